"""Who is let in, above the watermark; and prompts of which a part comes from elsewhere."""

from typing import Any

import numpy as np
import pytest

from pagedkv import PagedKVError, SequenceError
from pagedkv.block_tables import NULL_BLOCK
from pagedkv.hybrid import CacheGroup, HybridKVCacheManager, HybridSwapSpace
from pagedkv.testing import snapshot

FULL, LOCAL = CacheGroup("full", (0,)), CacheGroup("local", (1,), window=4)
SINKS = CacheGroup("sinks", (2,), window=3, sinks=3)
IGNORE = ("_seen", "_head", "_spare", "_next", "_last_batch")


def manager_of(num_blocks: int, **options: Any) -> HybridKVCacheManager:
    """A full group and a window of 4, in blocks of 2 tokens."""
    return HybridKVCacheManager([FULL, LOCAL], num_blocks, 2, **options)


def fill(manager: HybridKVCacheManager, name: str, tokens: list[int], **options: Any) -> int:
    opened = manager.open(name, tokens, **options)
    assert opened is not None
    manager.commit(name, tokens[opened.num_cached_tokens :])
    return opened.num_cached_tokens


def state(manager: Any) -> object:
    return snapshot(manager, IGNORE)


# -- the watermark


def test_the_watermark_keeps_room_for_sequences_that_are_open() -> None:
    """A quarter of 20 blocks; it binds who comes beside others, and nobody who grows."""
    manager = manager_of(20, watermark=0.25)
    prompt = list(range(9))
    assert manager.lookup(prompt * 2).fits and manager.open("a", prompt)  # alone: 10 blocks
    before = state(manager)
    assert not manager.lookup(range(20, 26)).fits and manager.open("b", range(20, 26)) is None
    assert state(manager) == before
    assert manager.lookup(range(20, 24)).fits and not manager.lookup(range(20, 24), 2).fits
    assert manager.open("b", range(20, 24))
    assert manager.append("a", 6) and manager.counts.free == 0
    manager.check_invariants()


def test_the_watermark_counts_idle_blocks_of_a_hit_and_of_a_copied_tail() -> None:
    """A hit of blocks that somebody holds is free; one of cached ones takes them, and a partial one, too."""
    manager = manager_of(16, watermark=0.25)
    fill(manager, "a", list(range(8)))  # 4 + 2, 2 fell out and are cached
    assert manager.counts == (8, 2, 6)
    assert manager.open("b", range(8), max_cached_tokens=8) == (8, 8)  # takes nothing
    manager.close("b")
    manager.close("a")
    fill(manager, "other", [50, 51])
    assert manager.counts == (6, 8, 2)
    assert manager.open("c", [0, 1, 2, 3, 9], max_cached_tokens=4) == (5, 4)  # 4 idle and 2 new of 10
    manager.close("c")
    assert manager.open("d", [0, 1, 2, 3, 4, 9, 9, 9, 9], partial_hits=True) == (9, 4)  # 4 + 6, not + 2
    assert manager.counts == (0, 4, 12) and len(manager.copies) == 0
    manager.check_invariants()


def test_a_swapped_sequence_comes_back_above_the_watermark() -> None:
    """As one that is opened."""
    manager = manager_of(12, watermark=0.25)
    space = HybridSwapSpace(manager, 20)
    fill(manager, "a", list(range(7)))
    out = space.swap_out("a")
    assert out is not None
    space.done(out.transfer)
    fill(manager, "b", [50] * 5)
    assert manager.counts.active == 6 and space.swap_in("a") is None
    manager.truncate("b", 2)
    back = space.swap_in("a")
    assert back is not None
    space.done(back.transfer)
    manager.check_invariants()


@pytest.mark.parametrize("bad", [-0.1, 1.0, 2, None, "half"])
def test_a_watermark_that_is_no_share_is_refused(bad: Any) -> None:
    """With the number."""
    with pytest.raises(PagedKVError, match=r"watermark must be in \[0, 1\)"):
        manager_of(8, watermark=bad)


# -- prompts that come from elsewhere


def test_what_is_loaded_takes_the_blocks_that_the_next_token_sees() -> None:
    """The full group all, a window its last blocks, and its sinks."""
    manager = HybridKVCacheManager([FULL, LOCAL, SINKS], 40, 2)
    prompt = list(range(17))
    opened = manager.open("a", prompt, loaded_tokens=16, max_fresh_tokens=1)
    assert opened == (17, 0)
    held = {name: np.flatnonzero(table.block_ids("a")).tolist() for name, table in manager.tables.items()}
    assert held == {"full": list(range(9)), "local": [6, 7, 8], "sinks": [0, 1, 7, 8]}
    manager.check_invariants()
    assert manager.lookup(prompt).num_cached_tokens == 0  # nobody hits what has not come
    manager.commit("a", prompt[:16])
    manager.check_invariants()
    assert manager.lookup([*prompt[:16], 99]).num_cached_tokens == 16
    assert manager.lookup(prompt[:15]).num_cached_tokens == 0  # that hit would need other local blocks
    manager.commit("a", prompt[16:])
    assert manager.append("a", 3)
    manager.commit("a", [1, 2, 3])
    manager.close("a")
    manager.check_invariants()


