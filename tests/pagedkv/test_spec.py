"""Bytes of a cache: worked examples, and what every geometry must satisfy."""

import pickle
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.errors import PagedKVError, SpecError
from pagedkv.spec import ELEMENT_BYTES, KVCacheSpec, LayerSpec

LLAMA_8B = KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128)

dtypes = st.sampled_from(sorted(ELEMENT_BYTES))
windows = st.none() | st.integers(1, 300)
plain_layers = st.builds(LayerSpec, st.integers(1, 16), st.integers(1, 256), st.integers(1, 256), windows)
latent_layers = st.builds(LayerSpec.mla, st.integers(1, 600), st.integers(0, 64))
layers = st.lists(plain_layers | latent_layers, min_size=1, max_size=6).map(tuple)
specs = st.builds(KVCacheSpec, layers, dtypes, st.sampled_from([1, 16, 48, 64]))


def test_llama_3_8b_in_bf16_takes_the_known_bytes() -> None:
    assert LLAMA_8B.bytes_per_token_layer(0) == 4_096
    assert LLAMA_8B.bytes_per_token == 131_072
    assert LLAMA_8B.bytes_per_block == 2 * 2**20
    assert LLAMA_8B.resident_bytes(500) == 65_536_000
    assert LLAMA_8B.resident_bytes(4_096) == 512 * 2**20


def test_int8_counts_one_fp32_scale_per_token_and_head_for_k_and_for_v() -> None:
    int8 = replace(LLAMA_8B, dtype="int8")
    assert int8.bytes_per_token_layer(0) == 2 * 8 * 128 + 2 * 8 * 4 == 2_112
    assert int8.bytes_per_token == 32 * 2_112


def test_fp8_is_half_of_bf16_and_fp32_is_twice() -> None:
    assert replace(LLAMA_8B, dtype="fp8-e4m3").bytes_per_token == 65_536
    assert replace(LLAMA_8B, dtype="fp32").bytes_per_token == 262_144
    assert replace(LLAMA_8B, dtype="fp16").bytes_per_token == LLAMA_8B.bytes_per_token


def test_a_latent_layer_stores_one_vector_and_no_values() -> None:
    layer = LayerSpec.mla(rank=512, rope_dim=64)
    assert (layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.is_latent) == (1, 576, 512, True)
    assert layer.bytes_per_token("bf16") == 1_152
    assert layer.bytes_per_token("int8") == 576 + 4


def test_unequal_key_and_value_dims_are_both_counted() -> None:
    spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=2, head_dim=192, v_head_dim=128)
    assert spec.bytes_per_token == 2 * (192 + 128) * 2


def test_a_window_bounds_what_stays_and_what_is_read() -> None:
    slide, full = LayerSpec(4, 64, window=128), LayerSpec(4, 64)
    spec = KVCacheSpec((slide, full))
    assert spec.resident_tokens(0, 100) == 100
    assert spec.resident_tokens(0, 1_000) == 128
    assert spec.resident_tokens(1, 1_000) == 1_000
    assert spec.bytes_read(1_000) == 1_024 * (128 + 1_000)
    assert spec.growth_past_window == 1_024


def test_groups_hold_equal_layers_in_order_of_first_appearance() -> None:
    slide, full, latent = LayerSpec(4, 64, window=8), LayerSpec(4, 64), LayerSpec.mla(32, 16)
    groups = KVCacheSpec((slide, full, latent, slide)).groups
    assert groups == {slide: (0, 3), full: (1,), latent: (2,)}
    assert list(groups) == [slide, full, latent]


def test_equal_geometry_compares_and_hashes_equal_however_it_was_written() -> None:
    assert hash(LayerSpec(8, 128)) == hash(LayerSpec(8, 128, v_head_dim=128))
    assert LayerSpec.mla(512, 64) == LayerSpec(1, 576, v_head_dim=512, latent_rank=512)


def test_numpy_integers_cannot_overflow_a_byte_count() -> None:
    head_dim: Any = np.int32(128)
    spec = KVCacheSpec.uniform(num_layers=80, num_kv_heads=8, head_dim=head_dim)
    assert spec.resident_bytes(np.int32(2_000_000)) == 80 * 4_096 * 2_000_000
    assert type(spec.layers[0].head_dim) is int


def test_a_spec_survives_pickling_after_its_sums_were_cached() -> None:
    assert LLAMA_8B.bytes_read(7) > 0
    assert pickle.loads(pickle.dumps(LLAMA_8B)) == LLAMA_8B


def test_the_null_block_costs_memory_but_is_not_usable() -> None:
    assert LLAMA_8B.num_blocks_for(2**30) == 511
    assert LLAMA_8B.max_tokens_for(2**30) == 511 * 16


@given(specs, st.integers(1, 10_000), st.data())
def test_num_blocks_for_inverts_the_bytes_of_blocks(
    spec: KVCacheSpec, blocks: int, data: st.DataObject
) -> None:
    spare = data.draw(st.integers(0, spec.bytes_per_block - 1))
    memory = (blocks + 1) * spec.bytes_per_block + spare
    assert spec.num_blocks_for(memory) == blocks
    assert spec.max_tokens_for(memory) == blocks * spec.block_size


