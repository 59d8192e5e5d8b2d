"""Replay speed: requests per second against the number of requests, on one core.

Run it with ``OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_replay.py``.
The method and a table of results are in README.md. Times are CPU seconds of this process.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from pagedkv.sim.hits import replay_hits
from pagedkv.sim.replay import ReplaySetup, blocks_in_memory, run_replay
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.workload import chat_long

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
