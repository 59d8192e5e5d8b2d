"""Arrays of block ids, and arrays with one row per block."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.block_tables import Int32Array
from pagedkv.errors import BlockError, PagedKVError, require_count

NO_BLOCKS: Int32Array = np.zeros(0, np.int32)

MOST_BLOCKS = 2**31 - 2
"""More have no id in an int32."""

_T = TypeVar("_T", bound=np.generic)


def require_num_blocks(name: str, value: int) -> int:
    """How many blocks a pool is to have, as a Python int; ``PagedKVError`` for what no pool can have."""
    count = require_count(name, value, 1)
    if count > MOST_BLOCKS:
        raise PagedKVError(f"{name} must be at most {MOST_BLOCKS}, as ids are int32, got {count}")
    return count


def as_ids(ids: npt.ArrayLike) -> Int32Array:
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


def as_renaming(old: npt.ArrayLike, new: npt.ArrayLike, num_blocks: int) -> tuple[Int32Array, Int32Array]:
    """Two equally long arrays of ids ``1..num_blocks``, no id twice in both together; else ``BlockError``.

    >>> as_renaming([7, 8], [1, 8], 9)
    Traceback (most recent call last):
    pagedkv.errors.BlockError: cannot rename block 8 twice in one call
    """
    old, new = as_ids(old), as_ids(new)
    if len(old) != len(new):
        raise BlockError(f"cannot rename {len(old)} blocks to {len(new)}")
    both = np.concatenate([old, new])
    outside = (both < 1) | (both > num_blocks)
    if outside.any():
        raise BlockError(f"cannot rename block {both[outside][0]}: ids are 1..{num_blocks}")
    first = np.unique(both, return_index=True)[1]
    if len(first) < len(both):
        raise BlockError(f"cannot rename block {np.delete(both, first)[0]} twice in one call")
    return old, new


def refuse_above(ids: Int32Array, num_blocks: int, what: str) -> None:
    """Raise ``BlockError`` if one of ``ids`` has no place among ``num_blocks``, or none ever has."""
    if num_blocks < 1:
        raise BlockError(f"there must be at least 1 block, got {num_blocks}")
    above = ids[ids > num_blocks]
    if len(above):
        raise BlockError(f"cannot shrink to {num_blocks} blocks: block {above[0]} is {what}")


def resized(array: npt.NDArray[_T], num_blocks: int) -> npt.NDArray[_T]:
    """A copy of an array ``[old num_blocks + 1, ...]`` for ``num_blocks``: cut, or with zeros at its end.

    >>> resized(np.array([0, 5, 6], np.int32), 3)
    array([0, 5, 6, 0], dtype=int32)
    """
    copy = np.zeros((num_blocks + 1, *array.shape[1:]), array.dtype)
    kept = min(len(copy), len(array))
    copy[:kept] = array[:kept]
    return copy
