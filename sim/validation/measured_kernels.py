"""Measured latencies of decode attention, one layer call a row, as published tables hold them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.gpus import GPU, load_gpu

KERNEL_FILE = "decode_attention_per_layer.csv"
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8-e4m3", "int8": "int8"}
LONG_CONTEXT = 8192
LARGEST_L2_SHARE = 2.0

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class KernelRows:
    """Calls of one kernel on one GPU with one KV dtype; every array is [num_rows].

    Attributes:
        kernel: engine, its version and the kernel's name.
        context: tokens per sequence. ``window``: of a sliding layer, 0 for a full one.
        kv_bytes: K and V that a call reads. ``row_bytes``: one head's K of one token.
        seconds: measured.
        is_suspect: the source or a reader of it doubts the row.
    """

    gpu: GPU
    kernel: str
    kv_dtype: str
    geometry: npt.NDArray[np.str_]
    batch: FloatArray
    num_kv_heads: FloatArray
    context: FloatArray
    window: FloatArray
    row_bytes: FloatArray
    kv_bytes: FloatArray
    seconds: FloatArray
    is_suspect: BoolArray

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.seconds)

    def where(self, mask: BoolArray) -> KernelRows:
        """The rows of a mask."""
        arrays: dict[str, Any] = {
            name: value[mask] for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        return replace(self, **arrays)

    @property
    def is_cold(self) -> BoolArray:
        """Full attention over long contexts whose K and V no L2 holds, as in a step that reads weights too.

        A benchmark calls a kernel again over the same K and V: below twice the L2 it measures the L2.
        """
        l2 = self.gpu.l2_bytes or 0
        long = (self.context >= LONG_CONTEXT) & (self.kv_bytes > LARGEST_L2_SHARE * l2)
        cold: BoolArray = long & (self.window == 0) & ~self.is_suspect
        return cold


def find_kernels(directory: Path) -> list[Path]:
    """Files below ``directory`` (itself included) with measured kernels, sorted."""
    return sorted(path for path in directory.rglob(KERNEL_FILE) if path.is_file())


def read_kernels(path: Path) -> list[KernelRows]:
    """Rows by GPU, kernel and dtype, sorted; ``PagedKVError`` names the file, the line and what is wrong."""
    groups: dict[tuple[str, str, str], list[tuple[GPU, dict[str, float], str]]] = {}
    for key, value in _lines(path):
        groups.setdefault(key, []).append(value)
    return [_group(key, groups[key]) for key in sorted(groups)]


def _lines(path: Path) -> Iterator[tuple[tuple[str, str, str], tuple[GPU, dict[str, float], str]]]:
    with path.open(encoding="utf-8", newline="") as file:
        try:
            rows = list(csv.DictReader(file))
        except (UnicodeDecodeError, csv.Error) as error:
            raise PagedKVError(f"{path}: no table: {error}") from None
    if not rows:
        raise PagedKVError(f"{path}: no rows")
    for number, row in enumerate(rows, start=2):
        try:
            yield _line(row)
        except KeyError as error:
            raise PagedKVError(f"{path}, line {number}: no field or value {error.args[0]!r}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise PagedKVError(f"{path}, line {number}: {error}") from None


def _line(row: dict[str, str]) -> tuple[tuple[str, str, str], tuple[GPU, dict[str, float], str]]:
    gpu, dtype = load_gpu(row["device"]), DTYPES[row["kv_cache_dtype"]]
    width = 2 if dtype in ("bf16", "fp16") else 1
    values = {
        "batch": float(row["batch_size"]),
        "num_kv_heads": float(row["num_key_value_heads"]),
        "context": float(row["ctx"]),
        "window": float(row["window_size"]),
        "row_bytes": float(row["head_dim"]) * width,
        "kv_bytes": float(row["kv_bytes_per_layer"]),
        "seconds": float(row["latency_ms_per_layer"]) * 1e-3,
        "is_suspect": float(row["suspect"] or 0),
    }
    for name, value in values.items():
        least = 0.0 if name in ("window", "is_suspect") else 1e-12
        if not least <= value < 1e18:
            raise ValueError(f"{name} is {value}")
    kernel = f"{row['framework']} {row['version']} {row['kernel_source']}"
    return (gpu.name, kernel, dtype), (gpu, values, row["geometry"])


def _group(key: tuple[str, str, str], rows: list[tuple[GPU, dict[str, float], str]]) -> KernelRows:
    columns = {name: np.array([values[name] for _, values, _ in rows]) for name in rows[0][1]}
    suspect = columns.pop("is_suspect") > 0
    geometry = np.array([text for _, _, text in rows])
    return KernelRows(rows[0][0], key[1], key[2], geometry, is_suspect=suspect, **columns)
