"""The engine loop: continuous batching over the real manager, in modelled time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_pool import BlockCounts
from pagedkv.errors import NeverFits, PagedKVError
from pagedkv.manager import KVCacheManager
from pagedkv.page_table import Int32Array
from pagedkv.sim.records import Records, Sample, Steps
from pagedkv.sim.step_cost import MOST_STEPS, StepCost, span_s, steps_until
from pagedkv.sim.step_time import Contexts, StepTimeModel
from pagedkv.sim.trace import Trace


@dataclass(frozen=True)
class EngineConfig:
    """How the engine schedules.

    ``max_batch`` sequences run at once; a step computes at most ``token_budget`` tokens, one per
    decoding sequence first and chunks of prompts with the rest; the timeline has a sample every
    ``interval_s`` modelled seconds.
    """

    max_batch: int = 256
    token_budget: int = 2048
    interval_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse sizes below one and a budget that cannot serve a full batch."""
        if self.max_batch < 1 or self.token_budget < self.max_batch:
            raise PagedKVError(
                f"need 1 <= max_batch <= token_budget, got {self.max_batch} and {self.token_budget}"
            )
        if not 1e-3 <= self.interval_s <= 1e9:
            raise PagedKVError(f"interval must be 0.001 to 1e9 seconds, got {self.interval_s}")


class _Plan(NamedTuple):
    """The next steps, and the prompt chunk of each prefilling request in one of them."""

    steps: Steps
    chunks: list[tuple[int, int]]


