"""Reset, defragment and resize while the pool is in use."""

import random
from typing import Any

import numpy as np
import pytest

from pagedkv import BlockCopies, KVCacheManager, Namespace, PagedKVError
from pagedkv.block_pool import BlockCounts
from pagedkv.events import BlocksCleared
from pagedkv.policies import POLICIES
from pagedkv.testing import ShadowIndex, ShadowStorage

SIZE = 4
ONLINE = [name for name in POLICIES if name != "belady"]


def fill(manager: KVCacheManager, name: str, tokens: list[int], **options: Any) -> None:
    opened = manager.open(name, tokens, **options)
    assert opened is not None
    manager.commit(name, tokens[opened.num_cached_tokens :])


# -- reset


def test_reset_forgets_all_cached_content() -> None:
    """Every block is free, nothing is found, and the followers of the events are told."""
    manager = KVCacheManager(8, SIZE)
    manager.events.record()
    fill(manager, "a", list(range(12)), namespace=Namespace(salt="x"))
    manager.close("a")
    manager.events.take()
    assert manager.maintenance.reset() is True
    assert manager.counts == BlockCounts(8, 0, 0)
    assert manager.events.take() == [BlocksCleared(1)]
    assert len(manager._cache.extra_keys) == 0
    manager.check_invariants()
    assert manager.open("b", list(range(12)), namespace=Namespace(salt="x")) == (12, 0)


@pytest.mark.parametrize("holder", ["sequence", "pin", "fence"])
def test_reset_is_not_now_while_blocks_are_held(holder: str) -> None:
    """An open sequence, a pin or a fence keeps all as it is."""
    manager = KVCacheManager(8, SIZE)
    fill(manager, "a", list(range(12)))
    pin = manager.retention.pin("a") if holder == "pin" else None
    fence = manager.fences.open() if holder == "fence" else None
    if holder != "sequence":
        manager.close("a")
    assert manager.maintenance.reset() is False
    assert manager.lookup(list(range(13))).num_cached_tokens == 12
    if pin is not None:
        manager.retention.unpin(pin)
    elif fence is not None:
        manager.fences.signal(fence)
    else:
        manager.close("a")
    assert manager.maintenance.reset() is True


def test_a_new_version_of_the_weights_hits_nothing_old_and_costs_nothing() -> None:
    """Other ``weights`` in the namespace: no block is touched, and the old content is evicted first."""
    manager = KVCacheManager(8, SIZE)
    old, new = Namespace(weights="step-1"), Namespace(weights="step-2")
    fill(manager, "a", list(range(16)), namespace=old)
    manager.close("a")
    before = manager.stats()
    assert manager.lookup(list(range(16)), namespace=new).num_cached_tokens == 0
    assert manager.stats() == before
    fill(manager, "b", list(range(16)), namespace=new)
    manager.close("b")
    fill(manager, "c", list(range(50, 62)), namespace=new)
    assert manager.lookup(list(range(17)), namespace=old).num_cached_tokens == 4
    assert manager.lookup(list(range(17)), namespace=new).num_cached_tokens == 16


# -- defragment


def test_defragment_moves_the_highest_ids_to_the_lowest_free_ones() -> None:
    """Blocks 1-3 of nine are free: the last three take their places, tables and hits follow."""
    manager = KVCacheManager(12, SIZE)
    for i, name in enumerate("abc"):
        fill(manager, name, list(range(100 * i, 100 * i + 11)))
    manager.truncate("a", 0)
    manager.maintenance.reset()
    free = manager.counts.free
    moves = manager.maintenance.defragment()
    assert moves is not None
    used = manager.num_blocks - free
    assert sorted(manager.tables.block_ids("b").tolist() + manager.tables.block_ids("c").tolist())[-1] <= used
    assert not set(moves.src.tolist()) & set(moves.dst.tolist())
    manager.check_invariants()
    again = manager.maintenance.defragment()
    assert again is not None and len(again.src) == 0


def test_defragment_moves_nothing_while_work_may_touch_the_blocks() -> None:
    """A fence that is open or a copy that waits: not now."""
    manager = KVCacheManager(8, SIZE)
    fill(manager, "a", [1, 2])
    fence = manager.fences.open()
    assert manager.maintenance.defragment() is None
    assert manager.maintenance.resize(4) is None
    manager.fences.signal(fence)
    assert manager.fork("a", "b") and manager.append("b")
    assert manager.maintenance.defragment() is None
    manager.copies.take()
    assert manager.maintenance.defragment() is not None


# -- resize


