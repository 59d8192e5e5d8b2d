"""Histograms of durations, with the same buckets everywhere, so that they can be added up and compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.errors import PagedKVError

BOUNDS = tuple(2.0**exponent for exponent in range(-10, 21))
"""Largest value of each bucket but the last: 1/1024 s (about 1 ms), doubling up to 1048576 s (12 days)."""

_BOUNDS: npt.NDArray[np.float64] = np.array(BOUNDS)


@dataclass(frozen=True)
class Histogram:
    """How many values fell into each bucket: those up to ``BOUNDS[i]`` and above the bound before.

    ``counts`` has one entry more than ``BOUNDS``, for what is above them all; ``sum`` is that of the values.

    >>> few = Histogram.of([0.5, 3.0, 4.0, 6.5])
    >>> few.count, few.mean, few.quantile(0.5)
    (4, 3.5, 3.0)
    """

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    sum: float = 0.0

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Histogram:
        """The histogram of ``values``, float [n]."""
        recorder = HistogramRecorder()
        recorder.add(np.asarray(values, np.float64))
        return recorder.histogram()

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their exact mean, nan without any."""
        return self.sum / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """A value that a share ``q`` (0..1) is not above, nan without any.

        Values are taken to be spread evenly over their bucket, and those above all bounds to be at the last
        one. Below it, the answer is at most twice too large or too small; under 1/1024 s it knows the scale
        no better. Raises ``PagedKVError`` unless ``0 <= q <= 1``.
        """
        if not 0.0 <= q <= 1.0:
            raise PagedKVError(f"a quantile is asked for by a share from 0 to 1, got {q!r}")
        if not self.count:
            return math.nan
        rank, below = q * self.count, 0
        for i, here in enumerate(self.counts[:-1]):
            if here and below + here >= rank:
                low = BOUNDS[i - 1] if i else 0.0
                return low + (BOUNDS[i] - low) * max(0.0, rank - below) / here
            below += here
        return BOUNDS[-1]

    def cumulative(self) -> list[int]:
        """How many values are at most ``BOUNDS[i]``, for each i, and then the number of all."""
        return list(accumulate(self.counts))

    def __add__(self, other: Histogram) -> Histogram:
        """The histogram of both together."""
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Histogram(counts, self.sum + other.sum)


class HistogramRecorder:
    """Counts values as they come: ``counts`` [len(BOUNDS) + 1] int64, and their ``sum``."""

    def __init__(self) -> None:
        """Count none yet."""
        self.counts: npt.NDArray[np.int64] = np.zeros(len(BOUNDS) + 1, np.int64)
        self.sum = 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Count ``values`` [n]. Cost: O(n) as arrays."""
        self.counts += np.bincount(np.searchsorted(_BOUNDS, values), minlength=len(self.counts))
        self.sum += float(values.sum())

    def histogram(self) -> Histogram:
        """What was counted until now."""
        return Histogram(tuple(self.counts.tolist()), self.sum)


class ResidencyHistograms(NamedTuple):
    """How cached content comes and goes, one value per block, in units of the clock (buckets fit seconds).

    ``lifetime``: from stored to evicted. ``idle_before_eviction``: from last becoming idle to evicted.
    ``reuse_gap``: from becoming idle to being held again.
    """

    lifetime: Histogram
    idle_before_eviction: Histogram
    reuse_gap: Histogram
