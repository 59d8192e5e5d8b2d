"""How long one engine step takes, modelled from bytes and FLOPS."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.errors import SpecError
from pagedkv.sim.gpus import GPU
from pagedkv.sim.models import Model
from pagedkv.spec import KVCacheSpec

Contexts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Efficiency:
    """Share of the peak that each part of a step reaches, and the cost that no byte explains.

    Defaults are published figures, fitted to no run of ours: weights stream at 0.92 of the memory
    bandwidth; paged attention reads K and V at 0.85-0.95 of it on data-centre GPUs and 0.8-0.85 on
    consumer ones; large GEMMs reach 0.78-0.87 of the dense peak (NVIDIA AIConfigurator's measured
    kernel database). The launch cost is what these leave unexplained of one published point: 7.42 ms
    TPOT of Llama-3.1-8B on an H100 SXM, 8 requests of 1,024 + 512 tokens at once (same database):
    weights 4.87, KV 0.45, prefill of the others 0.19, so 1.91 ms for 32 layers; 13-29 us of it per
    layer is the attention call.
    """

    weights: float = 0.92
    kv: float = 0.90
    compute: float = 0.78
    launch_s_per_layer: float = 60e-6

    def __post_init__(self) -> None:
        """Refuse shares outside (0, 1] and a negative launch time."""
        for name in ("weights", "kv", "compute"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise SpecError(f"efficiency {name} must be in (0, 1], got {getattr(self, name)}")
        if not 0.0 <= self.launch_s_per_layer < math.inf:
            raise SpecError(
                f"launch_s_per_layer must be finite and not negative, got {self.launch_s_per_layer}"
            )


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds of one step: ``launch + max(compute, weight bytes / bandwidth) + KV bytes / bandwidth``.

    A step reads every weight once (of routed experts, those that its tokens choose if they choose
    evenly: a share ``1 - (1 - top_k / experts)^tokens``), and all K and V of its sequences: the whole
    context, or the window in sliding layers. Rates are achieved ones, in bytes/s and FLOP/s.

    >>> StepTimeModel.from_rates(weight_bytes=14e9, bandwidth=800e9).decode_s(np.array([0]))
    0.0175
    """

    launch_s: float
    weight_bytes_per_s: float
    kv_bytes_per_s: float
    flops_per_s: float
    dense_weight_bytes: float
    expert_weight_bytes: float = 0.0
    expert_share: float = 1.0
    flops_per_token: float = 0.0
    flops_per_sample: float = 0.0
    flops_per_pair: float = 0.0
    """FLOPS of attention per pair of a query token and a token that it attends to, all layers."""
    kv_groups: tuple[tuple[int | None, int], ...] = ()
    """(sliding window or None, KV bytes per token) of each group of layers."""

    @classmethod
    def from_rates(
        cls, weight_bytes: float, bandwidth: float, spec: KVCacheSpec | None = None
    ) -> StepTimeModel:
        """Bandwidth alone, reached in full: no launch cost, no compute; ``SpecError`` unless above 0."""
        if not (0.0 < weight_bytes < math.inf and 0.0 < bandwidth < math.inf):
            raise SpecError(f"weights and bandwidth must be above 0, got {weight_bytes} and {bandwidth}")
        groups = kv_groups(spec) if spec else ()
        return cls(0.0, bandwidth, bandwidth, float("inf"), weight_bytes, kv_groups=groups)

    @classmethod
    def from_gpu(
        cls, model: Model, gpu: GPU, efficiency: Efficiency | None = None, weight_bits: float = 16
    ) -> StepTimeModel:
        """Peak rates of a GPU times the efficiency, for a model with weights of ``weight_bits``.

        Raises ``SpecError`` if the table has no FLOPS for the GPU.
        """
        if gpu.fp16_flops is None:
            raise SpecError(f"no FLOPS are known for {gpu.name}: state them (--tflops)")
        e = efficiency or Efficiency()
        weight_bytes = weight_bits / 8
        routed = model.params_experts * model.expert_share
        return cls(
            launch_s=e.launch_s_per_layer * model.num_layers,
            weight_bytes_per_s=gpu.bandwidth * e.weights,
            kv_bytes_per_s=gpu.bandwidth * e.kv,
            flops_per_s=gpu.fp16_flops * e.compute,
            dense_weight_bytes=(model.params_active - routed) * weight_bytes,
            expert_weight_bytes=model.params_experts * weight_bytes,
            expert_share=model.expert_share,
            flops_per_token=2.0 * (model.params_active - model.params_lm_head),
            flops_per_sample=2.0 * model.params_lm_head,
            flops_per_pair=4.0 * model.num_q_heads * model.q_head_dim * model.num_layers,
            kv_groups=kv_groups(model.spec),
        )

    def weight_bytes(self, num_tokens: int) -> float:
        """Weight bytes that a step of ``num_tokens`` reads."""
        if not self.expert_weight_bytes:
            return self.dense_weight_bytes
        chosen = 1.0 - (1.0 - self.expert_share) ** num_tokens
        return self.dense_weight_bytes + self.expert_weight_bytes * chosen

    def fixed_s(self, num_tokens: int, num_samples: int, num_pairs: float = 0.0) -> float:
        """Seconds of a step without its KV reads.

        ``num_tokens`` go through the layers, ``num_samples`` of them through the output head;
        ``num_pairs`` are the query-key pairs of prefill attention (decode attention is bound by bytes).
        """
        flops = self.flops_per_token * num_tokens + self.flops_per_sample * num_samples
        flops += self.flops_per_pair * num_pairs
        return self.launch_s + max(
            flops / self.flops_per_s, self.weight_bytes(num_tokens) / self.weight_bytes_per_s
        )

    def kv_bytes(self, contexts: Contexts) -> int:
        """KV bytes that a decode step of sequences with these contexts (this token included) reads."""
        total = 0
        for window, per_token in self.kv_groups:
            tokens = contexts if window is None else np.minimum(contexts, window)
            total += int(tokens.sum()) * per_token
        return total

    def prefill_kv_bytes(self, context: int) -> int:
        """KV bytes that a prompt chunk reads which ends at ``context``: its whole context, once."""
        return sum(
            per_token * (context if window is None else min(context, window))
            for window, per_token in self.kv_groups
        )

    def kv_growth(self, contexts: Contexts) -> int:
        """KV bytes by which the next such step reads more, each context one token longer."""
        return sum(
            per_token * (len(contexts) if window is None else int(np.count_nonzero(contexts < window)))
            for window, per_token in self.kv_groups
        )

    def steps_of_same_growth(self, contexts: Contexts) -> int | None:
        """Steps after which another context fills a sliding window, or None if none will."""
        left = [
            int((window - contexts[contexts < window]).min())
            for window, _ in self.kv_groups
            if window is not None and (contexts < window).any()
        ]
        return min(left, default=None)

    def decode_s(self, contexts: Contexts) -> float:
        """Seconds of one decode step: the ITL of a batch with these contexts (this token included)."""
        num = len(contexts)
        return self.fixed_s(num, num) + self.kv_bytes(contexts) / self.kv_bytes_per_s


def kv_groups(spec: KVCacheSpec) -> tuple[tuple[int | None, int], ...]:
    """(window, KV bytes per token) of each group of layers with one window."""
    groups: dict[int | None, int] = {}
    for layer, indices in spec.groups.items():
        per_token = spec.bytes_per_token_layer(indices[0]) * len(indices)
        groups[layer.window] = groups.get(layer.window, 0) + per_token
    return tuple(groups.items())
