"""How long one engine step takes, modelled from bytes and FLOPS."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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


class AttentionGroup(NamedTuple):
    """Layers with one window, taken together: what their attention reads and computes."""

    window: int | None
    bytes_per_token: int
    """KV bytes of one token in all layers of the group."""
    prefill_flops: float = 0.0
    """FLOPS per pair of a prompt token and one that it attends to: 2 x heads x (q_dim + v_dim) a layer."""
    decode_flops: float = 0.0
    """FLOPS per token that a decode step attends to. More than in prefill for MLA, which decodes in the
    latent space: 2 x heads x (latent + rope + latent) a layer."""

    def pairs(self, start: int, count: int) -> float:
        """Tokens that the prompt tokens ``start .. start + count - 1`` attend to, added up.

        >>> AttentionGroup(None, 0).pairs(2, 3), AttentionGroup(4, 0).pairs(2, 3)
        (12.0, 11.0)
        """
        if self.window is None:
            return count * (start + (count + 1) / 2)
        growing = min(max(self.window - start, 0), count)  # these do not fill the window yet
        return growing * (start + (growing + 1) / 2) + (count - growing) * self.window

    def tokens_read(self, start: int, count: int) -> int:
        """Tokens whose K and V the same prompt tokens read, each once."""
        end = start + count
        return end if self.window is None else min(end, self.window - 1 + count)


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds of one step: ``launch + max(compute, weight bytes / bandwidth) + KV bytes / bandwidth``.

    A step reads every weight once (of routed experts, those that its tokens choose if they choose
    evenly: a share ``1 - (1 - top_k / experts)^tokens``), and all K and V of its sequences: the whole
    context, or the window in sliding layers. Where decode attention computes for longer than it reads
    (MLA does), the longer time counts. Rates are achieved ones, in bytes/s and FLOP/s.

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
    groups: tuple[AttentionGroup, ...] = ()

    @classmethod
    def from_rates(
        cls,
        weight_bytes: float,
        bandwidth: float,
        spec: KVCacheSpec | None = None,
        *,
        expert_weight_bytes: float = 0.0,
        expert_share: float = 1.0,
    ) -> StepTimeModel:
        """Bandwidth alone, reached in full: no launch cost, no compute.

        ``weight_bytes`` are those of everything but routed experts. ``SpecError`` unless above 0.
        """
        if not (0.0 < weight_bytes < math.inf and 0.0 < bandwidth < math.inf):
            raise SpecError(f"weights and bandwidth must be above 0, got {weight_bytes} and {bandwidth}")
        groups = tuple(AttentionGroup(*item) for item in spec.bytes_by_window) if spec else ()
        return cls(
            0.0,
            bandwidth,
            bandwidth,
            math.inf,
            weight_bytes,
            expert_weight_bytes,
            expert_share,
            groups=groups,
        )

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
            groups=attention_groups(model),
        )

    def weight_bytes(self, num_tokens: int) -> float:
        """Weight bytes that a step of ``num_tokens`` reads."""
        if not self.expert_weight_bytes:
            return self.dense_weight_bytes
        chosen = 1.0 - (1.0 - self.expert_share) ** num_tokens
        return self.dense_weight_bytes + self.expert_weight_bytes * chosen

    def fixed_s(self, num_tokens: int, num_samples: int, attention_flops: float = 0.0) -> float:
        """Seconds of a step without its KV reads.

        ``num_tokens`` go through the layers, ``num_samples`` of them through the output head;
        ``attention_flops`` are those of prefill (see ``prefill_flops``).
        """
        flops = self.flops_per_token * num_tokens + self.flops_per_sample * num_samples + attention_flops
        weights_s = self.weight_bytes(num_tokens) / self.weight_bytes_per_s
        return self.launch_s + max(flops / self.flops_per_s, weights_s)

    def prefill_flops(self, start: int, count: int) -> float:
        """Attention FLOPS of a prompt chunk of ``count`` tokens behind ``start`` others."""
        return sum(group.prefill_flops * group.pairs(start, count) for group in self.groups)

    def prefill_kv_s(self, start: int, count: int) -> float:
        """Seconds in which such a chunk reads its K and V, each once."""
        read = sum(group.bytes_per_token * group.tokens_read(start, count) for group in self.groups)
        return read / self.kv_bytes_per_s

    def kv_bytes(self, contexts: Contexts) -> int:
        """KV bytes that a decode step of sequences with these contexts (this token included) reads."""
        return sum(group.bytes_per_token * _tokens(group, contexts) for group in self.groups)

    def decode_kv_s(self, contexts: Contexts) -> float:
        """Seconds of such a step's attention."""
        return sum(self._seconds_per_token(group) * _tokens(group, contexts) for group in self.groups)

    def decode_kv_growth_s(self, contexts: Contexts) -> float:
        """Seconds by which the next such step takes longer, each context one token longer."""
        return sum(
            self._seconds_per_token(group)
            * (len(contexts) if group.window is None else int(np.count_nonzero(contexts < group.window)))
            for group in self.groups
        )

    def steps_of_same_growth(self, contexts: Contexts) -> int | None:
        """Steps after which another context fills a sliding window, or None if none will."""
        left = [
            int((group.window - contexts[contexts < group.window]).min())
            for group in self.groups
            if group.window is not None and (contexts < group.window).any()
        ]
        return min(left, default=None)

    def decode_s(self, contexts: Contexts) -> float:
        """Seconds of one decode step: the ITL of a batch with these contexts (this token included)."""
        num = len(contexts)
        return self.fixed_s(num, num) + self.decode_kv_s(contexts)

    def _seconds_per_token(self, group: AttentionGroup) -> float:
        return max(group.bytes_per_token / self.kv_bytes_per_s, group.decode_flops / self.flops_per_s)


def attention_groups(model: Model) -> tuple[AttentionGroup, ...]:
    """Bytes and FLOPS of a model's attention, by window."""
    found: dict[int | None, AttentionGroup] = {}
    for layer in model.spec.layers:
        prefill = 2.0 * model.num_q_heads * (model.q_head_dim + model.v_head_dim)
        decode = 2.0 * model.num_q_heads * (layer.head_dim + layer.value_dim)
        old = found.get(layer.window, AttentionGroup(layer.window, 0))
        found[layer.window] = AttentionGroup(
            layer.window,
            old.bytes_per_token + layer.bytes_per_token(model.spec.dtype),
            old.prefill_flops + prefill,
            old.decode_flops + decode,
        )
    return tuple(found.values())


def _tokens(group: AttentionGroup, contexts: Contexts) -> int:
    read = contexts if group.window is None else np.minimum(contexts, group.window)
    return int(read.sum())
