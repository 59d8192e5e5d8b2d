"""KVStorage: what is written is what is read, and misuse changes nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.block_moves import runs
from pagedkv.block_tables import NULL_BLOCK
from pagedkv.errors import BlockError, PagedKVError
from pagedkv.page_table import PAD_SLOT
from pagedkv.quantization import NonFiniteError, dequantize, quantize
from pagedkv.spec import KVCacheSpec, LayerSpec
from pagedkv.storage import STORAGE_DTYPES, KVStorage, Layout

DTYPES = list(STORAGE_DTYPES)
LAYOUTS: list[Layout] = ["HND", "NHD"]
NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM, V_DIM = 5, 4, 2, 8, 6

# layers 0 and 2 share a group
MIXED = (LayerSpec(HEADS, DIM, V_DIM), LayerSpec(1, 16, window=4), LayerSpec(HEADS, DIM, V_DIM))
MLA = (LayerSpec(1, 12, latent_rank=8),) * 2

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def make(
    dtype: str = "fp32", layout: Layout = "HND", layers: tuple[LayerSpec, ...] = MIXED, device: str = "cpu"
) -> KVStorage:
    return KVStorage(KVCacheSpec(layers, dtype, BLOCK_SIZE), NUM_BLOCKS, layout=layout, device=device)


def tokens(n: int, seed: int = 0, dim: int = DIM, heads: int = HEADS) -> torch.Tensor:
    return torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(seed))


def slots(block_ids: Sequence[int], n: int) -> torch.Tensor:
    positions = torch.arange(n)
    return torch.tensor(block_ids)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def fill(storage: KVStorage, seed: int = 0) -> None:
    """Write random tokens into every slot of every block and layer."""
    n = NUM_BLOCKS * BLOCK_SIZE
    everything = torch.arange(BLOCK_SIZE, BLOCK_SIZE + n)
    for layer, shape in enumerate(storage.spec.layers):
        k = tokens(n, seed + 2 * layer, shape.head_dim, shape.num_kv_heads)
        v = None if shape.is_latent else tokens(n, seed + 2 * layer + 1, shape.value_dim, shape.num_kv_heads)
        storage.write(layer, k, v, everything)


def content(storage: KVStorage) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in storage.buffers]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.to(torch.float32), b.to(torch.float32)) for a, b in zip(left, right, strict=True)
    )


def stored(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """What a storage of ``dtype`` gives back for ``x``."""
    return dequantize(*quantize(x)) if dtype == "int8" else x.to(STORAGE_DTYPES[dtype])


@every_dtype
@every_layout
def test_gather_returns_what_was_written(dtype: str, layout: Layout) -> None:
    """Tokens scattered over blocks out of order come back in order, in the storage dtype."""
    storage = make(dtype, layout)
    k, v, block_ids = tokens(10, 1), tokens(10, 2, V_DIM), [5, 1, 3]
    storage.write(2, k, v, slots(block_ids, 10))
    got = storage.gather(2, block_ids, 10)
    assert same(got, [stored(k, dtype), stored(v, dtype)])
    wanted = torch.float32 if dtype == "int8" else STORAGE_DTYPES[dtype]
    assert got.k.dtype == got.v.dtype == wanted
    assert got.k.is_contiguous() and got.v.is_contiguous()


@every_dtype
@every_layout
def test_a_write_touches_its_layer_and_its_slots_only(dtype: str, layout: Layout) -> None:
    """Everything else stays zero, in the layers of the same group too."""
    storage = make(dtype, layout)
    storage.write(0, tokens(1) + 9, tokens(1, dim=V_DIM) + 9, torch.tensor([2 * BLOCK_SIZE + 3]))
    kv = storage.layer(0)
    assert bool((kv.k[2, :, 3].to(torch.float32) != 0).all())
    kv.k[2, :, 3], kv.v[2, :, 3] = 0, 0
    if kv.k_scale is not None and kv.v_scale is not None:
        kv.k_scale[2, :, 3], kv.v_scale[2, :, 3] = 0, 0
    assert same(content(storage), content(make(dtype, layout)))


@every_dtype
@every_layout
def test_layers_look_alike_in_both_layouts(dtype: str, layout: Layout) -> None:
    """Shapes, dtypes and scales; the layout is in the strides."""
    storage = make(dtype, layout)
    k, v, k_scale, v_scale, window = storage.layer(0)
    assert (window, storage.layer(1).window) == (None, 4)
    rows = NUM_BLOCKS + 1
    assert k.shape == (rows, HEADS, BLOCK_SIZE, DIM) and v.shape == (rows, HEADS, BLOCK_SIZE, V_DIM)
    assert k.dtype == v.dtype == STORAGE_DTYPES[dtype]
    assert k.stride()[1:] == ((BLOCK_SIZE * DIM, DIM, 1) if layout == "HND" else (DIM, HEADS * DIM, 1))
    if dtype == "int8":
        assert k_scale is not None and v_scale is not None
        assert k_scale.shape == v_scale.shape == (rows, HEADS, BLOCK_SIZE)
        assert k_scale.dtype == v_scale.dtype == torch.float32
    else:
        assert k_scale is None and v_scale is None


@every_dtype
@every_layout
@pytest.mark.parametrize("layers", [MIXED, MLA])
def test_bytes_are_those_of_the_spec(dtype: str, layout: Layout, layers: tuple[LayerSpec, ...]) -> None:
    """One row per block and one for the null block; scales count, MLA stores no values."""
    storage = make(dtype, layout, layers)
    assert storage.nbytes == storage.spec.bytes_per_block * (NUM_BLOCKS + 1)


def test_layers_of_one_shape_share_one_allocation() -> None:
    """Three layers of two shapes: two buffers for K and two for V, blocks in dimension 1."""
    storage = make()
    assert [tuple(buffer.shape[:2]) for buffer in storage.buffers] == [(2, 6), (2, 6), (1, 6), (1, 6)]
    assert storage.layer(0).k.untyped_storage().data_ptr() == storage.layer(2).k.untyped_storage().data_ptr()


@every_dtype
@every_layout
def test_token_minor_values_differ_in_their_strides_alone(dtype: str, layout: Layout) -> None:
    """Slots of one dimension side by side; writes, gathers and copies do not notice."""
    spec = KVCacheSpec(MIXED, dtype, BLOCK_SIZE)
    minor = KVStorage(spec, NUM_BLOCKS, layout=layout, token_minor_values=True)
    usual = make(dtype, layout)
    fill(minor)
    fill(usual)
    minor.copy_blocks([2], [3])
    usual.copy_blocks([2], [3])
    assert minor.layer(0).v.stride()[1:] == (BLOCK_SIZE * V_DIM, 1, BLOCK_SIZE)
    assert minor.layer(0).k.stride() == usual.layer(0).k.stride()
    assert same(content(minor), content(usual)) and minor.nbytes == usual.nbytes
    assert same(minor.gather(2, [5, 1], 7), usual.gather(2, [5, 1], 7))


@every_dtype
@every_layout
def test_a_later_write_wins(dtype: str, layout: Layout) -> None:
    """Writing a slot again replaces its vector and its scale."""
    storage = make(dtype, layout)
    where = slots([2], 3)
    storage.write(0, 100 * tokens(3, 1), tokens(3, 2, V_DIM), where)
    storage.write(0, tokens(3, 3), tokens(3, 4, V_DIM), where)
    got = storage.gather(0, [2], 3)
    assert same(got, [stored(tokens(3, 3), dtype), stored(tokens(3, 4, V_DIM), dtype)])


@every_dtype
def test_padded_rows_write_nothing(dtype: str) -> None:
    """Whatever they hold, NaN included; the null block stays untouched as well."""
    storage, expected = make(dtype), make(dtype)
    k, v = tokens(4, 1), tokens(4, 2, V_DIM)
    expected.write(0, k[1:3], v[1:3], torch.tensor([9, 20]))
    k[0], k[3], v[0], v[3] = torch.nan, torch.inf, torch.nan, -torch.inf
    storage.write(0, k, v, torch.tensor([PAD_SLOT, 9, 20, -7]))
    assert same(content(storage), content(expected))


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("where", [[], [PAD_SLOT, PAD_SLOT]])
def test_an_empty_write_is_no_error(dtype: str, where: list[int]) -> None:
    """n = 0, and n padded rows."""
    storage = make(dtype)
    n = len(where)
    storage.write(
        1, tokens(n, dim=16, heads=1), tokens(n, dim=16, heads=1), torch.tensor(where, dtype=torch.int64)
    )
    assert same(content(storage), content(make(dtype)))


@every_layout
def test_both_ends_of_the_pool_are_usable(layout: Layout) -> None:
    """The first slot of block 1 and the last slot of the last block."""
    storage = make(layout=layout)
    k, v = tokens(2, 1), tokens(2, 2, V_DIM)
    storage.write(0, k, v, torch.tensor([BLOCK_SIZE, (NUM_BLOCKS + 1) * BLOCK_SIZE - 1]))
    assert torch.equal(storage.layer(0).k[1, :, 0], k[0])
    assert torch.equal(storage.layer(0).v[NUM_BLOCKS, :, -1], v[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("storage_dtype", ["fp32", "bf16", "int8"])
def test_any_float_dtype_is_cast(dtype: torch.dtype, storage_dtype: str) -> None:
    """The cast is torch's."""
    storage = make(storage_dtype)
    k, v = tokens(3, 1).to(dtype), tokens(3, 2, V_DIM).to(dtype)
    storage.write(0, k, v, slots([4], 3))
    assert same(storage.gather(0, [4], 3), [stored(k, storage_dtype), stored(v, storage_dtype)])


