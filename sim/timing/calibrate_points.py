"""A hardware file from one to three measured decode steps of a known model on a known device."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.attention_constants import AttentionConstants
from pagedkv.sim.timing.efficiency import Efficiency
from pagedkv.sim.timing.gpus import GPU
from pagedkv.sim.timing.hardware import Figure, Hardware
from pagedkv.sim.timing.models import Model
from pagedkv.sim.timing.roofline import Roofline, efficiency_of

MOST_POINTS = 3
EXACT = 1e-9


@dataclass(frozen=True)
class Point:
    """A measured decode step: ``batch`` sequences of ``context`` tokens, this step's included."""

    batch: int
    context: int
    seconds: float

    def __post_init__(self) -> None:
        """Refuse what no step is."""
        if self.batch < 1 or self.context < 0 or not 0 < self.seconds < math.inf:
            raise PagedKVError(
                f"a point needs batch >= 1, context >= 0 and ms > 0, got {self.batch}, {self.context}, "
                f"{self.seconds * 1e3:g} ms"
            )

    @property
    def contexts(self) -> npt.NDArray[np.int64]:
        """[batch], all alike."""
        return np.full(self.batch, self.context, np.int64)


def parse_point(text: str) -> Point:
    """A point from ``batch=8,context=1280,ms=7.42``.

    >>> parse_point("batch=8, context=1280, ms=7.5")
    Point(batch=8, context=1280, seconds=0.0075)
    """
    fields = dict(re.findall(r"\s*(\w+)\s*=\s*([^,\s]+)\s*(?:,|$)", text))
    if sorted(fields) != ["batch", "context", "ms"] or text.count(",") != 2:
        raise PagedKVError(f"{text!r} is no point: write batch=8,context=1280,ms=7.42")
    try:
        return Point(int(fields["batch"]), int(fields["context"]), float(fields["ms"]) / 1e3)
    except (ValueError, OverflowError) as error:
        if isinstance(error, PagedKVError):
            raise
        raise PagedKVError(f"{text!r} is no point: {error}") from None


def calibrate(
    points: Sequence[Point],
    model: Model,
    gpu: GPU,
    weight_bits: float = 16,
    kernel: str | None = None,
) -> Efficiency:
    """What of ``efficiency_of`` has to change for the roofline to give these points exactly.

    ::

        step = launch + weights / bandwidth + a x KV bytes + b x sequences
        1 point     launch; if it were negative, the share of the bandwidth at which weights stream
        2 points    also a, if they read unlike KV bytes, else b
        3 points    launch, a and b

    One point says nothing of attention: ``kernel`` (see ``efficiency_of``) does, if the engine's is known.

    Raises:
        PagedKVError: no point or more than 3, points that do not determine so much, or that no device with
            these peaks can have (faster than the bandwidth, or faster with more to read).
    """
    if not 1 <= len(points) <= MOST_POINTS:
        raise PagedKVError(f"need 1 to {MOST_POINTS} points, got {len(points)}")
    start = efficiency_of(gpu, model.spec, kernel)
    found = _with_launch(points, model, gpu, start, weight_bits)
    if found is None:
        found = _with_weights(points, model, gpu, start, weight_bits)
    step = Roofline.from_gpu(model, gpu, found, weight_bits)
    for point in points:
        modelled = step.decode_s(point.contexts)
        if abs(modelled / point.seconds - 1) > EXACT:
            raise PagedKVError(
                f"no rates of {gpu.name} give {point.seconds * 1e3:g} ms at batch {point.batch}, context "
                f"{point.context}, beside the other points: {modelled * 1e3:g} ms is the nearest"
            )
    return found


def _unknowns(points: Sequence[Point], step: Roofline) -> npt.NDArray[np.float64]:
    """[points, unknowns]: a column for launch, and those for KV and sequences that the points determine."""
    kv = np.array([step.decode_kv_s(p.contexts) for p in points])
    batch = np.array([float(p.batch) for p in points])
    columns = [np.ones(len(points)), kv, batch]
    if len(points) == 1:
        columns = columns[:1]
    elif len(points) == 2:
        columns = [columns[0], kv if np.ptp(kv) > 0 else batch]
    matrix = np.stack(columns, 1)
    scaled = matrix / np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    if np.linalg.matrix_rank(scaled, tol=1e-9) < len(points):
        raise PagedKVError(
            f"the {len(points)} points do not determine {len(points)} rates: vary context and batch "
            f"({'; '.join(f'batch {p.batch}, context {p.context}' for p in points)})"
        )
    return matrix


def _solved(points: Sequence[Point], step: Roofline, others_s: Sequence[float]) -> tuple[float, float, float]:
    """Seconds of a launch, the factor on KV seconds, and seconds per sequence; ``others_s`` are known."""
    matrix = _unknowns(points, step)
    left = np.array([p.seconds for p in points]) - np.array(others_s)
    kv_known = len(points) == 1 or (len(points) == 2 and matrix[0, 1] == points[0].batch)
    if kv_known:
        left = left - np.array([step.decode_kv_s(p.contexts) for p in points])
    x = np.linalg.solve(matrix, left)
    if len(points) == 1:
        return float(x[0]), 1.0, 0.0
    if len(points) == 2:
        return (float(x[0]), 1.0, float(x[1])) if kv_known else (float(x[0]), float(x[1]), 0.0)
    return float(x[0]), float(x[1]), float(x[2])


