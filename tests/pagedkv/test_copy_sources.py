"""What a copy reads stays as it is until the copy was taken, and until the fences that were open then."""

import numpy as np
import pytest

from pagedkv import KVCacheManager, SequenceError
from pagedkv.testing import ShadowStorage

SIZE = 4


class Engine:
    """A manager and slots with the tokens in them; copies run one by one, in the order in which they come."""

    def __init__(self, num_blocks: int, policy: str | None = "lru") -> None:
        self.manager = KVCacheManager(num_blocks, SIZE, max_seq_len=32, policy=policy)
        self.shadow = ShadowStorage(num_blocks, SIZE)

    def open(self, name: str, tokens: list[int], *, write: bool = True) -> int | None:
        opened = self.manager.open(name, tokens, partial_hits=True)
        if opened is None:
            return None
        if write:
            self.copy()
            self.write(name, tokens[opened.num_cached_tokens :])
        return opened.num_cached_tokens

    def write(self, name: str, tokens: list[int]) -> None:
        start = self.manager.tables.num_committed(name)
        self.shadow.write(self.manager.tables.slots(name, start, start + len(tokens)), tokens)
        self.manager.commit(name, tokens)

    def close(self, name: str, tokens: list[int]) -> None:
        """Compute a prompt and close it."""
        self.open(name, tokens)
        self.manager.close(name)

    def copy(self) -> None:
        self.run(list(zip(*self.manager.copies.take(), strict=True)))

    def run(self, copies: list[tuple[int, int]]) -> None:
        for src, dst in copies:
            self.shadow.slots[dst] = self.shadow.slots[src]

    def blocks(self, name: str) -> list[int]:
        ids: list[int] = self.manager.tables.block_ids(name).tolist()
        return ids

    def read(self, name: str) -> list[int]:
        return self.shadow.read(self.manager, name)


def pairs(manager: KVCacheManager) -> list[tuple[int, int]]:
    """The copies that wait."""
    src, dst = manager.copies.pending
    return list(zip(src.tolist(), dst.tolist(), strict=True))


def test_the_source_of_a_partial_hit_is_not_evicted_before_the_copy_is_taken() -> None:
    """Blocks 1 and 2 were cached, 3 copies 2, one is free: who needs two more gets them after ``take``."""
    engine = Engine(4)
    engine.close("old", [*range(8)])
    assert engine.open("a", [0, 1, 2, 3, 4, 5, 90], write=False) == 6
    assert pairs(engine.manager) == [(2, 3)]
    assert engine.manager.counts == (1, 0, 3)
    assert engine.open("b", [50] * 5) is None and not engine.manager.lookup([50] * 5).fits
    engine.copy()
    assert engine.manager.counts == (1, 1, 2)
    assert engine.open("b", [50] * 5, write=False) == 0 and 2 in engine.blocks("b")
    assert engine.read("a") == [*range(6)]
    engine.manager.check_invariants()


@pytest.mark.parametrize("policy", ["lru", None])
def test_a_source_that_was_closed_is_not_rewritten_before_the_copy_is_taken(policy: str | None) -> None:
    """The parent of a fork closes, and others open, before the copy of its tail is run, in order."""
    engine = Engine(8, policy)
    engine.close("old", [70, 71, 72, 73, 74])
    engine.open("a", [*range(6)])
    tail = engine.blocks("a")[1]
    engine.manager.fork("a", "b")
    assert engine.manager.append("b")
    engine.manager.close("a")
    for name, tokens in (("c", [70, 71, 72, 80, 80]), ("d", [60]), ("e", [61])):
        assert engine.open(name, tokens, write=False) is not None
        assert tail not in engine.blocks(name)
    engine.copy()
    assert engine.read("b") == [*range(6)]
    assert engine.open("f", [62], write=False) == 0 and engine.blocks("f") == [tail]


@pytest.mark.parametrize("close_first", [False, True])
def test_a_source_waits_for_the_fences_that_were_open_when_the_copy_was_taken(close_first: bool) -> None:
    """An asynchronous copy: nobody gets its source before the signal, even if who copies has closed."""
    engine = Engine(4)
    engine.close("old", [*range(8)])
    engine.open("a", [0, 1, 2, 3, 4, 5, 90], write=False)
    fence = engine.manager.fences.open()
    copies = list(zip(*engine.manager.copies.take(), strict=True))
    if close_first:
        engine.manager.close("a")
    assert engine.manager.counts == (1, 0, 3)
    assert engine.manager.stats().fenced_blocks == (3 if close_first else 1)
    assert engine.open("b", [50] * 5) is None
    engine.run(copies)
    engine.manager.fences.signal(fence)
    assert engine.open("b", [50] * 5) == 0
    assert close_first or engine.read("a") == [*range(6)]
    engine.manager.check_invariants()


def test_a_fork_of_a_pending_copy_holds_the_first_source() -> None:
    """a's tail is to be copied from block 2, and c's from a's: when a goes, block 2 stays for c."""
    engine = Engine(5)
    engine.close("old", [*range(8)])
    engine.open("a", [0, 1, 2, 3, 4, 5, 90], write=False)
    engine.manager.truncate("a", 6)
    engine.manager.fork("a", "c")
    assert engine.manager.append("c") and pairs(engine.manager) == [(2, 3), (2, 4)]
    engine.manager.close("a")
    assert pairs(engine.manager) == [(2, 4)]
    assert engine.open("d", [50] * 9) is None
    engine.copy()
    assert engine.read("c") == [*range(6)]
    assert engine.open("d", [50] * 9) == 0
    assert engine.read("c") == [*range(6)]


