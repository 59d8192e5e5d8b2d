"""What an engine takes its blocks from: the manager, or the hybrid one behind the same words."""

from __future__ import annotations

from typing import Any

from pagedkv.arithmetic import div_ceil
from pagedkv.block_tables import Int32Array, SeqId
from pagedkv.errors import PagedKVError
from pagedkv.manager import KVCacheManager
from pagedkv.opened import Opened
from pagedkv.sim.engine.hybrid_pool import HybridPool

Pool = KVCacheManager | HybridPool
"""Decides which blocks hold which sequence, and counts them."""


def plain(pool: Pool, what: str) -> KVCacheManager:
    """The plain manager; ``PagedKVError``, which says that there is no ``what``, if it is the hybrid one."""
    if isinstance(pool, HybridPool):
        raise PagedKVError(f"a hybrid pool has no {what}")
    return pool


def tier_of(pool: Pool, num_blocks: int, max_seqs: int) -> Pool:
    """An empty pool of blocks elsewhere, for prefixes of what this one holds."""
    if isinstance(pool, HybridPool):
        return HybridPool(pool.spec, num_blocks, max_seqs=max_seqs, max_seq_len=pool.max_seq_len)
    return KVCacheManager(num_blocks, pool.block_size, max_seqs=max_seqs)


def open_loaded(pool: Pool, seq_id: SeqId, tokens: Int32Array, loaded: int, **options: Any) -> Opened | None:
    """Open a sequence whose first ``loaded`` tokens have K and V elsewhere: with room for what to bring.

    ``options`` as of ``KVCacheManager.open``, which has room for the whole prompt in any case.
    """
    if isinstance(pool, HybridPool):
        return pool.open(seq_id, tokens, loaded_tokens=loaded, **options)
    return pool.open(seq_id, tokens, **options)


def blocks_between(pool: Pool, seq_id: SeqId, start: int, stop: int) -> int:
    """Blocks that an open sequence holds for its tokens from ``start`` to before ``stop``."""
    if isinstance(pool, HybridPool):
        return pool.num_held_blocks(seq_id, start, stop)
    return div_ceil(stop, pool.block_size) - start // pool.block_size


def groups_of(pool: Pool) -> int:
    """In how many groups of layers each token takes a slot."""
    return pool.num_groups if isinstance(pool, HybridPool) else 1
