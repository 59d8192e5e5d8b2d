"""The engine loop: continuous batching over the real manager, in modelled time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from pagedkv.block_pool import BlockCounts
from pagedkv.sim.engine.admission import Admission
from pagedkv.sim.engine.engine_config import EngineConfig
from pagedkv.sim.engine.hybrid_pool import HybridPool
from pagedkv.sim.engine.pool import Pool, groups_of
from pagedkv.sim.engine.run_timeline import RunTimeline
from pagedkv.sim.engine.speculation import Guesses
from pagedkv.sim.engine.step_plan import Plan, StepPlanner
from pagedkv.sim.engine.swapping import Swapper
from pagedkv.sim.output.records import FloatArray, Records
from pagedkv.sim.requests import Requests
from pagedkv.sim.timing.step_cost import MOST_STEPS
from pagedkv.sim.timing.step_time import Contexts, StepTimeModel

__all__ = ["Engine", "EngineConfig"]

NO_TIMES: FloatArray = np.empty(0, np.float64)


class Engine(Admission):
    """Serves a trace: admission in order, chunked prefill, decode, preemption when blocks lack.

    ::

                 admit                    prompt is done                 output is done
        waiting -------> prefilling ----------------------> decoding -----------------> finished
           ^  \\                |                              |
           |   '--> coming back: blocks on the link ------->  |  (only what was swapped out)
           '--------------- preempted <----------------------'

    Time is modelled; blocks, hits and bytes are the manager's own. Between two events (an arrival that
    could be admitted, a completion, a full pool, a filled window, a finished transfer, a sample) all decode
    steps are taken at once: their durations grow evenly, so their sum has a closed form.

    A request's prompt is committed when its prefill ends and its output when it finishes or is
    preempted, so a preempted request finds what is still cached when it comes back. The last token of
    a request is never fed back: it takes no slot. When blocks lack, whom the queue serves last gives up
    all of its own; one that was swapped out keeps their content on the host.
    """

    def __init__(
        self,
        trace: Requests,
        manager: Pool,
        step_time: StepTimeModel,
        config: EngineConfig | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Make an engine at time 0; raises ``NeverFits`` if one request alone exceeds the pool."""
        super().__init__(trace, manager, step_time, config)
        self._on_progress = on_progress
        self._planner = StepPlanner(self.requests, manager, step_time, self.config)
        self._timeline = RunTimeline(self.records, manager, self.config.interval_s)
        self._guesses = Guesses(self.config.speculation, trace) if self.config.speculation else None
        self._horizon_s = math.inf
        self._may_be_late = self.config.prefill_first or self.host.link is not None
        self._has_advanced = False  # since it was last tried to admit somebody

    def run(self) -> Records:
        """Serve every request; returns what happened."""
        while self.records.num_finished < len(self.trace):
            self.tick()
        self.end()
        self.host.end_writes()
        return self.records

    def end(self, time_s: float = 0.0) -> None:
        """Take a sample where nothing goes on, not before ``time_s``."""
        self._wait_until(time_s)
        self._timeline.sample(self.now, len(self._running), len(self._waiting))

    # -- one turn of the loop

    def tick(self, horizon_s: float = math.inf) -> None:
        """Admit who has come by now, and let time pass up to the next event; steps begin before the horizon.

        A first step is taken in any case, if anybody runs.
        """
        self._horizon_s = horizon_s
        self._timeline.sample_if_due(self.now, len(self._running), len(self._waiting))
        self._let_happen()
        self._admit()
        if self.is_busy:
            self._advance()
        else:
            self._idle()

    @property
    def is_busy(self) -> bool:
        """Whether anybody prefills or decodes."""
        return bool(self._decoding or self._prefilling)

    @property
    def next_happening_s(self) -> float:
        """The next arrival or end of a transfer, as far as is known; inf if there is none."""
        return min(self.happenings.next_s, self.arrivals.next_s)

    @property
    def next_move_s(self) -> float:
        """Earliest time at which this engine may do anything; inf if nothing is known to happen."""
        may_admit = self._has_advanced and self._waiting.has_first
        return self.now if self.is_busy or may_admit else max(self.now, self.next_happening_s)

    def _let_happen(self) -> None:
        self.happenings.run_until(self.now)
        for request in self.arrivals.take(self.now):
            self._waiting.add(request)

    def _idle(self) -> None:
        """Nothing runs that could take a step: let the time pass to the next event."""
        if self._has_advanced:
            self.end()
            self._has_advanced = False
        event = min(self.next_happening_s, self._horizon_s)
        assert event < math.inf, "nothing runs and nothing will happen"
        self._wait_until(event)

    def _wait_until(self, time_s: float) -> None:
        if time_s > self.now:
            self._timeline.pass_time(time_s - self.now)
            self.now = time_s

    # -- steps

    def _advance(self) -> None:
        """Take the next steps; while blocks lack, preempt, and take one step only."""
        self._has_advanced = True
        plan, before = self._plan(), self.manager.counts
        while not self._grow(plan):
            if self.host.link is not None and (self._on_the_way or self.host.writes):
                self._wait_for_blocks()  # else those who come back could drive out who is to make progress
            else:
                self._preempt(self._waiting.last_of([*self._decoding, *self._prefilling]))
            if not self.is_busy:
                self._wait_until(self.now + self._stall_s)
                self._stall_s = 0.0
                return
            plan, before = self._plan(1), self.manager.counts
        self._take(plan, before)

    def _plan(self, most: int = MOST_STEPS) -> Plan:
        """The next steps, as many alike as no event interrupts (``most`` at most). Changes nothing."""
        alone = self.config.prefill_first and self._prefilling
        decoding = [] if alone else self._decoding
        budget = self.config.token_budget - len(decoding) * self.config.tokens_per_decode
        chunks = self._planner.chunks(self._prefilling, budget)
        return self._planner.plan(self.now, decoding, chunks, event_s=self._next_event_s(), most=most)

    def _next_event_s(self) -> float:
        """Next moment that may change what runs, or at which the timeline is due."""
        event = min(self._timeline.next_s, self._horizon_s, self.happenings.next_s)
        # First come, first served: while somebody waits, nobody who comes can be admitted before.
        is_open = self.config.queue != "fcfs" or not self._waiting.has_first
        if is_open and not self._prefilling and len(self._running) < self.config.max_batch:
            event = min(event, self.arrivals.next_s)
        return event

    def _grow(self, plan: Plan) -> bool:
        """Make room for what the planned steps compute; False if there is none now."""
        num_tokens = self.config.tokens_per_decode if self.config.speculation else plan.steps.num_steps
        if isinstance(self.manager, HybridPool):
            chunks = {request: int(self.requests.computed[request]) + n for request, n in plan.chunks}
            grown = self.manager.grow(plan.decoding, num_tokens, chunks)
        else:
            grown = self.manager.step(plan.decoding, num_tokens)
        self._run_copies()
        return grown

    def _take(self, plan: Plan, before: BlockCounts) -> None:
        """Let the planned steps pass: tokens are computed and emitted, sequences finish.

        ``before`` are the counts before the sequences grew; they grow evenly over the steps.
        """
        ids, steps, waited_s = plan.ids, plan.steps, NO_TIMES
        if self._may_be_late:
            waited_s = self.now - self.requests.last_token_s[ids]
            waited_s = waited_s[waited_s > 0]
            steps = steps._replace(first_s=steps.first_s + self._stall_s, num_late=len(waited_s))
            self._stall_s = 0.0
        grown = steps.num_steps * steps.num_decoding * self.config.tokens_per_decode
        self.now += self._timeline.take(steps, waited_s, before, grown * groups_of(self.manager))
        for request, tokens in plan.chunks:
            self.requests.computed[request] += tokens * steps.num_steps
            if isinstance(self.manager, HybridPool):
                self._commit_known(request)
        if len(ids):
            self._emit(ids, self._verify(ids, self._guesses) if self._guesses else steps.num_steps)
        self._end_prefills(plan.num_ending)
        if self.keeper is not None:
            self._keep_budget(self.keeper, self._decoding)

    def _verify(self, ids: Contexts, guesses: Guesses) -> Contexts:
        """Keep the drafts that are right, and give up the slots of the others: tokens got, [n] int64."""
        got = guesses.tokens_of_step(ids, self.requests.generated[ids])
        keep = self.requests.contexts(ids) - 1 + got
        for request, num_tokens in zip(ids.tolist(), keep.tolist(), strict=True):
            self.manager.truncate(request, num_tokens)
        self.records.drafted_tokens += len(ids) * self.config.num_drafts
        self.records.accepted_tokens += int(got.sum()) - len(ids)
        return got

    def _emit(self, ids: Contexts, count: Contexts | int) -> None:
        """Every decoding sequence got ``count`` more tokens, one number or [n] int64."""
        self.requests.generated[ids] += count
        self.requests.computed[ids] += count
        self.requests.last_token_s[ids] = self.now
        if isinstance(self.manager, HybridPool):
            for request in ids[self.requests.has_full_block(ids, self.manager.block_size)].tolist():
                self._commit_known(request)  # which gives back what fell out of a window
        finished = self.requests.generated[ids] == self.requests.output_len[ids]
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
                self.records.resume_gaps_s.append(self.now - float(self.requests.last_token_s[request]))
            self.requests.generated[request] += 1
            self.requests.last_token_s[request] = self.now
            if self.requests.generated[request] == self.requests.output_len[request]:
                self._finish(request)
            else:
                self._begin_decoding(request)
        if count:
            self._waiting.reconsider()

    def _begin_decoding(self, request: int) -> None:
        self.requests.decodes[request] = True
        self._decoding.append(request)

    def _wait_for_blocks(self) -> None:
        """Stall the next step until everything that is on the way has come."""
        coming = list(self._on_the_way.values())
        ends = [one.done_s() for one in sorted(coming, key=lambda one: one.ready_s)]
        self._stall(max([*ends, *self.host.writes.values()]))
        for one in coming:
            one.arrive()
        self.host.end_writes()

    def _stall(self, until_s: float) -> None:
        more = max(0.0, until_s - self.now - self._stall_s)
        self._stall_s += more
        self.records.stall_s += more

    def _preempt(self, request: int) -> None:
        """Take a request's blocks; it computes again what is no longer cached, unless the host keeps it."""
        (self._decoding if request in self._decoding else self._prefilling).remove(request)
        self._commit_known(request)
        self._forget(request)
        if self.host.swapper is None or not self._swap_out(request, self.host.swapper):
            self.manager.close(request)
        self._running.remove(request)
        self._waiting.reconsider()
        self._waiting.add(request)
        self.records.num_preemptions += 1

    def _swap_out(self, request: int, swapper: Swapper) -> bool:
        done_s = swapper.swap_out(request, int(self.requests.computed[request]), self.now + self._stall_s)
        if done_s is None:
            return False
        self._stall(done_s)
        self.records.num_swapped_out += 1
        return True

    def _forget(self, request: int) -> None:
        """Drop what can be drawn again."""
        if self._guesses is not None:
            self._guesses.forget(request)
        if self.keeper is not None:
            self.keeper.forget(request)

    def _finish(self, request: int) -> None:
        self.manager.close(request)
        self._running.remove(request)
        self.trace.forget(request)
        self.records.finish_s[request] = self.now
        self.records.num_finished += 1
        self.arrivals.finished(request, self.now)
        self._forget(request)
        if self._on_progress is not None:
            self._on_progress(self.records.num_finished)
