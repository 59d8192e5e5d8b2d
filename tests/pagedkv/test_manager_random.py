"""The manager against models under random operations, with failures injected, with bugs that must show."""

import copy
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pagedkv.manager
from pagedkv import BlockPool, KVCacheManager, Media, Namespace, PagedKVError, PageTable
from pagedkv.block_cache import BlockCache
from pagedkv.block_pool import FREE, NO_BLOCKS
from pagedkv.content import SequenceExtra
from pagedkv.namespace import ExtraKeys
from pagedkv.page_table import Int32Array, SeqId
from pagedkv.policies.lru import LRU
from pagedkv.prefix_index import PrefixIndex
from pagedkv.tails import NO_TAILS
from pagedkv.testing import ShadowStorage, manager_state, random_walk, snapshot

UNSEEN = ("_seen", "_head", "_next")
"""A scratch array, the lazy head of the order, and the number of the next extra key."""


def seen_state(manager: KVCacheManager) -> object:
    """Everything inside a manager but what is ``UNSEEN``."""
    return snapshot(manager, UNSEEN)


def visible(manager: KVCacheManager) -> object:
    """All that any later call can depend on: what uncommitted slots are thought to hold is left out."""
    pool, index = manager._cache.pool, manager._cache.index
    extra = {row: (e.namespace, sorted(e.media), e.by_block) for row, e in manager._extra.items()}
    partial = {}
    for seq_id in manager.tables.seq_ids:
        done = manager.num_committed(seq_id)
        slots = manager.tables.slots(seq_id, done - done % manager.block_size, done)
        partial[seq_id] = index.tokens.reshape(-1)[slots].tolist()
    return (
        manager_state(manager),
        (manager.tables.blocks.tolist(), manager.tables.seq_ids, extra, partial),
        (pool.ref_count.tolist(), pool.state.tolist()),
        pool._free[: pool.num_free].tolist(),
        manager._cache.policy.ids().tolist(),
        sorted((before, ids.tolist()) for before, ids in index.chains()),
        index.tokens[index.indexed].tolist(),
        [list(manager._cache.extra_keys._keys.get(x, ())) for x in index.extra[index.indexed].tolist()],
        sorted(manager._cache.extra_keys._uses.values()),
        dict(manager._cache._copies),
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
    "roomy": {"num_blocks": 40, "block_size": 2, "max_seqs": 6},
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_a_long_random_walk_agrees_with_the_model(size: str, seed: int) -> None:
    """Five thousand operations each: results, counts, slot contents and invariants after every one."""
    stats = random_walk(5_000, seed=seed, **SIZES[size]).stats()
    assert stats.num_opened > 200
    assert stats.evicted_blocks > 0 or size == "one_block"


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
        together.take_copies()
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
            self.manager.commit(seq_id, known[self.manager.num_committed(seq_id) :])
        for seq_id, known in self.tokens.items():
            assert self.shadow.read(self.manager, seq_id) == known

    def open(self) -> None:
        prompt = [self.random.randrange(3) for _ in range(self.random.randint(0, 11))]
        seq_id = next(self.names)
        opened = self.manager.open(seq_id, prompt)
        if opened is not None:
            self.tokens[seq_id] = prompt[: opened.num_cached_tokens]

    def grow(self, seq_id: SeqId) -> None:
        if self.manager.tables.num_tokens(seq_id) < 20:
            before = dict(self.manager._cache._copies)
            self.manager.append(seq_id, self.random.randint(1, 3))
            new = {dst: src for dst, src in self.manager._cache._copies.items() if dst not in before}
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
            pending = len(self.manager.pending_copies.src)
            name = self.random.choice(
                ["open", "grow", "grow", "grow", "cut", "fork", "fork", "close", "flush"]
            )
            if name in ("open", "flush"):
                getattr(self, name)()
            elif self.tokens:
                getattr(self, name)(self.random.choice(list(self.tokens)))
                self.dropped += len(self.manager.pending_copies.src) < pending
            self.manager.check_invariants()
            destinations = self.manager.pending_copies.dst
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
            self.manager.take_copies()
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
        for extra in self.manager._extra.values():
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
    assert walk.manager._extra == {}


# -- failures injected

Point = tuple[Any, str]
Operation = Callable[[KVCacheManager, random.Random], object]


def any_id(manager: KVCacheManager, rng: random.Random) -> SeqId:
    return rng.choice(manager.tables.seq_ids) if len(manager.tables) else "nobody"


def do_open(manager: KVCacheManager, rng: random.Random) -> object:
    prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
    media = [Media(rng.randrange(len(prompt)), "cat")] if rng.random() < 0.2 else []
    return manager.open("injected", prompt, namespace=rng.choice([None, Namespace("tenant")]), media=media)


def do_step(manager: KVCacheManager, rng: random.Random) -> object:
    ids = manager.tables.seq_ids
    return manager.step(rng.sample(ids, rng.randint(0, len(ids))), rng.randint(1, 3))


def uncommitted(manager: KVCacheManager, seq_id: SeqId) -> int:
    return manager.tables.num_tokens(seq_id) - manager.num_committed(seq_id)


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
    "can_admit": lambda m, rng: m.can_admit([rng.randrange(2) for _ in range(9)], 3),
    "append": lambda m, rng: m.append(any_id(m, rng), rng.randint(1, 5)),
    "step": do_step,
    "fork": lambda m, rng: m.fork(any_id(m, rng), "injected"),
    "truncate": lambda m, rng: m.truncate(any_id(m, rng), 0),
    "close": lambda m, rng: m.close(any_id(m, rng)),
    "commit": lambda m, rng: m.commit(any_id(m, rng), [0]),
    "commit_step": do_commit_step,
}

