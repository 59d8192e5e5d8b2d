"""The ceiling of a measurement: how fast this machine reads the same blocks and does nothing else."""

import torch
from torch import Tensor

from pagedkv import native
from pagedkv.attention.bench.cell import ColdSets
from pagedkv.attention.bench.contender import Contender

NAME = "read ceiling"


def read_ceiling(sets: ColdSets) -> tuple[Contender, str]:
    """A read-only pass over K and V of a set, and how it reads."""
    if sets.q.device.type == "cpu" and native.reason() is None:
        return _by_blocks(sets), "the native library reads K and V of the same blocks, on the same threads"
    return _in_order(sets), "torch.sum over as many bytes of the pool, in the order of memory"


def _by_blocks(sets: ColdSets) -> Contender:
    read, struct = native.library().pagedkv_read_blocks, native.Call("12q")
    k, v = sets.kv.k, sets.kv.v
    # a block is dense in every layout
    block_bytes = [x[0].numel() * x.element_size() for x in (k, v)]
    block_strides = [x.stride(0) * x.element_size() for x in (k, v)]
    sizes = (sets.cell.batch, sets.cell.block_size, *block_bytes, *block_strides)

    def call(index: int) -> Tensor:
        table = sets.tables[index]
        pointers = (k.data_ptr(), v.data_ptr(), table.data_ptr(), sets.lens.data_ptr())
        read(struct.pack(*pointers, *sizes, table.stride(0), torch.get_num_threads()))
        return sets.lens

    return Contender(NAME, call, sets.cell.num_blocks * sum(block_bytes))


def _in_order(sets: ColdSets) -> Contender:
    # int64, because adding it costs the same for every pattern of bits, which floats do not
    parts = [_words(buffer) for buffer in sets.storage.buffers]
    sizes = [len(words) // (sets.storage.num_blocks + 1) * sets.cell.num_blocks for words in parts]

    def call(index: int) -> Tensor:
        total = parts[0].new_zeros(())
        for words, size in zip(parts, sizes, strict=True):
            total = total + words[index * size : (index + 1) * size].sum()
        return total

    return Contender(NAME, call, 8 * sum(sizes))


def _words(buffer: Tensor) -> Tensor:
    """The memory of a buffer as int64, whatever its layout; a rest of less than 8 bytes is left out."""
    flat = buffer.as_strided((buffer.numel(),), (1,)).view(torch.uint8)
    return flat[: len(flat) // 8 * 8].view(torch.int64)
