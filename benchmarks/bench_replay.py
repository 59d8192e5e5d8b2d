"""Replay speed: requests per second against the number of requests, one core.

Run: ``OMP_NUM_THREADS=1 python -m pytest benchmarks/bench_replay.py``. The method and a table of results are in README.md.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pagedkv.sim.gpus import load_gpu
from pagedkv.sim.hits import replay_hits
from pagedkv.sim.models import load_model
from pagedkv.sim.replay import ReplaySetup, blocks_in_memory, run_replay
from pagedkv.sim.workload import chat_long

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 3
PEAK_MEMORY = """
import resource
from benchmarks.bench_replay import replay
replay({n})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def setup(gpu_name: str = "b200", block_size: int = 16) -> ReplaySetup:
    model, gpu = load_model("llama-3.1-8b", block_size=block_size), load_gpu(gpu_name)
    return ReplaySetup(model, gpu, blocks_in_memory(model, gpu.memory_bytes, 0.9, 16))


def replay(num_requests: int, gpu_name: str = "b200") -> None:
    run_replay(chat_long(num_requests), setup(gpu_name))


@pytest.mark.benchmark(group="replay, blocks of 16, prefix cache, LRU")
@pytest.mark.parametrize("num_requests", [5_000, 10_000, 20_000, 40_000])
def test_replay(benchmark: BenchmarkFixture, num_requests: int) -> None:
    trace, serving = chat_long(num_requests), setup()
    benchmark.pedantic(run_replay, (trace, serving), rounds=ROUNDS, warmup_rounds=0)
    benchmark.extra_info["requests_per_s"] = num_requests / benchmark.stats.stats.median


@pytest.mark.benchmark(group="replay under overload (h100)")
def test_replay_overloaded(benchmark: BenchmarkFixture) -> None:
    trace, serving = chat_long(20_000), setup("h100")
    benchmark.pedantic(run_replay, (trace, serving), rounds=ROUNDS, warmup_rounds=0)
    benchmark.extra_info["requests_per_s"] = len(trace) / benchmark.stats.stats.median


@pytest.mark.benchmark(group="hits only")
@pytest.mark.parametrize("block_size", [16, 512])
def test_hits_only(benchmark: BenchmarkFixture, block_size: int) -> None:
    trace = chat_long(20_000)
    blocks = 5_120_000 // block_size
    benchmark.pedantic(replay_hits, (trace, blocks, block_size), rounds=ROUNDS, warmup_rounds=0)
    benchmark.extra_info["requests_per_s"] = len(trace) / benchmark.stats.stats.median


@pytest.mark.benchmark(group="peak memory")
def test_peak_memory(benchmark: BenchmarkFixture) -> None:
    command = [sys.executable, "-c", PEAK_MEMORY.format(n=20_000)]
    done = benchmark.pedantic(
        subprocess.run, (command,), {"capture_output": True, "text": True, "check": True}, rounds=1
    )
    benchmark.extra_info["peak_mib"] = float(done.stdout)
