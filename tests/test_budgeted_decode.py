"""A whole decoder that drops blocks of its context: it attends to what is kept, at true positions.

The model is ``examples/budgeted_decode.py`` on ``examples/tiny_llama.py``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedkv import KVCacheSpec, PagedKVCache
from pagedkv.attention import backends, paged_attention
from pagedkv.block_tables import Int64Array
from pagedkv.token_eviction import BlockMass, lightest_blocks, outside_window

EXAMPLES = Path(__file__).parent.parent / "examples"
if not (EXAMPLES / "budgeted_decode.py").is_file():
    pytest.skip(f"needs the folder examples/ beside tests/: no {EXAMPLES}", allow_module_level=True)
if TYPE_CHECKING:
    from examples import budgeted_decode, tiny_llama
else:
    sys.path.insert(0, str(EXAMPLES.parent))
    tiny_llama = importlib.import_module("examples.tiny_llama")
    budgeted_decode = importlib.import_module("examples.budgeted_decode")
    sys.path.pop(0)

SIZE = 8
every_backend = pytest.mark.parametrize(
    "backend", [info.name for info in backends() if info.available and info.name != "triton"]
)


def filled(num_tokens: int) -> tuple[PagedKVCache, Tensor, Tensor]:
    """A cache with one sequence "a" of random keys and values [num_tokens, 2, 16]."""
    spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=2, head_dim=16, dtype="fp32", block_size=SIZE)
    cache = PagedKVCache(spec, num_blocks=64)
    k, v = torch.randn(2, num_tokens, 2, 16, generator=torch.Generator().manual_seed(3))
    cache.open("a", range(num_tokens))
    cache.write(0, k, v, cache.slots("a"))
    cache.commit("a", range(num_tokens))
    return cache, k, v


@every_backend
@pytest.mark.parametrize("columns", [[0], [1, 2, 3], [0, 4, 7, 11], list(range(12))])
def test_attention_reads_what_is_kept_and_nothing_else(backend: str, columns: list[int]) -> None:
    """Against softmax over the kept tokens by hand, in fp64: 101 tokens, then 7 more behind the drop."""
    cache, k, v = filled(101)
    cache.manager.context.drop_blocks("a", columns)
    cache.step(["a"], 7)
    more = torch.randn(2, 7, 2, 16, generator=torch.Generator().manual_seed(4))
    cache.write(0, more[0], more[1], cache.slots("a"))
    kept = [p for p in range(101) if p // SIZE not in columns]
    k, v = torch.cat([k[kept], more[0]]).double(), torch.cat([v[kept], more[1]]).double()
    q = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(5))
    batch, kv = cache.batch(["a"]), cache.storage.layer(0)
    assert (batch.seq_lens.item(), batch.positions.item()) == (len(kept) + 7, 107)
    out = paged_attention(q, kv.k, kv.v, batch.block_tables, batch.seq_lens, backend=backend)
    for head in range(4):
        weights = torch.softmax(k[:, head // 2] @ q[0, head].double() / 4, dim=0)
        torch.testing.assert_close(out[0, head].double(), weights @ v[:, head // 2], rtol=1e-5, atol=1e-5)


class Forgetful(tiny_llama.ContiguousCache):
    """A contiguous cache out of which tokens are deleted; the next ones keep counting."""

    def __init__(self, model: tiny_llama.TinyLlama):
        super().__init__(model)
        self.num_tokens = 0

    def forward(self, tokens: Sequence[int]) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            old_k, old_v = self.kv[layer]
            self.kv[layer] = (torch.cat([old_k, k]), torch.cat([old_v, v]))
            return tiny_llama.causal_attention(q, *self.kv[layer])

        start, self.num_tokens = self.num_tokens, self.num_tokens + len(tokens)
        return self.model.forward(tokens, torch.arange(start, self.num_tokens), attend)

    def forget(self, columns: Int64Array) -> None:
        kept = [i for i in range(len(self.kv[0][0])) if i // SIZE not in columns]
        self.kv = [(k[kept], v[kept]) for k, v in self.kv]


@pytest.mark.parametrize("kind", ["window", "heavy_hitters", "at_random"])
def test_a_budgeted_decode_is_a_decode_over_the_kept_tokens(kind: str) -> None:
    """Logits (standard deviation 1) of 90 tokens, against a cache that deletes the same ones: 1e-4 apart."""
    model = tiny_llama.TinyLlama()
    prompt = tiny_llama.random_tokens(model, 100, seed=1)
    follow = tiny_llama.random_tokens(model, 90, seed=2)
    cache = PagedKVCache(model.config.cache_spec(block_size=SIZE), num_blocks=20)
    choose = getattr(budgeted_decode, kind)(9)
    forgotten: list[Int64Array] = []

    def recorded(mass: BlockMass, num_blocks: int) -> Int64Array:
        forgotten.append(choose(mass, num_blocks))
        return forgotten[-1]

    got = budgeted_decode.decode_in_budget(model, cache, "a", prompt, follow, recorded)
    contiguous = Forgetful(model)
    logits, drops = [contiguous.forward(prompt)[-1]], iter(forgotten)
    for token in follow[:-1]:
        logits.append(contiguous.forward([token])[-1])
        if len(contiguous.kv[0][0]) % SIZE == 0:
            contiguous.forget(next(drops))
    torch.testing.assert_close(got.logits, torch.stack(logits), rtol=0, atol=1e-4)
    assert sum(map(len, forgotten)) == cache.manager.tables.num_dropped("a") > 10
    assert cache.manager.tables.positions(["a"]).tolist() == [188]
    assert (len(cache.manager.tables.block_ids("a")), cache.manager.counts.active) == (9, 9)
    cache.manager.check_invariants()


def test_a_budget_of_the_whole_context_changes_nothing() -> None:
    """And a smaller one does: the difference is that of the tokens that are gone."""
    model = tiny_llama.TinyLlama()
    prompt = tiny_llama.random_tokens(model, 60, seed=1)
    truth = tiny_llama.decode_contiguous(model, prompt, 40)
    errors = []
    for budget in (13, 9, 5):
        cache = PagedKVCache(model.config.cache_spec(block_size=SIZE), num_blocks=20)
        got = budgeted_decode.decode_in_budget(
            model, cache, "a", prompt, truth.tokens, budgeted_decode.heavy_hitters(budget)
        )
        errors.append(float((got.logits - truth.logits).square().mean().sqrt()))
    assert errors[0] < 1e-5 < 0.05 < errors[1] < errors[2], errors


def test_the_blocks_that_get_the_least_attention_change_it_the_least() -> None:
    """One query, six of twelve blocks dropped: the output moves at most by the share of mass that is gone."""
    cache, _, v = filled(97)
    batch, kv = cache.batch(["a"]), cache.storage.layer(0)
    q = 3 * torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(6))
    shares = torch.empty(1, 2, batch.block_tables.shape[1])
    whole = paged_attention(q, kv.k, kv.v, batch.block_tables, batch.seq_lens, block_mass=shares)
    mass = shares[0].sum(0).numpy()
    errors = {}
    for name, columns in (
        ("lightest", lightest_blocks(mass, 7)),
        ("window", outside_window(13, 7)),
        ("heaviest", lightest_blocks(-mass, 7)),
    ):
        assert cache.fork("a", name)
        cache.manager.context.drop_blocks(name, columns)
        some = cache.batch([name])
        out = paged_attention(q, kv.k, kv.v, some.block_tables, some.seq_lens)
        lost = shares[0, :, columns].sum(1)
        spread = v.norm(dim=2).max() * 2
        assert bool(((out - whole)[0].norm(dim=1) <= lost * spread).all())
        errors[name] = float((out - whole).norm())
    assert errors["lightest"] < errors["window"] < errors["heaviest"], errors
    assert np.isclose(mass.sum(), 2, atol=1e-5)
