"""The figures of a fleet, and of each replica in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pagedkv.sim.fleet.fleet import FleetResult
from pagedkv.sim.fleet.fleet_replica import Replica
from pagedkv.sim.output.latencies import latencies_of
from pagedkv.sim.output.metrics import FORMULAS, Distribution
from pagedkv.sim.output.records import FloatArray
from pagedkv.sim.timing.step_cost import span_s

BALANCE_FORMULA = "seconds in steps of the busiest replica / mean over all; 1 is even"


@dataclass(frozen=True)
class ReplicaSummary:
    """What one replica did."""

    requests: int
    input_tokens: int
    hit_tokens: int
    """Prompt tokens that the cache had when a request was first admitted."""
    output_tokens: int
    busy_s: float
    """Modelled seconds in steps."""
    evicted_blocks: int
    preemptions: int

    @property
    def token_hit_rate(self) -> float:
        """Hit tokens over all prompt tokens; 0 if nothing was sent here."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


@dataclass(frozen=True)
class FleetSummary:
    """The figures of a fleet. Times are modelled; hits were counted by the managers."""

    requests: int
    input_tokens: int
    output_tokens: int
    makespan_s: float
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    replicas: tuple[ReplicaSummary, ...]

    @property
    def hit_tokens(self) -> int:
        """Of all replicas."""
        return sum(replica.hit_tokens for replica in self.replicas)

    @property
    def token_hit_rate(self) -> float:
        """Hit tokens over all prompt tokens."""
        return self.hit_tokens / self.input_tokens

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the makespan."""
        return self.output_tokens / self.makespan_s

    @property
    def preemptions(self) -> int:
        """Of all replicas."""
        return sum(replica.preemptions for replica in self.replicas)

    @property
    def imbalance(self) -> float:
        """``BALANCE_FORMULA``."""
        busy = [replica.busy_s for replica in self.replicas]
        return max(busy) * len(busy) / sum(busy)


def summarize_fleet(result: FleetResult) -> FleetSummary:
    """Work out the figures of a finished run."""
    trace, records = result.trace, result.records
    latencies = latencies_of(trace, records)
    return FleetSummary(
        requests=len(trace),
        input_tokens=int(trace.input_len.sum()),
        output_tokens=int(trace.output_len.sum()),
        makespan_s=float(records.finish_s.max()),
        ttft=Distribution.of(latencies.ttft_s),
        itl=Distribution.of_gaps(records.gaps()),
        tpot=Distribution.of(_known(latencies.tpot_s)),
        e2e=Distribution.of(latencies.e2e_s),
        replicas=tuple(_replica(replica) for replica in result.fleet.replicas),
    )


def _known(values: FloatArray) -> FloatArray:
    return values[~np.isnan(values)]


def _replica(replica: Replica) -> ReplicaSummary:
    trace, records = replica.engine.trace, replica.engine.records
    served = np.array(replica.requests, np.int64)
    return ReplicaSummary(
        requests=len(served),
        input_tokens=int(trace.input_len[served].sum()),
        hit_tokens=records.hit_tokens,
        output_tokens=int(trace.output_len[served].sum()),
        busy_s=sum(span_s(s.num_steps, s.first_s, s.growth_s) for s in records.steps),
        evicted_blocks=replica.engine.manager.stats().evicted_blocks,
        preemptions=records.num_preemptions,
    )


def fleet_document(summary: FleetSummary) -> dict[str, Any]:
    """The figures for JSON; units are in the names."""
    return {
        "requests": summary.requests,
        "tokens": {"input": summary.input_tokens, "output": summary.output_tokens},
        "makespan_s": summary.makespan_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "latency_s": {name: asdict(getattr(summary, name)) for name in FORMULAS},
        "hit_tokens": summary.hit_tokens,
        "token_hit_rate": summary.token_hit_rate,
        "preemptions": summary.preemptions,
        "imbalance": summary.imbalance,
        "replicas": [
            asdict(replica) | {"token_hit_rate": replica.token_hit_rate} for replica in summary.replicas
        ],
    }
