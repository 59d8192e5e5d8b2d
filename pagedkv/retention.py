"""What stays cached longer than its turn: pins, and priorities."""

from typing import Protocol

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_pool import BlockPool
from pagedkv.block_tables import BlockTables, Int32Array, SeqId
from pagedkv.errors import PagedKVError, SequenceError, require_count
from pagedkv.policies.policy import EvictionPolicy
from pagedkv.prefix_index import PrefixIndex


class Keeper(Protocol):
    """What knows of blocks and their contents: a ``BlockCache``, or what stands in for one."""

    pool: BlockPool
    index: PrefixIndex
    policy: EvictionPolicy

    def release(self, ids: Int32Array) -> None:
        """Drop one reference each, deepest block first."""


class Retention:
    """Keeps full committed blocks of sequences that are open: until an unpin, or by priority.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(num_blocks=2, block_size=4)
    >>> _ = manager.open("system", [1, 2, 3, 4, 5]); manager.commit("system", [1, 2, 3, 4, 5])
    >>> pin = manager.retention.pin("system"); manager.close("system"); manager.counts
    BlockCounts(free=1, cached=0, active=1)
    >>> manager.retention.unpin(pin); manager.counts
    BlockCounts(free=1, cached=1, active=0)
    """

    def __init__(self, cache: Keeper, tables: BlockTables) -> None:
        """Start with no pin on any of ``cache``'s blocks."""
        self._cache = cache
        self._tables = tables
        self._held: dict[int, Int32Array] = {}
        self._next = 0

    def pin(self, seq_id: SeqId, num_tokens: int | None = None) -> int:
        """Keep the full blocks of the first ``num_tokens`` committed tokens (default: all) until ``unpin``.

        They count as active, survive ``close``, are never evicted, and can be hit. A block may have several
        pins, each is one reference on it. Returns the pin's number, which is never used again. Raises
        ``SequenceError`` if there is no such full block. Cost: O(blocks), vectorised.
        """
        committed = int(self._tables.committed[self._tables.row(seq_id)])
        wanted = committed if num_tokens is None else require_count("num_tokens", num_tokens, 0)
        blocks = self._to_pin(seq_id, wanted)
        if not len(blocks):
            raise SequenceError(
                f"nothing to pin: {committed} tokens of {seq_id!r} are committed, "
                f"{wanted} of them asked for, in blocks of {self._tables.block_size}"
            )
        self._hold(blocks)
        number, self._next = self._next, self._next + 1
        self._held[number] = blocks
        return number

    def unpin(self, pin: int) -> None:
        """Undo one ``pin``. Raises ``PagedKVError`` if it is undone already. Cost: O(blocks), vectorised."""
        if not isinstance(pin, (int, np.integer)) or isinstance(pin, bool) or pin not in self._held:
            raise PagedKVError(f"there is no pin {pin!r} ({len(self._held)} are held)")
        self._cache.release(self._held.pop(pin)[::-1])

    def set_priority(
        self,
        seq_id: SeqId,
        priority: int,
        *,
        start: int = 0,
        stop: int | None = None,
        ttl: float | None = None,
    ) -> int:
        """Set the priority, 0..100, of full committed blocks with tokens ``start..stop`` (default: all).

        Needs ``policy="priority"`` or another policy that knows priorities. With ``ttl``, the priority holds
        that long by the policy's clock. It belongs to the content, whoever uses it, and the last word counts.
        Returns how many blocks that are. Cost: O(log n) per block.
        """
        blocks = self._blocks(seq_id, start, stop)
        self._cache.policy.retain(blocks, priority, ttl)
        return len(blocks)

    @property
    def num_pinned(self) -> int:
        """Blocks with at least one pin. Cost: O(pinned blocks)."""
        return len(np.unique(np.concatenate(self.held()))) if self._held else 0

    # -- the manager's side

    def held(self) -> list[Int32Array]:
        """The blocks of each pin, shallowest first."""
        return list(self._held.values())

    def rename(self, name: Int32Array) -> None:
        """Block ``b`` is called ``name[b]`` from now on."""
        self._held = {pin: name[blocks] for pin, blocks in self._held.items()}

    def _to_pin(self, seq_id: SeqId, num_tokens: int) -> Int32Array:
        """What a pin holds, shallowest first; nothing if there is no full block."""
        return self._blocks(seq_id, 0, num_tokens)[: num_tokens // self._tables.block_size]

    def _hold(self, ids: Int32Array) -> None:
        self._cache.pool.acquire(0, shared=ids)

    def _blocks(self, seq_id: SeqId, start: int, stop: int | None) -> Int32Array:
        """Full committed blocks that can be found by content and hold any of the tokens ``start..stop``."""
        row, columns = self._columns(seq_id, start, stop)
        blocks = self._tables.blocks[row, columns].copy()
        # indexed are all of them or, without prefix caching, none
        return blocks if self._cache.index.indexed[blocks].all() else blocks[:0]

    def _columns(self, seq_id: SeqId, start: int, stop: int | None) -> tuple[int, slice]:
        """The row, and its full committed columns before any gap that hold any of these tokens."""
        row, size = self._tables.row(seq_id), self._tables.block_size
        committed = int(self._tables.committed[row])
        stop = committed if stop is None else require_count("stop", stop, 0)
        if not require_count("start", start, 0) <= stop <= committed:
            raise SequenceError(f"{committed} tokens of {seq_id!r} are committed, got {start}..{stop}")
        last = min(committed // size, div_ceil(stop, size)) if start < stop else 0
        if row in self._tables.dropped:
            last = min(last, self._tables.dropped[row].num_whole)
        return row, slice(start // size, last)