def test_strided_input_is_written_like_contiguous_input() -> None:
    """k and v are usually views of one fused projection."""
    storage = make()
    fused = tokens(3, 1, DIM + V_DIM)
    storage.write(0, fused[..., :DIM], fused[..., DIM:], slots([1], 3))
    assert same(storage.gather(0, [1], 3), [fused[..., :DIM], fused[..., DIM:]])


@every_dtype
@every_layout
def test_mla_values_are_the_head_of_the_latent_vector(dtype: str, layout: Layout) -> None:
    """One vector per token is stored; v is a view of k and shares its scale."""
    storage = make(dtype, layout, MLA)
    latent = tokens(6, 1, 12, heads=1)
    storage.write(1, latent, None, slots([3, 2], 6))
    kv, got = storage.layer(1), storage.gather(1, [3, 2], 6)
    assert kv.v.data_ptr() == kv.k.data_ptr() and kv.v.shape[-1] == 8
    if kv.k_scale is not None and kv.v_scale is not None:
        assert kv.v_scale.data_ptr() == kv.k_scale.data_ptr()
    assert same(got, [stored(latent, dtype), stored(latent, dtype)[..., :8]])


@every_dtype
@every_layout
@pytest.mark.parametrize("layers", [MIXED, MLA])
def test_copy_moves_every_layer_with_its_scales(
    dtype: str, layout: Layout, layers: tuple[LayerSpec, ...]
) -> None:
    """A block's whole content arrives, and no other block changes."""
    storage = make(dtype, layout, layers)
    fill(storage)
    before = content(storage)
    storage.copy_blocks([2, 5], [4, 1])
    for old, new in zip(before, storage.buffers, strict=True):
        wanted = old.clone()
        wanted[:, 4], wanted[:, 1] = old[:, 2], old[:, 5]
        assert same([new], [wanted])


