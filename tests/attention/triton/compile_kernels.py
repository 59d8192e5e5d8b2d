"""Compile what the Triton backend would launch, for GPUs that need not be there; print JSON, a record each.

A program of its own: in a process where kernels were decorated for the interpreter, nothing can be compiled.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from cubin import instructions, main_loop, resources  # type: ignore[import-not-found]
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagedkv import triton_write
from pagedkv.attention.arguments import AttentionArguments
from pagedkv.attention.triton_backend.launch import launches
from pagedkv.attention.triton_backend.plan_kernel import plan_kernel

ARCHITECTURES = (80, 90, 100)

NUM_SEQS, NUM_BLOCKS, NUM_KV_HEADS, MAX_BLOCKS, TARGET = 32, 4096, 8, 512, 99

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Case(NamedTuple):
    """One kernel as it would be launched. value_bytes, scale_bytes: of K and V, per step of its loop."""

    name: str
    kernel: Any
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    value_bytes: int = 0
    scale_bytes: int = 0


def cases() -> Iterator[Case]:
    """Every kernel, in the configurations that serve the common models."""
    yield from _attention("bf16 d128", torch.bfloat16, with_merge=True)
    yield from _attention("fp16 d128", torch.float16)
    yield from _attention("bf16 d64", torch.bfloat16, head_dim=64)
    yield from _attention("bf16 d256", torch.bfloat16, head_dim=256)
    yield from _attention("bf16 d128 block 64", torch.bfloat16, block_size=64)
    yield from _attention("bf16 d128 q_len 4", torch.bfloat16, q_len=4)
    latent: dict[str, Any] = {"head_dim": 576, "latent_rank": 512, "num_kv_heads": 1, "group_size": 16}
    yield from _attention("latent bf16", torch.bfloat16, **latent)
    yield from _attention("latent bf16 block 64", torch.bfloat16, block_size=64, **latent)
    yield from _attention("int8 d128", torch.int8)
    yield from _attention("int8 d128 q_len 4", torch.int8, q_len=4)
    yield from _attention("int8 d128 window", torch.int8, window=1024, softcap=30.0, sinks=True)
    yield _plan()
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        yield _write(dtype)


def _attention(
    name: str,
    dtype: torch.dtype,
    *,
    head_dim: int = 128,
    latent_rank: int | None = None,
    num_kv_heads: int = NUM_KV_HEADS,
    group_size: int = 4,
    block_size: int = 16,
    q_len: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    with_merge: bool = False,
) -> Iterator[Case]:
    q_dtype = torch.bfloat16 if dtype == torch.int8 else dtype
    q = _empty(NUM_SEQS, q_len, num_kv_heads * group_size, head_dim, dtype=q_dtype)
    k = _empty(NUM_BLOCKS, num_kv_heads, block_size, head_dim, dtype=dtype)
    v, scale = _empty(*k.shape, dtype=dtype), None
    if latent_rank is not None:
        v = k[..., :latent_rank]
    if dtype == torch.int8:
        v = _empty(NUM_BLOCKS, num_kv_heads, head_dim, block_size, dtype=dtype).transpose(2, 3)
        scale = _empty(NUM_BLOCKS, num_kv_heads, block_size, dtype=torch.float32)
    args = AttentionArguments(
        q=q,
        k=k,
        v=v,
        block_tables=_empty(NUM_SEQS, MAX_BLOCKS, dtype=torch.int32),
        seq_lens=_empty(NUM_SEQS, dtype=torch.int32),
        scale=head_dim**-0.5,
        k_scale=scale,
        v_scale=scale,
        window=window,
        sinks=_empty(q.shape[2], dtype=torch.float32) if sinks else None,
        softcap=softcap,
        out=_empty(*q.shape[:3], v.shape[3], dtype=q_dtype),
        lse=_empty(*q.shape[:3], dtype=torch.float32),
        block_mass=None,
        plan=None,
    )
    plan = _empty(2 * NUM_SEQS + TARGET + 2, dtype=torch.int32)
    attention, merge = launches(args, plan)
    tile = attention.arguments["PAGES"] * attention.arguments["SLOTS"]
    yield Case(
        name,
        attention.kernel,
        attention.arguments,
        attention.num_warps,
        attention.num_stages,
        value_bytes=tile * (head_dim if latent_rank else 2 * head_dim) * dtype.itemsize,
        scale_bytes=tile * 2 * 4 if scale is not None else 0,
    )
    if with_merge:
        yield Case("merge", merge.kernel, merge.arguments, merge.num_warps, merge.num_stages)


def _plan() -> Case:
    arguments = {
        "seq_lens": _empty(NUM_SEQS, dtype=torch.int32),
        "plan": _empty(2 * NUM_SEQS + TARGET + 2, dtype=torch.int32),
        "num_seqs": NUM_SEQS,
        "target": TARGET,
        "max_read": None,
        "min_chunk": 256,
        "stride_len": 1,
        "ROUND": 128,
        "BLOCK": NUM_SEQS,
    }
    return Case("plan", plan_kernel, arguments, 4, 1)


def _write(dtype: torch.dtype) -> Case:
    values = _empty(NUM_BLOCKS, NUM_KV_HEADS, 16, 128, dtype=dtype)
    scale = _empty(*values.shape[:3], dtype=torch.float32) if dtype == torch.int8 else None
    new = _empty(NUM_SEQS, NUM_KV_HEADS, 128, dtype=torch.bfloat16)
    _, arguments = triton_write.launch_of(values, scale, new, _empty(NUM_SEQS, dtype=torch.int64))
    name = f"write {str(dtype).removeprefix('torch.')}"
    return Case(name, triton_write.write_kernel, arguments, triton_write.NUM_WARPS, 1)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    # no memory; its address is 0, hence aligned as an allocation is
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(case: Case, architecture: int) -> Any:
    """The kernel, specialized as a launch would: None and 1 are constants, multiples of 16 are marked."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(case.kernel.params):
        value = case.arguments[parameter.name]
        is_number = isinstance(value, int) and not parameter.is_constexpr
        special = is_number and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
        else:
            signature[parameter.name] = "i32" if is_number else "fp32"
        if isinstance(value, Tensor) or (special and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, signature, constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def record(case: Case, architecture: int) -> dict[str, Any]:
    """What is checked of one kernel, as JSON can hold it."""
    kernel = compiled(case, architecture)
    cubin = kernel.asm["cubin"]
    used = resources(cubin)
    listed = instructions(cubin)
    return {
        "name": case.name,
        "architecture": architecture,
        "registers": used.registers,
        "stack": used.stack + used.local,
        "shared": used.shared + kernel.metadata.shared,
        "num_warps": case.num_warps,
        "value_bytes": case.value_bytes,
        "scale_bytes": case.scale_bytes,
        "kernel": Counter(instruction.mnemonic for instruction in listed),
        "loop": main_loop(listed),
    }


if __name__ == "__main__":
    json.dump([record(case, arch) for case in cases() for arch in ARCHITECTURES], sys.stdout)
