"""BatchFollower: a reader of event batches that knows what its manager has indexed."""

from collections.abc import Iterable

from pagedkv.errors import PagedKVError
from pagedkv.event_batches import EventBatch, MissedBatches, decode_batch
from pagedkv.events import BlocksCleared
from pagedkv.testing import ShadowIndex


class BatchFollower:
    """What a reader of the batches knows, in ``index``: checks that they give the manager's index.

    For managers of one group; `decode_batch` and ``pagedkv.hybrid.shadow.GroupShadow`` follow several.

    ``index`` raises ``AssertionError`` if the events contradict each other. With int hashes its digests are
    the last 8 bytes of the manager's. ``next_number`` is the batch to read next. See `BatchRing`. Not
    thread-safe.
    """

    def __init__(self) -> None:
        """Know nothing, and expect batch 0."""
        self.index = ShadowIndex()
        self.next_number = 0

    def __contains__(self, digest: bytes) -> bool:
        """Whether a block can be hit, by its digest as `prefix_digests` gives it. Cost: O(1)."""
        return digest in self.index.digests or digest[-8:] in self.index.digests

    def read(self, batch: EventBatch) -> None:
        """Apply the next batch.

        Raises ``MissedBatches`` if some before it were not read, ``PagedKVError`` if it was read already
        or is no batch; then nothing has changed. Cost: O(tokens).
        """
        if batch.number > self.next_number:
            raise MissedBatches(self.next_number, batch.number - 1, batch.number)
        if batch.number < self.next_number:
            raise PagedKVError(f"batch {batch.number} was read already, the next is {self.next_number}")
        self._apply(batch)

    def resync(self, snapshot: EventBatch) -> None:
        """Apply a snapshot instead of the batches up to its number; for what comes after, ``read``.

        Raises ``PagedKVError`` if it is older than what was read, or no snapshot; then nothing has changed.
        """
        if snapshot.number < self.next_number - 1:
            raise PagedKVError(f"snapshot {snapshot.number} is older than batch {self.next_number - 1}")
        if not isinstance(next(iter(decode_batch(snapshot.payload).events), None), BlocksCleared):
            raise PagedKVError(f"batch {snapshot.number} is no snapshot: it clears nothing")
        self._apply(snapshot)

    def check(self, digests: Iterable[bytes]) -> None:
        """Raise ``AssertionError`` unless the index holds exactly these blocks: ``BatchRing.digests``."""
        width = max(map(len, self.index.digests), default=0)
        expected = {digest[-width:] for digest in digests}
        missing, extra = expected - self.index.digests, self.index.digests - expected
        assert not missing | extra, f"{len(missing)} blocks are missing, {len(extra)} should not be there"

    def _apply(self, batch: EventBatch) -> None:
        events = decode_batch(batch.payload, self.index.next_number).events
        for event in events:
            if not isinstance(event, BlocksCleared) and event.group:
                raise PagedKVError(
                    f"event {event.number} is of group {event.group}: a follower knows group 0"
                )
        for event in events:
            self.index.apply(event)
        self.next_number = batch.number + 1
