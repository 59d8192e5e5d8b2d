"""FlashInfer and vLLM's Triton kernel as peers over the same storage, planned before the clock runs."""

from typing import Any

import torch
from torch import Tensor

from pagedkv.attention.bench.cell import ColdSets
from pagedkv.attention.bench.contender import Contender

# FlashInfer's advice for its workspace of partial results.
_WORKSPACE_BYTES = 128 * 2**20

# As vLLM's backend chooses them: 16 parts of each sequence, while the batch alone does not fill the chip.
_VLLM_SEGMENTS = 16
_VLLM_LEAST_GRID = 128


def flashinfer(sets: ColdSets) -> Contender | str:
    """Its paged decode with a plan per set, made before the clock runs; or why there is none."""
    try:
        import flashinfer as package
    except Exception as error:  # its imports fail in many ways, none of which concerns the others
        return f"not importable here: {type(error).__name__}: {error}"
    cell, kv = sets.cell, sets.kv
    if cell.dtype not in ("bf16", "fp16", "fp8-e4m3"):
        return f"no {cell.dtype} cache"
    # the order of the dimensions in memory, which it wants to be told
    layout, pages = sets.storage.layout, (kv.k, kv.v)
    if layout == "NHD":
        pages = (kv.k.transpose(1, 2), kv.v.transpose(1, 2))
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=sets.q.device)
    wrappers: list[Any] = []
    for table in sets.tables:
        wrapper = package.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=True)
        indptr, indices, last = _csr(sets, table)
        wrapper.plan(
            indptr,
            indices,
            last,
            cell.num_q_heads,
            cell.num_kv_heads,
            cell.head_dim,
            cell.block_size,
            q_data_type=cell.compute_dtype,
            kv_data_type=kv.k.dtype,
        )
        wrappers.append(wrapper)

    def call(index: int) -> Tensor:
        out: Tensor = wrappers[index].run(sets.q, pages)
        return out

    return Contender("flashinfer-planned", call, cell.kv_bytes)


def _csr(sets: ColdSets, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A table as FlashInfer names it: indptr, indices and the tokens in each last page, int32."""
    size = sets.cell.block_size
    counts = torch.tensor([-(-n // size) for n in sets.cell.lens], dtype=torch.int32, device=table.device)
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    columns = torch.arange(table.shape[1], device=table.device)
    return indptr, table[columns < counts.unsqueeze(1)], (sets.lens - (counts - 1) * size).int()


def vllm_triton(sets: ColdSets) -> Contender | str:
    """vLLM's unified attention, split as vLLM splits a decode step; int8 with scales per token and head."""
    cell, kv = sets.cell, sets.kv
    if cell.dtype == "fp8-e4m3":
        return "its fp8 cache goes with scales"
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode
    except Exception as error:
        return f"not importable here: {type(error).__name__}: {error}"
    device, padded_dim = sets.q.device, 1 << (cell.head_dim - 1).bit_length()
    threshold = max(1, _VLLM_LEAST_GRID // cell.num_kv_heads)
    parts = (threshold, cell.num_q_heads, _VLLM_SEGMENTS)
    options: dict[str, Any] = {
        "softmax_segm_output": torch.empty(*parts, padded_dim, device=device),
        "softmax_segm_max": torch.empty(parts, device=device),
        "softmax_segm_expsum": torch.empty(parts, device=device),
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": _VLLM_SEGMENTS,
    }
    if kv.k_scale is not None and kv.v_scale is not None:
        options["kv_quant_mode"] = KVQuantMode.INT8_PER_TOKEN_HEAD
        options["k_scale_cache"] = kv.k_scale.transpose(1, 2)
        options["v_scale_cache"] = kv.v_scale.transpose(1, 2)
    starts = torch.arange(cell.batch + 1, dtype=torch.int32, device=device)
    k, v = kv.k.transpose(1, 2), kv.v.transpose(1, 2)  # [blocks, slots, heads, dim], any strides

    def call(index: int) -> Tensor:
        out = torch.empty_like(sets.q)
        unified_attention(
            q=sets.q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=sets.lens,
            max_seqlen_k=cell.context,
            softmax_scale=cell.head_dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=sets.tables[index],
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            **options,
        )
        return out

    return Contender("vllm-triton", call, cell.kv_bytes)
