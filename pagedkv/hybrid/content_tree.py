"""Contents and the blocks that hold them: one pool of blocks, one tree of contents, for all groups."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.block_ids import resized
from pagedkv.block_pool import ACTIVE, CACHED, NO_BLOCKS, BlockPool
from pagedkv.block_tables import NULL_BLOCK, Int32Array
from pagedkv.copies import PendingCopies
from pagedkv.fences import Fences
from pagedkv.hybrid.events import GroupEvents
from pagedkv.hybrid.group import CacheGroup
from pagedkv.hybrid.group_view import GroupView
from pagedkv.namespace import ExtraKeys
from pagedkv.policies.lru import LRU
from pagedkv.policies.policy import EvictionPolicy
from pagedkv.prefix_index import ROOT, PrefixIndex


class ContentTree:
    """What the hybrid manager knows of contents and blocks, whichever sequence holds them.

    A *node* is the content of one block of tokens at its place in the tree of prefixes. Each group has a
    block for it or has none::

        node            1    2    3    4        one path: node 2 continues node 1, and so on
        full            5    6    9   12
        window          0    0   10   13        what fell out of the window may be gone

    A node is known while a sequence (or a pin, or a fence) holds it, a group has a block for it, or a known
    node continues it.

    Blocks go one by one, whatever their group, as the policy says, which knows them as one tree (see
    ``GroupView``): so none goes before one that needs it, and what is evicted is exactly what is short.
    Who lets go of several at once names the deepest first, and of one node those of window groups first.

    *Ids* that are held and let go of together are one array: blocks, and nodes as negative numbers.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        block_size: int,
        num_nodes: int,
        policy: EvictionPolicy,
    ) -> None:
        """Make ``num_blocks`` free blocks and ``num_nodes`` free nodes; a new ``policy`` says who goes."""
        self.groups = groups
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.nodes = BlockPool(num_nodes)
        self._spare_nodes = num_nodes - num_blocks
        self.index = PrefixIndex(num_nodes, block_size)
        self.extra_keys = ExtraKeys()
        self.copies = PendingCopies(self.let_go, policy.make_room)
        self.block_of: Int32Array = np.zeros((len(groups), num_nodes + 1), np.int32)
        self.node_of: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self.group_of: npt.NDArray[np.int16] = np.zeros(num_blocks + 1, np.int16)
        self.children: Int32Array = np.zeros(num_nodes + 1, np.int32)
        self.let_go_order = sorted(range(len(groups)), key=lambda g: groups[g].window is None)
        self.view = GroupView(self, num_blocks, num_nodes)
        self.policy = policy
        # exactly: a class derived from it may want to know what belongs to which branch
        self._any_order_will_do = type(policy) is LRU
        policy.bind(self.view)
        self.fences = Fences(self._give_up)
        self.events = GroupEvents(self)
        self.num_evicted = 0
        self.num_copied = 0

    # -- taking and giving up

    def acquire(
        self,
        num_new: int,
        shared: Int32Array = NO_BLOCKS,
        nodes: Int32Array = NO_BLOCKS,
        *,
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
            self.policy.discard(shared)
        if len(victims):
            self.policy.forget(victims[: len(doomed)])
            self.policy.evict(victims[len(doomed) :])
        rest = doomed[len(victims) :]
        if len(rest):
            self.policy.forget(rest)
            self.pool.evict(rest)
            victims = doomed
        self._forget(victims, "capacity")
        return new

    def _victims(self, count: int, keep: Int32Array, doomed: Int32Array) -> Int32Array:
        if count <= len(doomed):
            return doomed[:count]
        if not len(doomed):
            return self.policy.first(count, keep)
        others = self.policy.first(count - len(doomed), np.concatenate([keep, doomed]))
        return np.concatenate([doomed, others])

    def hold(self, ids: Int32Array) -> None:
        """Take one more reference on each of ``ids``."""
        self.acquire(0, ids[ids > 0], -ids[ids < 0])

    def note_hit(self, blocks: Int32Array) -> None:
        """A new sequence holds these blocks [groups, n] of a hit."""
        if not self._any_order_will_do and blocks.size:  # LRU need not know
            self.policy.hit(self.by_node(blocks)[::-1])

    def release(self, ids: Int32Array) -> None:
        """Drop one reference on each: blocks as ``by_node`` orders them, then nodes, deepest first."""
        self.let_go(ids[ids > 0], -ids[ids < 0])

    def let_go(self, blocks: Int32Array, nodes: Int32Array = NO_BLOCKS) -> None:
        """As ``release``, nodes by their numbers; while a fence is open, it takes the references over.

        What a copy into a block that nobody is left for would have read goes before its parents do.
        """
        dropped = self.copies.left_behind(blocks, self.pool.ref_count, self.fences) if self.copies else []
        if dropped:
            blocks = np.concatenate([self.copies.read_by(dropped), blocks])
        if self.fences:
            self.fences.hold(np.concatenate([blocks, -nodes]) if len(nodes) else blocks)
        else:
            self._drop(blocks, nodes)
        self.copies.forget(dropped)

    def _give_up(self, ids: Int32Array) -> None:
        self._drop(ids[ids > 0], -ids[ids < 0])

    def _drop(self, blocks: Int32Array, nodes: Int32Array) -> None:
        if len(blocks):
            self.policy.make_room(len(blocks))
            cached = self.pool.release(blocks, self.node_of[blocks] > 0)
            for branch in [cached] if self._any_order_will_do else self.view.branches(cached):
                self.policy.push(branch)
        if len(nodes):
            self.nodes.release(nodes, np.ones(len(nodes), np.bool_))
            self._prune(nodes[:1].tolist())
        surplus = self.policy.surplus()
        if surplus is not None:
            self._evict(surplus, "policy")

    def fenced_only(self) -> Int32Array:
        """Blocks that nothing but fences, and copies that wait, holds."""
        return self.fences.held_alone(self.pool.ref_count, self.copies.pending.src)

    def copy(self, src: Int32Array, dst: Int32Array) -> None:
        """Let new blocks ``dst`` [groups, n] begin with what ``src`` hold, once the engine has copied it.

        A reference on each of ``src`` is the copy's from now on.
        """
        order = self.let_go_order  # in which they will be given up
        self.copies.note(src[order].T.reshape(-1), dst[order].T.reshape(-1))
        self.num_copied += dst.size

    def replace(self, old: Int32Array, new: Int32Array) -> None:
        """Let ``new`` blocks [groups, n] take the place of tails, whose references pass to the copies."""
        src = self.copies.sources(old.reshape(-1)).reshape(old.shape)
        for block in src[src != old].reshape(-1, 1):
            self.pool.acquire(0, shared=block)
        self.copy(src, new)
        for column in np.where(src != old, old, NULL_BLOCK).T:
            self.let_go(self.by_node(column.reshape(-1, 1)))

    def by_node(self, blocks: Int32Array) -> Int32Array:
        """Blocks [groups, n] in the order in which they are let go of together, without the null block.

        Last column first; within one column those of window groups first.
        """
        columns: Int32Array = np.empty((blocks.shape[1], len(self.groups)), np.int32)
        for place, group in enumerate(self.let_go_order):
            columns[:, place] = blocks[group, ::-1]
        ids = columns.reshape(-1)
        return ids.compress(ids.astype(np.bool_))  # in half the time of a mask

    # -- contents

    def grow(self, parent: int, tokens: Int32Array, extra: Int32Array) -> Int32Array:
        """Hold the nodes that continue ``parent`` with ``tokens`` [n, block_size]; new ones where needed."""
        known = self.index.match(tokens, extra, parent)
        if len(known):
            self.nodes.acquire(0, shared=known)
        at = len(known)
        if at == len(tokens):
            return known
        try:
            new = self._insert(tokens[at:], extra[at:], int(known[-1]) if at else parent)
        except BaseException:
            self.nodes.release(known[::-1], np.ones(at, np.bool_))
            raise
        return np.concatenate([known, new])

    def _insert(self, tokens: Int32Array, extra: Int32Array, before: int) -> Int32Array:
        """Hold new nodes behind ``before``; none is left if that fails."""
        self._make_room_for_nodes(len(tokens))
        new = self.nodes.acquire(len(tokens))
        self.index.tokens[new] = tokens
        try:
            self.index.insert(new, extra, before)
        except BaseException:
            self.nodes.release(new, np.zeros(len(new), np.bool_))
            raise
        self.children[before] += 1
        self.children[new[:-1]] = 1
        for extra_id in extra[extra > 0].tolist():
            self.extra_keys.share(extra_id)
        if self.events.recording:
            self.events.learn(new, before)
        return new

    def adopt(self, own: Int32Array, nodes: Int32Array) -> Int32Array:
        """Blocks [groups, n] to hold for consecutive ``nodes``: ``own`` where a group has none, else its.

        The caller gives up its own blocks where it gets others. It gets none where its own is NULL_BLOCK.
        """
        theirs: Int32Array = self.block_of[:, nodes]
        if not theirs.any() and own.all():  # the common case, in a few steps
            self.block_of[:, nodes], self.node_of[own] = own, nodes
            self.policy.stored(own.reshape(-1))
            if self.events.recording:
                self.events.stored_where(own != NULL_BLOCK, nodes)
            return own
        wanted = own != NULL_BLOCK
        bare = wanted & (theirs == NULL_BLOCK)
        new, taken = own[bare], theirs[wanted & ~bare & (theirs != own)]
        if len(taken):
            self.pool.acquire(0, shared=taken)
            self.policy.discard(taken)
        self.block_of[:, nodes] = np.where(bare, own, theirs)
        self.node_of[new] = np.broadcast_to(nodes, own.shape)[bare]
        if len(new):
            self.policy.stored(new)
            if self.events.recording:
                self.events.stored_where(bare, nodes)
        return np.where(wanted & ~bare, theirs, own)

    def withdraw(self, node: int) -> None:
        """Let a leaf lose its content: its only holder is about to write something else into its blocks."""
        blocks = self.block_of[:, node]
        self.disown(blocks[blocks != NULL_BLOCK])
        self.nodes.release(np.array([node], np.int32), np.zeros(1, np.bool_))
        self._remove(np.array([node], np.int32), self.index.parent(node))

    def disown(self, blocks: Int32Array) -> None:
        """Let held blocks lose their content, children first; the contents stay known as long as needed."""
        if self.events.recording:
            self.events.removed_from(blocks, "rewritten")
        self.block_of[self.group_of[blocks], self.node_of[blocks]] = NULL_BLOCK
        self.node_of[blocks] = 0
        self.policy.forget(blocks)

    def idle_behind(self, nodes: Int32Array) -> Int32Array | None:
        """All blocks of contents that continue ``nodes``, children first; None if something holds any."""
        behind = self.index.behind(nodes)
        if (self.nodes.state[behind] != CACHED).any():
            return None
        blocks = self.by_node(self.block_of[:, behind[::-1]])
        return blocks if (self.pool.state[blocks] == CACHED).all() else None

    # -- the whole pool

    def clear(self) -> None:
        """Forget all content; nothing is held."""
        ids = self.policy.ids()
        if not len(ids):
            return
        nodes = np.flatnonzero(self.index.indexed).astype(np.int32)
        for extra_id in filter(None, self.index.extra[nodes].tolist()):
            self.extra_keys.drop(extra_id)
        self.index.remove(self.index.behind(np.array([ROOT], np.int32)))
        self.nodes.evict(nodes)
        if self.events.recording:
            self.events.cleared()
        self.block_of[:], self.children[:], self.node_of[:] = NULL_BLOCK, 0, ROOT
        self.policy.forget(ids)
        self.pool.evict(ids)
        self.num_evicted += len(ids)

    def shed(self, count: int) -> None:
        """Evict ``count`` cached blocks as the policy says."""
        self._evict(self.policy.first(count, NO_BLOCKS), "capacity")

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Give held or cached blocks the ids of free ones."""
        nodes = self.node_of[old]
        stored = nodes != ROOT
        self.pool.rename(old, new)
        self.group_of[new] = self.group_of[old]
        self.node_of[new], self.node_of[old] = nodes, ROOT
        self.block_of[self.group_of[new[stored]], nodes[stored]] = new[stored]
        self.policy.rename(old[stored], new[stored])

    def resize(self, num_blocks: int) -> None:
        """Go on with ids ``1..num_blocks``; those that go are free. The room for contents never shrinks."""
        node_of, group_of = resized(self.node_of, num_blocks), resized(self.group_of, num_blocks)
        parts, old = (self.pool, self.policy), self.pool.num_blocks
        try:
            for part in parts:
                part.resize(num_blocks)
            if num_blocks + self._spare_nodes > self.nodes.num_blocks:
                self._resize_nodes(num_blocks + self._spare_nodes)
        except BaseException:
            for part in parts:
                part.resize(old)
            raise
        self.node_of, self.group_of = node_of, group_of
        self.view.num_blocks = num_blocks

    # -- letting contents go

    def _make_room_for_nodes(self, count: int) -> None:
        """See that so many nodes are free: the oldest blocks go, and then there is more room for contents."""
        while self.nodes.num_free < count:
            victims = self.policy.first(1, NO_BLOCKS)
            if len(victims):
                self._evict(victims, "capacity")
            else:  # pins and fences may hold any number
                self._resize_nodes(2 * self.nodes.num_blocks)

    def _resize_nodes(self, num_nodes: int) -> None:
        children = resized(self.children, num_nodes)
        block_of: Int32Array = np.zeros((len(self.groups), num_nodes + 1), np.int32)
        block_of[:, : self.block_of.shape[1]] = self.block_of
        old = self.nodes.num_blocks
        self.nodes.resize(num_nodes)
        try:
            self.index.resize(num_nodes)
        except BaseException:
            self.nodes.resize(old)
            raise
        self.children, self.block_of = children, block_of

    def _evict(self, blocks: Int32Array, reason: str) -> None:
        """Make blocks free that the policy has named."""
        self.policy.evict(blocks)
        self.pool.evict(blocks)
        self._forget(blocks, reason)

    def _forget(self, blocks: Int32Array, reason: str) -> None:
        """Evicted blocks have lost their content, and contents without blocks go with them."""
        if not len(blocks):
            return
        if self.events.recording:
            self.events.removed_from(blocks, reason)
        nodes = self.node_of[blocks]
        self.block_of[self.group_of[blocks], nodes] = NULL_BLOCK
        self.node_of[blocks] = 0
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
        if self.events.recording:
            self.events.forget(nodes)
        self.children[nodes] = 0
        self.children[parent] -= 1
        extra = self.index.extra[nodes]
        for extra_id in extra[extra > 0].tolist():
            self.extra_keys.drop(extra_id)
