"""The picture of ``pagedkv bench attention``: how close contenders come to reading their blocks alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pagedkv.attention.bench.measure import CellResult


def plot_bench(results: Sequence[CellResult], conditions: Mapping[str, Any], path: Path) -> None:
    """Write one panel per dtype and block size, in the format that the suffix of ``path`` names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[str, list[CellResult]] = {}
    for result in results:
        if result.rows:
            title = f"{result.cell.dtype}, blocks of {result.cell.block_size}"
            panels.setdefault(title, []).append(result)
    figure = Figure(figsize=(14, 3.6 * max(1, len(panels))), layout="constrained")
    FigureCanvasAgg(figure)
    where = conditions.get("gpu", conditions["cpu"])
    threads = f"{conditions['threads']} thread{'' if conditions['threads'] == 1 else 's'}"
    figure.suptitle(f"Decode attention, measured on {where}, {threads}: batch x context of each call")
    axes = figure.subplots(max(1, len(panels)), 1, squeeze=False)[:, 0]
    for ax, (title, cells) in zip(axes, panels.items(), strict=False):
        _panel(ax, title, cells)
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, title: str, results: Sequence[CellResult]) -> None:
    names = list(dict.fromkeys(row.name for r in results for row in r.rows[1:] if row.seconds is not None))
    places = np.arange(len(results))
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        shares = [_share(result, name) for result in results]
        bars = axes.bar(places + (i - (len(names) - 1) / 2) * width, shares, width, label=name)
        axes.bar_label(bars, labels=[f"{share:.0f}" if share else "" for share in shares], fontsize=7)
    axes.axhline(100, color="black", linestyle="--", linewidth=1, label="read ceiling")
    ceilings = [f"{result.rows[0].gb_per_s:.1f} GB/s" for result in results]
    labels = [
        f"{result.cell.batch} x {result.cell.context:,}\nceiling {ceiling}"
        for result, ceiling in zip(results, ceilings, strict=True)
    ]
    axes.set_xticks(places, labels)
    axes.set(title=title, ylabel="time to read the blocks / time of a call [%]", ylim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _share(result: CellResult, name: str) -> float:
    # by time and not by bytes: a peer that reads bf16 where the cache is int8 is not faster for it
    ceiling = result.rows[0].seconds or 0.0
    return next((100 * ceiling / row.seconds for row in result.rows if row.name == name and row.seconds), 0.0)
