"""The cache of a Hugging Face model, read from its ``config.json``; an exact answer or a refusal.

Every family has one small reader, found by ``model_type``. A family reads some of the fields that change
what is cached; any other such field must be absent or neutral, so that a variant nobody described is
refused, not guessed. A missing field is filled in only where the family's transformers config class derives
it (``num_key_value_heads`` of Llama) or where its published files leave it out (Gemma-3). A window at least
as long as ``max_position_embeddings`` is no window: no context the model accepts can leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from pagedkv.errors import SpecError
from pagedkv.hf_fields import HFConfig, read_json
from pagedkv.layer_spec import LayerSpec

Layers = tuple[LayerSpec, ...]

_CACHE_FIELDS: Final = (
    "add_cross_attention",
    "attention_chunk_size",
    "block_overrides",
    "cache_implementation",
    "cla_share_factor",
    "cross_attention_layers",
    "index_topk",
    "is_encoder_decoder",
    "kv_lora_rank",
    "num_kv_shared_layers",
    "sliding_window",
    "sliding_window_pattern",
    "use_cla",
    "use_sliding_window",
)
_DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"


class _Family(NamedTuple):
    read: Callable[[HFConfig], Layers]
    reads: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = MappingProxyType({})
    defaults: Mapping[str, int] = MappingProxyType({})


def _text_part(values: Mapping[str, object]) -> Mapping[str, object]:
    if values.get("model_type") != "gemma3":
        return values
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        raise SpecError(
            f"gemma3 config: text_config is {text!r}; supported: an object of model_type 'gemma3_text'"
        )
    outer = {name: values[name] for name in ("torch_dtype", "dtype", "quantization_config") if name in values}
    return {**outer, **text}


def _head_dim(config: HFConfig) -> int:
    if config.get("head_dim") is not None:
        return config.integer("head_dim")
    hidden = config.integer("hidden_size")
    if hidden % config.num_q_heads:
        raise config.error(
            "hidden_size", f"a multiple of num_attention_heads {config.num_q_heads}, or an explicit head_dim"
        )
    return hidden // config.num_q_heads


def _divisor(config: HFConfig, name: str, num_kv_heads: int) -> int:
    if config.num_q_heads % num_kv_heads:
        raise config.error(name, f"a divisor of num_attention_heads {config.num_q_heads}")
    return num_kv_heads


def _kv_heads(config: HFConfig, default: int | None = None) -> int:
    name = "num_key_value_heads"
    return _divisor(config, name, config.integer(name, default))


def _window(config: HFConfig) -> int | None:
    if config.get("use_sliding_window") is False and config.get("sliding_window") is not None:
        raise config.error("use_sliding_window", "absent in this family, whose sliding_window alone decides")
    return None if config.get("sliding_window") is None else config.integer("sliding_window")


def _stated_window(config: HFConfig) -> int | None:
    # the config classes of these families default to a number, so silence does not mean full attention
    if not config.has("sliding_window"):
        raise config.error("sliding_window", "an integer of at least 1, or null")
    return _window(config)


def _sliding(config: HFConfig, full: LayerSpec, window: int | None) -> LayerSpec:
    if window is None:
        return full
    longest = config.integer("max_position_embeddings", default=window + 1)
    return replace(full, window=window) if window < longest else full


def _layer_types(config: HFConfig) -> tuple[str, ...] | None:
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, (list, tuple)) or len(types) != config.num_layers:
        raise config.error("layer_types", f"a list of num_hidden_layers = {config.num_layers} entries")
    if any(kind not in (_FULL, _SLIDING) for kind in types):
        raise config.error("layer_types", f"{_FULL} and {_SLIDING}")
    return tuple(types)


def _uniform(config: HFConfig, full: LayerSpec, window: int | None = None) -> Layers:
    types = _layer_types(config)
    expected = _FULL if window is None else _SLIDING
    if types is not None and set(types) != {expected}:
        raise config.error("layer_types", f"{expected} in every layer, as sliding_window says")
    return (_sliding(config, full, window),) * config.num_layers


def _mixed(config: HFConfig, full: LayerSpec, window: int | None, slides: Callable[[int], bool]) -> Layers:
    types = _layer_types(config)
    if types is None:
        types = tuple(_SLIDING if window and slides(index) else _FULL for index in range(config.num_layers))
    if _SLIDING in types and window is None:
        raise config.error("layer_types", f"{_FULL} only, as sliding_window is null or not in use")
    sliding = _sliding(config, full, window)
    return tuple(sliding if kind == _SLIDING else full for kind in types)


def _read_llama(config: HFConfig) -> Layers:
    return _uniform(config, LayerSpec(_kv_heads(config, default=config.num_q_heads), _head_dim(config)))


def _read_mistral(config: HFConfig) -> Layers:
    return _uniform(config, LayerSpec(_kv_heads(config), _head_dim(config)), _stated_window(config))


def _read_mixtral(config: HFConfig) -> Layers:
    return _uniform(config, LayerSpec(_kv_heads(config), _head_dim(config)), _window(config))


def _read_phi3(config: HFConfig) -> Layers:
    num_kv_heads = _kv_heads(config, default=config.num_q_heads)
    return _uniform(config, LayerSpec(num_kv_heads, _head_dim(config)), _window(config))


def _qwen_layers(config: HFConfig, head_dim: int) -> Layers:
    full = LayerSpec(_kv_heads(config), head_dim)
    if not config.flag("use_sliding_window", default=False):
        return _mixed(config, full, None, lambda index: False)
    first = config.integer("max_window_layers", minimum=0)
    return _mixed(config, full, config.integer("sliding_window"), lambda index: index >= first)


def _read_qwen2(config: HFConfig) -> Layers:
    return _qwen_layers(config, _head_dim(config))


def _read_qwen3(config: HFConfig) -> Layers:
    return _qwen_layers(config, config.integer("head_dim"))


def _read_qwen3_moe(config: HFConfig) -> Layers:
    # engines disagree on which layers slide here, and no published model uses it
    if config.flag("use_sliding_window", default=False):
        raise config.error("use_sliding_window", "false")
    return _uniform(config, LayerSpec(_kv_heads(config), config.integer("head_dim")))


def _read_even_layers_slide(config: HFConfig) -> Layers:
    full = LayerSpec(_kv_heads(config), config.integer("head_dim"))
    return _mixed(config, full, _stated_window(config), lambda index: index % 2 == 0)


def _read_gemma3(config: HFConfig) -> Layers:
    full = LayerSpec(_kv_heads(config), config.integer("head_dim"))
    pattern = config.integer("sliding_window_pattern")
    return _mixed(config, full, _stated_window(config), lambda index: (index + 1) % pattern != 0)


def _read_mla(config: HFConfig) -> Layers:
    layer = LayerSpec.mla(config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim"))
    return _uniform(config, layer)


def _read_gpt2(config: HFConfig) -> Layers:
    return _uniform(config, LayerSpec(config.num_q_heads, _head_dim(config)))


def _read_falcon(config: HFConfig) -> Layers:
    name = "num_kv_heads"
    if config.flag("new_decoder_architecture", default=False):
        num_kv_heads = config.integer(name)
    elif config.get("multi_query") is None:
        raise config.error("multi_query", "true or false")
    else:
        shared = config.flag("multi_query", default=False)
        num_kv_heads = 1 if shared else config.integer(name, default=config.num_q_heads)
    return _uniform(config, LayerSpec(_divisor(config, name, num_kv_heads), _head_dim(config)))


def _mpt_kv_heads(config: HFConfig, attn: HFConfig) -> int:
    kind = attn.get("attn_type")
    if kind == "multihead_attention":
        return config.num_q_heads
    if kind == "multiquery_attention":
        return 1
    if kind != "grouped_query_attention":
        raise attn.error("attn_type", "multihead_attention, multiquery_attention, grouped_query_attention")
    if config.num_q_heads % attn.integer("kv_n_heads"):
        raise attn.error("kv_n_heads", f"a divisor of num_attention_heads {config.num_q_heads}")
    return attn.integer("kv_n_heads")


def _read_mpt(config: HFConfig) -> Layers:
    values = config.get("attn_config")
    if not isinstance(values, Mapping):
        raise config.error("attn_config", "an object")
    attn = HFConfig(config.model_type, values)
    if attn.get("sliding_window_size") not in (None, -1):
        raise attn.error("sliding_window_size", "-1")
    return _uniform(config, LayerSpec(_mpt_kv_heads(config, attn), _head_dim(config)))


_WINDOW: Final = frozenset({"sliding_window"})
_QWEN: Final = _WINDOW | {"use_sliding_window"}
_GEMMA: Final = _WINDOW | {"cache_implementation"}
_MLA: Final = frozenset({"kv_lora_rank"})
# published Gemma-3 files leave out what equals the default of transformers' Gemma3TextConfig
_GEMMA3_DEFAULTS: Final = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window_pattern": 6,
    "vocab_size": 262_208,
}

_FAMILIES: Final[Mapping[str, _Family]] = {
    "deepseek_v2": _Family(_read_mla, _MLA),
    "deepseek_v3": _Family(_read_mla, _MLA),
    "falcon": _Family(
        _read_falcon, aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    ),
    "gemma2": _Family(_read_even_layers_slide, _GEMMA),
    "gemma3_text": _Family(
        _read_gemma3,
        _GEMMA | {"sliding_window_pattern"},
        {"sliding_window_pattern": "_sliding_window_pattern"},
        _GEMMA3_DEFAULTS,
    ),
    "gpt2": _Family(
        _read_gpt2,
        aliases={"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    ),
    "gpt_oss": _Family(_read_even_layers_slide, _WINDOW),
    "kimi_k2": _Family(_read_mla, _MLA),
    "llama": _Family(_read_llama),
    "mistral": _Family(_read_mistral, _WINDOW),
    "mixtral": _Family(_read_mixtral, _WINDOW),
    "mpt": _Family(
        _read_mpt,
        aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    ),
    "phi3": _Family(_read_phi3, _WINDOW),
    "qwen2": _Family(_read_qwen2, _QWEN),
    "qwen3": _Family(_read_qwen3, _QWEN),
    "qwen3_moe": _Family(_read_qwen3_moe, _QWEN),
}
# gemma3 is gemma3_text in a wrapper, and not a family of its own
SUPPORTED_MODEL_TYPES: Final = tuple(sorted([*_FAMILIES, "gemma3"]))


def _check_cache_fields(config: HFConfig) -> None:
    for name in _CACHE_FIELDS:
        if name not in _FAMILIES[config.model_type].reads and config.get(name):
            raise config.error(name, "absent, null or false in this family")
    # the Gemma families call their mix of full and sliding layers hybrid
    if config.get("cache_implementation") not in (None, "hybrid"):
        raise config.error("cache_implementation", "'hybrid' or null")


def load_config(source: str | Path | Mapping[str, object]) -> HFConfig:
    """Read a file, a folder that holds ``config.json``, or a dict.

    Raises:
        SpecError: it cannot be read, is no JSON object, or its ``model_type`` is not supported.
    """
    values = _text_part(source if isinstance(source, Mapping) else read_json(Path(source)))
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise SpecError(f"model_type is {model_type!r}; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    family = _FAMILIES[model_type]
    return HFConfig(model_type, values, family.aliases, family.defaults)


def read_layers(config: HFConfig) -> Layers:
    """What each decoder layer stores, in model order; multi-token-prediction layers are left out. O(layers).

    Raises:
        SpecError: the config does not say exactly what is cached; the field, its value and what is supported.

    >>> config = load_config({"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512,
    ...                         "qk_rope_head_dim": 64})
    >>> len(read_layers(config)), read_layers(config)[0].bytes_per_token("bf16")
    (61, 1152)
    """
    _check_cache_fields(config)
    return _FAMILIES[config.model_type].read(config)


def read_dtype(config: HFConfig) -> str:
    """Dtype that the config gives the cache: its ``torch_dtype``, which is what engines use by default.

    Raises:
        SpecError: it names none, or quantizes the cache in a way of its own.
    """
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("kv_cache_scheme") is not None:
        raise config.error("quantization_config", "no kv_cache_scheme, or pass the dtype of the cache")
    name = "torch_dtype" if config.has("torch_dtype") else "dtype"
    dtype = _DTYPES.get(str(config.get(name)).removeprefix("torch."))
    if dtype is None:
        raise config.error(name, f"{', '.join(_DTYPES)}, or pass the dtype of the cache")
    return dtype
