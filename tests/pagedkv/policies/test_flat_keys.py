"""Hit by hit equal to textbook caches of flat keys, where no block has a parent.

What differs by nature: on prefixes a block waits for all that builds on it, so that only leaves are compared
with each other; blocks have one size; and content is known only when it has been computed, so that ARC adapts
after it made room instead of before.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import pytest

from pagedkv import KVCacheManager
from pagedkv.block_tables import Int32Array
from pagedkv.policies import EvictionPolicy, make_policy
from pagedkv.policies.arc import ARC
from pagedkv.policies.belady import Belady
from pagedkv.policies.cost import CostAware

NUM_REQUESTS = 3_000


class Cache(Protocol):
    def get(self, key: int) -> bool: ...

    def resize(self, capacity: int) -> None: ...


class TextbookLRU:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: OrderedDict[int, int] = OrderedDict()  # key -> uses

    def get(self, key: int) -> bool:
        if key in self.keys:
            self.touch(key)
            return True
        if len(self.keys) == self.capacity:
            del self.keys[self.victim()]
        self.keys[key] = 1
        return False

    def touch(self, key: int) -> None:
        self.keys[key] += 1
        self.keys.move_to_end(key)

    def victim(self) -> int:
        return next(iter(self.keys))

    def resize(self, capacity: int) -> None:
        while len(self.keys) > capacity:
            del self.keys[self.victim()]
        self.capacity = capacity


class TextbookFIFO(TextbookLRU):
    def touch(self, key: int) -> None:
        pass


class TextbookLFU(TextbookLRU):
    def victim(self) -> int:
        return min(self.keys, key=self.keys.__getitem__)


class TextbookGreedyDual(TextbookLRU):
    """Frequency x cost / size, with all costs and sizes 1."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.inflation = 0.0
        self.value: dict[int, float] = {}

    def get(self, key: int) -> bool:
        hit = super().get(key)
        self.value[key] = self.inflation + self.keys[key]
        return hit

    def victim(self) -> int:
        key = min(self.keys, key=self.value.__getitem__)
        self.inflation = self.value[key]
        return key


class TextbookSIEVE:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: list[list[Any]] = []  # [key, visited], oldest first
        self.hand: list[Any] | None = None

    def get(self, key: int) -> bool:
        for entry in self.queue:
            if entry[0] == key:
                entry[1] = True
                return True
        if len(self.queue) == self.capacity:
            self.evict()
        self.queue.append([key, False])
        return False

    def evict(self) -> None:
        at = self.queue.index(self.hand) if self.hand is not None else 0
        while self.queue[at][1]:
            self.queue[at][1] = False
            at = (at + 1) % len(self.queue)
        self.hand = self.queue[at + 1] if at + 1 < len(self.queue) else None
        del self.queue[at]

    def resize(self, capacity: int) -> None:
        while len(self.queue) > capacity:
            self.evict()
        self.capacity = capacity