@every_dtype
def test_overlapping_copies_read_before_they_write(dtype: str) -> None:
    """A rotation of three blocks, and one source for two destinations."""
    storage = make(dtype)
    fill(storage)
    before = content(storage)
    storage.copy_blocks([1, 2, 3], [2, 3, 1])
    assert same([b[:, [2, 3, 1]] for b in storage.buffers], [b[:, [1, 2, 3]] for b in before])
    storage.copy_blocks([5, 5], [1, 2])
    assert same([b[:, [1, 2]] for b in storage.buffers], [b[:, [5, 5]] for b in before])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda ids: np.array(ids, np.uint8)])
def test_block_ids_come_as_sequence_array_or_tensor(kind: Callable[[list[int]], Sequence[int]]) -> None:
    """All kinds of integers do the same."""
    storage, expected = make(), make()
    fill(storage)
    fill(expected)
    storage.copy_blocks(kind([1, 2]), kind([3, 4]))
    expected.copy_blocks((1, 2), (3, 4))
    assert same(content(storage), content(expected))
    assert same(storage.gather(0, kind([3, 1]), 7), expected.gather(0, (3, 1), 7))


def test_copying_nothing_changes_nothing() -> None:
    """Empty lists are no error."""
    storage = make()
    fill(storage)
    before = content(storage)
    storage.copy_blocks([], [])
    assert same(content(storage), before)


