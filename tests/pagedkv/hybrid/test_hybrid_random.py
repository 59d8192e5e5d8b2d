"""The hybrid manager against a slow model and against the manager of one group, under random operations."""

import random
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import BlockCopies, Namespace, SequenceError
from pagedkv.block_tables import NULL_BLOCK
from pagedkv.hybrid import CacheGroup, HybridKVCacheManager
from pagedkv.hybrid.admission import Admission
from pagedkv.hybrid.checked import CheckedHybridManager, hybrid_state
from pagedkv.hybrid.content_tree import ContentTree
from pagedkv.hybrid.hits import Hits
from pagedkv.hybrid.rows import Rows
from pagedkv.policies import POLICIES, EvictionPolicy
from pagedkv.policies.quotas import NamespaceQuotas
from pagedkv.reference_policies import ReferencePolicy, ReferenceQuotas

FULL = CacheGroup("full", (0,))
GROUPS: dict[str, tuple[CacheGroup, ...]] = {
    "full": (FULL,),
    "two_full": (FULL, CacheGroup("other", (1,))),
    "full_window": (FULL, CacheGroup("w4", (1,), window=4)),
    "window_full": (CacheGroup("w5", (1,), window=5), FULL),
    "full_window_sinks": (FULL, CacheGroup("w3s2", (1,), window=3, sinks=2)),
    "full_two_windows": (CacheGroup("w7s1", (1,), window=7, sinks=1), FULL, CacheGroup("w2", (2,), window=2)),
    "two_windows": (CacheGroup("w3", (0,), window=3), CacheGroup("w8", (1,), window=8)),
    "two_windows_sinks": (
        CacheGroup("w20s6", (0,), window=20, sinks=6),
        CacheGroup("w2s4", (1,), window=2, sinks=4),
    ),
    "window": (CacheGroup("w5", (0,), window=5),),
    "window_sinks": (CacheGroup("w4s3", (0,), window=4, sinks=3),),
    "window_of_one": (CacheGroup("w1", (0,), window=1),),
}
WEIGHTS = {"open": 12, "step": 12, "append": 4, "commit": 18, "fork": 2, "truncate": 5, "close": 5}
WEIGHTS |= {"look_up": 2, "pin": 1, "unpin": 2, "fence": 1, "signal": 3}
WEIGHTS |= {"load": 5, "verify": 4, "defragment": 1, "resize": 1, "reset": 1}
TENANT = Namespace(salt="tenant")


