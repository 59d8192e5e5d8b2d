"""The manager against models under random operations, with failures injected, with bugs that must show."""

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pagedkv.sequences
from pagedkv import BlockCopies, KVCacheManager, Media, Namespace, PagedKVError, core
from pagedkv.announced import Announced
from pagedkv.block_cache import BlockCache
from pagedkv.block_pool import FREE, NO_BLOCKS
from pagedkv.block_tables import Int32Array, SeqId
from pagedkv.content import SequenceExtra
from pagedkv.copies import PendingCopies
from pagedkv.namespace import ExtraKeys
from pagedkv.policies.lru import LRU
from pagedkv.prefix_index import PrefixIndex
from pagedkv.sequences import Sequences
from pagedkv.tails import NO_TAILS
from pagedkv.testing import (
    FAILURE_POINTS,
    FailureInjector,
    ShadowStorage,
    manager_state,
    random_walk,
    snapshot,
)
from pagedkv.testing.states import SCRATCH

UNSEEN = (*SCRATCH, "_next")
"""Scratch, and the number of the next extra key."""


def seen_state(manager: KVCacheManager) -> object:
    """Everything inside a manager but what is ``UNSEEN``."""
    return snapshot(manager, UNSEEN)


def visible(manager: KVCacheManager) -> object:
    """All that any later call can depend on: what uncommitted slots are thought to hold is left out."""
    pool, index = manager._cache.pool, manager._cache.index
    extra = {row: (e.namespace, sorted(e.media), e.by_block) for row, e in manager._seqs._extra.items()}
    partial = {}
    for seq_id in manager.tables.seq_ids:
        done = manager.tables.num_committed(seq_id)
        slots = manager.tables.slots(seq_id, done - done % manager.block_size, done)
        partial[seq_id] = index.tokens.reshape(-1)[slots].tolist()
    return (
        manager_state(manager),
        (manager._tables.blocks.tolist(), manager.tables.seq_ids, extra, partial),
        (pool.ref_count.tolist(), pool.state.tolist()),
        pool._free[: pool.num_free].tolist(),
        manager._cache.policy.ids().tolist(),
        sorted((before, ids.tolist()) for before, ids in index.chains()),
        index.tokens[index.indexed].tolist(),
        [list(manager._cache.extra_keys._keys.get(x, ())) for x in index.extra[index.indexed].tolist()],
        sorted(manager._cache.extra_keys._uses.values()),
        dict(manager._cache.copies.source_of),
    )


# -- against the reference model

SIZES: dict[str, dict[str, Any]] = {
    "default": {},
    "one_block": {"num_blocks": 1, "block_size": 4, "max_seqs": 3},
    "one_token_blocks": {"num_blocks": 12, "block_size": 1, "max_seqs": 4},
    "one_sequence": {"num_blocks": 6, "block_size": 2, "max_seqs": 1},
    "many_sequences": {"num_blocks": 20, "block_size": 3, "max_seqs": 12},
    "one_token_vocabulary": {"num_blocks": 10, "block_size": 2, "vocabulary": 1, "max_seqs": 5},
    "wide_vocabulary": {"num_blocks": 10, "block_size": 2, "vocabulary": 5},
    "watermark": {"num_blocks": 12, "block_size": 2, "max_seqs": 5, "watermark": 0.3},
    "crowded": {"num_blocks": 5, "block_size": 3, "max_seqs": 8},
    "three_blocks": {"num_blocks": 3, "block_size": 4, "max_seqs": 2},
    "long_blocks": {"num_blocks": 8, "block_size": 4, "max_seqs": 3},
    "roomy": {"num_blocks": 40, "block_size": 2, "max_seqs": 6},
}


@pytest.mark.parametrize("size", SIZES)
def test_a_long_random_walk_agrees_with_the_model(size: str) -> None:
    """Three thousand operations each: results, counts, slot contents and invariants after every one."""
    stats = random_walk(3_000, seed=1, **SIZES[size]).stats()
    assert stats.num_opened > 150
    assert stats.evicted_blocks > 0 or size == "one_block"


