"""Windows that move on, hits that need every group, sharing, cutting, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv import Media, Namespace, NeverFits, PagedKVError, SequenceError
from pagedkv.block_tables import NULL_BLOCK
from pagedkv.hybrid import CacheGroup, HybridKVCacheManager
from pagedkv.hybrid.group import MOST_POSITIONS, longest_hit
from pagedkv.testing import snapshot

FULL, LOCAL = CacheGroup("full", (0,)), CacheGroup("local", (1,), window=4)


def state(manager: Any) -> object:
    """Everything inside a manager but scratch space."""
    return snapshot(manager, ("_seen", "_head", "_spare", "_next", "_last_batch"))


def decode(manager: HybridKVCacheManager, seq_id: str, tokens: list[int]) -> None:
    """Grow by one token at a time, each committed before the next."""
    for token in tokens:
        assert manager.step([seq_id])
        manager.commit_step([seq_id], [token])


def run(manager: HybridKVCacheManager, seq_id: str, tokens: list[int]) -> int:
    """Open, commit and close; returns the cached tokens."""
    opened = manager.open(seq_id, tokens)
    assert opened is not None
    manager.commit(seq_id, tokens[opened.num_cached_tokens :])
    manager.close(seq_id)
    return opened.num_cached_tokens


# -- windows that move on


def test_steady_decode_with_windows_only_holds_a_constant_number_of_blocks() -> None:
    """ceil((window - 1) / block_size) + 1 blocks and the sinks, however long the sequence becomes."""
    group = CacheGroup("w", (0,), window=10, sinks=5)
    manager = HybridKVCacheManager([group], 9, 4, max_seqs=2, max_seq_len=4000)
    assert manager.open("a", [0] * 30, max_fresh_tokens=8) == (8, 0)
    manager.commit("a", [0] * 8)
    held = set()
    for token in range(2000):
        assert manager.step(["a"])
        if token > 30:
            held.add(manager.counts.active)
        manager.commit_step(["a"], [token])
    manager.check_invariants()
    assert held == {3 + 1 + 2}
    assert manager.stats().num_nodes == 2008 // 4
    assert manager.stats().fallen_blocks > 480


def test_nothing_is_left_of_a_long_sequence_whose_blocks_are_gone() -> None:
    """Contents without blocks stay while deeper ones need them, and go with the last."""
    manager = HybridKVCacheManager([CacheGroup("w", (0,), window=4)], 8, 2, max_seqs=2, max_seq_len=400)
    assert manager.open("a", [0] * 16)
    manager.commit("a", [0] * 16)
    decode(manager, "a", list(range(200)))
    assert manager.stats().num_nodes == 108
    manager.close("a")
    assert manager.stats().num_nodes == 108 and manager.counts.cached == 8
    run(manager, "b", [1] * 16)
    stats = manager.stats()
    assert stats.num_nodes == 8 and stats.cached_blocks == 8
    manager.check_invariants()


def test_the_contents_of_an_open_sequence_stay_known_when_all_their_blocks_are_gone() -> None:
    """A window of one token needs no block of the past, and the sequence still continues its own path."""
    manager = HybridKVCacheManager([CacheGroup("w", (0,), window=1)], 4, 2, max_seqs=3)
    assert manager.open("a", [0, 1, 2, 3])
    manager.commit("a", [0, 1, 2, 3])
    assert manager.open("b", [0, 1, 2, 3, 9, 9, 9]) == (7, 4)
    manager.commit("b", [9, 9, 9])
    manager.close("b")
    assert manager.stats().num_nodes == 3
    assert manager.open("filler", [5] * 8)
    assert manager.counts.cached == 0 and manager.stats().num_nodes == 2
    manager.close("filler")
    decode(manager, "a", [9, 9])
    assert manager.stats().num_nodes == 3
    manager.check_invariants()


# -- hits


def test_a_hit_is_refused_when_a_window_block_is_gone_though_the_full_group_has_all() -> None:
    """The full group holds every block of the prompt; of the window group only the last two are left."""
    manager = HybridKVCacheManager([FULL, LOCAL], 12, 2)
    prompt = list(range(12))
    assert manager.open("a", prompt)
    manager.commit("a", prompt)
    assert manager.counts == (0, 4, 8)  # local blocks 0..3 fell out
    assert manager.open("filler", [50] * 4)
    manager.close("filler")
    assert manager.stats().groups["local"] == (2, 0) and manager.stats().groups["full"] == (6, 0)
    for length in (2, 4, 8, 10):
        assert manager.open(length, [*prompt[:length], 99], max_fresh_tokens=1) == (1, 0)
        manager.close(length)
    assert manager.open("b", [*prompt, 99]) == (13, 12)
    manager.check_invariants()


def test_shorter_prefixes_are_hit_while_what_fell_out_of_the_window_is_cached() -> None:
    """Blocks that fell out serve others, and only the ones that the other needs are held."""
    manager = HybridKVCacheManager([FULL, LOCAL], 30, 2)
    run(manager, "a", list(range(20)))
    for depth in (2, 6, 12, 20):
        prompt = [*range(depth), 77, 78]
        assert manager.open(depth, prompt) == (depth + 2, depth)
        held = np.flatnonzero(manager.tables["local"].block_ids(depth)).tolist()
        assert held == list(range(max(0, (depth - 3) // 2), depth // 2 + 1))
        manager.check_invariants()


def test_the_hit_shrinks_to_what_every_group_can_serve() -> None:
    """With one window block evicted, hits that need it are refused, and shorter and longer ones are not."""
    manager = HybridKVCacheManager([LOCAL, FULL], 24, 2, max_seqs=4)
    tokens = list(range(16))
    assert manager.open("a", tokens)
    manager.commit("a", tokens)  # local blocks 0..5 fell out: 5 is the oldest cached one, then 4, 3, ...
    assert manager.counts == (8, 6, 10)
    assert manager.open("filler", [50] * 15) is None  # would need 16 blocks of 8 + 6
    assert manager.open("filler", [50] * 9)  # 10 blocks: the two oldest are evicted, local 5 and 4
    manager.close("filler")
    hits = {}
    for depth in range(1, 9):
        opened = manager.open(
            "b", [*tokens[: 2 * depth], 99], max_cached_tokens=2 * depth, max_fresh_tokens=1
        )
        if opened is not None:
            hits[depth] = opened.num_cached_tokens // 2
            manager.close("b")
    manager.check_invariants()
    # a hit of d blocks needs local blocks d - 2 and d - 1
    assert hits == {1: 1, 2: 2, 3: 3, 4: 4, 5: 4, 6: 4, 7: 4, 8: 8}


def test_two_windows_and_sinks_must_all_be_there() -> None:
    """Each group has a veto."""
    groups = [CacheGroup("a", (0,), window=2), CacheGroup("b", (1,), window=6, sinks=2)]
    present = np.ones((2, 8), bool)
    assert longest_hit(groups, present, 2) == 8
    for group, block, expected in ((0, 7, 7), (0, 3, 8), (1, 5, 5), (1, 0, 0), (1, 1, 8)):
        without = present.copy()
        without[group, block] = False
        assert longest_hit(groups, without, 2) == expected


def test_a_finished_sequence_is_hit_to_its_last_full_block() -> None:
    """Wherever in a block it ended: a window is kept from the last boundary on. What fell out is gone."""
    for length in range(24, 28):
        manager = HybridKVCacheManager([FULL, LOCAL], 40, 4)
        tokens = list(range(length))
        assert manager.open("a", tokens[:12])
        manager.commit("a", tokens[:12])
        decode(manager, "a", tokens[12:])
        manager.close("a")
        fallen, free = manager.stats().fallen_blocks, manager.counts.free
        assert fallen == 5
        assert manager.open("filler", [90] * 4 * ((free + fallen) // 2))
        assert manager.stats().evicted_blocks in (4, 5)
        manager.close("filler")
        opened = manager.open("b", [*tokens, 99])
        assert opened is not None and opened.num_cached_tokens == 24


def test_namespaces_and_media_keep_contents_apart() -> None:
    """Equal tokens with another adapter or image are other contents, in every group."""
    manager = HybridKVCacheManager([FULL, LOCAL], 40, 2)
    tokens, namespace, media = list(range(9)), Namespace(adapter="x"), [Media(5, "cat")]
    assert manager.open("a", tokens, namespace=namespace, media=media)
    manager.commit("a", tokens)
    hits = [
        manager.open(i, tokens, namespace=n, media=m)
        for i, (n, m) in enumerate(
            [(None, []), (namespace, []), (namespace, [Media(5, "dog")]), (namespace, media)]
        )
    ]
    assert [opened and opened.num_cached_tokens for opened in hits] == [0, 4, 4, 8]
    for seq_id in ["a", *range(4)]:
        manager.close(seq_id)
    assert manager.open("big", [1] * 40) and len(manager._tree.extra_keys) == 0
    manager.check_invariants()


def test_media_may_come_with_the_tokens() -> None:
    """As with the plain manager."""
    manager = HybridKVCacheManager([FULL], 20, 2)
    assert manager.open("a", [1, 2])
    manager.commit("a", [1, 2])
    assert manager.append("a", 2)
    manager.commit("a", [7, 7], media=[Media(2, "cat")])
    assert manager.open("b", [1, 2, 7, 7, 3], media=[Media(2, "dog")]) == (5, 2)
    assert manager.open("c", [1, 2, 7, 7, 3], media=[Media(2, "cat")]) == (5, 4)


def test_without_prefix_caching_nothing_is_kept_and_windows_still_move() -> None:
    """What falls out of the window is free at once."""
    manager = HybridKVCacheManager([FULL, LOCAL], 20, 2, policy=None)
    tokens = list(range(12))
    assert manager.open("a", tokens)
    manager.commit("a", tokens)
    assert manager.counts == (12, 0, 8)
    assert manager.open("b", tokens) == (12, 0)
    assert manager.fork("b", "c")
    manager.check_invariants()
    for seq_id in "abc":
        manager.close(seq_id)
    assert manager.counts == (20, 0, 0) and manager.stats().num_nodes == 0


# -- growing, sharing, cutting


def test_tables_of_a_group_are_written_for_a_batch_like_any_other() -> None:
    """What fell out of the window is the null block; slots are where the newest tokens go."""
    manager = HybridKVCacheManager([FULL, LOCAL], 20, 2)
    for seq_id, tokens in (("a", list(range(11))), ("b", [7, 8, 9])):
        assert manager.open(seq_id, tokens)
        manager.commit(seq_id, tokens)
    for name, lost in (("full", 0), ("local", 3)):
        tables, lens = np.full((3, 7), 99, np.int32), np.empty(3, np.int32)
        slots = np.empty(3, np.int64)
        assert manager.tables[name].write_block_tables(["a", "b"], tables, lens, slots) == 6
        held = manager.tables[name].block_ids("a")
        assert np.flatnonzero(tables[0]).tolist() == list(range(lost, 6)) and tables[0, 5] == held[5]
        assert lens.tolist() == [11, 3, 0] and slots.tolist()[0] == held[5] * 2


def test_a_prompt_that_never_fits_at_once_fits_in_chunks() -> None:
    """The pool holds the full group's blocks and a window, not every group's whole prompt."""
    manager = HybridKVCacheManager([FULL, LOCAL], 15, 2)
    prompt = list(range(20))
    with pytest.raises(
        NeverFits, match=r"20 tokens, 0 of them computed before, can never fit.* 20 of 15 blocks"
    ):
        manager.open("a", prompt)
    assert manager.open("a", prompt, max_fresh_tokens=6) == (6, 0)
    for start in range(0, 18, 6):
        manager.commit("a", prompt[start : start + 6])
        assert manager.append("a", min(6, 20 - start - 6))
    manager.commit("a", prompt[18:])
    assert manager.counts.active == 10 + 2
    manager.close("a")
    assert manager.open("b", prompt) == (20, 18)  # with a hit it fits at once
    with pytest.raises(NeverFits, match=r"26 tokens, 25 of them computed before, .* need 16 of 15 blocks"):
        manager.open("c", list(range(100, 126)), max_fresh_tokens=1)


def test_growth_that_can_never_fit_is_told_from_growth_that_cannot_fit_now() -> None:
    """False while somebody else has the blocks, an error if nobody has."""
    manager = HybridKVCacheManager([FULL, LOCAL], 12, 2, max_seq_len=100)
    assert manager.open("a", [1, 2, 3, 4]) and manager.open("b", [1, 2, 3, 4])
    assert not manager.append("a", 6)
    with pytest.raises(NeverFits, match=r"13 tokens, 4 of them computed before.* 14 of 12 blocks"):
        manager.append("a", 9)
    with pytest.raises(NeverFits, match="a sequence holds at most 100"):
        manager.append("a", 97)


@pytest.mark.parametrize("count", [2**63 - 1, 2**63 - 3, 2**70])
def test_huge_counts_do_not_wrap_around(count: int) -> None:
    """Growth never fits, a chunk is all that is left, and a window is refused that no int64 can say."""
    manager = opened()
    before = state(manager)
    with pytest.raises(NeverFits, match=f"^{count + 5} tokens can never fit"):
        manager.append("a", count)
    with pytest.raises(NeverFits, match=f"^{count + 2} tokens can never fit"):
        manager.lookup([8, 9], count)
    assert manager.lookup([8, 9, 8], 1, max_fresh_tokens=count) == manager.lookup([8, 9, 8], 1)
    assert state(manager) == before
    if count > MOST_POSITIONS:
        with pytest.raises(PagedKVError, match=f"window must be at most {MOST_POSITIONS}, got {count}"):
            CacheGroup("local", (0,), window=count)
        with pytest.raises(PagedKVError, match=f"max_seq_len must be at most .* got {count} tokens"):
            HybridKVCacheManager([FULL, LOCAL], 12, 2, max_seq_len=count)


@pytest.mark.parametrize("name", ["close", "truncate", "commit"])
def test_memory_that_runs_out_while_blocks_are_given_up_loses_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row still names them, so that a later call gives them up."""

    def fail(count: int) -> None:
        raise MemoryError

    manager = opened()
    calls = {"close": lambda: manager.close("a"), "truncate": lambda: manager.truncate("a", 0)}
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        if name == "commit":
            assert manager.append("a", 3)
            manager.truncate("a", 8)
        patch.setattr(manager._tree.policy, "make_room", fail)
        calls.get(name, lambda: manager.commit("a", [5, 6, 7, 8]))()
    manager.check_invariants()
    manager.close("a")
    assert manager.counts.active == 0
    manager.check_invariants()


