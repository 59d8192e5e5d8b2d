"""The fitted attention constants against measured kernel calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedkv.sim.timing.attention_constants import AttentionConstants, fitted_kernels
from pagedkv.sim.validation.measured_kernels import LARGEST_L2_SHARE, LONG_CONTEXT, FloatArray, KernelRows
from pagedkv.sim.validation.series_error import SeriesError, Unused
from pagedkv.spec import ELEMENT_BYTES

ALLOWED = {2: 0.05, 1: 0.08}
"""Mean error of cold rows, by bytes per element of K and V."""

COLD = f"context >= {LONG_CONTEXT:,}, KV > {LARGEST_L2_SHARE:g} x L2"


def kernel_errors(groups: Sequence[KernelRows]) -> tuple[list[SeriesError], list[Unused]]:
    """The error of every kernel with constants, then of all cold rows by the width of K and V.

    Rows that no L2 holds have a bound; others a benchmark reads from the L2, as a step that reads its
    weights in between does not: they are shown without one.
    """
    errors, unused = [], []
    pooled: dict[int, list[tuple[FloatArray, FloatArray, FloatArray]]] = {}
    for rows in groups:
        constants = _constants(rows)
        if constants is None:
            unused.append(Unused(f"{_name(rows)}: {len(rows)} rows", _why_not(rows)))
            continue
        width = ELEMENT_BYTES[rows.kv_dtype]
        kinds = {
            COLD: rows.is_cold,
            "full attention, shorter or in L2": ~rows.is_cold & (rows.window == 0),
            "sliding window": rows.window > 0,
        }
        for condition, mask in kinds.items():
            if not mask.any():
                continue
            allowed = ALLOWED[width] if condition == COLD else None
            some = rows.where(mask)
            modelled, at_peak = _seconds(some, constants), some.kv_bytes / some.gpu.bandwidth
            errors.append(
                SeriesError.of(
                    _name(rows), condition, some.seconds, modelled, at_peak=at_peak, allowed=allowed
                )
            )
            if condition == COLD:
                pooled.setdefault(width, []).append((some.seconds, modelled, at_peak))
    for width, parts in sorted(pooled.items(), reverse=True):
        measured, modelled, at_peak = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        name = f"all kernels, {8 * width}-bit K and V"
        errors.append(SeriesError.of(name, COLD, measured, modelled, at_peak=at_peak, allowed=ALLOWED[width]))
    return errors, unused


def _name(rows: KernelRows) -> str:
    return f"{rows.gpu.name}, {rows.kernel}, {rows.kv_dtype}"


def _constants(rows: KernelRows) -> AttentionConstants | None:
    key = (rows.gpu.name, rows.kernel, rows.kv_dtype)
    return next((k.constants for k in fitted_kernels() if (k.gpu, k.kernel, k.kv_dtype) == key), None)


def _seconds(rows: KernelRows, constants: AttentionConstants) -> FloatArray:
    heads = rows.batch * rows.num_kv_heads
    return constants.seconds(rows.kv_bytes, heads, rows.row_bytes, rows.gpu.bandwidth)


def _why_not(rows: KernelRows) -> str:
    cold = rows.where(rows.is_cold)
    if not len(cold):
        return f"no constants for this kernel, and no rows with {COLD} to fit them to"
    share = float((cold.kv_bytes / cold.seconds).max()) / rows.gpu.bandwidth
    doubt = ", more than memory delivers: it was not measured cold" if share > 0.95 else ""
    return (
        f"no constants for this kernel; its fastest cold row reaches {share:.2f} of the peak bandwidth{doubt}"
    )
