"""The table of formats, and which of them a file has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

from pagedkv.sim.readers import (
    agent_sessions,
    azure,
    bailian,
    burstgpt,
    kv_events,
    mooncake,
    native,
    sharegpt,
    vidur,
    vllm_bench,
)
from pagedkv.sim.readers.csv_rows import split_fields
from pagedkv.sim.readers.native_parquet import MAGIC
from pagedkv.sim.readers.row import Format, Head
from pagedkv.sim.readers.source import Source
from pagedkv.sim.trace import TraceError

FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        module.FORMAT.name: module.FORMAT
        for module in (
            mooncake,
            bailian,
            agent_sessions,
            azure,
            burstgpt,
            vidur,
            sharegpt,
            vllm_bench,
            kv_events,
            native,
        )
    }
)
"""All formats by name, in the order in which they are tried."""


def find_format(source: Source, name: str | None = None) -> Format:
    """The format of that name, or the one that the file's beginning looks like.

    Reads the first line at most. Raises ``TraceError`` for an unknown name, a file of no known format, and a
    file that cannot be read.
    """
    if name is not None:
        if name not in FORMATS:
            raise TraceError(f"unknown format {name!r}, known are: {', '.join(FORMATS)}")
        return FORMATS[name]
    head = read_head(source)
    if not head.content.strip():
        raise source.error("the file holds no requests")
    found = [known for known in FORMATS.values() if known.recognises(head)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(known.name for known in found or FORMATS.values())
    what = "could be several formats" if found else "is no known format"
    raise source.place(1).error(f"the file's beginning {what}: state --format, one of {names}")


def read_head(source: Source) -> Head:
    """The beginning of a file, taken apart as JSON and as CSV."""
    content = source.head()
    if content.startswith(MAGIC):
        return Head(content, {}, ())
    line = content.lstrip(b"\n").split(b"\n", 1)[0].rstrip(b"\r")
    fields: dict[str, Any] = {}
    columns: tuple[str, ...] = ()
    if line.lstrip().startswith(b"{"):
        with suppress(ValueError, RecursionError):  # its reader says what is wrong
            value = json.loads(line)
            fields = value if isinstance(value, dict) else {}
    else:
        with suppress(TraceError):
            columns = tuple(split_fields(source.place(1), line))
    return Head(content, fields, columns)
