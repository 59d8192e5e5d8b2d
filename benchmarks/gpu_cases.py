"""Every feature of decode attention as a case that is compared with the fp64 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedkv.arithmetic import div_ceil
from pagedkv.attention import paged_attention, paged_mla_attention
from pagedkv.attention.testing import make_batch
from pagedkv.quantization import quantize
from pagedkv.spec import KVCacheSpec
from pagedkv.storage import STORAGE_DTYPES, KVStorage, Layout

LENS = (1, 17, 700, 2049, 0)

# What an unused entry of a table holds: no block of any pool.
NO_BLOCK = 2_000_000_000

# The largest difference, as a share of the largest entry for the output, absolute for LSE and mass.
TOLERANCES = {torch.float32: (1e-4, 1e-3), torch.float16: (3e-3, 3e-3), torch.bfloat16: (1.5e-2, 3e-3)}


@dataclass(frozen=True)
class Case:
    """One call. ``mla`` reads a latent cache; ``far`` blocks lie beyond 2^31 elements of the pool.

    heads: query heads and KV heads. dims: head_dim and v_head_dim (of a latent: with rope, and its rank).
    dtype: of the cache. q_dtype: None for bf16, or the dtype of a 16-bit or 32-bit cache.
    """

    name: str
    dtype: str = "bf16"
    lens: tuple[int, ...] = LENS
    heads: tuple[int, int] = (32, 8)
    dims: tuple[int, int] = (128, 128)
    block_size: int = 16
    layout: Layout = "HND"
    q_len: int = 1
    q_dtype: str | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    mass: bool = False
    token_minor: bool = False
    mla: bool = False
    far: bool = False
    planned: bool = True

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the query and the output."""
        if self.q_dtype is not None:
            return STORAGE_DTYPES[self.q_dtype]
        return STORAGE_DTYPES[self.dtype if self.dtype in ("fp32", "fp16") else "bf16"]

    def shrunk(self) -> Case:
        """The same feature with fewer heads and tokens, for the interpreter."""
        group = self.heads[0] // self.heads[1]
        kv_heads = min(self.heads[1], 2)
        lens = tuple(n if n <= 65 else 48 + n % 119 for n in self.lens[-4:])
        window = None if self.window is None else min(self.window, 70)
        return replace(self, heads=(min(group, 16) * kv_heads, kv_heads), lens=lens, window=window)


@dataclass(frozen=True)
class Outcome:
    """error: the largest difference, in units of what is allowed; None if the card cannot do it at all."""

    name: str
    error: float | None
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """Off by more than allowed, or not a number."""
        return self.error is not None and not self.error <= 1


CASES = (
    Case("bf16"),
    Case("int8, V row-major", dtype="int8"),
    Case("int8, V token-minor", dtype="int8", token_minor=True),
    Case("fp16", dtype="fp16"),
    Case("fp32", dtype="fp32"),
    Case("fp8-e4m3", dtype="fp8-e4m3"),
    Case("int8, fp32 query", dtype="int8", q_dtype="fp32", token_minor=True),
    Case("window", window=300),
    Case("sinks", sinks=True),
    Case("softcap", softcap=20.0),
    Case("window, sinks and softcap", window=300, sinks=True, softcap=20.0),
    Case("int8, window, sinks and softcap", "int8", window=300, sinks=True, softcap=20.0, token_minor=True),
    *(Case(f"q_len {n}", q_len=n) for n in (2, 3, 4, 8)),
    Case("q_len 4, window, sinks", q_len=4, window=300, sinks=True),
    Case("int8, q_len 4", dtype="int8", q_len=4, token_minor=True),
    Case("block mass", mass=True),
    Case("block mass, window, q_len 2", mass=True, window=300, q_len=2),
    Case("int8, block mass", dtype="int8", mass=True, token_minor=True),
    Case("MLA 512 + 64", heads=(16, 1), dims=(576, 512), mla=True),
    Case("MLA 512 + 64, block 64, q_len 2", heads=(16, 1), dims=(576, 512), block_size=64, q_len=2, mla=True),
    Case("NHD", layout="NHD"),
    Case("int8, NHD", dtype="int8", layout="NHD"),
    *(Case(f"block size {n}", block_size=n) for n in (8, 32, 64, 128, 256)),
    Case("int8, block size 64", dtype="int8", block_size=64, token_minor=True),
    *(Case(f"head_dim {n}", dims=(n, n)) for n in (32, 64, 80, 96, 256)),
    Case("head_dim 192, v_head_dim 128", dims=(192, 128)),
    Case("MHA", heads=(8, 8)),
    Case("group of 7", heads=(28, 4)),
    Case("MQA", heads=(32, 1)),
    Case("one long among short", lens=(*(65,) * 15, 16384)),
    Case("one long among short, no plan given", lens=(*(65,) * 15, 16384), planned=False),
    Case("only empty sequences", lens=(0, 0, 0)),
    Case("only empty sequences, sinks", lens=(0, 0, 0), sinks=True),
    Case("int8, blocks beyond 2^31 elements", dtype="int8", far=True),
    Case("bf16, blocks beyond 2^31 elements", far=True),
)


