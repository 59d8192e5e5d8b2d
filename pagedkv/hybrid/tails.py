"""The partial last blocks of sequences: which of them somebody else can see, in all groups at once."""

from typing import NamedTuple

import numpy as np

from pagedkv.block_pool import NO_BLOCKS
from pagedkv.block_tables import BlockTables, Int32Array, Int64Array
from pagedkv.hybrid.content_tree import ContentTree
from pagedkv.prefix_index import ROOT


class SharedTails(NamedTuple):
    """What must happen to the partial tails of a batch before it may grow, as rows of the batch."""

    copied: Int32Array
    """Who must copy its tail."""
    private: Int32Array
    """Who keeps a tail that has content, as its last holder: the content is withdrawn."""
    burdened: Int32Array
    """Who could keep it, were there no cached content behind it; a part of ``copied``."""

    def unburdened(self) -> "SharedTails":
        """The same once nothing is cached behind the burdened tails any more."""
        copied = self.copied[~np.isin(self.copied, self.burdened)]
        return SharedTails(copied, np.concatenate([self.private, self.burdened]), NO_BLOCKS)


NO_TAILS = SharedTails(NO_BLOCKS, NO_BLOCKS, NO_BLOCKS)


def shared_tails(tree: ContentTree, table: BlockTables, nodes: Int32Array, rows: Int64Array) -> SharedTails:
    """The partial tails of ``rows`` that somebody else can see, through a table or by content.

    No window ever leaves the tail behind and whoever shares it shares it in every group, so one group's
    ``table`` tells for all of them. ``nodes`` [max_seqs, max_blocks_per_seq] are the contents of the rows.
    If all holders of a tail grow in this batch and nothing cached builds on it, the longest of them keeps
    it, and the last of several: it writes behind what the copies for the others need. Not so if several hold
    a content while a fence is open.
    Changes nothing. Cost: O(rows), vectorised, plus O(1) for each such tail.
    """
    lens = table.seq_len[rows]
    partial = lens % table.block_size != 0
    columns = np.where(partial, lens // table.block_size, 0)
    blocks, contents = table.blocks[rows, columns], nodes[rows, columns]
    seen = partial & ((contents != ROOT) | (tree.pool.ref_count[blocks] > 1))
    copied = np.flatnonzero(seen).astype(np.int32)
    by_length = copied[np.argsort(lens[copied], kind="stable")][::-1]
    unique, first, holders = np.unique(blocks[by_length], return_index=True, return_counts=True)
    keeper = by_length[first]
    content = contents[keeper]
    references = np.where(content != ROOT, tree.nodes.ref_count[content], tree.pool.ref_count[unique])
    # a fence takes over what the others let go of, so that then nobody is the last to hold the content
    sole = (references == holders) & ((content == ROOT) | (holders == 1) | (not tree.fences))
    sole &= tree.pool.ref_count[unique] == holders  # a copy that waits holds the block alone
    leaf = (content == ROOT) | (tree.children[content] == 0)
    return SharedTails(
        copied=copied[~np.isin(copied, keeper[sole & leaf])],
        private=keeper[sole & leaf & (content != ROOT)],
        burdened=keeper[sole & ~leaf],
    )
