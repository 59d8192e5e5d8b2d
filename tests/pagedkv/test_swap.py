"""Swapping: a sequence comes back as it was, whatever happened meanwhile, and no block is lost or shared."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pagedkv import KVCacheManager, Media, Namespace, NeverFits, PagedKVError, SequenceError
from pagedkv.swap import SwapIn, SwapOut, SwapSpace
from pagedkv.testing import snapshot

TENANT = Namespace(salt="tenant")


def manager_with(num_blocks: int, *prompts: list[int], **options: Any) -> KVCacheManager:
    """A manager of blocks of 2 whose sequences "0", "1", ... are open and committed."""
    manager = KVCacheManager(num_blocks, 2, **options)
    for i, prompt in enumerate(prompts):
        assert manager.open(str(i), prompt)
        manager.commit(str(i), prompt)
    return manager


def go_out(space: SwapSpace, seq_id: Hashable) -> SwapOut:
    """Swap out, with the copies done."""
    out = space.swap_out(seq_id)
    assert out is not None
    space.done(out.transfer)
    return out


def come_back(space: SwapSpace, seq_id: Hashable) -> SwapIn:
    """Swap in, with the copies done."""
    back = space.swap_in(seq_id)
    assert back is not None
    space.done(back.transfer)
    return back


def evict_all(manager: KVCacheManager) -> None:
    """Fill the pool with uncommitted tokens for a moment."""
    manager.open("filler", np.arange(2 * (manager.counts.free + manager.counts.cached)))
    manager.close("filler")


def state(space: Any) -> object:
    """Everything inside the space and its manager."""
    return snapshot(space)


# -- worked examples


def test_all_blocks_go_out_and_only_missing_ones_come_back() -> None:
    """Five tokens, three blocks: the two full ones stay cached; the tail alone is copied back."""
    manager = manager_with(4, [1, 2, 3, 4, 5])
    space = SwapSpace(manager, 4)
    out = go_out(space, "0")
    assert (out.copies.src.tolist(), out.copies.dst.tolist()) == ([1, 2, 3], [1, 2, 3])
    assert "0" not in manager.tables and manager.counts == (2, 2, 0)
    assert space.counts == (1, 0, 3) and "0" in space and space.seq_ids == ["0"]
    back = space.swap_in("0")
    assert back is not None and back.num_cached_tokens == 4
    assert (back.copies.src.tolist(), back.copies.dst.tolist()) == ([3], [3])
    assert manager.tables.block_ids("0").tolist() == [1, 2, 3]
    assert space.counts == (1, 0, 3) and "0" not in space
    space.done(back.transfer)
    assert space.counts == (4, 0, 0)
    stats = space.stats()
    assert (stats.copied_out_blocks, stats.copied_in_blocks, stats.hit_blocks) == (3, 1, 2)
    assert (stats.num_swapped_out, stats.num_swapped_in, stats.num_seqs, stats.num_transfers) == (1, 1, 0, 0)


def test_what_was_evicted_meanwhile_is_copied_back() -> None:
    """All of it, into other blocks; and it can be hit again."""
    manager = manager_with(3, [1, 2, 3, 4, 5])
    space = SwapSpace(manager, 3)
    go_out(space, "0")
    manager.open("x", [7, 8, 9])
    assert space.swap_in("0") is None
    manager.append("x", 3)
    manager.close("x")
    back = come_back(space, "0")
    assert back.num_cached_tokens == 0 and back.copies.src.tolist() == [1, 2, 3]
    assert back.copies.dst.tolist() == manager.tables.block_ids("0").tolist()
    assert manager.lookup([1, 2, 3, 4, 5]).num_cached_tokens == 4
    manager.check_invariants()


def test_lengths_commits_namespace_and_media_come_back() -> None:
    """Three of seven tokens are committed; the others keep their slots. Nobody else's key finds them."""
    manager = KVCacheManager(8, 2)
    manager.open("a", [1, 2, 3], namespace=TENANT)
    manager.append("a", 4)
    manager.commit("a", [1, 2, 3], media=[Media(1, "cat")])
    space = SwapSpace(manager, 4)
    assert len(go_out(space, "a").copies.src) == 4
    evict_all(manager)
    assert len(come_back(space, "a").copies.src) == 4
    assert (manager.tables.num_tokens("a"), manager.tables.num_committed("a")) == (7, 3)
    manager.commit("a", [4], media=[Media(3, "dog")])
    manager.close("a")
    both = [Media(1, "cat"), Media(3, "dog")]
    assert manager.lookup([1, 2, 3, 4, 5], namespace=TENANT, media=both).num_cached_tokens == 4
    assert manager.lookup([1, 2, 3, 4, 5], namespace=TENANT, media=both[:1]).num_cached_tokens == 2
    assert manager.lookup([1, 2, 3, 4, 5], media=both).num_cached_tokens == 0


