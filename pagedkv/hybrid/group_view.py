"""What policies see of the blocks of several groups: one tree, so that every order of eviction is safe."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedkv.block_tables import NULL_BLOCK, Int32Array
from pagedkv.namespace import Namespace
from pagedkv.policies.index_view import IndexView
from pagedkv.prefix_index import ROOT

if TYPE_CHECKING:
    from pagedkv.hybrid.content_tree import ContentTree

_MASK = 2**64 - 1
_FACTOR = 0x9E3779B97F4A7C15


class GroupView:
    """The blocks of a ``ContentTree`` as a `BlockView`.

    ::

        content           1          2          3
        full              5 <------- 6 <------- 9       a block's parent is what must not go before it:
        window            '- 0       '- 10      '- 13   of a full group, the block before; of a window, the
                                                        full block of the same content

    Whoever holds a block holds its parents: of groups without a window every sequence holds all. Several of
    those form one chain, which goes through all of them at each content. Where every group has a window,
    no block needs another, and none has a parent: it is a branch of its own.
    """

    def __init__(self, tree: "ContentTree", num_blocks: int, num_nodes: int) -> None:
        """Look at ``tree``, which has its index, its extra keys and its arrays already."""
        self.num_blocks = num_blocks
        self._tree = tree
        self._contents = IndexView(num_nodes, tree.index, tree.extra_keys)
        self._full = [g for g in tree.let_go_order if tree.groups[g].window is None]  # deepest first
        self._level: npt.NDArray[np.int16] = np.full(len(tree.groups), -1, np.int16)
        self._level[self._full] = np.arange(len(self._full))

    def parent(self, block: int) -> int:
        """The block that must not go before this one, 0 if there is none. Cost: O(1)."""
        tree, node = self._tree, int(self._tree.node_of[block])
        above = int(self._level[tree.group_of[block]]) + 1
        if above == len(self._full):
            node, above = tree.index.parent(node), 0
        return int(tree.block_of[self._full[above], node]) if self._full and node != ROOT else NULL_BLOCK

    def path(self, block: int) -> Int32Array:
        """All blocks from the first to this one, each the parent of the next. Cost: O(length), as arrays."""
        group, node = self._tree.group_of[block], int(self._tree.node_of[block])
        own = np.array([block], np.int32)
        if not self._full:
            return own
        nodes = self._tree.index.path(node)
        path: Int32Array = self._tree.block_of[self._full[::-1]][:, nodes].T.reshape(-1)
        level = int(self._level[group])
        return np.concatenate([path, own]) if level < 0 else path[: len(path) - level]

    def namespace(self, block: int) -> Namespace | None:
        """Whose content it is; None for the default namespace. Cost: as ``path``."""
        return self._contents.namespace(int(self._tree.node_of[block]))

    def row_hashes(self, ids: Int32Array) -> list[int]:
        """64 bits for what each block holds itself, and for its group; equal in any process.

        Of a block without parents they stand for the whole prefix. Cost then: O(length) each, as arrays.
        """
        nodes, groups = self._tree.node_of[ids], self._tree.group_of[ids].tolist()
        if self._full:
            hashes = self._contents.row_hashes(nodes)
        else:
            hashes = [self._prefix_hash(node) for node in nodes.tolist()]
        return [(own + group * _FACTOR) & _MASK for own, group in zip(hashes, groups, strict=True)]

    def branches(self, ids: Int32Array) -> Iterator[Int32Array]:
        """Blocks that one sequence lets go of together, cut where a block is not followed by its parent."""
        nodes, levels = self._tree.node_of[ids], self._level[self._tree.group_of[ids]]
        same, top = nodes[1:] == nodes[:-1], len(self._full) - 1
        follows = np.where(same, levels[1:] == levels[:-1] + 1, (levels[:-1] == top) & (levels[1:] == 0))
        stops = [*(np.flatnonzero(~follows) + 1).tolist(), len(ids)]
        for start, stop in zip([0, *stops], stops, strict=False):
            yield ids[start:stop]

    def _prefix_hash(self, node: int) -> int:
        value = 0
        for own in self._contents.row_hashes(self._tree.index.path(node)):
            value = ((value ^ own) * _FACTOR + 1) & _MASK
            value ^= value >> 32
        return value