class TextbookS3FIFO:
    """A tenth small, the rest main, ghosts for nine tenths; two hits lead from small to main."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: OrderedDict[int, int] = OrderedDict()
        self.main: OrderedDict[int, int] = OrderedDict()
        self.ghosts: OrderedDict[int, None] = OrderedDict()
        self.evicting = False

    def get(self, key: int) -> bool:
        for queue in (self.small, self.main):
            if key in queue:
                queue[key] += 1
                return True
        was_ghost = self.ghosts.pop(key, key) is None
        while len(self.small) + len(self.main) >= self.capacity:
            self.evict()
        full = not self.evicting and len(self.small) >= self.capacity // 10
        (self.main if was_ghost or full else self.small)[key] = 0
        return False

    def evict(self) -> None:
        self.evicting = True
        if len(self.main) > self.capacity - self.capacity // 10 or not self.small:
            self.evict_main()
        else:
            self.evict_small()

    def resize(self, capacity: int) -> None:
        while len(self.small) + len(self.main) > capacity:
            self.evict()
        self.capacity = capacity
        while len(self.ghosts) > int(0.9 * capacity):
            self.ghosts.popitem(last=False)

    def evict_small(self) -> None:
        while self.small:
            key, hits = self.small.popitem(last=False)
            if hits < 2:
                if len(self.ghosts) == int(0.9 * self.capacity):
                    self.ghosts.popitem(last=False)
                self.ghosts[key] = None
                return
            self.main[key] = 0

    def evict_main(self) -> None:
        while True:
            key, hits = self.main.popitem(last=False)
            if not hits:
                return
            self.main[key] = min(hits, 3) - 1


class TextbookARC:
    """With ``early``, as published; without, p moves only when the content has been computed."""

    def __init__(self, capacity: int, early: bool = False) -> None:
        self.c, self.p, self.early = capacity, 0.0, early
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))

    def get(self, key: int) -> bool:
        if key in self.t1 or key in self.t2:
            self.t1.pop(key, None)
            self.t2.pop(key, None)
            self.t2[key] = None
            return True
        in_b1, in_b2 = key in self.b1, key in self.b2
        if self.early:
            self.adapt(in_b1, in_b2)
        if in_b1 or in_b2:
            self.replace(in_b2 and self.early)
        elif len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.popitem(last=False)
                self.replace(False)
            else:
                self.t1.popitem(last=False)
        elif sum(map(len, (self.t1, self.t2, self.b1, self.b2))) >= self.c:
            if sum(map(len, (self.t1, self.t2, self.b1, self.b2))) == 2 * self.c:
                self.b2.popitem(last=False)
            self.replace(False)
        if not self.early:
            self.adapt(in_b1, in_b2)
        self.b1.pop(key, None)
        self.b2.pop(key, None)
        (self.t2 if in_b1 or in_b2 else self.t1)[key] = None
        return False

    def adapt(self, in_b1: bool, in_b2: bool) -> None:
        if in_b1:
            self.p = min(self.c, self.p + max(1.0, len(self.b2) / len(self.b1)))
        if in_b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))

    def replace(self, in_b2: bool) -> None:
        if len(self.t1) + len(self.t2) < self.c:
            return
        self.evict(in_b2)

    def evict(self, in_b2: bool = False) -> None:
        if self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p)):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def resize(self, capacity: int) -> None:
        while len(self.t1) + len(self.t2) > capacity:
            self.evict()
        self.c, self.p = capacity, min(self.p, capacity)
        while self.b1 and len(self.t1) + len(self.b1) > capacity:
            self.b1.popitem(last=False)
        while self.b2 and sum(map(len, (self.t1, self.t2, self.b1, self.b2))) > 2 * capacity:
            self.b2.popitem(last=False)


def zipf(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [1 + min(int(rng.paretovariate(0.7)), 3_000) for _ in range(NUM_REQUESTS)]


def loop(seed: int) -> list[int]:
    """A long loop with other keys between: bad for recency."""
    rng = random.Random(seed)
    return [1 + (i % 150 if rng.random() < 0.7 else rng.randrange(1_000)) for i in range(NUM_REQUESTS)]


def drift(seed: int) -> list[int]:
    """Keys that are popular for a while."""
    rng = random.Random(seed)
    return [1 + i // 40 + min(int(rng.paretovariate(0.8)), 500) for i in range(NUM_REQUESTS)]


KEYS: dict[str, Callable[[int], list[int]]] = {"zipf": zipf, "loop": loop, "drift": drift}


def manager_hits(policy: Any, capacity: int, keys: Sequence[int]) -> list[bool]:
    """One sequence of one block of one token per request."""
    manager = KVCacheManager(capacity, 1, max_seqs=1, max_seq_len=1, policy=policy)
    hits = []
    for i, key in enumerate(keys):
        opened = manager.open(i, [key], max_cached_tokens=1)
        assert opened is not None
        hits.append(opened.num_cached_tokens == 1)
        manager.commit(i, [key][opened.num_cached_tokens :])
        manager.close(i)
    return hits


TEXTBOOK: dict[str, Callable[[int], Cache]] = {
    "lru": TextbookLRU,
    "fifo": TextbookFIFO,
    "lfu": TextbookLFU,
    "sieve": TextbookSIEVE,
    "s3fifo": TextbookS3FIFO,
    "arc": TextbookARC,
    "cost": TextbookGreedyDual,
    "priority": TextbookLRU,
}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", TEXTBOOK)
def test_every_hit_and_miss_is_that_of_the_textbook(name: str, keys: str) -> None:
    """Not merely the rate: request by request, at three sizes."""
    for capacity in (10, 37):
        requests = KEYS[keys](capacity)
        cache = TEXTBOOK[name](capacity)
        expected = [cache.get(key) for key in requests]
        assert 0 < sum(expected) < len(expected)
        policy = CostAware(lambda depth: 1.0) if name == "cost" else name
        assert manager_hits(policy, capacity, requests) == expected


class FlatCache:
    """A cache of flat keys around a policy: blocks have no parents, and move when there are fewer."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        self.policy, self.num_blocks = policy, num_blocks
        self.blocks: dict[int, int] = {}  # key -> block
        self.keys: dict[int, int] = {}  # block -> key
        self.free = set(range(1, num_blocks + 1))
        policy.bind(self)

    def parent(self, block: int) -> int:
        return 0

    def path(self, block: int) -> Int32Array:
        return np.array([block], np.int32)

    def namespace(self, block: int) -> None:
        return None

    def row_hashes(self, ids: Int32Array) -> list[int]:
        return [self.keys[block] for block in ids.tolist()]

    def get(self, key: int) -> bool:
        hit = key in self.blocks
        if hit:
            self.policy.discard(self.path(self.blocks[key]))
            self.policy.hit(self.path(self.blocks[key]))
        else:
            self.evict(0 if self.free else 1)
            self.place(key, self.free.pop())
            self.policy.stored(self.path(self.blocks[key]))
        self.policy.push(self.path(self.blocks[key]))
        return hit

    def place(self, key: int, block: int) -> None:
        self.blocks[key], self.keys[block] = block, key

    def evict(self, count: int) -> None:
        victims = self.policy.first(count, np.zeros(0, np.int32))
        self.policy.evict(victims)
        for block in victims.tolist():
            del self.blocks[self.keys.pop(block)]
            self.free.add(block)

    def resize(self, num_blocks: int) -> None:
        self.evict(max(0, len(self.blocks) - num_blocks))
        free = sorted(set(range(1, num_blocks + 1)) - set(self.keys))
        moves = {block: free.pop() for block in sorted(self.keys) if block > num_blocks}
        self.policy.rename(np.array([*moves], np.int32), np.array([*moves.values()], np.int32))
        for old, new in moves.items():
            self.place(self.keys.pop(old), new)
        self.policy.resize(num_blocks)
        self.num_blocks, self.free = num_blocks, set(free)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", TEXTBOOK)
