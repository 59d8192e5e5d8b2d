"""Attention of the newest tokens of each sequence over its paged context: what a user calls."""

import torch
from torch import Tensor

from pagedkv.attention.arguments import checked_window
from pagedkv.attention.cpu_backend import attend_at_once
from pagedkv.attention.op import NATIVE, is_watched, paged_attention_op
from pagedkv.errors import PagedKVError


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    block_mass: Tensor | None = None,
    plan: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of the newest tokens of each sequence over its cached context, read through block tables.

    ::

        seq_len = 6, block_size = 4, table row [7, 2, ?, ?]     token 5 is the token of this step
        positions   0 1 2 3 | 4 5 . . | ? ...                    '.' and '?' may hold anything, NaN included
        block             7 |       2 |

        q_len = 3 (verification of speculated tokens): query token i stands at seq_len - 3 + i
        query 0     x x x x |                                    and sees up to itself
        query 1     x x x x | x
        query 2     x x x x | x x

    Per query head h, with KV head ``h // (num_q_heads // num_kv_heads)`` and the positions j it sees::

        s[j] = scale * (q . k[j])                    then, if softcap:  s[j] = softcap * tanh(s[j] / softcap)
        lse  = log(sum_j exp(s[j]) + exp(sink))      exp(sink) only with sinks
        out  = sum_j exp(s[j] - lse) * v[j]

    in this order: the scale, the softcap, the mask, the softmax. With one query token there is no causal
    mask: it is the last of its sequence and sees all of it. A query that sees nothing (an empty sequence)
    gives ``out = 0`` and ``lse = -inf`` (``sink`` with sinks).

    Args:
        q: [num_seqs, num_q_heads, head_dim], or [num_seqs, q_len, num_q_heads, head_dim] with 1 to 8 query
            tokens per sequence; fp64, fp32, bf16 or fp16.
        k: [num_blocks, num_kv_heads, block_size, head_dim], a float dtype or int8; any strides, so that NHD
            storage is passed as a permuted view.
        v: [num_blocks, num_kv_heads, block_size, v_head_dim] in the dtype of ``k``; a view of it for MLA.
        block_tables: [num_seqs, max_blocks] int32, ids of rows of ``k``; entries beyond the sequence, and
            those wholly before its window, are ignored.
        seq_lens: [num_seqs] int32, KV entries of each sequence including the tokens of this step, 0 and more.
        scale: factor of the logits, ``1 / sqrt(head_dim)`` by default.
        k_scale, v_scale: [num_blocks, num_kv_heads, block_size] fp32, for int8 and only then; not negative.
        window: see only the last ``window`` positions, that of the query token among them; for a layer of a
            storage this is ``kv.window``. None: see all.
        sinks: [num_q_heads], a learned logit per head that takes weight but has no value (as in gpt-oss);
            neither ``scale`` nor ``softcap`` applies to it.
        softcap: bound of the logits (as in Gemma 2).
        out: like ``q`` but v_head_dim wide, in the dtype of ``q``; filled and returned if given.
        lse: like ``q`` without head_dim, fp32, filled in place with the natural logarithm if given.
        block_mass: like ``lse`` with max_blocks as a last dimension, fp32, filled in place if given with the
            share of the attention that each block of the table row takes, ``sum_j exp(s[j] - lse)`` over its
            positions: what an eviction of blocks by attention needs. Sums to 1 over a row without sinks.
        plan: the division of work of ``plan_splits`` for as many sequences, made once per step for all layers
            of one window. Only the triton backend splits by it, and makes its own per call without one.
        backend: a name from ``backends()``, or "auto" for the fastest that serves the call.

    Returns:
        The output, ``out`` if given. No gradient flows through it.

    Raises:
        PagedKVError: a shape, dtype, device, option or length that does not fit, an unknown backend, one
            that is not available here, or one that does not do what the call asks for.
        BlockError: an entry of ``block_tables`` that would be read is no row of ``k``.
        On an accelerator the contents of ``block_tables``, ``seq_lens`` and ``plan`` are checked only with
        PAGEDKV_DEBUG=1 in the environment, since looking makes the host wait.

    Cost: reads ``min(seq_len, window)`` keys and values per sequence and KV head, rounded up to blocks.

    >>> import torch
    >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).view(3, 1, 1, 2)   # three blocks of one token
    >>> v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]).view(3, 1, 1, 2)
    >>> q = torch.tensor([[[2.0, 2.0]]])
    >>> table, lens = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> [round(x, 4) for x in paged_attention(q, k, v, table, lens).flatten().tolist()]
    [1.5093, 1.5093]
    >>> mass = torch.empty(1, 1, 3)
    >>> _ = paged_attention(q, k, v, table, lens, block_mass=mass)
    >>> [round(x, 4) for x in mass.flatten().tolist()]
    [0.1636, 0.1636, 0.6728]
    """
    if out is None:
        out = _output_like(q, v)
    watched = is_watched()
    # past the dispatcher (2 us, 10 and more with a cold cache) where nobody watches it
    if (
        not watched
        and plan is None
        and backend in NATIVE
        and attend_at_once(
            q, k, v, block_tables, seq_lens, scale, k_scale, v_scale, window, sinks, softcap, out, lse,
            block_mass,
        )
    ):  # fmt: skip
        return out
    _require_tensors(q=q, k=k, v=v, block_tables=block_tables, seq_lens=seq_lens)
    if not watched:
        _refuse_negated(q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale, sinks=sinks, out=out, lse=lse)
    if scale is None:
        # a missing or empty head_dim is refused below, with the shapes in the message
        scale = max(1, q.shape[-1:].numel()) ** -0.5
    if window is not None:
        window = checked_window(window)
    paged_attention_op(
        q, k, v, block_tables, seq_lens, scale, k_scale, v_scale, window, sinks, softcap, out, lse,
        block_mass, plan, backend,
    )  # fmt: skip
    return out


def _output_like(q: Tensor, v: Tensor) -> Tensor:
    _require_tensors(q=q, v=v)
    if q.dim() and v.dim() == 4 and q.size(-1) == v.size(3) and q.is_contiguous():
        return torch.empty_like(q)  # with a cold cache 7 us less than the way below
    return q.new_empty(q.shape[:-1] + v.shape[3:])


def _require_tensors(**given: object) -> None:
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise PagedKVError(f"{name} must be a tensor, got {type(x).__name__}")


def _refuse_negated(**given: Tensor | None) -> None:
    """Memory holds other numbers there than torch shows; its dispatcher says only "Expected Tensor"."""
    for name, x in given.items():
        if isinstance(x, Tensor) and x.is_neg():
            raise PagedKVError(f"{name} is a negated view: pass {name}.resolve_neg()")


def paged_mla_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    latent_rank: int,
    scale: float,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    block_mass: Tensor | None = None,
    plan: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention over a latent cache (MLA, as in DeepSeek-V2 and later), in the absorbed form.

    ::

        one cached token    | latent: latent_rank (512) | rope (64) |      one KV head for all query heads
        as a key              all of it
        as a value            the latent alone

    The caller has absorbed the up-projections: ``q = [q_nope @ W_UK, q_rope]``, and multiplies the output by
    ``W_UV``. A backend with a kernel for it reads every token once.

    Args:
        q: [num_seqs, num_q_heads, head_dim] or [num_seqs, q_len, num_q_heads, head_dim], where head_dim is
            latent_rank plus the rope dimensions.
        kv: [num_blocks, 1, block_size, head_dim].
        latent_rank: width of the latent, 1..head_dim.
        scale: factor of the logits; there is no default, because it belongs to the head_dim before the
            absorption (DeepSeek-V3: ``1 / sqrt(128 + 64)``), which cannot be seen here.
        kv_scale: [num_blocks, 1, block_size] fp32 for int8.
        The others are those of ``paged_attention``.

    Returns:
        The output, latent_rank wide instead of head_dim.

    Raises:
        As ``paged_attention``; also ``PagedKVError`` for a latent_rank outside 1..head_dim.

    >>> import torch
    >>> kv = torch.tensor([[1.0, 2.0, 0.5], [3.0, 4.0, 0.5]]).view(1, 1, 2, 3)    # latent 2 + rope 1
    >>> table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    >>> paged_mla_attention(torch.zeros(1, 1, 3), kv, table, lens, latent_rank=2, scale=1.0).tolist()
    [[[2.0, 3.0]]]
    """
    if kv.dim() != 4 or not 1 <= latent_rank <= kv.shape[3]:
        raise PagedKVError(
            f"kv must be [num_blocks, 1, block_size, head_dim] with 1 <= latent_rank <= head_dim, "
            f"got {tuple(kv.shape)} and latent_rank {latent_rank}"
        )
    return paged_attention(
        q,
        kv,
        kv[..., :latent_rank],
        block_tables,
        seq_lens,
        scale=scale,
        k_scale=kv_scale,
        v_scale=kv_scale,
        out=out,
        lse=lse,
        block_mass=block_mass,
        plan=plan,
        backend=backend,
    )
