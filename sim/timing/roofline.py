"""A step's time from bytes and FLOPS, each over the rate that a device reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.errors import SpecError
from pagedkv.sim.timing.attention_constants import FittedKernel, fitted_kernels
from pagedkv.sim.timing.attention_group import AttentionGroup, Contexts, attention_groups
from pagedkv.sim.timing.efficiency import Efficiency
from pagedkv.sim.timing.gpus import GPU, load_gpu
from pagedkv.sim.timing.models import Model
from pagedkv.sim.timing.rates import nearest_dtype
from pagedkv.sim.timing.step_time import Chunk, Durations, StepTimeModel
from pagedkv.spec import ELEMENT_BYTES, KVCacheSpec

LAUNCH_GPU: Final = "H100 SXM"
"""Where the published launch cost per layer was found, with the attention call of this GPU in it."""


@dataclass(frozen=True)
class Roofline(StepTimeModel):
    """Seconds of one step: ``launch + max(compute, weight bytes / bandwidth) + KV bytes / bandwidth``.

    A step reads every weight once (of routed experts, those that its tokens choose if they choose
    evenly: a share ``1 - (1 - top_k / experts)^tokens``), and all K and V of its sequences: the whole
    context, or the window in sliding layers. Where decode attention computes for longer than it reads
    (MLA does), the longer time counts. Rates are achieved ones, in bytes/s and FLOP/s; the launch cost is
    ``launch_s`` a step and ``per_sequence_s`` for each token that is sampled.

    >>> Roofline.from_rates(weight_bytes=14e9, bandwidth=800e9).decode_s(np.array([0]))
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
    per_sequence_s: float = 0.0

    @classmethod
    def from_rates(
        cls,
        weight_bytes: float,
        bandwidth: float,
        spec: KVCacheSpec | None = None,
        *,
        expert_weight_bytes: float = 0.0,
        expert_share: float = 1.0,
    ) -> Roofline:
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
    ) -> Roofline:
        """Peak rates of a GPU times the efficiency, for a model with weights of ``weight_bits``.

        Without ``efficiency``, that of ``efficiency_of``. ``SpecError`` if no FLOPS are known for the GPU.
        """
        if gpu.fp16_flops is None:
            raise SpecError(f"no FLOPS are known for {gpu.name}: state them (--tflops)")
        e = efficiency or efficiency_of(gpu, model.spec)
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
            per_sequence_s=e.per_sequence_s,
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
        launch_s = self.launch_s + self.per_sequence_s * num_samples
        return launch_s + max(flops / self.flops_per_s, weights_s)

    def prefill_flops(self, start: int, count: int) -> float:
        """Attention FLOPS of a prompt chunk of ``count`` tokens behind ``start`` others."""
        return sum(group.prefill_flops * group.pairs(start, count) for group in self.groups)

    def prefill_kv_s(self, start: int, count: int) -> float:
        """Seconds in which such a chunk reads its K and V, each once."""
        read = sum(group.bytes_per_token * group.tokens_read(start, count) for group in self.groups)
        return read / self.kv_bytes_per_s

    def durations(self, contexts: Contexts, chunks: Sequence[Chunk] = (), num_ending: int = 0) -> Durations:
        """Seconds of the k-th step, in O(chunks): attention is affine in k until a window fills."""
        num_tokens = len(contexts) + sum(n for _, n in chunks)
        num_samples = len(contexts) + num_ending
        decode_kv_s = self.decode_kv_s(contexts)
        growth_s = self.decode_kv_growth_s(contexts)
        if not chunks:
            fixed_s = self.fixed_s(num_tokens, num_samples)
            return lambda k: fixed_s + (decode_kv_s + k * growth_s)

        def seconds(k: int) -> float:
            kv_s = decode_kv_s + k * growth_s
            return self.step_s(num_tokens, num_samples, kv_s, chunks, k)

        return seconds

    def step_s(
        self, num_tokens: int, num_samples: int, decode_kv_s: float, chunks: Sequence[Chunk] = (), k: int = 0
    ) -> float:
        """Seconds of a step whose decode attention takes ``decode_kv_s``; its chunks are the k-th ones."""
        flops, kv_s = 0.0, decode_kv_s
        for start, n in chunks:
            flops += self.prefill_flops(start + k * n, n)
            kv_s += self.prefill_kv_s(start + k * n, n)
        return self.fixed_s(num_tokens, num_samples, flops) + kv_s

    def kv_bytes(self, contexts: Contexts) -> int:
        """KV bytes that a decode step of sequences with these contexts (this token included) reads."""
        return sum(group.bytes_per_token * int(group.resident(contexts).sum()) for group in self.groups)

    def decode_kv_s(self, contexts: Contexts) -> float:
        """Seconds of such a step's attention."""
        return sum(
            self._seconds_per_token(group) * int(group.resident(contexts).sum()) for group in self.groups
        )

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

    def _seconds_per_token(self, group: AttentionGroup) -> float:
        return max(group.bytes_per_token / self.kv_bytes_per_s, group.decode_flops / self.flops_per_s)