def test_every_hit_and_miss_is_that_of_the_textbook_while_the_size_changes(name: str, keys: str) -> None:
    """It grows and shrinks every 50 requests; queues, ghosts and targets follow."""
    for seed in range(3):
        rng, requests = random.Random(seed), KEYS[keys](seed)
        policy = CostAware(lambda depth: 1.0) if name == "cost" else make_policy(name)
        textbook, cache = TEXTBOOK[name](37), FlatCache(policy, 37)
        hits = 0
        for i, key in enumerate(requests):
            expected = textbook.get(key)
            assert cache.get(key) == expected, f"seed {seed}, request {i}"
            hits += expected
            if i % 50 == 49:
                capacity = rng.randrange(10, 80)
                textbook.resize(capacity)
                cache.resize(capacity)
        assert 0 < hits < len(requests)


def test_the_target_of_arc_stays_within_a_smaller_cache() -> None:
    """A loop beside what was used again drives it up; it follows when the cache shrinks."""
    policy, textbook = ARC(), TextbookARC(37)
    cache = FlatCache(policy, 37)
    for key in [*range(20), *range(20), *(100 + i % 30 for i in range(200))]:
        assert cache.get(key) == textbook.get(key)
    assert policy._target == textbook.p > 10
    textbook.resize(10)
    cache.resize(10)
    assert policy._target == 10
    for key in zipf(1):
        assert cache.get(key) == textbook.get(key)


@pytest.mark.parametrize("keys", KEYS)
def test_arc_hits_about_as_often_as_if_it_knew_content_before_it_was_computed(keys: str) -> None:
    """Adapting one eviction later costs or gains less than one request in a hundred."""
    for capacity in (10, 37):
        requests = KEYS[keys](capacity)
        cache = TextbookARC(capacity, early=True)
        published = sum(cache.get(key) for key in requests)
        assert abs(sum(manager_hits("arc", capacity, requests)) - published) < NUM_REQUESTS / 100


def belady_hits(capacity: int, keys: Sequence[int]) -> int:
    """The manager with the future announced."""
    later: dict[int, int] = {}
    next_use = [0.0] * len(keys)
    for i in reversed(range(len(keys))):
        next_use[i] = later.get(keys[i], float("inf"))
        later[keys[i]] = i
    belady = Belady()
    manager = KVCacheManager(capacity, 1, max_seqs=1, max_seq_len=1, policy=belady)
    for i, key in enumerate(keys):
        opened = manager.open(i, [key], max_cached_tokens=1)
        assert opened is not None
        manager.commit(i, [key][opened.num_cached_tokens :])
        belady.announce(manager.tables.block_ids(i), [next_use[i]])
        manager.close(i)
    return manager.stats().hit_blocks


@pytest.mark.parametrize("keys", KEYS)
def test_belady_hits_as_often_as_a_scan_for_the_farthest_use(keys: str) -> None:
    """And no other policy hits more often."""
    requests, capacity = KEYS[keys](5)[:2_000], 37
    cached: set[int] = set()
    hits = 0
    for i, key in enumerate(requests):
        hits += key in cached
        if key not in cached and len(cached) == capacity:
            ahead = requests[i + 1 :]
            cached.remove(max(cached, key=lambda k: ahead.index(k) if k in ahead else len(ahead)))
        cached.add(key)
    assert belady_hits(capacity, requests) == hits
    assert all(sum(manager_hits(name, capacity, requests)) <= hits for name in TEXTBOOK)


PEERS = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "sieve": "Sieve", "s3fifo": "S3FIFO"}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", PEERS)
def test_every_hit_and_miss_is_that_of_libcachesim(name: str, keys: str) -> None:
    """An independent implementation (pip install libcachesim); its S3-FIFO needs more than 10 blocks."""
    peer = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
    for capacity in (37, 100):
        requests = KEYS[keys](capacity)
        cache = getattr(peer, PEERS[name])(capacity)
        expected = []
        for i, key in enumerate(requests):
            request = peer.Request()
            request.obj_id, request.obj_size, request.clock_time = key, 1, i
            expected.append(bool(cache.get(request)))
        assert manager_hits(name, capacity, requests) == expected
