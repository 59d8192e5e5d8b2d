"""The engine loop, against a slow engine that takes one token at a time, and by what must be conserved."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import NeverFits, PagedKVError
from pagedkv.manager import KVCacheManager, Opened
from pagedkv.sim.engine import Engine, EngineConfig
from pagedkv.sim.gpus import load_gpu
from pagedkv.sim.models import load_model
from pagedkv.sim.records import Records
from pagedkv.sim.replay import ReplaySetup, run_replay
from pagedkv.sim.report import replay_document, to_json
from pagedkv.sim.step_cost import span_s, steps_until
from pagedkv.sim.step_time import AttentionGroup, StepTimeModel
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long
from pagedkv.spec import KVCacheSpec, LayerSpec

Floats = npt.NDArray[np.float64]

# ---------------------------------------------------------------- the slow engine


@dataclass
class Request:
    """One request of the slow engine; tokens are counted one by one."""

    number: int
    arrival_s: float
    prompt: list[int]
    output: list[int]
    generated: int = 0
    computed: int = 0
    decoding: bool = False
    token_times: list[float] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return self.prompt + self.output[: self.generated]

    @property
    def left(self) -> int:
        return len(self.prompt) + self.generated - self.computed


class SlowEngine:
    """The same rules, one step at a time, with times worked out from the spec token by token.

    Serve first come, first served. A step decodes one token of every decoding sequence and spends the rest
    of the budget on prompts in order. When blocks lack, the youngest gives up all of its own.
    """

    def __init__(
        self,
        trace: Trace,
        manager: KVCacheManager,
        model: StepTimeModel,
        spec: KVCacheSpec,
        config: EngineConfig,
    ) -> None:
        self.manager, self.model, self.spec, self.config = manager, model, spec, config
        self.requests = [
            Request(i, float(trace.arrival_s[i]), trace.tokens(i).tolist(), trace.output_tokens(i).tolist())
            for i in range(len(trace))
        ]
        self.now, self.preemptions, self.peak, self.steps = 0.0, 0, 0, 0
        self.running: list[Request] = []  # in the order of admission
        self.decoding: list[Request] = []  # in the order in which prefills ended
        self.waiting = list(self.requests)

    def run(self) -> None:
        while self.waiting or self.running:
            self.admit()
            if self.running:
                self.step()
            else:
                self.now = max(self.now, self.waiting[0].arrival_s)

    def admit(self) -> None:
        while self.waiting and self.waiting[0].arrival_s <= self.now:
            request = self.waiting[0]
            unspent = self.config.token_budget - sum(1 if r.decoding else r.left for r in self.running)
            if unspent <= 0 or len(self.running) == self.config.max_batch:
                return
            opened = self.manager.open(request.number, request.known)
            if opened is None:
                return
            request.computed, request.decoding = opened.num_cached_tokens, False
            self.running.append(self.waiting.pop(0))

    def step(self) -> None:
        self.steps += 1
        while not self.manager.step([r.number for r in self.decoding]):
            self.preempt(self.running[-1])
        self.peak = max(self.peak, self.manager.counts.active)
        chunks, unspent = [], self.config.token_budget - len(self.decoding)
        for request in self.running:
            if not request.decoding and unspent > 0:
                chunks.append((request, min(unspent, request.left)))
                unspent -= chunks[-1][1]
        ended = [request for request, n in chunks if n == request.left]
        self.now += self.seconds(chunks, len(ended))
        for request, n in chunks:
            request.computed += n
        for request in list(self.decoding):
            request.computed += 1
            self.emit(request)
        for request in ended:
            self.commit(request)
            request.decoding = True
            self.decoding.append(request)
            self.emit(request)

    def seconds(self, chunks: list[tuple[Request, int]], num_ended: int) -> float:
        model, num_decoding = self.model, len(self.decoding)
        tokens = num_decoding + sum(n for _, n in chunks)
        flops = model.flops_per_token * tokens + model.flops_per_sample * (num_decoding + num_ended)
        weights = model.dense_weight_bytes
        weights += model.expert_weight_bytes * (1 - (1 - model.expert_share) ** tokens)
        kv_s = 0.0
        for layer in self.spec.layers:
            size, window = layer.bytes_per_token(self.spec.dtype), layer.window or 10**9
            for r, n in chunks:
                seen = [range(max(0, p + 1 - window), p + 1) for p in range(r.computed, r.computed + n)]
                flops += PREFILL_FLOPS * sum(map(len, seen))
                kv_s += size * len(set().union(*seen)) / model.kv_bytes_per_s
            per_token = max(size / model.kv_bytes_per_s, DECODE_FLOPS / model.flops_per_s)
            kv_s += sum(per_token * min(len(r.prompt) + r.generated, window) for r in self.decoding)
        return model.launch_s + max(flops / model.flops_per_s, weights / model.weight_bytes_per_s) + kv_s

    def emit(self, request: Request) -> None:
        request.generated += 1
        request.token_times.append(self.now)
        if request.generated == len(request.output):
            self.commit(request)
            self.leave(request)

    def preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.commit(request)
        self.leave(request)
        self.waiting.insert(0, request)

    def leave(self, request: Request) -> None:
        self.manager.close(request.number)
        self.running.remove(request)
        if request in self.decoding:
            self.decoding.remove(request)
        request.decoding = False

    def commit(self, request: Request) -> None:
        start = self.manager.num_committed(request.number)
        if self.manager.prefix_caching and start < request.computed:
            self.manager.commit(request.number, request.known[start : request.computed])

    @property
    def gaps(self) -> Floats:
        return np.sort(np.concatenate([[], *(np.diff(r.token_times) for r in self.requests)]))


# ---------------------------------------------------------------- watching the real one


class WatchedEngine(Engine):
    """The real engine, with the manager checked after each advance, and advances counted."""

    num_advances = 0

    def _advance(self) -> None:
        super()._advance()
        self.num_advances += 1
        self.manager.check_invariants()
        counts = self.manager.counts
        assert counts.free + counts.cached + counts.active == self.manager.num_blocks


class WatchedManager(KVCacheManager):
    """Writes down which sequence opened and closed when."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log: list[tuple[str, Any]] = []

    def open(self, seq_id: Any, tokens: Any, **options: Any) -> Opened | None:
        opened = super().open(seq_id, tokens, **options)
        if opened is not None:
            self.log.append(("open", seq_id))
        return opened

    def close(self, seq_id: Any) -> None:
        super().close(seq_id)
        self.log.append(("close", seq_id))


