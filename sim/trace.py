"""Request traces: arrivals, lengths and shared prefixes as arrays, and the Mooncake file format."""

import gzip
import json
import math
import os
import reprlib
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pagedkv.errors import PagedKVError

MOONCAKE_BLOCK_SIZE = 512
AGENT_BLOCK_SIZE = 16

_MAX_TOKENS = 2**31 - 1  # page tables and sequence lengths are int32
_MAX_MS = 2**53  # beyond it a float64 no longer counts single milliseconds
_LINES_PER_REPORT = 256


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

    def __post_init__(self) -> None:
        """Cast the columns to their declared dtypes, make them read-only and check them."""
        self._set_column("arrival_s", np.float64)
        for field in ("input_len", "output_len", "content_offsets"):
            self._set_column(field, np.int64)
        self._set_column("content_ids", np.int32)
        _check_requests(self)
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
        prompt = np.repeat(ids, block_size)[:num_tokens]
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

    def head(self, limit: int) -> "Trace":
        """Return the first ``limit`` requests (all of them if there are fewer). O(content ids), no copy.

        >>> len(Trace.from_lengths([0, 1, 2], [5, 5, 5], [1, 1, 1]).head(2))
        2
        """
        _check_positive_int("limit", limit)
        offsets = self.content_offsets[: limit + 1]
        ids = self.content_ids[: offsets[-1]]
        columns = (self.arrival_s[:limit], self.input_len[:limit], self.output_len[:limit])
        num_contents = int(ids.max()) + 1 if len(ids) else 0
        return Trace(self.name, *columns, ids, offsets, self.content_block_size, num_contents)

    def faster(self, speed: float) -> "Trace":
        """Return the same requests arriving ``speed`` times as fast; a speed below 1 slows them down.

        >>> Trace.from_lengths([0, 3], [5, 5], [1, 1]).faster(1.5).arrival_s.tolist()
        [0.0, 2.0]
        """
        if not (math.isfinite(speed) and speed > 0):
            raise TraceError(f"speed must be a finite number above 0, got {speed!r}")
        return Trace(
            self.name,
            self.arrival_s / speed,
            self.input_len,
            self.output_len,
            self.content_ids,
            self.content_offsets,
            self.content_block_size,
            self.num_contents,
        )

    def _unique_id(self, i: int) -> int:
        """Return the first of two ids that belong to request ``i`` alone: prompt tail, then output."""
        return self.num_contents + 2 * i

    def _check_index(self, i: int) -> None:
        if not 0 <= i < len(self):
            raise TraceError(f"request {i} is out of range: the trace has {len(self)} requests")

    def _set_column(self, field: str, dtype: type[np.generic]) -> None:
        object.__setattr__(self, field, _column(field, getattr(self, field), dtype))


