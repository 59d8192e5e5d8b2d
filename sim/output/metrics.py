"""Latency and cache figures of a run, each with its formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.sim.output.gaps import Gaps
from pagedkv.sim.output.records import FloatArray, Occupancy, Records
from pagedkv.sim.requests import Requests
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
    def of(cls, values: FloatArray) -> Distribution:
        """Describe values.

        A percentile p is the smallest value that at least p percent of the values do not exceed.
        """
        if not len(values):
            return cls(0, None, None, None, None, None)
        found = np.sort(values)[_ranks(len(values)) - 1]
        return cls(len(values), float(values.sum() / len(values)), *map(float, found))

    @classmethod
    def of_gaps(cls, gaps: Gaps) -> Distribution:
        """Describe gaps, each once per sequence that had it; percentiles as in ``of``."""
        if not gaps.total:
            return cls(0, None, None, None, None, None)
        found = gaps.ranked(_ranks(gaps.total))
        return cls(gaps.total, gaps.sum() / gaps.total, *map(float, found))


def _ranks(total: int) -> npt.NDArray[np.int64]:
    return np.array([-(-p * total // 100) for p in PERCENTILES])


@dataclass(frozen=True)
class BlockUse:
    """Blocks and slots over the whole run, idle time included. A slot is used once it is assigned."""

    peak_active_blocks: int
    mean_active_blocks: float
    peak_used_slots: int
    mean_used_slots: float
    mean_cached_blocks: float
    mean_fragmentation: float
    """Share of active slots without a token, both added up over time."""


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
    hit_tokens: int
    """Prompt tokens that the cache had when a request was first admitted."""
    hit_blocks: int
    prompt_blocks: int
    """Full blocks of all prompts: the only cacheable ones."""
    preemptions: int
    steps: int
    use: BlockUse
    stats: ManagerStats

    @property
    def token_hit_rate(self) -> float:
        """Hit tokens over all prompt tokens."""
        return self.hit_tokens / self.input_tokens

    @property
    def block_hit_rate(self) -> float:
        """Hit blocks over the full blocks of all prompts."""
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the makespan."""
        return self.output_tokens / self.makespan_s


def summarize(trace: Requests, records: Records, stats: ManagerStats) -> Summary:
    """Work out the figures of a finished run."""
    arrival_s = trace.arrival_s if records.arrival_s is None else records.arrival_s
    ttft = records.first_token_s - arrival_s
    e2e = records.finish_s - arrival_s
    several = trace.output_len > 1
    tpot = (e2e - ttft)[several] / (trace.output_len[several] - 1)
    return Summary(
        requests=len(trace),
        input_tokens=int(trace.input_len.sum()),
        output_tokens=int(trace.output_len.sum()),
        makespan_s=float(records.finish_s.max()),
        ttft=Distribution.of(ttft),
        itl=Distribution.of_gaps(records.gaps()),
        tpot=Distribution.of(tpot),
        e2e=Distribution.of(e2e),
        hit_tokens=records.hit_tokens,
        hit_blocks=(records.hit_tokens - records.partial_hit_tokens) // stats.block_size,
        prompt_blocks=int((trace.input_len // stats.block_size).sum()),
        preemptions=records.num_preemptions,
        steps=int(records.steps.column("num_steps").sum()),
        use=block_use(records.occupancy, stats.block_size),
        stats=stats,
    )


def block_use(o: Occupancy, block_size: int) -> BlockUse:
    """Peaks, and means over the time that was added up."""
    slot_s = o.active_block_s * block_size
    return BlockUse(
        peak_active_blocks=o.peak_active_blocks,
        mean_active_blocks=o.active_block_s / o.seconds,
        peak_used_slots=o.peak_used_slots,
        mean_used_slots=o.used_slot_s / o.seconds,
        mean_cached_blocks=o.cached_block_s / o.seconds,
        mean_fragmentation=1 - o.used_slot_s / slot_s if slot_s else 0.0,
    )


def bytes_of(
    use: BlockUse, spec: KVCacheSpec, num_blocks: int, bytes_per_block: int | None = None
) -> dict[str, float]:
    """The same in bytes of all layers, or of blocks of ``bytes_per_block``, if those are of some layers."""
    block = spec.bytes_per_block if bytes_per_block is None else bytes_per_block
    slot = block // spec.block_size
    return {
        "reserved": num_blocks * block,
        "peak_active": use.peak_active_blocks * block,
        "mean_active": use.mean_active_blocks * block,
        "peak_used": use.peak_used_slots * slot,
        "mean_used": use.mean_used_slots * slot,
        "mean_cached": use.mean_cached_blocks * block,
    }