class Walk:
    """A checked manager, and what every slot of the storage holds, driven together."""

    def __init__(
        self,
        seed: int,
        groups: Sequence[CacheGroup],
        num_blocks: int = 16,
        block_size: int = 2,
        max_seqs: int = 4,
        vocabulary: int = 2,
        max_len: int | None = None,
        watermark: float = 0.0,
        policy: str | EvictionPolicy = "lru",
        reference: str | Callable[[int, int], ReferencePolicy] = "lru",
    ) -> None:
        self.random = random.Random(seed)
        self.groups, self.vocabulary, self.block_size = groups, vocabulary, block_size
        self.max_len = max_len or num_blocks * block_size // len(groups) + 8
        manager = HybridKVCacheManager(
            groups,
            num_blocks,
            block_size,
            max_seqs=max_seqs,
            max_seq_len=self.max_len,
            watermark=watermark,
            policy=policy,
        )
        manager.events.record(b"walk")
        self.checked = CheckedHybridManager(manager, reference)
        self.manager, self.model = manager, self.checked.model
        self.sizes = num_blocks * 3 // 4, num_blocks * 5 // 4
        self.slots = np.full((self.sizes[1] + 1) * block_size, -1)
        self.prompts: dict[Hashable, list[int]] = {}
        self.loaded: dict[Hashable, int] = {}  # how far it can be seen before that is committed
        self.pins: list[int] = []
        self.next_id = self.hits = self.partly_hit = self.refused_cuts = self.inside = self.refused_pins = 0
        self.moved = self.rejected = self.filled = 0

    def run(self, num_ops: int, weights: dict[str, int] = WEIGHTS) -> "Walk":
        for number in range(num_ops):
            name = self.random.choices(list(weights), list(weights.values()))[0]
            try:
                getattr(self, name)()
                self.check_slots()
            except AssertionError as error:
                raise AssertionError(f"operation {number} ({name}): {error}") from error
        return self

    def check_slots(self) -> None:
        """Whatever the next token of a sequence sees, in any group, is what was committed there."""
        if len(self.manager.copies):
            return
        for seq_id, seq in self.model.seqs.items():
            done = len(seq.tokens)
            at = max(done, self.loaded.get(seq_id, 0))
            for g, group in enumerate(self.groups):
                table = self.manager.tables[group.name]
                blocks, slots = table.block_ids(seq_id), table.slots(seq_id)
                for position, token in enumerate(seq.tokens):
                    seen = group.window is None or position > at - group.window or position < group.sinks
                    there = blocks[position // table.block_size] != NULL_BLOCK
                    assert there or not seen, f"{group.name}: position {position} of {seq_id} is gone"
                    if there:
                        held = self.slots[slots[position]]
                        assert held == 100 * g + token, f"{group.name}: {seq_id}[{position}] holds {held}"

    def copy(self) -> None:
        copies = self.checked.take_copies()
        rows = self.slots.reshape(-1, self.block_size)
        rows[copies.dst] = rows[copies.src]

    # -- operations

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(count)]

    def any(self) -> Hashable | None:
        return self.random.choice(list(self.model.seqs)) if self.model.seqs else None

    def prompt(self) -> tuple[list[int], Namespace | None]:
        """Half of the prompts begin like something that some group has."""
        namespace = self.random.choice([None, None, TENANT])
        tokens = self.tokens(self.random.randrange(self.max_len))
        paths = [path for by in self.model.by_prefix for path in by]
        if paths and self.random.random() < 0.6:
            path: Any = self.random.choice(paths)
            namespace = path[0]
            tokens = [*path[1 : self.random.randint(1, len(path))], *tokens[: self.random.randrange(5)]]
        return tokens[: self.max_len - 1], namespace

    def open(self) -> None:
        tokens, namespace = self.prompt()
        seq_id, self.next_id = self.next_id, self.next_id + 1
        options: dict[str, Any] = {
            "max_fresh_tokens": self.random.choice([None, 1, 3, 6]),
            "max_cached_tokens": self.random.choice([None, None, None, len(tokens), 3]),
            "partial_hits": self.random.random() < 0.5,
            "announce": self.random.random() < 0.5,
        }
        opened = self.checked.open(seq_id, tokens, namespace=namespace, **options)
        if opened:
            if self.random.random() < 0.7:
                self.copy()
            self.prompts[seq_id] = tokens
            self.hits += opened.num_cached_tokens > 0
            self.inside += opened.num_cached_tokens % self.block_size > 0
            blocks = [self.manager.tables[g.name].block_ids(seq_id) for g in self.groups]
            self.partly_hit += any(
                b[: opened.num_cached_tokens // self.block_size].min(initial=1) == 0 for b in blocks
            )

    def load(self) -> None:
        """A prompt of which somebody else has a part: not all of its blocks have to be filled."""
        tokens, namespace = self.prompt()
        loaded = self.random.randint(len(tokens) // 2, len(tokens))
        options = {"max_fresh_tokens": 2, "max_cached_tokens": self.random.choice([None, len(tokens)])}
        seq_id, self.next_id = self.next_id, self.next_id + 1
        opened = self.checked.open(seq_id, tokens, namespace=namespace, loaded_tokens=loaded, **options)
        if opened:
            self.prompts[seq_id] = tokens
            self.loaded[seq_id] = loaded // self.block_size * self.block_size
            self.filled += opened.num_cached_tokens < loaded

    def look_up(self) -> None:
        """And what it says of an open must come true."""
        tokens, namespace = self.prompt()
        fresh = self.random.choice([None, 1, 4])
        growth = min(self.random.choice([0, 0, 1, 5]), self.max_len - len(tokens))
        found = self.checked.lookup(tokens, growth, namespace, fresh)
        if found is not None and (found.fits or (fresh is None and not growth)):
            seq_id, self.next_id = self.next_id, self.next_id + 1
            opened = self.checked.open(seq_id, tokens, namespace=namespace, max_fresh_tokens=fresh)
            assert (opened is not None) == found.fits
            if opened:
                assert opened.num_cached_tokens == found.num_cached_tokens
                self.prompts[seq_id] = tokens

    def step(self) -> None:
        ids = [i for i in self.model.seqs if self.model.seqs[i].length < self.max_len]
        self.checked.step(self.random.sample(ids, self.random.randint(0, len(ids))), 1)

    def append(self) -> None:
        seq_id, count = self.any(), self.random.randrange(6)
        if seq_id is None or self.model.seqs[seq_id].length + count > self.max_len:
            return
        self.checked.append(seq_id, count)

    def commit(self) -> None:
        seq_id = self.any()
        if seq_id is None:
            return
        seq = self.model.seqs[seq_id]
        start, left = len(seq.tokens), seq.length - len(seq.tokens)
        count = self.random.choice([left, self.random.randint(0, left)])
        known = self.prompts.get(seq_id, [])[start : start + count]
        tokens = known + self.tokens(count - len(known))
        self.copy()
        for g, table in enumerate(self.manager.tables.values()):
            self.slots[table.slots(seq_id, start, start + count)] = 100 * g + np.array(tokens, np.int64)
        if count == 1 and self.random.random() < 0.5:
            self.checked.commit_step([seq_id], tokens)
        else:
            self.checked.commit(seq_id, tokens)

    def verify(self) -> None:
        """Drafts are written, some of them are right, and the others go."""
        at = {i: max(len(s.tokens), self.loaded.get(i, 0)) for i, s in self.model.seqs.items()}
        ids = [
            i for i, s in self.model.seqs.items() if s.length + 4 <= self.max_len and at[i] == len(s.tokens)
        ]
        ids = self.random.sample(ids, min(len(ids), 2))
        if not self.checked.step(ids, self.random.randint(1, 4)):
            return
        self.copy()
        drafts, counts = [], []
        for seq_id in ids:
            start, length = len(self.model.seqs[seq_id].tokens), self.model.seqs[seq_id].length
            known = self.prompts.get(seq_id, [])[start:length]
            drafts.append(known + self.tokens(length - start - len(known)))
            counts.append(self.random.randint(0, length - start))
            for g, table in enumerate(self.manager.tables.values()):
                self.slots[table.slots(seq_id, start)] = 100 * g + np.array(drafts[-1], np.int64)
            self.rejected += counts[-1] < length - start
            self.prompts[seq_id] = self.prompts.get(seq_id, [])[: start + counts[-1]]
        self.checked.commit_step(ids, drafts, counts)

    def move(self, moves: BlockCopies | None) -> None:
        if moves is not None:
            rows = self.slots.reshape(-1, self.block_size)
            rows[moves.dst] = rows[moves.src]
            rows[moves.src] = -1
            self.moved += len(moves.src)

    def defragment(self) -> None:
        self.copy()
        self.move(self.checked.defragment())

    def resize(self) -> None:
        self.copy()
        self.move(self.checked.resize(self.random.randint(*self.sizes)))

    def reset(self) -> None:
        if self.random.random() < 0.3:
            self.checked.reset()

    def fork(self) -> None:
        seq_id = self.any()
        if seq_id is not None and len(self.model.seqs[seq_id].tokens) == self.model.seqs[seq_id].length:
            child, self.next_id = self.next_id, self.next_id + 1
            self.checked.fork(seq_id, child)

    def truncate(self) -> None:
        seq_id = self.any()
        if seq_id is None:
            return
        seq = self.model.seqs[seq_id]
        length = self.random.choice(
            [self.random.randint(0, seq.length), max(0, len(seq.tokens) - self.random.randrange(4))]
        )
        if not self.model.can_truncate(seq_id, length):
            self.refused_cuts += 1
            with pytest.raises(SequenceError, match="fell out of a window"):
                self.manager.truncate(seq_id, length)
            return
        self.checked.truncate(seq_id, length)
        self.prompts[seq_id] = self.prompts.get(seq_id, [])[:length]
        self.loaded[seq_id] = min(self.loaded.get(seq_id, 0), length)

    def close(self) -> None:
        seq_id = self.any()
        if seq_id is not None:
            self.checked.close(seq_id)

    def pin(self) -> None:
        seq_id = self.any()
        full = len(self.model.seqs[seq_id].tokens) // self.block_size if seq_id is not None else 0
        if seq_id is None or not full or len(self.pins) > 3:
            return
        count = self.random.choice([full, self.random.randint(1, full)])
        if self.model.can_pin(seq_id, count):
            self.pins.append(self.checked.pin(seq_id, count * self.block_size))
        else:
            self.refused_pins += 1
            with pytest.raises(SequenceError, match="fell out of the window and are gone"):
                self.checked.pin(seq_id, count * self.block_size)

    def unpin(self) -> None:
        if self.pins:
            self.checked.unpin(self.pins.pop(self.random.randrange(len(self.pins))))

    def prioritise(self) -> None:
        seq_id = self.any()
        if seq_id is not None:
            done = len(self.model.seqs[seq_id].tokens)
            start = self.random.randint(0, done)
            self.checked.set_priority(seq_id, self.random.choice([0, 50, 90]), start, done)

    def fence(self) -> None:
        if len(self.model.open_fences) < 3:
            self.checked.open_fence()

    def signal(self) -> None:
        if self.model.open_fences:
            self.checked.signal(self.random.choice(self.model.open_fences))

    def drain(self) -> None:
        """Give everything back."""
        self.copy()
        for seq_id in list(self.model.seqs):
            self.checked.close(seq_id)
        for pin in self.pins:
            self.checked.unpin(pin)
        for fence in list(self.model.open_fences):
            self.checked.signal(fence)
        assert self.manager.counts.active == 0


SIZES: dict[str, dict[str, Any]] = {
    "default": {"num_blocks": 20},
    "crowded": {"num_blocks": 8, "max_seqs": 8, "watermark": 0.2},
    "one_token_blocks": {"block_size": 1, "num_blocks": 20},
    "large_blocks": {"block_size": 5, "num_blocks": 12, "max_len": 40},
    "roomy": {"num_blocks": 60, "max_seqs": 6, "max_len": 40},
    "one_token_vocabulary": {"vocabulary": 1, "block_size": 3},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GROUPS)
def test_a_long_random_walk_agrees_with_the_model(name: str, size: str) -> None:
    """Results, hits, counts by group, tables, events and slot contents after every one of many operations."""
    walk = Walk(12, GROUPS[name], **SIZES[size]).run(1400 if size == "default" else 150)
    stats = walk.manager.stats()
    assert stats.num_opened > 3
    if size == "default":
        assert stats.evicted_blocks > 50 and walk.hits > 10 and walk.inside > 0
        assert min(walk.moved, walk.rejected, walk.filled) > 3
        if any(group.window for group in walk.groups):
            assert stats.fallen_blocks > 20 and walk.partly_hit > 0 and walk.refused_cuts > 1
        if any(group.window is None for group in walk.groups):
            assert walk.checked.num_never_fits >= 2
    walk.drain()


@pytest.mark.parametrize("groups", ["two_full", "full_two_windows", "two_windows_sinks"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_walk_under_every_policy_agrees_with_the_model_of_the_policy(policy: str, groups: str) -> None:
    """The very blocks that are evicted, whatever their group, are those that the slow model names."""
    weights = WEIGHTS | ({"prioritise": 3} if policy == "priority" else {})
    evicted = 0
    for size, count in (("default", 250), ("crowded", 60), ("roomy", 200)):
        walk = Walk(3, GROUPS[groups], policy=policy, reference=policy, **SIZES[size]).run(count, weights)
        evicted += walk.manager.stats().evicted_blocks
        walk.drain()
    assert evicted > 40


@pytest.mark.parametrize("groups", ["full_window", "window_sinks"])
def test_a_walk_with_quotas_agrees_with_the_model(groups: str) -> None:
    """What a namespace has too much goes when it is let go of, and says so in its events."""
    limits = {TENANT: 3}
    policy, reference = NamespaceQuotas(limits), partial(ReferenceQuotas, limits=limits.items())
    Walk(5, GROUPS[groups], policy=policy, reference=reference, num_blocks=20).run(400).drain()


@pytest.mark.parametrize("policy", ["lfu", "sieve", "arc"])
def test_a_walk_finds_a_policy_with_another_order(policy: str) -> None:
    """Compared with the model of LRU, a walk fails: the orders do differ."""
    with pytest.raises(AssertionError):
        for seed in range(4):
            Walk(seed, GROUPS["full_window"], policy=policy, reference="lru", **SIZES["roomy"]).run(600)


def _all_fresh(self: Hits, hit: Any, num_tokens: int) -> Any:
    columns = -(-num_tokens // self._windows.block_size) - len(hit.nodes)
    return np.ones((len(hit.blocks), columns), np.bool_)


BUGS: dict[str, tuple[type, str, Any]] = {
    "moved blocks change their group": (
        ContentTree,
        "group_of",
        property(lambda self: self._groups, lambda self, value: setattr(self, "_groups", value * 0)),
    ),
    "tables keep old ids": (Rows, "rename", lambda self, name: None),
    "no watermark": (Admission, "can_have", lambda self, need: need <= self._pool.num_available),
    "what is loaded takes all blocks": (Hits, "fresh", _all_fresh),
    "all drafts are kept": (Rows, "cut", lambda self, row, num_tokens, extra: None),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_walk_finds_this_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is done to the whole pool, at admission, and with drafts."""
    monkeypatch.setattr(*BUGS[bug], raising=False)
    with pytest.raises(AssertionError):
        for seed in range(4):
            Walk(seed, GROUPS["window_full"], num_blocks=20, watermark=0.1).run(600)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32),
    windows=st.lists(
        st.one_of(st.none(), st.tuples(st.integers(1, 20), st.integers(0, 9))), min_size=1, max_size=4
    ),
    blocks_per_group=st.integers(2, 14),
    block_size=st.integers(1, 5),
    max_seqs=st.integers(1, 6),
    vocabulary=st.integers(1, 4),
)
def test_walks_with_any_groups_agree_with_the_model(
    seed: int,
    windows: list[tuple[int, int] | None],
    blocks_per_group: int,
    block_size: int,
    max_seqs: int,
    vocabulary: int,
) -> None:
    """Whatever the groups and sizes, manager and model do the same."""
    groups = [
        CacheGroup(f"g{i}", (i,), *((None, 0) if window is None else window))
        for i, window in enumerate(windows)
    ]
    Walk(seed, groups, blocks_per_group * len(groups), block_size, max_seqs, vocabulary).run(120)


def test_contents_that_run_short_are_evicted_with_the_oldest_blocks() -> None:
    """With windows only, the tails of long prompts that are used again and again keep many contents known."""
    walk = Walk(1, GROUPS["window"], num_blocks=48, max_seqs=1, max_len=60)
    rng, prompts = random.Random(1), [[i] * 50 for i in range(5)]
    short = 0
    for _ in range(60):
        tokens = [*rng.choice(prompts), *(rng.randrange(100) for _ in range(4))]
        opened = walk.manager.open("a", tokens, max_fresh_tokens=10)
        assert opened == walk.model.open("a", tokens, None, 10) and opened is not None
        done, length = opened.num_cached_tokens, opened.num_tokens
        while True:
            evicted = walk.manager.stats().evicted_blocks
            for manager in (walk.manager, walk.model):
                manager.commit("a", tokens[done:length])
            short += walk.manager.stats().evicted_blocks > evicted  # though a commit takes no blocks
            assert hybrid_state(walk.manager) == walk.model.state()
            if length == len(tokens):
                break
            more = min(10, len(tokens) - length)
            assert walk.manager.append("a", more) and walk.model.step(["a"], more)
            done, length = length, length + more
        for manager in (walk.manager, walk.model):
            manager.close("a")
        walk.manager.check_invariants()
        assert hybrid_state(walk.manager) == walk.model.state()
    assert short > 5 and walk.manager.stats().hit_tokens > 500


@pytest.mark.parametrize("name", [name for name in GROUPS if name != "window_of_one"])
def test_what_no_hit_can_use_is_evicted_before_all_that_one_can_use(name: str) -> None:
    """As long as no committed token is cut and none loaded, the oldest cached blocks are the useless ones."""
    walk, useless = Walk(5, GROUPS[name], num_blocks=24), 0
    model = walk.model
    for _ in range(500):
        operation = walk.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if operation not in ("truncate", "load"):
            getattr(walk, operation)()
        served = [path for path in model.nodes() if model.serves(path)]
        use = [any(model.uses(path, block) for path in served) for block in model.cached]
        assert use == sorted(use), "something useless would outlive something useful"
        useless += use.count(False)
    assert useless > 4 or not any(group.window for group in walk.groups)


def test_the_same_calls_give_the_same_tables() -> None:
    """Block ids depend on nothing but the calls."""
    first, second, other = (Walk(seed, GROUPS["full_two_windows"]).run(400) for seed in (3, 3, 4))
    tables = [walk.manager._rows.blocks.tolist() for walk in (first, second, other)]
    assert tables[0] == tables[1] != tables[2]
