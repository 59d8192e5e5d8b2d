"""Figures of several results beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pagedkv.errors import PagedKVError
from pagedkv.sim.output.report import HITS_SCHEMA, REPLAY_SCHEMA

COMPARE_SCHEMA = "pagedkv.compare/1"

Document = Mapping[str, Any]


class Compared(NamedTuple):
    """A figure of a document: where it is, and its unit."""

    place: str
    unit: str


_LATENCIES = [
    Compared(f"latency_s.{name}.{key}", "s")
    for name in ("ttft", "itl", "tpot", "e2e")
    for key in ("mean", "p50", "p90", "p99")
]
FIGURES: Mapping[str, Sequence[Compared]] = {
    REPLAY_SCHEMA: (
        *_LATENCIES,
        Compared("makespan_s", "s"),
        Compared("output_tokens_per_s", "tokens/s"),
        Compared("goodput.share", ""),
        Compared("goodput.requests_per_s", "requests/s"),
        Compared("cache.token_hit_rate", ""),
        Compared("cache.block_hit_rate", ""),
        Compared("cache.evicted_blocks", "blocks"),
        Compared("cache.bytes.reserved", "bytes"),
        Compared("cache.bytes.peak_active", "bytes"),
        Compared("cache.bytes.mean_active", "bytes"),
        Compared("cache.bytes.mean_used", "bytes"),
        Compared("cache.mean_fragmentation", ""),
        Compared("preemptions", ""),
        Compared("steps", ""),
    ),
    HITS_SCHEMA: (
        Compared("hit_blocks", "blocks"),
        Compared("hit_tokens", "tokens"),
        Compared("block_hit_rate", ""),
        Compared("token_hit_rate", ""),
        Compared("evicted_blocks", "blocks"),
    ),
}
_CONDITIONS = (
    "pagedkv_version",
    "kind",
    "inputs",
    "goodput.slo_s",
    "trace",
    "requests",
    "block_size",
    "num_blocks",
)


def compare(names: Sequence[str], documents: Sequence[Document]) -> dict[str, Any]:
    """Conditions that differ, then figures with ratio and difference to the first document.

    Raises:
        PagedKVError: fewer than two, different schemas, or figures that mean different things.
    """
    _require_comparable(names, documents)
    conditions = [_flat_conditions(document) for document in documents]
    places = list(dict.fromkeys(place for found in conditions for place in found))
    rows = [{"condition": p, "values": [found.get(p) for found in conditions]} for p in places]
    differing = [row for row in rows if any(value != row["values"][0] for value in row["values"])]
    return {
        "schema": COMPARE_SCHEMA,
        "results": list(names),
        "kinds": list(dict.fromkeys(map(_kind, documents))),
        "conditions": differing,
        "same_conditions": len(rows) - len(differing),
        "figures": [
            row
            for row in (_figure(item, documents) for item in FIGURES[documents[0]["schema"]])
            if any(value is not None for value in row["values"])
        ],
    }


def _require_comparable(names: Sequence[str], documents: Sequence[Document]) -> None:
    if len(documents) < 2:
        raise PagedKVError(f"comparing takes at least 2 results, got {len(documents)}")
    first = documents[0]
    for name, document in zip(names, documents, strict=True):
        if document["schema"] != first["schema"]:
            raise PagedKVError(
                f"{names[0]} is a {first['schema']} document and {name} a {document['schema']} one: "
                "their figures mean different things"
            )
        for figure, formula in first["formulas"].items():
            other = document["formulas"].get(figure, formula)
            if other != formula:
                raise PagedKVError(f"{figure} is {formula!r} in {names[0]}, but {other!r} in {name}")


def _kind(document: Document) -> str:
    return str(document.get("kind", "hits were counted by the cache manager, without time"))


def _figure(item: Compared, documents: Sequence[Document]) -> dict[str, Any]:
    values = [_at(document, item.place) for document in documents]
    first = values[0]
    return {
        "figure": item.place,
        "unit": item.unit,
        "values": values,
        "ratios": [None if v is None or not first else v / first for v in values],
        "differences": [None if v is None or first is None else v - first for v in values],
    }


def _at(document: Document, place: str) -> Any:
    """What is at a place of nested objects; None if there is nothing."""
    found: Any = document
    for name in place.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _flat_conditions(document: Document) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place in _CONDITIONS:
        _flatten(place, _at(document, place), found)
    return found


def _flatten(place: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            _flatten(f"{place.removeprefix('inputs')}.{name}".removeprefix("."), item, found)
    elif value is not None:
        found[place] = value
