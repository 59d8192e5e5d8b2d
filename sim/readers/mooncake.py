"""Mooncake: JSON lines of arrivals, lengths and ids of prefix-chained blocks."""

from __future__ import annotations

from collections.abc import Iterator

from pagedkv.sim.readers.contents import with_block_size
from pagedkv.sim.readers.json_rows import json_lines
from pagedkv.sim.readers.row import Clock, Format, Head, Notes, ReadOptions, Row, output_tokens
from pagedkv.sim.readers.source import Source

MOONCAKE_BLOCK_SIZE = 512
AGENT_BLOCK_SIZE = 16

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_MOST_MS = 2.0**53  # beyond it a float64 no longer counts single milliseconds


def read_rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    """Yield the requests of a file.

    ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens, ``hash_ids`` integers of
    64 bits, ``session_id`` where there is one; other fields are ignored. Without a stated block size it is
    512 if the lengths agree with that, else 16.
    """
    sizes = [MOONCAKE_BLOCK_SIZE, AGENT_BLOCK_SIZE] if options.block_size is None else [options.block_size]
    rows = _rows(source, options, notes)
    return with_block_size(rows, "hash_ids", "input_length", sizes, guessed=options.block_size is None)


def _rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    clock = Clock("timestamp", "ms", 1000.0, options)
    for place, row in json_lines(source):
        stamp = place.number("timestamp", place.value(row, "timestamp"), most=_MOST_MS, what="milliseconds")
        arrival_s = clock.seconds(place, stamp)
        input_len = place.integer("input_length", place.value(row, "input_length"))
        output_len = output_tokens(place, "output_length", place.value(row, "output_length"), options, notes)
        ids = place.hash_ids("hash_ids", place.value(row, "hash_ids"))
        session = row.get("session_id")
        if session is not None:
            place.key("session_id", session)
        if output_len:
            yield Row(place, arrival_s, input_len, output_len, ids, 0, session)


def _recognises(head: Head) -> bool:
    fields = head.fields
    return sum(name in fields for name in _FIELDS) >= 2 and "chat_id" not in fields


FORMAT = Format("mooncake", "Mooncake JSON lines", _recognises, read_rows)
