"""What a router has heard of one replica's cache, some time after it was said."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from pagedkv.errors import PagedKVError
from pagedkv.events import DEVICE, BlocksCleared, BlocksStored, Event


class ReplicaIndex:
    """The prefixes that one manager's events say are cached, as of ``delay_s`` ago.

    >>> from pagedkv import KVCacheManager
    >>> manager, index = KVCacheManager(4, block_size=2), ReplicaIndex(delay_s=0.5)
    >>> manager.events.record()
    >>> _ = manager.open("a", [1, 2, 3, 4]); manager.commit("a", [1, 2, 3, 4])
    >>> index.hear(7.0, manager.events.take())
    >>> len(index.digests(7.4)), index.digests(7.5) == manager.events.digests()
    (0, True)
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        """Know nothing. Raises ``PagedKVError`` for a negative delay."""
        if not 0 <= delay_s < float("inf"):
            raise PagedKVError(f"event delay must be 0 seconds or more, got {delay_s}")
        self._delay_s = delay_s
        self._digests: set[bytes] = set()
        self._next_number = 0
        self._on_the_way: deque[tuple[float, Sequence[Event]]] = deque()

    def hear(self, time_s: float, events: Sequence[Event]) -> None:
        """Let events be sent at a time, not before those sent earlier."""
        if events:
            self._on_the_way.append((time_s + self._delay_s, events))

    def digests(self, now_s: float) -> set[bytes]:
        """Digests of all blocks that are known to be cached now. The set is the index's own."""
        while self._on_the_way and self._on_the_way[0][0] <= now_s:
            for event in self._on_the_way.popleft()[1]:
                self._apply(event)
        return self._digests

    def num_cached(self, now_s: float, digests: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are known to be cached. O(log blocks).

        A cached block's prefix is cached, so the first that is missing can be searched for.
        """
        known = self.digests(now_s)
        return bisect_left(digests, True, key=lambda digest: digest not in known)

    def _apply(self, event: Event) -> None:
        if event.number != self._next_number:
            raise PagedKVError(f"event {event.number} was heard, the next is {self._next_number}")
        self._next_number += 1
        if isinstance(event, BlocksCleared):
            self._digests.clear()
        elif event.tier != DEVICE:
            return  # not where the replica computes
        elif isinstance(event, BlocksStored):
            self._digests.update(event.digests)
        else:
            self._digests.difference_update(event.digests)
