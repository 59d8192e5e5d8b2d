"""Least recently used, leaves first: the default policy, a log that whole arrays are written to."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pagedkv.page_table import Int32Array, Int64Array
from pagedkv.policies.policy import BlockView, EvictionPolicy

_NOWHERE = -1


class LRU(EvictionPolicy):
    """Gives up what was released longest ago.

    A log of ids with lazy deletion: ``_place[id]`` is where the id's valid entry stands, so an older
    entry of the same id is void. Whole releases and whole evictions are single array operations,
    which is what makes this several times cheaper per block than a linked list or a sorted container.

    Leaves come first by construction: a sequence releases its blocks deepest first, and a block can
    only be used while its whole prefix is, so a parent is never less recent than its child.

    Cost: O(1) amortised per block, whatever the number cached.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(2, block_size=1, policy="lru")
    >>> for seq_id, token in enumerate([7, 8, 7, 9, 7]):
    ...     opened = manager.open(seq_id, [token], max_cached_tokens=1)
    ...     manager.commit(seq_id, [token][opened.num_cached_tokens:]); manager.close(seq_id)
    >>> manager.stats().hit_tokens
    2
    """

    def bind(self, view: BlockView) -> None:
        """Make an empty order."""
        super().bind(view)
        num_blocks = view.num_blocks
        size = 2 * num_blocks + 64
        self._place: Int64Array = np.full(num_blocks + 1, _NOWHERE, np.int64)
        self._log: Int32Array = np.zeros(size, np.int32)
        self._places: Int64Array = np.arange(size)
        self._kept: npt.NDArray[np.bool_] = np.zeros(num_blocks + 1, np.bool_)
        self._head = 0
        self._tail = 0

    def push(self, ids: Int32Array) -> None:
        """Add ids as the most recently used, the first of them as the least recent."""
        self.make_room(len(ids))
        end = self._tail + len(ids)
        self._log[self._tail : end] = ids
        self._place[ids] = self._places[self._tail : end]
        self._tail = end

    def make_room(self, count: int) -> None:
        """Make sure that ``count`` ids can be pushed without moving anything."""
        if self._tail + count > len(self._log):
            self._compact()

    def discard(self, ids: Int32Array) -> None:
        """Forget ids, whether they are here or not."""
        self._place[ids] = _NOWHERE

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Up to ``count`` least recently used ids, oldest first, none of them in ``keep``."""
        if not len(keep):
            return self._oldest(count, self._any)
        self._kept[keep] = True
        try:
            return self._oldest(count, lambda ids: ids[~self._kept[ids]])
        finally:
            self._kept[keep] = False

    @staticmethod
    def _any(ids: Int32Array) -> Int32Array:
        return ids

    def _oldest(self, count: int, choose: Callable[[Int32Array], Int32Array]) -> Int32Array:
        """Scan windows from the head until ``choose`` has left enough of their valid entries."""
        parts: list[Int32Array] = []
        start, width = self._head, count + 64
        while count > 0 and start < self._tail:
            stop = min(start + width, self._tail)
            window = self._log[start:stop]
            valid = window[self._place[window] == self._places[start:stop]]
            if start == self._head and not len(valid):
                self._head = stop  # void entries stay void: never scan them again
            found = choose(valid)[:count]
            parts.append(found)
            count -= len(found)
            start, width = stop, 2 * width
        return parts[0] if len(parts) == 1 else np.concatenate([self._log[:0], *parts])

    def _compact(self) -> None:
        """Move the valid entries to the front; at most num_blocks of them, so half the log is free again."""
        ids = self._oldest(len(self._place), self._any)
        self._log[: len(ids)] = ids
        self._place[ids] = self._places[: len(ids)]
        self._head, self._tail = 0, len(ids)

    def ids(self) -> Int32Array:
        """All ids, least recently used first."""
        return self._oldest(len(self._place), self._any)
