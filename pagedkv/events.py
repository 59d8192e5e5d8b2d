"""What became findable and what ceased to be: the stream that a router or a second index follows."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

from pagedkv.block_tables import NULL_BLOCK, Int32Array
from pagedkv.content import SequenceExtra, as_token_array
from pagedkv.errors import PagedKVError
from pagedkv.namespace import Media, Namespace

DEVICE, HOST = "device", "host"
"""Tiers: where content can be hit. The manager keeps the device; the host, whoever stores blocks there."""

_DIGEST_BYTES = 32


ExtraKey = tuple[object, ...]


class BlocksStored(NamedTuple):
    """Consecutive blocks of one branch can be hit from now on.

    ``number`` counts the events of a log from 0 without gaps. ``digests[i]`` stands for the whole prefix
    up to and including block i; ``parent`` is the digest of the block before them, None at the start of a
    sequence. ``tokens`` int32 [n, block_size]. ``extra[i]``, if there are any, is what besides tokens the
    block's content hangs on: (namespace of the sequence, for its first block; media that start in it).
    ``group``: of which group of layers, for a hybrid manager. ``tier``: where they can be hit, `DEVICE` for
    all that the manager says itself.
    """

    number: int
    parent: bytes | None
    digests: tuple[bytes, ...]
    tokens: Int32Array
    extra: tuple[ExtraKey | None, ...] = ()
    group: int = 0
    tier: str = DEVICE


class BlocksRemoved(NamedTuple):
    """The last copy of these contents in one tier is gone; on the device, children before their parents.

    ``reason``: "capacity" (others needed the room), "policy" (a quota, or a time that ran out),
    "rewritten" (the only holder goes on writing there), "dropped" (it keeps this, but not what came before).
    """

    number: int
    digests: tuple[bytes, ...]
    reason: str = ""
    group: int = 0
    tier: str = DEVICE


class BlocksCleared(NamedTuple):
    """Nothing can be hit any more, in no tier: a reset, or the beginning of a snapshot."""

    number: int


Event = BlocksStored | BlocksRemoved | BlocksCleared


class EventLog:
    """The events of a manager since the last ``take``, once ``record`` was called.

    A digest is BLAKE2b-256, keyed with the seed, of the parent's digest, the block's tokens (little-endian
    int32) and its extra key: the same in every process, and of no use to a tenant with another seed.
    Cost: about 1.5 us per block stored; nothing before ``record``.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(num_blocks=4, block_size=2)
    >>> manager.events.record()
    >>> _ = manager.open("a", [1, 2, 3]); manager.commit("a", [1, 2, 3])
    >>> manager.events.take()[0].tokens.tolist()
    [[1, 2]]
    """

    def __init__(self, index: Sized) -> None:
        """Record nothing yet; ``index`` holds what is findable already."""
        self._index = index
        self._seed: bytes | None = None
        self._digest_of: dict[int, bytes] = {}
        self._events: list[Event] = []
        self._next = 0

    @property
    def recording(self) -> bool:
        """Whether ``record`` was called."""
        return self._seed is not None

    def record(self, seed: bytes = b"") -> None:
        """Record from now on what becomes findable and what ceases to be.

        They are kept until ``take``, however many. ``seed`` (at most 64 bytes) keys the digests. Raises
        ``PagedKVError`` if blocks are cached already, since the stream would not be complete.
        """
        if len(self._index):
            raise PagedKVError(f"too late to record events: {len(self._index)} blocks are indexed already")
        if self.recording:
            raise PagedKVError("events are recorded already")
        if not isinstance(seed, bytes) or len(seed) > 64:
            raise PagedKVError(f"the seed must be at most 64 bytes, got {seed!r}")
        self._seed = seed

    def take(self) -> list[Event]:
        """Hand over the events since the last call, oldest first; none unless they are recorded."""
        events, self._events = self._events, []
        return events

    def report(self, event: BlocksStored | BlocksRemoved) -> None:
        """Add an event of another tier than the device, which is somebody else's; its number is set here.

        For who keeps blocks on the host, say, in a way that any later request can load them: each tier's
        keeper tells of its own. (A `SwapSpace` has nothing to tell: what it keeps can be had back by one
        sequence alone.) A ``reset`` clears all tiers. Raises ``PagedKVError`` before ``record``, or for the
        device. Cost: O(1).

        >>> from pagedkv import KVCacheManager
        >>> from pagedkv.events import BlocksRemoved
        >>> manager = KVCacheManager(num_blocks=4, block_size=2)
        >>> manager.events.record()
        >>> manager.events.report(BlocksRemoved(0, (b"digest",), "capacity", tier="host"))
        >>> manager.events.take()[0].tier
        'host'
        """
        if not self.recording:
            raise PagedKVError("events are not recorded")
        if not isinstance(event, (BlocksStored, BlocksRemoved)) or event.tier == DEVICE:
            raise PagedKVError(
                f"only blocks stored or removed in another tier can be reported, got {event!r}"
            )
        self._events.append(event._replace(number=self._next))
        self._next += 1

    # -- the manager's side

    def stored(
        self, ids: Int32Array, tokens: Int32Array, extra: Sequence[ExtraKey | None], parent: int
    ) -> None:
        """Note that blocks are indexed behind ``parent`` (the null block for the first)."""
        assert self._seed is not None
        before = self._digest_of[parent] if parent != NULL_BLOCK else None
        digests = tuple(chain_digests(tokens, extra, before, self._seed))
        keys = tuple(extra) if any(key is not None for key in extra) else ()
        event = BlocksStored(self._next, before, digests, tokens.copy(), keys)
        self._digest_of.update(zip(ids.tolist(), digests, strict=True))
        self._events.append(event)
        self._next += 1

    def removed(self, ids: Int32Array, reason: str) -> None:
        """Note that blocks are no longer indexed."""
        blocks = ids.tolist()
        digests = tuple(self._digest_of[block] for block in blocks)
        self._events.append(BlocksRemoved(self._next, digests, reason))
        self._next += 1
        for block in blocks:
            del self._digest_of[block]

    def cleared(self) -> None:
        """Note that nothing is indexed any more."""
        self._events.append(BlocksCleared(self._next))
        self._next += 1
        self._digest_of.clear()

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Go on with other ids for blocks that have moved; their contents are the same."""
        moved = [(n, self._digest_of.pop(o)) for o, n in zip(old.tolist(), new.tolist(), strict=True)]
        self._digest_of.update(moved)

    def digests(self) -> set[bytes]:
        """Digests of all indexed blocks."""
        return set(self._digest_of.values())


