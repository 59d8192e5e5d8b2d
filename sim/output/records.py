"""What the engine loop writes down: steps, and the times of each request."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.block_pool import BlockCounts
from pagedkv.sim.output.gaps import Gaps

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


_SECONDS: Final = ("start_s", "first_s", "growth_s")


class StepLog:
    """Steps in order, as numbers in one row after the other: 80 bytes each. Whole numbers up to 2**53.

    >>> log = StepLog([Steps(0.0, 3, 0.5, 0.25, 2, 100, 6400, 0)])
    >>> log.append(Steps(2.25, 1, 0.5, 0.0, 0, 0, 0, 512)); len(log), log.column("num_steps").tolist()
    (2, [3, 1])
    >>> next(iter(log)).first_s
    0.5
    """

    def __init__(self, steps: Iterable[Steps] = ()) -> None:
        """Start with these."""
        self._numbers = array("d")
        for one in steps:
            self.append(one)

    def append(self, steps: Steps) -> None:
        """Write down one more."""
        self._numbers.extend(steps)

    def extend(self, other: StepLog) -> None:
        """Write down all of another log."""
        self._numbers.extend(other._numbers)

    def column(self, name: str) -> npt.NDArray[Any]:
        """The field ``name`` of all: [len] int64, or float64 if it is seconds."""
        numbers = np.asarray(self._numbers).reshape(-1, len(Steps._fields))[:, Steps._fields.index(name)]
        return numbers.copy() if name in _SECONDS else numbers.astype(np.int64)

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._numbers) // len(Steps._fields)

    def __iter__(self) -> Iterator[Steps]:
        """Yield them in order, made anew."""
        return map(Steps, *(self.column(name).tolist() for name in Steps._fields))


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
        self.steps = StepLog()
        self.samples: list[Sample] = []
        self.resume_gaps_s = array("d")
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
        self.transfer_s = array("d")
        """From the end of a prefill to the arrival of its KV where it is decoded, one per request."""
        self.arrival_s: FloatArray | None = None
        """When each request came, where that depends on the run; None: as the trace says."""
        self.occupancy = Occupancy()
        self.first_token_s: FloatArray = np.full(num_requests, np.nan)
        self.finish_s: FloatArray = np.full(num_requests, np.nan)

    def gaps(self) -> Gaps:
        """Every gap between consecutive tokens of a sequence.

        Each decoding sequence gets a token a step, so a step is a gap for all of them. Gaps over a
        preemption or another wait are counted whole, one by one. Accepted drafts follow after no time.
        """
        alone = np.array(self.resume_gaps_s)
        drafts = np.array([self.accepted_tokens])
        none, one = np.zeros(len(alone) + 1, np.int64), np.ones(len(alone) + 1, np.int64)
        return Gaps(
            first=np.concatenate([self.steps.column("first_s"), alone, [0.0]]),
            growth=np.concatenate([self.steps.column("growth_s"), none]),
            count=np.concatenate([self.steps.column("num_steps"), one]),
            weight=np.concatenate([self.steps.column("num_decoding"), one[1:], drafts]),
            late=np.concatenate([self.steps.column("num_late"), none]),
        )
