"""Turn the base-2 logarithms that the attention kernel left in ``block_mass`` into shares of the whole.

::

    one program = one sequence x one row (query token, query head) x COLUMNS blocks

    block_mass   [ ? ? | log2 sum exp2(s)  . . . . . | ? ? ]    in
                 [ 0 0 | exp2(x - lse)     . . . . . | 0 0 ]    out
                 before the window       read       beyond the sequence
"""

import triton
import triton.language as tl

from pagedkv.attention.triton_backend.numerics import LOG2_E


@triton.jit(
    do_not_specialize=["window", "max_blocks", "mass_stride_seq", "mass_stride_token", "mass_stride_head"]
)
def mass_kernel(
    seq_lens,
    lse,
    block_mass,
    window,
    max_blocks,
    num_q_heads,
    len_stride_seq,
    lse_stride_seq,
    lse_stride_token,
    lse_stride_head,
    mass_stride_seq,
    mass_stride_token,
    mass_stride_head,
    mass_stride_block,
    Q_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (q_len * num_q_heads, num_seqs, cdiv(max_blocks, COLUMNS)). lse is the final one, natural."""
    token = (tl.program_id(0) // num_q_heads).to(tl.int64)
    head = (tl.program_id(0) % num_q_heads).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    n = tl.maximum(tl.load(seq_lens + seq * len_stride_seq), 0)
    first = 0
    if window is not None:
        first = tl.maximum(n - (Q_LEN - 1) - window, 0)
    row_lse = tl.load(lse + seq * lse_stride_seq + token * lse_stride_token + head * lse_stride_head) * LOG2_E
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row = block_mass + seq * mass_stride_seq + token * mass_stride_token + head * mass_stride_head
    read = (columns >= first // BLOCK_SIZE) & (columns < tl.cdiv(n, BLOCK_SIZE))
    logs = tl.load(row + columns * mass_stride_block, mask=read & (columns < max_blocks), other=float("-inf"))
    # an LSE of -inf: nothing was seen, and every sum is -inf too
    mass = tl.exp2(logs - tl.where(row_lse == float("-inf"), 0.0, row_lse))
    tl.store(row + columns * mass_stride_block, mass, mask=columns < max_blocks)
