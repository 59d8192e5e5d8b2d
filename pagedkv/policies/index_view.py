"""What policies see of the prefix index."""

import hashlib

import numpy as np
import numpy.typing as npt

from pagedkv.block_tables import Int32Array
from pagedkv.namespace import ExtraKeys, Namespace
from pagedkv.prefix_index import PrefixIndex

_MASK = 2**64 - 1


class IndexView:
    """The prefix index as a `BlockView`."""

    def __init__(self, num_blocks: int, index: PrefixIndex, extra_keys: ExtraKeys) -> None:
        """Look at ``index``, whose blocks may have ``extra_keys``."""
        self.num_blocks = num_blocks
        self._index = index
        self._extra_keys = extra_keys
        self._weights = _odd_weights(index.tokens.shape[1])

    def parent(self, block: int) -> int:
        """The block before this one, 0 for the first of a branch. Cost: O(1)."""
        return self._index.parent(block)

    def path(self, block: int) -> Int32Array:
        """All blocks from the first to this one. Cost: O(length) as arrays, O(1) per branch."""
        return self._index.path(block)

    def namespace(self, block: int) -> Namespace | None:
        """Whose content it is; None for the default namespace. Cost: as ``path``."""
        extra = int(self._index.extra[self.path(block)[0]])
        first = self._extra_keys.key(extra)[0] if extra else None
        return first if isinstance(first, Namespace) else None

    def row_hashes(self, ids: Int32Array) -> list[int]:
        """64 bits for what each block holds itself, without its prefix; equal in any process."""
        sums = (self._index.tokens[ids].astype(np.uint64) * self._weights).sum(axis=1, dtype=np.uint64)
        hashes: list[int] = sums.tolist()
        extra = self._index.extra[ids]
        for i in np.flatnonzero(extra).tolist():
            text = repr(self._extra_keys.key(int(extra[i]))).encode()
            digest = hashlib.blake2b(text, digest_size=8).digest()
            hashes[i] = (hashes[i] + int.from_bytes(digest, "little")) & _MASK
        return hashes


def _odd_weights(count: int) -> npt.NDArray[np.uint64]:
    """Well mixed odd numbers, always the same."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: npt.NDArray[np.uint64] = mixed | np.uint64(1)
    return odd
