"""Blocks with content: the pool, the prefix index and the eviction policy, kept in step."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.block_pool import CACHED, FREE, NO_BLOCKS, BlockPool
from pagedkv.errors import SequenceError
from pagedkv.events import EventLog
from pagedkv.fences import Fences
from pagedkv.namespace import ExtraKeys
from pagedkv.page_table import Int32Array
from pagedkv.pins import Pins
from pagedkv.policies.index_view import IndexView
from pagedkv.policies.policy import EvictionPolicy
from pagedkv.prefix_index import PrefixIndex


class BlockCopies(NamedTuple):
    """Blocks to copy, ``src[i]`` to ``dst[i]``, both int32 [n]: read all sources before writing any."""

    src: Int32Array
    dst: Int32Array


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
        policy.bind(IndexView(num_blocks, self.index, self.extra_keys))
        self.fences = Fences()
        self.pins = Pins()
        self.events: EventLog | None = None
        self.num_evicted = 0
        self.num_copied = 0
        self._copies: dict[int, int] = {}

    def acquire(
        self, num_new: int, shared: Int32Array = NO_BLOCKS, doomed: Int32Array = NO_BLOCKS
    ) -> Int32Array:
        """Take references on ``shared`` and ``num_new`` new blocks, evicting exactly the shortfall.

        ``doomed`` cached blocks, children first, are evicted in any case, and before any other.
        """
        victims = self._victims(max(0, num_new - self.pool.num_free), shared, doomed)
        num_idle = self.pool.num_cached
        new = self.pool.acquire(num_new, shared, victims)
        try:
            self.forget(victims)
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
            self._evict(rest)
        return new

    def _victims(self, count: int, shared: Int32Array, doomed: Int32Array) -> Int32Array:
        """The blocks to evict for ``count`` new ones: the doomed, then as the policy says."""
        if count <= len(doomed):
            return doomed[:count]
        if not len(doomed):
            return self.policy.first(count, keep=shared)
        others = self.policy.first(count - len(doomed), keep=np.concatenate([shared, doomed]))
        return np.concatenate([doomed, others])

    def _evict(self, ids: Int32Array) -> None:
        self.forget(ids)
        self.pool.evict(ids)
        self.num_evicted += len(ids)

    def release(self, ids: Int32Array) -> None:
        """Drop one reference each, deepest block first, so that children are evicted before parents.

        While a fence is open, it takes the references over, so that they are dropped in this order later.
        """
        if self.fences:
            self.fences.hold(ids)
        else:
            self._give_up(ids)

    def signal(self, fence: int) -> None:
        """Close a fence and release what waited for it alone."""
        for ids in self.fences.signal(fence):
            self._give_up(ids)

    def _give_up(self, ids: Int32Array) -> None:
        """Drop one reference each; full committed blocks without any stay cached."""
        self.policy.make_room(len(ids))
        cached = self.pool.release(ids, self.index.indexed[ids])
        self.policy.push(cached)
        surplus = self.policy.surplus()
        if surplus is not None:
            self.policy.evict(surplus)
            self._evict(surplus)
        if self._copies:  # asked here too, to spare the gather in the common case
            self._drop_copies(ids[self.pool.state[ids] == FREE])

    def pin(self, ids: Int32Array) -> int:
        """Hold indexed blocks, shallowest first, until they are unpinned."""
        self.pool.acquire(0, shared=ids)
        return self.pins.add(ids)

    @property
    def num_pinned(self) -> int:
        """Blocks with at least one pin. Cost: O(pinned blocks)."""
        held = self.pins.held()
        return len(np.unique(np.concatenate(held))) if held else 0

    def unpin(self, pin: int) -> None:
        """Give up what a pin holds."""
        self.release(self.pins.remove(pin)[::-1])

    def fenced_only(self) -> Int32Array:
        """Blocks that nothing but fences holds."""
        held = self.fences.held()
        if not held:
            return NO_BLOCKS
        ids, counts = np.unique(np.concatenate(held), return_counts=True)
        alone: Int32Array = ids[self.pool.ref_count[ids] == counts]
        return alone

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
        if self.events is not None:
            keys = [self.extra_keys.key(i) if i else None for i in extra.tolist()]
            self.events.stored(ids, tokens, keys, parent)
        self.index.insert(ids, extra, parent)
        for extra_id in extra[extra > 0].tolist():
            self.extra_keys.share(extra_id)

    def forget(self, ids: Int32Array) -> None:
        """Remove blocks from the index, and their extra keys with them."""
        if not len(ids):
            return
        self.index.remove(ids)
        if len(self.extra_keys):
            extra = self.index.extra[ids]
            for extra_id in extra[extra > 0].tolist():
                self.extra_keys.drop(extra_id)
        if self.events is not None:
            self.events.removed(ids)

    def withdraw(self, ids: Int32Array) -> None:
        """Let held blocks lose their content: their holder is about to write something else there."""
        self.forget(ids)
        self.policy.forget(ids)

    def idle_behind(self, blocks: Int32Array) -> Int32Array | None:
        """All content that builds on these blocks, children first; None if a fence holds some of it."""
        ids = self.index.behind(blocks)
        return ids if (self.pool.state[ids] == CACHED).all() else None

    def is_shared(self, ids: Int32Array) -> npt.NDArray[np.bool_]:
        """Which blocks somebody else can see: another sequence, or a later one through the index."""
        shared: npt.NDArray[np.bool_] = self.index.indexed[ids] | (self.pool.ref_count[ids] > 1)
        return shared

    def replace(self, old: Int32Array, new: Int32Array) -> None:
        """Let ``new`` blocks take the place of shared tails: note the copies, give up the old ones."""
        self.index.tokens[new] = self.index.tokens[old]
        for src, dst in zip(old.tolist(), new.tolist(), strict=True):
            # A source whose own copy is still pending has its content in that copy's source.
            self._copies[dst] = self._copies.get(src, src)
        for block in old:
            self.release(block.reshape(1))
        self.num_copied += len(new)

    @property
    def pending_copies(self) -> BlockCopies:
        """The copies that wait to be run."""
        count = len(self._copies)
        if not count:
            return BlockCopies(NO_BLOCKS, NO_BLOCKS)
        return BlockCopies(
            np.fromiter(self._copies.values(), np.int32, count),
            np.fromiter(self._copies.keys(), np.int32, count),
        )

    def take_copies(self) -> BlockCopies:
        """Hand over the pending copies and forget them."""
        copies = self.pending_copies
        self._copies.clear()
        return copies

    def require_copied(self, ids: Int32Array) -> None:
        """Refuse blocks whose copy is still pending: what is written to them now would be overwritten."""
        if self._copies:
            for block in ids.tolist():
                if block in self._copies:
                    raise SequenceError(
                        f"block {block} awaits its copy from block {self._copies[block]}: take_copies() first"
                    )

    def _drop_copies(self, ids: Int32Array) -> None:
        """Forget pending copies into blocks that no longer have content."""
        if self._copies:
            for block in ids.tolist():
                self._copies.pop(block, None)
