"""How far the modelled run is from a measured one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.sim.engine.engine import EngineConfig
from pagedkv.sim.output.records import FloatArray, IntArray
from pagedkv.sim.replay import ReplayResult, ReplaySetup, run_replay
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.timing.roofline import efficiency_of
from pagedkv.sim.validation.measured_run import MeasuredRun


@dataclass(frozen=True)
class Comparison:
    """One figure, measured and modelled, and the difference that is allowed."""

    name: str
    measured: float
    modelled: float
    error: float
    """Relative, or in the unit of the figure where ``allowed`` says so."""
    allowed: float
    unit: str

    @property
    def holds(self) -> bool:
        """Tell whether the difference is allowed."""
        return abs(self.error) <= self.allowed


def replay_like(run: MeasuredRun) -> ReplayResult:
    """Serve the same requests with the same engine settings and the efficiencies of the GPU's table.

    Those are published or fitted to kernels on other machines, never to a run. vLLM admits without a
    watermark, and its timeline has a row a second.
    """
    model, gpu = load_model(run.model, block_size=run.block_size), load_gpu(run.gpu)
    setup = ReplaySetup(
        model=model,
        gpu=gpu,
        num_blocks=run.num_blocks,
        engine=EngineConfig(run.max_batch, run.token_budget, interval_s=1.0),
        efficiency=efficiency_of(gpu, model.spec),
        watermark=0.0,
    )
    return run_replay(run.trace, setup)


def compare(run: MeasuredRun, result: ReplayResult) -> list[Comparison]:
    """The figures of both, with the differences that count as agreement."""
    trace, records, summary = run.trace, result.records, result.summary
    several = trace.output_len > 1
    ttft = float((run.first_token_s - run.queued_s).mean())
    found = [_relative("TTFT, mean [s]", ttft, summary.ttft.mean, 0.03)]
    if several.any():
        tpot = (run.last_token_s - run.first_token_s)[several] / (trace.output_len[several] - 1)
        found.append(_relative("TPOT, mean [s]", float(tpot.mean()), summary.tpot.mean, 0.02))
    found.append(_relative("makespan [s]", float(run.last_token_s.max()), summary.makespan_s, 0.05))
    usage = _usage_at(result, run.time_s)
    found.append(
        Comparison(
            "KV usage, mean absolute error [points]",
            float(run.kv_usage.mean() * 100),
            float(usage.mean() * 100),
            float(np.abs(usage - run.kv_usage).mean() * 100),
            2.5,
            "points",
        )
    )
    preemptions = outstanding_growth(run.time_s, run.waiting, run.queued_s, run.scheduled_s)
    found.append(
        Comparison(
            "preemptions (measured: at least)",
            preemptions,
            records.num_preemptions,
            _decades(preemptions, records.num_preemptions),
            0.5,
            "decades",
        )
    )
    return found


def outstanding_growth(
    time_s: FloatArray, waiting: IntArray, queued_s: FloatArray, scheduled_s: FloatArray
) -> int:
    """Fewest preemptions that a timeline proves.

    Who waits but was scheduled before has been preempted; each growth of their number between two
    rows takes that many preemptions, and those that ended between two rows are not seen.

    >>> outstanding_growth(np.array([1.0, 2.0, 3.0]), np.array([0, 2, 1]), np.array([0.0]), np.array([0.5]))
    2
    """
    arrived = np.searchsorted(np.sort(queued_s), time_s, side="right")
    scheduled = np.searchsorted(np.sort(scheduled_s), time_s, side="right")
    outstanding = np.maximum(waiting - (arrived - scheduled), 0)
    return int(np.maximum(np.diff(outstanding, prepend=0), 0).sum())


def _usage_at(result: ReplayResult, time_s: FloatArray) -> FloatArray:
    """Modelled share of active blocks at each moment, or at the last sample before the end."""
    samples = result.records.samples
    times = np.array([s.time_s for s in samples])
    active = np.array([s.active_blocks for s in samples]) / result.setup.num_blocks
    at = np.minimum(np.searchsorted(times, time_s), len(times) - 1)
    usage: FloatArray = active[at]
    return usage


def _relative(name: str, measured: float, modelled: float | None, allowed: float) -> Comparison:
    assert modelled is not None  # the same requests were served
    return Comparison(name, measured, modelled, modelled / measured - 1, allowed, "relative")


def _decades(a: float, b: float) -> float:
    """Distance in powers of ten; none and none are equal."""
    return float(np.log10((b + 1) / (a + 1)))
