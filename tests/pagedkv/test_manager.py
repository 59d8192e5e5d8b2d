"""The manager as a user meets it: reuse, copy-on-write, refusals, statistics, misuse that changes nothing."""

import ast
import copy
import importlib
import inspect
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv
from pagedkv import (
    KVCacheManager,
    KVCacheSpec,
    Media,
    Namespace,
    NeverFits,
    Opened,
    PagedKVError,
    SequenceError,
)
from pagedkv.block_tables import SeqId
from pagedkv.stats import CacheBytes
from pagedkv.testing import ShadowStorage, random_walk, snapshot

SIZE = 4


class Engine:
    """A manager and the tokens its slots would hold, written and copied as an engine writes and copies."""

    def __init__(self, num_blocks: int = 16, block_size: int = SIZE, **options: Any) -> None:
        self.manager = KVCacheManager(num_blocks, block_size, **options)
        self.shadow = ShadowStorage(num_blocks, block_size)

    def open(self, seq_id: SeqId, tokens: Sequence[int], **options: Any) -> int:
        """Open, prefill and commit a prompt; returns how many tokens were cached."""
        opened = self.manager.open(seq_id, tokens, **options)
        assert opened is not None
        hit = opened.num_cached_tokens
        self.shadow.write(self.manager.tables.slots(seq_id, hit), tokens[hit:])
        self.manager.commit(seq_id, tokens[hit:])
        self.manager.check_invariants()
        return hit

    def grow(
        self,
        seq_id: SeqId,
        tokens: Sequence[int],
        accepted: int | None = None,
        media: Sequence[Media] = (),
    ) -> None:
        """Append drafts, write them, commit the accepted ones (default: all) and reject the others."""
        start = self.manager.tables.num_tokens(seq_id)
        assert self.manager.append(seq_id, len(tokens)) is True
        self.shadow.copy(self.manager)
        self.shadow.write(self.manager.tables.slots(seq_id, start), tokens)
        self.manager.commit(seq_id, tokens[:accepted], media=media)
        self.manager.truncate(seq_id, self.manager.tables.num_committed(seq_id))
        self.manager.check_invariants()

    def read(self, seq_id: SeqId) -> list[int]:
        return self.shadow.read(self.manager, seq_id)

    def blocks(self, seq_id: SeqId) -> list[int]:
        found: list[int] = self.manager.tables.block_ids(seq_id).tolist()
        return found

    def hit(self, tokens: Sequence[int], **options: Any) -> int:
        """How many tokens an ``open`` would find, every full block counted."""
        opened = copy.deepcopy(self.manager).open("probe", tokens, max_cached_tokens=len(tokens), **options)
        assert opened is not None
        return opened.num_cached_tokens


def take_copies(manager: KVCacheManager) -> list[tuple[int, int]]:
    copies = manager.copies.take()
    assert copies.src.dtype == copies.dst.dtype == np.int32
    return list(zip(copies.src.tolist(), copies.dst.tolist(), strict=True))


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


# -- reuse


def test_a_closed_prompt_is_hit_again_and_reads_back() -> None:
    """Open, commit, close, open: the full blocks come from the cache and hold the same tokens."""
    engine = Engine()
    assert engine.open("a", tokens(10)) == 0
    blocks = engine.blocks("a")
    engine.manager.close("a")
    assert engine.manager.stats().cached_blocks == 2
    assert engine.open("b", tokens(10)) == 8
    assert engine.blocks("b")[:2] == blocks[:2]
    assert engine.read("b") == tokens(10)


def test_open_sequences_share_their_prefix() -> None:
    """Nothing has to be closed for its committed blocks to be shared."""
    engine = Engine()
    engine.open("a", tokens(9))
    assert engine.open("b", [*tokens(8), 99]) == 8
    assert engine.blocks("a")[:2] == engine.blocks("b")[:2]
    assert engine.blocks("a")[2] != engine.blocks("b")[2]
    assert (engine.read("a"), engine.read("b")) == (tokens(9), [*tokens(8), 99])


@pytest.mark.parametrize(
    ("limit", "cached"), [(None, 4), (0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8), (1_000, 8)]
)
def test_a_hit_leaves_at_least_one_token_unless_told_otherwise(limit: int | None, cached: int) -> None:
    """A prompt of two whole cached blocks gets one by default, and ``max_cached_tokens`` at most."""
    engine = Engine()
    engine.open("a", tokens(8))
    assert engine.manager.open("b", tokens(8), max_cached_tokens=limit) == Opened(8, cached)
    assert engine.manager.tables.num_committed("b") == cached


@pytest.mark.parametrize("at", range(9))
def test_one_other_token_stops_the_hit_at_its_block(at: int) -> None:
    """Changing any single token of the prompt hits only the blocks before it."""
    engine = Engine()
    engine.open("a", tokens(9))
    changed = tokens(9)
    changed[at] += 1_000
    assert engine.hit(changed) == at // SIZE * SIZE
    assert engine.hit(tokens(9)) == 8


def test_nothing_uncommitted_is_shared() -> None:
    """Slots reserved, even filled blocks, are found by nobody before they are committed."""
    engine = Engine()
    engine.manager.open("a", tokens(12))
    assert engine.hit(tokens(12)) == 0
    engine.manager.commit("a", tokens(7))
    assert engine.hit(tokens(12)) == 4
    engine.manager.commit("a", tokens(5, 7))
    assert engine.hit(tokens(12)) == 12
    engine.manager.open("b", tokens(4, 500))
    engine.manager.close("b")
    assert engine.hit(tokens(4, 500)) == 0
    assert engine.manager.stats().cached_blocks == 0


def test_rejected_drafts_never_hit() -> None:
    """Drafts fill whole blocks; what is rejected is not found, what is accepted is."""
    engine = Engine()
    engine.open("a", tokens(6))
    drafts = tokens(8, 6)
    engine.grow("a", drafts, accepted=3)
    assert engine.hit(tokens(14)) == 8
    engine.grow("a", [70, 71, 72])
    assert engine.hit(tokens(14)) == 8
    assert engine.hit([*tokens(9), 70, 71, 72]) == 12
    assert engine.read("a") == [*tokens(9), 70, 71, 72]


def test_two_computing_the_same_prompt_merge_on_commit() -> None:
    """The one that commits later takes the indexed blocks and frees its own."""
    engine = Engine()
    for seq_id in ("a", "b"):
        assert engine.manager.open(seq_id, tokens(10)) == Opened(10, 0)
        engine.shadow.write(engine.manager.tables.slots(seq_id), tokens(10))
    assert engine.manager.stats().active_blocks == 6
    engine.manager.commit("a", tokens(10))
    engine.manager.commit("b", tokens(5))
    assert engine.blocks("b")[:1] == engine.blocks("a")[:1]
    engine.manager.commit("b", tokens(5, 5))
    assert engine.blocks("b")[:2] == engine.blocks("a")[:2]
    assert engine.manager.stats().active_blocks == 4
    assert engine.read("b") == tokens(10)
    engine.manager.check_invariants()


def test_merging_revives_a_cached_block() -> None:
    """If the equal block is cached but held by nobody, the committing sequence holds it again."""
    engine = Engine()
    engine.manager.open("late", tokens(5))
    engine.open("a", tokens(5))
    engine.manager.close("a")
    engine.manager.commit("late", tokens(5))
    stats = engine.manager.stats()
    assert (stats.cached_blocks, stats.active_blocks) == (0, 2)
    engine.manager.check_invariants()


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    """``policy=None``: no hits, and a closed sequence leaves only free blocks."""
    engine = Engine(policy=None)
    engine.open("a", tokens(9), namespace=Namespace("t"), media=[Media(5, "cat")])
    assert engine.hit(tokens(9), namespace=Namespace("t"), media=[Media(5, "cat")]) == 0
    engine.manager.close("a")
    stats = engine.manager.stats()
    assert (stats.free_blocks, stats.cached_blocks, stats.indexed_blocks) == (16, 0, 0)


def test_eviction_takes_the_shortfall_from_the_end_of_the_oldest() -> None:
    """A closed sequence loses its deepest blocks first, as many as are missing and no more."""
    engine = Engine(num_blocks=6)
    engine.open("old", tokens(12))
    engine.manager.close("old")
    engine.open("new", tokens(8, 100))
    engine.manager.close("new")
    assert engine.manager.stats().cached_blocks == 5
    engine.open("x", tokens(12, 200))
    stats = engine.manager.stats()
    assert (stats.evicted_blocks, stats.free_blocks, stats.cached_blocks) == (2, 0, 3)
    assert engine.hit([*tokens(4), 999]) == 4
    engine.manager.close("x")
    assert (engine.hit(tokens(12)), engine.hit(tokens(8, 100))) == (4, 8)


