"""Blocks dropped from the middle of a context: who chooses them, what goes back, and what attention sees."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from pagedkv import KVCacheManager, PagedKVError, SequenceError, SwapSpace
from pagedkv.block_pool import BlockCounts
from pagedkv.policies import POLICIES
from pagedkv.testing import CheckedManager, FailureInjector, check_nothing_is_held, snapshot
from pagedkv.token_eviction import BlockMass, lightest_blocks, outside_window

SIZE = 4


def opened(num_tokens: int, *, num_blocks: int = 32, **options: Any) -> CheckedManager:
    """A manager with one committed sequence "a" of the tokens 0, 1, 2, ..."""
    manager = CheckedManager(KVCacheManager(num_blocks, SIZE, **options))
    manager.manager.events.record()
    open_committed(manager, "a", num_tokens)
    return manager


def open_committed(manager: CheckedManager, name: str, num_tokens: int, *more: int) -> None:
    tokens = [*range(num_tokens), *more]
    found = manager.open(name, tokens)
    assert found is not None
    manager.commit(name, tokens[found.num_cached_tokens :])


def hit(manager: CheckedManager, num_tokens: int) -> int:
    cached: int = manager.lookup(range(num_tokens + 1)).num_cached_tokens
    return cached


class TestChoice:
    def test_a_window_keeps_sinks_and_the_newest(self) -> None:
        """Columns 1..4 of 8 go for a budget of 4 with one sink."""
        assert outside_window(8, 4).tolist() == [1, 2, 3, 4]
        assert outside_window(8, 4, sinks=3).tolist() == [3, 4, 5, 6]
        assert outside_window(8, 4, sinks=0).tolist() == [0, 1, 2, 3]
        assert outside_window(4, 4).tolist() == outside_window(0, 4).tolist() == []

    def test_the_lightest_between_sinks_and_recent_go(self) -> None:
        """The sink and the two newest have the least of all, and stay."""
        mass = [0.0, 0.9, 0.2, 0.8, 0.3, 0.1, 0.0]
        assert lightest_blocks(mass, 5, recent=2).tolist() == [2, 4]
        assert lightest_blocks(mass, 5, recent=1).tolist() == [2, 5]
        assert lightest_blocks(mass, 7).tolist() == []

    def test_of_equals_the_older_goes(self) -> None:
        """All weigh the same: what a window drops."""
        for num_blocks, budget, sinks in ((9, 4, 1), (30, 7, 2), (5, 2, 0)):
            chosen = lightest_blocks(np.ones(num_blocks), budget, sinks=sinks)
            assert chosen.tolist() == outside_window(num_blocks, budget, sinks=sinks).tolist()

    def test_it_keeps_as_much_mass_as_any_choice_can(self) -> None:
        """Against all subsets of a small context."""
        rng = np.random.default_rng(5)
        for _ in range(50):
            n, sinks, recent = int(rng.integers(3, 9)), int(rng.integers(0, 2)), int(rng.integers(1, 3))
            budget = int(rng.integers(sinks + recent, n + 2))
            mass = rng.random(n)
            gone = lightest_blocks(mass, budget, sinks=sinks, recent=recent)
            assert len(gone) == max(0, n - budget)
            between = range(sinks, n - recent)
            best = min(sum(mass[list(some)]) for some in combinations(between, len(gone)))
            assert mass[gone].sum() == pytest.approx(best)

    def test_mass_adds_up_over_life_or_over_a_window(self) -> None:
        """Rows grow at the end; after a drop the columns are those of the shorter table."""
        life, window = BlockMass(), BlockMass(window=2)
        for given in ([1.0], [0.5, 0.5], [0.25, 0.5, 0.25]):
            life.add(given)
            window.add(given)
        assert life.total.tolist() == [1.75, 1.0, 0.25]
        assert window.total.tolist() == [0.75, 1.0, 0.25]
        for score in (life, window):
            score.drop([1])
        assert (life.total.tolist(), window.total.tolist()) == ([1.75, 0.25], [0.75, 0.25])
        window.add([1.0, 0.0, 0.0])
        assert window.total.tolist() == [1.25, 0.25, 0.0]

    @pytest.mark.parametrize(
        "call",
        [
            lambda: outside_window(8, 0),
            lambda: outside_window(8, 2, sinks=2),
            lambda: outside_window(-1, 2),
            lambda: lightest_blocks([1.0, 2.0], 2, sinks=1, recent=2),
            lambda: lightest_blocks([1.0, 2.0], 2, recent=0),
            lambda: lightest_blocks([[1.0]], 2),
            lambda: lightest_blocks([np.nan, 1.0], 2),
            lambda: lightest_blocks("ab", 2),
            lambda: BlockMass(window=0),
            lambda: BlockMass().drop([0]),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, call: Any) -> None:
        """Budgets below what must stay, and masses that are none."""
        with pytest.raises(PagedKVError):
            call()

    def test_a_drop_that_was_not_told_is_noticed(self) -> None:
        """The table is shorter than the mass that was added up."""
        score = BlockMass()
        score.add([0.2, 0.8])
        with pytest.raises(PagedKVError, match="1 blocks, but there were 2"):
            score.add([1.0])


class TestDropping:
    def test_blocks_of_nobody_else_go_back_and_the_row_closes_up(self) -> None:
        """22 tokens in 6 blocks: 2 and 4 go; 2 is cached behind 1, 3 and 5 leave the index with 4."""
        manager = opened(22)
        before = manager.tables.block_ids("a").tolist()
        assert manager.context.drop_blocks("a", [3, 1]) == 2
        assert manager.tables.block_ids("a").tolist() == [before[i] for i in (0, 2, 4, 5)]
        assert manager.counts == BlockCounts(free=32 - 5, cached=1, active=4)
        assert (manager.tables.num_tokens("a"), manager.tables.num_committed("a")) == (14, 14)
        assert manager.tables.positions(["a"]).tolist() == [21]
        assert hit(manager, 22) == 8

    def test_one_run_stays_a_hit_with_what_comes_before(self) -> None:
        """What StreamingLLM drops is cached as a whole, and evictable: the pool can be had by others."""
        manager = opened(40, num_blocks=10)
        assert manager.context.drop_blocks("a", outside_window(10, 3)) == 7
        assert (hit(manager, 39), manager.counts.cached) == (32, 7)
        assert manager.open("b", range(100, 128)) is not None
        assert manager.counts == BlockCounts(0, 0, 10)

    def test_without_prefix_caching_all_is_free(self) -> None:
        """Nothing is indexed, so nothing stays."""
        manager = opened(22, policy=None)
        assert manager.context.drop_blocks("a", [0, 1, 3]) == 3
        assert manager.counts == BlockCounts(free=29, cached=0, active=3)

    def test_later_tokens_are_never_a_hit(self) -> None:
        """A block filled after the drop stays private, by commit and by commit_step; so does the child's."""
        manager = opened(14)
        manager.context.drop_blocks("a", [1])
        manager.append("a", 6)
        manager.commit("a", range(14, 20))
        manager.fork("a", "child")
        for token in range(20, 30):
            assert manager.step(["a", "child"])
            manager.copies.take()
            manager.commit_step(["a", "child"], [token, token])
        assert hit(manager, 30) == 8
        manager.close("a")
        manager.close("child")
        assert hit(manager, 30) == 8
        check_nothing_is_held(manager.manager)

    def test_a_prompt_can_drop_before_it_is_whole(self) -> None:
        """Chunked prefill under a budget: the second chunk is computed behind a gap, so it is not shared."""
        manager = CheckedManager(KVCacheManager(32, SIZE))
        manager.open("a", range(30), announce=True)
        manager.commit("a", range(12))
        assert manager.lookup(range(30)).num_coming_tokens == 16
        manager.context.drop_blocks("a", [1])
        assert manager.lookup(range(30)).num_coming_tokens == 0
        manager.commit("a", range(12, 30))
        assert hit(manager, 30) == 8

    def test_the_block_with_the_newest_token_stays(self) -> None:
        """Of 16 tokens in 4 full blocks the last one holds the newest."""
        manager = opened(16)
        with pytest.raises(SequenceError, match="newest token stays"):
            manager.context.drop_blocks("a", [3])
        assert manager.context.drop_blocks("a", [0, 1, 2]) == 3
        assert manager.tables.num_tokens("a") == 4

    @pytest.mark.parametrize(
        "columns", [[0, 0], [-1], [6], [5], [1.0], "12", 3, None, [[1]], [True], [0, 7], ["x"]]
    )
    def test_what_cannot_be_dropped_is_refused_and_changes_nothing(self, columns: Any) -> None:
        """Twice, outside, the partial block, no numbers."""
        manager = opened(22)
        before = snapshot(manager.manager)
        with pytest.raises(PagedKVError):
            manager.manager.context.drop_blocks("a", columns)
        assert snapshot(manager.manager) == before

    @pytest.mark.parametrize(
        "point",
        [
            "pagedkv.block_tables:BlockTables.row",
            "pagedkv.prefix_index:PrefixIndex.behind",
            "numpy:concatenate",
            "numpy:delete",
            "numpy:flatnonzero",
        ],
    )
    def test_a_drop_that_fails_has_changed_nothing(self, point: str) -> None:
        """At any call of what it depends on, with a part of the blocks shared; the next one goes well."""
        manager = opened(41).manager
        manager.fork("a", "b")
        manager.context.drop_blocks("a", [3])
        manager.close("b")
        injector = FailureInjector(point)
        for at in range(1, 20):
            before = snapshot(manager)
            with injector.failing(at), suppress(MemoryError):
                manager.context.drop_blocks("a", [1, 4, 6])
            if not injector.has_failed:
                break
            assert snapshot(manager) == before
        assert at > 1
        assert manager.tables.num_dropped("a") == 4
        manager.check_invariants()

    def test_dropped_blocks_are_counted_for_each_sequence_that_drops_them(self) -> None:
        """What a fork drops, too, counts again; a call that drops nothing or is refused does not."""
        manager = opened(17).manager
        manager.fork("a", "b")
        for name, columns in (("a", [0, 2]), ("b", [2]), ("b", [])):
            manager.context.drop_blocks(name, columns)
        with pytest.raises(SequenceError):
            manager.context.drop_blocks("a", [2])
        assert (manager.stats().dropped_blocks, manager.stats().dropped_tokens) == (3, 3 * SIZE)

    def test_what_is_not_final_stays(self) -> None:
        """Uncommitted tokens, and a sequence that is not open."""
        manager = opened(9)
        manager.append("a", 8)
        with pytest.raises(SequenceError, match="9 of 17 tokens are committed"):
            manager.context.drop_blocks("a", [2])
        with pytest.raises(SequenceError, match="not open"):
            manager.context.drop_blocks("b", [])

    def test_dropping_nothing_does_nothing(self) -> None:
        """On a sequence with and without gaps."""
        manager = opened(22)
        before = snapshot(manager.manager)
        assert manager.context.drop_blocks("a", []) == 0
        assert snapshot(manager.manager) == before
        manager.context.drop_blocks("a", [2])
        before = snapshot(manager.manager)
        assert manager.context.drop_blocks("a", np.zeros(0, np.int64)) == 0
        assert snapshot(manager.manager) == before

    def test_events_tell_what_left_and_why(self) -> None:
        """Blocks 2 and on leave the index, children first; the dropped first run stays."""
        manager = opened(22)
        manager.taken.clear()
        manager.context.drop_blocks("a", [1, 3])
        (event,) = manager.taken
        assert event.reason == "dropped" and len(event.digests) == 3  # type: ignore[union-attr]


