"""Prefill and decode on two devices with a pool each, and the KV of prompts sent over a link between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pagedkv.errors import require_count
from pagedkv.sim.engine.arrivals import Arrivals
from pagedkv.sim.engine.engine import Engine
from pagedkv.sim.engine.engine_config import EngineConfig
from pagedkv.sim.engine.link import Link, LinkSpeed
from pagedkv.sim.engine.pool import Pool, blocks_between, open_loaded
from pagedkv.sim.engine.waiting import WaitingQueue
from pagedkv.sim.output.records import Records, Sample
from pagedkv.sim.requests import Requests
from pagedkv.sim.timing.step_time import StepTimeModel


@dataclass(frozen=True)
class TransferSettings:
    """The link from the pool of the prefills to that of the decodes, and the bytes of a block on it."""

    link: LinkSpeed
    bytes_per_block: int

    def __post_init__(self) -> None:
        """Check the bytes."""
        require_count("bytes_per_block", self.bytes_per_block, 1)


class PrefillEngine(Engine):
    """Computes prompts and their first tokens. A prompt keeps its blocks until they have been fetched.

    A hybrid pool gives a prompt its blocks chunk by chunk, so one may lack some that those hold which are
    done: it is preempted then, and nobody is admitted before one of these is fetched.
    """

    hand_over: Callable[[int], None]
    """Hears of each prompt that is done and has output to come."""

    _waits_for_release = False

    def release(self, request: int, time_s: float) -> None:
        """Let the request's blocks go at a time."""
        self.happenings.at(time_s, partial(self._release, request))

    def drain(self) -> None:
        """Let all blocks go that were to go."""
        while self.happenings.next_s < math.inf:
            self._wait_until(self.happenings.next_s)
            self.happenings.run_until(self.now)

    @property
    def next_move_s(self) -> float:
        """As of any engine; nobody is admitted while blocks are to be fetched."""
        if self.is_busy or not self._waits_for_release:
            return super().next_move_s
        return max(self.now, self.next_happening_s)

    def _admit(self) -> None:
        if not self._waits_for_release:
            super()._admit()

    def _preempt(self, request: int) -> None:
        super()._preempt(request)
        self._waits_for_release = len(self._running) > len(self._prefilling)

    def _release(self, request: int) -> None:
        self.manager.close(request)
        self._running.remove(request)
        self._waits_for_release = False

    def _begin_decoding(self, request: int) -> None:
        self.hand_over(request)