def test_without_prefix_caching_all_comes_back_by_copies() -> None:
    """The manager keeps no tokens then, and none are needed."""
    manager = manager_with(3, [1, 2, 3], policy=None)
    manager.append("0", 2)
    space = SwapSpace(manager, 3)
    go_out(space, "0")
    assert manager.counts == (3, 0, 0)
    back = come_back(space, "0")
    assert back.num_cached_tokens == 0 and len(back.copies.src) == 3
    assert (manager.tables.num_tokens("0"), manager.tables.num_committed("0")) == (5, 3)
    manager.commit("0", [4, 5])
    manager.check_invariants()


def test_an_empty_sequence_goes_and_comes() -> None:
    """It takes no host block, but its transfers are begun and done like any other."""
    manager = manager_with(1, [])
    space = SwapSpace(manager, 1)
    assert len(go_out(space, "0").copies.src) == 0
    assert len(come_back(space, "0").copies.src) == 0
    assert manager.tables.num_tokens("0") == 0


def test_forks_keep_what_they_share() -> None:
    """A swapped fork takes a copy of the shared tail; the one that stays is not disturbed."""
    manager = manager_with(4, [1, 2, 3])
    manager.fork("0", "f")
    space = SwapSpace(manager, 2)
    out = space.swap_out("0")
    assert out is not None and out.copies.src.tolist() == [1, 2]
    manager.append("f")  # the tail is being read for the host: the fork writes to a copy
    assert manager.copies.take().src.tolist() == [2]
    space.done(out.transfer)
    back = come_back(space, "0")
    assert back.num_cached_tokens == 2
    assert not set(back.copies.dst.tolist()) & set(manager.tables.block_ids("f").tolist())
    manager.check_invariants()


def test_a_sequence_cut_inside_a_full_block_comes_back_cut() -> None:
    """The block that is still cached holds more than its tokens; it gets one of its own."""
    manager = manager_with(4, [1, 2, 3, 4])
    manager.truncate("0", 3)
    space = SwapSpace(manager, 2)
    go_out(space, "0")
    back = come_back(space, "0")
    assert back.num_cached_tokens == 2 and back.copies.src.tolist() == [2]
    manager.append("0")
    manager.commit("0", [9])
    assert manager.lookup([1, 2, 3, 9, 0]).num_cached_tokens == 4
    assert manager.lookup([1, 2, 3, 4, 0]).num_cached_tokens == 4


# -- fences


def test_blocks_that_go_out_are_handed_out_only_when_done() -> None:
    """They are active until then, whoever wants them."""
    manager = manager_with(2, [1, 2, 3])
    space = SwapSpace(manager, 2)
    out = space.swap_out("0")
    assert out is not None
    assert manager.counts == (0, 0, 2) and manager.stats().fenced_blocks == 2
    assert manager.open("b", [9]) is None
    space.done(out.transfer)
    assert manager.open("b", [9]) is not None


def test_full_blocks_can_be_hit_while_they_go_out() -> None:
    """Reading them twice harms nobody."""
    manager = manager_with(3, [1, 2, 3])
    space = SwapSpace(manager, 2)
    out = space.swap_out("0")
    opened = manager.open("b", [1, 2, 7])
    assert out is not None and opened is not None and opened.num_cached_tokens == 2
    space.done(out.transfer)
    manager.check_invariants()


def test_a_sequence_comes_back_only_when_its_way_out_is_done() -> None:
    """Before that the host does not have it: not now, although it would fit."""
    manager = manager_with(4, [1, 2, 3])
    space = SwapSpace(manager, 2)
    out = space.swap_out("0")
    before = state(space)
    assert out is not None and space.swap_in("0") is None and state(space) == before
    space.done(out.transfer)
    assert space.swap_in("0") is not None


def test_host_blocks_are_free_only_when_the_way_back_is_done() -> None:
    """They are being read until then, even if the sequence is closed already; and so are the device's."""
    manager = manager_with(2, [1, 2, 3])
    space = SwapSpace(manager, 2)
    go_out(space, "0")
    evict_all(manager)
    back = space.swap_in("0")
    assert back is not None
    manager.close("0")
    assert manager.open("b", [9]) is None and manager.stats().fenced_blocks == 2
    assert space.counts == (0, 0, 2)
    space.done(back.transfer)
    assert space.counts == (2, 0, 0) and manager.open("b", [9]) is not None


def test_blocks_that_are_being_filled_do_not_go_out() -> None:
    """Neither with the sequence that comes back nor with one that hits them: not now."""
    manager = manager_with(4, [1, 2, 3])
    space = SwapSpace(manager, 8)
    go_out(space, "0")
    evict_all(manager)
    back = space.swap_in("0")
    manager.open("b", [1, 2, 7])
    manager.open("c", [8])
    before = state(space)
    assert back is not None and space.swap_out("0") is None and space.swap_out("b") is None
    assert state(space) == before
    assert space.swap_out("c") is not None
    space.done(back.transfer)
    assert space.swap_out("0") is not None and space.swap_out("b") is not None