POINTS: dict[str, list[Point]] = {
    "open": [
        (SequenceExtra, "build"),
        (PrefixIndex, "match"),
        (LRU, "first"),
        (LRU, "_oldest"),
        (BlockPool, "acquire"),
        (BlockPool, "_require"),
        (PageTable, "add"),
        (KVCacheManager, "_set_extra"),
        (ExtraKeys, "exchange"),
        (ExtraKeys, "take"),
        (BlockCache, "acquire"),
    ],
    "can_admit": [(SequenceExtra, "build"), (PrefixIndex, "match")],
    "append": [
        (PageTable, "row"),
        (BlockCache, "is_shared"),
        (PrefixIndex, "is_leaf"),
        (LRU, "first"),
        (BlockPool, "acquire"),
    ],
    "step": [
        (PageTable, "rows"),
        (BlockCache, "is_shared"),
        (PrefixIndex, "is_leaf"),
        (LRU, "first"),
        (BlockPool, "acquire"),
    ],
    "fork": [
        (PageTable, "block_ids"),
        (PageTable, "add"),
        (KVCacheManager, "_set_extra"),
        (ExtraKeys, "exchange"),
        (ExtraKeys, "take"),
        (BlockCache, "acquire"),
        (BlockPool, "acquire"),
        (BlockPool, "_require"),
    ],
    "truncate": [
        (PageTable, "num_blocks"),
        (BlockPool, "release"),
        (BlockPool, "_require"),
    ],
    "close": [
        (PageTable, "block_ids"),
        (BlockPool, "release"),
        (BlockPool, "_require"),
    ],
    "commit": [
        (PageTable, "row"),
        (pagedkv.manager, "as_token_array"),
        (SequenceExtra, "extended"),
        (BlockCache, "require_copied"),
    ],
    "commit_step": [
        (PageTable, "rows"),
        (pagedkv.manager, "as_token_array"),
        (BlockCache, "require_copied"),
    ],
}

NUMPY = ["concatenate", "arange", "flatnonzero", "unique", "where", "zeros"]
PLANNING = {"_match", "first", "acquire", "shared_tails"}
"""While one of these runs, the operations tested have changed nothing yet, or can take it back."""
CHANGING = {"forget", "discard", "replace"}
"""Unless it has come to one of these."""


def is_planning() -> bool:
    """Whether the numpy call comes from a planning step of the manager."""
    frame = sys._getframe(2)
    names = set()
    while frame.f_back is not None and "pagedkv" in frame.f_globals.get("__name__", ""):
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return bool(names & PLANNING) and not names & CHANGING


class Injector:
    """Raises ``MemoryError`` at the chosen call of one function; counts the calls otherwise.

    It raises once only, so that what takes a change back may call the same function.
    """

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, only_planning: bool = False) -> None:
        self.calls = 0
        self.fail_at = 0
        self.active = False
        original = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if self.active and (not only_planning or is_planning()):
                self.calls += 1
                if self.calls == self.fail_at:
                    raise MemoryError("injected")
            return original(*args, **kwargs)

        static = isinstance(vars(owner).get(name), classmethod)
        patch.setattr(owner, name, staticmethod(replaced) if static else replaced)

    def run(self, act: Operation, manager: KVCacheManager, seed: int, fail_at: int = 0) -> int:
        """Run the operation with the ``fail_at``-th call failing (0: none); returns the calls seen."""
        self.calls, self.fail_at, self.active = 0, fail_at, True
        try:
            act(manager, random.Random(seed))
        except PagedKVError:
            pass
        finally:
            self.active = False
        return self.calls