def prefix_digests(
    tokens: Any,
    block_size: int,
    *,
    seed: bytes = b"",
    namespace: Namespace | None = None,
    media: Iterable[Media] = (),
) -> list[bytes]:
    """Digests of the full blocks of a prompt, as the events name them: what a router looks up.

    Raises ``PagedKVError`` for tokens, a namespace or media that ``open`` would refuse. Cost: O(n).

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(num_blocks=4, block_size=2)
    >>> manager.events.record()
    >>> _ = manager.open("a", [1, 2, 3, 4, 5]); manager.commit("a", [1, 2, 3, 4, 5])
    >>> manager.events.take()[0].digests == tuple(prefix_digests([1, 2, 3, 4, 5], block_size=2))
    True
    """
    prompt = as_token_array(tokens)
    extra = SequenceExtra.build(namespace, media, len(prompt), block_size)
    full = len(prompt) // block_size
    rows = prompt[: full * block_size].reshape(full, block_size)
    return list(chain_digests(rows, [extra.by_block.get(i) for i in range(full)], None, seed))


def chain_digests(
    tokens: Int32Array, extra: Sequence[tuple[object, ...] | None], parent: bytes | None, seed: bytes
) -> Iterator[bytes]:
    """Digest of each block, chained from ``parent`` on (None: the start of a sequence)."""
    digest = parent or bytes(_DIGEST_BYTES)
    for row, key in zip(tokens.astype("<i4", copy=False), extra, strict=True):
        content = digest + row.tobytes() + (ascii(key).encode() if key is not None else b"")
        digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=seed).digest()
        yield digest
