"""Errors. Misuse is always a ``ValueError`` subclass with the numbers in it, and changes nothing.

What merely does not fit *now* is no error: the call returns ``None`` or ``False``.
"""

import operator


class PagedKVError(ValueError):
    """Base of every error that pagedkv raises for a caller's mistake."""


class BlockError(PagedKVError):
    """A block id that is foreign, repeated, or in the wrong state (for example freed twice)."""


class SequenceError(PagedKVError):
    """A sequence that is not open, is open already, or is asked for something out of its range."""


class NeverFits(PagedKVError):
    """The request can never be served by this pool, however long the caller waits."""


class SpecError(PagedKVError):
    """A cache geometry that is impossible, or a model config whose cache is not known exactly."""


def check(holds: bool, what: str) -> None:
    """Raise ``AssertionError`` unless an invariant holds: our own bug, never the caller's mistake."""
    if not holds:
        raise AssertionError(f"broken invariant: {what}")


def require_count(name: str, value: int, least: int) -> int:
    """Whole number of at least ``least`` as a Python int, whatever integer type it came in."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if isinstance(value, bool) or count < least:
        raise PagedKVError(f"{name} must be an integer of at least {least}, got {value!r}")
    return count
