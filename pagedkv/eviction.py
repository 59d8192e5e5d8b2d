"""The order in which cached blocks are given up: least recently used, leaves first."""

import numpy as np

from pagedkv.page_table import Int32Array, Int64Array

_NOWHERE = -1


class LRUOrder:
    """Cached blocks, least recently used first.

    A log of ids with lazy deletion: ``_place[id]`` is where the id's valid entry stands, so an older
    entry of the same id is void. Whole releases and whole evictions are single array operations,
    which is what makes this several times cheaper per block than a linked list or a sorted container.

    Leaves come first by construction: a sequence releases its blocks deepest first, and a block can
    only be used while its whole prefix is, so a parent is never less recent than its child.

    Cost: O(1) amortised per block, whatever the number cached.

    >>> order = LRUOrder(4)
    >>> order.push(np.array([3, 1, 2], np.int32)); order.discard(np.array([1], np.int32))
    >>> order.first(2, keep=np.array([3], np.int32)).tolist()
    [2]
    """

    def __init__(self, num_blocks: int) -> None:
        """Make an empty order for ids ``1..num_blocks``."""
        self._place: Int64Array = np.full(num_blocks + 1, _NOWHERE, np.int64)
        self._log: Int32Array = np.zeros(2 * num_blocks + 64, np.int32)
        self._head = 0
        self._tail = 0

    def push(self, ids: Int32Array) -> None:
        """Add ids as the most recently used, the first of them as the least recent."""
        if self._tail + len(ids) > len(self._log):
            self._compact()
        end = self._tail + len(ids)
        self._log[self._tail : end] = ids
        self._place[ids] = np.arange(self._tail, end)
        self._tail = end

    def discard(self, ids: Int32Array) -> None:
        """Forget ids, whether they are here or not."""
        self._place[ids] = _NOWHERE

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Up to ``count`` least recently used ids, oldest first, none of them in ``keep``."""
        self._skip_void()
        hidden = self._place[keep]
        self._place[keep] = _NOWHERE
        try:
            return self._oldest(count)
        finally:
            self._place[keep] = hidden

    def _skip_void(self) -> None:
        """Move the head to the oldest valid entry: what is void stays void."""
        while self._head < self._tail:
            stop = min(self._head + 512, self._tail)
            valid = self._place[self._log[self._head : stop]] == np.arange(self._head, stop)
            if valid.any():
                self._head += int(valid.argmax())
                return
            self._head = stop

    def _oldest(self, count: int) -> Int32Array:
        """Scan windows from the head until enough valid entries are seen."""
        parts: list[Int32Array] = []
        start, width = self._head, max(64, 2 * count)
        while count > 0 and start < self._tail:
            stop = min(start + width, self._tail)
            window = self._log[start:stop]
            valid = window[self._place[window] == np.arange(start, stop)][:count]
            parts.append(valid)
            count -= len(valid)
            start, width = stop, 2 * width
        return np.concatenate(parts) if parts else self._log[:0]

    def _compact(self) -> None:
        """Move the valid entries to the front; at most num_blocks of them, so half the log is free again."""
        ids = self._oldest(len(self._place))
        self._log[: len(ids)] = ids
        self._place[ids] = np.arange(len(ids))
        self._head, self._tail = 0, len(ids)

    def ids(self) -> Int32Array:
        """All ids, least recently used first."""
        return self._oldest(len(self._place))