def _with_launch(
    points: Sequence[Point], model: Model, gpu: GPU, start: Efficiency, weight_bits: float
) -> Efficiency | None:
    """Weights as they are; the launch cost takes what is left. None if that is negative."""
    free = replace(start, launch_s_per_layer=0.0, per_sequence_s=0.0)
    step = Roofline.from_gpu(model, gpu, free, weight_bits)
    known = [step.fixed_s(p.batch, p.batch) for p in points]
    launch_s, kv_factor, per_sequence_s = _solved(points, step, known)
    if launch_s < -_rounding(points):
        return None
    launch_s = max(0.0, launch_s)
    return _efficiency(free, launch_s / model.num_layers, kv_factor, per_sequence_s, gpu, points)


def _with_weights(
    points: Sequence[Point], model: Model, gpu: GPU, start: Efficiency, weight_bits: float
) -> Efficiency:
    """No launch cost; weights stream faster than published."""
    free = replace(start, launch_s_per_layer=0.0, per_sequence_s=0.0, weights=1.0)
    step = Roofline.from_gpu(model, gpu, free, weight_bits)
    weights_s = [step.weight_bytes(p.batch) / step.weight_bytes_per_s for p in points]
    rest_s, kv_factor, per_sequence_s = _solved(points, step, weights_s)
    mean_s = float(np.mean(weights_s))
    # what is left is a multiple of the weights' time at peak: exact where all points read the same weights
    weights = mean_s / (mean_s + rest_s) if rest_s > -mean_s else math.inf
    if not 0 < weights <= 1 + EXACT:
        fastest = points[0]
        raise PagedKVError(
            f"{fastest.seconds * 1e3:g} ms at batch {fastest.batch}, context {fastest.context} is faster "
            f"than {gpu.name} reads {step.weight_bytes(fastest.batch) / 1e9:.2f} GB of weights and "
            f"{step.kv_bytes(fastest.contexts) / 1e9:.2f} GB of K and V: is the model, --weight-bits or the "
            "GPU another?"
        )
    return _efficiency(replace(free, weights=min(1.0, weights)), 0.0, kv_factor, per_sequence_s, gpu, points)


def _efficiency(
    start: Efficiency,
    launch_s: float,
    kv_factor: float,
    per_sequence_s: float,
    gpu: GPU,
    points: Sequence[Point],
) -> Efficiency:
    if per_sequence_s < -_rounding(points) or kv_factor <= 0:
        raise PagedKVError(
            f"the points contradict each other: a step would get faster by "
            f"{max(-per_sequence_s * 1e6, 0.0):.3g} us per sequence, and read K and V in {kv_factor:.3g} of "
            "the modelled time"
        )
    kv = start.kv / kv_factor
    if kv > 1 + EXACT:
        raise PagedKVError(
            f"the points read K and V at {kv:.2f} of the bandwidth of {gpu.name}: is the model, --kv-dtype "
            "or the GPU another?"
        )
    return replace(
        start,
        launch_s_per_layer=launch_s,
        kv=min(1.0, kv),
        per_sequence_s=max(0.0, per_sequence_s),
    )


def _rounding(points: Sequence[Point]) -> float:
    """Seconds below which a difference of the points is none."""
    return 1e-2 * EXACT * min(p.seconds for p in points)


def points_hardware(
    points: Sequence[Point],
    model: Model,
    gpu: GPU,
    weight_bits: float,
    when: str,
    kernel: str | None = None,
) -> Hardware:
    """The hardware file of a calibration to points: its device, with the rates that give them exactly."""
    efficiency = calibrate(points, model, gpu, weight_bits, kernel)
    assert gpu.fp16_flops is not None  # the roofline needed it
    origin = f"of {gpu.name}, {gpu.source}"
    fitted = (
        f"fitted to {len(points)} points of {model.name}, {weight_bits:g}-bit weights, {model.spec.dtype}"
    )

    def made(name: str, value: float, start: float) -> Figure:
        if value == start:
            return Figure(value, "published", f"{name}: {kernel or 'the default'} for {gpu.name}")
        return Figure(value, "fitted", f"{name}: {fitted}", when, len(points))

    start = efficiency_of(gpu, model.spec, kernel)
    costs = AttentionConstants(0.0, 1.0 / efficiency.kv)
    figures = {
        "memory_bytes": Figure(gpu.memory_bytes, "published", origin),
        "bandwidth": Figure(gpu.bandwidth, "published", origin),
        "flops": Figure(gpu.fp16_flops, "published", origin),
        "weights": made("share of the bandwidth", efficiency.weights, start.weights),
        "compute": made("share of the FLOPS", efficiency.compute, start.compute),
        "layer_s": made("seconds per layer", efficiency.launch_s_per_layer, start.launch_s_per_layer),
        "per_sequence_s": made("seconds per sequence", efficiency.per_sequence_s, start.per_sequence_s),
    }
    attention = {
        "fixed_s": Figure(0.0, "fitted", "counted in layer_s", when, len(points)),
        "byte_cost": made("1 / share of the bandwidth for K and V", costs.byte_cost, 1.0 / start.kv),
        "row_cost": Figure(0.0, "fitted", "counted in byte_cost", when, len(points)),
        "head_cost": Figure(0.0, "fitted", "counted in byte_cost", when, len(points)),
    }
    rows = [{"batch": p.batch, "context": p.context, "seconds": p.seconds, "how": "stated"} for p in points]
    conditions = {
        "model": model.name,
        "weight_bits": weight_bits,
        "kv_dtype": model.spec.dtype,
        "gpu": gpu.name,
    }
    return Hardware(f"{gpu.name}, calibrated", when, figures, {model.spec.dtype: attention}, conditions, rows)
