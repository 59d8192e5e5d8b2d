"""Decode attention over float blocks.

::

    one program = one KV head x one part of a sequence x up to M query rows

    M rows = (query token, head of the group), token-major        a step = one tile of keys and of values

                  whole blocks  PAGES x SLOTS = TILE tokens
                   ________________________________
                  | block id 7 | block id 2 | ...   |   K [TILE, D], 16-byte loads; one table entry per block
                  |____________|____________|_______|
     q [M, D]  x   s [M, TILE] -> mask -> weights        sum over SLOTS: the mass of each block
                   ________________________________
                  | block id 7 | block id 2 | ...   |   V [TILE, DV]
                  |____________|____________|_______|
                   weighted [M, DV] += weights x V

    short blocks: SLOTS = block_size, PAGES = TILE / SLOTS, SPLITS = 1        ``tile`` draws it
    long blocks:  SLOTS = TILE, PAGES = 1, a block is SPLITS tiles
"""

import triton
import triton.language as tl

from pagedkv.attention.triton_backend.numerics import (
    LOG2_E,
    dot,
    operand,
    rounded,
    sink_weight,
    soft_cap,
    softmax_step,
)
from pagedkv.attention.triton_backend.plan_kernel import part_of_blocks, work_item
from pagedkv.attention.triton_backend.store import store_rows
from pagedkv.attention.triton_backend.tile import row_offsets, seen_by, store_block_sums, tile_range


@triton.jit(do_not_specialize=["num_seqs", "num_kv_heads", "window"])
def decode_kernel(
    q,
    k,
    v,
    block_tables,
    seq_lens,
    sinks,
    plan,
    out,
    lse,
    block_mass,
    part_out,
    part_lse,
    num_seqs,
    num_kv_heads,
    scale,
    window,
    softcap,
    q_stride_seq,
    q_stride_token,
    q_stride_head,
    q_stride_dim,
    k_stride_block,
    k_stride_head,
    k_stride_slot,
    k_stride_dim,
    v_stride_block,
    v_stride_head,
    v_stride_slot,
    v_stride_dim,
    table_stride_seq,
    table_stride_block,
    len_stride_seq,
    sink_stride_head,
    out_stride_seq,
    out_stride_token,
    out_stride_head,
    out_stride_dim,
    lse_stride_seq,
    lse_stride_token,
    lse_stride_head,
    mass_stride_seq,
    mass_stride_token,
    mass_stride_head,
    mass_stride_block,
    DTYPE: tl.constexpr,
    Q_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    M_TILES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Grid (num_kv_heads * M_TILES, num_items); tensors of ``paged_attention``, plan of ``plan_kernel``.

    sinks, lse, block_mass, window and softcap may be None. block_mass takes, for the blocks that are read,
    the sum of exp2(logit) as a base-2 logarithm; ``mass_kernel`` makes it a share of the whole.
    """
    item = tl.program_id(1)
    seq, part, num_parts = work_item(plan, item, num_seqs)
    if seq < 0:
        return
    kv_head = tl.program_id(0) // M_TILES
    seq_64 = seq.to(tl.int64)
    n = tl.maximum(tl.load(seq_lens + seq_64 * len_stride_seq), 0)
    first, begin, end = part_of_blocks(n, window, part, num_parts, Q_LEN, BLOCK_SIZE, PAGES)

    rows = tl.program_id(0) % M_TILES * M + tl.arange(0, M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = rows < Q_LEN * GROUP
    dims = tl.arange(0, D)
    v_dims = tl.arange(0, DV)
    q_rows = q + seq_64 * q_stride_seq + tokens * q_stride_token + heads * q_stride_head
    q_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = operand(tl.load(q_rows[:, None] + dims[None, :] * q_stride_dim, mask=q_mask, other=0.0), DTYPE)

    peak = tl.full([M], float("-inf"), tl.float32)
    # the sum of weights is kept per column of the tile: one reduction less in every step
    totals = tl.zeros([M, PAGES * SLOTS], tl.float32)
    if sinks is not None:
        # one more logit, without a value, seen by the first part
        sink_rows = tl.where(part == 0, Q_LEN * GROUP, 0)
        sink = tl.load(sinks + heads * sink_stride_head, mask=rows < sink_rows, other=float("-inf"))
        peak = sink.to(tl.float32) * LOG2_E
    weighted = tl.zeros([M, DV], tl.float32)
    block_total = tl.zeros([M, PAGES], tl.float32)

    table = block_tables + seq_64 * table_stride_seq
    k_head = k + tl.multiple_of(kv_head.to(tl.int64) * k_stride_head, ALIGN)
    v_head = v + tl.multiple_of(kv_head.to(tl.int64) * v_stride_head, ALIGN)
    mass_rows = None
    if block_mass is not None:
        mass_rows = block_mass + seq_64 * mass_stride_seq
        mass_rows += tokens.to(tl.int64) * mass_stride_token + heads.to(tl.int64) * mass_stride_head
    first_tile, end_tile = tile_range(n, first, begin, end, BLOCK_SIZE, SLOTS, SPLITS)
    for tile in range(first_tile, end_tile, PAGES):
        blocks = tile // SPLITS + tl.arange(0, PAGES)
        slots = tile % SPLITS * SLOTS + tl.arange(0, SLOTS)
        ids = tl.load(table + blocks * table_stride_block, mask=blocks < end, other=0)
        position = blocks[:, None] * BLOCK_SIZE + slots[None, :]
        # what stands in an unused slot may be NaN, which a weight of 0 does not silence
        used = (position >= first) & (position < n) & (slots < BLOCK_SIZE)[None, :]
        used_rows = tl.reshape(used, [PAGES * SLOTS])[:, None]
        k_rows = row_offsets(ids, slots, k_stride_block, k_stride_slot, ALIGN)
        k_tile = tl.load(
            k_head + k_rows[:, None] + dims[None, :] * k_stride_dim,
            mask=used_rows & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        s = scale * dot(q_tile, tl.trans(operand(k_tile, DTYPE)), None)
        if softcap is not None:
            s = soft_cap(s, softcap)
        seen = seen_by(tokens, tile, n, first, window, Q_LEN, BLOCK_SIZE, SLOTS, PAGES, SPLITS)
        s = tl.where(seen, s * LOG2_E, float("-inf"))
        weights, decay, peak, base = softmax_step(s, peak)
        totals = totals * decay[:, None] + weights
        if block_mass is not None:
            block_total = store_block_sums(
                mass_rows,
                mass_stride_block,
                weights,
                decay,
                base,
                block_total,
                tile,
                blocks,
                row_mask,
                end,
                M,
                SLOTS,
                PAGES,
                SPLITS,
            )
        v_rows = row_offsets(ids, slots, v_stride_block, v_stride_slot, ALIGN)
        v_tile = tl.load(
            v_head + v_rows[:, None] + v_dims[None, :] * v_stride_dim,
            mask=used_rows & (v_dims < V_HEAD_DIM)[None, :],
            other=0.0,
        )
        v_tile = operand(v_tile, DTYPE)
        weighted = dot(rounded(weights, DTYPE), v_tile, weighted * decay[:, None])
    total = tl.sum(totals, 1)
    if sinks is not None:
        total += sink_weight(sink, peak)
    store_rows(
        weighted,
        peak,
        total,
        rows,
        v_dims,
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
        Q_LEN * GROUP,
        GROUP,
        V_HEAD_DIM,
    )
