"""The default policy: least recently used first against a plain list, at a cost that does not grow."""

import random
from typing import Any, cast

import numpy as np
import pytest

from pagedkv.block_cache import BlockCache
from pagedkv.page_table import Int32Array
from pagedkv.policies.lru import LRU


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def order_of(num_blocks: int) -> LRU:
    """An empty order for ids 1..num_blocks."""
    order = LRU()
    BlockCache(num_blocks, 1, order)
    return order


def first(order: LRU, count: int, *keep: int) -> list[int]:
    found: list[int] = order.first(count, keep=ids(*keep)).tolist()
    return found


def test_the_first_pushed_is_the_first_given_up() -> None:
    """Within one push and between pushes, order of arrival is order of departure."""
    order = order_of(9)
    order.push(ids(3, 1))
    order.push(ids(2))
    assert first(order, 2) == [3, 1]
    assert first(order, 9) == order.ids().tolist() == [3, 1, 2]


def test_a_block_pushed_again_counts_from_its_last_use() -> None:
    """Discarded or not in between, only the newest entry of an id is valid."""
    order = order_of(9)
    order.push(ids(1, 2, 3))
    order.push(ids(1))
    order.discard(ids(2))
    order.push(ids(2))
    assert first(order, 9) == [3, 1, 2]


def test_what_is_kept_is_passed_over_and_stays() -> None:
    """``keep`` hides ids, cached or not, from this one call."""
    order = order_of(9)
    order.push(ids(1, 2, 3))
    assert first(order, 2, 1, 9) == [2, 3]
    assert first(order, 9, 1, 2, 3) == []
    assert first(order, 9) == [1, 2, 3]


def test_room_made_before_is_there_when_it_is_needed() -> None:
    """After ``make_room(n)`` a push of n moves no entry, however full the log was; the order stays."""
    order = order_of(50)
    for _ in range(40):
        order.push(np.arange(1, 51, dtype=np.int32))
        order.discard(np.arange(1, 21, dtype=np.int32))
        before = order.ids().tolist()
        order.make_room(20)
        places = order._place[21:].tolist()
        assert order.ids().tolist() == before
        order.push(np.arange(20, 0, -1, dtype=np.int32))
        assert order._place[21:].tolist() == places
        assert order.ids().tolist() == [*before, *range(20, 0, -1)]


def test_discarding_what_is_not_there_changes_nothing() -> None:
    """Blocks that were never cached may be discarded."""
    order = order_of(4)
    order.discard(ids(1, 4))
    order.push(ids(2))
    order.discard(ids(3))
    assert first(order, 4) == [2]


def test_an_empty_order_and_a_count_of_zero_give_nothing() -> None:
    """No id, and an int32 array all the same."""
    order = order_of(1)
    found = order.first(3, keep=ids())
    assert found.dtype == np.int32 and found.tolist() == []
    order.push(ids(1))
    assert first(order, 0) == []


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 100, 700])
def test_random_operations_agree_with_a_plain_list(num_blocks: int) -> None:
    """Pushes, discards and looks with any ``keep`` follow a list, through many compactions."""
    rng = random.Random(num_blocks)
    order = order_of(num_blocks)
    size = len(order._log)
    model: list[int] = []
    pushed = 0
    for _ in range(1_500):
        choice = rng.choice(["push", "push", "discard", "first", "evict"])
        some = rng.sample(range(1, num_blocks + 1), rng.randint(0, min(num_blocks, 40)))
        if choice == "push":
            order.push(ids(*some))
            pushed += len(some)
            model = [i for i in model if i not in some] + some
        elif choice == "discard":
            order.discard(ids(*some))
            model = [i for i in model if i not in some]
        else:
            count = rng.randint(0, 30)
            expected = [i for i in model if i not in some][:count]
            assert first(order, count, *some) == expected
            assert first(order, count, *some) == expected
            if choice == "evict":
                order.discard(ids(*expected))
                model = [i for i in model if i not in expected]
        assert order.ids().tolist() == model
        assert len(order._log) == size and order._head <= order._tail <= size
    assert pushed > 2 * size