class DecodeEngine(Engine):
    """Decodes what was prefilled elsewhere. Who is admitted takes blocks, and fetches what was no hit.

    What is preempted here computes its prompt again here.
    """

    def __init__(
        self,
        trace: Requests,
        manager: Pool,
        step_time: StepTimeModel,
        config: EngineConfig,
        prefill: PrefillEngine,
        transfer: TransferSettings,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Nobody comes but from ``prefill``."""
        super().__init__(trace, manager, step_time, config, on_progress)
        self.arrivals = Arrivals(trace, expected=False)
        self.records.arrival_s = prefill.arrivals.arrival_s
        self._waiting = WaitingQueue(self.config.queue, trace, prefill.arrivals.arrival_s.item)
        self.link = Link(transfer.link)
        self._bytes_per_block = transfer.bytes_per_block
        self._prefill = prefill
        self._may_be_late = True  # everybody waits for a transfer
        self._elsewhere: set[int] = set()
        self.num_fetched_blocks = 0
        prefill.hand_over = self.receive

    def receive(self, request: int) -> None:
        """Take over a request whose prompt and first token the other engine has just computed."""
        now_s = self._prefill.now
        self._elsewhere.add(request)
        self.arrivals.add(request, now_s)
        self.requests.generated[request] = 1
        self.requests.last_token_s[request] = self.records.first_token_s[request] = now_s

    def _open(self, request: int) -> bool:
        return self._fetch(request) if request in self._elsewhere else super()._open(request)

    def _fetch(self, request: int) -> bool:
        """Take blocks for the prompt, and let the link fill those that were not a hit."""
        num_tokens = int(self.trace.input_len[request])
        prompt = self.requests.tokens(request, 0, num_tokens)
        opened = open_loaded(
            self.manager,
            request,
            prompt,
            num_tokens,
            max_cached_tokens=num_tokens,
            announce=self.config.coalesce,
            partial_hits=self.config.partial_hits,
        )
        if opened is None:
            return False
        self._elsewhere.remove(request)
        self._note_hit(request, opened)
        self.requests.computed[request] = num_tokens
        self.requests.decodes[request] = True
        missing = blocks_between(self.manager, request, opened.num_cached_tokens, num_tokens)
        self.num_fetched_blocks += missing
        done_s = self.link.begin(self.now, missing * self._bytes_per_block)
        self.records.transfer_s.append(done_s - self.now)
        self._prefill.release(request, done_s)
        self._expect(request, done_s, partial(self._fetched, request))
        return True

    def _fetched(self, request: int) -> None:
        self._commit_known(request)
        if self.keeper is not None:
            self._keep_budget(self.keeper, [request])
        self._waiting.reconsider()

    def _finish(self, request: int) -> None:
        super()._finish(request)
        self._prefill.arrivals.finished(request, self.now)


class Disaggregated:
    """Two engines whose clocks run together: no one takes a step that the other could still influence."""

    def __init__(
        self,
        trace: Requests,
        managers: tuple[Pool, Pool],
        step_time: StepTimeModel,
        config: EngineConfig,
        transfer: TransferSettings,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """``managers`` of the prefills and of the decodes; both devices have the same ``step_time``."""
        self._num_requests = len(trace)
        self._num_finished = 0
        self.num_hit_tokens_not_sent = 0
        self._on_progress = on_progress
        # a prompt of a hybrid pool alone can be preempted there, see PrefillEngine
        alone = replace(config, swap=None)
        self.prefill = PrefillEngine(trace, managers[0], step_time, alone, self._finished)
        there = replace(config, host_tier=None, disk_tier=None)
        self.decode = DecodeEngine(
            trace, managers[1], step_time, there, self.prefill, transfer, self._finished
        )

    def run(self) -> Records:
        """Serve every request: what the decoding engine wrote down, with what the other one knows better.

        First tokens, hits and requests of a single token are those of the prefills. Both have one end.
        """
        prefill, decode = self.prefill, self.decode
        while self._num_finished < self._num_requests:
            prefill_s, decode_s = prefill.next_move_s, decode.next_move_s
            if prefill_s <= decode_s:
                prefill.tick(decode_s)
            else:
                decode.tick(prefill_s)
        prefill.drain()
        end_s = max(prefill.now, decode.now)
        prefill.end(end_s)
        decode.end(end_s)
        records, other = decode.records, prefill.records
        records.samples = _with_hits_of(other.samples, records.samples)
        self.num_hit_tokens_not_sent = records.hit_tokens
        records.hit_tokens, records.partial_hit_tokens = other.hit_tokens, other.partial_hit_tokens
        records.first_token_s = other.first_token_s
        records.finish_s = np.where(np.isnan(records.finish_s), other.finish_s, records.finish_s)
        return records

    def _finished(self, _: int) -> None:
        self._num_finished += 1
        if self._on_progress is not None:
            self._on_progress(self._num_finished)


def _with_hits_of(prefill: list[Sample], decode: list[Sample]) -> list[Sample]:
    """The samples of the decodes, with the prompts that the prefills had looked up by then.

    These go on to the same end, and begin no later.
    """
    begun = np.searchsorted([s.time_s for s in prefill], [s.time_s for s in decode], side="right")
    return [
        sample._replace(queried_tokens=there.queried_tokens, hit_tokens=there.hit_tokens)
        for sample, there in zip(decode, (prefill[i - 1] for i in begun.tolist()), strict=True)
    ]
