"""Fit the attention constants of the simulator to published kernel latencies, and say how well they fit.

    python benchmarks/fit_attention.py DIR [--write]

DIR holds ``decode_attention_per_layer.csv`` (NVIDIA AIConfigurator's measured database, Apache-2.0; it is not
part of this repository). Fitted are full-attention rows of 8,192 tokens of context and more whose K and V
are larger than twice the L2. The fit minimises the mean absolute relative error, which an outlier cannot
pull; costs are not negative.

Where DIR holds ``itl_end_to_end.csv`` too, the byte cost of llama.cpp is the median slope of its series of
one sequence over contexts (llama.cpp's DGX Spark benchmarks, MIT): of whole steps, so that its call has no
fixed cost here.

Prints the table of ``benchmarks/README.md``; ``--write`` replaces ``sim/timing/attention_constants.csv``.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.attention_constants import FIELDS, ROW_BYTES, AttentionConstants
from pagedkv.sim.validation.measured_kernels import (
    BoolArray,
    FloatArray,
    KernelRows,
    find_kernels,
    read_kernels,
)
from pagedkv.sim.validation.measured_rates import RateRow, find_rates, read_rates

OUTPUT = Path(__file__).parent.parent / "sim" / "timing" / "attention_constants.csv"
HEAD_COSTS = tuple(np.arange(4.0, 101.0, 2.0))
FAR = 1 / 3
FOLDS = 5
# No memory delivers more: a group with a row above this share of the peak was not measured cold.
PLAUSIBLE = 0.95
DEFAULT_ENGINE = "VLLM"
ROUNDS = 100
SMALLEST_ERROR = 3e-3


class Fit(NamedTuple):
    constants: AttentionConstants
    error: float


def predict(rows: KernelRows, constants: AttentionConstants) -> FloatArray:
    """Seconds of every call."""
    heads = rows.batch * rows.num_kv_heads
    return constants.seconds(rows.kv_bytes, heads, rows.row_bytes, rows.gpu.bandwidth)


def errors(rows: KernelRows, constants: AttentionConstants) -> FloatArray:
    return np.abs(predict(rows, constants) / rows.seconds - 1)


def fit(rows: KernelRows) -> Fit:
    """The best constants; a head cost only where calls are far slower than their bytes say."""
    best = _fit_at(rows, 0.0)
    assert best is not None  # all rows are bound by the bandwidth then
    if errors(rows, best.constants).max() <= FAR:
        return best
    for head_cost in HEAD_COSTS:
        found = _fit_at(rows, head_cost)
        if found is not None and found.error < best.error - 1e-3:
            best = found
    return best


def _fit_at(rows: KernelRows, head_cost: float) -> Fit | None:
    """Fit the rows that the bandwidth bounds, until those are the ones that the constants say."""
    at_peak = rows.kv_bytes / rows.gpu.bandwidth
    features = np.stack([np.ones(len(rows)), at_peak, at_peak * ROW_BYTES / rows.row_bytes], 1)
    limit = head_cost / (rows.batch * rows.num_kv_heads)
    bounded = np.ones(len(rows), np.bool_)
    for _ in range(10):
        if bounded.sum() < 4:
            return None
        fixed, byte_cost, row_cost = _least_relative(features[bounded], rows.seconds[bounded])
        now = byte_cost + row_cost * ROW_BYTES / rows.row_bytes >= limit
        if (now == bounded).all():
            break
        bounded = now
    constants = AttentionConstants(float(fixed), float(byte_cost), float(row_cost), float(head_cost))
    return Fit(constants, float(errors(rows, constants).mean()))


def _least_relative(features: FloatArray, seconds: FloatArray) -> FloatArray:
    """Coefficients >= 0 of the least mean |prediction / seconds - 1|, by reweighted least squares."""
    scaled = features / seconds[:, None]
    weights, active = np.ones(len(seconds)), np.arange(features.shape[1])
    if features.shape[1] > 2 and np.ptp(features[:, -1] / features[:, 1]) < 1e-9:
        active = active[:-1]  # rows of one width: their cost cannot be told from that of bytes
    x = np.zeros(features.shape[1])
    for _ in range(ROUNDS):
        while True:
            root = np.sqrt(weights)
            x = np.zeros(features.shape[1])
            x[active] = np.linalg.lstsq(scaled[:, active] * root[:, None], root, rcond=None)[0]
            if (x[active] >= 0).all():
                break
            active = active[x[active] > 0]
        before, weights = weights, 1 / np.maximum(np.abs(scaled @ x - 1), SMALLEST_ERROR)
        if np.allclose(weights, before, rtol=1e-6):
            break
    return x


def held_out(rows: KernelRows, parts: list[BoolArray]) -> float:
    """Mean error in percent of each part, predicted from all the others."""
    found = np.zeros(len(rows))
    for part in parts:
        found[part] = errors(rows.where(part), fit(rows.where(~part)).constants)
    return float(found.mean() * 100)


class Slope(NamedTuple):
    """One sequence of a model over contexts: seconds against the seconds of its K and V at peak."""

    gpu: str
    engine: str
    at_peak: FloatArray
    seconds: FloatArray

    @property
    def cost(self) -> float:
        return float(
            _least_relative(np.stack([np.ones(len(self.seconds)), self.at_peak], 1), self.seconds)[1]
        )

    def errors(self, cost: float) -> FloatArray:
        """Of all points but the median context, from there on with this byte cost."""
        middle = len(self.seconds) // 2
        modelled = self.seconds[middle] + cost * (self.at_peak - self.at_peak[middle])
        return np.delete(np.abs(modelled / self.seconds - 1), middle)


class EngineLine(NamedTuple):
    """The byte cost of an engine's attention, and its errors in percent: fitted, and each series left out."""

    gpu: str
    engine: str
    cost: float
    num_rows: int
    error: float
    left_out: float


