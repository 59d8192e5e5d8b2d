"""What share of a device's peaks the parts of a step reach."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedkv.errors import SpecError

SHARES = ("weights", "kv", "compute")
TIMES = ("launch_s_per_layer", "per_sequence_s")


@dataclass(frozen=True)
class Efficiency:
    """Share of the peak that each part of a step reaches, and the cost that no byte explains.

    Defaults are published figures, fitted to no run of ours: weights stream at 0.92 of the memory
    bandwidth; paged attention reads K and V at 0.85-0.95 of it on data-centre GPUs and 0.8-0.85 on
    consumer ones; large GEMMs reach 0.78-0.87 of the dense peak (NVIDIA AIConfigurator's measured
    kernel database). The launch cost is what these leave unexplained of one published point: 7.42 ms
    TPOT of Llama-3.1-8B on an H100 SXM, 8 requests of 1,024 + 512 tokens at once (same database):
    weights 4.87, KV 0.45, prefill of the others 0.19, so 1.91 ms for 32 layers; 13-29 us of it per
    layer is the attention call. ``efficiency_of`` replaces the attention part where it was fitted.

    Attributes:
        weights, kv: shares of the memory bandwidth at which weights, and K and V, are read.
        compute: share of the dense FLOPS.
        launch_s_per_layer: seconds per layer and step, the attention call's fixed cost included.
        per_sequence_s: seconds per step and decoding sequence (sampling, scheduling); 0 unless calibrated.
    """

    weights: float = 0.92
    kv: float = 0.90
    compute: float = 0.78
    launch_s_per_layer: float = 60e-6
    per_sequence_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse shares outside (0, 1], and times that are negative or no numbers."""
        for name in SHARES:
            if not 0.0 < getattr(self, name) <= 1.0:
                raise SpecError(f"efficiency {name} must be in (0, 1], got {getattr(self, name)}")
        for name in TIMES:
            if not 0.0 <= getattr(self, name) < math.inf:
                raise SpecError(f"{name} must be finite and not negative, got {getattr(self, name)}")