def test_using_a_prefix_makes_it_the_most_recent() -> None:
    """A hit moves its blocks to the safe end of the order."""
    engine = Engine(num_blocks=4)
    for seq_id, start in (("a", 0), ("b", 100)):
        engine.open(seq_id, tokens(8, start))
        engine.manager.close(seq_id)
    engine.open("again", tokens(8), max_cached_tokens=8)
    engine.manager.close("again")
    engine.open("x", tokens(8, 200))
    assert engine.manager.stats().evicted_blocks == 2
    engine.manager.close("x")
    assert (engine.hit(tokens(8)), engine.hit(tokens(8, 100))) == (8, 0)


def test_opening_never_evicts_its_own_hit() -> None:
    """The hit is held before the rest is allocated, even if it is the oldest content of a full pool."""
    engine = Engine(num_blocks=4)
    engine.open("a", tokens(16))
    engine.manager.close("a")
    prompt = [*tokens(8), *tokens(8, 500)]
    assert engine.open("b", prompt) == 8
    assert engine.read("b") == prompt
    assert engine.manager.stats().evicted_blocks == 2


# -- copy-on-write


def forked(**options: Any) -> Engine:
    """``a`` and its fork ``b``: six tokens, block 1 full, block 2 a shared tail."""
    engine = Engine(**options)
    engine.open("a", tokens(6))
    assert engine.manager.fork("a", "b")
    assert (engine.blocks("a"), engine.blocks("b")) == ([1, 2], [1, 2])
    return engine


@pytest.mark.parametrize(("grower", "other"), [("a", "b"), ("b", "a")])
def test_whoever_grows_first_copies_the_shared_tail(grower: str, other: str) -> None:
    """The grower gets a new tail with the old content; the other keeps the original and copies nothing."""
    engine = forked()
    engine.manager.append(grower)
    assert (engine.blocks(grower), engine.blocks(other)) == ([1, 3], [1, 2])
    assert take_copies(engine.manager) == [(2, 3)]
    engine.manager.append(other)
    assert engine.blocks(other) == [1, 2]
    assert take_copies(engine.manager) == []
    assert engine.manager.stats().copied_blocks == 1


def test_forks_go_their_own_ways() -> None:
    """After the fork each side reads its own tokens, and both still share the full block."""
    engine = forked()
    engine.grow("b", [60, 70, 80])
    engine.grow("a", [61, 71])
    engine.grow("b", [90])
    assert engine.read("a") == [*tokens(6), 61, 71]
    assert engine.read("b") == [*tokens(6), 60, 70, 80, 90]
    assert engine.blocks("a")[0] == engine.blocks("b")[0]


def test_a_fork_of_whole_blocks_copies_nothing() -> None:
    """Without a partial tail, growing allocates and copies not."""
    engine = Engine()
    engine.open("a", tokens(8))
    engine.manager.fork("a", "b")
    assert engine.manager.step(["a", "b"])
    assert take_copies(engine.manager) == []
    assert engine.manager.counts.active == 4


@pytest.mark.parametrize("siblings", [1, 2, 4])
def test_all_holders_growing_in_one_step_leave_the_original_with_the_last(siblings: int) -> None:
    """Of n holders, n - 1 copy, in the order of the batch, and the last one of it keeps the block."""
    engine = Engine()
    engine.open(0, tokens(6))
    for child in range(1, siblings + 1):
        engine.manager.fork(0, child)
    batch = [*range(1, siblings + 1), 0]
    assert engine.manager.step(batch)
    assert take_copies(engine.manager) == [(2, 3 + i) for i in range(siblings)]
    assert engine.blocks(0) == [1, 2]
    assert [engine.blocks(i)[1] for i in batch] == [*range(3, 3 + siblings), 2]
    newest = [engine.manager.tables.slots(i, 6).tolist() for i in batch]
    assert newest == [[engine.blocks(i)[1] * SIZE + 2] for i in batch]
    engine.manager.check_invariants()


def test_a_holder_that_does_not_grow_makes_all_others_copy() -> None:
    """The original stays with the one outside the batch."""
    engine = forked()
    engine.manager.fork("a", "idle")
    engine.manager.step(["a", "b"])
    assert take_copies(engine.manager) == [(2, 3), (2, 4)]
    assert engine.blocks("idle") == [1, 2]


def test_a_copy_of_a_pending_copy_reads_the_first_source() -> None:
    """a to b to c before anything ran: both copies read a's block, so one batch of copies is right."""
    engine = forked()
    engine.manager.append("b")
    engine.manager.truncate("b", 6)
    engine.manager.fork("b", "c")
    engine.manager.append("c")
    copies = copy.deepcopy(engine.manager)
    assert take_copies(copies) == [(2, 3), (2, 4)]
    engine.shadow.copy(engine.manager)
    assert [engine.read(i) for i in "abc"] == [tokens(6)] * 3


def test_copies_into_freed_blocks_are_dropped() -> None:
    """Once the grower closes or takes back the block, its copy must not overwrite the next owner."""
    engine = forked()
    engine.manager.append("b")
    engine.manager.close("b")
    assert take_copies(engine.manager) == []
    engine.manager.fork("a", "c")
    engine.manager.append("c")
    engine.manager.truncate("c", 4)
    engine.open("d", tokens(3, 900))
    assert engine.blocks("d") == [3]
    engine.shadow.copy(engine.manager)
    assert engine.read("d") == tokens(3, 900)


def test_a_copied_tail_merges_once_its_copy_has_run() -> None:
    """A copied tail that turns out equal to an indexed block is freed when it is committed."""
    engine = forked()
    engine.grow("a", [6, 7])
    engine.manager.fork("a", "c")
    engine.manager.truncate("c", 6)
    engine.manager.append("c", 2)
    assert engine.blocks("c")[1] != engine.blocks("a")[1]
    engine.shadow.copy(engine.manager)
    engine.shadow.write(engine.manager.tables.slots("c", 6), [6, 7])
    engine.manager.commit("c", [6, 7])
    assert engine.blocks("c") == engine.blocks("a")
    assert engine.read("c") == engine.read("a") == tokens(8)


COMMITS: dict[str, Callable[[KVCacheManager], object]] = {
    "commit": lambda m: m.commit("b", [60]),
    "commit_a_whole_block": lambda m: m.commit("b", [60, 70]),
    "commit_step": lambda m: m.commit_step(["b"], [60]),
    "commit_step_behind_another": lambda m: m.commit_step(["a", "b"], [61, 60]),
}


@pytest.mark.parametrize("call", COMMITS)
def test_a_commit_into_a_block_whose_copy_is_pending_is_refused(call: str) -> None:
    """What was written before the copy ran would be lost: an error first, and then the same call works."""
    engine = forked()
    engine.manager.step(["b", "a"])
    engine.manager.append("b")
    before = snapshot(engine.manager)
    with pytest.raises(SequenceError, match="block 3 awaits its copy from block 2"):
        COMMITS[call](engine.manager)
    assert snapshot(engine.manager) == before
    engine.shadow.copy(engine.manager)
    COMMITS[call](engine.manager)
    assert engine.manager.tables.num_committed("b") > 6
    engine.manager.check_invariants()


def test_the_source_of_a_pending_copy_may_be_committed_into() -> None:
    """Only the destination waits: new tokens of the source lie behind what is copied."""
    engine = forked()
    engine.manager.step(["b", "a"], 2)
    engine.manager.commit("a", [6, 7])
    assert engine.hit(tokens(8)) == 8
    assert engine.manager.copies.pending.dst.tolist() == [3]


@pytest.mark.parametrize("call", COMMITS)
def test_a_commit_into_a_block_whose_copy_is_pending_is_refused_without_prefix_caching(call: str) -> None:
    """The token would be lost for a fork of the fork all the same."""
    engine = forked(policy=None)
    engine.manager.step(["b", "a"])
    engine.manager.append("b")
    before = snapshot(engine.manager)
    with pytest.raises(SequenceError, match="block 3 awaits its copy from block 2"):
        COMMITS[call](engine.manager)
    assert snapshot(engine.manager) == before


def test_no_fork_misses_a_token_written_after_the_copies_ran() -> None:
    """Without prefix caching nothing has to be committed before a fork; copies then wait for the write."""
    engine = forked(policy=None)
    engine.manager.append("b")
    forked_now = True
    try:
        engine.manager.fork("b", "c")
    except SequenceError:
        forked_now = False
    if forked_now:
        engine.manager.append("c")
    engine.shadow.copy(engine.manager)
    engine.shadow.write(engine.manager.tables.slots("b", 6), [60])
    if not forked_now:
        engine.manager.fork("b", "c")
        engine.manager.append("c")
        engine.shadow.copy(engine.manager)
    engine.shadow.write(engine.manager.tables.slots("c", 7), [61])
    engine.manager.commit("c", [60, 61])
    assert engine.read("c") == [*tokens(6), 60, 61]


