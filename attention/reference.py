"""The truth for every test: one sequence at a time, in fp64, every feature."""

import torch
from torch import Tensor

from pagedkv.attention.arguments import AttentionArguments


@torch.no_grad()
def attend(args: AttentionArguments) -> None:
    """Fill ``args.out`` and ``args.lse`` in fp64, cast once at the end.

    Cost: one Python iteration and a few copies of the whole context per sequence. Any device with fp64.
    """
    for row, (seq_len, first) in enumerate(args.spans()):
        positions = torch.arange(first, seq_len, device=args.q.device)
        out, lse = _attend_one(
            args,
            args.q[row].double(),
            _read(args, row, positions, args.k, args.k_scale),
            _read(args, row, positions, args.v, args.v_scale),
        )
        args.out[row] = out.to(args.out.dtype)
        if args.lse is not None:
            args.lse[row] = lse.to(args.lse.dtype)


def _read(
    args: AttentionArguments, row: int, positions: Tensor, values: Tensor, scale: Tensor | None
) -> Tensor:
    """Vectors [n, num_q_heads, dim] of the tokens at ``positions``, each KV head repeated for its group."""
    blocks = args.block_tables[row].long()[positions // args.block_size]
    offsets = positions % args.block_size
    tokens = values[blocks, :, offsets].double()
    if scale is not None:
        tokens = tokens * scale[blocks, :, offsets].double().unsqueeze(-1)
    return tokens.repeat_interleave(args.group_size, dim=1)


def _attend_one(args: AttentionArguments, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [num_q_heads, v_head_dim] and LSE [num_q_heads] of one query over n tokens."""
    logits = args.scale * torch.einsum("hd,nhd->hn", q, k)
    if args.softcap is not None:
        logits = args.softcap * torch.tanh(logits / args.softcap)
    competing = logits
    if args.sinks is not None:
        competing = torch.cat([logits, args.sinks.double().unsqueeze(1)], dim=1)
    lse = torch.logsumexp(competing, dim=1)
    weights = torch.exp(logits - lse.unsqueeze(1))
    return torch.einsum("hn,nhd->hd", weights, v), lse
