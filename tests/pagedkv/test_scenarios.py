"""What users of prefix caches came to rely on elsewhere, as tests of this manager.

The ideas are those of the test suites named in tests/README.md, with what is done differently here and why.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from pagedkv import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KVCacheManager,
    Media,
    Namespace,
    NeverFits,
    Opened,
    SequenceError,
    core,
    prefix_digests,
)
from pagedkv.prefix_index import PrefixIndex
from pagedkv.testing import ShadowIndex, random_walk

SIZE = 4


def make(num_blocks: int = 10, **options: Any) -> KVCacheManager:
    manager = KVCacheManager(num_blocks, SIZE, **options)
    manager.events.record()
    return manager


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def serve(manager: KVCacheManager, name: str, prompt: list[int], close: bool = False, **options: Any) -> int:
    """Open with a prompt and commit it all; returns the cached tokens."""
    opened = manager.open(name, prompt, **options)
    assert opened is not None
    manager.copies.take()
    manager.commit(name, prompt[opened.num_cached_tokens :])
    if close:
        manager.close(name)
    manager.check_invariants()
    return opened.num_cached_tokens


def blocks(manager: KVCacheManager, name: Hashable) -> list[int]:
    ids: list[int] = manager.tables.block_ids(name).tolist()
    return ids


def cached(manager: KVCacheManager, prompt: list[int], **options: Any) -> int:
    return manager.lookup(prompt, **options).num_cached_tokens


# -- what is shared


def test_the_prefix_of_a_running_sequence_is_shared() -> None:
    """Nobody has to finish first: the second prompt holds the very blocks of the first."""
    manager = make()
    serve(manager, "a", tokens(11))
    assert serve(manager, "b", [*tokens(8), 90, 91]) == 8
    assert blocks(manager, "b")[:2] == blocks(manager, "a")[:2]
    assert manager.counts.active == 4


def test_a_partial_block_is_not_shared() -> None:
    """Three of four tokens in the last block: nobody else finds them, unless it asks for partial hits."""
    manager = make()
    serve(manager, "a", tokens(7))
    assert cached(manager, tokens(8)) == 4


def test_a_block_that_decoding_fills_is_shared() -> None:
    """Blocks of generated tokens are found like those of prompts, when they are full."""
    manager = make()
    serve(manager, "a", tokens(6))
    for token in (6, 7):
        assert cached(manager, tokens(9)) == 4
        manager.append("a")
        manager.commit_step(["a"], [token])
    assert cached(manager, tokens(9)) == 8


@pytest.mark.parametrize(("length", "hit"), [(8, 4), (9, 8), (5, 4), (4, 0)])
def test_the_last_token_is_always_computed(length: int, hit: int) -> None:
    """A prompt that is cached whole still leaves its last block to compute, or there would be no logits."""
    manager = make()
    serve(manager, "a", tokens(12), close=True)
    assert serve(manager, "b", tokens(length)) == hit


def test_a_whole_hit_when_no_logits_are_needed() -> None:
    """Whoever only wants the KV, as to send it elsewhere, asks for all of it."""
    manager = make()
    serve(manager, "a", tokens(8), close=True)
    assert manager.open("b", tokens(8), max_cached_tokens=8) == Opened(8, 8)


def test_an_empty_prompt_opens_and_finds_nothing() -> None:
    """A tree has a root that matches everything: zero tokens of it."""
    manager = make()
    serve(manager, "a", tokens(8))
    assert manager.open("b", []) == Opened(0, 0) and blocks(manager, "b") == []


def test_prompts_shorter_than_a_block_share_nothing_and_harm_nothing() -> None:
    """Keys are whole blocks."""
    manager = make()
    assert [serve(manager, name, [1, 2, 3]) for name in "abc"] == [0, 0, 0]
    assert manager.stats().indexed_blocks == 0


@pytest.mark.parametrize("part", [1, 3, 4, 7, 8, 11])
def test_two_prompts_part_at_a_block_edge(part: int) -> None:
    """They share the whole blocks before the first token that differs, and both stay findable."""
    manager = make(20)
    first, second = tokens(12), [*tokens(part), *tokens(12 - part, 500)]
    serve(manager, "a", first, close=True)
    assert serve(manager, "b", second, close=True) == part // SIZE * SIZE
    assert cached(manager, [*first, 0]) == cached(manager, [*second, 0]) == 12


def test_the_same_tokens_behind_another_prefix_are_other_content() -> None:
    """K and V hang on everything before them."""
    manager = make()
    serve(manager, "a", [*tokens(4), *tokens(4, 50)])
    assert cached(manager, [*tokens(4, 90), *tokens(4, 50), 1]) == 0


def test_a_hit_inside_a_block_is_served_by_a_copy() -> None:
    """Token-exact reuse with blocks: two of the next block's four tokens, copied before the prefill."""
    manager = make()
    serve(manager, "a", tokens(8), close=True)
    opened = manager.open("b", [*tokens(6), 90, 91], partial_hits=True)
    copies = manager.copies.take()
    assert opened == Opened(8, 6)
    assert copies.dst.tolist() == blocks(manager, "b")[1:]
    assert copies.src.tolist() != copies.dst.tolist() and cached(manager, tokens(9)) == 8


