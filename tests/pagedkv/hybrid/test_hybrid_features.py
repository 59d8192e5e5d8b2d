"""What engines need besides sequences: lookups, partial hits, events, fences, pins, priorities, policies."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from pagedkv import KVCacheManager, Namespace, NeverFits, PagedKVError, SequenceError
from pagedkv.events import BlocksRemoved, BlocksStored, prefix_digests
from pagedkv.hybrid import CacheGroup, HybridKVCacheManager
from pagedkv.hybrid.shadow import GroupShadow
from pagedkv.policies import POLICIES
from pagedkv.policies.belady import Belady
from pagedkv.policies.lru import LRU
from pagedkv.policies.policy import NO_BLOCKS
from pagedkv.policies.quotas import NamespaceQuotas
from pagedkv.policies.residency import Residency
from pagedkv.testing import snapshot

FULL, LOCAL = CacheGroup("full", (0,)), CacheGroup("local", (1,), window=4)
TENANT = Namespace(salt="tenant")


def manager_of(num_blocks: int, **options: Any) -> HybridKVCacheManager:
    """A full group and a window of 4, in blocks of 2 tokens."""
    return HybridKVCacheManager([FULL, LOCAL], num_blocks, 2, **options)


def run(manager: HybridKVCacheManager, tokens: list[int], **options: Any) -> int:
    """Open, commit and close; returns the cached tokens."""
    opened = manager.open("run", tokens, **options)
    assert opened is not None
    manager.commit("run", tokens[opened.num_cached_tokens :])
    manager.close("run")
    return opened.num_cached_tokens


def found(manager: HybridKVCacheManager, tokens: list[int]) -> int:
    """How much of a prompt, all of it, would be a hit."""
    return manager.lookup([*tokens, 99]).num_cached_tokens


def state(manager: Any) -> object:
    """Everything inside a manager but scratch space."""
    return snapshot(manager, ("_seen", "_head", "_spare", "_next", "_last_batch"))


def refused(manager: HybridKVCacheManager, act: Callable[[], object], error: Any, words: str) -> None:
    """A mistake has its own error with the numbers in it, and changes nothing."""
    before = state(manager)
    with pytest.raises(error, match=words):
        act()
    assert state(manager) == before
    manager.check_invariants()


# -- lookup


def test_a_lookup_says_what_open_finds_and_takes_nothing() -> None:
    """The hit, limited as that of open is, and not one number changed."""
    manager = manager_of(20)
    run(manager, list(range(8)))
    before = state(manager)
    assert manager.lookup([*range(8), 9]) == (9, 8, 0, True)
    assert manager.lookup(range(8)) == (8, 6, 0, True)  # the last token is always computed
    assert manager.lookup([]) == (0, 0, 0, True)
    assert manager.lookup(range(8), namespace=TENANT) == (8, 0, 0, True)
    assert state(manager) == before


def test_a_lookup_counts_what_windows_give_back_on_the_way() -> None:
    """20 tokens of growth: the full group needs a block for every two, the window three in all."""
    manager = manager_of(15)
    assert manager.lookup(range(4), 16).fits  # 10 + 3 blocks
    assert manager.lookup(range(4), 20).fits  # 12 + 3
    refused(manager, lambda: manager.lookup(range(4), 22), NeverFits, "need 16 of 15 blocks")
    refused(manager, lambda: manager.lookup(range(20)), NeverFits, "need 20 of 15 blocks")
    assert manager.lookup(range(20), max_fresh_tokens=2).fits  # 10 + 3 in chunks
    assert manager.open("a", range(6))  # 6 blocks
    assert not manager.lookup(range(10, 14), 16).fits and manager.lookup(range(10, 14), 4).fits


def test_a_lookup_tells_of_prompts_that_others_compute() -> None:
    """Until they are committed, are cut, or their sequence closes; chunk by chunk as by whole prompts."""
    manager = manager_of(40)
    prompt = list(range(10))
    assert manager.open("a", prompt, announce=True, max_fresh_tokens=4) == (4, 0)
    assert manager.lookup([*prompt, 99]) == (11, 0, 10, True)
    assert manager.lookup([*prompt[:4], 99]).num_coming_tokens == 4
    assert manager.lookup(prompt, namespace=TENANT).num_coming_tokens == 0
    manager.commit("a", prompt[:4])
    assert manager.lookup([*prompt, 99])[1:3] == (4, 6)
    assert manager.append("a", 6)
    manager.truncate("a", 8)
    assert manager.lookup([*prompt, 99])[1:3] == (4, 4)
    manager.close("a")
    assert manager.lookup([*prompt, 99])[1:3] == (4, 0)
    assert manager.open("b", prompt[:4], announce=True, max_cached_tokens=4) == (4, 4)
    assert manager.lookup([*prompt, 99]).num_coming_tokens == 0  # nothing is left to compute


# -- partial hits


def test_a_hit_may_end_inside_a_block_by_a_copy_in_every_group() -> None:
    """The first token of the third block serves, too, once its copies have run."""
    manager = manager_of(20)
    run(manager, [1, 2, 3, 4, 5, 6])
    assert manager.lookup([1, 2, 3, 4, 5, 9]).num_cached_tokens == 4
    assert manager.open("a", [1, 2, 3, 4, 5, 9], partial_hits=True) == (6, 5)
    src, dst = manager.copies.pending
    assert sorted(int(table.block_ids("a")[2]) for table in manager.tables.values()) == sorted(dst.tolist())
    assert len(src) == 2 and not set(src.tolist()) & set(dst.tolist())
    before = state(manager)
    with pytest.raises(SequenceError, match="awaits its copy"):
        manager.commit("a", [9])
    assert state(manager) == before
    manager.copies.take()
    manager.commit("a", [9])
    manager.close("a")
    assert found(manager, [1, 2, 3, 4, 5, 9]) == 6 == found(manager, [1, 2, 3, 4, 5, 6])
    manager.check_invariants()


def test_a_partial_hit_needs_the_block_in_every_group_and_room_beside_it() -> None:
    """A window that lost the block vetoes it; a source that would have to be evicted is none."""
    manager = manager_of(12)
    assert manager.open("a", list(range(12)))
    manager.commit("a", list(range(12)))  # all 12 are held or cached: local 0..3 fell out
    assert manager.open("filler", [50] * 4)  # evicts them, the oldest
    manager.close("filler")
    assert manager.open("b", [0, 1, 2, 77], partial_hits=True) == (4, 0)
    manager.close("b")
    manager.close("a")
    small = manager_of(4)
    run(small, [1, 2, 3])
    assert small.open("b", [1, 9, 9, 9], partial_hits=True) == (4, 0)
    assert small.counts == (0, 0, 4) and not len(small.copies)


# -- events


def test_events_of_each_group_replay_to_what_it_has() -> None:
    """Digests, not block ids; the groups lose contents at different times."""
    manager = manager_of(8)
    manager.events.record(b"seed")
    follower = GroupShadow(manager.groups)
    for tokens in (list(range(8)), list(range(8)), [7] * 8, [0, 1, 2, 3, 9, 9]):
        run(manager, tokens)
        for event in manager.events.take():
            follower.apply(event)
        assert follower.digests == [manager.events.digests(0), manager.events.digests(1)]
    assert prefix_digests([0, 1, 2, 3], 2, seed=b"seed")[1] in follower.digests[0]
    stats = manager.stats()
    assert [len(digests) for digests in follower.digests] == [sum(b) for b in stats.groups.values()]


def test_an_event_says_group_parent_tokens_and_why() -> None:
    """The window loses what fell out of it before the full group loses anything."""
    manager = manager_of(10)
    manager.events.record()
    run(manager, list(range(8)))  # 4 + 4 blocks
    stored = manager.events.take()
    assert [(e.number, e.group, len(e.digests)) for e in stored if isinstance(e, BlocksStored)] == [
        (0, 0, 4),
        (1, 1, 4),
    ]
    assert manager.open("b", [50, 51])  # fits the free ones
    assert manager.open("c", [60, 61])
    removed = manager.events.take()
    assert [type(e) for e in removed] == [BlocksRemoved]
    first = prefix_digests(range(8), 2)
    assert removed[0][1:4] == ((first[1], first[0]), "capacity", 1)
    manager.commit("b", [50, 51])
    manager.truncate("b", 1)
    assert manager.append("b")
    rewritten = [e for e in manager.events.take() if isinstance(e, BlocksRemoved)]
    assert [(e.group, e.reason) for e in rewritten] == [(0, "rewritten"), (1, "rewritten")]


def test_events_are_recorded_from_the_start_or_not_at_all() -> None:
    """A stream that begins in the middle would replay to something else."""
    manager = manager_of(8)
    run(manager, [1, 2, 3])
    assert manager.events.take() == []
    refused(manager, manager.events.record, PagedKVError, "too late to record events: 1 blocks")
    fresh = manager_of(8)
    fresh.events.record()
    refused(fresh, fresh.events.record, PagedKVError, "recorded already")


def test_a_follower_finds_gaps_repetitions_and_orphans() -> None:
    """A checker that accepts anything would prove nothing."""
    manager = manager_of(20)
    manager.events.record()
    run(manager, list(range(6)))
    full, local = manager.events.take()
    assert isinstance(full, BlocksStored) and isinstance(local, BlocksStored)
    wrong: list[list[Any]] = [
        [local],  # begins with number 1
        [full, full._replace(number=1)],
        [full._replace(parent=b"nobody")],
        [BlocksRemoved(0, full.digests[:1])],
        [full, BlocksRemoved(1, full.digests)],  # parents first
        [full._replace(digests=full.digests[:1] * 2)],
    ]
    for events in wrong:
        follower = GroupShadow(manager.groups)
        with pytest.raises(AssertionError):
            for event in events:
                follower.apply(event)
    follower = GroupShadow(manager.groups)
    follower.apply(full)
    follower.apply(local._replace(parent=b"what fell out"))  # a window does not need it
    follower.apply(BlocksRemoved(2, local.digests, group=1))
    assert follower.digests == [set(full.digests), set()]


# -- fences


def test_what_falls_out_or_is_given_up_waits_for_its_fence_in_every_group() -> None:
    """Not handed out before the signal, and not lost for hits meanwhile."""
    manager = manager_of(12)
    assert manager.open("a", list(range(8)))
    fence = manager.fences.open()
    manager.commit("a", list(range(8)))  # two local blocks fall out
    assert manager.counts == (4, 0, 8) and manager.stats().fenced_blocks == 2
    manager.close("a")
    assert manager.counts == (4, 0, 8) and manager.stats().fenced_blocks == 8
    assert manager.open("b", [50] * 6) is None
    assert manager.open("b", [*range(8), 9]) == (9, 8)  # a hit of what waits
    manager.check_invariants()
    manager.close("b")
    manager.fences.signal(fence)
    assert manager.counts == (4, 8, 0) and manager.stats().fenced_blocks == 0
    assert manager.open("b", [50] * 6)
    manager.check_invariants()


def test_fences_are_signalled_in_any_order_and_each_once() -> None:
    """Whoever was given up under two waits for both."""
    for first, second in ((0, 1), (1, 0)):
        manager = manager_of(8)
        fences = [manager.fences.open()]
        assert manager.open("a", [1, 2, 3])
        manager.commit("a", [1, 2, 3])
        fences.append(manager.fences.open())
        manager.close("a")
        manager.fences.signal(fences[first])
        assert manager.counts.active == 4
        manager.check_invariants()
        manager.fences.signal(fences[second])
        assert manager.counts == (6, 2, 0)
        refused(manager, partial(manager.fences.signal, fences[first]), PagedKVError, "is not open")


def test_what_a_fence_holds_is_copied_before_it_is_overwritten() -> None:
    """A cut tail whose rest waits is somebody else's, too; it is not withdrawn."""
    manager = manager_of(20)
    assert manager.open("a", list(range(4)))
    manager.commit("a", list(range(4)))
    manager.fences.open()
    manager.truncate("a", 1)
    assert manager.append("a") and len(manager.copies) == 2
    manager.check_invariants()


