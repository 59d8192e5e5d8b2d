"""LRU on the compiled core: links between blocks."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import _core
from pagedkv.block_ids import NO_BLOCKS, as_renaming, refuse_above
from pagedkv.block_tables import Int32Array
from pagedkv.policies.numpy_lru import refuse_idle
from pagedkv.policies.policy import BlockView, EvictionPolicy

_NOWHERE = -1


class NativeLRU(_core.Order, EvictionPolicy):
    """What `pagedkv.policies.lru.LRU` says, as a ring of links through block 0.

    ``_next[0]`` is the oldest block and ``_prev[0]`` the newest; ``_next`` of a block that is not here is -1.
    Cost: O(1) per block.
    """

    def bind(self, view: BlockView) -> None:
        """Make an empty order."""
        super().bind(view)
        self._make(view.num_blocks, NO_BLOCKS)

    def _make(self, num_blocks: int, ids: Int32Array) -> None:
        """Make an order for ``num_blocks`` that begins with ``ids``."""
        after: Int32Array = np.full(num_blocks + 1, _NOWHERE, np.int32)
        before: Int32Array = np.zeros(num_blocks + 1, np.int32)
        kept: npt.NDArray[np.bool_] = np.zeros(num_blocks + 1, np.bool_)
        after[0] = 0
        self._next, self._prev, self._kept = after, before, kept
        self._attach_core()
        self._push(ids)

    def _attach_core(self) -> None:
        self._attach(len(self._next) - 1, self._next, self._prev, self._kept)

    def push(self, ids: Int32Array) -> None:
        """Add ids as the most recently used, the first of them as the least recent."""
        self._push(ids)

    def discard(self, ids: Int32Array) -> None:
        """Forget ids, whether they are here or not."""
        self._discard(ids)

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Up to ``count`` least recently used ids, oldest first, none of them in ``keep``."""
        found: Int32Array = np.empty(max(0, min(count, len(self._next) - 1)), np.int32)
        num_found = self._first(keep, found)
        return found if num_found == len(found) else found[:num_found].copy()

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Let ``new[i]`` stand where ``old[i]`` stands, if it does.

        Raises ``BlockError``, with nothing changed, if an id of ``new`` is here. Cost: O(n log n).
        """
        old, new = as_renaming(old, new, self.num_blocks)
        refuse_idle(new[self._next[new] != _NOWHERE])
        self._rename(old, new)

    def resize(self, num_blocks: int) -> None:
        """Let ids be ``1..num_blocks`` from now on. Cost: O(blocks), vectorised.

        Raises ``BlockError``, with nothing changed, if one above is here.
        """
        ids = self.ids()
        refuse_above(ids, num_blocks, "idle")
        self._make(num_blocks, ids)
        super().resize(num_blocks)

    def __getstate__(self) -> dict[str, Any]:
        """Everything to copy; what the core points to is said anew."""
        return vars(self).copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over copied arrays."""
        vars(self).update(state)
        if "_next" in state:  # bound before it was copied
            self._attach_core()
