"""Read a trace of any format: as a stream of requests, or whole as arrays."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from pagedkv.sim.readers.columns import Contents, Numbers
from pagedkv.sim.readers.formats import find_format
from pagedkv.sim.readers.row import Format, Notes, ReadOptions, Row
from pagedkv.sim.readers.source import Progress, Source
from pagedkv.sim.trace import Trace, check_positive_int

T = TypeVar("T")

SORT_WINDOW = 100_000
"""Requests held back when a file is sorted by arrival; more disorder than that is refused."""


@dataclass(frozen=True)
class Reading:
    r"""A file and how to read it; each iteration is a pass over it.

    Memory: one line, plus what its format's reader names, plus ``sort_window`` requests.

    >>> import tempfile; from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "demo.csv")
    ...     _ = path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5.0,70,9\n7.5,8,1\n")
    ...     reading = open_trace(path)
    ...     [(row.arrival_s, row.input_len, row.output_len) for row in reading]
    [(0.0, 70, 9), (2.5, 8, 1)]
    >>> reading.format.name, reading.notes.lines()
    ('vidur', ('no content: no two prompts share a prefix',))
    """

    source: Source
    format: Format
    options: ReadOptions
    notes: Notes
    """What was assumed and left out; complete after a pass."""

    def __iter__(self) -> Iterator[Row]:
        """Yield the requests, arrivals not decreasing. Raises ``TraceError`` with file, line and field."""
        self.notes.clear()
        rows = self.format.read(self.source, self.options, self.notes)
        if self.options.sort_window:
            rows = sorted_by_arrival(rows, self.options.sort_window)
        return _from_first(rows)


def second_pass(reading: Reading, values: Iterable[T]) -> Iterator[tuple[Row, T]]:
    """Yield the requests with what a first pass found of each.

    Raises ``TraceError`` for a file that has more or fewer requests than it had.
    """
    rows = iter(reading)
    for value in values:
        row = next(rows, None)
        if row is None:
            raise reading.source.error("the file has changed: it has fewer requests than before")
        yield row, value
    if next(rows, None) is not None:
        raise reading.source.error("the file has changed: it has more requests than before")


def open_trace(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    options: ReadOptions | None = None,
    progress: Progress | None = None,
) -> Reading:
    """Tell a file's format by its content, or take it as stated, and get ready to read it.

    Args:
        path: the file, plain, gzip or zstd.
        format: a key of ``FORMATS``.
        options: what the file leaves open.
        progress: called now and then with (bytes read, bytes in all) of the file as stored.

    Raises:
        TraceError: a file that is missing or of no known format, an unknown name.
    """
    options = options or ReadOptions()
    if options.block_size is not None:
        check_positive_int("block_size", options.block_size)
    source = Source(path, progress)
    return Reading(source, find_format(source, format), options, Notes())


def read_trace(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    options: ReadOptions | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace of any format whole. O(size of the file); see `open_trace` for the arguments.

    ``limit`` reads only so many requests, at least 1. Requests without arrivals all arrive at 0. Contents are
    renumbered in order of appearance, kept apart between adapters.
    """
    if limit is not None:
        check_positive_int("limit", limit)
    reading = open_trace(path, format=format, options=options, progress=progress)
    return trace_of(reading, limit)


def trace_of(reading: Reading, limit: int | None = None) -> Trace:
    """The requests of a reading, or the first ``limit`` of them, as arrays."""
    numbers, contents = Numbers(), Contents()
    for row in islice(reading, limit):
        numbers.add(row)
        contents.add(row)
    if not numbers.num_requests:
        raise reading.source.error("the file holds no requests")
    return numbers.trace(reading.source.name, reading.notes.lines(), contents)


def sorted_by_arrival(rows: Iterator[Row], window: int) -> Iterator[Row]:
    """Yield the rows by arrival, equal ones in file order; holds back ``window`` of them.

    Raises ``TraceError`` with the line of a row that comes more
    than ``window`` rows after one that arrives later. Rows without arrivals stay in file order.
    """
    held: list[tuple[float, int, Row]] = []
    last = -np.inf
    for number, row in enumerate(rows):
        heapq.heappush(held, (0.0 if row.arrival_s is None else row.arrival_s, number, row))
        if row.arrival_s is not None and row.arrival_s < last:
            raise row.place.error(
                f"arrival is {last - row.arrival_s:g} s before that of a request more than {window:,} "
                "requests earlier: sort the file itself"
            )
        if len(held) > window:
            last, _, ready = heapq.heappop(held)
            yield ready
    while held:
        yield heapq.heappop(held)[2]


def _from_first(rows: Iterator[Row]) -> Iterator[Row]:
    """Let time begin with the first request that is there, whatever was sorted or left out before it."""
    first_s: float | None = None
    for row in rows:
        if row.arrival_s is not None:
            first_s = row.arrival_s if first_s is None else first_s
            if first_s:
                row = row._replace(arrival_s=row.arrival_s - first_s)
        yield row
