"""Merge the partial results of split sequences by their log-sum-exp.

::

    one program = one sequence x one row (query token, query head)

    part_lse   [ . . . . | . . . . | . . ]      PARTS at a time, rows indptr[seq] .. indptr[seq + 1] - 1
    part_out   [ . . . . | . . . . | . . ] x DV     out = sum exp2(lse_i - lse) * out_i

    A sequence that is not split was written by its only part: its programs leave at once.
"""

import triton
import triton.language as tl

from pagedkv.attention.triton_backend.numerics import log_sum, softmax_step
from pagedkv.attention.triton_backend.store import store_final


@triton.jit
def merge_kernel(
    part_out,
    part_lse,
    plan,
    out,
    lse,
    num_kv_heads,
    out_stride_seq,
    out_stride_token,
    out_stride_head,
    out_stride_dim,
    lse_stride_seq,
    lse_stride_token,
    lse_stride_head,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    DV: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid (num_kv_heads * ROWS, num_seqs). Shapes and strides as in ``store_rows``."""
    kv_row = tl.program_id(0)
    seq = tl.program_id(1)
    begin = tl.load(plan + 1 + seq)
    end = tl.load(plan + 2 + seq)
    if begin == end:
        return
    dims = tl.arange(0, DV)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([1, DV], tl.float32)
    for start in range(begin, end, PARTS):
        parts = start + tl.arange(0, PARTS)
        used = parts < end
        flat = parts.to(tl.int64) * num_kv_heads * ROWS + kv_row
        part_lses = tl.load(part_lse + flat, mask=used, other=float("-inf"))
        values = tl.load(
            part_out + flat[:, None] * V_HEAD_DIM + dims[None, :],
            mask=used[:, None] & (dims < V_HEAD_DIM)[None, :],
            other=0.0,
        )
        weights, decay, peak, _ = softmax_step(part_lses[None, :], peak)
        total = total * decay + tl.sum(weights, 1)
        merged = merged * decay[:, None] + tl.sum(tl.trans(weights) * values, 0)[None, :]
    values = merged / tl.where(total > 0, total, 1.0)[:, None]
    row_lse = log_sum(peak, total)
    rows = tl.full([1], 0, tl.int32) + kv_row % ROWS
    store_final(
        values,
        row_lse,
        rows,
        dims,
        rows < ROWS,
        (rows < ROWS)[:, None] & (dims < V_HEAD_DIM)[None, :],
        seq,
        kv_row // ROWS,
        out,
        lse,
        out_stride_seq,
        out_stride_token,
        out_stride_head,
        out_stride_dim,
        lse_stride_seq,
        lse_stride_token,
        lse_stride_head,
        GROUP,
    )
