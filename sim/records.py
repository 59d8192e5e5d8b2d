"""What the engine loop writes down: steps, and the times of each request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.block_pool import BlockCounts

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
    """Mean duration of the steps since the last sample, once per token decoded; None if there were none."""


class Occupancy:
    """Blocks and slots over time, added up exactly: integrals and peaks."""

    def __init__(self) -> None:
        """Start at time 0 with nothing held."""
        self.seconds = 0.0
        self.active_block_s = 0.0
        self.cached_block_s = 0.0
        self.used_slot_s = 0.0
        self.peak_active_blocks = 0
        self.peak_used_slots = 0

    def add(
        self, seconds: float, num_steps: int, before: BlockCounts, after: BlockCounts, used: tuple[int, int]
    ) -> None:
        """Let steps of ``seconds`` in all pass, over which blocks and ``used`` slots grew evenly.

        Each step takes what it needs when it begins, so n equal steps hold on average what the last
        one holds, less (n - 1) / 2n of the growth.
        """
        late = (num_steps - 1) / (2 * num_steps)
        self.seconds += seconds
        self.active_block_s += seconds * (after.active - late * (after.active - before.active))
        self.cached_block_s += seconds * (after.cached - late * (after.cached - before.cached))
        self.used_slot_s += seconds * (used[1] - late * (used[1] - used[0]))
        self.peak_active_blocks = max(self.peak_active_blocks, after.active)
        self.peak_used_slots = max(self.peak_used_slots, used[1])


class Records:
    """Everything that happened in one run, in order."""

    def __init__(self, num_requests: int) -> None:
        """Start with no step taken."""
        self.steps: list[Steps] = []
        self.samples: list[Sample] = []
        self.resume_gaps_s: list[float] = []
        self.num_preemptions = 0
        self.num_finished = 0
        self.hit_tokens = 0  # of first admissions, so that a preempted request does not count twice
        self.occupancy = Occupancy()
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
