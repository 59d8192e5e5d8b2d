"""Blocks that wait to be copied before anything else is written."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pagedkv.block_pool import NO_BLOCKS
from pagedkv.errors import SequenceError
from pagedkv.page_table import Int32Array


class BlockCopies(NamedTuple):
    """Blocks to copy, ``src[i]`` to ``dst[i]``, both int32 [n]: read all sources before writing any."""

    src: Int32Array
    dst: Int32Array


class PendingCopies:
    """The copies that copy-on-write and partial hits ask for, until the engine has run them.

    ::

        if len(manager.copies):
            copies = manager.copies.pending          # nothing is forgotten yet:
            storage.copy_blocks(*copies)             # a copy that fails can be run again
            manager.copies.take()

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(num_blocks=4, block_size=4)
    >>> _ = manager.open("a", [1, 2]); manager.commit("a", [1, 2])
    >>> _ = manager.fork("a", "b"); _ = manager.append("b")
    >>> manager.copies.take()
    BlockCopies(src=array([1], dtype=int32), dst=array([2], dtype=int32))
    >>> len(manager.copies)
    0
    """

    def __init__(self) -> None:
        """Start with none."""
        self._src_of: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many copies wait."""
        return len(self._src_of)

    @property
    def pending(self) -> BlockCopies:
        """The copies that wait, all at once."""
        count = len(self._src_of)
        if not count:
            return BlockCopies(NO_BLOCKS, NO_BLOCKS)
        return BlockCopies(
            np.fromiter(self._src_of.values(), np.int32, count),
            np.fromiter(self._src_of.keys(), np.int32, count),
        )

    def take(self) -> BlockCopies:
        """Hand over the copies that wait and forget them; run them before any later write."""
        copies = self.pending
        self._src_of.clear()
        return copies

    # -- the manager's side

    def note(self, src: Int32Array, dst: Int32Array) -> None:
        """Ask for copies into new blocks."""
        for old, new in zip(src.tolist(), dst.tolist(), strict=True):
            # A source whose own copy is still pending has its content in that copy's source.
            self._src_of[new] = self._src_of.get(old, old)

    def require_done(self, ids: Int32Array) -> None:
        """Refuse blocks whose copy is still pending: what is written to them now would be overwritten."""
        if self._src_of:
            for block in ids.tolist():
                if block in self._src_of:
                    raise SequenceError(
                        f"block {block} awaits its copy from block {self._src_of[block]}: "
                        "run the copies first (copies.take)"
                    )

    def into(self, ids: Int32Array) -> set[int]:
        """Which of these blocks await a copy."""
        blocks: list[int] = ids.tolist()
        return self._src_of.keys() & blocks

    def drop(self, blocks: Iterable[int]) -> None:
        """Forget copies into blocks that no longer have content."""
        for block in blocks:
            self._src_of.pop(block, None)
