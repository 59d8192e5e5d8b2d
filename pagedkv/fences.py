"""Blocks that were given up while work that may touch them was still under way."""

from pagedkv.errors import PagedKVError
from pagedkv.page_table import Int32Array


class Fences:
    """Holds blocks until every fence that was open when they were released has been signalled.

    ::

        open 0   release a   open 1   release b   signal 1   signal 0
                 a waits     '        a, b wait   '          a and b are free
                 for 0                for 0 and 0, 1
    """

    def __init__(self) -> None:
        """Start with no fence open."""
        self._open: list[int] = []
        self._next = 0
        self._held: list[
            tuple[int, Int32Array]
        ] = []  # (youngest fence open at the release, ids), oldest first

    def __bool__(self) -> bool:
        """Tell whether any fence is open."""
        return bool(self._open)

    def open(self) -> int:
        """Open a fence; its number is never used again."""
        number, self._next = self._next, self._next + 1
        self._open.append(number)
        return number

    def hold(self, ids: Int32Array) -> None:
        """Keep blocks until the fences that are open now are signalled."""
        if len(ids):
            self._held.append((self._open[-1], ids))

    def signal(self, number: int) -> list[Int32Array]:
        """Close a fence; returns the blocks that wait for no other, in the order of their release.

        Raises ``PagedKVError`` if the fence is not open.
        """
        if number not in self._open or isinstance(number, bool):
            raise PagedKVError(f"fence {number!r} is not open, open are {self._open}")
        self._open.remove(number)
        oldest = self._open[0] if self._open else self._next
        done = [ids for youngest, ids in self._held if youngest < oldest]
        del self._held[: len(done)]
        return done

    def held(self) -> list[Int32Array]:
        """Blocks that wait, in the order of their release."""
        return [ids for _, ids in self._held]