MODES: dict[str, dict[str, Any]] = {
    "no_prefix_cache": {"policy": None},
    "no_events": {"events": False},
    "maintenance": {"maintenance": True},
    "failures": {"failures": 0.4},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_random_walk_in_every_mode_agrees_with_the_model(mode: str) -> None:
    """Without prefix cache, without events, in a pool that changes its size, with failures in the middle."""
    for seed, size in enumerate(("default", "long_blocks", "many_sequences", "watermark")):
        random_walk(1_000, seed=seed, **MODES[mode], **SIZES[size])


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(2, 30),
    block_size=st.integers(1, 6),
    max_seqs=st.integers(1, 9),
    vocabulary=st.integers(1, 4),
    watermark=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
)
def test_walks_of_any_size_agree_with_the_model(
    seed: int, num_blocks: int, block_size: int, max_seqs: int, vocabulary: int, watermark: float
) -> None:
    """Whatever the sizes, manager and model do the same."""
    random_walk(
        150,
        seed=seed,
        num_blocks=num_blocks,
        block_size=block_size,
        max_seqs=max_seqs,
        vocabulary=vocabulary,
        watermark=watermark,
    )


def test_the_same_seed_gives_the_same_manager() -> None:
    """Two walks with one seed end in equal state, down to the last array."""
    first, second, other = (seen_state(random_walk(800, seed=seed)) for seed in (3, 3, 4))
    assert first == second != other


@pytest.mark.parametrize("seed", range(4))
def test_commit_step_equals_committing_one_by_one(seed: int) -> None:
    """Same blocks, same index, same order of eviction: only faster."""
    rng = random.Random(seed)
    compared = shared = 0

    def compare(manager: KVCacheManager) -> None:
        nonlocal compared, shared
        ids = [i for i in manager.tables.seq_ids if uncommitted(manager, i)]
        if not ids or rng.random() < 0.5:
            return
        batch = rng.sample(ids, rng.randint(1, len(ids)))
        tokens = [rng.randrange(2) for _ in batch]
        together = copy.deepcopy(manager)
        together.copies.take()
        one_by_one = copy.deepcopy(together)
        together.commit_step(batch, tokens)
        for seq_id, token in zip(batch, tokens, strict=True):
            one_by_one.commit(seq_id, [token])
        together.check_invariants()
        assert visible(together) == visible(one_by_one)
        compared += len(batch) > 1
        shared += together.stats().indexed_blocks > manager.stats().indexed_blocks

    random_walk(1_000, seed=seed, before_op=compare, num_blocks=12, max_seqs=6)
    assert compared > 30 and shared > 15


# -- copies that wait


