"""KVStorage: the tensors behind the block ids."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedkv import native
from pagedkv.arithmetic import div_ceil
from pagedkv.block_moves import move_blocks, put_blocks, take_blocks
from pagedkv.block_tables import NULL_BLOCK
from pagedkv.errors import BlockError, PagedKVError
from pagedkv.kv_write import write_kv
from pagedkv.layer_spec import whole_number
from pagedkv.page_table import PAD_SLOT
from pagedkv.quantization import NonFiniteError, dequantize
from pagedkv.spec import KVCacheSpec, LayerSpec

Layout = Literal["HND", "NHD"]
BlockIds = Sequence[int] | NDArray[np.integer[Any]] | Tensor

STORAGE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8-e4m3": torch.float8_e4m3fn,
}


class LayerKV(NamedTuple):
    """The cache of one layer, as attention reads it; every tensor is a view of the storage.

    The dimensions are the same for both layouts, which differ in strides only. ``num_rows`` is
    ``num_blocks + 1``: a block id indexes it directly, row ``NULL_BLOCK`` is nobody's.

    k: [num_rows, num_kv_heads, block_size, head_dim], storage dtype.
    v: [num_rows, num_kv_heads, block_size, v_head_dim], storage dtype; for MLA the first ``latent_rank``
        entries of ``k``.
    k_scale, v_scale: [num_rows, num_kv_heads, block_size] fp32 for int8, else None.
    window: tokens that the layer reads, from its spec; None for all. Pass it on, nothing else applies it:
        ``paged_attention(q, kv.k, kv.v, ..., window=kv.window)``.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    window: int | None


class KVPair(NamedTuple):
    """Keys [n, num_kv_heads, head_dim] and values [n, num_kv_heads, v_head_dim] of n tokens."""

    k: Tensor
    v: Tensor


