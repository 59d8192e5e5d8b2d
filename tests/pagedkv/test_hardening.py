"""Ways to break a manager that were found by attacking it; each is closed."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv import (
    BlockError,
    BlockPool,
    KVCacheManager,
    Media,
    Namespace,
    NeverFits,
    PagedKVError,
    SequenceError,
    SwapSpace,
    core,
    prefix_digests,
)
from pagedkv.block_ids import MOST_BLOCKS
from pagedkv.content import as_token_array
from pagedkv.namespace import ExtraKeys
from pagedkv.policies.lru import LRU
from pagedkv.prefix_index import PrefixIndex
from pagedkv.testing import CheckedManager, snapshot


def opened(tokens: list[int], **options: Any) -> KVCacheManager:
    manager = KVCacheManager(32, 4, **options)
    assert manager.open("a", tokens) is not None
    manager.commit("a", tokens)
    return manager


@pytest.mark.parametrize("batch", [(i for i in ["a"]), {"a"}, {"a": 1}.keys(), 5, None, "a"])
def test_a_batch_that_is_no_list_is_refused_and_not_remembered(batch: Any) -> None:
    """An exhausted generator must not stand for the batch of a later call."""
    manager = opened([1, 2])
    before = snapshot(manager)
    with pytest.raises(SequenceError, match="a batch is a list"):
        manager.step(batch)
    assert manager.step([]) and snapshot(manager) == before


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_the_same_batch_again_is_the_same_whatever_happened_between(kind: Callable[[list[str]], Any]) -> None:
    """Rows are looked up anew once a sequence has closed, and a list may be changed between two calls."""
    manager = KVCacheManager(32, 4)
    for name in "abc":
        manager.open(name, [1, 2])
    batch = ["a", "b"]
    assert manager.step(kind(batch)) and manager.step(kind(batch))
    manager.close("a")
    with pytest.raises(SequenceError, match=r"sequence .*'a'.* is not open"):
        manager.step(kind(batch))
    manager.open("z", [1])
    manager.open("a", [1])
    assert manager.step(kind(batch))
    batch[0] = "c"
    assert manager.step(kind(batch))
    assert [manager.tables.num_tokens(i) for i in "abcz"] == [2, 6, 3, 1]


def test_used_slots_look_at_no_tail_that_is_a_sequences_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejecting drafts makes no tail shared: the count stays one pass over the lengths."""
    manager = KVCacheManager(600, 4, max_seqs=128, max_seq_len=64)
    names = [str(i) for i in range(100)]
    for i, name in enumerate(names):
        manager.open(name, [i] * 5)
        manager.commit(name, [i] * 5)
    manager.step(names, 2)
    manager.commit_step(names, [[7, 7]] * 100, num_accepted=[1] * 100)
    monkeypatch.setattr("pagedkv.tails._filled_slots", lambda *args: pytest.fail("looked at every table"))
    assert manager.used_slots == 600