def test_two_that_compute_the_same_prompt_end_with_one_copy() -> None:
    """Neither could hit the other; on commit the second takes the first's blocks and gives up its own."""
    manager = make()
    for name in "ab":
        assert manager.open(name, tokens(9)) == Opened(9, 0)
    for name in "ab":
        manager.commit(name, tokens(9))
    assert blocks(manager, "a")[:2] == blocks(manager, "b")[:2]
    assert manager.counts.active == 4
    manager.check_invariants()


def test_the_second_of_two_equal_prompts_can_wait_for_the_first() -> None:
    """It is told how much is coming, and later hits it instead of computing it again."""
    manager = make()
    manager.open("a", tokens(9), announce=True)
    assert manager.lookup(tokens(9))[:3] == (9, 0, 8)
    manager.commit("a", tokens(9))
    assert manager.lookup(tokens(9))[:3] == (9, 8, 0)


def test_chunks_of_a_prefill_are_findable_as_they_come() -> None:
    """A long prompt, committed in chunks of six: after each, its whole blocks can be hit."""
    manager = make()
    manager.open("a", tokens(20))
    for stop in (6, 12, 18, 20):
        manager.commit("a", tokens(20)[manager.tables.num_committed("a") : stop])
        assert cached(manager, [*tokens(20), 99]) == stop // SIZE * SIZE


# -- exactness


@pytest.mark.skipif(core.engine() != "native", reason="the numpy engine compares keys, and has no hash")
def test_a_hash_that_is_always_the_same_gives_no_wrong_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collision costs time, never content: every step of a walk still agrees with the model."""
    monkeypatch.setattr(PrefixIndex, "hash_mask", 0)
    assert random_walk(2_000, seed=8, num_blocks=20, vocabulary=4).stats().hit_tokens > 100
    manager = make(20)
    prompts = [[i, *tokens(8, 100)] for i in range(4)]
    for i, prompt in enumerate(prompts):
        assert serve(manager, f"{i}", prompt, close=True) == 0
    assert [cached(manager, [*prompt[:8], 0]) for prompt in prompts] == [8] * 4


def test_digests_chain_and_are_stable() -> None:
    """A block's digest stands for its whole prefix: the same bytes in any process, this one included."""
    one, other = prefix_digests(tokens(8), SIZE), prefix_digests([9, *tokens(7, 1)], SIZE)
    assert one[0].hex()[:16] == "c3973e6b31b15afa"
    assert not set(one) & set(other)


def test_a_salt_keeps_tenants_apart_in_the_first_block_and_all_behind() -> None:
    """Equal salts share, others do not, and no salt is one more tenant."""
    manager = make(30)
    for salt in ("x", "y", ""):
        assert serve(manager, salt, tokens(9), namespace=Namespace(salt=salt)) == 0
    for salt, hit in (("x", 8), ("y", 8), ("z", 0), ("", 8)):
        assert cached(manager, tokens(9), namespace=Namespace(salt=salt)) == hit


def test_adapters_share_only_with_themselves_as_loaded() -> None:
    """The name and the version: weights that are loaded again under one name make other K and V."""
    manager = make(30)
    serve(manager, "a", tokens(9), namespace=Namespace(adapter="lora", adapter_version=1))
    assert cached(manager, tokens(9), namespace=Namespace(adapter="lora", adapter_version=1)) == 8
    assert cached(manager, tokens(9), namespace=Namespace(adapter="lora", adapter_version=2)) == 0
    assert cached(manager, tokens(9)) == 0