class LateCopies:
    """Sequences that grow, shrink, fork and close for a while before anyone runs the pending copies.

    Copies and the writes of new tokens happen together in ``flush``, copies first, as in an engine
    that plans several changes and then runs one step.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        num_blocks = self.random.choice([6, 10, 20])
        self.manager = KVCacheManager(num_blocks, 4, max_seqs=6, max_seq_len=24)
        self.shadow = ShadowStorage(num_blocks, 4)
        self.tokens: dict[SeqId, list[int]] = {}  # the committed ones
        self.names = itertools.count()
        self.chained = self.dropped = 0

    def flush(self) -> None:
        self.shadow.copy(self.manager)
        for seq_id, known in self.tokens.items():
            start, stop = len(known), self.manager.tables.num_tokens(seq_id)
            new = [self.random.randrange(3) for _ in range(stop - start)]
            self.shadow.write(self.manager.tables.slots(seq_id, start, stop), new)
            known += new
        for seq_id, known in self.tokens.items():
            self.manager.commit(seq_id, known[self.manager.tables.num_committed(seq_id) :])
        for seq_id, known in self.tokens.items():
            assert self.shadow.read(self.manager, seq_id) == known

    def open(self) -> None:
        prompt = [self.random.randrange(3) for _ in range(self.random.randint(0, 11))]
        seq_id = next(self.names)
        opened = self.manager.open(seq_id, prompt, partial_hits=self.random.random() < 0.5)
        if opened is not None:
            self.tokens[seq_id] = prompt[: opened.num_cached_tokens]

    def grow(self, seq_id: SeqId) -> None:
        if self.manager.tables.num_tokens(seq_id) < 20:
            before = dict(self.manager._cache.copies.source_of)
            self.manager.append(seq_id, self.random.randint(1, 3))
            new = {dst: src for dst, src in self.manager._cache.copies.source_of.items() if dst not in before}
            self.chained += any(src in before.values() for src in new.values())

    def cut(self, seq_id: SeqId) -> None:
        length = self.random.choice([len(self.tokens[seq_id]), self.manager.tables.num_tokens(seq_id) // 2])
        self.manager.truncate(seq_id, length)
        del self.tokens[seq_id][length:]

    def fork(self, seq_id: SeqId) -> None:
        self.manager.truncate(seq_id, len(self.tokens[seq_id]))
        child = next(self.names)
        if self.manager.fork(seq_id, child):
            self.tokens[child] = list(self.tokens[seq_id])

    def close(self, seq_id: SeqId) -> None:
        self.manager.close(seq_id)
        del self.tokens[seq_id]

    def run(self, num_ops: int) -> None:
        for _ in range(num_ops):
            pending = len(self.manager.copies.pending.src)
            name = self.random.choice(
                ["open", "grow", "grow", "grow", "cut", "fork", "fork", "close", "flush"]
            )
            if name in ("open", "flush"):
                getattr(self, name)()
            elif self.tokens:
                getattr(self, name)(self.random.choice(list(self.tokens)))
                self.dropped += len(self.manager.copies.pending.src) < pending
            self.manager.check_invariants()
            destinations = self.manager.copies.pending.dst
            assert (self.manager._cache.pool.state[destinations] != FREE).all(), "a copy into a free block"
        self.flush()


@pytest.mark.parametrize("seed", range(10))
def test_copies_run_late_still_give_every_sequence_its_tokens(seed: int) -> None:
    """Chained and dropped copies: whenever the batch is run, every committed token is in its slot."""
    LateCopies(seed).run(500)


def test_late_copies_do_get_chained_and_dropped() -> None:
    """The walk above reaches what it is for."""
    walks = [LateCopies(seed) for seed in range(10)]
    for walk in walks:
        walk.run(500)
    assert sum(walk.chained for walk in walks) > 3
    assert sum(walk.dropped for walk in walks) > 3


# -- namespaces and media


class MediaWalk:
    """Sequences with namespaces and media, also later ones; tracks what indexed blocks were computed from."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice([2, 3])
        self.manager = KVCacheManager(self.random.choice([8, 16, 40]), self.size, max_seqs=5)
        self.tokens: dict[SeqId, list[int]] = {}
        self.media: dict[SeqId, list[Media]] = {}
        self.namespace: dict[SeqId, Namespace | None] = {}
        self.made: dict[int, object] = {}  # block -> the path it was indexed for
        self.names = itertools.count()
        self.hits = self.later_media = 0

    def path(self, seq_id: SeqId, num_blocks: int) -> object:
        """All that the K and V of block ``num_blocks - 1`` depend on."""
        stop = num_blocks * self.size
        media = tuple(sorted(item for item in self.media[seq_id] if item.offset < stop))
        return self.namespace[seq_id], tuple(self.tokens[seq_id][:stop]), media

    def open(self) -> None:
        prompt = [0] * self.random.randint(0, 5 * self.size)
        media = [
            Media(self.random.randrange(len(prompt)), self.random.choice(["cat", "dog"]))
            for _ in range(self.random.choice([0, 0, 1, 2]) if prompt else 0)
        ]
        media = list(dict.fromkeys(media))
        namespace = self.random.choice([None, Namespace("x"), Namespace(adapter="x")])
        seq_id = next(self.names)
        limit = self.random.choice([None, len(prompt)])
        indexed = set(np.flatnonzero(self.manager._cache.index.indexed).tolist())
        opened = self.manager.open(seq_id, prompt, namespace=namespace, media=media, max_cached_tokens=limit)
        if opened is None:
            return
        self.tokens[seq_id], self.media[seq_id], self.namespace[seq_id] = prompt, media, namespace
        hit = opened.num_cached_tokens // self.size
        self.hits += hit
        for i, block in enumerate(self.manager.tables.block_ids(seq_id)[:hit].tolist()):
            assert self.made[block] == self.path(seq_id, i + 1), "a hit was computed from something else"
        usable = (len(prompt) - 1 if limit is None else limit) // self.size
        if hit < usable:
            known = [self.made[block] for block in indexed]
            assert self.path(seq_id, hit + 1) not in known, "a cached block was not found"
        self.manager.commit(seq_id, prompt[opened.num_cached_tokens :])

    def grow(self, seq_id: SeqId) -> None:
        count = self.random.randint(0, 3)
        fits = self.manager.tables.num_tokens(seq_id) + count <= self.manager.max_seq_len
        if fits and self.manager.append(seq_id, count):
            start = len(self.tokens[seq_id])
            self.tokens[seq_id] += [0] * count
            media = [
                Media(self.random.randrange(start, start + count), self.random.choice(["cat", "dog"]))
                for _ in range(self.random.choice([0, 0, 1, 2]) if count else 0)
            ]
            media = list(dict.fromkeys(media))
            self.manager.copies.take()
            if count == 1 and not media:
                self.manager.commit_step([seq_id], [0])
            else:
                self.manager.commit(seq_id, [0] * count, media=media)
            self.media[seq_id] = self.media[seq_id] + media
            self.later_media += len(media)

    def cut(self, seq_id: SeqId) -> None:
        length = self.random.randint(0, len(self.tokens[seq_id]))
        self.manager.truncate(seq_id, length)
        del self.tokens[seq_id][length:]
        self.media[seq_id] = [item for item in self.media[seq_id] if item.offset < length]

    def fork(self, seq_id: SeqId) -> None:
        child = next(self.names)
        if self.manager.fork(seq_id, child):
            self.tokens[child] = list(self.tokens[seq_id])
            self.media[child] = list(self.media[seq_id])
            self.namespace[child] = self.namespace[seq_id]

    def close(self, seq_id: SeqId) -> None:
        self.manager.close(seq_id)
        del self.tokens[seq_id], self.media[seq_id], self.namespace[seq_id]

    def check(self) -> None:
        """Equal blocks if and only if equal paths; and every extra key has exactly its users."""
        self.manager.check_invariants()
        indexed = np.flatnonzero(self.manager._cache.index.indexed)
        for seq_id, tokens in self.tokens.items():
            full = len(tokens) // self.size
            for i, block in enumerate(self.manager.tables.block_ids(seq_id)[:full].tolist()):
                self.made[block] = self.path(seq_id, i + 1)
        paths = [self.made[block] for block in indexed.tolist()]
        assert len(set(paths)) == len(paths), "one content is indexed twice"
        keys = self.manager._cache.extra_keys
        uses = Counter(x for x in self.manager._cache.index.extra[indexed].tolist() if x)
        for extra in self.manager._seqs._extra.values():
            uses.update(keys.find(key) for key in extra.by_block.values())
        assert uses == keys._uses, "an extra key is kept without a user, or dropped with one"

    def run(self, num_ops: int) -> None:
        for _ in range(num_ops):
            name = self.random.choice(["open", "open", "grow", "grow", "cut", "fork", "close"])
            if name == "open":
                self.open()
            elif self.tokens:
                getattr(self, name)(self.random.choice(list(self.tokens)))
            self.check()