def efficiency_of(gpu: GPU, spec: KVCacheSpec, kernel: str | None = None) -> Efficiency:
    """What a step reaches on a device: its hardware file's rates, else fitted ones, else published ones.

    Fitted are the attention constants, on the GPU itself or on one of its architecture; they depend on the
    KV dtype and the bytes of a row. ``kernel``, the beginning of a name in ``fitted_kernels``, chooses
    another than the default, from another GPU if need be. The rest of a step is published in both cases.

    Raises:
        SpecError: no kernel of that name was fitted.

    >>> from pagedkv.sim.timing.gpus import load_gpu
    >>> spec = KVCacheSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128)
    >>> [round(efficiency_of(load_gpu(name), spec).kv, 2) for name in ("h100", "l40s", "b200")]
    [0.95, 0.84, 0.9]
    """
    row_bytes = _row_bytes(spec)
    if gpu.rates is not None and kernel is None:
        own = gpu.rates.attention_for(spec.dtype)
        launch_s = gpu.rates.layer_s + own.fixed_s
        rates = gpu.rates
        return Efficiency(rates.weights, own.share(row_bytes), rates.compute, launch_s, rates.per_sequence_s)
    attention = fitted_attention(gpu, spec.dtype) if kernel is None else _named(kernel, gpu, spec.dtype)
    at_launch = fitted_attention(load_gpu(LAUNCH_GPU), "bf16")
    if attention is None or at_launch is None:
        return Efficiency()
    launch_s = Efficiency.launch_s_per_layer - at_launch.constants.fixed_s + attention.constants.fixed_s
    return Efficiency(kv=attention.constants.share(row_bytes), launch_s_per_layer=launch_s)


def attention_fixed_s(gpu: GPU, kv_dtype: str) -> float:
    """Seconds per layer of the launch cost in ``efficiency_of`` that are the attention call's."""
    if gpu.rates is not None:
        return gpu.rates.attention_for(kv_dtype).fixed_s
    kernel = fitted_attention(gpu, kv_dtype) or fitted_attention(load_gpu(LAUNCH_GPU), "bf16")
    return 0.0 if kernel is None else kernel.constants.fixed_s


def origin_of(gpu: GPU, kv_dtype: str) -> str:
    """Where ``efficiency_of`` has its rates from, in words.

    >>> from pagedkv.sim.timing.gpus import load_gpu
    >>> origin_of(load_gpu("h200"), "bf16")
    'published efficiencies, attention as fitted on H100 SXM'
    """
    if gpu.rates is not None:
        return gpu.source
    kernel = fitted_attention(gpu, kv_dtype)
    return "published efficiencies" + (f", attention as fitted on {kernel.gpu}" if kernel else "")


def fitted_attention(gpu: GPU, kv_dtype: str) -> FittedKernel | None:
    """The default kernel of a GPU, or of one of its architecture, for a KV dtype or the nearest; or None."""
    default = [kernel for kernel in fitted_kernels() if kernel.is_default]
    of_gpu = [kernel for kernel in default if kernel.gpu == gpu.name] or [
        kernel for kernel in default if load_gpu(kernel.gpu).architecture == gpu.architecture
    ]
    by_dtype = {kernel.kv_dtype: kernel for kernel in of_gpu}
    return by_dtype[nearest_dtype(kv_dtype, by_dtype)] if by_dtype else None


def _named(kernel: str, gpu: GPU, kv_dtype: str) -> FittedKernel:
    """A kernel by the beginning of its name, in any case: of the GPU if it was fitted there."""
    named = [k for k in fitted_kernels() if k.kernel.lower().startswith(kernel.lower())]
    if not named:
        known = ", ".join(dict.fromkeys(k.kernel for k in fitted_kernels()))
        raise SpecError(f"no attention kernel {kernel!r} was fitted; there are: {known}")
    on_gpu = [k for k in named if k.gpu == gpu.name] or [k for k in named if k.gpu == named[0].gpu]
    by_dtype = {k.kv_dtype: k for k in on_gpu}
    return by_dtype[nearest_dtype(kv_dtype, by_dtype)]


def _row_bytes(spec: KVCacheSpec) -> float:
    """Bytes of one head's K of one token, a mean over the layers by the bytes they read."""
    width = ELEMENT_BYTES[spec.dtype]
    sizes = [layer.bytes_per_token(spec.dtype) for layer in spec.layers]
    return sum(sizes) / sum(
        size / (layer.head_dim * width) for size, layer in zip(sizes, spec.layers, strict=True)
    )
