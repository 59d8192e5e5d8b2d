"""Residency: how long content stays, waits and rests, by hand and against a slow model."""

import random
from typing import Any

import numpy as np
import pytest

from pagedkv import KVCacheManager, Namespace, PagedKVError
from pagedkv.block_tables import Int32Array
from pagedkv.histogram import Histogram, ResidencyHistograms
from pagedkv.policies import POLICIES, EvictionPolicy, make_policy
from pagedkv.policies.lru import LRU
from pagedkv.policies.policy import NO_BLOCKS
from pagedkv.policies.quotas import NamespaceQuotas
from pagedkv.policies.residency import Residency


class Clock:
    """Seconds that a test sets."""

    now = 0.0
    read = 0

    def __call__(self) -> float:
        self.read += 1
        return self.now


def run(manager: KVCacheManager, tokens: Any, namespace: Namespace | None = None) -> None:
    """Serve a prompt in no time."""
    opened = manager.open("run", tokens, namespace=namespace, max_cached_tokens=len(tokens))
    assert opened is not None
    manager.commit("run", tokens[opened.num_cached_tokens :])
    manager.close("run")


def histograms(*values: list[float]) -> ResidencyHistograms:
    return ResidencyHistograms(*map(Histogram.of, values))


def test_one_life_by_hand() -> None:
    """Stored at 1, idle at 3, hit at 10, idle at 12, evicted at 20: two blocks each time."""
    clock = Clock()
    measured = Residency("lru", clock)
    manager = KVCacheManager(2, 2, policy=measured)
    clock.now = 1.0
    manager.open("a", range(4))
    manager.commit("a", range(4))
    clock.now = 3.0
    manager.close("a")
    assert measured.histograms() == histograms([], [], [])
    clock.now = 10.0
    manager.open("b", range(4), max_cached_tokens=4)
    assert measured.histograms() == histograms([], [], [7.0, 7.0])
    clock.now = 12.0
    manager.close("b")
    clock.now = 20.0
    manager.open("c", range(10, 14))
    assert measured.histograms() == histograms([19.0] * 2, [8.0] * 2, [7.0] * 2)


def test_blocks_of_one_prefix_are_measured_each_by_itself() -> None:
    """The first of two is hit and lives on, the second waits and goes."""
    clock = Clock()
    measured = Residency("lru", clock)
    manager = KVCacheManager(2, 2, policy=measured)
    run(manager, range(4))
    clock.now = 5.0
    run(manager, [0, 1, 9, 9])
    assert measured.histograms() == histograms([5.0], [5.0], [5.0])
    clock.now = 6.5
    run(manager, range(20, 24))
    assert measured.histograms() == histograms([5.0, 1.5, 6.5], [5.0, 1.5, 1.5], [5.0])


def test_content_that_was_never_idle_has_no_gap() -> None:
    """A hit on what somebody still holds is no reuse after a rest."""
    clock = Clock()
    measured = Residency("lru", clock)
    manager = KVCacheManager(4, 2, policy=measured)
    manager.open("a", range(2))
    manager.commit("a", range(2))
    clock.now = 4.0
    run(manager, range(2))
    manager.close("a")
    assert measured.histograms() == histograms([], [], [])


def test_content_that_is_computed_again_ends_the_rest_of_its_equal() -> None:
    """A commit finds it cached, though the open was not allowed to."""
    clock = Clock()
    measured = Residency("lru", clock)
    manager = KVCacheManager(4, 2, policy=measured)
    run(manager, range(2))
    clock.now = 4.0
    manager.open("a", range(2), max_cached_tokens=0)
    manager.commit("a", range(2))
    assert measured.histograms() == histograms([], [], [4.0])


def test_what_goes_for_a_quota_is_evicted_and_each_part_may_measure_alone() -> None:
    """Around the quotas, and inside: the part without a quota sees nothing of the other."""
    tenant, clock = Namespace(salt="tenant"), Clock()
    parts: list[Residency] = []

    def part() -> EvictionPolicy:
        parts.append(Residency("lru", clock))
        return parts[-1]

    whole = Residency(NamespaceQuotas({tenant: 1}, part), clock)
    manager = KVCacheManager(8, 2, policy=whole)
    manager.open("a", range(6), namespace=tenant)
    manager.commit("a", range(6))
    clock.now = 2.0
    manager.close("a")
    others, limited = (part.histograms() for part in parts)
    assert whole.histograms() == limited == histograms([2.0] * 2, [0.0] * 2, [])
    assert others == histograms([], [], [])


def test_content_that_moves_takes_its_times_along_and_a_resize_keeps_them() -> None:
    """Also to a block that was not there before."""
    clock = Clock()
    measured = Residency("fifo", clock)
    manager = KVCacheManager(2, 2, policy=measured)
    run(manager, range(4))
    clock.now = 3.0
    measured.resize(9)
    measured.rename(np.array([1], np.int32), np.array([8], np.int32))
    clock.now = 4.0
    measured.evict(measured.first(2, np.zeros(0, np.int32)))
    assert measured.histograms() == histograms([4.0] * 2, [4.0] * 2, [])


