"""Replay speed: requests per second against the number of requests, on one core, and beside other simulators.

Run it with ``OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_replay.py``: times are CPU seconds of this
process. ``python benchmarks/bench_replay.py --peers`` runs other simulators over the same trace file, see
``--help``. The method and tables of results are in README.md.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedkv.sim.console import show_table
from pagedkv.sim.hits import replay_hits
from pagedkv.sim.readers.writing import rows_of, write_trace
from pagedkv.sim.replay import ReplaySetup, blocks_in_memory, run_replay
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.workload import chat_long

if __name__ == "__main__":  # as a script, this folder is what is searched, and not the one above
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.replay_peers import (
    CONTESTANTS,
    DYNAMO_SPEEDUP,
    Contestant,
    Run,
    find_interpreters,
    hit_rate_of_last_half,
    run_once,
)

ROUNDS = 3
PEAK_MEMORY = """
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.replay import ReplaySetup, blocks_in_memory, run_replay
from pagedkv.sim.workload import chat_long
model, gpu = load_model("llama-3.1-8b"), load_gpu("b200")
run_replay(chat_long(20_000), ReplaySetup(model, gpu, blocks_in_memory(model, gpu.memory_bytes, 0.9, 16)))
# Not ru_maxrss, which a child inherits from its parent.
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024)
"""


def serving(gpu_name: str) -> ReplaySetup:
    """Llama-3.1-8B with blocks of 16, prefix cache and LRU, in 90 % of the GPU's memory."""
    model, gpu = load_model("llama-3.1-8b"), load_gpu(gpu_name)
    return ReplaySetup(model, gpu, blocks_in_memory(model, gpu.memory_bytes, 0.9, 16))


def measure(benchmark: Any, num_requests: int, run: Callable[..., object], *args: object) -> None:
    """Time ``run(*args)`` a few times and note requests per second at the median."""
    benchmark.pedantic(run, args, rounds=ROUNDS)
    benchmark.extra_info["requests_per_s"] = num_requests / benchmark.stats.stats.median


@pytest.mark.benchmark(group="replay, blocks of 16, prefix cache, LRU, b200", timer=time.process_time)
@pytest.mark.parametrize("num_requests", [5_000, 10_000, 20_000, 40_000])
def test_replay(benchmark: Any, num_requests: int) -> None:
    measure(benchmark, num_requests, run_replay, chat_long(num_requests), serving("b200"))


@pytest.mark.benchmark(group="replay under overload, h100", timer=time.process_time)
def test_replay_overloaded(benchmark: Any) -> None:
    measure(benchmark, 20_000, run_replay, chat_long(20_000), serving("h100"))


@pytest.mark.benchmark(group="hits only, LRU, a pool of 5,120,000 tokens", timer=time.process_time)
@pytest.mark.parametrize("block_size", [16, 512])
def test_hits_only(benchmark: Any, block_size: int) -> None:
    measure(benchmark, 20_000, replay_hits, chat_long(20_000), 5_120_000 // block_size, block_size)


@pytest.mark.benchmark(group="peak memory of 20,000 requests")
def test_peak_memory(benchmark: Any) -> None:
    command = [sys.executable, "-c", PEAK_MEMORY]
    options = {"capture_output": True, "text": True, "check": True}
    done = benchmark.pedantic(subprocess.run, (command,), options, rounds=1)
    benchmark.extra_info["peak_mib"] = float(done.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for beside each other, print a table, and say why something is missing."""
    parser = argparse.ArgumentParser(
        description="Other simulators beside this one: the same trace file, cache sizes as alike as their "
        "meanings allow, each run a process of its own that reads the file, too.",
        epilog="Install them in environments of their own, and name their interpreters: "
        + "; ".join(dict.fromkeys(c.install for c in CONTESTANTS if c.module != "pagedkv")),
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="PYTHON",
        required=True,
        help="run those that this interpreter or one of these can import",
    )
    parser.add_argument("--requests", type=int, default=20_000, help="of chat-long (default 20,000)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"medians of so many (default {ROUNDS})")
    args = parser.parse_args(argv)
    found, missing = find_interpreters([sys.executable, *args.peers])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chat-long.jsonl")
        trace = chat_long(args.requests)
        write_trace(rows_of(trace), path, format="mooncake", name=trace.name, notes=lambda: ())
        runs = _rounds(found, path, args.rounds)
        half = hit_rate_of_last_half(path, args.requests)
    for group in dict.fromkeys(c.group for c in CONTESTANTS):
        _show(
            group,
            args.requests,
            {c: runs[c.name] for c in CONTESTANTS if c.group == group and c.name in runs},
        )
    for line in (
        f"pagedkv --hits-only over the last half: {half:.3%}. It keeps full blocks alone; kvcache-simulator",
        "keeps the partial last block of each prompt, too, which takes room. With time, what runs at once",
        "shares the pool, so that hit rates differ as times do. Dynamo's own time model runs "
        f"{DYNAMO_SPEEDUP} times as fast, since its queue would grow without end.",
        *missing,
    ):
        print(line)
    return 0


def _rounds(found: dict[str, str], trace: Path, rounds: int) -> dict[str, list[Run]]:
    """Runs of each, one after the other in each round, after one to warm up where something is built."""
    chosen = [c for c in CONTESTANTS if c.name in found]
    for contestant in chosen:
        if contestant.warms_up:
            run_once(contestant, found[contestant.name], trace)
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in chosen}
    for _ in range(rounds):
        for contestant in chosen:
            runs[contestant.name].append(run_once(contestant, found[contestant.name], trace))
    return runs


def _show(group: str, num_requests: int, runs: dict[Contestant, list[Run]]) -> None:
    own_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = []
    for contestant, found in runs.items():
        wall_s, cpu_s, peak_mib, hit_rate = (statistics.median(column) for column in zip(*found, strict=True))
        # a child's peak begins with what its parent had when it was forked
        peak = f"{peak_mib:,.0f}" if peak_mib > 1.01 * own_mib else f"under {own_mib:,.0f}"
        figures = (f"{wall_s:.2f}", f"{cpu_s:.2f}", f"{num_requests / cpu_s:,.0f}", peak)
        rows.append((contestant.name, *figures, f"{hit_rate:.3%}", contestant.rate_of))
    columns = ("whole process", "wall s", "CPU s", "requests/CPU s", "peak MiB", "hit rate", "of requests")
    show_table(f"{num_requests:,} requests, {group}", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
