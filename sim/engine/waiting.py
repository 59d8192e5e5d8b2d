"""Requests that wait to be admitted, in the order in which the engine serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Final

from pagedkv.errors import PagedKVError
from pagedkv.sim.requests import Requests

QUEUES: Final = ("fcfs", "priority", "shortest", "deadline")
"""Orders of service; those that arrived earlier go first among equals."""

_Key = tuple[float, int]


class WaitingQueue:
    """An order that a request keeps for its life, so that a preempted one comes back to its old place.

    ::

        fcfs      by arrival                 shortest  by the tokens of the prompt
        priority  by the trace's priority    deadline  by arrival + deadline

    Who is first in the order is never preempted while others run: somebody always makes progress.

    >>> from pagedkv.sim.trace import Trace
    >>> queue = WaitingQueue("shortest", Trace.from_lengths([0, 1, 2], [9, 5, 7], [1, 1, 1]), lambda i: 0.0)
    >>> queue.add(0); queue.add(1); queue.add(2)
    >>> queue.first, queue.last_of([1, 0]), len(queue)
    (1, 0, 3)
    >>> queue.take(), queue.take(), queue.take()
    (1, 2, 0)
    """

    def __init__(self, order: str, trace: Requests, arrival_s: Callable[[int], float]) -> None:
        """Start empty; ``arrival_s`` says when a request came. ``PagedKVError`` for an order not known."""
        if order not in QUEUES:
            raise PagedKVError(f"queue must be one of {', '.join(QUEUES)}, got {order!r}")
        self._order, self._trace, self._arrival_s = order, trace, arrival_s
        self._keys: dict[int, _Key] = {}
        self._heap: list[tuple[_Key, int]] = []
        self._held: list[int] = []

    def __len__(self) -> int:
        """Return how many wait, those set aside included."""
        return len(self._heap) + len(self._held)

    @property
    def has_first(self) -> bool:
        """Whether one waits that is not set aside."""
        return bool(self._heap)

    @property
    def first(self) -> int:
        """The request that is next."""
        return self._heap[0][1]

    def add(self, request: int) -> None:
        """Let a request wait, for the first time or again."""
        if request not in self._keys:
            self._keys[request] = (self._rank(request), len(self._keys))
        heappush(self._heap, (self._keys[request], request))

    def take(self) -> int:
        """Remove and return the first."""
        return heappop(self._heap)[1]

    def set_aside(self) -> None:
        """Pass over the first until ``reconsider``."""
        self._held.append(self.take())

    def reconsider(self) -> None:
        """Give those set aside their places back."""
        for request in self._held:
            heappush(self._heap, (self._keys[request], request))
        self._held.clear()

    def last_of(self, requests: Iterable[int]) -> int:
        """Whom of several the order serves last: the one to preempt."""
        return max(requests, key=self._keys.__getitem__)

    def _rank(self, request: int) -> float:
        if self._order == "priority":
            return int(self._trace.priority[request])
        if self._order == "shortest":
            return int(self._trace.input_len[request])
        if self._order == "deadline":
            return self._arrival_s(request) + float(self._trace.deadline_s[request])
        return 0
