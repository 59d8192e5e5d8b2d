"""Azure LLM inference traces of 2023 and 2024: CSV of arrivals and lengths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from pagedkv.sim.readers.csv_rows import csv_rows, whole
from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.row import Clock, Format, Head, Notes, ReadOptions, Row, output_tokens
from pagedkv.sim.readers.source import Source

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[ T]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,9}))?"
    r"(?:Z|([+-])([0-9]{2}):([0-9]{2}))?"
)
_NS_PER_S = 10**9
_EPOCH = datetime(1970, 1, 1)


def read_rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    """Yield the requests of a file.

    ``TIMESTAMP`` is a date and time, with up to nine fractional digits (2023) and perhaps an offset from UTC
    (2024; without one it is taken as UTC); ``ContextTokens`` and ``GeneratedTokens`` are tokens. The traces
    say nothing about content: no two prompts share anything.
    """
    clock = Clock("TIMESTAMP", "ns", float(_NS_PER_S), options)
    notes.assume("no content: no two prompts share a prefix")
    for place, fields in csv_rows(source, _COLUMNS):
        stamp, context, generated = (fields[column] for column in _COLUMNS)
        arrival_s = clock.seconds(place, _nanoseconds(place, stamp))
        input_len = place.integer("ContextTokens", whole(context))
        output_len = output_tokens(place, "GeneratedTokens", whole(generated), options, notes)
        if output_len:
            yield Row(place, arrival_s, input_len, output_len)


def _nanoseconds(place: Place, text: str) -> int:
    """Since 1970, exact."""
    wanted = "a time such as 2024-05-10 00:00:00.009930+00:00"
    match = _STAMP.fullmatch(text)
    if not match:
        raise place.field_error("TIMESTAMP", wanted, text)
    try:
        moment = datetime(*map(int, match.groups()[:6]))  # type: ignore[arg-type]  # six numbers
    except ValueError as error:
        raise place.field_error("TIMESTAMP", f"{wanted} ({error})", text) from error
    since = moment - _EPOCH
    fraction = int((match[7] or "").ljust(9, "0"))
    offset_s = (60 * int(match[9]) + int(match[10])) * 60 if match[8] else 0
    seconds = since.days * 86400 + since.seconds - (offset_s if match[8] == "+" else -offset_s)
    return seconds * _NS_PER_S + fraction


def _recognises(head: Head) -> bool:
    return "ContextTokens" in head.columns or "GeneratedTokens" in head.columns


FORMAT = Format("azure", "Azure LLM inference CSV (2023, 2024)", _recognises, read_rows)
