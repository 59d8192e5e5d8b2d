"""Where the rows of a program go: to the outputs if their sequence is whole, else to the partial results."""

import triton
import triton.language as tl

from pagedkv.attention.triton_backend.numerics import LN_2, log_sum, stored


@triton.jit
def store_rows(
    weighted,
    peak,
    total,
    rows,
    dims,
    seq,
    item,
    num_parts,
    kv_head,
    num_kv_heads,
    out,
    lse,
    part_out,
    part_lse,
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
):
    """Normalise and store ``rows`` (query token * GROUP + head of the group) of one KV head.

    weighted: [M, dims] sum of weight * value. peak, total: [M], the softmax in base 2.
    out, lse: the tensors of the call, lse may be None and takes the natural logarithm.
    part_out, part_lse: fp32 [num_items, num_kv_heads, ROWS, V_HEAD_DIM] and [..., ROWS] in base 2.
    """
    # where nothing was seen the sum of values is 0, over 1
    values = weighted / tl.where(total > 0, total, 1.0)[:, None]
    row_lse = log_sum(peak, total)
    mask = rows < ROWS
    mask_2d = mask[:, None] & (dims < V_HEAD_DIM)[None, :]
    if num_parts > 1:
        flat = (item * num_kv_heads + kv_head).to(tl.int64) * ROWS + rows
        tl.store(part_lse + flat, row_lse, mask=mask)
        tl.store(part_out + flat[:, None] * V_HEAD_DIM + dims[None, :], values, mask=mask_2d)
    else:
        store_final(
            values,
            row_lse,
            rows,
            dims,
            mask,
            mask_2d,
            seq,
            kv_head,
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


@triton.jit
def store_final(
    values,
    row_lse,
    rows,
    dims,
    mask,
    mask_2d,
    seq,
    kv_head,
    out,
    lse,
    out_stride_seq,
    out_stride_token,
    out_stride_head,
    out_stride_dim,
    lse_stride_seq,
    lse_stride_token,
    lse_stride_head,
    GROUP: tl.constexpr,
):
    """Store normalised ``values`` [M, dims] and ``row_lse`` [M] (base 2) where the caller wants them."""
    seq = seq.to(tl.int64)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    out_rows = out + seq * out_stride_seq + tokens * out_stride_token + heads * out_stride_head
    target = out_rows[:, None] + dims[None, :] * out_stride_dim
    tl.store(target, stored(values, out.dtype.element_ty), mask=mask_2d)
    if lse is not None:
        lse_rows = lse + seq * lse_stride_seq + tokens * lse_stride_token + heads * lse_stride_head
        tl.store(lse_rows, row_lse * LN_2, mask=mask)
