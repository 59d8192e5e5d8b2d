"""How far a model is from a series of measurements, and what could not be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SeriesError:
    """The error of a model over the rows of one series.

    Attributes:
        name, condition: what was measured, and which rows of it under which calibration.
        num_rows: rows that were predicted; one that calibrated the model is not among them.
        error: mean absolute relative error. ``worst``: the largest, with its sign.
        baseline: the mean error of the peak rates alone, without efficiencies.
        uncalibrated: the mean error without any calibration, where ``error`` is with one.
        allowed: largest mean error that counts as agreement, None where none is promised.
    """

    name: str
    condition: str
    num_rows: int
    error: float
    worst: float
    baseline: float | None
    allowed: float | None
    uncalibrated: float | None = None

    @property
    def holds(self) -> bool:
        """Tell whether the error is allowed."""
        return self.allowed is None or self.error <= self.allowed

    @classmethod
    def of(
        cls,
        name: str,
        condition: str,
        measured: FloatArray,
        modelled: FloatArray,
        *,
        at_peak: FloatArray | None = None,
        as_is: FloatArray | None = None,
        allowed: float | None = None,
    ) -> SeriesError:
        """From seconds, [num_rows] each; at least one row."""
        errors = modelled / measured - 1
        worst = float(errors[np.abs(errors).argmax()])
        baseline, uncalibrated = _mean(at_peak, measured), _mean(as_is, measured)
        error = float(np.abs(errors).mean())
        return cls(name, condition, len(errors), error, worst, baseline, allowed, uncalibrated)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return vars(self) | {"holds": self.holds}


def _mean(modelled: FloatArray | None, measured: FloatArray) -> float | None:
    return None if modelled is None else float(np.abs(modelled / measured - 1).mean())


@dataclass(frozen=True)
class Unused:
    """Something that was found and not compared, and why."""

    what: str
    why: str