class TestShared:
    def test_a_shared_prefix_is_kept_for_all_and_goes_with_the_last(self) -> None:
        """Two hit the same 5 blocks; one drops 2 of them: they are nobody's loss, and held for block 4."""
        manager = opened(21)
        open_committed(manager, "b", 20, 90, 91)
        assert manager.context.drop_blocks("b", [1, 3]) == 0
        assert manager.tables.num_tokens("b") == 14
        assert hit(manager, 20) == 20
        manager.close("a")
        assert hit(manager, 20) == 20
        assert manager.counts.cached == 0, "what is held behind a gap is not evictable"
        assert manager.context.drop_blocks("b", []) == 2
        assert (manager.counts.active, manager.counts.cached, hit(manager, 20)) == (4, 1, 8)
        manager.close("b")
        check_nothing_is_held(manager.manager)

    def test_a_shared_run_with_nothing_kept_and_shared_behind_it_is_given_up(self) -> None:
        """b shares 3 blocks, drops the last two, and keeps only its own behind them."""
        manager = opened(13)
        open_committed(manager, "b", 12, *range(90, 100))
        assert manager.context.drop_blocks("b", [1, 2]) == 2
        manager.close("a")
        assert hit(manager, 12) == 12
        assert manager.counts.cached == 2

    def test_cached_content_of_others_behind_a_kept_block_keeps_it(self) -> None:
        """A closed sequence built on all of a's blocks: those stay a hit until its own are evicted."""
        manager = opened(12)
        manager.append("a", 1)
        manager.commit("a", [90])
        open_committed(manager, "old", 20)
        manager.close("old")
        assert manager.context.drop_blocks("a", [1]) == 0
        assert hit(manager, 20) == 20
        assert manager.open("big", range(200, 200 + 4 * 28)) is not None  # evicts the old one's
        assert manager.context.drop_blocks("a", []) == 1
        assert hit(manager, 20) == 8

    def test_a_pin_holds_what_it_holds(self) -> None:
        """Dropped blocks stay a hit until the pin goes; then they go with the next call."""
        manager = opened(22)
        pin = manager.retention.pin("a")
        assert manager.context.drop_blocks("a", [1, 3]) == 0
        assert hit(manager, 22) == 20
        manager.retention.unpin(pin)
        assert manager.context.drop_blocks("a", [2]) == 3
        assert manager.counts == BlockCounts(free=28, cached=1, active=3)

    def test_pins_and_priorities_reach_the_first_gap(self) -> None:
        """Blocks 0 and 1 of six; behind the gap nothing is found any more."""
        manager = opened(22, policy="priority")
        manager.context.drop_blocks("a", [2])
        assert manager.manager.retention.set_priority("a", 80) == 2
        pin = manager.manager.retention.pin("a")
        assert manager.manager.stats().pinned_blocks == 2
        manager.manager.check_invariants()
        manager.manager.retention.unpin(pin)
        manager.manager.context.drop_blocks("a", [0])
        with pytest.raises(SequenceError, match="nothing to pin"):
            manager.manager.retention.pin("a")

    def test_a_fence_keeps_what_was_dropped(self) -> None:
        """Work under way may still read it; it comes back when that is over."""
        manager = opened(22)
        fence = manager.fences.open()
        manager.context.drop_blocks("a", [1, 3])
        assert manager.counts == BlockCounts(free=26, cached=0, active=6)
        manager.fences.signal(fence)
        assert manager.counts == BlockCounts(free=27, cached=1, active=4)

    def test_a_fork_shares_gaps_and_each_drops_for_itself(self) -> None:
        """The child of a sequence with gaps has them too; what both hold goes with the second."""
        manager = opened(26)
        manager.context.drop_blocks("a", [2])
        assert manager.fork("a", "b")
        assert manager.tables.positions(["a", "b"]).tolist() == [25, 25]
        free = manager.counts.free
        assert manager.context.drop_blocks("b", [3]) == 1
        assert manager.counts.free == free
        assert manager.context.drop_blocks("a", [3]) == 1
        assert manager.counts.free == free + 1
        manager.close("a")
        manager.close("b")
        check_nothing_is_held(manager.manager)


