"""The picture of a replay: cache bytes over time, ITL against context, ITL percentiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.errors import PagedKVError
from pagedkv.sim.output.metrics import PERCENTILES
from pagedkv.sim.output.report import kind_of_times, times_are
from pagedkv.sim.replay import ReplayResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 4000
GIB = 2**30


def require_plottable(path: str) -> None:
    """Refuse a plot that could not be drawn, before the work: no matplotlib, or no such format."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise PagedKVError('a plot needs matplotlib: pip install "pagedkv[plot]"') from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in formats:
        raise PagedKVError(
            f"cannot plot to {path}: the name must end with one of .{', .'.join(sorted(formats))}"
        )


def plot_replay(result: ReplayResult, path: Path) -> None:
    """Write the three panels as an image, in the format that the suffix of ``path`` names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3, width_ratios=(1.3, 1.1, 0.8))
    setup = result.setup
    figure.suptitle(
        f"{result.trace.name}: {result.summary.requests:,} requests, {setup.model.name} on {setup.gpu.name}, "
        f"{setup.model.spec.dtype} cache, blocks of {setup.model.spec.block_size} "
        f"({times_are(setup.step_time.attention_time)})"
    )
    _cache_bytes(axes[0], result)
    _itl_against_context(axes[1], result)
    _itl_percentiles(axes[2], result)
    figure.savefig(path, dpi=110)


def _cache_bytes(axes: Axes, result: ReplayResult) -> None:
    samples, block = result.records.samples, result.setup.bytes_per_block
    slot = block // result.setup.model.spec.block_size
    time = np.array([s.time_s for s in samples])
    active = np.array([s.active_blocks for s in samples]) * block / GIB
    used = np.array([s.used_slots for s in samples]) * slot / GIB
    cached = np.array([s.cached_blocks for s in samples]) * block / GIB
    axes.stackplot(
        time,
        [used, active - used, cached],
        labels=["used by open sequences", "active but unassigned", "cached for reuse"],
        colors=["#2a6f97", "#d1495b", "#a9d6e5"],
        step="post",
    )
    capacity = result.setup.num_blocks * block / GIB
    axes.axhline(capacity, color="black", linestyle="--", linewidth=1, label="reserved (the pool)")
    axes.set(title="Cache bytes over time", xlabel="time [s]", ylabel="GiB", ylim=(0, capacity * 1.25))
    axes.margins(x=0)
    axes.legend(loc="upper left", ncols=2, fontsize=8)


def _itl_against_context(axes: Axes, result: ReplayResult) -> None:
    log = result.records.steps
    batches = log.column("num_decoding")
    steps = np.flatnonzero(batches)
    steps = steps[:: max(1, len(steps) // MOST_POINTS)]
    context = log.column("context_tokens")[steps]
    itl = log.column("first_s")[steps] * 1e3
    mixed = log.column("num_prefill_tokens")[steps] > 0
    for which, color, label in (
        (mixed, "#d1495b", "steps with prefill"),
        (~mixed, "#2a6f97", "decode steps"),
    ):
        axes.scatter(context[which], itl[which], s=5, color=color, alpha=0.4, label=label, linewidths=0)
    if len(steps):
        batch = max(1, round(float(np.median(batches[steps]))))
        line = np.linspace(0, float(context.max()), 50)
        model = result.setup.step_time
        seconds = [model.decode_s(np.full(batch, round(x / batch), np.int64)) * 1e3 for x in line]
        label = f"decode of {batch}: {kind_of_times(model.attention_time)}"
        axes.plot(line, seconds, color="black", linewidth=1.2, label=label)
    axes.set(title="ITL against context", xlabel="context of the batch [tokens]", ylabel="ITL [ms]")
    axes.set_ylim(0, 1.3 * float(np.percentile(itl, 99)) if len(steps) else 1)
    axes.legend(loc="upper left", fontsize=8)


def _itl_percentiles(axes: Axes, result: ReplayResult) -> None:
    itl = result.summary.itl
    names = ["mean", *(f"p{p}" for p in PERCENTILES)]
    values = [(getattr(itl, name) or 0.0) * 1e3 for name in names]
    bars = axes.bar(names, values, color="#2a6f97")
    axes.bar_label(bars, fmt="{:.1f}", fontsize=8)
    axes.set(title=f"ITL, pooled over {itl.count:,} gaps", ylabel="ms")
