"""FlashInfer's paged decode over the same storage; used only when asked for by name.

It plans on the host at every call, for which the host waits. An engine that plans once per step embeds
FlashInfer itself, with ``manager.tables.write_csr`` and the views of the storage.
"""

import importlib.util
import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedkv.attention.arguments import AttentionArguments

# FlashInfer's advice for its workspace of partial results.
WORKSPACE_BYTES = 128 * 2**20


class CSR(NamedTuple):
    """A batch as FlashInfer names it: sequence i has the pages ``indices[indptr[i]:indptr[i + 1]]``.

    indptr: [num_seqs + 1] int32.    indices: [pages] int32.
    last_page_len: [num_seqs] int32, tokens in the last page, 0 without pages.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def unavailable() -> str | None:
    """It needs the package and a CUDA device."""
    if importlib.util.find_spec("flashinfer") is None:
        return "no module flashinfer; install it with: pip install flashinfer-python"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def unsupported(args: AttentionArguments) -> str | None:
    """The features that its decode wrapper lacks, or that this adapter does not pass on."""
    if args.q.dtype not in (torch.float16, torch.bfloat16):
        return f"queries of {args.q.dtype} (it has fp16 and bf16)"
    if args.k.dtype not in (args.q.dtype, torch.float8_e4m3fn):
        return f"a cache of {args.k.dtype} under queries of {args.q.dtype}"
    if args.sinks is not None or args.block_mass is not None:
        return "sinks and block_mass"
    if args.k.shape[3] != args.v.shape[3]:
        return f"values of another width ({args.v.shape[3]}) than the keys ({args.k.shape[3]})"
    if args.q_len > 1 and args.window is not None:
        return "a window with several query tokens"
    if _layout(args.k) is None or _layout(args.k) != _layout(args.v):
        return f"blocks that are neither HND nor NHD (strides {args.k.stride()} and {args.v.stride()})"
    return None


@torch.no_grad()
def attend(args: AttentionArguments) -> None:
    """Fill the outputs. Its LSE is in base 2 and is converted; queries that see nothing are set by us."""
    args.check_contents()
    layout = _layout(args.k)
    wrapper = _wrapper(args.q.device, layout)
    csr = to_csr(args)
    wrapper.plan(
        csr.indptr,
        csr.indices,
        csr.last_page_len,
        args.q.shape[2],
        args.k.shape[1],
        args.k.shape[3],
        args.block_size,
        window_left=-1 if args.window is None else args.window - 1,
        logits_soft_cap=args.softcap or 0.0,
        q_data_type=args.q.dtype,
        kv_data_type=args.k.dtype,
        sm_scale=args.scale,
        q_len_per_req=args.q_len,
    )
    pages = (args.k, args.v) if layout == "HND" else (args.k.transpose(1, 2), args.v.transpose(1, 2))
    out, lse = wrapper.run(args.q.flatten(0, 1), pages, return_lse=True)
    blind = args.blind()
    args.out.copy_(out.view(args.out.shape).masked_fill(blind[..., None, None], 0))
    if args.lse is not None:
        natural = lse.view(args.lse.shape) * math.log(2)
        args.lse.copy_(natural.masked_fill(blind.unsqueeze(-1), -torch.inf))


def to_csr(args: AttentionArguments) -> CSR:
    """The tables of a call in FlashInfer's dialect. The host waits for the number of pages.

    Entries wholly before the window, which may name anything, become block 0.
    """
    block_size, lens = args.block_size, args.seq_lens.long()
    counts = (lens + block_size - 1) // block_size
    columns = torch.arange(args.block_tables.shape[1], device=lens.device)
    ids = args.block_tables
    if args.window is not None:
        first_read = (lens - args.q_len + 1 - args.window).clamp_min(0) // block_size
        ids = ids.masked_fill(columns < first_read.unsqueeze(1), 0)
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    last_page_len = (lens - (counts - 1).clamp_min(0) * block_size).int()
    return CSR(indptr, ids[columns < counts.unsqueeze(1)], last_page_len)


def _layout(blocks: Tensor) -> str | None:
    _, heads, slots, dim = blocks.shape
    layouts = {(slots * dim, dim, 1): "HND", (dim, heads * dim, 1): "NHD"}
    return layouts.get((blocks.stride(1), blocks.stride(2), blocks.stride(3)))


@cache
def _wrapper(device: torch.device, layout: str) -> Any:
    import flashinfer

    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=True)
