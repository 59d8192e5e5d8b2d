"""The built-in models reproduce the published geometry: cache bytes and parameter counts."""

import csv
import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from pagedkv.errors import SpecError
from pagedkv.sim.timing.models import Model, load_model, model_names, model_source


class Facts(NamedTuple):
    params_total: int
    params_active: int
    bytes_per_token: int
    growth_past_window: int
    resident_gib_at_128k: float


# computed from the public configs, independently of this code; bytes for a bf16 cache
FACTS = {
    "llama-2-7b": Facts(6_738_149_376, 6_607_077_376, 524_288, 524_288, 64.0),
    "llama-2-13b": Facts(13_015_449_600, 12_851_609_600, 819_200, 819_200, 100.0),
    "llama-2-70b": Facts(68_975_329_280, 68_713_185_280, 327_680, 327_680, 40.0),
    "llama-3.1-8b": Facts(8_029_995_008, 7_504_658_432, 131_072, 131_072, 16.0),
    "llama-3.1-70b": Facts(70_552_387_584, 69_501_714_432, 327_680, 327_680, 40.0),
    "llama-3.1-405b": Facts(405_849_243_648, 403_747_897_344, 516_096, 516_096, 63.0),
    "mistral-7b-v0.1": Facts(7_241_465_856, 7_110_393_856, 131_072, 0, 0.5),
    "mistral-7b-v0.3": Facts(7_247_757_312, 7_113_539_584, 131_072, 131_072, 16.0),
    "mixtral-8x7b": Facts(46_702_526_464, 12_748_587_008, 131_072, 131_072, 16.0),
    "qwen2.5-7b": Facts(7_615_283_200, 7_070_285_824, 57_344, 57_344, 7.0),
    "qwen2.5-72b": Facts(72_704_065_536, 71_458_357_248, 327_680, 327_680, 40.0),
    "qwen3-8b": Facts(8_190_427_136, 7_568_097_280, 147_456, 147_456, 18.0),
    "qwen3-32b": Facts(32_761_446_400, 31_983_534_080, 262_144, 262_144, 32.0),
    "qwen3-30b-a3b": Facts(30_531_911_680, 3_041_656_832, 98_304, 98_304, 12.0),
    "qwen3-235b-a22b": Facts(235_092_836_352, 21_567_635_456, 192_512, 192_512, 23.5),
    "gemma-2-9b": Facts(9_241_100_288, 9_241_100_288, 344_064, 172_032, 21.656),
    "gemma-2-27b": Facts(27_226_275_840, 27_226_275_840, 376_832, 188_416, 23.719),
    "gemma-3-12b": Facts(11_765_022_720, 11_765_022_720, 393_216, 65_536, 8.312),
    "gemma-3-27b": Facts(27_007_647_744, 27_007_647_744, 507_904, 81_920, 10.406),
    "phi-3-mini-4k": Facts(3_820_879_872, 3_722_379_264, 393_216, 0, 0.75),
    "phi-3-medium-128k": Facts(13_959_823_360, 13_795_655_680, 204_800, 204_800, 25.0),
    "phi-4": Facts(14_659_092_480, 14_145_290_240, 204_800, 204_800, 25.0),
    "gpt-oss-20b": Facts(20_907_786_240, 3_607_142_400, 49_152, 24_576, 3.003),
    "gpt-oss-120b": Facts(116_788_838_400, 5_131_100_160, 73_728, 36_864, 4.504),
    "deepseek-v2": Facts(235_740_692_480, 20_850_769_920, 69_120, 69_120, 8.438),
    "deepseek-v3": Facts(671_025_397_760, 36_624_596_992, 70_272, 70_272, 8.578),
    "kimi-k2": Facts(1_026_407_202_816, 31_686_066_176, 70_272, 70_272, 8.578),
    "gpt2": Facts(124_318_464, 123_532_032, 36_864, 36_864, 4.5),
    "smollm2-135m": Facts(134_479_872, 134_479_872, 23_040, 23_040, 2.812),
    "tinyllama-1.1b": Facts(1_099_956_224, 1_034_420_224, 22_528, 22_528, 2.75),
    "falcon-7b": Facts(6_921_420_800, 6_921_420_800, 8_192, 8_192, 1.0),
    "mpt-7b": Facts(6_649_020_416, 6_649_020_416, 524_288, 524_288, 64.0),
}

# rows of the external table whose name is not simply the built-in name in capitals
EXTERNAL_NAMES = {
    "DeepSeek-V2 (236B)": "deepseek-v2",
    "DeepSeek-V3/R1": "deepseek-v3",
    "GPT-2 (124M)": "gpt2",
    "Gemma-3-12B (text)": "gemma-3-12b",
    "Gemma-3-27B (text)": "gemma-3-27b",
    "Llama-3/3.1-70B": "llama-3.1-70b",
    "Llama-3/3.1-8B": "llama-3.1-8b",
    "Phi-3-medium": "phi-3-medium-128k",
    "Phi-4 (14B)": "phi-4",
}


def facts_of(model: Model) -> Facts:
    spec = model.spec
    resident = round(spec.resident_bytes(131_072) / 2**30, 3)
    return Facts(
        model.params_total, model.params_active, spec.bytes_per_token, spec.growth_past_window, resident
    )


def test_every_built_in_model_has_its_facts() -> None:
    assert set(model_names()) == set(FACTS)
    assert len(FACTS) == 32


@pytest.mark.parametrize("name", sorted(FACTS))
def test_bytes_and_parameters_are_those_of_the_public_config(name: str) -> None:
    assert facts_of(load_model(name)) == FACTS[name]