def slopes(directory: Path) -> list[Slope]:
    series: dict[tuple[str, ...], list[RateRow]] = {}
    for path in find_rates(directory):
        for row in read_rates(path):
            if row.kernel is not None and row.batch == 1 and row.served is None:
                series.setdefault(row.series, []).append(row)
    found = []
    for rows in series.values():
        rows = sorted(rows, key=lambda row: row.context)
        try:
            model, gpu = rows[0].load()
        except PagedKVError:
            continue
        if len(rows) > 2:
            read = np.array([float(model.spec.bytes_read(row.context)) for row in rows])
            seconds = np.array([row.seconds for row in rows])
            found.append(Slope(gpu.name, rows[0].engine, read / gpu.bandwidth, seconds))
    return found


def engine_lines(found: list[Slope]) -> list[EngineLine]:
    lines = []
    for gpu, engine in sorted({(s.gpu, s.engine) for s in found}):
        mine = [s for s in found if (s.gpu, s.engine) == (gpu, engine)]
        costs = np.array([s.cost for s in mine])
        cost = float(np.median(costs))
        error = np.concatenate([s.errors(cost) for s in mine]).mean() * 100
        others = [float(np.median(np.delete(costs, i))) for i in range(len(mine))]
        left_out = np.concatenate([s.errors(c) for s, c in zip(mine, others, strict=True)]).mean() * 100
        num_rows = sum(len(s.seconds) for s in mine)
        lines.append(EngineLine(gpu, engine, cost, num_rows, float(error), float(left_out)))
    return lines


class Line(NamedTuple):
    rows: KernelRows
    fit: Fit
    every_fifth: float
    by_geometry: float

    @property
    def is_plausible(self) -> bool:
        rows = self.rows
        return bool((rows.kv_bytes / rows.seconds).max() <= PLAUSIBLE * rows.gpu.bandwidth)

    @property
    def is_default(self) -> bool:
        return self.rows.kernel.startswith(DEFAULT_ENGINE)


