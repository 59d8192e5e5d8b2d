"""Blocks that wait to be copied before anything else is written."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from pagedkv.block_pool import NO_BLOCKS
from pagedkv.block_tables import Int32Array
from pagedkv.errors import SequenceError
from pagedkv.fences import Fences


class BlockCopies(NamedTuple):
    """Blocks to copy, ``src[i]`` to ``dst[i]``, both int32 [n]; no block is both, so any order will do."""

    src: Int32Array
    dst: Int32Array


class PendingCopies:
    """The copies that copy-on-write and partial hits ask for, until the engine has run them.

    ::

        if len(manager.copies):
            copies = manager.copies.pending          # nothing is forgotten yet:
            storage.copy_blocks(*copies)             # a copy that fails can be run again
            manager.copies.take()

    Until then each of them holds the block that it reads: nothing else is written there. It counts as active
    and may be what the next ``open`` or ``step`` waits for, so take the copies before you give one up. Run
    them before any later write; or under a fence that was open when they were taken, which then holds what
    they read, and before anything else is written where they write. A copy for whom nobody is left any more
    is forgotten.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(num_blocks=4, block_size=4)
    >>> _ = manager.open("a", [1, 2]); manager.commit("a", [1, 2])
    >>> _ = manager.fork("a", "b"); _ = manager.append("b")
    >>> manager.copies.take()
    BlockCopies(src=array([1], dtype=int32), dst=array([2], dtype=int32))
    >>> len(manager.copies)
    0
    """

    def __init__(self, give_up: Callable[[Int32Array], None], make_room: Callable[[int], None]) -> None:
        """Start with none; ``give_up`` drops references on what was read, or leaves them to fences.

        ``make_room`` makes sure that it cannot run out of memory for so many.
        """
        self._give_up, self._make_room = give_up, make_room
        self.source_of: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many copies wait."""
        return len(self.source_of)

    @property
    def pending(self) -> BlockCopies:
        """The copies that wait, all at once."""
        count = len(self.source_of)
        if not count:
            return BlockCopies(NO_BLOCKS, NO_BLOCKS)
        return BlockCopies(
            np.fromiter(self.source_of.values(), np.int32, count),
            np.fromiter(self.source_of.keys(), np.int32, count),
        )

    def take(self) -> BlockCopies:
        """Hand over the copies that wait and forget them; run them before any later write."""
        copies = self.pending
        self._make_room(len(copies.src))  # or fail while nothing is forgotten yet
        self.source_of.clear()
        for block in copies.src.reshape(-1, 1):  # one by one, since several may read the same block
            self._give_up(block)
        return copies

    # -- the manager's side

    def note(self, src: Int32Array, dst: Int32Array) -> None:
        """Ask for copies into new blocks of what ``sources`` names; take over a reference on each source."""
        self.source_of.update(zip(dst.tolist(), src.tolist(), strict=True))

    def sources(self, ids: Int32Array) -> Int32Array:
        """Where the content of blocks is now: that of one which awaits its copy is in the copy's source."""
        if not self.source_of:
            return ids
        return np.array([self.source_of.get(block, block) for block in ids.tolist()], np.int32)

    def require_done(self, ids: Int32Array) -> None:
        """Refuse blocks whose copy is still pending: what is written to them now would be overwritten."""
        if self.source_of:
            for block in ids.tolist():
                if block in self.source_of:
                    raise SequenceError(
                        f"block {block} awaits its copy from block {self.source_of[block]}: "
                        "run the copies first (copies.take)"
                    )

    def into(self, ids: Int32Array) -> list[int]:
        """Which of these blocks await a copy."""
        return [block for block in ids.tolist() if block in self.source_of]

    def left_behind(self, ids: Int32Array, ref_count: Int32Array, fences: Fences) -> list[int]:
        """Which of these blocks await a copy for whoever gives them up now, and nobody else but fences."""
        return [b for b in self.into(ids) if ref_count[b] - fences.num_references(b) == 1]

    def read_by(self, blocks: list[int]) -> Int32Array:
        """The sources of the copies into these blocks."""
        return np.array([self.source_of[block] for block in blocks], np.int32)

    def forget(self, blocks: Iterable[int]) -> None:
        """Let no copy wait into these blocks; the caller has given up what would have been read."""
        for block in blocks:
            del self.source_of[block]
