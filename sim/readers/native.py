"""The project's own format, as JSON lines or Parquet: see docs/trace-format.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagedkv.sim.readers import native_parquet
from pagedkv.sim.readers.contents import DEFAULT_BLOCK_SIZE, check_num_contents, token_contents
from pagedkv.sim.readers.json_rows import json_lines
from pagedkv.sim.readers.place import Place, is_64_bit
from pagedkv.sim.readers.row import Clock, Format, Head, Notes, ReadOptions, Row, output_tokens
from pagedkv.sim.readers.source import Source

FORMAT_NAME, VERSION = "pagedkv-trace", 1
HEADER_FIELDS = ("format", "version", "name", "block_size", "notes")
FIELDS = (
    "arrival_s",
    "input_len",
    "output_len",
    "token_ids",
    "block_hashes",
    "session",
    "think_s",
    "deadline_s",
    "adapter",
    "priority",
)
_MOST_PRIORITY = 2**31 - 1
_MOST_BLOCK_SIZE = 1 << 20
_LONGEST_HASH = 128


def read_rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    """Yield the requests of a file; the first line, or the Parquet schema's metadata, is the header.

    Fields that are absent or null have their default; unknown ones are refused.
    """
    records = native_parquet.records(source) if native_parquet.is_parquet(source) else json_lines(source)
    place, header = next(records, (source.place(1), None))
    if header is None:
        return
    block_size = _header(place, header, options, notes)
    parser = _Parser(block_size, options, notes)
    for where, record in records:
        row = parser.row(where, record)
        if row.output_len:
            yield row


def _header(place: Place, header: dict[str, Any], options: ReadOptions, notes: Notes) -> int | None:
    """Check the header; returns the block size it states, or the one asked for."""
    if header.get("format") != FORMAT_NAME:
        raise place.field_error("format", repr(FORMAT_NAME), header.get("format"))
    if place.integer("version", place.value(header, "version")) != VERSION:
        raise place.field_error("version", f"{VERSION}, the one known", header["version"])
    place.refuse_others(header, HEADER_FIELDS)
    if header.get("name") is not None:
        place.text("name", header["name"])
    said = header.get("notes") or []
    if not isinstance(said, list):
        raise place.field_error("notes", "a list of texts", said)
    for i, text in enumerate(said):
        notes.assume(place.text(f"notes[{i}]", text, longest=1000))
    stated = header.get("block_size")
    if stated is None:
        return options.block_size
    place.integer("block_size", stated, most=_MOST_BLOCK_SIZE)
    if options.block_size not in (None, stated):
        raise place.field_error("block_size", f"{options.block_size} as asked for", stated)
    return int(stated)


class _Parser:
    """Checks one record after the other against the format, and times against those before."""

    def __init__(self, block_size: int | None, options: ReadOptions, notes: Notes) -> None:
        self._block_size = block_size
        self._options, self._notes = options, notes
        self._clock = Clock("arrival_s", "s", 1.0, options)
        self._arrival_s: float | None = None
        self._timed: bool | None = None
        self._started: set[int | str] = set()
        self._has_contents: bool | None = None

    def row(self, place: Place, record: dict[str, Any]) -> Row:
        given = {name: value for name, value in record.items() if value is not None}
        place.refuse_others(given, FIELDS)
        session = place.key("session", given["session"]) if "session" in given else None
        think_s = place.number("think_s", given["think_s"]) if "think_s" in given else None
        if think_s is not None and session not in self._started:
            raise place.error("think_s needs an earlier request of the same session")
        arrival_s = self._arrival(place, given)
        input_len, contents, block_size = self._prompt(place, given)
        self._check_contents(place, given)
        output_len = output_tokens(
            place, "output_len", place.value(given, "output_len"), self._options, self._notes
        )
        row = Row(
            place,
            arrival_s,
            input_len,
            output_len,
            contents,
            block_size,
            session,
            think_s,
            place.number("deadline_s", given["deadline_s"]) if "deadline_s" in given else None,
            place.text("adapter", given["adapter"]) if "adapter" in given else None,
            place.integer("priority", given.get("priority", 0), least=-_MOST_PRIORITY, most=_MOST_PRIORITY),
        )
        if session is not None:
            self._started.add(session)
        return row

    def _arrival(self, place: Place, given: dict[str, Any]) -> float | None:
        """As stated; a turn that only waits for the one before may come from the line before on."""
        if self._timed is None:
            self._timed = "arrival_s" in given
        if "arrival_s" in given:
            stated = place.number("arrival_s", given["arrival_s"])
            if not self._timed:
                raise place.error("arrival_s is there, but not in the first request")
            self._arrival_s = self._clock.seconds(place, stated)
        elif self._timed and "think_s" not in given:
            raise place.error("arrival_s is missing; only a turn with think_s may leave it out")
        return self._arrival_s

    def _check_contents(self, place: Place, given: dict[str, Any]) -> None:
        """Content is said of all requests or of none, since a prompt of unknown content has no ids."""
        name = "token_ids" if "token_ids" in given else "block_hashes"
        has_contents = name in given
        if self._has_contents is None:
            self._has_contents = has_contents
        if has_contents != self._has_contents:
            raise place.error(
                f"{name}: {'there' if has_contents else 'missing'}, unlike in the first request "
                "(the content is known of all requests or of none)"
            )

    def _prompt(self, place: Place, given: dict[str, Any]) -> tuple[int, list[int | str] | list[int], int]:
        """Prompt tokens, contents, and tokens per content."""
        if "token_ids" in given:
            if "block_hashes" in given:
                raise place.error("block_hashes and token_ids are both there")
            tokens = place.token_ids("token_ids", given["token_ids"])
            input_len = place.integer("input_len", given.get("input_len", len(tokens)))
            if input_len != len(tokens):
                raise place.field_error("input_len", f"{len(tokens)}, the number of token_ids", input_len)
            block_size = self._block_size or DEFAULT_BLOCK_SIZE
            return input_len, token_contents(tokens, block_size), block_size
        input_len = place.integer("input_len", place.value(given, "input_len"))
        if "block_hashes" not in given:
            return input_len, [], 0
        if self._block_size is None:
            raise place.error("block_hashes need the header's block_size")
        hashes = _hashes(place, given["block_hashes"])
        check_num_contents(place, "block_hashes", len(hashes), input_len, self._block_size)
        return input_len, hashes, self._block_size


def _hashes(place: Place, value: Any) -> list[int | str]:
    if not isinstance(value, list):
        raise place.field_error("block_hashes", "a list of hashes", value)
    for i, item in enumerate(value):
        if not (is_64_bit(item) or (type(item) is str and 1 <= len(item) <= _LONGEST_HASH)):
            raise place.field_error(f"block_hashes[{i}]", "an integer of 64 bits or text", item)
    return value


def _recognises(head: Head) -> bool:
    return head.fields.get("format") == FORMAT_NAME or head.content.startswith(native_parquet.MAGIC)


FORMAT = Format("native", "pagedkv trace, JSON lines or Parquet", _recognises, read_rows)