def lines(directory: Path) -> list[Line]:
    found = []
    for path in find_kernels(directory):
        for group in read_kernels(path):
            rows = group.where(group.is_cold)
            index, names = np.arange(len(rows)) % FOLDS, sorted(set(rows.geometry))
            fifths = held_out(rows, [index == k for k in range(FOLDS)])
            geometries = held_out(rows, [rows.geometry == name for name in names])
            found.append(Line(rows, fit(rows), fifths, geometries))
    return found


def write(found: list[Line], engines: list[EngineLine], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for line in found:
            if not line.is_plausible:
                continue
            c, rows = line.fit.constants, line.rows
            writer.writerow(
                (
                    rows.gpu.name,
                    rows.kernel,
                    rows.kv_dtype,
                    f"{c.fixed_s * 1e6:.2f}",
                    f"{c.byte_cost:.4f}",
                    f"{c.row_cost:.4f}",
                    f"{c.head_cost:g}",
                    len(rows),
                    f"{line.fit.error * 100:.2f}",
                    f"{line.every_fifth:.2f}",
                    int(line.is_default),
                )
            )
        for e in engines:
            errors = f"{e.error:.2f}", f"{e.left_out:.2f}"
            writer.writerow((e.gpu, e.engine, "bf16", 0, f"{e.cost:.4f}", 0, 0, e.num_rows, *errors, 0))


def table(found: list[Line], engines: list[EngineLine]) -> str:
    head = "| GPU | kernel | KV | rows | fixed us | byte | row | head | error | fifths | geometries |"
    text = [head, "|---|---|---|---|---|---|---|---|---|---|---|"]
    for line in found:
        c, rows = line.fit.constants, line.rows
        note = "" if line.is_plausible else " (not used)"
        text.append(
            f"| {rows.gpu.name} | {rows.kernel}{note} | {rows.kv_dtype} | {len(rows)} "
            f"| {c.fixed_s * 1e6:.1f} | {c.byte_cost:.3f} | {c.row_cost:.3f} | {c.head_cost:g} "
            f"| {line.fit.error * 100:.1f} % | {line.every_fifth:.1f} % | {line.by_geometry:.1f} % |"
        )
    text += [
        f"| {e.gpu} | {e.engine}, whole steps | bf16 | {e.num_rows} | - | {e.cost:.3f} | - | - "
        f"| {e.error:.1f} % | - | {e.left_out:.1f} % |"
        for e in engines
    ]
    text += ["", *(_pooled(found, dtype, label) for dtype, label in (("bf16", "bf16"), ("fp8-e4m3", "fp8")))]
    return "\n".join(text)


def _pooled(found: list[Line], dtype: str, label: str) -> str:
    mine = [line for line in found if line.rows.kv_dtype == dtype]

    def mean(which: list[Line], value: Callable[[Line], float]) -> str:
        return f"{np.average([value(x) for x in which], weights=[len(x.rows) for x in which]):.1f} %"

    count = sum(len(x.rows) for x in mine)
    used = [line for line in mine if line.is_plausible]
    return (
        f"{label}: mean over all {count} rows {mean(mine, lambda x: x.fit.error * 100)}, "
        f"over those used {mean(used, lambda x: x.fit.error * 100)} "
        f"(fifths {mean(used, lambda x: x.every_fifth)}, geometries {mean(used, lambda x: x.by_geometry)})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="fit the attention constants")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--write", action="store_true", help=f"replace {OUTPUT.name}")
    args = parser.parse_args()
    found = lines(args.directory)
    if not found:
        parser.error(f"no measured kernels below {args.directory}")
    engines = engine_lines(slopes(args.directory))
    print(table(found, engines))
    if args.write:
        write(found, engines, OUTPUT)


if __name__ == "__main__":
    main()