def walk_with_failures(
    injector: Injector, act: Operation, seed: int, look: Callable[[KVCacheManager], object] = seen_state
) -> int:
    """A walk before each of whose operations ``act`` fails in every way; returns the failures injected."""
    rng = random.Random(seed)
    injected = 0

    def fail_everywhere(manager: KVCacheManager) -> None:
        nonlocal injected
        if rng.random() < 0.7:
            return
        choice = rng.randrange(2**32)
        for k in range(1, injector.run(act, copy.deepcopy(manager), choice) + 1):
            before = look(manager)
            with pytest.raises(MemoryError, match="injected"):
                injector.run(act, manager, choice, fail_at=k)
            assert look(manager) == before, f"call {k} failed and something changed"
            manager.check_invariants()
            injected += 1

    random_walk(250, seed=seed, before_op=fail_everywhere)
    return injected


def walk_until_it_failed(
    injector: Injector, act: Operation, look: Callable[[KVCacheManager], object] = seen_state
) -> None:
    """Walks with other seeds until more than ten failures were injected; most points need one or two."""
    injected = 0
    for seed in range(1, 30):
        injected += walk_with_failures(injector, act, seed, look)
        if injected > 10:
            return
    pytest.fail(f"only {injected} failures were injected")


@pytest.mark.parametrize(
    ("operation", "point"),
    [
        pytest.param(operation, point, id=f"{operation}-{point[1]}")
        for operation, points in POINTS.items()
        for point in points
    ],
)
def test_a_failure_leaves_everything_as_it_was(
    operation: str, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails while it plans, or behind the first change of ``open`` and ``fork``, has no effect.

    The walk then goes on in step with the model.
    """
    injector = Injector(monkeypatch, *point)
    walk_until_it_failed(injector, OPERATIONS[operation])


@pytest.mark.parametrize("operation", ["close", "truncate"])
def test_a_log_that_cannot_be_compacted_leaves_everything_as_it_was(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eviction order makes room before a reference is dropped, not between."""
    manager = KVCacheManager(8, 2)
    manager.open("a", range(9))
    manager.commit("a", range(9))
    order = manager._cache.policy
    assert isinstance(order, LRU)
    while order._tail + 4 <= len(order._log):
        order._tail += 1  # as if something had been cached and used again
    act = {"close": lambda m, rng: m.close("a"), "truncate": lambda m, rng: m.truncate("a", 0)}[operation]
    injector = Injector(monkeypatch, LRU, "_compact")
    before = seen_state(manager)
    with pytest.raises(MemoryError, match="injected"):
        injector.run(act, manager, 0, fail_at=1)
    assert seen_state(manager) == before
    assert injector.run(act, manager, 0) == 1
    manager.check_invariants()
    assert manager.counts == (4, 4, 0)


@pytest.mark.parametrize("point", [(PrefixIndex, "match"), (BlockCache, "share")], ids=lambda p: p[1])
@pytest.mark.parametrize("operation", ["commit", "commit_step"])
def test_a_commit_that_fails_before_it_shares_has_committed_nothing(
    operation: str, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a later call could see has changed, and the same commit can be tried again."""
    injector = Injector(monkeypatch, *point)
    act = {"commit": do_commit, "commit_step": do_one_commit_step}[operation]
    walk_until_it_failed(injector, act, visible)


def fails_then_succeeds(
    act: Callable[[], object], patch: pytest.MonkeyPatch, point: Point, fail_at: int = 1
) -> None:
    """Run ``act`` with one call failing, and then again."""
    calls, original = 0, getattr(*point)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise MemoryError("injected")
        return original(*args, **kwargs)

    patch.setattr(*point, replaced)
    with pytest.raises(MemoryError, match="injected"):
        act()
    act()


def test_a_commit_step_that_failed_at_its_second_block_can_be_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first block is indexed already, and is not held twice."""
    manager = KVCacheManager(8, 4)
    for seq_id, start in (("a", 0), ("b", 50)):
        manager.open(seq_id, range(start, start + 4))
        manager.commit(seq_id, range(start, start + 3))
    fails_then_succeeds(
        lambda: manager.commit_step(["a", "b"], [3, 53]), monkeypatch, (BlockCache, "share"), fail_at=2
    )
    manager.check_invariants()


def test_a_commit_that_failed_to_hold_an_equal_block_can_be_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks behind the equal one are not indexed before that one is held."""
    manager = KVCacheManager(8, 4)
    manager.open("a", range(4))
    manager.commit("a", range(4))
    manager.open("b", range(8), max_cached_tokens=0)
    manager.close("a")

    def commit() -> None:
        manager.check_invariants()
        manager.commit("b", range(8))

    fails_then_succeeds(commit, monkeypatch, (BlockPool, "acquire"))
    manager.check_invariants()


@pytest.mark.parametrize("point", [(BlockCache, "share"), (PrefixIndex, "match")], ids=lambda p: p[1])
def test_a_commit_with_media_that_failed_can_be_run_again(
    point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The media are not counted twice."""
    manager = KVCacheManager(8, 4)
    media = [Media(1, "cat")]
    manager.open("a", [7] * 4)
    fails_then_succeeds(lambda: manager.commit("a", [7] * 4, media=media), monkeypatch, point)
    assert manager.open("b", [7] * 5, media=media) == (5, 4)


def test_an_open_that_failed_to_evict_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the pool's own change too: what the index allocates for a removal grows with the victims."""
    manager = KVCacheManager(2, 4)
    manager.open("a", range(8))
    manager.commit("a", range(8))
    manager.close("a")
    fails_then_succeeds(lambda: manager.open("b", range(100, 108)), monkeypatch, (PrefixIndex, "remove"))
    manager.check_invariants()


@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("operation", ["open", "append", "step", "fork", "can_admit"])
def test_an_array_that_cannot_be_allocated_while_planning_leaves_everything_as_it_was(
    operation: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for every numpy allocation of the planning steps."""
    injector = Injector(monkeypatch, np, name, only_planning=True)
    walk_with_failures(injector, OPERATIONS[operation], 3)


# -- bugs that must show


def blind_to_extra(*args: Any) -> Int32Array:
    return np.zeros(args[3], np.int32)


def mutate_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pagedkv.manager, "shared_tails", lambda *args: NO_TAILS)


def mutate_unindexing(patch: pytest.MonkeyPatch) -> None:
    original = pagedkv.tails.shared_tails
    patch.setattr(pagedkv.manager, "shared_tails", lambda *args: original(*args)._replace(private=NO_BLOCKS))


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

    patch.setattr(pagedkv.manager, "shared_tails", tails)


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
    patch.setattr(KVCacheManager, "_share_blocks", lambda self, row, first, content: None)


def mutate_watermark(patch: pytest.MonkeyPatch) -> None:
    def without(self: KVCacheManager, hit: Int32Array, fresh: int) -> bool:
        pool = self._cache.pool
        return fresh + int(np.count_nonzero(pool.ref_count[hit] == 0)) <= pool.num_available

    patch.setattr(KVCacheManager, "_fits_now", without)


def mutate_watermark_of_idle_hits(patch: pytest.MonkeyPatch) -> None:
    def without(self: KVCacheManager, hit: Int32Array, fresh: int) -> bool:
        pool = self._cache.pool
        idle = int(np.count_nonzero(pool.ref_count[hit] == 0))
        reserve = self._watermark_blocks if len(self.tables) else 0
        return fresh + idle <= pool.num_available and fresh <= max(0, pool.num_available - reserve)

    patch.setattr(KVCacheManager, "_fits_now", without)


def mutate_idle_hits(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager._fits_now
    patch.setattr(KVCacheManager, "_fits_now", lambda self, hit, fresh: original(self, hit[:0], fresh))


def mutate_forgetting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockCache, "forget", lambda self, ids: None)


def mutate_pending_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "pending_copies", property(KVCacheManager.take_copies))


def mutate_committed_steps(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.commit_step
    patch.setattr(
        KVCacheManager, "commit_step", lambda self, ids, tokens: original(self, ids, [0 for _ in tokens])
    )


def mutate_eviction_order(patch: pytest.MonkeyPatch) -> None:
    original = LRU.first
    patch.setattr(LRU, "first", lambda self, count, keep: original(self, 10**6, keep)[::-1][: max(count, 0)])


def mutate_copied_content(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.take_copies

    def reversed_copies(self: KVCacheManager) -> Any:
        copies = original(self)
        return copies._replace(src=copies.dst, dst=copies.src)

    patch.setattr(KVCacheManager, "take_copies", reversed_copies)


def mutate_written_tokens(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager._commit_content
    patch.setattr(
        KVCacheManager,
        "_commit_content",
        lambda self, row, start, new, extra: original(self, row, start, np.zeros_like(new), extra),
    )


MUTATIONS = {name[7:]: act for name, act in list(globals().items()) if name.startswith("mutate_")}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_random_walk_finds_a_manager_with_this_bug(
    mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk that could not fail would prove nothing: sizes and seed are those of walks that pass above."""
    MUTATIONS[mutation](monkeypatch)
    with pytest.raises((AssertionError, PagedKVError, KeyError)):
        for size in ("default", "watermark", "one_token_vocabulary"):
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
            walk.manager._cache._copies = Unchained()
            walk.run(500)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (BlockCache, "_drop_copies"),
        (KVCacheManager, "_set_extra"),
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
