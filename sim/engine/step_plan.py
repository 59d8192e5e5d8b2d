"""What the next steps compute, and how many of them are alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.sim.engine.engine_config import EngineConfig
from pagedkv.sim.engine.hybrid_pool import HybridPool
from pagedkv.sim.engine.pool import Pool, groups_of
from pagedkv.sim.engine.request_state import RequestState
from pagedkv.sim.output.records import Steps
from pagedkv.sim.timing.step_cost import MOST_STEPS, StepCost, steps_until
from pagedkv.sim.timing.step_time import Contexts, StepTimeModel

NOBODY: Contexts = np.empty(0, np.int64)


class Plan(NamedTuple):
    """The next steps: who decodes in each, and the prompt chunk of each prefilling request in one of them."""

    steps: Steps
    decoding: list[int]
    ids: Contexts
    """[num_decoding] int64: the same as an array."""
    chunks: list[tuple[int, int]]
    num_ending: int
    """How many of the chunks end their prompt, if there is but one step."""


class StepPlanner:
    """Plans from what runs; changes nothing."""

    def __init__(
        self, requests: RequestState, pool: Pool, step_time: StepTimeModel, config: EngineConfig
    ) -> None:
        """Plan for these requests and the blocks of this pool, with the durations of this model."""
        self._requests, self._pool, self._step_time, self._config = requests, pool, step_time, config

    def plan(
        self,
        now_s: float,
        decoding: list[int],
        chunks: list[tuple[int, int]],
        *,
        event_s: float,
        most: int = MOST_STEPS,
    ) -> Plan:
        """As many steps as nothing interrupts: no end of a sequence or prompt, no event, no lack of blocks.

        At least one step is planned even if there are no blocks for it, and at most ``most``.
        """
        ids = np.array(decoding, np.int64)
        contexts = self._requests.contexts(ids)
        ending = sum(n == self._requests.left_to_prefill(request) for request, n in chunks)
        cost = self._cost(contexts, chunks, ending)
        count = min(most, self._repeats(ids, contexts, chunks))
        first_s = cost.seconds(0)
        growth_s = cost.seconds(1) - first_s if count > 1 else 0.0
        if count > 1:
            count = min(count, steps_until(event_s - now_s, first_s, growth_s))
            count = self._largest_growth(contexts - 1, count)
            while count > 1 and not cost.is_even(count, first_s, growth_s):
                count //= 2
        if self._config.speculation:
            first_s += self._config.num_drafts * self._config.speculation.draft_s if decoding else 0.0
        steps = Steps(
            now_s,
            count,
            first_s,
            growth_s,
            len(ids),
            int(contexts.sum()),
            self._step_time.kv_bytes(contexts + self._config.num_drafts),
            sum(n for _, n in chunks),
        )
        return Plan(steps, decoding, ids, chunks, ending if count == 1 else 0)

    def chunks(self, prefilling: Iterable[int], budget: int) -> list[tuple[int, int]]:
        """(request, prompt tokens) of the next step: the budget, to prompts in order."""
        found = []
        for request in prefilling:
            if budget <= 0:
                break
            found.append((request, min(budget, self._requests.left_to_prefill(request))))
            budget -= found[-1][1]
        return found

    def _cost(self, contexts: Contexts, chunks: list[tuple[int, int]], ending: int) -> StepCost:
        """Verifying drafts costs what a prompt chunk behind the context does, each token sampled from."""
        starts = [(int(self._requests.computed[request]), n) for request, n in chunks]
        if not self._config.speculation:
            return StepCost(self._step_time, contexts, starts, ending)
        verified = self._config.tokens_per_decode
        starts += [(context - 1, verified) for context in contexts.tolist()]
        return StepCost(self._step_time, NOBODY, starts, ending + verified * len(contexts))

    def _repeats(self, ids: Contexts, contexts: Contexts, chunks: list[tuple[int, int]]) -> int:
        """Steps until a sequence ends, a prompt takes less than the whole budget, or a window fills."""
        limits = [MOST_STEPS]
        if len(ids):
            if self._config.speculation:
                return 1  # how far each sequence gets is drawn anew
            left = self._requests.output_len[ids] - self._requests.generated[ids]
            limits.append(int(left.min()))
            limits.append(self._step_time.steps_of_same_growth(contexts) or MOST_STEPS)
            if isinstance(self._pool, HybridPool):
                limits.append(self._pool.steps_until_full(contexts - 1))
            if self._config.kv_budget:
                size = self._pool.block_size
                limits.append(self._config.kv_budget.tokens // size * size - int(contexts.max()) + 1)
        if chunks:
            # a hybrid pool makes room for each chunk when it is computed
            alike = len(chunks) == 1 and not isinstance(self._pool, HybridPool)
            limits.append(self._full_chunks(*chunks[0]) if alike else 1)
        return min(limits)

    def _full_chunks(self, request: int, chunk: int) -> int:
        """Steps that compute a whole chunk and leave prompt for a later step; the last step is one alone."""
        return max(1, (self._requests.left_to_prefill(request) - 1) // chunk)

    def _largest_growth(self, lens: Contexts, count: int) -> int:
        """Most steps, 1..count, whose new blocks are available; 1 if not even one step fits."""
        size, counts = self._pool.block_size, self._pool.counts
        available = (counts.free + counts.cached) // groups_of(self._pool)
        if len(lens) * div_ceil(count, size) <= available:
            return count  # wherever in its last block each sequence ends
        held = div_ceil(lens, size)

        def fits(steps: int) -> bool:
            return int((div_ceil(lens + steps, size) - held).sum()) <= available

        if fits(count):
            return count
        low, high = 1, count
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low