def test_a_token_committed_after_the_copies_reaches_a_fork_of_a_fork() -> None:
    """Copy, write, commit, fork and copy again: the second copy has the token that the first had not."""
    engine = forked()
    engine.grow("b", [60])
    engine.manager.fork("b", "c")
    engine.grow("c", [61])
    assert engine.read("c") == [*tokens(6), 60, 61]
    assert engine.read("b") == [*tokens(6), 60]


def test_taking_the_copies_empties_the_list_and_looking_does_not() -> None:
    """``pending_copies`` shows the same until ``take_copies`` hands them over, once."""
    engine = forked()
    assert engine.manager.copies.pending.src.dtype == np.int32
    engine.manager.append("b")
    before = snapshot(engine.manager)
    for _ in range(2):
        pending = engine.manager.copies.pending
        assert (pending.src.tolist(), pending.dst.tolist()) == ([2], [3])
    pending.dst[:] = 9
    assert snapshot(engine.manager) == before
    assert take_copies(engine.manager) == [(2, 3)]
    assert take_copies(engine.manager) == []
    assert engine.manager.copies.pending.src.tolist() == []


# -- growing from within a cached block


def test_the_only_holder_of_a_cached_leaf_writes_it_in_place() -> None:
    """Nothing is copied; the old content leaves the cache, and hits of it end before that block."""
    engine = Engine()
    engine.open("a", tokens(8))
    blocks = engine.blocks("a")
    engine.manager.truncate("a", 6)
    assert engine.hit(tokens(8)) == 8
    engine.grow("a", [60, 70, 80])
    assert engine.blocks("a")[:2] == blocks
    assert engine.manager.stats().copied_blocks == 0
    assert engine.read("a") == [*tokens(6), 60, 70, 80]
    assert engine.open("original", tokens(9)) == 4
    assert engine.open("changed", [*tokens(6), 60, 70, 999]) == 8
    assert engine.read("original") == tokens(9)
    assert engine.read("changed") == [*tokens(6), 60, 70, 999]


def test_room_for_nothing_takes_nothing_from_the_cache() -> None:
    """Cutting alone, or growing by no token, leaves the block to be hit."""
    engine = Engine()
    engine.open("a", tokens(8))
    engine.manager.truncate("a", 6)
    engine.manager.append("a", 0)
    engine.manager.step(["a"], 0)
    assert engine.hit(tokens(8)) == 8


def test_a_cached_block_that_somebody_else_holds_is_copied() -> None:
    """The other sequence, and later ones, read the old content."""
    engine = Engine()
    engine.open("a", tokens(8))
    assert engine.open("b", tokens(9)) == 8
    engine.manager.truncate("a", 6)
    engine.grow("a", [60, 70, 80])
    assert engine.manager.stats().copied_blocks == 1
    assert engine.open("original", tokens(9)) == 8
    assert [engine.read(i) for i in ("b", "original")] == [tokens(9)] * 2
    assert engine.read("a") == [*tokens(6), 60, 70, 80]


@pytest.mark.parametrize("cut", [5, 6, 7])
def test_a_cached_block_with_cached_children_is_copied(cut: int) -> None:
    """The children would be lost with their parent: they stay, and are still hit."""
    engine = Engine()
    engine.open("a", tokens(12))
    engine.manager.truncate("a", cut)
    engine.grow("a", tokens(5, 60))
    assert engine.manager.stats().copied_blocks == 1
    assert engine.open("original", tokens(13)) == 12
    assert engine.read("original") == tokens(13)
    assert engine.read("a") == [*tokens(cut), *tokens(5, 60)]


def test_a_block_whose_children_were_evicted_is_written_in_place_again() -> None:
    """What matters is what is cached now."""
    engine = Engine(num_blocks=3)
    engine.open("a", tokens(12))
    engine.manager.truncate("a", 6)
    engine.open("x", [99])
    assert engine.manager.stats().evicted_blocks == 1
    engine.grow("a", [60])
    assert engine.manager.stats().copied_blocks == 0
    engine.manager.close("x")
    assert (engine.hit([*tokens(6), 60]), engine.read("a")) == (4, [*tokens(6), 60])


def test_of_all_holders_cut_into_a_cached_leaf_the_last_writes_it_in_place() -> None:
    """Two sequences cut into one block: one copies, the other keeps and un-indexes it, in one step."""
    engine = Engine()
    engine.open("a", tokens(8))
    engine.open("b", tokens(8), max_cached_tokens=8)
    for seq_id in "ab":
        engine.manager.truncate(seq_id, 6)
    assert engine.manager.step(["a", "b"])
    assert (engine.blocks("a"), engine.blocks("b")) == ([1, 3], [1, 2])
    assert take_copies(engine.manager) == [(2, 3)]
    assert engine.hit(tokens(8)) == 4
    engine.manager.check_invariants()


def test_content_written_in_place_takes_its_extra_keys_from_the_cache() -> None:
    """A block with a media key leaves no user of that key behind."""
    engine = Engine()
    engine.open("a", [7] * 8, media=[Media(6, "cat")])
    engine.manager.truncate("a", 5)
    assert len(engine.manager._cache.extra_keys) == 1
    engine.grow("a", [7, 8, 9])
    assert len(engine.manager._cache.extra_keys) == 0
    assert (engine.hit([7] * 8, media=[Media(6, "cat")]), engine.hit([*[7] * 6, 8, 9])) == (4, 8)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("step", [True, False])
def test_the_only_sequence_can_always_grow_to_its_greatest_length(num_blocks: int, step: bool) -> None:
    """Cut anywhere, and growing token by token: "not now" would never end when nobody else can close."""
    length = num_blocks * SIZE
    for cut in range(length + 1):
        engine = Engine(num_blocks=num_blocks)
        engine.open("a", tokens(length))
        engine.manager.truncate("a", cut)
        for token in range(length - cut):
            assert engine.manager.step(["a"]) if step else engine.manager.append("a")
            engine.shadow.copy(engine.manager)
            engine.shadow.write(engine.manager.tables.slots("a", cut + token), [token])
            engine.manager.commit("a", [token])
            engine.manager.check_invariants()
        assert engine.read("a") == [*tokens(cut), *tokens(length - cut)]


@pytest.mark.parametrize("num_blocks", [2, 3, 8])
def test_the_only_sequence_can_always_grow_to_its_greatest_length_at_once(num_blocks: int) -> None:
    """As above in one call, over a tail that cached children build on."""
    engine = Engine(num_blocks=num_blocks)
    engine.open("a", tokens(num_blocks * SIZE))
    engine.manager.truncate("a", 3)
    assert engine.manager.append("a", num_blocks * SIZE - 3)


def test_cutting_and_regrowing_the_same_tokens_comes_back_to_the_cached_block() -> None:
    """Written in place and committed again, the block is found again."""
    engine = Engine()
    engine.open("a", tokens(8))
    blocks = engine.blocks("a")
    engine.manager.truncate("a", 5)
    engine.grow("a", tokens(3, 5))
    assert engine.blocks("a") == blocks
    assert engine.read("a") == tokens(8)
    assert engine.hit(tokens(8)) == 8


def test_truncate_to_nothing_and_grow_again() -> None:
    """An empty sequence is open, holds no block, and can start over."""
    engine = Engine()
    engine.open("a", tokens(8))
    engine.manager.truncate("a", 0)
    assert engine.blocks("a") == []
    assert engine.manager.stats().cached_blocks == 2
    engine.grow("a", tokens(5, 40))
    assert engine.read("a") == tokens(5, 40)
    assert engine.hit(tokens(8)) == 8


def test_a_fork_shares_nothing_of_its_future() -> None:
    """Commits and cuts of the child leave the parent alone."""
    engine = forked()
    engine.grow("b", tokens(8, 60))
    engine.manager.truncate("b", 1)
    engine.manager.close("b")
    assert (engine.read("a"), engine.manager.tables.num_committed("a")) == (tokens(6), 6)
    engine.manager.check_invariants()


# -- namespaces and media

NAMESPACES = [
    None,
    Namespace(salt="a"),
    Namespace(salt="b"),
    Namespace(adapter="a"),
    Namespace(adapter="a", adapter_version=1),
    Namespace(weights="a"),
    Namespace(salt="a", adapter="b"),
    Namespace(salt="ab"),
    Namespace(salt="b", adapter="a"),
    Namespace(salt="a", weights="b"),
]


