"""What a prompt finds: the contents that are known, and the blocks of them that its sequence will hold."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.block_pool import NO_BLOCKS
from pagedkv.block_tables import NULL_BLOCK, Int32Array
from pagedkv.content import SequenceExtra
from pagedkv.hybrid.content_tree import ContentTree
from pagedkv.hybrid.group import longest_hit
from pagedkv.hybrid.windows import Windows
from pagedkv.prefix_index import ROOT


class Hit(NamedTuple):
    """The beginning of a sequence that is there already."""

    nodes: Int32Array
    """Its contents, one per block."""
    blocks: Int32Array
    """[groups, len(nodes)]: the blocks that it holds, NULL_BLOCK where it needs none or there is none."""
    held: Int32Array
    """The same in one row, without NULL_BLOCK."""
    position: int
    """A block boundary: what the token there does not see is not needed. Where the hit ends, or behind."""
    num_missing: int
    """How many of the blocks that are needed are not there."""


class Plan(NamedTuple):
    """How a sequence is opened."""

    hit: Hit
    fresh: npt.NDArray[np.bool_]
    """[groups, blocks behind the hit]: where it takes a new block."""
    num_tokens: int
    """Its length at first."""
    num_cached_tokens: int
    source: Int32Array = NO_BLOCKS
    """[groups]: the blocks whose copies are its first new ones, if the hit ends inside them."""


class Hits:
    """Finds in a ``ContentTree`` what every group can serve."""

    def __init__(self, tree: ContentTree, windows: Windows) -> None:
        """Look for contents in ``tree``, which the groups see through ``windows``."""
        self._tree = tree
        self._windows = windows

    def match(self, prompt: Int32Array, extra: SequenceExtra, limit: int, loaded: int = 0) -> Hit:
        """The longest prefix of at most ``limit`` tokens that every group can serve.

        If the first ``loaded`` tokens are more than that, the prefix up to the first block that the token
        behind those needs and that is not there. Cost: O(n), and O(groups x n) if a group lacks a block.
        """
        size, tree = self._windows.block_size, self._tree
        full, position = max(0, limit) // size, loaded // size * size
        tokens = prompt[: full * size].reshape(full, size)
        nodes = tree.index.match(tokens, extra.ids(tree.extra_keys, 0, full)) if full else NO_BLOCKS
        hit = self.of(nodes, len(nodes) * size)
        if hit.num_missing:
            depth = longest_hit(self._windows.groups, tree.block_of[:, nodes] != NULL_BLOCK, size)
            hit = self.of(nodes[:depth], depth * size)
        return hit if position <= hit.position else self._before(nodes[: position // size], position)

    def of(self, nodes: Int32Array, position: int) -> Hit:
        """What a sequence holds of ``nodes`` when it goes on from ``position``."""
        n, needed = len(nodes), 0
        blocks: Int32Array = np.zeros((len(self._windows.groups), n), np.int32)
        firsts, sinks = self._windows.first_blocks(position), self._windows.sink_blocks.tolist()
        for row, block_of, first, last in zip(blocks, self._tree.block_of, firsts, sinks, strict=True):
            first, last = min(first, n), min(first, last, n)
            row[first:] = block_of.take(nodes[first:])
            if last:
                row[:last] = block_of.take(nodes[:last])
            needed += n - first + last
        held = blocks[blocks != NULL_BLOCK]
        return Hit(nodes, blocks, held, position, needed - len(held))

    def fresh(self, hit: Hit, num_tokens: int) -> npt.NDArray[np.bool_]:
        """Where a sequence of so many tokens takes new blocks behind a hit: [groups, blocks]."""
        at, total = len(hit.nodes), div_ceil(num_tokens, self._windows.block_size)
        if hit.position > at * self._windows.block_size:
            return self._windows.seen(total, hit.position)[:, at:]
        return np.ones((len(hit.blocks), total - at), np.bool_)

    def tail(self, prompt: Int32Array, extra: SequenceExtra, hit: Hit, limit: int) -> tuple[Int32Array, int]:
        """Blocks [groups] of the content behind a hit that shares the most tokens, and how many.

        None, and 0, unless every group has a block of it.
        """
        nodes, size = hit.nodes, self._windows.block_size
        start = len(nodes) * size
        tokens = prompt[start : min(limit, start + size)]
        if not len(tokens):
            return NO_BLOCKS, 0
        extra_id = int(extra.ids(self._tree.extra_keys, len(nodes), 1)[0])
        node, count = self._tree.index.best_child(tokens, extra_id, int(nodes[-1]) if len(nodes) else ROOT)
        blocks = self._tree.block_of[:, node]
        return (blocks, count) if blocks.all() else (NO_BLOCKS, 0)

    def _before(self, nodes: Int32Array, position: int) -> Hit:
        """What is there of ``nodes`` up to the first block that is not, seen from a ``position`` behind."""
        missing = self._windows.seen(len(nodes), position) & (self._tree.block_of[:, nodes] == NULL_BLOCK)
        lacking = np.flatnonzero(missing.any(axis=0))
        return self.of(nodes[: lacking[0]] if len(lacking) else nodes, position)
