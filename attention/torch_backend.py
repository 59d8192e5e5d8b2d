"""Paged attention in plain torch, on any device: chunks of the context and an online softmax."""

import torch
from torch import Tensor

from pagedkv.attention.arguments import AttentionArguments

# Large enough to hide the launch of a dozen operations, small enough for the gathered copy to stay in cache.
CHUNK_TOKENS = 512


@torch.no_grad()
def attend(args: AttentionArguments) -> None:
    """Fill ``args.out`` and ``args.lse``; the arithmetic is fp32 (fp64 for an fp64 query).

    Sequences are processed longest first, so that those still unfinished at any chunk are a leading slice of
    the batch and finished ones cost nothing. Chunks before every window are skipped. Keys and values are not
    repeated for grouped heads. The host waits once, for ``seq_lens``.

    Cost: every context token that is read is copied once and cast once; memory for one chunk of the batch.
    """
    spans = args.spans()
    order = sorted(range(len(spans)), key=lambda row: -spans[row][0])
    batch = _Batch(args, torch.tensor(order, dtype=torch.int64, device=args.q.device))
    blocks_per_chunk = max(1, CHUNK_TOKENS // args.block_size)
    lengths = [spans[row][0] for row in order]
    firsts = [spans[row][1] for row in order]
    num_active = len(order)
    for start in _chunk_starts(lengths, firsts, blocks_per_chunk * args.block_size):
        while lengths[num_active - 1] <= start:
            num_active -= 1
        first_block = start // args.block_size
        end = start + blocks_per_chunk * args.block_size
        whole = lengths[num_active - 1] >= end and max(firsts[:num_active]) <= start
        batch.attend_chunk(num_active, first_block, first_block + blocks_per_chunk, whole)
    batch.store()


def _chunk_starts(lengths: list[int], firsts: list[int], chunk: int) -> range:
    reading = [first for length, first in zip(lengths, firsts, strict=True) if length]
    if not reading:
        return range(0)
    return range(min(reading) // chunk * chunk, lengths[0], chunk)


class _Batch:
    """Running softmax of all sequences, in the order given.

    maximum, total: [num_seqs, num_kv_heads, group_size]; weighted: [..., v_head_dim]: after each chunk
    ``total = sum(exp(logit - maximum))`` and ``weighted = sum(exp(logit - maximum) * v)``.
    """

    def __init__(self, args: AttentionArguments, order: Tensor) -> None:
        self.args = args
        self.order = order
        self.dtype = torch.promote_types(args.q.dtype, torch.float32)
        grouped = (len(order), args.k.shape[1], args.group_size)
        self.q = args.q[order].to(self.dtype).view(*grouped, args.q.shape[2]) * args.scale
        lengths = args.seq_lens[order].long()
        self.ends = lengths.unsqueeze(1)
        self.firsts = self.ends - args.window if args.window is not None else torch.zeros_like(self.ends)
        self.tables = args.block_tables[order].long()
        self.maximum = self.q.new_full(grouped, -torch.inf)
        self.total = self.q.new_zeros(grouped)
        self.weighted = self.q.new_zeros(*grouped, args.v.shape[3])
        if args.sinks is not None:
            # a sink is one more logit without a value: seen before the first token, it is the running state
            self.maximum.copy_(args.sinks.view(grouped[1:]))
            self.total.fill_(1)

    def attend_chunk(self, num_active: int, first_block: int, end_block: int, whole: bool) -> None:
        """Fold blocks ``first_block..end_block - 1`` of the leading ``num_active`` sequences into the state.

        ``whole`` says that all of their slots are read, so that nothing needs a mask.
        """
        ids = self.tables[:num_active, first_block:end_block]
        if whole:
            readable = None
        else:
            readable = self._readable(num_active, first_block, ids.shape[1])
            # what the table says about a block that is not read may be anything: read block 0, masked
            ids = ids.where(readable.view(*ids.shape, -1).any(dim=2), 0)
        logits = self._logits(ids)
        if readable is not None:
            logits = logits.where(readable[:, None, None], -torch.inf)
        weights = self._rescale(num_active, logits)
        self._accumulate(ids, weights, readable)

    def store(self) -> None:
        """Write the normalised state to the outputs, in the caller's order."""
        args = self.args
        # a sequence without tokens or sinks has total 0 and weighted 0: its output is 0, its LSE -inf
        safe_total = self.total.where(self.total > 0, 1)
        out = self.weighted / safe_total.unsqueeze(-1)
        args.out[self.order] = out.flatten(1, 2).to(args.out.dtype)
        if args.lse is not None:
            lse = self.maximum + self.total.log()
            args.lse[self.order] = lse.flatten(1, 2).to(args.lse.dtype)

    def _readable(self, num_active: int, first_block: int, num_blocks: int) -> Tensor:
        block_size = self.args.block_size
        positions = torch.arange(
            first_block * block_size, (first_block + num_blocks) * block_size, device=self.q.device
        )
        return (positions >= self.firsts[:num_active]) & (positions < self.ends[:num_active])

    def _logits(self, ids: Tensor) -> Tensor:
        """[num_active, num_kv_heads, group_size, chunk], before masking."""
        args = self.args
        logits = self.q[: len(ids)] @ self._gather(args.k, ids).transpose(2, 3)
        if args.k_scale is not None:
            logits *= self._gather(args.k_scale.unsqueeze(-1), ids).transpose(2, 3)
        if args.softcap is not None:
            logits = args.softcap * torch.tanh(logits / args.softcap)
        return logits

    def _rescale(self, num_active: int, logits: Tensor) -> Tensor:
        """Raise the running maximum to these logits; return their weights relative to it."""
        old = self.maximum[:num_active]
        new = torch.maximum(old, logits.amax(dim=-1))
        # nothing seen yet: exp(-inf - -inf) would be NaN
        finite = new.where(new > -torch.inf, 0)
        weights = torch.exp(logits - finite.unsqueeze(-1))
        decay = torch.exp(old - finite)
        self.total[:num_active] = self.total[:num_active] * decay + weights.sum(dim=-1)
        self.weighted[:num_active] *= decay.unsqueeze(-1)
        self.maximum[:num_active] = new
        return weights

    def _accumulate(self, ids: Tensor, weights: Tensor, readable: Tensor | None) -> None:
        args = self.args
        v = self._gather(args.v, ids)
        if args.v_scale is not None:
            v *= self._gather(args.v_scale.unsqueeze(-1), ids)
        if readable is not None:
            # a weight of 0 does not silence a NaN left in an unused slot
            v = v.masked_fill(~readable[:, None, :, None], 0)
        self.weighted[: len(ids)] += weights @ v

    def _gather(self, values: Tensor, ids: Tensor) -> Tensor:
        """Blocks ``ids`` [n, m] of ``values`` as [n, num_kv_heads, m * block_size, dim], cast."""
        blocks = values.index_select(0, ids.flatten()).view(*ids.shape, *values.shape[1:])
        # the cast and the reordering are one pass
        tokens = blocks.transpose(1, 2).to(self.dtype, memory_format=torch.contiguous_format)
        return tokens.flatten(2, 3)