def run_case(case: Case, device: str, backend: str) -> Outcome:
    """Compare output, LSE and mass with the reference. Every unused slot and table entry is poison."""
    call = _far_call(case, device) if case.far else _call(case, device)
    expected = _attend(case, {**call, "q": call["q"].double()}, "reference")
    if backend == "triton" and case.planned:
        call["plan"] = _plan(case, call)
    try:
        found = _attend(case, call, backend)
    except ValueError as refusal:
        is_too_old = "compute capability" in str(refusal)
        return Outcome(case.name, None if is_too_old else float("inf"), str(refusal).splitlines()[0])
    of_out, of_lse = TOLERANCES[case.compute_dtype]
    largest = float(expected[0].abs().max()) or 1.0
    errors = [_largest_difference(found[0], expected[0]) / largest / of_out]
    errors += [_largest_difference(a, b) / of_lse for a, b in zip(found[1:], expected[1:], strict=True)]
    return Outcome(case.name, max(errors))


def _attend(case: Case, call: dict[str, Any], backend: str) -> list[Tensor]:
    """Output, LSE and, if the case has it, mass, into buffers that were NaN."""
    options = dict(call)
    q, k, v = (options.pop(name) for name in ("q", "k", "v"))
    tables, lens = options.pop("block_tables"), options.pop("seq_lens")
    out = q.new_full((*q.shape[:-1], case.dims[1]), torch.nan)
    results = [out, torch.full(q.shape[:-1], torch.nan, device=q.device)]
    if case.mass:
        mass = torch.full((*q.shape[:-1], tables.shape[1]), torch.nan, device=q.device)
        results.append(mass)
        options["block_mass"] = mass
    options |= {"out": out, "lse": results[1], "backend": backend}
    if case.mla:
        scale = (case.dims[0] - case.dims[1]) ** -0.5 / 2
        paged_mla_attention(q, k, tables, lens, latent_rank=case.dims[1], scale=scale, **options)
    else:
        paged_attention(q, k, v, tables, lens, **options)
    return results


def _call(case: Case, device: str) -> dict[str, Any]:
    batch = make_batch(
        case.lens,
        heads=case.heads,
        dims=case.dims,
        block_size=case.block_size,
        layout=case.layout,
        q_len=case.q_len,
        unused=torch.nan,
    )
    call: dict[str, Any] = {"q": batch.q.to(case.compute_dtype), "seq_lens": batch.lens}
    call["block_tables"] = _poisoned(batch.tables, case)
    if case.dtype == "int8":
        (k, call["k_scale"]), (v, call["v_scale"]) = (quantize(x, check=False) for x in (batch.k, batch.v))
    else:
        k, v = (x.to(STORAGE_DTYPES[case.dtype]) for x in (batch.k, batch.v))
    call |= {"k": k, "v": _token_minor(v) if case.token_minor else v}
    return _placed(call, case, device)


