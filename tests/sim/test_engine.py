"""The engine loop, against a slow engine that takes one token at a time, and by what must be conserved."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import NeverFits, PagedKVError
from pagedkv.events import BlocksRemoved, BlocksStored
from pagedkv.manager import KVCacheManager
from pagedkv.opened import Opened
from pagedkv.sim.engine.disaggregation import Disaggregated, TransferSettings
from pagedkv.sim.engine.disk_tier import DiskTierSettings
from pagedkv.sim.engine.engine import Engine, EngineConfig
from pagedkv.sim.engine.host_tier import HostTierSettings
from pagedkv.sim.engine.hybrid_pool import HybridPool
from pagedkv.sim.engine.kv_budget import RULES, KVBudget
from pagedkv.sim.engine.link import LinkSpeed
from pagedkv.sim.engine.speculation import Speculation
from pagedkv.sim.engine.swapping import SwapSettings
from pagedkv.sim.engine.waiting import QUEUES
from pagedkv.sim.output.records import Records
from pagedkv.sim.output.report import replay_document, to_json
from pagedkv.sim.replay import ReplaySetup, run_replay
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.timing.roofline import Roofline
from pagedkv.sim.timing.step_cost import span_s, steps_until
from pagedkv.sim.timing.step_time import AttentionGroup, StepTimeModel
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long
from pagedkv.spec import KVCacheSpec, LayerSpec
from pagedkv.swap import SwapSpace

Floats = npt.NDArray[np.float64]

# ---------------------------------------------------------------- the slow engine


@dataclass
class Request:
    """One request of the slow engine; tokens are counted one by one."""

    number: int
    arrival_s: float
    prompt: list[int]
    output: list[int]
    rank: float = 0.0
    after: Request | None = None
    think_s: float = 0.0
    seat: int | None = None
    generated: int = 0
    computed: int = 0
    committed: int = 0
    blocks: list[int] = field(default_factory=list)  # of its context, those that it has not dropped
    dropped: int = 0
    decoding: bool = False
    coming: bool = False
    token_times: list[float] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return self.prompt + self.output[: self.generated]

    @property
    def left(self) -> int:
        return len(self.prompt) + self.generated - self.computed

    @property
    def key(self) -> tuple[float, int]:
        assert self.seat is not None
        return self.rank, self.seat

    @property
    def comes_s(self) -> float:
        """When it comes; never, as far as is known, while the turn before it is not done."""
        if self.after is None:
            return self.arrival_s
        if self.after.generated < len(self.after.output):
            return math.inf
        return max(self.arrival_s, self.after.token_times[-1] + self.think_s)


class SlowEngine:
    """The same rules, one step at a time, with times worked out from the spec token by token.

    Serve in the order of the queue. A step decodes one token of every decoding sequence, or verifies
    1 + k, and spends the rest of the budget on prompts in order. When blocks lack, the last in the order
    gives up all of its own.
    """

    def __init__(
        self,
        trace: Trace,
        manager: Any,
        model: Roofline,
        spec: KVCacheSpec,
        config: EngineConfig,
    ) -> None:
        self.manager, self.model, self.spec, self.config = manager, model, spec, config
        self.requests = [
            Request(i, float(trace.arrival_s[i]), trace.tokens(i).tolist(), trace.output_tokens(i).tolist())
            for i in range(len(trace))
        ]
        for request, priority, deadline_s, session, think_s in zip(
            self.requests, trace.priority, trace.deadline_s, trace.session, trace.think_s, strict=True
        ):
            before = [r for r in self.requests[: request.number] if trace.session[r.number] == session >= 0]
            if before and not math.isnan(think_s):
                request.after, request.think_s = before[-1], float(think_s)
            request.rank = {
                "fcfs": 0.0,
                "priority": float(priority),
                "shortest": float(len(request.prompt)),
                "deadline": float(deadline_s),
            }[config.queue]
        self.now, self.preemptions, self.peak, self.steps = 0.0, 0, 0, 0
        self.hit_tokens = self.accepted = self.drafted = self.dropped_blocks = 0
        self.running: list[Request] = []  # in the order of admission
        self.decoding: list[Request] = []  # in the order in which prefills ended
        self.waiting: list[Request] = []
        self.expected = list(self.requests)
        self.link_free_s = self.link_bytes = self.stall = self.stall_s = 0.0
        self.coming: list[tuple[float, Request, Callable[[], None]]] = []
        self.seen: list[Request] = []  # who has been admitted before
        if config.swap is not None:
            hosted = config.swap.num_host_blocks
            hybrid = isinstance(manager, HybridPool)
            self.space = manager.swap_space(hosted) if hybrid else SwapSpace(manager, hosted)
        self.tier: KVCacheManager | None = None
        self.stored = self.loaded = 0
        self.writes: list[tuple[float, int]] = []
        if config.host_tier is not None:
            size = manager.block_size
            self.tier = KVCacheManager(config.host_tier.num_blocks, size, max_seqs=config.max_batch + 1)
        self.disk: KVCacheManager | None = None
        self.disk_free_s = 0.0
        self.read = self.written = 0
        self.reading: list[tuple[float, Request, Callable[[], None]]] = []
        self.paths: dict[bytes | None, tuple[int, ...]] = {None: ()}  # of what is on the host, by digest
        if config.disk_tier is not None and self.tier is not None:
            self.disk = KVCacheManager(config.disk_tier.num_blocks, size, max_seqs=config.max_batch + 1)
            self.tier.events.record()

    @property
    def k(self) -> int:
        return self.config.speculation.num_drafts if self.config.speculation else 0

    @property
    def ready(self) -> list[Request]:
        return [r for r in self.running if not r.coming]

    def run(self) -> None:
        while self.expected or self.waiting or self.running:
            self.turn()
        self.end_writes(math.inf)

    @property
    def moment(self) -> float:
        """When it will do something; never, if nothing is known to happen."""
        if self.ready or (self.waiting and self.has_stepped):
            return self.now
        return max(self.now, min([math.inf, *self.events]))

    has_stepped = False

    @property
    def events(self) -> list[float]:
        known = [r.comes_s for r in self.expected] + [done_s for done_s, _, _ in self.coming]
        return known + [done_s for done_s, _ in self.writes] + [item[0] for item in self.reading]

    def end_writes(self, now_s: float) -> None:
        for done_s, pin in list(self.writes):
            if done_s <= now_s:
                self.writes.remove((done_s, pin))
                self.manager.retention.unpin(pin)

    def turn(self, horizon_s: float = math.inf) -> None:
        self.receive()
        self.admit()
        self.has_stepped = bool(self.ready)
        if self.ready:
            self.step()
        else:
            then = min([horizon_s, *self.events])
            if then > self.now:
                self.now, self.peak = then, max(self.peak, self.manager.counts.active)

    def receive(self) -> None:
        """Who has come by now takes a seat; who is back from the host runs."""
        while due := [item for item in [*self.coming, *self.reading] if item[0] <= self.now]:
            item = min(due, key=lambda item: item[0])
            self.end_writes(item[0])
            if item in self.reading:
                self.send(item)
            else:
                self.is_back(item)
        self.end_writes(self.now)
        for request in sorted(self.expected, key=lambda r: (r.comes_s, r.number)):
            if request.comes_s <= self.now:
                request.seat = len(self.requests) - len(self.expected)
                if self.config.queue == "deadline":
                    request.rank += request.comes_s
                self.expected.remove(request)
                self.waiting.append(request)

    def is_back(self, item: tuple[float, Request, Callable[[], None]]) -> None:
        self.coming.remove(item)
        item[2]()
        item[1].coming = False
        if item[1].decoding:
            self.decoding.append(item[1])
        else:  # prompts are computed in the order in which they could be
            self.running.remove(item[1])
            self.running.append(item[1])

    def claim(self, request: Request) -> int:
        if request.decoding:
            return 0 if self.config.prefill_first else 1 + self.k
        return request.left

    def admit(self) -> None:
        for request in sorted(self.waiting, key=lambda r: r.key):
            unspent = self.config.token_budget - sum(map(self.claim, self.running))
            if unspent <= 0 or len(self.running) == self.config.max_batch:
                return
            is_swapped = self.config.swap is not None and request.number in self.space
            if self.config.coalesce and not is_swapped and self.is_coming(request):
                continue
            if not (self.swap_in(request) if is_swapped else self.open(request)):
                return
            self.running.append(request)
            self.waiting.remove(request)

    def is_coming(self, request: Request) -> bool:
        return bool(self.manager.lookup(request.known).num_coming_tokens > 0)

    def swap_in(self, request: Request) -> bool:
        back = self.space.swap_in(request.number)
        if back is None:
            return False
        request.coming = True
        done_s = self.over_link(len(back.copies.src))
        self.coming.append((done_s, request, partial(self.space.done, back.transfer)))
        return True

    def open(self, request: Request) -> bool:
        opened = self.manager.open(
            request.number,
            request.known,
            announce=self.config.coalesce,
            partial_hits=self.config.partial_hits,
        )
        if opened is None:
            return False
        self.note_hit(request, opened.num_cached_tokens)
        request.computed, request.decoding = opened.num_cached_tokens, False
        request.dropped, request.blocks = 0, []
        if self.tier is not None:
            self.load(request, self.tier)
        return True

    def load(self, request: Request, tier: KVCacheManager) -> None:
        """The host fills the first blocks of a prompt, if it has more of them than were a hit."""
        known = request.known[: tier.max_seq_len]
        found, on_disk = tier.lookup(known).num_cached_tokens, 0
        if self.disk is not None:
            on_disk = self.disk.lookup(known[: self.disk.max_seq_len]).num_cached_tokens
        missing: list[int] = []
        if on_disk > max(found, request.computed) and tier.open(
            request.number, known[:on_disk], max_cached_tokens=on_disk
        ):
            missing, found = known[found:on_disk], on_disk
        elif found <= request.computed:
            return
        else:
            assert tier.open(request.number, known[:found], max_cached_tokens=found)
        blocks = found // tier.block_size - request.computed // tier.block_size
        request.computed, request.coming, self.loaded = found, True, self.loaded + blocks

        def commit() -> None:
            if self.disk is not None and missing:
                self.disk.close(request.number)
                tier.commit(request.number, missing)
            tier.close(request.number)
            self.commit(request)

        if not missing:
            self.coming.append((self.over_link(blocks), request, commit))
            return
        assert self.disk is not None and self.config.disk_tier is not None
        assert self.disk.open(request.number, known[:found], max_cached_tokens=found)
        num_read = len(missing) // tier.block_size
        self.read += num_read
        ready_s = self.on_disk(num_read, self.config.disk_tier.read)

        def send() -> None:
            self.coming.append((self.over_link(blocks, ready_s), request, commit))

        self.reading.append((ready_s, request, send))
        self.demote(tier)

    def send(self, item: tuple[float, Request, Callable[[], None]]) -> None:
        """What was read from the disk goes over the link."""
        self.reading.remove(item)
        item[2]()

    def on_disk(self, blocks: int, speed: LinkSpeed) -> float:
        """When so many blocks are read or written; one transfer after the other."""
        assert self.config.disk_tier is not None
        if not blocks:
            return self.now + self.stall
        begin = max(self.now + self.stall, self.disk_free_s)
        num_bytes = blocks * self.config.disk_tier.bytes_per_block
        self.disk_free_s = begin + speed.latency_s + num_bytes / speed.bytes_per_s
        return self.disk_free_s

    def demote(self, tier: KVCacheManager) -> None:
        """Write to the disk the prefixes that ended in blocks which the host has just evicted."""
        if self.disk is None or self.config.disk_tier is None:
            return
        for event in tier.events.take():
            if isinstance(event, BlocksStored):
                path = self.paths[event.parent]
                for digest, tokens in zip(event.digests, event.tokens.tolist(), strict=True):
                    path += tuple(tokens)
                    self.paths[digest] = path
            elif isinstance(event, BlocksRemoved):
                ended: list[tuple[int, ...]] = []
                for path in map(self.paths.pop, event.digests):
                    if any(longer[: len(path)] == path for longer in ended):
                        continue
                    ended.append(path)
                    path = path[: self.disk.max_seq_len]
                    opened = self.disk.open("writing", path, max_cached_tokens=len(path))
                    if opened is None:
                        continue
                    self.disk.commit("writing", path[opened.num_cached_tokens :])
                    self.disk.close("writing")
                    blocks = (len(path) - opened.num_cached_tokens) // tier.block_size
                    self.written += blocks
                    self.on_disk(blocks, self.config.disk_tier.write)

    def write(self, request: Request, tier: KVCacheManager) -> None:
        """Full blocks that the host does not have are written there, and stay until they are."""
        full = min(request.committed // tier.block_size * tier.block_size, tier.max_seq_len)
        if not full:
            return
        opened = tier.open("writing", request.known[:full], max_cached_tokens=full)
        if opened is None:
            return
        tier.commit("writing", request.known[opened.num_cached_tokens : full])
        tier.close("writing")
        self.demote(tier)
        blocks = (full - opened.num_cached_tokens) // tier.block_size
        if blocks:
            self.stored += blocks
            self.writes.append((self.over_link(blocks), self.manager.retention.pin(request.number)))

    def note_hit(self, request: Request, num_cached: int) -> None:
        self.manager.copies.take()
        request.committed = num_cached
        if request not in self.seen:
            self.seen.append(request)
            self.hit_tokens += num_cached

    def over_link(self, blocks: int, ready_s: float | None = None) -> float:
        """When so many blocks are on the other side; one transfer after the other."""
        host = self.config.swap or self.config.host_tier
        assert host is not None
        if not blocks:
            return self.now + self.stall
        link, num_bytes = host.link, blocks * host.bytes_per_block
        begin = max(self.now + self.stall if ready_s is None else ready_s, self.link_free_s)
        self.link_free_s = begin + link.latency_s + num_bytes / link.bytes_per_s
        self.link_bytes += num_bytes
        return self.link_free_s

    def step(self) -> None:
        self.stall = 0.0
        while not self.make_room():
            uses_host = self.config.swap is not None or self.tier is not None
            if uses_host and (self.coming or self.writes or self.reading):
                for reading in sorted(self.reading, key=lambda item: item[0]):
                    self.send(reading)
                ends = [item[0] for item in self.coming] + [done_s for done_s, _ in self.writes]
                self.stall = max(self.stall, max(ends) - self.now)
                for item in sorted(self.coming, key=lambda item: self.running.index(item[1])):
                    self.is_back(item)
                self.end_writes(math.inf)
            else:
                self.preempt(max(self.ready, key=lambda r: r.key))
            if not self.ready:
                self.now, self.stall_s = self.now + self.stall, self.stall_s + self.stall
                return
        self.manager.copies.take()
        self.steps += 1
        decoding = self.next_decoding
        self.peak = max(self.peak, self.manager.counts.active)
        chunks = self.chunks(decoding)
        ended = [request for request, n in chunks if n == request.left]
        self.now += self.stall + self.seconds(decoding, chunks, len(ended))
        self.stall_s, self.stall = self.stall_s + self.stall, 0.0
        for request, n in chunks:
            request.computed += n
            if isinstance(self.manager, HybridPool):
                self.commit(request)
        for request in decoding:
            got = self.verified(request)
            for _ in range(got):
                request.computed += 1
                self.emit(request)
            if self.k and request in self.running:
                self.manager.truncate(request.number, request.computed - request.dropped)
        if isinstance(self.manager, HybridPool):
            for request in decoding:
                if request.computed // self.manager.block_size > request.committed // self.manager.block_size:
                    self.commit(request)
        for request in decoding:
            if request.generated == len(request.output):
                self.commit(request)
                self.leave(request)
        for request in ended:
            self.commit(request)
            self.emit(request)
            if request.generated == len(request.output):
                self.leave(request)
            else:
                self.begin(request)
        for request in self.decoding:
            self.keep_budget(request)

    def keep_budget(self, request: Request) -> None:
        """Drop blocks one by one until the next step has room in the budget."""
        budget, size = self.config.kv_budget, self.manager.block_size
        if budget is None:
            return
        all_blocks = -(-(request.computed + 1 + self.k) // size)
        request.blocks += range(request.blocks[-1] + 1 if request.blocks else 0, all_blocks)
        weights = np.random.default_rng([budget.seed, request.number]).random(all_blocks)
        limit = budget.tokens // size
        must_stay = 1 + -(-(1 + self.k) // size)
        if budget.rule == "heavy-hitters":
            must_stay = max(must_stay, limit // 2)
        gone = []
        before = list(request.blocks)
        may_go = before[1 : len(before) - must_stay]
        while len(request.blocks) > limit:
            worst = may_go[0] if budget.rule == "streaming" else min(may_go, key=weights.__getitem__)
            may_go.remove(worst)
            request.blocks.remove(worst)
            gone.append(before.index(worst))
        if gone:
            self.commit(request)
            self.manager.context.drop_blocks(request.number, gone)
            request.dropped += size * len(gone)
            self.dropped_blocks += len(gone)

    def begin(self, request: Request) -> None:
        request.decoding = True
        self.decoding.append(request)

    @property
    def next_decoding(self) -> list[Request]:
        """Who decodes in the next step: nobody, if prompts go first and there are any."""
        alone = self.config.prefill_first and any(not r.decoding for r in self.ready)
        return [] if alone else list(self.decoding)

    def make_room(self) -> bool:
        """For what the step computes, in all sequences or in none."""
        decoding = [r.number for r in self.next_decoding]
        if not isinstance(self.manager, HybridPool):
            return bool(self.manager.step(decoding, 1 + self.k))
        size, need = self.manager.block_size, 0
        for number in decoding:
            length = self.lengths[number]
            need += -(-(length + 1 + self.k) // size) - -(-length // size)
        chunks = self.chunks(self.next_decoding)
        for request, n in chunks:
            length = self.lengths[request.number]
            need += max(0, -(-(request.computed + n) // size) - -(-length // size))
        counts, groups = self.manager.counts, self.manager.num_groups
        if need * groups > counts.free + counts.cached:
            return False
        assert self.manager.grow(decoding, 1 + self.k, {r.number: r.computed + n for r, n in chunks})
        return True

    @property
    def lengths(self) -> dict[int, int]:
        """Slots of each open sequence of a hybrid pool."""
        table = next(iter(self.manager._manager.tables.values()))
        return {r.number: table.num_tokens(r.number) for r in self.running}

    def chunks(self, decoding: list[Request]) -> list[tuple[Request, int]]:
        """What the budget leaves, to prompts in order."""
        chunks, unspent = [], self.config.token_budget - len(decoding) * (1 + self.k)
        for request in self.ready:
            if not request.decoding and unspent > 0:
                chunks.append((request, min(unspent, request.left)))
                unspent -= chunks[-1][1]
        return chunks

    def verified(self, request: Request) -> int:
        """Tokens of one step: drafts up to the first wrong one, and one more, up to the end."""
        if self.config.speculation is None:
            return 1
        s, length = self.config.speculation, len(request.output)
        right = np.random.default_rng([s.seed, request.number]).random(length + self.k) < s.accept_rate
        got = 0
        while got < self.k and right[request.generated + got]:
            got += 1
        got = min(got + 1, length - request.generated)
        self.drafted += self.k
        self.accepted += got - 1
        return got

    def seconds(self, decoding: list[Request], chunks: list[tuple[Request, int]], num_ended: int) -> float:
        model = self.model
        prompts = [(r.computed, n) for r, n in chunks]
        if self.k:
            prompts += [(r.computed - r.dropped, 1 + self.k) for r in decoding]
        samples = num_ended + len(decoding) * (1 + self.k)
        tokens = sum(n for _, n in prompts) + (0 if self.k else len(decoding))
        flops = model.flops_per_token * tokens + model.flops_per_sample * samples
        weights = model.dense_weight_bytes
        weights += model.expert_weight_bytes * (1 - (1 - model.expert_share) ** tokens)
        kv_s = 0.0
        for layer in self.spec.layers:
            size, window = layer.bytes_per_token(self.spec.dtype), layer.window or 10**9
            for start, n in prompts:
                seen = [range(max(0, p + 1 - window), p + 1) for p in range(start, start + n)]
                flops += PREFILL_FLOPS * sum(map(len, seen))
                kv_s += size * len(set().union(*seen)) / model.kv_bytes_per_s
            if not self.k:
                per_token = max(size / model.kv_bytes_per_s, DECODE_FLOPS / model.flops_per_s)
                kv_s += sum(
                    per_token * min(len(r.prompt) + r.generated - r.dropped, window) for r in decoding
                )
        draft_s = self.k * self.config.speculation.draft_s if self.config.speculation and decoding else 0.0
        once = model.launch_s + max(flops / model.flops_per_s, weights / model.weight_bytes_per_s)
        return draft_s + once + kv_s

    def emit(self, request: Request) -> None:
        request.generated += 1
        request.token_times.append(self.now)

    def preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.commit(request)
        if self.config.swap is not None and request.computed and self.is_better_swapped(request):
            out = self.space.swap_out(request.number)
            assert out is not None
            self.stall = max(self.stall, self.over_link(len(out.copies.src)) - self.now)
            self.space.done(out.transfer)
            self.running.remove(request)
            if request.decoding:
                self.decoding.remove(request)
        else:
            self.leave(request)
        self.waiting.append(request)

    def is_better_swapped(self, request: Request) -> bool:
        swap = self.config.swap
        assert swap is not None
        blocks = self.blocks_of(request)
        if blocks > self.space.counts.free:
            return False
        if swap.always:
            return True
        budget, nobody = self.config.token_budget, np.empty(0, np.int64)
        near, far = (self.model.durations(nobody, [(start, budget)])(0) for start in (0, 8192))
        per_pair = (far - near) / (budget * 8192)
        per_token = (near - per_pair * budget * (budget + 1) / 2) / budget
        n = request.computed
        if not isinstance(self.manager, HybridPool):
            blocks = -(-n // self.manager.block_size)
        both_ways = 2 * (swap.link.latency_s + blocks * swap.bytes_per_block / swap.link.bytes_per_s)
        return bool(both_ways < n * per_token + per_pair * n * (n + 1) / 2)

    def blocks_of(self, request: Request) -> int:
        if not isinstance(self.manager, HybridPool):
            return int(-(-self.manager.tables.num_tokens(request.number) // self.manager.block_size))
        tables = self.manager._manager.tables.values()
        return sum(int((table.block_ids(request.number) > 0).sum()) for table in tables)

    def leave(self, request: Request) -> None:
        self.manager.close(request.number)
        self.running.remove(request)
        if request in self.decoding:
            self.decoding.remove(request)
        request.decoding = False

    def commit(self, request: Request) -> None:
        is_told = self.manager.prefix_caching or self.config.kv_budget is not None
        is_told |= isinstance(self.manager, HybridPool)
        if is_told and request.committed < request.computed:
            self.manager.commit(request.number, request.known[request.committed : request.computed])
            request.committed = request.computed
            if self.tier is not None and self.manager.prefix_caching and not request.dropped:
                self.write(request, self.tier)

    @property
    def gaps(self) -> Floats:
        return np.sort(np.concatenate([[], *(np.diff(r.token_times) for r in self.requests)]))


class SlowPrefill(SlowEngine):
    """Computes prompts, and keeps them until they have been fetched."""

    decode: SlowDecode

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: list[Request] = []
        self.released: list[tuple[float, Request]] = []

    @property
    def ready(self) -> list[Request]:
        return [r for r in super().ready if r not in self.held]

    @property
    def events(self) -> list[float]:
        return super().events + [time_s for time_s, _ in self.released]

    def claim(self, request: Request) -> int:
        return 0 if request in self.held else request.left

    def receive(self) -> None:
        for time_s, request in list(self.released):
            if time_s <= self.now:
                self.released.remove((time_s, request))
                self.held.remove(request)
                self.running.remove(request)
                self.manager.close(request.number)
        super().receive()

    def begin(self, request: Request) -> None:
        self.held.append(request)
        self.decode.handed.append((self.now, request))


class SlowDecode(SlowEngine):
    """Fetches prompts, and decodes."""

    def __init__(self, prefill: SlowPrefill, transfer: TransferSettings, *args: Any) -> None:
        super().__init__(*args)
        self.requests, self.expected, prefill.decode = prefill.requests, [], self
        self.prefill, self.transfer = prefill, transfer
        self.handed: list[tuple[float, Request]] = []
        self.elsewhere: list[Request] = []
        self.num_seats = 0
        self.kv_free_s, self.kv_bytes = 0.0, 0
        self.fetches: list[float] = []

    @property
    def events(self) -> list[float]:
        return super().events + [time_s for time_s, _ in self.handed]

    def receive(self) -> None:
        super().receive()
        for time_s, request in sorted(self.handed, key=lambda item: (item[0], item[1].number)):
            if time_s <= self.now:
                self.handed.remove((time_s, request))
                request.seat, self.num_seats = self.num_seats, self.num_seats + 1
                self.elsewhere.append(request)
                self.waiting.append(request)

    def open(self, request: Request) -> bool:
        if request not in self.elsewhere:
            return super().open(request)
        n, size = len(request.prompt), self.manager.block_size
        opened = self.manager.open(
            request.number,
            request.prompt,
            max_cached_tokens=n,
            announce=self.config.coalesce,
            partial_hits=self.config.partial_hits,
        )
        if opened is None:
            return False
        self.elsewhere.remove(request)
        self.note_hit(request, opened.num_cached_tokens)
        request.computed, request.decoding, request.coming = n, True, True
        request.dropped, request.blocks = 0, []
        num_bytes = (-(-n // size) - opened.num_cached_tokens // size) * self.transfer.bytes_per_block
        done_s = self.now
        if num_bytes:
            speed = self.transfer.link
            done_s = max(self.now, self.kv_free_s) + speed.latency_s + num_bytes / speed.bytes_per_s
            self.kv_free_s, self.kv_bytes = done_s, self.kv_bytes + num_bytes
        self.fetches.append(done_s - self.now)
        self.prefill.released.append((done_s, request))
        self.coming.append((done_s, request, partial(self.fetched, request)))
        return True

    def fetched(self, request: Request) -> None:
        self.commit(request)
        self.keep_budget(request)


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


class Watched:
    """Writes down which sequence opened and closed when."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log: list[tuple[str, Any]] = []

    def open(self, seq_id: Any, tokens: Any, **options: Any) -> Opened | None:
        opened: Opened | None = super().open(seq_id, tokens, **options)  # type: ignore[misc]
        if opened is not None:
            self.log.append(("open", seq_id))
        return opened

    def close(self, seq_id: Any) -> None:
        super().close(seq_id)  # type: ignore[misc]
        self.log.append(("close", seq_id))


