"""The prefix index: finds cached blocks by content, and proves that the content is the same."""

from itertools import takewhile

import numpy as np
import numpy.typing as npt

from pagedkv.block_hash import BlockHasher, UInt64Array
from pagedkv.page_table import NULL_BLOCK, Int32Array

ROOT = NULL_BLOCK
"""Parent of the first block of every sequence."""


class PrefixIndex:
    """Maps chained block hashes to block ids, one block per content.

    Per block, as arrays: ``tokens`` [num_blocks + 1, block_size] int32, ``parent``, ``extra`` (id of
    the extra key, 0 for none), ``hash`` and whether it is ``indexed``. A lookup trusts no hash: the
    parent, every token and the extra key are compared. Two contents with one hash cost a missed hit,
    never a wrong one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Make an empty index for ids ``1..num_blocks``."""
        self.hasher = BlockHasher(block_size)
        self.tokens: Int32Array = np.zeros((num_blocks + 1, block_size), np.int32)
        self.parent: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self.extra: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self.hash: UInt64Array = np.zeros(num_blocks + 1, np.uint64)
        self.indexed: npt.NDArray[np.bool_] = np.zeros(num_blocks + 1, np.bool_)
        self._block_of: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of indexed blocks."""
        return len(self._block_of)

    def match(
        self, tokens: Int32Array, extra: Int32Array, hashes: UInt64Array, parent: int = ROOT
    ) -> Int32Array:
        """Longest run of indexed blocks that continues ``parent`` with exactly this content.

        ``tokens`` [n, block_size] int32, ``extra`` [n] int32, ``hashes`` [n] uint64.
        Returns ids, int32 [0..n]. Cost: O(hit length x block_size); changes nothing.
        """
        found = list(takewhile(bool, map(self._block_of.get, hashes.tolist())))
        if not found:
            return np.zeros(0, np.int32)
        ids = np.array(found, np.int32)
        n = len(ids)
        parents = np.concatenate([np.array([parent], np.int32), ids[:-1]])
        same = (self.parent[ids] == parents) & (self.extra[ids] == extra[:n])
        same &= (self.tokens[ids] == tokens[:n]).all(axis=1)
        return ids if same.all() else ids[: int(same.argmin())]

    def insert(self, ids: Int32Array, extra: Int32Array, hashes: UInt64Array, parent: int) -> int:
        """Index consecutive blocks whose ``tokens`` rows are already written; returns how many.

        Stops at the first hash that another content holds: the blocks from there on stay private.
        Cost: O(n).
        """
        keys, values = hashes.tolist(), ids.tolist()
        holders = list(map(self._block_of.setdefault, keys, values))
        n = len(values)
        if holders != values:
            n = next(i for i, (a, b) in enumerate(zip(holders, values, strict=True)) if a != b)
            for key, block, holder in zip(keys[n:], values[n:], holders[n:], strict=True):
                if block == holder:
                    del self._block_of[key]
        ids = ids[:n]
        self.parent[ids] = np.concatenate([np.array([parent], np.int32), ids])[:n]
        self.extra[ids] = extra[:n]
        self.hash[ids] = hashes[:n]
        self.indexed[ids] = True
        return n

    def remove(self, ids: Int32Array) -> None:
        """Forget indexed blocks; the caller removes children before or with their parents. Cost: O(n)."""
        for key in self.hash[ids].tolist():
            del self._block_of[key]
        self.indexed[ids] = False

    def block_of(self, block_hash: int) -> int | None:
        """Id of the block that holds a hash, or None."""
        return self._block_of.get(block_hash)
