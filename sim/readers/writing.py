"""Write a trace as a stream of requests: the project's own format, or Mooncake's."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from pagedkv.sim.readers.native import FORMAT_NAME, VERSION
from pagedkv.sim.readers.native_parquet import ParquetWriter, require_parquet
from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.row import Row
from pagedkv.sim.trace import Trace, TraceError

WRITE_FORMATS: Final = ("native", "mooncake")


def rows_of(trace: Trace) -> Iterator[Row]:
    """The requests of a trace, as a reader would give them; contents are its ids."""
    path = Path(trace.name)
    offsets = trace.content_offsets.tolist()
    for i in range(len(trace)):
        session, adapter = int(trace.session[i]), int(trace.adapter[i])
        think_s, deadline_s = float(trace.think_s[i]), float(trace.deadline_s[i])
        yield Row(
            Place(path, i + 1, unit="request"),
            float(trace.arrival_s[i]),
            int(trace.input_len[i]),
            int(trace.output_len[i]),
            trace.content_ids[offsets[i] : offsets[i + 1]].tolist(),
            trace.content_block_size,
            session if session >= 0 else None,
            None if np.isnan(think_s) else think_s,
            None if np.isinf(deadline_s) else deadline_s,
            trace.adapter_names[adapter] if adapter >= 0 else None,
            int(trace.priority[i]),
        )


def write_trace(
    rows: Iterable[Row],
    path: str | os.PathLike[str],
    *,
    format: str = "native",
    name: str | None = None,
    notes: Callable[[], Sequence[str]] = tuple,
) -> int:
    """Write requests to a file; returns how many. Memory: one request (4,096 for Parquet).

    Args:
        rows: the requests, arrivals not decreasing.
        path: the file; its suffix ``.parquet``, ``.gz`` or ``.zst`` says how it is packed.
        format: one of ``WRITE_FORMATS``.
        name: of the trace, for the header.
        notes: what to say in the header, asked for when the first request is there.

    Raises:
        TraceError: no request at all, or one that the format cannot hold, with its line.
    """
    if format not in WRITE_FORMATS:
        raise TraceError(f"unknown format to write {format!r}, known are: {', '.join(WRITE_FORMATS)}")
    stream = iter(rows)
    first = next(stream, None)
    if first is None:
        raise TraceError("no request is left to write")
    requests, path = _chain(first, stream), Path(path)
    if path.suffix == ".parquet":
        if format != "native":
            raise TraceError(f"{format} is JSON lines, not Parquet")
        return _write_parquet(requests, path, _header(first, name, notes()))
    with _packed(path) as file:
        if format == "native":
            _write_line(file, _header(first, name, notes()))
            return sum(_write_line(file, record_of(row)) for row in requests)
        return sum(_write_line(file, _mooncake_record(row)) for row in requests)


def check_suffix(name: str, format: str) -> None:
    """Refuse before the work what could not be written after it: no pyarrow, no zstandard."""
    suffix = Path(name).suffix
    if suffix == ".parquet":
        require_parquet(Path(name))
        if format != "native":
            raise TraceError(f"{name}: {format} is JSON lines, not Parquet")
    if suffix == ".zst":
        _require_zstd(name)


def record_of(row: Row) -> dict[str, Any]:
    """A request as the project's own format says it; what has its default is left out."""
    record: dict[str, Any] = {
        "arrival_s": row.arrival_s,
        "input_len": row.input_len,
        "output_len": row.output_len,
        "block_hashes": list(row.contents) if row.block_size else None,
        "session": row.session,
        "think_s": row.think_s,
        "deadline_s": row.deadline_s,
        "adapter": row.adapter,
        "priority": row.priority or None,
    }
    return {field: value for field, value in record.items() if value is not None}


def _mooncake_record(row: Row) -> dict[str, Any]:
    if not row.block_size or row.arrival_s is None:
        what = "contents" if not row.block_size else "an arrival"
        raise row.place.error(f"Mooncake's format needs {what}; write the native one")
    if any(value is not None for value in (row.think_s, row.deadline_s, row.adapter)) or row.priority:
        raise row.place.error(
            "Mooncake's format holds no think times, deadlines, adapters or priorities; write the native one"
        )
    if any(type(content) is not int for content in row.contents):
        raise row.place.error("Mooncake's hash_ids are integers, these are text; write the native format")
    milliseconds = round(row.arrival_s * 1000.0, 6)
    record: dict[str, Any] = {
        "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
        "input_length": row.input_len,
        "output_length": row.output_len,
        "hash_ids": list(row.contents),
    }
    return record if row.session is None else record | {"session_id": row.session}


def _header(first: Row, name: str | None, notes: Sequence[str]) -> dict[str, Any]:
    header: dict[str, Any] = {"format": FORMAT_NAME, "version": VERSION}
    if name:
        header["name"] = name[:200]
    if first.block_size:
        header["block_size"] = first.block_size
    if notes:
        header["notes"] = list(notes)
    return header


def _write_parquet(rows: Iterable[Row], path: Path, header: dict[str, Any]) -> int:
    count = 0
    with ParquetWriter(path, header) as writer:
        for row in rows:
            writer.write(record_of(row))
            count += 1
    return count


def _write_line(file: BinaryIO, record: dict[str, Any]) -> int:
    file.write(json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n")
    return 1


def _chain(first: Row, rest: Iterator[Row]) -> Iterator[Row]:
    yield first
    yield from rest


@contextmanager
def _packed(path: Path) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        if path.suffix == ".gz":
            # neither the time nor the file's name, so that the same requests give the same bytes
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed, io.BufferedWriter(packed) as buffered:
                yield buffered
        elif path.suffix == ".zst":
            with _require_zstd(str(path)).ZstdCompressor().stream_writer(file, closefd=False) as packed:
                yield packed
        else:
            yield file


def _require_zstd(name: str) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise TraceError(f'{name}: writing zstd needs: pip install "pagedkv[zstd]"') from error
    return zstandard
