"""The truth for every test: one sequence at a time, in fp64, every feature."""

import torch
from torch import Tensor

from pagedkv.attention.arguments import AttentionArguments


def unavailable() -> None:
    """It runs everywhere."""


def unsupported(args: AttentionArguments) -> None:
    """It serves every call."""


@torch.no_grad()
def attend(args: AttentionArguments) -> None:
    """Fill the outputs in fp64, cast once at the end.

    Cost: one Python iteration and a few copies of the whole context per sequence. Any device with fp64.
    """
    args.check_contents()
    for row, (seq_len, first) in enumerate(args.spans()):
        positions = torch.arange(first, seq_len, device=args.q.device)
        logits = _logits(args, args.q[row].double(), _read(args, row, positions, args.k, args.k_scale))
        logits.masked_fill_(~_seen(args, seq_len, positions).unsqueeze(1), -torch.inf)
        lse = _log_sum_exp(args, logits)
        # a query that sees nothing has an LSE of -inf, and -inf - -inf would be NaN
        weights = torch.exp(logits - lse.where(lse > -torch.inf, 0).unsqueeze(2))
        values = _read(args, row, positions, args.v, args.v_scale)
        args.out[row] = torch.einsum("qhn,nhd->qhd", weights, values).to(args.out.dtype)
        if args.lse is not None:
            args.lse[row] = lse.to(args.lse.dtype)
        if args.block_mass is not None:
            columns = (positions // args.block_size).expand_as(weights)
            mass = weights.new_zeros(args.block_mass.shape[1:]).scatter_add_(2, columns, weights)
            args.block_mass[row] = mass.to(args.block_mass.dtype)


def _read(
    args: AttentionArguments, row: int, positions: Tensor, values: Tensor, scale: Tensor | None
) -> Tensor:
    """Vectors [n, num_q_heads, dim] of the tokens at ``positions``, each KV head repeated for its group."""
    blocks = args.block_tables[row].long()[positions // args.block_size]
    offsets = positions % args.block_size
    bits = values.view(torch.int8) if values.itemsize == 1 else values  # torch 2.6 cannot index fp8
    tokens = bits[blocks, :, offsets].view(values.dtype).double()
    if scale is not None:
        tokens = tokens * scale[blocks, :, offsets].double().unsqueeze(-1)
    return tokens.repeat_interleave(args.group_size, dim=1)


def _logits(args: AttentionArguments, q: Tensor, k: Tensor) -> Tensor:
    """[q_len, num_q_heads, n], scaled and capped."""
    logits = args.scale * torch.einsum("qhd,nhd->qhn", q, k)
    if args.softcap is not None:
        logits = args.softcap * torch.tanh(logits / args.softcap)
    return logits


def _seen(args: AttentionArguments, seq_len: int, positions: Tensor) -> Tensor:
    """[q_len, n]: query token i, which stands at ``seq_len - q_len + i``, sees the position."""
    standing = torch.arange(seq_len - args.q_len, seq_len, device=positions.device).unsqueeze(1)
    seen = positions <= standing
    return seen if args.window is None else seen & (positions > standing - args.window)


def _log_sum_exp(args: AttentionArguments, logits: Tensor) -> Tensor:
    """[q_len, num_q_heads], the sinks among the terms."""
    if args.sinks is not None:
        sinks = args.sinks.double().view(1, -1, 1).expand(len(logits), -1, 1)
        logits = torch.cat([logits, sinks], dim=2)
    return torch.logsumexp(logits, dim=2)
