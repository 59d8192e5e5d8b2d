"""FlexAttention over torch's experimental PagedAttention as a peer."""

import warnings

import torch
from torch import Tensor

from pagedkv.attention.bench.cell import ColdSets
from pagedkv.attention.bench.contender import Contender


def make(sets: ColdSets) -> Contender | str:
    """A contender over a copy of the sets in PagedAttention's layout; or why there is none."""
    try:
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask
    except ImportError as error:
        return f"this torch has none: {error}"
    cell, device = sets.cell, sets.q.device
    num_rows = sets.storage.num_blocks + 1
    shape = (1, cell.num_kv_heads, num_rows * cell.block_size, cell.head_dim)
    k_cache, v_cache = (_head_major(x, scale, cell.compute_dtype).view(shape) for x, scale in _kinds(sets))
    logical = create_block_mask(
        noop_mask, cell.batch, 1, 1, cell.context, device=device, BLOCK_SIZE=(1, cell.block_size)
    )
    pages = PagedAttention(num_rows, cell.block_size, cell.batch, device=str(device))
    masks = []
    for table in sets.tables:
        # its own allocator hands pages out in order; the tables here are the ones that all contenders read,
        # and as no two of them share a block, the way back from a page can be kept for all of them
        pages.page_table[:, : table.shape[1]] = table
        columns = torch.arange(table.shape[1], device=device).expand(cell.batch, -1)
        pages.physical_to_logical.scatter_(1, table.long(), columns)
        masks.append(pages.convert_logical_block_mask(logical, kv_len=sets.lens))
    compiled = torch.compile(flex_attention, dynamic=False)
    q = sets.q.unsqueeze(2)

    def call(index: int) -> Tensor:
        out = compiled(q, k_cache, v_cache, block_mask=masks[index], enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.squeeze(2)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(0)
    except Exception as error:  # a missing compiler is one of many things that the compilation may meet
        return f"not compiled: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Contender("flex", call, cell.float_bytes)


def _kinds(sets: ColdSets) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    return (sets.kv.k, sets.kv.k_scale), (sets.kv.v, sets.kv.v_scale)


def _head_major(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[num_kv_heads, num_rows, block_size, head_dim] in the compute dtype."""
    values = values.to(dtype)
    if scale is not None:
        values = values * scale.unsqueeze(-1).to(dtype)
    return values.transpose(0, 1).contiguous()
