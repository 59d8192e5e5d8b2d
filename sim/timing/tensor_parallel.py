"""Tensor parallelism: what each of several GPUs holds of a model, and what it costs them to agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pagedkv.arithmetic import div_ceil
from pagedkv.errors import SpecError
from pagedkv.layer_spec import LayerSpec
from pagedkv.sim.engine.link import LinkSpeed
from pagedkv.sim.timing.models import Model
from pagedkv.sim.timing.step_time import Chunk, Contexts, Durations, StepTimeModel

_ACTIVATION_BYTES: Final = 2
_ALL_REDUCES_PER_LAYER: Final = 2
"""One behind attention, one behind the MLP."""


@dataclass(frozen=True)
class TensorParallel:
    """``num_gpus`` GPUs, each of which sends and receives over the link at its bandwidth at once.

    Raises:
        SpecError: fewer than 2 GPUs.
    """

    num_gpus: int
    link: LinkSpeed

    def __post_init__(self) -> None:
        """Check the number."""
        if self.num_gpus < 2:
            raise SpecError(f"tensor parallelism takes 2 GPUs or more, got {self.num_gpus}")

    def all_reduce_s(self, num_bytes: float) -> float:
        """Seconds to add up ``num_bytes`` of all GPUs: in a ring, each sends ``2 (n - 1) / n`` of them.

        >>> TensorParallel(4, LinkSpeed(1e9, 1e-5)).all_reduce_s(2_000_000)
        0.00301
        """
        return self.link.latency_s + 2 * self._share_sent * num_bytes / self.link.bytes_per_s

    def all_gather_s(self, num_bytes: float) -> float:
        """Seconds until each GPU has all of ``num_bytes``, of which every one made its share."""
        return self.link.latency_s + self._share_sent * num_bytes / self.link.bytes_per_s

    @property
    def _share_sent(self) -> float:
        return (self.num_gpus - 1) / self.num_gpus


def shard(model: Model, num_gpus: int) -> Model:
    """What one of ``num_gpus`` GPUs holds: its query heads, its kv heads, and an equal share of the weights.

    With more GPUs than kv heads each head is held by several; so is the latent of MLA layers, by all. (The
    projections to a kv head that is held twice are not counted twice.)

    Raises:
        SpecError: heads that cannot be split evenly.

    >>> from pagedkv.sim.timing.models import load_model
    >>> model = load_model("llama-3.1-8b")                     # 8 kv heads
    >>> [shard(model, n).spec.layers[0].num_kv_heads for n in (1, 2, 8, 16)]
    [8, 4, 1, 1]
    >>> [model.spec.bytes_per_token // shard(model, n).spec.bytes_per_token for n in (1, 2, 8, 16)]
    [1, 2, 8, 8]
    """
    if num_gpus < 1 or model.num_q_heads % num_gpus:
        raise SpecError(f"{model.name}: {model.num_q_heads} query heads cannot be split over {num_gpus} GPUs")
    layers = tuple(_shard_layer(layer, num_gpus, model.name) for layer in model.spec.layers)
    return replace(
        model,
        spec=replace(model.spec, layers=layers),
        num_q_heads=model.num_q_heads // num_gpus,
        params_total=div_ceil(model.params_total, num_gpus),
        params_active=div_ceil(model.params_active, num_gpus),
        params_lm_head=div_ceil(model.params_lm_head, num_gpus),
        params_experts=div_ceil(model.params_experts, num_gpus),
    )


def _shard_layer(layer: LayerSpec, num_gpus: int, name: str) -> LayerSpec:
    heads = layer.num_kv_heads
    if layer.is_latent:
        return layer
    if heads % num_gpus and num_gpus % heads:
        raise SpecError(
            f"{name}: {heads} kv heads can neither be split nor repeated evenly on {num_gpus} GPUs"
        )
    return replace(layer, num_kv_heads=max(1, heads // num_gpus))


class TensorParallelStepTime(StepTimeModel):
    """The step of one GPU's shard, and the communication between the layers, which overlaps with nothing.

    ::

        step = base + layers x 2 all-reduces of (tokens x hidden size) + an all-gather of the logits
    """

    def __init__(self, base: StepTimeModel, model: Model, parallel: TensorParallel) -> None:
        """``base`` is the model of one shard; ``model`` says how many layers there are and how wide."""
        self.base, self.parallel = base, parallel
        self._num_all_reduces = _ALL_REDUCES_PER_LAYER * model.num_layers
        self._bytes_per_token = model.hidden_size * _ACTIVATION_BYTES
        self._bytes_per_sample = model.vocab_size * _ACTIVATION_BYTES

    @property
    def attention_time(self) -> str:
        """As in ``base``."""
        return self.base.attention_time

    def communication_s(self, num_tokens: int, num_samples: int) -> float:
        """Seconds of a step's all-reduces and of the gathering of its logits."""
        one = self.parallel.all_reduce_s(num_tokens * self._bytes_per_token)
        logits_s = self.parallel.all_gather_s(num_samples * self._bytes_per_sample) if num_samples else 0.0
        return self._num_all_reduces * one + logits_s

    def durations(self, contexts: Contexts, chunks: Sequence[Chunk] = (), num_ending: int = 0) -> Durations:
        """Those of ``base``, each longer by the same communication."""
        num_tokens = len(contexts) + sum(n for _, n in chunks)
        communication_s = self.communication_s(num_tokens, len(contexts) + num_ending)
        base = self.base.durations(contexts, chunks, num_ending)
        return lambda k: base(k) + communication_s

    def steps_of_same_growth(self, contexts: Contexts) -> int | None:
        """As in ``base``."""
        return self.base.steps_of_same_growth(contexts)

    def kv_bytes(self, contexts: Contexts) -> int:
        """Of one GPU."""
        return self.base.kv_bytes(contexts)

    def weight_bytes(self, num_tokens: int) -> float:
        """Of one GPU."""
        return self.base.weight_bytes(num_tokens)

    def decode_kv_s(self, contexts: Contexts) -> float:
        """As in ``base``."""
        return self.base.decode_kv_s(contexts)