class Engine:
    """Serves a trace: FCFS admission, chunked prefill, decode first, preemption by recompute.

    Time is modelled; blocks, hits and bytes are the manager's own. Between two events (an arrival that
    could be admitted, a completion, a full pool, a filled window, a sample) all decode steps are taken at
    once: their durations grow evenly, so their sum has a closed form.

    A request's prompt is committed when its prefill ends and its output when it finishes or is
    preempted, so a preempted request finds what is still cached when it comes back. The last token of
    a request is never fed back: it takes no slot.
    """

    def __init__(
        self,
        trace: Trace,
        manager: KVCacheManager,
        step_time: StepTimeModel,
        config: EngineConfig | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Make an engine at time 0; raises ``NeverFits`` if one request alone exceeds the pool."""
        self.trace, self.manager, self.step_time = trace, manager, step_time
        self.config = config or EngineConfig()
        self.records = Records(len(trace))
        self.now = 0.0
        self._on_progress = on_progress
        self._next_arrival = 0
        self._waiting: deque[int] = deque()
        self._prefilling: deque[int] = deque()
        self._decoding: list[int] = []
        self._admitted: list[int] = []  # running requests, in the order of admission
        self._computed = np.zeros(len(trace), np.int64)  # tokens whose K and V exist
        self._generated = np.zeros(len(trace), np.int64)
        self._opened_before = np.zeros(len(trace), np.bool_)
        self._last_token_s = np.zeros(len(trace), np.float64)
        self._next_sample_s = 0.0
        self._itl_sum, self._itl_count = 0.0, 0
        _require_all_fit(trace, manager)

    def run(self) -> Records:
        """Serve every request; returns what happened."""
        self._sample_if_due()
        while self.records.num_finished < len(self.trace):
            self._take_arrivals()
            self._admit()
            if self._admitted:
                self._advance()
            else:
                self._idle()
            self._sample_if_due()
        self._sample()
        return self.records

    def _idle(self) -> None:
        """Nothing runs and nothing waits: let the time to the next arrival pass."""
        self._sample()
        arrival, counts = float(self.trace.arrival_s[self._next_arrival]), self.manager.counts
        self.records.occupancy.add(arrival - self.now, 1, counts, counts, (0, 0))
        self.now = arrival

    # -- admission

    def _take_arrivals(self) -> None:
        stop = int(np.searchsorted(self.trace.arrival_s, self.now, side="right"))
        self._waiting.extend(range(self._next_arrival, stop))
        self._next_arrival = max(stop, self._next_arrival)

    def _admit(self) -> None:
        """Open waiting requests in order while the batch, the budget of a step and the pool have room."""
        budget = self.config.token_budget - len(self._decoding)
        budget -= sum(self._left_to_prefill(i) for i in self._prefilling)
        while self._waiting and budget > 0 and len(self._admitted) < self.config.max_batch:
            request = self._waiting[0]
            known = int(self.trace.input_len[request] + self._generated[request])
            opened = self.manager.open(request, self._tokens(request, 0, known))
            if opened is None:
                return
            if not self._opened_before[request]:
                self._opened_before[request] = True
                self.records.hit_tokens += opened.num_cached_tokens
            self._waiting.popleft()
            self._admitted.append(request)
            self._prefilling.append(request)
            self._computed[request] = opened.num_cached_tokens
            budget -= self._left_to_prefill(request)

    def _tokens(self, request: int, start: int, stop: int) -> Int32Array:
        """Tokens at positions ``start .. stop - 1`` of a request: its prompt, then its output."""
        num_prompt = int(self.trace.input_len[request])
        parts = []
        if start < num_prompt:
            parts.append(self.trace.tokens(request)[start:stop])
        if stop > num_prompt:
            parts.append(self.trace.output_tokens(request)[max(0, start - num_prompt) : stop - num_prompt])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _left_to_prefill(self, request: int) -> int:
        return int(self.trace.input_len[request] + self._generated[request] - self._computed[request])

    # -- steps

    def _advance(self) -> None:
        """Take the next steps; while blocks lack, preempt the youngest request and take one step only."""
        plan, before = self._plan(most=None), self.manager.counts
        while not self.manager.step(self._decoding, plan.steps.num_steps):
            self._preempt(self._admitted[-1])
            if not self._admitted:
                return
            plan, before = self._plan(most=1), self.manager.counts
        self._take(plan, before)

    def _plan(self, most: int | None) -> _Plan:
        """The next steps, as many alike as no event interrupts (``most`` at most). Changes nothing."""
        ids = np.array(self._decoding, np.int64)
        contexts = (
            self.trace.input_len[ids] + self._generated[ids]
        )  # read by the first step, its token included
        chunks = self._chunks()
        starts = [(int(self._computed[request]), n) for request, n in chunks]
        cost = StepCost(self.step_time, contexts, starts, self._ending(chunks))
        count = self._repeats(ids, contexts, chunks) if most is None else most
        first_s = cost.seconds(0)
        growth_s = cost.seconds(1) - first_s if count > 1 else 0.0
        if count > 1:
            count = min(count, steps_until(self._next_event_s() - self.now, first_s, growth_s))
            count = self._largest_growth(contexts - 1, count)
            while count > 1 and not cost.is_even(count, first_s, growth_s):
                count //= 2
        prefill = sum(n for _, n in chunks)
        steps = Steps(
            self.now,
            count,
            first_s,
            growth_s,
            len(ids),
            int(contexts.sum()),
            self.step_time.kv_bytes(contexts),
            prefill,
        )
        return _Plan(steps, chunks)

    def _chunks(self) -> list[tuple[int, int]]:
        """(request, prompt tokens) of the next step: what the budget leaves, to prompts in order."""
        budget = self.config.token_budget - len(self._decoding)
        chunks = []
        for request in self._prefilling:
            if budget <= 0:
                break
            chunks.append((request, min(budget, self._left_to_prefill(request))))
            budget -= chunks[-1][1]
        return chunks

    def _ending(self, chunks: list[tuple[int, int]]) -> int:
        """How many of the chunks end their prompt."""
        return sum(n == self._left_to_prefill(request) for request, n in chunks)

    def _repeats(self, ids: Contexts, contexts: Contexts, chunks: list[tuple[int, int]]) -> int:
        """Steps until a sequence ends, a prompt takes less than the whole budget, or a window fills."""
        limits = [MOST_STEPS]
        if len(ids):
            limits.append(int((self.trace.output_len[ids] - self._generated[ids]).min()))
            limits.append(self.step_time.steps_of_same_growth(contexts) or MOST_STEPS)
        if chunks:
            limits.append(self._full_chunks(*chunks[0]) if len(chunks) == 1 else 1)
        return min(limits)

    def _full_chunks(self, request: int, chunk: int) -> int:
        """Steps that compute a whole chunk and leave prompt for a later step; the last step is one alone."""
        return max(1, (self._left_to_prefill(request) - 1) // chunk)

    def _next_event_s(self) -> float:
        """Next moment at which the timeline is due, or a request arrives that could be admitted."""
        event = self._next_sample_s
        room = len(self._admitted) < self.config.max_batch and not self._waiting and not self._prefilling
        if room and self._next_arrival < len(self.trace):
            event = min(event, float(self.trace.arrival_s[self._next_arrival]))
        return event

    def _largest_growth(self, lens: Contexts, count: int) -> int:
        """Most steps, 1..count, whose new blocks are available; 1 if not even one step fits."""
        size = self.manager.block_size
        held = div_ceil(lens, size)
        counts = self.manager.counts
        available = counts.free + counts.cached

        def fits(steps: int) -> bool:
            return int((div_ceil(lens + steps, size) - held).sum()) <= available

        if fits(count):
            return count
        low, high = 1, count
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def _take(self, plan: _Plan, before: BlockCounts) -> None:
        """Let the planned steps pass: tokens are computed and emitted, sequences finish.

        ``before`` are the counts before the sequences grew; they grow evenly over the steps.
        """
        steps = plan.steps
        ending = self._ending(plan.chunks) if steps.num_steps == 1 else 0
        seconds = span_s(steps.num_steps, steps.first_s, steps.growth_s)
        self.records.steps.append(steps)
        grown = steps.num_steps * steps.num_decoding
        used, counts = self.manager.used_slots, self.manager.counts
        self.records.occupancy.add(seconds, steps.num_steps, before, counts, (used - grown, used))
        self._itl_sum += seconds * steps.num_decoding
        self._itl_count += grown
        self.now += seconds
        for request, tokens in plan.chunks:
            self._computed[request] += tokens * steps.num_steps
        self._emit_decoded(steps.num_steps)
        self._end_prefills(ending)

    def _emit_decoded(self, count: int) -> None:
        """Every decoding sequence got ``count`` more tokens."""
        ids = np.array(self._decoding, np.int64)
        self._generated[ids] += count
        self._computed[ids] += count
        self._last_token_s[ids] = self.now
        finished = self._generated[ids] == self.trace.output_len[ids]
        if finished.any():
            self._decoding = ids[~finished].tolist()
            for request in ids[finished].tolist():
                self._commit_known(request)
                self._finish(request)

    def _end_prefills(self, count: int) -> None:
        """The first ``count`` prefilling requests have their whole prompt: commit it, emit a token."""
        for _ in range(count):
            request = self._prefilling.popleft()
            self._commit_known(request)
            if math.isnan(self.records.first_token_s[request]):
                self.records.first_token_s[request] = self.now
            else:
                self.records.resume_gaps_s.append(self.now - float(self._last_token_s[request]))
            self._generated[request] += 1
            self._last_token_s[request] = self.now
            if self._generated[request] == self.trace.output_len[request]:
                self._finish(request)
            else:
                self._decoding.append(request)

    def _preempt(self, request: int) -> None:
        """Give up the request's blocks; it comes back first and recomputes what is no longer cached."""
        if request in self._decoding:
            self._decoding.remove(request)
        else:
            self._prefilling.remove(request)
        self._commit_known(request)
        self.manager.close(request)
        self._admitted.remove(request)
        self._waiting.appendleft(request)
        self.records.num_preemptions += 1

    def _commit_known(self, request: int) -> None:
        """Commit what is computed and not committed yet."""
        start, stop = self.manager.num_committed(request), int(self._computed[request])
        if self.manager.prefix_caching and start < stop:
            self.manager.commit(request, self._tokens(request, start, stop))

    def _finish(self, request: int) -> None:
        self.manager.close(request)
        self._admitted.remove(request)
        self.records.finish_s[request] = self.now
        self.records.num_finished += 1
        if self._on_progress is not None:
            self._on_progress(self.records.num_finished)

    # -- writing down

    def _sample_if_due(self) -> None:
        if self.now >= self._next_sample_s:
            self._sample()
            self._next_sample_s = (math.floor(self.now / self.config.interval_s) + 1) * self.config.interval_s

    def _sample(self) -> None:
        if self.records.samples and self.records.samples[-1].time_s == self.now:
            return
        stats = self.manager.stats()
        self.records.samples.append(
            Sample(
                time_s=self.now,
                num_running=len(self._admitted),
                num_waiting=len(self._waiting),
                free_blocks=stats.free_blocks,
                cached_blocks=stats.cached_blocks,
                active_blocks=stats.active_blocks,
                used_slots=stats.used_slots,
                mean_itl_s=self._itl_sum / self._itl_count if self._itl_count else None,
            )
        )
        self._itl_sum, self._itl_count = 0.0, 0


def _require_all_fit(trace: Trace, manager: KVCacheManager) -> None:
    """Refuse a trace with a request that this pool can never hold, before anything runs."""
    total = trace.input_len + trace.output_len - 1
    worst = int(total.argmax())
    tokens = int(total[worst])
    blocks = div_ceil(tokens, manager.block_size)
    if blocks > manager.num_blocks or tokens > manager.max_seq_len:
        raise NeverFits(
            f"request {worst + 1} of {trace.name} needs {blocks} blocks of {manager.block_size} tokens, "
            f"the pool has {manager.num_blocks} and a sequence at most {manager.max_seq_len} tokens: "
            "give it more blocks (--num-blocks, or --gpu-memory and a smaller --kv-dtype)"
        )
