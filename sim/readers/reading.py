"""Read a trace of any format: as a stream of requests, or whole as arrays."""

from __future__ import annotations

import heapq
import os
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from pagedkv.sim.readers.formats import find_format
from pagedkv.sim.readers.row import Format, Notes, ReadOptions, Row
from pagedkv.sim.readers.source import Progress, Source
from pagedkv.sim.trace import NO_DEADLINE, Trace, check_positive_int

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
    columns = _Columns()
    for row in islice(reading, limit):
        columns.add(row)
    if not columns.num_requests:
        raise reading.source.error("the file holds no requests")
    return columns.trace(reading.source.name, reading.notes.lines())


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


class _Columns:
    """The rows read so far, as growing columns."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._arrival_s, self._think_s, self._deadline_s = array("d"), array("d"), array("d")
        self._input_len, self._output_len, self._priority = array("q"), array("q"), array("q")
        self._session, self._adapter = array("q"), array("q")
        self._content_ids, self._content_offsets = array("i"), array("q", [0])
        self._contents: dict[Hashable, int] = {}
        self._sessions: dict[Hashable, int] = {}
        self._adapters: dict[str, int] = {}
        self._block_size = 0

    def add(self, row: Row) -> None:
        if row.block_size != self._block_size and row.contents:
            if self._block_size:
                raise row.place.error(f"blocks of {row.block_size} tokens after blocks of {self._block_size}")
            self._block_size = row.block_size
        self.num_requests += 1
        self._arrival_s.append(row.arrival_s or 0.0)
        self._input_len.append(row.input_len)
        self._output_len.append(row.output_len)
        contents = self._contents
        self._content_ids.extend([contents.setdefault(key, len(contents)) for key in row.content_keys()])
        self._content_offsets.append(len(self._content_ids))
        self._session.append(_number(self._sessions, row.session))
        self._adapter.append(_number(self._adapters, row.adapter))
        self._think_s.append(np.nan if row.think_s is None else row.think_s)
        self._deadline_s.append(NO_DEADLINE if row.deadline_s is None else row.deadline_s)
        self._priority.append(row.priority)

    def trace(self, name: str, notes: tuple[str, ...]) -> Trace:
        return Trace(
            name,
            np.array(self._arrival_s),
            np.array(self._input_len),
            np.array(self._output_len),
            np.array(self._content_ids, np.int32),
            np.array(self._content_offsets),
            self._block_size,
            len(self._contents),
            session=np.array(self._session),
            think_s=np.array(self._think_s),
            deadline_s=np.array(self._deadline_s),
            priority=np.array(self._priority),
            adapter=np.array(self._adapter),
            adapter_names=tuple(self._adapters),
            notes=notes,
        )


def _number(numbers: dict[Any, int], key: Any) -> int:
    """The number of a key, from 0 in order of appearance; -1 for none."""
    return -1 if key is None else numbers.setdefault(key, len(numbers))
