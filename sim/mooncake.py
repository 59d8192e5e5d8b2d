"""The Mooncake trace format, by name: what `readers` does for all formats, for this one alone."""

import os
from collections.abc import Callable

from pagedkv.sim.readers.mooncake import AGENT_BLOCK_SIZE, MOONCAKE_BLOCK_SIZE
from pagedkv.sim.readers.reading import read_trace
from pagedkv.sim.readers.row import ReadOptions
from pagedkv.sim.trace import Trace

__all__ = ["AGENT_BLOCK_SIZE", "MOONCAKE_BLOCK_SIZE", "read_mooncake"]


def read_mooncake(
    path: str | os.PathLike[str],
    *,
    block_size: int | None = MOONCAKE_BLOCK_SIZE,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    r"""Read a trace in the Mooncake format: one JSON object per line, plain, gzip or zstd.

    The compression is told by the content, not by the file's name. Fields: ``timestamp`` (ms),
    ``input_length`` and ``output_length`` (tokens), ``hash_ids`` (integers of 64 bits, signed or unsigned),
    ``session_id`` where there is one; others are ignored. Arrivals count from the first request; ids are
    renumbered in order of appearance. O(size of the file): the public conversation trace (12,031 requests,
    3 MB) takes about 0.2 s.

    Args:
        path: the file.
        block_size: tokens per hash id. None: 512 if that agrees with the lengths, else 16.
        limit: read only so many requests, at least 1.
        progress: called now and then with (bytes read, bytes in all) of the file as stored.

    Raises:
        TraceError: a file that is missing, empty, damaged or no such trace, with file, line and field.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "demo.jsonl")
    ...     line = '{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [46, 47]}'
    ...     _ = path.write_text(line + "\n")
    ...     trace = read_mooncake(path)
    >>> trace.name, trace.content_ids.tolist(), trace.input_len.tolist()
    ('demo', [0, 1], [700])
    """
    options = ReadOptions(block_size=block_size)
    return read_trace(path, format="mooncake", options=options, limit=limit, progress=progress)
