"""Parts of a trace: its beginning, a random part, a window of time, with whole sessions if asked."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.sim.readers.reading import Reading, second_pass
from pagedkv.sim.readers.row import Row
from pagedkv.sim.trace import TraceError

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sample:
    """Which requests to keep: exactly one of ``first``, ``random`` and ``window_s`` is stated.

    Args:
        first: so many from the beginning.
        random: so many drawn without replacement, each as likely, with ``seed``.
        window_s: (from, to) in seconds after the first request, the end excluded.
        seed: of the random numbers.
        keep_sessions: keep or leave whole sessions: those of the first requests, sessions drawn at random,
            or those that begin in the window. There may then be more requests than asked for, by less than
            one session.
    """

    first: int | None = None
    random: int | None = None
    window_s: tuple[float, float] | None = None
    seed: int = 0
    keep_sessions: bool = False

    def __post_init__(self) -> None:
        """Refuse none or several ways to choose."""
        if sum(way is not None for way in (self.first, self.random, self.window_s)) != 1:
            raise TraceError("state one of first, random and window")
        if self.window_s is not None and not 0 <= self.window_s[0] < self.window_s[1]:
            raise TraceError(f"the window must not end before it begins, got {self.window_s}")


def sample_rows(reading: Reading, sample: Sample) -> Iterator[Row]:
    """Yield the chosen requests in file order; arrivals count from the first of them.

    Two passes over the file; memory: 16 bytes per request, and its sessions. A request whose session began
    outside loses its think time. Raises ``TraceError`` for a stream, for more random requests than there are,
    for a window of a trace without arrivals, and if nothing is chosen.
    """
    reading.source.require_two_passes()
    chosen = _chosen(reading, sample)
    if not chosen.any():
        raise reading.source.error("no request is in the sample")
    first_s: float | None = None
    begun: set[int | str] = set()
    for row, keep in second_pass(reading, chosen.tolist()):
        if not keep:
            continue
        if row.think_s is not None and row.session not in begun:
            row = row._replace(think_s=None)
        if row.session is not None:
            begun.add(row.session)
        if row.arrival_s is not None:
            first_s = row.arrival_s if first_s is None else first_s
            row = row._replace(arrival_s=row.arrival_s - first_s)
        yield row


def _chosen(reading: Reading, sample: Sample) -> Mask:
    """One bool per request."""
    units, arrivals = _units(reading, sample)
    if sample.window_s is not None:
        begin, end = sample.window_s
        if np.isnan(arrivals).any():
            raise reading.source.error("a window needs arrivals, but the file has none")
        first_arrivals = arrivals[np.unique(units, return_index=True)[1]]
        return ((first_arrivals >= begin) & (first_arrivals < end))[units]
    num_units = int(units.max(initial=-1)) + 1
    order, wanted = np.arange(num_units), sample.first or 0
    if sample.random is not None:
        wanted = sample.random
        if wanted > len(units):
            raise reading.source.error(f"{wanted} random requests asked for, the file holds {len(units)}")
        order = np.random.Generator(np.random.PCG64(sample.seed)).permutation(num_units)
    sizes = np.bincount(units, minlength=num_units)[order]
    before = np.cumsum(sizes) - sizes
    kept = np.zeros(num_units, np.bool_)
    kept[order[before < wanted]] = True
    return kept[units]


def _units(reading: Reading, sample: Sample) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """What is kept or left as one, per request, numbered by first appearance; and the arrivals."""
    units, arrivals = array("q"), array("d")
    numbers: dict[int | str, int] = {}
    num_units = 0
    for row in reading:
        unit = num_units
        if sample.keep_sessions and row.session is not None:
            unit = numbers.setdefault(row.session, num_units)
        num_units += unit == num_units
        units.append(unit)
        arrivals.append(np.nan if row.arrival_s is None else row.arrival_s)
    return np.array(units, np.int64), np.array(arrivals)
