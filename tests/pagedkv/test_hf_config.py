"""A config.json gives the exact cache, or a SpecError that names the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import SpecError
from pagedkv.hf_config import SUPPORTED_MODEL_TYPES, load_config, read_layers
from pagedkv.spec import KVCacheSpec, LayerSpec

Config = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


def base(model_type: str, **fields: object) -> Config:
    """Four layers of eight heads with two kv heads and 64 dims."""
    config: Config = {
        "model_type": model_type,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
    }
    return {**config, **fields}


def without(config: Config, name: str) -> Config:
    return {key: value for key, value in config.items() if key != name}


def layers_of(config: Config) -> tuple[LayerSpec, ...]:
    return read_layers(load_config(config))


def windows_of(config: Config) -> list[int | None]:
    return [layer.window for layer in layers_of(config)]


GQA = LayerSpec(2, 64)
LLAMA = base("llama")
MISTRAL = base("mistral", sliding_window=128)
QWEN3 = base("qwen3", head_dim=64)
GEMMA2 = base("gemma2", head_dim=64, sliding_window=128)
GPT_OSS = base("gpt_oss", head_dim=64, sliding_window=128, layer_types=[SLIDING, FULL, SLIDING, FULL])
GPT2 = {"model_type": "gpt2", "n_embd": 512, "n_head": 8, "n_layer": 4}
FALCON = base("falcon", multi_query=True)
MPT = {"model_type": "mpt", "d_model": 512, "n_heads": 8, "n_layers": 4}
MLA = base("deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        base("mistral", sliding_window=None),
        base("mixtral"),
        base("phi3"),
        base("qwen2"),
        QWEN3,
        base("qwen3_moe", head_dim=64),
        base("gemma2", head_dim=64, sliding_window=None),
        base("llama", layer_types=[FULL] * 4),
        base("qwen3", head_dim=64, layer_types=[FULL] * 4, sliding_window=None),
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_grouped_query_families_store_their_kv_heads_in_every_layer(config: Config) -> None:
    assert layers_of(config) == (GQA,) * 4


def test_an_explicit_head_dim_wins_over_hidden_size_by_heads() -> None:
    assert layers_of(base("mistral", sliding_window=None, head_dim=128))[0] == LayerSpec(2, 128)


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_families_derived_from_multi_head_attention_may_leave_out_kv_heads(model_type: str) -> None:
    assert layers_of(without(base(model_type), "num_key_value_heads"))[0] == LayerSpec(8, 64)
    assert layers_of(base(model_type, num_key_value_heads=None))[0] == LayerSpec(8, 64)


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "phi3"])
def test_one_window_holds_for_every_layer(model_type: str) -> None:
    assert windows_of(base(model_type, sliding_window=128)) == [128] * 4
    assert windows_of(base(model_type, sliding_window=128, layer_types=[SLIDING] * 4)) == [128] * 4


def test_a_window_that_no_accepted_context_can_leave_is_no_window() -> None:
    assert windows_of(base("phi3", sliding_window=4096, max_position_embeddings=4096)) == [None] * 4
    assert windows_of(base("phi3", sliding_window=4095, max_position_embeddings=4096)) == [4095] * 4


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows_count_only_when_in_use_and_from_max_window_layers_on(model_type: str) -> None:
    config = base(model_type, head_dim=64, sliding_window=128, max_window_layers=3)
    assert windows_of(config) == [None] * 4
    assert windows_of({**config, "use_sliding_window": False}) == [None] * 4
    assert windows_of({**config, "use_sliding_window": True}) == [None, None, None, 128]


def test_layer_types_win_over_the_rule_of_the_family() -> None:
    types = [FULL, FULL, SLIDING, FULL]
    assert windows_of({**GEMMA2, "layer_types": types}) == [None, None, 128, None]
    assert windows_of(base("gemma3_text", sliding_window=128, layer_types=types)) == [None, None, 128, None]


def test_even_layers_of_gemma_2_slide() -> None:
    assert windows_of({**GEMMA2, "cache_implementation": "hybrid"}) == [128, None, 128, None]


def test_gpt_oss_follows_its_layer_types() -> None:
    assert windows_of(GPT_OSS) == [128, None, 128, None]
    assert windows_of({**GPT_OSS, "layer_types": [FULL, SLIDING, SLIDING, FULL]}) == [None, 128, 128, None]


@pytest.mark.parametrize("name", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_every_nth_layer_of_gemma_3_is_full(name: str) -> None:
    assert windows_of(base("gemma3_text", sliding_window=128, **{name: 2})) == [128, None, 128, None]


def test_gemma_3_is_read_from_its_text_config_with_its_published_defaults() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 6, "sliding_window": 1024}
    spec = KVCacheSpec.from_hf_config(
        {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    )
    assert spec.dtype == "bf16"
    assert spec.layers == (LayerSpec(4, 256, window=1024),) * 5 + (LayerSpec(4, 256),)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_latent_families_store_one_vector_of_rank_plus_rope_dims(model_type: str) -> None:
    assert layers_of({**MLA, "model_type": model_type}) == (LayerSpec.mla(512, 64),) * 4


def test_gpt_2_stores_every_head_under_its_own_field_names() -> None:
    assert layers_of(GPT2) == (LayerSpec(8, 64),) * 4


@pytest.mark.parametrize(
    ("fields", "num_kv_heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": True, "num_kv_heads": 8}, 1),
        ({"multi_query": False}, 8),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4}, 4),
    ],
)
def test_falcon_kv_heads_depend_on_its_architecture(fields: Config, num_kv_heads: int) -> None:
    assert layers_of(base("falcon", **fields))[0] == LayerSpec(num_kv_heads, 64)


def test_falcon_may_use_its_older_field_names() -> None:
    config = {"model_type": "falcon", "hidden_size": 512, "n_head": 8, "n_layer": 2, "multi_query": True}
    assert layers_of(config) == (LayerSpec(1, 64),) * 2


@pytest.mark.parametrize(
    ("attention", "num_kv_heads"),
    [
        ({"attn_type": "multihead_attention"}, 8),
        ({"attn_type": "multiquery_attention", "sliding_window_size": -1}, 1),
        ({"attn_type": "grouped_query_attention", "kv_n_heads": 2}, 2),
    ],
)
def test_mpt_kv_heads_depend_on_its_attn_config(attention: Config, num_kv_heads: int) -> None:
    assert layers_of({**MPT, "attn_config": attention}) == (LayerSpec(num_kv_heads, 64),) * 4


@pytest.mark.parametrize(
    ("text", "dtype"), [("float32", "fp32"), ("torch.bfloat16", "bf16"), ("float16", "fp16")]
)
@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_the_dtype_is_the_configs_unless_it_is_passed(text: str, dtype: str, field: str) -> None:
    assert KVCacheSpec.from_hf_config({**LLAMA, field: text}).dtype == dtype
    assert KVCacheSpec.from_hf_config({**LLAMA, field: text}, dtype="int8").dtype == "int8"


def test_a_file_its_folder_and_a_dict_give_the_same_spec(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8")
    expected = KVCacheSpec((GQA,) * 4, "bf16", 64)
    for source in (file, str(file), tmp_path, LLAMA):
        assert KVCacheSpec.from_hf_config(source, dtype="bf16", block_size=64) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"model_type is None; supported: deepseek_v2, .*qwen3_moe"),
        (base("mamba"), r"model_type is 'mamba'; supported: "),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        (without(LLAMA, "num_hidden_layers"), "llama config: num_hidden_layers is missing"),
        (without(GPT2, "n_layer"), r"num_hidden_layers \(n_layer\) is missing"),
        (base("llama", num_hidden_layers=0), "num_hidden_layers is 0; supported: an integer of at least 1"),
        (base("llama", num_hidden_layers=10**9), "num_hidden_layers is 1000000000; supported: at most"),
        (base("llama", num_attention_heads=-8), "num_attention_heads is -8"),
        (base("llama", num_key_value_heads=2.0), r"num_key_value_heads is 2\.0"),
        (base("llama", num_key_value_heads="2"), "num_key_value_heads is '2'"),
        (base("llama", num_key_value_heads=True), "num_key_value_heads is True"),
        (base("llama", num_key_value_heads=3), "num_key_value_heads is 3; supported: a divisor of .* 8"),
        (
            base("llama", hidden_size=500),
            "hidden_size is 500; supported: a multiple of num_attention_heads 8",
        ),
        (base("llama", head_dim=0), "head_dim is 0"),
        (without(MISTRAL, "num_key_value_heads"), "num_key_value_heads is missing"),
        (without(MISTRAL, "sliding_window"), "sliding_window is missing; supported: .* or null"),
        (base("mistral", sliding_window=0), "sliding_window is 0"),
        (without(QWEN3, "head_dim"), "head_dim is missing"),
        (base("deepseek_v3", kv_lora_rank=512), "qk_rope_head_dim is missing"),
        (without(FALCON, "multi_query"), "multi_query is missing; supported: true or false"),
        (base("falcon", multi_query="yes"), "multi_query is 'yes'; supported: true or false"),
        (base("falcon", multi_query=True, new_decoder_architecture=True), "num_kv_heads is missing"),
        (MPT, "attn_config is missing; supported: an object"),
        (
            {**MPT, "attn_config": {"attn_type": "linear"}},
            "attn_type is 'linear'; supported: multihead_attention",
        ),
        (
            {**MPT, "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 3}},
            "kv_n_heads is 3; supported: a divisor of num_attention_heads 8",
        ),
        (
            {**MPT, "attn_config": {"attn_type": "multihead_attention", "sliding_window_size": 64}},
            "sliding_window_size is 64; supported: -1",
        ),
        ({"model_type": "gemma3"}, "text_config is None"),
    ],
)
def test_a_missing_or_impossible_field_is_named_with_its_value(config: Config, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        KVCacheSpec.from_hf_config(config, dtype="bf16")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (base("llama", sliding_window=4096), "sliding_window"),
        (base("llama", attention_chunk_size=8192), "attention_chunk_size"),
        (base("llama", cache_implementation="static"), "cache_implementation"),
        (base("llama", kv_lora_rank=512), "kv_lora_rank"),
        (base("llama", layer_types=[FULL, SLIDING, FULL, FULL]), "layer_types"),
        ({**GEMMA2, "cache_implementation": "quantized"}, "cache_implementation"),
        (base("gemma3_text", sliding_window=128, num_kv_shared_layers=2), "num_kv_shared_layers"),
        (base("llama", use_cla=True), "use_cla"),
        (base("llama", cla_share_factor=2), "cla_share_factor"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
        (base("llama", cross_attention_layers=[1]), "cross_attention_layers"),
        (base("llama", is_encoder_decoder=True), "is_encoder_decoder"),
        (base("mistral", sliding_window=128, use_sliding_window=True), "use_sliding_window"),
        (base("mistral", sliding_window=128, use_sliding_window=False), "use_sliding_window"),
        (base("qwen3_moe", head_dim=64, use_sliding_window=True), "use_sliding_window"),
        (base("mistral", sliding_window=128, layer_types=[FULL] * 4), "layer_types"),
        (base("qwen2", sliding_window=128, layer_types=[SLIDING] * 4), "layer_types"),
        ({**MLA, "index_topk": 2048}, "index_topk"),
        (
            {**MPT, "attn_config": {"attn_type": "multihead_attention"}, "block_overrides": {"a": 1}},
            "block_overrides",
        ),
    ],
)
def test_a_field_that_changes_the_cache_and_is_not_handled_is_refused(config: Config, field: str) -> None:
    with pytest.raises(SpecError, match=f"config: {field} is .*; supported: "):
        KVCacheSpec.from_hf_config(config, dtype="bf16")


@pytest.mark.parametrize(
    "types", [[FULL] * 3, "full_attention", ["linear_attention"] * 4, [FULL, FULL, FULL, None]]
)
def test_layer_types_that_are_not_full_or_sliding_are_refused(types: object) -> None:
    with pytest.raises(SpecError, match=r"layer_types is .*; supported: "):
        KVCacheSpec.from_hf_config({**GPT_OSS, "layer_types": types}, dtype="bf16")


def test_a_config_that_does_not_say_the_dtype_asks_for_it() -> None:
    with pytest.raises(SpecError, match=r"dtype is missing; supported: float32.*pass the dtype"):
        KVCacheSpec.from_hf_config(LLAMA)
    with pytest.raises(SpecError, match="torch_dtype is 'float8'"):
        KVCacheSpec.from_hf_config({**LLAMA, "torch_dtype": "float8"})
    scheme = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    with pytest.raises(SpecError, match=r"quantization_config.*no kv_cache_scheme"):
        KVCacheSpec.from_hf_config({**LLAMA, "torch_dtype": "bfloat16", **scheme})


def test_an_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(SpecError, match="dtype is 'bfloat16'; supported: fp32, bf16"):
        KVCacheSpec.from_hf_config(LLAMA, dtype="bfloat16")


def test_a_path_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    for missing in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(SpecError, match=r"cannot read .*expected a config.json or its folder") as caught:
            KVCacheSpec.from_hf_config(missing)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00", b"[" * 100_000])
def test_what_is_not_json_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(SpecError, match="is not valid JSON") as caught:
        KVCacheSpec.from_hf_config(file)
    assert "\n" not in str(caught.value)


def test_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(SpecError, match="holds a JSON list; expected an object"):
        KVCacheSpec.from_hf_config(file)


def test_every_supported_type_is_listed_once_and_sorted() -> None:
    assert list(SUPPORTED_MODEL_TYPES) == sorted(set(SUPPORTED_MODEL_TYPES))
    assert {"llama", "gemma3", "kimi_k2", "gpt_oss"} <= set(SUPPORTED_MODEL_TYPES)
