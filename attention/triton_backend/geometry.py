"""Which kernel serves a call and with which tile: every tuning constant, with its reason."""

from functools import cache
from typing import NamedTuple

import torch
import triton

from pagedkv.arithmetic import div_ceil
from pagedkv.attention.arguments import AttentionArguments


class Limits(NamedTuple):
    """Bounds of a tile, by the size of what the tensor cores multiply.

    tokens: per step.
    kv_bytes: keys and values of a step, which lie in shared memory; tokens are halved until they fit.
    min_rows, max_rows: query rows of a program; more are further programs, which read from the L2 cache.
    min_width: of an operand; narrower heads are padded.
    """

    tokens: int
    kv_bytes: int
    min_rows: int
    max_rows: int
    min_width: int


# 16 bit: 64 tokens of 128 entries are 32 KB in flight per program, and three programs share a multiprocessor:
# four times what hides the latency of the memory of an H200. From 64 rows on the compiler chooses other
# instructions (wgmma, tcgen05), with which it spills or copies more than it saves.
# fp32: a product is three TF32 products of twice the operands, for which 64 tokens have no registers.
# int8: a row is two rows of bytes; a step of 64 would be half the bytes for the same work beside the
# products.
LIMITS = {
    2: Limits(tokens=64, kv_bytes=64 * 1024, min_rows=16, max_rows=32, min_width=16),
    4: Limits(tokens=32, kv_bytes=32 * 1024, min_rows=16, max_rows=32, min_width=16),
    1: Limits(tokens=128, kv_bytes=32 * 1024, min_rows=8, max_rows=16, min_width=32),
}

# 2 warps need up to 255 registers and spill, 8 issue 1.3 to 1.5 times the instructions for the same tile. The
# accumulator of 32 rows of a wide latent has no room in 4.
NUM_WARPS = 4
NUM_WARPS_MLA = 8

# A load through a table is two loads deep, so that 3 stages keep one tile of keys and one of values in
# flight; 4 give the same code, 2 up to 7 % more instructions, 5 twice the shared memory.
NUM_STAGES = 3


class Geometry(NamedTuple):
    """constants: constexprs of an attention kernel, by name. m_tiles: programs per KV head and work item."""

    constants: dict[str, int]
    m_tiles: int
    num_warps: int
    num_stages: int


def is_mla(args: AttentionArguments) -> bool:
    """Values are a proper leading part of the keys, in a float dtype: one load can serve both."""
    return args.v.shape[3] < args.k.shape[3] and args.k.is_floating_point() and args.is_latent


def operand_dtype(args: AttentionArguments) -> torch.dtype:
    """What the tensor cores multiply: the dtype that holds query and cache without loss, if there is one."""
    if args.k.dtype == torch.int8:
        return torch.int8
    if args.k.dtype.itemsize == 1:
        return args.q.dtype
    return torch.promote_types(args.q.dtype, args.k.dtype)


@cache
def geometry(
    operand: torch.dtype,
    mla: bool,
    q_len: int,
    group_size: int,
    block_size: int,
    head_dim: int,
    v_head_dim: int,
) -> Geometry:
    """Tile and rows for a shape of call."""
    limits = LIMITS[operand.itemsize]
    num_rows = q_len * group_size
    m = min(limits.max_rows, max(limits.min_rows, triton.next_power_of_2(num_rows)))
    widths = {"L": v_head_dim, "R": head_dim - v_head_dim} if mla else {"D": head_dim, "DV": v_head_dim}
    widths = {name: max(limits.min_width, triton.next_power_of_2(n)) for name, n in widths.items()}
    tokens = limits.tokens
    while tokens > limits.min_width and tokens * sum(widths.values()) * operand.itemsize > limits.kv_bytes:
        tokens //= 2
    slots = min(tokens, triton.next_power_of_2(block_size))
    m_tiles = div_ceil(num_rows, m)
    constants = {
        "Q_LEN": q_len,
        "GROUP": group_size,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "BLOCK_SIZE": block_size,
        "M": m,
        "M_TILES": m_tiles,
        "SLOTS": slots,
        "PAGES": tokens // slots,
        "SPLITS": div_ceil(block_size, tokens),
        **widths,
    }
    num_warps = NUM_WARPS_MLA if mla and m > limits.min_rows else NUM_WARPS
    return Geometry(constants, m_tiles, num_warps, NUM_STAGES)
