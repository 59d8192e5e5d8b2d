"""Paged attention in plain torch, on any device: chunks of the context and an online softmax."""

import torch
from torch import Tensor

from pagedkv.attention.arguments import AttentionArguments

# Large enough to hide the launch of a dozen operations, small enough for the gathered copy to stay in cache.
CHUNK_TOKENS = 512


def unavailable() -> None:
    """It runs wherever torch does."""


def unsupported(args: AttentionArguments) -> None:
    """It serves every call."""


@torch.no_grad()
def attend(args: AttentionArguments) -> None:
    """Fill the outputs; the arithmetic is fp32 (fp64 for an fp64 query).

    Sequences are processed longest first, so that those still unfinished at any chunk are a leading slice of
    the batch and finished ones cost nothing. Chunks before every window are skipped. Keys and values are not
    repeated for grouped heads. The host waits once, for ``seq_lens``.

    Cost: every context token that is read is copied once and cast once; memory for one chunk of the batch.
    """
    args.check_contents()
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
        end = start + blocks_per_chunk * args.block_size
        sees_all = lengths[num_active - 1] - args.q_len + 1 >= end and (
            args.window is None or lengths[0] - args.window <= start
        )
        first_block = start // args.block_size
        batch.attend_chunk(num_active, first_block, first_block + blocks_per_chunk, sees_all)
    batch.store()


def _chunk_starts(lengths: list[int], firsts: list[int], chunk: int) -> range:
    reading = [first for length, first in zip(lengths, firsts, strict=True) if length]
    if not reading:
        return range(0)
    return range(min(reading) // chunk * chunk, lengths[0], chunk)


class _Batch:
    """Running softmax of all sequences, in the order given.

    ::

        rows     the queries of one KV head: q_len * group_size, query token by query token
        maximum, total [num_seqs, num_kv_heads, rows]    weighted [num_seqs, num_kv_heads, rows, v_head_dim]
        after each chunk   total = sum(exp(logit - maximum))    weighted = sum(exp(logit - maximum) * v)
    """

    def __init__(self, args: AttentionArguments, order: Tensor) -> None:
        self.args = args
        self.order = order
        self.dtype = torch.promote_types(args.q.dtype, torch.float32)
        num_kv_heads, rows = args.k.shape[1], args.q_len * args.group_size
        shape = (len(order), num_kv_heads, rows)
        self.q = self._by_kv_head(args.q[order].to(self.dtype) * args.scale)
        # [num_seqs, q_len]: one past the last position that each query token sees, and the first one
        self.ends = args.seq_lens[order].long().unsqueeze(1) - torch.arange(
            args.q_len - 1, -1, -1, device=order.device
        )
        window = args.window
        self.firsts = self.ends - window if window is not None else torch.zeros_like(self.ends)
        self.tables = args.block_tables[order].long()
        self.maximum = self.q.new_full(shape, -torch.inf)
        self.total = self.q.new_zeros(shape)
        self.weighted = self.q.new_zeros(*shape, args.v.shape[3])
        self.block_lse: Tensor | None = None
        if args.block_mass is not None:
            self.block_lse = self.q.new_full((*shape, self.tables.shape[1]), -torch.inf)
        if args.sinks is not None:
            # a sink is one more logit without a value: seen before the first token, it is the running state
            sinks = args.sinks.view(num_kv_heads, 1, args.group_size)
            self.maximum.copy_(sinks.expand(-1, args.q_len, -1).flatten(1))
            self.total.fill_(1)

    def attend_chunk(self, num_active: int, first_block: int, end_block: int, sees_all: bool) -> None:
        """Fold blocks ``first_block..end_block - 1`` of the leading ``num_active`` sequences into the state.

        ``sees_all`` says that every query sees every slot of them, so that nothing needs a mask.
        """
        ids = self.tables[:num_active, first_block:end_block]
        if sees_all:
            logits, readable = self._logits(ids), None
        else:
            seen = self._seen(num_active, first_block, ids.shape[1])
            readable = seen.any(dim=1)
            # what the table says about a block that is not read may be anything: read block 0, masked
            ids = ids.where(readable.view(*ids.shape, -1).any(dim=2), 0)
            per_row = seen.repeat_interleave(self.args.group_size, dim=1).unsqueeze(1)
            logits = self._logits(ids).where(per_row, -torch.inf)
        if self.block_lse is not None:
            per_block = logits.view(*logits.shape[:3], ids.shape[1], self.args.block_size).logsumexp(dim=4)
            self.block_lse[:num_active, :, :, first_block : first_block + ids.shape[1]] = per_block
        weights = self._rescale(num_active, logits)
        self._accumulate(ids, weights, readable)

    def store(self) -> None:
        """Write the normalised state to the outputs, in the caller's order."""
        args = self.args
        # a query that saw nothing, without sinks, has total 0 and weighted 0: its output is 0, its LSE -inf
        safe_total = self.total.where(self.total > 0, 1)
        args.out[self.order] = self._by_query(self.weighted / safe_total.unsqueeze(-1)).to(args.out.dtype)
        lse = self.maximum + self.total.log()
        if args.lse is not None:
            args.lse[self.order] = self._by_query(lse.unsqueeze(-1)).squeeze(-1).to(args.lse.dtype)
        if args.block_mass is not None and self.block_lse is not None:
            mass = torch.exp(self.block_lse - lse.where(lse > -torch.inf, 0).unsqueeze(-1))
            args.block_mass[self.order] = self._by_query(mass).to(args.block_mass.dtype)

    def _by_kv_head(self, x: Tensor) -> Tensor:
        """[num_seqs, q_len, num_q_heads, dim] as [num_seqs, num_kv_heads, rows, dim]."""
        grouped = (self.args.k.shape[1], self.args.group_size)
        return x.reshape(*x.shape[:2], *grouped, x.shape[3]).transpose(1, 2).flatten(2, 3)

    def _by_query(self, x: Tensor) -> Tensor:
        """The way back from ``_by_kv_head``."""
        rows = (self.args.q_len, self.args.group_size)
        return x.reshape(*x.shape[:2], *rows, x.shape[3]).transpose(1, 2).flatten(2, 3)

    def _seen(self, num_active: int, first_block: int, num_blocks: int) -> Tensor:
        """[num_active, q_len, positions of the chunk]: the query token sees the position."""
        block_size = self.args.block_size
        positions = torch.arange(
            first_block * block_size, (first_block + num_blocks) * block_size, device=self.q.device
        )
        firsts, ends = self.firsts[:num_active].unsqueeze(2), self.ends[:num_active].unsqueeze(2)
        return (positions >= firsts) & (positions < ends)

    def _logits(self, ids: Tensor) -> Tensor:
        """[num_active, num_kv_heads, rows, chunk], before masking."""
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