def test_images_share_the_text_before_them() -> None:
    """Placeholders are equal tokens; the image's id and its place count from its first block on."""
    manager = make(30)
    prompt = [*tokens(6), *[7] * 8, 1]
    serve(manager, "a", prompt, media=[Media(6, "cat")])
    assert cached(manager, prompt, media=[Media(6, "cat")]) == 12
    assert cached(manager, prompt, media=[Media(6, "dog")]) == 4
    assert cached(manager, prompt, media=[Media(7, "cat")]) == 4
    assert cached(manager, prompt, media=[Media(13, "dog"), Media(6, "cat")]) == 12


def test_two_images_in_one_block_both_count() -> None:
    """Whatever the order in which they are named."""
    manager = make(30)
    prompt = [*[7] * 8, 1]
    serve(manager, "a", prompt, media=[Media(0, "cat"), Media(2, "dog")])
    assert cached(manager, prompt, media=[Media(2, "dog"), Media(0, "cat")]) == 8
    assert cached(manager, prompt, media=[Media(0, "cat")]) == 0


def test_new_weights_find_nothing_old() -> None:
    """After an update of the weights nothing has to be flushed: the old content is not asked for any more."""
    manager = make()
    serve(manager, "a", tokens(9), namespace=Namespace(weights="1"), close=True)
    assert cached(manager, tokens(9), namespace=Namespace(weights="2")) == 0


# -- eviction


def test_blocks_are_evicted_from_the_end_of_the_least_recently_used() -> None:
    """Of two closed sequences the older loses its last block first, then the one before it."""
    manager = make(6)
    serve(manager, "a", tokens(12), close=True)
    serve(manager, "b", tokens(12, 50), close=True)
    for i, (left, other) in enumerate([(8, 12), (4, 12), (0, 12), (0, 8)]):
        serve(manager, f"new {i}", [900 + i])
        assert (cached(manager, [*tokens(12), 1]), cached(manager, [*tokens(12, 50), 1])) == (left, other)


def test_a_hit_makes_a_prefix_recent() -> None:
    """The one that was used again survives the one that was not, though it is older."""
    manager = make(4)
    serve(manager, "a", tokens(8), close=True)
    serve(manager, "b", tokens(8, 50), close=True)
    serve(manager, "c", tokens(8), close=True)
    serve(manager, "d", [900])
    assert (cached(manager, tokens(9)), cached(manager, tokens(9, 50))) == (8, 4)


def test_free_blocks_are_used_before_anything_is_evicted() -> None:
    """Content stays while there is a block without any."""
    manager = make(5)
    serve(manager, "a", tokens(8), close=True)
    serve(manager, "b", tokens(12, 50))
    assert manager.stats().evicted_blocks == 0 and cached(manager, tokens(9)) == 8


def test_what_somebody_holds_is_never_evicted() -> None:
    """Locks are references: only what nobody holds can go, however much is needed."""
    manager = make(6)
    serve(manager, "a", tokens(8))
    serve(manager, "old", tokens(8, 50), close=True)
    assert manager.open("big", tokens(20, 900)) is None
    serve(manager, "b", tokens(16, 900))
    assert cached(manager, tokens(9)) == 8 and cached(manager, tokens(9, 50)) == 0


def test_a_shared_prefix_is_free_only_when_its_last_holder_has_closed() -> None:
    """Two sequences lock it; either may go first."""
    manager = make(4)
    serve(manager, "a", tokens(9))
    serve(manager, "b", tokens(9))
    for name, active in (("a", 3), ("b", 0)):
        manager.close(name)
        assert manager.counts.active == active
    with pytest.raises(SequenceError, match="not open"):
        manager.close("b")


def test_a_pin_keeps_a_system_prompt() -> None:
    """Locked on purpose, for as long as the caller says, without a sequence."""
    manager = make(4)
    serve(manager, "system", tokens(8))
    pin = manager.retention.pin("system")
    manager.close("system")
    serve(manager, "a", tokens(8, 50), close=True)
    serve(manager, "b", tokens(8, 90), close=True)
    assert cached(manager, tokens(9)) == 8
    manager.retention.unpin(pin)
    assert manager.counts.active == 0


