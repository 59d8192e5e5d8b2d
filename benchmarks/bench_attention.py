"""Decode attention per call, in every backend that runs here and its peers, and what surrounds it.

Run it with ``python -m pytest benchmarks/bench_attention.py``; choose with ``-k``, for example ``-k native``.
Times are wall times, and every contender runs for itself; ``pagedkv bench attention`` measures the same in
interleaved rounds, which is what to quote on a machine that others use too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any

import pytest
import torch

from pagedkv.attention import backends
from pagedkv.attention.bench.cell import ColdSets, even_cell
from pagedkv.attention.bench.contender import Contender
from pagedkv.attention.bench.measure import backend_contender
from pagedkv.attention.bench.peers import BY_REQUEST, PEERS
from pagedkv.attention.bench.read_ceiling import NAME, read_ceiling
from pagedkv.spec import KVCacheSpec
from pagedkv.storage import STORAGE_DTYPES, KVStorage

LLAMA_8B = (32, 8, 128)
COLD_BYTES = 2**29
ROUNDS = 15

BACKENDS = [info.name for info in backends() if info.available and info.name != "reference"]
ON_CPU = [name for name, peer in PEERS.items() if peer.device in (None, "cpu") and name not in BY_REQUEST]
CONTENDERS = [NAME, *BACKENDS, *ON_CPU]


@lru_cache(maxsize=1)  # the name of the contender varies fastest
def sets(batch: int, context: int, dtype: str, cold_bytes: int = COLD_BYTES) -> ColdSets:
    return ColdSets(even_cell(batch, context, dtype, 16, LLAMA_8B), cold_bytes)


def contender(data: ColdSets, name: str) -> Contender:
    """The contender of that name; skips, with the reason, where there is none."""
    if name in BACKENDS:
        return backend_contender(data, name)
    made = read_ceiling(data)[0] if name == NAME else PEERS[name].make(data)
    if isinstance(made, str):
        pytest.skip(made)
    return made


@pytest.mark.benchmark(group="attention, cold")
@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize(("batch", "context"), [(1, 1024), (8, 1024), (1, 8192)])
def test_attention(benchmark: Any, batch: int, context: int, dtype: str, name: str) -> None:
    """One layer; every call reads blocks that no cache holds."""
    benchmark.group = f"attention, cold, {dtype}, {batch} x {context}, Llama-3-8B layer, blocks of 16"
    data = sets(batch, context, dtype)
    timed = contender(data, name)
    order = count()

    def next_set() -> tuple[tuple[int], dict[str, object]]:
        return (next(order) % len(data),), {}

    benchmark.pedantic(timed.call, setup=next_set, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["gb_per_s"] = timed.num_bytes / benchmark.stats.stats.median / 1e9


@pytest.mark.benchmark(group="cost of a call: 1 sequence of 16 tokens, bf16, in cache")
@pytest.mark.parametrize("name", [*BACKENDS, "sdpa", "sdpa-rows", "vllm"])
def test_call(benchmark: Any, name: str) -> None:
    """With 64 KB to read, what is left is the way from Python to the kernel and back."""
    timed = contender(sets(1, 16, "bf16", 1), name)
    benchmark(timed.call, 0)
    benchmark.extra_info["us"] = 1e6 * benchmark.stats.stats.median


@pytest.mark.benchmark(group="KV write, one Llama-3-8B layer, bf16 in")
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 32, 1024])
def test_write(benchmark: Any, num_tokens: int, dtype: str) -> None:
    """``KVStorage.write`` of a step of 1 or 32 sequences, and of a chunk of a prompt."""
    benchmark.group = f"KV write, {num_tokens} tokens, one Llama-3-8B layer, bf16 in"
    write = writer(num_tokens, dtype)
    write()
    benchmark(write)
    benchmark.extra_info["us"] = 1e6 * benchmark.stats.stats.median


def writer(num_tokens: int, dtype: str) -> Callable[[], None]:
    _, num_heads, head_dim = LLAMA_8B
    spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=num_heads, head_dim=head_dim, dtype=dtype)
    storage = KVStorage(spec, 1024)
    generator = torch.Generator().manual_seed(0)
    slots = 16 + torch.randperm(1024 * 16, generator=generator)[:num_tokens]
    shape = (num_tokens, num_heads, head_dim)
    k, v = (torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(2))
    return lambda: storage.write(0, k, v, slots)