@pytest.mark.parametrize("seed", range(10))
def test_hits_with_namespaces_and_media_are_exact_and_complete(seed: int) -> None:
    """Whatever was computed from other tokens, media or namespaces is never hit; all else is."""
    walk = MediaWalk(seed)
    walk.run(500)
    assert walk.hits > 5 and walk.later_media > 5
    for seq_id in list(walk.tokens):
        walk.close(seq_id)
    walk.check()
    assert walk.manager._seqs._extra == {}


# -- failures injected

Operation = Callable[[KVCacheManager, random.Random], object]


def any_id(manager: KVCacheManager, rng: random.Random) -> SeqId:
    return rng.choice(manager.tables.seq_ids) if len(manager.tables) else "nobody"


def do_open(manager: KVCacheManager, rng: random.Random) -> object:
    prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
    media = [Media(rng.randrange(len(prompt)), "cat")] if rng.random() < 0.2 else []
    return manager.open(
        "injected",
        prompt,
        namespace=rng.choice([None, Namespace("tenant")]),
        media=media,
        partial_hits=rng.random() < 0.6,
        announce=rng.random() < 0.3,
    )


def do_step(manager: KVCacheManager, rng: random.Random) -> object:
    ids = manager.tables.seq_ids
    return manager.step(rng.sample(ids, rng.randint(0, len(ids))), rng.randint(1, 3))


def uncommitted(manager: KVCacheManager, seq_id: SeqId) -> int:
    return manager.tables.num_tokens(seq_id) - manager.tables.num_committed(seq_id)


def do_commit(manager: KVCacheManager, rng: random.Random) -> None:
    seq_id = any_id(manager, rng)
    manager.commit(seq_id, [rng.randrange(2) for _ in range(uncommitted(manager, seq_id))])


def do_one_commit_step(manager: KVCacheManager, rng: random.Random) -> None:
    manager.commit_step([any_id(manager, rng)], [rng.randrange(2)])


def do_commit_step(manager: KVCacheManager, rng: random.Random) -> None:
    ids = [i for i in manager.tables.seq_ids if uncommitted(manager, i)]
    batch = rng.sample(ids, rng.randint(0, len(ids)))
    manager.commit_step(batch, [rng.randrange(2) for _ in batch])


