"""Decode attention over int8 blocks: both products on the int8 tensor cores, nothing of K or V is converted.

::

    A row of 16-bit integers, n = 256 * high + low, is two rows of bytes. Both share the 16 rows of a tensor
    core tile, of which the few query heads of a group would fill half at most.

     q8 [2M, D]              whole blocks [PAGES, SLOTS, D] = [TILE, D], 16-byte loads along D
     | high of rows 0..7 |    ________________________________
     | low  of rows 0..7 |   | block id 7 | block id 2 | ...   |  K        integers [2M, TILE] -> [M, TILE]
     | high of rows 8..  | x |____________|____________|_______|           x step of the row x k_scale of the
     | ...               |                                                 token = logits s, masked

                              whole blocks [PAGES, DV, SLOTS], token-minor: 16-byte loads along SLOTS, and
     w8 [2M, TILE]            four tokens share a register, as this product wants its operand
     | high of weights   |    ________________________________
     | low  of weights   | x | block id 7 | block id 2 | ...   |  V        integers [2M, DV] -> [M, DV]
     | ...               |   |____________|____________|_______|           x step of the tile, added in fp32

Error against exact attention over the dequantized blocks, beside the roundings of fp32
    The query is in steps of max|q| / 32639, each entry off by half a step at most, and the integer product is
    exact. A logit (a soft cap can only lessen this) is off by at most

        eps = scale * max_j |k_j|_1 * max|q| / 65000

    So is ``lse``, and a probability p_j by a factor of exp(2 eps) at most. Weights times ``v_scale`` are in
    steps of 1.07 / 32639 of the largest in their tile, again off by half a step, against |v_int8| <= 127:

        |error of out[d]| <= (exp(2 eps) - 1) * sum_j p_j |v_j[d]|
                             + sum over tiles of TILE / 61000 * max_{j in tile} p_j * 127 * v_scale_j

    The signs of these errors being random, one sees the square root of such sums: 3e-5 to 1e-4 of the output.
"""

import math

import triton
import triton.language as tl

from pagedkv.attention.triton_backend.numerics import LOG2_E, sink_weight, soft_cap
from pagedkv.attention.triton_backend.plan_kernel import part_of_blocks, work_item
from pagedkv.attention.triton_backend.store import store_rows
from pagedkv.attention.triton_backend.tile import block_offsets, seen_by, store_block_sums, tile_range

# 127 * 256 + 127: what a signed byte and a signed low byte express on both sides of zero.
_SPAN = tl.constexpr(32639.0)
_LOG2_SPAN = tl.constexpr(math.log2(32639))

# 1.5 * 2**23: an fp32 sum with it is rounded to an integer, which stands in the low bits.
_TO_INTEGER = tl.constexpr(12582912.0)

# Below any real scale; stands for a scale of 0, which has no logarithm, and leaves weights in fp32's range.
_TINY = tl.constexpr(1e-24)

# Columns of logits that four warps have in one register each; the others lie in further registers.
_COLUMNS = tl.constexpr(32)