def test_namespaces_that_differ_in_anything_never_share() -> None:
    """Salt, adapter, adapter version and weights keep apart what equal namespaces share."""
    engine = Engine(num_blocks=64)
    for number, namespace in enumerate(NAMESPACES):
        assert engine.open(number, tokens(9), namespace=namespace) == 0
    for number, namespace in enumerate(NAMESPACES):
        equal = None if namespace is None else Namespace(**vars(namespace))
        assert engine.open(100 + number, tokens(9), namespace=equal) == 8
        assert engine.blocks(100 + number)[:2] == engine.blocks(number)[:2]


def test_the_default_namespace_is_no_namespace() -> None:
    """``Namespace()`` and ``None`` mean the same."""
    engine = Engine()
    engine.open("a", tokens(5), namespace=Namespace())
    assert engine.open("b", tokens(5)) == 4


@pytest.mark.parametrize("offset", range(12))
def test_other_media_share_up_to_the_block_of_the_offset(offset: int) -> None:
    """Equal placeholder tokens with another content id, or none, hit only the blocks before it."""
    engine = Engine()
    placeholders = [7] * 12
    engine.open("cat", placeholders, media=[Media(offset, "cat")])
    before = offset // SIZE * SIZE
    assert engine.hit(placeholders, media=[Media(offset, "cat")]) == 12
    assert engine.hit(placeholders, media=[Media(offset, "dog")]) == before
    assert engine.hit(placeholders) == before
    moved = offset + 1 if offset < 11 else offset - 1
    assert engine.hit(placeholders, media=[Media(moved, "cat")]) == min(before, moved // SIZE * SIZE)


def test_the_order_in_which_media_are_named_does_not_matter() -> None:
    """Media of one prompt are a set of places, and any iterable will do."""
    engine = Engine()
    items = [Media(1, "cat"), Media(3, "dog"), Media(9, "owl")]
    engine.open("a", [7] * 12, media=items)
    assert engine.hit([7] * 12, media=reversed(items)) == 12
    assert engine.hit([7] * 12, media=[Media(1, "dog"), Media(3, "cat"), Media(9, "owl")]) == 0


@pytest.mark.parametrize(("length", "left"), [(10, (6, 9)), (9, (6,)), (7, (6,)), (6, ()), (4, ())])
def test_truncate_drops_the_media_beyond_the_cut(length: int, left: tuple[int, ...]) -> None:
    """Grown again with text, the sequence equals one that never had the media that were cut off."""
    engine = Engine()
    prompt = [7] * 12
    engine.open("a", prompt, media=[Media(6, "cat"), Media(9, "dog")])
    engine.manager.truncate("a", length)
    engine.grow("a", tokens(12 - length, 100))
    text = [*prompt[:length], *tokens(12 - length, 100)]
    names = {6: "cat", 9: "dog"}
    assert engine.hit(text, media=[Media(i, names[i]) for i in left]) == 12
    assert engine.read("a") == text


def test_a_fork_inherits_namespace_and_media() -> None:
    """What the child fills is found under the parent's namespace and media, and under no other."""
    engine = Engine()
    namespace, media = Namespace("tenant"), [Media(6, "cat")]
    engine.open("a", [7] * 7, namespace=namespace, media=media)
    engine.manager.fork("a", "b")
    engine.manager.close("a")
    engine.grow("b", [8])
    assert engine.hit([*[7] * 7, 8], namespace=namespace, media=media) == 8
    assert engine.hit([*[7] * 7, 8], namespace=namespace) == 4
    assert engine.hit([*[7] * 7, 8], media=media) == 0


def test_extra_keys_do_not_leak() -> None:
    """When every sequence is closed and every block evicted, no key is left."""
    engine = Engine(num_blocks=24)
    for number, namespace in enumerate(NAMESPACES):
        media = [Media(5, "cat"), Media(10, f"image {number}")]
        engine.open("a", tokens(12), namespace=namespace, media=media)
        engine.manager.fork("a", "b")
        engine.manager.truncate("a", 10)
        engine.manager.open("c", tokens(12), namespace=namespace, media=media)
        for seq_id in "cba":
            engine.manager.close(seq_id)
    assert len(engine.manager._cache.extra_keys) > 0
    engine.open("everything", tokens(24 * SIZE, 5_000))
    assert len(engine.manager._cache.extra_keys) == len(engine.manager._seqs._extra) == 0


# -- media that come with later turns


@pytest.mark.parametrize("offset", range(6, 11))
def test_an_image_of_a_later_turn_is_found_by_whoever_opens_with_it(offset: int) -> None:
    """Given to ``commit``, it keeps apart what ``open`` would keep apart, and shares what ``open`` shares."""
    engine = Engine()
    first, later = Media(1, "cat"), Media(offset, "dog")
    engine.open("chat", [7] * 6, media=[first])
    engine.grow("chat", [7] * 5, media=[later])
    engine.grow("chat", [7])
    before = offset // SIZE * SIZE
    assert engine.hit([7] * 12, media=[first, later]) == 12
    assert engine.hit([7] * 12, media=[later, first]) == 12
    assert engine.hit([7] * 12, media=[first]) == before
    assert engine.hit([7] * 12, media=[first, Media(offset, "owl")]) == before
    assert engine.hit([7] * 12, media=[later]) == 0


def test_turns_with_images_reuse_each_other_like_one_long_prompt() -> None:
    """Turn by turn, and opened afresh with everything so far, as a stateless server does."""
    rng = random.Random(5)
    engine = Engine(num_blocks=64)
    engine.open("chat", [7])
    said: list[int] = [7]
    media: list[Media] = []
    for turn in range(8):
        new = [7] * rng.randint(3, 9)
        items = [Media(len(said) + rng.randrange(3), f"image {turn}")]
        engine.grow("chat", new, media=items)
        said, media = said + new, media + items
        assert engine.hit(said, media=media) == len(said) // SIZE * SIZE
        assert engine.open(turn, [*said, 1], media=media) == len(said) // SIZE * SIZE
        assert engine.read(turn) == [*said, 1]
        assert engine.hit(said, media=[*media[:-1], Media(media[-1].offset, "else")]) <= media[-1].offset
    for seq_id in engine.manager.tables.seq_ids:
        engine.manager.close(seq_id)
    assert len(engine.manager._seqs._extra) == 0


def test_drafted_media_count_only_when_committed() -> None:
    """Rejected placeholders leave no key behind; another image may follow in their place."""
    engine = Engine()
    engine.open("a", [7] * 5)
    engine.grow("a", [7] * 3, accepted=1)
    engine.grow("a", [7] * 2, media=[Media(6, "dog")])
    assert engine.hit([7] * 8, media=[Media(6, "dog")]) == 8
    assert engine.hit([7] * 8) == 4
    engine.manager.truncate("a", 6)
    engine.grow("a", [7] * 2, media=[Media(6, "cat")])
    assert (engine.hit([7] * 8, media=[Media(6, "cat")]), engine.hit([7] * 8, media=[Media(6, "dog")])) == (
        8,
        4,
    )


def test_media_of_a_fork_are_its_own() -> None:
    """An image given to one of two forks is no image of the other."""
    engine = Engine()
    engine.open("a", [7] * 6)
    engine.manager.fork("a", "b")
    engine.grow("b", [7] * 2, media=[Media(7, "dog")])
    engine.grow("a", [7] * 2)
    assert engine.blocks("a")[1] != engine.blocks("b")[1]
    assert engine.hit([7] * 8) == engine.hit([7] * 8, media=[Media(7, "dog")]) == 8


def test_media_named_twice_are_the_same_media() -> None:
    """In one call, or in ``open`` and again in ``commit``: a set of places."""
    engine = Engine()
    engine.manager.open("a", [7] * 8, media=[Media(5, "cat"), Media(5, "cat")])
    engine.manager.commit("a", [7] * 8, media=[Media(5, "cat")])
    assert engine.hit([7] * 8, media=[Media(5, "cat")]) == 8


def test_media_may_be_given_with_a_chunk_of_a_prompt_that_has_media_further_on() -> None:
    """What ``open`` was told about the rest of the prompt stays true."""
    engine = Engine()
    engine.manager.open("a", [7] * 12, media=[Media(9, "cat")])
    engine.manager.commit("a", [7] * 4, media=[Media(2, "dog")])
    engine.manager.commit("a", [7] * 8)
    assert engine.hit([7] * 12, media=[Media(2, "dog"), Media(9, "cat")]) == 12


# -- one token of many sequences


def test_commit_step_makes_full_blocks_findable_and_merges_equal_ones() -> None:
    """Two sequences that say the same end up in one block, a third in its own; others wait."""
    engine = Engine()
    for seq_id, prompt in (("a", tokens(7)), ("b", tokens(7)), ("c", tokens(7, 50)), ("d", tokens(5, 80))):
        engine.open(seq_id, prompt)
    assert engine.manager.step(list("abcd"))
    for seq_id, token in zip("abcd", [7, 7, 57, 85], strict=True):
        engine.shadow.write(engine.manager.tables.slots(seq_id)[-1:], [token])
    engine.manager.commit_step(list("abcd"), np.array([7, 7, 57, 85], np.int16))
    assert engine.blocks("a") == engine.blocks("b")
    assert (engine.hit(tokens(8)), engine.hit(tokens(8, 50)), engine.hit(tokens(6, 80))) == (8, 8, 4)
    assert [engine.manager.tables.num_committed(i) for i in "abcd"] == [8, 8, 8, 6]
    assert [engine.read(i) for i in "abcd"] == [tokens(8), tokens(8), tokens(8, 50), tokens(6, 80)]
    engine.manager.check_invariants()


def test_commit_step_of_nobody_changes_nothing() -> None:
    """An empty batch is fine."""
    manager = busy()
    before = snapshot(manager)
    manager.commit_step([], [])
    assert snapshot(manager) == before


# -- not now, and never


def crowded() -> KVCacheManager:
    """Six blocks: ``a`` holds three, ``b`` one, two are cached."""
    manager = KVCacheManager(6, SIZE, max_seqs=3)
    for seq_id, count, start in (("gone", 8, 500), ("a", 12, 0), ("b", 4, 100)):
        manager.open(seq_id, tokens(count, start))
        manager.commit(seq_id, tokens(count, start))
        if seq_id == "gone":
            manager.close(seq_id)
    assert manager.stats().cached_blocks == 2
    return manager


NOT_NOW: dict[str, Callable[[KVCacheManager], object]] = {
    "open": lambda m: m.open("c", tokens(9, 700)),
    "open_with_a_hit_among_the_cached": lambda m: m.open("c", tokens(12, 500)),
    "append": lambda m: m.append("a", 9),
    "step": lambda m: m.step(["a", "b"], 5),
    "lookup": lambda m: m.lookup(tokens(4, 700), 5).fits,
}


@pytest.mark.parametrize("call", NOT_NOW)
def test_not_now_is_a_value_and_changes_nothing(call: str) -> None:
    """What does not fit is None or False; nothing is evicted, no recency and no counter moves."""
    manager = crowded()
    before = snapshot(manager)
    assert NOT_NOW[call](manager) is (None if call.startswith("open") else False)
    assert snapshot(manager) == before
    manager.check_invariants()


def test_max_seqs_is_not_now() -> None:
    """With every row taken ``open`` is None, ``fork`` and ``lookup`` are False, and nothing changes."""
    manager = crowded()
    manager.open("c", [])
    before = snapshot(manager)
    assert manager.open("d", []) is None
    assert manager.fork("a", "d") is False
    assert manager.lookup([], 0).fits is False
    assert snapshot(manager) == before
    manager.close("c")
    assert manager.open("d", []) == Opened(0, 0)


def test_what_was_refused_fits_once_others_have_closed() -> None:
    """Not now means later."""
    manager = crowded()
    assert manager.open("c", tokens(9, 700)) is None
    manager.close("a")
    assert manager.open("c", tokens(9, 700)) == Opened(9, 0)


NEVER: dict[str, tuple[Callable[[KVCacheManager], object], str]] = {
    "open": (lambda m: m.open("c", tokens(25)), "25 tokens can never fit: .* at most 24"),
    "append": (lambda m: m.append("a", 13), "25 tokens can never fit: .* at most 24"),
    "append_much": (lambda m: m.append("a", 2**40), f"{2**40 + 12} tokens can never fit"),
    "step": (lambda m: m.step(["b", "a"], 13), "25 tokens can never fit: .* at most 24"),
    "lookup": (lambda m: m.lookup(tokens(9), 16).fits, "25 tokens can never fit: .* at most 24"),
    "lookup_much": (lambda m: m.lookup(tokens(9), 2**70).fits, f"{2**70 + 9} tokens can never fit"),
}


@pytest.mark.parametrize("call", NEVER)
def test_what_can_never_fit_is_an_error_with_the_numbers(call: str) -> None:
    """Longer than a sequence can be: ``NeverFits``, and nothing changes."""
    manager = crowded()
    before = snapshot(manager)
    with pytest.raises(NeverFits, match=NEVER[call][1]):
        NEVER[call][0](manager)
    assert snapshot(manager) == before


def test_a_sequence_longer_than_the_pool_never_fits_even_below_max_seq_len() -> None:
    """The message says how many blocks are needed and how many there are."""
    manager = KVCacheManager(2, SIZE, max_seq_len=100)
    with pytest.raises(NeverFits, match="9 tokens can never fit: they need 3 of 2 blocks"):
        manager.open("a", tokens(9))
    with pytest.raises(NeverFits, match="101 tokens can never fit: a sequence holds at most 100"):
        manager.open("a", tokens(101))
    manager = KVCacheManager(10, SIZE, max_seq_len=7)
    with pytest.raises(NeverFits, match="8 tokens can never fit: a sequence holds at most 7"):
        manager.open("a", tokens(8))
    assert manager.open("a", tokens(7)) == Opened(7, 0)


def test_a_step_grows_all_or_none() -> None:
    """One block is available and two are needed: neither sequence grows."""
    manager = KVCacheManager(3, SIZE)
    for seq_id in ("a", "b"):
        manager.open(seq_id, tokens(4))
    before = snapshot(manager)
    assert manager.step(["a", "b"]) is False
    assert snapshot(manager) == before
    assert manager.step(["b"]) is True


def test_growing_by_nothing_always_fits() -> None:
    """No tokens: True, even with a full pool, a shared tail or an empty batch."""
    manager = KVCacheManager(2, SIZE)
    manager.open("a", tokens(6))
    manager.commit("a", tokens(6))
    manager.fork("a", "b")
    before = snapshot(manager)
    assert manager.append("a", 0) and manager.step(["a", "b"], 0) and manager.step([])
    assert snapshot(manager) == before


def test_the_watermark_leaves_room_for_growth() -> None:
    """``open`` keeps a share of the pool available; growth may use it."""
    manager = KVCacheManager(10, SIZE, watermark=0.3)
    assert manager.open("a", tokens(5 * SIZE)) is not None
    assert manager.open("b", tokens(3 * SIZE)) is None
    assert manager.lookup(tokens(3 * SIZE), 0).fits is False
    assert manager.open("b", tokens(2 * SIZE)) is not None
    assert manager.append("a", 3 * SIZE) is True
    assert manager.counts == (0, 0, 10)


def test_the_watermark_counts_idle_hits() -> None:
    """A cached block that is hit is no longer available, so it counts like a fresh one."""
    manager = KVCacheManager(4, SIZE, watermark=0.5)
    manager.open("gone", tokens(4 * SIZE))
    manager.commit("gone", tokens(4 * SIZE))
    manager.close("gone")
    manager.open("other", [900])
    assert manager.counts == (0, 3, 1)
    before = snapshot(manager)
    assert manager.open("c", tokens(2 * SIZE), max_cached_tokens=2 * SIZE) is None
    assert manager.lookup(tokens(SIZE + 1), 0).fits is False
    assert snapshot(manager) == before
    assert manager.open("c", tokens(SIZE), max_cached_tokens=SIZE) == Opened(SIZE, SIZE)


def test_the_watermark_does_not_bind_what_takes_nothing() -> None:
    """A prompt whose blocks are all held already, or that is empty, is opened at the watermark."""
    manager = KVCacheManager(4, SIZE, watermark=0.5)
    manager.open("a", tokens(3 * SIZE))
    manager.commit("a", tokens(3 * SIZE))
    assert manager.open("b", tokens(2 * SIZE), max_cached_tokens=2 * SIZE) is not None
    assert manager.open("c", []) is not None
    assert manager.open("d", [1]) is None


@pytest.mark.parametrize("watermark", [0.0, 0.5, 0.99])
def test_the_watermark_never_blocks_the_only_sequence(watermark: float) -> None:
    """A sequence that needs the whole pool gets it when nobody else is open."""
    manager = KVCacheManager(10, SIZE, watermark=watermark)
    assert manager.lookup(tokens(40), 0).fits
    assert manager.open("a", tokens(40)) is not None


@pytest.mark.parametrize("seed", range(6))
def test_lookup_agrees_with_open_and_growth(seed: int) -> None:
    """True exactly when opening would work, and then so does growing by ``max_new_tokens``."""
    rng = random.Random(seed)
    watermark = rng.choice([0.0, 0.25])
    seen = set()
    for walk in range(12):
        manager = random_walk(60, seed=100 * seed + walk, num_blocks=8, watermark=watermark)
        for _ in range(6):
            prompt = [rng.randrange(2) for _ in range(rng.randint(0, 23))]
            before = snapshot(manager)
            admitted = manager.lookup(prompt, 0).fits
            assert snapshot(manager) == before
            assert admitted == (copy.deepcopy(manager).open("new", prompt) is not None)
            growth = rng.randint(0, 24 - len(prompt))
            if manager.lookup(prompt, growth).fits:
                trial = copy.deepcopy(manager)
                assert trial.open("new", prompt) is not None and trial.append("new", growth)
            seen.add(admitted)
    assert seen == {True, False}


# -- statistics


def test_internal_fragmentation_by_a_worked_example() -> None:
    """37 tokens in blocks of 16 take 3 blocks of 48 slots, of which 11 are empty."""
    manager = KVCacheManager(8, 16)
    manager.open("a", tokens(37))
    stats = manager.stats()
    assert (stats.active_blocks, stats.used_slots, stats.num_seqs) == (3, 37, 1)
    assert stats.internal_fragmentation == pytest.approx(11 / 48)
    assert stats.usage == 3 / 8
    assert KVCacheManager(8, 16).stats().internal_fragmentation == 0.0


def test_slots_held_by_several_are_counted_once() -> None:
    """A fork uses nothing more; its own tokens and its copied tail are counted when it grows."""
    manager = KVCacheManager(8, 16)
    manager.open("a", tokens(37))
    manager.commit("a", tokens(37))
    manager.fork("a", "b")
    assert (manager.stats().active_blocks, manager.stats().used_slots) == (3, 37)
    manager.append("b", 3)
    assert (manager.stats().active_blocks, manager.stats().used_slots) == (4, 32 + 5 + 8)
    manager.open("c", tokens(33))
    assert (manager.stats().active_blocks, manager.stats().used_slots) == (5, 32 + 5 + 8 + 1)


def test_a_shared_tail_counts_up_to_its_longest_holder() -> None:
    """Cutting one of two holders of a private block leaves the slots of the other in use."""
    manager = KVCacheManager(8, 16, policy=None)
    manager.open("a", tokens(20))
    manager.fork("a", "b")
    manager.truncate("b", 18)
    assert manager.stats().used_slots == 20
    manager.truncate("a", 3)
    assert manager.stats().used_slots == 18
    manager.close("b")
    assert manager.stats().used_slots == 3


def test_bytes_by_a_worked_example() -> None:
    """2 layers x 2 heads x 8 dims x (K, V) x 2 bytes = 128 bytes per token, 2,048 per block of 16."""
    spec = KVCacheSpec.uniform(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16)
    manager = KVCacheManager(8, 16)
    manager.open("gone", tokens(20, 1_000))
    manager.commit("gone", tokens(20, 1_000))
    manager.close("gone")
    manager.open("a", tokens(37))
    assert manager.stats().bytes(spec) == CacheBytes(
        reserved=8 * 2_048, active=3 * 2_048, cached=1 * 2_048, used=37 * 128
    )


def test_bytes_of_a_spec_with_blocks_of_another_size_are_refused() -> None:
    """The numbers would be wrong by the ratio of the sizes."""
    spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16)
    with pytest.raises(PagedKVError, match="blocks of 16 tokens, the manager of 64"):
        KVCacheManager(8, 64).stats().bytes(spec)