OPERATIONS: dict[str, Operation] = {
    "open": do_open,
    "lookup": lambda m, rng: m.lookup([rng.randrange(2) for _ in range(9)], 3),
    "append": lambda m, rng: m.append(any_id(m, rng), rng.randint(1, 5)),
    "step": do_step,
    "fork": lambda m, rng: m.fork(any_id(m, rng), "injected"),
    "truncate": lambda m, rng: m.truncate(any_id(m, rng), 0),
    "close": lambda m, rng: m.close(any_id(m, rng)),
    "commit": lambda m, rng: m.commit(any_id(m, rng), [0]),
    "commit_step": do_commit_step,
    "retention.pin": lambda m, rng: m.retention.pin(any_id(m, rng)),
}

CUT = (
    "pagedkv.block_tables:BlockTables.beyond",
    "pagedkv.block_pool:BlockPool.release",
    "pagedkv.block_pool:BlockPool._require",
)
TAKE = (
    "pagedkv.policies.lru:LRU.first",
    "pagedkv.policies.lru:LRU._oldest",
    "pagedkv.block_pool:BlockPool.acquire",
)
INNER = {
    "open": (*TAKE, "pagedkv.block_pool:BlockPool._require"),
    "append": TAKE,
    "step": TAKE,
    "fork": TAKE[2:] + CUT[2:],
    "truncate": CUT,
    "close": CUT,
}
"""What the compiled core does in one call, where it may; private ones are the numpy engine's alone."""

SHARING = ("pagedkv.prefix_index:PrefixIndex.match", "pagedkv.block_cache:BlockCache.share")
"""What of a commit may fail behind the first change, of which nobody can see anything."""

POINTS = [
    (operation, point)
    for operation in OPERATIONS
    for point in (*FAILURE_POINTS[operation], *INNER.get(operation, ()))
    if core.engine() == "numpy" or "._" not in point
]

NUMPY = ["concatenate", "arange", "flatnonzero", "unique", "where", "zeros"]
PLANNING = {"match", "first", "acquire", "plan_growth", "shared_tails"}
"""While one of these runs, the operations tested have changed nothing yet, or can take it back."""
CHANGING = {"_forget", "discard", "replace"}
"""Unless it has come to one of these."""


def is_planning(frame: FrameType) -> bool:
    """Whether the numpy call comes from a planning step of the manager."""
    names = set()
    caller: FrameType | None = frame
    while caller is not None and "pagedkv" in caller.f_globals.get("__name__", ""):
        names.add(caller.f_code.co_name)
        caller = caller.f_back
    return bool(names & PLANNING) and not names & CHANGING


def attempt(
    injector: FailureInjector, act: Operation, manager: KVCacheManager, seed: int, fail_at: int = 0
) -> int:
    """Run the operation with the ``fail_at``-th call failing (0: none); returns the calls seen."""
    with injector.failing(fail_at), suppress(PagedKVError):
        act(manager, random.Random(seed))
    return injector.calls


def walk_with_failures(
    injector: FailureInjector,
    act: Operation,
    seed: int,
    look: Callable[[KVCacheManager], object] = seen_state,
    stepwise: bool = False,
) -> int:
    """A walk before each of whose operations ``act`` fails in every way; returns the failures injected."""
    rng = random.Random(seed)
    injected = 0

    def fail_everywhere(manager: KVCacheManager) -> None:
        nonlocal injected
        if rng.random() < 0.7:
            return
        if stepwise:
            manager._cache._all_compiled = False  # as with events or another policy: one call has no middle
        choice = rng.randrange(2**32)
        for k in range(1, attempt(injector, act, copy.deepcopy(manager), choice) + 1):
            before = look(manager)
            with pytest.raises(MemoryError, match="injected"):
                attempt(injector, act, manager, choice, fail_at=k)
            assert look(manager) == before, f"call {k} failed and something changed"
            manager.check_invariants()
            injected += 1

    random_walk(250, seed=seed, before_op=fail_everywhere)
    return injected


def walk_until_it_failed(
    injector: FailureInjector,
    act: Operation,
    look: Callable[[KVCacheManager], object] = seen_state,
    stepwise: bool = False,
) -> None:
    """Walks with other seeds until more than ten failures were injected; most points need one or two."""
    injected = 0
    for seed in range(1, 30):
        injected += walk_with_failures(injector, act, seed, look, stepwise)
        if injected > 10:
            return
    pytest.fail(f"only {injected} failures were injected")