@every_layout
@pytest.mark.parametrize("seq_len", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE])
def test_gather_ignores_the_table_beyond_the_sequence(layout: Layout, seq_len: int) -> None:
    """Entries that are not needed may be any number."""
    storage = make(layout=layout)
    k, v = tokens(seq_len, 1), tokens(seq_len, 2, V_DIM)
    table = [4, 2][: -(-seq_len // BLOCK_SIZE)]
    storage.write(0, k, v, slots([4, 2], seq_len))
    assert same(storage.gather(0, [*table, NULL_BLOCK, -3, 999], seq_len), [k, v])


def test_gather_is_a_copy() -> None:
    """Changing it does not change the storage."""
    storage = make()
    fill(storage)
    before = content(storage)
    storage.gather(0, [1], BLOCK_SIZE).k.zero_()
    assert same(content(storage), before)


K, V, SLOTS = tokens(2, 1), tokens(2, 2, V_DIM), torch.tensor([4, 5])

BAD_WRITES: dict[str, tuple[type[PagedKVError], tuple[Any, ...], str]] = {
    "slot in the null block": (BlockError, (0, K, V, torch.tensor([3, 5])), r"1 slots outside 4\.\.23.* 3"),
    "slot beyond the pool": (BlockError, (0, K, V, torch.tensor([24, 99])), r"2 slots outside 4\.\.23.* 24"),
    "repeated slot": (BlockError, (0, K, V, torch.tensor([7, 7])), "slot 7 is given more than once"),
    "int32 slots": (PagedKVError, (0, K, V, SLOTS.int()), "torch.int32"),
    "2-D slots": (PagedKVError, (0, K, V, SLOTS.view(1, 2)), r"\(1, 2\)"),
    "another n": (
        PagedKVError,
        (0, K, V, torch.tensor([4, 5, 6])),
        r"k must be floats \(3, 2, 8\).*\(2, 2, 8\)",
    ),
    "heads of k": (PagedKVError, (0, K[:, :1], V, SLOTS), r"k must be floats .*\(2, 1, 8\)"),
    "dim of v": (PagedKVError, (0, K, K, SLOTS), r"v must be floats \(2, 2, 6\).*\(2, 2, 8\)"),
    "integer k": (PagedKVError, (0, K.int(), V, SLOTS), "torch.int32"),
    "integer v": (PagedKVError, (0, K, V.to(torch.int8), SLOTS), "torch.int8"),
    "missing v": (PagedKVError, (0, K, None, SLOTS), "v must be None for MLA, and only there"),
    "no such layer": (PagedKVError, (3, K, V, SLOTS), r"no layer 3, the storage has layers 0\.\.2"),
    "negative layer": (PagedKVError, (-1, K, V, SLOTS), "no layer -1"),
    "another device": (PagedKVError, (0, K.to("meta"), V, SLOTS), "k is on meta"),
    "numpy k": (PagedKVError, (0, K.numpy(), V, SLOTS), "k must be a tensor, got ndarray"),
    "numpy v": (PagedKVError, (0, K, V.numpy(), SLOTS), "v must be a tensor, got ndarray"),
    "numpy slots": (PagedKVError, (0, K, V, SLOTS.numpy()), "slot_mapping must be a tensor, got ndarray"),
    "listed slots": (PagedKVError, (0, K, V, [4, 5]), "slot_mapping must be a tensor, got list"),
}


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("case", BAD_WRITES)
def test_a_bad_write_is_refused_and_changes_nothing(dtype: str, case: str) -> None:
    """With the numbers in the message."""
    error, arguments, message = BAD_WRITES[case]
    storage = make(dtype)
    fill(storage)
    before = content(storage)
    with pytest.raises(error, match=message):
        storage.write(*arguments)
    assert same(content(storage), before)


@every_dtype
def test_a_write_keeps_no_graph(dtype: str) -> None:
    """Keys of a model that is being trained: the values are stored, nothing that gradients would need."""
    storage, expected = make(dtype), make(dtype)
    weight = torch.ones(DIM, requires_grad=True)
    k, v = K * weight, V.clone().requires_grad_()
    storage.write(0, k, v, SLOTS)
    storage.copy_blocks([1], [2])
    expected.write(0, k.detach(), v.detach(), SLOTS)
    expected.copy_blocks([1], [2])
    assert same(content(storage), content(expected))
    assert not any(buffer.requires_grad or buffer.grad_fn for buffer in storage.buffers)
    assert k.requires_grad and torch.is_grad_enabled()


def test_int8_refuses_non_finite_values_and_names_layer_and_tensor() -> None:
    """In v: the k of the same call must not have been written."""
    storage = make("int8")
    fill(storage)
    before, v = content(storage), V.clone()
    v[1, 0, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="layer 2, v: 1 of 24 values"):
        storage.write(2, K, v, SLOTS)
    assert same(content(storage), before)


def test_mla_refuses_values() -> None:
    """There is no place for them."""
    storage = make(layers=MLA)
    with pytest.raises(PagedKVError, match="v must be None for MLA"):
        storage.write(0, tokens(2, dim=12, heads=1), tokens(2, dim=8, heads=1), SLOTS)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([1], [NULL_BLOCK], r"dst holds block 0, outside 1\.\.5"),
        ([NULL_BLOCK], [1], "src holds block 0"),
        ([1, 2], [3, 6], "dst holds block 6"),
        ([1, -1], [3, 4], "src holds block -1"),
        ([1, 2], [3, 3], "dst block 3 is given more than once"),
        ([1, 2], [3], "src holds 2 block ids and dst 1"),
        (np.array([1.0]), [3], "src must be integers"),
        (np.array([[1]]), [3], "src must be integers"),
        (np.array([True]), [3], "src must be integers"),
    ],
)
def test_a_bad_copy_is_refused_and_changes_nothing(
    src: Sequence[int], dst: Sequence[int], message: str
) -> None:
    """Foreign ids, repeated destinations, lists that do not pair up."""
    storage = make("int8")
    fill(storage)
    before = content(storage)
    with pytest.raises(BlockError, match=message):
        storage.copy_blocks(src, dst)
    assert same(content(storage), before)