def test_a_copy_for_nobody_gives_its_source_up_before_the_source_s_parent() -> None:
    """With and without a fence, after a fork, by a cut: the source is idle, and goes before its parent."""
    for cut, fenced, forked in ((1, 0, 0), (0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)):
        engine = Engine(6)
        engine.close("old", [*range(8)])
        engine.open("a", [0, 1, 2, 3, 4, 5, 90], write=False)
        fence = engine.manager.fences.open() if fenced else None
        if forked:
            engine.manager.truncate("a", 6)
            engine.manager.fork("a", "b")
            engine.manager.close("a")
            assert len(engine.manager.copies) == 1
        name = "b" if forked else "a"
        engine.manager.truncate(name, 4) if cut else engine.manager.close(name)
        assert len(engine.manager.copies) == 0
        if fence is not None:
            later = engine.manager.fences.open()
            engine.manager.fences.signal(fence)
            engine.manager.fences.signal(later)
        engine.manager.check_invariants()
        assert engine.manager.counts == (4, 1, 1) if cut else (4, 2, 0)
        order = engine.manager._cache.policy.ids().tolist()
        assert order == ([2] if cut else [2, 1])


def test_the_longest_holder_keeps_a_tail_that_others_copy() -> None:
    """A shorter one would write again where the copy still reads: under a fence, both at the same time."""
    engine = Engine(8)
    engine.open("a", [*range(6)])
    engine.manager.fork("a", "b")
    engine.manager.truncate("b", 5)
    tail = engine.blocks("a")[1]
    assert engine.manager.step(["a", "b"])
    assert (engine.blocks("a")[1], engine.manager.copies.pending.src.tolist()) == (tail, [tail])
    engine.manager.fences.open()
    copies = list(zip(*engine.manager.copies.take(), strict=True))
    engine.write("a", [61])
    engine.run(copies)
    engine.write("b", [62])
    assert engine.read("a") == [*range(6), 61] and engine.read("b") == [*range(5), 62]


def test_a_holder_that_goes_back_copies_its_tail_while_another_copy_reads_it() -> None:
    """What a truncation gave up is not written anew under the copy, before ``take`` and after it."""
    for take_first in (False, True):
        engine = Engine(8)
        engine.open("a", [*range(6)])
        engine.manager.fork("a", "b")
        assert engine.manager.step(["b", "a"])  # the last keeps the tail
        tail = engine.blocks("a")[1]
        engine.manager.fences.open()
        copies = list(zip(*engine.manager.copies.take(), strict=True)) if take_first else []
        engine.manager.truncate("a", 5)
        assert engine.manager.append("a") and engine.blocks("a")[1] != tail
        copies += list(zip(*engine.manager.copies.take(), strict=True))
        engine.run(copies)
        engine.write("a", [60])
        assert engine.read("a") == [*range(5), 60] and engine.read("b") == [*range(6)]


def test_blocks_are_not_dropped_from_a_context_that_awaits_a_copy() -> None:
    """The source must not outlive its parents in the cache: the copies are run first."""
    engine = Engine(12)
    engine.close("old", [*range(12)])
    engine.open("a", [*range(10), 99, 99, 99], write=False)
    with pytest.raises(SequenceError, match="block 4 awaits its copy from block 3: run the copies first"):
        engine.manager.context.drop_blocks("a", np.array([0, 1]))
    engine.copy()
    assert engine.manager.context.drop_blocks("a", np.array([0, 1])) == 2
    engine.manager.check_invariants()


def test_a_copy_that_waits_keeps_its_source_s_content_findable_and_counts_it_once() -> None:
    """A source can be hit like any held block; alone, it counts as held by nobody."""
    engine = Engine(6)
    engine.close("old", [*range(8)])
    engine.open("a", [0, 1, 2, 3, 4, 5, 90], write=False)
    engine.open("b", [0, 1, 2, 3, 4, 5, 91], write=False)
    stats = engine.manager.stats()
    assert (stats.active_blocks, stats.fenced_blocks, stats.used_slots) == (4, 1, 4 + 4 + 3 + 3)
    assert engine.manager.lookup([*range(9)]).num_cached_tokens == 8
    assert not engine.manager.maintenance.reset()
    engine.copy()
    assert engine.manager.stats().fenced_blocks == 0
    assert engine.read("a") == engine.read("b") == [*range(6)]


def test_copies_that_cannot_be_taken_wait_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room to give up what they read is made before any of them is forgotten."""
    engine = Engine(6)
    engine.close("old", [*range(8)])
    engine.open("a", [0, 1, 2, 3, 4, 5, 90], write=False)
    copies, waiting = engine.manager.copies, engine.manager.copies.pending

    def fail(count: int) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(copies, "_make_room", fail)
        with pytest.raises(MemoryError):
            copies.take()
    assert [x.tolist() for x in copies.pending] == [x.tolist() for x in waiting] and len(copies) == 1
    engine.manager.check_invariants()
    engine.copy()
    assert engine.read("a") == [*range(6)]
