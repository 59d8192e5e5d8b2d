"""What the engine loop writes down: steps, and the times of each request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Steps(NamedTuple):
    """Consecutive steps; the k-th lasts ``first_s + k * growth_s``, counted from 0."""

    start_s: float
    num_steps: int
    first_s: float
    growth_s: float
    num_decoding: int
    """Sequences that got a further token in each of these steps."""
    context_tokens: int
    """Tokens of those sequences that the first of these steps read."""
    kv_bytes: int
    """KV bytes that the first of these steps read for decoding."""
    num_prefill_tokens: int
    """Prompt tokens that each of these steps computed; 0 for pure decode steps."""


class Sample(NamedTuple):
    """State at one moment of the timeline, as the manager counted it."""

    time_s: float
    num_running: int
    num_waiting: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    used_slots: int
    mean_itl_s: float | None
    """Mean gap of the tokens decoded since the last sample, None if there were none."""


class Records:
    """Everything that happened in one run, in order."""

    def __init__(self, num_requests: int) -> None:
        """Start with no step taken."""
        self.steps: list[Steps] = []
        self.samples: list[Sample] = []
        self.resume_gaps_s: list[float] = []
        self.num_preemptions = 0
        self.num_finished = 0
        self.peak_active_blocks = 0
        self.first_token_s: FloatArray = np.full(num_requests, np.nan)
        self.finish_s: FloatArray = np.full(num_requests, np.nan)

    def gaps(self) -> tuple[FloatArray, IntArray]:
        """Every gap between consecutive tokens of a sequence: (seconds, how many tokens had it).

        Each decoding sequence gets one token a step, so a step is a gap for all of them. Gaps over a
        preemption are counted whole, one by one.
        """
        counts = np.array([s.num_steps for s in self.steps], np.int64)
        decoding = np.repeat(np.array([s.num_decoding for s in self.steps], np.int64), counts)
        k = np.arange(len(decoding)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(np.array([s.first_s for s in self.steps]), counts)
        growth = np.repeat(np.array([s.growth_s for s in self.steps]), counts)
        seconds = np.concatenate([first + growth * k, np.array(self.resume_gaps_s)])
        weights = np.concatenate([decoding, np.ones(len(self.resume_gaps_s), np.int64)])
        return seconds[weights > 0], weights[weights > 0]
