"""The order of the checks: what must be right first, then what is fast, and the peers last."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from benchmarks.gpu_cases import CASES, WRITES, run_case, run_write, write_name
from benchmarks.gpu_graph import run_graph
from benchmarks.gpu_report import (
    Line,
    absent,
    bandwidth_lines,
    check_line,
    growth_lines,
    int8_lines,
    speed_lines,
)
from benchmarks.gpu_speed import Shape, beside_peers, growth, mixes, run_bandwidth, run_shape
from benchmarks.gpu_workers import Box, Task, run_tasks
from pagedkv.attention import backends
from pagedkv.attention.bench.cell import Cell
from pagedkv.attention.bench.conditions import conditions

PEERS = ("sdpa", "sdpa-rows", "flashinfer-planned", "vllm-triton")
SMALL_BYTES = 2**22


def run_all(dry: bool, workers: int, start_s: float, end_s: float) -> tuple[list[Line], dict[str, Any]]:
    """The lines of the table, and the document with notes and conditions."""
    box, device = Box(start_s, end_s), "cpu" if dry else "cuda"
    backend, notes = _backend()
    lines = _checks(dry, backend, device, workers, box)
    timed, results = _speeds(dry, backend, device, box)
    lines += timed
    found = conditions(device)
    notes += absent(results) + _notes(dry, found, box)
    return lines, {"notes": notes, "conditions": found, "lines": [asdict(line) for line in lines]}


def _backend() -> tuple[str, list[str]]:
    (triton,) = (info for info in backends() if info.name == "triton")
    if triton.available:
        return "triton", []
    return "torch", [f"checked with the torch backend, as triton is not available: {triton.reason}"]


def _checks(dry: bool, backend: str, device: str, workers: int, box: Box) -> list[Line]:
    cases = [case.shrunk() if dry else case for case in CASES]
    tasks = [Task(case.name, run_case, (case, device, backend)) for case in cases]
    if backend == "triton":
        tasks += [Task(write_name(*write), run_write, (*write, device)) for write in WRITES]
    for dtype in ("bf16", "int8"):
        tasks.append(Task(f"growing lengths, {dtype}", run_graph, (*_graph(dtype, dry), device, backend)))
    _say(f"{len(tasks)} comparisons with the reference, {workers} at a time", box)
    return [check_line(name, outcome) for name, outcome in run_tasks(tasks, workers, box).items()]


def _graph(dtype: str, dry: bool) -> tuple[Cell, tuple[tuple[int, ...], ...]]:
    """A cell at its longest, and lengths that grow into it."""
    longest = (200, 90, 33) if dry else (9000, 4096, 333, 1)
    heads = (4, 1, 32) if dry else (32, 8, 128)
    shares = (0.01, 0.3, 0.7, 1.0)
    grown = tuple(tuple(int(n * share) for n in longest) for share in shares)
    return Cell(longest, dtype, 16, *heads), grown


def _speeds(dry: bool, backend: str, device: str, box: Box) -> tuple[list[Line], dict[str, Any]]:
    """One process for all, one after the other: two at a time would share the bandwidth."""
    alone = {shape.name: shape for shape in (*mixes(), *growth())}
    beside = {f"beside peers: {shape.name}": shape for shape in beside_peers()}
    names = (backend, "flash-attn")
    tasks = [Task("bandwidth", run_bandwidth, (device, SMALL_BYTES) if dry else (device,))]
    tasks += [_speed_task(name, shape, (backend,), (), dry, device) for name, shape in alone.items()]
    tasks += [_speed_task(name, shape, names, PEERS, dry, device) for name, shape in beside.items()]
    _say(f"{len(tasks)} shapes, timed" if not dry else f"{len(tasks)} shapes, not timed", box)
    results = run_tasks(tasks, 1, box)
    lines, read = bandwidth_lines(results["bandwidth"], dry)
    for name in (*alone, *beside):
        lines += speed_lines(name, results[name], read, backend)
    if read is not None:
        lines += growth_lines(results) + int8_lines(results)
    return lines, results


def _speed_task(
    name: str, shape: Shape, names: tuple[str, ...], peers: tuple[str, ...], dry: bool, device: str
) -> Task:
    return Task(name, run_shape, (shape.shrunk() if dry else shape, names, peers, device))


def _notes(dry: bool, found: dict[str, Any], box: Box) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    where = found.get("gpu", found["cpu"])
    if dry:
        return [f"dry run on {where}: shrunken shapes, nothing was timed; {box.spent_s:.0f} s; {versions}"]
    return [
        f"measured on {where} in {box.spent_s:.0f} s; {versions}",
        "us: median of a call; a Llama-3-8B layer (32 query heads, 8 KV heads, dim 128), cold",
        "% read: of the sum over 2 GiB; a copy counts what it reads and what it writes",
    ]


def _say(what: str, box: Box) -> None:
    print(f"[{box.spent_s:5.0f} s] {what}", file=sys.stderr, flush=True)
