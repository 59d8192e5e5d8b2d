"""JSON in trace files: an object per line, or one array of objects over the whole file."""

from __future__ import annotations

import codecs
import json
import re
import reprlib
from collections.abc import Iterator
from typing import Any

from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.source import Source

_SPACE = re.compile(r"[ \t\r\n]*")
_MOST_PENDING = 1 << 28  # characters of one element


def parse_json(place: Place, text: bytes) -> Any:
    """The value of a line."""
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise place.error(f"not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise place.error(f"not JSON: {error}") from error


def as_object(place: Place, value: Any) -> dict[str, Any]:
    """The value, if it is an object."""
    if not isinstance(value, dict):
        raise place.error(f"must be a JSON object, got {reprlib.repr(value)}")
    return value


def json_lines(source: Source) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the object of each line."""
    for place, line in source.lines():
        yield place, as_object(place, parse_json(place, line))


def json_array(source: Source, item: str) -> Iterator[tuple[Place, Any]]:
    """Yield the elements of the array that fills the file; memory for one element.

    Each element's place is the line where it begins, and its number from 1, called ``item``.
    """
    text, elements = _Text(source), 0
    text.expect("[", 0, item)
    if text.peek() == "]":
        text.expect("]", 0, item)
    else:
        while True:
            elements += 1
            yield text.value(elements, item)
            if text.expect(",]", elements, item) == "]":
                break
    if text.peek():
        raise source.place(text.line).error(f"text behind the end of the array: {text.peek()!r}")


class _Text:
    """The text that has been read and not been used."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._chunks = source.chunks()
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at = "", 0
        self.line = 1

    def peek(self) -> str:
        """The next character that is no white space, empty at the end."""
        while True:
            end = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches always
            self._skip_to(end)
            if end < len(self._text):
                return self._text[end]
            if not self._more():
                return ""

    def expect(self, wanted: str, number: int, item: str) -> str:
        """Take the next character, which must be one of those wanted."""
        found = self.peek()
        if not found or found not in wanted:
            what = repr(found) if found else "the file's end"
            raise self._place(number, item).error(f"not JSON: expected {' or '.join(wanted)}, got {what}")
        self._skip_to(self._at + 1)
        return found

    def value(self, number: int, item: str) -> tuple[Place, Any]:
        """The next value and its place."""
        self.peek()
        place = self._place(number, item)
        self._text, self._at = self._text[self._at :], 0
        wait = 0
        while True:
            try:
                value, end = self._scan(self._text)
                # a number may go on in the next chunk
                if end < len(self._text) or not self._more():
                    break
            except ValueError as error:
                if len(self._text) > _MOST_PENDING or not self._grow(wait):
                    raise place.error(f"not JSON: {error}") from error
                wait = 2 * wait or 1  # so that a long element is not scanned once per chunk
            except RecursionError as error:
                raise place.error(f"not JSON: {error}") from error
        self._skip_to(end)
        return place, value

    def _place(self, number: int, item: str) -> Place:
        return self._source.place(self.line, f"{item} {number}" if number else "")

    def _skip_to(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _grow(self, chunks: int) -> bool:
        grown = self._more()
        for _ in range(chunks if grown else 0):
            if not self._more():
                break
        return grown

    def _more(self) -> bool:
        chunk = next(self._chunks, None)
        try:
            text = self._decode(chunk or b"", chunk is None)
        except UnicodeDecodeError as error:
            raise self._source.place(self.line).error(f"not UTF-8 text: {error.reason}") from error
        self._text, self._at = self._text[self._at :] + text, 0
        return chunk is not None