def test_counts_are_those_of_the_snapshot() -> None:
    """``counts`` is the cheap part of ``stats``."""
    manager = crowded()
    stats = manager.stats()
    assert manager.counts == (stats.free_blocks, stats.cached_blocks, stats.active_blocks) == (0, 2, 4)


def test_both_hit_rates_by_a_worked_example() -> None:
    """Two prompts of 10 tokens: 8 of 20 tokens hit, and 2 of the 4 full blocks."""
    manager = KVCacheManager(8, SIZE)
    assert (manager.stats().token_hit_rate, manager.stats().block_hit_rate) == (0.0, 0.0)
    manager.open("a", tokens(10))
    manager.commit("a", tokens(10))
    manager.open("b", tokens(10))
    stats = manager.stats()
    assert (stats.num_opened, stats.queried_tokens, stats.hit_tokens) == (2, 20, 8)
    assert (stats.queried_blocks, stats.hit_blocks) == (4, 2)
    assert stats.token_hit_rate == pytest.approx(0.4)
    assert stats.block_hit_rate == pytest.approx(0.5)


def test_refused_opens_are_not_counted() -> None:
    """Retrying does not dilute the hit rate."""
    manager = crowded()
    before = manager.stats()
    for _ in range(5):
        assert manager.open("c", tokens(12, 700)) is None
    assert manager.stats() == before


