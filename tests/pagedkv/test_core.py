"""The compiled core: what it refuses, what it costs in bytes, and how it is chosen."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv import core
from pagedkv.block_cache import BlockCache
from pagedkv.block_pool import BlockPool
from pagedkv.block_tables import Int32Array
from pagedkv.content import as_token_array
from pagedkv.errors import BlockError
from pagedkv.policies.numpy_lru import NumpyLRU
from pagedkv.policies.policy import EvictionPolicy

needs_core = pytest.mark.skipif(core.missing() is not None, reason="no compiled core")

SIZE = 3


def ids(values: Any) -> Int32Array:
    return np.array(values, np.int32)


# -- what it refuses and holds


def native_index(*chains: tuple[list[int], int]) -> Any:
    from pagedkv.native_prefix_index import NativePrefixIndex

    index = NativePrefixIndex(8, SIZE)
    for blocks, parent in chains:
        index.tokens[blocks] = np.array(blocks)[:, None]
        index.insert(ids(blocks), np.zeros(len(blocks), np.int32), parent)
    return index


@needs_core
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda i: i.insert(ids([5, 1]), ids([0, 0]), 0), "cannot index block 1: it is indexed"),
        (lambda i: i.insert(ids([5, 5]), ids([0, 0]), 0), "cannot index block 5: it is indexed"),
        (lambda i: i.insert(ids([9]), ids([0]), 0), r"cannot index block 9: ids are 1\.\.8"),
        (lambda i: i.insert(ids([5]), ids([0]), 6), "block 6 is not indexed"),
        (lambda i: i.insert(ids([5]), ids([]), 0), "1 ids with 0 extra keys"),
        (lambda i: i.remove(ids([2])), "cannot forget block 2: block 3 continues it"),
        (lambda i: i.remove(ids([3, 3])), "cannot forget block 3: it is not indexed"),
        (lambda i: i.remove(ids([3, 7])), "cannot forget block 7: it is not indexed"),
        (lambda i: i.remove(ids([-1])), "cannot forget block -1"),
        (lambda i: i.grow(ids([5]), ids([7])), "cannot continue block 7: it is not indexed"),
        (lambda i: i.match(np.zeros((1, 2), np.int32), ids([0])), "1 rows of 2 tokens"),
        (lambda i: i.match(np.zeros((1, SIZE), np.int32), ids([0]), 2**31), "not in -2147483648"),
        (lambda i: i.best_child(np.zeros(SIZE + 1, np.int32), 0), "4 tokens, blocks have 3"),
        (lambda i: i.is_leaf(8), "block 8 is not indexed"),
        (lambda i: i.path(-1), "block -1 is not indexed"),
    ],
)
def test_the_compiled_index_refuses_what_would_break_it(act: Callable[[Any], object], message: str) -> None:
    """Its links lead nowhere but to indexed blocks, whatever it is told."""
    index = native_index(([1, 2, 3], 0), ([4], 1))
    before = [
        getattr(index, name).tolist() for name in ("indexed", "_parent", "_first_child", "_next", "_prev")
    ]
    with pytest.raises(BlockError, match=message):
        act(index)
    names = ("indexed", "_parent", "_first_child", "_next", "_prev")
    assert [getattr(index, name).tolist() for name in names] == before
    assert len(index) == 4


@needs_core
def test_a_removal_in_any_order_leaves_no_trace() -> None:
    """Parents before children, if both go in one call."""
    index = native_index(([1, 2, 3], 0), ([4], 1), ([5], 1))
    index.remove(ids([1, 5, 2, 3, 4]))
    assert len(index) == 0 and not index._table.any() and not index._first_child[0]


@needs_core
def test_a_chain_is_never_hashed() -> None:
    """Only what has a newer sibling is in the table."""
    index = native_index(([1, 2, 3, 4], 0))
    assert not index._table.any()
    index.tokens[5] = 5
    index.insert(ids([5]), ids([0]), 2)
    assert np.count_nonzero(index._table) == 1


@needs_core
def test_tokens_overwritten_behind_the_back_of_an_index_leave_no_entry_for_good() -> None:
    """What the hash no longer finds is searched for, so that the table cannot fill up."""
    index = native_index(([1], 0), ([2], 0))
    index.tokens[1] = 77
    index.remove(ids([1, 2]))
    assert not index._table.any()


@needs_core
def test_bookkeeping_per_block_stays_under_200_bytes_besides_its_tokens() -> None:
    """Pool, index and order together, at any number of blocks."""
    from pagedkv.native_block_pool import NativeBlockPool
    from pagedkv.native_prefix_index import NativePrefixIndex
    from pagedkv.policies.native_lru import NativeLRU

    for num_blocks in (1_000, 1_365, 1_366, 100_000):
        order = NativeLRU()
        BlockCache(num_blocks, 1, order)
        index = NativePrefixIndex(num_blocks, 16)
        parts: list[Any] = [NativeBlockPool(num_blocks), index, order]
        arrays = [a for part in parts for a in vars(part).values() if isinstance(a, np.ndarray)]
        in_index = (
            sum(a.nbytes for a in vars(index).values() if isinstance(a, np.ndarray)) - index.tokens.nbytes
        )
        assert in_index <= 46 * num_blocks
        assert sum(a.nbytes for a in arrays) - index.tokens.nbytes <= 80 * num_blocks


@needs_core
@pytest.mark.parametrize("name", ["push", "discard", "first"])
@pytest.mark.parametrize("wrong", [-1, 6, 2**31 - 1])
def test_the_compiled_order_refuses_foreign_ids(name: str, wrong: int) -> None:
    """Nothing is written outside its arrays, and nothing at all."""
    from pagedkv.policies.native_lru import NativeLRU

    order = NativeLRU()
    BlockCache(5, 1, order)
    order.push(ids([3, 1]))
    with pytest.raises(BlockError, match=f"block {wrong}: ids are"):
        getattr(order, name)(*((2,) if name == "first" else ()), ids([1, wrong]))
    assert order.ids().tolist() == [3, 1] and not order._kept.any()


@needs_core
def test_a_repeated_id_shows_when_the_stamps_have_run_out() -> None:
    """Two billion calls later too: what was remembered of the calls before is forgotten then."""
    from pagedkv.native_block_pool import NativeBlockPool

    pool = NativeBlockPool(3)
    blocks = pool.acquire(2)
    pool._seen[:] = np.iinfo(np.int32).min + 1
    with pytest.raises(BlockError, match="block 1 twice"):
        pool.acquire(0, ids([1, 2, 1]))
    assert pool.release(blocks, np.ones(2, np.bool_)).tolist() == [1, 2]


@needs_core
def test_a_core_without_arrays_refuses_every_block() -> None:
    """Its types are of use only once they were told where the arrays are."""
    from pagedkv import _core

    found = ids([0, 0])
    with pytest.raises(BlockError, match="block 0 is not indexed"):
        _core.Index().is_leaf(0)
    with pytest.raises(BlockError, match="no blocks yet"):
        _core.Index()._rebuild()
    with pytest.raises(BlockError, match="no blocks yet"):
        _core.Order()._first(ids([]), found)
    with pytest.raises(BlockError, match="cannot order block 1"):
        _core.Order()._push(ids([1]))
    assert not _core.Pool()._acquire(found, ids([]), ids([]))
    assert _core.Pool()._check(ids([1]), 0, 2) == -1


@needs_core
def test_calls_on_several_parts_refuse_what_does_not_belong_together() -> None:
    """Foreign objects, parts without arrays or of other sizes, foreign ids and rows: with nothing changed."""
    from pagedkv import _core
    from pagedkv.native_block_pool import NativeBlockPool
    from pagedkv.native_prefix_index import NativePrefixIndex
    from pagedkv.policies.native_lru import NativeLRU

    pool, index, order = NativeBlockPool(4), NativePrefixIndex(4, 2), NativeLRU()
    BlockCache(4, 2, order)
    parts = pool, index, order
    lens, done, rows = (np.array(x, np.int64) for x in ([5, 3], [5, 3], [0, 1]))
    table = np.array([[1, 2, 9], [3, 0, 0]], np.int32)
    one, many, tails = ids([1]), ids([0, 0]), np.zeros((2, 2), np.int32)
    pool.acquire(3)
    wrong: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (TypeError, "give_up", (index, index, order, one)),
        (TypeError, "give_up", (pool, pool, order, one)),
        (TypeError, "take", (pool, index, 7, many, one)),
        (BlockError, "give_up", (_core.Pool(), _core.Index(), _core.Order(), one)),
        (BlockError, "give_up", (NativeBlockPool(5), index, order, one)),
        (BlockError, "take", (*parts, many, ids([5]))),
        (BlockError, "cut_row", (*parts, table, lens, done, 2, 0)),
        (BlockError, "cut_row", (*parts, table, lens, done, 0, 6)),
        (BlockError, "cut_row", (*parts, table, np.array([9, 9]), done, 0, 0)),
        (ValueError, "cut_row", (*parts, table, lens[:1], done, 0, 0)),
        (TypeError, "cut_row", (*parts, table, lens.astype(np.int32), done, 0, 0)),
        (BlockError, "plan_growth", (pool, _core.Index(), table, lens, rows, 1, tails)),
        (BlockError, "plan_growth", (_core.Pool(), index, table, lens, rows, 1, tails)),
        (BlockError, "plan_growth", (pool, index, table, lens, rows, 1, tails)),  # block 9
        (BlockError, "plan_growth", (pool, index, table, lens, rows + 1, 1, tails)),
        (BlockError, "plan_growth", (pool, index, table, -lens, rows, 1, tails)),
        (BlockError, "plan_growth", (pool, index, table, lens, rows, 1, tails[:1])),
        (BlockError, "grow_rows", (table, lens, rows, 2, 1, many)),
        (BlockError, "grow_rows", (table, lens, rows[:1], 2, 2, one)),
        (BlockError, "store_tokens", (index, table, lens + 2, lens, rows, many, many)),
        (BlockError, "store_tokens", (index, table, lens, done - 9, rows, many, many)),
        (BlockError, "store_tokens", (index, table, lens, done, rows, one, many)),
        (BlockError, "commit_row", (_core.Index(), table, done * 0, 0, one)),
        (BlockError, "commit_row", (index, table, done * 0 + 4, 0, one)),
        (
            BlockError,
            "commit_row",
            (index, table, done * 0 + 2, 0, many),
        ),  # behind a block that is not indexed
        (BlockError, "commit_row", (index, table, done * 0 + 5, 0, many)),
        (BlockError, "commit_row", (index, table, done * 0, 2, one)),
        (BlockError, "commit_row", (index, table, done * 0 - 1, 0, one)),
        (ValueError, "commit_row", (index, table, done[:1], 0, one)),
    ]
    arrays: list[Any] = [table, lens, done, pool.state, pool.ref_count]
    before = [array.copy() for array in arrays]
    for error, name, arguments in wrong:
        with pytest.raises(error):
            getattr(_core, name)(*arguments)
    assert not _core.cut_row(*parts, table, lens, done, 0, 0)  # block 9: the pool says what is wrong
    assert not _core.give_up(*parts, ids([1, 1]))
    assert _core.take(*parts, np.empty(2, np.int32), ids([])) == -1  # nothing to evict
    _core.grow_rows(table, lens.copy(), np.array([1, 1]), 2, 3, ids([4, 4, 4, 4])[:2])
    table[1] = 3, 0, 0
    for array, was in zip(arrays, before, strict=True):
        assert np.array_equal(array, was)
    assert not len(index) and not order.ids().size


# -- which engine


def run_with(engine: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PAGEDKV_CORE": engine},
    )


WHICH = """
from pagedkv import core
from pagedkv.block_pool import BlockPool
from pagedkv.prefix_index import PrefixIndex
from pagedkv.policies.lru import LRU
print(core.engine(), *(c.__mro__[1].__name__ for c in (BlockPool, PrefixIndex, LRU)), core.reason())
"""


def test_numpy_serves_where_it_is_asked_for() -> None:
    """All three classes stand on numpy, and the reason says why."""
    done = run_with("numpy", WHICH)
    classes = "NumpyBlockPool NumpyPrefixIndex NumpyLRU"
    assert done.stdout.strip() == f"numpy {classes} PAGEDKV_CORE asks for numpy"


@needs_core
@pytest.mark.parametrize("engine", ["native", "auto"])
def test_the_core_serves_where_it_loads(engine: str) -> None:
    """All three classes stand on the core."""
    done = run_with(engine, WHICH)
    assert done.stdout.strip() == "native NativeBlockPool NativePrefixIndex NativeLRU None"


@pytest.mark.parametrize("engine", ["auto", "native"])
def test_without_a_core_numpy_serves_unless_the_core_was_asked_for(engine: str) -> None:
    """As on a machine without a compiler; asked for by name, it is missed loudly."""
    done = run_with(engine, "import sys; sys.modules['pagedkv._core'] = None\n" + WHICH)
    if engine == "auto":
        assert done.stdout.startswith("numpy NumpyBlockPool NumpyPrefixIndex NumpyLRU the compiled core")
    else:
        assert done.returncode and "PAGEDKV_CORE asks for the compiled core: the compiled core" in done.stderr


@needs_core
def test_a_core_of_another_version_is_not_used() -> None:
    """A library left over from another version could misread its arguments."""
    done = run_with(
        "auto", "import pagedkv.core as c; c.VERSION += 1; c.missing.cache_clear(); print(c.missing())"
    )
    assert "of another version" in done.stdout


def test_an_unknown_engine_is_refused() -> None:
    """With the names of those that there are."""
    done = run_with("rust", "import pagedkv")
    assert done.returncode
    assert "PAGEDKV_CORE is 'rust', must be one of auto, native, numpy" in done.stderr


@needs_core
def test_the_core_loads_without_torch_or_numpy() -> None:
    """It knows buffers only."""
    code = "import sys, pagedkv.errors; from pagedkv import _core; print('torch' in sys.modules)"
    assert run_with("auto", code).stdout.strip() == "False"


def test_the_names_to_construct_are_classes_of_their_own() -> None:
    """Whatever the engine, an error or a patch names the public class."""
    assert BlockPool.__name__ == "BlockPool" and BlockPool.__module__ == "pagedkv.block_pool"
    assert issubclass(NumpyLRU, EvictionPolicy)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([0, 5, 2**31 - 1], np.int32), True),
        (np.zeros(0, np.int32), True),
        (np.array([3, -1], np.int32), False),
        (np.array([[1]], np.int32), False),
        (np.array([1], np.int64), False),
        (np.arange(6, dtype=np.int32)[::2], False),
        (np.arange(6, dtype=np.int32)[::-1], False),
        (np.array([1], ">i4"), False),
        (np.frombuffer(b"x" + bytes(8), np.int32, offset=1), False),
        (np.array(["a"]), False),
        (np.array([1], object), False),
        ("text", False),
        (None, False),
    ],
)
def test_the_core_knows_tokens_that_need_no_conversion(array: Any, expected: bool) -> None:
    """What it does not know at once, numpy converts or refuses."""
    _core = pytest.importorskip("pagedkv._core")
    assert _core.are_tokens(array) is expected


def test_tokens_are_taken_as_they_are_where_nothing_has_to_be_done() -> None:
    """No copy, by either engine."""
    tokens = np.array([1, 2, 3], np.int32)
    assert as_token_array(tokens) is tokens or np.shares_memory(as_token_array(tokens), tokens)
