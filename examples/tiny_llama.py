"""A tiny Llama-like decoder with random weights, run three ways: what an engine has to do to use pagedkv.

    python examples/tiny_llama.py

The model is written once. The three ways differ only in the ``attend`` function they hand to it::

    full_forward            no cache: every token of the sequence is run again
    ContiguousCache         one growing tensor per layer, one sequence
    prefill, decode_step    PagedKVCache: blocks, shared prefixes, forks, a batch of any lengths
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pagedkv import KVCacheSpec, PagedKVCache
from pagedkv.attention import paged_attention

# -- the model

# attend(layer, q [n, num_q_heads, head_dim], k and v [n, num_kv_heads, head_dim]) -> the shape of q.
# The n tokens are a chunk of one sequence, or the newest token of n sequences: the model cannot tell.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    num_layers: int = 3
    hidden: int = 64
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    mlp_dim: int = 128
    vocab: int = 101
    rope_base: float = 10_000.0

    def cache_spec(self, dtype: str = "fp32", block_size: int = 16) -> KVCacheSpec:
        return KVCacheSpec.uniform(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            block_size=block_size,
        )


class Layer(NamedTuple):
    attention_norm: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    mlp_norm: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor


class TinyLlama:
    """RMSNorm, RoPE, grouped-query attention, SwiGLU, an untied head. Weights follow from the seed."""

    def __init__(self, config: Config | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float32):
        self.config = c = config if config is not None else Config()
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator).div(rows**0.5).to(dtype)

        def norm() -> Tensor:
            return torch.randn(c.hidden, generator=generator).mul(0.1).add(1).to(dtype)

        q_dim, kv_dim = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.embedding = matrix(c.vocab, c.hidden) * c.vocab**0.5
        self.layers = [
            Layer(
                norm(),
                # sharp attention (logits of a few units): what a token sees decides what comes out
                matrix(c.hidden, q_dim) * 2,
                matrix(c.hidden, kv_dim),
                matrix(c.hidden, kv_dim),
                matrix(q_dim, c.hidden),
                norm(),
                matrix(c.hidden, c.mlp_dim),
                matrix(c.hidden, c.mlp_dim),
                matrix(c.mlp_dim, c.hidden),
            )
            for _ in range(c.num_layers)
        ]
        self.norm, self.head = norm(), matrix(c.hidden, c.vocab)

    def forward(self, tokens: Sequence[int], positions: Tensor, attend: Attend) -> Tensor:
        """Logits [n, vocab] of ``tokens`` at ``positions`` (int64 [n])."""
        head_dim = self.config.head_dim
        x = self.embedding[torch.tensor(tokens)]
        for index, layer in enumerate(self.layers):
            h = rms_norm(x, layer.attention_norm)
            q, k, v = ((h @ w).view(len(h), -1, head_dim) for w in (layer.wq, layer.wk, layer.wv))
            q, k = rope(q, positions, self.config.rope_base), rope(k, positions, self.config.rope_base)
            x = x + attend(index, q, k, v).flatten(1) @ layer.wo
            h = rms_norm(x, layer.mlp_norm)
            x = x + (functional.silu(h @ layer.w_gate) * (h @ layer.w_up)) @ layer.w_down
        return rms_norm(x, self.norm) @ self.head


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate the halves of every head of ``x`` [n, num_heads, head_dim] by its token's position."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions[:, None, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last n of m tokens to those before them: q [n, ...], k and v [m, ...]."""
    n, m, group_size = len(q), len(k), q.shape[1] // k.shape[1]
    visible = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    k, v = (x.repeat_interleave(group_size, dim=1).transpose(0, 1) for x in (k, v))
    out = functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=visible)
    return out.transpose(0, 1)


# -- (a) no cache


