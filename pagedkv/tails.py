"""The partial last blocks of sequences: who else can see them, and what of them is unused."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_cache import BlockCache
from pagedkv.block_pool import NO_BLOCKS
from pagedkv.block_tables import BlockTables, Int32Array, Int64Array


class SharedTails(NamedTuple):
    """What must happen to the partial tails of a batch before its sequences may grow."""

    copied: Int32Array
    """Which rows of the batch must copy theirs."""
    private: Int32Array
    """Indexed blocks that a holder keeps, so that they leave the index."""
    burdened: Int32Array
    """Blocks that would be private if nothing cached built on them."""
    burdened_rows: Int32Array
    """The holder of each of those that would keep it, among ``copied``."""

    def unburdened(self) -> "SharedTails":
        """The same once nothing builds on the burdened blocks any more."""
        copied = self.copied[~np.isin(self.copied, self.burdened_rows)]
        return SharedTails(copied, np.concatenate([self.private, self.burdened]), NO_BLOCKS, NO_BLOCKS)


NO_TAILS = SharedTails(NO_BLOCKS, NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)


def shared_tails(cache: BlockCache, shared: Int32Array, lens: Int64Array) -> SharedTails:
    """What becomes of partial tails that others can see: ``shared`` [2, n], rows of the batch and tails.

    Only a fork or a truncation makes one. If all holders of a tail grow in this batch and nothing
    cached builds on it, the longest of them by ``lens`` [batch] keeps it, and the last of several: it writes
    behind what the copies for the others need. Changes nothing. Cost: O(1) for each such tail.
    """
    positions, tails = shared.tolist()
    holders: dict[int, list[int]] = {}
    for i, block in zip(positions, tails, strict=True):
        holders.setdefault(block, []).append(i)
    keeping, private, burdened, burdened_rows = set(), [], [], []
    for block, held_by in holders.items():
        if cache.pool.ref_count[block] != len(held_by):
            continue
        keeper = max(reversed(held_by), key=lens.__getitem__)
        indexed = cache.index.indexed[block]
        if indexed and not cache.index.is_leaf(block):
            burdened.append(block)
            burdened_rows.append(keeper)
            continue
        keeping.add(keeper)
        if indexed:
            private.append(block)
    copied = [i for i in positions if i not in keeping] if keeping else shared[0]
    return SharedTails(*map(_as_ids, (copied, private, burdened, burdened_rows)))


def _as_ids(values: Sequence[int] | Int32Array) -> Int32Array:
    return np.array(values, np.int32) if len(values) else NO_BLOCKS


def unused_slots(cache: BlockCache, tables: BlockTables, maybe_shared: Collection[int]) -> int:
    """Slots of active blocks that hold no token of an open sequence; a shared tail counts once.

    ``maybe_shared`` are the rows whose tail others might see; every other partial tail is its row's own.
    Cost: O(max_seqs) in one pass, and O(open sequences' blocks) for each tail that several share.
    """
    unused = -tables.seq_len % tables.block_size
    total = int(unused.sum())
    rows = np.array([row for row in maybe_shared if unused[row]], np.int64)
    if len(rows):
        tails = tables.blocks[rows, tables.seq_len[rows] // tables.block_size]
        alone = (cache.pool.ref_count[tails] == 1) & ~cache.index.indexed[tails]
        rows, tails = rows[~alone], tails[~alone]  # those are counted right already
        total -= int(unused[rows].sum())
        for block in np.unique(tails[~cache.index.indexed[tails]]).tolist():
            total += tables.block_size - _filled_slots(tables, block)
    fenced = cache.fenced_only()
    return total + tables.block_size * int(np.count_nonzero(~cache.index.indexed[fenced]))


def _filled_slots(tables: BlockTables, block: int) -> int:
    """Slots of a private tail that at least one of its holders has reached."""
    rows = tables.all_rows()
    lens = tables.seq_len[rows]
    width = div_ceil(int(lens.max()), tables.block_size)
    holders, columns = np.nonzero(tables.blocks[rows, :width] == block)
    reached = lens[holders] - columns * tables.block_size
    return int(np.minimum(reached, tables.block_size).max())