def test_what_is_there_of_what_is_loaded_is_not_loaded() -> None:
    """Though no hit could use it: the window needs its last two blocks only, and has none."""
    manager = manager_of(15)
    prompt = list(range(12))
    fill(manager, "a", prompt)  # local 0..3 fell out: 3, 2 and 1 are evicted
    fill(manager, "filler", [50] * 6)
    manager.close("filler")
    assert manager.lookup([*prompt[:10], 99]).num_cached_tokens == 2
    opened = manager.open("b", prompt, loaded_tokens=10, max_fresh_tokens=1)
    assert opened is not None and opened.num_cached_tokens == 6  # local 3 is the first that is missing
    table = manager.tables["full"].block_ids("b")
    assert int(np.count_nonzero(table)) == 6
    manager.commit("b", prompt[6:10])
    manager.check_invariants()


def test_a_whole_prompt_comes_from_another_manager() -> None:
    """What one side holds is what the other has to fill, block by block, the partial tail included."""
    prefill, decode = manager_of(40), manager_of(40)
    prompt = list(range(13))
    fill(prefill, "a", prompt)
    fill(decode, "old", prompt[:6])
    opened = decode.open("a", prompt, max_cached_tokens=13, loaded_tokens=13)
    assert opened == (13, 6)
    for name, table in decode.tables.items():
        theirs, ours = prefill.tables[name].block_ids("a")[3:], table.block_ids("a")[3:]
        assert ((theirs != NULL_BLOCK) == (ours != NULL_BLOCK)).all()
    decode.commit("a", prompt[6:])
    decode.check_invariants()
    assert decode.counts.active == 7 + 3 + 2  # and what "old" sees in its window


def test_less_than_the_hit_is_not_loaded() -> None:
    """The same as without."""
    manager = manager_of(40)
    fill(manager, "a", list(range(9)))
    assert manager.open("b", range(9), loaded_tokens=8, max_fresh_tokens=1) == (9, 8)
    assert manager.open("c", [*range(5), 77], loaded_tokens=3, partial_hits=True) == (6, 5)
    manager.copies.take()
    manager.check_invariants()


def test_what_was_to_be_loaded_can_be_given_up_but_not_cut_inside() -> None:
    """Without the blocks that its window has not got."""
    manager = manager_of(40)
    prompt = list(range(16))
    assert manager.open("a", prompt, loaded_tokens=16)
    before = state(manager)
    with pytest.raises(SequenceError, match="positions from 8 on fell out of a window"):
        manager.truncate("a", 12)
    with pytest.raises(SequenceError, match="cannot truncate 'a' from 16 to 1 tokens"):
        manager.commit_step(["a"], [prompt], [1])
    with pytest.raises(PagedKVError, match="17 tokens cannot be loaded of a prompt of 16"):
        manager.open("b", prompt, loaded_tokens=17)
    with pytest.raises(PagedKVError, match="loaded_tokens"):
        manager.open("b", prompt, loaded_tokens=-1)
    assert state(manager) == before
    manager.truncate("a", 0)
    assert manager.counts == (40, 0, 0)
    assert manager.append("a", 5)
    manager.commit("a", prompt[:5])
    manager.check_invariants()


def test_a_sequence_that_is_being_loaded_can_be_swapped() -> None:
    """It comes back with the same gaps."""
    manager = manager_of(20)
    space = HybridSwapSpace(manager, 20)
    prompt = list(range(12))
    assert manager.open("a", prompt, loaded_tokens=12)
    tables = {name: (t.block_ids("a") != NULL_BLOCK).tolist() for name, t in manager.tables.items()}
    out = space.swap_out("a")
    assert out is not None and len(out.copies.src) == 6 + 2
    space.done(out.transfer)
    assert manager.maintenance.resize(8) is not None
    back = space.swap_in("a")
    assert back is not None
    space.done(back.transfer)
    assert tables == {name: (t.block_ids("a") != NULL_BLOCK).tolist() for name, t in manager.tables.items()}
    manager.commit("a", prompt)
    manager.check_invariants()