def full_forward(model: TinyLlama, tokens: Sequence[int]) -> Tensor:
    """Logits [n, vocab] of a whole sequence, from scratch."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v)

    return model.forward(tokens, torch.arange(len(tokens)), attend)


# -- (b) a contiguous cache of one sequence


class ContiguousCache:
    """Keys and values of one sequence, copied whole every time it grows."""

    def __init__(self, model: TinyLlama):
        c = model.config
        empty = model.embedding.new_empty(0, c.num_kv_heads, c.head_dim)
        self.model = model
        self.kv = [(empty, empty)] * c.num_layers

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Logits [n, vocab] of the next n tokens."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            old_k, old_v = self.kv[layer]
            self.kv[layer] = (torch.cat([old_k, k]), torch.cat([old_v, v]))
            return causal_attention(q, *self.kv[layer])

        start = len(self.kv[0][0])
        return self.model.forward(tokens, torch.arange(start, start + len(tokens)), attend)


# -- (c) the paged cache


def prefill(
    model: TinyLlama, cache: PagedKVCache, seq_id: Hashable, prompt: Sequence[int], chunk_size: int = 512
) -> Tensor | None:
    """Open a sequence and run the part of its prompt that is not cached, in chunks.

    Returns the logits [n, vocab] of that part (the last row says what follows the prompt), or None if
    the prompt does not fit now: try again when another sequence has been closed.
    """
    opened = cache.open(seq_id, prompt)
    if opened is None:
        return None
    logits = []
    for start in range(opened.num_cached_tokens, len(prompt), chunk_size):
        chunk = prompt[start : start + chunk_size]
        logits.append(run_chunk(model, cache, seq_id, chunk, start))
        cache.commit(seq_id, chunk)
    return torch.cat(logits)


def run_chunk(
    model: TinyLlama, cache: PagedKVCache, seq_id: Hashable, tokens: Sequence[int], start: int
) -> Tensor:
    """Run and write the tokens at position ``start`` and on; each token sees all that come before it.

    The prefill of a prompt, and also the check of drafts: ``append`` them, run them, ``truncate`` what is
    rejected, ``commit`` what is accepted.
    """
    stop = start + len(tokens)
    slots = cache.slots(seq_id, start, stop)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, k, v, slots)
        stored = cache.storage.gather(layer, cache.manager.tables.block_ids(seq_id), stop)
        return causal_attention(q, stored.k.to(q.dtype), stored.v.to(q.dtype))

    return model.forward(tokens, torch.arange(start, stop), attend)


def decode_step(
    model: TinyLlama, cache: PagedKVCache, seq_ids: Sequence[Hashable], tokens: Sequence[int]
) -> Tensor | None:
    """Run one more token of each sequence, in one batch.

    Returns logits [num_seqs, vocab], or None if there is no room for all of them now; nothing has
    happened then, and the engine closes or preempts a sequence and calls again.
    """
    if not cache.step(seq_ids):
        return None
    batch = cache.batch(seq_ids)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, k, v, batch.slot_mapping)
        kv = cache.storage.layer(layer)
        return paged_attention(
            q,
            kv.k,
            kv.v,
            batch.block_tables,
            batch.seq_lens,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            window=kv.window,
        )

    logits = model.forward(tokens, batch.positions, attend)
    cache.commit_step(seq_ids, tokens)
    return logits


# -- decoding with any of the three


class Decoded(NamedTuple):
    """The tokens that followed the prompt, and the logits [len(tokens), vocab] each was chosen from."""

    tokens: list[int]
    logits: Tensor


def decode(
    first: Tensor, step: Callable[[int], Tensor], num_tokens: int, follow: Sequence[int] | None = None
) -> Decoded:
    """Decode greedily, or along ``follow``, from the logits [vocab] that the prompt ended with.

    ``step(token)`` runs one token and returns the logits [vocab] of what follows it.
    """
    tokens, logits = [], [first]
    for i in range(num_tokens):
        tokens.append(int(logits[-1].argmax()) if follow is None else follow[i])
        if i + 1 < num_tokens:
            logits.append(step(tokens[-1]))
    return Decoded(tokens, torch.stack(logits))


def decode_from_scratch(model: TinyLlama, prompt: Sequence[int], num_tokens: int) -> Decoded:
    sequence = list(prompt)

    def step(token: int) -> Tensor:
        sequence.append(token)
        return full_forward(model, sequence)[-1]

    return decode(full_forward(model, sequence)[-1], step, num_tokens)


def decode_contiguous(model: TinyLlama, prompt: Sequence[int], num_tokens: int) -> Decoded:
    cache = ContiguousCache(model)
    return decode(cache.forward(prompt)[-1], lambda token: cache.forward([token])[-1], num_tokens)


def decode_paged(
    model: TinyLlama,
    cache: PagedKVCache,
    seq_id: Hashable,
    prompt: Sequence[int],
    num_tokens: int,
    follow: Sequence[int] | None = None,
) -> Decoded:
    """Open ``seq_id``, decode, and leave it open. The cache must have room for all of it."""

    def step(token: int) -> Tensor:
        logits = decode_step(model, cache, [seq_id], [token])
        assert logits is not None, "the cache is full"
        return logits[0]

    logits = prefill(model, cache, seq_id, prompt)
    assert logits is not None, "the cache is full"
    return decode(logits[-1], step, num_tokens, follow)


def random_tokens(model: TinyLlama, num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(model.config.vocab, (num_tokens,), generator=generator).tolist()
    return tokens


def main() -> None:
    torch.set_num_threads(1)  # for tensors this small more threads only wait for each other
    model, num_tokens = TinyLlama(), 200
    prompt = random_tokens(model, 50, seed=1)
    truth = decode_from_scratch(model, prompt, num_tokens)
    print(f"{num_tokens} tokens after a prompt of {len(prompt)}, compared with recomputing everything\n")
    print(f"{'':<28}{'max |logit diff|':>17}{'same top token':>16}{'bytes/token':>13}")

    def report(name: str, got: Decoded, spec: KVCacheSpec) -> None:
        error = (got.logits - truth.logits).abs().max()
        same = int((got.logits.argmax(-1) == truth.logits.argmax(-1)).sum())
        print(f"{name:<28}{error:>17.1e}{same:>12}/{num_tokens}{spec.bytes_per_token:>13}")

    report("contiguous, greedy", decode_contiguous(model, prompt, num_tokens), model.config.cache_spec())
    caches = {}
    for dtype in ("fp32", "bf16", "int8"):
        spec = model.config.cache_spec(dtype)
        caches[dtype] = cache = PagedKVCache(spec, num_blocks=32)
        # what is rounded is made to follow the exact tokens, or the two would soon talk about other things
        follow = None if dtype == "fp32" else truth.tokens
        got = decode_paged(model, cache, "a", prompt, num_tokens, follow)
        report(f"paged {dtype}, " + ("greedy" if follow is None else "same tokens fed"), got, spec)

    # A second question about the same 48 tokens: its prefill runs what is new, and shares the rest.
    cache = caches["fp32"]
    question = [*prompt[:48], *random_tokens(model, 12, seed=2)]
    logits = prefill(model, cache, "b", question)
    assert logits is not None
    error = (logits[-1] - full_forward(model, question)[-1]).abs().max()
    stats = cache.manager.stats()
    size = stats.bytes(cache.storage.spec)
    print(f"\na second prompt of {len(question)} tokens ran {len(logits)} of them, logit diff {error:.1e}")
    print(
        f"fp32 cache: {stats.num_seqs} sequences, {stats.active_blocks} blocks active, "
        f"{stats.cached_blocks} cached, {stats.free_blocks} free\n"
        f"bytes: {size.reserved} reserved, {size.active} active, {size.used} used\n"
        f"hit rate: {stats.token_hit_rate:.0%} of prompt tokens, {stats.block_hit_rate:.0%} of full blocks"
    )


if __name__ == "__main__":
    main()
