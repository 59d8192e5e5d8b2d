"""The compiled core does what the numpy engine does, call by call, over random calls."""

import importlib.util
import random
from typing import Any

import numpy as np
import pytest

from pagedkv import KVCacheManager, Media, Namespace, core, row_batches
from pagedkv.block_cache import BlockCache
from pagedkv.block_tables import Int32Array
from pagedkv.errors import BlockError, PagedKVError
from pagedkv.numpy_block_pool import NumpyBlockPool
from pagedkv.numpy_prefix_index import NumpyPrefixIndex
from pagedkv.policies.numpy_lru import NumpyLRU
from pagedkv.testing import snapshot

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


# -- rows of a batch


def numpy_row_batches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as it is where there is no compiled core."""
    spec = row_batches.__spec__
    assert spec is not None and spec.loader is not None
    with monkeypatch.context() as patched:
        patched.setattr(core, "reason", lambda: "numpy is asked for")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@needs_core
@pytest.mark.parametrize("seed", range(4))
def test_both_engines_plan_grow_and_store_the_same_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same counts, tables and tokens over random batches, whatever the lengths."""
    from pagedkv import _core
    from pagedkv.native_block_pool import NativeBlockPool
    from pagedkv.native_prefix_index import NativePrefixIndex

    engines: list[Any] = [numpy_row_batches(monkeypatch), _core]
    assert engines[0].plan_growth is not _core.plan_growth
    rng = random.Random(seed)
    max_seqs, width, num_blocks = 7, 5, 60
    seen_shared = seen_full = seen_none_left = 0
    for _ in range(400):
        pool, index = NativeBlockPool(num_blocks), NativePrefixIndex(num_blocks, SIZE)
        pool.ref_count[:] = [rng.randint(1, 2) for _ in range(num_blocks + 1)]
        index.indexed[:] = [rng.random() < 0.2 for _ in range(num_blocks + 1)]
        blocks = ids(rng.sample(range(1, num_blocks + 1), max_seqs * width)).reshape(max_seqs, width)
        seq_len = np.array([rng.randint(0, 3 * SIZE) for _ in range(max_seqs)], np.int64)
        committed = np.array([rng.randint(0, n) for n in seq_len], np.int64)
        rows = np.array(rng.sample(range(max_seqs), rng.randint(0, max_seqs)), np.int64)
        num_tokens, tokens = rng.randint(0, 5), ids([rng.randrange(99) for _ in rows])
        found = []
        for engine in engines:
            table, lens = blocks.copy(), seq_len.copy()
            shared, full = np.full((2, len(rows)), -1, np.int32), np.full(len(rows), -1, np.int32)
            plan = engine.plan_growth(pool, index, table, lens, rows, num_tokens, shared)
            blind = engine.plan_growth(pool, index, table, lens, rows, num_tokens, shared[:, :0])
            assert blind == (*plan[:2], 0)
            fresh = np.arange(100, 100 + plan[1], dtype=np.int32)
            engine.grow_rows(table, lens, rows, SIZE, num_tokens, fresh)
            index.tokens[:] = -1
            num_full = engine.store_tokens(index, blocks, seq_len, committed, rows, tokens, full)
            stored = index.tokens.tolist()
            found.append(
                (plan, table.tolist(), lens.tolist(), shared.tolist(), num_full, full.tolist(), stored)
            )
        assert found[0] == found[1]
        seen_shared += found[0][0][2]
        seen_full += max(0, found[0][4])
        seen_none_left += found[0][4] == -1
    assert min(seen_shared, seen_full, seen_none_left) > 20


# -- one compiled call, or several


def stepwise(manager: KVCacheManager) -> KVCacheManager:
    """The same manager, told to do in steps what it could do in one compiled call."""
    assert manager._cache._all_compiled
    manager._cache._all_compiled = False
    return manager


@needs_core
@pytest.mark.skipif(core.engine() != "native", reason="only the compiled core has such calls")
@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "watched"])
@pytest.mark.parametrize("seed", range(3))
def test_one_compiled_call_does_what_the_steps_do(seed: int, quiet: bool) -> None:
    """The same answers, ids, events and arrays over random calls on pools that are always too small."""
    rng = random.Random(seed)
    size = 2
    num_blocks = rng.choice([8, 12, 30])
    both = [
        KVCacheManager(num_blocks, size, max_seqs=5),
        stepwise(KVCacheManager(num_blocks, size, max_seqs=5)),
    ]
    if not quiet:
        for manager in both:
            manager.events.record()
    first = both[0]
    fences: list[int] = []

    def same(name: str, *arguments: Any, **options: Any) -> Any:
        results = []
        for manager in both:
            of: Any = manager
            *parts, method = name.split(".")
            for part in parts:
                of = getattr(of, part)
            try:
                results.append(getattr(of, method)(*arguments, **options))
            except PagedKVError as error:
                results.append((type(error), str(error)))
        assert str(results[0]) == str(results[1]), (name, arguments)
        return results[0]

    def text(count: int) -> list[int]:
        return [rng.randrange(2) for _ in range(count)]

    for number in range(1_200):
        names = first.tables.seq_ids
        kind = rng.choice(
            ["open", "open", "step", "step", "commit", "close", "fork", "truncate", "fence", "copies"]
        )
        if kind == "open":
            options: dict[str, Any] = {"partial_hits": rng.random() < 0.3}
            if not quiet and rng.random() < 0.3:
                options |= {"namespace": Namespace("tenant"), "media": [Media(0, "cat")]}
            same("open", number, text(rng.randint(1, 4 * size)), **options)
        elif kind == "fence":
            if fences and rng.random() < 0.9:
                same("fences.signal", fences.pop(rng.randrange(len(fences))))
            elif len(fences) < 2:
                fences.append(same("fences.open"))
        elif kind == "copies":
            same("copies.take")
        elif names:
            name = rng.choice(names)
            left = first.tables.num_tokens(name) - first.tables.num_committed(name)
            if kind == "step":
                batch = rng.sample(names, rng.randint(1, len(names)))
                same("step", batch, rng.randint(0, 2))
                same("commit_step", batch, text(len(batch)))
            elif kind == "commit":
                same("commit", name, text(rng.randint(0, left + (rng.random() < 0.1))))
            elif kind == "fork":
                same("fork", name, number)
            elif kind == "truncate":
                same("truncate", name, rng.randint(0, first.tables.num_tokens(name)))
            else:
                same("close", name)
        for name in first.tables.seq_ids:
            same("tables.block_ids", name)
        both[0]._cache._all_compiled = False  # compared as well
        assert snapshot(both[0]) == snapshot(both[1]), (number, kind)
        both[0]._cache._all_compiled = True
        for manager in both:
            manager.check_invariants()
    if not quiet:
        same("events.take")
    stats = first.stats()
    assert min(stats.evicted_blocks, stats.copied_blocks, stats.hit_blocks) > 5
