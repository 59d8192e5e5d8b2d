"""kv-cache-tester: JSON lines of recorded agent sessions, each with its own block ids."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from typing import Any

from pagedkv.sim.readers.contents import check_num_contents
from pagedkv.sim.readers.json_rows import json_lines
from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.row import Format, Head, Notes, ReadOptions, Row, output_tokens
from pagedkv.sim.readers.source import Source

SESSION_GAP_MS = 30_000
"""Sessions were recorded one by one; here each begins so long after the one before."""

SUBAGENT = "subagent"

_MOST_IDS = 2**32  # of a session; its number comes before them in 64 bits
_MOST_SESSIONS = 2**31


def read_rows(source: Source, options: ReadOptions, notes: Notes) -> Iterator[Row]:
    """Yield the requests of all sessions of a file, in order of time, then session, then turn.

    A session has ``block_size`` (64 if it does not say) and ``requests``; a request has ``t`` (seconds since
    the session's start), ``in`` and ``out`` (tokens), and ``hash_runs``, ``[start, length]`` each: the ids of
    its full blocks, which mean something within the session alone. Other fields are ignored. Requests of
    sub-agents are left out and counted. Times are rounded to milliseconds. Memory: the requests of the
    sessions that overlap.
    """
    notes.assume(f"sessions begin {SESSION_GAP_MS // 1000} s after one another")
    waiting: list[tuple[int, int, int, Row]] = []
    for session, (place, record) in enumerate(json_lines(source)):
        if session >= _MOST_SESSIONS:
            raise place.error(f"more than {_MOST_SESSIONS:,} sessions")
        start_ms = session * SESSION_GAP_MS
        # what is due now comes before whatever the sessions from here on hold
        while waiting and waiting[0][0] <= start_ms:
            yield _due(waiting)
        for turn, (after_ms, row) in enumerate(_requests(place, record, session, options, notes)):
            heapq.heappush(waiting, (start_ms + after_ms, session, turn, row))
    while waiting:
        yield _due(waiting)


def _due(waiting: list[tuple[int, int, int, Row]]) -> Row:
    """Take the request that is due next."""
    at_ms, _, _, row = heapq.heappop(waiting)
    return row._replace(arrival_s=at_ms / 1000.0)


def _requests(
    place: Place, record: dict[str, Any], session: int, options: ReadOptions, notes: Notes
) -> Iterator[tuple[int, Row]]:
    """Yield (milliseconds after the session's start, request)."""
    block_size = place.integer("block_size", record.get("block_size", 64), most=1 << 20)
    if options.block_size not in (None, block_size):
        raise place.field_error("block_size", f"{options.block_size} as asked for", block_size)
    requests = place.value(record, "requests")
    if not isinstance(requests, list):
        raise place.field_error("requests", "a list", requests)
    for i, request in enumerate(requests):
        where = place._replace(item=f"request {i + 1}")
        if not isinstance(request, dict):
            raise where.field_error("request", "an object", request)
        if request.get("type") == SUBAGENT:
            notes.count("requests of sub-agents left out")
            continue
        after_s = where.number("t", where.value(request, "t"))
        input_len = where.integer("in", where.value(request, "in"))
        output_len = output_tokens(where, "out", where.value(request, "out"), options, notes)
        ids = _ids(where, where.value(request, "hash_runs"), input_len // block_size + 1)
        check_num_contents(where, "hash_runs", len(ids), input_len, block_size)
        contents = [session * _MOST_IDS + number for number in ids]
        if output_len:
            row = Row(where, None, input_len, output_len, contents, block_size, session)
            yield round(1000 * after_s), row


def _ids(place: Place, runs: Any, most: int) -> list[int]:
    """The ids of runs; refuses a run that alone is longer than the prompt before it is written out."""
    if not isinstance(runs, list):
        raise place.field_error("hash_runs", "a list of [start, length]", runs)
    ids: list[int] = []
    for i, run in enumerate(runs):
        field = f"hash_runs[{i}]"
        if not isinstance(run, list) or len(run) != 2:
            raise place.field_error(field, "[start, length]", run)
        length = place.integer(f"{field}[1]", run[1], most=most)
        start = place.integer(f"{field}[0]", run[0], least=0, most=_MOST_IDS - length)
        ids += range(start, start + length)
    return ids


def _recognises(head: Head) -> bool:
    if "hash_id_scope" in head.fields or ("requests" in head.fields and "block_size" in head.fields):
        return True
    return "hash_runs" in json.dumps(head.fields.get("requests"))


FORMAT = Format("kv-cache-tester", "kv-cache-tester agent sessions, JSON lines", _recognises, read_rows)
