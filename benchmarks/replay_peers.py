"""Other simulators and this one over the same trace file, each run a process of its own.

A peer is asked only for what its command line or its documented call offers; nothing of it is imported here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_OF_TRACE = 512
GIB_OF_HITS = 64
BLOCKS_OF_HITS = GIB_OF_HITS * 2**30 // (BLOCK_OF_TRACE * 131_072)
"""Blocks of 512 tokens in 64 GiB: a token of Llama-3.1-8B in bf16 has 131,072 bytes."""
BLOCK_OF_REPLAY, BLOCKS_OF_REPLAY = 16, 75_285
"""What a B200 has beside the weights of that model, at 90 % of its memory."""

HITS = "hits only, 1,024 blocks of 512 tokens, LRU"
REPLAY = "with time and decode, 75,285 blocks of 16 tokens, LRU"

DYNAMO = """
import json, sys
from dynamo._core import run_mocker_trace_replay
engine = {"block_size": BLOCK, "num_gpu_blocks": BLOCKS, "max_num_batched_tokens": 2048, "max_num_seqs": 256,
          "speedup_ratio": float(sys.argv[2])}
found = run_mocker_trace_replay([sys.argv[1]], {"engine": engine}, trace_block_size=TRACE_BLOCK)
print(json.dumps(found.summary))
""".replace("BLOCKS", str(BLOCKS_OF_REPLAY)).replace("TRACE_BLOCK", str(BLOCK_OF_TRACE))
DYNAMO = DYNAMO.replace("BLOCK", str(BLOCK_OF_REPLAY))
DYNAMO_SPEEDUP = 4
"""On its own time model, with which the queue of this trace would grow without end."""


class Contestant(NamedTuple):
    """One way to run a simulator over a trace file."""

    name: str
    group: str
    """Contestants of one group do comparable work."""
    module: str
    """What an interpreter that has it can import."""
    install: str
    argv: Callable[[str, Path], Sequence[str]]
    """The command, from the interpreter and the trace."""
    hit_rate: Callable[[str], float]
    """Token hit rate from what the command printed."""
    rate_of: str
    """Which requests the hit rate is of."""
    warms_up: bool = False
    """Whether something is built by the first run."""


class Run(NamedTuple):
    """One finished run of a contestant: the whole process, reading the trace included."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    hit_rate: float


def _hits_only(python: str, trace: Path) -> Sequence[str]:
    blocks = ("--block-size", str(BLOCK_OF_TRACE), "--num-blocks", str(BLOCKS_OF_HITS))
    return (python, "-m", "pagedkv", "replay", str(trace), "--hits-only", *blocks, "--json", "-")


def _replay(python: str, trace: Path) -> Sequence[str]:
    blocks = ("--block-size", str(BLOCK_OF_REPLAY), "--num-blocks", str(BLOCKS_OF_REPLAY), "--gpu", "b200")
    return (python, "-m", "pagedkv", "replay", str(trace), *blocks, "--json", "-")


def _kvcache_simulator(backend: str) -> Callable[[str, Path], Sequence[str]]:
    def argv(python: str, trace: Path) -> Sequence[str]:
        cache = ("--model", "llama-3.1-8b", "--budgets-gib", str(GIB_OF_HITS), "--policies", "lru")
        how = ("--backend", backend, "--jobs", "1", "--no-progress", "--format", "json")
        main = "import sys; from kvcache_sim.cli import main; sys.exit(main())"
        return (python, "-c", main, "run", "--trace", str(trace), "--block-size", "512", *cache, *how)

    return argv


def _dynamo(python: str, trace: Path) -> Sequence[str]:
    return (python, "-c", DYNAMO, str(trace), str(DYNAMO_SPEEDUP))


def _last_half(text: str) -> float:
    (point,) = json.loads(text)["points"]
    return float(point["results"]["lru"]["hitRate"])


CONTESTANTS = (
    Contestant(
        "pagedkv --hits-only",
        HITS,
        "pagedkv",
        "pip install .",
        _hits_only,
        lambda text: float(json.loads(text)["token_hit_rate"]),
        "all",
    ),
    *(
        Contestant(
            f"kvcache-simulator, {backend}",
            HITS,
            "kvcache_sim",
            "pip install kvcache-simulator==0.1.3",
            _kvcache_simulator(backend),
            _last_half,
            "last half",
            warms_up=backend == "cpp",
        )
        for backend in ("cpp", "python")
    ),
    Contestant(
        "pagedkv replay",
        REPLAY,
        "pagedkv",
        "pip install .",
        _replay,
        lambda text: float(json.loads(text)["cache"]["token_hit_rate"]),
        "all",
    ),
    Contestant(
        "Dynamo mocker",
        REPLAY,
        "dynamo._core",
        "pip install ai-dynamo-runtime==1.6.1",
        _dynamo,
        lambda text: float(json.loads(text)["first_admission_prefix_cache_reused_ratio"]),
        "all",
    ),
)


def find_interpreters(pythons: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """An interpreter for each contestant that one of ``pythons`` can import, and why there are no others."""
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    for contestant in CONTESTANTS:
        tried = {python: _import_error(python, contestant.module) for python in pythons}
        usable = [python for python, error in tried.items() if error is None]
        if usable:
            found[contestant.name] = usable[0]
        else:
            reasons = "; ".join(f"{python}: {error}" for python, error in tried.items())
            missing[contestant.module] = (
                f"no {contestant.name.partition(',')[0]} ({contestant.install}): {reasons}"
            )
    return found, list(missing.values())


def _import_error(python: str, module: str) -> str | None:
    if shutil.which(python) is None:
        return "no such interpreter"
    done = subprocess.run(
        [python, "-c", f"import {module}"], capture_output=True, text=True, env=_environment()
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed"])[-1]


def run_once(contestant: Contestant, python: str, trace: Path) -> Run:
    """Run it and wait; raises ``RuntimeError`` with its last line of errors if it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        process = subprocess.Popen(contestant.argv(python, trace), stdout=out, stderr=err, env=_environment())
        _, status, usage = os.wait4(process.pid, 0)  # the usage of this child alone
        wall_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        if process.returncode:
            lines = err.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"{contestant.name} failed: {(lines or ['no message'])[-1]}")
        rate = contestant.hit_rate(out.read().decode())
    return Run(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, rate)


def hit_rate_of_last_half(trace: Path, num_requests: int) -> float:
    """Our token hit rate over the requests that kvcache-simulator measures: those of two runs, subtracted."""
    counts = []
    for limit in (num_requests // 2, num_requests):
        argv = (*_hits_only(sys.executable, trace), "--limit", str(limit))
        done = subprocess.run(argv, capture_output=True, text=True, check=True, env=_environment())
        document: Mapping[str, Any] = json.loads(done.stdout)
        counts.append((document["hit_tokens"], document["input_tokens"]))
    (hits, tokens), (all_hits, all_tokens) = counts
    return float((all_hits - hits) / (all_tokens - tokens))


def _environment() -> dict[str, str]:
    """One thread per library, and this checkout's package for our own runs."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
