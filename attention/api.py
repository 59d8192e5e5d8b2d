"""The one operation, and the registry of what can run it."""

from collections.abc import Callable

from torch import Tensor

from pagedkv.attention.arguments import AttentionArguments
from pagedkv.errors import PagedKVError

Backend = Callable[[AttentionArguments], None]


def _reference() -> Backend:
    from pagedkv.attention.reference import attend

    return attend


def _torch() -> Backend:
    from pagedkv.attention.torch_backend import attend

    return attend


# Factories, so that a backend is imported when it is asked for.
_FACTORIES: dict[str, Callable[[], Backend]] = {"reference": _reference, "torch": _torch}

_AUTO = "torch"


def backends() -> tuple[str, ...]:
    """Names that ``paged_attention(backend=...)`` accepts besides "auto".

    >>> backends()
    ('reference', 'torch')
    """
    return tuple(_FACTORIES)


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
    backend: str = "auto",
) -> Tensor:
    """Attention of one new token per sequence over its cached context, read through block tables.

    ::

        seq_len = 6, block_size = 4, table row [7, 2, ?, ?]     token 5 is the token of this step
        positions   0 1 2 3 | 4 5 . . | ? ...                    '.' and '?' may hold anything, NaN included
        block             7 |       2 |

    Per query head h, with KV head ``h // (num_q_heads // num_kv_heads)`` and the positions j it sees::

        s[j] = scale * (q . k[j])                    then, if softcap:  s[j] = softcap * tanh(s[j] / softcap)
        lse  = log(sum_j exp(s[j]) + exp(sink))      exp(sink) only with sinks
        out  = sum_j exp(s[j] - lse) * v[j]

    in this order: the scale, the softcap, the mask, the softmax. There is no causal mask: the token of this
    step is the last of its sequence and sees all of it. An empty sequence gives ``out = 0`` and
    ``lse = -inf`` (``sink`` with sinks).

    Args:
        q: [num_seqs, num_q_heads, head_dim], fp64, fp32, bf16 or fp16.
        k: [num_blocks, num_kv_heads, block_size, head_dim], a float dtype or int8; any strides, so that NHD
            storage is passed as a permuted view.
        v: [num_blocks, num_kv_heads, block_size, v_head_dim] in the dtype of ``k``; a view of it for MLA.
        block_tables: [num_seqs, max_blocks] int32, ids of rows of ``k``; entries beyond the sequence, and
            those wholly before its window, are ignored.
        seq_lens: [num_seqs] int32, KV entries of each sequence including the token of this step, 0 and more.
        scale: factor of the logits, ``1 / sqrt(head_dim)`` by default.
        k_scale, v_scale: [num_blocks, num_kv_heads, block_size] fp32, for int8 and only then.
        window: see only the last ``window`` positions, the token of this step among them; for a layer of a
            storage this is ``kv.window``. None: see all.
        sinks: [num_q_heads], a learned logit per head that takes weight but has no value (as in gpt-oss);
            neither ``scale`` nor ``softcap`` applies to it.
        softcap: bound of the logits (as in Gemma 2).
        out: [num_seqs, num_q_heads, v_head_dim] in the dtype of ``q``, filled and returned if given.
        lse: [num_seqs, num_q_heads] fp32, filled in place with the natural logarithm if given.
        backend: a name from ``backends()``, or "auto".

    Returns:
        [num_seqs, num_q_heads, v_head_dim] in the dtype of ``q``. No gradient flows through it.

    Raises:
        PagedKVError: a shape, dtype, device, option or length that does not fit, or an unknown backend.
        BlockError: an entry of ``block_tables`` that would be read is no row of ``k``.
        On an accelerator the contents of ``block_tables`` and ``seq_lens`` are not checked.

    Cost: reads ``min(seq_len, window)`` keys and values per sequence and KV head, rounded up to blocks.

    >>> import torch
    >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).view(3, 1, 1, 2)   # three blocks of one token
    >>> v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]).view(3, 1, 1, 2)
    >>> q = torch.tensor([[[2.0, 2.0]]])
    >>> table, lens = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> [round(x, 4) for x in paged_attention(q, k, v, table, lens).flatten().tolist()]
    [1.5093, 1.5093]
    """
    attend = _backend(backend)
    if out is None:
        out = q.new_empty(*q.shape[:2], *v.shape[3:])
    if scale is None:
        # a missing or empty head_dim is refused below, with the shapes in the message
        scale = max(1, q.shape[-1:].numel()) ** -0.5
    attend(
        AttentionArguments(
            q, k, v, block_tables, seq_lens, k_scale, v_scale, scale, window, softcap, sinks, out, lse
        )
    )
    return out


def _backend(name: str) -> Backend:
    name = _AUTO if name == "auto" else name
    if name not in _FACTORIES:
        raise PagedKVError(f"no attention backend {name!r}, there are: auto, {', '.join(backends())}")
    return _FACTORIES[name]()
