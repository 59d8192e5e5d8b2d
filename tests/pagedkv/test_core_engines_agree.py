"""The compiled core does what the numpy engine does, call by call, over random calls."""

import random
from typing import Any

import numpy as np
import pytest

from pagedkv import core
from pagedkv.block_cache import BlockCache
from pagedkv.errors import BlockError, PagedKVError
from pagedkv.numpy_block_pool import NumpyBlockPool
from pagedkv.numpy_prefix_index import NumpyPrefixIndex
from pagedkv.page_table import Int32Array
from pagedkv.policies.numpy_lru import NumpyLRU

needs_core = pytest.mark.skipif(core.missing() is not None, reason="no compiled core")

SIZE = 3


def ids(values: Any) -> Int32Array:
    return np.array(values, np.int32)


def strided(rng: random.Random, values: Any) -> Int32Array:
    """The same ids as some view or other."""
    array = ids(values)
    step = rng.choice([1, 1, -1, 2, -3])
    wide: Int32Array = np.full(abs(step) * len(array), -7, np.int32)
    wide[::step] = array
    return wide[::step]


def outcome(of: Any, name: str, arguments: tuple[Any, ...]) -> object:
    """What a method returned, or which error it raised, in words."""
    try:
        found = getattr(of, name)(*arguments)
    except PagedKVError as error:
        return type(error), str(error)
    return (found.dtype.str, found.tolist()) if isinstance(found, np.ndarray) else found


# -- pool


def pool_state(pool: Any) -> object:
    free = pool._free[: pool.num_free].tolist()
    return pool.num_blocks, pool.counts, pool.ref_count.tolist(), pool.state.tolist(), free


@needs_core
@pytest.mark.parametrize("seed", range(8))
def test_both_pools_do_the_same(seed: int) -> None:
    """The same ids, errors and arrays over thousands of calls, of which many are misuse."""
    from pagedkv.native_block_pool import NativeBlockPool

    rng = random.Random(seed)
    num_blocks = rng.choice([1, 3, 9, 40])
    pools: list[Any] = [NumpyBlockPool(num_blocks), NativeBlockPool(num_blocks)]
    refused = 0

    def some(*states: int) -> list[int]:
        """Blocks in a state, now and then with one that is wrong."""
        good = [b for b in range(1, pools[0].num_blocks + 1) if pools[0].state[b] in states]
        chosen = rng.sample(good, rng.randint(0, len(good)))
        if rng.random() < 0.1:
            chosen.insert(rng.randint(0, len(chosen)), rng.choice([0, -1, 2**31 - 1, *range(1, 42)]))
        return chosen

    for _ in range(1_500):
        name = rng.choice(["acquire", "acquire", "release", "release", "evict", "rename", "resize"])
        arguments: tuple[Any, ...]
        if name == "acquire":
            shared = some(1, 2)
            count = rng.randint(-1 if rng.random() < 0.05 else 0, pools[0].num_available)
            idle = [b for b in some(1) if b not in shared or rng.random() < 0.05]
            arguments = (count, ids(shared), ids(idle[: max(0, count - pools[0].num_free)]))
        elif name == "release":
            gone = some(2)
            flags = np.array([rng.random() < 0.6 for _ in range(2 * len(gone))], np.bool_)[::2]
            arguments = (ids(gone), flags if rng.random() < 0.95 else flags[1:])
        elif name == "evict":
            arguments = (some(1),)
        elif name == "rename":
            new = some(0)
            old = some(1, 2)[: len(new)]
            arguments = (ids(old), ids(new[: len(old)] if rng.random() < 0.95 else new))
        else:
            arguments = (pools[0].num_blocks + rng.randint(-4, 4),) if rng.random() < 0.2 else (40,)
        if name != "resize":
            first = arguments[0]
            ids_first = first if isinstance(first, int) else strided(rng, first)
            if not isinstance(first, int) and rng.random() < 0.1:
                ids_first = np.asarray(first, np.int64)
            arguments = (ids_first, *arguments[1:])
        results = [outcome(pool, name, arguments) for pool in pools]
        assert results[0] == results[1], (name, arguments)
        assert pool_state(pools[0]) == pool_state(pools[1]), (name, arguments)
        refused += isinstance(results[0], tuple) and results[0][0] is BlockError
        for pool in pools:
            pool.check_invariants()
    assert refused > 100


# -- index