@pytest.mark.parametrize("groups", [[FULL, LOCAL], [LOCAL]])
def test_while_a_fence_is_open_nobody_keeps_a_content_that_several_cut(groups: list[CacheGroup]) -> None:
    """It takes over what the others let go of, so all of them copy; without one, the last keeps its tail."""
    for fenced, copied in ((False, 1), (True, 2)):
        manager = HybridKVCacheManager(groups, 20, 2)
        assert manager.open("a", list(range(4)))
        manager.commit("a", list(range(4)))
        manager.truncate("a", 3)
        assert manager.fork("a", "b")
        fence = manager.fences.open() if fenced else None
        assert manager.step(["a", "b"])
        assert manager.stats().copied_blocks == copied * len(groups)
        manager.check_invariants()
        if fence is not None:
            manager.fences.signal(fence)
        manager.check_invariants()


def test_contents_that_fences_and_pins_hold_beyond_the_room_for_them_are_held_all_the_same() -> None:
    """With windows only, contents outlive their blocks, and nobody can say beforehand how many."""
    window = CacheGroup("w", (0,), window=2)
    manager = HybridKVCacheManager([window], 6, 2, max_seqs=1, max_seq_len=42)
    fence, held = manager.fences.open(), 0
    for start in (100, 200, 300):
        manager.fences.signal(fence)  # blocks are given back, and the pins hold the contents
        fence = manager.fences.open()
        tokens = list(range(start, start + 40))
        assert manager.open("a", tokens, max_fresh_tokens=2)
        for i in range(0, 40, 2):
            manager.commit("a", tokens[i : i + 2])
            manager.fences.signal(fence)
            fence = manager.fences.open()
            assert i == 38 or manager.append("a", 2)
        held += 20
        manager.retention.pin("a")
        manager.close("a")
        manager.check_invariants()
        assert manager.stats().num_nodes >= held
    assert held > 6 + 1 * 21  # more than there was room for
    assert found(manager, list(range(100, 140))) == 40