class WatchedPool(Watched, HybridPool):
    pass


class WatchedManager(Watched, KVCacheManager):
    pass


PREFILL_FLOPS, DECODE_FLOPS = 0.07, 0.9
"""Of one layer, per pair and per token: bytes bound decode attention at one rate, compute at another."""

FULL = KVCacheSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=8)
SLIDING = KVCacheSpec((LayerSpec(1, 8, window=5), LayerSpec(1, 8), LayerSpec(1, 8, window=17)))
ALL_SLIDING = KVCacheSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=8, window=9)


def model_of(spec: KVCacheSpec, bound: str) -> Roofline:
    """Times of about a second a step, in which every part has a visible share."""
    return Roofline(
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
    hybrid: bool = False
    transfer: TransferSettings | None = None

    def manager(self) -> Any:
        longest = int((self.trace.input_len + self.trace.output_len).max())
        if self.hybrid:
            return WatchedPool(
                replace(self.spec, block_size=self.block_size),
                self.num_blocks,
                max_seqs=self.config.max_batch,
                max_seq_len=longest + self.config.num_drafts,
                policy="lru" if self.prefix_caching else None,
            )
        return WatchedManager(
            self.num_blocks,
            self.block_size,
            max_seqs=self.config.max_batch,
            max_seq_len=longest + self.config.num_drafts,
            policy="lru" if self.prefix_caching else None,
            watermark=self.watermark,
        )

    def engine(self) -> WatchedEngine:
        return WatchedEngine(self.trace, self.manager(), model_of(self.spec, self.bound), self.config)

    def slow_engine(self) -> SlowEngine:
        return SlowEngine(*self.slow_arguments())

    def slow_arguments(self) -> tuple[Any, ...]:
        return self.trace, self.manager(), model_of(self.spec, self.bound), self.spec, self.config

    def two_engines(self) -> Disaggregated:
        assert self.transfer is not None
        pools, model = (self.manager(), self.manager()), model_of(self.spec, self.bound)
        return Disaggregated(self.trace, pools, model, self.config, self.transfer)

    def two_slow_engines(self) -> tuple[SlowPrefill, SlowDecode]:
        assert self.transfer is not None
        prefill = SlowPrefill(*self.slow_arguments())
        there = replace(self, config=replace(self.config, host_tier=None, disk_tier=None))
        decode = SlowDecode(prefill, self.transfer, *there.slow_arguments())
        while prefill.expected or any(e.waiting or e.running for e in (prefill, decode)) or decode.handed:
            if prefill.moment <= decode.moment:
                prefill.turn(decode.moment)
            else:
                decode.turn(prefill.moment)
        prefill.end_writes(math.inf)
        return prefill, decode


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


FEATURES = (
    "queue",
    "prefill_first",
    "coalesce",
    "partial_hits",
    "swap",
    "host_tier",
    "speculation",
    "sessions",
    "kv_budget",
    "disk_tier",
)


def with_features(case: Case, seed: int, chosen: Sequence[str]) -> Case:
    """The case with these features switched on, of random strength."""
    rng = np.random.default_rng([seed, 7])
    trace, config, num_blocks = case.trace, case.config, case.num_blocks
    num = len(trace)
    options: dict[str, Any] = {}
    if "queue" in chosen:
        options["queue"] = QUEUES[1 + int(rng.integers(len(QUEUES) - 1))]
        trace = replace(trace, priority=rng.integers(-1, 2, num), deadline_s=rng.random(num) * 100)
    if "coalesce" in chosen:
        trace = replace(trace, arrival_s=trace.arrival_s[np.arange(num) // 4 * 4])
    if "sessions" in chosen:
        session = rng.integers(-1, 3, num).astype(np.int32)
        think_s = np.where((session >= 0) & (rng.random(num) < 0.8), rng.random(num) * 20, np.nan)
        trace = replace(trace, session=session, think_s=think_s)
    options |= {name: True for name in ("prefill_first", "coalesce", "partial_hits") if name in chosen}
    if "swap" in chosen:
        longest = int((trace.input_len + trace.output_len).max())
        # a pool for the longest request and little more, so that somebody is preempted
        needed = int((-(-(trace.input_len + trace.output_len - 1) // case.block_size)).max())
        num_blocks = min(num_blocks, needed + int(rng.choice([0, 1, needed // 2])))
        hosted = int(rng.choice([1, 2, 5])) * -(-longest // case.block_size)
        speed = LinkSpeed(float(rng.choice([50.0, 1000.0, 1e5])), float(rng.choice([0.0, 0.1])))
        options["swap"] = SwapSettings(hosted, 64 * case.block_size, speed, always=bool(rng.random() < 0.6))
    if "host_tier" in chosen:
        speed = LinkSpeed(float(rng.choice([300.0, 1000.0, 1e5])), float(rng.choice([0.0, 0.1])))
        speed = options["swap"].link if "swap" in options else speed
        hosted = int(rng.choice([1, 3, 20, 200]))
        options["host_tier"] = HostTierSettings(hosted, 64 * case.block_size, speed)
    if "speculation" in chosen:
        rate, drafts = float(rng.choice([0.0, 0.4, 0.9, 1.0])), int(rng.integers(1, 5))
        options["speculation"] = Speculation(drafts, rate, seed, draft_s=float(rng.choice([0.0, 0.013])))
        options["token_budget"] = config.token_budget + config.max_batch * drafts
        num_blocks += -(-drafts // case.block_size)
    if "kv_budget" in chosen and "swap" not in chosen:
        drafts = options["speculation"].num_drafts if "speculation" in chosen else 0
        least = (3 + drafts // case.block_size) * case.block_size
        rule = RULES[int(rng.integers(len(RULES)))]
        options["kv_budget"] = KVBudget(least + int(rng.choice([0, 1, 7, 20])), rule, seed)
    if "disk_tier" in chosen:
        hosted = int(rng.choice([1, 3, 10]))
        if "host_tier" not in options:
            link = options["swap"].link if "swap" in options else LinkSpeed(1e4)
            options["host_tier"] = HostTierSettings(hosted, 64 * case.block_size, link)
        speeds = [
            LinkSpeed(float(rng.choice([200.0, 3000.0, 1e5])), float(rng.choice([0.0, 0.1]))) for _ in "rw"
        ]
        options["disk_tier"] = DiskTierSettings(int(rng.choice([1, 10, 100])), 64 * case.block_size, *speeds)
    return replace(case, trace=trace, config=replace(config, **options), num_blocks=num_blocks)


def random_features(seed: int) -> Case:
    """A random case with some of the features."""
    rng = np.random.default_rng([seed, 8])
    chosen = [name for name in FEATURES if rng.random() < 0.4]
    return with_features(random_case(seed), seed, chosen)


def expanded_gaps(records: Records) -> Floats:
    gaps = records.gaps()
    return np.sort(np.repeat(*gaps.piece(0, len(gaps))))


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=0)


# ---------------------------------------------------------------- fast equals slow


def assert_fast_is_slow(case: Case, context: str) -> tuple[WatchedEngine, SlowEngine]:
    """Times to 1e-9, and every count exactly."""
    fast, slow = case.engine(), case.slow_engine()
    records = fast.run()
    slow.run()
    assert records.num_preemptions == slow.preemptions, context
    assert fast.manager.stats() == slow.manager.stats(), context
    assert fast.manager.log == slow.manager.log, context  # type: ignore[union-attr]
    assert records.occupancy.peak_active_blocks == slow.peak, context
    assert records.hit_tokens == slow.hit_tokens, context
    assert (records.drafted_tokens, records.accepted_tokens) == (slow.drafted, slow.accepted), context
    assert sum(s.num_steps for s in records.steps) == slow.steps, context
    expected: dict[str, tuple[Any, Any]] = {
        "first": (records.first_token_s, [r.token_times[0] for r in slow.requests]),
        "last": (records.finish_s, [r.token_times[-1] for r in slow.requests]),
        "gaps": (expanded_gaps(records), slow.gaps),
        "arrival": (records.arrival_s, [r.comes_s for r in slow.requests]),
        "stall": (records.stall_s, slow.stall_s),
    }
    for name, (found, wanted) in expected.items():
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9, err_msg=f"{name}, {context}")
    if fast.keeper is not None:
        assert fast.keeper.num_dropped == slow.dropped_blocks, context
    if fast.host.link is not None:
        assert fast.host.link.num_bytes == slow.link_bytes, context
    if fast.host.tier is not None and slow.tier is not None:
        assert fast.host.tier.pool.stats() == slow.tier.stats(), context
        assert (fast.host.tier.num_stored, fast.host.tier.num_loaded) == (slow.stored, slow.loaded), context
        disk = fast.host.tier.disk
        if disk is not None and slow.disk is not None:
            assert disk.pool.stats() == slow.disk.stats(), context
            assert (disk.num_read, disk.num_written) == (slow.read, slow.written), context
            assert_close(disk.read_link.free_s, slow.disk_free_s)
    if fast.host.swapper is not None:
        assert fast.host.swapper.space.stats() == slow.space.stats(), context
        fast.host.swapper.space.check_invariants()
    return fast, slow


@pytest.mark.parametrize("first_seed", range(0, 400, 40))
def test_jumping_over_tokens_gives_what_single_steps_give(first_seed: int) -> None:
    """Over 40 random cases."""
    for seed in range(first_seed, first_seed + 40):
        assert_fast_is_slow(random_case(seed), f"seed {seed}")


@pytest.mark.parametrize("feature", FEATURES)
def test_so_it_is_with_each_feature(feature: str) -> None:
    """Over 60 random cases, with one thing switched on."""
    for seed in range(1000, 1060):
        assert_fast_is_slow(with_features(random_case(seed), seed, [feature]), f"{feature}, seed {seed}")


def hybrid_case(seed: int) -> Case:
    """A random case over the hybrid manager, perhaps with features that it has."""
    rng = np.random.default_rng([seed, 9])
    case = replace(random_case(seed), spec=(SLIDING, ALL_SLIDING)[int(rng.integers(2))], hybrid=True)
    groups = 3 if case.spec is SLIDING else 1
    offered = ("queue", "prefill_first", "sessions", "speculation", "coalesce", "partial_hits", "swap")
    case = with_features(case, seed, [name for name in offered if rng.random() < 0.35])
    swap = case.config.swap
    if swap is not None:
        case = replace(
            case,
            config=replace(case.config, swap=replace(swap, num_host_blocks=groups * swap.num_host_blocks)),
        )
    return replace(case, num_blocks=groups * case.num_blocks)


@pytest.mark.parametrize("first_seed", range(0, 120, 40))
def test_so_it_is_with_a_hybrid_pool(first_seed: int) -> None:
    """Over 40 random cases of layers with windows."""
    for seed in range(first_seed, first_seed + 40):
        assert_fast_is_slow(hybrid_case(seed), f"seed {seed}")


def disaggregated_case(seed: int) -> Case:
    """A random case with a link between two pools, perhaps with features."""
    rng = np.random.default_rng([seed, 10])
    case = random_features(seed) if rng.random() < 0.6 else random_case(seed)
    speed = LinkSpeed(float(rng.choice([70.0, 1500.0, 1e6])), float(rng.choice([0.0, 0.21])))
    return replace(case, transfer=TransferSettings(speed, 64 * case.block_size))


@pytest.mark.parametrize("first_seed", range(0, 200, 40))
def test_so_it_is_with_prefill_and_decode_apart(first_seed: int) -> None:
    """Over 40 random cases of two engines, whose clocks run together in both."""
    for seed in range(first_seed, first_seed + 40):
        case, context = disaggregated_case(seed), f"seed {seed}"
        fast = case.two_engines()
        records = fast.run()
        prefill, decode = case.two_slow_engines()
        for found, wanted in ((fast.prefill, prefill), (fast.decode, decode)):
            assert found.manager.counts.active == 0, context
            assert found.manager.stats() == wanted.manager.stats(), context
            assert found.manager.log == wanted.manager.log, context  # type: ignore[union-attr]
            assert found.records.num_preemptions == wanted.preemptions, context
            assert found.records.occupancy.peak_active_blocks == wanted.peak, context
            assert sum(s.num_steps for s in found.records.steps) == wanted.steps, context
        assert records.hit_tokens == prefill.hit_tokens, context
        if fast.prefill.host.tier is not None:
            assert fast.prefill.host.tier.num_loaded == prefill.loaded, context
        assert fast.num_hit_tokens_not_sent == decode.hit_tokens, context
        assert fast.decode.link.num_bytes == decode.kv_bytes, context
        expected: dict[str, tuple[Any, Any]] = {
            "first": (records.first_token_s, [r.token_times[0] for r in decode.requests]),
            "last": (records.finish_s, [r.token_times[-1] for r in decode.requests]),
            "gaps": (expanded_gaps(records), decode.gaps),
            "fetches": (records.transfer_s, decode.fetches),
        }
        for name, (times, slow_times) in expected.items():
            np.testing.assert_allclose(times, slow_times, rtol=1e-9, atol=1e-9, err_msg=f"{name}, {context}")


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
def test_and_with_features_together(first_seed: int) -> None:
    """Over 50 random combinations."""
    for seed in range(first_seed, first_seed + 50):
        assert_fast_is_slow(random_features(seed), f"seed {seed}")


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


def test_the_random_features_reach_what_they_are_for() -> None:
    """Each of them does something in several of the cases, and in several ways."""
    reached: dict[str, int] = {}
    for feature in FEATURES[1:]:
        for seed in range(1000, 1060):
            case = with_features(random_case(seed), seed, [feature])
            engine = case.engine()
            records = engine.run()
            assert records.arrival_s is not None
            swapper = engine.host.swapper
            what = {
                "swapped": records.num_swapped_out > 0,
                "swapped or not": 0 < records.num_swapped_out < records.num_preemptions,
                "stalled": records.stall_s > 0,
                "still cached": swapper is not None and swapper.space.stats().hit_blocks > 0,
                "loaded": engine.host.tier is not None and engine.host.tier.num_loaded > 0,
                "demoted": feature == "disk_tier" and engine.host.tier.disk.num_written > 0,  # type: ignore[union-attr]
                "promoted": feature == "disk_tier" and engine.host.tier.disk.num_read > 0,  # type: ignore[union-attr]
                "coalesced": records.num_coalesced > 0,
                "partly hit": records.partial_hit_tokens > 0,
                "dropped": engine.keeper is not None and engine.keeper.num_dropped > 0,
                "right": records.accepted_tokens > 0,
                "wrong": records.drafted_tokens > records.accepted_tokens,
                "came later": bool((records.arrival_s > case.trace.arrival_s).any()),
                "waited": feature == "prefill_first" and any(s.num_late for s in records.steps),
            }
            for name, happened in what.items():
                reached[name] = reached.get(name, 0) + happened
    assert min(reached.values()) >= 4, reached


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
    assert records.gaps().total == (trace.output_len - 1).sum()
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
    closes = [request for what, request in engine.manager.log if what == "close"]  # type: ignore[union-attr]
    left = {request: closes.count(request) for request in pending}
    for what, request in engine.manager.log:  # type: ignore[union-attr]
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
        "from pagedkv.sim.timing.gpus import load_gpu\n"
        "from pagedkv.sim.timing.models import load_model\n"
        "from pagedkv.sim.replay import ReplaySetup, run_replay\n"
        "from pagedkv.sim.output.report import replay_document, to_json\n"
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
