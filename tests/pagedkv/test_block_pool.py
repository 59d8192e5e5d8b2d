"""The block pool: three disjoint states, and misuse that is refused with numbers and changes nothing."""

import copy
import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv import core
from pagedkv.block_pool import ACTIVE, CACHED, FREE, BlockCounts, BlockPool
from pagedkv.block_tables import Int32Array
from pagedkv.errors import BlockError

NUM_BLOCKS = 8


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
    module = importlib.import_module(f"pagedkv.{name}_block_pool")
    monkeypatch.setitem(globals(), "BlockPool", getattr(module, f"{name.title()}BlockPool"))
    return name


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def snapshot(pool: BlockPool) -> tuple[object, ...]:
    """Everything in the pool but its scratch array."""
    return (
        pool.num_blocks,
        pool.counts,
        pool.ref_count.tolist(),
        pool.state.tolist(),
        pool._free.tolist(),
    )


def release(pool: BlockPool, blocks: Int32Array, retain: bool = False) -> Int32Array:
    return pool.release(blocks, np.full(len(blocks), retain))


def mixed_pool() -> BlockPool:
    """Blocks 1, 2 active (2 twice), 3, 4 cached, 5..8 free."""
    pool = BlockPool(NUM_BLOCKS)
    pool.acquire(4)
    pool.acquire(0, shared=ids(2))
    release(pool, ids(4, 3), retain=True)
    return pool


def full_pool() -> BlockPool:
    """Blocks 1..5 active, 6, 7, 8 cached: every new block needs a victim."""
    pool = BlockPool(NUM_BLOCKS)
    release(pool, pool.acquire(NUM_BLOCKS)[5:], retain=True)
    return pool