@pytest.mark.parametrize(("operation", "point"), POINTS, ids=lambda text: text.rpartition(".")[2])
def test_a_failure_leaves_everything_as_it_was(operation: str, point: str) -> None:
    """What fails while it plans, or behind the first change of ``open`` and ``fork``, has no effect.

    The walk then goes on in step with the model.
    """
    stepwise = point in INNER.get(operation, ())
    walk_until_it_failed(FailureInjector(point), OPERATIONS[operation], stepwise=stepwise)


@pytest.mark.skipif(core.engine() != "numpy", reason="only the numpy engine has a log to compact")
@pytest.mark.parametrize("operation", ["close", "truncate"])
def test_a_log_that_cannot_be_compacted_leaves_everything_as_it_was(operation: str) -> None:
    """The eviction order makes room before a reference is dropped, not between."""
    manager = KVCacheManager(8, 2)
    manager.open("a", range(9))
    manager.commit("a", range(9))
    order = manager._cache.policy
    assert isinstance(order, LRU)
    while order._tail + 4 <= len(order._log):
        order._tail += 1  # as if something had been cached and used again
    act = {"close": lambda m, rng: m.close("a"), "truncate": lambda m, rng: m.truncate("a", 0)}[operation]
    injector = FailureInjector("pagedkv.policies.lru:LRU._compact")
    before = seen_state(manager)
    with pytest.raises(MemoryError, match="injected"):
        attempt(injector, act, manager, 0, fail_at=1)
    assert seen_state(manager) == before
    assert attempt(injector, act, manager, 0) == 1
    manager.check_invariants()
    assert manager.counts == (4, 4, 0)


@pytest.mark.parametrize("point", SHARING)
@pytest.mark.parametrize("operation", ["commit", "commit_step"])
def test_a_commit_that_fails_before_it_shares_has_committed_nothing(operation: str, point: str) -> None:
    """Nothing that a later call could see has changed, and the same commit can be tried again."""
    act = {"commit": do_commit, "commit_step": do_one_commit_step}[operation]
    walk_until_it_failed(FailureInjector(point), act, visible)


def fails_then_succeeds(act: Callable[[], object], point: str, fail_at: int = 1) -> None:
    """Run ``act`` with one call failing, and then again."""
    with pytest.raises(MemoryError, match="injected"), FailureInjector(point).failing(fail_at):
        act()
    act()


def test_a_commit_step_that_failed_at_its_second_block_can_be_run_again() -> None:
    """The first block is indexed already, and is not held twice."""
    manager = KVCacheManager(8, 4)
    manager.events.record()
    for seq_id, start in (("a", 0), ("b", 50)):
        manager.open(seq_id, range(start, start + 4))
        manager.commit(seq_id, range(start, start + 3))
    fails_then_succeeds(lambda: manager.commit_step(["a", "b"], [3, 53]), SHARING[1], fail_at=2)
    manager.check_invariants()


def test_a_commit_that_failed_to_hold_an_equal_block_can_be_run_again() -> None:
    """The blocks behind the equal one are not indexed before that one is held."""
    manager = KVCacheManager(8, 4)
    manager.open("a", range(4))
    manager.commit("a", range(4))
    manager.open("b", range(8), max_cached_tokens=0)
    manager.close("a")

    def commit() -> None:
        manager.check_invariants()
        manager.commit("b", range(8))

    fails_then_succeeds(commit, "pagedkv.block_pool:BlockPool.acquire")
    manager.check_invariants()


@pytest.mark.parametrize("point", SHARING)
def test_a_commit_with_media_that_failed_can_be_run_again(point: str) -> None:
    """The media are not counted twice."""
    manager = KVCacheManager(8, 4)
    media = [Media(1, "cat")]
    manager.open("a", [7] * 4)
    fails_then_succeeds(lambda: manager.commit("a", [7] * 4, media=media), point)
    assert manager.open("b", [7] * 5, media=media) == (5, 4)


def test_a_commit_that_failed_leaves_no_media_behind() -> None:
    """Whoever then commits without them has not computed what others look for with them."""
    manager = KVCacheManager(8, 4)
    manager.open("a", [7] * 5)
    with pytest.raises(MemoryError), FailureInjector(SHARING[1]).failing():
        manager.commit("a", [7] * 4, media=[Media(1, "cat")])
    manager.commit("a", [7] * 4)
    assert manager.open("b", [7] * 5, media=[Media(1, "cat")]) == (5, 0)


def test_an_open_that_failed_to_evict_can_be_run_again() -> None:
    """Behind the pool's own change too: what the index allocates for a removal grows with the victims."""
    manager = KVCacheManager(2, 4, policy="fifo")
    manager.open("a", range(8))
    manager.commit("a", range(8))
    manager.close("a")
    fails_then_succeeds(lambda: manager.open("b", range(100, 108)), "pagedkv.prefix_index:PrefixIndex.remove")
    manager.check_invariants()


