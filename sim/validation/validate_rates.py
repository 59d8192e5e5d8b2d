"""The step-time model against measured speeds of whole models, as it is and after a calibration point."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.calibrate_points import Point, calibrate
from pagedkv.sim.timing.efficiency import Efficiency
from pagedkv.sim.timing.roofline import Roofline, efficiency_of
from pagedkv.sim.timing.served_step import prefill_share_s, served_tpot_s
from pagedkv.sim.validation.measured_rates import RateRow
from pagedkv.sim.validation.series_error import FloatArray, SeriesError, Unused

ALLOWED_16_BIT = 0.02
ALLOWED_4_BIT = 0.046
PEAK = Efficiency(1.0, 1.0, 1.0, 0.0)


def rate_errors(rows: Sequence[RateRow]) -> tuple[list[SeriesError], list[Unused]]:
    """The error of every series, and the rows that could not be compared.

    ::

        one sequence over contexts   calibrated at the median context; a bound for 16 and 4 bits
        the same with two points     the shortest and the longest context, where there are others between
        several models at one point  calibrated on the smallest; a bound for 16 bits
        several batches; served      calibrated at the smallest batch, shortest context; no bound
        one row alone                as it is; no bound
    """
    errors: list[SeriesError] = []
    usable, unused = _usable(rows)
    series: dict[tuple[str, ...], list[RateRow]] = {}
    for row in usable:
        series.setdefault(row.series, []).append(row)
    singles: dict[tuple[str, ...], list[RateRow]] = {}
    for key, members in sorted(series.items()):
        if len({(row.batch, row.context) for row in members}) == 1:
            singles.setdefault((key[0], *key[2:]), []).extend(members)
            continue
        try:
            errors += _of_series(members)
        except PagedKVError as error:
            unused.append(Unused(f"{_name(members[0])}: {len(members)} rows", _short(error)))
    for members in singles.values():
        try:
            errors.append(_across_models(members))
        except PagedKVError as error:
            unused.append(Unused(f"{_name(members[0])}: {len(members)} rows", _short(error)))
    return errors, unused


def _usable(rows: Sequence[RateRow]) -> tuple[list[RateRow], list[Unused]]:
    """Rows whose model and GPU are known and large enough; the same reason is said once."""
    usable, reasons = [], dict[tuple[str, str], int]()
    for row in rows:
        try:
            row.require_fits(*row.load())
            usable.append(row)
        except PagedKVError as error:
            key = (_name(row), _short(error))
            reasons[key] = reasons.get(key, 0) + 1
    return usable, [Unused(f"{name}: {count} rows", why) for (name, why), count in reasons.items()]


def _of_series(rows: list[RateRow]) -> list[SeriesError]:
    rows = sorted(rows, key=lambda row: (row.batch, row.context))
    name = _name(rows[0])
    if rows[0].served or len({row.batch for row in rows}) > 1:
        what = "served, prefill modelled" if rows[0].served else "batches"
        condition = f"{what}; 1 point: batch {rows[0].batch}, context {rows[0].context:,}"
        return [_error(rows[:1], rows[1:], name, condition, None)]
    bits = rows[0].weight_bits
    allowed = ALLOWED_16_BIT if bits >= 16 else ALLOWED_4_BIT if bits < 8 else None
    middle = len(rows) // 2
    condition = f"contexts; 1 point: context {rows[middle].context:,}"
    others = rows[:middle] + rows[middle + 1 :]
    found = [_error(rows[middle : middle + 1], others, name, condition, allowed)]
    if len(rows) > 2:
        condition = f"contexts; 2 points: {rows[0].context:,} and {rows[-1].context:,}"
        found.append(_error([rows[0], rows[-1]], rows[1:-1], name, condition, None))
    return found


def _across_models(rows: list[RateRow]) -> SeriesError:
    """Rows of one device, engine and weight dtype, one per model: rates found with one serve the others."""
    rows = sorted(rows, key=lambda row: row.load()[0].params_total)
    first, others = rows[0], rows[1:]
    if not others:
        measured, as_is = np.array([first.seconds]), np.array([_modelled(first, None)])
        at_peak = np.array([_modelled(first, PEAK)])
        return SeriesError.of(
            _name(first), "one row, not calibrated", measured, as_is, at_peak=at_peak, as_is=as_is
        )
    models = ", ".join(row.model for row in others)
    name = f"{models}, {first.weight_dtype}, {first.gpu}, {first.engine}"
    allowed = ALLOWED_16_BIT if first.weight_bits >= 16 and not first.served else None
    return _error([first], others, name, f"other models; 1 point: {first.model}", allowed)


def _error(
    points: Sequence[RateRow],
    others: Sequence[RateRow],
    name: str,
    condition: str,
    allowed: float | None,
) -> SeriesError:
    efficiency = _calibrated(points)

    def modelled(known: Efficiency | None) -> FloatArray:
        return np.array([_modelled(row, known) for row in others])

    measured = np.array([row.seconds for row in others])
    return SeriesError.of(
        name,
        condition,
        measured,
        modelled(efficiency),
        at_peak=modelled(PEAK),
        as_is=modelled(None),
        allowed=allowed,
    )


def _calibrated(rows: Sequence[RateRow]) -> Efficiency:
    """Rates that give these rows; of served ones, the prefill of the others is taken off first."""
    (model, gpu), bits = rows[0].load(), rows[0].weight_bits
    step = Roofline.from_gpu(model, gpu, weight_bits=bits)
    points = []
    for row in rows:
        left = row.seconds - (prefill_share_s(step, row.batch, *row.served) if row.served else 0.0)
        if left <= 0:
            raise PagedKVError(
                f"prefill alone would take {row.seconds - left:.4g} s of the {row.seconds:.4g} s per token "
                f"at batch {row.batch}, context {row.context}"
            )
        points.append(Point(row.batch, row.context, left))
    return calibrate(points, model, gpu, bits, rows[0].kernel)


def _modelled(row: RateRow, efficiency: Efficiency | None) -> float:
    """Seconds per token; without an efficiency that of the GPU's table."""
    model, gpu = row.load()
    known = efficiency or efficiency_of(gpu, model.spec, row.kernel)
    step = Roofline.from_gpu(model, gpu, known, row.weight_bits)
    if row.served:
        return served_tpot_s(step, row.batch, *row.served)
    return step.decode_s(np.full(row.batch, row.context, np.int64))


def _name(row: RateRow) -> str:
    return f"{row.model}, {row.weight_dtype or '16 bits?'}, {row.gpu}, {row.engine}"


def _short(error: PagedKVError) -> str:
    """Without the list of what would have been known."""
    return str(error).partition("; ")[0]