PREFILL_FLOPS, DECODE_FLOPS = 0.07, 0.9
"""Of one layer, per pair and per token: bytes bound decode attention at one rate, compute at another."""

FULL = KVCacheSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=8)
SLIDING = KVCacheSpec((LayerSpec(1, 8, window=5), LayerSpec(1, 8), LayerSpec(1, 8, window=17)))
ALL_SLIDING = KVCacheSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=8, window=9)


def model_of(spec: KVCacheSpec, bound: str) -> StepTimeModel:
    """Times of about a second a step, in which every part has a visible share."""
    return StepTimeModel(
        launch_s=0.137,
        weight_bytes_per_s=971.0,
        kv_bytes_per_s=2039.0,
        flops_per_s={"weights": 1e6, "compute": 31.0, "either": 173.0}[bound],
        dense_weight_bytes=211.0,
        expert_weight_bytes=331.0,
        expert_share=0.25,
        flops_per_token=7.0,
        flops_per_sample=3.0,
        groups=tuple(
            AttentionGroup(
                window,
                size,
                PREFILL_FLOPS * layers_with(spec, window),
                DECODE_FLOPS * layers_with(spec, window),
            )
            for window, size in spec.bytes_by_window
        ),
    )


def layers_with(spec: KVCacheSpec, window: int | None) -> int:
    return sum(layer.window == window for layer in spec.layers)


