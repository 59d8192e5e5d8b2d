"""What will happen at known times: ends of transfers."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple


class OnTheWay(NamedTuple):
    """An admitted request whose blocks are being filled over a link."""

    ready_s: float
    """From when on its transfer can begin."""
    done_s: Callable[[], float]
    """When it ends; begins it if need be."""
    arrive: Callable[[], None]
    """Lets it run; does nothing the second time."""


class Happenings:
    """Actions by time, those of one time in the order in which they were told.

    >>> heard = []
    >>> happenings = Happenings()
    >>> happenings.at(2.0, lambda: heard.append("b")); happenings.at(1.0, lambda: heard.append("a"))
    >>> happenings.next_s, happenings.run_until(1.5), heard
    (1.0, None, ['a'])
    """

    def __init__(self) -> None:
        """Start with nothing to come."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_told = 0

    @property
    def next_s(self) -> float:
        """When the next thing happens; inf if nothing is to come."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heappush(self._heap, (time_s, self._num_told, action))
        self._num_told += 1

    def run_until(self, now_s: float) -> None:
        """Let happen what is due."""
        while self._heap and self._heap[0][0] <= now_s:
            heappop(self._heap)[2]()
