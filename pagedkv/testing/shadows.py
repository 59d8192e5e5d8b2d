"""Shadows: what slots hold and what is findable, learnt from the outside alone."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from pagedkv.copies import BlockCopies, PendingCopies
from pagedkv.events import DEVICE, BlocksCleared, BlocksRemoved, BlocksStored, Event
from pagedkv.page_table import PageTable


class HasTables(Protocol):
    """A ``KVCacheManager``, or what stands in for one."""

    tables: PageTable

    @property
    def copies(self) -> PendingCopies:
        """Copies that wait."""


class ShadowStorage:
    """Which token each slot holds, written and copied as an engine would: finds shared slots that changed.

    >>> from pagedkv import KVCacheManager
    >>> manager, shadow = KVCacheManager(4, block_size=2), ShadowStorage(4, block_size=2)
    >>> _ = manager.open("a", [5, 6, 7])
    >>> shadow.write(manager.tables.slots("a"), [5, 6, 7]); manager.commit("a", [5, 6, 7])
    >>> shadow.read(manager, "a")
    [5, 6, 7]
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """All slots start empty (-1)."""
        self.slots = np.full((num_blocks + 1, block_size), -1)

    def copy(self, manager: HasTables) -> None:
        """Take the copies that wait, and run them."""
        self.move(manager.copies.take())

    def move(self, copies: BlockCopies) -> None:
        """Run copies that were taken, or the moves of a defragmentation."""
        self.slots[copies.dst] = self.slots[copies.src]

    def resize(self, num_blocks: int) -> None:
        """Keep the slots of ids ``1..num_blocks``; new ones are empty."""
        slots = np.full((num_blocks + 1, self.slots.shape[1]), -1)
        kept = min(len(slots), len(self.slots))
        slots[:kept] = self.slots[:kept]
        self.slots = slots

    def write(self, slots: Any, tokens: Sequence[int]) -> None:
        """Store one token per slot."""
        self.slots.reshape(-1)[np.asarray(slots, np.int64)] = tokens

    def read(self, manager: HasTables, seq_id: Hashable) -> list[int]:
        """The committed tokens of a sequence, read through its block table."""
        slots = manager.tables.slots(seq_id, 0, manager.tables.num_committed(seq_id))
        tokens: list[int] = self.slots.reshape(-1)[slots].tolist()
        return tokens


class ShadowIndex:
    """What a follower of the event stream knows: it sees events only.

    Raises ``AssertionError`` on a gap in the numbers, on a block behind an unknown parent, on one stored
    twice or removed without being there, and on a parent that goes before its child. ``digests`` are those
    of all blocks that can be hit on the device now, ``others[tier]`` those of another tier, where any block
    may come and go by itself.

    >>> from pagedkv import KVCacheManager
    >>> manager, follower = KVCacheManager(4, block_size=2), ShadowIndex()
    >>> manager.events.record()
    >>> _ = manager.open("a", [1, 2, 3, 4]); manager.commit("a", [1, 2, 3, 4])
    >>> for event in manager.events.take():
    ...     follower.apply(event)
    >>> follower.digests == manager.events.digests(), len(follower.digests)
    (True, 2)
    """

    def __init__(self) -> None:
        """Start like a manager: empty, expecting event 0."""
        self.next_number = 0
        self.digests: set[bytes] = set()
        self.others: defaultdict[str, set[bytes]] = defaultdict(set)
        self._parents: dict[bytes, bytes | None] = {}
        self._num_children: dict[bytes, int] = {}

    def apply(self, event: Event) -> None:
        """Take in one event."""
        assert event.number == self.next_number, f"event {event.number}, expected {self.next_number}"
        self.next_number += 1
        if isinstance(event, BlocksCleared):
            for known in (self.digests, self.others, self._parents, self._num_children):
                known.clear()
        elif event.tier != DEVICE:
            self._apply_elsewhere(event, self.others[event.tier])
        elif isinstance(event, BlocksStored):
            parent = event.parent
            for digest in event.digests:
                self._store(digest, parent)
                parent = digest
        else:
            for digest in event.digests:
                self._remove(digest)

    @staticmethod
    def _apply_elsewhere(event: BlocksStored | BlocksRemoved, known: set[bytes]) -> None:
        for digest in event.digests:
            is_stored = isinstance(event, BlocksStored)
            assert (digest in known) != is_stored, f"stored twice, or removed without being in {event.tier}"
            (known.add if is_stored else known.remove)(digest)

    def _store(self, digest: bytes, parent: bytes | None) -> None:
        assert parent is None or parent in self.digests, "stored behind an unknown parent"
        assert digest not in self.digests, "stored twice"
        self.digests.add(digest)
        self._parents[digest] = parent
        self._num_children[digest] = 0
        if parent is not None:
            self._num_children[parent] += 1

    def _remove(self, digest: bytes) -> None:
        assert digest in self.digests, "removed what was not there"
        assert not self._num_children.pop(digest), "removed before what builds on it"
        self.digests.remove(digest)
        parent = self._parents.pop(digest)
        if parent is not None:
            self._num_children[parent] -= 1
