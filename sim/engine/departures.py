"""The prefixes that a manager evicts, by its events."""

from __future__ import annotations

import numpy as np

from pagedkv.block_tables import Int32Array
from pagedkv.events import BlocksRemoved, BlocksStored
from pagedkv.manager import KVCacheManager


class Departures:
    """Hears what a new manager evicts. Cost: some 2 us per block stored or evicted, and O(prefix) for each.

    >>> manager = KVCacheManager(3, block_size=2)
    >>> departures = Departures(manager)
    >>> for name, tokens in ("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8]):
    ...     _ = manager.open(name, tokens); manager.commit(name, tokens); manager.close(name)
    >>> [prefix.tolist() for prefix in departures.take()]
    [[1, 2, 3, 4]]
    """

    def __init__(self, manager: KVCacheManager) -> None:
        """Listen from now on; nobody else may take the manager's events."""
        manager.events.record()
        self._events = manager.events
        self._known: dict[bytes, tuple[bytes | None, Int32Array]] = {}  # the parent, and its own tokens

    def take(self) -> list[Int32Array]:
        """Whole prefixes [tokens] that ended in an evicted block since the last call, in this order.

        One that is the beginning of another is not told.
        """
        prefixes = []
        for event in self._events.take():
            if isinstance(event, BlocksStored):
                parents = [event.parent, *event.digests[:-1]]
                self._known.update(zip(event.digests, zip(parents, event.tokens, strict=True), strict=True))
            elif isinstance(event, BlocksRemoved):
                told: set[bytes | None] = set()
                for digest in event.digests:  # children first
                    if digest not in told:
                        prefixes.append(self._prefix(digest, told))
                for digest in event.digests:
                    del self._known[digest]
        return prefixes

    def _prefix(self, digest: bytes, told: set[bytes | None]) -> Int32Array:
        """The tokens up to a block; the blocks that they make up are told with it."""
        parts = []
        at: bytes | None = digest
        while at is not None:
            told.add(at)
            at, tokens = self._known[at]
            parts.append(tokens)
        return np.concatenate(parts[::-1])
