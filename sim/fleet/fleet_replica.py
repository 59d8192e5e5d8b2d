"""One replica of a fleet: an engine over a manager of its own, served by a router."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pagedkv.sim.engine.arrivals import Arrivals
from pagedkv.sim.engine.engine import Engine
from pagedkv.sim.engine.engine_config import EngineConfig
from pagedkv.sim.engine.pool import Pool
from pagedkv.sim.engine.waiting import WaitingQueue
from pagedkv.sim.fleet.router import ReplicaLoad
from pagedkv.sim.requests import Requests
from pagedkv.sim.timing.step_time import StepTimeModel


class _Sent(NamedTuple):
    request: int
    prompt_tokens: int
    expected_tokens: int
    """Of the prompt, those that the router expected to be computed."""


class Inbox(Arrivals):
    """Requests that a router sends; the fleet's arrivals hear of their ends, for follow-ups of sessions."""

    def __init__(self, trace: Requests, fleet: Arrivals) -> None:
        """Nobody comes until sent."""
        super().__init__(trace, expected=False)
        self.arrival_s = fleet.arrival_s
        self._fleet = fleet

    def finished(self, request: int, now_s: float) -> None:
        """Let the follow-up come to the router."""
        self._fleet.finished(request, now_s)


class ReplicaEngine(Engine):
    """An engine to which nobody comes but from a router."""

    def __init__(
        self,
        trace: Requests,
        manager: Pool,
        step_time: StepTimeModel,
        config: EngineConfig,
        fleet: Arrivals,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """``fleet`` are the arrivals of all replicas: when each request came."""
        super().__init__(trace, manager, step_time, config, on_progress)
        self.arrivals = Inbox(trace, fleet)
        self.records.arrival_s = fleet.arrival_s
        self._waiting = WaitingQueue(self.config.queue, trace, fleet.arrival_s.item)


class Replica:
    """An engine, what it was sent, and what a router knows of it."""

    def __init__(self, engine: ReplicaEngine) -> None:
        """Nothing was sent yet."""
        self.engine = engine
        self.requests: list[int] = []
        """Requests that were sent here, in the order in which they came."""
        self._queued: deque[_Sent] = deque()
        self._open: deque[_Sent] = deque()

    def send(self, request: int, time_s: float, num_cached_tokens: int) -> None:
        """Let a request come now; the router expects so many tokens of its prompt to be cached."""
        self.engine.arrivals.add(request, time_s)
        self.requests.append(request)
        prompt = int(self.engine.trace.input_len[request])
        sent = _Sent(request, prompt, prompt - num_cached_tokens)
        self._queued.append(sent)
        self._open.append(sent)

    def load(self, now_s: float) -> ReplicaLoad:
        """What a router knows at a time: it has seen the tokens that came out by then. O(open requests)."""
        first_s, finish_s = self.engine.records.first_token_s, self.engine.records.finish_s
        # NaN, for what has not happened, is not at most now
        self._queued = deque(sent for sent in self._queued if not first_s[sent.request] <= now_s)
        self._open = deque(sent for sent in self._open if not finish_s[sent.request] <= now_s)
        return ReplicaLoad(
            len(self.requests),
            sum(sent.expected_tokens for sent in self._queued),
            sum(sent.prompt_tokens for sent in self._open),
        )
