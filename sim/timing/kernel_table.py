"""A profile of one kernel: seconds by batch and context, interpolated."""

from __future__ import annotations

import csv
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pagedkv.errors import PagedKVError

COLUMNS = ("batch", "context", "seconds")


@dataclass(frozen=True)
class KernelTable:
    """Seconds of a kernel at measured points (batch, context): exact there, linear between.

    Inside the table, time never falls as batch or context grow.

    ::

        batch 8   |    *---------*--------*         each batch has its own contexts;
        batch 1   | *-------*--------------*---*    between two batches, linear in the batch at one context
                  +------------------------------ context

    Linear, because decode attention is affine in the tokens it reads. A point is inside if both neighbouring
    batches cover its context. Outside, ``seconds`` raises, unless the table was made with ``extrapolate``:
    beyond the largest context the last segment goes on, below the smallest its value holds; beyond the
    largest batch time grows in proportion to the batch, below the smallest its value holds.

    >>> table = KernelTable.from_points([(1, 1024, 1e-4), (1, 2048, 2e-4), (2, 1024, 3e-4), (2, 2048, 4e-4)])
    >>> table.seconds(2, 1024), round(table.seconds(1.5, 1536), 7)
    (0.0003, 0.00025)
    """

    batches: tuple[float, ...]
    contexts: tuple[tuple[float, ...], ...]
    times: tuple[tuple[float, ...], ...]
    extrapolate: bool = False
    name: str = "the table"

    @classmethod
    def from_points(
        cls,
        points: Iterable[tuple[float, float, float]],
        *,
        extrapolate: bool = False,
        name: str = "the table",
    ) -> KernelTable:
        """A table of (batch, context, seconds); ``PagedKVError`` names the points that contradict it.

        Refused are numbers that are not above 0 (a context may be 0), a point given twice, and a time that
        falls while batch or context grows: an average of several runs does not.
        """
        rows: dict[float, dict[float, float]] = {}
        for batch, context, seconds in points:
            if not (0 < batch < math.inf and 0 <= context < math.inf and 0 < seconds < math.inf):
                raise PagedKVError(
                    f"{name}: need batch and seconds above 0 and a context of 0 or more, got batch "
                    f"{batch:g}, context {context:g}, {seconds:g} s"
                )
            if context in rows.setdefault(batch, {}):
                raise PagedKVError(f"{name}: batch {batch:g}, context {context:g} is there twice")
            rows[batch][context] = seconds
        if not rows:
            raise PagedKVError(f"{name}: no points")
        batches = sorted(rows)
        contexts = tuple(tuple(sorted(rows[b])) for b in batches)
        times = tuple(tuple(rows[b][c] for c in cs) for b, cs in zip(batches, contexts, strict=True))
        table = cls(tuple(batches), contexts, times, extrapolate, name)
        table._require_rising()
        return table

    @classmethod
    def from_csv(cls, path: Path, *, extrapolate: bool = False) -> KernelTable:
        """The table of a CSV file with the columns batch, context, seconds; others are ignored."""
        try:
            with path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
                rows = list(reader)
        except OSError as error:
            raise PagedKVError(f"cannot read {path}: {error.strerror or error}") from None
        except (UnicodeDecodeError, csv.Error) as error:
            raise PagedKVError(f"{path}: no table: {error}") from None
        if missing:
            raise PagedKVError(f"{path}: no column {', '.join(missing)} (need {', '.join(COLUMNS)})")
        points = []
        for number, row in enumerate(rows, start=2):
            try:
                points.append((float(row["batch"]), float(row["context"]), float(row["seconds"])))
            except (TypeError, ValueError):
                values = ", ".join(f"{name} {row[name]!r}" for name in COLUMNS)
                raise PagedKVError(f"{path}, line {number}: no numbers: {values}") from None
        return cls.from_points(points, extrapolate=extrapolate, name=str(path))

    def seconds(self, batch: float, context: float) -> float:
        """Seconds at a point. O(log points).

        Raises:
            PagedKVError: the point is outside, and the table does not extrapolate; with the range.
        """
        low, high = self._neighbours(batch)
        below = self._in_row(low, context)
        if low == high:
            beyond = batch / self.batches[-1] if low == len(self.batches) - 1 else 1.0
            return below * max(1.0, beyond)
        above = self._in_row(high, context)
        share = (batch - self.batches[low]) / (self.batches[high] - self.batches[low])
        return below + share * (above - below) if share < 1 else above

    def next_knot(self, batch: float, context: float) -> float:
        """The first measured context above ``context`` in the rows that ``seconds`` uses; inf if none is."""
        found = math.inf
        for row in set(self._neighbours(batch)):
            at = bisect_right(self.contexts[row], context)
            if at < len(self.contexts[row]):
                found = min(found, self.contexts[row][at])
        return found

    def _neighbours(self, batch: float) -> tuple[int, int]:
        """The rows around a batch; twice the same at a row or beyond the ends."""
        at = bisect_left(self.batches, batch)
        if at < len(self.batches) and self.batches[at] == batch:
            return at, at
        if 0 < at < len(self.batches):
            return at - 1, at
        if not self.extrapolate:
            raise PagedKVError(
                f"batch {batch:g} is outside {self.name}, which has {self.batches[0]:g} to "
                f"{self.batches[-1]:g}"
            )
        at = min(at, len(self.batches) - 1)
        return at, at

    def _in_row(self, row: int, context: float) -> float:
        contexts, times = self.contexts[row], self.times[row]
        if not contexts[0] <= context <= contexts[-1]:
            return self._outside_row(row, context)
        at = bisect_left(contexts, context)
        if contexts[at] == context:
            return times[at]
        share = (context - contexts[at - 1]) / (contexts[at] - contexts[at - 1])
        return times[at - 1] + share * (times[at] - times[at - 1])

    def _outside_row(self, row: int, context: float) -> float:
        contexts, times = self.contexts[row], self.times[row]
        if not self.extrapolate:
            raise PagedKVError(
                f"context {context:g} is outside {self.name}, which has {contexts[0]:g} to "
                f"{contexts[-1]:g} at batch {self.batches[row]:g}"
            )
        if context < contexts[0]:
            return times[0]
        if len(contexts) == 1:  # no segment: through the origin
            return times[0] * context / contexts[0] if contexts[0] else times[0]
        slope = (times[-1] - times[-2]) / (contexts[-1] - contexts[-2])
        return times[-1] + slope * (context - contexts[-1])

    def _require_rising(self) -> None:
        """Refuse a row that falls, and a row below another at a context that both have or interpolate."""
        for row, (contexts, times) in enumerate(zip(self.contexts, self.times, strict=True)):
            for i in range(1, len(times)):
                if times[i] < times[i - 1]:
                    self._refuse((row, contexts[i]), (row, contexts[i - 1]))
            for upper in range(row + 1, len(self.batches)):
                low = max(contexts[0], self.contexts[upper][0])
                high = min(contexts[-1], self.contexts[upper][-1])
                for knot in sorted({*contexts, *self.contexts[upper]}):
                    if low <= knot <= high and self._in_row(upper, knot) < self._in_row(row, knot):
                        self._refuse((upper, knot), (row, knot))

    def _refuse(self, less: tuple[int, float], more: tuple[int, float]) -> None:
        raise PagedKVError(
            f"{self.name}: batch {self.batches[less[0]]:g}, context {less[1]:g} takes "
            f"{self._in_row(*less):g} s, less than the {self._in_row(*more):g} s of batch "
            f"{self.batches[more[0]]:g}, context {more[1]:g}: repeat the measurement and average"
        )
