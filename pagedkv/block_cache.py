"""Blocks with content: the pool, the prefix index and the eviction policy, kept in step."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedkv import core
from pagedkv.block_pool import CACHED, NO_BLOCKS, BlockPool
from pagedkv.block_tables import BlockTables, Int32Array
from pagedkv.copies import PendingCopies
from pagedkv.events import EventLog
from pagedkv.fences import Fences
from pagedkv.namespace import ExtraKeys
from pagedkv.policies.index_view import IndexView
from pagedkv.policies.lru import LRU
from pagedkv.policies.policy import EvictionPolicy
from pagedkv.prefix_index import PrefixIndex

if TYPE_CHECKING or core.reason() is None:
    from pagedkv._core import commit_row, cut_row, give_up, take


class BlockCache:
    """What the manager knows of blocks, whichever sequence holds them.

    A block is indexed once it is full and committed; released to ref_count 0 it then stays cached until
    it is evicted, else it becomes free. The caller knows that what it asks for fits.
    """

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy) -> None:
        """Make ``num_blocks`` free blocks, given up in the order of a new ``policy``."""
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(num_blocks, block_size)
        self.extra_keys = ExtraKeys()
        self.policy = policy
        # exactly: a class derived from it may want to hear of every step
        self._all_compiled = core.reason() is None and type(policy) is LRU
        self._view = IndexView(num_blocks, self.index, self.extra_keys)
        policy.bind(self._view)
        self.fences = Fences(self._give_up)
        self.copies = PendingCopies(self.release, policy.make_room)
        self.events = EventLog(self.index)
        self.num_evicted = 0
        self.num_copied = 0
        self.num_dropped = 0

    def acquire(
        self,
        new: Int32Array,
        shared: Int32Array = NO_BLOCKS,
        *,
        doomed: Int32Array = NO_BLOCKS,
    ) -> None:
        """Take references on ``shared`` and fill ``new`` with new blocks, evicting exactly the shortfall.

        ``doomed`` cached blocks, children first, are evicted in any case, and before any other. What ``new``
        holds is undefined if this fails.
        """
        if self._all_compiled and not (len(doomed) or len(self.extra_keys) or self.events.recording):
            num_evicted = take(self.pool, self.index, self.policy, new, shared)
            if num_evicted >= 0:
                self.num_evicted += num_evicted
                return
        new[:] = self._acquire_stepwise(len(new), shared, doomed)

    def _acquire_stepwise(self, num_new: int, shared: Int32Array, doomed: Int32Array) -> Int32Array:
        victims = self._victims(max(0, num_new - self.pool.num_free), shared, doomed)
        num_idle = self.pool.num_cached
        new = self.pool.acquire(num_new, shared, victims)
        try:
            self._forget(victims, "capacity")
        except BaseException:
            for ids in (new[::-1], shared):
                self.pool.release(ids, self.index.indexed[ids])
            raise
        if self.pool.num_cached + len(victims) < num_idle:  # some of the shared were idle
            self.policy.discard(shared)
        if len(victims):
            if len(doomed):
                self.policy.forget(victims[: len(doomed)])
            self.policy.evict(victims[len(doomed) :])
            self.num_evicted += len(victims)
        rest = doomed[len(victims) :]
        if len(rest):
            self.policy.forget(rest)
            self._evict(rest, "capacity")
        return new

    def _victims(self, count: int, keep: Int32Array, doomed: Int32Array) -> Int32Array:
        """The blocks to evict for ``count`` new ones: the doomed, then as the policy says."""
        if count <= len(doomed):
            return doomed[:count]
        if not len(doomed):
            return self.policy.first(count, keep=keep)
        others = self.policy.first(count - len(doomed), keep=np.concatenate([keep, doomed]))
        return np.concatenate([doomed, others])

    def _evict(self, ids: Int32Array, reason: str) -> None:
        self._forget(ids, reason)
        self.pool.evict(ids)
        self.num_evicted += len(ids)

    def release(self, ids: Int32Array) -> None:
        """Drop one reference each, deepest block first, so that children are evicted before parents.

        While a fence is open, it takes the references over, so that they are dropped in this order later.
        What a copy into a block that nobody is left for would have read goes before its parents do.
        """
        given_up = ids
        dropped = self.copies.left_behind(ids, self.pool.ref_count, self.fences) if self.copies else []
        if dropped:
            given_up = np.concatenate([self.copies.read_by(dropped), ids])
        if self.fences:
            self.fences.hold(given_up)
        else:
            self._give_up(given_up)
        self.copies.forget(dropped)

    def cut_row(self, tables: BlockTables, row: int, num_tokens: int) -> None:
        """Cut a sequence to its first ``num_tokens``, and ``release`` the blocks beyond.

        In one step where nobody else has to be told: no fence, no pending copy, no policy in Python.
        """
        if not (
            self._all_compiled
            and not self.fences.open_numbers  # each a call less than its truth
            and not self.copies.source_of
            and cut_row(
                self.pool,
                self.index,
                self.policy,
                tables.blocks,
                tables.seq_len,
                tables.committed,
                row,
                num_tokens,
            )
        ):
            self.release(tables.beyond(row, num_tokens)[::-1])
            tables.cut(row, num_tokens)

    def _give_up(self, ids: Int32Array) -> None:
        """Drop one reference each; full committed blocks without any stay cached."""
        if not (self._all_compiled and give_up(self.pool, self.index, self.policy, ids)):
            self._give_up_stepwise(ids)

    def _give_up_stepwise(self, ids: Int32Array) -> None:
        self.policy.make_room(len(ids))
        cached = self.pool.release(ids, self.index.indexed[ids])
        self.policy.push(cached)
        surplus = self.policy.surplus()
        if surplus is not None:
            self.policy.evict(surplus)
            self._evict(surplus, "policy")

    def fenced_only(self) -> Int32Array:
        """Blocks that nothing but fences, and copies that wait, holds."""
        return self.fences.held_alone(self.pool.ref_count, self.copies.pending.src)

    def extend_content(self, tables: BlockTables, row: int, tokens: Int32Array) -> bool:
        """Commit ``tokens`` of a row: store them, index what they fill, and count them, in one step.

        False where it takes several: somebody has to be told, or an equal block is indexed already.
        """
        return (
            self._all_compiled
            and not self.events.recording
            and commit_row(self.index, tables.blocks, tables.committed, row, tokens)
        )

    def share(self, ids: Int32Array, tokens: Int32Array, extra: Int32Array, parent: int) -> Int32Array:
        """Make full committed blocks findable behind ``parent``; returns the blocks to hold instead.

        Where an equal block is indexed already, that one is returned, with a reference taken; the
        caller then releases its own. ``tokens`` [n, block_size] are already stored for ``ids``.
        """
        known = self.index.match(tokens, extra, parent)
        n = len(known)
        if not n:
            self._insert(ids, tokens, extra, parent)
            return ids
        held = np.concatenate([known, ids[n:]])
        theirs = known[known != ids[:n]]
        if len(theirs):
            self.pool.acquire(0, shared=theirs)
            self.policy.discard(theirs)
        if n < len(ids):
            self._insert(ids[n:], tokens[n:], extra[n:], int(known[-1]))
        return held

    def _insert(self, ids: Int32Array, tokens: Int32Array, extra: Int32Array, parent: int) -> None:
        if self.events.recording:
            keys = [self.extra_keys.key(i) if i else None for i in extra.tolist()]
            self.events.stored(ids, tokens, keys, parent)
        self.index.insert(ids, extra, parent)
        for extra_id in extra[extra > 0].tolist() if len(self.extra_keys) else ():
            self.extra_keys.share(extra_id)
        self.policy.stored(ids)

    def _forget(self, ids: Int32Array, reason: str) -> None:
        """Remove blocks from the index, and their extra keys with them; no ``reason`` if all are cleared."""
        if not len(ids):
            return
        self.index.remove(ids)
        if len(self.extra_keys):
            extra = self.index.extra[ids]
            for extra_id in extra[extra > 0].tolist():
                self.extra_keys.drop(extra_id)
        if self.events.recording:
            if reason:
                self.events.removed(ids, reason)
            else:
                self.events.cleared()

    def withdraw(self, ids: Int32Array, reason: str = "rewritten") -> None:
        """Let nobody find held blocks any more: their holder is about to write something else there."""
        self._forget(ids, reason)
        self.policy.forget(ids)

    def idle_behind(self, blocks: Int32Array) -> Int32Array | None:
        """All content that builds on these blocks, children first; None if something holds some of it."""
        ids = self.index.behind(blocks)
        return ids if (self.pool.state[ids] == CACHED).all() else None

    def is_shared(self, ids: Int32Array) -> npt.NDArray[np.bool_]:
        """Which blocks somebody else can see: another sequence, or a later one through the index."""
        shared: npt.NDArray[np.bool_] = self.index.indexed[ids] | (self.pool.ref_count[ids] > 1)
        return shared

    def replace(self, old: Int32Array, new: Int32Array) -> None:
        """Let ``new`` blocks take the place of shared tails, whose references pass to the copies."""
        src = self.copies.sources(old)
        for block in src[src != old].reshape(-1, 1):
            self.pool.acquire(0, shared=block)
        self.copy(src, new)
        for block in old[src != old].reshape(-1, 1):
            self.release(block)

    def copy(self, src: Int32Array, dst: Int32Array) -> None:
        """Let new blocks ``dst`` begin with what ``src`` hold, once the engine has run the copies.

        A reference on each of ``src`` is the copy's from now on.
        """
        self.index.tokens[dst] = self.index.tokens[src]
        self.copies.note(src, dst)
        self.num_copied += len(dst)

    # -- the whole pool

    def clear(self) -> None:
        """Forget all content; no block is held."""
        ids = self.policy.ids()
        self._forget(ids, "")
        self.policy.forget(ids)
        self.pool.evict(ids)
        self.num_evicted += len(ids)

    def shed(self, count: int) -> None:
        """Evict ``count`` cached blocks as the policy says."""
        ids = self.policy.first(count, NO_BLOCKS)
        self.policy.evict(ids)
        self._evict(ids, "capacity")

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Give blocks with content the ids of free ones."""
        indexed = self.index.indexed[old]
        self.pool.rename(old, new)
        if self.events.recording:
            self.events.rename(old[indexed], new[indexed])
        self.index.tokens[new] = self.index.tokens[old]
        self.index.rename(old[indexed], new[indexed])
        self.policy.rename(old[indexed], new[indexed])

    def resize(self, num_blocks: int) -> None:
        """Go on with ids ``1..num_blocks``; those that go are free."""
        parts, old = (self.pool, self.index, self.policy), self.pool.num_blocks
        try:
            for part in parts:
                part.resize(num_blocks)
        except BaseException:
            for part in parts:
                part.resize(old)
            raise
        self._view.num_blocks = num_blocks
