"""The native CPU library: where it is, why it is not, and writing keys and values through it.

``setup.py`` compiles ``pagedkv/csrc`` into ``pagedkv/_native*.so``, a C library without ties to a version of
torch or of the interpreter, called through ctypes, which lets go of the GIL while a call runs. It is also a
module with one function, ``attend``, which takes tensors as they are. Without it everything works, slower.

It computes on the threads of torch's OpenMP, where torch has such: a pool of its own would get no core beside
them, since they spin for milliseconds after each operation.

The instruction set is chosen when a call is made: the best that the CPU has. ``PAGEDKV_CPU_ISA`` in the
environment, or ``force_isa``, asks for a lesser one.
"""

import ctypes
import importlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pagedkv.errors import PagedKVError

ABI_VERSION = 3

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
def _load() -> tuple[ctypes.CDLL, ModuleType] | str:
    """The library, and the same as a module; or why there is none."""
    try:
        module = importlib.import_module("pagedkv._native")
        library = ctypes.CDLL(str(module.__file__))
        version = library.pagedkv_abi_version()
    except ModuleNotFoundError:
        return "the native library was not built: a C++ compiler was missing when pagedkv was installed"
    except (ImportError, OSError, AttributeError) as error:
        return f"the native library does not load: {error}"
    if version != ABI_VERSION:
        name = Path(str(module.__file__)).name
        return f"{name} is of another version ({version}, not {ABI_VERSION}): install pagedkv again"
    for name in ("pagedkv_best_isa", "pagedkv_attend", "pagedkv_write_kv", "pagedkv_advise_huge"):
        getattr(library, name).restype = ctypes.c_int64
    for name in ("pagedkv_attend", "pagedkv_write_kv", "pagedkv_read_blocks", "pagedkv_use_team"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.pagedkv_read_blocks.restype = ctypes.c_uint64
    library.pagedkv_use_team.restype = None
    library.pagedkv_advise_huge.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    best = int(library.pagedkv_best_isa())
    if _isa > best:
        return f"PAGEDKV_CPU_ISA asks for {ISAS[_isa]}, the best of this CPU is {ISAS[best]}"
    library.pagedkv_use_team(_team_of_torch())
    return library, module


@cache
def _team_of_torch() -> int | None:
    """The address of ``GOMP_parallel`` in the OpenMP runtime that torch computes with; None without one."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # a symbol is looked up in the library and in what that depends on, and nowhere else
        torch_cpu = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


@contextmanager
def own_threads() -> Iterator[None]:
    """Compute on a pool of the library's own, while the context lasts: for tests and comparisons."""
    library().pagedkv_use_team(None)
    try:
        yield
    finally:
        library().pagedkv_use_team(_team_of_torch())


@cache
def attend() -> Callable[..., int] | None:
    """Attention that takes torch's tensors as they are; None without the library or with a torch before 2.10.

    See csrc/attend_tensors.cpp. It answers a status, and writes nothing unless that is 0.
    """
    found, table = _load(), getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if isinstance(found, str) or table is None:
        return None
    module: Any = found[1]
    try:
        module.use_exchange(table, torch.Tensor, torch.nn.Parameter, torch.Tensor.is_neg)
    except (ImportError, TypeError, ValueError):
        return None  # a table of another kind
    function: Callable[..., int] = module.attend
    return function


def reason() -> str | None:
    """Why the native library cannot be used here; None if it can. O(1) after the first call."""
    found = _load()
    return found if isinstance(found, str) else None


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        PagedKVError: there is none, with the reason.
    """
    found = _load()
    if isinstance(found, str):
        raise PagedKVError(found)
    return found[0]


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
