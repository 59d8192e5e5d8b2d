"""The block pool in numpy: the reference, and the engine where there is no compiled core."""

from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from pagedkv.block_ids import NO_BLOCKS, as_ids, resized
from pagedkv.block_tables import NULL_BLOCK, Int32Array
from pagedkv.errors import BlockError, check

FREE, CACHED, ACTIVE = 0, 1, 2
"""No content; content reusable and evictable, ref_count 0; ref_count > 0."""

_RESERVED = 3
_STATE_NAMES = ("free", "cached", "active")


class BlockCounts(NamedTuple):
    """How many blocks are in each of the three disjoint states."""

    free: int
    cached: int
    active: int


class NumpyBlockPool:
    """What `pagedkv.block_pool.BlockPool` says, on whole arrays.

    It costs some 20 numpy calls per operation, however few ids there are.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make a pool of ``num_blocks`` free blocks (ids from 1; id 0 is the reserved null block)."""
        if num_blocks < 1:
            raise BlockError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_count: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self.state: npt.NDArray[np.uint8] = np.zeros(num_blocks + 1, np.uint8)
        self.state[NULL_BLOCK] = _RESERVED
        self._free: Int32Array = np.arange(num_blocks, 0, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._num_cached = 0
        self._seen: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self._order: Int32Array = np.arange(num_blocks + 1, dtype=np.int32)
        self._attach_core()

    def _attach_core(self) -> None:
        """Tell a compiled core where the arrays are."""

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose content may be hit again."""
        return self._num_cached

    @property
    def num_active(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self._num_free - self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free + cached."""
        return self._num_free + self._num_cached

    @property
    def counts(self) -> BlockCounts:
        """The three counts at once; they always add up to ``num_blocks``."""
        return BlockCounts(self._num_free, self._num_cached, self.num_active)

    def acquire(
        self, num_new: int, shared: Int32Array = NO_BLOCKS, victims: Int32Array = NO_BLOCKS
    ) -> Int32Array:
        """Take a reference on each of ``shared`` and hand out ``num_new`` blocks, in one step.

        New blocks come from the free ones first; ``victims`` (cached blocks) must make up exactly
        the shortfall. A new block starts with ref_count 1.

        Returns the new ids, int32 [num_new]. Raises ``BlockError`` with nothing changed.
        Cost: O(num_new + len(shared)).
        """
        if num_new < 0:
            raise BlockError(f"cannot acquire {num_new} blocks")
        shared, victims = as_ids(shared), as_ids(victims)
        shortfall = max(0, num_new - self._num_free)
        if len(victims) != shortfall:
            raise BlockError(
                f"{num_new} blocks with {self._num_free} free need {shortfall} victims, got {len(victims)}"
            )
        revived = 0
        if len(shared):
            revived = self._require(shared, CACHED, ACTIVE, "share")
        if shortfall:
            self._require(victims, CACHED, CACHED, "evict")
            if len(shared):
                self._require(np.concatenate([shared, victims]), CACHED, ACTIVE, "share and evict")
        new = self._free[self._num_free - num_new + shortfall : self._num_free][::-1]
        new = np.concatenate([new, victims]) if shortfall else new.copy()
        if len(shared):
            self.ref_count[shared] += np.int32(1)
            self.state[shared] = ACTIVE
        self._num_free -= num_new - shortfall
        self._num_cached -= shortfall + revived
        self.ref_count[new] = 1
        self.state[new] = ACTIVE
        return new

    def release(self, ids: Int32Array, retain: npt.NDArray[np.bool_]) -> Int32Array:
        """Drop one reference on each id; at zero a block becomes cached where ``retain``, else free.

        Returns the ids that became cached, in the order given. Raises ``BlockError`` with nothing
        changed. Cost: O(len(ids)).
        """
        ids = as_ids(ids)
        if not isinstance(retain, np.ndarray) or retain.dtype != np.bool_ or retain.shape != ids.shape:
            raise BlockError(f"{len(ids)} ids need as many retain flags, as an array of bool")
        self._require(ids, ACTIVE, ACTIVE, "release")
        left = self.ref_count[ids] - np.int32(1)
        cached, freed = ids, NO_BLOCKS
        # a finished sequence of its own content is the common case: every block idle and kept
        if np.count_nonzero(left) or np.count_nonzero(retain) < len(ids):
            idle = left == 0
            cached, freed = ids[idle & retain], ids[idle & ~retain]
        self.ref_count[ids] = left
        self.state[cached] = CACHED
        self._num_cached += len(cached)
        if len(freed):
            self._push_free(freed)
        return cached

    def evict(self, ids: Int32Array) -> None:
        """Turn cached blocks into free ones. Raises ``BlockError`` with nothing changed."""
        ids = as_ids(ids)
        self._require(ids, CACHED, CACHED, "evict")
        self._num_cached -= len(ids)
        self._push_free(ids)

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Let free blocks ``new[i]`` take the state and the references of held or cached ``old[i]``.

        The old ones are free then and are handed out last, ``old[0]`` first of them, so that a pool whose
        blocks were moved together stays so for as long as it can. Raises ``BlockError`` with nothing
        changed. Cost: O(free blocks), vectorised.
        """
        old, new = as_ids(old), as_ids(new)
        if len(old) != len(new):
            raise BlockError(f"cannot rename {len(old)} blocks to {len(new)}")
        self._require(old, CACHED, ACTIVE, "rename")
        self._require(new, FREE, FREE, "rename to")
        taken = np.zeros(self.num_blocks + 1, np.bool_)
        taken[new] = True
        free = self._free[: self._num_free]
        self._free[: self._num_free] = np.concatenate([old[::-1], free[~taken[free]]])
        self.ref_count[new], self.state[new] = self.ref_count[old], self.state[old]
        self.ref_count[old], self.state[old] = 0, FREE

    def resize(self, num_blocks: int) -> None:
        """Let ids be ``1..num_blocks`` from now on.

        New ids are handed out after all that are free now, in ascending order; ids above must be free, and
        the others keep their turn. Raises ``BlockError`` with nothing changed. Cost: O(blocks), vectorised.
        """
        if num_blocks < 1:
            raise BlockError(f"a pool needs at least 1 block, got {num_blocks}")
        used = np.flatnonzero(self.state[num_blocks + 1 :])
        if len(used):
            block = num_blocks + 1 + int(used[0])
            raise BlockError(
                f"cannot shrink to {num_blocks} blocks: block {block} is {_STATE_NAMES[self.state[block]]}"
            )
        added: Int32Array = np.arange(num_blocks, self.num_blocks, -1, dtype=np.int32)
        free = np.concatenate([added, self._free[: self._num_free]])
        free = free[free <= num_blocks]
        stack: Int32Array = np.zeros(num_blocks, np.int32)
        stack[: len(free)] = free
        ref_count, state = resized(self.ref_count, num_blocks), resized(self.state, num_blocks)
        seen: Int32Array = np.zeros(num_blocks + 1, np.int32)
        order: Int32Array = np.arange(num_blocks + 1, dtype=np.int32)
        self.num_blocks, self._num_free = num_blocks, len(free)
        self.ref_count, self.state, self._free = ref_count, state, stack
        self._seen, self._order = seen, order
        self._attach_core()

    def _push_free(self, ids: Int32Array) -> None:
        self.state[ids] = FREE
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    def _require(self, ids: Int32Array, least: int, most: int, verb: str) -> int:
        """Refuse ids that are out of range, repeated, or not in a state from ``least`` to ``most``.

        Returns how many are in the state ``least``. Counting what is right, in whole arrays, is the
        cheapest test that numpy has for a few ids; only a failure is looked at more closely.
        """
        count = len(ids)
        try:
            order = self._order[:count]
            self._seen[ids] = order
            state = self.state[ids]
            in_least = int(np.count_nonzero(state == least))
            in_states = in_least if least == most else in_least + np.count_nonzero(state == most)
            if in_states == count == np.count_nonzero(self._seen[ids] == order) == np.count_nonzero(ids > 0):
                return in_least
        except (IndexError, ValueError):  # an id too large, or more ids than blocks
            pass
        self._refuse(ids, least, most, verb)

    def _refuse(self, ids: Int32Array, least: int, most: int, verb: str) -> NoReturn:
        outside = (ids < 1) | (ids > self.num_blocks)
        if outside.any():
            raise BlockError(f"cannot {verb} block {ids[outside][0]}: ids are 1..{self.num_blocks}")
        if len(ids) > self.num_blocks:
            raise BlockError(f"cannot {verb} {len(ids)} blocks, there are only {self.num_blocks}")
        first = np.unique(ids, return_index=True)[1]
        if len(first) < len(ids):
            repeated = np.delete(ids, first)[0]
            raise BlockError(f"cannot {verb} block {repeated} twice in one call")
        state = self.state[ids]
        wrong = (state < least) | (state > most)
        bad, found = ids[wrong][0], state[wrong][0]
        wanted = " or ".join(_STATE_NAMES[least : most + 1])
        raise BlockError(f"cannot {verb} block {bad}: it is {_STATE_NAMES[found]}, must be {wanted}")

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the pool contradicts itself. Cost: O(num_blocks), vectorised."""
        state, refs = self.state[1:], self.ref_count[1:]
        free = np.sort(self._free[: self._num_free])
        check(
            np.array_equal(free, np.flatnonzero(self.state == FREE)),
            "the free stack is not the free blocks",
        )
        check(int(np.count_nonzero(state == CACHED)) == self._num_cached, "the cached count is wrong")
        check(
            bool(((refs > 0) == (state == ACTIVE)).all()),
            "a block is active without a reference, or idle with one",
        )
        check(bool((refs >= 0).all()), "a ref_count is negative")
        check(
            self.ref_count[NULL_BLOCK] == 0 and self.state[NULL_BLOCK] == _RESERVED,
            "the null block is in use",
        )
