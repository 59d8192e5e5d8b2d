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
    num_late: int = 0
    """Of the decoding sequences, those whose gap before the first of these steps is longer than that step:
    they waited, and the whole gap is written down by itself."""


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
    queried_tokens: int = 0
    """Prompt tokens of all admissions so far, repeated ones too."""
    hit_tokens: int = 0
    """Those of them that were in the cache."""
    preemptions: int = 0
    """Preemptions so far."""


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
        # of first admissions, so that a preempted request does not count twice
        self.hit_tokens = 0
        self.partial_hit_tokens = 0
        """Of them, those of a block that only its first tokens serve."""
        self.num_coalesced = 0
        """Times that a waiting request was passed over, for a prompt that was about to be a hit."""
        self.num_swapped_out = 0
        self.stall_s = 0.0
        """Seconds in which nobody ran, because blocks were on their way to or from the host."""
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        """Drafts that became output: each came together with another token."""
        self.transfer_s: list[float] = []
        """From the end of a prefill to the arrival of its KV where it is decoded, one per request."""
        self.arrival_s: FloatArray | None = None
        """When each request came, where that depends on the run; None: as the trace says."""
        self.occupancy = Occupancy()
        self.first_token_s: FloatArray = np.full(num_requests, np.nan)
        self.finish_s: FloatArray = np.full(num_requests, np.nan)

    def gaps(self) -> tuple[FloatArray, IntArray]:
        """Every gap between consecutive tokens of a sequence: (seconds, how many tokens had it).

        Each decoding sequence gets a token a step, so a step is a gap for all of them. Gaps over a
        preemption or another wait are counted whole, one by one. Accepted drafts follow after no time.
        """
        counts = np.array([s.num_steps for s in self.steps], np.int64)
        decoding = np.repeat(np.array([s.num_decoding for s in self.steps], np.int64), counts)
        starts = np.cumsum(counts) - counts
        decoding[starts] -= np.array([s.num_late for s in self.steps], np.int64)
        k = np.arange(len(decoding)) - np.repeat(starts, counts)
        first = np.repeat(np.array([s.first_s for s in self.steps]), counts)
        growth = np.repeat(np.array([s.growth_s for s in self.steps]), counts)
        seconds = np.concatenate([first + growth * k, np.array(self.resume_gaps_s), [0.0]])
        weights = np.concatenate(
            [decoding, np.ones(len(self.resume_gaps_s), np.int64), [self.accepted_tokens]]
        )
        return seconds[weights > 0], weights[weights > 0]
