"""What one layer of a model keeps in the cache, and its bytes.

::

    full, sliding layer  num_kv_heads x (head_dim + v_head_dim) elements per token (+ 2 x num_kv_heads scales)
    latent layer (MLA)   head_dim = kv_lora_rank + rope_dim elements per token (+ 1 scale)

Scales exist for int8 only: one fp32 per token and kv head for K and one for V.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, SupportsIndex

from pagedkv.errors import SpecError

ELEMENT_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8-e4m3": 1}
SCALE_BYTES: Final[Mapping[str, int]] = {"fp32": 0, "bf16": 0, "fp16": 0, "int8": 4, "fp8-e4m3": 0}


def whole_number(name: str, value: SupportsIndex, minimum: int) -> int:
    """``value`` as a Python int of at least ``minimum``; ``SpecError`` otherwise."""
    # numpy integers become Python ones, which cannot overflow; True is a mistake, not 1
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise SpecError(f"{name} must be an integer, got {value!r}")
    if number < minimum:
        raise SpecError(f"{name} must be at least {minimum}, got {number}")
    return number


def check_dtype(dtype: object) -> None:
    """Refuse what is not the name of a cache dtype with ``SpecError``."""
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise SpecError(f"dtype is {dtype!r}; supported: {', '.join(ELEMENT_BYTES)}")


@dataclass(frozen=True)
class LayerSpec:
    """What one layer stores for one token. Layers that store the same compare and hash equal.

    Args:
        num_kv_heads: K and V heads of this layer.
        head_dim: elements of one K head. For a latent layer: of the whole latent vector.
        v_head_dim: elements of one V head; ``head_dim`` when not given, ``latent_rank`` for a latent layer.
            Filled in when the layer is made, so ``dataclasses.replace`` keeps it when ``head_dim`` changes.
        window: tokens a sliding-window layer reads, the token of this step included. None: all of them.
        latent_rank: multi-head latent attention. One vector per token is stored once; its first
            ``latent_rank`` elements serve as the values, so no V is stored.

    Raises:
        SpecError: a number is not a positive integer, or the latent geometry is impossible.

    >>> LayerSpec(num_kv_heads=8, head_dim=128).bytes_per_token("bf16")
    4096
    >>> LayerSpec(8, 128) == LayerSpec(8, 128, v_head_dim=128)
    True
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int | None = None
    latent_rank: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers, and fill in ``v_head_dim``."""
        for name in ("num_kv_heads", "head_dim", "v_head_dim", "window", "latent_rank"):
            value = getattr(self, name)
            if value is not None or name in ("num_kv_heads", "head_dim"):
                object.__setattr__(self, name, whole_number(name, value, 1))
        if self.latent_rank is not None:
            self._check_latent(self.latent_rank)
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.latent_rank or self.head_dim)

    def _check_latent(self, rank: int) -> None:
        if self.num_kv_heads != 1:
            raise SpecError(f"a latent layer has one kv head, got num_kv_heads={self.num_kv_heads}")
        if rank > self.head_dim:
            raise SpecError(f"latent_rank {rank} is larger than head_dim {self.head_dim}, which contains it")
        if self.v_head_dim not in (None, rank):
            raise SpecError(
                f"a latent layer's values are its latent_rank {rank} dims, got v_head_dim={self.v_head_dim}"
            )

    @classmethod
    def mla(cls, rank: int, rope_dim: int) -> LayerSpec:
        """A latent layer of ``kv_lora_rank`` and decoupled rope dims (DeepSeek-V2, arXiv 2405.04434, 2.1.3).

        >>> LayerSpec.mla(rank=512, rope_dim=64).bytes_per_token("bf16")
        1152
        """
        rank, rope_dim = whole_number("rank", rank, 1), whole_number("rope_dim", rope_dim, 0)
        return cls(num_kv_heads=1, head_dim=rank + rope_dim, latent_rank=rank)

    @property
    def is_latent(self) -> bool:
        """Whether this layer stores one latent vector per token instead of K and V."""
        return self.latent_rank is not None

    @property
    def value_dim(self) -> int:
        """Elements of one value head: ``v_head_dim``, never None."""
        return self.v_head_dim or self.head_dim

    @property
    def elements_per_token(self) -> int:
        """Elements stored per token, scales not counted."""
        return self.num_kv_heads * (self.head_dim if self.is_latent else self.head_dim + self.value_dim)

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes stored per token in this layer, scales included. O(1).

        Raises:
            SpecError: ``dtype`` is not a cache dtype.

        >>> LayerSpec(num_kv_heads=8, head_dim=128).bytes_per_token("int8")
        2112
        """
        check_dtype(dtype)
        num_scales = self.num_kv_heads * (1 if self.is_latent else 2)
        return self.elements_per_token * ELEMENT_BYTES[dtype] + num_scales * SCALE_BYTES[dtype]

    def resident_tokens(self, context: SupportsIndex) -> int:
        """Tokens this layer needs at a context of ``context`` tokens: ``min(context, window)``. O(1)."""
        tokens = whole_number("context", context, 0)
        return tokens if self.window is None else min(tokens, self.window)
