"""The default policy: least recently used first against a plain list, at a cost that does not grow."""

import copy
import importlib
import random
from typing import Any, cast

import numpy as np
import pytest

from pagedkv import core
from pagedkv.block_cache import BlockCache
from pagedkv.block_tables import Int32Array
from pagedkv.errors import BlockError
from pagedkv.policies.lru import LRU
from pagedkv.policies.numpy_lru import NumpyLRU
from pagedkv.testing import snapshot


@pytest.fixture(
    params=[
        "numpy",
        pytest.param(
            "native", marks=pytest.mark.skipif(core.missing() is not None, reason="no compiled core")
        ),
    ],
    autouse=True,
)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let every test of this file run with both engines."""
    name: str = request.param
    module = importlib.import_module(f"pagedkv.policies.{name}_lru")
    monkeypatch.setitem(globals(), "LRU", getattr(module, f"{name.title()}LRU"))
    return name


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def order_of(num_blocks: int) -> LRU:
    """An empty order for ids 1..num_blocks."""
    order = LRU()
    BlockCache(num_blocks, 1, order)
    return order


def log_of(num_blocks: int) -> NumpyLRU:
    """An empty order of the numpy engine."""
    order = NumpyLRU()
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
    """Pushes, discards and looks with any ``keep`` follow a list, however often ids come back."""
    rng = random.Random(num_blocks)
    order = order_of(num_blocks)
    model: list[int] = []
    for _ in range(1_500):
        choice = rng.choice(["push", "push", "discard", "first", "evict"])
        some = rng.sample(range(1, num_blocks + 1), rng.randint(0, min(num_blocks, 40)))
        if choice == "push":
            order.push(ids(*some))
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


def test_first_changes_nothing() -> None:
    """Looking, with or without ``keep``, leaves every array as it was."""
    order: Any = order_of(5)
    order.push(ids(4, 2, 5, 1))
    order.discard(ids(2))
    before = snapshot(order)
    for keep in ((), (4,), (1, 2, 3, 4, 5)):
        first(order, 3, *keep)
        assert snapshot(order) == before


def test_a_renamed_block_keeps_its_place() -> None:
    """Idle ones stand where they stood, held ones stay away; new ids may have been here before."""
    order = order_of(9)
    order.push(ids(5, 1, 7, 2, 3))
    order.discard(ids(5, 7))
    order.rename(ids(1, 3, 4), ids(7, 9, 8))
    assert order.ids().tolist() == [7, 2, 9]
    order.push(ids(1, 8))
    order.discard(ids(7))
    assert order.ids().tolist() == [2, 9, 1, 8]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ((1,), (2,), "rename a block to 2, which is idle"),
        ((1, 4), (5,), "rename 2 blocks to 1"),
        ((1, 4), (5, 5), "rename block 5 twice"),
        ((1, 5), (5, 6), "rename block 5 twice"),
        ((1,), (10,), r"rename block 10: ids are 1\.\.9"),
    ],
)
def test_a_wrong_renaming_is_refused_and_changes_nothing(
    old: tuple[int, ...], new: tuple[int, ...], message: str
) -> None:
    """Names that stand in the order, repeated or foreign ones raise ``BlockError``."""
    order = order_of(9)
    order.push(ids(1, 2, 3))
    with pytest.raises(BlockError, match=message):
        order.rename(ids(*old), ids(*new))
    assert order.ids().tolist() == [1, 2, 3]


def test_an_order_grows_and_shrinks_around_what_is_in_it() -> None:
    """The order stays; an idle block cannot be cut off."""
    order = order_of(6)
    order.push(ids(6, 2, 4))
    order.discard(ids(6))
    order.resize(60)
    order.push(ids(60, 1))
    assert order.ids().tolist() == [2, 4, 60, 1]
    for num_blocks, message in ((59, "59 blocks: block 60 is idle"), (0, "at least 1 block, got 0")):
        with pytest.raises(BlockError, match=message):
            order.resize(num_blocks)
    order.discard(ids(60))
    order.resize(4)
    order.push(ids(3))
    assert order.num_blocks == 4
    assert order.ids().tolist() == first(order, 9) == [2, 4, 1, 3]


def test_a_copy_of_an_order_is_independent() -> None:
    """A deep copy has arrays of its own; an order that is not bound yet can be copied too."""
    order = order_of(5)
    order.push(ids(4, 2))
    twin = copy.deepcopy(order)
    twin.discard(ids(4))
    order.push(ids(1))
    assert (order.ids().tolist(), twin.ids().tolist()) == ([4, 2, 1], [2])
    BlockCache(3, 1, copy.deepcopy(LRU()))


# -- the numpy engine's own promises


def test_room_made_before_is_there_when_it_is_needed() -> None:
    """After ``make_room(n)`` a push of n moves no entry, however full the log was; the order stays."""
    order = log_of(50)
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


@pytest.mark.parametrize("num_blocks", [1, 5, 64])
def test_the_log_never_outgrows_its_array(num_blocks: int) -> None:
    """All blocks pushed again and again: compaction makes room, and the order stays right."""
    order = log_of(num_blocks)
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
    order = log_of(num_blocks)
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
    order = log_of(num_blocks)
    order.push(np.arange(1, num_blocks + 1, dtype=np.int32))
    order.discard(np.arange(1, num_blocks - looks + 1, dtype=np.int32))
    order._log = cast("Int32Array", order._log.view(CountingLog))
    CountingLog.read = 0
    for expected in range(num_blocks - looks + 1, num_blocks + 1):
        victims = order.first(1, keep=ids())
        assert victims.tolist() == [expected]
        order.discard(victims)
    assert CountingLog.read <= 2 * num_blocks + 192 * looks
