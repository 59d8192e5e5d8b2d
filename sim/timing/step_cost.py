"""How long several steps in a row take: evenly growing durations, summed in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagedkv.sim.timing.step_time import Chunk, Contexts, StepTimeModel

MOST_STEPS = 2**31
"""More steps at once than any sequence has tokens."""


class StepCost:
    """Seconds of the k-th of several steps that decode the same sequences and prefill the same prompts."""

    def __init__(
        self, model: StepTimeModel, contexts: Contexts, chunks: Sequence[Chunk], num_ending: int
    ) -> None:
        """``contexts`` of the decoding sequences in the first step, ``chunks`` (start, tokens) of prompts
        in it, ``num_ending`` of which end their prompt.
        """
        self.seconds = model.durations(contexts, chunks, num_ending)

    def is_even(self, count: int, first_s: float, growth_s: float) -> bool:
        """Tell whether the durations grow by ``growth_s`` up to the last of ``count`` steps."""
        last = first_s + growth_s * (count - 1)
        return math.isclose(self.seconds(count - 1), last, rel_tol=1e-9)


def span_s(count: int, first_s: float, growth_s: float) -> float:
    """Duration of ``count`` steps that last ``first_s + k * growth_s``: an arithmetic series.

    >>> span_s(3, 1.0, 0.5)
    4.5
    """
    return count * first_s + growth_s * (count * (count - 1) / 2)


def steps_until(seconds: float, first_s: float, growth_s: float) -> int:
    """Fewest steps, at least 1, that last ``seconds`` or longer: the positive root of ``span_s``.

    >>> steps_until(4.5, 1.0, 0.5), steps_until(4.6, 1.0, 0.5), steps_until(0.0, 1.0, 0.5)
    (3, 4, 1)
    """
    if seconds <= first_s:
        return 1
    if seconds >= span_s(MOST_STEPS, first_s, growth_s):
        return MOST_STEPS
    a, b = growth_s / 2, first_s - growth_s / 2
    count = max(1, math.ceil(2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))))
    # The root is rounded: settle the last step by the sum itself.
    while count > 1 and span_s(count - 1, first_s, growth_s) >= seconds:
        count -= 1
    while span_s(count, first_s, growth_s) < seconds:
        count += 1
    return count