def test_a_load_that_fails_in_the_middle_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory when the blocks are taken."""
    manager = manager_of(20)
    fill(manager, "a", list(range(6)))
    before = state(manager)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(manager._tree.pool, "acquire", fail)
        with pytest.raises(MemoryError):
            manager.open("b", range(9), loaded_tokens=9)
    assert state(manager) == before


# -- copies that wait


def test_what_a_copy_reads_is_held_in_every_group_until_the_copy_is_taken() -> None:
    """It is not evicted meanwhile, and cached again afterwards; a fence that was open takes it over."""
    manager = manager_of(12)
    fill(manager, "a", list(range(4)))
    manager.close("a")
    assert manager.open("b", [0, 1, 2, 77], partial_hits=True) == (4, 3)
    assert manager.counts == (6, 0, 6) and manager.stats().fenced_blocks == 2
    assert manager.open("c", [50] * 8) is None  # 8 blocks of 6
    manager.check_invariants()
    fence = manager.fences.open()
    copies = manager.copies.take()
    assert len(copies.src) == 2 and manager.counts == (6, 0, 6)
    manager.fences.signal(fence)
    assert manager.counts == (6, 2, 4)
    manager.check_invariants()
    assert manager.open("c", [50] * 8)


def test_a_copy_for_whom_nobody_is_left_is_forgotten_and_lets_go_of_what_it_reads() -> None:
    """Children before their parents, so that the order of eviction stays right."""
    manager = manager_of(12)
    fill(manager, "a", list(range(4)))
    manager.close("a")
    assert manager.open("b", [0, 1, 2, 77], partial_hits=True) == (4, 3)
    manager.close("b")
    assert len(manager.copies) == 0 and manager.counts == (8, 4, 0)
    manager.check_invariants()
    fill(manager, "a", [8, 9, 10])
    assert manager.fork("a", "b") and manager.step(["b"]) and manager.step(["a"])
    assert len(manager.copies) == 4  # "a" could not write there either: the first copies read it
    manager.truncate("b", 2)
    assert len(manager.copies) == 2
    manager.check_invariants()


# -- drafts


def test_drafts_move_no_window_and_rejected_ones_go_with_their_blocks() -> None:
    """With none accepted, the next token sees what it saw before; with all, the window has moved."""
    manager = manager_of(40)
    fill(manager, "a", list(range(8)))
    held = {name: table.block_ids("a").tolist() for name, table in manager.tables.items()}
    for _ in range(3):
        assert manager.step(["a"], 1 + 7) and manager.counts.active == 4 + 2 + 8
        assert [b for b in manager.tables["local"].block_ids("a") if b][:2] == held["local"][2:]
        manager.commit_step(["a"], [[1] * 8], [0])
        assert held == {name: table.block_ids("a").tolist() for name, table in manager.tables.items()}
    assert manager.step(["a"], 8)
    manager.commit_step(["a"], [[1] * 8], [5])
    assert manager.tables["full"].num_tokens("a") == 13 == manager.tables["full"].num_committed("a")
    assert np.flatnonzero(manager.tables["local"].block_ids("a")).tolist() == [4, 5, 6]
    manager.check_invariants()
    assert manager.stats().fallen_blocks == 2 + 2


def test_a_batch_of_drafts_is_accepted_whole_or_not_at_all() -> None:
    """One sequence with too many, an unknown one, or rows that are none: nothing changes."""
    manager = manager_of(40)
    for name in "ab":
        fill(manager, name, [ord(name)] * 5)
    assert manager.step(["a", "b"], 3)
    before = state(manager)
    wrong: list[tuple[Any, Any, Any]] = [
        (["a", "b"], [[1, 2, 3], [1, 2]], [1, 3]),
        (["a", "b"], [[1, 2, 3], [1, 2, 3, 4]], [1, 4]),
        (["a", "c"], [[1], [1]], [1, 1]),
        (["a", "a"], [[1], [1]], [1, 1]),
        (["a", "b"], [[1], [1]], [1]),
        (["a", "b"], [1, 2], [1, 1]),
        (["a", "b"], [[1], [1]], [1, -1]),
    ]
    for ids, drafts, counts in wrong:
        with pytest.raises(PagedKVError):
            manager.commit_step(ids, drafts, counts)
        assert state(manager) == before
    manager.commit_step(["a", "b"], [[1, 2, 3], [4]], [2, 1])
    table = manager.tables["full"]
    assert [table.num_tokens(name) for name in "ab"] == [7, 6]
    manager.check_invariants()


def test_drafts_are_not_accepted_into_blocks_that_await_their_copies() -> None:
    """In any group."""
    manager = manager_of(40)
    fill(manager, "a", [1, 2, 3])
    assert manager.fork("a", "b") and manager.step(["a", "b"], 3)
    before = state(manager)
    with pytest.raises(SequenceError, match="awaits its copy"):
        manager.commit_step(["b", "a"], [[1, 2, 3]] * 2, [1, 1])
    assert state(manager) == before
    manager.copies.take()
    manager.commit_step(["b", "a"], [[1, 2, 3]] * 2, [1, 3])
    manager.check_invariants()