@triton.jit(do_not_specialize=["num_seqs", "num_kv_heads", "window"])
def int8_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
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
    v_stride_dim: tl.constexpr,
    k_scale_stride_block,
    k_scale_stride_head,
    k_scale_stride_slot,
    v_scale_stride_block,
    v_scale_stride_head,
    v_scale_stride_slot,
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
):
    """Grid (num_kv_heads * M_TILES, num_items); arguments as in ``decode_kernel``, the scales after k and v.

    M: rows of a program, a power of two of at least 8. D: at least 32 and at most 512, so that no sum of
    products leaves int32; likewise TILE = PAGES * SLOTS. v_stride_slot is 1 if this is to be fast, and
    v_stride_dim, most often BLOCK_SIZE, a constant: a multiple of 8 would otherwise not be known for one.
    """
    item = tl.program_id(1)
    seq, part, num_parts = work_item(plan, item, num_seqs)
    if seq < 0:
        return
    TILE: tl.constexpr = PAGES * SLOTS
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
    q_tile = tl.load(q_rows[:, None] + dims[None, :] * q_stride_dim, mask=q_mask, other=0.0).to(tl.float32)
    largest = _largest(q_tile)
    q8 = _two_bytes(q_tile * (1.0 / tl.maximum(largest, _TINY) * _SPAN)[:, None])
    row_step = largest * (scale / _SPAN)
    if softcap is None:
        row_step *= LOG2_E

    peak = tl.full([M], float("-inf"), tl.float32)
    # sums of the weights that one thread has, of several tiles: one reduction less in every step
    totals = tl.zeros([M, _COLUMNS], tl.float32)
    if sinks is not None:
        # one more logit, without a value, seen by the first part
        sink_rows = tl.where(part == 0, Q_LEN * GROUP, 0)
        sink = tl.load(sinks + heads * sink_stride_head, mask=rows < sink_rows, other=float("-inf"))
        peak = sink.to(tl.float32) * LOG2_E
    weighted = tl.zeros([M, DV], tl.float32)
    # 0, until it meets a scale that is NaN or infinite, of which the integers would show nothing
    spoiled = tl.zeros([PAGES, SLOTS], tl.float32)
    block_total = tl.zeros([M, PAGES], tl.float32)

    table = block_tables + seq_64 * table_stride_seq
    kv_head_64 = kv_head.to(tl.int64)
    k_head = k + kv_head_64 * k_stride_head
    v_head = v + kv_head_64 * v_stride_head
    k_scales = k_scale + kv_head_64 * k_scale_stride_head
    v_scales = v_scale + kv_head_64 * v_scale_stride_head
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
        # an unused slot may hold a scale of NaN, which a weight of 0 does not silence
        used = (position >= first) & (position < n) & (slots < BLOCK_SIZE)[None, :]
        k_step = tl.load(
            k_scales
            + block_offsets(ids, k_scale_stride_block)[:, None]
            + slots[None, :] * k_scale_stride_slot,
            mask=used,
            other=0.0,
        )
        v_step = tl.load(
            v_scales
            + block_offsets(ids, v_scale_stride_block)[:, None]
            + slots[None, :] * v_scale_stride_slot,
            mask=used,
            other=0.0,
        )
        k_tile = _load_tile(
            k_head + block_offsets(ids, k_stride_block)[:, None, None],
            slots[None, :, None] * k_stride_slot + dims[None, None, :] * k_stride_dim,
            (slots < BLOCK_SIZE)[None, :, None] & (dims < HEAD_DIM)[None, None, :],
            (BLOCK_SIZE % SLOTS == 0) & (HEAD_DIM == D),
        )
        v_tile = _load_tile(
            v_head + block_offsets(ids, v_stride_block)[:, None, None],
            v_dims[None, :, None] * v_stride_dim + slots[None, None, :] * v_stride_slot,
            (slots < BLOCK_SIZE)[None, None, :] & (v_dims < V_HEAD_DIM)[None, :, None],
            (BLOCK_SIZE % SLOTS == 0) & (V_HEAD_DIM == DV),
        )
        spoiled += (k_step + v_step) * 0.0
        k_step = tl.reshape(k_step, [TILE])
        v_step = tl.reshape(v_step, [TILE])

        products = tl.dot(q8, tl.trans(tl.reshape(k_tile, [TILE, D])))
        s = _from_two_bytes(products) * row_step[:, None] * k_step[None, :]
        if softcap is not None:
            s = soft_cap(s, softcap) * LOG2_E
        seen = seen_by(tokens, tile, n, first, window, Q_LEN, BLOCK_SIZE, SLOTS, PAGES, SPLITS)
        s = tl.where(seen, s, float("-inf"))

        # The peak of a row is that of weight * v_scale, its share in the output, so that the shares of a tile
        # fill the integers whatever their size beside other tiles: what weights * v_scale are counted in.
        tile_peak = tl.max(s + _log2_ceiling(v_step)[None, :], 1)
        unit = tile_peak - _LOG2_SPAN
        weights = tl.exp2(s - tl.where(unit == float("-inf"), 0.0, unit)[:, None])
        # roundings of a large s may lift a share above the peak
        w8 = _two_bytes(tl.minimum(weights * v_step[None, :], _SPAN))

        new_peak = tl.maximum(peak, tile_peak)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - base)
        gain = tl.exp2(unit - base)
        peak = new_peak
        sums = tl.sum(tl.reshape(weights, [M, TILE // _COLUMNS, _COLUMNS]), 1)
        totals = totals * decay[:, None] + sums * gain[:, None]
        if block_mass is not None:
            block_total = store_block_sums(
                mass_rows,
                mass_stride_block,
                weights * gain[:, None],
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
        products = tl.dot(w8, tl.reshape(tl.permute(v_tile, (0, 2, 1)), [TILE, DV]))
        weighted = weighted * decay[:, None] + _from_two_bytes(products) * gain[:, None]
    nothing = tl.sum(tl.sum(spoiled, 1), 0)
    total = tl.sum(totals, 1) + nothing
    weighted += nothing
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


@triton.jit
def _load_tile(block, within, mask, WHOLE: tl.constexpr):
    """A tile of whole blocks; masked only where it is padded. Slots that nobody uses hold some integer."""
    if WHOLE:
        return tl.load(block + within)
    else:
        return tl.load(block + within, mask=mask, other=0)


@triton.jit
def _largest(x):
    """The largest magnitude of each row; NaN, which a maximum of floats would drop, is the largest of all."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)


@triton.jit
def _log2_ceiling(x):
    """Of x >= 0 a number up to 0.0861 above its base-2 logarithm: two instructions where that takes twenty.

    The bits of an fp32 number are its logarithm as a fixed-point number, with a straight line between powers.
    """
    return tl.maximum(x, _TINY).to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-23) - (127 - 0.0861)


@triton.jit
def _two_bytes(x):
    """x [M, N] in -SPAN..SPAN, rounded, as int8 [2M, N]: after the high bytes of 8 rows their low bytes.

    A thread holds rows r and r + 8 of a result of 16 rows, so that both bytes of a number are its own. They
    are chosen by row, not joined: Triton 3.7 takes joined numbers for half as wide as they are, then reads
    both operands in another order, by 8 bytes instead of by ldmatrix, and moves them into place.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    bits = tl.reshape((x + _TO_INTEGER).to(tl.int32, bitcast=True), [M // 8, 1, 8, N])
    is_low = (tl.arange(0, 2) == 1)[None, :, None, None]
    # the low byte is signed, hence the high one is rounded
    return tl.reshape(tl.where(is_low, bits, (bits + 128) >> 8).to(tl.int8), [2 * M, N])


@triton.jit
def _from_two_bytes(products):
    """The products of both bytes, int32 [2M, N] in the order of ``_two_bytes``, as fp32 [M, N]."""
    M: tl.constexpr = products.shape[0] // 2
    N: tl.constexpr = products.shape[1]
    high, low = tl.split(tl.permute(tl.reshape(products, [M // 8, 2, 8, N]), (0, 2, 3, 1)))
    return tl.reshape((high * 256 + low).to(tl.float32), [M, N])
