"""A step's time with decode attention from a profile, and the rest from a roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagedkv.sim.timing.attention_group import Contexts
from pagedkv.sim.timing.kernel_table import KernelTable
from pagedkv.sim.timing.models import Model
from pagedkv.sim.timing.roofline import Roofline
from pagedkv.sim.timing.step_time import Chunk, Durations, StepTimeModel


@dataclass(frozen=True)
class TableStepTime(StepTimeModel):
    """Decode attention as profiled, one call per layer; everything else as ``base`` models it.

    A batch of unlike contexts takes what one of their mean takes: attention is affine in the tokens it
    reads. In a sliding layer a context counts up to the window.

    Attributes:
        base: of the same model on the same device, whose attention is left out. What it says of launches
            should not contain the attention call, whose fixed cost is in the profile.
        table: seconds of one layer's call by batch and context.
        layers_by_window: number of layers of each window (None: full attention).
    """

    base: Roofline
    table: KernelTable
    layers_by_window: tuple[tuple[int | None, int], ...]

    @classmethod
    def of_model(cls, base: Roofline, table: KernelTable, model: Model) -> TableStepTime:
        """With the layers of a model."""
        windows = [layer.window for layer in model.spec.layers]
        return cls(base, table, tuple((window, windows.count(window)) for window in dict.fromkeys(windows)))

    @property
    def attention_time(self) -> str:
        """Profiled."""
        return "profiled"

    def decode_kv_s(self, contexts: Contexts) -> float:
        """Seconds of attention in all layers. ``PagedKVError`` for a batch or context outside the table."""
        if not len(contexts):
            return 0.0
        return sum(
            num_layers * self.table.seconds(len(contexts), _mean(contexts, window))
            for window, num_layers in self.layers_by_window
        )

    def durations(self, contexts: Contexts, chunks: Sequence[Chunk] = (), num_ending: int = 0) -> Durations:
        """Seconds of the k-th step; each call looks into the table."""
        num_tokens = len(contexts) + sum(n for _, n in chunks)
        num_samples = len(contexts) + num_ending

        def seconds(k: int) -> float:
            return self.base.step_s(num_tokens, num_samples, self.decode_kv_s(contexts + k), chunks, k)

        return seconds

    def steps_of_same_growth(self, contexts: Contexts) -> int | None:
        """Steps until a mean context passes a measured one, or a window fills."""
        left = [self.base.steps_of_same_growth(contexts)]
        if len(contexts):
            for window, _ in self.layers_by_window:
                mean = _mean(contexts, window)
                knot = self.table.next_knot(len(contexts), mean)
                left.append(None if math.isinf(knot) else max(1, math.floor(knot - mean) + 1))
        return min((steps for steps in left if steps is not None), default=None)

    def kv_bytes(self, contexts: Contexts) -> int:
        """As in ``base``."""
        return self.base.kv_bytes(contexts)

    def weight_bytes(self, num_tokens: int) -> float:
        """As in ``base``."""
        return self.base.weight_bytes(num_tokens)


def _mean(contexts: Contexts, window: int | None) -> float:
    read = contexts if window is None else contexts.clip(max=window)
    return float(read.mean())