@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("operation", ["open", "append", "step", "fork", "lookup"])
def test_an_array_that_cannot_be_allocated_while_planning_leaves_everything_as_it_was(
    operation: str, name: str
) -> None:
    """The same for every numpy allocation of the planning steps."""
    injector = FailureInjector(f"numpy:{name}", only_when=is_planning)
    walk_with_failures(injector, OPERATIONS[operation], 3)


# -- bugs that must show


def blind_to_extra(*args: Any) -> Int32Array:
    return np.zeros(args[3], np.int32)


def mutate_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pagedkv.sequences, "shared_tails", lambda *args: NO_TAILS)


def mutate_unindexing(patch: pytest.MonkeyPatch) -> None:
    original = pagedkv.tails.shared_tails
    patch.setattr(
        pagedkv.sequences, "shared_tails", lambda *args: original(*args)._replace(private=NO_BLOCKS)
    )


def mutate_unindexing_of_inner_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "is_leaf", lambda self, block: True)


def mutate_unindexing_at_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "is_leaf", lambda self, block: False)


def mutate_number_of_holders(patch: pytest.MonkeyPatch) -> None:
    """The last of a batch keeps a tail even if somebody outside the batch holds it too."""
    original = pagedkv.tails.shared_tails

    def tails(*args: Any) -> Any:
        found = original(*args)
        return found._replace(copied=found.copied[:-1])

    patch.setattr(pagedkv.sequences, "shared_tails", tails)


def mutate_namespaces(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SequenceExtra, "ids", blind_to_extra)


def mutate_release_order(patch: pytest.MonkeyPatch) -> None:
    original = BlockCache.release
    patch.setattr(BlockCache, "release", lambda self, ids: original(self, ids[::-1]))


def mutate_hit_protection(patch: pytest.MonkeyPatch) -> None:
    original = LRU.first
    patch.setattr(LRU, "first", lambda self, count, keep: original(self, count, NO_BLOCKS))


def mutate_hit_limit(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager._match
    patch.setattr(KVCacheManager, "_match", lambda self, p, extra, limit: original(self, p, extra, len(p)))


def mutate_discard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LRU, "discard", lambda self, ids: None)


def mutate_sharing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequences, "_share", lambda self, *args: None)


def mutate_watermark(patch: pytest.MonkeyPatch) -> None:
    def without(self: KVCacheManager, hit: Int32Array, fresh: int) -> bool:
        pool = self._cache.pool
        return fresh + int(np.count_nonzero(pool.ref_count[hit] == 0)) <= pool.num_available

    patch.setattr(KVCacheManager, "_fits_now", without)


def mutate_watermark_of_idle_hits(patch: pytest.MonkeyPatch) -> None:
    def without(self: KVCacheManager, hit: Int32Array, fresh: int) -> bool:
        pool = self._cache.pool
        idle = int(np.count_nonzero(pool.ref_count[hit] == 0))
        reserve = int(self._watermark * pool.num_blocks) if len(self.tables) else 0
        return fresh + idle <= pool.num_available and fresh <= max(0, pool.num_available - reserve)

    patch.setattr(KVCacheManager, "_fits_now", without)


def mutate_idle_hits(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager._fits_now
    patch.setattr(KVCacheManager, "_fits_now", lambda self, hit, fresh: original(self, hit[:0], fresh))


def mutate_forgetting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockCache, "_forget", lambda self, ids, reason: None)


def mutate_pending_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingCopies, "pending", property(lambda self: BlockCopies(NO_BLOCKS, NO_BLOCKS)))