def external_rows() -> list[dict[str, str]]:
    folder = os.environ.get("PAGEDKV_DATA")
    if folder is None:
        pytest.skip("PAGEDKV_DATA is not set: no external table to compare with")
    path = Path(folder) / "specs" / "model_configs.csv"
    if not path.exists():
        pytest.skip(f"{path} does not exist: no external table to compare with")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_all_models_agree_with_the_external_table() -> None:
    names = []
    for row in external_rows():
        model = load_model(EXTERNAL_NAMES.get(row["model"], row["model"]))
        names.append(model.name)
        assert facts_of(model) == Facts(
            int(row["params_total_computed"]),
            int(row["params_active_per_token_computed"]),
            int(row["kv_bytes_per_token_bf16"]),
            int(row["kv_growth_past_window_bf16"]),
            float(row["kv_resident_128k_bf16_GiB"]),
        ), row["model"]
        shape = (model.num_layers, model.num_q_heads, model.hidden_size, model.vocab_size)
        assert shape == tuple(int(row[key]) for key in ("layers", "q_heads", "hidden", "vocab")), row["model"]
        assert sum(layer.window is not None for layer in model.spec.layers) == int(
            row["n_sliding_layers"] or 0
        )
    assert sorted(names) == sorted(FACTS)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_no_model_uses_more_parameters_than_it_has(name: str) -> None:
    model = load_model(name)
    assert 0 < model.params_lm_head < model.params_active <= model.params_total
    assert model.params_lm_head == model.vocab_size * model.hidden_size


def test_a_model_carries_the_dtype_and_block_size_that_were_asked_for() -> None:
    spec = load_model("llama-3.1-8b", kv_dtype="int8", block_size=64).spec
    assert (spec.dtype, spec.block_size, spec.bytes_per_token_layer(0)) == ("int8", 64, 2_112)


def test_a_query_head_of_mla_is_counted_before_it_is_absorbed() -> None:
    assert load_model("deepseek-v3").q_head_dim == 192
    assert load_model("gemma-3-12b").q_head_dim == 256


@pytest.mark.parametrize("name", sorted(FACTS))
def test_a_model_is_found_by_name_and_by_repository_in_any_case(name: str) -> None:
    assert load_model(name.upper()) == load_model(model_source(name)) == load_model(name)


CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
}


def write(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}), encoding="utf-8")
    return folder


def test_a_config_from_a_path_is_counted_like_a_built_in_one(tmp_path: Path) -> None:
    model = load_model(write(tmp_path), block_size=32)
    attention, expert = 64 * 64 * 2 + 2 * 64 * 16, 3 * 64 * 96
    assert model.name == str(tmp_path)
    assert model.params_total == 2 * 6_400 + 2 * (attention + 64 * 4 + 4 * expert)
    assert model.params_active == 6_400 + 2 * (attention + 64 * 4 + 2 * expert)
    assert load_model(str(tmp_path / "config.json"), block_size=32).spec == model.spec


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    untied = load_model(write(tmp_path))
    tied = load_model(write(tmp_path, tie_word_embeddings=True))
    assert untied.params_total - tied.params_total == tied.params_lm_head
    assert untied.params_active == tied.params_active


def test_a_query_without_a_low_rank_is_one_matrix(tmp_path: Path) -> None:
    mla = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    moe = {"n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 0}
    fields = {**mla, **moe, "model_type": "deepseek_v2", "num_hidden_layers": 1}
    with_rank = load_model(write(tmp_path, **fields, q_lora_rank=48)).params_total
    without_rank = load_model(write(tmp_path, **fields, q_lora_rank=None)).params_total
    assert with_rank - without_rank == 48 * (64 + 8 * 24) - 64 * 8 * 24


def test_listed_layers_of_qwen3_moe_are_dense(tmp_path: Path) -> None:
    fields = {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24}
    sparse = load_model(write(tmp_path, **fields)).params_total
    one_dense = load_model(write(tmp_path, **fields, mlp_only_layers=[1])).params_total
    assert one_dense - sparse == 3 * 64 * 96 - (64 * 4 + 4 * 3 * 64 * 24)
    assert load_model(write(tmp_path, **fields, decoder_sparse_step=2)).params_total == one_dense


def test_an_unknown_name_is_refused_with_close_names() -> None:
    with pytest.raises(SpecError, match=r"no model 'llama-3.1-9b'.*close names: llama-3.1-8b"):
        load_model("llama-3.1-9b")
    with pytest.raises(SpecError, match=r"no model 'Qwen/Qwen3-8B-Base'.*close names: qwen3-8b"):
        load_model("Qwen/Qwen3-8B-Base")
    with pytest.raises(SpecError, match=r"no model 'zzz'.*built in: deepseek-v2"):
        load_model("zzz")
    with pytest.raises(SpecError, match="no model 'gpt-3'"):
        model_source("gpt-3")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": None}, "vocab_size is None; supported: an integer"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; supported: at most the 4 experts"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; supported: true or false"),
        (
            {"model_type": "qwen3_moe", "head_dim": 8, "mlp_only_layers": 3},
            "mlp_only_layers is 3; supported: a list of layer indices",
        ),
    ],
)
def test_a_config_whose_parameters_cannot_be_counted_is_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        load_model(write(tmp_path, **fields))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model_type": "mamba"}', json.dumps(CONFIG | {"vocab_size": 0})]
)
def test_a_config_that_is_refused_is_named_once(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as refusal:
        load_model(path)
    assert str(refusal.value).count("bad.json") == 1
    with pytest.raises(SpecError) as refusal:
        load_model(tmp_path)
    assert str(refusal.value).count(str(tmp_path)) == 1