def test_a_snapshot_is_frozen() -> None:
    """Later operations do not reach into statistics taken before."""
    manager = crowded()
    before = manager.stats()
    copied = copy.deepcopy(before)
    manager.close("a")
    assert before == copied != manager.stats()


# -- determinism and imports

SCRIPT = """
from pagedkv import KVCacheManager, Media, Namespace
manager = KVCacheManager(12, 2)
for i in range(40):
    name, prompt = f"seq {i}", [i % 3, 1, i % 2, 2, 3, i % 5, 4]
    space = Namespace(salt=f"tenant {i % 3}") if i % 2 else None
    manager.open(name, prompt, namespace=space, media=[Media(3, f"image {i % 2}")])
    if name in manager.tables:
        manager.commit(name, prompt[manager.tables.num_committed(name):])
        manager.fork(name, name + " child")
        batch = [s for s in (name, name + " child") if s in manager.tables]
        if manager.step(batch):
            print(batch, manager.copies.take())
            manager.commit_step(batch, [i % 2] * len(batch))
    if len(manager.tables) > 2:
        manager.close(manager.tables.seq_ids[i % 3])
    for seq_id in manager.tables.seq_ids:
        print(seq_id, manager.tables.block_ids(seq_id).tolist())
    print(manager.stats(), manager.copies.take())
"""


