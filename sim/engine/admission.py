"""Who gets blocks: requests that come, wait, are opened, and are on their way from somewhere else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache, partial

import numpy as np

from pagedkv.block_tables import Int32Array
from pagedkv.opened import Opened
from pagedkv.sim.engine.arrivals import Arrivals
from pagedkv.sim.engine.engine_config import EngineConfig
from pagedkv.sim.engine.fitting import require_all_fit
from pagedkv.sim.engine.happenings import Happenings, OnTheWay
from pagedkv.sim.engine.host_side import HostSide
from pagedkv.sim.engine.host_tier import HostTier
from pagedkv.sim.engine.hybrid_pool import HybridPool
from pagedkv.sim.engine.kv_budget import BudgetKeeper
from pagedkv.sim.engine.pool import Pool, open_loaded, plain
from pagedkv.sim.engine.request_state import RequestState
from pagedkv.sim.engine.waiting import WaitingQueue
from pagedkv.sim.output.records import Records
from pagedkv.sim.requests import Requests
from pagedkv.sim.timing.step_time import StepTimeModel


class Admission:
    r"""The part of an engine that gives blocks to requests; time and steps are the other part.

    ::

                  _open            blocks are here            prompt is done
        _waiting ------> _on_the_way -------------> _prefilling -------------> _decoding
                     \_________________________________^                       ^
                        (nothing to fetch)    (came back with its output) _____/

    ``_running`` are all that have blocks.
    """

    def __init__(
        self,
        trace: Requests,
        manager: Pool,
        step_time: StepTimeModel,
        config: EngineConfig | None = None,
    ) -> None:
        """Start at time 0 with nobody; raises ``NeverFits`` if one request alone exceeds the pool."""
        self.trace, self.manager, self.step_time = trace, manager, step_time
        self.config = config or EngineConfig()
        self.records = Records(len(trace))
        self.requests = RequestState(trace)
        self.arrivals = Arrivals(trace)
        self.records.arrival_s = self.arrivals.arrival_s
        self.now = 0.0
        self.host = HostSide(manager, self.config, step_time)
        self.keeper: BudgetKeeper | None = None
        if self.config.kv_budget is not None:
            budgeted = plain(manager, "budget of tokens")
            self.keeper = BudgetKeeper(self.config.kv_budget, budgeted, self.config.tokens_per_decode)
        # a hybrid pool gives back what fell out of a window when it is told the tokens
        self._tells = manager.prefix_caching or self.keeper is not None or isinstance(manager, HybridPool)
        self._waiting = WaitingQueue(self.config.queue, trace, self.arrivals.arrival_s.item)
        self._prefilling: deque[int] = deque()
        self._decoding: list[int] = []
        self._running: list[int] = []  # whoever has blocks, in the order of admission
        self._on_the_way: dict[int, OnTheWay] = {}  # running, but their blocks are being filled
        self.happenings = Happenings()
        self._stall_s = 0.0  # of the next step, for copies that it has to wait for
        require_all_fit(trace, manager, self.config)

    def _admit(self) -> None:
        """Open waiting requests in order while the batch, the budget of a step and the pool have room."""
        if not self._waiting.has_first:
            return
        budget = self.config.token_budget - len(self._decoding) * self._per_decode
        budget -= sum(map(self.requests.left_to_prefill, self._prefilling))
        budget -= sum(map(self._claim, self._on_the_way))
        while self._waiting.has_first and budget > 0 and len(self._running) < self.config.max_batch:
            request = self._waiting.first
            if self.config.coalesce and self._is_coming(request):
                self._waiting.set_aside()
                self.records.num_coalesced += 1
                continue
            if not self._open(request):
                return
            self._waiting.take()
            self._running.append(request)
            budget -= self._claim(request)

    def _claim(self, request: int) -> int:
        """Tokens of who was just admitted, or is on the way, that the next steps will compute."""
        return self._per_decode if self.requests.decodes[request] else self.requests.left_to_prefill(request)

    @property
    def _per_decode(self) -> int:
        return 0 if self.config.prefill_first else self.config.tokens_per_decode

    def _is_coming(self, request: int) -> bool:
        """Whether a running prefill is about to make a hit of more than what is cached now."""
        if request in self.host:
            return False
        known = self.requests.tokens(request, 0, self.requests.known(request))
        return self.manager.lookup(known).num_coming_tokens > 0

    def _open(self, request: int) -> bool:
        """Give a waiting request its blocks, and let it prefill; False if there is no room now."""
        if request in self.host:
            return self._swap_in(request)
        tokens = self.requests.tokens(request, 0, self.requests.known(request))
        opened = open_loaded(
            self.manager,
            request,
            tokens,
            self._num_loadable(tokens),
            announce=self.config.coalesce,
            partial_hits=self.config.partial_hits,
        )
        if opened is None:
            return False
        self._note_hit(request, opened)
        if self.host.tier is None or not self._load(request, tokens, self.host.tier):
            self._prefilling.append(request)
        return True

    def _num_loadable(self, tokens: Int32Array) -> int:
        """First tokens that the host has, if that says what a prompt takes room for."""
        if self.host.tier is None or not isinstance(self.manager, HybridPool):
            return 0
        return self.host.tier.find(tokens)

    def _load(self, request: int, tokens: Int32Array, tier: HostTier) -> bool:
        """Let the host fill the first blocks of an opened prompt, if it has more than were a hit."""
        loaded = tier.load(request, tokens, int(self.requests.computed[request]), self.now)
        if loaded is None:
            return False

        def commit() -> None:
            tier.loaded(request)
            self._commit_known(request)
            self._waiting.reconsider()

        self.requests.computed[request] = loaded.num_tokens
        if loaded.ready_s <= self.now:
            self._expect(request, tier.send(request, self.now), commit)
        else:
            self._expect_later(request, loaded.ready_s, partial(tier.send, request), commit)
        return True

    def _note_hit(self, request: int, opened: Opened) -> None:
        self._run_copies()
        cached, requests = opened.num_cached_tokens, self.requests
        requests.computed[request] = requests.committed[request] = cached
        requests.decodes[request], requests.dropped[request] = False, 0
        if not requests.was_admitted[request]:
            requests.was_admitted[request] = True
            self.records.hit_tokens += cached
            self.records.partial_hit_tokens += cached % self.manager.block_size

    def _swap_in(self, request: int) -> bool:
        swapper = self.host.swapper
        assert swapper is not None
        back = swapper.swap_in(request, self.now)
        if back is None:
            return False
        self._expect(request, back.done_s, partial(swapper.space.done, back.transfer))
        return True

    def _expect(self, request: int, done_s: float, then: Callable[[], None]) -> None:
        """Let an admitted request go on when its blocks have come."""
        arrive = partial(self._arrive, request, then)
        self._on_the_way[request] = OnTheWay(self.now, lambda: done_s, arrive)
        self.happenings.at(done_s, arrive)

    def _expect_later(
        self, request: int, ready_s: float, send: Callable[[float], float], then: Callable[[], None]
    ) -> None:
        """As ``_expect``, over a link on which the transfer begins when it is ready."""
        done_s = cache(partial(send, ready_s))
        arrive = partial(self._arrive, request, then)

        def begin() -> None:
            if request in self._on_the_way:
                self.happenings.at(done_s(), arrive)

        self._on_the_way[request] = OnTheWay(ready_s, done_s, arrive)
        self.happenings.at(ready_s, begin)

    def _arrive(self, request: int, then: Callable[[], None]) -> None:
        """Let a request that is on the way run; does nothing the second time."""
        if self._on_the_way.pop(request, None) is not None:
            then()
            (self._decoding if self.requests.decodes[request] else self._prefilling).append(request)

    def _run_copies(self) -> None:
        if len(self.manager.copies):
            self.manager.copies.take()

    def _commit_known(self, request: int) -> None:
        """Commit what is computed and not committed yet."""
        start, stop = int(self.requests.committed[request]), int(self.requests.computed[request])
        is_prefix = self.manager.prefix_caching and not self.requests.dropped[request]
        if self._tells and start < stop:
            self.manager.commit(request, self.requests.tokens(request, start, stop))
            self.requests.committed[request] = stop
            if self.host.tier is not None and is_prefix:
                tokens = self.requests.tokens(request, 0, stop)
                self.host.write(request, tokens, start, self.now + self._stall_s, self.happenings)

    def _keep_budget(self, keeper: BudgetKeeper, requests: list[int]) -> None:
        """Let those that decode drop what their next step has no room for in the budget."""
        excess = keeper.excess(self.requests.contexts(np.array(requests, np.int64)) - 1)
        for place in np.flatnonzero(excess).tolist():
            request = requests[place]
            self._commit_known(request)
            self.requests.dropped[request] += keeper.drop(request, int(excess[place]))