def read_mooncake(
    path: str | os.PathLike[str],
    *,
    block_size: int | None = MOONCAKE_BLOCK_SIZE,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    r"""Read a trace in the Mooncake format: one JSON object per line, plain, gzip or zstd.

    The compression is told by the content, not by the file's name. Fields: ``timestamp`` (ms),
    ``input_length`` and ``output_length`` (tokens), ``hash_ids`` (integers of 64 bits, signed or unsigned);
    others are ignored. Arrivals count from the first request; ids are renumbered in order of appearance.
    O(size of the file): the public conversation trace (12,031 requests, 3 MB) takes about 0.2 s.

    Args:
        path: the file.
        block_size: tokens per hash id. None: 512 if that agrees with every line, else 16.
        limit: read only so many requests, at least 1.
        progress: called now and then with (bytes read, bytes in all) of the file as stored.

    Raises:
        TraceError: a file that is missing, empty, damaged or no such trace, with file, line and field.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "demo.jsonl")
    ...     line = '{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [46, 47]}'
    ...     _ = path.write_text(line + "\n")
    ...     trace = read_mooncake(path)
    >>> trace.name, trace.content_ids.tolist(), trace.input_len.tolist()
    ('demo', [0, 1], [700])
    """
    if limit is not None:
        _check_positive_int("limit", limit)
    rows = _Rows(Path(path), block_size)
    for number, line in _nonblank_lines(rows.path, progress):
        rows.add(number, line)
        if len(rows) == limit:
            break
    return rows.trace()


class _Place(NamedTuple):
    """Where in a file something is wrong."""

    path: Path
    line: int

    def error(self, text: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.line}: {text}")

    def field_error(self, field: str, wanted: str, value: object) -> TraceError:
        return self.error(f"{field} must be {wanted}, got {reprlib.repr(value)}")


class _Rows:
    """The lines read so far, as growing columns."""

    def __init__(self, path: Path, block_size: int | None) -> None:
        if block_size is not None:
            _check_positive_int("block_size", block_size)
        self.path = path
        self._arrival_ms = array("d")
        self._input_len = array("q")
        self._output_len = array("q")
        self._content_ids = array("i")
        self._content_offsets = array("q", [0])
        self._dense_id: dict[int, int] = {}
        self._guessing = block_size is None
        # block sizes that no line has contradicted yet, the preferred one first
        self._block_sizes = [MOONCAKE_BLOCK_SIZE, AGENT_BLOCK_SIZE] if block_size is None else [block_size]

    def __len__(self) -> int:
        return len(self._arrival_ms)

    def add(self, number: int, line: bytes) -> None:
        place = _Place(self.path, number)
        row = _json_object(place, line)
        arrival_ms = _timestamp(place, row)
        if self._arrival_ms and arrival_ms < self._arrival_ms[-1]:
            raise place.error(f"timestamp decreases from {self._arrival_ms[-1]:g} to {arrival_ms:g} ms")
        input_len, output_len = _length(place, row, "input_length"), _length(place, row, "output_length")
        ids = _hash_ids(place, row)
        self._narrow_block_sizes(place, input_len, len(ids))
        self._arrival_ms.append(arrival_ms)
        self._input_len.append(input_len)
        self._output_len.append(output_len)
        dense_id = self._dense_id
        self._content_ids.extend([dense_id.setdefault(content, len(dense_id)) for content in ids])
        self._content_offsets.append(len(self._content_ids))

    def trace(self) -> Trace:
        if not self._arrival_ms:
            raise TraceError(f"{self.path}: the file holds no requests")
        arrival_ms = np.array(self._arrival_ms)
        return Trace(
            self.path.name.split(".")[0],
            (arrival_ms - arrival_ms[0]) / 1000.0,
            np.array(self._input_len),
            np.array(self._output_len),
            np.array(self._content_ids, np.int32),
            np.array(self._content_offsets),
            self._block_sizes[0],
            len(self._dense_id),
        )

    def _narrow_block_sizes(self, place: _Place, input_len: int, num_ids: int) -> None:
        left = [size for size in self._block_sizes if num_ids in _possible_num_ids(input_len, size)]
        if not left:
            wanted = "; ".join(
                f"blocks of {size} tokens make {' or '.join(map(str, _possible_num_ids(input_len, size)))}"
                for size in self._block_sizes
            )
            hint = "; state the right block_size (--trace-block-size)" if self._guessing else ""
            raise place.error(f"hash_ids has {num_ids} ids for input_length {input_len}, but {wanted}{hint}")
        self._block_sizes = left


def _possible_num_ids(input_len: int, block_size: int) -> list[int]:
    """Return how many ids a prompt may have: its full blocks, and the partial one if there is one."""
    full, rest = divmod(input_len, block_size)
    return [full, full + 1] if rest else [full]


def _json_object(place: _Place, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise place.error(f"not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise place.error(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise place.error(f"must be a JSON object, got {reprlib.repr(row)}")
    return row


def _value(place: _Place, row: dict[str, Any], field: str) -> Any:
    if field not in row:
        raise place.error(f"{field} is missing")
    return row[field]


def _timestamp(place: _Place, row: dict[str, Any]) -> float:
    value = _value(place, row, "timestamp")
    # NaN fails the comparison, and so does infinity
    if type(value) not in (int, float) or not 0 <= value <= _MAX_MS:
        raise place.field_error("timestamp", "milliseconds from 0 to 2**53", value)
    return float(value)


def _length(place: _Place, row: dict[str, Any], field: str) -> int:
    value = _value(place, row, field)
    if type(value) is not int or not 1 <= value <= _MAX_TOKENS:
        raise place.field_error(field, "an integer from 1 to 2**31 - 1", value)
    return value


def _hash_ids(place: _Place, row: dict[str, Any]) -> list[int]:
    value = _value(place, row, "hash_ids")
    if not isinstance(value, list):
        raise place.field_error("hash_ids", "a list of integers", value)
    if value and (set(map(type, value)) != {int} or min(value) < -(2**63) or max(value) >= 2**64):
        position, content = next((k, c) for k, c in enumerate(value) if not _is_64_bit(c))
        raise place.field_error(f"hash_ids[{position}]", "an integer of 64 bits", content)
    return value


def _is_64_bit(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**64


def _nonblank_lines(path: Path, progress: Callable[[int, int], None] | None) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line); blank lines may stand only at the file's end."""
    blank = 0
    for number, line in enumerate(_lines(path, progress), start=1):
        if not line.strip():
            blank = blank or number
        elif blank:
            raise _Place(path, blank).error("blank line inside the trace")
        else:
            yield number, line


def _lines(path: Path, progress: Callable[[int, int], None] | None) -> Iterator[bytes]:
    with _open(path) as file:
        total = os.fstat(file.fileno()).st_size
        lines = _decompressed_lines(path, file)
        for number in count(1):
            line = _next_line(_Place(path, number), lines)
            if not line:
                break
            yield line
            if progress and number % _LINES_PER_REPORT == 0:
                progress(file.tell(), total)
        if progress:
            progress(total, total)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be opened: {error.strerror}") from error


def _next_line(place: _Place, lines: Iterator[bytes]) -> bytes:
    """Return the next line with its newline, empty at the file's end."""
    try:
        return next(lines, b"")
    except (EOFError, zlib.error, OSError) as error:
        raise place.error(f"cannot be read: {error}") from error


def _decompressed_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    magic = file.peek(4)[:4]  # type: ignore[attr-defined]
    if magic.startswith(b"\x1f\x8b"):
        return iter(gzip.GzipFile(fileobj=file))
    if magic == b"\x28\xb5\x2f\xfd":
        return _zstd_lines(path, file)
    return iter(file)


def _zstd_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise TraceError(f'{path}: reading zstd needs: pip install "pagedkv[zstd]"') from error
    decoder, pending = None, b""
    while chunk := file.read(1 << 16):
        while chunk:
            decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
            try:
                pending += decoder.decompress(chunk)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            # a file may hold several frames, one after the other
            chunk, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
        *lines, pending = pending.split(b"\n")
        yield from (line + b"\n" for line in lines)
    if decoder is not None:
        raise EOFError("the zstd stream is cut off before its end")
    if pending:
        yield pending


def _check_positive_int(name: str, value: int) -> None:
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
    lengths = {field: len(getattr(trace, field)) for field in ("arrival_s", "input_len", "output_len")}
    if len(set(lengths.values())) > 1:
        raise TraceError(f"columns must have one length, got {lengths}")
    if not len(trace):
        raise TraceError("a trace needs at least one request, got 0")
    _refuse_where("arrival_s", trace.arrival_s, ~(np.isfinite(trace.arrival_s) & (trace.arrival_s >= 0)))
    _refuse_where("arrival_s (must not decrease)", trace.arrival_s[1:], np.diff(trace.arrival_s) < 0)
    for field in ("input_len", "output_len"):
        values = getattr(trace, field)
        _refuse_where(field, values, (values < 1) | (values > _MAX_TOKENS))


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
    if trace.num_contents + 2 * len(trace) > _MAX_TOKENS:
        raise TraceError(f"{trace.num_contents} contents and {len(trace)} requests need ids beyond int32")


def _refuse_where(field: str, values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_]) -> None:
    if wrong.any():
        first = int(wrong.argmax())
        raise TraceError(f"{field} is wrong at {first}: got {values[first]}")