@pytest.mark.parametrize(
    ("block_ids", "seq_len", "message"),
    [
        ([1], 5, "5 tokens need 2 blocks of 4, got 1"),
        ([1], -1, "-1 tokens"),
        ([1, 0], 5, "block_ids holds block 0"),
        ([1, 6], 5, "block_ids holds block 6"),
    ],
)
def test_a_bad_gather_is_refused(block_ids: list[int], seq_len: int, message: str) -> None:
    """Too few blocks, or foreign ones."""
    with pytest.raises(BlockError, match=message):
        make().gather(0, block_ids, seq_len)


@pytest.mark.parametrize(
    ("num_blocks", "layout", "message"),
    [
        (0, "HND", "num_blocks must be at least 1, got 0"),
        (-1, "NHD", "num_blocks must be at least 1, got -1"),
        (4, "DHN", "layout must be HND or NHD, got 'DHN'"),
    ],
)
def test_an_impossible_storage_is_refused(num_blocks: int, layout: Layout, message: str) -> None:
    """No blocks, or an unknown layout."""
    spec = KVCacheSpec(MIXED, "fp32", BLOCK_SIZE)
    with pytest.raises(PagedKVError, match=message):
        KVStorage(spec, num_blocks, layout=layout)


@pytest.mark.parametrize("num_blocks", [8.5, 8.0, True, "8", None, torch.tensor([8, 9])])
def test_a_number_of_blocks_that_is_no_integer_is_refused(num_blocks: Any) -> None:
    """With what was given."""
    with pytest.raises(PagedKVError, match="num_blocks must be an integer, got"):
        KVStorage(KVCacheSpec(MIXED, "fp32", BLOCK_SIZE), num_blocks)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@every_layout
def test_on_an_accelerator_a_write_never_waits_for_the_device(dtype: str, layout: Layout) -> None:
    """The meta device has no content to look at: looking raises."""
    storage = make(dtype, layout, device="meta")
    k, v = tokens(3).to("meta"), tokens(3, dim=V_DIM).to("meta")
    storage.write(0, k, v, torch.zeros(3, dtype=torch.int64, device="meta"))
    storage.copy_blocks([1], [2])
    with pytest.raises(PagedKVError, match="slot_mapping is on cpu, the storage on meta"):
        storage.write(0, k, v, SLOTS)


# -- between two storages


def pair(dtype: str, layouts: tuple[Layout, Layout], minor: tuple[bool, bool]) -> list[KVStorage]:
    """Two storages of one spec and different sizes, full of different content."""
    spec = KVCacheSpec(MIXED, dtype, BLOCK_SIZE)
    sizes = (NUM_BLOCKS, NUM_BLOCKS + 3)
    both = [
        KVStorage(spec, size, layout=layout, token_minor_values=token_minor)
        for size, layout, token_minor in zip(sizes, layouts, minor, strict=True)
    ]
    for seed, storage in enumerate(both):
        fill(storage, 50 * seed)
    return both


