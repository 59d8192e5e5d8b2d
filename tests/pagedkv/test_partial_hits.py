"""A hit that ends inside a block: the shared tokens are copied, not computed again."""

import random

import pytest

from pagedkv import KVCacheManager, Media, Namespace, SequenceError
from pagedkv.testing import ShadowStorage

SIZE = 4


def closed(manager: KVCacheManager, name: str, tokens: list[int], **options: object) -> list[int]:
    """A prompt that was computed and closed; returns its blocks."""
    opened = manager.open(name, tokens, **options)  # type: ignore[arg-type]
    assert opened is not None
    manager.copies.take()
    manager.commit(name, tokens[opened.num_cached_tokens :])
    blocks: list[int] = manager.tables.block_ids(name).tolist()
    manager.close(name)
    return blocks


def test_the_first_tokens_of_a_cached_block_are_copied() -> None:
    """Cached 1..8, asked for 1 2 3 4 5 6 | 9 9: one whole block and two tokens of the next."""
    manager = KVCacheManager(8, SIZE)
    first = closed(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    opened = manager.open("b", [1, 2, 3, 4, 5, 6, 9, 9], partial_hits=True)
    assert opened is not None and opened.num_cached_tokens == 6
    copies = manager.copies.pending
    assert (copies.src.tolist(), copies.dst.tolist()) == ([first[1]], [manager.tables.block_ids("b")[1]])
    assert manager.tables.num_committed("b") == 6
    with pytest.raises(SequenceError, match=r"awaits its copy from block 2: run the copies first"):
        manager.commit("b", [9, 9])
    manager.copies.take()
    manager.commit("b", [9, 9])
    manager.close("b")
    manager.check_invariants()
    assert manager.lookup([1, 2, 3, 4, 5, 6, 9, 9, 0]).num_cached_tokens == 8


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 9], 7),
        ([1, 2, 3, 4, 9], 4),
        ([1, 2, 9, 9], 2),
        ([1, 2], 1),  # the last token is computed, to say what follows
        ([9], 0),
        ([], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8], 7),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
    ],
)
def test_how_far_a_partial_hit_goes(prompt: list[int], cached: int) -> None:
    """As far as the tokens agree, and never to the last token of the prompt."""
    manager = KVCacheManager(8, SIZE)
    closed(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    opened = manager.open("b", prompt, partial_hits=True)
    assert opened == (len(prompt), cached)
    assert len(manager.copies) == (1 if cached % SIZE else 0)
    assert manager.stats().hit_tokens == cached


def test_partial_hits_are_only_for_those_who_ask() -> None:
    """Without ``partial_hits`` a hit ends with a block and needs no copy."""
    manager = KVCacheManager(8, SIZE)
    closed(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    opened = manager.open("b", [1, 2, 3, 4, 5, 6, 9, 9])
    assert opened is not None and (opened.num_cached_tokens, len(manager.copies)) == (4, 0)


def test_a_partial_hit_stays_in_its_namespace_and_before_its_media() -> None:
    """Another namespace, or other media in the same block, share nothing."""
    manager = KVCacheManager(16, SIZE)
    closed(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8], media=[Media(6, "cat")])
    for name, options in {
        "tenant": {"namespace": Namespace(salt="x")},
        "dog": {"media": [Media(6, "dog")]},
        "none": {},
    }.items():
        opened = manager.open(name, [1, 2, 3, 4, 5, 6, 7, 8, 9], partial_hits=True, **options)  # type: ignore[arg-type]
        assert opened is not None and opened.num_cached_tokens == (0 if name == "tenant" else 4), name
    opened = manager.open("cat", [1, 2, 3, 4, 5, 6, 7, 9], media=[Media(6, "cat")], partial_hits=True)
    assert opened is not None and opened.num_cached_tokens == 7


def test_the_copied_block_is_not_evicted_to_make_room_for_its_copy() -> None:
    """A full pool: where the room has to come from the block itself, the hit ends before it."""
    manager = KVCacheManager(2, SIZE)
    closed(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    opened = manager.open("b", [1, 2, 3, 4, 5, 6, 9, 9], partial_hits=True)
    assert opened is not None and (opened.num_cached_tokens, len(manager.copies)) == (4, 0)
    manager.check_invariants()
    manager = KVCacheManager(3, SIZE)
    closed(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    opened = manager.open("b", [1, 2, 3, 4, 5, 6, 9, 9], partial_hits=True)
    assert opened is not None and opened.num_cached_tokens == 6
    assert manager.stats().evicted_blocks == 0


def test_a_partial_hit_of_what_is_itself_to_be_copied_reads_the_first_source() -> None:
    """The copy of a copy that has not run takes its content from where it is."""
    manager = KVCacheManager(8, SIZE)
    (block, *_) = closed(manager, "a", [1, 2, 3, 4])
    assert manager.open("b", [1, 2, 3, 9, 9], partial_hits=True) == (5, 3)
    assert manager.open("c", [1, 2, 3, 9, 9], partial_hits=True) == (5, 3)
    assert manager.copies.pending.src.tolist() == [block, block]


@pytest.mark.parametrize("seed", range(4))
def test_partial_hits_hold_the_right_tokens(seed: int) -> None:
    """Random prompts of two token ids in a tiny pool, copies run before writes, every slot compared."""
    rng = random.Random(seed)
    manager, shadow = KVCacheManager(12, SIZE, max_seqs=3), ShadowStorage(12, SIZE)
    known: list[list[int]] = [[]]
    partial = 0
    for number in range(600):
        base = rng.choice(known)
        prompt = [*base[: rng.randint(0, len(base))], *(rng.randrange(2) for _ in range(rng.randint(1, 6)))][
            :16
        ]
        full = manager.lookup(prompt).num_cached_tokens
        opened = manager.open(number, prompt, partial_hits=True)
        assert opened is not None and full <= opened.num_cached_tokens < min(full + SIZE, len(prompt))
        partial += opened.num_cached_tokens > full
        shadow.copy(manager)
        done = opened.num_cached_tokens
        assert shadow.read(manager, number) == prompt[:done]
        shadow.write(manager.tables.slots(number, done), prompt[done:])
        manager.commit(number, prompt[done:])
        assert shadow.read(manager, number) == prompt
        manager.check_invariants()
        manager.close(number)
        known.append(prompt)
    assert partial > 100
    assert manager.counts.active == 0
