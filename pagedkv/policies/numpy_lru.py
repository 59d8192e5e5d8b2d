"""LRU in numpy: the reference, and the engine where there is no compiled core."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pagedkv.block_ids import as_renaming, refuse_above
from pagedkv.block_tables import Int32Array, Int64Array
from pagedkv.errors import BlockError
from pagedkv.policies.policy import BlockView, EvictionPolicy

_NOWHERE = -1


class NumpyLRU(EvictionPolicy):
    """What `pagedkv.policies.lru.LRU` says, as a log that whole arrays are written to.

    A log of ids with lazy deletion: ``_place[id]`` is where the id's valid entry stands, so an older
    entry of the same id is void. Whole releases and whole evictions are single array operations,
    which is what makes this several times cheaper per block than a linked list or a sorted container
    in Python. Cost: O(1) amortised per block.
    """

    def bind(self, view: BlockView) -> None:
        """Make an empty order."""
        super().bind(view)
        self._make(view.num_blocks, np.zeros(0, np.int32))

    def _make(self, num_blocks: int, ids: Int32Array) -> None:
        """Make an order for ``num_blocks`` that begins with ``ids``."""
        size = 2 * num_blocks + 64
        place: Int64Array = np.full(num_blocks + 1, _NOWHERE, np.int64)
        log: Int32Array = np.zeros(size, np.int32)
        places: Int64Array = np.arange(size)
        kept: npt.NDArray[np.bool_] = np.zeros(num_blocks + 1, np.bool_)
        place[ids], log[: len(ids)] = places[: len(ids)], ids
        self._place, self._log, self._places, self._kept = place, log, places, kept
        self._head, self._tail = 0, len(ids)

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

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Let ``new[i]`` stand where ``old[i]`` stands, if it does.

        Raises ``BlockError``, with nothing changed, if an id of ``new`` is here. Cost: O(n log n).
        """
        old, new = as_renaming(old, new, self.num_blocks)
        refuse_idle(new[self._place[new] != _NOWHERE])
        place = self._place[old]
        here = place != _NOWHERE
        self._place[old] = _NOWHERE
        self._place[new[here]] = place[here]
        self._log[place[here]] = new[here]

    def resize(self, num_blocks: int) -> None:
        """Let ids be ``1..num_blocks`` from now on. Cost: O(blocks), vectorised.

        Raises ``BlockError``, with nothing changed, if one above is here.
        """
        ids = self.ids()
        refuse_above(ids, num_blocks, "idle")
        self._make(num_blocks, ids)
        super().resize(num_blocks)

    def _compact(self) -> None:
        """Move the valid entries to the front; at most num_blocks of them, so half the log is free again."""
        ids = self._oldest(len(self._place), self._any)
        self._log[: len(ids)] = ids
        self._place[ids] = self._places[: len(ids)]
        self._head, self._tail = 0, len(ids)


def refuse_idle(ids: Int32Array) -> None:
    """Raise ``BlockError`` unless empty: names to give that the order knows."""
    if len(ids):
        raise BlockError(f"cannot rename a block to {ids[0]}, which is idle")