@given(specs, st.integers(0, 2_000))
def test_resident_bytes_are_the_sum_over_layers(spec: KVCacheSpec, context: int) -> None:
    by_layer = (
        spec.bytes_per_token_layer(index) * spec.resident_tokens(index, context)
        for index in range(spec.num_layers)
    )
    assert spec.resident_bytes(context) == spec.bytes_read(context) == sum(by_layer)


@given(specs, st.integers(300, 5_000))
def test_growth_past_every_window_is_constant(spec: KVCacheSpec, context: int) -> None:
    assert spec.resident_bytes(context + 1) - spec.resident_bytes(context) == spec.growth_past_window


@given(specs)
def test_the_first_token_costs_the_same_with_and_without_windows(spec: KVCacheSpec) -> None:
    assert spec.resident_bytes(0) == 0
    assert spec.resident_bytes(1) == spec.bytes_per_token


@given(specs)
def test_groups_cover_every_layer_once(spec: KVCacheSpec) -> None:
    indices = sorted(index for group in spec.groups.values() for index in group)
    assert indices == list(range(spec.num_layers))
    assert all(spec.layers[index] == layer for layer, group in spec.groups.items() for index in group)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_kv_heads": 0, "head_dim": 128}, "num_kv_heads must be at least 1, got 0"),
        ({"num_kv_heads": 8, "head_dim": -128}, "head_dim must be at least 1, got -128"),
        ({"num_kv_heads": 8, "head_dim": 64.0}, "head_dim must be an integer, got 64.0"),
        ({"num_kv_heads": True, "head_dim": 64}, "num_kv_heads must be an integer, got True"),
        ({"num_kv_heads": 8, "head_dim": None}, "head_dim must be an integer, got None"),
        ({"num_kv_heads": 8, "head_dim": 64, "window": 0}, "window must be at least 1, got 0"),
        ({"num_kv_heads": 8, "head_dim": 64, "v_head_dim": 0}, "v_head_dim must be at least 1, got 0"),
        ({"num_kv_heads": 2, "head_dim": 64, "latent_rank": 32}, "one kv head, got num_kv_heads=2"),
        ({"num_kv_heads": 1, "head_dim": 64, "latent_rank": 65}, "latent_rank 65 is larger than head_dim 64"),
        (
            {"num_kv_heads": 1, "head_dim": 64, "latent_rank": 48, "v_head_dim": 64},
            "48 dims, got v_head_dim=64",
        ),
    ],
)
def test_an_impossible_layer_is_refused_with_its_numbers(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        LayerSpec(**arguments)


def test_an_impossible_cache_is_refused_with_its_numbers() -> None:
    layer, no_layer = LayerSpec(8, 128), cast(LayerSpec, 8)
    with pytest.raises(SpecError, match="at least 1 layer"):
        KVCacheSpec(())
    with pytest.raises(SpecError, match="layers must be a tuple of LayerSpec, got 8"):
        KVCacheSpec(cast(tuple[LayerSpec, ...], 8))
    with pytest.raises(SpecError, match=r"layers\[1\] must be a LayerSpec, got 8"):
        KVCacheSpec((layer, no_layer))
    with pytest.raises(SpecError, match="dtype is 'int4'; supported: fp32, bf16, fp16, int8, fp8-e4m3"):
        KVCacheSpec((layer,), dtype="int4")
    with pytest.raises(SpecError, match="dtype is 'int4'"):
        layer.bytes_per_token("int4")
    with pytest.raises(SpecError, match=r"dtype is \['bf16'\]; supported"):
        KVCacheSpec((layer,), dtype=cast(str, ["bf16"]))
    with pytest.raises(SpecError, match=r"dtype is \['bf16'\]; supported"):
        layer.bytes_per_token(cast(str, ["bf16"]))
    with pytest.raises(SpecError, match="block_size must be at least 1, got 0"):
        KVCacheSpec((layer,), block_size=0)
    with pytest.raises(SpecError, match="num_layers must be at least 1, got 0"):
        KVCacheSpec.uniform(num_layers=0, num_kv_heads=8, head_dim=128)


def test_impossible_questions_are_refused_with_their_numbers() -> None:
    with pytest.raises(SpecError, match=r"4194303 bytes hold no usable block.*need 4194304 bytes"):
        LLAMA_8B.num_blocks_for(4_194_303)
    with pytest.raises(SpecError, match="memory_bytes must be an integer"):
        LLAMA_8B.max_tokens_for(cast(int, 80e9))
    with pytest.raises(SpecError, match="context must be at least 0, got -1"):
        LLAMA_8B.bytes_read(-1)
    with pytest.raises(SpecError, match="layer_index is 32, but there are 32 layers"):
        LLAMA_8B.bytes_per_token_layer(32)
    with pytest.raises(SpecError, match="layer_index must be at least 0, got -1"):
        LLAMA_8B.resident_tokens(-1, 10)


def test_spec_errors_are_value_errors_of_this_package() -> None:
    assert issubclass(SpecError, PagedKVError) and issubclass(SpecError, ValueError)
