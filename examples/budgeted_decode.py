"""Decoding in a fixed budget of blocks: what is least attended to goes, and the pool gets it back.

    python examples/budgeted_decode.py

The decoder of ``tiny_llama.py`` decodes behind a long prompt. Whenever its sequence is about to exceed the
budget, one block goes: by a window with attention sinks (StreamingLLM), by the attention that each block got
over its life (H2O), or, for comparison, at random. Its logits are compared with those of the whole context,
fed with the same tokens.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING or __package__:
    from examples.tiny_llama import TinyLlama, decode_contiguous, prefill, random_tokens
else:  # run as a script
    from tiny_llama import TinyLlama, decode_contiguous, prefill, random_tokens

from pagedkv import PagedKVCache
from pagedkv.attention import paged_attention
from pagedkv.block_tables import Int64Array
from pagedkv.token_eviction import BlockMass, lightest_blocks, outside_window

# choose(mass, num_blocks): the block table columns to drop
Choose = Callable[[BlockMass, int], Int64Array]


class Budgeted(NamedTuple):
    """Logits [num_tokens, vocab] of a decode, and the most blocks that it held from the first step on."""

    logits: Tensor
    most_blocks: int


def decode_step(
    model: TinyLlama, cache: PagedKVCache, seq_id: Hashable, token: int, mass: BlockMass
) -> Tensor:
    """Run one more token; adds up which blocks it attended to. Returns logits [vocab]."""
    grown = cache.step([seq_id])
    assert grown, "the cache is full"
    batch = cache.batch([seq_id])
    got = torch.zeros(batch.block_tables.shape[1])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, k, v, batch.slot_mapping)
        kv = cache.storage.layer(layer)
        shares = torch.empty(1, q.shape[1], batch.block_tables.shape[1])
        out = paged_attention(q, kv.k, kv.v, batch.block_tables, batch.seq_lens, block_mass=shares)
        got.add_(shares[0].sum(0))
        return out

    logits = model.forward([token], batch.positions, attend)  # true positions, whatever was dropped
    mass.add(got.numpy())
    cache.commit_step([seq_id], [token])
    return logits[0]


def decode_in_budget(
    model: TinyLlama,
    cache: PagedKVCache,
    seq_id: Hashable,
    prompt: Sequence[int],
    follow: Sequence[int],
    choose: Choose,
) -> Budgeted:
    """Decode along ``follow`` behind a prompt, and drop what ``choose`` says after every step."""
    first = prefill(model, cache, seq_id, prompt)
    assert first is not None, "the cache is full"
    logits, mass, most = [first[-1]], BlockMass(), 0
    for token in follow[:-1]:
        logits.append(decode_step(model, cache, seq_id, token, mass))
        num_blocks = len(cache.manager.tables.block_ids(seq_id))
        if cache.manager.tables.num_tokens(seq_id) % cache.manager.block_size == 0:
            columns = choose(mass, num_blocks + 1)  # the next token takes a block more
            cache.manager.context.drop_blocks(seq_id, columns)
            mass.drop(columns)
        most = max(most, len(cache.manager.tables.block_ids(seq_id)))
    return Budgeted(torch.stack(logits), most)


def window(budget: int) -> Choose:
    return lambda mass, num_blocks: outside_window(num_blocks, budget)


def heavy_hitters(budget: int, recent: int = 2) -> Choose:
    def choose(mass: BlockMass, num_blocks: int) -> Int64Array:
        total = np.append(mass.total, np.zeros(num_blocks - len(mass.total)))  # the block to come is recent
        return lightest_blocks(total, budget, recent=recent)

    return choose


def at_random(budget: int, recent: int = 2, seed: int = 0) -> Choose:
    rng = np.random.default_rng(seed)
    return lambda mass, num_blocks: lightest_blocks(rng.random(num_blocks), budget, recent=recent)


def main() -> None:
    torch.set_num_threads(1)
    model, num_tokens, block_size = TinyLlama(), 200, 8
    prompt = random_tokens(model, 400, seed=1)
    truth = decode_contiguous(model, prompt, num_tokens)
    whole = -(-(len(prompt) + num_tokens - 1) // block_size)
    print(
        f"{num_tokens} tokens after a prompt of {len(prompt)}, {whole} blocks of {block_size} if all stay\n"
    )
    print(f"{'kept':<24}{'blocks':>8}{'rms logit diff':>16}{'same top token':>16}")
    spread = truth.logits.std()
    for budget in (whole, 48, 32, 16):
        for name, choose in (
            ("sinks and newest", window(budget)),
            ("most attended to", heavy_hitters(budget)),
            ("at random", at_random(budget)),
        ):
            cache = PagedKVCache(model.config.cache_spec(block_size=block_size), num_blocks=whole + 1)
            got = decode_in_budget(model, cache, "a", prompt, truth.tokens, choose)
            error = (got.logits - truth.logits).square().mean().sqrt() / spread
            same = int((got.logits.argmax(-1) == truth.logits.argmax(-1)).sum())
            held = len(cache.manager.tables.block_ids("a"))
            print(f"{name:<24}{held:>8}{error:>16.1e}{same:>12}/{num_tokens}")
    print("\nrms over all logits, as a share of their standard deviation; the model has random weights")


if __name__ == "__main__":
    main()
