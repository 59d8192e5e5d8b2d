"""Pins: content that stays without a sequence, counted, and given up once for each time it was pinned."""

from typing import Any

import pytest

from pagedkv import KVCacheManager, PagedKVError, SequenceError
from pagedkv.testing import snapshot


def pinned_manager() -> tuple[KVCacheManager, int]:
    """Six blocks of two tokens, of which a closed sequence has pinned two."""
    manager = KVCacheManager(6, 2)
    manager.open("system", range(5))
    manager.commit("system", range(5))
    pin = manager.retention.pin("system")
    manager.close("system")
    return manager, pin


def test_pinned_blocks_survive_close_and_any_pressure() -> None:
    """They are active, and a prompt that starts like them hits them all the time."""
    manager, _ = pinned_manager()
    assert manager.counts == (4, 0, 2)
    assert manager.stats().pinned_blocks == 2
    for i in range(5):
        manager.open("filler", range(100 * i + 50, 100 * i + 58))
        manager.commit("filler", range(100 * i + 50, 100 * i + 58))
        manager.close("filler")
        manager.check_invariants()
    assert manager.stats().evicted_blocks == 16
    opened = manager.open("again", range(5))
    assert opened is not None and opened.num_cached_tokens == 4


def test_what_only_a_pin_holds_does_not_fit_now() -> None:
    """``open`` says None until the pin is undone."""
    manager, pin = pinned_manager()
    assert manager.open("long", range(50, 60)) is None
    manager.retention.unpin(pin)
    assert manager.counts == (4, 2, 0)
    assert manager.open("long", range(50, 60)) is not None
    assert manager.stats().evicted_blocks == 1


def test_pins_are_counted() -> None:
    """Two pins of one block need two unpins; each number is good once."""
    manager, pin = pinned_manager()
    manager.open("again", range(5))
    second = manager.retention.pin("again", 2)
    manager.close("again")
    assert manager.stats().pinned_blocks == 2
    manager.retention.unpin(pin)
    assert manager.stats().pinned_blocks == 1
    assert manager.counts == (4, 1, 1)
    for undone in (pin, 7, -1, True, None, "0"):
        before = snapshot(manager)
        with pytest.raises(PagedKVError, match=r"there is no pin .* \(1 are held\)"):
            manager.retention.unpin(undone)  # type: ignore[arg-type]
        assert snapshot(manager) == before
    manager.retention.unpin(second)
    assert manager.counts == (4, 2, 0)
    manager.check_invariants()


@pytest.mark.parametrize(
    ("num_tokens", "message"),
    [
        (1, "3 tokens of 'a' are committed, 1 of them asked for, in blocks of 2"),
        (0, "3 tokens of 'a' are committed, 0 of them asked for"),
        (4, r"3 tokens of 'a' are committed, got 0\.\.4"),
        (-1, "num_tokens must be an integer of at least 0, got -1"),
        (1.0, r"got 1\.0"),
    ],
)
def test_only_full_committed_blocks_can_be_pinned(num_tokens: Any, message: str) -> None:
    """Everything else is refused, and nothing changes."""
    manager = KVCacheManager(6, 2)
    manager.open("a", range(5))
    manager.commit("a", range(3))
    before = snapshot(manager)
    with pytest.raises(PagedKVError, match=message):
        manager.retention.pin("a", num_tokens)
    assert snapshot(manager) == before
    with pytest.raises(SequenceError, match="'b' is not open"):
        manager.retention.pin("b")
    manager.retention.pin("a", 3)
    assert manager.stats().pinned_blocks == 1


def test_without_prefix_caching_there_is_nothing_to_pin() -> None:
    """No content is kept, so none can be held."""
    manager = KVCacheManager(6, 2, policy=None)
    manager.open("a", range(4))
    manager.commit("a", range(4))
    with pytest.raises(SequenceError, match="nothing to pin"):
        manager.retention.pin("a")


def test_a_pinned_tail_is_copied_before_it_is_overwritten() -> None:
    """A sequence cut back into a pinned block gets a block of its own to grow in."""
    manager = KVCacheManager(6, 4)
    manager.open("a", range(8))
    manager.commit("a", range(8))
    manager.retention.pin("a")
    manager.truncate("a", 6)
    assert manager.append("a")
    assert manager.copies.take().src.tolist() == [2]
    manager.close("a")
    assert manager.counts == (4, 0, 2)
    manager.check_invariants()


def test_a_fence_holds_what_is_unpinned_meanwhile() -> None:
    """As it holds what a sequence gives up."""
    manager, pin = pinned_manager()
    fence = manager.fences.open()
    manager.retention.unpin(pin)
    assert manager.counts == (4, 0, 2) and manager.stats().pinned_blocks == 0
    manager.fences.signal(fence)
    assert manager.counts == (4, 2, 0)
    manager.check_invariants()


def test_a_pin_that_fails_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference is left, and no number is taken that could be undone."""
    manager = KVCacheManager(6, 2)
    manager.open("a", range(4))
    manager.commit("a", range(4))
    before = snapshot(manager)

    def fail(*args: object, **options: object) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(manager._cache.pool, "acquire", fail)
        with pytest.raises(MemoryError, match="injected"):
            manager.retention.pin("a")
    assert snapshot(manager) == before
