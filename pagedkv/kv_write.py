"""Storing new keys and values at their slots, by the fastest way that this machine has."""

import importlib.util
from functools import cache

from torch import Tensor

from pagedkv import native
from pagedkv.block_tables import NULL_BLOCK
from pagedkv.quantization import quantize


def write_kv(values: Tensor, scale: Tensor | None, new: Tensor, slot_mapping: Tensor) -> None:
    """Store ``new[i]`` in slot ``slot_mapping[i]`` of ``values``; int8 quantizes on the way.

    A CUDA device with Triton takes one kernel launch, a CPU the native library where it was built, and
    everything else torch's indexing. All give the same bits, but for what exceeds fp8: torch makes NaN of
    it, the kernel the largest number.

    Args:
        values: [rows, heads, slots, dim], a storage dtype, any strides.
        scale: [rows, heads, slots] fp32 for int8, else None.
        new: [n, heads, dim], any float dtype, any strides; a view of the cache itself is copied first. For
            int8 it is finite, or a scale will not be.
        slot_mapping: [n] int64, ``row * slots + offset`` of a row of ``values``, each at most once. A
            negative slot writes nothing (with torch on an accelerator it writes into row ``NULL_BLOCK``).

    Cost: reads and writes n vectors; on an accelerator the host does not wait.
    """
    new = new.resolve_neg()  # of the imaginary part of a conjugate torch keeps only that it is negated
    if new.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
        # rows are written in any order, some perhaps before they are read
        new = new.clone()
    if values.device.type == "cuda" and _has_triton():
        from pagedkv import triton_write

        triton_write.write_kv(values, scale, new, slot_mapping)
    elif native.unsupported_write(values, new) is None:
        native.write_kv(values, scale, new, slot_mapping)
    else:
        _write_by_index(values, scale, new, slot_mapping)


def _write_by_index(values: Tensor, scale: Tensor | None, new: Tensor, slot_mapping: Tensor) -> None:
    if values.device.type == "cpu":
        rows = (slot_mapping >= 0).nonzero().flatten()
        new, slots = new[rows], slot_mapping[rows]
    else:
        # dropping rows needs their number, which only the device knows
        slots = slot_mapping.clamp_min(NULL_BLOCK * values.shape[2])
    block_ids, offsets = slots // values.shape[2], slots % values.shape[2]
    if scale is None:
        values[block_ids, :, offsets] = new.to(values.dtype)
    else:
        values[block_ids, :, offsets], scale[block_ids, :, offsets] = quantize(new, check=False)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