def _far_call(case: Case, device: str) -> dict[str, Any]:
    """Blocks at both ends of a pool whose last ones start beyond 2^31 elements; the rest is never touched."""
    stride = case.block_size * case.dims[0]
    num_rows = 2**31 // stride + 9
    lens = [5 * case.block_size - 3, 2 * case.block_size]
    tables = torch.tensor(
        [[num_rows - 1, 1, num_rows - 3, 2, num_rows - 5], [num_rows - 2, 3, NO_BLOCK, NO_BLOCK, NO_BLOCK]]
    )
    used = tables[tables != NO_BLOCK]
    generator = torch.Generator().manual_seed(1)
    call: dict[str, Any] = {"block_tables": tables.int(), "seq_lens": torch.tensor(lens, dtype=torch.int32)}
    group = case.heads[0] // case.heads[1]
    q = torch.randn(2, 1, group, case.dims[0], generator=generator)
    call["q"] = q.to(case.compute_dtype)
    for name in ("k", "v"):
        pool = torch.empty(
            num_rows, 1, case.block_size, case.dims[0], dtype=STORAGE_DTYPES[case.dtype], device=device
        )
        values = torch.randn(len(used), 1, case.block_size, case.dims[0], generator=generator)
        if case.dtype == "int8":
            values, scale = quantize(values)
            scales = torch.full((num_rows, 1, case.block_size), torch.nan, device=device)
            scales[used.to(device)] = scale.to(device)
            call[f"{name}_scale"] = scales
        pool[used.to(device)] = values.to(pool.dtype).to(device)
        call[name] = pool
    return {name: x.to(device) for name, x in call.items()}


def _placed(call: dict[str, Any], case: Case, device: str) -> dict[str, Any]:
    options = {name: x.to(device) for name, x in call.items()}  # keeps the strides
    if case.sinks:
        options["sinks"] = torch.linspace(-1, 2, case.heads[0], device=device)
    return options | {"window": case.window, "softcap": case.softcap} if not case.mla else options


def _poisoned(tables: Tensor, case: Case) -> Tensor:
    """The table with ``NO_BLOCK`` wherever no query token reads: beyond the sequence, before the window."""
    tables = tables.clone()
    for row, n in enumerate(case.lens):
        tables[row, div_ceil(n, case.block_size) :] = NO_BLOCK
        if case.window is not None:
            tables[row, : max(0, n - case.q_len + 1 - case.window) // case.block_size] = NO_BLOCK
    return tables


def _token_minor(v: Tensor) -> Tensor:
    return v.transpose(2, 3).contiguous().transpose(2, 3)


def _plan(case: Case, call: dict[str, Any]) -> Tensor:
    from pagedkv.attention import default_target, plan_splits

    target = default_target(call["q"].device, case.heads[1])
    return plan_splits(call["seq_lens"], target=target, q_len=case.q_len, window=case.window, min_chunk=128)


def _largest_difference(found: Tensor, expected: Tensor) -> float:
    """Infinite where one is not a number or infinite and the other is not the same."""
    a, b = found.double(), expected.double()
    difference = (a - b).abs().where(a != b, 0)  # equal infinities have no difference
    return float(difference.nan_to_num(torch.inf).max()) if difference.numel() else 0.0


LAYOUTS: tuple[Layout, ...] = ("HND", "NHD")
WRITES: tuple[tuple[str, Layout, bool], ...] = (
    *((dtype, layout, False) for dtype in STORAGE_DTYPES for layout in LAYOUTS),
    ("int8", "HND", True),
)


def write_name(dtype: str, layout: Layout, token_minor: bool) -> str:
    """As in the table."""
    return f"write {dtype}, {layout}" + (", V token-minor" if token_minor else "")


def run_write(dtype: str, layout: Layout, token_minor: bool, device: str) -> Outcome:
    """The write kernel against the storage on a CPU, bit for bit, padded rows among the tokens."""
    from pagedkv.triton_write import write_kv

    spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=3, head_dim=80, dtype=dtype, block_size=16)
    expected, found = (
        KVStorage(spec, 9, device=place, layout=layout, token_minor_values=token_minor)
        for place in ("cpu", device)
    )
    generator = torch.Generator().manual_seed(2)
    slots = torch.randperm(9 * 16, generator=generator)[:70] + 16
    slots[::7] = -1
    k, v = (torch.randn(70, 3, 80, generator=generator).to(torch.bfloat16) for _ in range(2))
    expected.write(0, k, v, slots)
    layer = found.layer(0)
    for values, scale, new in ((layer.k, layer.k_scale, k), (layer.v, layer.v_scale, v)):
        write_kv(values, scale, new.to(device), slots.to(device))
    name = write_name(dtype, layout, token_minor)
    wrong = sum(
        int((a.cpu().view(torch.uint8) != b.view(torch.uint8)).sum())
        for a, b in zip(found.buffers, expected.buffers, strict=True)
    )
    return Outcome(name, float("inf") if wrong else 0.0, f"{wrong} bytes differ" if wrong else "bit for bit")
