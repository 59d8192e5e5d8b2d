"""Drafts: slots ahead of the tokens, of which verification accepts some."""

import copy
import random
from typing import Any

import pytest

from pagedkv import KVCacheManager, PagedKVError, SequenceError
from pagedkv.testing import FAILURE_POINTS, FailureInjector, ShadowStorage, snapshot


def opened(names: str, length: int = 6) -> KVCacheManager:
    manager = KVCacheManager(32, 4, max_seqs=8)
    for i, name in enumerate(names):
        prompt = [10 * i + 1] * length
        assert manager.open(name, prompt) is not None
        manager.commit(name, prompt)
    return manager


def test_accepted_drafts_stay_and_rejected_ones_give_their_blocks_back() -> None:
    """Three drafts and one token of the model each; 4, 1 and 0 of them are right."""
    manager = opened("abc")
    assert manager.step(["a", "b", "c"], 4)
    assert manager.counts.active == 9
    drafts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    manager.commit_step(["a", "b", "c"], drafts, num_accepted=[4, 1, 0])
    assert [manager.tables.num_tokens(i) for i in "abc"] == [10, 7, 6]
    assert [manager.tables.num_committed(i) for i in "abc"] == [10, 7, 6]
    assert manager.counts.active == 3 + 2 + 2
    manager.check_invariants()
    manager.close("a")
    assert manager.open("d", [1] * 6 + [1, 2, 3, 4]) == (10, 8)


BAD: dict[str, tuple[Any, Any, str]] = {
    "too many accepted": ([[1, 2]] * 2, [1, 3], "cannot accept 3 of 2 tokens of 'b'"),
    "more than there is room for": (
        [[1, 2, 3]] * 2,
        [1, 3],
        "cannot accept 3 of 3 tokens of 'b': 6 of its 8",
    ),
    "negative": ([[1, 2]] * 2, [1, -1], "num_accepted must be an integer of at least 0, got -1"),
    "counts missing": ([[1, 2]] * 2, [1], "2 sequences, but 2 rows of tokens and 1 counts"),
    "one row": ([[1, 2]], [1, 1], "2 sequences, but 1 rows of tokens and 2 counts"),
    "flat": ([1, 2], [1, 1], r"tokens must have one dimension, got shape \(\)"),
    "no tokens": ([["x", "y"]] * 2, [1, 1], "tokens must be integers"),
    "ragged": ([[1, 2], [1]], [1, 2], "cannot accept 2 of 1 tokens of 'b'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_accepted_changes_nothing(case: str) -> None:
    """The first sequence alone would be fine: it keeps its drafts too."""
    drafts, counts, message = BAD[case]
    manager = opened("ab")
    assert manager.step(["a", "b"], 2)
    before = snapshot(manager)
    with pytest.raises((PagedKVError, SequenceError), match=message):
        manager.commit_step(["a", "b"], drafts, num_accepted=counts)
    assert snapshot(manager) == before


@pytest.mark.parametrize("seed", range(3))
def test_speculative_decoding_equals_decoding_one_by_one(seed: int) -> None:
    """The same tokens, hits and block counts after every round, whatever was drafted."""
    rng = random.Random(seed)
    fast, slow = opened("abc"), opened("abc")
    shadow = ShadowStorage(32, 4)
    known = {name: [10 * i + 1] * 6 for i, name in enumerate("abc")}
    for name, tokens in known.items():
        shadow.write(fast.tables.slots(name), tokens)
    for _ in range(12):
        assert fast.step(list("abc"), 3)
        shadow.copy(fast)
        truth = {name: [rng.randrange(2) for _ in range(rng.randint(0, 3))] for name in "abc"}
        drafts = [[*truth[name], 7, 7, 7][:3] for name in "abc"]
        for name, row in zip("abc", drafts, strict=True):
            shadow.write(fast.tables.slots(name, len(known[name])), row)
        fast.commit_step(list("abc"), drafts, num_accepted=[len(truth[name]) for name in "abc"])
        for name, tokens in truth.items():
            for token in tokens:
                assert slow.append(name)
                slow.copies.take()
                slow.commit_step([name], [token])
            known[name] += tokens
            assert shadow.read(fast, name) == known[name]
        fast.check_invariants()
        assert fast.counts == slow.counts
        assert fast.stats().indexed_blocks == slow.stats().indexed_blocks


POINTS = (
    *FAILURE_POINTS["commit_step"],
    "pagedkv.drafts:as_token_array",
    "pagedkv.drafts:require_count",
    "pagedkv.block_tables:BlockTables.row",
)


@pytest.mark.parametrize("point", POINTS)
def test_a_batch_of_drafts_is_accepted_whole_or_not_at_all(point: str) -> None:
    """All that can refuse comes before the first sequence changes, so that none is left half done."""
    injector, drafts, counts = FailureInjector(point), [[1, 2, 3, 4]] * 3, [4, 1, 0]

    def accept(manager: KVCacheManager) -> None:
        manager.commit_step(list("abc"), drafts, num_accepted=counts)

    manager = opened("abc")
    assert manager.step(list("abc"), 4)
    with injector.counting():
        accept(copy.deepcopy(manager))
    for call in range(1, injector.calls + 1):
        before = snapshot(manager)
        with injector.failing(at=call), pytest.raises(MemoryError, match="injected"):
            accept(manager)
        assert snapshot(manager) == before, call
    accept(manager)
    assert [manager.tables.num_tokens(i) for i in "abc"] == [10, 7, 6]
