"""When requests come: constant, Poisson, Gamma or bursty arrivals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.sim.trace import TraceError

ARRIVALS: Final = ("poisson", "gamma", "constant", "bursty")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ArrivalProcess:
    """Gaps between requests.

    Args:
        kind: ``constant``: all gaps are equal; ``poisson``: exponential gaps; ``gamma``: Gamma gaps with
            coefficient of variation ``cv``; ``bursty``: Poisson arrivals during exponential on-times of mean
            ``on_s``, none during exponential off-times of mean ``off_s``.
        per_s: requests per second in the long run, off-times included.
        cv: of ``gamma`` gaps: 1 is Poisson, more is burstier, less is more even.
        on_s: mean seconds of a burst.
        off_s: mean seconds between bursts.

    >>> ArrivalProcess("constant", per_s=4).draw(np.random.default_rng(0), 3).tolist()
    [0.0, 0.25, 0.5]
    """

    kind: str = "poisson"
    per_s: float = 1.0
    cv: float = 1.0
    on_s: float = 10.0
    off_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse an unknown kind and numbers that are not above 0."""
        if self.kind not in ARRIVALS:
            raise TraceError(f"unknown arrivals {self.kind!r}, known are: {', '.join(ARRIVALS)}")
        for name in ("per_s", "cv", "on_s", "off_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise TraceError(f"{name} must be a finite number above 0, got {value!r}")

    def __str__(self) -> str:
        """The kind and the numbers that matter to it.

        >>> str(ArrivalProcess("gamma", per_s=2, cv=3))
        'gamma at 2 per second, cv 3'
        """
        more = {"gamma": f", cv {self.cv:g}", "bursty": f", {self.on_s:g} s on and {self.off_s:g} s off"}
        return f"{self.kind} at {self.per_s:g} per second{more.get(self.kind, '')}"

    def draw(self, rng: np.random.Generator, n: int) -> Floats:
        """Arrivals of ``n`` requests: [n] float64 seconds, not decreasing, the first one at 0. O(n)."""
        gaps = self._gaps(rng, n - 1) if n > 1 else np.empty(0)
        return np.concatenate([[0.0], np.cumsum(gaps)])[:n]

    def draw_seeded(self, seed: int, n: int) -> Floats:
        """As `draw`, from a seed: the same in any process."""
        return self.draw(np.random.Generator(np.random.PCG64(seed)), n)

    def _gaps(self, rng: np.random.Generator, n: int) -> Floats:
        if self.kind == "constant":
            return np.full(n, 1.0 / self.per_s)
        if self.kind == "poisson":
            return rng.standard_exponential(n) / self.per_s
        if self.kind == "gamma":
            shape = 1.0 / self.cv**2
            return rng.standard_gamma(shape, n) / (shape * self.per_s)
        return self._bursty(rng, n)

    def _bursty(self, rng: np.random.Generator, n: int) -> Floats:
        """Gaps in busy time, and the off-times that fall into them."""
        share = self.on_s / (self.on_s + self.off_s)
        busy = rng.standard_exponential(n) * share / self.per_s
        at = np.cumsum(busy)
        # a burst ends at the points of a Poisson process in busy time
        num_pauses = int(at[-1] / self.on_s * 1.5 + 10)
        ends = np.cumsum(rng.standard_exponential(num_pauses) * self.on_s)
        while ends[-1] < at[-1]:
            more = np.cumsum(rng.standard_exponential(num_pauses) * self.on_s)
            ends = np.concatenate([ends, ends[-1] + more])
        pauses = rng.standard_exponential(len(ends)) * self.off_s
        before = np.concatenate([[0.0], np.cumsum(pauses)])[np.searchsorted(ends, at)]
        return np.diff(at + before, prepend=0.0)
