"""What every eviction policy must do, whatever its order: one suite for all of them."""

import copy
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, cast

import numpy as np
import pytest

from pagedkv import KVCacheManager, Namespace, PagedKVError
from pagedkv.block_tables import Int32Array
from pagedkv.policies import POLICIES, EvictionPolicy, make_policy
from pagedkv.policies.arc import ARC
from pagedkv.policies.belady import Belady
from pagedkv.policies.fingerprints import Ghosts
from pagedkv.policies.priority import Priority
from pagedkv.policies.quotas import NamespaceQuotas
from pagedkv.policies.residency import Residency
from pagedkv.testing import snapshot

A, B = Namespace(salt="a"), Namespace(adapter="b")

MAKERS: dict[str, Callable[[], EvictionPolicy]] = {
    **{name: partial(make_policy, name) for name in POLICIES},
    "quotas": lambda: NamespaceQuotas({A: 2, B: 3}),
    "quotas of arc": lambda: NamespaceQuotas({A: 2}, ARC),
    "quotas of residency": lambda: NamespaceQuotas({A: 2}, lambda: Residency("sieve", count().__next__)),
    "residency": lambda: Residency("s3fifo", count().__next__),
}


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


class Tree:
    """Blocks with parents, as a policy sees them; content is a number per block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.parents: dict[int, int] = {}
        self.content = dict.fromkeys(range(1, num_blocks + 1), 0)

    def parent(self, block: int) -> int:
        return self.parents[block]

    def path(self, block: int) -> Int32Array:
        found = [block]
        while self.parents[found[-1]]:
            found.append(self.parents[found[-1]])
        return ids(*found[::-1])

    def namespace(self, block: int) -> Namespace | None:
        return (None, A, B)[self.content[int(self.path(block)[0])] % 3]

    def row_hashes(self, blocks: Int32Array) -> list[int]:
        return [self.content[block] for block in blocks.tolist()]


class Driver:
    """Branches that are released, held again, evicted and forgotten at random, as a manager would."""

    def __init__(self, name: str, num_blocks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.tree = Tree(num_blocks)
        self.policy = MAKERS[name]()
        self.policy.bind(self.tree)
        self.free = list(range(num_blocks, 0, -1))
        self.idle: set[int] = set()
        self.held: list[int] = []  # one branch at a time is in use, shallowest first

    def children(self, block: int) -> list[int]:
        return [child for child, parent in self.tree.parents.items() if parent == block]

    def open(self) -> None:
        """Hold a prefix of what is idle, and grow a branch behind it."""
        hit = self.tree.path(self.random.choice(sorted(self.idle))) if self.idle else ids()
        hit = hit[: self.random.randint(0, len(hit))]
        new = self.random.randint(0, max(0, min(6, self.tree.num_blocks - len(hit))))
        keep = set(hit.tolist())
        victims = self.first(max(0, new - len(self.free)), keep)
        self.policy.discard(hit)
        self.idle -= keep
        if len(victims):
            self.lose(victims, evicted=True)
        self.policy.hit(hit)
        self.held = hit.tolist()
        for _ in range(new):
            block = self.free.pop()
            self.tree.parents[block] = self.held[-1] if self.held else 0
            self.tree.content[block] = self.random.randrange(1, 9)
            self.held.append(block)
        self.policy.stored(ids(*self.held[len(hit) :]))

    def first(self, count: int, keep: set[int]) -> Int32Array:
        victims = self.policy.first(count, ids(*sorted(keep)))
        assert victims.dtype == np.int32
        self.check_victims(victims.tolist(), count, keep)
        return victims

    def check_victims(self, victims: list[int], count: int, keep: set[int]) -> None:
        usable = self.idle - keep - {b for k in keep for b in self.tree.path(k).tolist()}
        assert len(victims) == min(count, len(usable)), "not the exact count"
        assert len(set(victims)) == len(victims) and set(victims) <= usable
        for i, block in enumerate(victims):
            assert set(self.children(block)) <= set(victims[:i]), "a parent goes before its child"

    def lose(self, blocks: Int32Array, evicted: bool) -> None:
        (self.policy.evict if evicted else self.policy.forget)(blocks)
        for block in blocks.tolist():
            self.idle.discard(block)
            del self.tree.parents[block]
            self.free.append(block)

    def close(self) -> None:
        """Release all that is held, or forget the end of it first, as a copy would."""
        if self.held and self.random.random() < 0.2 and not self.children(self.held[-1]):
            self.lose(ids(self.held.pop()), evicted=False)
        released = ids(*self.held[::-1])
        self.policy.make_room(len(released))
        self.policy.push(released)
        self.idle |= set(self.held)
        self.held = []
        surplus = self.policy.surplus()
        if surplus is not None:
            self.lose(surplus, evicted=True)

    def run(self, num_rounds: int) -> Iterator[None]:
        for _ in range(num_rounds):
            self.open()
            yield
            self.close()
            yield


policies = pytest.mark.parametrize("name", POLICIES)
all_policies = pytest.mark.parametrize("name", MAKERS)


@all_policies
@pytest.mark.parametrize("num_blocks", [1, 2, 9, 40])
def test_victims_are_idle_leaves_first_none_kept_and_exactly_as_many_as_asked(
    name: str, num_blocks: int
) -> None:
    """At every moment, for every count, also with a prefix kept; ``ids`` is the whole order."""
    for seed in range(3):
        driver = Driver(name, num_blocks, seed)
        for _ in driver.run(120):
            order = driver.policy.ids().tolist()
            assert set(order) == driver.idle
            driver.check_victims(order, num_blocks, set())
            count = driver.random.randint(0, num_blocks)
            assert driver.first(count, set()).tolist() == order[:count]
            if driver.idle:
                kept = driver.tree.path(driver.random.choice(sorted(driver.idle))).tolist()
                driver.first(count, set(kept))


def state(policy: EvictionPolicy) -> Any:
    """Everything inside but scratch: two are equal if nothing changed."""
    return snapshot(policy, ("_head", "view", "_view", "_clock"))  # type: ignore[arg-type]


@all_policies
def test_first_changes_nothing(name: str) -> None:
    """Not one number inside, with and without ``keep``."""
    driver = Driver(name, 12, seed=1)
    for _ in driver.run(60):
        before = state(driver.policy)
        for keep in (ids(), ids(*sorted(driver.idle))[:0], ids(*sorted(driver.idle))):
            driver.policy.first(5, keep)
        assert state(driver.policy) == before


@all_policies
def test_the_snapshot_does_see_what_a_policy_keeps(name: str) -> None:
    """Else the test above would prove nothing."""
    driver = Driver(name, 12, seed=1)
    for _ in driver.run(5):
        pass
    before = state(driver.policy)
    assert before == state(copy.deepcopy(driver.policy))
    for _ in driver.run(3):
        pass
    assert state(driver.policy) != before


@all_policies
def test_evicting_some_at_once_is_evicting_one_after_the_other(name: str) -> None:
    """The next victims are the same, so marks, hands and ghosts are."""
    for seed in range(3):
        driver = Driver(name, 20, seed)
        for _ in driver.run(80):
            if len(driver.idle) < 2:
                continue
            at_once, one_by_one = copy.deepcopy(driver.policy), copy.deepcopy(driver.policy)
            victims = at_once.first(driver.random.randint(1, len(driver.idle) - 1), ids())
            at_once.evict(victims)
            for block in victims.tolist():
                assert one_by_one.first(1, ids()).tolist() == [block]
                one_by_one.evict(ids(block))
            assert at_once.ids().tolist() == one_by_one.ids().tolist()


@all_policies
def test_discarding_or_forgetting_what_is_not_idle_changes_no_order(name: str) -> None:
    """Blocks that nobody pushed may be named."""
    driver = Driver(name, 9, seed=3)
    for _ in driver.run(20):
        order = driver.policy.ids().tolist()
        strangers = ids(*(set(range(1, 10)) - driver.idle - set(driver.held)))
        driver.policy.discard(strangers)
        driver.policy.forget(strangers)
        assert driver.policy.ids().tolist() == order


@policies
def test_an_empty_order_and_a_count_of_zero_give_nothing(name: str) -> None:
    """No id, and an int32 array all the same."""
    policy = make_policy(name)
    tree = Tree(3)
    policy.bind(tree)
    none = policy.first(3, keep=ids())
    assert none.dtype == np.int32 and none.tolist() == []
    policy.push(ids())
    tree.parents[2] = 0
    policy.push(ids(2))
    assert policy.first(0, keep=ids()).tolist() == []
    assert policy.first(3, keep=ids()).tolist() == [2]


@policies
def test_a_policy_serves_one_manager(name: str) -> None:
    """The second one would mix up the blocks of both, and is refused."""
    policy = make_policy(name)
    KVCacheManager(2, 2, policy=policy)
    with pytest.raises(PagedKVError, match="another manager already"):
        KVCacheManager(2, 2, policy=policy)


@pytest.mark.parametrize("wrong", ["LRU", "", 3, object])
def test_what_is_no_policy_is_refused_with_the_names(wrong: Any) -> None:
    """The message lists what there is."""
    with pytest.raises(PagedKVError, match=r"one of lru, fifo, .*, got"):
        KVCacheManager(2, 2, policy=wrong)


@policies
def test_only_a_policy_with_priorities_retains(name: str) -> None:
    """The others say which policy would; nothing changes."""
    manager = KVCacheManager(2, 2, policy=name)
    manager.open("a", [1, 2])
    manager.commit("a", [1, 2])
    if name == "priority":
        assert manager.retention.set_priority("a", 3) == 1
    else:
        with pytest.raises(PagedKVError, match="knows no priorities"):
            manager.retention.set_priority("a", 3)


def test_a_manager_with_the_default_policy_needs_numpy_alone() -> None:
    """The sorted container is imported when a policy that uses it is asked for."""
    script = (
        "import sys, pagedkv.testing; pagedkv.KVCacheManager(2); print('sortedcontainers' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "False\n"


# -- blocks that move


class Moved(EvictionPolicy):
    """A policy whose blocks move now and then, seen as if they had stayed; the view of that policy."""

    def __init__(self, policy: EvictionPolicy, tree: Tree, seed: int) -> None:
        self.policy, self.tree, self.random = policy, tree, random.Random(seed)
        self.num_blocks = tree.num_blocks
        self.real = np.arange(tree.num_blocks + 1, dtype=np.int32)
        self.seen = self.real.copy()
        self.num_moved = 0
        policy.bind(self)

    def move(self) -> None:
        """Some content goes where none is, in one step."""
        full = sorted(self.tree.parents)
        empty = sorted(set(range(1, self.num_blocks + 1)) - set(full))
        moves = self.random.randint(0, min(len(full), len(empty), 7))
        old, new = ids(*self.random.sample(full, moves)), ids(*self.random.sample(empty, moves))
        real_old, real_new = self.real[old], self.real[new]
        view_is_first = self.random.random() < 0.5
        if not view_is_first:
            self.policy.rename(real_old, real_new)
        self.real[old], self.real[new] = real_new, real_old
        self.seen[self.real] = np.arange(self.num_blocks + 1)
        if view_is_first:
            self.policy.rename(real_old, real_new)
        self.num_moved += moves

    def parent(self, block: int) -> int:
        return int(self.real[self.tree.parent(int(self.seen[block]))])

    def path(self, block: int) -> Int32Array:
        return self.real[self.tree.path(int(self.seen[block]))]

    def namespace(self, block: int) -> Namespace | None:
        return self.tree.namespace(int(self.seen[block]))

    def row_hashes(self, blocks: Int32Array) -> list[int]:
        return self.tree.row_hashes(self.seen[blocks])

    def stored(self, ids: Int32Array) -> None:
        self.policy.stored(self.real[ids])

    def push(self, ids: Int32Array) -> None:
        self.policy.push(self.real[ids])

    def discard(self, ids: Int32Array) -> None:
        self.policy.discard(self.real[ids])

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        return self.seen[self.policy.first(count, self.real[keep])]

    def hit(self, ids: Int32Array) -> None:
        self.policy.hit(self.real[ids])

    def evict(self, ids: Int32Array) -> None:
        self.policy.evict(self.real[ids])

    def forget(self, ids: Int32Array) -> None:
        self.policy.forget(self.real[ids])

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        raise NotImplementedError("blocks seen from here never move")

    def resize(self, num_blocks: int) -> None:
        raise NotImplementedError("nor do they become more")

    def surplus(self) -> Int32Array | None:
        found = self.policy.surplus()
        return None if found is None else self.seen[found]

    def retain(self, ids: Int32Array, priority: int, ttl: float | None) -> None:
        self.policy.retain(self.real[ids], priority, ttl)

    def announce(self, ids: Int32Array, next_uses: list[float]) -> None:
        cast(Belady, self.policy).announce(self.real[ids], next_uses)


class TellingDriver(Driver):
    """Says what only some policies want to know: priorities with a time to live, and the future."""

    def __init__(self, name: str, num_blocks: int, seed: int) -> None:
        super().__init__(name, num_blocks, seed)
        self.name, self.time = name, 0.0
        self.policy = self.make()
        self.policy.bind(self.tree)

    def make(self) -> EvictionPolicy:
        return Priority(clock=lambda: self.time) if self.name == "priority" else MAKERS[self.name]()

    def open(self) -> None:
        self.time += 1.0
        super().open()
        held = ids(*self.held)
        if self.name == "priority":
            self.policy.retain(held, self.random.randrange(3), self.random.choice([None, 1.5, 4.5, 9.5]))
        if self.name == "belady":
            uses = [float(self.random.randrange(9)) for _ in self.held]
            cast(Belady, self.policy).announce(held, uses)


@all_policies
@pytest.mark.parametrize("num_blocks", [2, 9, 40])
def test_content_that_moves_to_another_block_keeps_its_place_in_the_order(name: str, num_blocks: int) -> None:
    """Histories with and without moves have the same victims; held and idle blocks move, and parents."""
    num_moved = 0
    for seed in range(4):
        still = TellingDriver(name, num_blocks, seed)
        moved = TellingDriver(name, num_blocks, seed)
        moved.policy = policy = Moved(moved.make(), moved.tree, seed)
        for _ in zip(still.run(150), moved.run(150), strict=True):
            policy.move()
            assert policy.seen[policy.policy.ids()].tolist() == still.policy.ids().tolist()
            assert moved.idle == still.idle
        num_moved += policy.num_moved
        if isinstance(still.policy, Residency):
            assert cast(Residency, policy.policy).histograms() == still.policy.histograms()
    assert num_moved > 50


# -- another number of blocks


class ResizedDriver(TellingDriver):
    """Changes the number of blocks now and then; what is beyond moves, and what has no room is evicted."""

    def resize(self, num_blocks: int) -> None:
        needed = len(self.tree.parents) - num_blocks
        if needed > 0:
            self.lose(self.first(needed, set()), evicted=True)
        full = sorted(self.tree.parents)
        empty = [block for block in range(1, num_blocks + 1) if block not in self.tree.parents]
        self.rename({block: empty.pop() for block in full if block > num_blocks})
        self.policy.resize(num_blocks)
        self.tree.num_blocks = num_blocks
        self.free = empty

    def rename(self, names: dict[int, int]) -> None:
        self.policy.rename(ids(*names), ids(*names.values()))
        tree = self.tree

        def new(block: int) -> int:
            return names.get(block, block)

        tree.parents = {new(block): new(parent) for block, parent in tree.parents.items()}
        for block, name in names.items():
            tree.content[name] = tree.content[block]
        self.idle = set(map(new, self.idle))
        self.held = list(map(new, self.held))

    def sizes(self) -> Iterator[None]:
        for _ in self.run(150):
            if self.random.random() < 0.2:
                self.resize(self.random.randint(max(1, len(self.held)), 30))
            yield


@all_policies
def test_a_policy_serves_as_many_blocks_as_there_are_now(name: str) -> None:
    """Growing and shrinking in the middle of a history, the contract holds: every idle block in the order."""
    for seed in range(4):
        driver = ResizedDriver(name, 9, seed)
        for _ in driver.sizes():
            order = driver.policy.ids().tolist()
            assert set(order) == driver.idle
            driver.check_victims(order, driver.tree.num_blocks, set())
            count = driver.random.randint(0, 30)
            assert driver.first(count, set()).tolist() == order[:count]


@all_policies
@pytest.mark.parametrize(("before", "now"), [(9, 40), (40, 9), (1, 2)])
def test_a_policy_that_was_resized_is_like_one_of_that_size(name: str, before: int, now: int) -> None:
    """Nothing of the former size is left: the same victims in a long history."""
    for seed in range(3):
        fresh, other = TellingDriver(name, now, seed), TellingDriver(name, now, seed)
        other.policy, other.tree.num_blocks = other.make(), before
        other.policy.bind(other.tree)
        other.policy.resize(now)
        other.tree.num_blocks = now
        assert state(other.policy) == state(fresh.policy)
        for _ in zip(fresh.run(150), other.run(150), strict=True):
            assert other.policy.ids().tolist() == fresh.policy.ids().tolist()


# -- cost


class Counting(int):
    """A number that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counting.compared += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        Counting.compared += 1
        return isinstance(other, int) and int(self) == int(other)

    __hash__ = int.__hash__


