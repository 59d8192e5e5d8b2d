"""The block pool: ids, ref counts and states, and nothing else."""

from typing import TYPE_CHECKING

from pagedkv import core
from pagedkv.block_ids import NO_BLOCKS
from pagedkv.numpy_block_pool import ACTIVE, CACHED, FREE, BlockCounts, NumpyBlockPool

if TYPE_CHECKING or core.reason() is not None:
    _Engine = NumpyBlockPool
else:
    from pagedkv.native_block_pool import NativeBlockPool as _Engine

__all__ = ["ACTIVE", "CACHED", "FREE", "NO_BLOCKS", "BlockCounts", "BlockPool"]


class BlockPool(_Engine):
    """Hands out block ids ``1..num_blocks`` and counts the references on them.

    ::

                 acquire (new)              release, ref_count 0, retain
        free  ----------------->  active  ------------------------------>  cached
          ^                        |  ^         acquire (shared)             |
          '--- release, ref_count 0'  '--------------------------------------|
          '---------------------------------- evict -------------------------'

    Every call takes whole arrays of ids and checks all of them in O(1) per id before it changes
    anything: an id that is out of range, named twice or in the wrong state raises ``BlockError`` and
    leaves the pool as it was. Ids are reused last-in first-out, so the same calls give the same ids.

    >>> import numpy as np
    >>> pool = BlockPool(4)
    >>> ids = pool.acquire(3); ids.tolist()
    [1, 2, 3]
    >>> pool.release(ids[:2], retain=np.array([True, False])).tolist()
    [1]
    >>> pool.counts
    BlockCounts(free=2, cached=1, active=1)
    >>> pool.release(ids[1:2], retain=np.array([False]))
    Traceback (most recent call last):
    pagedkv.errors.BlockError: cannot release block 2: it is free, must be active
    """