MISUSE: dict[str, tuple[Callable[[], BlockPool], Callable[[BlockPool], object], str]] = {
    "release_a_free_block": (mixed_pool, lambda p: release(p, ids(1, 5)), "release block 5: it is free"),
    "release_a_cached_block": (mixed_pool, lambda p: release(p, ids(1, 3)), "release block 3: it is cached"),
    "release_id_zero": (mixed_pool, lambda p: release(p, ids(1, 0)), "cannot release block 0: "),
    "release_a_negative_id": (mixed_pool, lambda p: release(p, ids(1, -1)), r"block -1: ids are 1\.\.8"),
    "release_an_id_too_large": (mixed_pool, lambda p: release(p, ids(1, 9)), r"block 9: ids are 1\.\.8"),
    "release_a_huge_id": (mixed_pool, lambda p: release(p, ids(1, 2**31 - 1)), "block 2147483647: ids are"),
    "release_an_id_twice": (mixed_pool, lambda p: release(p, ids(2, 1, 2)), "release block 2 twice"),
    "release_more_ids_than_there_are_blocks": (
        mixed_pool,
        lambda p: release(p, ids(*[1, 2] * NUM_BLOCKS)),
        "cannot release",
    ),
    **{
        f"release_with_flags_as_{name}": (
            mixed_pool,
            lambda p, flags=flags: p.release(ids(1, 2), flags),  # type: ignore[misc]
            "2 ids need as many retain flags, as an array of bool",
        )
        for name, flags in {
            "too_few": np.ones(1, np.bool_),
            "ints": np.array([1, 0]),
            "a_list": [True, False],
            "two_dimensions": np.ones((2, 1), np.bool_),
            "objects": np.array([True, False], object),
        }.items()
    },
    "release_two_dimensions": (
        mixed_pool,
        lambda p: p.release(ids(1, 2).reshape(2, 1), np.ones((2, 1), np.bool_)),
        r"one dimension, got int32 \(2, 1\)",
    ),
    "release_floats": (
        mixed_pool,
        lambda p: p.release(np.array([1.0, 2.0]), np.ones(2, np.bool_)),
        r"must be integers .* got float64 \(2,\)",
    ),
    "release_an_id_that_wraps_to_a_good_one": (
        mixed_pool,
        lambda p: p.release(np.array([2**32 + 1]), np.ones(1, np.bool_)),
        r"fit int32, got 4294967297\.\.4294967297",
    ),
    "share_an_id_that_wraps_to_a_good_one": (
        mixed_pool,
        lambda p: p.acquire(1, np.array([1 - 2**32])),
        "fit int32, got -4294967295",
    ),
    "share_a_free_block": (mixed_pool, lambda p: p.acquire(1, ids(1, 6)), "share block 6: it is free"),
    "share_id_zero": (mixed_pool, lambda p: p.acquire(1, ids(0)), "share block 0"),
    "share_a_negative_id": (mixed_pool, lambda p: p.acquire(1, ids(-3)), "share block -3"),
    "share_an_id_too_large": (mixed_pool, lambda p: p.acquire(1, ids(9)), "share block 9"),
    "share_an_id_twice": (mixed_pool, lambda p: p.acquire(1, ids(3, 3)), "share block 3 twice"),
    "acquire_a_negative_count": (mixed_pool, lambda p: p.acquire(-1), "acquire -1 blocks"),
    "acquire_more_than_free": (mixed_pool, lambda p: p.acquire(5), "4 free need 1 victims, got 0"),
    "give_a_victim_without_need": (
        mixed_pool,
        lambda p: p.acquire(4, victims=ids(3)),
        "4 blocks with 4 free need 0 victims, got 1",
    ),
    "give_too_few_victims": (full_pool, lambda p: p.acquire(2, victims=ids(6)), "need 2 victims, got 1"),
    "give_too_many_victims": (full_pool, lambda p: p.acquire(1, victims=ids(6, 7)), "1 victims, got 2"),
    "evict_an_active_victim": (full_pool, lambda p: p.acquire(1, victims=ids(1)), "block 1: it is active"),
    "evict_a_victim_twice": (full_pool, lambda p: p.acquire(2, victims=ids(6, 6)), "block 6 twice"),
    "evict_a_foreign_victim": (full_pool, lambda p: p.acquire(1, victims=ids(9)), "evict block 9"),
    "share_and_evict_the_same": (full_pool, lambda p: p.acquire(1, ids(7), ids(7)), "block 7 twice"),
    "rename_a_free_block": (
        mixed_pool,
        lambda p: p.rename(ids(1, 5), ids(6, 7)),
        "rename block 5: it is free",
    ),
    "rename_a_block_twice": (mixed_pool, lambda p: p.rename(ids(1, 1), ids(6, 7)), "rename block 1 twice"),
    "rename_a_foreign_block": (mixed_pool, lambda p: p.rename(ids(9), ids(6)), "rename block 9: ids are"),
    "rename_to_an_active_block": (
        mixed_pool,
        lambda p: p.rename(ids(1), ids(2)),
        "rename to block 2: it is act",
    ),
    "rename_to_a_cached_block": (
        mixed_pool,
        lambda p: p.rename(ids(1), ids(3)),
        "rename to block 3: it is cac",
    ),
    "rename_to_one_block_twice": (mixed_pool, lambda p: p.rename(ids(1, 2), ids(6, 6)), "to block 6 twice"),
    "rename_to_too_few": (mixed_pool, lambda p: p.rename(ids(1, 2), ids(6)), "rename 2 blocks to 1"),
    "shrink_below_an_active_block": (mixed_pool, lambda p: p.resize(1), "to 1 blocks: block 2 is active"),
    "shrink_below_a_cached_block": (mixed_pool, lambda p: p.resize(3), "to 3 blocks: block 4 is cached"),
    "shrink_to_nothing": (mixed_pool, lambda p: p.resize(0), "at least 1 block, got 0"),
    "evict_an_active_block": (mixed_pool, lambda p: p.evict(ids(3, 1)), "evict block 1: it is active"),
    "evict_a_free_block": (mixed_pool, lambda p: p.evict(ids(3, 5)), "evict block 5: it is free"),
    "evict_a_block_twice": (mixed_pool, lambda p: p.evict(ids(3, 3)), "evict block 3 twice"),
    "evict_a_foreign_block": (mixed_pool, lambda p: p.evict(ids(3, 0)), "evict block 0"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_with_numbers_and_changes_nothing(case: str) -> None:
    """Every kind of wrong id, state or count raises ``BlockError`` and leaves every array as it was."""
    make, act, message = MISUSE[case]
    pool = make()
    before = snapshot(pool)
    with pytest.raises(BlockError, match=message):
        act(pool)
    assert snapshot(pool) == before
    pool.check_invariants()


def test_a_double_free_is_refused_however_often_it_is_tried() -> None:
    """The second release of the last reference fails, and so does the third."""
    pool = BlockPool(2)
    block = pool.acquire(1)
    release(pool, block)
    for _ in range(2):
        with pytest.raises(BlockError, match="release block 1: it is free"):
            release(pool, block)
    assert pool.counts == BlockCounts(free=2, cached=0, active=0)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    """There is nothing that it could ever hand out."""
    with pytest.raises(BlockError, match=f"at least 1 block, got {num_blocks}"):
        BlockPool(num_blocks)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.uint64, ">i4"])
