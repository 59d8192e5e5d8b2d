"""Swapping with tensors: what a sequence wrote on the device is what it reads after a stay on the host."""

import pytest
import torch

from pagedkv import KVCacheManager, KVCacheSpec, KVStorage, LayerSpec
from pagedkv.storage import Layout
from pagedkv.swap import SwapSpace

# layers 0 and 2 share their buffers, layer 1 has another shape
LAYERS = (LayerSpec(2, 8, 6), LayerSpec(1, 16, window=4), LayerSpec(2, 8, 6))
BLOCK_SIZE = 4


def vectors(count: int, shape: LayerSpec, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    heads = shape.num_kv_heads
    k = torch.randn(count, heads, shape.head_dim, generator=made)
    return 100 * k, torch.randn(count, heads, shape.value_dim, generator=made)


def write(manager: KVCacheManager, storage: KVStorage, seq_id: str, start: int, seed: int) -> None:
    """Random keys and values for all positions from ``start`` on."""
    slots = torch.from_numpy(manager.tables.slots(seq_id, start))
    for layer, shape in enumerate(LAYERS):
        storage.write(layer, *vectors(len(slots), shape, seed + layer), slots)


def read(manager: KVCacheManager, storage: KVStorage, seq_id: str) -> list[torch.Tensor]:
    """Keys and values of every layer; int8 comes dequantized, by its scales."""
    table, length = manager.tables.block_ids(seq_id), manager.tables.num_tokens(seq_id)
    return [x for layer in range(len(LAYERS)) for x in storage.gather(layer, table, length)]


@pytest.mark.parametrize(("layout", "token_minor"), [("HND", True), ("HND", False), ("NHD", False)])
@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_a_sequence_reads_back_its_keys_values_and_scales(
    dtype: str, layout: Layout, token_minor: bool
) -> None:
    """Its device blocks are overwritten meanwhile; it comes back to others, with its tail and a draft."""
    spec = KVCacheSpec(LAYERS, dtype, BLOCK_SIZE)
    manager = KVCacheManager(num_blocks=6, block_size=BLOCK_SIZE)
    device = KVStorage(spec, 6, layout=layout, token_minor_values=token_minor)
    host = KVStorage(spec, 9, layout=layout, token_minor_values=token_minor)
    space = SwapSpace(manager, num_host_blocks=9)

    prompt = list(range(10))
    manager.open("a", prompt)
    write(manager, device, "a", 0, seed=1)
    manager.commit("a", prompt)
    manager.append("a")  # a draft, written and not committed
    write(manager, device, "a", 10, seed=2)
    before, table = read(manager, device, "a"), manager.tables.block_ids("a").tolist()

    out = space.swap_out("a")
    assert out is not None
    device.copy_blocks_to(host, *out.copies)
    space.done(out.transfer)

    manager.open("b", list(range(50, 74)))  # the whole device
    write(manager, device, "b", 0, seed=3)
    assert space.swap_in("a") is None
    manager.truncate("b", 4)
    manager.commit("b", [50, 51, 52, 53])

    back = space.swap_in("a")
    assert back is not None and back.num_cached_tokens == 0
    host.copy_blocks_to(device, *back.copies)
    space.done(back.transfer)
    assert manager.tables.block_ids("a").tolist() != table
    assert all(torch.equal(x, y) for x, y in zip(before, read(manager, device, "a"), strict=True))
    assert space.counts.free == 9


def test_only_what_left_the_device_is_copied_back() -> None:
    """The hit is read where it was; the copied tail beside it is right too."""
    spec = KVCacheSpec(LAYERS, "int8", BLOCK_SIZE)
    manager = KVCacheManager(num_blocks=6, block_size=BLOCK_SIZE)
    device = KVStorage(spec, 6, token_minor_values=True)
    host = KVStorage(spec, 3, token_minor_values=True)
    space = SwapSpace(manager, num_host_blocks=3)
    manager.open("a", range(11))
    write(manager, device, "a", 0, seed=1)
    manager.commit("a", range(11))
    before = read(manager, device, "a")
    out = space.swap_out("a")
    assert out is not None
    device.copy_blocks_to(host, *out.copies)
    space.done(out.transfer)
    manager.open("b", range(50, 66))  # the four blocks that are free
    write(manager, device, "b", 0, seed=2)
    manager.close("b")
    back = space.swap_in("a")
    assert back is not None and (back.num_cached_tokens, len(back.copies.src)) == (8, 1)
    host.copy_blocks_to(device, *back.copies)
    space.done(back.transfer)
    assert all(torch.equal(x, y) for x, y in zip(before, read(manager, device, "a"), strict=True))
