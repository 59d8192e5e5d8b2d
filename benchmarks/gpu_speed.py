"""What is timed on a GPU: the bandwidth of the card, mixes of lengths, growth with the context, the peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pagedkv.attention.bench.cell import Cell
from pagedkv.attention.bench.conditions import available_bytes
from pagedkv.attention.bench.contender import Contender
from pagedkv.attention.bench.measure import CellResult, Plan, measure_cell
from pagedkv.attention.bench.rounds import call_seconds

COPY_BYTES = 2**31
ROUNDS = 9

MIXES = {
    "B1 1k": (1024,),
    "B1 32k": (32768,),
    "B32 8k": (8192,) * 32,
    "B64 2k": (2048,) * 64,
    "1 x 128k + 63 x 1k": (131072, *(1024,) * 63),
}
GROWTH = {f"B8 {n // 1024}k": (n,) * 8 for n in (1024, 4096, 16384, 65536, 131072)}

# Several times the L2 cache of any card.
COLD_BYTES = 2**29

SHARE_OF_MEMORY = 0.6


class Shape(NamedTuple):
    """A cell with the name of its mix of lengths."""

    mix: str
    cell: Cell

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.mix}, {self.cell.dtype}, block {self.cell.block_size}"

    def shrunk(self) -> Shape:
        """The same mix with few and short sequences of few heads, for the interpreter."""
        lens = tuple(min(160, 16 + n // 512) for n in self.cell.lens[:3])
        return self._replace(cell=replace(self.cell, lens=lens, num_q_heads=4, num_kv_heads=1, head_dim=32))


def mixes() -> list[Shape]:
    """Every mix in bf16 and int8, in blocks of 16 and 64: one Llama-3-8B layer."""
    return [
        Shape(mix, _llama(lens, dtype, block_size))
        for block_size in (16, 64)
        for dtype in ("bf16", "int8")
        for mix, lens in MIXES.items()
    ]


def growth() -> list[Shape]:
    """Contexts from 1k to 128k."""
    return [Shape(mix, _llama(lens, dtype, 16)) for dtype in ("bf16", "int8") for mix, lens in GROWTH.items()]


def beside_peers() -> list[Shape]:
    """Where the peers run too. FlashAttention knows blocks of 256 and no others."""
    names = ("B1 32k", "B32 8k", "1 x 128k + 63 x 1k")
    shapes = [Shape(name, _llama(MIXES[name], dtype, 16)) for dtype in ("bf16", "int8") for name in names]
    return [*shapes, Shape("B32 8k", _llama(MIXES["B32 8k"], "bf16", 256))]


def _llama(lens: tuple[int, ...], dtype: str, block_size: int) -> Cell:
    return Cell(lens, dtype, block_size, num_q_heads=32, num_kv_heads=8, head_dim=128)


def run_bandwidth(device: str, num_bytes: int = COPY_BYTES) -> dict[str, float]:
    """Bytes per second of a sum over the memory, and of a copy, whose reads and writes both count."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return {
        "read": num_bytes / _fastest(lambda: source.sum(), device),
        "copy": 2 * num_bytes / _fastest(lambda: target.copy_(source), device),
    }


def _fastest(work: Any, device: str) -> float:
    contender = Contender("", lambda index: work(), 0)
    contender.call(0)
    return min(call_seconds(contender, 0, device) for _ in range(ROUNDS))


def run_shape(shape: Shape, backends: tuple[str, ...], peers: tuple[str, ...], device: str) -> CellResult:
    """Time a shape, after a check of every result against the torch backend."""
    is_gpu = torch.device(device).type == "cuda"
    cold, least = (COLD_BYTES, 5) if is_gpu else (1, 1)
    plan = Plan(
        backends,
        peers,
        seconds=0.3 if is_gpu else 0.0,
        cold_bytes=cold,
        max_bytes=int(SHARE_OF_MEMORY * available_bytes(device)),
        device=device,
        least_rounds=least,
    )
    return measure_cell(shape.cell, plan)
