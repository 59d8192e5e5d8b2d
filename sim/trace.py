"""Request traces: arrivals, lengths and shared prefixes as arrays."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pagedkv.errors import PagedKVError

MAX_TOKENS = 2**31 - 1
"""Most tokens of a prompt or an output: token counts and ids are int32."""


NO_DEADLINE = math.inf
"""What ``deadline_s`` says of a request without a deadline."""

_Columns = dict[str, Any]


class TraceError(PagedKVError):
    """A trace that cannot be read or that contradicts itself; the message says where."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in replay order, as read-only arrays of ``n`` requests.

    A content id stands for ``content_block_size`` prompt tokens **and all that precede them**: equal ids at
    equal depth mean equal prefixes. A request carries ``ceil(input_len / content_block_size)`` ids, the last
    one perhaps of a partial block, or ``floor(...)`` ids, of its full blocks only::

        content_block_size = 4, input_len = 10      content ids   7 7 7 7   9 9 9 9   3 3      ceil: [7, 9, 3]
                                                    content ids   7 7 7 7   9 9 9 9   u u      floor: [7, 9]
                                                                          u: an id unique to the request

    Ids are dense: ``0 .. num_contents - 1``, in order of first appearance when a reader made them. Two traces
    are equal only if they are the same object.

    >>> trace = Trace("demo", [0.0, 0.5], [6, 6], [2, 1], [0, 1, 0, 2], [0, 2, 4], 4, 3)
    >>> len(trace), trace.tokens(1).tolist()
    (2, [0, 0, 0, 0, 2, 2])

    Raises:
        TraceError: columns of different lengths, no request at all, arrivals that decrease, lengths below 1,
            ids outside the declared range, or a number of ids that contradicts the prompt's length.
    """

    name: str
    arrival_s: npt.NDArray[np.float64]
    """[n] float64, seconds since the trace's start, non-decreasing."""
    input_len: npt.NDArray[np.int64]
    """[n] int64, prompt tokens, at least 1."""
    output_len: npt.NDArray[np.int64]
    """[n] int64, generated tokens, at least 1."""
    content_ids: npt.NDArray[np.int32]
    """[total] int32, the ids of all requests, one request after the other."""
    content_offsets: npt.NDArray[np.int64]
    """[n + 1] int64: request i has ``content_ids[content_offsets[i]:content_offsets[i + 1]]``."""
    content_block_size: int
    """Prompt tokens per content id; 0 when the trace says nothing about content."""
    num_contents: int
    """Number of distinct content ids."""
    session: npt.NDArray[np.int32] = field(default_factory=lambda: _unstated(np.int32), kw_only=True)
    """[n] int32: requests with the same number are turns of one session, in order; -1 for none."""
    think_s: npt.NDArray[np.float64] = field(default_factory=lambda: _unstated(np.float64), kw_only=True)
    """[n] float64: the request comes no earlier than this after the end of its session's previous one (and
    no earlier than ``arrival_s``); NaN where only ``arrival_s`` counts."""
    deadline_s: npt.NDArray[np.float64] = field(default_factory=lambda: _unstated(np.float64), kw_only=True)
    """[n] float64, seconds after the request's arrival by which its last token is due; inf for none."""
    priority: npt.NDArray[np.int64] = field(default_factory=lambda: _unstated(np.int64), kw_only=True)
    """[n] int64: lower is served first; 0 where nothing is said."""
    adapter: npt.NDArray[np.int32] = field(default_factory=lambda: _unstated(np.int32), kw_only=True)
    """[n] int32, index into ``adapter_names``; -1 for the model itself. Contents differ between adapters."""
    adapter_names: tuple[str, ...] = field(default=(), kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """What was assumed or left out when the trace was read."""

    def __post_init__(self) -> None:
        """Cast the columns to their declared dtypes, make them read-only and check them."""
        self._set_column("arrival_s", np.float64)
        for name in ("input_len", "output_len", "content_offsets"):
            self._set_column(name, np.int64)
        self._set_column("content_ids", np.int32)
        for name, (dtype, unstated) in _OPTIONAL.items():
            if not np.size(getattr(self, name)):
                object.__setattr__(self, name, np.full(len(self.arrival_s), unstated, dtype))
            self._set_column(name, dtype)
        _check_requests(self)
        _check_options(self)
        _check_contents(self)

    @classmethod
    def from_lengths(
        cls,
        arrival_s: npt.ArrayLike,
        input_len: npt.ArrayLike,
        output_len: npt.ArrayLike,
        *,
        name: str = "lengths",
    ) -> "Trace":
        """Make a trace of requests that share nothing, from three columns of equal length.

        >>> Trace.from_lengths([0, 1.5], [100, 20], [8, 8]).tokens(1)[:3].tolist()
        [2, 2, 2]
        """
        columns = cast("tuple[Any, Any, Any]", (arrival_s, input_len, output_len))
        offsets = np.zeros(np.size(columns[1]) + 1, np.int64)
        return cls(name, *columns, np.empty(0, np.int32), offsets, 0, 0)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival_s)

    def tokens(self, i: int) -> npt.NDArray[np.int32]:
        """Return the prompt of request ``i``: [input_len[i]] int32, each content id once per token it covers.

        Tokens that no content id covers get an id unique to the request. O(input_len[i]), one numpy pass.
        """
        self._check_index(i)
        num_tokens, block_size = int(self.input_len[i]), self.content_block_size
        ids = self.content_ids[self.content_offsets[i] : self.content_offsets[i + 1]]
        prompt = ids.repeat(block_size)[:num_tokens]
        if len(prompt) == num_tokens:
            return prompt
        tail = np.full(num_tokens - len(prompt), self._unique_id(i), np.int32)
        return np.concatenate([prompt, tail])

    def output_tokens(self, i: int) -> npt.NDArray[np.int32]:
        """Return the output of request ``i``: [output_len[i]] int32, one id that occurs nowhere else.

        >>> Trace.from_lengths([0.0], [3], [2]).output_tokens(0).tolist()
        [1, 1]
        """
        self._check_index(i)
        return np.full(int(self.output_len[i]), self._unique_id(i) + 1, np.int32)

    def forget(self, i: int) -> None:
        """Do nothing: everything stays. See `pagedkv.sim.requests.Requests`."""

    def head(self, limit: int) -> "Trace":
        """Return the first ``limit`` requests (all of them if there are fewer). O(content ids), no copy.

        >>> len(Trace.from_lengths([0, 1, 2], [5, 5, 5], [1, 1, 1]).head(2))
        2
        """
        check_positive_int("limit", limit)
        offsets = self.content_offsets[: limit + 1]
        ids = self.content_ids[: offsets[-1]]
        columns: _Columns = {name: getattr(self, name)[:limit] for name in _PER_REQUEST}
        num_contents = int(ids.max()) + 1 if len(ids) else 0
        return replace(self, content_ids=ids, content_offsets=offsets, num_contents=num_contents, **columns)

    def faster(self, speed: float) -> "Trace":
        """Return the same requests arriving ``speed`` times as fast; a speed below 1 slows them down.

        >>> Trace.from_lengths([0, 3], [5, 5], [1, 1]).faster(1.5).arrival_s.tolist()
        [0.0, 2.0]
        """
        return replace(self, arrival_s=sped_up(self.arrival_s, speed))

    def _unique_id(self, i: int) -> int:
        """Return the first of two ids that belong to request ``i`` alone: prompt tail, then output."""
        return self.num_contents + 2 * i

    def _check_index(self, i: int) -> None:
        if not 0 <= i < len(self):
            raise TraceError(f"request {i} is out of range: the trace has {len(self)} requests")

    def _set_column(self, name: str, dtype: type[np.generic]) -> None:
        object.__setattr__(self, name, _column(name, getattr(self, name), dtype))


