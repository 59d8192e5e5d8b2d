"""What became findable and what ceased to be: the stream that a router or a second index follows."""

import hashlib
from typing import NamedTuple

from pagedkv.page_table import Int32Array


class BlocksStored(NamedTuple):
    """Consecutive blocks of one branch can be hit from now on.

    ``number`` counts the events of a log from 0 without gaps. ``digests[i]`` stands for the whole prefix
    up to and including block i; ``parent`` is the digest of the block before them, None at the start of a
    sequence. ``tokens`` int32 [n, block_size].
    """

    number: int
    parent: bytes | None
    digests: tuple[bytes, ...]
    tokens: Int32Array


class BlocksRemoved(NamedTuple):
    """The last copy of these contents is gone; children before their parents."""

    number: int
    digests: tuple[bytes, ...]


Event = BlocksStored | BlocksRemoved


class EventLog:
    """Records events until they are taken, and knows the digest of every indexed block.

    A digest is BLAKE2b-256, keyed with ``seed``, of the parent's digest, the block's tokens (little-endian
    int32) and its extra key: the same in every process, and of no use to a tenant with another seed.
    Cost: about 1.5 us per block stored.
    """

    def __init__(self, seed: bytes = b"") -> None:
        """Start an empty log; ``seed`` has at most 64 bytes."""
        self._seed = seed
        self._digest_of: dict[int, bytes] = {}
        self._events: list[Event] = []
        self._next = 0

    def stored(self, ids: Int32Array, tokens: Int32Array, extra: list[object], parent: int) -> None:
        """Note that blocks are indexed behind ``parent`` (the null block for the first)."""
        before = self._digest_of.get(parent)
        digests, digest = [], before
        little = tokens.astype("<i4", copy=False)
        for block, row, key in zip(ids.tolist(), little, extra, strict=True):
            digest = self._digest(digest, row.tobytes(), key)
            self._digest_of[block] = digest
            digests.append(digest)
        self._events.append(BlocksStored(self._number(), before, tuple(digests), tokens.copy()))

    def removed(self, ids: Int32Array) -> None:
        """Note that blocks are no longer indexed."""
        digests = tuple(self._digest_of.pop(block) for block in ids.tolist())
        self._events.append(BlocksRemoved(self._number(), digests))

    def take(self) -> list[Event]:
        """Hand over the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def digests(self) -> set[bytes]:
        """Digests of all indexed blocks."""
        return set(self._digest_of.values())

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _digest(self, parent: bytes | None, tokens: bytes, extra: object) -> bytes:
        content = b"".join((parent or bytes(32), tokens, repr(extra).encode() if extra is not None else b""))
        return hashlib.blake2b(content, digest_size=32, key=self._seed).digest()
