"""Reset, defragment and resize of a hybrid pool while it is in use."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv import Namespace, PagedKVError
from pagedkv.block_pool import BlockCounts
from pagedkv.events import BlocksCleared
from pagedkv.hybrid import CacheGroup, HybridKVCacheManager, HybridSwapSpace
from pagedkv.hybrid.checked import CheckedHybridManager
from pagedkv.policies import POLICIES
from pagedkv.testing import snapshot

FULL, LOCAL = CacheGroup("full", (0,)), CacheGroup("local", (1,), window=4)
IGNORE = ("_seen", "_head", "_spare", "_next", "_last_batch")


def manager_of(num_blocks: int, **options: Any) -> HybridKVCacheManager:
    """A full group and a window of 4, in blocks of 2 tokens."""
    return HybridKVCacheManager([FULL, LOCAL], num_blocks, 2, **options)


def fill(manager: HybridKVCacheManager, name: str, tokens: list[int], **options: Any) -> None:
    opened = manager.open(name, tokens, **options)
    assert opened is not None
    manager.commit(name, tokens[opened.num_cached_tokens :])


def found(manager: HybridKVCacheManager, tokens: list[int]) -> int:
    return manager.lookup([*tokens, 99]).num_cached_tokens


# -- reset


def test_reset_forgets_the_contents_of_all_groups() -> None:
    """Blocks, contents and extra keys; the followers of the events are told once."""
    manager = manager_of(20)
    manager.events.record()
    fill(manager, "a", list(range(12)), namespace=Namespace(salt="x"))
    manager.close("a")
    number = manager.events.take()[-1].number
    assert manager.maintenance.reset() is True
    assert manager.counts == BlockCounts(20, 0, 0) and manager.stats().num_nodes == 0
    assert manager.events.take() == [BlocksCleared(number + 1)]
    assert len(manager._tree.extra_keys) == 0 and not manager.events.digests(0)
    manager.check_invariants()
    assert manager.maintenance.reset() is True and manager.events.take() == []
    assert manager.open("b", list(range(12)), namespace=Namespace(salt="x")) == (12, 0)


@pytest.mark.parametrize("holder", ["sequence", "pin", "fence"])
@pytest.mark.parametrize("window", [1, 4])
def test_reset_is_not_now_while_a_block_or_a_content_is_held(holder: str, window: int) -> None:
    """A window of one token holds no block at a boundary, but the sequence goes on from its content."""
    manager = HybridKVCacheManager([CacheGroup("w", (0,), window=window)], 20, 2, max_seqs=2, max_seq_len=40)
    fill(manager, "a", list(range(8)))
    pin = manager.retention.pin("a") if holder == "pin" else None
    fence = manager.fences.open() if holder == "fence" else None
    if holder != "sequence":
        manager.close("a")
    assert (manager.counts.active == 0) == (window == 1)
    before = snapshot(manager, IGNORE)  # type: ignore[arg-type]
    assert manager.maintenance.reset() is False
    assert snapshot(manager, IGNORE) == before  # type: ignore[arg-type]
    if pin is not None:
        manager.retention.unpin(pin)
    elif fence is not None:
        manager.fences.signal(fence)
    else:
        manager.close("a")
    assert manager.maintenance.reset() is True
    manager.check_invariants()


# -- defragment and resize


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "belady"])
def test_moved_blocks_stay_with_their_group_content_pins_and_place_in_the_order(policy: str) -> None:
    """Held, pinned and cached ones; what is evicted later is what the model says."""
    manager = manager_of(30, policy=policy)
    manager.events.record()
    checked = CheckedHybridManager(manager, policy)
    checked.open("low", [7] * 10)
    for name in "bcda":
        tokens = [ord(name)] * 4
        checked.open(name, tokens)
        checked.commit(name, tokens)
    pin = checked.pin("d", 4)
    for name in "ad":
        checked.close(name)
    assert checked.reset() is False
    checked.close("low")  # ten blocks that nobody has committed: all others have higher ids
    held = {name: table.block_ids("c").tolist() for name, table in manager.tables.items()}
    moves = checked.resize(14)  # of the cached blocks of "a", two go and two move
    assert moves is not None and len(moves.src) == 10 and moves.src.min() > 14
    name_of = dict(zip(moves.src.tolist(), moves.dst.tolist(), strict=True))
    for name, table in manager.tables.items():
        assert table.block_ids("c").tolist() == [name_of.get(block, block) for block in held[name]]
    assert found(manager, [ord("d")] * 4) == 4
    checked.close("b")
    assert checked.defragment() is not None
    checked.unpin(pin)
    checked.close("c")
    for token in range(20, 26):
        checked.open("x", [token] * 6)
        checked.commit("x", [token] * 6)
        checked.close("x")
    assert checked.reset() is True


def test_a_pool_grows_and_gets_room_for_contents() -> None:
    """What could never fit, fits; a full pool of contents evicts nothing on the way."""
    manager = HybridKVCacheManager([FULL], 2, 2, max_seq_len=100)
    with pytest.raises(PagedKVError, match="all groups together need 3 of 2 blocks"):
        manager.open("a", list(range(6)))
    moves = manager.maintenance.resize(20)
    assert moves is not None and len(moves.src) == 0 and manager.num_blocks == 20
    fill(manager, "a", list(range(40)))
    assert manager.counts == BlockCounts(0, 0, 20)
    assert manager.stats().num_nodes == 20 and manager.stats().evicted_blocks == 0
    assert manager._tree.nodes.num_blocks == 20
    manager.check_invariants()
    manager.close("a")
    assert manager.maintenance.resize(3) is not None and manager.stats().evicted_blocks == 17
    assert manager.maintenance.resize(9) is not None and manager._tree.nodes.num_blocks == 20
    manager.check_invariants()
    assert found(manager, list(range(6))) == 6


def test_a_pool_shrinks_to_what_is_held() -> None:
    """Cached blocks of any group go, held ones move; one less than is held is "not now"."""
    manager = manager_of(30)
    fill(manager, "old", list(range(8)))
    fill(manager, "a", list(range(50, 59)))
    manager.close("old")
    held = manager.counts.active
    assert held == 5 + 3
    assert manager.maintenance.resize(held - 1) is None and manager.num_blocks == 30
    moves = manager.maintenance.resize(held)
    assert moves is not None and manager.counts == BlockCounts(0, 0, held)
    manager.check_invariants()
    manager.close("a")
    assert found(manager, list(range(50, 58))) == 8 and found(manager, [0, 1]) == 0
    assert manager.open("b", [*range(50, 58), 99]) == (9, 8)


def test_nothing_moves_while_work_may_touch_the_blocks() -> None:
    """A fence, a copy that waits, a swap under way: not now."""
    manager = manager_of(20)
    space = HybridSwapSpace(manager, 20)
    fill(manager, "a", [1, 2, 3])
    assert manager.fork("a", "b") and manager.append("b")
    assert manager.maintenance.defragment() is None and manager.maintenance.resize(19) is None
    manager.copies.take()
    out = space.swap_out("a")
    assert out is not None and manager.maintenance.defragment() is None
    space.done(out.transfer)
    assert manager.maintenance.defragment() is not None
    back = space.swap_in("a")
    assert back is not None and manager.maintenance.resize(10) is None
    space.done(back.transfer)
    assert manager.maintenance.resize(10) is not None
    manager.check_invariants()


def test_a_sequence_that_a_smaller_pool_can_never_hold_does_not_come_back() -> None:
    """``swap_in`` counts what it holds, not what it had."""
    manager = manager_of(20)
    space = HybridSwapSpace(manager, 20)
    fill(manager, "a", list(range(13)))  # 7 blocks of one group, 3 of the other
    out = space.swap_out("a")
    assert out is not None
    space.done(out.transfer)
    assert manager.maintenance.resize(9) is not None
    with pytest.raises(PagedKVError, match="'a' can never be swapped in: it has 10 blocks, the pool 9"):
        space.swap_in("a")
    assert manager.maintenance.resize(10) is not None and space.swap_in("a") is not None
    manager.check_invariants()


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None, "8"])
def test_a_size_that_is_none_is_refused(bad: Any) -> None:
    """With the number, and nothing changed."""
    manager = manager_of(4)
    with pytest.raises(PagedKVError, match="num_blocks"):
        manager.maintenance.resize(bad)
    assert manager.num_blocks == 4


@pytest.mark.parametrize("part", ["pool", "policy", "nodes", "index"])
@pytest.mark.parametrize("num_blocks", [8, 40])
def test_a_resize_that_fails_in_the_middle_is_undone(
    part: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in any part: the ids are as they were."""
    manager = manager_of(24)
    fill(manager, "old", list(range(8)))
    fill(manager, "a", list(range(50, 56)))
    manager.close("old")
    manager.maintenance.resize(20)  # so that a shrink has nothing left to evict but moves something
    while manager.counts.cached + manager.counts.active > 8:
        manager._tree.shed(1)
    tables = {name: table.block_ids("a").tolist() for name, table in manager.tables.items()}
    target = getattr(manager._tree, part)
    resize: Callable[[int], None] = target.resize

    def fail(count: int) -> None:
        if count == num_blocks or (part in ("nodes", "index") and count > 24):
            raise MemoryError
        resize(count)

    grows = num_blocks == 40
    with monkeypatch.context() as patch:
        patch.setattr(target, "resize", fail)
        if grows or part in ("pool", "policy"):
            with pytest.raises(MemoryError):
                manager.maintenance.resize(num_blocks)
    assert manager.num_blocks == 20 and manager._tree.view.num_blocks == 20
    assert {name: table.block_ids("a").tolist() for name, table in manager.tables.items()} == tables
    manager.check_invariants()
    assert manager.maintenance.resize(num_blocks) is not None
    manager.check_invariants()
    assert np.all(manager._rows.blocks <= num_blocks)