def run(script: str, hash_seed: int = 0) -> str:
    """Output of a script in a fresh interpreter that imports the same ``pagedkv``."""
    env = {
        **os.environ,
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": str(Path(pagedkv.__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_same_calls_give_same_ids_in_any_process() -> None:
    """Blocks, slots, copies and counters do not depend on the hash seed of the process."""
    first, second = run(SCRIPT, hash_seed=0), run(SCRIPT, hash_seed=12_345)
    assert first.count("\n") > 100 and "evicted_blocks=0" not in first.splitlines()[-1]
    assert first == second


def test_importing_pagedkv_and_its_testing_tools_loads_no_torch() -> None:
    """A scheduler process starts with numpy alone."""
    script = "import sys, pagedkv, pagedkv.testing; print([m for m in sys.modules if 'torch' in m])"
    assert run(script).strip() == "[]"


BOOKKEEPING = [
    "arithmetic",
    "block_cache",
    "block_pool",
    "content",
    "errors",
    "invariants",
    "manager",
    "namespace",
    "page_table",
    "retention",
    "copies",
    "sequences",
    "announced",
    "policies",
    "policies.arc",
    "policies.belady",
    "policies.cost",
    "policies.fifo",
    "policies.fingerprints",
    "policies.index_view",
    "policies.leaf_policy",
    "policies.lfu",
    "policies.lru",
    "policies.policy",
    "policies.priority",
    "policies.quotas",
    "policies.s3fifo",
    "policies.sieve",
    "prefix_index",
    "stats",
]


@pytest.mark.parametrize("name", BOOKKEEPING)
def test_bookkeeping_knows_no_clock_no_chance_no_threads_and_no_process_hash(name: str) -> None:
    """No module of the manager imports time, random and the like, or calls ``hash`` or ``id``."""
    source = ast.parse(inspect.getsource(importlib.import_module(f"pagedkv.{name}")))
    imported: set[str] = set()
    called: set[str] = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    harmless = {"abc", "hashlib", "heapq", "importlib", "itertools", "math", "sortedcontainers"}
    assert imported <= {"collections", "dataclasses", "numpy", "operator", "pagedkv", "typing"} | harmless
    assert not called & {"hash", "id"}


# -- misuse


def busy() -> KVCacheManager:
    """Open, forked, uncommitted and cached sequences, a namespace, media, and a pending copy."""
    manager = KVCacheManager(24, SIZE)
    for seq_id, count in (("gone", 9), ("a", 6), ("m", 7)):
        media = [Media(5, "cat")] if seq_id == "m" else []
        manager.open(seq_id, tokens(count, 10 * count), namespace=Namespace("t"), media=media)
        manager.commit(seq_id, tokens(count - 1, 10 * count) if seq_id == "m" else tokens(count, 10 * count))
    manager.close("gone")
    manager.fork("a", "b")
    manager.append("b", 2)
    return manager


UNHASHABLE: Any = [1]

BAD_TOKENS: dict[str, tuple[Any, str]] = {
    "bools": ([True, False], "must be integers, got bool"),
    "floats": ([1.0, 2.0], "must be integers, got float64"),
    "strings": (["a"], "must be integers, got <U1"),
    "none": (None, r"one dimension, got shape \(\)"),
    "a_number": (3, r"one dimension, got shape \(\)"),
    "two_dimensions": ([[1, 2]], r"one dimension, got shape \(1, 2\)"),
    "negative": ([1, -2], r"in 0\.\.2147483647, got -2"),
    "too_large": ([1, 2**31], r"in 0\.\.2147483647, got 2147483648"),
    "unsigned_too_large": (np.array([2**64 - 1], np.uint64), r"got 18446744073709551615"),
    "beyond_64_bits": ([2**70], "must be integers, got object"),
    "ragged": ([[1], [1, 2]], "must be a sequence of integers"),
}

MISUSE: dict[str, tuple[Callable[[KVCacheManager], object], type[Exception], str]] = {
    "open_twice": (lambda m: m.open("a", [1]), SequenceError, "'a' is open already"),
    "close_unknown": (lambda m: m.close("x"), SequenceError, r"'x' is not open \(3 are\)"),
    "close_again": (lambda m: m.close("gone"), SequenceError, r"'gone' is not open \(3 are\)"),
    "append_unknown": (lambda m: m.append("x"), SequenceError, "'x' is not open"),
    "append_negative": (lambda m: m.append("a", -1), PagedKVError, "at least 0, got -1"),
    "append_bool": (lambda m: m.append("a", True), PagedKVError, "got True"),
    "append_float": (lambda m: m.append("a", 1.0), PagedKVError, r"got 1\.0"),  # type: ignore[arg-type]
    "append_none": (lambda m: m.append("a", None), PagedKVError, "got None"),  # type: ignore[arg-type]
    "step_unknown": (lambda m: m.step(["a", "x"]), SequenceError, "'x' is not open"),
    "step_repeated": (lambda m: m.step(["a", "m", "a"]), SequenceError, "batch of 3 names only 2"),
    "step_negative": (lambda m: m.step(["a"], -2), PagedKVError, "at least 0, got -2"),
    "commit_unknown": (lambda m: m.commit("x", [1]), SequenceError, "'x' is not open"),
    "commit_beyond": (
        lambda m: m.commit("m", [1, 2]),
        SequenceError,
        "cannot commit 2 more tokens of 'm': 6 of its 7 are committed",
    ),
    "commit_too_much": (lambda m: m.commit("a", tokens(99)), SequenceError, "6 of its 6 are committed"),
    "fork_unknown": (lambda m: m.fork("x", "y"), SequenceError, "'x' is not open"),
    "fork_onto_open": (lambda m: m.fork("a", "m"), SequenceError, "'m' is open already"),
    "fork_onto_itself": (lambda m: m.fork("a", "a"), SequenceError, "'a' is open already"),
    "fork_uncommitted": (lambda m: m.fork("m", "y"), SequenceError, "6 of .*7 tokens are committed"),
    "truncate_unknown": (lambda m: m.truncate("x", 0), SequenceError, "'x' is not open"),
    "truncate_negative": (lambda m: m.truncate("a", -1), SequenceError, "'a' of 6 tokens to -1"),
    "truncate_beyond": (lambda m: m.truncate("a", 7), SequenceError, "'a' of 6 tokens to 7"),
    "truncate_bool": (lambda m: m.truncate("a", True), SequenceError, "to True"),
    "truncate_unsigned_beyond": (lambda m: m.truncate("a", np.uint8(7)), SequenceError, "tokens to 7"),  # type: ignore[arg-type]
    "commit_step_unknown": (lambda m: m.commit_step(["m", "x"], [1, 2]), SequenceError, "'x' is not open"),
    "commit_step_repeated": (lambda m: m.commit_step(["m", "m"], [1, 2]), SequenceError, "names only 1"),
    "commit_step_too_few": (lambda m: m.commit_step(["m"], []), SequenceError, "1 sequences, but 0 tokens"),
    "commit_step_too_many": (lambda m: m.commit_step([], [1]), SequenceError, "0 sequences, but 1 tokens"),
    "commit_step_beyond": (
        lambda m: m.commit_step(["m", "a"], [1, 2]),
        SequenceError,
        "'a' has no uncommitted token left",
    ),
    "commit_media_before": (
        lambda m: m.commit("m", [1], media=[Media(6, "dog"), Media(5, "owl")]),
        PagedKVError,
        "'owl' starts at 5, before the 6 committed tokens",
    ),
    "commit_media_behind": (
        lambda m: m.commit("m", [1], media=[Media(7, "dog")]),
        PagedKVError,
        "'dog' starts at 7, outside the 7 tokens",
    ),
    "commit_media_unhashable": (
        lambda m: m.commit("m", [1], media=[Media(6, ["dog"])]),  # type: ignore[arg-type]
        PagedKVError,
        "str content_id",
    ),
    "commit_media_offset_float": (
        lambda m: m.commit("m", [1], media=[Media(6.0, "dog")]),  # type: ignore[arg-type]
        PagedKVError,
        "int offset",
    ),
    "media_a_tuple": (
        lambda m: m.open("x", [1], media=[(0, "cat")]),  # type: ignore[list-item]
        PagedKVError,
        r"must be Media\(offset, content_id\), got \(0, 'cat'\)",
    ),
    "media_offset_float": (
        lambda m: m.open("x", [1, 2], media=[Media(0.5, "cat")]),  # type: ignore[arg-type]
        PagedKVError,
        r"int offset .*=0\.5",
    ),
    "media_offset_bool": (
        lambda m: m.open("x", [1, 2], media=[Media(True, "cat")]),
        PagedKVError,
        "int offset",
    ),
    "media_content_a_number": (
        lambda m: m.open("x", [1, 2], media=[Media(1, "cat"), Media(1, 3)]),  # type: ignore[arg-type]
        PagedKVError,
        "str content_id",
    ),
    "media_content_unhashable": (
        lambda m: m.open("x", tokens(6), media=[Media(0, "cat"), Media(5, ["dog"])]),  # type: ignore[arg-type]
        PagedKVError,
        "str content_id",
    ),
    **{
        f"max_cached_tokens_{bad}": (
            lambda m, bad=bad: m.open("x", tokens(6), max_cached_tokens=bad),  # type: ignore[misc]
            PagedKVError,
            f"max_cached_tokens must be an integer of at least 0, got {bad!r}",
        )
        for bad in (-1, True, 4.5, "x")
    },
    "num_committed_unknown": (lambda m: m.tables.num_committed("x"), SequenceError, "'x' is not open"),
    "lookup_negative": (lambda m: m.lookup([1], -1).fits, PagedKVError, "at least 0, got -1"),
    "lookup_bool": (lambda m: m.lookup([1], True).fits, PagedKVError, "got True"),
    "namespace_of_another_type": (
        lambda m: m.open("x", [1], namespace="tenant"),  # type: ignore[arg-type]
        PagedKVError,
        "must be a Namespace, got str",
    ),
    "media_before_the_prompt": (
        lambda m: m.open("x", tokens(5), media=[Media(-1, "cat")]),
        PagedKVError,
        "'cat' starts at -1, outside the 5 tokens",
    ),
    "media_behind_the_prompt": (
        lambda m: m.open("x", tokens(5), media=[Media(2, "dog"), Media(5, "cat")]),
        PagedKVError,
        "'cat' starts at 5, outside the 5 tokens",
    ),
    "admit_media_behind_the_prompt": (
        lambda m: m.lookup(tokens(5), 9, media=[Media(7, "cat")]).fits,
        PagedKVError,
        "'cat' starts at 7, outside the 5 tokens",
    ),
    "open_unhashable": (lambda m: m.open(UNHASHABLE, [1]), TypeError, "unhashable"),
    "close_unhashable": (lambda m: m.close(UNHASHABLE), TypeError, "unhashable"),
    "step_unhashable": (lambda m: m.step(["a", UNHASHABLE]), TypeError, "unhashable"),
    "fork_onto_unhashable": (lambda m: m.fork("a", UNHASHABLE), TypeError, "unhashable"),
}
for _name, (_bad, _message) in BAD_TOKENS.items():
    MISUSE[f"open_{_name}"] = (lambda m, bad=_bad: m.open("x", bad), PagedKVError, _message)  # type: ignore[misc]
    MISUSE[f"commit_{_name}"] = (lambda m, bad=_bad: m.commit("m", bad), PagedKVError, _message)  # type: ignore[misc]
    MISUSE[f"commit_step_{_name}"] = (lambda m, bad=_bad: m.commit_step(["m"], bad), PagedKVError, _message)  # type: ignore[misc]
    MISUSE[f"lookup_{_name}"] = (lambda m, bad=_bad: m.lookup(bad, 1).fits, PagedKVError, _message)  # type: ignore[misc]


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_with_numbers_and_changes_nothing(case: str) -> None:
    """Every mistake raises the documented error and leaves all of the manager as it was."""
    act, error, message = MISUSE[case]
    manager = busy()
    before = snapshot(manager)
    with pytest.raises(error, match=message):
        act(manager)
    assert snapshot(manager) == before
    manager.check_invariants()


NOT_MENDED_MISUSE: dict[str, tuple[Callable[[KVCacheManager], object], type[Exception]]] = {
    "truncate_float": (lambda m: m.truncate("a", 2.5), SequenceError),  # type: ignore[arg-type]
    "truncate_none": (lambda m: m.truncate("a", None), SequenceError),  # type: ignore[arg-type]
    "commit_media_a_tuple": (lambda m: m.commit("m", [1], media=[(6, "dog")]), PagedKVError),  # type: ignore[list-item]
    "commit_nothing_with_media": (lambda m: m.commit("m", [], media=[Media(6, "dog")]), PagedKVError),
}


@pytest.mark.parametrize("case", NOT_MENDED_MISUSE)
def test_more_misuse_is_refused_and_changes_nothing(case: str) -> None:
    """As above."""
    act, error = NOT_MENDED_MISUSE[case]
    manager = busy()
    before = snapshot(manager)
    with pytest.raises(error):
        act(manager)
    assert snapshot(manager) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("salt", ["t"]),
        ("salt", b"t"),
        ("salt", None),
        ("adapter", 3),
        ("weights", 1.5),
        ("adapter_version", "1"),
        ("adapter_version", True),
        ("adapter_version", 1.0),
    ],
)
def test_a_namespace_of_other_types_is_refused_when_it_is_made(field: str, value: Any) -> None:
    """``1``, ``1.0`` and ``True`` are equal to Python and must not be to the cache."""
    with pytest.raises(PagedKVError, match=f"{field} must be"):
        Namespace(**{field: value})