# -- pins and priorities


def test_a_pin_keeps_what_a_hit_needs_of_every_group() -> None:
    """Under any pressure; and no more than that: local blocks before the window go."""
    manager = manager_of(12)
    system = list(range(8))
    assert manager.open("system", system)
    manager.commit("system", system)
    pin = manager.retention.pin("system")
    manager.close("system")
    assert manager.counts == (4, 2, 6) and manager.stats().pinned_blocks == 6
    for token in range(50, 56):
        run(manager, [token] * 6)
        assert found(manager, system) == 8
    assert found(manager, system[:4]) == 0  # that hit would need what nobody pinned
    manager.check_invariants()
    manager.retention.unpin(pin)
    run(manager, [60] * 12)
    assert found(manager, system) == 0 and manager.stats().pinned_blocks == 0


def test_pins_are_counted_and_hold_blocks_that_are_cached_again() -> None:
    """A prompt that fell out of the window, but is cached, can be pinned: its blocks are active again."""
    manager = manager_of(40)
    assert manager.open("a", list(range(20)))
    manager.commit("a", list(range(20)))
    cached = manager.counts.cached
    first, second = manager.retention.pin("a", 6), manager.retention.pin("a", 7)
    assert first != second and manager.counts.cached == cached - 2  # local 1 and 2
    manager.close("a")
    manager.check_invariants()
    manager.retention.unpin(first)
    assert manager.stats().pinned_blocks == 5
    manager.check_invariants()
    manager.retention.unpin(second)
    refused(manager, lambda: manager.retention.unpin(second), PagedKVError, "there is no pin 1")
    assert manager.counts.active == 0