def test_the_own_hit_is_not_evicted_for_the_rest_of_the_prompt() -> None:
    """The pool has exactly enough if the hit is kept: it is kept, and the other content goes."""
    manager = make(5)
    serve(manager, "a", tokens(8), close=True)
    serve(manager, "b", tokens(8, 50), close=True)
    assert serve(manager, "c", [*tokens(8), *tokens(8, 900)]) == 8
    assert cached(manager, tokens(9, 50)) == 4


def test_a_priority_outlasts_recency() -> None:
    """The older prompt stays, as it was said to matter more."""
    manager = make(4, policy="priority")
    for name, start in (("system", 0), ("chat", 50)):
        serve(manager, name, tokens(8, start))
    manager.retention.set_priority("system", 80)
    manager.close("system")
    manager.close("chat")
    serve(manager, "new", tokens(7, 900))
    assert (cached(manager, tokens(9)), cached(manager, tokens(9, 50))) == (8, 0)


# -- running out of room


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    """Closed to make room for somebody else and opened again with all it had: only the tail is computed."""
    manager = make(5)
    serve(manager, "a", tokens(7))
    for token in (7, 8, 9):
        manager.append("a")
        manager.commit("a", [token])
    assert manager.open("b", tokens(12, 50)) is None
    manager.close("a")
    serve(manager, "b", tokens(12, 50), close=True)
    assert serve(manager, "a", tokens(10)) == 8


def test_what_does_not_fit_leaves_the_cache_alone() -> None:
    """A refused prompt holds nothing, evicts nothing, and is not counted."""
    manager = make(4)
    serve(manager, "a", tokens(5))
    serve(manager, "old", tokens(8, 50), close=True)
    before = manager.stats()
    assert manager.open("b", tokens(12, 900)) is None
    assert manager.stats() == before and cached(manager, tokens(9, 50)) == 8


def test_a_prompt_longer_than_the_pool_is_an_error_at_once() -> None:
    """It would wait for ever."""
    with pytest.raises(NeverFits, match="17 tokens can never fit"):
        make(4).open("a", tokens(17))


def test_a_watermark_keeps_room_for_those_who_run() -> None:
    """A newcomer must leave it, growth may take it."""
    manager = make(10, watermark=0.2)
    serve(manager, "a", tokens(4))
    assert manager.open("b", tokens(29, 50)) is None
    assert manager.open("b", tokens(28, 50)) is not None
    assert manager.step(["a", "b"])


def test_a_step_of_a_batch_is_all_or_nothing() -> None:
    """Both need a block, there is one: neither grows, and the scheduler preempts."""
    manager = make(3)
    for name in "ab":
        serve(manager, name, tokens(4, ord(name)))
    assert manager.step(["a", "b"]) is False
    assert [manager.tables.num_tokens(name) for name in "ab"] == [4, 4]
    manager.close("b")
    assert manager.step(["a"])


# -- drafts


def test_lookahead_slots_are_allocated_and_nothing_of_them_is_shared() -> None:
    """Room for five drafts over a block's edge; only what is committed can be hit."""
    manager = make()
    serve(manager, "a", tokens(6))
    assert manager.append("a", 5) and len(blocks(manager, "a")) == 3
    assert manager.stats().indexed_blocks == 1
    manager.commit_step(["a"], [tokens(5, 6)], [3])
    assert manager.tables.num_tokens("a") == 9 and cached(manager, tokens(9)) == 8


def test_rejected_drafts_give_their_blocks_back() -> None:
    """None of seven drafts is right: the sequence is as long as before, and holds no more."""
    manager = make()
    serve(manager, "a", tokens(6))
    manager.append("a", 7)
    assert manager.counts.active == 4
    manager.commit_step(["a"], [tokens(7, 90)], [0])
    assert manager.counts.active == 2 and manager.tables.num_tokens("a") == 6