KINDS = [np.uint8, np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_integers_are_integers(kind: Any) -> None:
    """Counts and sizes of any numpy kind do what the Python integer does, and do not wrap."""
    engines = []
    for number in (int, kind):
        manager = KVCacheManager(number(100), number(16), max_seqs=number(7), max_seq_len=1_500)
        assert manager.open("a", list(range(390))) == Opened(390, 0)
        manager.commit("a", list(range(390)))
        assert manager.lookup(list(range(390)), number(100)).fits is True
        with pytest.raises(NeverFits, match="1510 tokens can never fit"):
            manager.lookup(list(range(1_410)), number(100))
        assert manager.append("a", number(100)) and manager.step(["a"], number(3))
        assert manager.open("b", list(range(200)), max_cached_tokens=number(100)) == Opened(200, 96)
        manager.truncate("b", number(100))
        assert manager.append("b", number(1))
        manager.check_invariants()
        engines.append(snapshot(manager))
    assert engines[0] == engines[1]


@pytest.mark.parametrize("count", [2**31, 2**62, 2**63 - 1, 2**63, 2**70])
def test_huge_counts_never_fit(count: int) -> None:
    """No addition wraps around."""
    manager = busy()
    with pytest.raises(NeverFits, match=f"{6 + count} tokens"):
        manager.append("a", count)
    with pytest.raises(NeverFits, match=f"{6 + count} tokens"):
        manager.step(["a"], count)
    assert manager.open("x", [1, 2], max_cached_tokens=count) == Opened(2, 0)
    manager.close("x")
    assert manager.tables.seq_ids == ["a", "m", "b"]


def test_the_snapshot_notices_a_change_anywhere() -> None:
    """The helper of the tests above sees arrays, dicts, counters and the tree."""
    changes: list[Callable[[KVCacheManager], object]] = [
        lambda m: m.append("a", 1),
        lambda m: m.commit("m", [1]),
        lambda m: m.copies.take(),
        lambda m: m.commit_step(["m"], [1]),
        lambda m: m.close("m"),
        lambda m: m.open("new", []),
        lambda m: m._cache.index.tokens.__setitem__((3, 0), 1_000),
        lambda m: m._cache.extra_keys.take(("key",)),
        lambda m: m._cache.policy.discard(np.array([1, 2, 3, 4], np.int32)),
    ]
    for change in changes:
        manager = busy()
        before = snapshot(manager)
        assert before == snapshot(copy.deepcopy(manager))
        change(manager)
        assert snapshot(manager) != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, got 0"),
        ({"num_blocks": -4}, "num_blocks .* got -4"),
        ({"num_blocks": 8.0}, r"num_blocks .* got 8\.0"),
        ({"num_blocks": True}, "num_blocks .* got True"),
        ({"block_size": 0}, "block_size .* got 0"),
        ({"max_seqs": 0}, "max_seqs .* got 0"),
        ({"max_seq_len": 0}, "max_seq_len .* got 0"),
        ({"max_seq_len": "9"}, "max_seq_len .* got '9'"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1\.0"),
        ({"watermark": -0.1}, r"got -0\.1"),
        ({"watermark": float("nan")}, "got nan"),
    ],
)
def test_a_manager_of_impossible_sizes_is_refused(options: dict[str, Any], message: str) -> None:
    """Counts below one, other types and shares outside [0, 1) raise ``PagedKVError``."""
    with pytest.raises(PagedKVError, match=message):
        KVCacheManager(**{"num_blocks": 8, "block_size": SIZE, **options})


@pytest.mark.parametrize("seq_id", ["a", 0, -1, (1, "x"), None, frozenset({1})])
def test_any_hashable_names_a_sequence(seq_id: SeqId) -> None:
    """Ids are the caller's; nothing but equality is asked of them."""
    manager = KVCacheManager(4, SIZE)
    manager.open(seq_id, tokens(5))
    assert seq_id in manager.tables and manager.tables.seq_ids == [seq_id]
    manager.close(seq_id)
    assert seq_id not in manager.tables


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, ">i4"])
def test_tokens_may_have_any_integer_dtype(dtype: Any) -> None:
    """The same ids in another dtype, stride or byte order are the same content."""
    engine = Engine()
    engine.open("a", tokens(9))
    assert engine.hit(np.arange(9).astype(dtype)) == 8  # type: ignore[arg-type]
    assert engine.hit(np.repeat(np.arange(9), 2).astype(dtype)[::2]) == 8  # type: ignore[arg-type]


def test_the_caller_may_reuse_its_token_array() -> None:
    """The manager keeps no reference to the tokens it was given."""
    manager = KVCacheManager(8, SIZE)
    prompt = np.arange(9, dtype=np.int32)
    manager.open("a", prompt)
    manager.commit("a", prompt)
    prompt[:] = 0
    manager.close("a")
    assert manager.open("b", tokens(9)) == Opened(9, 8)


def test_a_thousand_branches_behind_a_cut_are_evicted_without_recursion() -> None:
    """Each sequence forks off one block deeper; cutting the deepest to one token must still let it grow."""
    depth = 1_200
    manager = KVCacheManager(2 * depth + 2, 2, max_seqs=2)
    for i in range(1, depth):
        tokens = [*range(2 * i), 9_999_999, 9_999_999]
        opened = manager.open("twig", tokens)
        assert opened is not None
        manager.commit("twig", tokens[opened.num_cached_tokens :])
        manager.close("twig")
    opened = manager.open("trunk", list(range(2 * (depth - 1))))
    assert opened is not None
    manager.commit("trunk", list(range(opened.num_cached_tokens, 2 * (depth - 1))))
    manager.truncate("trunk", 1)
    assert manager.append("trunk", manager.max_seq_len - 1)
    manager.check_invariants()


def test_a_text_is_no_batch() -> None:
    """ "ab" names one sequence, not two."""
    manager = KVCacheManager(4, 2)
    manager.open("a", [1])
    manager.open("b", [1])
    with pytest.raises(SequenceError, match="list of sequence ids"):
        manager.step("ab")