def test_what_is_dropped_for_another_reason_is_not_counted() -> None:
    """Content that its holder overwrites was not evicted, and what comes next starts anew."""
    clock = Clock()
    measured = Residency("lru", clock)
    manager = KVCacheManager(2, 2, policy=measured)
    manager.open("a", range(2))
    manager.commit("a", range(2))
    clock.now = 1.0
    manager.truncate("a", 1)
    manager.append("a", 1)
    manager.commit("a", [7])
    manager.close("a")
    assert measured.histograms() == histograms([], [], [])
    clock.now = 1.5
    run(manager, range(10, 14))
    assert measured.histograms() == histograms([0.5], [0.5], [])


class SlowResidency(LRU):
    """The same with dicts and lists, one block at a time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.born: dict[int, float] = {}
        self.idle: dict[int, float] = {}
        self.lives: list[float] = []
        self.waits: list[float] = []
        self.gaps: list[float] = []

    def stored(self, ids: Int32Array) -> None:
        for block in ids.tolist():
            self.born[block] = self.clock.now

    def push(self, ids: Int32Array) -> None:
        super().push(ids)
        for block in ids.tolist():
            self.idle[block] = self.clock.now

    def discard(self, ids: Int32Array) -> None:
        super().discard(ids)
        for block in ids.tolist():
            if block in self.idle:
                self.gaps.append(self.clock.now - self.idle.pop(block))

    def evict(self, ids: Int32Array, keep: Int32Array = NO_BLOCKS) -> None:
        for block in ids.tolist():
            self.lives.append(self.clock.now - self.born.pop(block))
            self.waits.append(self.clock.now - self.idle.pop(block))
        super().discard(ids)

    def forget(self, ids: Int32Array) -> None:
        for block in ids.tolist():
            self.born.pop(block, None)
            self.idle.pop(block, None)
        super().discard(ids)


def walk(policy: EvictionPolicy, clock: Clock, seed: int) -> KVCacheManager:
    """Sequences that overlap, with hits, forks, rewritten tails, and a pool that is too small."""
    rng = random.Random(seed)
    manager = KVCacheManager(12, 2, policy=policy)
    names: list[int] = []
    for name in range(600):
        clock.now += rng.choice([0.0, 0.125, 1.0, 64.0])
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        opened = manager.open(name, prompt)
        if opened is not None:
            manager.commit(name, prompt[opened.num_cached_tokens :])
            names.append(name)
            if rng.random() < 0.3:
                manager.truncate(name, len(prompt) - 1)
                if manager.append(name, 1):
                    manager.copies.take()
                    manager.commit(name, [rng.randrange(2)])
        while len(names) > 2 or (opened is None and names):
            manager.close(names.pop(rng.randrange(len(names))))
            clock.now += rng.choice([0.0, 0.25])
    return manager


@pytest.mark.parametrize("seed", range(4))
def test_a_random_history_agrees_with_dicts_and_lists(seed: int) -> None:
    """All three, value by value as far as buckets and exact sums show it; and one life per eviction."""
    clock, slow_clock = Clock(), Clock()
    measured, slow = Residency("lru", clock), SlowResidency(slow_clock)
    manager = walk(measured, clock, seed)
    walk(slow, slow_clock, seed)
    assert measured.histograms() == histograms(slow.lives, slow.waits, slow.gaps)
    assert min(len(slow.lives), len(slow.waits), len(slow.gaps)) > 50
    assert measured.histograms().lifetime.count <= manager.stats().evicted_blocks


@pytest.mark.parametrize("name", POLICIES)
def test_measuring_changes_nothing(name: str) -> None:
    """The same hits and victims as the policy alone."""
    alone, measured = make_policy(name), Residency(name, Clock())
    expected = walk(alone, Clock(), 1)
    found = walk(measured, Clock(), 1)
    assert found.stats().hit_blocks == expected.stats().hit_blocks
    assert found.stats().evicted_blocks == expected.stats().evicted_blocks
    assert measured.ids().tolist() == alone.ids().tolist()


def test_priorities_and_policies_are_those_of_the_policy_inside() -> None:
    """Where it knows none, the message names it; what is no policy is refused."""
    for inner, known in (("priority", True), ("fifo", False)):
        manager = KVCacheManager(4, 2, policy=Residency(inner, Clock()))
        manager.open("a", range(4))
        manager.commit("a", range(4))
        if known:
            assert manager.retention.set_priority("a", 9) == 2
        else:
            with pytest.raises(PagedKVError, match="FIFO knows no priorities"):
                manager.retention.set_priority("a", 9)
    with pytest.raises(PagedKVError, match="one of lru, fifo"):
        Residency("nothing", Clock())


def test_the_clock_is_read_once_per_call_however_many_blocks() -> None:
    """And not at all for none."""
    for count in (2, 400):
        clock = Clock()
        manager = KVCacheManager(400, 1, policy=Residency("lru", clock))
        manager.open("a", range(count))
        assert clock.read == 0
        manager.commit("a", range(count))
        manager.close("a")
        assert clock.read == 2
        manager.open("b", range(count), max_cached_tokens=count)
        assert clock.read == 3
