"""The native CPU library: where it is, why it is not, and writing keys and values through it.

``setup.py`` compiles ``pagedkv/csrc`` into ``pagedkv/_native*.so``, a plain C library without ties to an
interpreter or to torch, loaded here through ctypes, which lets go of the GIL while a call runs. Without it
everything works, slower.

The instruction set is chosen when a call is made: the best that the CPU has. ``PAGEDKV_CPU_ISA`` in the
environment, or ``force_isa``, asks for a lesser one.
"""

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from pagedkv.errors import PagedKVError

ABI_VERSION = 2

# As csrc/abi.h numbers them.
ISAS = ("auto", "portable", "avx2", "avx512", "avx512-dot")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
if hasattr(torch, "float8_e4m3fn"):
    DTYPES[torch.float8_e4m3fn] = 4

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Call:
    """A C struct of 8-byte fields that one thread fills again and again.

    Packing with one precompiled format costs 2 us for 60 fields, assigning them one by one 10.
    """

    def __init__(self, layout: str) -> None:
        """Allocate for fields like "11q2d"."""
        self._struct = struct.Struct(layout)
        self._buffer = bytearray(self._struct.size)
        self._keep = (ctypes.c_char * self._struct.size).from_buffer(self._buffer)
        self.address = ctypes.addressof(self._keep)

    def pack(self, *fields: float) -> int:
        """Fill in all fields and return the address of the struct."""
        self._struct.pack_into(self._buffer, 0, *fields)
        return self.address


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_native{suffix}"
        if path.is_file():
            break
    else:
        return "the native library was not built: a C++ compiler was missing when pagedkv was installed"
    try:
        library = ctypes.CDLL(str(path))
        version = library.pagedkv_abi_version()
    except (OSError, AttributeError) as error:
        return f"the native library does not load: {error}"
    if version != ABI_VERSION:
        return f"{path.name} is of another version ({version}, not {ABI_VERSION}): install pagedkv again"
    for name in ("pagedkv_best_isa", "pagedkv_attend", "pagedkv_write_kv", "pagedkv_advise_huge"):
        getattr(library, name).restype = ctypes.c_int64
    for name in ("pagedkv_attend", "pagedkv_write_kv", "pagedkv_read_blocks"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.pagedkv_read_blocks.restype = ctypes.c_uint64
    library.pagedkv_advise_huge.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    best = int(library.pagedkv_best_isa())
    if _isa > best:
        return f"PAGEDKV_CPU_ISA asks for {ISAS[_isa]}, the best of this CPU is {ISAS[best]}"
    return library


def reason() -> str | None:
    """Why the native library cannot be used here; None if it can. O(1) after the first call."""
    library = _load()
    return library if isinstance(library, str) else None


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        PagedKVError: there is none, with the reason.
    """
    found = _load()
    if isinstance(found, str):
        raise PagedKVError(found)
    return found


def available_isas() -> tuple[str, ...]:
    """Instruction sets that ``force_isa`` accepts here, the plainest first."""
    return ISAS[1 : int(library().pagedkv_best_isa()) + 1]


def _isa_of_environment() -> int:
    name = os.environ.get("PAGEDKV_CPU_ISA", "auto")
    if name not in ISAS:
        raise PagedKVError(f"PAGEDKV_CPU_ISA is {name!r}, must be one of {', '.join(ISAS)}")
    return ISAS.index(name)


_isa = _isa_of_environment()


def isa() -> int:
    """The number of the instruction set that calls ask for, 0 for the best."""
    return _isa


@contextmanager
def force_isa(name: str) -> Iterator[None]:
    """Ask for an instruction set in all threads, while the context lasts: for tests and comparisons.

    Raises:
        PagedKVError: it is not "auto" and not one of ``available_isas()``.
    """
    global _isa
    if name not in ("auto", *available_isas()):
        raise PagedKVError(
            f"no instruction set {name!r} here, there are: auto, {', '.join(available_isas())}"
        )
    before, _isa = _isa, ISAS.index(name)
    try:
        yield
    finally:
        _isa = before


def advise_huge(x: Tensor) -> bool:
    """Ask the system for huge pages under a tensor that was not touched yet. False where it has none."""
    return reason() is None and library().pagedkv_advise_huge(x.data_ptr(), x.nbytes) == 0


_local = threading.local()

_WRITE_LAYOUT = "4q4q4q3q3qq4q"


def unsupported_write(values: Tensor, new: Tensor) -> str | None:
    """Why ``write_kv`` cannot store ``new`` into ``values``; None if it can."""
    if reason() is not None:
        return reason()
    if values.device.type != "cpu" or new.device.type != "cpu":
        return f"the native library writes on the CPU, not from {new.device} to {values.device}"
    if values.dtype not in DTYPES or values.dtype not in (*SOURCE_DTYPES, torch.int8):
        return f"the native library does not write {values.dtype}"
    return None


def write_kv(values: Tensor, scale: Tensor | None, new: Tensor, slot_mapping: Tensor) -> int:
    """Store one vector per token and head; int8 quantizes on the way, floats round to nearest even.

    Args:
        values: [num_rows, num_heads, block_size, dim], fp32, bf16, fp16 or int8, any strides.
        scale: [num_rows, num_heads, block_size] fp32 for int8, else None.
        new: [n, num_heads, dim], any float dtype, any strides.
        slot_mapping: [n] int64, ``block_id * block_size + offset``, checked by the caller. A negative slot
            writes nothing.

    Returns:
        How many values are NaN or infinite (int8 only). Unless it is 0, nothing was written.

    Cost: one pass over ``new``, two for int8, on up to ``torch.get_num_threads()`` threads.
    """
    if new.dtype not in SOURCE_DTYPES:
        new = new.float()
    try:
        call: Call = _local.write
    except AttributeError:
        call = _local.write = Call(_WRITE_LAYOUT)
    address = call.pack(
        values.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        new.data_ptr(),
        slot_mapping.data_ptr(),
        *new.shape[:2],
        values.shape[2],
        new.shape[2],
        *values.stride(),
        *(scale.stride() if scale is not None else (0, 0, 0)),
        *new.stride(),
        *slot_mapping.stride(),
        DTYPES[values.dtype],
        DTYPES[new.dtype],
        torch.get_num_threads(),
        _isa,
    )
    bad = int(library().pagedkv_write_kv(address))
    if bad < 0:
        raise MemoryError("no memory for the vectors of one write")
    return bad
