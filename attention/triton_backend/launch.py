"""From the arguments of a call to kernel launches, all of it known without asking the device."""

import inspect
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.arithmetic import div_ceil
from pagedkv.attention.arguments import AttentionArguments
from pagedkv.attention.triton_backend.decode_kernel import decode_kernel
from pagedkv.attention.triton_backend.device import on_device
from pagedkv.attention.triton_backend.geometry import geometry, is_mla, operand_dtype
from pagedkv.attention.triton_backend.int8_kernel import int8_kernel
from pagedkv.attention.triton_backend.mass_kernel import mass_kernel
from pagedkv.attention.triton_backend.merge_kernel import merge_kernel
from pagedkv.attention.triton_backend.mla_kernel import mla_kernel
from pagedkv.attention.triton_backend.plan import check_plan, default_target, plan_splits

# Parts that the merge loads at once, and blocks that one program of the mass kernel serves.
MERGE_PARTS, MASS_COLUMNS = 16, 1024

_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
}

# The tensors of a call, and the names of their strides in the kernels.
_STRIDES = {
    name: tuple(f"{prefix}_stride_{dim}" for dim in dims.split())
    for name, prefix, dims in (
        ("q", "q", "seq token head dim"),
        ("k", "k", "block head slot dim"),
        ("v", "v", "block head slot dim"),
        ("k_scale", "k_scale", "block head slot"),
        ("v_scale", "v_scale", "block head slot"),
        ("block_tables", "table", "seq block"),
        ("seq_lens", "len", "seq"),
        ("sinks", "sink", "head"),
        ("out", "out", "seq token head dim"),
        ("lse", "lse", "seq token head"),
        ("block_mass", "mass", "seq token head block"),
    )
}


class Launch(NamedTuple):
    """One kernel with all that its launch needs.

    arguments: by name, constexprs among them.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        """Enqueue it on the current stream of the current device. The host does not wait."""
        self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


class Partials(NamedTuple):
    """Results of the parts of split sequences, fp32, a row per work item.

    out: [num_rows, num_kv_heads, q_len * group_size, v_head_dim]. lse: [..., q_len * group_size] in base 2.
    """

    out: Tensor
    lse: Tensor


@torch.no_grad()
def attend(args: AttentionArguments) -> None:
    """Fill the outputs. No host synchronisation, so that a CUDA graph can capture it.

    Cost: two launches (a third with block_mass, one more without a plan), 2 * target rows of partial results.
    """
    args.check_contents()
    num_seqs = len(args.q)
    if num_seqs == 0:
        return
    plan = args.plan
    if plan is None:
        target = default_target(args.q.device, args.k.shape[1])
        plan = plan_splits(args.seq_lens, target=target, q_len=args.q_len, window=args.window)
    elif args.looks_inside:
        check_plan(plan, num_seqs)
    with on_device(args.q):
        for launch in launches(args, plan):
            launch.run()


def launches(args: AttentionArguments, plan: Tensor) -> list[Launch]:
    """What ``attend`` runs, in order. Nothing runs yet."""
    known = _known(args)
    partials = new_partials(args, plan)
    known |= {"plan": plan, "part_out": partials.out, "part_lse": partials.lse}
    if args.lse is None and args.block_mass is not None:
        known |= _strided("lse", args.q.new_empty(args.q.shape[:3], dtype=torch.float32), _STRIDES["lse"])
    steps = [_attention(args, plan, known), _merge(args, known)]
    if args.block_mass is not None:
        steps.append(_mass(args, known))
    return steps


def new_partials(args: AttentionArguments, plan: Tensor) -> Partials:
    """Uninitialised partial results, enough for every split of this plan.

    A split sequence is longer than a chunk, so that there are less than ``target`` of them, with less than
    ``2 * target`` parts.
    """
    target = num_items(args, plan) - len(args.q)
    num_rows = min(len(args.q) + target, 2 * target)
    shape = (num_rows, args.k.shape[1], args.q_len * args.group_size)
    out = args.q.new_empty(*shape, args.v.shape[3], dtype=torch.float32)
    return Partials(out, args.q.new_empty(shape, dtype=torch.float32))


def num_items(args: AttentionArguments, plan: Tensor) -> int:
    """Work items that the grid has room for: ``num_seqs + target``."""
    return len(plan) - len(args.q) - 2


def _attention(args: AttentionArguments, plan: Tensor, known: dict[str, Any]) -> Launch:
    operand, mla = operand_dtype(args), is_mla(args)
    head_dims = args.k.shape[3], args.v.shape[3]
    shape = geometry(operand, mla, args.q_len, args.group_size, args.block_size, *head_dims)
    kernel = int8_kernel if operand == torch.int8 else mla_kernel if mla else decode_kernel
    known |= shape.constants
    known["DTYPE"] = _DTYPES[operand]
    known["ALIGN"] = gcd(16, *args.k.stride()[:3], *args.v.stride()[:3])
    grid = (args.k.shape[1] * shape.m_tiles, num_items(args, plan))
    return Launch(kernel, grid, _chosen(kernel, known), shape.num_warps, shape.num_stages)


def _merge(args: AttentionArguments, known: dict[str, Any]) -> Launch:
    num_rows = args.q_len * args.group_size
    known["ROWS"] = num_rows
    known["DV"] = triton.next_power_of_2(args.v.shape[3])
    known["PARTS"] = MERGE_PARTS
    return Launch(merge_kernel, (args.k.shape[1] * num_rows, len(args.q)), _chosen(merge_kernel, known))


def _mass(args: AttentionArguments, known: dict[str, Any]) -> Launch:
    max_blocks = args.block_tables.shape[1]
    columns = min(MASS_COLUMNS, triton.next_power_of_2(max(1, max_blocks)))
    known["COLUMNS"] = columns
    grid = (args.q_len * args.q.shape[2], len(args.q), div_ceil(max_blocks, columns))
    return Launch(mass_kernel, grid, _chosen(mass_kernel, known))


def _known(args: AttentionArguments) -> dict[str, Any]:
    """Every tensor, stride and number of the call that some kernel asks for, by the name it has there."""
    known: dict[str, Any] = {
        "num_seqs": args.q.shape[0],
        "num_q_heads": args.q.shape[2],
        "num_kv_heads": args.k.shape[1],
        "max_blocks": args.block_tables.shape[1],
        "scale": args.scale,
        "window": args.window,
        "softcap": args.softcap,
    }
    for name, strides in _STRIDES.items():
        known |= _strided(name, getattr(args, name), strides)
    return known


def _strided(name: str, x: Tensor | None, strides: tuple[str, ...]) -> dict[str, Any]:
    if x is None:
        return dict.fromkeys(strides, 0) | {name: None}
    return dict(zip(strides, x.stride(), strict=True)) | {name: x}


def _chosen(kernel: Any, known: dict[str, Any]) -> dict[str, Any]:
    return {name: known[name] for name in _parameters(kernel)}


@cache
def _parameters(kernel: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kernel.fn).parameters)
