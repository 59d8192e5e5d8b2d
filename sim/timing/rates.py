"""What a device reaches of its peaks, where somebody measured or fitted it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagedkv.errors import SpecError
from pagedkv.sim.timing.attention_constants import AttentionConstants
from pagedkv.sim.timing.efficiency import Efficiency
from pagedkv.spec import ELEMENT_BYTES


@dataclass(frozen=True)
class DeviceRates:
    """What a hardware file says of a device beside its peaks.

    Attributes:
        attention: constants of decode attention by KV dtype; at least one.
        weights, compute: shares of the peaks, as in ``Efficiency``.
        layer_s: seconds per layer and step without the attention call.
        per_sequence_s: seconds per decoding sequence and step.
    """

    attention: Mapping[str, AttentionConstants]
    weights: float = Efficiency.weights
    compute: float = Efficiency.compute
    layer_s: float = 0.0
    per_sequence_s: float = field(default=0.0)

    def __post_init__(self) -> None:
        """Refuse rates without attention, of dtypes that no cache has, and shares and times that are none."""
        unknown = [dtype for dtype in self.attention if dtype not in ELEMENT_BYTES]
        if unknown or not self.attention:
            raise SpecError(
                f"need attention rates by KV dtype ({', '.join(ELEMENT_BYTES)}), got "
                f"{', '.join(self.attention) or 'none'}"
            )
        Efficiency(self.weights, 1.0, self.compute, self.layer_s, self.per_sequence_s)

    def attention_for(self, kv_dtype: str) -> AttentionConstants:
        """The constants of a KV dtype, or of the nearest that is there."""
        return self.attention[nearest_dtype(kv_dtype, self.attention)]


def nearest_dtype(kv_dtype: str, known: Mapping[str, object]) -> str:
    """Of the known dtypes this one, else the one with the next number of bytes per element.

    >>> nearest_dtype("int8", {"bf16": 1, "fp8-e4m3": 1}), nearest_dtype("fp16", {"bf16": 1, "int8": 1})
    ('fp8-e4m3', 'bf16')
    """
    if kv_dtype in known:
        return kv_dtype
    width = ELEMENT_BYTES[kv_dtype]
    return min(known, key=lambda name: (abs(ELEMENT_BYTES[name] - width), name))
