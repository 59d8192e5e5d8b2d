"""``plan_splits``: decide on the device how sequences are cut into work items."""

from itertools import pairwise

import torch
import triton
from torch import Tensor

from pagedkv.arithmetic import div_ceil
from pagedkv.attention.arguments import checked_window
from pagedkv.attention.triton_backend.device import device_mismatch, num_multiprocessors, on_device
from pagedkv.attention.triton_backend.plan_kernel import plan_kernel
from pagedkv.errors import PagedKVError

# Below this a part spends more on its start and its partial result (3 % of the traffic at 256 tokens of
# Llama-3-8B, 13 % at 64) than a better balance returns.
MIN_CHUNK = 256

# A chunk is a multiple of the tile of every kernel.
CHUNK_MULTIPLE = 128

# Three items for each of two programs per multiprocessor. In a model of 264 such places, where a program
# costs 96 tokens beside its own, long batches then keep 77..95 % of them busy (one of 128k among 63 of 1k:
# 93 %); with one item it is 54..96 %, and from four on the starts and the merge cost more than they balance.
ITEMS_PER_SM = 2 * 3

# There is no chip under the interpreter: few items, so that small tests still split.
INTERPRETED_TARGET = 8

_SEQS_PER_PASS = 1024


def plan_splits(
    seq_lens: Tensor,
    *,
    target: int,
    q_len: int = 1,
    window: int | None = None,
    min_chunk: int = MIN_CHUNK,
    out: Tensor | None = None,
) -> Tensor:
    """Cut sequences into parts of about equal length: one long sequence among short ones keeps all busy.

    ::

        chunk = max(min_chunk, ceil(sum(read_len) / target)), rounded up to 128 tokens
        parts of a sequence = max(1, ceil(read_len / chunk))            their sum <= num_seqs + target, always

    The number of work items is bounded whatever the lengths are, so one launch grid and one buffer serve
    every batch of this size: captured in a CUDA graph, the plan stays right as sequences grow. One plan
    serves every layer of a step that shares the window. A plan made for other lengths costs balance, never
    correctness.

    Args:
        seq_lens: [num_seqs] int32, as in ``paged_attention``.
        target: work items per KV head to aim at, 1 and more; ``default_target`` fits the device.
        q_len: query tokens per sequence.
        window: of the layers that will use the plan.
        min_chunk: a sequence of no more tokens stays whole.
        out: contiguous int32 [2 * num_seqs + target + 2], filled and returned if given.

    Returns:
        int32 [2 * num_seqs + target + 2], for ``paged_attention(plan=...)``; ``plan_kernel`` draws it.

    Raises:
        PagedKVError: an argument that does not fit.

    Cost: one launch of one block, O(num_seqs + target). The host does not wait.
    """
    num_seqs = _checked_lens(seq_lens)
    for name, value in (("target", target), ("q_len", q_len), ("min_chunk", min_chunk)):
        if value < 1:
            raise PagedKVError(f"{name} must be at least 1, got {value}")
    max_read = None if window is None else checked_window(window) + q_len - 1
    size = 2 * num_seqs + target + 2
    if out is None:
        out = torch.empty(size, dtype=torch.int32, device=seq_lens.device)
    elif out.shape != (size,) or out.dtype != torch.int32 or not out.is_contiguous():
        raise PagedKVError(f"out must be contiguous int32 ({size},), got {out.dtype} {tuple(out.shape)}")
    if out.device != seq_lens.device:
        raise PagedKVError(f"out is on {out.device}, seq_lens on {seq_lens.device}")
    block = min(_SEQS_PER_PASS, max(16, triton.next_power_of_2(num_seqs)))
    with on_device(seq_lens):
        plan_kernel[(1,)](
            seq_lens,
            out,
            num_seqs,
            target,
            max_read,
            min_chunk,
            seq_lens.stride(0),
            ROUND=CHUNK_MULTIPLE,
            BLOCK=block,
            num_warps=4,
        )
    return out


def check_plan(plan: Tensor, num_seqs: int) -> None:
    """Raise ``PagedKVError`` unless the plan is one for so many sequences, of any lengths. The host waits."""
    entries = plan.tolist()
    indptr, items = entries[1 : num_seqs + 2], entries[num_seqs + 2 :]
    num_parts = [end - begin for begin, end in pairwise(indptr)]
    split = [seq for seq, n in enumerate(num_parts) for _ in range(n)]
    whole = [seq for seq, n in enumerate(num_parts) if n == 0]
    surplus = len(items) - len(split) - len(whole)
    if indptr[0] != 0 or items != [*split, *whole, *[-1] * surplus]:
        raise PagedKVError(
            f"plan must come from plan_splits for {num_seqs} sequences: "
            f"its indptr {indptr[:4]}... and its work items {items[:4]}... do not agree"
        )


def default_target(device: torch.device, num_kv_heads: int) -> int:
    """Work items per KV head that fill a device: ``ceil(6 * multiprocessors / num_kv_heads)``."""
    if device.type != "cuda":
        return INTERPRETED_TARGET
    return div_ceil(ITEMS_PER_SM * num_multiprocessors(device), num_kv_heads)


def _checked_lens(seq_lens: Tensor) -> int:
    if seq_lens.dim() != 1 or seq_lens.dtype != torch.int32:
        raise PagedKVError(f"seq_lens must be int32 [num_seqs], got {seq_lens.dtype} {tuple(seq_lens.shape)}")
    mismatch = device_mismatch(seq_lens)
    if mismatch is not None:
        raise PagedKVError(f"plan_splits cannot run: {mismatch}")
    return len(seq_lens)