def test_a_commit_that_runs_out_of_memory_leaves_no_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room for contents is what it was."""

    def fail(*args: object) -> None:
        raise MemoryError

    manager = HybridKVCacheManager([FULL, LOCAL], 12, 2)
    assert manager.open("a", [1, 2, 3])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(manager._tree.index, "insert", fail)
        manager.commit("a", [1, 2, 3])
    manager.check_invariants()
    assert (manager.tables["full"].num_committed("a"), manager._tree.nodes.num_active) == (0, 0)
    manager.commit("a", [1, 2, 3])
    assert manager.stats().num_nodes == 1


def test_a_fork_copies_its_tail_in_every_group() -> None:
    """Whoever grows first gets a block of its own per group, and both are right about what they hold."""
    manager = HybridKVCacheManager([FULL, LOCAL], 20, 2)
    assert manager.open("a", [1, 2, 3])
    manager.commit("a", [1, 2, 3])
    assert manager.fork("a", "b") and manager.counts.active == 4
    tails = [manager.tables[name].block_ids("a")[-1] for name in ("full", "local")]
    assert manager.step(["a", "b"])
    copies = manager.copies.take()
    assert sorted(copies.src.tolist()) == sorted(tails) and len(copies.dst) == 2
    assert [manager.tables[name].block_ids("b")[-1] for name in ("full", "local")] == tails
    assert manager.counts.active == 6
    manager.commit_step(["a", "b"], [4, 4])  # equal contents become one again
    assert manager.counts.active == 4
    manager.check_invariants()


def test_two_forks_share_their_tail_after_the_first_sequence_has_closed() -> None:
    """One of them copies, the other keeps the block."""
    manager = HybridKVCacheManager([FULL, LOCAL], 20, 2)
    assert manager.open("a", [1, 2, 3])
    manager.commit("a", [1, 2, 3])
    assert manager.fork("a", "b") and manager.fork("a", "c")
    manager.close("a")
    assert manager.step(["b"]) and len(manager.copies.take().src) == 2
    assert manager.step(["c"]) and len(manager.copies) == 0
    manager.check_invariants()


def test_drafts_can_be_cut_and_what_fell_out_cannot_come_back() -> None:
    """Uncommitted tokens always, committed ones as long as the window is there, and all of them."""
    manager = HybridKVCacheManager([FULL, LOCAL], 40, 2)
    tokens = list(range(20))
    assert manager.open("a", tokens)
    manager.commit("a", tokens)
    assert manager.append("a", 5)
    manager.truncate("a", 22)
    manager.truncate("a", 20)
    manager.truncate("a", 19)  # sees 16..18; 16 and on are held
    before = state(manager)
    with pytest.raises(SequenceError, match="from 19 to 18 tokens: positions from 14 on fell out"):
        manager.truncate("a", 18)  # sees 15, which is gone
    assert state(manager) == before
    manager.check_invariants()
    manager.truncate("a", 0)
    assert manager.append("a", 6)
    manager.commit("a", [1, 2, 3, 4, 5, 6])
    manager.check_invariants()


def test_a_cut_tail_is_copied_before_it_is_written() -> None:
    """Its content stays findable for others."""
    manager = HybridKVCacheManager([FULL, CacheGroup("local", (1,), window=8)], 40, 4)
    assert manager.open("a", list(range(8)))
    manager.commit("a", list(range(8)))
    assert manager.open("b", [*range(8), 9], max_cached_tokens=8) == (9, 8)
    manager.truncate("a", 6)
    assert manager.append("a")
    assert len(manager.copies.take().src) == 2
    manager.commit("a", [66])
    assert manager.append("a")
    manager.commit("a", [67])
    assert manager.open("c", [*range(8), 5]) == (9, 8)
    assert manager.open("d", [0, 1, 2, 3, 4, 5, 66, 67, 8]) == (9, 8)
    manager.check_invariants()


def test_cached_content_behind_its_own_tail_does_not_keep_a_sequence_from_growing() -> None:
    """Alone in a full pool, it takes the place of what it cut off, and then needs no copy of its tail."""
    manager = HybridKVCacheManager([FULL, CacheGroup("local", (1,), window=12)], 6, 4)
    assert manager.open("a", list(range(12)))
    manager.commit("a", list(range(12)))
    manager.truncate("a", 6)
    assert manager.counts == (0, 2, 4)
    assert manager.append("a", 3)  # a copy and a new block in each group would be 4 blocks
    assert manager.stats().evicted_blocks == 2 and len(manager.copies) == 0
    manager.commit("a", [60, 70, 80])
    manager.check_invariants()


def test_a_tail_is_shared_with_whoever_built_on_its_content_and_let_its_window_go() -> None:
    """The one block of the window group has one holder, and still its content must not be withdrawn."""
    manager = HybridKVCacheManager([LOCAL, FULL], 12, 2)
    assert manager.open("a", list(range(12)))
    manager.commit("a", list(range(12)))
    assert manager.open("b", [0, 1, 2, 3, 4, 5, 99]) == (7, 6)
    manager.truncate("b", 5)
    assert manager.open("filler", [50])
    assert manager.counts == (0, 0, 12)
    assert not manager.append("b")
    manager.close("filler")
    assert manager.append("b") and len(manager.copies) == 2
    manager.check_invariants()


def test_a_copy_whose_target_is_given_up_is_forgotten() -> None:
    """Its block may have another owner before the copies are run."""
    manager = HybridKVCacheManager([FULL, LOCAL], 20, 2)
    assert manager.open("a", [1, 2, 3])
    manager.commit("a", [1, 2, 3])
    assert manager.fork("a", "b") and manager.append("b")
    assert len(manager.copies) == 2
    manager.close("b")
    assert len(manager.copies) == 0


def test_exactly_the_shortfall_is_evicted() -> None:
    """One block at a time, whatever the group, though contents have several."""
    groups = [FULL, CacheGroup("other", (1,)), CacheGroup("local", (2,), window=4)]
    manager = HybridKVCacheManager(groups, 30, 2)
    run(manager, "a", list(range(20)))
    assert manager.counts == (0, 30, 0)
    evicted = 0
    for length in (2, 1, 3):
        assert manager.open(length, [60 + length] * length)
        evicted += 3 * (-(-length // 2))
        assert manager.stats().evicted_blocks == evicted
        manager.check_invariants()


# -- refusals


def opened() -> HybridKVCacheManager:
    """A manager with a sequence of 5 tokens, 4 of them committed."""
    manager = HybridKVCacheManager([FULL, LOCAL], 12, 2, max_seqs=2, max_seq_len=20)
    assert manager.open("a", [1, 2, 3, 4, 5])
    manager.commit("a", [1, 2, 3, 4])
    return manager


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.open("a", [1]), SequenceError, "'a' is open already"),
        (lambda m: m.open("b", [[1]]), PagedKVError, "one dimension"),
        (lambda m: m.open("b", [-1]), PagedKVError, "token ids must be in"),
        (lambda m: m.open("b", [1], max_cached_tokens=-1), PagedKVError, "max_cached_tokens"),
        (lambda m: m.open("b", [1], max_fresh_tokens=0), PagedKVError, "max_fresh_tokens"),
        (lambda m: m.open("b", [1], namespace="x"), PagedKVError, "namespace must be a Namespace"),
        (lambda m: m.open("b", [1], media=[Media(3, "x")]), PagedKVError, "outside the 1 tokens"),
        (lambda m: m.open("b", [1] * 21), NeverFits, "a sequence holds at most 20"),
        (lambda m: m.open("b", [1] * 16), NeverFits, "need 16 of 12 blocks"),
        (lambda m: m.append("b"), SequenceError, "'b' is not open"),
        (lambda m: m.append("a", -1), PagedKVError, "num_tokens"),
        (lambda m: m.step(["a", "a"]), SequenceError, "only 1 distinct"),
        (lambda m: m.commit("a", [1, 2]), SequenceError, "4 of its 5 are committed"),
        (lambda m: m.commit("a", [1], media=[Media(0, "x")]), PagedKVError, "before the 4 committed"),
        (lambda m: m.commit_step(["a"], [1, 2]), SequenceError, "1 sequences, but 2 tokens"),
        (lambda m: m.fork("a", "b"), SequenceError, "4 of 5 tokens are committed"),
        (lambda m: m.fork("a", "a"), SequenceError, "'a' is open already"),
        (lambda m: m.truncate("a", 6), SequenceError, "of 5 tokens to 6"),
        (lambda m: m.truncate("a", True), SequenceError, "to True"),
        (lambda m: m.close("b"), SequenceError, "'b' is not open"),
    ],
)
def test_what_is_refused_changes_nothing(
    call: Callable[[HybridKVCacheManager], object], error: type[PagedKVError], message: str
) -> None:
    """Every mistake has an error of its own with the numbers in it."""
    manager = opened()
    before = state(manager)
    with pytest.raises(error, match=message):
        call(manager)
    assert state(manager) == before
    manager.check_invariants()


def test_not_now_changes_nothing() -> None:
    """No blocks left, or no row left."""
    manager = opened()
    assert manager.open("b", [9] * 6)
    before = state(manager)
    assert manager.open("c", [1]) is None
    assert not manager.append("a", 3) and not manager.step(["a", "b"], 2)
    manager.commit("a", [5])
    assert not manager.fork("a", "c")
    manager.truncate("a", 4)
    assert manager.counts == (2, 0, 10)
    assert before != state(manager)


def test_nothing_is_written_into_a_block_that_awaits_its_copy() -> None:
    """The copy would overwrite it."""
    manager = opened()
    manager.commit("a", [5])
    assert manager.fork("a", "b") and manager.step(["a"])
    before = state(manager)
    with pytest.raises(SequenceError, match="awaits its copy"):
        manager.commit("a", [6])
    with pytest.raises(SequenceError, match="awaits its copy"):
        manager.commit_step(["a"], [6])
    assert state(manager) == before
    manager.copies.take()
    manager.commit("a", [6])


@pytest.mark.parametrize("failing", ["blocks", "keys"])
@pytest.mark.parametrize("name", ["open", "fork"])
def test_an_open_or_fork_that_fails_in_the_middle_is_undone(
    name: str, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory while extra keys or blocks are taken."""
    manager = HybridKVCacheManager([FULL, LOCAL], 12, 2, max_seqs=2, max_seq_len=20)
    namespace = Namespace(salt="s")
    assert manager.open("a", [1, 2, 3], namespace=namespace)
    manager.commit("a", [1, 2, 3])
    before = state(manager)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        if failing == "blocks":
            patch.setattr(manager._tree.pool, "acquire", fail)
        else:
            patch.setattr(manager._tree.extra_keys, "take", fail)
        with pytest.raises(MemoryError):
            if name == "open":
                manager.open("b", [1, 2, 9], namespace=namespace)
            else:
                manager.fork("a", "b")
    assert state(manager) == before
    manager.check_invariants()


