"""Ways to break a manager that were found by attacking it; each is closed."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv import (
    BlockPool,
    KVCacheManager,
    Media,
    Namespace,
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
from pagedkv.testing import snapshot


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
    manager = opened([1, 2, 3, 4])
    fences = [manager.fences.open(), manager.fences.open()]
    manager.close("a")
    with monkeypatch.context() as patch:
        patch.setattr(LRU, "make_room", lambda self, count: (_ for _ in ()).throw(RuntimeError("policy")))
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