def comparisons_per_eviction(name: str, num_blocks: int, cycles: int = 150) -> float:
    """One block in, one out, with ``num_blocks`` idle as single blocks; a tenth is hit on the way."""
    policy = make_policy(name)
    tree = Tree(num_blocks)
    tree.parents = dict.fromkeys(range(1, num_blocks + 1), 0)
    policy.bind(tree)
    score = policy.score  # type: ignore[attr-defined]

    def counted(block: int) -> Any:
        value = score(block)
        return (*value[:-1], Counting(value[-1])) if isinstance(value, tuple) else Counting(value)

    policy.score = counted  # type: ignore[attr-defined]
    for block in range(1, num_blocks + 1):
        policy.push(ids(block))
    Counting.compared = 0
    rng = random.Random(1)
    for _ in range(cycles):
        used = ids(rng.randint(1, num_blocks))
        policy.discard(used)
        policy.hit(used)
        policy.push(used)
        victims = policy.first(1, keep=used)
        policy.evict(victims)
        policy.push(victims)
    return Counting.compared / cycles


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "lru"])
def test_work_per_eviction_grows_like_a_logarithm(name: str) -> None:
    """100 times as many blocks idle cost a few comparisons more: no scan, no heap built anew."""
    small, large = (comparisons_per_eviction(name, n) for n in (1_000, 100_000))
    assert large <= 2.5 * small + 20


@pytest.mark.parametrize("count", [100, 20_000])
def test_ghosts_are_forgotten_oldest_first_each_in_the_same_time(count: int) -> None:
    """One in, one out, for several turnovers: what is dropped is what was added ``count`` before."""
    ghosts = Ghosts()
    for i in range(1, 4 * count):
        ghosts.add(i)
        ghosts.add(i)
        ghosts.trim(count)
        assert len(ghosts) == min(i, count)
    assert not ghosts.remove(3 * count - 1)
    assert ghosts.remove(3 * count) and not ghosts.remove(3 * count)
    ghosts.trim(0)
    assert len(ghosts) == 0
