"""An axis of a chart: from values to pixels, and where its ticks are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_TICKS = 6


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high`` on a line. ``label`` names the quantity and its unit.

    ``whole``: of things that are counted, so that no tick lies between whole numbers.
    """

    label: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        """Widen an axis of no length; a logarithmic one begins above 0."""
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic axis begins above 0, got {self.low}")
        if not self.high > self.low:
            object.__setattr__(self, "high", self.low * 2 if self.log else self.low + 1)

    def place(self, value: float) -> float:
        """Where a value is, 0 at ``low`` and 1 at ``high``; what lies outside is put on the edge.

        >>> Axis("x", 0, 10).place(5), Axis("x", 1, 100, log=True).place(10), Axis("x", 0, 10).place(11)
        (0.5, 0.5, 1.0)
        """
        if self.log:
            share = (math.log(max(value, self.low)) - math.log(self.low)) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Round values on the axis, each with its text.

        >>> [text for _, text in Axis("x", 0, 97).ticks()]
        ['0', '20', '40', '60', '80']
        >>> [text for _, text in Axis("x", 3, 4000, log=True).ticks()]
        ['10', '100', '1k']
        """
        if self.log:
            return [(value, short(value)) for value in self._log_ticks()]
        step = max(_step((self.high - self.low) / MOST_TICKS), 1.0 if self.whole else 0.0)
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor(self.high / step + 1e-9) - first + 1
        values = [(first + i) * step for i in range(count)]
        return [(value, _fixed(value, step)) for value in values]

    def _log_ticks(self) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for parts in ((1,), (1, 3), (1, 2, 5)):
            # powers of negative tens are divided, so that 0.001 is what its digits say
            values = [part * 10.0**d if d >= 0 else part / 10.0**-d for d in decades for part in parts]
            inside = [v for v in values if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
            if len(inside) >= 3:
                break
        every = math.ceil(len(inside) / (MOST_TICKS + 1))
        return inside[::every] if len(inside) >= 2 else [self.low, self.high]


def axis_over(label: str, values: Sequence[float], *, whole: bool = False) -> Axis:
    """An axis from 0 to a little above the largest value."""
    return Axis(label, 0.0, max([0.0, *values]) * 1.05, whole=whole)


def short(value: float) -> str:
    """Three digits and a letter.

    >>> short(0), short(0.25), short(1234), short(131072), short(2.5e9)
    ('0', '0.25', '1.23k', '131k', '2.5G')
    """
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{float(f'{value / limit:.3g}'):g}{letter}"
    return f"{float(f'{value:.3g}'):g}"


def _step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... (times a power of ten) that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _fixed(value: float, step: float) -> str:
    """A tick with the decimals that its step needs."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if step >= limit / 10 and abs(value) >= limit:
            return f"{value / limit:.{_decimals(step / limit)}f}{letter}"
    if step >= 1e2 and not value:
        return "0"
    return f"{value:,.{_decimals(step)}f}"


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))
