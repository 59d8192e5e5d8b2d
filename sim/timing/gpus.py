"""The GPUs of the simulator: capacities and peak rates from vendor tables, one source per row.

Memory and L2 are binary: vendors write GB and mean GiB (an "80 GB" A100 reports 81920 MiB); where a driver is
known to report otherwise (B300), that is what stands here. It is the nominal capacity, before ECC and the
driver take their share, and the largest configuration where one is sold in several.

Rates are decimal: bytes per second, and dense FLOPS or integer operations per second, without structured
sparsity. fp16 means fp32 accumulation, which halves the rate of consumer cards. All are peaks; what a step
reaches of them belongs to the step-time model. L2 is the cache that spans the device: the 256 MB Infinity
Cache behind the L2 of an MI300X is not in it, Gaudi's shared SRAM is.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from pagedkv.errors import SpecError
from pagedkv.sim.timing.rates import DeviceRates

_ALIASES: Final[Mapping[str, str]] = {
    "4090": "RTX 4090",
    "a100": "A100-80 SXM",
    "a10040gb": "A100-40 SXM",
    "a10080gb": "A100-80 SXM",
    "a100pcie80gb": "A100-80 PCIe",
    "a100sxm440gb": "A100-40 SXM",
    "a100sxm480gb": "A100-80 SXM",
    "a6000": "RTX A6000",
    "b200": "B200 SXM",
    "b300": "B300 SXM",
    "dgxspark": "GB10 (DGX Spark)",
    "gb10": "GB10 (DGX Spark)",
    "h100": "H100 SXM",
    "h10080gbhbm3": "H100 SXM",
    "h200": "H200 SXM",
    "m1max": "Apple M1 Max",
    "m1ultra": "Apple M1 Ultra",
    "m2max": "Apple M2 Max",
    "m2ultra": "Apple M2 Ultra",
    "m3max": "Apple M3 Max 16c",
    "m3ultra": "Apple M3 Ultra",
    "m4max": "Apple M4 Max 16c",
    "rtxpro6000": "RTX PRO 6000 Blackwell",
}


@dataclass(frozen=True)
class GPU:
    """One device. None means that no trustworthy figure was found, never zero.

    Attributes:
        name: as in `gpu_names`.
        memory_bytes: nominal capacity.
        bandwidth: peak memory bandwidth, bytes per second.
        l2_bytes: last-level cache that spans the device.
        fp16_flops: dense fp16 or bf16 matrix FLOPS with fp32 accumulation.
        fp8_flops: dense fp8 matrix FLOPS, fp32 accumulation where the vendor tells them apart.
        int8_ops: dense int8 matrix operations per second.
        source: where the row comes from, and which figure is unverified.
        architecture: the vendor's name of the generation, such as Hopper; devices of one share its kernels.
        rates: what the device reaches of its peaks; known from a hardware file only.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    l2_bytes: int | None
    fp16_flops: float | None
    fp8_flops: float | None
    int8_ops: float | None
    source: str
    architecture: str = ""
    rates: DeviceRates | None = None


def _scaled(text: str, unit: float) -> float | None:
    return float(text) * unit if text else None


def _gpu(row: Mapping[str, str]) -> GPU:
    l2 = _scaled(row["l2_mib"], 2**20)
    return GPU(
        name=row["name"],
        memory_bytes=int(float(row["memory_gib"]) * 2**30),
        bandwidth=float(row["bandwidth_gbps"]) * 1e9,
        l2_bytes=None if l2 is None else int(l2),
        fp16_flops=_scaled(row["fp16_tflops"], 1e12),
        fp8_flops=_scaled(row["fp8_tflops"], 1e12),
        int8_ops=_scaled(row["int8_tops"], 1e12),
        source=row["source"],
        architecture=row["architecture"],
    )


@cache
def _table() -> dict[str, GPU]:
    text = files("pagedkv.sim.timing").joinpath("gpu_specs.csv").read_text(encoding="utf-8")
    return {row["name"]: _gpu(row) for row in csv.DictReader(text.splitlines())}


def _canonical(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


@cache
def _by_canonical_name() -> dict[str, GPU]:
    table = _table()
    return {_canonical(name): gpu for name, gpu in table.items()} | {
        alias: table[name] for alias, name in _ALIASES.items()
    }


def gpu_names() -> tuple[str, ...]:
    """The full names, in the order of the table.

    >>> "H100 SXM" in gpu_names()
    True
    """
    return tuple(_table())


def load_gpu(name: str) -> GPU:
    """A device by name, short alias, or the name that its driver reports. O(1).

    Case, spaces and punctuation do not count.

    Raises:
        SpecError: no such device, with close names.

    >>> load_gpu("h100") is load_gpu("H100-SXM")
    True
    >>> load_gpu("rtx4090").memory_bytes // 2**30, load_gpu("rtx4090").bandwidth
    (24, 1008000000000.0)
    """
    known = _by_canonical_name()
    wanted = _canonical(name).removeprefix("nvidia").removeprefix("geforce")
    if wanted in known:
        return known[wanted]
    close = list(
        dict.fromkeys(known[key].name for key in difflib.get_close_matches(wanted, known, n=5, cutoff=0.5))
    )
    hint = f"close names: {', '.join(close)}" if close else f"known: {', '.join(gpu_names())}"
    raise SpecError(f"no GPU {name!r}; {hint}")
