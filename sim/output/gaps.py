"""The gaps between consecutive tokens of all sequences, which are too many to be written down one by one."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

PIECE: Final = 1 << 17
"""Gaps that are worked out at a time."""

_DIGIT_BITS: Final = 13
_DIGIT: Final = np.uint64((1 << _DIGIT_BITS) - 1)


class Gaps:
    """Runs of gaps: the k-th of a run lasts ``first + growth * k`` seconds, and ``weight`` sequences had it.

    The first gap of a run may be one that ``late`` fewer had. Memory: the runs, and ``PIECE`` gaps.

    >>> gaps = Gaps(first=[1.0, 7.0], growth=[0.5, 0.0], count=[3, 1], weight=[2, 1], late=[2, 0])
    >>> gaps.piece(0, 3)
    (array([1.5, 2. , 7. ]), array([2, 2, 1]))
    >>> gaps.total, gaps.sum(), gaps.ranked(np.array([1, 4, 5])).tolist()
    (5, 14.0, [1.5, 2.0, 7.0])
    """

    def __init__(
        self,
        first: npt.ArrayLike,
        growth: npt.ArrayLike,
        count: npt.ArrayLike,
        weight: npt.ArrayLike,
        late: npt.ArrayLike,
    ) -> None:
        """Take columns of one number per run; gaps that nobody had are left out."""
        columns: list[npt.NDArray[Any]] = [np.asarray(column) for column in (count, weight, late)]
        counts, weights, fewer = columns
        skipped = (fewer == weights).astype(np.int64)
        there = (weights > 0) & (counts > skipped)
        self._first, self._growth = (
            np.asarray(first, np.float64)[there],
            np.asarray(growth, np.float64)[there],
        )
        self._weight = weights[there]
        self._late = np.where(skipped, 0, fewer)[there]
        self._ends = np.cumsum((counts - skipped)[there])
        self._starts = self._ends - (counts - skipped)[there]
        self._zero = self._starts - skipped[there]  # the place of k = 0
        self.total = int(((counts - skipped)[there] * self._weight).sum() - self._late.sum())
        """Gaps, each counted once per sequence."""

    def __len__(self) -> int:
        """Return how many gaps there are, each counted once."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def piece(self, start: int, stop: int) -> tuple[FloatArray, IntArray]:
        """Gaps ``start .. stop - 1``: (seconds, how many sequences had each). O(stop - start)."""
        runs = slice(
            int(np.searchsorted(self._ends, start, side="right")), int(np.searchsorted(self._starts, stop))
        )
        starts = self._starts[runs]
        counts = np.minimum(self._ends[runs], stop) - np.maximum(starts, start)
        k = np.arange(start, stop) - np.repeat(self._zero[runs], counts)
        seconds = np.repeat(self._first[runs], counts) + np.repeat(self._growth[runs], counts) * k
        weights = np.repeat(self._weight[runs], counts)
        begun = starts >= start
        weights[starts[begun] - start] -= self._late[runs][begun]
        return seconds, weights

    def sum(self) -> float:
        """Seconds of all gaps, each once per sequence. O(gaps)."""
        return self._sum(0, len(self))

    def _sum(self, start: int, stop: int) -> float:
        """Split as numpy does it, so that the size of a piece makes no difference in the last digit."""
        count = stop - start
        if count <= PIECE:
            seconds, weights = self.piece(start, stop)
            return float((seconds * weights).sum())
        half = count // 2
        half -= half % 8
        return self._sum(start, start + half) + self._sum(start + half, stop)

    def ranked(self, ranks: IntArray) -> FloatArray:
        """The gaps of these ranks [m], from 1 to ``total`` in ascending order: [m] float64.

        Found digit by digit of their bits, which are in the order of the numbers, since none is negative.
        O(gaps log m).
        """
        found, left = np.zeros(len(ranks), np.uint64), np.array(ranks, np.int64)
        for shift in range(64 // _DIGIT_BITS * _DIGIT_BITS, -1, -_DIGIT_BITS):
            known, place = np.unique(found, return_inverse=True)
            reached = np.cumsum(self._digits(known, shift), axis=1)[place]
            digits = np.argmax(reached >= left[:, None], axis=1)
            below = np.take_along_axis(reached, np.maximum(digits - 1, 0)[:, None], axis=1)[:, 0]
            left -= np.where(digits > 0, below, 0)
            found = (found << np.uint64(_DIGIT_BITS)) | digits.astype(np.uint64)
        return found.view(np.float64)

    def _digits(self, known: npt.NDArray[np.uint64], shift: int) -> IntArray:
        """Of the gaps that begin with each of the bits ``known``, how many go on with each digit."""
        size = int(_DIGIT) + 1
        table = np.zeros(len(known) * size)
        for start in range(0, len(self), PIECE):
            seconds, weights = self.piece(start, min(start + PIECE, len(self)))
            bits = seconds.view(np.uint64) >> np.uint64(shift)
            begins = bits >> np.uint64(_DIGIT_BITS)
            row = np.minimum(np.searchsorted(known, begins), len(known) - 1)
            inside = known[row] == begins
            at = row[inside] * size + (bits[inside] & _DIGIT).astype(np.int64)
            table += np.bincount(at, weights[inside], minlength=len(table))
        return table.astype(np.int64).reshape(len(known), size)
