"""When requests come: at the trace's times, or a while after the end of their session's previous turn."""

from __future__ import annotations

import math
from heapq import heappop, heappush

import numpy as np

from pagedkv.sim.requests import Requests


class Arrivals:
    """Requests that are yet to come. A follow-up of a session is known once the turn before it is done.

    ::

        turn 1          think_s           turn 2
        |---- served ----|................|---- served ----|
                          not before its own arrival_s, either

    >>> from pagedkv.sim.trace import Trace
    >>> talk = {"session": [7, 7], "think_s": [math.nan, 2]}
    >>> trace = Trace("talk", [0, 0], [5, 9], [1, 1], [], [0, 0, 0], 0, 0, **talk)
    >>> arrivals = Arrivals(trace)
    >>> arrivals.take(10.0), arrivals.next_s
    ([0], inf)
    >>> arrivals.finished(0, 30.0); arrivals.next_s, arrivals.take(32.0)
    (32.0, [1])
    """

    def __init__(self, trace: Requests, *, expected: bool = True) -> None:
        """Everything in the trace is to come, or, unless ``expected``, only what is added."""
        self.arrival_s = np.array(trace.arrival_s)
        """[n] float64: when each request came; of a follow-up not yet due, the trace's time."""
        self._think_s = trace.think_s
        self._follow_up = _follow_ups(trace) if expected else {}
        fixed = np.ones(len(trace), np.bool_)
        fixed[list(self._follow_up.values())] = False
        self._fixed = np.flatnonzero(fixed) if expected else np.empty(0, np.int64)
        self._fixed_s = self.arrival_s[self._fixed]
        self._num_taken = 0
        self._more: list[tuple[float, int]] = []

    @property
    def next_s(self) -> float:
        """When the next one comes, as far as is known; inf if none does."""
        more = self._more[0][0] if self._more else math.inf
        if self._num_taken == len(self._fixed):
            return more
        return min(more, float(self._fixed_s[self._num_taken]))

    def take(self, now_s: float) -> list[int]:
        """Those that have come by now, in order."""
        if self.next_s > now_s:
            return []
        stop = int(np.searchsorted(self._fixed_s, now_s, side="right"))
        came: list[int] = self._fixed[self._num_taken : stop].tolist()
        self._num_taken = max(stop, self._num_taken)
        if not self._more or self._more[0][0] > now_s:
            return came
        while self._more and self._more[0][0] <= now_s:
            came.append(heappop(self._more)[1])
        return sorted(came, key=lambda request: (float(self.arrival_s[request]), request))

    def add(self, request: int, time_s: float) -> None:
        """Let a request come at a time."""
        self.arrival_s[request] = time_s
        heappush(self._more, (time_s, request))

    def finished(self, request: int, now_s: float) -> None:
        """Note the end of a request: the next turn of its session comes after its think time."""
        follow_up = self._follow_up.get(request)
        if follow_up is not None:
            think_s = float(self._think_s[follow_up])
            self.add(follow_up, max(float(self.arrival_s[follow_up]), now_s + think_s))


def _follow_ups(trace: Requests) -> dict[int, int]:
    """Of each turn of a session the next one, if that one waits for it."""
    if np.isnan(trace.think_s).all():
        return {}
    found, before = {}, dict[int, int]()
    for request, (session, think_s) in enumerate(
        zip(trace.session.tolist(), trace.think_s.tolist(), strict=True)
    ):
        if session >= 0:
            if session in before and not math.isnan(think_s):
                found[before[session]] = request
            before[session] = request
    return found
