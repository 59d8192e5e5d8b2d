"""A measured serving run: request times, per-second engine state, and the engine's settings."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.errors import PagedKVError
from pagedkv.sim.output.records import FloatArray, IntArray
from pagedkv.sim.trace import Trace

FILES = ("meta.json", "requests.jsonl", "timeseries.csv")


@dataclass(frozen=True)
class MeasuredRun:
    """What a real engine did, as its benchmark wrote it down.

    Per request, in order of arrival: ``trace`` (arrivals and lengths), ``queued_s``, ``scheduled_s``,
    ``first_token_s`` and ``last_token_s``, in seconds of the engine's clock. Per row of the timeline:
    ``time_s``, ``running``, ``waiting`` and ``kv_usage`` (share of the blocks, 0..1).
    """

    name: str
    model: str
    gpu: str
    num_blocks: int
    block_size: int
    max_batch: int
    token_budget: int
    trace: Trace
    queued_s: FloatArray
    scheduled_s: FloatArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    time_s: FloatArray
    running: IntArray
    waiting: IntArray
    kv_usage: FloatArray


def find_runs(directory: Path) -> list[Path]:
    """Folders below ``directory`` (itself included) that hold a measured run, sorted."""
    if not directory.is_dir():
        raise PagedKVError(f"no folder {directory}")
    folders = sorted({path.parent for path in directory.rglob("requests.jsonl")})
    return [folder for folder in folders if all((folder / name).is_file() for name in FILES)]


def read_run(folder: Path) -> MeasuredRun:
    """Read a run; raises ``PagedKVError`` naming the folder and what is missing or wrong."""
    try:
        meta = _object(json.loads((folder / "meta.json").read_text(encoding="utf-8")))
        lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [_object(json.loads(line)) for line in lines]
        with (folder / "timeseries.csv").open(encoding="utf-8", newline="") as file:
            timeline = list(csv.DictReader(file))
        return _run(folder.name, meta, rows, timeline)
    except KeyError as error:
        raise PagedKVError(f"{folder}: no field {error.args[0]!r}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise PagedKVError(f"{folder}: {error}") from None


def _run(
    name: str, meta: dict[str, Any], rows: Sequence[dict[str, Any]], timeline: Sequence[dict[str, str]]
) -> MeasuredRun:
    if not rows or not timeline:
        raise PagedKVError(f"{len(rows)} requests and {len(timeline)} rows of the timeline: need both")
    rows = sorted(rows, key=lambda row: float(row["queued_ts"]))
    start = float(rows[0]["queued_ts"])

    def seconds(field: str) -> FloatArray:
        return _finite(field, [float(row[field]) - start for row in rows])

    lengths = ([int(row["input_toks"]) for row in rows], [int(row["output_toks"]) for row in rows])
    queued, first = seconds("queued_ts"), seconds("first_token_ts")
    if (first <= queued).any():
        raise PagedKVError(
            f"request {int((first <= queued).argmax()) + 1} has its first token before it is queued"
        )
    return MeasuredRun(
        name=name,
        model=_text(meta["model"]),
        gpu=_text(meta["hardware"]["device_name"]),
        num_blocks=int(meta["kv_cache"]["num_gpu_blocks"]),
        block_size=int(meta["kv_cache"]["block_size"]),
        max_batch=int(meta["scheduler"]["max_num_seqs"]),
        token_budget=int(meta["scheduler"]["max_num_batched_tokens"]),
        trace=Trace.from_lengths(queued, *lengths, name=name),
        queued_s=queued,
        scheduled_s=seconds("scheduled_ts"),
        first_token_s=first,
        last_token_s=seconds("last_token_ts"),
        time_s=_finite("t", [float(row["t"]) for row in timeline]),
        running=np.array([int(row["running"]) for row in timeline]),
        waiting=np.array([int(row["waiting"]) for row in timeline]),
        kv_usage=_finite("kv_cache_pct", [float(row["kv_cache_pct"]) for row in timeline]) / 100,
    )


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


def _finite(field: str, values: list[float]) -> FloatArray:
    array = np.array(values)
    if not np.isfinite(array).all():
        raise ValueError(f"{field} must be finite")
    return array
