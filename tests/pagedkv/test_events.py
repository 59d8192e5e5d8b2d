"""The event stream is complete, exact and the same everywhere."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from pagedkv import KVCacheManager, Media, Namespace, PagedKVError, prefix_digests
from pagedkv.events import DEVICE, HOST, BlocksCleared, BlocksRemoved, BlocksStored
from pagedkv.swap import SwapSpace
from pagedkv.testing import ShadowIndex


def stored(manager: KVCacheManager, seq_id: str, tokens: list[int], **options: object) -> None:
    opened = manager.open(seq_id, tokens, **options)  # type: ignore[arg-type]
    assert opened is not None
    manager.commit(seq_id, tokens[opened.num_cached_tokens :])


def recording(num_blocks: int = 8, block_size: int = 2) -> KVCacheManager:
    manager = KVCacheManager(num_blocks, block_size)
    manager.events.record(b"seed")
    return manager


def digest(parent: bytes, tokens: list[int], extra: str = "") -> bytes:
    """The documented digest, worked out by hand."""
    content = parent + np.array(tokens, "<i4").tobytes() + extra.encode()
    return hashlib.blake2b(content, digest_size=32, key=b"seed").digest()


def test_a_commit_says_what_became_findable() -> None:
    """One event for a run of full blocks, with tokens, parent and chained digests; the tail is not in it."""
    manager = recording()
    stored(manager, "a", [1, 2, 3, 4, 5])
    (event,) = manager.events.take()
    assert isinstance(event, BlocksStored)
    first = digest(bytes(32), [1, 2])
    assert (event.number, event.parent) == (0, None)
    assert event.digests == (first, digest(first, [3, 4]))
    assert event.tokens.tolist() == [[1, 2], [3, 4]]
    assert manager.events.take() == []


def test_a_continuation_names_its_parent() -> None:
    """What is stored later hangs behind what was stored before."""
    manager = recording()
    stored(manager, "a", [1, 2, 3, 4])
    stored(manager, "b", [1, 2, 9, 9, 7])
    first, second = manager.events.take()
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert second.parent == first.digests[0]
    assert second.digests == (digest(first.digests[0], [9, 9]),)


def test_an_equal_block_is_stored_once_and_removed_with_its_last_copy() -> None:
    """Two sequences that compute the same prompt make one event; removal comes with the eviction."""
    manager = recording(num_blocks=4)
    manager.open("a", [1, 2, 3, 4])
    manager.open("b", [1, 2, 3, 4])
    manager.commit("a", [1, 2, 3, 4])
    manager.commit("b", [1, 2, 3, 4])
    assert len(manager.events.take()) == 1
    manager.close("a")
    assert manager.events.take() == []
    manager.close("b")
    assert manager.events.take() == []
    manager.open("c", [7, 7, 7, 7, 7])  # three blocks: evicts the deeper of the two cached ones
    (event,) = manager.events.take()
    assert isinstance(event, BlocksRemoved)
    assert event.digests == (digest(digest(bytes(32), [1, 2]), [3, 4]),)


def test_namespace_and_media_change_the_digest() -> None:
    """Equal tokens under another salt or image are another content, for a router too."""
    digests = set()
    for options in (
        {},
        {"namespace": Namespace(salt="t")},
        {"namespace": Namespace(adapter="x")},
        {"media": [Media(1, "cat")]},
        {"media": [Media(1, "dog")]},
        {"media": [Media(0, "cat")]},
    ):
        manager = recording()
        stored(manager, "a", [1, 2, 3, 4], **options)
        (event,) = manager.events.take()
        assert isinstance(event, BlocksStored)
        digests.add(event.digests)
    assert len(digests) == 6


def test_a_router_can_work_out_the_digests_of_a_prompt() -> None:
    """`prefix_digests` says, without a manager, what the events will name; a partial block has none."""
    options = {"namespace": Namespace(salt="t"), "media": [Media(3, "cat")]}
    manager = recording()
    stored(manager, "a", [1, 2, 3, 4, 5], **options)
    (event,) = manager.events.take()
    assert isinstance(event, BlocksStored)
    found = prefix_digests([1, 2, 3, 4, 5], 2, seed=b"seed", **options)  # type: ignore[arg-type]
    assert tuple(found) == event.digests
    assert prefix_digests([1], 2) == []


def test_an_event_that_cannot_be_recorded_leaves_nothing_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream stays complete even if memory runs out while a digest is worked out."""
    manager = recording()
    manager.open("a", [1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "blake2b", lambda *args, **options: exec("raise MemoryError"))
        with pytest.raises(MemoryError):
            manager.commit("a", [1, 2, 3])
    assert manager.stats().indexed_blocks == 0
    manager.commit("a", [1, 2, 3])
    assert len(manager.events.take()) == 1


def test_a_seed_keeps_digests_apart() -> None:
    """A tenant with another seed cannot recognise a content by its digest."""
    digests = []
    for seed in (b"", b"one", b"two"):
        manager = KVCacheManager(4, 2)
        manager.events.record(seed)
        stored(manager, "a", [1, 2])
        (event,) = manager.events.take()
        assert isinstance(event, BlocksStored)
        digests.append(event.digests[0])
    assert len(set(digests)) == 3


def test_replaying_the_stream_gives_the_index() -> None:
    """A follower that sees events alone knows the digests that are cached, after every call."""
    manager, follower = recording(num_blocks=6), ShadowIndex()
    for i in range(40):
        stored(manager, str(i), [i % 3, 1, i % 5, 2, i % 2, 3, 4])
        manager.close(str(i))
        for event in manager.events.take():
            follower.apply(event)
        assert len(follower.digests) == manager.stats().indexed_blocks
    assert follower.next_number > 40


PROGRAM = """
from pagedkv import KVCacheManager, Media, Namespace
m = KVCacheManager(6, 2)
m.events.record(b"seed")
for i in range(30):
    t = [i % 3, 1, i % 5, 2, i % 2, 3, 4]
    o = m.open(i, t, namespace=Namespace(salt=str(i % 2)), media=[Media(3, "cat")] if i % 4 else [])
    m.commit(i, t[o.num_cached_tokens:])
    m.close(i)
print([(type(e).__name__, e.number, [d.hex() for d in e.digests]) for e in m.events.take()])
"""


def test_digests_and_events_are_the_same_in_every_process() -> None:
    """Another process with another hash seed says the same, byte for byte."""
    said = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(said) == 1
    assert "BlocksRemoved" in said.pop()


@pytest.mark.parametrize("seed", ["text", bytes(65), None])
def test_a_bad_seed_is_refused(seed: object) -> None:
    """A seed is at most 64 bytes."""
    with pytest.raises(PagedKVError, match="at most 64 bytes"):
        KVCacheManager(4, 2).events.record(seed)  # type: ignore[arg-type]


def test_recording_must_begin_before_anything_is_cached() -> None:
    """A stream that begins in the middle would not be complete; recording twice would lose events."""
    manager = KVCacheManager(4, 2)
    stored(manager, "a", [1, 2])
    with pytest.raises(PagedKVError, match="1 blocks are indexed"):
        manager.events.record()
    fresh = recording()
    with pytest.raises(PagedKVError, match="recorded already"):
        fresh.events.record()


def test_nothing_is_recorded_unless_asked() -> None:
    """The default costs nothing and grows nothing."""
    manager = KVCacheManager(4, 2)
    stored(manager, "a", [1, 2])
    assert manager.events.take() == []


def test_every_event_of_the_manager_says_that_it_is_about_the_device() -> None:
    """Stored and removed, whatever the reason."""
    manager = recording(num_blocks=2)
    stored(manager, "a", [1, 2, 3, 4])
    manager.close("a")
    stored(manager, "b", [5, 6, 7])
    events = manager.events.take()
    assert {type(event) for event in events} == {BlocksStored, BlocksRemoved}
    assert {event.tier for event in events if not isinstance(event, BlocksCleared)} == {DEVICE}


def test_the_keeper_of_another_tier_reports_into_the_same_stream() -> None:
    """Numbers go on without a gap; a follower keeps the tiers apart, and a reset clears both."""
    manager, follower = recording(), ShadowIndex()
    stored(manager, "a", [1, 2, 3, 4, 5])
    (event,) = manager.events.take()
    assert isinstance(event, BlocksStored)
    follower.apply(event)
    manager.events.report(event._replace(tier=HOST))
    manager.events.report(BlocksRemoved(-1, event.digests[:1], "capacity", tier=HOST))
    for number, reported in enumerate(manager.events.take(), 1):
        assert reported.number == number
        follower.apply(reported)
    assert follower.digests == set(event.digests) == manager.events.digests()
    assert follower.others == {HOST: set(event.digests[1:])}
    manager.close("a")
    assert manager.maintenance.reset()
    for last in manager.events.take():
        follower.apply(last)
    assert not follower.digests and not follower.others


@pytest.mark.parametrize(
    "wrong",
    [
        BlocksRemoved(1, (b"x",), tier=HOST),
        BlocksStored(1, None, (b"a",), np.zeros((1, 2), np.int32), tier=HOST),
    ],
)
def test_a_follower_finds_what_a_tier_says_wrongly(wrong: BlocksRemoved | BlocksStored) -> None:
    """Removed without being there, or stored twice."""
    follower = ShadowIndex()
    follower.apply(BlocksStored(0, None, (b"a",), np.zeros((1, 2), np.int32), tier=HOST))
    with pytest.raises(AssertionError, match="in host"):
        follower.apply(wrong)


def test_nobody_but_the_manager_speaks_for_the_device() -> None:
    """And nobody at all before events are recorded."""
    silent = KVCacheManager(4, 2)
    with pytest.raises(PagedKVError, match="not recorded"):
        silent.events.report(BlocksRemoved(0, (b"x",), tier=HOST))
    manager = recording()
    for event in (BlocksRemoved(0, (b"x",)), BlocksCleared(0)):
        with pytest.raises(PagedKVError, match="in another tier"):
            manager.events.report(event)  # type: ignore[arg-type]
    assert manager.events.take() == []


def test_a_swapped_sequence_is_not_announced_on_the_host() -> None:
    """Nobody else could hit it there; what stays cached on the device was told already."""
    manager = recording()
    space = SwapSpace(manager, num_host_blocks=4)
    stored(manager, "a", [1, 2, 3])
    told = manager.events.take()
    out = space.swap_out("a")
    assert out is not None
    space.done(out.transfer)
    assert len(told) == 1 and manager.events.take() == []
