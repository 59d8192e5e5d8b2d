"""Results as lines of one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_cases import Outcome
from benchmarks.gpu_speed import GROWTH
from benchmarks.gpu_workers import Failure
from pagedkv.attention.bench.measure import CellResult

NOT_TIMED = "not timed"


@dataclass(frozen=True)
class Line:
    """result: right, wrong, timed, skipped, or "differs" for a wrong result of a peer.

    of_read: GB/s in percent of the measured read bandwidth.
    """

    what: str
    result: str
    us: float | None = None
    gb_per_s: float | None = None
    of_read: float | None = None
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """It makes the exit code 1."""
        return self.result == "wrong"


def check_line(name: str, outcome: Outcome | Failure) -> Line:
    """A comparison with the reference."""
    if isinstance(outcome, Failure):
        return Line(name, "wrong" if outcome.is_wrong else "skipped", note=outcome.reason)
    if outcome.error is None:
        return Line(outcome.name, "skipped", note=outcome.note)
    note = f"{outcome.error:.0%} of what is allowed" + (f"; {outcome.note}" if outcome.note else "")
    return Line(outcome.name, "wrong" if outcome.is_wrong else "right", note=note)


def bandwidth_lines(found: Mapping[str, float] | Failure, dry: bool) -> tuple[list[Line], float | None]:
    """What the card reaches without attention, and its bytes read per second if that was timed."""
    if isinstance(found, Failure):
        return [Line("bandwidth", "wrong" if found.is_wrong else "skipped", note=found.reason)], None
    if dry:
        return [Line("bandwidth", "skipped", note=NOT_TIMED)], None
    read = found["read"]
    lines = [
        Line(f"bandwidth: {name}", "timed", gb_per_s=rate / 1e9, of_read=100 * rate / read)
        for name, rate in found.items()
    ]
    return lines, read


def speed_lines(name: str, result: CellResult | Failure, read: float | None, ours: str) -> list[Line]:
    """A line per contender; what ``ours`` gets wrong is wrong, what a peer does is a note.

    read: bandwidth in bytes per second, None if nothing was timed.
    """
    if isinstance(result, Failure):
        is_wrong = result.is_wrong and not name.startswith("beside")  # there a peer may have failed
        return [Line(name, "wrong" if is_wrong else "skipped", note=result.reason)]
    if result.note:
        return [Line(name, "skipped", note=result.note)]
    lines = []
    for row in result.rows[1:]:
        what = f"{name}: {row.name}"
        if row.name == ours and row.note:
            lines.append(Line(what, "wrong", note=row.note))
        elif row.is_wrong:
            lines.append(Line(what, "differs", note=row.note))
        elif row.seconds is None or row.gb_per_s is None:
            continue  # one of the `absent`
        elif read is None:
            lines.append(Line(what, "right", note=NOT_TIMED))
        else:
            share = 100 * row.gb_per_s / (read / 1e9)
            lines.append(Line(what, "timed", row.seconds * 1e6, row.gb_per_s, share))
    return lines


def absent(results: Mapping[str, Any]) -> list[str]:
    """The peers that did not take part, and why; every reason once, with the first shape that it kept out."""
    reasons: dict[tuple[str, str], str] = {}
    for shape, result in results.items():
        for row in result.rows if isinstance(result, CellResult) else ():
            if row.note and not row.is_wrong:
                reasons.setdefault((row.name, row.note), shape)
    return [f"{name} did not take part: {why} ({shape})" for (name, why), shape in reasons.items()]


def growth_lines(results: Mapping[str, CellResult | Failure]) -> list[Line]:
    """How the time of a layer grows from the first to the last context, by dtype."""
    lines = []
    first, *_, last = GROWTH
    for dtype in ("bf16", "int8"):
        ends = [_seconds(results.get(f"{mix}, {dtype}, block 16")) for mix in (first, last)]
        if ends[0] is None or ends[1] is None:
            continue
        tokens = GROWTH[last][0] - GROWTH[first][0]
        per_token = (ends[1] - ends[0]) / tokens * 1e6
        note = f"x {ends[1] / ends[0]:.1f}; {per_token * 1024:.2f} us per layer and 1k tokens of context"
        lines.append(Line(f"ITL growth, {first} to {last}, {dtype}", "timed", note=note))
    return lines


def int8_lines(results: Mapping[str, CellResult | Failure]) -> list[Line]:
    """Tokens per second of int8 against bf16, shape by shape."""
    lines = []
    for name, result in results.items():
        fast, slow = _seconds(results.get(name.replace("bf16", "int8"))), _seconds(result)
        if "bf16" in name and fast is not None and slow is not None:
            note = f"{slow / fast:.2f} x the tokens per second of bf16 (bytes: 1.94 x)"
            lines.append(Line(f"int8 against {name}", "timed", note=note))
    return lines


def _seconds(result: Any) -> float | None:
    """Of the first backend that was timed."""
    if not isinstance(result, CellResult):
        return None
    return next((row.seconds for row in result.rows[1:] if row.seconds is not None), None)
