"""Opening a sequence again as it was, from what the groups still have and new blocks for the rest."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.block_tables import NULL_BLOCK, Int32Array, SeqId
from pagedkv.content import SequenceExtra
from pagedkv.hybrid.rows import Rows
from pagedkv.prefix_index import ROOT
from pagedkv.swap import Swapped


class Found(NamedTuple):
    """What is left of a sequence, by group and block: [groups, blocks of its length]."""

    blocks: Int32Array
    """Blocks that have its content; NULL_BLOCK where it needs none, or there is none."""
    missing: npt.NDArray[np.bool_]
    """Which of the blocks that it needs are not there."""
    nodes: Int32Array
    """Its contents that are known, from the first on."""


def find(rows: Rows, tokens: Int32Array, extra: SequenceExtra, held: npt.NDArray[np.bool_]) -> Found:
    """What is left of a sequence that had the blocks ``held`` and committed ``tokens``. Changes nothing.

    Whether a hit could use it does not matter: what is missing is going to be filled.
    """
    full = len(tokens) // rows.block_size
    content = tokens[: full * rows.block_size].reshape(full, rows.block_size)
    nodes = rows.tree.index.match(content, extra.ids(rows.tree.extra_keys, 0, full))
    blocks: Int32Array = np.zeros(held.shape, np.int32)
    blocks[:, : len(nodes)] = np.where(held[:, : len(nodes)], rows.tree.block_of[:, nodes], NULL_BLOCK)
    return Found(blocks, held & (blocks == NULL_BLOCK), nodes)


def restore(rows: Rows, seq_id: SeqId, extra: SequenceExtra, swapped: Swapped, found: Found) -> Int32Array:
    """Open and commit a sequence with what was ``found``; returns new blocks, group by group, for the rest.

    If that fails, nothing is left of it but what was evicted for it.
    """
    tree, known = rows.tree, len(found.nodes)
    row = rows.new_row(seq_id)
    try:
        rows.set_extra(row, extra)
        hit = found.blocks[found.blocks != NULL_BLOCK]
        new = tree.acquire(int(np.count_nonzero(found.missing)), hit, found.nodes)
    except BaseException:
        rows.forget_row(seq_id, row)
        raise
    blocks = found.blocks + rows.share_out(new, found.missing)
    rows.blocks[:, row, : blocks.shape[1]] = blocks
    rows.nodes[row, :known] = found.nodes
    rows.seq_len[row], rows.committed[row] = len(swapped.tokens), swapped.num_committed
    rows.start[:, row] = swapped.starts
    full, rest = divmod(swapped.num_committed, rows.block_size)
    rows.tail_tokens[row, :rest] = swapped.tokens[swapped.num_committed - rest : swapped.num_committed]
    try:
        if known < full and rows.keeps_content:
            content = swapped.tokens[known * rows.block_size : full * rows.block_size]
            ids = rows.extra(row).ids(tree.extra_keys, known, full - known)
            parent = int(found.nodes[-1]) if known else ROOT
            rows.nodes[row, known:full] = tree.grow(parent, content.reshape(-1, rows.block_size), ids)
        if rows.keeps_content:
            tree.adopt(blocks[:, :full], rows.nodes[row, :full])
    except BaseException:
        rows.remove(seq_id)
        raise
    tree.note_hit(found.blocks)
    return new
