"""What decode attention kernels reach of the memory bandwidth: constants fitted to published measurements.

``attention_constants.csv`` is written by ``benchmarks/fit_attention.py``, which says how, and how large the
errors are. The measurements themselves are not part of this package.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from pagedkv.errors import SpecError

ROW_BYTES = 64
"""The unit of ``row_cost``: a row costs as much as reading this many bytes ``row_cost`` times."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AttentionConstants:
    """Time of one decode-attention call of one layer, as a kernel takes it on a device.

    ::

        seconds = fixed_s + kv_bytes / bandwidth * max(byte_cost + row_cost * 64 / row_bytes,
                                                       head_cost / (sequences * kv heads))

    A row is one head's K (or V) of one token: what a kernel converts and multiplies at once. Costs are
    multiples of what the peak bandwidth would take, so 1.0 is the peak.

    Attributes:
        fixed_s: seconds of a call that no byte explains.
        byte_cost: of reading a byte.
        row_cost: of a row, per 64 bytes of it: narrow rows (fp8, small heads) cost more per byte.
        head_cost: for one sequence and KV head alone; 0 for kernels that split long sequences.
    """

    fixed_s: float
    byte_cost: float
    row_cost: float = 0.0
    head_cost: float = 0.0

    def __post_init__(self) -> None:
        """Refuse costs that would make time run backwards, or bytes come for nothing."""
        for name in ("fixed_s", "row_cost", "head_cost"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise SpecError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if not 0.0 < self.byte_cost < math.inf:
            raise SpecError(f"byte_cost must be above 0, got {self.byte_cost}")

    def share(self, row_bytes: float) -> float:
        """Share of the bandwidth that many long sequences reach, at most 1.

        >>> AttentionConstants(0.0, byte_cost=1.0, row_cost=0.5).share(row_bytes=128)
        0.8
        """
        return min(1.0, 1.0 / (self.byte_cost + self.row_cost * ROW_BYTES / row_bytes))

    def seconds(
        self, kv_bytes: FloatArray, num_heads: FloatArray, row_bytes: FloatArray, bandwidth: float
    ) -> FloatArray:
        """Seconds of calls that read ``kv_bytes`` for ``num_heads`` = sequences x KV heads; [num_calls].

        >>> constants = AttentionConstants(1e-5, byte_cost=1.25)
        >>> constants.seconds(np.array([1e9]), np.array([256.0]), np.array([256.0]), 1e12).tolist()
        [0.00126]
        """
        cost = np.maximum(self.byte_cost + self.row_cost * ROW_BYTES / row_bytes, self.head_cost / num_heads)
        found: FloatArray = self.fixed_s + kv_bytes / bandwidth * cost
        return found


@dataclass(frozen=True)
class FittedKernel:
    """The constants of one kernel on one GPU with one KV dtype, and how well they fit.

    ``num_rows`` measurements were fitted; their mean absolute relative error in percent is ``mape``, and
    ``cross_validated`` when each fifth of them is predicted from the others. ``is_default``: a step is
    modelled with this kernel of the GPU and dtype.
    """

    gpu: str
    kernel: str
    kv_dtype: str
    constants: AttentionConstants
    num_rows: int
    mape: float
    cross_validated: float
    is_default: bool


FIELDS = (
    "gpu",
    "kernel",
    "kv_dtype",
    "fixed_us",
    "byte_cost",
    "row_cost",
    "head_cost",
    "rows",
    "mape_percent",
    "cross_validated_percent",
    "default",
)


@cache
def fitted_kernels() -> tuple[FittedKernel, ...]:
    """Every fitted kernel, in the order of the file.

    >>> [k.gpu for k in fitted_kernels() if k.is_default and k.kv_dtype == "bf16"]
    ['A100-80 SXM', 'H100 SXM', 'L40S']
    """
    text = files("pagedkv.sim.timing").joinpath("attention_constants.csv").read_text(encoding="utf-8")
    return tuple(_kernel(row) for row in csv.DictReader(text.splitlines()))


def _kernel(row: dict[str, str]) -> FittedKernel:
    costs = [float(row[name]) for name in ("byte_cost", "row_cost", "head_cost")]
    return FittedKernel(
        row["gpu"],
        row["kernel"],
        row["kv_dtype"],
        AttentionConstants(float(row["fixed_us"]) * 1e-6, *costs),
        int(row["rows"]),
        float(row["mape_percent"]),
        float(row["cross_validated_percent"]),
        row["default"] == "1",
    )
