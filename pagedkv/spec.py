"""How many bytes a KV cache takes, exactly: its layers, the dtype of its elements, the size of its blocks.

All sizes are in bytes, all contexts and windows in tokens. Nothing here needs torch or numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, SupportsIndex

from pagedkv.errors import SpecError
from pagedkv.hf_config import load_config, read_dtype, read_layers
from pagedkv.layer_spec import ELEMENT_BYTES, LayerSpec, check_dtype, whole_number

__all__ = ["ELEMENT_BYTES", "KVCacheSpec", "LayerSpec"]

NUM_RESERVED_BLOCKS: Final = 1


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
        check_dtype(self.dtype)
        object.__setattr__(self, "block_size", whole_number("block_size", self.block_size, 1))

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
        return cls((layer,) * whole_number("num_layers", num_layers, 1), dtype, block_size)

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
        config = load_config(source)
        return cls(read_layers(config), read_dtype(config) if dtype is None else dtype, block_size)

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
    def bytes_by_window(self) -> tuple[tuple[int | None, int], ...]:
        """(window or None, bytes per token of all layers with it), in order of first appearance."""
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
        return dict(self.bytes_by_window).get(None, 0)

    def _layer(self, layer_index: SupportsIndex) -> LayerSpec:
        index = whole_number("layer_index", layer_index, 0)
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
        tokens = whole_number("context", context, 0)
        return sum(
            size * (tokens if window is None else min(tokens, window))
            for window, size in self.bytes_by_window
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
        memory = whole_number("memory_bytes", memory_bytes, 0)
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