def test_what_cannot_be_pinned_is_refused_with_the_numbers() -> None:
    """Nothing full, nothing committed, nobody there, or a window that has lost the blocks."""
    manager = manager_of(12)
    prompt = list(range(12))
    assert manager.open("a", prompt)
    pin = manager.retention.pin
    refused(manager, lambda: pin("a"), SequenceError, "nothing to pin: 0 tokens of 'a' are committed")
    manager.commit("a", prompt)
    refused(manager, lambda: pin("a", 1), SequenceError, "1 of them asked for, in blocks of 2")
    refused(manager, lambda: pin("a", 13), SequenceError, "12 tokens of 'a' are committed, got 0..13")
    refused(manager, lambda: pin("a", -1), PagedKVError, "num_tokens")
    refused(manager, lambda: pin("b"), SequenceError, "'b' is not open")
    assert manager.open("filler", [50] * 4)  # the four local blocks that fell out are evicted
    words = "cannot pin 6 tokens of 'a': of group 'local', positions 2 to 5 fell out of the window"
    refused(manager, lambda: pin("a", 6), SequenceError, words)
    assert pin("a", 12) == 0
    bare = manager_of(12, policy=None)
    assert bare.open("a", prompt)
    bare.commit("a", prompt)
    refused(bare, lambda: bare.retention.pin("a"), SequenceError, "nothing to pin")


