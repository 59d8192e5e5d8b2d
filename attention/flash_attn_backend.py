"""FlashAttention-2's attention with a paged cache over the same storage; used only when asked for by name."""

import importlib.util

import torch

from pagedkv.attention.arguments import AttentionArguments

# FlashAttention-2 takes pages of a multiple of this only.
PAGE_MULTIPLE = 256
MAX_HEAD_DIM = 256


def unavailable() -> str | None:
    """It needs the package and a CUDA device."""
    if importlib.util.find_spec("flash_attn") is None:
        return "no module flash_attn; install it with: pip install flash-attn"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def unsupported(args: AttentionArguments) -> str | None:
    """The features that it lacks."""
    if args.q.dtype not in (torch.float16, torch.bfloat16):
        return f"queries of {args.q.dtype} (it has fp16 and bf16)"
    if args.k.dtype != args.q.dtype:
        return f"a cache of {args.k.dtype} under queries of {args.q.dtype}"
    if args.block_size % PAGE_MULTIPLE:
        return f"a block_size of {args.block_size} (it has multiples of {PAGE_MULTIPLE})"
    if args.k.shape[3] != args.v.shape[3] or args.k.shape[3] > MAX_HEAD_DIM:
        return f"dims {args.k.shape[3]} and {args.v.shape[3]} (it has equal ones up to {MAX_HEAD_DIM})"
    if args.k.stride(3) != 1 or args.v.stride(3) != 1:
        return "blocks whose last dimension is not contiguous"
    return "sinks and block_mass" if args.sinks is not None or args.block_mass is not None else None


@torch.no_grad()
def attend(args: AttentionArguments) -> None:
    """Fill the outputs; queries that see nothing, for which it says LSE = +inf, are set by us."""
    from flash_attn import flash_attn_with_kvcache

    args.check_contents()
    out, lse = flash_attn_with_kvcache(
        args.q,
        args.k.transpose(1, 2),
        args.v.transpose(1, 2),
        cache_seqlens=args.seq_lens,
        block_table=args.block_tables.contiguous(),
        softmax_scale=args.scale,
        causal=True,
        window_size=(-1, -1) if args.window is None else (args.window - 1, 0),
        softcap=args.softcap or 0.0,
        return_softmax_lse=True,
    )
    blind = args.blind()
    args.out.copy_(out.masked_fill(blind[..., None, None], 0))
    if args.lse is not None:
        args.lse.copy_(lse.transpose(1, 2).masked_fill(blind.unsqueeze(-1), -torch.inf))
