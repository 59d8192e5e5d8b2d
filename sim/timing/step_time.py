"""How long one engine step takes: the interface of the models that say it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pagedkv.sim.timing.attention_group import AttentionGroup, Contexts
from pagedkv.sim.timing.efficiency import Efficiency

if TYPE_CHECKING:
    from pagedkv.sim.timing.gpus import GPU
    from pagedkv.sim.timing.models import Model
    from pagedkv.sim.timing.roofline import Roofline
    from pagedkv.spec import KVCacheSpec

__all__ = ["AttentionGroup", "Chunk", "Contexts", "Durations", "Efficiency", "StepTimeModel"]

Chunk = tuple[int, int]
"""Tokens before a prompt chunk, and tokens in it."""

Durations = Callable[[int], float]
"""Seconds of the k-th of several steps in a row, from 0."""


class StepTimeModel(ABC):
    """What the engine asks of a model of time. Implementations:

    ``Roofline``          bytes and FLOPS over the rates that a device reaches; no state, a closed form
    ``TableStepTime``     decode attention interpolated in a profile, the rest from a roofline
    ``MeasuredStepTime``  decode attention run on this machine at each step, the rest from a roofline

    The engine takes several steps at once while ``durations`` grow evenly. A model promises nothing about
    that: ``steps_of_same_growth`` says how far it is worth trying, and the engine checks the last one.
    """

    @property
    def attention_time(self) -> str:
        """Where the time of decode attention comes from: "modelled", "profiled" or "measured"."""
        return "modelled"

    @abstractmethod
    def durations(self, contexts: Contexts, chunks: Sequence[Chunk] = (), num_ending: int = 0) -> Durations:
        """Seconds of the k-th of several steps that decode the same sequences and prefill the same prompts.

        Args:
            contexts: [num_seqs] tokens of each decoding sequence in the first step, its own token included;
                each grows by one a step.
            chunks: of prompts in the first step; each next step computes as many tokens behind them.
            num_ending: chunks that end their prompt, and so go through the output head.
        """

    @abstractmethod
    def steps_of_same_growth(self, contexts: Contexts) -> int | None:
        """Steps, at least 1, after which the durations may grow otherwise; None if they never do."""

    @abstractmethod
    def kv_bytes(self, contexts: Contexts) -> int:
        """KV bytes that a decode step of sequences with these contexts (this token included) reads."""

    @abstractmethod
    def weight_bytes(self, num_tokens: int) -> float:
        """Weight bytes that a step of ``num_tokens`` reads."""

    @abstractmethod
    def decode_kv_s(self, contexts: Contexts) -> float:
        """Seconds that the attention of a decode step adds for its contexts."""

    def decode_s(self, contexts: Contexts) -> float:
        """Seconds of one decode step: the ITL of a batch with these contexts (this token included)."""
        return self.durations(contexts)(0)

    @staticmethod
    def from_rates(
        weight_bytes: float,
        bandwidth: float,
        spec: KVCacheSpec | None = None,
        *,
        expert_weight_bytes: float = 0.0,
        expert_share: float = 1.0,
    ) -> Roofline:
        """``Roofline.from_rates``: bandwidth alone, reached in full.

        >>> import numpy as np
        >>> StepTimeModel.from_rates(weight_bytes=14e9, bandwidth=800e9).decode_s(np.array([0]))
        0.0175
        """
        from pagedkv.sim.timing.roofline import Roofline

        return Roofline.from_rates(
            weight_bytes, bandwidth, spec, expert_weight_bytes=expert_weight_bytes, expert_share=expert_share
        )

    @staticmethod
    def from_gpu(
        model: Model, gpu: GPU, efficiency: Efficiency | None = None, weight_bits: float = 16
    ) -> Roofline:
        """``Roofline.from_gpu``: what a device reaches of its peaks, for a model."""
        from pagedkv.sim.timing.roofline import Roofline

        return Roofline.from_gpu(model, gpu, efficiency, weight_bits)
