"""Batches of random sequences in blocks, for whoever tests or measures an attention backend."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedkv.arithmetic import div_ceil
from pagedkv.attention.api import paged_attention
from pagedkv.quantization import quantize
from pagedkv.storage import Layout


@dataclass(frozen=True)
class Batch:
    """Sequences as a caller would have them, and the same sequences in blocks.

    q: [num_seqs, num_q_heads, head_dim], or with q_len as a second dimension.
    ks, vs: per sequence [seq_len, num_kv_heads, head_dim or v_head_dim].
    k, v, tables, lens: the arguments of ``paged_attention``.
    scales: ``k_scale`` and ``v_scale`` of an int8 batch, else empty.
    """

    q: Tensor
    ks: list[Tensor]
    vs: list[Tensor]
    k: Tensor
    v: Tensor
    tables: Tensor
    lens: Tensor
    scales: dict[str, Tensor]

    def attend(self, backend: str, **options: Any) -> Tensor:
        """``paged_attention`` over the batch."""
        options = {**self.scales, **options}
        return paged_attention(self.q, self.k, self.v, self.tables, self.lens, backend=backend, **options)

    def attend_with_lse(self, backend: str, **options: Any) -> tuple[Tensor, Tensor]:
        """The output and the LSE, whose buffer was NaN before."""
        lse = torch.full(self.q.shape[:-1], torch.nan, device=self.q.device)
        return self.attend(backend, lse=lse, **options), lse

    def attend_with_mass(self, backend: str, **options: Any) -> tuple[Tensor, Tensor]:
        """The output and the mass of each block, whose buffer was NaN before."""
        shape = (*self.q.shape[:-1], self.tables.shape[1])
        mass = torch.full(shape, torch.nan, device=self.q.device)
        return self.attend(backend, block_mass=mass, **options), mass

    def to(self, dtype: torch.dtype) -> "Batch":
        """Query, keys and values in another float dtype."""
        cast = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v")}
        return replace(self, **cast, ks=[k.to(dtype) for k in self.ks], vs=[v.to(dtype) for v in self.vs])

    def quantized(self) -> "Batch":
        """The cache in int8 with its scales, the query in fp32; ``ks`` and ``vs`` stay as they were."""
        (k, k_scale), (v, v_scale) = (quantize(x, check=False) for x in (self.k, self.v))
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return replace(self, q=self.q.float(), k=k, v=v, scales=scales)

    def dequantized(self) -> "Batch":
        """An int8 batch as fp64 numbers, exactly what its integers and scales say."""
        k, v = (
            x.double() * self.scales[name].double().unsqueeze(-1)
            for x, name in ((self.k, "k_scale"), (self.v, "v_scale"))
        )
        return replace(self, q=self.q.double(), k=k, v=v, scales={})


def make_batch(
    lens: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    block_size: int = 4,
    layout: Layout = "HND",
    q_len: int | None = None,
    seed: int = 0,
    unused: float = 0.0,
) -> Batch:
    """Random fp64 sequences in randomly chosen blocks; every slot nobody owns holds ``unused``.

    Args:
        lens: tokens per sequence.
        heads: query heads and KV heads.
        dims: head_dim and v_head_dim.
        block_size, layout: of the cache. The first block and the last ones of the pool are nobody's.
        q_len: query tokens per sequence; None for a query of three dimensions.
        seed: of the numbers and the choice of blocks.
        unused: what slots and blocks hold that no sequence owns; table entries beyond a sequence name such a
            block.

    >>> make_batch([3, 0, 5]).attend("torch").shape
    torch.Size([3, 4, 8])
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [div_ceil(n, block_size) for n in lens]
    k, v = (_pool(sum(num_blocks) + 3, heads[1], block_size, dim, layout, unused) for dim in dims)
    ids = 1 + torch.randperm(len(k) - 1, generator=generator)
    tables = torch.full((len(lens), max(num_blocks, default=0) + 2), int(ids[-1]), dtype=torch.int32)
    ks, vs = [], []
    for row, (n, blocks) in enumerate(zip(lens, num_blocks, strict=True)):
        mine, ids = ids[:blocks], ids[blocks:]
        tables[row, :blocks] = mine
        ks.append(torch.randn(n, heads[1], dims[0], generator=generator, dtype=torch.float64))
        vs.append(torch.randn(n, heads[1], dims[1], generator=generator, dtype=torch.float64))
        positions = torch.arange(n)
        k[mine[positions // block_size], :, positions % block_size] = ks[-1]
        v[mine[positions // block_size], :, positions % block_size] = vs[-1]
    shape = (len(lens), heads[0], dims[0]) if q_len is None else (len(lens), q_len, heads[0], dims[0])
    q = torch.randn(shape, generator=generator, dtype=torch.float64)
    return Batch(q, ks, vs, k, v, tables, torch.tensor(lens, dtype=torch.int32), {})


def _pool(rows: int, heads: int, block_size: int, dim: int, layout: Layout, value: float) -> Tensor:
    if layout == "HND":
        return torch.full((rows, heads, block_size, dim), value, dtype=torch.float64)
    return torch.full((rows, block_size, heads, dim), value, dtype=torch.float64).transpose(1, 2)
