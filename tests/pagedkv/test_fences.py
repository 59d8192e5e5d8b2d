"""A block that work under way may touch is handed out only after the signal."""

import pytest

from pagedkv import KVCacheManager, PagedKVError


def manager_with(num_blocks: int, *prompts: list[int]) -> KVCacheManager:
    """A manager whose sequences "0", "1", ... are open and committed."""
    manager = KVCacheManager(num_blocks, 2)
    for i, prompt in enumerate(prompts):
        assert manager.open(str(i), prompt)
        manager.commit(str(i), prompt)
    return manager


def test_a_freed_block_waits_for_its_fence() -> None:
    """It is active until the signal, then free, and only then handed out."""
    manager = manager_with(1, [1])
    fence = manager.fences.open()
    manager.close("0")
    assert manager.counts == (0, 0, 1)
    assert manager.stats().fenced_blocks == 1
    assert manager.stats().used_slots == 0
    assert manager.open("b", [2]) is None
    assert not manager.lookup([2]).fits
    manager.fences.signal(fence)
    assert manager.counts == (1, 0, 0)
    assert manager.open("b", [2])


def test_a_cached_block_is_not_evicted_before_the_signal_but_can_be_hit() -> None:
    """Its content stays right, so a hit is fine; an eviction would overwrite it under the step."""
    manager = manager_with(2, [1, 2, 3])
    fence = manager.fences.open()
    manager.close("0")
    assert manager.open("b", [5, 6, 7]) is None
    opened = manager.open("c", [1, 2], max_cached_tokens=2)
    assert opened is not None
    assert opened.num_cached_tokens == 2
    manager.close("c")
    manager.fences.signal(fence)
    manager.check_invariants()
    assert manager.counts == (1, 1, 0)
    assert manager.open("b", [5, 6, 7])


def test_a_cut_tail_and_a_copied_tail_wait_too() -> None:
    """Truncation and copy-on-write give blocks up like a close does."""
    manager = manager_with(4, [1, 2, 3])
    fence = manager.fences.open()
    manager.truncate("0", 2)
    assert manager.stats().fenced_blocks == 1
    manager.fences.signal(fence)
    assert manager.counts == (3, 0, 1)


def test_a_fence_does_not_hold_what_was_given_up_before_it_opened() -> None:
    """Work that starts later cannot touch a block that nobody held when it started."""
    manager = manager_with(2, [1], [2])
    manager.close("0")
    manager.fences.open()
    assert manager.counts.free == 1
    assert manager.open("b", [3])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_block_waits_for_every_fence_that_was_open_when_it_was_given_up(order: tuple[int, int]) -> None:
    """Two steps in flight: both must be done, in whichever order they end."""
    manager = manager_with(2, [1], [2])
    fences = [manager.fences.open()]
    manager.close("0")  # waits for the first
    fences.append(manager.fences.open())
    manager.close("1")  # waits for both
    manager.fences.signal(fences[order[0]])
    assert manager.counts.free == (1 if order[0] == 0 else 0)
    manager.fences.signal(fences[order[1]])
    assert manager.counts.free == 2


def test_a_signal_of_a_fence_that_is_not_open_is_refused() -> None:
    """Unknown, signalled twice, of another type: an error with the open ones, and nothing changes."""
    manager = manager_with(1, [1])
    fence = manager.fences.open()
    manager.close("0")
    for bad in (fence + 1, -1, None, "0"):
        with pytest.raises(PagedKVError, match=r"is not open \(1 are\)"):
            manager.fences.signal(bad)  # type: ignore[arg-type]
    assert manager.stats().fenced_blocks == 1
    manager.fences.signal(fence)
    with pytest.raises(PagedKVError, match=r"fence 0 is not open \(0 are\)"):
        manager.fences.signal(fence)


def test_fence_numbers_are_never_used_again() -> None:
    """A late signal of an old fence cannot end a new one."""
    manager = KVCacheManager(1, 2)
    first = manager.fences.open()
    manager.fences.signal(first)
    assert manager.fences.open() != first


def test_a_parent_that_was_fenced_twice_is_evicted_after_its_child() -> None:
    """A second user of a fenced prefix extends it and leaves: children still go before parents."""
    manager = manager_with(3, [1, 2, 3, 4])
    fence = manager.fences.open()
    manager.close("0")
    assert manager.open("b", [1, 2, 9, 9])
    manager.commit("b", [9, 9])
    manager.close("b")
    manager.fences.signal(fence)
    manager.check_invariants()
    assert manager.counts == (0, 3, 0)
    manager.open("c", [7])  # evicts the least recent leaf
    manager.check_invariants()
    opened = manager.open("d", [1, 2, 9, 9], max_cached_tokens=4)
    assert opened is not None
    assert opened.num_cached_tokens == 4
