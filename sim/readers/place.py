"""Where in a file something stands, and the checks of a single value that say so."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pagedkv.sim.trace import MAX_TOKENS, TraceError

MAX_SECONDS = 2.0**43
"""Beyond it (279,000 years) a float64 no longer counts single milliseconds."""

_LONGEST_VALUE = 200


class Place(NamedTuple):
    """A line of a file, or a row of one that has no lines; ``item`` tells several on one line apart."""

    path: Path
    line: int
    item: str = ""
    unit: str = "line"

    def error(self, text: str) -> TraceError:
        """The error to raise, with file and line.

        >>> str(Place(Path("a.csv"), 3).error("empty"))
        'a.csv, line 3: empty'
        """
        item = f", {self.item}" if self.item else ""
        return TraceError(f"{self.path}, {self.unit} {self.line}{item}: {text}")

    def field_error(self, field: str, wanted: str, value: object) -> TraceError:
        """The error of one field, with what was wanted and what was found, shortened."""
        return self.error(f"{field} must be {wanted}, got {_shown(value)}")

    def value(self, row: dict[str, Any], field: str) -> Any:
        """The field of a row; refuses one that is absent."""
        if field not in row:
            raise self.error(f"{field} is missing")
        return row[field]

    def integer(self, field: str, value: Any, least: int = 1, most: int = MAX_TOKENS) -> int:
        """A whole number in a range, by default of tokens."""
        if type(value) is not int or not least <= value <= most:
            limit = "2**31 - 1" if most == MAX_TOKENS else f"{most}"
            raise self.field_error(field, f"an integer from {least} to {limit}", value)
        return value

    def number(
        self, field: str, value: Any, least: float = 0.0, most: float = MAX_SECONDS, what: str = "seconds"
    ) -> float:
        """A finite number in a range, by default of seconds."""
        # NaN fails the comparison, and so does infinity
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.field_error(field, f"{what} from {least:g} to {_power(most)}", value)
        return float(value)

    def text(self, field: str, value: Any, longest: int = _LONGEST_VALUE) -> str:
        """A string that is not empty and of a sensible length."""
        if type(value) is not str or not 1 <= len(value) <= longest:
            raise self.field_error(field, f"text of 1 to {longest} characters", value)
        return value

    def key(self, field: str, value: Any) -> int | str:
        """What names a session: an integer of 64 bits, or text."""
        if is_64_bit(value):
            number: int = value
            return number
        if type(value) is not str or not 1 <= len(value) <= _LONGEST_VALUE:
            raise self.field_error(field, f"an integer of 64 bits or text up to {_LONGEST_VALUE}", value)
        return value

    def hash_ids(self, field: str, value: Any) -> list[int]:
        """A list of integers of 64 bits, signed or unsigned. O(n), about 30 ns each."""
        if not isinstance(value, list):
            raise self.field_error(field, "a list of integers", value)
        if value and (set(map(type, value)) != {int} or min(value) < -(2**63) or max(value) >= 2**64):
            position, content = next((k, c) for k, c in enumerate(value) if not is_64_bit(c))
            raise self.field_error(f"{field}[{position}]", "an integer of 64 bits", content)
        return value

    def token_ids(self, field: str, value: Any) -> list[int]:
        """A list of integers of 31 bits, not empty."""
        if not isinstance(value, list) or not value:
            raise self.field_error(field, "a list of at least one token id", value)
        if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKENS:
            position, token = next((k, t) for k, t in enumerate(value) if not _is_token(t))
            raise self.field_error(f"{field}[{position}]", "a token id from 0 to 2**31 - 1", token)
        return value

    def refuse_others(self, row: Iterable[str], known: Iterable[str]) -> None:
        """Refuse fields that mean nothing here, so that a misspelt one is not passed over."""
        names = list(known)
        for field in row:
            if field not in names:
                raise self.error(f"unknown field {_shown(field)}, known are: {', '.join(names)}")


def is_64_bit(value: object) -> bool:
    """Tell whether it is an integer of 64 bits, signed or unsigned."""
    return type(value) is int and -(2**63) <= value < 2**64


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKENS


def _power(most: float) -> str:
    exponent = int(most).bit_length() - 1
    return f"2**{exponent}" if most > 1e6 and most == 2.0**exponent else f"{most:g}"


def _shown(value: object) -> str:
    # an escaped character may take ten columns
    return reprlib.repr(value)[:_LONGEST_VALUE]
