"""What a follower of a hybrid manager's events knows: which contents each group has."""

from collections.abc import Sequence

from pagedkv.events import DEVICE, BlocksCleared, BlocksRemoved, BlocksStored, Event
from pagedkv.hybrid.group import CacheGroup
from pagedkv.testing.shadows import ShadowIndex


class GroupShadow:
    """Replays the events of a `HybridKVCacheManager`: it sees events only.

    Raises ``AssertionError`` on a gap in the numbers, on a content that a group gets twice or loses without
    having it, and in groups without a window on one behind an unknown parent, or a parent that goes before
    its child. ``digests[group]`` are those of all contents that a group has on the device; other
    tiers are passed over.

    >>> from pagedkv.hybrid import HybridKVCacheManager
    >>> groups = CacheGroup("full", (1,)), CacheGroup("local", (0,), window=2)
    >>> manager, follower = HybridKVCacheManager(groups, num_blocks=8, block_size=2), GroupShadow(groups)
    >>> manager.events.record()
    >>> _ = manager.open("a", [1, 2, 3, 4]); manager.commit("a", [1, 2, 3, 4])
    >>> for event in manager.events.take():
    ...     follower.apply(event)
    >>> [follower.digests[group] == manager.events.digests(group) for group in range(2)]
    [True, True]
    """

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        """Start like a manager: empty, expecting event 0."""
        self.next_number = 0
        self.digests: list[set[bytes]] = [set() for _ in groups]
        self._strict = {g: ShadowIndex() for g, group in enumerate(groups) if group.window is None}

    def apply(self, event: Event) -> None:
        """Take in one event."""
        assert event.number == self.next_number, f"event {event.number}, expected {self.next_number}"
        self.next_number += 1
        if isinstance(event, BlocksCleared):
            for digests in self.digests:
                digests.clear()
            for strict in self._strict.values():
                strict.apply(event._replace(number=strict.next_number))
            return
        if event.tier != DEVICE:
            return
        if event.group in self._strict:
            strict = self._strict[event.group]
            strict.apply(event._replace(number=strict.next_number))
        self._change(event, self.digests[event.group])

    def _change(self, event: BlocksStored | BlocksRemoved, digests: set[bytes]) -> None:
        changed = set(event.digests)
        assert len(changed) == len(event.digests), "a content comes twice in one event"
        if isinstance(event, BlocksStored):
            assert not changed & digests, "stored twice"
            digests |= changed
        else:
            assert changed <= digests, "removed what was not there"
            digests -= changed
