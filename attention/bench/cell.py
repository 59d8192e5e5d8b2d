"""One cell of a measurement: the sizes of a decode step, and more K and V than a cache can hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pagedkv.arithmetic import div_ceil
from pagedkv.errors import PagedKVError
from pagedkv.quantization import MIN_SCALE, Q_MAX
from pagedkv.spec import KVCacheSpec
from pagedkv.storage import STORAGE_DTYPES, KVStorage, LayerKV, Layout

# Random numbers are made once and repeated; a length that no block size divides keeps blocks different.
_CHUNK = 4_000_037

# The largest logits of N(0, 1) vectors stay where fp16 and fp8 are exact enough to compare results.
_INT8_SCALE = 1.0 / 48


@dataclass(frozen=True)
class Cell:
    """The sizes of one attention call: one layer, one query token per sequence.

    lens: tokens per sequence.
    dtype: of the cache: fp32, bf16, fp16, int8 or fp8-e4m3.
    """

    lens: tuple[int, ...]
    dtype: str
    block_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        """Refuse sizes that are no attention call."""
        if not self.lens or min(self.lens) < 1:
            raise PagedKVError(f"a cell needs sequences of at least 1 token, got {self.lens}")
        if self.num_q_heads % self.num_kv_heads:
            raise PagedKVError(
                f"{self.num_q_heads} query heads are no multiple of {self.num_kv_heads} KV heads"
            )

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.lens)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lens)

    @property
    def is_even(self) -> bool:
        """All sequences have one length, as a contiguous batch needs it."""
        return min(self.lens) == self.context

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the query, and of K and V where a peer knows no int8 or fp8: bf16 unless the cache is wider."""
        return STORAGE_DTYPES[self.dtype if self.dtype in ("fp32", "fp16") else "bf16"]

    @property
    def spec(self) -> KVCacheSpec:
        """The cache of the one layer."""
        return KVCacheSpec.uniform(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            block_size=self.block_size,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes that the call must read: K, V and scales of every token.

        >>> Cell((1024,), "bf16", 16, 32, 8, 128).kv_bytes
        4194304
        """
        return sum(self.lens) * self.spec.bytes_per_token

    @property
    def float_bytes(self) -> int:
        """The same in the compute dtype, without scales."""
        width = self.compute_dtype.itemsize
        return sum(self.lens) * self.num_kv_heads * self.head_dim * 2 * width

    @property
    def num_blocks(self) -> int:
        """Blocks of all sequences."""
        return sum(div_ceil(n, self.block_size) for n in self.lens)

    def num_sets(self, cold_bytes: int) -> int:
        """Block tables without a block in common that make the pool as large as ``cold_bytes``."""
        return max(1, div_ceil(cold_bytes, self.num_blocks * self.spec.bytes_per_block))

    def pool_bytes(self, cold_bytes: int) -> int:
        """Bytes of the pool for ``num_sets(cold_bytes)``, ``NULL_BLOCK`` included."""
        return self.spec.bytes_per_block * (self.num_sets(cold_bytes) * self.num_blocks + 1)


class ColdSets:
    """One pool in a `KVStorage`, and block tables that take turns, so that no call finds its blocks in cache.

    ::

        pool      | 0 | 7 2 5 | 1 8 3 | 6 9 4 |      block ids in random order, as in a pool long in use
        tables[0]     7 2 5                          a call reads one set;
        tables[1]             1 8 3                  the next call of anybody reads the next set,
        tables[2]                     6 9 4          and a set returns when the whole pool has passed
    """

    def __init__(
        self,
        cell: Cell,
        cold_bytes: int,
        *,
        device: str = "cpu",
        layout: Layout = "HND",
        seed: int = 0,
    ) -> None:
        """Allocate and fill ``cell.pool_bytes(cold_bytes)`` bytes with random numbers."""
        self.cell = cell
        num_sets = cell.num_sets(cold_bytes)
        self.storage = KVStorage(cell.spec, num_sets * cell.num_blocks, device=device, layout=layout)
        generator = torch.Generator(device).manual_seed(seed)
        for buffer in self.storage.buffers:
            _fill(buffer, generator, is_scale=cell.dtype == "int8" and buffer.dtype == torch.float32)
        order = 1 + torch.randperm(num_sets * cell.num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables = [_table(cell, ids).to(device) for ids in order.view(num_sets, -1)]
        self.lens = torch.tensor(cell.lens, dtype=torch.int32, device=device)
        shape = (cell.batch, cell.num_q_heads, cell.head_dim)
        self.q = torch.randn(shape, generator=generator, device=device).to(cell.compute_dtype)

    def __len__(self) -> int:
        """Number of sets."""
        return len(self.tables)

    @property
    def kv(self) -> LayerKV:
        """The layer that every call reads."""
        return self.storage.layer(0)

    def gathered(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a set as [batch, num_kv_heads, context, head_dim] in the compute dtype, a copy.

        Beyond a shorter sequence they hold what its table names there: block 0, zeros.
        """
        kv, ids = self.kv, self.tables[index].long()
        return self._tokens(kv.k, kv.k_scale, ids), self._tokens(kv.v, kv.v_scale, ids)

    @cached_property
    def contiguous(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of every set, as a cache without blocks holds them. Made once, as large as the pool."""
        return [self.gathered(i) for i in range(len(self))]

    def _tokens(self, values: Tensor, scale: Tensor | None, ids: Tensor) -> Tensor:
        # [batch, blocks, heads, slots, dim]; not values[ids], which torch 2.6 lacks for fp8
        blocks = values.index_select(0, ids.flatten()).view(*ids.shape, *values.shape[1:])
        if scale is not None:
            blocks = blocks.to(self.cell.compute_dtype) * scale[ids].unsqueeze(-1).to(self.cell.compute_dtype)
        tokens = blocks.to(self.cell.compute_dtype).transpose(1, 2).flatten(2, 3)
        return tokens[:, :, : self.cell.context].contiguous()


def even_cell(batch: int, context: int, dtype: str, block_size: int, heads: Sequence[int]) -> Cell:
    """A cell whose sequences are equally long; ``heads`` are query heads, KV heads and head_dim."""
    num_q_heads, num_kv_heads, head_dim = heads
    return Cell((context,) * batch, dtype, block_size, num_q_heads, num_kv_heads, head_dim)


def _table(cell: Cell, ids: Tensor) -> Tensor:
    """[batch, max_blocks] int32; beyond a shorter sequence ``NULL_BLOCK``."""
    counts = [div_ceil(n, cell.block_size) for n in cell.lens]
    table = torch.zeros(cell.batch, max(counts), dtype=torch.int32)
    for row, (mine, count) in enumerate(zip(torch.split(ids, counts), counts, strict=True)):
        table[row, :count] = mine
    return table


def _fill(buffer: Tensor, generator: torch.Generator, is_scale: bool) -> None:
    flat = buffer.as_strided((buffer.numel(),), (1,))  # in the order of memory, whatever the layout
    size = min(len(flat), _CHUNK)
    device = buffer.device
    if is_scale:
        chunk = torch.rand(size, generator=generator, device=device) * _INT8_SCALE + MIN_SCALE
    elif buffer.dtype == torch.int8:
        chunk = torch.randint(-Q_MAX, Q_MAX + 1, (size,), generator=generator, device=device)
    else:
        chunk = torch.randn(size, generator=generator, device=device)
    chunk = chunk.to(buffer.dtype)
    for start in range(0, len(flat), size):
        part = flat[start : start + size]
        part.copy_(chunk[: len(part)])
