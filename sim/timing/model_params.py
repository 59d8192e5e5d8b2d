"""How many parameters a model has, counted from its config.

Counted are the weight matrices: embeddings, a learned position table, attention and MLP projections, routers,
and the output head. Not counted are biases, norms and attention sinks (together below 0.1 % in the built-in
models), and layers that plain decoding does not run (multi-token prediction, vision towers).

    attention   h*Hq*D + h*Hkv*(D + Dv) + Hq*Dv*h
    MLA         query  h*Hq*(nope + rope), or h*rq + rq*Hq*(nope + rope) with a query rank rq
                latent h*(r + rope) + r*Hq*(nope + Dv);  output Hq*Dv*h
    MLP         3*h*f gated, 2*h*f plain (GPT-2, Falcon, MPT)
    experts     h*E + (E + shared) * 3*h*f per MoE layer; active: top_k in place of E in the second term

with h = hidden_size, Hq and Hkv = heads, D and Dv = K and V head dims, f = MLP width, E = routed experts.

Active per token is what one decoded token multiplies with: everything but the input embedding (a gather) and
the position table, and of the experts the chosen and shared ones. A tied embedding counts once, as the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from pagedkv.hf_fields import HFConfig
from pagedkv.layer_spec import LayerSpec

_TIED_BY_DEFAULT: Final = frozenset({"falcon", "gemma2", "gemma3_text", "gpt2", "mpt"})


@dataclass(frozen=True)
class ParamCount:
    """Parameters of a model: all, those one token uses, those of the head, those of routed experts."""

    total: int
    active: int
    lm_head: int
    experts: int
    """Routed experts of all layers; a token uses the share ``top_k / num_experts`` of them."""
    expert_share: float


class _Mlp(NamedTuple):
    """Parameters of all MLPs of a model; of them those of routed experts, and the share one token uses."""

    total: int
    active: int
    experts: int = 0
    expert_share: float = 1.0


class _Experts(NamedTuple):
    """The experts of a layer, how many a token uses, the width of one, and the number of layers without."""

    num: int
    top_k: int
    shared: int
    width: int
    num_dense_layers: int


def _dense(config: HFConfig, matrices: int, width: int) -> _Mlp:
    params = config.num_layers * matrices * config.integer("hidden_size") * width
    return _Mlp(params, params)


def _gated(config: HFConfig) -> _Mlp:
    return _dense(config, 3, config.integer("intermediate_size"))


def _gpt2(config: HFConfig) -> _Mlp:
    return _dense(config, 2, config.integer("n_inner", default=4 * config.integer("hidden_size")))


def _falcon(config: HFConfig) -> _Mlp:
    return _dense(config, 2, config.integer("ffn_hidden_size", default=4 * config.integer("hidden_size")))


def _mpt(config: HFConfig) -> _Mlp:
    return _dense(config, 2, config.integer("expansion_ratio", default=4) * config.integer("hidden_size"))


def _moe(config: HFConfig, experts: _Experts) -> _Mlp:
    if experts.top_k > experts.num:
        raise config.error("num_experts_per_tok", f"at most the {experts.num} experts of a layer")
    hidden = config.integer("hidden_size")
    expert = 3 * hidden * experts.width
    dense = experts.num_dense_layers * 3 * hidden * config.integer("intermediate_size")
    num_layers = config.num_layers - experts.num_dense_layers
    fixed = dense + num_layers * (hidden * experts.num + experts.shared * expert)
    routed = num_layers * experts.num * expert
    used = num_layers * experts.top_k * expert
    return _Mlp(fixed + routed, fixed + used, routed, experts.top_k / experts.num)


def _mixtral(config: HFConfig) -> _Mlp:
    num, top_k = config.integer("num_local_experts"), config.integer("num_experts_per_tok")
    return _moe(config, _Experts(num, top_k, 0, config.integer("intermediate_size"), 0))


def _qwen3_moe(config: HFConfig) -> _Mlp:
    step, listed = config.integer("decoder_sparse_step", default=1), config.get("mlp_only_layers") or ()
    if not isinstance(listed, (list, tuple)):
        raise config.error("mlp_only_layers", "a list of layer indices")
    num_dense = sum(index in listed or (index + 1) % step != 0 for index in range(config.num_layers))
    num, top_k = config.integer("num_experts"), config.integer("num_experts_per_tok")
    return _moe(config, _Experts(num, top_k, 0, config.integer("moe_intermediate_size"), num_dense))


def _deepseek(config: HFConfig) -> _Mlp:
    first = config.integer("first_k_dense_replace", minimum=0)
    freq = config.integer("moe_layer_freq", default=1)
    num_dense = sum(index < first or index % freq != 0 for index in range(config.num_layers))
    num, top_k = config.integer("n_routed_experts"), config.integer("num_experts_per_tok")
    shared = config.integer("n_shared_experts", default=0, minimum=0)
    return _moe(config, _Experts(num, top_k, shared, config.integer("moe_intermediate_size"), num_dense))


_MLPS: Final[Mapping[str, Callable[[HFConfig], _Mlp]]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_oss": _mixtral,
    "kimi_k2": _deepseek,
    "mixtral": _mixtral,
    "mpt": _mpt,
    "qwen3_moe": _qwen3_moe,
}


def q_head_dim(config: HFConfig, layer: LayerSpec) -> int:
    """Elements of one query head; with MLA, those before the query is absorbed into the latent space."""
    if layer.is_latent:
        return config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
    return layer.head_dim


def v_head_dim(config: HFConfig, layer: LayerSpec) -> int:
    """Elements of one value head; with MLA, those after the values are expanded from the latent space."""
    return config.integer("v_head_dim") if layer.is_latent else layer.value_dim


def _mla_params(config: HFConfig, layer: LayerSpec) -> int:
    hidden, heads = config.integer("hidden_size"), config.num_q_heads
    nope, value, rank = config.integer("qk_nope_head_dim"), config.integer("v_head_dim"), layer.value_dim
    query_dim = heads * q_head_dim(config, layer)
    query = hidden * query_dim
    if config.get("q_lora_rank") is not None:
        query = config.integer("q_lora_rank") * (hidden + query_dim)
    return query + hidden * layer.head_dim + rank * heads * (nope + value) + heads * value * hidden


def _attention_params(config: HFConfig, layer: LayerSpec) -> int:
    if layer.is_latent:
        return _mla_params(config, layer)
    q_dims = config.num_q_heads * (layer.head_dim + layer.value_dim)
    return config.integer("hidden_size") * (q_dims + layer.elements_per_token)


def count_params(config: HFConfig, layers: tuple[LayerSpec, ...]) -> ParamCount:
    """Parameters by the formulas above. O(layers).

    Raises:
        SpecError: a field that a formula needs is missing or no positive integer.

    >>> from pagedkv.hf_config import load_config, read_layers
    >>> config = load_config({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768,
    ...                         "n_positions": 1024, "vocab_size": 50257})
    >>> count_params(config, read_layers(config))
    ParamCount(total=124318464, active=123532032, lm_head=38597376, experts=0, expert_share=1.0)
    """
    embedding = config.integer("vocab_size") * config.integer("hidden_size")
    tied = config.flag("tie_word_embeddings", default=config.model_type in _TIED_BY_DEFAULT)
    positions = (
        config.integer("n_positions") * config.integer("hidden_size") if config.model_type == "gpt2" else 0
    )
    attention = sum(_attention_params(config, layer) for layer in layers)
    mlp = _MLPS.get(config.model_type, _gated)(config)
    total = embedding * (1 if tied else 2) + positions + attention + mlp.total
    return ParamCount(total, embedding + attention + mlp.active, embedding, mlp.experts, mlp.expert_share)