class TestAfterwards:
    def test_drafts_are_cut_down_to_the_gap_and_no_further(self) -> None:
        """Kept are blocks 0, 2, 3 and two tokens; 9 of the 16 tokens could be cut."""
        manager = opened(18)
        manager.context.drop_blocks("a", [1])
        manager.append("a", 3)
        manager.truncate("a", 14)
        manager.truncate("a", 4)
        with pytest.raises(SequenceError, match="first 4 tokens that are left must stay"):
            manager.manager.truncate("a", 3)
        manager.append("a", 1)
        manager.commit("a", [77])
        manager.append("a", 3)
        manager.commit("a", [78, 79, 80])
        assert hit(manager, 18) == 8

    def test_drafts_are_verified_behind_a_gap(self) -> None:
        """As in any sequence: two of three are right."""
        manager = opened(14)
        manager.context.drop_blocks("a", [0, 1])
        manager.append("a", 4)
        manager.commit_step(["a"], [[1, 2, 3]], [2])
        assert (manager.tables.num_tokens("a"), manager.tables.positions(["a"]).tolist()) == (8, [15])

    def test_a_sequence_cut_inside_a_cached_block_must_grow_first(self) -> None:
        """The block that it shares with the cache is to be copied before the row may have gaps."""
        manager = opened(14)
        manager.truncate("a", 10)
        with pytest.raises(SequenceError, match="append to it first"):
            manager.context.drop_blocks("a", [0])
        manager.append("a", 1)
        manager.copies.take()
        manager.context.drop_blocks("a", [0])

    def test_it_cannot_be_swapped(self) -> None:
        """It could not be opened again from its tokens."""
        manager = KVCacheManager(16, SIZE)
        manager.open("a", range(14))
        manager.commit("a", range(14))
        manager.context.drop_blocks("a", [1])
        before = snapshot(manager)
        with pytest.raises(SequenceError, match="dropped 1 blocks"):
            SwapSpace(manager, 8).swap_out("a")
        assert snapshot(manager) == before

    def test_maintenance_knows_what_is_held_outside_the_row(self) -> None:
        """Blocks held for their children move with the others, and the manager cannot shrink below them."""
        manager = CheckedManager(KVCacheManager(32, SIZE))
        open_committed(manager, "filler", 0, *range(300, 340))
        open_committed(manager, "a", 21)
        open_committed(manager, "b", 20, 90, 91)
        manager.close("filler")
        manager.context.drop_blocks("b", [1, 3])
        manager.close("a")
        assert manager.maintenance.resize(8) is not None
        assert manager.counts.active == 6
        manager.close("b")
        check_nothing_is_held(manager.manager)

    def test_endless_decoding_in_a_budget(self) -> None:
        """5,000 tokens through 8 blocks, each one further than ``max_seq_len`` allows at once."""
        manager = KVCacheManager(8, SIZE, max_seq_len=32)
        manager.open("a", range(10))
        manager.commit("a", range(10))
        for token in range(5000):
            if manager.tables.num_tokens("a") % SIZE == 0 and len(manager.tables.block_ids("a")) == 6:
                manager.context.drop_blocks("a", outside_window(6, 5))
            assert manager.append("a")
            manager.commit("a", [token])
        assert manager.tables.positions(["a"]).tolist() == [5009]
        assert manager.counts.active <= 6
        manager.check_invariants()