def test_a_dropped_sequence_frees_its_host_blocks_when_its_way_out_is_done() -> None:
    """Until then they are being written. Dropped later, they are free at once."""
    manager = manager_with(4, [1, 2, 3], [4])
    space = SwapSpace(manager, 3)
    out = space.swap_out("0")
    assert out is not None
    space.drop("0")
    assert "0" not in space and space.counts == (1, 0, 2)
    space.done(out.transfer)
    assert space.counts == (3, 0, 0)
    go_out(space, "1")
    space.drop("1")
    assert space.counts == (3, 0, 0)


# -- what is refused


def refused(error: type[Exception], words: str, space: SwapSpace, act: Callable[[], object]) -> None:
    """``act`` raises, with these words, and changes nothing on either side."""
    before = state(space)
    with pytest.raises(error, match=words):
        act()
    assert state(space) == before


def test_misuse_is_refused_with_numbers_and_changes_nothing() -> None:
    """Unknown ids, ids in the wrong place, and transfers that are not under way."""
    manager = manager_with(4, [1, 2, 3], [4])
    space = SwapSpace(manager, 4)
    out = go_out(space, "0")
    for act in (space.swap_in, space.drop):
        refused(SequenceError, r"'1' is not swapped out \(1 are\)", space, partial(act, "1"))
    refused(SequenceError, r"'0' is not open", space, lambda: space.swap_out("0"))
    refused(PagedKVError, r"transfer 0 is not under way", space, lambda: space.done(out.transfer))
    refused(PagedKVError, r"transfer True is not", space, lambda: space.done(True))
    come_back(space, "0")
    refused(SequenceError, r"'0' is not swapped out \(0 are\)", space, lambda: space.drop("0"))


def test_an_id_may_be_open_and_swapped_out_but_then_it_stays_where_it_is() -> None:
    """Two sequences of one name: neither may take the other's place."""
    manager = manager_with(4, [1, 2, 3])
    space = SwapSpace(manager, 4)
    go_out(space, "0")
    manager.open("0", [7])
    refused(SequenceError, "'0' is swapped out", space, lambda: space.swap_out("0"))
    refused(SequenceError, "'0' is open", space, lambda: space.swap_in("0"))
    manager.close("0")
    come_back(space, "0")
    assert manager.tables.num_tokens("0") == 3


def test_what_the_host_can_never_hold_is_an_error_and_what_it_cannot_hold_now_is_none() -> None:
    """Three blocks against a host of two; two against one that is free."""
    manager = manager_with(8, [1, 2, 3, 4, 5], [6, 7, 8], [9])
    space = SwapSpace(manager, 2)
    refused(NeverFits, "it has 3 blocks, the host 2", space, lambda: space.swap_out("0"))
    go_out(space, "2")
    before = state(space)
    assert space.swap_out("1") is None and state(space) == before


def test_what_the_device_cannot_hold_now_is_none_and_evicts_nothing() -> None:
    """Blocks, rows or the watermark: the sequence stays on the host, whole."""
    for options, others in (({}, [[5, 6]]), ({"max_seqs": 1}, [[]]), ({"watermark": 0.5}, [[]])):
        manager = manager_with(3, [1, 2, 3, 4, 5], **options)
        space = SwapSpace(manager, 3)
        go_out(space, "0")
        for i, prompt in enumerate(others):
            manager.open(i, prompt)
        before = state(space)
        assert space.swap_in("0") is None and state(space) == before, options
        manager.close(0)
        assert space.swap_in("0") is not None


def test_a_pending_copy_is_run_before_its_block_is_saved() -> None:
    """A block that awaits its copy has nothing to save; what comes in takes no block that a copy reads."""
    manager = manager_with(6, [1, 2, 3], [5])
    space = SwapSpace(manager, 5)
    go_out(space, "1")
    manager.fork("0", "f")
    manager.append("f")
    refused(SequenceError, "block 3 awaits its copy from block 2", space, lambda: space.swap_out("f"))
    assert space.swap_out("0") is not None and space.swap_in("1") is not None
    assert manager.copies.pending.src.tolist() == [2]
    assert 2 not in manager.tables.block_ids("1")
    manager.copies.take()
    assert space.swap_out("f") is not None


@pytest.mark.parametrize("count", [0, -1, 1.5, True, 2**31])
def test_an_impossible_number_of_host_blocks_is_refused(count: Any) -> None:
    """A pool has 1 to 2^31 - 2 blocks."""
    with pytest.raises(PagedKVError, match="num_host_blocks"):
        SwapSpace(KVCacheManager(1), count)
