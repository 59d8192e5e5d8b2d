"""BatchRing: a manager's events as numbered batches, the newest of them kept for late readers."""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from pagedkv.block_tables import Int32Array
from pagedkv.errors import PagedKVError, require_count
from pagedkv.event_batches import (
    EventBatch,
    MissedBatches,
    WireFormat,
    require_msgspec,
)
from pagedkv.events import DEVICE, BlocksCleared, BlocksRemoved, BlocksStored, Event


class BatchRing:
    """Encodes the events of one manager and keeps the last ``capacity`` batches for late readers.

    Readers ask for what they lack with ``since``; one that comes too late is told so, and goes on from a
    ``snapshot``. Needs the whole stream: it must see event 0, and no event may go elsewhere. Memory: the
    kept payloads, and for the snapshot the tokens and about 200 bytes per indexed block. Not thread-safe.

    >>> from pagedkv import KVCacheManager
    >>> from pagedkv.event_follower import BatchFollower
    >>> manager = KVCacheManager(num_blocks=4, block_size=2)
    >>> manager.events.record()
    >>> _ = manager.open("a", [1, 2, 3, 4]); manager.commit("a", [1, 2, 3, 4])
    >>> ring, follower = BatchRing(capacity=100), BatchFollower()
    >>> ring.publish(manager.events.take(), timestamp=0.0).number
    0
    >>> for batch in ring.since(follower.next_number):
    ...     follower.read(batch)
    >>> len(follower.index.digests)
    2
    """

    def __init__(self, capacity: int, wire: WireFormat | None = None) -> None:
        """Start before event 0. Raises ``PagedKVError`` unless ``capacity >= 1``, and without msgspec."""
        require_count("capacity", capacity, 1)
        require_msgspec()  # a missing package shows now, not when events are at stake
        self.wire = wire or WireFormat()
        self._kept: deque[EventBatch] = deque(maxlen=capacity)
        self._contents = _Contents()
        self._next_event = 0
        self.next_number = 0

    @property
    def digests(self) -> set[bytes]:
        """Digests of all blocks that are indexed after the last batch, of group 0 if there are several.

        Cost: O(indexed blocks).
        """
        return set(self._contents.places[DEVICE, 0])

    def publish(self, events: Sequence[Event], timestamp: float) -> EventBatch | None:
        """Encode events as the next batch; None, and no number used, if there are none.

        Raises ``PagedKVError`` if an event is missing or came before; then nothing has changed.
        Cost: O(tokens).
        """
        for expected, event in enumerate(events, self._next_event):
            if event.number != expected:
                raise PagedKVError(f"event {event.number} cannot be published, the next is {expected}")
        if not events:
            return None
        batch = EventBatch(self.next_number, self.wire.encode(events, timestamp))
        for event in events:
            self._contents.apply(event)
        self._kept.append(batch)
        self._next_event += len(events)
        self.next_number += 1
        return batch

    def since(self, number: int) -> list[EventBatch]:
        """Batches ``number``, ``number + 1``, ... up to the newest; none if ``number`` is the next one.

        Raises ``MissedBatches`` if the first of them are no longer kept, ``PagedKVError`` for a number
        after the next one. Cost: O(capacity).
        """
        require_count("number", number, 0)
        oldest = self.next_number - len(self._kept)
        if number < oldest:
            raise MissedBatches(number, oldest - 1, oldest)
        if number > self.next_number:
            raise PagedKVError(f"batch {number} does not exist: the next one is {self.next_number}")
        return list(islice(self._kept, number - oldest, None))

    def snapshot(self, timestamp: float) -> EventBatch:
        """One batch that stands in for all so far: AllBlocksCleared, then what is indexed now.

        Raises ``PagedKVError`` if nothing was published yet. Cost: O(indexed tokens).
        """
        if not self.next_number:
            raise PagedKVError("a snapshot stands in for batches, and 0 were published")
        return EventBatch(self.next_number - 1, self.wire.encode(self._contents.events(), timestamp))


class _Contents:
    """Parent and tokens of each block of a (tier, group), by digest, in the order in which they came."""

    def __init__(self) -> None:
        self.places: defaultdict[tuple[str, int], dict[bytes, tuple[bytes | None, bytes]]] = defaultdict(dict)

    def apply(self, event: Event) -> None:
        if isinstance(event, BlocksCleared):
            self.places.clear()
            return
        blocks = self.places[event.tier, event.group]
        if isinstance(event, BlocksRemoved):
            for digest in event.digests:
                del blocks[digest]
        else:
            parents = (event.parent, *event.digests[:-1])
            # bytes: a row of the array would keep the whole array alive
            rows = (row.tobytes() for row in event.tokens)
            blocks.update(zip(event.digests, zip(parents, rows, strict=True), strict=True))

    def events(self) -> list[Event]:
        """Events, numbered from 0, that give these contents to whoever applies them."""
        events: list[Event] = [BlocksCleared(0)]
        for (tier, group), blocks in self.places.items():
            for run in _runs(blocks):
                tokens: Int32Array = np.stack([np.frombuffer(blocks[digest][1], np.int32) for digest in run])
                parent = blocks[run[0]][0]
                digests = tuple(run)
                events.append(BlocksStored(len(events), parent, digests, tokens, group=group, tier=tier))
        return events


def _runs(blocks: dict[bytes, tuple[bytes | None, bytes]]) -> Iterator[list[bytes]]:
    """Digests, cut where a block does not follow the one before it."""
    run: list[bytes] = []
    for digest, (parent, _) in blocks.items():
        if run and parent != run[-1]:
            yield run
            run = []
        run.append(digest)
    if run:
        yield run
