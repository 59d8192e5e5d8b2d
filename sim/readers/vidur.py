"""Vidur: CSV of lengths, with or without arrivals, sessions and block hashes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pagedkv.sim.readers.contents import with_block_size
from pagedkv.sim.readers.csv_rows import csv_rows, decimal, whole
from pagedkv.sim.readers.mooncake import AGENT_BLOCK_SIZE, MOONCAKE_BLOCK_SIZE
from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.row import Clock, Format, Head, Notes, ReadOptions, Row, output_tokens
from pagedkv.sim.readers.source import Source

_PREFILL, _DECODE = "num_prefill_tokens", "num_decode_tokens"
_TOTAL, _ARRIVAL, _SESSION, _HASHES = "num_total_tokens", "arrived_at", "session_id", "block_hash_ids"
_SEPARATORS = re.compile(r"[|,;\s]+")


def read_rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    """Yield the requests of a file.

    ``num_prefill_tokens`` and ``num_decode_tokens`` in tokens; where they are, ``arrived_at`` in seconds,
    ``num_total_tokens`` (their sum, which is checked), ``session_id``, and ``block_hash_ids``: integers of
    64 bits with ``|`` between them, or a list in brackets. Other columns are ignored. Without a stated block
    size it is 16 if the lengths agree with that, else 512.
    """
    sizes = [AGENT_BLOCK_SIZE, MOONCAKE_BLOCK_SIZE] if options.block_size is None else [options.block_size]
    rows = _rows(source, options, notes)
    first = next(rows, None)
    if first is None:
        return iter(())
    if first.block_size == 0:
        return _again(first, rows)
    return with_block_size(_again(first, rows), _HASHES, _PREFILL, sizes, guessed=options.block_size is None)


def _again(first: Row, rows: Iterator[Row]) -> Iterator[Row]:
    yield first
    yield from rows


def _rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    clock = Clock(_ARRIVAL, "s", 1.0, options)
    for place, fields in csv_rows(source, (_PREFILL, _DECODE)):
        arrival_s = None
        if _ARRIVAL in fields:
            arrival_s = clock.seconds(place, place.number(_ARRIVAL, decimal(fields[_ARRIVAL])))
        input_len = place.integer(_PREFILL, whole(fields[_PREFILL]))
        output_len = output_tokens(place, _DECODE, whole(fields[_DECODE]), options, notes)
        _check_total(place, fields, input_len + output_len)
        session = fields.get(_SESSION) or None
        if session is not None:
            place.key(_SESSION, session)
        ids: Sequence[int] = ()
        if _HASHES in fields:
            ids = _hash_ids(place, fields[_HASHES])
        else:
            notes.assume("no content: no two prompts share a prefix")
        if output_len:
            # 1 stands for a block size that is not known yet, 0 for no content
            yield Row(place, arrival_s, input_len, output_len, ids, int(_HASHES in fields), session)


def _check_total(place: Place, fields: dict[str, str], total: int) -> None:
    if _TOTAL in fields and whole(fields[_TOTAL]) != total:
        raise place.field_error(_TOTAL, f"the sum of the others, {total}", fields[_TOTAL])


def _hash_ids(place: Place, text: str) -> list[int]:
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    parts = _SEPARATORS.split(inside.strip()) if inside.strip() else []
    return place.hash_ids(_HASHES, [whole(part) for part in parts])


def _recognises(head: Head) -> bool:
    return _PREFILL in head.columns or _DECODE in head.columns


FORMAT = Format("vidur", "Vidur CSV", _recognises, read_rows)
