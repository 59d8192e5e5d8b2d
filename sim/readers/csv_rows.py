"""CSV in trace files: a header line, then one line per request."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence

from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.source import Source

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_WHOLE = re.compile(r"([+-]?[0-9]{1,30})(\.0*)?")


def whole(text: str) -> int | str:
    """The whole number that a field says, or the text as it is, for the error.

    >>> whole("12"), whole("12.0"), whole("12.5"), whole("1_2")
    (12, 12, '12.5', '1_2')
    """
    match = _WHOLE.fullmatch(text)
    return int(match[1]) if match else text


def decimal(text: str) -> float | str:
    """The number that a field says, or the text as it is, for the error.

    >>> decimal("1.5e3"), decimal("nan")
    (1500.0, 'nan')
    """
    return float(text) if _NUMBER.fullmatch(text) else text


def split_fields(place: Place, line: bytes) -> list[str]:
    """The fields of a line; a quoted one may hold commas, but no end of line."""
    try:
        text = line.decode("utf-8")
        if "\r" in text or "\0" in text:
            raise csv.Error("a carriage return or NUL inside the line")
        if '"' not in text:
            return [field.strip() for field in text.split(",")]
        return [field.strip() for field in next(csv.reader([text], strict=True))]
    except UnicodeDecodeError as error:
        raise place.error(f"not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (csv.Error, StopIteration) as error:
        raise place.error(f"not CSV: {error}") from error


def csv_rows(source: Source, required: Sequence[str]) -> Iterator[tuple[Place, dict[str, str]]]:
    """Yield the fields of each line by column; columns that no reader asks for are allowed."""
    columns: list[str] = []
    for place, line in source.lines():
        fields = split_fields(place, line)
        if not columns:
            columns = fields
            _check_header(place, columns, required)
        elif len(fields) != len(columns):
            # names the first column that is missing or too many
            field = columns[len(fields)] if len(fields) < len(columns) else f"field {len(columns) + 1}"
            raise place.error(f"{field}: {len(fields)} fields, but the header has {len(columns)}")
        else:
            yield place, dict(zip(columns, fields, strict=True))


def _check_header(place: Place, columns: list[str], required: Sequence[str]) -> None:
    for column in required:
        if column not in columns:
            raise place.error(f"{column} is missing in the header")
    for column in columns:
        if columns.count(column) > 1:
            raise place.error(f"{column!r} stands twice in the header")
