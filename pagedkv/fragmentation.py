"""Where a pool's memory goes besides tokens that somebody needs."""

from typing import NamedTuple

import numpy as np

from pagedkv.block_pool import CACHED
from pagedkv.manager import KVCacheManager
from pagedkv.prefix_index import ROOT


class Fragmentation(NamedTuple):
    """Four ways in which memory is held without need, as slots of one token or as blocks.

    tail_slots: slots of active blocks that hold no token yet, mostly in last blocks. Smaller blocks help.
    duplicate_slots: slots of last blocks whose committed tokens a cached block behind the same prefix holds
        too. ``partial_hits`` copy them instead of computing them, but nothing shares them.
    unreachable_blocks: cached blocks that no prompt can hit. 0: children are evicted before their parents.
    pinned_blocks: blocks that nothing but pins holds.
    """

    tail_slots: int
    duplicate_slots: int
    unreachable_blocks: int
    pinned_blocks: int


def fragmentation(manager: KVCacheManager) -> Fragmentation:
    """Look at a manager between two of its calls.

    Cost: O(pool), vectorised, and O(1) per open sequence and branch of the prefix tree: for a scrape, not
    for every step.

    >>> manager = KVCacheManager(num_blocks=8, block_size=4)
    >>> _ = manager.open("a", [1, 2, 3, 4, 5, 6, 7, 8]); manager.commit("a", [1, 2, 3, 4, 5, 6, 7, 8])
    >>> _ = manager.open("b", [1, 2, 3, 4, 5, 6, 9]); manager.commit("b", [5, 6, 9])
    >>> fragmentation(manager)
    Fragmentation(tail_slots=1, duplicate_slots=2, unreachable_blocks=0, pinned_blocks=0)
    """
    return Fragmentation(
        manager.counts.active * manager.block_size - manager.used_slots,
        sum(_duplicates(manager, row) for row in manager._tables.all_rows().tolist()),
        _unreachable(manager),
        _only_pinned(manager),
    )


def _duplicates(manager: KVCacheManager, row: int) -> int:
    """Committed tokens in the last block of a row that an indexed block holds too."""
    index, table = manager._cache.index, manager._tables.blocks[row]
    full, count = divmod(int(manager._tables.committed[row]), manager.block_size)
    if not manager.prefix_caching or not count or index.indexed[table[full]]:
        return 0
    extra = manager._seqs.extra(row).ids(manager._cache.extra_keys, full, 1)
    parent = int(table[full - 1]) if full else ROOT
    return index.best_child(index.tokens[table[full], :count].copy(), int(extra[0]), parent)[1]


def _unreachable(manager: KVCacheManager) -> int:
    cached = np.flatnonzero(manager._cache.pool.state == CACHED)
    found = [ids for _, ids in manager._cache.index.chains()]
    return len(np.setdiff1d(cached, np.concatenate(found) if found else cached[:0]))


def _only_pinned(manager: KVCacheManager) -> int:
    held = manager.retention.held()
    if not held:
        return 0
    ids, pins = np.unique(np.concatenate(held), return_counts=True)
    return int(np.count_nonzero(manager._cache.pool.ref_count[ids] == pins))
