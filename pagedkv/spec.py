"""How many bytes a KV cache takes, exactly.

A cache is described layer by layer, and every byte count follows from that description::

    full, sliding layer  num_kv_heads x (head_dim + v_head_dim) elements per token (+ 2 x num_kv_heads scales)
    latent layer (MLA)   head_dim = kv_lora_rank + rope_dim elements per token (+ 1 scale)

Scales exist for int8 only: one fp32 per token and kv head for K and one for V. All sizes are in bytes, all
contexts and windows in tokens. Nothing here needs torch or numpy.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, SupportsIndex

from pagedkv.errors import SpecError

ELEMENT_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8-e4m3": 1}
SCALE_BYTES: Final[Mapping[str, int]] = {"fp32": 0, "bf16": 0, "fp16": 0, "int8": 4, "fp8-e4m3": 0}
NUM_RESERVED_BLOCKS: Final = 1


def _integer(name: str, value: SupportsIndex, minimum: int) -> int:
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
                object.__setattr__(self, name, _integer(name, value, 1))
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
        rank, rope_dim = _integer("rank", rank, 1), _integer("rope_dim", rope_dim, 0)
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
        if dtype not in ELEMENT_BYTES:
            raise SpecError(f"dtype is {dtype!r}; supported: {', '.join(ELEMENT_BYTES)}")
        num_scales = self.num_kv_heads * (1 if self.is_latent else 2)
        return self.elements_per_token * ELEMENT_BYTES[dtype] + num_scales * SCALE_BYTES[dtype]

    def resident_tokens(self, context: SupportsIndex) -> int:
        """Tokens this layer needs at a context of ``context`` tokens: ``min(context, window)``. O(1)."""
        tokens = _integer("context", context, 0)
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True)
class KVCacheSpec:
    """A whole cache: its layers in model order, the dtype of its elements, and the tokens per block.

    A block holds ``block_size`` token slots in **every** layer. ``dataclasses.replace`` makes a variant.

    Args:
        layers: one `LayerSpec` per layer that has a cache.
        dtype: fp32, bf16, fp16, int8 or fp8-e4m3.
        block_size: token slots per block.

    Raises:
        SpecError: no layers, something that is no `LayerSpec`, an unknown dtype, or a block size below 1.

    >>> spec = KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128)
    >>> spec.bytes_per_token_layer(0), spec.bytes_per_token, spec.resident_bytes(500)
    (4096, 131072, 65536000)
    >>> spec.resident_bytes(4096) // 2**20
    512
    """

    layers: tuple[LayerSpec, ...]
    dtype: str = "bf16"
    block_size: int = 16

    def __post_init__(self) -> None:
        """Check the layers, the dtype and the block size."""
        if not isinstance(self.layers, (tuple, list)):
            raise SpecError(f"layers must be a tuple of LayerSpec, got {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise SpecError("layers is empty: a cache needs at least 1 layer")
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, LayerSpec):
                raise SpecError(f"layers[{index}] must be a LayerSpec, got {layer!r}")
        if self.dtype not in ELEMENT_BYTES:
            raise SpecError(f"dtype is {self.dtype!r}; supported: {', '.join(ELEMENT_BYTES)}")
        object.__setattr__(self, "block_size", _integer("block_size", self.block_size, 1))

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        window: int | None = None,
        dtype: str = "bf16",
        block_size: int = 16,
    ) -> KVCacheSpec:
        """A cache whose layers are all alike.

        >>> KVCacheSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=64, dtype="int8").bytes_per_token
        272
        """
        layer = LayerSpec(num_kv_heads, head_dim, v_head_dim, window)
        return cls((layer,) * _integer("num_layers", num_layers, 1), dtype, block_size)

    @classmethod
    def from_hf_config(
        cls, source: str | Path | Mapping[str, object], dtype: str | None = None, block_size: int = 16
    ) -> KVCacheSpec:
        """The cache of a Hugging Face model, from its ``config.json``; see `pagedkv.hf_config`.

        Args:
            source: the file, the folder that holds it, or its content as a dict.
            dtype: dtype of the cache. None: the config's ``torch_dtype``.
            block_size: token slots per block.

        Raises:
            SpecError: the file cannot be read, or the config does not say exactly what is cached.

        >>> config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
        ...           "num_key_value_heads": 8, "num_hidden_layers": 32}
        >>> KVCacheSpec.from_hf_config(config, dtype="bf16").bytes_per_token
        131072
        """
        from pagedkv.hf_config import read_spec

        return read_spec(source, dtype=dtype, block_size=block_size)

    @property
    def num_layers(self) -> int:
        """Layers that have a cache."""
        return len(self.layers)

    @property
    def groups(self) -> dict[LayerSpec, tuple[int, ...]]:
        """Layers that store the same, with their indices; in order of first appearance. O(layers).

        >>> slide, full = LayerSpec(4, 64, window=128), LayerSpec(4, 64)
        >>> list(KVCacheSpec((slide, full, slide)).groups.values())
        [(0, 2), (1,)]
        """
        members: dict[LayerSpec, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer, []).append(index)
        return {layer: tuple(indices) for layer, indices in members.items()}

    @cached_property
    def _bytes_by_window(self) -> tuple[tuple[int | None, int], ...]:
        # a step asks for bytes once per sequence, so layers are summed once per distinct window
        totals: dict[int | None, int] = {}
        for layer in self.layers:
            totals[layer.window] = totals.get(layer.window, 0) + layer.bytes_per_token(self.dtype)
        return tuple(totals.items())

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, windows not honoured, scales included."""
        return sum(layer.bytes_per_token(self.dtype) for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers, scales included."""
        return self.bytes_per_token * self.block_size

    @property
    def growth_past_window(self) -> int:
        """Bytes that each further token adds once the context is past every window.

        >>> KVCacheSpec((LayerSpec(4, 64, window=128), LayerSpec(4, 64))).growth_past_window
        1024
        """
        return dict(self._bytes_by_window).get(None, 0)

    def _layer(self, layer_index: SupportsIndex) -> LayerSpec:
        index = _integer("layer_index", layer_index, 0)
        if index >= self.num_layers:
            raise SpecError(f"layer_index is {index}, but there are {self.num_layers} layers")
        return self.layers[index]

    def bytes_per_token_layer(self, layer_index: SupportsIndex) -> int:
        """Bytes of one token in one layer, scales included. O(1).

        Raises:
            SpecError: there is no such layer.

        >>> KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128).bytes_per_token_layer(31)
        4096
        """
        return self._layer(layer_index).bytes_per_token(self.dtype)

    def resident_tokens(self, layer_index: SupportsIndex, context: SupportsIndex) -> int:
        """Tokens one layer still needs at a context of ``context`` tokens: ``min(context, window)``. O(1).

        Raises:
            SpecError: there is no such layer, or ``context`` is negative.

        >>> KVCacheSpec((LayerSpec(8, 128, window=4096),)).resident_tokens(0, 9000)
        4096
        """
        return self._layer(layer_index).resident_tokens(context)

    def resident_bytes(self, context: SupportsIndex) -> int:
        """Bytes that must stay for one sequence of ``context`` tokens when windows are honoured.

        Counted in tokens, not rounded up to blocks. O(distinct windows).

        Raises:
            SpecError: ``context`` is negative.

        >>> KVCacheSpec((LayerSpec(4, 64, window=128), LayerSpec(4, 64))).resident_bytes(1000)
        1155072
        """
        tokens = _integer("context", context, 0)
        return sum(
            size * (tokens if window is None else min(tokens, window))
            for window, size in self._bytes_by_window
        )

    def bytes_read(self, context: SupportsIndex) -> int:
        """KV bytes that one decode step reads for one sequence: every resident byte, once.

        ``context`` counts the token of this step, as ``seq_lens`` does. A latent vector serves as key and
        value in one read. O(distinct windows).

        Raises:
            SpecError: ``context`` is negative.

        >>> KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128).bytes_read(4096)
        536870912
        """
        return self.resident_bytes(context)

    def num_blocks_for(self, memory_bytes: SupportsIndex) -> int:
        """Usable blocks in this much memory. The reserved null block costs one block and is not usable. O(1).

        Raises:
            SpecError: not even one usable block fits.

        >>> KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128).num_blocks_for(2**30)
        511
        """
        memory = _integer("memory_bytes", memory_bytes, 0)
        usable = memory // self.bytes_per_block - NUM_RESERVED_BLOCKS
        if usable < 1:
            need = (1 + NUM_RESERVED_BLOCKS) * self.bytes_per_block
            raise SpecError(
                f"{memory} bytes hold no usable block: one block and the null block need {need} bytes"
            )
        return usable

    def max_tokens_for(self, memory_bytes: SupportsIndex) -> int:
        """Token slots of the usable blocks: what all sequences together can hold, windows not honoured. O(1).

        Raises:
            SpecError: not even one usable block fits.

        >>> KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128).max_tokens_for(2**30)
        8176
        """
        return self.num_blocks_for(memory_bytes) * self.block_size
