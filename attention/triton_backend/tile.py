"""A tile of whole blocks: which tiles a part has, who sees their tokens, what each block weighs.

::

    block_size 6, TILE 16: SLOTS 8, PAGES 2, SPLITS 1    block_size 40, TILE 16: SLOTS 16, PAGES 1, SPLITS 3

    tile 2  | 12 .. 17 - - | 18 .. 23 - - |              tile 3 | 40 .. 55 |  tile 5 | 72 .. 79 - .. - |
            |   block 2    |   block 3    |                     |      block 1, in tiles 3, 4 and 5    |

    The numbers are positions, '-' pads. Tile numbers are blocks times SPLITS; a step takes PAGES tiles.
"""

import triton
import triton.language as tl

from pagedkv.attention.triton_backend.numerics import log_sum


@triton.jit
def block_offsets(ids, stride_block):
    """``ids * stride_block`` in 64 bits, of numbers that are no less than 0; ids: int32, of any shape.

    The compiler, which is told so, needs one instruction for a product that otherwise takes five.
    """
    tl.assume(stride_block >= 0)
    return ids.to(tl.uint32).to(tl.int64) * stride_block


@triton.jit
def row_offsets(ids, slots, stride_block, stride_slot, ALIGN: tl.constexpr):
    """Offsets [TILE] of the rows of whole blocks: one table entry per block, no matter how many slots.

    ids: [PAGES] int32. slots: [SLOTS]. ALIGN: divides both strides. The compiler sees only multiples of 16,
    and up to 3.7 loses them in the reshape; then it would load rows entry by entry.
    """
    offsets = block_offsets(ids, stride_block)[:, None] + slots[None, :] * stride_slot
    return tl.multiple_of(tl.reshape(offsets, [ids.shape[0] * slots.shape[0]]), ALIGN)


@triton.jit
def tile_range(n, first, begin, end, BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr):
    """The tiles of the blocks [begin, end) that hold a position of [first, n)."""
    if SPLITS == 1:
        return begin, end
    else:
        first_tile = first // BLOCK_SIZE * SPLITS + first % BLOCK_SIZE // SLOTS
        last = tl.maximum(n - 1, 0)
        end_tile = last // BLOCK_SIZE * SPLITS + last % BLOCK_SIZE // SLOTS + 1
        return tl.maximum(begin * SPLITS, first_tile), tl.minimum(end * SPLITS, end_tile)


@triton.jit
def seen_by(
    tokens,
    tile,
    n,
    first,
    window,
    Q_LEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """[M or 1, TILE]: query token i stands at n - Q_LEN + i, sees itself and what is before, in the window.

    tokens: [M] query token of each row. n, first: end and begin of the positions that any of them sees.
    """
    column = tl.arange(0, PAGES * SLOTS)
    slot = tile % SPLITS * SLOTS + column % SLOTS
    position = (tile // SPLITS + column // SLOTS) * BLOCK_SIZE + slot
    in_block = slot < BLOCK_SIZE
    if Q_LEN == 1:
        return (in_block & (position >= first) & (position < n))[None, :]
    else:
        own = (n - Q_LEN + tokens)[:, None]
        seen = in_block[None, :] & (position[None, :] <= own)
        if window is not None:
            seen = seen & (position[None, :] > own - window)
        return seen


@triton.jit
def store_block_sums(
    block_mass,
    mass_stride_block,
    weights,
    decay,
    base,
    block_total,
    tile,
    blocks,
    row_mask,
    end,
    M: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store log2 of the sum of exp2(logit) over each block of the tile; the sums so far of a split block.

    block_mass: [M] pointers to the rows. weights [M, TILE], decay and base [M]: of ``softmax_step``.
    block_total: [M, PAGES] what this returned for the tile before.
    """
    sums = tl.sum(tl.reshape(weights, [M, PAGES, SLOTS]), 2)
    if SPLITS > 1:
        sums += tl.where(tile % SPLITS == 0, 0.0, block_total * decay[:, None])
    tl.store(
        block_mass[:, None] + blocks[None, :] * mass_stride_block,
        log_sum(base[:, None], sums),
        mask=row_mask[:, None] & (blocks < end)[None, :],
    )
    return sums
