"""KV append on an accelerator: one kernel scatters vectors by slot and rounds or quantizes them on the way.

::

    new [n, heads, dim]              one program = one token, a tile of its heads
                                        dim ->
        token i, slot_mapping[i] = s    +--------------+     values[s // slots, h, s % slots, :]
                                   head | x0 x1 x2 ... | --> one row per head, of unit stride in dim,
                                     |  | x0 x1 x2 ... |     or one column of a token-minor block
                                     v  +--------------+
                                          | largest magnitude of each row (int8)
                                          v
                                        scale[s // slots, h, s % slots]
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.quantization import MIN_SCALE, Q_MAX

# Numbers that one program keeps in registers: 32 a thread, several loads of 16 bytes in flight.
_TILE = 4096
NUM_WARPS = 4

_STRIDES = (
    *("values_stride_row", "values_stride_head", "values_stride_slot", "values_stride_dim"),
    *("scale_stride_row", "scale_stride_head", "scale_stride_slot"),
    *("new_stride_token", "new_stride_head", "new_stride_dim"),
    "slot_mapping_stride",
)

# What the kernel makes bit by bit: sm_80 has no fp8, and Triton's interpreter computes bf16 wrongly.
_AS_BITS = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.int16}

_Q_MAX = tl.constexpr(float(Q_MAX))
_MIN_SCALE = tl.constexpr(MIN_SCALE)


def write_kv(values: Tensor, scale: Tensor | None, new: Tensor, slot_mapping: Tensor) -> None:
    """Store ``new[i]`` in slot ``slot_mapping[i]`` of ``values``, for every token i, in one launch.

    Floats are rounded to the dtype of ``values`` through fp32, as torch does it. int8 is quantized exactly as
    ``pagedkv.quantization.quantize(new, check=False)`` does on the CPU, bit for bit.

    Args:
        values: [rows, heads, slots, dim] fp32, bf16, fp16, fp8-e4m3 or int8, any strides; fastest with a unit
            stride in dim.
        scale: [rows, heads, slots] fp32, any strides, with int8 and only then.
        new: [n, heads, dim], a float dtype, any strides.
        slot_mapping: [n] int64, ``row * slots + offset``. A negative slot is a padded row, which writes
            nothing and may hold anything; so does a slot beyond the last row, rather than hit foreign memory.

    Cost: reads ``new`` once and writes it once; the host never waits.
    """
    if not len(new):
        return
    grid, arguments = launch_of(values, scale, new, slot_mapping)
    # a launch goes to the current device, wherever its tensors are
    with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
        write_kernel[grid](**arguments, num_warps=NUM_WARPS)


def launch_of(
    values: Tensor, scale: Tensor | None, new: Tensor, slot_mapping: Tensor
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and arguments of ``write_kernel`` for a call of ``write_kv``; the device is not asked."""
    n, heads, dim = new.shape
    padded_dim = triton.next_power_of_2(dim)
    tile_heads = min(triton.next_power_of_2(heads), max(1, _TILE // padded_dim))
    if values.dtype in _AS_BITS:
        values = values.view(_AS_BITS[values.dtype])
    tensors = {"values": values, "scale": scale, "new": new, "slot_mapping": slot_mapping}
    strides = [
        *values.stride(),
        *(scale.stride() if scale is not None else (0, 0, 0)),
        *new.stride(),
        *slot_mapping.stride(),
    ]
    sizes = {
        "num_slots": values.shape[0] * values.shape[2],
        "HEADS": heads,
        "SLOTS": values.shape[2],
        "DIM": dim,
        "TILE_HEADS": tile_heads,
        "TILE_DIM": padded_dim,
    }
    grid = (n, triton.cdiv(heads, tile_heads))
    return grid, tensors | dict(zip(_STRIDES, strides, strict=True)) | sizes


@triton.jit(do_not_specialize=["num_slots"])
def write_kernel(
    values,
    scale,
    new,
    slot_mapping,
    num_slots,
    values_stride_row,
    values_stride_head,
    values_stride_slot,
    values_stride_dim,
    scale_stride_row,
    scale_stride_head,
    scale_stride_slot,
    new_stride_token,
    new_stride_head,
    new_stride_dim,
    slot_mapping_stride,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Program (i, j) stores heads ``j * TILE_HEADS ...`` of token i. See ``write_kv``.

    values is uint8 for fp8 and int16 for bf16; scale is None but for int8. Addresses are 64 bits wide.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_mapping_stride)
    if (slot < 0) | (slot >= num_slots):
        return
    row, offset = slot // SLOTS, slot % SLOTS
    heads = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)).to(tl.int64)
    dims = tl.arange(0, TILE_DIM)
    inside = (heads < HEADS)[:, None] & (dims < DIM)[None, :]
    source = (
        new + token * new_stride_token + heads[:, None] * new_stride_head + dims[None, :] * new_stride_dim
    )
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)

    dtype: tl.constexpr = values.dtype.element_ty
    if dtype == tl.int8:
        step = _scale(x)
        encoded = _quantized(x, step)
        tl.store(
            scale + row * scale_stride_row + heads * scale_stride_head + offset * scale_stride_slot,
            step,
            mask=heads < HEADS,
        )
    elif dtype == tl.uint8:
        encoded = _fp8_bits(x)
    elif dtype == tl.int16:
        encoded = _bf16_bits(x)
    else:
        encoded = x.to(dtype)
    target = (
        values + row * values_stride_row + heads[:, None] * values_stride_head + offset * values_stride_slot
    )
    tl.store(target + dims[None, :] * values_stride_dim, encoded, mask=inside)


@triton.jit
def _scale(x):
    """``max(absmax / 127, 1e-6)`` of each row of x [M, N]; NaN or infinite where x is."""
    # magnitudes are ordered like their bits, and NaN, which a maximum of floats would drop, is above all
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    # the / of Triton is a multiplication by a reciprocal, off by one bit now and then
    scale = tl.div_rn(largest, tl.full(largest.shape, _Q_MAX, tl.float32))
    return tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)


@triton.jit
def _quantized(x, scale):
    """``x / scale`` rounded half away from zero, in -127..127; 0 for NaN."""
    y = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    y = tl.where(y == y, tl.minimum(tl.maximum(y, -_Q_MAX), _Q_MAX), 0.0)
    # y minus its whole part is exact, which adding 0.5 to y is not
    whole = y.to(tl.int32)
    return (whole + ((y - whole.to(tl.float32)) * 2).to(tl.int32)).to(tl.int8)


@triton.jit
def _bf16_bits(x):
    """fp32 x as bf16, to nearest, ties to even: the upper half of its bits. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _fp8_bits(x):
    """fp32 x as float8_e4m3fn, to nearest, ties to even; beyond 448 it saturates, NaN stays NaN.

    ::

        fp32   s eeeeeeee mmm....    bias 127
        e4m3   s eeee mmm            bias 7; 1111 111 is NaN, there is no infinity
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # drop 20 bits of mantissa; a carry moves into the exponent, as it should
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # below 2**-6 the steps are 2**-9 wide, which is how an fp32 sum with 2**14 is rounded
    tiny = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(size < 0x3C800000, tiny, tl.minimum(normal, 0x7E))
    return (tl.where(x == x, byte, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)
