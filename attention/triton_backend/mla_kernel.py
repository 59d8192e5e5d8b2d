"""Decode attention over latent float blocks (MLA): the value of a token is the leading part of its key.

::

    one program = one KV head x one part of a sequence x up to M query rows        a step = one tile

                       L (512)                          R (64)
                   ________________________________    ________
                  | block id 7 | block id 2 | ...  |  |        |     latent and rope, each token read once;
                  |____________|___________________|  |________|     two tiles, since 576 would pad to 1024

     s [M, TILE] = q_latent [M, L] x latent  +  q_rope [M, R] x rope
     weighted [M, L] += weights x latent

    PAGES, SLOTS and SPLITS as in decode_kernel
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
def mla_kernel(
    q,
    k,
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
    L: tl.constexpr,
    R: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Grid and tensors as in ``decode_kernel``; the values are the first V_HEAD_DIM entries of the keys."""
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
    dims = tl.arange(0, L)
    ropes = V_HEAD_DIM + tl.arange(0, R)
    q_rows = q + seq_64 * q_stride_seq + tokens * q_stride_token + heads * q_stride_head
    dim_mask = dims < V_HEAD_DIM
    rope_mask = ropes < HEAD_DIM
    q_latent = tl.load(
        q_rows[:, None] + dims[None, :] * q_stride_dim, mask=row_mask[:, None] & dim_mask[None, :], other=0.0
    )
    q_rope = tl.load(
        q_rows[:, None] + ropes[None, :] * q_stride_dim,
        mask=row_mask[:, None] & rope_mask[None, :],
        other=0.0,
    )
    q_latent = operand(q_latent, DTYPE)
    q_rope = operand(q_rope, DTYPE)

    peak = tl.full([M], float("-inf"), tl.float32)
    totals = tl.zeros([M, PAGES * SLOTS], tl.float32)
    if sinks is not None:
        # one more logit, without a value, seen by the first part
        sink_rows = tl.where(part == 0, Q_LEN * GROUP, 0)
        sink = tl.load(sinks + heads * sink_stride_head, mask=rows < sink_rows, other=float("-inf"))
        peak = sink.to(tl.float32) * LOG2_E
    weighted = tl.zeros([M, L], tl.float32)
    block_total = tl.zeros([M, PAGES], tl.float32)

    table = block_tables + seq_64 * table_stride_seq
    k_head = k + tl.multiple_of(kv_head.to(tl.int64) * k_stride_head, ALIGN)
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
        k_rows = k_head + k_rows[:, None]
        latent = tl.load(k_rows + dims[None, :] * k_stride_dim, mask=used_rows & dim_mask[None, :], other=0.0)
        rope = tl.load(k_rows + ropes[None, :] * k_stride_dim, mask=used_rows & rope_mask[None, :], other=0.0)
        latent = operand(latent, DTYPE)
        rope = operand(rope, DTYPE)
        s = dot(q_latent, tl.trans(latent), None)
        s = scale * dot(q_rope, tl.trans(rope), s)
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
        weighted = dot(rounded(weights, DTYPE), latent, weighted * decay[:, None])
    total = tl.sum(totals, 1)
    if sinks is not None:
        total += sink_weight(sink, peak)
    store_rows(
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
        Q_LEN * GROUP,
        GROUP,
        V_HEAD_DIM,
    )
