"""Chained hashes of full blocks, for a whole prompt in one vectorised pass."""

import numpy as np
import numpy.typing as npt

from pagedkv.page_table import Int32Array

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15


class BlockHasher:
    """64-bit hashes that chain each block to its prefix.

    With ``c[i]`` a mixed multiply-add hash of the tokens (and extra key) of block i, all mod 2^64::

        hash[i] = hash[i - 1] + c[i] * p^i        (p odd, so p^i is invertible; hash[-1] = 0)

    The sum makes the whole chain one cumulative sum instead of one step per block. A hash here is
    only an index: the prefix index compares parents, tokens and extra keys before it believes one.
    The constants come from splitmix64 (Steele, Lea, Flood 2014), so hashes are the same in every
    process and independent of ``PYTHONHASHSEED``.
    """

    def __init__(self, block_size: int) -> None:
        """Prepare the multipliers of a block of ``block_size`` tokens."""
        constants = _mix(np.arange(1, block_size + 2, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)
        self._token_multipliers = constants[:-1]
        self._power = int(constants[-1])
        self._powers: UInt64Array = np.ones(1, np.uint64)

    def chain(
        self, tokens: Int32Array, extra: UInt64Array | None, position: int, previous: np.uint64
    ) -> UInt64Array:
        """Hashes of consecutive blocks: uint64 [n].

        ``tokens`` [n, block_size] int32; ``extra`` [n] hashes of the extra keys, or None for none;
        ``position`` the index of the first block in its sequence; ``previous`` the hash of the block
        before it. Cost: O(n x block_size).
        """
        # The offset keeps a block of zeros from hashing to zero, which would add nothing to the chain.
        content = tokens.astype(np.uint64) @ self._token_multipliers + np.uint64(_GOLDEN)
        if extra is not None:
            content += extra
        weighted = _mix(content) * self._powers_from(position, len(tokens))
        weighted[:1] += previous
        return np.cumsum(weighted, dtype=np.uint64)

    def _powers_from(self, position: int, count: int) -> UInt64Array:
        """``p^position .. p^(position + count - 1)`` mod 2^64, from a table that doubles when needed."""
        while len(self._powers) < position + count:
            step = np.uint64(pow(self._power, len(self._powers), 1 << 64))
            self._powers = np.concatenate([self._powers, self._powers * step])
        return self._powers[position : position + count]


def _mix(x: UInt64Array) -> UInt64Array:
    """Finalizer of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