_OPTIONAL: dict[str, tuple[type[np.generic], float]] = {
    "session": (np.int32, -1),
    "think_s": (np.float64, math.nan),
    "deadline_s": (np.float64, NO_DEADLINE),
    "priority": (np.int64, 0),
    "adapter": (np.int32, -1),
}
"""Columns that may be left out: dtype, and what stands for nothing said."""

_PER_REQUEST = ("arrival_s", "input_len", "output_len", *_OPTIONAL)


def sped_up(arrival_s: npt.NDArray[np.float64], speed: float) -> npt.NDArray[np.float64]:
    """Arrivals at ``speed`` times the pace, which must be finite and above 0."""
    if not (math.isfinite(speed) and speed > 0):
        raise TraceError(f"speed must be a finite number above 0, got {speed!r}")
    return arrival_s / speed


def _unstated(dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.empty(0, dtype)


def check_positive_int(name: str, value: int) -> None:
    """Refuse anything but an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise TraceError(f"{name} must be an integer of at least 1, got {value!r}")


def _column(field: str, values: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return ``values`` as a read-only array [n] of ``dtype``; refuse a cast that changes a value."""
    given = np.asarray(values)
    if given.ndim != 1:
        raise TraceError(f"{field} must have one dimension, got {given.ndim}")
    kinds = "iu" if issubclass(dtype, np.integer) else "iuf"
    if given.size and given.dtype.kind not in kinds:
        raise TraceError(f"{field} must hold {dtype.__name__} values, got {given.dtype}")
    if issubclass(dtype, np.integer) and given.size and not _fits(given, dtype):
        raise TraceError(f"{field} must fit {dtype.__name__}, got values up to {given.max()}")
    column = given.astype(dtype, copy=False).view()
    column.flags.writeable = False
    return column


def _fits(values: npt.NDArray[Any], dtype: type[np.integer[Any]]) -> bool:
    bounds = np.iinfo(dtype)
    return bounds.min <= int(values.min()) and int(values.max()) <= bounds.max


def _check_requests(trace: Trace) -> None:
    lengths = {name: len(getattr(trace, name)) for name in _PER_REQUEST}
    if len(set(lengths.values())) > 1:
        raise TraceError(f"columns must have one length, got {lengths}")
    if not len(trace):
        raise TraceError("a trace needs at least one request, got 0")
    _refuse_where("arrival_s", trace.arrival_s, ~(np.isfinite(trace.arrival_s) & (trace.arrival_s >= 0)))
    _refuse_where("arrival_s (must not decrease)", trace.arrival_s[1:], np.diff(trace.arrival_s) < 0)
    for name in ("input_len", "output_len"):
        values = getattr(trace, name)
        _refuse_where(name, values, (values < 1) | (values > MAX_TOKENS))


def _check_options(trace: Trace) -> None:
    _refuse_where("think_s", trace.think_s, ~(np.isnan(trace.think_s) | (trace.think_s >= 0)))
    _refuse_where(
        "think_s (without a session)", trace.think_s, ~np.isnan(trace.think_s) & (trace.session < 0)
    )
    _refuse_where("deadline_s", trace.deadline_s, ~(trace.deadline_s >= 0))
    _refuse_where("session", trace.session, trace.session < -1)
    most = len(trace.adapter_names)
    _refuse_where("adapter", trace.adapter, (trace.adapter < -1) | (trace.adapter >= most))


def _check_contents(trace: Trace) -> None:
    offsets, ids, block_size = trace.content_offsets, trace.content_ids, trace.content_block_size
    if len(offsets) != len(trace) + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise TraceError(f"content_offsets must be {len(trace) + 1} values from 0 to {len(ids)}")
    if block_size < 0 or (block_size == 0 and (len(ids) or trace.num_contents)):
        raise TraceError(f"content_block_size {block_size} contradicts {len(ids)} content ids")
    _refuse_where("content_ids", ids, (ids < 0) | (ids >= trace.num_contents))
    if block_size:
        full, rest = np.divmod(trace.input_len, block_size)
        extra = np.diff(offsets) - full
        wrong = (extra < 0) | (extra > (rest > 0))
        _refuse_where("input_len (contradicts the number of ids)", trace.input_len, wrong)
    if trace.num_contents + 2 * len(trace) > MAX_TOKENS:
        raise TraceError(f"{trace.num_contents} contents and {len(trace)} requests need ids beyond int32")


def _refuse_where(field: str, values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_]) -> None:
    if wrong.any():
        first = int(wrong.argmax())
        raise TraceError(f"{field} is wrong at {first}: got {values[first]}")
