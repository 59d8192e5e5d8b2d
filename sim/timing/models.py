"""The models of the simulator: built in by name, or any supported ``config.json``.

The built-in table keeps, for each model, the fields of its published config that decide the cache and the
parameter count, with the name of the repository they come from. Nothing is downloaded.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from pagedkv.errors import SpecError
from pagedkv.hf_config import load_config, read_layers
from pagedkv.hf_fields import HFConfig, read_json
from pagedkv.sim.timing.model_params import count_params, q_head_dim, v_head_dim
from pagedkv.spec import KVCacheSpec


@dataclass(frozen=True)
class Model:
    """What the simulator needs to know of a model.

    Attributes:
        name: built-in name, or the path it was read from.
        spec: the cache; bytes come from here and nowhere else.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_q_heads: query heads per layer.
        q_head_dim: elements of one query head (MLA: nope + rope dims, as prefill computes it).
        v_head_dim: elements of one value head (MLA: as prefill expands it).
        vocab_size: rows of the output head.
        params_total: parameters that must be held in memory; formulas in `pagedkv.sim.timing.model_params`.
        params_active: parameters one decoded token multiplies with, the output head included.
        params_lm_head: parameters of the output head, ``vocab_size * hidden_size``.
        params_experts: parameters of all routed experts, 0 for a dense model.
        expert_share: share of the routed experts that one token uses, 1 for a dense model.
    """

    name: str
    spec: KVCacheSpec
    num_layers: int
    hidden_size: int
    num_q_heads: int
    q_head_dim: int
    v_head_dim: int
    vocab_size: int
    params_total: int
    params_active: int
    params_lm_head: int
    params_experts: int = 0
    expert_share: float = 1.0


class _Entry(NamedTuple):
    source: str
    config: Mapping[str, object]


@cache
def _table() -> dict[str, _Entry]:
    rows = json.loads(files("pagedkv.sim.timing").joinpath("model_configs.json").read_text(encoding="utf-8"))
    return {name: _Entry(row["source"], row["config"]) for name, row in rows.items()}


def model_names() -> tuple[str, ...]:
    """The built-in names, sorted.

    >>> len(model_names()), model_names()[0]
    (32, 'deepseek-v2')
    """
    return tuple(sorted(_table()))


def model_source(name: str) -> str:
    """The repository a built-in config comes from.

    Raises:
        SpecError: ``name`` is not built in.

    >>> model_source("llama-3.1-8b")
    'meta-llama/Llama-3.1-8B'
    """
    found = _built_in(name)
    if found is None:
        raise _unknown(name)
    return _table()[found].source


def _built_in(name: str) -> str | None:
    wanted = name.lower()
    return next((key for key, row in _table().items() if wanted in (key, row.source.lower())), None)


def _unknown(name: str) -> SpecError:
    close = difflib.get_close_matches(name.lower().rpartition("/")[2], model_names(), n=3, cutoff=0.5)
    hint = f"close names: {', '.join(close)}" if close else f"built in: {', '.join(model_names())}"
    return SpecError(f"no model {name!r}, and no such config.json or folder; {hint}")


def _from_config(name: str, config: HFConfig, kv_dtype: str, block_size: int) -> Model:
    layers = read_layers(config)
    params = count_params(config, layers)
    return Model(
        name=name,
        spec=KVCacheSpec(layers, kv_dtype, block_size),
        num_layers=len(layers),
        hidden_size=config.integer("hidden_size"),
        num_q_heads=config.num_q_heads,
        q_head_dim=q_head_dim(config, layers[0]),
        v_head_dim=v_head_dim(config, layers[0]),
        vocab_size=config.integer("vocab_size"),
        params_total=params.total,
        params_active=params.active,
        params_lm_head=params.lm_head,
        params_experts=params.experts,
        expert_share=params.expert_share,
    )


def load_model(name_or_path: str | Path, *, kv_dtype: str = "bf16", block_size: int = 16) -> Model:
    """A built-in model by name or repository, in any case; else a ``config.json`` or the folder of one.

    Built-in names win over paths of the same name. O(layers).

    Raises:
        SpecError: no such model or file (with close names), or a config that is not supported.

    >>> model = load_model("llama-3.1-8b", kv_dtype="int8")
    >>> model.spec.bytes_per_token_layer(0), model.params_total
    (2112, 8029995008)
    """
    name = str(name_or_path)
    found = _built_in(name)
    if found is not None:
        return _from_config(found, load_config(_table()[found].config), kv_dtype, block_size)
    if not Path(name_or_path).exists():
        raise _unknown(name)
    values = read_json(Path(name_or_path))  # its errors name the path already
    try:
        return _from_config(name, load_config(values), kv_dtype, block_size)
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from None