@pytest.mark.parametrize(
    "sabotage",
    [
        lambda m: m._tree.block_of.__setitem__((0, 1), 0),
        lambda m: m._tree.node_of.__setitem__(1, 2),
        lambda m: m._tree.group_of.__setitem__(1, 1),
        lambda m: m._tree.children.__setitem__(1, 0),
        lambda m: m._tree.pool.ref_count.__setitem__(1, 2),
        lambda m: m._tree.nodes.ref_count.__setitem__(1, 2),
        lambda m: m._tree.policy.discard(m._tree.policy.ids()[:1]),
        lambda m: m._tree.policy.push(m._tree.policy.ids()[:1]),
        lambda m: m._tree.index.tokens.__setitem__((1, 0), 9),
        lambda m: m._rows.seq_len.__setitem__(m._table.row("a"), 4),
        lambda m: m._rows.committed.__setitem__(m._table.row("a"), 3),
        lambda m: m._rows.blocks.__setitem__((1, m._table.row("a"), 0), NULL_BLOCK),
        lambda m: m._rows.nodes.__setitem__((m._table.row("a"), 1), 0),
        lambda m: m._rows.start.__setitem__((1, m._table.row("a")), 1),
    ],
)
def test_check_invariants_finds_every_contradiction(sabotage: Callable[[HybridKVCacheManager], None]) -> None:
    """One array changed behind the manager's back."""
    manager = opened()
    run(manager, "b", [1, 2, 3, 9])
    run(manager, "c", [8, 8])
    manager.check_invariants()
    sabotage(manager)
    with pytest.raises(AssertionError, match="broken invariant"):
        manager.check_invariants()
