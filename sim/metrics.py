"""Latency and cache figures of a run, each with its formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.sim.records import FloatArray, IntArray, Records
from pagedkv.sim.trace import Trace
from pagedkv.spec import KVCacheSpec
from pagedkv.stats import ManagerStats

FORMULAS = {
    "ttft": "first token - arrival, queueing included, per request",
    "itl": "gap between consecutive tokens of a request, pooled over tokens",
    "tpot": "(e2e - ttft) / (output tokens - 1), per request with 2 or more output tokens",
    "e2e": "last token - arrival, per request",
}
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles in seconds; all None if there is no value."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: FloatArray, weights: IntArray | None = None) -> Distribution:
        """Describe values that each occur ``weights`` times (once by default).

        A percentile p is the smallest value that at least p percent of the values do not exceed.
        """
        weights = np.ones(len(values), np.int64) if weights is None else weights
        total = int(weights.sum())
        if not total:
            return cls(0, None, None, None, None, None)
        order = np.argsort(values, kind="stable")
        ranked, cumulative = values[order], np.cumsum(weights[order])
        ranks = [-(-p * total // 100) for p in PERCENTILES]
        found = ranked[np.searchsorted(cumulative, ranks)]
        return cls(total, float((values * weights).sum() / total), *map(float, found))


@dataclass(frozen=True)
class BlockUse:
    """Blocks and slots over the run. Peaks of blocks are exact; the rest is over the timeline's samples."""

    peak_active_blocks: int
    mean_active_blocks: float
    peak_used_slots: int
    mean_used_slots: float
    mean_cached_blocks: float
    mean_fragmentation: float
    """Active slots without a token over active slots, both summed over time."""


@dataclass(frozen=True)
class Summary:
    """The figures of one run. Times are modelled; blocks, slots and hits were counted by the manager."""

    requests: int
    input_tokens: int
    output_tokens: int
    makespan_s: float
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    preemptions: int
    steps: int
    use: BlockUse
    stats: ManagerStats

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the makespan."""
        return self.output_tokens / self.makespan_s


def summarize(trace: Trace, records: Records, stats: ManagerStats) -> Summary:
    """Work out the figures of a finished run."""
    ttft = records.first_token_s - trace.arrival_s
    e2e = records.finish_s - trace.arrival_s
    several = trace.output_len > 1
    tpot = (e2e - ttft)[several] / (trace.output_len[several] - 1)
    return Summary(
        requests=len(trace),
        input_tokens=int(trace.input_len.sum()),
        output_tokens=int(trace.output_len.sum()),
        makespan_s=float(records.finish_s.max()),
        ttft=Distribution.of(ttft),
        itl=Distribution.of(*records.gaps()),
        tpot=Distribution.of(tpot),
        e2e=Distribution.of(e2e),
        preemptions=records.num_preemptions,
        steps=sum(s.num_steps for s in records.steps),
        use=_block_use(records, stats.block_size),
        stats=stats,
    )


def _block_use(records: Records, block_size: int) -> BlockUse:
    """Averages over time: each sample stands for the span up to the next."""
    times = np.array([s.time_s for s in records.samples])
    active = np.array([s.active_blocks for s in records.samples], np.int64)
    cached = np.array([s.cached_blocks for s in records.samples], np.int64)
    used = np.array([s.used_slots for s in records.samples], np.int64)
    spans = np.diff(times)
    weights = spans if spans.sum() > 0 else np.ones(1)

    def mean(values: IntArray) -> float:
        return float(np.average(values[: len(weights)], weights=weights))

    slots = mean(active) * block_size
    return BlockUse(
        peak_active_blocks=records.peak_active_blocks,
        mean_active_blocks=mean(active),
        peak_used_slots=int(used.max()),
        mean_used_slots=mean(used),
        mean_cached_blocks=mean(cached),
        mean_fragmentation=1 - mean(used) / slots if slots else 0.0,
    )


def bytes_of(use: BlockUse, spec: KVCacheSpec, num_blocks: int) -> dict[str, float]:
    """The same in bytes of all layers."""
    return {
        "reserved": num_blocks * spec.bytes_per_block,
        "peak_active": use.peak_active_blocks * spec.bytes_per_block,
        "mean_active": use.mean_active_blocks * spec.bytes_per_block,
        "peak_used": use.peak_used_slots * spec.bytes_per_token,
        "mean_used": use.mean_used_slots * spec.bytes_per_token,
        "mean_cached": use.mean_cached_blocks * spec.bytes_per_block,
    }
