"""One request as a reader gives it, and what else a reading has to say."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.source import Source

DEFAULT_OUTPUT_LEN = 256
"""Output tokens of a request whose file does not say; what ``vllm bench`` asks for then."""


class Row(NamedTuple):
    """A request of a trace.

    ``contents`` name the prompt's blocks of ``block_size`` tokens, each together with all that precedes it:
    as many as the prompt has full blocks, and perhaps one more for a partial last block.
    """

    place: Place
    arrival_s: float | None
    """Seconds after the file's first request; None if the file says nothing about time."""
    input_len: int
    output_len: int
    contents: Sequence[int | str] = ()
    block_size: int = 0
    """Tokens per content; 0 when the file says nothing about content."""
    session: int | str | None = None
    think_s: float | None = None
    """Seconds after the end of the session's previous request before which this one does not come."""
    deadline_s: float | None = None
    """Seconds after its arrival by which its last token is due."""
    adapter: str | None = None
    priority: int = 0
    """Lower is served first."""

    def content_keys(self) -> Sequence[Hashable]:
        """The contents, kept apart between adapters, whose KV differs for the same text."""
        if self.adapter is None:
            return self.contents
        return [(self.adapter, content) for content in self.contents]


@dataclass(frozen=True)
class ReadOptions:
    """How to read what a file leaves open.

    Args:
        block_size: tokens per content; None: what the format or the lengths say.
        sort_window: requests to hold back in order to sort by arrival; 0 refuses arrivals that decrease.
        skip_failed: leave out requests without any output, and count them, instead of refusing them.
        output_len: output tokens where a file does not say.
    """

    block_size: int | None = None
    sort_window: int = 0
    skip_failed: bool = False
    output_len: int = DEFAULT_OUTPUT_LEN


class Notes:
    """What a reading assumed, and how often it left something out."""

    def __init__(self) -> None:
        """Start with nothing to say."""
        self._counts: dict[str, int] = {}

    def assume(self, text: str) -> None:
        """Note an assumption, once."""
        self._counts.setdefault(text, 0)

    def count(self, text: str) -> None:
        """Note one more of something."""
        self._counts[text] = self._counts.get(text, 0) + 1

    def clear(self) -> None:
        """Begin again, for another pass."""
        self._counts.clear()

    def assumptions(self) -> tuple[str, ...]:
        """Those notes that count nothing, which are known when the first request is there."""
        return tuple(text for text, n in self._counts.items() if not n)

    def lines(self) -> tuple[str, ...]:
        """All notes, in the order in which they came up.

        >>> notes = Notes(); notes.count("requests left out"); notes.count("requests left out"); notes.lines()
        ('2 requests left out',)
        """
        return tuple(f"{n:,} {text}" if n else text for text, n in self._counts.items())


Read = Callable[[Source, ReadOptions, Notes], Iterator[Row]]


@dataclass(frozen=True)
class Format:
    """A kind of trace file: its name, how its beginning looks, and its reader.

    ``read`` yields requests in file order with memory for one line (plus what a reader's docstring names) and
    raises ``TraceError`` with file, line and field for anything that is not of the format.
    """

    name: str
    title: str
    recognises: Callable[[Head], bool]
    read: Read


class Head(NamedTuple):
    """The beginning of a file, as far as it can be told without a format."""

    content: bytes
    fields: dict[str, Any]
    """Of the first line, if that is a JSON object."""
    columns: tuple[str, ...]
    """Of the first line, if that is a header of CSV."""


class Clock:
    """Turns a file's times into seconds after its first request, and sees to it that they do not decrease."""

    def __init__(self, field: str, unit: str, per_second: float, options: ReadOptions) -> None:
        """``field`` and ``unit`` appear in errors; ``per_second`` units make a second."""
        self._field, self._unit, self._per_second = field, unit, per_second
        self._sorting = options.sort_window > 0
        self._first: float | None = None
        self._last = 0.0

    def seconds(self, place: Place, value: float) -> float:
        """Seconds after the first value; refuses a decrease unless requests are to be sorted.

        Takes the difference before it divides, so that integers lose nothing.
        """
        if self._first is None:
            self._first = self._last = value
        if value < self._last and not self._sorting:
            raise place.error(
                f"{self._field} decreases from {self._last:.15g} to {value:.15g} {self._unit} "
                "(--sort puts requests in order)"
            )
        self._last = value
        return (value - self._first) / self._per_second


def output_tokens(place: Place, field: str, value: Any, options: ReadOptions, notes: Notes) -> int:
    """Output tokens of a request; 0 for a failed one that is to be left out, which is counted."""
    length = place.integer(field, value, least=0 if options.skip_failed else 1)
    if not length:
        notes.count(f"requests left out, whose {field} is 0")
    return length
