"""What the charts of a replay show, thinned to a size that a document can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedkv.sim.output.gaps import Gaps
from pagedkv.sim.output.latencies import LATENCIES, latencies_of
from pagedkv.sim.output.records import FloatArray, IntArray
from pagedkv.sim.output.slo import Goodput
from pagedkv.sim.output.tables import columns_of
from pagedkv.sim.output.timeline import timeline_csv
from pagedkv.sim.replay import ReplayResult
from pagedkv.sim.timing.step_time import StepTimeModel

MOST_ROWS = 600
MOST_POINTS = 2000
LINE_POINTS = 40
LONGEST_CONTEXT = 10**8
PERCENTS = (*range(100), 99.5, 99.9, 100)
"""The smallest value (0) and percentiles, by the rule of ``Distribution.of``."""


def series_of(result: ReplayResult, goodput: Goodput | None = None) -> dict[str, Any]:
    """Columns of equal length per chart; floats have six digits. Same run, same series.

    ``timeline``: of every few rows of the timeline the one with the most active bytes. ``itl_by_context``:
    every few steps, the decode step of the median batch, and the context at which such a step
    reads more KV bytes than weight bytes. ``quantiles``: of each latency, and of the factor on the SLOs.
    """
    return {
        "timeline": _timeline(result),
        "itl_by_context": _itl_by_context(result),
        "quantiles": _quantiles(result, goodput),
    }


def _timeline(result: ReplayResult) -> dict[str, list[Any]]:
    active = [sample.active_blocks for sample in result.records.samples]
    every = -(-len(active) // MOST_ROWS)
    runs = [range(start, min(start + every, len(active))) for start in range(0, len(active), every)]
    # the first and the last row stay: where the time begins, and where the counters end
    kept = sorted({0, len(active) - 1, *(max(run, key=active.__getitem__) for run in runs)})
    columns = columns_of(timeline_csv(result, kept))
    return {name: list(map(_digits, column)) for name, column in columns.items()}


def _itl_by_context(result: ReplayResult) -> dict[str, Any]:
    log = result.records.steps
    batches = log.column("num_decoding")
    steps = np.flatnonzero(batches)
    shown = steps[:: max(1, -(-len(steps) // MOST_POINTS))]
    context_tokens = log.column("context_tokens")
    found: dict[str, Any] = {
        "batch": None,
        "weight_bytes": None,
        "overtake_tokens": None,
        "points": {
            "context_tokens": context_tokens[shown].tolist(),
            "itl_s": [_digits(seconds) for seconds in log.column("first_s")[shown].tolist()],
            "prefill_tokens": log.column("num_prefill_tokens")[shown].tolist(),
        },
        "model": {"context_tokens": [], "itl_s": []},
    }
    if len(steps):
        model = result.setup.step_time
        batch = max(1, round(float(np.median(batches[steps]))))
        top = int(context_tokens[steps].max())
        each = sorted({max(1, round(x / batch)) for x in np.linspace(0, top, LINE_POINTS).tolist()})
        weights = model.weight_bytes(batch)
        found["batch"], found["weight_bytes"] = batch, round(weights)
        found["overtake_tokens"] = overtaking_context(model, batch)
        found["model"] = {
            "context_tokens": [batch * context for context in each],
            "itl_s": [_digits(model.decode_s(np.full(batch, context, np.int64))) for context in each],
        }
    return found


def overtaking_context(model: StepTimeModel, batch: int) -> int | None:
    """Tokens in all of ``batch`` equal contexts from which on a decode step reads more KV than weights.

    None if it never does: sliding windows may bound what is read.

    >>> from pagedkv.spec import KVCacheSpec
    >>> spec = KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128)  # 131,072 bytes per token
    >>> overtaking_context(StepTimeModel.from_rates(131_072 * 1000, 1e12, spec), batch=4)
    1004
    """
    weights = model.weight_bytes(batch)

    def overtakes(context: int) -> bool:
        return model.kv_bytes(np.full(batch, context, np.int64)) > weights

    if not overtakes(LONGEST_CONTEXT):
        return None
    low, high = 0, LONGEST_CONTEXT
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overtakes(middle) else (middle, high)
    return batch * high


def _quantiles(result: ReplayResult, goodput: Goodput | None) -> dict[str, Any]:
    found: dict[str, Any] = {"percent": list(PERCENTS), "itl_s": _ranked_gaps(result.records.gaps())}
    latencies = latencies_of(result.trace, result.records)
    for name in LATENCIES:
        values = latencies.of(name)
        values = values[np.isfinite(values)]
        found[f"{name}_s"] = _ranked(values)
    if goodput is not None:
        found["slo_factor"] = _ranked(goodput.worst)
    return found


def _ranked(values: FloatArray) -> list[float | None]:
    """The smallest value that at least each percentage of all do not exceed; None if it is not finite."""
    if not len(values):
        return []
    found: FloatArray = np.sort(values)[_ranks(len(values)) - 1]
    return [_digits(value) if np.isfinite(value) else None for value in found.tolist()]


def _ranked_gaps(gaps: Gaps) -> list[float | None]:
    return [_digits(value) for value in gaps.ranked(_ranks(gaps.total)).tolist()] if gaps.total else []


def _ranks(total: int) -> IntArray:
    return np.array([max(1, -(-round(p * 10) * total // 1000)) for p in PERCENTS])


def _digits(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def thinned(column: Sequence[Any], most: int) -> list[Any]:
    """Every few entries of a column, the last one always.

    >>> thinned([0, 1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    every = max(1, -(-len(column) // most))
    return list(column[::-1][::every][::-1])
