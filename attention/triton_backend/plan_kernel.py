"""The work plan: into how many parts each sequence is cut. Written by one block, read by every other kernel.

::

    seq_lens 900 100 0 2000, chunk_len 512         parts ceil(n / 512), at least 1:   2  1  1  4

    plan   [ chunk_len | indptr: 0 2 2 2 6 | item: 0 0 3 3 3 3 1 2 -1 -1 ]
                         num_seqs + 1        split sequences   |    surplus
                                             part by part      whole sequences

    item i of a split sequence s is its part i - indptr[s] and owns row i of the partial results;
    indptr[s] == indptr[s + 1]: s is not split, its one item writes the output itself.
"""

import triton
import triton.language as tl


@triton.jit
def work_item(plan, item, num_seqs):
    """Sequence, part and number of parts of a work item. A sequence of -1: there is nothing to do."""
    seq = tl.load(plan + num_seqs + 2 + item)
    # a plan for more sequences is a mistake, but must not write outside
    seq = tl.where(seq < num_seqs, seq, -1)
    row = tl.maximum(seq, 0)
    begin = tl.load(plan + 1 + row)
    num_parts = tl.load(plan + 2 + row) - begin
    part = tl.where(num_parts > 0, item - begin, 0)
    return seq, part, tl.maximum(num_parts, 1)


@triton.jit
def part_of_blocks(
    n, window, part, num_parts, Q_LEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr
):
    """First position that a sequence of n tokens reads, and the blocks [begin, end) of one of its parts.

    The blocks that are read are cut evenly, in units of UNIT. The cut is made here and not by the plan, so
    that no block belongs to two parts and a plan made for other lengths costs balance, never correctness.
    """
    first = 0
    if window is not None:
        first = tl.maximum(n - (Q_LEN - 1) - window, 0)
    first_block = first // BLOCK_SIZE
    end_block = tl.cdiv(n, BLOCK_SIZE)
    units = tl.cdiv(end_block - first_block, UNIT)
    begin = first_block + UNIT * (units * part // num_parts)
    end = first_block + UNIT * (units * (part + 1) // num_parts)
    return first, begin, tl.minimum(end, end_block)


@triton.jit(do_not_specialize=["num_seqs", "target", "max_read", "min_chunk"])
def plan_kernel(
    seq_lens,
    plan,
    num_seqs,
    target,
    max_read,
    min_chunk,
    stride_len,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program. Every pass walks the sequences BLOCK at a time.

    seq_lens: [num_seqs] int32. plan: [2 * num_seqs + target + 2] int32, filled.
    max_read: tokens that a sequence reads at most, None without a window.
    """
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((), tl.int64)
    for start in range(0, num_seqs, BLOCK):
        total += tl.sum(_read_lens(seq_lens, start + lanes, num_seqs, stride_len, max_read).to(tl.int64), 0)
    even = tl.maximum(tl.cdiv(total, target), min_chunk)
    chunk = (tl.cdiv(even, ROUND) * ROUND).to(tl.int32)
    tl.store(plan, chunk)

    num_split_items = tl.zeros((), tl.int32)
    for start in range(0, num_seqs, BLOCK):
        parts = tl.cdiv(_read_lens(seq_lens, start + lanes, num_seqs, stride_len, max_read), chunk)
        split = tl.where(parts > 1, parts, 0)
        ends = num_split_items + tl.cumsum(split, 0)
        tl.store(plan + 2 + start + lanes, ends, mask=start + lanes < num_seqs)
        num_split_items += tl.sum(split, 0)
    tl.store(plan + 1, 0)

    items = plan + num_seqs + 2
    num_split = tl.zeros((), tl.int32)
    num_whole = tl.zeros((), tl.int32)
    for start in range(0, num_seqs, BLOCK):
        seqs = start + lanes
        parts = tl.cdiv(_read_lens(seq_lens, seqs, num_seqs, stride_len, max_read), chunk)
        split = tl.where(parts > 1, parts, 0)
        begins = num_split + tl.cumsum(split, 0) - split
        for part in range(0, tl.max(split, 0)):
            tl.store(items + begins + part, seqs, mask=part < split)
        whole = ((parts <= 1) & (seqs < num_seqs)).to(tl.int32)
        tl.store(items + num_split_items + num_whole + tl.cumsum(whole, 0) - 1, seqs, mask=whole > 0)
        num_split += tl.sum(split, 0)
        num_whole += tl.sum(whole, 0)

    for start in range(num_split + num_whole, num_seqs + target, BLOCK):
        tl.store(items + start + lanes, -1, mask=start + lanes < num_seqs + target)


@triton.jit
def _read_lens(seq_lens, seqs, num_seqs, stride_len, max_read):
    """Tokens that each sequence reads; 0 beyond the last sequence."""
    n = tl.maximum(tl.load(seq_lens + seqs * stride_len, mask=seqs < num_seqs, other=0), 0)
    if max_read is not None:
        n = tl.minimum(n, max_read)
    return n