def test_ids_of_any_integer_dtype_and_stride_will_do(dtype: Any) -> None:
    """What is wider, unsigned, of another byte order or a view means the same ids."""
    pool = BlockPool(4)
    pool.acquire(4)
    some = np.array([9, 1, 9, 3], dtype)[::-2]
    assert pool.release(some, np.ones(2, np.bool_)).tolist() == [3, 1]
    assert pool.acquire(0, shared=some).tolist() == []
    assert pool.counts == BlockCounts(free=0, cached=0, active=4)


def test_calls_with_no_ids_change_nothing() -> None:
    """Empty arrays and a count of zero are fine in every state."""
    pool = full_pool()
    before = snapshot(pool)
    assert pool.acquire(0).tolist() == release(pool, ids()).tolist() == []
    pool.evict(ids())
    assert snapshot(pool) == before


def test_a_pool_of_one_block_goes_through_every_state() -> None:
    """Free, active, cached, active again by sharing, cached, a victim, free."""
    pool = BlockPool(1)
    assert pool.acquire(1).tolist() == [1]
    assert pool.counts == (0, 0, 1)
    assert release(pool, ids(1), retain=True).tolist() == [1]
    assert pool.counts == (0, 1, 0)
    pool.acquire(0, shared=ids(1))
    assert pool.counts == (0, 0, 1)
    release(pool, ids(1), retain=True)
    assert pool.acquire(1, victims=ids(1)).tolist() == [1]
    assert pool.counts == (0, 0, 1)
    assert release(pool, ids(1)).tolist() == []
    assert pool.counts == (1, 0, 0)
    pool.check_invariants()


def test_a_full_pool_hands_out_its_victims_after_its_free_blocks() -> None:
    """New ids are the free ones first, then the victims in the order given."""
    pool = full_pool()
    release(pool, ids(2))
    assert pool.acquire(3, victims=ids(8, 6)).tolist() == [2, 8, 6]
    assert pool.counts == BlockCounts(free=0, cached=1, active=7)


def test_a_block_is_idle_only_after_its_last_reference() -> None:
    """Each release drops one reference; only the last one reports the block as cached."""
    pool = BlockPool(3)
    block = pool.acquire(1)
    for _ in range(3):
        pool.acquire(0, shared=block)
    left = [release(pool, block, retain=True).tolist() for _ in range(4)]
    assert left == [[], [], [], [1]]
    assert pool.state[1] == CACHED


def test_retain_is_decided_block_by_block_and_keeps_the_order_given() -> None:
    """Cached ids come back in the order of the call; the others are free."""
    pool = BlockPool(4)
    pool.acquire(4)
    assert pool.release(ids(3, 1, 4, 2), np.array([True, False, True, True])).tolist() == [3, 4, 2]
    assert pool.state[1:].tolist() == [FREE, CACHED, CACHED, CACHED]


def test_the_block_freed_last_is_handed_out_first() -> None:
    """Ids are reused last-in first-out, so that the same calls give the same ids."""
    pool = BlockPool(5)
    assert pool.acquire(5).tolist() == [1, 2, 3, 4, 5]
    release(pool, ids(2, 5, 3))
    assert pool.acquire(2).tolist() == [3, 5]
    assert pool.acquire(1).tolist() == [2]


def test_a_renamed_block_keeps_its_state_and_references() -> None:
    """Held or cached as before under the new name; the old name is free, and handed out last."""
    pool = mixed_pool()
    pool.rename(ids(2, 4), ids(7, 5))
    assert pool.state[1:].tolist() == [ACTIVE, FREE, CACHED, FREE, CACHED, FREE, ACTIVE, FREE]
    assert pool.ref_count[1:].tolist() == [1, 0, 0, 0, 0, 0, 2, 0]
    assert pool.counts == BlockCounts(free=4, cached=2, active=2)
    pool.check_invariants()
    assert pool.acquire(4).tolist() == [6, 8, 2, 4]


