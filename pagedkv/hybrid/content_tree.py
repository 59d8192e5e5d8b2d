"""Contents and the blocks that hold them: one pool of blocks, one tree of contents, for all groups."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt

from pagedkv.block_pool import ACTIVE, CACHED, FREE, NO_BLOCKS, BlockPool
from pagedkv.copies import PendingCopies
from pagedkv.errors import check
from pagedkv.hybrid.group import CacheGroup, longest_hit
from pagedkv.namespace import ExtraKeys
from pagedkv.page_table import NULL_BLOCK, Int32Array
from pagedkv.policies.lru import LRU
from pagedkv.policies.policy import BlockView
from pagedkv.prefix_index import ROOT, PrefixIndex


class ContentTree:
    """What the hybrid manager knows of contents and blocks, whichever sequence holds them.

    A *node* is the content of one block of tokens at its place in the tree of prefixes. Each group has a
    block for it or has none::

        node            1    2    3    4        one path: node 2 continues node 1, and so on
        full            5    6    9   12
        window          0    0   10   13        what fell out of the window may be gone

    A node is known while a sequence holds it, a group has a block for it, or a known node continues it.

    Blocks go one by one, least recently used first, whatever their group: who lets go of several at once
    names the deepest first, and of one node those of window groups first. So a block that deeper blocks
    need is younger than these, and what is evicted is exactly what is short.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], num_blocks: int, block_size: int, num_nodes: int
    ) -> None:
        """Make ``num_blocks`` free blocks, and room for ``num_nodes`` contents."""
        self.groups = groups
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.nodes = BlockPool(num_nodes)
        self.index = PrefixIndex(num_nodes, block_size)
        self.extra_keys = ExtraKeys()
        self.copies = PendingCopies()
        self.block_of: Int32Array = np.zeros((len(groups), num_nodes + 1), np.int32)
        self.node_of: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self.group_of: npt.NDArray[np.int16] = np.zeros(num_blocks + 1, np.int16)
        self.children: Int32Array = np.zeros(num_nodes + 1, np.int32)
        self.order = LRU()
        # the order asks a view for nothing but its size
        self.order.bind(cast(BlockView, SimpleNamespace(num_blocks=num_blocks)))
        self.num_evicted = 0
        self.num_copied = 0
        self._windows_first = sorted(range(len(groups)), key=lambda g: groups[g].window is None)

    # -- taking and giving up

    def match(self, tokens: Int32Array, extra: Int32Array) -> Int32Array:
        """Nodes of the longest prefix that every group has: ``tokens`` [n, block_size], ``extra`` [n]."""
        nodes = self.index.match(tokens, extra)
        return nodes[: longest_hit(self.groups, self.block_of[:, nodes] != NULL_BLOCK, self.block_size)]

    def acquire(
        self,
        num_new: int,
        shared: Int32Array = NO_BLOCKS,
        nodes: Int32Array = NO_BLOCKS,
        doomed: Int32Array = NO_BLOCKS,
    ) -> Int32Array:
        """Hold ``nodes`` and the blocks ``shared``, take ``num_new`` new blocks, evict exactly the shortfall.

        ``doomed`` cached blocks are evicted in any case, and before any other.
        """
        victims = self._victims(max(0, num_new - self.pool.num_free), shared, doomed)
        if len(nodes):
            self.nodes.acquire(0, shared=nodes)
        try:
            new = self.pool.acquire(num_new, shared, victims)
        except BaseException:
            self.nodes.release(nodes, np.ones(len(nodes), np.bool_))
            raise
        if len(shared):
            self.order.discard(shared)
        rest = doomed[len(victims) :]
        if len(rest):
            self.pool.evict(rest)
            victims = doomed
        if len(victims):
            self._forget(victims)
        return new

    def _victims(self, count: int, shared: Int32Array, doomed: Int32Array) -> Int32Array:
        if count <= len(doomed):
            return doomed[:count]
        if not len(doomed):
            return self.order.first(count, keep=shared)
        others = self.order.first(count - len(doomed), keep=np.concatenate([shared, doomed]))
        return np.concatenate([doomed, others])

    def release(self, blocks: Int32Array, nodes: Int32Array = NO_BLOCKS) -> None:
        """Drop one reference on each: ``blocks`` as ``by_node`` orders them, ``nodes`` deepest first."""
        if len(blocks):
            self.order.make_room(len(blocks))
            self.order.push(self.pool.release(blocks, self.node_of[blocks] > 0))
            if len(self.copies):
                self.copies.drop(blocks[self.pool.state[blocks] == FREE])
        if len(nodes):
            self.nodes.release(nodes, np.ones(len(nodes), np.bool_))
            self._prune(nodes[:1].tolist())

    def by_node(self, blocks: Int32Array) -> Int32Array:
        """Blocks [groups, n] in the order in which they are let go of together, without the null block.

        Last column first; within one column those of window groups first.
        """
        flat: Int32Array = blocks[self._windows_first, ::-1].T.reshape(-1)
        held: Int32Array = flat[flat != NULL_BLOCK]
        return held

    # -- contents

    def grow(self, parent: int, tokens: Int32Array, extra: Int32Array) -> Int32Array:
        """Hold the nodes that continue ``parent`` with ``tokens`` [n, block_size]; new ones where needed."""
        known = self.index.match(tokens, extra, parent)
        if len(known):
            self.nodes.acquire(0, shared=known)
        at = len(known)
        if at == len(tokens):
            return known
        while self.nodes.num_free < len(tokens) - at:
            self._evict_oldest()
        new = self.nodes.acquire(len(tokens) - at)
        before = int(known[-1]) if at else parent
        self.index.tokens[new] = tokens[at:]
        self.index.insert(new, extra[at:], before)
        self.children[before] += 1
        self.children[new[:-1]] = 1
        for extra_id in extra[at:][extra[at:] > 0].tolist():
            self.extra_keys.share(extra_id)
        return np.concatenate([known, new])

    def adopt(self, own: Int32Array, nodes: Int32Array) -> Int32Array:
        """Blocks [groups, n] to hold for ``nodes``: ``own`` where a group has none, else that one.

        The caller gives up its own blocks where it gets others.
        """
        theirs: Int32Array = self.block_of[:, nodes]
        bare = theirs == NULL_BLOCK
        held: Int32Array = np.where(bare, own, theirs)
        self.block_of[:, nodes] = held
        self.node_of[held] = nodes
        taken = theirs[~bare]
        if len(taken):
            self.pool.acquire(0, shared=taken)
            self.order.discard(taken)
        return held

    def withdraw(self, node: int) -> None:
        """Let a leaf lose its content: its only holder is about to write something else into its blocks."""
        blocks = self.block_of[:, node]
        self.node_of[blocks[blocks != NULL_BLOCK]] = 0
        self.block_of[:, node] = NULL_BLOCK
        self.nodes.release(np.array([node], np.int32), np.zeros(1, np.bool_))
        self._remove(np.array([node], np.int32), self.index.parent(node))

    def behind(self, nodes: Int32Array) -> Int32Array:
        """All cached blocks of contents that continue ``nodes``, which nobody else holds, children first."""
        return self.by_node(self.block_of[:, self.index.behind(nodes)[::-1]])

    # -- letting contents go

    def _evict_oldest(self) -> None:
        victim = self.order.first(1, keep=NO_BLOCKS)
        check(len(victim) > 0, "contents are short, but no block is cached")
        self.pool.evict(victim)
        self._forget(victim)

    def _forget(self, blocks: Int32Array) -> None:
        """Blocks have lost their content, and contents without blocks go with them."""
        nodes = self.node_of[blocks]
        self.block_of[self.group_of[blocks], nodes] = NULL_BLOCK
        self.node_of[blocks] = 0
        self.order.discard(blocks)
        self.num_evicted += len(blocks)
        self._prune(dict.fromkeys(nodes.tolist()))

    def _prune(self, nodes: Iterable[int]) -> None:
        """Forget those of ``nodes`` that nothing needs, and whatever before them nothing needs then."""
        for node in nodes:
            if self.nodes.state[node] != CACHED or self.children[node] or self.block_of[:, node].any():
                continue
            gone, parent = np.array([node], np.int32), self.index.parent(node)
            if parent != ROOT and not self._needed(np.array([parent])).any():
                path = self.index.path(node)
                needed = np.flatnonzero(self._needed(path[:-1]))
                stop = int(needed[-1]) + 1 if len(needed) else 0
                gone, parent = path[stop:][::-1].copy(), int(path[stop - 1]) if stop else ROOT
            self.nodes.evict(gone)
            self._remove(gone, parent)

    def _needed(self, nodes: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which nodes are still needed if one child of each goes."""
        needed: npt.NDArray[np.bool_] = (
            (self.children[nodes] > 1)
            | (self.nodes.state[nodes] == ACTIVE)
            | self.block_of[:, nodes].any(axis=0)
        )
        return needed

    def _remove(self, nodes: Int32Array, parent: int) -> None:
        """Take a chain without children, deepest node first, out of the tree."""
        self.index.remove(nodes)
        self.children[nodes] = 0
        self.children[parent] -= 1
        extra = self.index.extra[nodes]
        for extra_id in extra[extra > 0].tolist():
            self.extra_keys.drop(extra_id)