def mutate_committed_steps(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.commit_step

    def wrong(self: KVCacheManager, ids: Any, tokens: Any, accepted: Any = None) -> None:
        original(self, ids, (np.asarray(tokens) * 0).tolist(), accepted)

    patch.setattr(KVCacheManager, "commit_step", wrong)


def mutate_eviction_order(patch: pytest.MonkeyPatch) -> None:
    original = LRU.first
    patch.setattr(LRU, "first", lambda self, count, keep: original(self, 10**6, keep)[::-1][: max(count, 0)])


def mutate_copied_content(patch: pytest.MonkeyPatch) -> None:
    original = PendingCopies.take

    def reversed_copies(self: PendingCopies) -> Any:
        copies = original(self)
        return copies._replace(src=copies.dst, dst=copies.src)

    patch.setattr(PendingCopies, "take", reversed_copies)


def mutate_written_tokens(patch: pytest.MonkeyPatch) -> None:
    original = Sequences.commit
    patch.setattr(
        Sequences, "commit", lambda self, row, new, extra: original(self, row, np.zeros_like(new), extra)
    )


def mutate_held_sources(patch: pytest.MonkeyPatch) -> None:
    """What a copy reads is given up as soon as the copy is asked for."""
    copy_blocks = BlockCache.copy

    def letting_go(self: BlockCache, src: Int32Array, dst: Int32Array) -> None:
        copy_blocks(self, src, dst)
        for block in src.reshape(-1, 1):
            self.release(block)

    def take(self: PendingCopies) -> BlockCopies:
        copies = self.pending
        self.source_of.clear()
        return copies

    patch.setattr(BlockCache, "copy", letting_go)
    patch.setattr(PendingCopies, "take", take)
    patch.setattr(PendingCopies, "read_by", lambda self, blocks: NO_BLOCKS)


def mutate_fenced_sources(patch: pytest.MonkeyPatch) -> None:
    """What a copy reads is given up when it is taken, whatever fences are open."""
    original = PendingCopies.__init__
    patch.setattr(
        PendingCopies, "__init__", lambda self, give_up, room: original(self, give_up.__self__._give_up, room)
    )


def mutate_best_child(patch: pytest.MonkeyPatch) -> None:
    original = PrefixIndex.best_child

    def one_more(self: PrefixIndex, row: Any, extra: int, parent: int = 0) -> tuple[int, int]:
        block, count = original(self, row, extra, parent)
        return block, count + (0 < count < len(row))

    patch.setattr(PrefixIndex, "best_child", one_more)


def mutate_best_child_of_any_namespace(patch: pytest.MonkeyPatch) -> None:
    original = PrefixIndex.best_child
    patch.setattr(
        PrefixIndex, "best_child", lambda self, row, extra, parent=0: original(self, row, 0, parent)
    )


def mutate_announcements(patch: pytest.MonkeyPatch) -> None:
    """What was announced is said to come even when it was given up."""
    patch.setattr(Announced, "cut", lambda self, row, committed, length: None)


def mutate_coming(patch: pytest.MonkeyPatch) -> None:
    original = Announced.common
    patch.setattr(Announced, "common", lambda self, *args: original(self, *args) + 1)


def mutate_accepted_drafts(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts keep their slots."""
    original = KVCacheManager.commit_step

    def uncut(self: KVCacheManager, *args: Any, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KVCacheManager, "_cut_row", lambda self, row, num_tokens: None)
            original(self, *args, **options)

    patch.setattr(KVCacheManager, "commit_step", uncut)


def mutate_reasons(patch: pytest.MonkeyPatch) -> None:
    original = BlockCache._forget
    patch.setattr(BlockCache, "_forget", lambda self, ids, reason: original(self, ids, "policy"))


MUTATIONS = {name[7:]: act for name, act in list(globals().items()) if name.startswith("mutate_")}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_random_walk_finds_a_manager_with_this_bug(
    mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk that could not fail would prove nothing: sizes and seed are those of walks that pass above."""
    MUTATIONS[mutation](monkeypatch)
    with pytest.raises((AssertionError, PagedKVError, KeyError)):
        for size in ("default", "watermark", "one_token_vocabulary", "long_blocks"):
            random_walk(2_000, seed=1, **SIZES[size])


class Unchained(dict[int, int]):
    """Pending copies that never say that a source is itself still to be copied."""

    def get(self, key: int, default: Any = None) -> Any:
        return default


def test_the_walk_with_late_copies_finds_a_copy_of_what_was_not_copied_yet() -> None:
    """Without following a pending copy to its source, a fork of a fork reads an empty block."""
    with pytest.raises(AssertionError):
        for seed in range(10):
            walk = LateCopies(seed)
            walk.manager._cache.copies.source_of = Unchained()
            walk.run(500)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (PendingCopies, "forget"),
        (Sequences, "set_extra"),
        (ExtraKeys, "share"),
        (ExtraKeys, "drop"),
    ],
)
def test_the_other_walks_find_what_is_kept_too_long_or_not_at_all(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies into free blocks and users of extra keys are recounted after every operation."""
    monkeypatch.setattr(owner, name, lambda self, *args: None)
    with pytest.raises((AssertionError, PagedKVError, KeyError)):
        for seed in range(4):
            LateCopies(seed).run(500)
            MediaWalk(seed).run(500)
