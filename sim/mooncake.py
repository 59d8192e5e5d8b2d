"""The Mooncake trace format: JSON lines of arrivals, lengths and content ids."""

import gzip
import json
import os
import reprlib
import zlib
from array import array
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from pagedkv.sim.trace import MAX_TOKENS, Trace, TraceError, check_positive_int

MOONCAKE_BLOCK_SIZE = 512
AGENT_BLOCK_SIZE = 16

_MAX_MS = 2**53  # beyond it a float64 no longer counts single milliseconds
_LINES_PER_REPORT = 256


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
        check_positive_int("limit", limit)
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
            check_positive_int("block_size", block_size)
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
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
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
