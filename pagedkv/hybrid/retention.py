"""Pins and priorities of a hybrid manager: what a hit of a prefix needs of every group."""

import numpy as np

from pagedkv.block_tables import NULL_BLOCK, Int32Array, SeqId
from pagedkv.errors import SequenceError
from pagedkv.hybrid.rows import Rows
from pagedkv.prefix_index import ROOT
from pagedkv.retention import Retention


class GroupRetention(Retention):
    """Keeps contents of sequences that are open, in all groups: until an unpin, or by priority.

    A pin holds what a hit of its tokens needs: of groups without a window all blocks, of others those that
    the next token sees. While it is there, such a hit is always found. (So it is refused, with
    ``SequenceError``, once a block that such a hit needs has fallen out of a window and was evicted: pin a
    prompt when it is committed, not when the sequence has grown.)

    >>> from pagedkv.hybrid import CacheGroup, HybridKVCacheManager
    >>> groups = CacheGroup("full", (1,)), CacheGroup("local", (0,), window=2)
    >>> manager = HybridKVCacheManager(groups, num_blocks=8, block_size=2)
    >>> _ = manager.open("system", range(5)); manager.commit("system", range(5))
    >>> pin = manager.retention.pin("system"); manager.close("system"); manager.counts
    BlockCounts(free=4, cached=1, active=3)
    >>> manager.retention.unpin(pin); manager.counts
    BlockCounts(free=4, cached=4, active=0)
    """

    def __init__(self, rows: Rows) -> None:
        """Start with no pin on any block of ``rows``."""
        super().__init__(rows.tree, rows.tables[0])
        self._rows = rows

    @property
    def num_pinned(self) -> int:
        """Blocks, of all groups, with at least one pin. Cost: O(pinned blocks)."""
        return int(np.count_nonzero(np.unique(np.concatenate(self.held())) > 0)) if self._held else 0

    def _to_pin(self, seq_id: SeqId, num_tokens: int) -> Int32Array:
        """Nodes, as negative numbers, and blocks, shallowest first."""
        committed = int(self._tables.committed[self._tables.row(seq_id)])
        if num_tokens > committed:
            raise SequenceError(f"{committed} tokens of {seq_id!r} are committed, got 0..{num_tokens}")
        size = self._tables.block_size
        nodes = self._rows.nodes[self._tables.row(seq_id), : num_tokens // size].copy()
        if not len(nodes) or (nodes == ROOT).any():  # without prefix caching there are none
            return nodes[:0]
        hit = self._rows.hits.of(nodes, len(nodes) * size)
        if hit.num_missing:
            seen = self._rows.windows.seen(len(nodes), hit.position)
            groups, columns = np.nonzero(seen & (hit.blocks == NULL_BLOCK))
            raise SequenceError(
                f"cannot pin {len(nodes) * size} tokens of {seq_id!r}: of group "
                f"{self._rows.groups[groups[0]].name!r}, positions {columns[0] * size} to "
                f"{(columns[-1] + 1) * size - 1} fell out of the window and are gone"
            )
        return np.concatenate([self._rows.tree.by_node(hit.blocks), -nodes[::-1]])[::-1]

    def rename(self, name: Int32Array) -> None:
        """Block ``b`` is called ``name[b]`` from now on."""
        self._held = {
            pin: np.where(ids > 0, name[np.maximum(ids, 0)], ids) for pin, ids in self._held.items()
        }

    def _hold(self, ids: Int32Array) -> None:
        self._rows.tree.hold(ids)

    def _blocks(self, seq_id: SeqId, start: int, stop: int | None) -> Int32Array:
        """Blocks of all groups that have the content of any of the tokens ``start..stop``, held or cached."""
        row, columns = self._columns(seq_id, start, stop)
        nodes = self._rows.nodes[row, columns]
        tree = self._rows.tree
        return tree.by_node(tree.block_of[:, nodes[nodes != ROOT]])[::-1]