def test_a_shrunk_pool_hands_out_the_rest_in_the_same_order() -> None:
    """Ids above are gone, the others keep their turn."""
    pool = BlockPool(6)
    pool.acquire(6)
    release(pool, ids(1, 6, 3, 5, 2))
    pool.resize(4)
    assert (pool.num_blocks, pool.counts) == (4, BlockCounts(free=3, cached=0, active=1))
    pool.check_invariants()
    with pytest.raises(BlockError, match=r"block 5: ids are 1\.\.4"):
        release(pool, ids(5))
    assert pool.acquire(3).tolist() == [2, 3, 1]


def test_new_ids_of_a_grown_pool_are_handed_out_last_and_in_ascending_order() -> None:
    """What was free before goes first."""
    pool = mixed_pool()
    pool.resize(11)
    assert pool.counts == BlockCounts(free=7, cached=2, active=2)
    pool.check_invariants()
    assert pool.acquire(7).tolist() == [5, 6, 7, 8, 9, 10, 11]
    pool.evict(ids(3))
    assert pool.acquire(1).tolist() == [3]


def test_a_copy_of_a_pool_is_independent() -> None:
    """A deep copy has arrays of its own, and goes on by itself."""
    pool = mixed_pool()
    twin, before = copy.deepcopy(pool), snapshot(pool)
    assert snapshot(twin) == before
    assert twin.acquire(2).tolist() == [5, 6]
    release(twin, ids(1))
    assert snapshot(pool) == before
    assert pool.acquire(2).tolist() == [5, 6]
    twin.check_invariants()


@pytest.mark.parametrize("num_blocks", [1, 2, 5, 17])
def test_random_calls_agree_with_a_dict_of_ref_counts(num_blocks: int) -> None:
    """States and ref counts follow a plain model; the three counts always add up."""
    rng = random.Random(num_blocks)
    pool = BlockPool(num_blocks)
    refs: dict[int, int] = {}  # block -> references; 0 while cached, absent while free
    every = range(1, num_blocks + 1)
    for _ in range(600):
        active = [b for b, n in refs.items() if n]
        cached = [b for b, n in refs.items() if not n]
        choice = rng.choice(["acquire", "release", "evict"])
        if choice == "acquire":
            shared = rng.sample(list(refs), rng.randint(0, len(refs)))
            idle = [b for b in cached if b not in shared]
            count = rng.randint(0, pool.num_free + len(idle))
            victims = idle[: max(0, count - pool.num_free)]
            new = pool.acquire(count, ids(*shared), ids(*victims)).tolist()
            assert len(set(new)) == count and not set(new) & set(refs) - set(victims)
            for block in shared:
                refs[block] += 1
            for block in new:
                refs[block] = 1
        elif choice == "release":
            gone = rng.sample(active, rng.randint(0, len(active)))
            retain = np.array([rng.random() < 0.5 for _ in gone], np.bool_)
            expected = [b for b, keep in zip(gone, retain, strict=True) if keep and refs[b] == 1]
            assert pool.release(ids(*gone), retain).tolist() == expected
            for block, keep in zip(gone, retain, strict=True):
                refs[block] -= 1
                if not refs[block] and not keep:
                    del refs[block]
        else:
            gone = rng.sample(cached, rng.randint(0, len(cached)))
            pool.evict(ids(*gone))
            for block in gone:
                del refs[block]
        assert pool.num_free + pool.num_cached + pool.num_active == sum(pool.counts) == num_blocks
        assert pool.num_available == num_blocks - sum(n > 0 for n in refs.values())
        states = [ACTIVE if refs.get(b) else CACHED if b in refs else FREE for b in every]
        assert pool.state[1:].tolist() == states
        assert pool.ref_count[1:].tolist() == [refs.get(b, 0) for b in every]
        pool.check_invariants()


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.ref_count.__setitem__(1, 0),
        lambda p: p.ref_count.__setitem__(0, 1),
        lambda p: p.ref_count.__setitem__(5, 1),
        lambda p: p.state.__setitem__(3, FREE),
        lambda p: p._free.__setitem__(0, 1),
        lambda p: setattr(p, "_num_cached", 1),
    ],
)
def test_check_invariants_notices_damage(damage: Callable[[BlockPool], None]) -> None:
    """A pool whose arrays contradict each other does not pass."""
    pool = mixed_pool()
    pool.check_invariants()
    damage(pool)
    with pytest.raises(AssertionError, match="broken invariant"):
        pool.check_invariants()
