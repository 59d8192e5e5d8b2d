"""The block pool on the compiled core, over the arrays of the numpy engine."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import _core
from pagedkv.block_ids import NO_BLOCKS
from pagedkv.block_tables import Int32Array
from pagedkv.numpy_block_pool import NumpyBlockPool


class NativeBlockPool(_core.Pool, NumpyBlockPool):
    """What `pagedkv.block_pool.BlockPool` says, one loop over the ids per call.

    The core checks all ids before it changes anything, and refuses without a word: the numpy engine then
    gets the same call, to say what is wrong or to convert ids that are no int32. The two counts live in
    the core, ``_num_free`` and ``_num_cached``.
    """

    def _attach_core(self) -> None:
        self._attach(self.num_blocks, self.ref_count, self.state, self._free, self._seen)

    def acquire(
        self, num_new: int, shared: Int32Array = NO_BLOCKS, victims: Int32Array = NO_BLOCKS
    ) -> Int32Array:
        """Take a reference on each of ``shared`` and hand out ``num_new`` blocks, in one step."""
        if 0 <= num_new <= self.num_blocks:
            new: Int32Array = np.empty(num_new, np.int32)
            if self._acquire(new, shared, victims):
                return new
        return super().acquire(num_new, shared, victims)

    def release(self, ids: Int32Array, retain: npt.NDArray[np.bool_]) -> Int32Array:
        """Drop one reference on each id; at zero a block becomes cached where ``retain``, else free."""
        if isinstance(ids, np.ndarray):
            cached: Int32Array = np.empty(ids.size, np.int32)
            count = self._release(ids, retain, cached)
            if count == len(cached):
                return cached
            if count >= 0:
                return cached[:count]
        return super().release(ids, retain)

    def evict(self, ids: Int32Array) -> None:
        """Turn cached blocks into free ones. Raises ``BlockError`` with nothing changed."""
        if not self._evict(ids):
            super().evict(ids)

    def _require(self, ids: Int32Array, least: int, most: int, verb: str) -> int:
        in_least = self._check(ids, least, most)
        if in_least < 0:
            self._refuse(ids, least, most, verb)
        return in_least

    def __getstate__(self) -> dict[str, Any]:
        """Everything to copy; what the core points to is said anew."""
        return vars(self) | {"_num_free": self._num_free, "_num_cached": self._num_cached}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over copied arrays."""
        for name, value in state.items():
            setattr(self, name, value)
        self._attach_core()
