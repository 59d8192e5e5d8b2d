"""Blocks that were given up while work that may touch them was still under way."""

from collections import deque
from collections.abc import Callable

import numpy as np

from pagedkv.block_ids import NO_BLOCKS
from pagedkv.block_tables import Int32Array
from pagedkv.errors import PagedKVError


class Fences:
    """Holds blocks until every fence that was open when they were released has been signalled.

    Open one before work starts that may touch any block held now: an asynchronous step, a copy. From then
    on no block that is given up is handed out or evicted before the fence is signalled. It counts as
    active until then, and can be hit if its content is cached. So are the blocks that ``copies`` read held
    until their copies are taken, and from then on like any other that is given up.
    Cost: O(1), and O(blocks) to give them up.

    ::

        open 0   release a   open 1   release b   signal 1   signal 0
                 a waits     '        a, b wait   '          a and b are free
                 for 0                for 0 and 0, 1

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(num_blocks=1, block_size=4)
    >>> _ = manager.open("a", [1, 2])
    >>> fence = manager.fences.open()
    >>> manager.close("a"); manager.open("b", [3]) is None
    True
    >>> manager.fences.signal(fence); manager.open("b", [3])
    Opened(num_tokens=1, num_cached_tokens=0)
    """

    def __init__(self, give_up: Callable[[Int32Array], None]) -> None:
        """Start with no fence open; ``give_up`` drops the references that waited."""
        self._give_up = give_up
        self.open_numbers: list[int] = []
        self._next = 0
        # (youngest fence open at the release, ids), oldest first
        self._held: deque[tuple[int, Int32Array]] = deque()

    def __bool__(self) -> bool:
        """Tell whether any fence is open."""
        return bool(self.open_numbers)

    def open(self) -> int:
        """Open a fence; its number is never used again."""
        number, self._next = self._next, self._next + 1
        self.open_numbers.append(number)
        return number

    def signal(self, number: int) -> None:
        """Say that the work behind a fence is done; gives up what waited for it alone, as it was released.

        Raises ``PagedKVError`` if the fence is not open.
        """
        if number not in self.open_numbers or isinstance(number, bool):
            raise PagedKVError(f"fence {number!r} is not open ({len(self.open_numbers)} are)")
        self.open_numbers.remove(number)
        oldest = self.open_numbers[0] if self.open_numbers else self._next
        while self._held and self._held[0][0] < oldest:
            self._give_up(self._held[0][1])
            self._held.popleft()

    # -- the manager's side

    def hold(self, ids: Int32Array) -> None:
        """Keep blocks until the fences that are open now are signalled."""
        if len(ids):
            self._held.append((self.open_numbers[-1], ids))

    def held(self) -> list[Int32Array]:
        """Blocks that wait, in the order of their release."""
        return [ids for _, ids in self._held]

    def num_references(self, block: int) -> int:
        """How many references on a block wait."""
        return sum(int(np.count_nonzero(ids == block)) for _, ids in self._held)

    def held_alone(self, ref_count: Int32Array, others: Int32Array = NO_BLOCKS) -> Int32Array:
        """Blocks that only fences and ``others`` hold, by their references; ids below 1 are left out."""
        if not self._held and not len(others):
            return NO_BLOCKS
        ids, counts = np.unique(np.concatenate([*self.held(), others]), return_counts=True)
        blocks, counts = ids[ids > 0], counts[ids > 0]
        alone: Int32Array = blocks[ref_count[blocks] == counts]
        return alone
