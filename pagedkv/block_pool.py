"""The block pool: ids, ref counts and states, and nothing else."""

from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from pagedkv.errors import BlockError, check
from pagedkv.page_table import NULL_BLOCK, Int32Array

FREE, CACHED, ACTIVE = 0, 1, 2
"""No content; content reusable and evictable, ref_count 0; ref_count > 0."""

NO_BLOCKS: Int32Array = np.zeros(0, np.int32)
_RESERVED = 3
_STATE_NAMES = ("free", "cached", "active")


class BlockCounts(NamedTuple):
    """How many blocks are in each of the three disjoint states."""

    free: int
    cached: int
    active: int


class BlockPool:
    """Hands out block ids ``1..num_blocks`` and counts the references on them.

    ::

                 acquire (new)              release, ref_count 0, retain
        free  ----------------->  active  ------------------------------>  cached
          ^                        |  ^         acquire (shared)             |
          '--- release, ref_count 0'  '--------------------------------------|
          '---------------------------------- evict -------------------------'

    Every call takes whole arrays of ids and checks all of them in O(1) per id before it changes
    anything: an id that is out of range, named twice or in the wrong state raises ``BlockError`` and
    leaves the pool as it was. Ids are reused last-in first-out, so the same calls give the same ids.

    >>> pool = BlockPool(4)
    >>> ids = pool.acquire(3); ids.tolist()
    [1, 2, 3]
    >>> pool.release(ids[:2], retain=np.array([True, False])).tolist()
    [1]
    >>> pool.counts
    BlockCounts(free=2, cached=1, active=1)
    >>> pool.release(ids[1:2], retain=np.array([False]))
    Traceback (most recent call last):
    pagedkv.errors.BlockError: cannot release block 2: it is free, must be active
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
        shared, victims = _as_ids(shared), _as_ids(victims)
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
        ids = _as_ids(ids)
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
        ids = _as_ids(ids)
        self._require(ids, CACHED, CACHED, "evict")
        self._num_cached -= len(ids)
        self._push_free(ids)

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


def _as_ids(ids: npt.ArrayLike) -> Int32Array:
    """Block ids as int32 [n]; ``BlockError`` for anything else than whole numbers that fit."""
    array = np.asarray(ids)
    if array.dtype == np.int32 and array.ndim == 1:
        return array
    whole = array.size == 0 or array.dtype.kind in "iu"
    if array.ndim != 1 or not whole:
        raise BlockError(f"block ids must be integers in one dimension, got {array.dtype} {array.shape}")
    if array.size and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
        raise BlockError(f"block ids must fit int32, got {int(array.min())}..{int(array.max())}")
    return array.astype(np.int32)
