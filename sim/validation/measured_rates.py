"""Measured decode speeds of whole models: tokens per second at a stated batch and context."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.gpus import GPU, load_gpu
from pagedkv.sim.timing.models import Model, load_model

RATES_FILE = "itl_end_to_end.csv"
WEIGHT_BITS: Final[Mapping[str, float]] = {
    "bf16": 16,
    "f16": 16,
    "int8": 8,
    "fp8": 8,
    "q8": 8.5,
    "q8_0": 8.5,
    "int4-g32": 4.5,
    "q4": 4.5,
    "q4_0": 4.5,
    "mxfp4": 4.25,
    "fp4": 4.5,
}
"""Bits per weight, the scales of its block included; a row that states none has 16-bit weights."""

SAME_ARCHITECTURE: Final[Mapping[str, str]] = {
    "qwen2.5-coder-7b": "qwen2.5-7b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
}


ENGINE_KERNELS: Final = ("llama.cpp",)


@dataclass(frozen=True)
class RateRow:
    """One measured speed: seconds per token of a sequence, of ``batch`` that decode together.

    ``served`` are prompt and output tokens of a request where the figure is a served TPOT at a fixed
    concurrency, prefill of other requests included; None where nothing but decoding was measured.
    """

    model: str
    weight_dtype: str
    gpu: str
    tp: int
    batch: int
    context: int
    kv_dtype: str
    engine: str
    seconds: float
    served: tuple[int, int] | None

    @property
    def weight_bits(self) -> float:
        """Bits per weight; ``PagedKVError`` for a dtype that is not known."""
        name = self.weight_dtype.lower()
        if name and name not in WEIGHT_BITS:
            raise PagedKVError(f"weights of dtype {self.weight_dtype!r}: bits per weight are not known")
        return WEIGHT_BITS.get(name, 16)

    @property
    def kernel(self) -> str | None:
        """The attention kernel that is known under the engine's name, if it is no GPU's default."""
        return next((name for name in ENGINE_KERNELS if self.engine.startswith(name)), None)

    @property
    def series(self) -> tuple[str, ...]:
        """What rows have in common that one calibration point serves: all but batch and context."""
        kind = "served" if self.served else "decode"
        return (kind, self.model, self.weight_dtype, self.gpu, str(self.tp), self.kv_dtype, self.engine)

    def load(self) -> tuple[Model, GPU]:
        """The model and GPU; ``PagedKVError`` with the reason for those that are not known.

        fp8 weights are multiplied in fp8, and so are fp4 ones where the hardware knows fp4 (its own rate
        is not in the table). Where no FLOPS are known computing takes no time, which is nearly true of
        one sequence at a time.
        """
        if self.tp != 1:
            raise PagedKVError(f"{self.tp} GPUs: tensor parallelism is not part of the step model")
        name = self.model.rpartition("/")[2].lower()
        name = re.sub(r"-(instruct|fp8)\b", "", name)
        dtype = self.kv_dtype if self.kv_dtype in ("bf16", "int8") else "bf16"
        model = load_model(SAME_ARCHITECTURE.get(name, name), kv_dtype=dtype)
        gpu = load_gpu(re.sub(r"\((?!DGX).*\)", "", self.gpu).strip())
        narrow = self.weight_dtype == "fp8" or (
            self.weight_dtype == "fp4" and gpu.architecture == "Blackwell"
        )
        flops = gpu.fp8_flops if narrow else gpu.fp16_flops
        return model, replace(gpu, fp16_flops=flops or gpu.fp16_flops or math.inf)

    def require_fits(self, model: Model, gpu: GPU) -> None:
        """Refuse more weights, K and V than the memory holds: fewer sequences ran, or narrower K and V."""
        weights = model.params_total * self.weight_bits / 8
        kv_bytes = self.batch * model.spec.bytes_read(self.context)
        if weights + kv_bytes > gpu.memory_bytes:
            raise PagedKVError(
                f"more weights and {model.spec.dtype} K and V than {gpu.name} holds; "
                f"{weights / 2**30:.0f} and {kv_bytes / 2**30:.0f} GiB at batch {self.batch}, "
                f"context {self.context}"
            )


def find_rates(directory: Path) -> list[Path]:
    """Files below ``directory`` (itself included) with measured speeds, sorted."""
    return sorted(path for path in directory.rglob(RATES_FILE) if path.is_file())


def read_rates(path: Path) -> list[RateRow]:
    """Every row; ``PagedKVError`` names the file, the line and what is wrong."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            rows = list(csv.DictReader(file))
        except (UnicodeDecodeError, csv.Error) as error:
            raise PagedKVError(f"{path}: no table: {error}") from None
    if not rows:
        raise PagedKVError(f"{path}: no rows")
    found = []
    for number, row in enumerate(rows, start=2):
        try:
            found.append(_row(row))
        except KeyError as error:
            raise PagedKVError(f"{path}, line {number}: no field {error.args[0]!r}") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PagedKVError(f"{path}, line {number}: {error}") from None
    return found


def _row(row: dict[str, str]) -> RateRow:
    served = None
    if row["method"].startswith("served"):
        lengths = re.search(r"_(\d+)x(\d+)_c\d+", row["source"])
        if lengths is None:
            raise ValueError(f"no lengths of the requests in {row['source']!r}")
        served = (int(lengths[1]), int(lengths[2]))
    batch, context, seconds = int(row["batch"]), float(row["context"]), float(row["itl_ms"]) * 1e-3
    if batch < 1 or not 0 <= context < 1e9 or not 0 < seconds < 1e6:
        raise ValueError(f"batch {batch}, context {context}, {seconds} s is no decode step")
    return RateRow(
        row["model"],
        row["weight_dtype"],
        row["gpu"],
        int(row["tp"]),
        batch,
        round(context),
        row["kv_dtype"],
        row["engine"],
        seconds,
        served,
    )
