"""What else attends: the peers that a measurement runs beside the backends, over the same numbers."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pagedkv.attention.bench import flex_peer, gpu_peers, vllm_peer
from pagedkv.attention.bench.cell import ColdSets
from pagedkv.attention.bench.contender import Contender


class Peer(NamedTuple):
    """How to make a contender, and what it needs.

    make: the contender over these sets, or why it cannot take part.
    of_pool: bytes that it keeps, in units of K and V of all sets in the compute dtype.
    of_set: bytes that a call allocates, in units of one set.
    device: where it runs; None for anywhere.
    """

    make: Callable[[ColdSets], Contender | str]
    of_pool: int = 0
    of_set: int = 0
    device: str | None = None


def _sdpa(sets: ColdSets) -> Contender | str:
    if not sets.cell.is_even:
        return "sequences of different lengths"
    q, kv = sets.q.unsqueeze(2), sets.contiguous

    def call(index: int) -> Tensor:
        k, v = kv[index]
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).squeeze(2)

    return Contender("sdpa", call, sets.cell.float_bytes)


def _sdpa_rows(sets: ColdSets) -> Contender | str:
    if not sets.cell.is_even:
        return "sequences of different lengths"
    # without a mask the heads of a group may pass for query tokens of one head, which reads K and V once
    q = sets.q.view(sets.cell.batch, sets.cell.num_kv_heads, -1, sets.cell.head_dim)
    kv = sets.contiguous

    def call(index: int) -> Tensor:
        k, v = kv[index]
        return F.scaled_dot_product_attention(q, k, v).flatten(1, 2)

    return Contender("sdpa-rows", call, sets.cell.float_bytes)


def _gather(sets: ColdSets) -> Contender:
    q, mask = sets.q.unsqueeze(2), _mask(sets)

    def call(index: int) -> Tensor:
        k, v = sets.gathered(index)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).squeeze(2)

    return Contender("gather", call, sets.cell.kv_bytes)


def _concatenate(sets: ColdSets) -> Contender | str:
    if not sets.cell.is_even:
        return "sequences of different lengths"
    if sets.cell.context < 2:
        return "a context of 1 token: nothing to append to"
    q, kv = sets.q.unsqueeze(2), sets.contiguous

    def call(index: int) -> Tensor:
        # what a growing cache of one tensor per layer does in each step: old tokens and the new one, copied
        k, v = (torch.cat([x[:, :, :-1], x[:, :, -1:]], dim=2) for x in kv[index])
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).squeeze(2)

    return Contender("cat", call, sets.cell.float_bytes)


def _mask(sets: ColdSets) -> Tensor | None:
    """[batch, 1, 1, context], True where a sequence has a token; None where all have."""
    if sets.cell.is_even:
        return None
    positions = torch.arange(sets.cell.context, device=sets.lens.device)
    return (positions < sets.lens.unsqueeze(1))[:, None, None]


PEERS: dict[str, Peer] = {
    "sdpa": Peer(_sdpa, of_pool=1),
    "sdpa-rows": Peer(_sdpa_rows, of_pool=1),
    "gather": Peer(_gather, of_set=3),
    "cat": Peer(_concatenate, of_pool=1, of_set=1),
    "flex": Peer(flex_peer.make, of_pool=1),
    "vllm": Peer(vllm_peer.make, of_pool=1, of_set=1, device="cpu"),
    "flashinfer-planned": Peer(gpu_peers.flashinfer, device="cuda"),
    "vllm-triton": Peer(gpu_peers.vllm_triton, device="cuda"),
}
"""By the name that a user gives:

- sdpa: contiguous K and V, ``scaled_dot_product_attention(enable_gqa=True)``;
- sdpa-rows: the same with the heads of a group as query rows, which reads K and V once;
- gather: blocks gathered into contiguous K and V, then SDPA;
- cat: contiguous K and V concatenated with the new token at every step, then SDPA;
- flex: FlexAttention, compiled, over torch's experimental PagedAttention;
- vllm: vLLM's CPU kernel over its own paged layout;
- flashinfer-planned, vllm-triton: FlashInfer and vLLM's Triton kernel, planned before the clock runs.
"""

CONTIGUOUS = ("sdpa", "sdpa-rows", "cat")
"""Peers that share one contiguous copy of the pool."""

BY_REQUEST = {"flex": "left out unless asked for (--peers flex): compiling takes half a minute or more"}
"""Peers that cost too much to come along uncalled."""
