"""What is inside a trace: counts, arrivals, lengths, sharing, sessions, and what it does not say."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.sim.readers.reading import Reading
from pagedkv.sim.readers.row import Row

INFO_SCHEMA = "pagedkv.trace-info/1"
PERCENTS = (50, 90, 95, 99)


@dataclass(frozen=True)
class Lengths:
    """How a length is distributed, in tokens; percentiles are interpolated linearly."""

    total: int
    mean: float
    least: int
    percentiles: dict[str, float]
    most: int


@dataclass(frozen=True)
class Arrivals:
    """When requests arrive. ``gap_cv``: standard deviation of the gaps over their mean; None without gaps."""

    span_s: float
    per_s: float | None
    gap_cv: float | None


@dataclass(frozen=True)
class Sharing:
    """What a cache that never evicts would hit, in file order.

    Only full blocks take part; a hit is one of a prompt's leading blocks that an earlier prompt had, too.
    """

    block_size: int
    unique_contents: int
    full_blocks: int
    hit_blocks: int
    token_hit_rate: float
    """Hit tokens over all prompt tokens."""
    block_hit_rate: float
    """Hit blocks over full blocks."""


@dataclass(frozen=True)
class Sessions:
    """Requests that belong together; requests without a session are not counted here."""

    sessions: int
    requests: int
    mean_turns: float
    most_turns: int


@dataclass(frozen=True)
class TraceInfo:
    """All that `describe` found; None where the file says nothing."""

    name: str
    format: str
    requests: int
    input_tokens: Lengths
    output_tokens: Lengths
    arrivals: Arrivals | None
    sharing: Sharing | None
    sessions: Sessions | None
    adapters: dict[str, int]
    """Requests by adapter."""
    with_think_time: int
    with_deadline: int
    with_priority: int
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def describe(reading: Reading, limit: int | None = None) -> TraceInfo:
    """Read a trace once and say what is inside. Memory: 24 bytes per request and its distinct contents.

    Raises ``TraceError`` as reading does, and for a file without requests.
    """
    counts = _Counts()
    for number, row in enumerate(reading, start=1):
        counts.add(row)
        if number == limit:
            break
    if not counts.input_len:
        raise reading.source.error("the file holds no requests")
    return TraceInfo(
        name=reading.source.name,
        format=reading.format.name,
        requests=len(counts.input_len),
        input_tokens=_lengths(counts.input_len),
        output_tokens=_lengths(counts.output_len),
        arrivals=_arrivals(np.array(counts.arrival_s)) if counts.arrival_s else None,
        sharing=counts.sharing(),
        sessions=_sessions(counts.turns) if counts.turns else None,
        adapters=dict(sorted(counts.adapters.items())),
        with_think_time=counts.with_think_time,
        with_deadline=counts.with_deadline,
        with_priority=counts.with_priority,
        missing=counts.missing(),
        notes=reading.notes.lines(),
    )


class _Counts:
    def __init__(self) -> None:
        self.arrival_s, self.input_len, self.output_len = array("d"), array("q"), array("q")
        self.turns: Counter[Hashable] = Counter()
        self.adapters: Counter[str] = Counter()
        self.with_think_time = self.with_deadline = self.with_priority = 0
        self._seen: set[Hashable] = set()
        self._block_size = self._full_blocks = self._hit_blocks = 0

    def add(self, row: Row) -> None:
        self.input_len.append(row.input_len)
        self.output_len.append(row.output_len)
        if row.arrival_s is not None:
            self.arrival_s.append(row.arrival_s)
        if row.session is not None:
            self.turns[row.session] += 1
        if row.adapter is not None:
            self.adapters[row.adapter] += 1
        self.with_think_time += row.think_s is not None
        self.with_deadline += row.deadline_s is not None
        self.with_priority += row.priority != 0
        if row.block_size:
            self._add_contents(row)

    def _add_contents(self, row: Row) -> None:
        self._block_size = row.block_size
        full = row.input_len // row.block_size
        keys, seen = row.content_keys(), self._seen
        self._full_blocks += full
        self._hit_blocks += next((i for i, key in enumerate(keys[:full]) if key not in seen), full)
        seen.update(keys)

    def sharing(self) -> Sharing | None:
        if not self._block_size:
            return None
        return Sharing(
            block_size=self._block_size,
            unique_contents=len(self._seen),
            full_blocks=self._full_blocks,
            hit_blocks=self._hit_blocks,
            token_hit_rate=self._hit_blocks * self._block_size / sum(self.input_len),
            block_hit_rate=self._hit_blocks / self._full_blocks if self._full_blocks else 0.0,
        )

    def missing(self) -> tuple[str, ...]:
        said = {
            "arrivals": bool(self.arrival_s),
            "content": bool(self._block_size),
            "sessions": bool(self.turns),
            "think times": self.with_think_time > 0,
            "deadlines": self.with_deadline > 0,
            "adapters": bool(self.adapters),
            "priorities": self.with_priority > 0,
        }
        return tuple(name for name, there in said.items() if not there)


def _lengths(values: array[int]) -> Lengths:
    column = np.array(values)
    found = np.percentile(column, PERCENTS)
    return Lengths(
        total=int(column.sum()),
        mean=float(column.mean()),
        least=int(column.min()),
        percentiles={f"p{percent}": float(value) for percent, value in zip(PERCENTS, found, strict=True)},
        most=int(column.max()),
    )


def _arrivals(arrival_s: npt.NDArray[np.float64]) -> Arrivals:
    gaps, span = np.diff(arrival_s), float(arrival_s[-1] - arrival_s[0])
    if not span > 0:
        return Arrivals(span, None, None)
    return Arrivals(span, len(gaps) / span, float(gaps.std() / gaps.mean()))


def _sessions(turns: Counter[Hashable]) -> Sessions:
    requests = sum(turns.values())
    return Sessions(len(turns), requests, requests / len(turns), max(turns.values()))


def info_document(info: TraceInfo) -> dict[str, Any]:
    """What `describe` found, for machines; units are in the names."""
    return {"schema": INFO_SCHEMA, **asdict(info)}


def info_rows(info: TraceInfo) -> list[tuple[str, str]]:
    """What `describe` found, as (what, value) for a table."""
    rows = [("format", info.format), ("requests", f"{info.requests:,}")]
    for name, lengths in (("input", info.input_tokens), ("output", info.output_tokens)):
        rows.append((f"{name} tokens", f"{lengths.total:,}"))
        rows.append((f"{name} length, least / mean / most", _triple(lengths)))
        texts = " / ".join(f"{value:,.0f}" for value in lengths.percentiles.values())
        rows.append((f"{name} length, {' / '.join(lengths.percentiles)}", texts))
    rows += _arrival_rows(info.arrivals)
    rows += _sharing_rows(info.sharing)
    if info.sessions is not None:
        turns = f"{info.sessions.mean_turns:,.2f} / {info.sessions.most_turns:,}"
        rows.append(("sessions", f"{info.sessions.sessions:,}"))
        rows.append(("turns per session, mean / most", turns))
    rows += [(f"adapter {name}, requests", f"{n:,}") for name, n in info.adapters.items()]
    for what in ("think_time", "deadline", "priority"):
        if n := getattr(info, f"with_{what}"):
            rows.append((f"requests with a {what.replace('_', ' ')}", f"{n:,}"))
    return rows


def _triple(lengths: Lengths) -> str:
    return f"{lengths.least:,} / {lengths.mean:,.1f} / {lengths.most:,}"


def _arrival_rows(arrivals: Arrivals | None) -> Iterable[tuple[str, str]]:
    if arrivals is None:
        return []
    rows = [("span", f"{arrivals.span_s:,.3f} s")]
    if arrivals.per_s is not None:
        rows.append(("arrivals per second", f"{arrivals.per_s:,.4g}"))
    if arrivals.gap_cv is not None:
        rows.append(("cv of the gaps between arrivals", f"{arrivals.gap_cv:.3f}"))
    return rows


def _sharing_rows(sharing: Sharing | None) -> Iterable[tuple[str, str]]:
    if sharing is None:
        return []
    return [
        ("tokens per content id", f"{sharing.block_size:,}"),
        ("distinct contents", f"{sharing.unique_contents:,}"),
        ("full blocks", f"{sharing.full_blocks:,}"),
        ("hit blocks in an unbounded cache", f"{sharing.hit_blocks:,}"),
        ("hit rate, tokens (hit / all prompt tokens)", f"{sharing.token_hit_rate:.2%}"),
        ("hit rate, blocks (hit / full prompt blocks)", f"{sharing.block_hit_rate:.2%}"),
    ]
