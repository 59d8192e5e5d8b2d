"""The arithmetic of blocks, written once."""

from typing import Any, overload

import numpy as np
import numpy.typing as npt


@overload
def div_ceil(a: int, b: int) -> int: ...
@overload
def div_ceil(a: npt.NDArray[np.int64], b: int) -> npt.NDArray[np.int64]: ...
def div_ceil(a: Any, b: int) -> Any:
    """Smallest integers not below ``a / b``, for ``b > 0``: blocks of size b that a tokens need.

    >>> div_ceil(500, 16), div_ceil(512, 16), div_ceil(0, 16)
    (32, 32, 0)
    >>> div_ceil(np.array([33, 0]), 16).tolist()
    [3, 0]
    """
    return -(-a // b)
