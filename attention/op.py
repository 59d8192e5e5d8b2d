"""The operation as torch knows it, ``torch.ops.pagedkv.paged_attention``, whole under ``torch.compile``."""

import torch
from torch import Tensor

from pagedkv.attention.arguments import AttentionArguments
from pagedkv.attention.cpu_backend import attend_at_once
from pagedkv.attention.registry import backend_for

# Names that mean the native library for every call on a CPU that it serves.
NATIVE = ("auto", "native")

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
    if (
        backend in NATIVE
        and plan is None
        and attend_at_once(
            q, k, v, block_tables, seq_lens, scale, k_scale, v_scale, window, sinks, softcap, out, lse,
            block_mass,
        )
    ):  # fmt: skip
        return
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


# Not public; without them every call goes through the dispatcher.
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_transform = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)


def is_watched() -> bool:
    """Whether a compiler, a mode (fake tensors, tracing) or a transform wants to see operations."""
    if torch.compiler.is_compiling() or _dispatch_modes is None or _transform is None:
        return True
    return _dispatch_modes() > 0 or _transform() is not None
