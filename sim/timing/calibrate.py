"""Measure this machine for the step-time model: what it copies, computes and attends to per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.hardware import Figure, Hardware

if TYPE_CHECKING:
    from pagedkv.attention.bench.cell import Cell

DTYPES: Final = ("bf16", "int8")
CONTEXTS: Final = (1024, 4096, 16384)
BATCHES: Final = (1, 8)
HEADS: Final = (32, 8, 128)
"""Query heads, KV heads and head_dim of Llama-3.1-8B."""

CACHES = 4
LEAST_COPY_BYTES = 2**28
LINEAR: Final = (4096, 14336)
GEMM_TOKENS = 512
SMALL = 64
LINEARS_PER_LAYER = 7
LEAST_REPETITIONS = 3
MOST_REPETITIONS = 200

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measurement:
    """One thing that was timed: the median of ``repetitions`` calls that each move or compute ``amount``."""

    kind: str
    what: str
    amount: float
    unit: str
    seconds: float
    repetitions: int
    dtype: str | None = None
    batch: int | None = None
    context: int | None = None

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.amount / self.seconds


def num_measurements(contexts: Sequence[int] = CONTEXTS, batches: Sequence[int] = BATCHES) -> int:
    """How many ``measure`` yields."""
    return 4 + len(DTYPES) * len(contexts) * len(batches)


def measure(
    device: str = "cpu",
    seconds: float = 20.0,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    clock: Literal["wall", "cpu"] = "wall",
) -> Iterator[Measurement]:
    """Time each thing in turn, for about ``seconds`` all together; imports torch.

    Copies and attention are cold: each call reads other memory than the one before, of several last-level
    caches in all. ``clock`` "cpu" counts the time that the one thread really ran, on a machine that others
    use too.

    Raises:
        PagedKVError: a device that torch does not have, or the CPU clock for more than one thread or a GPU.
    """
    import torch

    from pagedkv.attention.bench.conditions import check_device, last_level_cache_bytes

    check_device(device)
    if clock == "cpu" and (torch.get_num_threads() > 1 or torch.device(device).type != "cpu"):
        raise PagedKVError(
            f"the clock of CPU time needs one thread on a CPU, got {torch.get_num_threads()} threads on "
            f"{device}"
        )
    timer = Timer(device, seconds / num_measurements(contexts, batches), clock)
    cold = max(CACHES * last_level_cache_bytes(), LEAST_COPY_BYTES)
    yield _copy(timer, cold)
    yield _weights(timer, cold)
    yield _gemm(timer)
    yield _small(timer)
    from pagedkv.attention.bench.cell import even_cell

    for dtype in DTYPES:
        for batch in batches:
            for context in contexts:
                yield _attention(even_cell(batch, context, dtype, 16, HEADS), timer, cold)


def hardware_from(
    measurements: Sequence[Measurement], device: str, when: str, conditions: dict[str, Any]
) -> Hardware:
    """The hardware file of what ``measure`` yielded.

    The bandwidth is the highest rate that anything reached, so that no share exceeds 1; attention is
    fitted per dtype as ``fixed_s + bytes / rate`` with the least relative error.
    """
    by_kind = {m.kind: m for m in measurements}
    moved = [m for m in measurements if m.unit == "bytes"]
    attention = {
        dtype: _fit([m for m in moved if m.kind == "attention" and m.dtype == dtype]) for dtype in DTYPES
    }
    slopes = {dtype: 1.0 / per_byte for dtype, (_, per_byte, _) in attention.items()}
    fastest = max(moved, key=lambda m: m.rate)
    bandwidth = max(fastest.rate, *slopes.values())
    gemm, small, weights = by_kind["gemm"], by_kind["small"], by_kind["weights"]

    def measured(value: float, m: Measurement) -> Figure:
        return Figure(value, "measured", m.what, when, m.repetitions)

    figures = {
        "memory_bytes": Figure(_memory_bytes(device), "reported", "by the system", when),
        "bandwidth": measured(bandwidth, fastest),
        "flops": measured(gemm.rate, gemm),
        "weights": measured(weights.rate / bandwidth, weights),
        "compute": Figure(1.0, "measured", "flops is what a GEMM reached", when, gemm.repetitions),
        "layer_s": measured(LINEARS_PER_LAYER * small.seconds, small),
        "per_sequence_s": Figure(0.0, "stated", "not measured: no engine runs here"),
    }
    costs = {dtype: _costs(fit, bandwidth, when, measurements, dtype) for dtype, fit in attention.items()}
    rows = [{k: v for k, v in vars(m).items() if v is not None} for m in measurements]
    name = str(conditions.get("gpu", conditions["cpu"]))
    return Hardware(name, when, figures, costs, conditions, rows)


def _costs(
    fit: tuple[float, float, float],
    bandwidth: float,
    when: str,
    measurements: Sequence[Measurement],
    dtype: str,
) -> dict[str, Figure]:
    fixed_s, per_byte, error = fit
    mine = [m for m in measurements if m.dtype == dtype]
    count = sum(m.repetitions for m in mine)
    what = f"fitted to {len(mine)} cells with a mean error of {error:.1%}"
    return {
        "fixed_s": Figure(fixed_s, "fitted", what, when, count),
        "byte_cost": Figure(per_byte * bandwidth, "fitted", what, when, count),
        "row_cost": Figure(0.0, "stated", "one head_dim was measured"),
        "head_cost": Figure(0.0, "stated", "not fitted"),
    }


def _fit(cells: Sequence[Measurement]) -> tuple[float, float, float]:
    """Fixed seconds, seconds per byte, and the mean relative error of a straight line with both >= 0."""
    seconds, amount = np.array([m.seconds for m in cells]), np.array([m.amount for m in cells])
    scaled = np.stack([np.ones(len(cells)), amount], 1) / seconds[:, None]
    fixed, per_byte = np.linalg.lstsq(scaled, np.ones(len(cells)), rcond=None)[0]
    if fixed < 0 or per_byte <= 0:
        rate = amount / seconds
        fixed, per_byte = 0.0, float((rate @ np.ones(len(rate))) / (rate @ rate))
    error = float(np.abs(scaled @ np.array([fixed, per_byte]) - 1).mean())
    return float(fixed), float(per_byte), error


class Timer(NamedTuple):
    """How calls are timed."""

    device: str
    seconds: float
    clock: Literal["wall", "cpu"]

    def median_s(self, call: Callable[[int], Any]) -> tuple[float, int]:
        """Median seconds of a call and the number of calls, after one that does not count."""
        from pagedkv.attention.bench.contender import Contender
        from pagedkv.attention.bench.rounds import call_seconds

        contender = Contender("", call, 0)
        call_seconds(contender, 0, self.device)
        spent: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(spent) < LEAST_REPETITIONS or (time.perf_counter() < end and len(spent) < MOST_REPETITIONS):
            spent.append(call_seconds(contender, len(spent) + 1, self.device, self.clock))
        return median(spent), len(spent)


def _copy(timer: Timer, cold: int) -> Measurement:
    import torch

    source = torch.ones(cold // 8, dtype=torch.int64, device=timer.device)
    target = torch.empty_like(source)
    spent, count = timer.median_s(lambda _: target.copy_(source))
    what = f"copy of {cold / 2**20:.0f} MiB, bytes read and written"
    return Measurement("copy", what, 2.0 * cold, "bytes", spent, count)


def _weights(timer: Timer, cold: int) -> Measurement:
    """Weight matrices that no cache holds, each multiplied with one token: what a decode step does."""
    import torch

    rows, columns = LINEAR
    size = rows * columns * 2
    matrices = [
        torch.full((columns, rows), 0.01, dtype=torch.bfloat16, device=timer.device)
        for _ in range(max(2, -(-cold // size)))
    ]
    x = torch.ones(1, rows, dtype=torch.bfloat16, device=timer.device)

    def call(index: int) -> Any:
        return torch.nn.functional.linear(x, matrices[index % len(matrices)])

    spent, count = timer.median_s(call)
    return Measurement("weights", f"linear {rows} x {columns} bf16 of 1 token", size, "bytes", spent, count)


def _gemm(timer: Timer) -> Measurement:
    import torch

    rows, columns = LINEAR
    weight = torch.full((columns, rows), 0.01, dtype=torch.bfloat16, device=timer.device)
    x = torch.ones(GEMM_TOKENS, rows, dtype=torch.bfloat16, device=timer.device)
    spent, count = timer.median_s(lambda _: torch.nn.functional.linear(x, weight))
    flops = 2.0 * GEMM_TOKENS * rows * columns
    what = f"linear {rows} x {columns} bf16 of {GEMM_TOKENS} tokens"
    return Measurement("gemm", what, flops, "FLOP", spent, count)


def _small(timer: Timer) -> Measurement:
    import torch

    weight = torch.ones(SMALL, SMALL, dtype=torch.bfloat16, device=timer.device)
    x = torch.ones(1, SMALL, dtype=torch.bfloat16, device=timer.device)
    spent, count = timer.median_s(lambda _: torch.nn.functional.linear(x, weight))
    what = f"{LINEARS_PER_LAYER} calls of a linear {SMALL} x {SMALL}, the cost of calling"
    return Measurement("small", what, 1.0, "call", spent, count)


def _attention(cell: Cell, timer: Timer, cold: int) -> Measurement:
    from pagedkv.attention import paged_attention
    from pagedkv.attention.bench.cell import ColdSets

    sets = ColdSets(cell, cold, device=timer.device)
    kv = sets.kv

    def call(index: int) -> Any:
        table = sets.tables[index % len(sets)]
        return paged_attention(sets.q, kv.k, kv.v, table, sets.lens, k_scale=kv.k_scale, v_scale=kv.v_scale)

    spent, count = timer.median_s(call)
    q_heads, kv_heads, head_dim = HEADS
    what = f"paged attention, {q_heads} query and {kv_heads} KV heads of {head_dim}, blocks of 16"
    return Measurement(
        "attention", what, float(cell.kv_bytes), "bytes", spent, count, cell.dtype, cell.batch, cell.context
    )


def _memory_bytes(device: str) -> float:
    import torch

    from pagedkv.attention.bench.conditions import available_bytes, conditions

    if torch.device(device).type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(conditions(device)["memory_bytes"] or available_bytes(device))