PARTS: list[Any] = [BlockPool, PrefixIndex, LRU]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("num_blocks", [5, 40])
def test_a_resize_that_runs_out_of_memory_leaves_everything_as_it_was(
    part: Any, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, contents and capacity: the moves are undone, since the caller will never make them."""
    manager = KVCacheManager(16, 4, max_seq_len=64)
    for i, name in enumerate("abcd"):
        manager.open(name, [i] * 8)
        manager.commit(name, [i] * 8)
    for name in "abc":
        manager.close(name)
    manager.maintenance.reset()
    manager.open("e", [9] * 4)
    before = manager.tables.block_ids("d").tolist(), manager.num_blocks
    original, calls = part.resize, []

    def failing(self: Any, count: int) -> None:
        calls.append(count)
        if len(calls) == 1:
            raise MemoryError("injected")
        original(self, count)

    monkeypatch.setattr(part, "resize", failing)
    with pytest.raises(MemoryError, match="injected"):
        manager.maintenance.resize(num_blocks)
    assert (manager.tables.block_ids("d").tolist(), manager.num_blocks) == before
    manager.check_invariants()
    assert manager.maintenance.resize(num_blocks) is not None
    manager.check_invariants()


@pytest.mark.parametrize("count", [MOST_BLOCKS + 1, 2**70])
def test_more_blocks_than_ids_are_refused_everywhere(count: int) -> None:
    manager = opened([1])
    for call in (KVCacheManager, manager.maintenance.resize, lambda n: SwapSpace(manager, n)):
        with pytest.raises(
            PagedKVError, match=f"must be at most {MOST_BLOCKS}, as ids are int32, got {count}"
        ):
            call(count)


def test_tokens_at_an_odd_address_are_tokens() -> None:
    """A view into a message that starts at any byte."""
    message = b"x" + np.arange(12, dtype=np.int32).tobytes()
    tokens = np.frombuffer(message, np.int32, offset=1)
    manager = opened(tokens)  # type: ignore[arg-type]
    assert manager.lookup(list(range(12))).num_cached_tokens == 8


def test_tokens_of_an_array_subclass_become_a_plain_array() -> None:
    """A masked array compares in its own way; the manager must not keep one."""
    masked = np.ma.masked_array(np.arange(9, dtype=np.int32), mask=[True] * 9)
    assert type(as_token_array(masked)) is np.ndarray
    manager = opened(masked)  # type: ignore[arg-type]
    assert manager.lookup(list(range(9))).num_cached_tokens == 8
    assert manager.lookup(masked).num_cached_tokens == 8


def test_digests_do_not_depend_on_the_python_that_makes_them() -> None:
    """Characters that one version of Unicode prints and another escapes are always escaped."""
    new = Namespace(salt="\U0001fae8")
    written = "(Namespace(salt='\\U0001fae8', adapter='', adapter_version=0, weights=''), ())"
    content = bytes(32) + np.array([1, 2], "<i4").tobytes() + written.encode("ascii")
    digest = hashlib.blake2b(content, digest_size=32).digest()
    assert prefix_digests([1, 2], block_size=2, namespace=new) == [digest]
    with pytest.raises(PagedKVError, match="str content_id"):
        prefix_digests([1, 2], block_size=2, media=[Media(0, np.str_("cat"))])


def test_ids_of_extra_keys_are_used_again() -> None:
    """A long life with ever new tenants and images does not run out of 31 bits."""
    keys = ExtraKeys()
    for i in range(1000):
        extra_id = keys.take((i,))
        assert extra_id <= 2
        if i:
            keys.drop(keys.find((i - 1,)))
    assert len(keys) == 1


WRONG: dict[str, Callable[[KVCacheManager], object]] = {
    "media none": lambda m: m.open("b", [1], media=None),  # type: ignore[arg-type]
    "media number": lambda m: m.commit("a", [], media=3),  # type: ignore[arg-type]
    "pin list": lambda m: m.retention.unpin([]),  # type: ignore[arg-type]
    "accepted number": lambda m: m.commit_step(["a"], [[1]], num_accepted=3),  # type: ignore[arg-type]
    "accepted scalar": lambda m: m.commit_step(["a"], [[1]], num_accepted=np.array(0)),  # type: ignore
    "drafts scalar": lambda m: m.commit_step(["a"], np.array(1), [0]),
    "batch scalar": lambda m: m.step(np.array("a")),  # type: ignore[arg-type]
    "drafts number": lambda m: m.commit_step(["a"], 3, [0]),
    "swap without manager": lambda m: SwapSpace(None, 4),  # type: ignore[arg-type]
    "pin too many": lambda m: m.retention.pin("a", np.uint8(200)),  # type: ignore[arg-type]
    "long sequences": lambda m: KVCacheManager(8, max_seq_len=2**63),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_type_is_a_mistake_of_the_caller(case: str) -> None:
    """A ``PagedKVError`` and nothing changed, not whatever Python makes of it."""
    manager = opened([1, 2])
    before = snapshot(manager)
    with pytest.raises(PagedKVError):
        WRONG[case](manager)
    assert snapshot(manager) == before


def test_empty_media_of_any_type_are_none() -> None:
    manager = opened([1, 2, 3, 4])
    assert manager.open("b", [1, 2, 3, 4, 5], media=np.array([])) == (5, 4)


def test_a_fence_whose_release_fails_keeps_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that raises once loses no block: the next signal gives it up."""

    class Fussy(LRU):
        pass

    manager = KVCacheManager(8, 2, policy=Fussy())
    manager.open("a", [1, 2, 3, 4])
    manager.commit("a", [1, 2, 3, 4])
    fences = [manager.fences.open(), manager.fences.open()]
    manager.close("a")
    with monkeypatch.context() as patch:
        patch.setattr(Fussy, "make_room", lambda self, count: (_ for _ in ()).throw(RuntimeError("policy")))
        manager.fences.signal(fences[1])
        with pytest.raises(RuntimeError, match="policy"):
            manager.fences.signal(fences[0])
    manager.fences.signal(manager.fences.open())
    assert manager.counts.active == 0
    manager.check_invariants()


def test_counts_that_somebody_overwrote_do_not_reach_memory() -> None:
    """Attributes can be written in Python; the compiled core still stays inside its arrays."""
    pool = BlockPool(4)
    ids = pool.acquire(2)
    pool._num_free = 10**9
    if core.engine() == "native":
        from pagedkv.native_block_pool import NativeBlockPool

        with pytest.raises(ValueError):
            pool.release(ids, np.zeros(2, np.bool_))
        assert isinstance(pool, NativeBlockPool) and not pool._acquire(
            np.empty(5, np.int32), ids[:0], ids[:0]
        )


needs_core = pytest.mark.skipif(core.engine() != "native", reason="only the compiled core has such calls")


def backwards(count: int, dtype: Any = np.int32) -> Any:
    """Every second item from the end: who writes there side by side leaves the array."""
    return np.zeros(2 * count, dtype)[::-2]


def read_only(count: int, dtype: Any = np.int32) -> Any:
    array = np.zeros(count, dtype)
    array.setflags(write=False)
    return array


@needs_core
@pytest.mark.parametrize("make", [backwards, read_only])
@pytest.mark.parametrize("call", ["match", "walk", "climb", "grow", "first", "table", "acquire", "release"])
def test_the_core_writes_to_no_array_with_gaps_and_to_none_that_is_read_only(
    call: str, make: Callable[..., Any]
) -> None:
    """An answer written side by side into an array that is not would end up outside of it."""
    from pagedkv import _core

    manager = opened(list(range(8)))
    cache: Any = manager._cache
    index, pool, order, two = cache.index, cache.pool, cache.policy, np.array([1, 2], np.int32)
    tokens, zeros = np.arange(8, dtype=np.int32).reshape(2, 4), np.zeros(2, np.int32)
    if call == "first":
        manager.close("a")
    before = snapshot(manager)
    if call in ("acquire", "release"):
        kept = np.ones(2, np.bool_)
        calls: dict[str, Callable[[], Any]] = {
            "acquire": lambda: pool._acquire(make(2), zeros[:0], zeros[:0]),
            "release": lambda: pool._release(two, kept, make(2)) >= 0,
        }
        assert calls[call]() is False  # the numpy engine then gets the call
    else:
        links = [np.zeros(8, np.int32) for _ in range(4)]
        arrays = [np.zeros((8, 4), np.int32), np.zeros(8, np.int32), np.zeros(8, np.bool_), *links]
        calls = {
            "match": lambda: index._match(tokens, zeros, 0, make(2)),
            "walk": lambda: index._walk(0, make(2)),
            "climb": lambda: index._climb(2, make(2)),
            "grow": lambda: index._grow(two + np.int32(2), two, make(2, np.bool_)),
            "first": lambda: order._first(zeros[:0], make(2)),
            "table": lambda: _core.Index()._attach(7, 4, *arrays, make(16, np.uint64), 0, 0),
        }
        with pytest.raises((ValueError, BufferError)):
            calls[call]()
    assert snapshot(manager) == before


@needs_core
def test_the_core_looks_at_rows_after_all_numbers_are_read() -> None:
    """What turns into a number may run code, which may change what was checked before."""
    from pagedkv import _core

    cache: Any = KVCacheManager(8, 4)._cache
    table, lens = np.ones((3, 2), np.int32), np.array([4, 4, 4], np.int64)
    rows, fresh = np.zeros(1, np.int64), np.ones(1, np.int32)

    class Changing:
        def __index__(self) -> int:
            rows[0] = 2
            return 4

    number: Any = Changing()

    with pytest.raises(BlockError, match="row 2 of a table of 2"):
        _core.plan_growth(
            cache.pool, cache.index, table[:2], lens[:2], rows, number, np.zeros((2, 1), np.int32)
        )
    rows[0] = 0
    with pytest.raises(BlockError, match="row 2 of a table of 2"):
        _core.grow_rows(table[:2], lens[:2], rows, 4, number, fresh)
    assert lens.tolist() == [4, 4, 4]


@needs_core
@pytest.mark.parametrize("length", [2**63 - 1, 2**63 - 4])
def test_lengths_that_no_row_has_do_not_wrap_around(length: int) -> None:
    """Rounded up to whole blocks, the longest would be negative, and everything fit."""
    from pagedkv import _core

    cache: Any = KVCacheManager(8, 4)._cache
    parts, table = (cache.pool, cache.index, cache.policy), np.zeros((1, 2), np.int32)
    lens, done, rows = np.array([length], np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    with pytest.raises(BlockError, match="a table of 2 blocks a row"):
        _core.cut_row(*parts, table, lens, done, 0, 5)
    with pytest.raises(BlockError, match=f"row 0 has {length} tokens"):
        _core.plan_growth(cache.pool, cache.index, table, lens, rows, 9, np.zeros((2, 0), np.int32))
    with pytest.raises(BlockError, match=f"row 0 has {length} tokens"):
        _core.grow_rows(table, lens, rows, 4, 9, np.zeros(0, np.int32))
    assert lens.tolist() == [length]


@pytest.mark.parametrize("more", [2**31 - 1, 2**31, 2**33 - 2, 2**33, 2**40, 2**70])
def test_growth_that_no_int32_can_say_never_fits(more: int) -> None:
    """A long ``max_seq_len`` of large blocks: both engines say what is wrong in the same words."""
    manager = KVCacheManager(4, 2**20, max_seqs=2, max_seq_len=2**33)
    manager.open("a", [1, 2])
    with pytest.raises(NeverFits, match=f"^{more + 2} tokens can never fit"):
        manager.append("a", more)


def test_a_checked_manager_takes_drafts_of_several_lengths() -> None:
    """As the manager does: a row of tokens for each sequence, however long."""
    checked = CheckedManager(KVCacheManager(8, 4))
    for name in "ab":
        checked.open(name, [1, 2, 3])
    checked.commit_step(["a", "b"], [[1, 2, 3], [1]], num_accepted=[3, 1])
    assert [checked.tables.num_tokens(name) for name in "ab"] == [3, 1]