@every_dtype
@pytest.mark.parametrize("layouts", [("HND", "HND"), ("NHD", "NHD"), ("HND", "NHD"), ("NHD", "HND")])
@pytest.mark.parametrize("minor", [(False, False), (True, True), (False, True), (True, False)])
@pytest.mark.parametrize("ids", [([2, 3, 4], [6, 7, 8]), ([5, 1, 2], [3, 1, 8]), ([4, 4], [7, 1]), ([], [])])
def test_blocks_move_to_another_storage_with_their_scales(
    dtype: str,
    layouts: tuple[Layout, Layout],
    minor: tuple[bool, bool],
    ids: tuple[list[int], list[int]],
) -> None:
    """All layers; runs and scattered ids; whatever the layouts. Nothing else changes, on either side."""
    ours, theirs = pair(dtype, layouts, minor)
    mine, before = content(ours), content(theirs)
    src, dst = ids
    ours.copy_blocks_to(theirs, src, dst)
    assert same(content(ours), mine)
    for source, old, new in zip(mine, before, theirs.buffers, strict=True):
        wanted = old.clone()
        for s, d in zip(src, dst, strict=True):
            wanted[:, d] = source[:, s]
        assert same([new], [wanted])


def test_a_storage_that_does_not_match_is_refused() -> None:
    """Another dtype, block size or layer, this storage itself, or no storage: nothing is copied."""
    ours = make()
    fill(ours)
    for other in (
        KVStorage(KVCacheSpec(MIXED, "bf16", BLOCK_SIZE), NUM_BLOCKS),
        KVStorage(KVCacheSpec(MIXED, "fp32", BLOCK_SIZE + 1), NUM_BLOCKS),
        KVStorage(KVCacheSpec(MIXED[:2], "fp32", BLOCK_SIZE), NUM_BLOCKS),
    ):
        before = content(other)
        with pytest.raises(PagedKVError, match=r"storages differ: KVCacheSpec.* here, KVCacheSpec.* there"):
            ours.copy_blocks_to(other, [1], [1])
        assert same(content(other), before)
    for wrong, words in ((ours, "this one"), ("host", "str")):
        with pytest.raises(PagedKVError, match=f"another KVStorage, got {words}"):
            ours.copy_blocks_to(wrong, [1], [2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        ([6], [1], "src holds block 6, outside 1..5"),
        ([1], [9], "dst holds block 9, outside 1..8"),
        ([0], [1], "src holds block 0"),
        ([1, 2], [1], "src holds 2 block ids and dst 1"),
        ([1, 2], [7, 7], "dst block 7 is given more than once"),
        ([1.5], [1], "src must be integers"),
    ],
)
def test_ids_that_one_of_two_storages_lacks_are_refused(src: list[int], dst: list[int], words: str) -> None:
    """Each side by its own size; nothing is copied."""
    ours, theirs = pair("int8", ("HND", "HND"), (True, True))
    before = content(theirs)
    with pytest.raises(BlockError, match=words):
        ours.copy_blocks_to(theirs, src, dst)
    assert same(content(theirs), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_dtype
def test_blocks_move_between_cuda_and_the_host(dtype: str) -> None:
    """There and back, scattered and in runs, into other blocks."""
    spec = KVCacheSpec(MIXED, dtype, BLOCK_SIZE)
    device = KVStorage(spec, NUM_BLOCKS, device="cuda")
    host, expected = KVStorage(spec, NUM_BLOCKS), KVStorage(spec, NUM_BLOCKS)
    fill(expected)
    expected.copy_blocks_to(device, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    device.copy_blocks_to(host, [5, 1, 2], [2, 3, 5])
    assert same([b[:, [2, 3, 5]] for b in host.buffers], [b[:, [5, 1, 2]] for b in expected.buffers])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_ids_that_count_up_are_found(kind: Callable[[list[int]], Any]) -> None:
    """Ranges over which both lists rise by one cover all positions, each once."""
    src, dst = (torch.as_tensor(kind(x)) for x in ([4, 5, 6, 9, 10], [1, 2, 7, 8, 9]))
    assert list(runs(src, dst)) == [(0, 2), (2, 3), (3, 5)]
    assert list(runs(src)) == [(0, 3), (3, 5)]
    assert list(runs(src[:0])) == []