def test_a_pool_grows() -> None:
    """What could never fit, fits; nothing moves."""
    manager = KVCacheManager(2, SIZE, max_seq_len=100)
    with pytest.raises(PagedKVError, match="they need 3 of 2 blocks"):
        manager.open("a", list(range(12)))
    moves = manager.maintenance.resize(3)
    assert moves is not None and len(moves.src) == 0
    fill(manager, "a", list(range(12)))
    assert manager.counts == BlockCounts(0, 0, 3)
    manager.check_invariants()


def test_a_pool_shrinks_to_what_is_held() -> None:
    """Cached content goes, held blocks move; one less than is held is "not now"."""
    manager = KVCacheManager(10, SIZE)
    fill(manager, "old", list(range(16)))
    fill(manager, "a", list(range(50, 60)))
    manager.close("old")
    assert manager.maintenance.resize(2) is None
    assert manager.counts == BlockCounts(3, 4, 3)
    moves = manager.maintenance.resize(3)
    assert moves is not None and sorted(moves.dst.tolist()) == [1, 2, 3]
    assert manager.counts == BlockCounts(0, 0, 3)
    assert manager.stats().evicted_blocks == 4
    manager.check_invariants()
    manager.close("a")
    assert manager.open("b", list(range(50, 60))) == (10, 8)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None, "8"])
def test_a_size_that_is_none_is_refused(bad: Any) -> None:
    """With the number, and nothing changed."""
    manager = KVCacheManager(4, SIZE)
    with pytest.raises(PagedKVError, match="num_blocks"):
        manager.maintenance.resize(bad)
    assert manager.num_blocks == 4


# -- all together


@pytest.mark.parametrize("policy", ONLINE)
def test_contents_survive_moves_under_every_policy(policy: str) -> None:
    """Random sequences in a pool that grows, shrinks and is defragmented: every slot and event is right."""
    rng = random.Random(7)
    manager, shadow = KVCacheManager(10, 3, max_seqs=4, policy=policy), ShadowStorage(40, 3)
    manager.events.record()
    follower = ShadowIndex()
    tokens: dict[str, list[int]] = {}
    moved = resized = 0
    for number in range(1500):
        action = rng.choice(["open", "open", "grow", "grow", "close", "pin", "defragment", "resize", "reset"])
        if action == "open" and len(tokens) < 4:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            opened = manager.open(str(number), prompt) if -(-len(prompt) // 3) <= manager.num_blocks else None
            if opened is not None:
                tokens[str(number)] = prompt[: opened.num_cached_tokens]
                write(manager, shadow, tokens, str(number), prompt[opened.num_cached_tokens :])
        elif action == "grow" and tokens:
            name = rng.choice(list(tokens))
            length = len(tokens[name]) + 1
            if length <= min(manager.max_seq_len, 3 * manager.num_blocks) and manager.append(name):
                write(manager, shadow, tokens, name, [rng.randrange(2)])
        elif action == "close" and tokens:
            name = rng.choice(list(tokens))
            del tokens[name]
            manager.close(name)
        elif action == "pin" and tokens:
            name = rng.choice(list(tokens))
            if len(tokens[name]) >= 3:
                pin = manager.retention.pin(name)
                moves = manager.maintenance.defragment()
                moved += move(shadow, moves)
                manager.retention.unpin(pin)
        elif action == "defragment":
            moves = manager.maintenance.defragment()
            moved += move(shadow, moves)
        elif action == "resize":
            moves = manager.maintenance.resize(rng.randint(4, 30))
            moved += move(shadow, moves)
            resized += moves is not None
        elif action == "reset" and rng.random() < 0.1:
            manager.maintenance.reset()
        manager.check_invariants()
        for event in manager.events.take():
            follower.apply(event)
        assert follower.digests == manager.events.digests()
        for name, known in tokens.items():
            assert shadow.read(manager, name) == known
    assert moved > 100 and resized > 50


def write(
    manager: KVCacheManager, shadow: ShadowStorage, tokens: dict[str, list[int]], name: str, new: list[int]
) -> None:
    shadow.copy(manager)
    start = len(tokens[name])
    shadow.write(manager.tables.slots(name, start, start + len(new)), new)
    manager.commit(name, new)
    tokens[name] = tokens[name] + new


def move(shadow: ShadowStorage, moves: BlockCopies | None) -> int:
    if moves is None:
        return 0
    shadow.slots[moves.dst] = shadow.slots[moves.src]
    shadow.slots[moves.src] = -1
    assert len(np.unique(np.concatenate([moves.src, moves.dst]))) == 2 * len(moves.src)
    return len(moves.src)
