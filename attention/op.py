"""The operation as torch knows it, ``torch.ops.pagedkv.paged_attention``, whole under ``torch.compile``."""

import torch
from torch import Tensor

from pagedkv.attention.arguments import AttentionArguments
from pagedkv.attention.registry import backend_for

# Defined and implemented through torch.library.Library: a call costs 3 us, one through custom_op 60.
_LIBRARY = torch.library.Library("pagedkv", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor block_tables, Tensor seq_lens, float scale, "
    "Tensor? k_scale, Tensor? v_scale, int? window, Tensor? sinks, float? softcap, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? block_mass, Tensor? plan, str backend) -> ()"
)


def _paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    out: Tensor,
    lse: Tensor | None,
    block_mass: Tensor | None,
    plan: Tensor | None,
    backend: str,
) -> None:
    args = AttentionArguments(
        q, k, v, block_tables, seq_lens, scale, k_scale, v_scale, window, sinks, softcap, out, lse,
        block_mass, plan,
    )  # fmt: skip
    backend_for(backend, args).attend(args)


def _paged_attention_fake(*args: object) -> None:
    """The checks of shapes, dtypes and options, so that a compiler meets the same errors as a call."""
    AttentionArguments(*args[:-1])  # type: ignore[arg-type]


_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "paged_attention", _paged_attention, "CompositeExplicitAutograd"
)
torch.library.register_fake("pagedkv::paged_attention", _paged_attention_fake, lib=_LIBRARY)

paged_attention_op = torch.ops.pagedkv.paged_attention.default
