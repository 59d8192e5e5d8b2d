"""What a step does to the rows of a batch, in one pass: compiled or, here, in numpy.

``blocks`` [max_seqs, max_blocks_per_seq] int32, ``seq_len`` and ``committed`` [max_seqs] int64 are those of
`pagedkv.block_tables.BlockTables`; ``rows`` [batch] int64 are distinct and open. Cost: O(batch + new blocks).
"""

from typing import TYPE_CHECKING

import numpy as np

from pagedkv import core
from pagedkv.arithmetic import div_ceil
from pagedkv.block_pool import BlockPool
from pagedkv.block_tables import Int32Array, Int64Array
from pagedkv.prefix_index import PrefixIndex

__all__ = ["grow_rows", "plan_growth", "store_tokens"]


def plan_growth(
    pool: BlockPool,
    index: PrefixIndex,
    blocks: Int32Array,
    seq_len: Int64Array,
    rows: Int64Array,
    num_tokens: int,
    shared: Int32Array,
) -> tuple[int, int, int]:
    """How long the longest row is with ``num_tokens`` more, how many new blocks all need, and how many of
    their partial tails others can see.

    Writes which rows of the batch these are, and the tails, to the front of ``shared`` int32 [2, batch];
    does not look for them if that is [2, 0]. Changes nothing else.
    """
    lens, size = seq_len[rows], index.tokens.shape[1]
    longest = int((lens + num_tokens).max(initial=0))
    num_new = int((div_ceil(lens + num_tokens, size) - div_ceil(lens, size)).sum())
    if not shared.size:
        return longest, num_new, 0
    partial = lens % size != 0
    tails = blocks[rows, np.where(partial, lens // size, 0)]
    found = np.flatnonzero(partial & (index.indexed[tails] | (pool.ref_count[tails] > 1)))
    shared[:, : len(found)] = found, tails[found]
    return longest, num_new, len(found)


def grow_rows(
    blocks: Int32Array,
    seq_len: Int64Array,
    rows: Int64Array,
    block_size: int,
    num_tokens: int,
    fresh: Int32Array,
) -> None:
    """Let each row be ``num_tokens`` longer; the ``fresh`` blocks are what all need, row after row."""
    lens = seq_len[rows]
    have = div_ceil(lens, block_size)
    grow = div_ceil(lens + num_tokens, block_size) - have
    columns = np.repeat(have - np.cumsum(grow) + grow, grow) + np.arange(len(fresh))
    blocks[np.repeat(rows, grow), columns] = fresh
    seq_len[rows] += num_tokens


def store_tokens(
    index: PrefixIndex,
    blocks: Int32Array,
    seq_len: Int64Array,
    committed: Int64Array,
    rows: Int64Array,
    tokens: Int32Array,
    full: Int32Array,
) -> int:
    """Store the next committed token of each row in its block: ``tokens`` int32 [batch].

    Writes which rows of the batch have a full block now to the front of ``full`` int32 [batch], and returns
    how many; -1, with nothing changed, if a row has no uncommitted token left.
    """
    start, size = committed[rows], index.tokens.shape[1]
    if (start >= seq_len[rows]).any():
        return -1
    offset = start % size
    index.tokens[blocks[rows, start // size], offset] = tokens
    found = np.flatnonzero(offset == size - 1)
    full[: len(found)] = found
    return len(found)


if not TYPE_CHECKING and core.reason() is None:
    from pagedkv._core import grow_rows, plan_growth, store_tokens