class Twins:
    """Both indexes, with a set of free ids and random contents of few tokens."""

    def __init__(self, rng: random.Random, num_blocks: int, index: type[Any]) -> None:
        self.rng = rng
        self.both: list[Any] = [NumpyPrefixIndex(num_blocks, SIZE), index(num_blocks, SIZE)]

    @property
    def num_blocks(self) -> int:
        return len(self.both[0].indexed) - 1

    def known(self) -> list[int]:
        found: list[int] = np.flatnonzero(self.both[0].indexed).tolist()
        return found

    def unknown(self) -> list[int]:
        return sorted(set(range(1, self.num_blocks + 1)) - set(self.known()))

    def contents(self, count: int) -> tuple[Int32Array, Int32Array]:
        tokens = ids([[self.rng.randrange(2) for _ in range(SIZE)] for _ in range(count)])
        extra = ids([self.rng.choice([0, 0, 0, 4]) for _ in range(count)])
        return tokens.reshape(count, SIZE), extra

    def same(self, name: str, *arguments: Any) -> Any:
        results = [outcome(index, name, arguments) for index in self.both]
        assert results[0] == results[1], (name, arguments, results)
        return results[0]

    def match(self) -> None:
        tokens, extra = self.contents(self.rng.randint(0, 6))
        if self.rng.random() < 0.5:
            tokens = np.asfortranarray(tokens)
        self.same("match", tokens, extra, self.rng.choice([0, *self.known()]))

    def insert(self) -> None:
        free = self.unknown()
        count = self.rng.randint(0, min(5, len(free)))
        tokens, extra = self.contents(count)
        parent = self.rng.choice([0, *self.known()])
        hit = self.both[0].match(tokens, extra, parent)
        parent = int(hit[-1]) if len(hit) else parent
        new = strided(self.rng, self.rng.sample(free, count)[len(hit) :])
        if len(new):
            for index in self.both:
                index.tokens[new] = tokens[len(hit) :]
                index.insert(new, extra[len(hit) :], parent)

    def grow(self) -> None:
        known, free = self.known(), self.unknown()
        count = min(len(known), len(free), self.rng.randint(0, 3))
        new = ids(self.rng.sample(free, count))
        tokens, _ = self.contents(count)
        for index in self.both:
            index.tokens[new] = tokens
        self.same("grow", new, ids([self.rng.choice(known) for _ in new]))

    def remove(self) -> None:
        left, gone = self.known(), []
        parents = {block: self.both[0].parent(block) for block in left}
        for _ in range(self.rng.randint(0, len(left))):
            inner = {parents[b] for b in left}
            gone.append(self.rng.choice([b for b in left if b not in inner]))
            left.remove(gone[-1])
        if gone:
            for index in self.both:
                index.remove(ids(gone))

    def rename(self) -> None:
        free = self.unknown()
        old = self.rng.sample(range(1, self.num_blocks + 1), self.rng.randint(0, min(4, len(free))))
        new = self.rng.sample(free, len(old))
        if self.rng.random() < 0.8:
            new, old = new, [b for b in old if b not in new]
            new = new[: len(old)]
        for index in self.both:
            index.tokens[self.unknown()] = 0
        self.same("rename", ids(old), ids(new))

    def resize(self) -> None:
        self.same("resize", min(80, max(4, self.num_blocks + self.rng.randint(-5, 5))))

    def best_child(self) -> None:
        row = ids([self.rng.randrange(2) for _ in range(self.rng.randint(0, SIZE))])
        parent = self.rng.choice([0, *self.known()])
        self.same("best_child", row, self.rng.choice([0, 4]), parent, self.rng.randint(0, 3))

    def behind(self) -> None:
        known = self.known()
        self.same("behind", ids(self.rng.sample(known, self.rng.randint(0, min(4, len(known))))))

    def compare(self) -> None:
        self.same("__len__")
        assert self.both[0].indexed.tolist() == self.both[1].indexed.tolist()
        known = self.known()
        for name in ("tokens", "extra"):
            values = [getattr(index, name)[known].tolist() for index in self.both]
            assert values[0] == values[1], name
        for block in known:
            for name in ("is_leaf", "parent", "path"):
                self.same(name, block)
            path = self.both[0].path(block)
            found = self.both[1].match(self.both[1].tokens[path], self.both[1].extra[path])
            assert found.tolist() == path.tolist()
        links = [
            sorted(
                pair for before, run in index.chains() for pair in zip([before, *run[:-1]], run, strict=True)
            )
            for index in self.both
        ]
        assert links[0] == links[1]


@needs_core
@pytest.mark.parametrize("hash_mask", [2**64 - 1, 0, 1 << 33], ids=["hashes", "one hash", "two hashes"])
@pytest.mark.parametrize("seed", range(6))
def test_both_indexes_do_the_same_whatever_the_hash(
    seed: int, hash_mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same hits, trees and errors, also when every key of the table collides with every other."""
    from pagedkv.native_prefix_index import NativePrefixIndex

    monkeypatch.setattr(NativePrefixIndex, "hash_mask", hash_mask)
    rng = random.Random(seed)
    twins = Twins(rng, rng.choice([4, 20, 60]), NativePrefixIndex)
    names = [
        "match",
        "insert",
        "insert",
        "insert",
        "grow",
        "remove",
        "rename",
        "resize",
        "best_child",
        "behind",
    ]
    entries = 0
    for _ in range(700):
        getattr(twins, rng.choice(names))()
        twins.compare()
        table = twins.both[1]._table
        in_table = np.sort(table[table > 0] & np.uint64(2**32 - 1)).tolist()
        assert in_table == [b for b in twins.known() if twins.both[1]._prev[b]], (
            "the table is not the older children"
        )
        entries = max(entries, len(in_table))
    assert entries >= 3


# -- order


@needs_core
@pytest.mark.parametrize("seed", range(6))
def test_both_orders_do_the_same(seed: int) -> None:
    """The same ids in the same order over thousands of calls."""
    from pagedkv.policies.native_lru import NativeLRU

    rng = random.Random(seed)
    orders: list[Any] = [NumpyLRU(), NativeLRU()]
    num_blocks = rng.choice([1, 5, 30, 200])
    for order in orders:
        BlockCache(num_blocks, 1, order)
    for _ in range(2_000):
        size = orders[0].num_blocks
        some = rng.sample(range(1, size + 1), rng.randint(0, min(size, 20)))
        new = rng.sample(range(1, size + 1), len(some))
        name, arguments = rng.choice(
            [
                ("push", (strided(rng, some),)),
                ("push", (ids(some),)),
                ("discard", (strided(rng, some),)),
                ("first", (rng.randint(-1, 30), strided(rng, some))),
                ("rename", (ids(some), ids(new))),
                ("resize", (max(0, size + rng.randint(-3, 3)),)),
                ("make_room", (len(some),)),
            ]
        )
        results = [outcome(order, name, arguments) for order in orders]
        assert results[0] == results[1], (name, arguments)
        assert orders[0].ids().tolist() == orders[1].ids().tolist()
        assert not orders[1]._kept.any()
