"""Which points of a sweep no other point beats, and the picture of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pagedkv.errors import PagedKVError
from pagedkv.sim.sweep.sweep_columns import FIGURES, Row

DEFAULT_AXES: Final = ("pool_bytes", "output_tokens_per_s")
MOST_COLORS: Final = 10


def check_figures(names: Sequence[str]) -> None:
    """Refuse a name that is no figure of a sweep, and one figure against itself."""
    known = {column.name for column in FIGURES}
    for name in names:
        if name not in known:
            raise PagedKVError(f"no figure {name!r}; figures are {', '.join(sorted(known))}")
    if len(set(names)) < len(names):
        raise PagedKVError(f"need two different figures, got {names[0]} twice")


def pareto(rows: Sequence[Row], x: str, y: str) -> list[Row]:
    """Rows that no other row beats: at least as good in both figures, and better in one. Sorted by ``x``.

    Rows with equal figures are all kept; rows without figures are left out. O(n log n).

    >>> rows = [{"pool_bytes": m, "output_tokens_per_s": t} for m, t in ((1, 5.0), (2, 9.0), (3, 8.0))]
    >>> [row["pool_bytes"] for row in pareto(rows, "pool_bytes", "output_tokens_per_s")]
    [1, 2]
    """
    check_figures((x, y))
    better = {column.name: column.better for column in FIGURES}
    points = sorted(
        (
            (-better[x] * number(row, x), -better[y] * number(row, y), i)
            for i, row in _with_figures(rows, x, y)
        )
    )
    front: list[tuple[float, float, int]] = []
    for point in points:
        if not front or point[1] < front[-1][1] or point[:2] == front[-1][:2]:
            front.append(point)
    return sorted((rows[i] for _, _, i in front), key=lambda row: number(row, x))


def _with_figures(rows: Sequence[Row], x: str, y: str) -> list[tuple[int, Row]]:
    found = [(i, row) for i, row in enumerate(rows) if row.get(x) is not None and row.get(y) is not None]
    if not found and any(row.get("error") is None for row in rows):
        raise PagedKVError(f"no point has both {x} and {y}: goodput needs --slo, and ITL more than one token")
    return found


def number(row: Row, name: str) -> float:
    """A figure as a number."""
    value = row[name]
    assert isinstance(value, (int, float))
    return float(value)


def plot_pareto(rows: Sequence[Row], x: str, y: str, color_by: str | None, title: str, path: Path) -> None:
    """Draw all points, and a line through those that no other beats. Raises as ``pareto`` does."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    front = pareto(rows, x, y)
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, group in _groups([row for _, row in _with_figures(rows, x, y)], color_by).items():
        axes.scatter(*_xy(group, x, y), s=26, alpha=0.75, label=label)
    axes.plot(
        *_xy(front, x, y), color="black", linewidth=1, marker="o", markersize=8, markerfacecolor="none",
        drawstyle="steps-post" if _same_way(x, y) else "default", label="not beaten by another",
    )  # fmt: skip
    axes.set(title=title, xlabel=_label(x), ylabel=_label(y))
    axes.grid(alpha=0.3)
    axes.legend(title=color_by, fontsize=8)
    figure.savefig(path, dpi=110)


def _xy(rows: Sequence[Row], x: str, y: str) -> tuple[list[float], list[float]]:
    return [number(row, x) * _scale(x) for row in rows], [number(row, y) * _scale(y) for row in rows]


def _same_way(x: str, y: str) -> bool:
    better: Mapping[str, int] = {column.name: column.better for column in FIGURES}
    return better[x] != better[y]


def _scale(name: str) -> float:
    return 2.0**-30 if name.endswith("_bytes") else 1.0


def _label(name: str) -> str:
    unit = "GiB" if name.endswith("_bytes") else ""
    text = name.removesuffix("_bytes").replace("_per_s", " per s").removesuffix("_s").replace("_", " ")
    unit = unit or ("s" if name.endswith("_s") and not name.endswith("_per_s") else "")
    return f"{text} [{unit}]" if unit else text


def _groups(rows: Sequence[Row], by: str | None) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault("points" if by is None else _shown(row.get(by)), []).append(row)
    if len(groups) <= MOST_COLORS:
        return groups
    return {f"points ({len(groups)} values of {by})": list(rows)}


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
