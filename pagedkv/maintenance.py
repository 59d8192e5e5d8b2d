"""What is done to a whole pool while it is in use: forget all, move together, grow, shrink."""

from typing import Protocol

import numpy as np

from pagedkv.block_ids import require_num_blocks
from pagedkv.block_pool import FREE, BlockPool
from pagedkv.block_tables import Int32Array
from pagedkv.copies import BlockCopies, PendingCopies
from pagedkv.fences import Fences


class Contents(Protocol):
    """What knows of blocks and their contents: a ``BlockCache``, or what stands in for one."""

    pool: BlockPool
    fences: Fences
    copies: PendingCopies

    def clear(self) -> None:
        """Forget all content; nothing is held."""

    def shed(self, count: int) -> None:
        """Evict so many cached blocks."""

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Give blocks with content the ids of free ones."""

    def resize(self, num_blocks: int) -> None:
        """Go on with ids ``1..num_blocks``; those that go are free."""


class Holder(Protocol):
    """Who names blocks by their ids."""

    def rename(self, name: Int32Array) -> None:
        """Block ``b`` is called ``name[b]`` from now on."""


class Maintenance:
    """Reset, defragment and resize; each is refused as "not now" while work under way may touch the blocks.

    Moves come as copies: run them before anything else is read or written, the block tables have changed.
    They overlap nowhere: no block is both read and written.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(num_blocks=8, block_size=4)
    >>> for name in "abc":
    ...     _ = manager.open(name, [1, 2, 3])
    >>> manager.close("a"); manager.maintenance.defragment()
    BlockCopies(src=array([3], dtype=int32), dst=array([1], dtype=int32))
    >>> manager.tables.block_ids("c").tolist()
    [1]
    >>> manager.maintenance.resize(2)
    BlockCopies(src=array([], dtype=int32), dst=array([], dtype=int32))
    >>> manager.counts
    BlockCounts(free=0, cached=0, active=2)
    """

    def __init__(self, cache: Contents, tables: Holder, retention: Holder) -> None:
        """Look after the blocks of ``cache``, which ``tables`` and ``retention`` hold."""
        self._cache = cache
        self._tables = tables
        self._retention = retention

    def reset(self) -> bool:
        """Forget all cached content: every block is free then. False while any block is held.

        For one set of weights or one tenant, a new `Namespace` does the same at no cost: what nobody asks
        for any more is evicted first. Cost: O(cached blocks).
        """
        if self._cache.pool.num_active:
            return False
        self._cache.clear()
        return True

    def defragment(self) -> BlockCopies | None:
        """Move blocks so that those with content have the lowest ids; returns the moves.

        None while a fence is open or copies are pending. Cost: O(num_blocks), and O(moved) for the index.
        """
        if self._busy():
            return None
        pool = self._cache.pool
        return self._move_below(pool.num_blocks - pool.num_free)

    def resize(self, num_blocks: int) -> BlockCopies | None:
        """Go on with ids ``1..num_blocks``; returns the moves to make *before* the storage shrinks.

        To shrink, cached content goes as the policy says, and what is left moves to lower ids. None while
        more blocks than that are held, a fence is open or copies are pending. What a sequence can hold at
        most, and what the page table reserves for it, stays as it was. Raises ``PagedKVError`` unless
        ``num_blocks`` is at least 1. Cost: O(num_blocks), and O(moved) for the index.
        """
        num_blocks = require_num_blocks("num_blocks", num_blocks)
        pool = self._cache.pool
        if self._busy() or pool.num_active > num_blocks:
            return None
        self._cache.shed(max(0, pool.num_active + pool.num_cached - num_blocks))
        moves = self._move_below(num_blocks)
        try:
            self._cache.resize(num_blocks)
        except BaseException:
            self._rename(moves.dst, moves.src)
            raise
        return moves

    def _busy(self) -> bool:
        return bool(self._cache.fences) or len(self._cache.copies) > 0

    def _move_below(self, limit: int) -> BlockCopies:
        """Give all blocks with content ids up to ``limit``: the highest ids go to the lowest free ones."""
        state = self._cache.pool.state
        src = (np.flatnonzero(state[limit + 1 :] != FREE) + limit + 1).astype(np.int32)
        dst = (np.flatnonzero(state[1 : limit + 1] == FREE)[: len(src)] + 1).astype(np.int32)
        self._rename(src, dst)
        return BlockCopies(src, dst)

    def _rename(self, old: Int32Array, new: Int32Array) -> None:
        """Give blocks with content other ids, wherever they are named."""
        if not len(old):
            return
        name: Int32Array = np.arange(len(self._cache.pool.state), dtype=np.int32)
        name[old] = new
        self._cache.rename(old, new)
        self._tables.rename(name)
        self._retention.rename(name)
