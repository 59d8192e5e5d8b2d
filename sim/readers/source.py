"""Bytes of a trace file, plain, gzip or zstd, as lines with their place or as chunks."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO

from pagedkv.sim.readers.place import Place
from pagedkv.sim.trace import TraceError

Progress = Callable[[int, int], None]

_LINES_PER_REPORT = 256
_CHUNK_BYTES = 1 << 16
_GZIP_MAGIC, _ZSTD_MAGIC, _BYTE_ORDER_MARK = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf"


class Source:
    """A trace file that can be read from its beginning as often as one likes.

    The compression is told by the content, not by the file's name. ``progress`` is called now and then
    with (bytes read, bytes in all) of the file as stored. Memory: one line.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
        """Name a file; it is opened by each pass."""
        self.path = Path(path)
        self._progress = progress

    @property
    def name(self) -> str:
        """The file's name up to its first dot.

        >>> Source("traces/demo.jsonl.gz").name
        'demo'
        """
        return self.path.name.split(".")[0] or self.path.name

    @property
    def is_stream(self) -> bool:
        """Whether it is a pipe or the like, which gives its content once."""
        return self.path.exists() and not (self.path.is_file() or self.path.is_dir())

    def require_two_passes(self) -> None:
        """Raise ``TraceError`` for a stream."""
        if self.is_stream:
            raise self.error("a stream cannot be read twice: save it as a file")

    def stamp(self) -> tuple[int, int] | None:
        """What differs once the file was written to: its bytes and the time of that; None if it is gone."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns

    def place(self, line: int, item: str = "") -> Place:
        """A place in this file."""
        return Place(self.path, line, item)

    def error(self, text: str) -> TraceError:
        """An error of the file as a whole."""
        return TraceError(f"{self.path}: {text}")

    def lines(self) -> Iterator[tuple[Place, bytes]]:
        """Yield (place, line without its end); blank lines may stand only at the file's end."""
        blank = 0
        for number, line in enumerate(self._lines(), start=1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if not line.strip():
                blank = blank or number
            elif blank:
                raise self.place(blank).error("blank line inside the trace")
            else:
                yield self.place(number), line.rstrip(b"\r\n")

    def chunks(self) -> Iterator[bytes]:
        """Yield the decompressed content in pieces, for formats without lines."""
        with _open(self.path) as file:
            total = os.fstat(file.fileno()).st_size
            pieces, line = _decompressed_chunks(self.path, file), 1
            while piece := _next(self.place(line), pieces):
                line += piece.count(b"\n")
                yield piece
                if self._progress:
                    self._progress(file.tell(), total)
        if self._progress:
            self._progress(total, total)

    def head(self, most: int = 1 << 24) -> bytes:
        """The beginning: at least the first line that is not blank if that is a JSON object of up to ``most``
        bytes, else some of it.

        Refuses a pipe, whose beginning would be lost to those who read on.
        """
        if self.is_stream:
            raise self.error("a stream cannot be read twice: state its --format, or save it as a file")
        found = b""
        for chunk in Source(self.path).chunks():
            found += chunk
            begun = found.lstrip()
            # only an object, which has to be taken apart, is wanted whole
            if b"\n" in begun or len(found) >= most or (begun and begun[:1] not in b"{\xef"):
                break
        return found.removeprefix(_BYTE_ORDER_MARK)[:most]

    def _lines(self) -> Iterator[bytes]:
        with _open(self.path) as file:
            total = os.fstat(file.fileno()).st_size
            lines = _decompressed_lines(self.path, file)
            for number in count(1):
                line = _next(self.place(number), lines)
                if not line:
                    break
                yield line
                if self._progress and number % _LINES_PER_REPORT == 0:
                    self._progress(file.tell(), total)
            if self._progress:
                self._progress(total, total)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be opened: {getattr(error, 'strerror', error)}") from error


def _next(place: Place, pieces: Iterator[bytes]) -> bytes:
    """Return the next piece, empty at the file's end."""
    try:
        return next(pieces, b"")
    except (EOFError, zlib.error, OSError) as error:
        raise place.error(f"cannot be read: {error}") from error


def _magic(file: BinaryIO) -> bytes:
    return bytes(file.peek(4)[:4])  # type: ignore[attr-defined]


def _decompressed_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    magic = _magic(file)
    if magic.startswith(_GZIP_MAGIC):
        return iter(gzip.GzipFile(fileobj=file))
    if magic == _ZSTD_MAGIC:
        return _split_lines(_zstd_chunks(path, file))
    return iter(file)


def _decompressed_chunks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    magic = _magic(file)
    if magic == _ZSTD_MAGIC:
        yield from _zstd_chunks(path, file)
        return
    plain = gzip.GzipFile(fileobj=file) if magic.startswith(_GZIP_MAGIC) else file
    while chunk := plain.read(_CHUNK_BYTES):
        yield chunk


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    pending: list[bytes] = []
    for chunk in chunks:
        first, *more = chunk.split(b"\n")
        pending.append(first)
        for part in more:
            yield b"".join(pending) + b"\n"
            pending = [part]
    if last := b"".join(pending):
        yield last


def _zstd_chunks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise TraceError(f'{path}: reading zstd needs: pip install "pagedkv[zstd]"') from error
    decoder = None
    while chunk := file.read(_CHUNK_BYTES):
        while chunk:
            decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
            try:
                if plain := decoder.decompress(chunk):
                    yield plain
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            # a file may hold several frames, one after the other
            chunk, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
    if decoder is not None:
        raise EOFError("the zstd stream is cut off before its end")