def walk(seed: int, policy: str | None, num_calls: int = 250) -> dict[str, int]:
    """Random calls on a checked manager of few blocks, with drops in all places; counts what happened."""
    rng = np.random.default_rng(seed)
    manager = CheckedManager(KVCacheManager(24, SIZE, max_seqs=6, policy=policy))
    manager.manager.events.record()
    seen = dict.fromkeys(("drops", "delayed", "late", "gaps forked", "cut"), 0)
    pins: list[int] = []
    fences: list[int] = []
    names = 0

    def committed(name: int) -> bool:
        return bool(manager.tables.num_tokens(name) == manager.tables.num_committed(name))

    for _ in range(num_calls):
        if len(manager.copies) and rng.random() < 0.8:
            manager.copies.take()
        open_ids = manager.tables.seq_ids
        action = rng.choice(
            ["open", "grow", "grow", "drop", "drop", "drop", "fork", "cut", "close", "hold", "hold"]
        )
        name = int(rng.choice(open_ids)) if open_ids else -1
        if action == "open" or name < 0:
            names += 1
            branch = int(rng.integers(3))
            tokens = [
                *range(int(rng.integers(24))),
                *range(100 * branch, 100 * branch + int(rng.integers(9))),
            ]
            found = manager.open(names, tokens)
            if found is not None and rng.random() < 0.8:
                manager.commit(names, tokens[found.num_cached_tokens :])
        elif action == "grow":
            count = int(rng.integers(1, 7))
            if manager.append(name, count) and not len(manager.copies):
                left = manager.tables.num_tokens(name) - manager.tables.num_committed(name)
                manager.commit(name, [int(rng.integers(2))] * int(rng.integers(left + 1)))
        elif action == "drop":
            length, done = manager.tables.num_tokens(name), manager.tables.num_committed(name)
            limit = min(done // SIZE, max(0, length - 1) // SIZE)
            columns = np.flatnonzero(rng.random(limit) < rng.choice([0.0, 0.3, 0.8]))
            blocks = manager.tables.block_ids(name)
            is_cut = length % SIZE and manager._cache.index.indexed[blocks[-1]]
            if is_cut or manager.copies.into(blocks):
                with pytest.raises(SequenceError):
                    manager.call("context.drop_blocks", name, columns)
                continue
            count = manager.context.drop_blocks(name, rng.permutation(columns))
            seen["drops"] += len(columns) > 0
            seen["delayed"] += count < len(columns)
            seen["late"] += count > len(columns)
        elif action == "fork" and (committed(name) or policy is None) and not len(manager.copies):
            names += 1
            seen["gaps forked"] += manager.tables.num_dropped(name) > 0
            manager.fork(name, names)
        elif action == "cut":
            least = manager.manager.context.least_tokens(name)
            length = manager.tables.num_tokens(name)
            seen["cut"] += least > 0
            manager.truncate(name, int(rng.integers(least, length + 1)))
        elif action == "close":
            manager.close(name)
        elif action == "hold":
            hold_or_let_go(manager, rng, name, pins, fences)
    for name in manager.tables.seq_ids:
        manager.close(name)
    for pin in pins:
        manager.retention.unpin(pin)
    for fence in fences:
        manager.fences.signal(fence)
    if len(manager.copies):
        manager.copies.take()
    check_nothing_is_held(manager.manager)
    return seen


def hold_or_let_go(
    manager: CheckedManager, rng: np.random.Generator, name: int, pins: list[int], fences: list[int]
) -> None:
    """Pin, unpin, open or signal a fence, or defragment."""
    choice, is_whole = rng.integers(5), not manager.tables.num_dropped(name)
    if choice == 0 and is_whole and manager.prefix_caching and manager.tables.num_committed(name) >= SIZE:
        pins.append(manager.retention.pin(name))
    elif choice == 1 and pins:
        manager.retention.unpin(pins.pop(int(rng.integers(len(pins)))))
    elif choice == 2 and len(fences) < 2:
        fences.append(manager.fences.open())
    elif choice == 3 and fences:
        manager.fences.signal(fences.pop(0))
    elif choice == 4:
        manager.maintenance.defragment()


@pytest.mark.parametrize("policy", [*(name for name in POLICIES if name != "belady"), None])
def test_random_drops_agree_with_the_slow_model(policy: str | None) -> None:
    """Counts, hits, events and invariants after each of some thousand calls, for every policy."""
    total: dict[str, int] = {}
    for seed in range(8):
        for name, count in walk(seed, policy).items():
            total[name] = total.get(name, 0) + count
    rare = {"late", "delayed"} if policy is None else set()
    assert all(count > 2 for name, count in total.items() if name not in rare), total