def test_a_fence_holds_what_is_unpinned_meanwhile() -> None:
    """And a pin that fails in the middle holds nothing."""
    manager = manager_of(12)
    assert manager.open("a", list(range(4)))
    manager.commit("a", list(range(4)))
    pin = manager.retention.pin("a")
    manager.close("a")
    fence = manager.fences.open()
    manager.retention.unpin(pin)
    assert manager.counts.active == 4
    manager.fences.signal(fence)
    assert manager.counts == (8, 4, 0)
    manager.check_invariants()


def test_a_pin_that_fails_in_the_middle_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory when the nodes are held already."""
    manager = manager_of(12)
    assert manager.open("a", list(range(4)))
    manager.commit("a", list(range(4)))
    before = state(manager)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(manager._tree.pool, "acquire", fail)
        with pytest.raises(MemoryError):
            manager.retention.pin("a")
    assert state(manager) == before


def test_priorities_keep_contents_in_all_groups() -> None:
    """A low prompt that is younger goes before a high one; a range has its own."""
    manager = manager_of(16, policy="priority")
    for name, start in (("high", 0), ("low", 10)):
        assert manager.open(name, range(start, start + 4))
        manager.commit(name, range(start, start + 4))
    assert manager.retention.set_priority("high", 90) == 4
    assert manager.retention.set_priority("low", 10, start=2) == 2
    refused(manager, lambda: manager.retention.set_priority("high", 101), PagedKVError, "0 to 100")
    refused(manager, lambda: manager.retention.set_priority("low", 5, stop=5), SequenceError, "got 0..5")
    manager.close("high")
    manager.close("low")
    run(manager, [50] * 12)
    assert found(manager, list(range(4))) == 4 and found(manager, list(range(10, 14))) == 0
    plain = manager_of(16)
    assert plain.open("a", [1, 2])
    plain.commit("a", [1, 2])
    refused(plain, lambda: plain.retention.set_priority("a", 1), PagedKVError, "knows no priorities")


# -- policies


@pytest.mark.parametrize("name", POLICIES)
def test_one_full_group_hits_and_evicts_as_the_plain_manager_does_under_every_policy(name: str) -> None:
    """The same calls find the same, so a policy means the same thing in both."""
    rng = np.random.default_rng(3)
    plain = KVCacheManager(24, 2, policy=name)
    hybrid = HybridKVCacheManager([FULL], 24, 2, policy=name)
    for _ in range(400):
        tokens = [int(rng.zipf(1.5)) % 6, *rng.integers(0, 2, rng.integers(0, 9)).tolist()]
        results = []
        for manager in (plain, hybrid):
            opened = manager.open("a", tokens)
            assert opened is not None
            manager.commit("a", tokens[opened.num_cached_tokens :])
            manager.close("a")
            results.append((opened, manager.counts, manager.stats().evicted_blocks))
        assert results[0] == results[1]
    assert hybrid.stats().evicted_blocks > 100 and hybrid.stats().hit_tokens > 300
    hybrid.check_invariants()


@pytest.mark.parametrize("name", POLICIES)
def test_exactly_the_shortfall_is_evicted_under_every_policy(name: str) -> None:
    """Block by block, whichever group it is of; and nothing if it does not fit."""
    manager = manager_of(30, policy=name)
    run(manager, list(range(30)))
    assert manager.counts == (0, 30, 0)
    evicted = 0
    for length in (2, 1, 3):
        assert manager.open(length, [60 + length] * length)
        evicted += 2 * (-(-length // 2))
        assert manager.stats().evicted_blocks == evicted
        manager.check_invariants()
    assert manager.open("large", [70] * 30) is None and manager.stats().evicted_blocks == evicted


def test_a_policy_serves_one_manager_and_unknown_ones_are_refused() -> None:
    """By name or by itself, as in the plain manager."""
    policy = LRU()
    manager_of(4, policy=policy)
    for wrong in (policy, "mru", 3):
        with pytest.raises(PagedKVError, match=r"policy must be|another manager"):
            manager_of(4, policy=wrong)


def test_a_quota_counts_the_blocks_of_all_groups() -> None:
    """What a namespace has too much goes when it is let go of."""
    manager = manager_of(20, policy=NamespaceQuotas({TENANT: 3}))
    manager.events.record()
    run(manager, list(range(4)), namespace=TENANT)
    run(manager, list(range(4)))
    assert manager.counts.cached == 3 + 4
    assert {e.reason for e in manager.events.take() if isinstance(e, BlocksRemoved)} == {"policy"}
    manager.check_invariants()


def test_residency_is_measured_under_any_policy() -> None:
    """And is in the stats."""
    manager = manager_of(6, policy=Residency("lfu", count().__next__))
    assert manager_of(6).stats().residency is None
    for token in range(5):
        run(manager, [token] * 4)
    residency = manager.stats().residency
    assert residency is not None and residency.lifetime.count == manager.stats().evicted_blocks > 0


def test_belady_is_told_of_the_blocks_of_every_group() -> None:
    """What is used again last goes first, though it was used last."""
    belady = Belady()
    manager = manager_of(8, policy=belady)
    for token, next_use in ((1, 10.0), (2, 99.0), (3, 20.0)):
        assert manager.open("a", [token] * 2)
        manager.commit("a", [token] * 2)
        for table in manager.tables.values():
            belady.announce(table.block_ids("a"), [next_use])
        manager.close("a")
    assert manager.open("b", [9] * 4)
    assert [found(manager, [token] * 2) for token in (1, 2, 3)] == [2, 0, 2]


def test_what_a_policy_sees_is_one_tree_without_loops() -> None:
    """A block's path ends with it, begins with a root, and every step of it is a parent."""
    groups = [CacheGroup("w", (1,), window=4), FULL, CacheGroup("more", (2,))]
    manager = HybridKVCacheManager(groups, 60, 2)
    run(manager, list(range(10)))
    run(manager, [*range(6), 50, 51], namespace=None)
    view = manager._tree.view
    for block in manager._tree.policy.ids().tolist():
        path = view.path(block).tolist()
        assert [view.parent(b) for b in path] == [0, *path[:-1]] and path[-1] == block
    assert len(set(view.row_hashes(manager._tree.policy.ids()))) > 10
    assert manager._tree.policy.first(0, NO_BLOCKS).tolist() == []