def test_first_changes_nothing() -> None:
    """Looking, with or without ``keep``, leaves entries, places and later answers as they were."""
    order = order_of(5)
    order.push(ids(4, 2, 5, 1))
    order.discard(ids(2))
    before = (order._log.tolist(), order._place.tolist(), order._tail, order.ids().tolist())
    for keep in ((), (4,), (1, 2, 3, 4, 5)):
        first(order, 3, *keep)
        assert (order._log.tolist(), order._place.tolist(), order._tail, order.ids().tolist()) == before


@pytest.mark.parametrize("num_blocks", [1, 5, 64])
def test_the_log_never_outgrows_its_array(num_blocks: int) -> None:
    """All blocks pushed again and again: compaction makes room, and the order stays right."""
    order = order_of(num_blocks)
    size = len(order._log)
    everything = list(range(1, num_blocks + 1))
    for round_number in range(3 * size):
        everything = everything[1:] + everything[:1]
        order.push(ids(*everything))
        assert len(order._log) == size and order._tail <= size
        if round_number % 17 == 0:
            assert order.ids().tolist() == everything


class CountingLog(np.ndarray[Any, Any]):
    """Counts the entries of the log that are read."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        found = np.asarray(super().__getitem__(key))
        CountingLog.read += found.size
        return found


def entries_read_per_eviction(num_blocks: int, batch: int, cycles: int) -> float:
    """Evict ``batch`` blocks and release as many, again and again, while hits come and go."""
    rng = random.Random(num_blocks)
    order = order_of(num_blocks)
    order.push(np.arange(1, num_blocks + 1, dtype=np.int32))
    order._log = cast("Int32Array", order._log.view(CountingLog))
    CountingLog.read = 0
    for _ in range(cycles):
        used = np.array(rng.sample(range(1, num_blocks + 1), batch), np.int32)
        victims = order.first(batch, keep=used)
        assert len(victims) == batch
        order.discard(victims)
        order.discard(used)
        order.push(used)
        order.push(victims)
    return CountingLog.read / (cycles * batch)


@pytest.mark.parametrize("batch", [1, 16])
def test_work_per_eviction_does_not_grow_with_the_number_cached(batch: int) -> None:
    """As many log entries are read per eviction with 100,000 blocks cached as with 1,000."""
    read = {n: entries_read_per_eviction(n, batch, cycles=400) for n in (100, 1_000, 10_000, 100_000)}
    assert read[10_000] <= 1.1 * read[1_000] + 1
    assert read[100_000] <= 1.1 * read[1_000] + 1
    assert max(read.values()) <= 640 / batch + 8


@pytest.mark.parametrize("num_blocks", [100, 1_000, 10_000, 100_000])
def test_work_per_eviction_stays_small_with_compactions_counted(num_blocks: int) -> None:
    """Over several turnovers of the whole cache, a handful of entries are read per block evicted."""
    batch = num_blocks // 10
    assert entries_read_per_eviction(num_blocks, batch, cycles=60) <= 32


@pytest.mark.parametrize("num_blocks", [1_000, 10_000, 100_000])
@pytest.mark.parametrize("looks", [1, 10, 100])
def test_a_void_stretch_is_read_twice_at_most(num_blocks: int, looks: int) -> None:
    """A long void stretch before the oldest block costs two passes, however many looks follow."""
    order = order_of(num_blocks)
    order.push(np.arange(1, num_blocks + 1, dtype=np.int32))
    order.discard(np.arange(1, num_blocks - looks + 1, dtype=np.int32))
    order._log = cast("Int32Array", order._log.view(CountingLog))
    CountingLog.read = 0
    for expected in range(num_blocks - looks + 1, num_blocks + 1):
        victims = order.first(1, keep=ids())
        assert victims.tolist() == [expected]
        order.discard(victims)
    assert CountingLog.read <= 2 * num_blocks + 192 * looks