@dataclass(frozen=True)
class Case:
    """Everything that one comparison depends on."""

    trace: Trace
    spec: KVCacheSpec
    bound: str
    num_blocks: int
    block_size: int
    config: EngineConfig
    watermark: float
    prefix_caching: bool

    def manager(self) -> WatchedManager:
        return WatchedManager(
            self.num_blocks,
            self.block_size,
            max_seqs=self.config.max_batch,
            max_seq_len=int((self.trace.input_len + self.trace.output_len).max()),
            prefix_caching=self.prefix_caching,
            watermark=self.watermark,
        )

    def engine(self) -> WatchedEngine:
        return WatchedEngine(self.trace, self.manager(), model_of(self.spec, self.bound), self.config)

    def slow_engine(self) -> SlowEngine:
        model = model_of(self.spec, self.bound)
        return SlowEngine(self.trace, self.manager(), model, self.spec, self.config)


def shared_prefixes(rng: np.random.Generator, arrival: Floats, outputs: Sequence[int], longest: int) -> Trace:
    """Requests whose prompts branch off one another at random depths, content ids of 1 to 4 tokens."""
    size = int(rng.integers(1, 5))
    rows: list[list[int]] = []
    lengths, unused = [], 0
    for _ in outputs:
        length = int(rng.integers(1, longest + 1))
        kept: list[int] = []
        if rows and rng.random() < 0.7:
            parent = rows[int(rng.integers(len(rows)))]
            kept = parent[: int(rng.integers(0, min(len(parent), length // size) + 1))]
        num_ids = -(-length // size) if rng.random() < 0.5 else length // size
        new = range(unused, unused + max(0, num_ids - len(kept)))
        unused += len(new)
        rows.append((kept + list(new))[:num_ids])
        lengths.append(length)
    flat = [content for row in rows for content in row]
    offsets = np.cumsum([0, *map(len, rows)])
    return Trace("random", arrival, lengths, outputs, np.array(flat, np.int32), offsets, size, unused)  # type: ignore[arg-type]


def random_case(seed: int) -> Case:
    """A small case; what is tiny, bursty, shared or windowed changes from seed to seed."""
    rng = np.random.default_rng(seed)
    num = int(rng.choice([1, 2, 5, 12, 25]))
    spread = float(rng.choice([0.0, 1.0, 20.0, 300.0]))
    arrival = np.sort(rng.random(num) * spread)
    if rng.random() < 0.3:
        arrival = arrival[np.arange(num) // 3 * 3]  # in groups that arrive together
    longest_output = int(rng.choice([1, 2, 15, 60]))
    outputs = rng.integers(1, longest_output + 1, num).tolist()
    trace = shared_prefixes(rng, arrival, outputs, longest=int(rng.choice([3, 20, 60])))
    block_size = int(rng.choice([1, 2, 3, 4, 8, 16]))
    needed = int((-(-(trace.input_len + trace.output_len - 1) // block_size)).max())
    max_batch = int(rng.choice([1, 2, 4, 30]))
    budget = max_batch + int(rng.choice([0, 1, 3, 10, 200]))
    return Case(
        trace,
        spec=(FULL, SLIDING, ALL_SLIDING)[int(rng.integers(3))],
        bound=("weights", "compute", "either")[int(rng.integers(3))],
        num_blocks=needed + int(rng.choice([0, 0, 1, needed // 2, needed, 1000])),
        block_size=block_size,
        config=EngineConfig(max_batch, budget, interval_s=float(rng.choice([0.9, 7.3, 1e6]))),
        watermark=float(rng.choice([0.0, 0.01, 0.3])),
        prefix_caching=bool(rng.random() < 0.8),
    )


def expanded_gaps(records: Records) -> Floats:
    seconds, counts = records.gaps()
    return np.sort(np.repeat(seconds, counts))


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=0)


# ---------------------------------------------------------------- fast equals slow


@pytest.mark.parametrize("first_seed", range(0, 400, 40))
def test_jumping_over_tokens_gives_what_single_steps_give(first_seed: int) -> None:
    """Times to 1e-9, and every count exactly, over 40 random cases."""
    for seed in range(first_seed, first_seed + 40):
        case = random_case(seed)
        fast, slow = case.engine(), case.slow_engine()
        records = fast.run()
        slow.run()
        context = f"seed {seed}"
        assert records.num_preemptions == slow.preemptions, context
        assert fast.manager.stats() == slow.manager.stats(), context
        assert fast.manager.log == slow.manager.log, context  # type: ignore[attr-defined]
        assert records.occupancy.peak_active_blocks == slow.peak, context
        assert sum(s.num_steps for s in records.steps) == slow.steps, context
        np.testing.assert_allclose(
            records.first_token_s, [r.token_times[0] for r in slow.requests], rtol=1e-9, err_msg=context
        )
        np.testing.assert_allclose(
            records.finish_s, [r.token_times[-1] for r in slow.requests], rtol=1e-9, err_msg=context
        )
        np.testing.assert_allclose(expanded_gaps(records), slow.gaps, rtol=1e-9, err_msg=context)


def test_the_random_cases_reach_what_they_are_for() -> None:
    """Preemptions, hits, evictions, single tokens and jumps all occur among the seeds."""
    preempting = hitting = evicting = jumping = resumed = prefilling_jump = 0
    for seed in range(0, 400, 5):
        engine = random_case(seed).engine()
        records = engine.run()
        preempting += records.num_preemptions > 0
        resumed += len(records.resume_gaps_s) > 0
        hitting += engine.manager.stats().hit_blocks > 0
        evicting += engine.manager.stats().evicted_blocks > 0
        jumping += any(s.num_steps > 5 for s in records.steps)
        prefilling_jump += any(s.num_steps > 1 and s.num_prefill_tokens for s in records.steps)
    assert min(preempting, resumed, hitting, evicting, jumping, prefilling_jump) >= 4


def lengths_case(
    inputs: Sequence[int],
    outputs: Sequence[int],
    num_blocks: int,
    *,
    arrivals: Sequence[float] | None = None,
    config: EngineConfig | None = None,
    bound: str = "weights",
    spec: KVCacheSpec = FULL,
    block_size: int = 4,
    watermark: float = 0.0,
) -> Case:
    arrival = np.zeros(len(inputs)) if arrivals is None else np.array(arrivals)
    return Case(
        Trace.from_lengths(arrival, inputs, outputs),
        spec,
        bound,
        num_blocks,
        block_size,
        config or EngineConfig(interval_s=1e6),
        watermark,
        prefix_caching=True,
    )


def test_a_prompt_that_ends_exactly_with_its_budget_pays_for_its_first_token() -> None:
    """Three full chunks in a row: the last one goes through the output head, the others do not."""
    case = lengths_case([30], [1], num_blocks=20, config=EngineConfig(1, 10, interval_s=1e6), bound="compute")
    records, slow = case.engine().run(), case.slow_engine()
    slow.run()
    assert_close(records.first_token_s, [slow.requests[0].token_times[0]])


def test_a_lone_request_takes_the_sum_of_its_steps() -> None:
    """Prefill of 6 tokens and then contexts 7, 8 and 9, by hand: 64 bytes per token."""
    case = lengths_case([6], [4], num_blocks=3)
    records = case.engine().run()
    per_token = 2 * 2 * 8 * 2
    model = model_of(FULL, "weights")

    def seconds(tokens: int, read: int) -> float:
        weights = 211.0 + 331.0 * (1 - 0.75**tokens)
        return model.launch_s + weights / 971.0 + read * per_token / 2039.0

    first = seconds(6, 6)
    assert_close(records.first_token_s, [first])
    assert_close(records.finish_s, [first + seconds(1, 7) + seconds(1, 8) + seconds(1, 9)])


# ---------------------------------------------------------------- conservation and order


@pytest.mark.parametrize("seed", range(0, 400, 10))
def test_everything_is_served_and_nothing_is_lost(seed: int) -> None:
    """Tokens, gaps and blocks add up, at the end and in every sample."""
    case = random_case(seed)
    engine = case.engine()
    records, trace = engine.run(), case.trace
    assert records.num_finished == len(trace)
    assert np.isfinite(records.first_token_s).all()
    assert (records.first_token_s > trace.arrival_s).all()
    assert (records.finish_s >= records.first_token_s).all()
    prefill_ends = len(trace) + len(records.resume_gaps_s)
    decoded = sum(s.num_steps * s.num_decoding for s in records.steps)
    assert decoded + prefill_ends == trace.output_len.sum()
    assert records.gaps()[1].sum() == (trace.output_len - 1).sum()
    assert engine.manager.counts.active == 0
    for sample in records.samples:
        assert sample.free_blocks + sample.cached_blocks + sample.active_blocks == case.num_blocks
        assert 0 <= sample.used_slots <= sample.active_blocks * case.block_size
        assert sample.active_blocks <= records.occupancy.peak_active_blocks
        assert sample.num_running <= case.config.max_batch
    stats = engine.manager.stats()
    assert stats.num_opened == len(trace) + records.num_preemptions
    if not records.num_preemptions:
        computed = sum(s.num_steps * s.num_prefill_tokens for s in records.steps)
        assert computed == stats.queried_tokens - stats.hit_tokens
        assert stats.queried_tokens == trace.input_len.sum()


@pytest.mark.parametrize("seed", range(0, 400, 10))
def test_steps_follow_one_another_without_overlap(seed: int) -> None:
    """Each jump begins where the last one ended, or after an idle wait for an arrival."""
    case = random_case(seed)
    records = case.engine().run()
    end = 0.0
    for steps in records.steps:
        idle = steps.start_s > end * (1 + 1e-12)
        assert steps.start_s == pytest.approx(end, rel=1e-12) or idle
        if idle:
            assert steps.start_s in case.trace.arrival_s
        assert steps.num_decoding + steps.num_prefill_tokens <= case.config.token_budget
        end = steps.start_s + span_s(steps.num_steps, steps.first_s, steps.growth_s)
    assert_close(end, records.finish_s.max())


def test_the_timeline_is_in_order_and_has_one_row_a_moment() -> None:
    """Times strictly increase: a moment is not reported twice."""
    for seed in range(0, 400, 10):
        times = [s.time_s for s in random_case(seed).engine().run().samples]
        assert times == sorted(times)
        assert len(times) == len(set(times)), f"seed {seed} ends {times[-3:]}"


@pytest.mark.parametrize("seed", range(0, 400, 4))
def test_admission_is_first_come_first_served_and_the_preempted_come_back_first(seed: int) -> None:
    """Every open takes the earliest request that is neither open nor done; victims are the youngest."""
    case = random_case(seed)
    engine = case.engine()
    engine.run()
    running: set[int] = set()
    pending, generations = set(range(len(case.trace))), 0
    closes = [request for what, request in engine.manager.log if what == "close"]  # type: ignore[attr-defined]
    left = {request: closes.count(request) for request in pending}
    for what, request in engine.manager.log:  # type: ignore[attr-defined]
        if what == "open":
            assert request == min(pending)
            pending.remove(request)
            running.add(request)
            continue
        left[request] -= 1
        if left[request]:  # closed again later: this was a preemption
            assert request == max(running)
            generations += 1
            pending.add(request)
        running.remove(request)
    assert not pending
    assert generations == engine.records.num_preemptions


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.9])
@pytest.mark.parametrize("budget", [4, 7, 100])
def test_requests_that_each_fill_the_pool_alone_are_all_served(
    block_size: int, watermark: float, budget: int
) -> None:
    """Six requests of 40 tokens at most, and a pool for 40: no livelock, no lost request."""
    case = lengths_case(
        [1, 20, 37, 10, 40, 30],
        [40, 21, 4, 31, 1, 11],
        num_blocks=-(-40 // block_size),
        config=EngineConfig(max_batch=4, token_budget=budget, interval_s=1e6),
        block_size=block_size,
        watermark=watermark,
    )
    engine = case.engine()
    records = engine.run()
    assert records.num_finished == 6
    assert records.occupancy.peak_active_blocks == case.num_blocks
    # progress: no request is admitted more often than the others make tokens
    assert engine.manager.stats().num_opened <= sum([40, 21, 4, 31, 1, 11])


def test_the_last_token_takes_no_slot() -> None:
    """13 + 4 - 1 tokens fill four blocks of 4 exactly; one token more needs a fifth."""
    assert lengths_case([13], [4], num_blocks=4).engine().run().occupancy.peak_active_blocks == 4
    with pytest.raises(NeverFits, match="needs 5 blocks of 4 tokens, the pool has 4"):
        lengths_case([13], [5], num_blocks=4).engine()


def test_a_request_that_never_fits_is_refused_before_anything_runs() -> None:
    """The bad request is the last of three; none has been opened, and the message counts from 1."""
    trace = Trace.from_lengths([0.0, 1.0, 2.0], [4, 4, 90], [2, 2, 2])
    manager, heard = KVCacheManager(10, 4, max_seqs=8), list[int]()
    with pytest.raises(NeverFits, match=r"^request 3 of lengths needs 23 blocks"):
        Engine(trace, manager, model_of(FULL, "weights"), on_progress=heard.append).run()
    assert manager.stats().num_opened == 0
    assert manager.counts.free == 10
    assert heard == []


def test_progress_is_heard_once_per_request_in_order() -> None:
    """1, 2, ... up to the number of requests."""
    heard: list[int] = []
    case = lengths_case([5] * 7, [1, 9, 3, 3, 2, 1, 4], num_blocks=12)
    Engine(case.trace, case.manager(), model_of(FULL, "weights"), case.config, heard.append).run()
    assert heard == list(range(1, 8))


def test_a_resumed_request_finds_what_is_still_cached() -> None:
    """Two requests grow in a pool for one and a half: the younger one's prompt is a hit when it is back."""
    case = lengths_case([8, 8], [9, 9], num_blocks=6)
    engine = case.engine()
    records = engine.run()
    assert records.num_preemptions >= 1
    assert engine.manager.stats().hit_tokens >= 8
    assert len(records.resume_gaps_s) == records.num_preemptions


def test_without_prefix_caching_nothing_is_ever_cached() -> None:
    """Not even what a preempted request has computed."""
    for seed in range(60):
        case = random_case(seed)
        if not case.prefix_caching:
            engine = case.engine()
            assert {s.cached_blocks for s in engine.run().samples} == {0}
            assert engine.manager.stats().hit_tokens == 0


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    """A pause of an hour costs nothing; the second request starts when it arrives."""
    case = lengths_case([4, 4], [2, 2], num_blocks=8, arrivals=[5.0, 3605.0])
    records = case.engine().run()
    assert [s.start_s for s in records.steps if s.num_prefill_tokens] == [5.0, 3605.0]
    assert_close(records.first_token_s[1] - 3605.0, records.first_token_s[0] - 5.0)


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 0},
        {"max_batch": 9, "token_budget": 8},
        {"interval_s": 0.0},
        {"interval_s": -1.0},
        {"interval_s": float("nan")},
        {"interval_s": float("inf")},
        {"interval_s": 1e-9},
        {"interval_s": 1e12},
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    """Sizes below one, a budget below the batch, an interval that is no time."""
    with pytest.raises(PagedKVError, match="got"):
        EngineConfig(**options)


@pytest.mark.parametrize("interval", [1e-3, 1.0, 1e9])
def test_any_reasonable_interval_is_served(interval: float) -> None:
    """A sample at every step, or none but the last."""
    case = lengths_case([40], [20], num_blocks=20, config=EngineConfig(interval_s=interval))
    assert case.engine().run().num_finished == 1


# ---------------------------------------------------------------- the arithmetic of jumps

seconds_range = st.floats(0.0, 1e6)
first_range = st.floats(1e-3, 10.0)
growth_range = st.one_of(st.just(0.0), st.floats(1e-12, 1.0))


@settings(max_examples=500, deadline=None)
@given(seconds=seconds_range, first=first_range, growth=growth_range)
def test_steps_until_is_the_fewest_that_last_so_long(seconds: float, first: float, growth: float) -> None:
    """As many steps last the span, one fewer does not."""
    count = steps_until(seconds, first, growth)
    assert count >= 1
    if count > 1:
        assert span_s(count - 1, first, growth) < seconds
    # An even pace is divided, not settled: the quotient may be one rounding short of the sum.
    assert span_s(count, first, growth) >= seconds * (1 - 1e-15)


@settings(max_examples=500, deadline=None)
@given(count=st.integers(1, 100_000), first=first_range, growth=growth_range)
def test_steps_until_inverts_span(count: int, first: float, growth: float) -> None:
    """The span of n steps is reached after n steps, not after n + 1."""
    assert steps_until(span_s(count, first, growth), first, growth) == count


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 2000), first=first_range, growth=growth_range)
def test_span_is_the_sum_of_its_steps(count: int, first: float, growth: float) -> None:
    """Added one by one."""
    assert span_s(count, first, growth) == pytest.approx(
        sum(first + k * growth for k in range(count)), rel=1e-9
    )


# ---------------------------------------------------------------- cost and determinism


@pytest.mark.parametrize("spec", [FULL, SLIDING, ALL_SLIDING], ids=["full", "sliding", "all sliding"])
def test_ten_times_the_tokens_take_no_more_iterations(spec: KVCacheSpec) -> None:
    """The loop advances per event (a prefill, a completion, a full window), not per token."""
    outputs = [30, 45, 60, 75, 90]
    advances = []
    for factor in (1, 10, 100):
        case = lengths_case(
            [20] * 5,
            [n * factor for n in outputs],
            num_blocks=20_000,
            config=EngineConfig(interval_s=1e9),
            spec=spec,
        )
        engine = case.engine()
        records = engine.run()
        assert sum(s.num_steps for s in records.steps) == 90 * factor
        advances.append(engine.num_advances)
    assert advances[0] == advances[1] == advances[2]
    assert advances[0] <= 1 + len(outputs) + 2


def test_iterations_are_bounded_by_events_on_a_real_model() -> None:
    """Arrivals, prefill chunks, completions and samples: a small multiple, with 100,000s of tokens."""
    trace = chat_long(60, seed=3)
    model, gpu = load_model("llama-3.1-8b"), load_gpu("b200")
    manager = KVCacheManager(
        60_000, 16, max_seqs=256, max_seq_len=int((trace.input_len + trace.output_len).max())
    )
    engine = WatchedEngine(trace, manager, StepTimeModel.from_gpu(model, gpu), EngineConfig(interval_s=1e6))
    records = engine.run()
    chunks = int((trace.input_len // 2048 + 2).sum())
    assert engine.num_advances <= chunks + 3 * len(trace)
    assert sum(s.num_steps for s in records.steps) > 3 * engine.num_advances


def small_replay() -> str:
    setup = ReplaySetup(load_model("llama-3.1-8b"), load_gpu("h100"), num_blocks=9_000)
    return to_json(replay_document(run_replay(chat_long(80, seed=5), setup)))


def test_two_runs_give_the_same_bytes() -> None:
    """The same JSON document, byte for byte."""
    assert small_replay() == small_replay()


def test_other_processes_and_hash_seeds_give_the_same_bytes() -> None:
    """Nothing depends on the order of a set or on an address."""
    code = (
        "import hashlib, sys\n"
        "from pagedkv.sim.gpus import load_gpu\n"
        "from pagedkv.sim.models import load_model\n"
        "from pagedkv.sim.replay import ReplaySetup, run_replay\n"
        "from pagedkv.sim.report import replay_document, to_json\n"
        "from pagedkv.sim.workload import chat_long\n"
        "setup = ReplaySetup(load_model('llama-3.1-8b'), load_gpu('h100'), num_blocks=9_000)\n"
        "text = to_json(replay_document(run_replay(chat_long(80, seed=5), setup)))\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    found = set()
    for seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        found.add(done.stdout.strip())
    assert found == {hashlib.sha256(small_replay().encode()).hexdigest()}
