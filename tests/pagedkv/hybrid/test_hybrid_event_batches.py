"""A hybrid manager's events as batches: each group's contents reach a reader, late or not."""

import random

import pytest

from pagedkv.errors import PagedKVError
from pagedkv.event_batches import WireFormat, decode_batch
from pagedkv.event_follower import BatchFollower
from pagedkv.event_ring import BatchRing
from pagedkv.hybrid import CacheGroup, HybridKVCacheManager
from pagedkv.hybrid.shadow import GroupShadow

GROUPS = CacheGroup("full", (1,)), CacheGroup("local", (0,), window=4)


def served(manager: HybridKVCacheManager, rng: random.Random) -> None:
    """One prompt of few tokens, so that some are hit and some evicted."""
    tokens = [rng.randrange(2) for _ in range(rng.randint(2, 14))]
    opened = manager.open("x", tokens)
    assert opened is not None
    manager.commit("x", tokens[opened.num_cached_tokens :])
    manager.close("x")


@pytest.mark.parametrize("layout", ["map", "array"])
def test_each_group_is_what_a_reader_makes_of_the_batches(layout: str) -> None:
    """From the start, and from a snapshot, whose windows may lack the contents before theirs."""
    rng = random.Random(3)
    manager = HybridKVCacheManager(GROUPS, num_blocks=14, block_size=2)
    manager.events.record()
    ring, early = (
        BatchRing(3, WireFormat("bytes", "map" if layout == "map" else "array")),
        GroupShadow(GROUPS),
    )
    lacking = 0
    for _ in range(150):
        served(manager, rng)
        batch = ring.publish(manager.events.take(), 0.0)
        if batch is None:
            continue
        for event in decode_batch(batch.payload, early.next_number).events:
            early.apply(event)
        expected = [manager.events.digests(group) for group in range(2)]
        assert early.digests == expected
        assert ring.digests == expected[0]
        late = GroupShadow(GROUPS)
        for event in decode_batch(ring.snapshot(0.0).payload).events:
            late.apply(event)
        assert late.digests == expected
        lacking += expected[0] != expected[1]
    assert lacking > 20


def test_a_follower_of_one_group_refuses_the_events_of_another() -> None:
    """It would take the same digest of two groups for one block stored twice."""
    manager = HybridKVCacheManager(GROUPS, num_blocks=14, block_size=2)
    manager.events.record()
    served(manager, random.Random(0))
    ring, follower = BatchRing(3), BatchFollower()
    batch = ring.publish(manager.events.take(), 0.0)
    assert batch is not None
    with pytest.raises(PagedKVError, match=r"event \d+ is of group 1: a follower knows group 0"):
        follower.read(batch)
    assert (follower.next_number, follower.index.digests) == (0, set())