class KVStorage:
    """Keys, values and scales of every layer, for blocks ``1..num_blocks``.

    ::

        group = layers of equal shape        a block = one row of every buffer of every group
        k        [layers, num_blocks + 1, num_kv_heads, block_size, head_dim]      HND (default)
                 [layers, num_blocks + 1, block_size, num_kv_heads, head_dim]      NHD
        v        the same with v_head_dim    (MLA: none, values are k[..., :latent_rank])
                 [layers, num_blocks + 1, num_kv_heads, v_head_dim, block_size]    token-minor: int8 on CUDA
        k_scale  [layers, num_blocks + 1, num_kv_heads, block_size] fp32           int8 only
        v_scale  the same

    Token-minor values let both products of attention run on int8 tensor cores, which want consecutive tokens
    of one dimension side by side. Whatever the layout, views have the same dimensions and other strides.

    Layers of one shape share an allocation, so that moving a block moves all its layers in one strided copy,
    and its scales with it. Memory starts zeroed.

    What an argument *contains* (slots, finiteness) is checked where looking is free, on the CPU. On an
    accelerator looking would make the host wait, so only shapes and dtypes are checked there.

    >>> spec = KVCacheSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype="fp32", block_size=2)
    >>> storage = KVStorage(spec, num_blocks=3)
    >>> k = torch.arange(12.0).view(3, 1, 4)
    >>> slots = torch.tensor([6, 7, 2])                # block 3, then the first slot of block 1
    >>> storage.write(0, k, -k, slots)
    >>> storage.gather(0, block_ids=[3, 1], seq_len=3).k[:, 0, 0].tolist()
    [0.0, 4.0, 8.0]
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        device: str | torch.device = "cpu",
        layout: Layout = "HND",
        token_minor_values: bool | None = None,
    ) -> None:
        """Allocate ``spec.bytes_per_block * (num_blocks + 1)`` bytes.

        Args:
            spec: shapes of the layers, dtype and block size.
            num_blocks: usable blocks; one more row is allocated for ``NULL_BLOCK``.
            device: where the tensors live.
            layout: order of a block in memory, "HND" (head, slot, dim) or "NHD" (slot, head, dim).
            token_minor_values: store values as (head, dim, slot), whatever the layout; by default for int8 on
                CUDA. Not for MLA, whose values are part of the keys.

        Raises:
            PagedKVError: no whole number of blocks, fewer than one, or an unknown layout.
        """
        if layout not in ("HND", "NHD"):
            raise PagedKVError(f"layout must be HND or NHD, got {layout!r}")
        self.spec = spec
        self.num_blocks = whole_number("num_blocks", num_blocks, 1)
        self.block_size = spec.block_size
        self.layout = layout
        self.dtype = STORAGE_DTYPES[spec.dtype]
        self.device = torch.device(device)
        if token_minor_values is None:
            token_minor_values = self.dtype == torch.int8 and self.device.type == "cuda"
        self._token_minor_values = token_minor_values
        self._buffers: list[Tensor] = []
        self._layers: dict[int, LayerKV] = {}
        for shape, layers in spec.groups.items():
            self._allocate_group(shape, layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, ``spec.bytes_per_block * (num_blocks + 1)``. O(buffers)."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Every allocation, with layers in dimension 0 and block ids in dimension 1.

        ``buffer[:, block_id]`` over all of them is the whole content of a block, scales included.
        """
        return tuple(self._buffers)

    def layer(self, index: int) -> LayerKV:
        """The views of one layer, and its window. O(1).

        Raises:
            PagedKVError: there is no such layer.
        """
        if index not in self._layers:
            raise PagedKVError(f"no layer {index}, the storage has layers 0..{len(self._layers) - 1}")
        return self._layers[index]

    @torch.no_grad()
    def write(self, layer: int, k: Tensor, v: Tensor | None, slot_mapping: Tensor) -> None:
        """Store one vector per token, head and kind; int8 quantizes on the way. No gradient is recorded.

        Args:
            layer: index of the layer.
            k: [n, num_kv_heads, head_dim], any float dtype, cast to the storage dtype (rounded; what fp16 or
                fp8 cannot hold becomes what torch makes of it).
            v: [n, num_kv_heads, v_head_dim], likewise; None for MLA, whose values are part of ``k``.
            slot_mapping: [n] int64, ``block_id * block_size + offset``, every slot at most once. A negative
                slot (``PAD_SLOT``) is a padded row, which writes nothing and may hold anything. (On an
                accelerator without Triton it lands in ``NULL_BLOCK``, which nobody reads, since the host
                cannot see which rows to drop.)

        Raises:
            PagedKVError: a wrong shape, dtype, device or layer.
            BlockError: a slot repeated, in ``NULL_BLOCK`` or beyond the last block (on the CPU).
            NonFiniteError: int8, and a value is NaN or infinite (on the CPU).
            Nothing is written then.

        Cost: O(n) vectors, plus sorting n slots.
        """
        target, shape = self.layer(layer), self.spec.layers[layer]
        self._check_slot_mapping(slot_mapping)
        self._check_vectors("k", k, (len(slot_mapping), shape.num_kv_heads, shape.head_dim))
        if (v is None) != shape.is_latent:
            raise PagedKVError(
                f"layer {layer}: v must be None for MLA, and only there, got {type(v).__name__}"
            )
        new = [("k", target.k, target.k_scale, k)]
        if v is not None:
            self._check_vectors("v", v, (len(slot_mapping), shape.num_kv_heads, shape.value_dim))
            new.append(("v", target.v, target.v_scale, v))
        if self.device.type == "cpu":
            self._check_slots(slot_mapping)
            for name, _, scale, x in new:
                if scale is not None:
                    _require_finite(layer, name, x, slot_mapping)
        for _, values, scale, x in new:
            write_kv(values, scale, x, slot_mapping)

    @torch.no_grad()
    def copy_blocks(self, src: BlockIds, dst: BlockIds) -> None:
        """Copy block ``src[i]`` onto block ``dst[i]``: all layers, keys, values and scales together.

        All sources are read before anything is written, so the lists may overlap (a swap is
        ``copy_blocks([a, b], [b, a])``).

        Args:
            src, dst: n block ids each (sequence, array or tensor of integers), read by the host.

        Raises:
            BlockError: ids outside 1..num_blocks, lists of different length, or a repeated destination.
                Nothing is copied then.

        Cost: n blocks read and written once on the CPU; twice elsewhere or if the lists overlap, through a
        temporary of n blocks of one buffer.

        >>> spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fp32", block_size=1)
        >>> storage = KVStorage(spec, num_blocks=2)
        >>> storage.write(0, torch.tensor([[[5.0]]]), torch.tensor([[[6.0]]]), torch.tensor([1]))
        >>> storage.copy_blocks([1], [2])
        >>> [x.item() for x in storage.gather(0, [2], 1)]
        [5.0, 6.0]
        """
        sources, targets = _checked_pairs(self._checked_ids("src", src), self._checked_ids("dst", dst))
        apart = not bool(torch.isin(sources, targets).any())
        for buffer in self._buffers:
            if apart:
                move_blocks(buffer, buffer, sources, targets)
            else:
                put_blocks(buffer, targets, take_blocks(buffer, sources))

    @torch.no_grad()
    def copy_blocks_to(self, other: "KVStorage", src: BlockIds, dst: BlockIds) -> None:
        """Copy block ``src[i]`` onto block ``dst[i]`` of ``other``: all layers, and scales with their values.

        The storages may be on different devices and laid out differently; with equal layouts it is faster.
        Between CUDA and the CPU the blocks pass through pinned memory, and the host waits for them.

        Args:
            other: another storage of an equal spec.
            src, dst: n block ids each (sequence, array or tensor of integers), read by the host.

        Raises:
            PagedKVError: ``other`` is this storage (see ``copy_blocks``), or its spec differs.
            BlockError: ids that one of the two lacks, lists of different length, or a repeated destination.
                Nothing is copied then.

        Cost: n blocks read and written once on the CPU, one strided copy per buffer for ids that count up on
        both sides; else once more on either side.

        >>> spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fp32", block_size=1)
        >>> device, host = KVStorage(spec, num_blocks=2), KVStorage(spec, num_blocks=9, layout="NHD")
        >>> device.write(0, torch.tensor([[[5.0]]]), torch.tensor([[[6.0]]]), torch.tensor([1]))
        >>> device.copy_blocks_to(host, [1], [9])
        >>> [x.item() for x in host.gather(0, [9], 1)]
        [5.0, 6.0]
        """
        if not isinstance(other, KVStorage) or other is self:
            what = "this one" if other is self else type(other).__name__
            raise PagedKVError(f"blocks are copied to another KVStorage, got {what}")
        if other.spec != self.spec:
            raise PagedKVError(f"the storages differ: {self.spec} here, {other.spec} there")
        sources, targets = _checked_pairs(self._checked_ids("src", src), other._checked_ids("dst", dst))
        for ours, theirs in zip(self._buffers, other._buffers, strict=True):
            move_blocks(ours, theirs, sources, targets)

    def gather(self, layer: int, block_ids: BlockIds, seq_len: int) -> KVPair:
        """The first ``seq_len`` tokens of a sequence, contiguous.

        Args:
            layer: index of the layer.
            block_ids: the block table of the sequence; entries beyond ``seq_len`` are ignored.
            seq_len: number of tokens, 0 and more.

        Returns:
            k [seq_len, num_kv_heads, head_dim] and v [seq_len, num_kv_heads, v_head_dim], in the storage
            dtype; int8 is dequantized to fp32.

        Raises:
            BlockError: fewer blocks than ``seq_len`` needs, or an id outside 1..num_blocks among them.

        Cost: O(seq_len) vectors.
        """
        kv = self.layer(layer)
        num_used = div_ceil(seq_len, self.block_size)
        if seq_len < 0 or num_used > len(block_ids):
            raise BlockError(
                f"{seq_len} tokens need {num_used} blocks of {self.block_size}, got {len(block_ids)}"
            )
        ids = self._checked_ids("block_ids", block_ids[:num_used]).to(self.device)
        return KVPair(_tokens(kv.k, kv.k_scale, ids, seq_len), _tokens(kv.v, kv.v_scale, ids, seq_len))

    def _allocate_group(self, shape: LayerSpec, layers: tuple[int, ...]) -> None:
        scaled = self.dtype == torch.int8
        k, k_scale = self._allocate(shape, len(layers), shape.head_dim, scaled, self.layout)
        if shape.latent_rank is not None:
            v, v_scale = k[..., : shape.latent_rank], k_scale
        else:
            v_layout = "HDN" if self._token_minor_values else self.layout
            v, v_scale = self._allocate(shape, len(layers), shape.value_dim, scaled, v_layout)
        for row, layer in enumerate(layers):
            k_scale_row, v_scale_row = (None if x is None else x[row] for x in (k_scale, v_scale))
            self._layers[layer] = LayerKV(k[row], v[row], k_scale_row, v_scale_row, shape.window)

    def _allocate(
        self, shape: LayerSpec, num_layers: int, dim: int, scaled: bool, layout: str
    ) -> tuple[Tensor, Tensor | None]:
        outer, sizes = (
            (num_layers, self.num_blocks + 1),
            {"N": self.block_size, "H": shape.num_kv_heads, "D": dim},
        )
        inner = (sizes[axis] for axis in layout)
        stored = torch.empty(*outer, *inner, dtype=self.dtype, device=self.device)
        if self.device.type == "cpu":
            native.advise_huge(stored)  # before the first touch: attention reads blocks in any order
        stored.zero_()
        values = stored.permute(0, 1, *(2 + layout.index(axis) for axis in "HND"))
        self._buffers.append(values)
        if not scaled:
            return values, None
        scale = torch.zeros(*outer, sizes["H"], sizes["N"], dtype=torch.float32, device=self.device)
        self._buffers.append(scale)
        return values, scale

    def _check_slot_mapping(self, slot_mapping: Tensor) -> None:
        _check_tensor("slot_mapping", slot_mapping)
        if slot_mapping.dim() != 1 or slot_mapping.dtype != torch.int64:
            got = f"{slot_mapping.dtype} {tuple(slot_mapping.shape)}"
            raise PagedKVError(f"slot_mapping must be int64 [n], got {got}")
        self._check_device("slot_mapping", slot_mapping)

    def _check_vectors(self, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
        _check_tensor(name, x)
        if x.shape != shape or not x.is_floating_point():
            raise PagedKVError(f"{name} must be floats {shape}, got {x.dtype} {tuple(x.shape)}")
        self._check_device(name, x)

    def _check_device(self, name: str, x: Tensor) -> None:
        if x.device.type != self.device.type:
            raise PagedKVError(f"{name} is on {x.device}, the storage on {self.device}")

    def _check_slots(self, slot_mapping: Tensor) -> None:
        slots = slot_mapping[slot_mapping > PAD_SLOT]
        first, end = self.block_size * (NULL_BLOCK + 1), self.block_size * (self.num_blocks + 1)
        outside = slots[(slots < first) | (slots >= end)]
        if len(outside):
            raise BlockError(
                f"{len(outside)} slots outside {first}..{end - 1}, the first is {int(outside[0])}"
            )
        _refuse_repeated("slot", slots)

    def _checked_ids(self, name: str, ids: BlockIds) -> Tensor:
        array = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise BlockError(f"{name} must be integers [n], got {array.dtype} {array.shape}")
        outside = array[(array <= NULL_BLOCK) | (array > self.num_blocks)]
        if outside.size:
            raise BlockError(f"{name} holds block {outside[0]}, outside 1..{self.num_blocks}")
        return torch.from_numpy(array.astype(np.int64))


def _checked_pairs(src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    if len(src) != len(dst):
        raise BlockError(f"src holds {len(src)} block ids and dst {len(dst)}")
    _refuse_repeated("dst block", dst)
    return src, dst


def _tokens(values: Tensor, scale: Tensor | None, ids: Tensor, seq_len: int) -> Tensor:
    # not values[ids], which torch 2.6 lacks for fp8
    tokens = values.index_select(0, ids).transpose(1, 2).flatten(0, 1)[:seq_len]
    if scale is None:
        return tokens.contiguous()
    return dequantize(tokens, scale[ids].transpose(1, 2).flatten(0, 1)[:seq_len]).contiguous()


def _require_finite(layer: int, name: str, x: Tensor, slot_mapping: Tensor) -> None:
    """Refuse what int8 cannot express; padded rows may hold anything."""
    finite = torch.isfinite(x.float())
    if bool(finite.all()):
        return
    written = finite[slot_mapping > PAD_SLOT]
    count = written.numel() - int(written.sum())
    if count:
        raise NonFiniteError(
            f"layer {layer}, {name}: {count} of {written.numel()} values to quantize are NaN or infinite"
        )


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise PagedKVError(f"{name} must be a tensor, got {type(x).__name__}")


def _refuse_repeated(what: str, ids: Tensor) -> None:
    ordered = ids.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise BlockError(f"{what} {int(repeated[0])} is given more than once")
