"""What managers are asked to do: nine kinds of bookkeeping, without a model and without KV bytes.

Each is a small frozen thing whose fields are its size; ``run`` drives a new peer through it and tells the
CPU time of each phase. Whatever a workload opens it closes, and it checks that the pool is whole again.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from benchmarks.manager_peers import BLOCK_SIZE, MakePeer, Peer, Pool, prompt
from pagedkv.arithmetic import div_ceil
from pagedkv.block_tables import Int32Array


@dataclass(frozen=True)
class Measured:
    """Microseconds of each phase, per call, of ``step`` per token; and what the cache gave."""

    us: dict[str, float]
    asked_tokens: int
    hit_tokens: int


class Workload(Protocol):
    """Something to drive a manager through."""

    def run(self, make: MakePeer) -> Measured:
        """Make a peer of the size that this needs, and drive it."""


class Stopwatch:
    """CPU time of this thread by phase, less what reading the clock costs."""

    def __init__(self) -> None:
        self._ns: defaultdict[str, int] = defaultdict(int)
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._units: defaultdict[str, int] = defaultdict(int)

    def timed(self, phase: str, units: int, call: Callable[..., Any], *args: Any) -> Any:
        """What ``call(*args)`` returns; its time counts for ``units`` of the phase."""
        start = time.thread_time_ns()
        value = call(*args)
        self._ns[phase] += time.thread_time_ns() - start
        self._calls[phase] += 1
        self._units[phase] += units
        return value

    def us(self, clock_ns: float) -> dict[str, float]:
        """Microseconds per unit of each phase, for a clock that costs ``clock_ns`` to read twice."""
        return {
            phase: max(0.0, ns - clock_ns * self._calls[phase]) / self._units[phase] / 1000
            for phase, ns in self._ns.items()
        }


@cache
def clock_cost_ns() -> float:
    """What the stopwatch shows for a call that does nothing: the least of a few trials."""

    def trial() -> float:
        watch = Stopwatch()
        for _ in range(3000):
            watch.timed("nothing", 1, lambda request: None, None)
        return watch.us(0.0)["nothing"] * 1000

    return min(trial() for _ in range(5))


class Driver:
    """A peer and its stopwatch."""

    def __init__(self, make: MakePeer, pool: Pool) -> None:
        self.peer: Peer = make(pool)
        self._whole = self.peer.available()
        self.restart()

    def restart(self) -> None:
        """Forget what was measured: from now on the peer is warm."""
        self._watch = Stopwatch()
        self._asked = self._hit = 0

    def request(self, name: str, tokens: Int32Array) -> Any:
        return self.peer.request(name, tokens)

    def admit(self, request: Any, num_tokens: int) -> None:
        """Open and commit."""
        hit = self._watch.timed("open", 1, self.peer.open, request)
        if hit is None:
            raise MemoryError("the pool is too small for this workload")
        self._watch.timed("commit", 1, self.peer.commit, request)
        self._asked += num_tokens
        self._hit += hit

    def step(self, requests: Sequence[Any], tokens: Int32Array) -> None:
        self._watch.timed("step", len(requests), self.peer.step, requests, tokens)

    def fork(self, request: Any, child: Any) -> None:
        self._watch.timed("fork", 1, self.peer.fork, request, child)

    def close(self, request: Any) -> None:
        self._watch.timed("close", 1, self.peer.close, request)

    def measured(self) -> Measured:
        """The result; a block that is missing now was lost by the manager or held by the workload."""
        left = self.peer.available()
        if left != self._whole:
            raise AssertionError(f"{self._whole} blocks were available, {left} are left")
        return Measured(self._watch.us(clock_cost_ns()), self._asked, self._hit)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: what one peer allocates must not bill another."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def sampled(step: int, batch: int) -> Int32Array:
    """A token for each sequence of a batch."""
    tokens: Int32Array = (np.arange(batch, dtype=np.int32) * 17 + step * 131) % 32_000
    return tokens


def blocks_of(num_tokens: int) -> int:
    """Blocks that a sequence of so many tokens holds."""
    return int(div_ceil(num_tokens, BLOCK_SIZE))


@dataclass(frozen=True)
class Lifecycle:
    """Unique prompts are all opened, decode as one batch, and are closed."""

    seqs: int = 128
    prompt: int = 1024
    steps: int = 64
    prefix_caching: bool = True

    def run(self, make: MakePeer) -> Measured:
        length = self.prompt + self.steps
        driver = Driver(make, Pool(self.seqs * blocks_of(length), self.seqs, length, self.prefix_caching))
        requests = [driver.request(f"r{i}", prompt(i, self.prompt)) for i in range(self.seqs)]
        with uncollected():
            for request in requests:
                driver.admit(request, self.prompt)
            for step in range(self.steps):
                driver.step(requests, sampled(step, self.seqs))
            for request in requests:
                driver.close(request)
        return driver.measured()


@dataclass(frozen=True)
class SharedPrefix:
    """A long system prompt that all share, then some tokens of their own; one after another, or at once."""

    shared: int = 8192
    own: int = 256
    seqs: int = 60
    at_once: bool = False

    def run(self, make: MakePeer) -> Measured:
        length = self.shared + self.own
        num_blocks = blocks_of(length) + self.seqs * blocks_of(self.own + BLOCK_SIZE)
        driver = Driver(make, Pool(num_blocks, self.seqs + 1, length))
        system = prompt(0, self.shared)
        requests = [
            driver.request(f"r{i}", np.concatenate([system, prompt(1 + i, self.own)]))
            for i in range(self.seqs + 1)
        ]
        with uncollected():
            first, *others = requests
            driver.admit(first, length)
            if not self.at_once:
                driver.close(first)
            driver.restart()
            for request in others:
                driver.admit(request, length)
                if not self.at_once:
                    driver.close(request)
            if self.at_once:
                for request in requests:
                    driver.close(request)
        return driver.measured()


@dataclass(frozen=True)
class ZipfDocuments:
    """Requests for documents whose popularity is Zipf's, one after another; the pool holds a part of them.

    Each has a token more than whole blocks, so that a repeated one can hit all of those.
    """

    documents: int = 1000
    document_blocks: int = 32
    warm: int = 1000
    requests: int = 3000
    exponent: float = 0.9
    pool_share: float = 0.25

    def order(self) -> list[int]:
        """Which documents are asked for."""
        weights = 1 / np.arange(1, self.documents + 1) ** self.exponent
        chosen = np.random.default_rng(5).choice(
            self.documents, self.warm + self.requests, p=weights / weights.sum()
        )
        found: list[int] = chosen.tolist()
        return found

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return int(self.documents * self.document_blocks * self.pool_share)

    def run(self, make: MakePeer) -> Measured:
        length = self.document_blocks * BLOCK_SIZE + 1
        driver = Driver(make, Pool(self.num_blocks, 1, length))
        texts = [prompt(1000 + i, length) for i in range(self.documents)]
        with uncollected():
            for i, document in enumerate(self.order()):
                if i == self.warm:
                    driver.restart()
                request = driver.request(f"q{i}", texts[document])
                driver.admit(request, length)
                driver.close(request)
        return driver.measured()


@dataclass(frozen=True)
class Churn:
    """Nobody asks twice: with a pool full of cached blocks, each prompt evicts as many as it needs."""

    prompt: int = 512
    requests: int = 800
    num_blocks: int = 4096

    def run(self, make: MakePeer) -> Measured:
        warm = div_ceil(self.num_blocks * BLOCK_SIZE, self.prompt) + 8
        driver = Driver(make, Pool(self.num_blocks, 1, self.prompt))
        requests = [
            driver.request(f"q{i}", prompt(50_000 + i, self.prompt)) for i in range(warm + self.requests)
        ]
        with uncollected():
            for i, request in enumerate(requests):
                if i == warm:
                    driver.restart()
                driver.admit(request, self.prompt)
                driver.close(request)
        return driver.measured()


@dataclass(frozen=True)
class Eviction:
    """A pool full of cached prompts, released in random order; then unique prompts, each evicting its size.

    Prompts of one block show what evicting a single block costs, whatever the number that are cached.
    """

    num_cached: int = 1000
    filler: int = 512
    prompt: int = BLOCK_SIZE
    requests: int = 2000

    def run(self, make: MakePeer) -> Measured:
        seqs = div_ceil(self.num_cached, blocks_of(self.filler))
        lengths = [self.filler] * (seqs - 1)
        lengths.append((self.num_cached - (seqs - 1) * blocks_of(self.filler)) * BLOCK_SIZE)
        driver = Driver(make, Pool(self.num_cached, seqs, max(self.filler, self.prompt)))
        with uncollected():
            held = [driver.request(f"f{i}", prompt(i, length)) for i, length in enumerate(lengths)]
            for request, length in zip(held, lengths, strict=True):
                driver.admit(request, length)
            for i in np.random.default_rng(0).permutation(seqs).tolist():
                driver.close(held[i])
            del held
            requests = [
                driver.request(f"q{i}", prompt(seqs + i, self.prompt)) for i in range(self.requests + 8)
            ]
            for i, request in enumerate(requests):
                if i == 8:
                    driver.restart()
                driver.admit(request, self.prompt)
                driver.close(request)
        return driver.measured()


@dataclass(frozen=True)
class Fork:
    """Several answers to one prompt, which ends within a block: the first token of each copies that block."""

    parents: int = 12
    children: int = 8
    prompt: int = 2056

    def run(self, make: MakePeer) -> Measured:
        num_blocks = self.parents * blocks_of(self.prompt) + 3 * self.children
        driver = Driver(make, Pool(num_blocks, self.parents + self.children, self.prompt + 1))
        texts = [prompt(900 + i, self.prompt) for i in range(self.parents)]
        parents = [driver.request(f"p{i}", text) for i, text in enumerate(texts)]
        with uncollected():
            for parent in parents:
                driver.admit(parent, self.prompt)
            driver.restart()
            for i, (parent, text) in enumerate(zip(parents, texts, strict=True)):
                children = [driver.request(f"p{i}c{k}", text) for k in range(self.children)]
                for child in children:
                    driver.fork(parent, child)
                driver.step(children, sampled(i, self.children))
                for child in children:
                    driver.close(child)
        for parent in parents:
            driver.peer.close(parent)
        return driver.measured()


@dataclass(frozen=True)
class MultiTurn:
    """Conversations in lockstep: each turn asks again with all that was said, and a new question."""

    conversations: int = 16
    turns: int = 12
    question: int = 192
    answer: int = 64

    def run(self, make: MakePeer) -> Measured:
        length = self.turns * (self.question + self.answer)
        driver = Driver(make, Pool(self.conversations * blocks_of(length), self.conversations, length))
        said = [np.zeros(0, np.int32)] * self.conversations
        with uncollected():
            for turn in range(self.turns):
                for c in range(self.conversations):
                    said[c] = np.concatenate([said[c], prompt(turn * 1000 + c, self.question)])
                requests = [driver.request(f"c{c}t{turn}", text) for c, text in enumerate(said)]
                for request, text in zip(requests, said, strict=True):
                    driver.admit(request, len(text))
                answers = [sampled(turn * self.answer + i, self.conversations) for i in range(self.answer)]
                for tokens in answers:
                    driver.step(requests, tokens)
                for request in requests:
                    driver.close(request)
                said = [
                    np.concatenate([text, part]) for text, part in zip(said, np.array(answers).T, strict=True)
                ]
        return driver.measured()


@dataclass(frozen=True)
class Length:
    """A small batch whose prompts have this length: what grows with it, and what must not."""

    prompt: int = 131_072
    seqs: int = 8
    steps: int = 128

    def run(self, make: MakePeer) -> Measured:
        return Lifecycle(self.seqs, self.prompt, self.steps).run(make)


@dataclass(frozen=True)
class Tree:
    """Prompts that branch at arbitrary places, in random order, and more of them than the pool can cache.

    Half of them prolong an earlier one; the others come in bursts of 2 to 10 that part at the same place.
    """

    seqs: int = 1500
    most_new: int = 256
    num_blocks: int = 6250

    def prompts(self) -> list[Int32Array]:
        """All of them, as they are asked for."""
        rng = np.random.default_rng(42)

        def longer(text: Int32Array) -> Int32Array:
            new = rng.integers(0, 32_000, rng.integers(1, self.most_new, endpoint=True), np.int32)
            return np.concatenate([text, new])

        found = [rng.integers(0, 32_000, max(1, self.most_new // 4), np.int32)]
        while len(found) <= self.seqs // 2:
            found.append(longer(found[rng.integers(len(found))]))
        while len(found) < self.seqs:
            stem = found[rng.integers(len(found))]
            burst = min(int(rng.integers(2, 10, endpoint=True)), self.seqs - len(found))
            found += [longer(stem) for _ in range(burst)]
        return [found[i] for i in rng.permutation(len(found))]

    def run(self, make: MakePeer) -> Measured:
        texts = self.prompts()
        driver = Driver(make, Pool(self.num_blocks, 1, max(map(len, texts))))
        requests = [driver.request(f"s{i}", text) for i, text in enumerate(texts)]
        with uncollected():
            for request, text in zip(requests, texts, strict=True):
                driver.admit(request, len(text))
                driver.close(request)
        return driver.measured()


WORKLOADS: dict[str, Workload] = {
    "w1-nocache": Lifecycle(prefix_caching=False),
    "w1": Lifecycle(),
    "w2": SharedPrefix(),
    "w2-at-once": SharedPrefix(at_once=True),
    "w3": ZipfDocuments(),
    "w3u": Churn(),
    "w4": Fork(),
    "w5": MultiTurn(),
    "w6-1024": Length(1024),
    "w6-8192": Length(8192),
    "w6-32768": Length(32_768),
    "w6-131072": Length(131_072),
    "w7": Tree(),
    "step-256": Lifecycle(256),
    "evict-1k": Eviction(1000),
    "evict-10k": Eviction(10_000),
    "evict-100k": Eviction(100_000),
    "evict-1m": Eviction(1_000_000),
    "evict-512-of-1k": Eviction(1000, filler=8192, prompt=8192, requests=100),
    "evict-512-of-1m": Eviction(1_000_000, filler=8192, prompt=8192, requests=100),
}


def bytes_per_block(make: MakePeer, num_blocks: int = 65_536, prompt_blocks: int = 32) -> float:
    """Traced memory of a manager whose blocks all are cached, in prompts of so many, divided by them.

    The pool admits 256 sequences of up to 8,192 tokens, so a page table counts too. Requests that are
    over do not.
    """
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        peer = make(Pool(num_blocks, 256, 8192))
        for i in range(num_blocks // prompt_blocks):
            request = peer.request(f"r{i}", prompt(i, prompt_blocks * BLOCK_SIZE))
            if peer.open(request) is None:
                raise MemoryError("the pool is too small for its own blocks")
            peer.commit(request)
            peer.close(request)
            del request
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / num_blocks
    finally:
        tracemalloc.stop()