def test_a_fork_shares_all_and_copies_its_tail_when_it_grows() -> None:
    """Parallel samples of one prompt: one partial block more for each that goes on."""
    manager = make()
    serve(manager, "a", tokens(6))
    assert manager.fork("a", "b") and manager.counts.active == 2
    assert manager.append("b") and manager.counts.active == 3
    assert blocks(manager, "a")[0] == blocks(manager, "b")[0]
    assert manager.copies.take().src.tolist() == blocks(manager, "a")[1:]


# -- reset, events, counters


def test_a_reset_waits_until_nobody_holds_a_block() -> None:
    """False and nothing changed while a sequence runs; then everything is forgotten."""
    manager = make()
    serve(manager, "a", tokens(8))
    assert manager.maintenance.reset() is False and cached(manager, tokens(9)) == 8
    manager.close("a")
    assert manager.maintenance.reset() is True and cached(manager, tokens(9)) == 0
    assert isinstance(manager.events.take()[-1], BlocksCleared)


def test_events_come_in_order_parents_first_and_children_go_first() -> None:
    """Stored: one event per run, with its parent. Removed: the deepest block first."""
    manager = make(4)
    serve(manager, "a", tokens(12))
    serve(manager, "b", [*tokens(8), *tokens(4, 50)])
    stored = manager.events.take()
    assert [type(event) for event in stored] == [BlocksStored, BlocksStored]
    digests = prefix_digests(tokens(12), SIZE)
    assert [stored[0].parent, stored[1].parent] == [None, digests[1]]  # type: ignore[union-attr]
    manager.close("b")
    manager.close("a")
    serve(manager, "c", tokens(15, 900))
    removed = [e for e in manager.events.take() if isinstance(e, BlocksRemoved)]
    assert [d for e in removed for d in e.digests][-2:] == digests[1::-1]
    assert {e.reason for e in removed} == {"capacity"}


def test_a_router_that_follows_the_events_knows_what_is_cached() -> None:
    """It works out a prompt's digests, and finds the hit that the manager would find."""
    manager, router = make(5), ShadowIndex()
    for number in range(30):
        prompt = [number % 3, 1, 2, 3, number % 5, 5, 6, 7, 8]
        serve(manager, f"{number}", prompt, close=True)
        for event in manager.events.take():
            router.apply(event)
        for known in range(15):
            asked = [known % 3, 1, 2, 3, known % 5, 5, 6, 7, 8]
            found = [digest in router.digests for digest in prefix_digests(asked, SIZE)]
            assert sum(found) * SIZE == cached(manager, asked)


def test_hits_and_queries_are_counted_in_tokens() -> None:
    """Of 9 + 9 prompt tokens 8 were cached; what was refused does not count."""
    manager = make(4)
    serve(manager, "a", tokens(9), close=True)
    serve(manager, "b", tokens(9))
    assert manager.open("c", tokens(9, 50)) is None
    stats = manager.stats()
    assert (stats.queried_tokens, stats.hit_tokens, stats.num_opened) == (18, 8, 2)


def test_without_a_prefix_cache_nothing_is_looked_up_kept_or_announced() -> None:
    """For workloads that never repeat: blocks are free as soon as they are given up."""
    manager = KVCacheManager(10, SIZE, policy=None)
    for name in "ab":
        assert serve(manager, name, tokens(9), announce=True) == 0
    assert manager.lookup(tokens(9))[1:3] == (0, 0)
    manager.close("a")
    assert manager.counts == (7, 0, 3)


def test_the_null_block_is_never_handed_out() -> None:
    """Block 0 pads tables; a pool of n has n others, each handed out once."""
    manager = make(10)
    for i in range(10):
        manager.open(i, [1])
    assert sorted(blocks(manager, i)[0] for i in range(10)) == list(range(1, 11))
    assert manager.counts.free == 0


def test_padding_of_a_batch_is_the_null_block_and_writes_nothing() -> None:
    """Rows beyond the batch: block 0, length 0, slot -1."""
    manager = make()
    serve(manager, "a", tokens(5))
    tables, lens = np.full((3, 4), 9, np.int32), np.full(3, 9, np.int32)
    slots = np.full(3, 9, np.int64)
    manager.tables.write_block_tables(["a"], tables, lens, slots)
    assert tables[0].tolist() == [*blocks(manager, "a"), 0, 0] and not tables[1:].any()
    assert lens.tolist() == [5, 0, 0] and slots.tolist()[1:] == [-1, -1]
