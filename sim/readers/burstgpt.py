"""BurstGPT: CSV of arrivals and lengths, with or without failed requests and session ids."""

from __future__ import annotations

from collections.abc import Iterator

from pagedkv.sim.readers.csv_rows import csv_rows, decimal, whole
from pagedkv.sim.readers.row import Clock, Format, Head, Notes, ReadOptions, Row, output_tokens
from pagedkv.sim.readers.source import Source

_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    """Yield the requests of a file.

    ``Timestamp`` in seconds, ``Request tokens`` and ``Response tokens``; ``Session ID`` where there is one.
    ``Model``, ``Total tokens``, ``Log Type`` and ``Elapsed time`` are ignored. Failed requests have 0
    response tokens: they are refused, or left out and counted with ``skip_failed``. No two prompts share
    anything.
    """
    clock = Clock("Timestamp", "s", 1.0, options)
    notes.assume("no content: no two prompts share a prefix")
    for place, fields in csv_rows(source, _COLUMNS):
        stamp, request, response = (fields[column] for column in _COLUMNS)
        arrival_s = clock.seconds(place, place.number("Timestamp", decimal(stamp)))
        input_len = place.integer("Request tokens", whole(request))
        output_len = output_tokens(place, "Response tokens", whole(response), options, notes)
        session = fields.get("Session ID") or None
        if session is not None:
            place.key("Session ID", session)
        if output_len:
            yield Row(place, arrival_s, input_len, output_len, session=session)


def _recognises(head: Head) -> bool:
    return "Request tokens" in head.columns or "Response tokens" in head.columns


FORMAT = Format("burstgpt", "BurstGPT CSV", _recognises, read_rows)
