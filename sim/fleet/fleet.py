"""A fleet: several engines with a manager each, and a router that sends every request to one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.errors import PagedKVError, require_count
from pagedkv.sim.engine.arrivals import Arrivals
from pagedkv.sim.engine.conservation import check_pool, check_tokens
from pagedkv.sim.engine.pool import Pool, plain
from pagedkv.sim.fleet.fleet_replica import Replica, ReplicaEngine
from pagedkv.sim.fleet.router import Router, make_router
from pagedkv.sim.output.records import Records
from pagedkv.sim.replay import ReplaySetup
from pagedkv.sim.requests import Requests


class Fleet:
    """Replicas whose clocks run together, so that a router sees each of them as of the arrival it routes.

    ::

                                   .--> replica 0: engine, manager --.
        arrivals ---> router ------+--> replica 1: engine, manager --+---> finished
                        ^          '--> replica 2: engine, manager --'
                        '------- events of the managers, tokens that came out

    No replica begins a step at or after the next arrival before that one is routed. A step that is under way
    then goes on: its tokens, and its events, are known at its end. Decode steps between two events of an
    engine are taken at once, and what they evict is known at the end of the last one.
    """

    def __init__(
        self, trace: Requests, replicas: Sequence[Replica], router: Router, arrivals: Arrivals
    ) -> None:
        """Start at time 0; ``arrivals`` are those that the replicas' engines were given."""
        self.replicas, self.router = list(replicas), router
        self.replica_of: npt.NDArray[np.int32] = np.full(len(trace), -1, np.int32)
        """[requests] int32: where each was sent; -1 before it came."""
        self._trace, self._arrivals = trace, arrivals
        self._has_follow_ups = not bool(np.isnan(trace.think_s).all())

    def run(self) -> None:
        """Serve every request."""
        while True:
            replica = min(self.replicas, key=lambda replica: replica.engine.next_move_s)
            move_s, arrival_s = replica.engine.next_move_s, self._arrivals.next_s
            if math.isinf(move_s) and math.isinf(arrival_s):
                break
            if arrival_s <= move_s:
                self._route(arrival_s)
            else:
                self._tick(replica, arrival_s)
        for replica in self.replicas:
            replica.engine.end()

    def _route(self, now_s: float) -> None:
        for request in self._arrivals.take(now_s):
            loads = [replica.load(now_s) for replica in self.replicas]
            choice = self.router.choose(now_s, self._trace.tokens(request), loads)
            self.replica_of[request] = choice.replica
            self.replicas[choice.replica].send(request, now_s, choice.num_cached_tokens)

    def _tick(self, replica: Replica, arrival_s: float) -> None:
        horizon_s = arrival_s
        if self._has_follow_ups:  # an end may bring a new arrival: let no one run ahead of it
            others = (other.engine.next_move_s for other in self.replicas if other is not replica)
            horizon_s = min(arrival_s, *others, math.inf)
        engine = replica.engine
        engine.tick(horizon_s)
        if self.router.follows_events:
            self.router.hear(
                self.replicas.index(replica),
                engine.now,
                plain(engine.manager, "event stream").events.take(),
            )


@dataclass(frozen=True)
class FleetResult:
    """A finished run of a fleet."""

    trace: Requests
    setup: ReplaySetup
    """What each replica is."""
    fleet: Fleet
    records: Records
    """Of all replicas: steps, hits and times; without samples and occupancy, which each replica has."""


def run_fleet(
    trace: Requests,
    setup: ReplaySetup,
    num_replicas: int,
    router: str,
    on_progress: Callable[[int], None] | None = None,
    *,
    load_weight: float | None = None,
    event_delay_s: float = 0.0,
) -> FleetResult:
    """Serve the trace with equal replicas; ``router`` and its numbers as in `make_router`.

    Depends on the arguments alone. Raises ``NeverFits`` before anything runs if one request exceeds the pool
    of a replica, and ``PagedKVError`` for a prefix-aware router of replicas that cache no prefixes.

    >>> from pagedkv.sim.timing.gpus import load_gpu
    >>> from pagedkv.sim.timing.models import load_model
    >>> from pagedkv.sim.trace import Trace
    >>> setup = ReplaySetup(load_model("llama-3.1-8b"), load_gpu("b200"), num_blocks=1000)
    >>> aabb = Trace("AABB", [0, 9, 18, 27], [100] * 4, [2] * 4, [0, 0, 1, 1], [0, 1, 2, 3, 4], 96, 2)
    >>> for name in ("round-robin", "prefix-aware"):
    ...     result = run_fleet(aabb, setup, 2, name)
    ...     result.fleet.replica_of.tolist(), result.records.hit_tokens
    ([0, 1, 0, 1], 0)
    ([0, 0, 1, 1], 192)
    """
    require_count("num_replicas", num_replicas, 1)
    weight = {} if load_weight is None else {"load_weight": load_weight}
    chosen = make_router(
        router, num_replicas, setup.model.spec.block_size, event_delay_s=event_delay_s, **weight
    )
    if setup.transfer is not None:
        raise PagedKVError("a replica of a fleet prefills and decodes on one device")
    if chosen.follows_events and (setup.hybrid or not setup.prefix_caching):
        raise PagedKVError(
            f"router {router} follows a manager's events: it needs prefix caching, and no hybrid pool"
        )
    arrivals, step_time = Arrivals(trace), setup.step_time
    count = _Count(on_progress)
    engines = [
        ReplicaEngine(trace, _pool(trace, setup, chosen), step_time, setup.engine, arrivals, count.one_more)
        for _ in range(num_replicas)
    ]
    fleet = Fleet(trace, [Replica(engine) for engine in engines], chosen, arrivals)
    fleet.run()
    for engine in engines:
        check_pool(engine)
    records = _together(trace, [engine.records for engine in engines])
    check_tokens(trace, records)
    return FleetResult(trace, setup, fleet, records)


def _pool(trace: Requests, setup: ReplaySetup, router: Router) -> Pool:
    pool = setup.pool(trace)
    if router.follows_events:
        plain(pool, "event stream").events.record()
    return pool


def _together(trace: Requests, parts: Sequence[Records]) -> Records:
    """What all replicas wrote down: each request was served by one of them."""
    all_of = Records(len(trace))
    all_of.arrival_s = parts[0].arrival_s
    for part in parts:
        all_of.steps.extend(part.steps)
        all_of.resume_gaps_s.extend(part.resume_gaps_s)
        for name in ("first_token_s", "finish_s"):
            mine, theirs = getattr(all_of, name), getattr(part, name)
            setattr(all_of, name, np.where(np.isnan(theirs), mine, theirs))
        for name in ("num_preemptions", "num_finished", "hit_tokens", "accepted_tokens"):
            setattr(all_of, name, getattr(all_of, name) + getattr(part, name))
    return all_of


class _Count:
    """Requests that have finished anywhere."""

    def __init__(self, on_progress: Callable[[int], None] | None) -> None:
        self._done, self._on_progress = 0, on_progress

    def one_more(self, _: int) -> None:
        self._done += 1
        if self._on_progress is not None:
            self._on_progress(self._done)
