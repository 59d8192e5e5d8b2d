"""Batches say what the events say, in the form that readers of vLLM's events expect."""

import importlib.util
import itertools
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec
import pytest

from pagedkv import KVCacheManager, PagedKVError, prefix_digests
from pagedkv.event_batches import (
    EventBatch,
    HashKind,
    Layout,
    MissedBatches,
    WireFormat,
    decode_batch,
    int_hash,
)
from pagedkv.event_follower import BatchFollower
from pagedkv.event_ring import BatchRing
from pagedkv.events import HOST, BlocksCleared, BlocksRemoved, BlocksStored, Event
from pagedkv.testing import random_walk

HASHES, LAYOUTS = get_args(HashKind), get_args(Layout)
FORMATS = [WireFormat(hashes, layout) for hashes in HASHES for layout in LAYOUTS]
every_format = pytest.mark.parametrize("wire", FORMATS, ids=lambda w: f"{w.hashes}-{w.layout}")


def digests_of(event: Event) -> tuple[bytes, ...]:
    assert not isinstance(event, BlocksCleared)
    return event.digests


# The published message format, written down again as a reader would: current (maps), and older (arrays).


class StoredMap(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class RemovedMap(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class StoredArray(msgspec.Struct, tag="BlockStored", array_like=True):
    """As it was before tiers and adapter names were added behind."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int | bytes]


class ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class MapMessage(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredMap | RemovedMap | ClearedMap]
    data_parallel_rank: int | None = None


class ArrayMessage(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


def a_stream() -> list[Event]:
    """Stored, stored behind it, evicted: three events of blocks of 2."""
    manager = KVCacheManager(4, 2)
    manager.events.record(b"seed")
    for name, tokens in (("a", [1, 2, 3, 4]), ("b", [1, 2, 9, 9]), ("c", [7] * 8)):
        opened = manager.open(name, tokens)
        assert opened is not None
        manager.commit(name, tokens[opened.num_cached_tokens :])
        manager.close(name)
    return manager.events.take()


def as_plain(events: Sequence[Event], width: int = 32) -> list[object]:
    """Comparable events, with digests cut to their last ``width`` bytes."""

    def plain(event: Event) -> object:
        if isinstance(event, BlocksCleared):
            return event
        digests = [digest[-width:] for digest in event.digests]
        if isinstance(event, BlocksRemoved):
            return "removed", event.number, digests
        return "stored", event.number, event.parent and event.parent[-width:], digests, event.tokens.tolist()

    return [plain(event) for event in events]


class Traffic:
    """A manager under random prompts, whose events go to a ring."""

    def __init__(self, seed: int, capacity: int, wire: WireFormat | None = None) -> None:
        self.random = random.Random(seed)
        self.manager = KVCacheManager(8, 2)
        self.manager.events.record()
        self.ring = BatchRing(capacity, wire)

    def run(self, num_prompts: int) -> None:
        for _ in range(num_prompts):
            tokens = [self.random.randrange(3) for _ in range(self.random.randint(2, 12))]
            opened = self.manager.open("x", tokens)
            assert opened is not None
            self.manager.commit("x", tokens[opened.num_cached_tokens :])
            self.manager.close("x")
            self.ring.publish(self.manager.events.take(), 0.0)


@every_format
def test_a_batch_decodes_to_the_events_it_was_made_of(wire: WireFormat) -> None:
    """Nothing is lost but the upper bytes of digests that were written as ints."""
    events = [*a_stream(), BlocksCleared(len(a_stream()))]
    assert {type(event) for event in events} == {BlocksStored, BlocksRemoved, BlocksCleared}
    decoded = decode_batch(wire.encode(events, 12.5))
    assert (decoded.timestamp, decoded.data_parallel_rank) == (12.5, 0)
    assert as_plain(decoded.events) == as_plain(events, 8 if wire.hashes == "int" else 32)


def test_maps_are_what_current_readers_decode() -> None:
    """Field names, tags, int hashes of the last 64 bits, and the batch as an array of three."""
    events = [*a_stream(), BlocksCleared(9)]
    payload = WireFormat(medium="CPU", data_parallel_rank=3).encode(events, 1.0)
    message = msgspec.msgpack.decode(payload, type=MapMessage)
    assert (message.ts, message.data_parallel_rank) == (1.0, 3)
    first, second, *_, cleared = message.events
    parent, child = digests_of(a_stream()[0])
    assert isinstance(first, StoredMap)
    assert first.block_hashes == [int.from_bytes(parent[24:], "big"), int.from_bytes(child[24:], "big")]
    assert (first.parent_block_hash, first.token_ids, first.block_size) == (None, [1, 2, 3, 4], 2)
    assert (first.lora_id, first.medium, first.lora_name, first.group_idx) == (None, "CPU", None, 0)
    assert isinstance(second, StoredMap)
    assert second.parent_block_hash == first.block_hashes[0] == int_hash(parent)
    assert isinstance(message.events[2], RemovedMap)
    assert message.events[2].medium == "CPU"
    assert isinstance(cleared, ClearedMap)


def test_arrays_are_what_older_readers_decode() -> None:
    """By position, behind the tag; fields that came later stand at the end and are passed over."""
    payload = WireFormat(hashes="bytes", layout="array").encode([*a_stream(), BlocksCleared(9)], 1.0)
    message = msgspec.msgpack.decode(payload, type=ArrayMessage)
    first, second, removed, *_, cleared = message.events
    assert isinstance(first, StoredArray)
    assert isinstance(second, StoredArray)
    assert isinstance(removed, RemovedArray)
    assert isinstance(cleared, ClearedArray)
    assert tuple(first.block_hashes) == digests_of(a_stream()[0])
    assert second.parent_block_hash == first.block_hashes[0]
    raw = msgspec.msgpack.decode(payload)
    assert raw[1][0] == [
        "BlockStored",
        list(digests_of(a_stream()[0])),
        None,
        [1, 2, 3, 4],
        2,
        None,
        "GPU",
        None,
        None,
        0,
    ]
    assert raw[1][2] == ["BlockRemoved", list(digests_of(a_stream()[2])), "GPU", 0]


@pytest.mark.parametrize("hashes", HASHES)
def test_the_classes_of_vllm_decode_and_encode_batches(hashes: Any) -> None:
    """Both ways, with vLLM's own classes where they are installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch
    events = [*a_stream(), BlocksCleared(len(a_stream()))]
    message = msgspec.msgpack.decode(WireFormat(hashes).encode(events, 1.0), type=KVEventBatch)
    assert isinstance(message.events[0], BlockStored)
    assert message.events[0].token_ids == [1, 2, 3, 4]
    assert isinstance(message.events[-1], AllBlocksCleared)
    decoded = decode_batch(msgspec.msgpack.encode(message))
    assert as_plain(decoded.events) == as_plain(events, 8 if hashes == "int" else 32)


def test_fields_that_newer_writers_add_are_passed_over() -> None:
    """A message with more, or without the last optional fields, decodes all the same."""
    stored = StoredMap([2**64 - 1], None, [5, 6], 2, None, "GPU", None, extra_keys=[None], group_idx=0)
    for event in (stored, StoredArray([-1], None, [5, 6], 2, None)):
        (decoded,) = decode_batch(msgspec.msgpack.encode([0.0, [event]])).events
        assert isinstance(decoded, BlocksStored)
        assert decoded.digests == (b"\xff" * 8,)


def spoiled(**changes: object) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2]}
    return msgspec.msgpack.encode([0.0, [event | {"block_size": 2} | changes], 0])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "0 bytes are no batch"),
        (b"\xc1", "1 bytes are no batch"),
        (b"\x93\xca\x00", "3 bytes are no batch"),
        (msgspec.msgpack.encode([0.0]), "Expected `array`"),
        (msgspec.msgpack.encode({"ts": 0.0}), "Expected `array`"),
        (b"\x93\x00" + b"\x91" * 100_000, "recursion"),
        (msgspec.msgpack.encode([0.0, [7], 0]), "unknown kind of event None"),
        (msgspec.msgpack.encode([0.0, [[]], 0]), "unknown kind of event None"),
        (msgspec.msgpack.encode([0.0, [["BlockMoved"]], 0]), "unknown kind of event 'BlockMoved'"),
        (msgspec.msgpack.encode([0.0, [[["BlockStored"]]], 0]), "unknown kind of event"),
        (msgspec.msgpack.encode([0.0, [["BlockStored", [1]]], 0]), "Expected `array`"),
        (spoiled(block_hashes=None), "Expected `array`, got `null`"),
        (spoiled(block_hashes=["x"]), "Expected `int | bytes`"),
        (spoiled(block_size=3), "1 blocks of 3 tokens come with 2 tokens"),
        (spoiled(block_size=0, token_ids=[]), "1 blocks of 0 tokens"),
        (spoiled(token_ids=[1, -2]), "token ids must be in"),
        (spoiled(token_ids=[1, 2**31]), "token ids must be in"),
    ],
    ids=itertools.count(),
)
def test_what_is_no_batch_is_refused(payload: bytes, reason: str) -> None:
    """With the size of the message and the reason."""
    with pytest.raises(PagedKVError, match="bytes are no batch of events") as caught:
        decode_batch(payload)
    assert reason in str(caught.value)


def test_numbers_have_no_gaps_and_no_number_is_spent_on_nothing() -> None:
    """Batch numbers and event numbers both count from 0."""
    events, ring = a_stream(), BatchRing(9)
    numbers = []
    for i, event in enumerate(events):
        assert ring.publish([], 0.0) is None
        batch = ring.publish([event], float(i))
        assert batch is not None
        numbers.append(batch.number)
    assert numbers == list(range(len(events)))
    assert ring.next_number == len(events)


def test_a_missing_or_repeated_event_is_refused_and_changes_nothing() -> None:
    """The stream stays complete: what is out of order is not published."""
    events, ring = a_stream(), BatchRing(9)
    for wrong in (events[1:], [events[0], events[2]], [events[0], events[0]]):
        with pytest.raises(PagedKVError, match=r"event \d cannot be published, the next is \d"):
            ring.publish(wrong, 0.0)
        assert (ring.next_number, ring.since(0), ring.digests) == (0, [], set())
    ring.publish(events, 0.0)
    with pytest.raises(PagedKVError, match="event 0 cannot be published, the next is"):
        ring.publish(events, 0.0)


@every_format
@pytest.mark.parametrize("seed", range(3))
def test_replaying_the_batches_gives_the_index(wire: WireFormat, seed: int) -> None:
    """A follower of batches alone knows what is cached, after every batch."""
    traffic, follower = Traffic(seed, 4, wire), BatchFollower()
    for _ in range(100):
        traffic.run(1)
        for batch in traffic.ring.since(follower.next_number):
            follower.read(batch)
        follower.check(traffic.ring.digests)
        assert len(follower.index.digests) == traffic.manager.stats().indexed_blocks
    assert follower.next_number == traffic.ring.next_number > 50


@pytest.mark.parametrize("policy", ["lru", "sieve", "arc"])
def test_batches_and_snapshots_follow_a_random_walk(policy: str) -> None:
    """Under forks, truncations and fences too; a snapshot at any moment gives the same index."""
    ring, follower, rng = BatchRing(2), BatchFollower(), random.Random(5)

    def tap(take: Callable[[], list[Event]]) -> list[Event]:
        events = take()
        batch = ring.publish(events, 0.0)
        if batch is not None:
            follower.read(batch)
            follower.check(ring.digests)
            if rng.random() < 0.2:
                late = BatchFollower()
                late.resync(ring.snapshot(0.0))
                late.check(ring.digests)
        return events

    def attach(manager: KVCacheManager) -> None:
        if "take" not in vars(manager.events):
            take = manager.events.take
            vars(manager.events)["take"] = lambda: tap(take)

    manager = random_walk(1500, seed=3, policy=policy, before_op=attach)
    assert ring.next_number > 100
    assert len(ring.digests) == manager.stats().indexed_blocks


def test_a_reader_that_comes_too_late_is_told_what_it_missed() -> None:
    """An error with the numbers, not a silent gap; the ring keeps the newest."""
    traffic = Traffic(0, capacity=3)
    while traffic.ring.next_number < 10:
        traffic.run(1)
    assert [batch.number for batch in traffic.ring.since(7)] == [7, 8, 9]
    assert traffic.ring.since(10) == []
    with pytest.raises(MissedBatches, match="batches 4 to 6 were missed, the oldest one left is 7") as caught:
        traffic.ring.since(4)
    assert (caught.value.first, caught.value.last, caught.value.oldest) == (4, 6, 7)
    for number, reason in ((11, "batch 11 does not exist: the next one is 10"), (-1, "at least 0, got -1")):
        with pytest.raises(PagedKVError, match=reason):
            traffic.ring.since(number)


@every_format
def test_a_snapshot_stands_in_for_what_was_missed(wire: WireFormat) -> None:
    """A late reader applies it, reads on behind it, and knows what one that read everything knows."""
    traffic, late = Traffic(1, 3, wire), BatchFollower()
    traffic.run(2)
    for batch in traffic.ring.since(0):
        late.read(batch)
    traffic.run(40)
    with pytest.raises(MissedBatches):
        traffic.ring.since(late.next_number)
    late.resync(traffic.ring.snapshot(0.0))
    assert (late.next_number, traffic.ring.since(late.next_number)) == (traffic.ring.next_number, [])
    late.check(traffic.ring.digests)
    traffic.run(3)
    for batch in traffic.ring.since(late.next_number):
        late.read(batch)
    late.check(traffic.ring.digests)


def test_a_snapshot_joins_blocks_that_follow_each_other() -> None:
    """One event per run, with the parent and the tokens that the events had."""
    ring = BatchRing(9)
    ring.publish(a_stream()[:2], 0.0)
    cleared, *stored = decode_batch(ring.snapshot(0.0).payload).events
    assert isinstance(cleared, BlocksCleared)
    expected = [event._replace(number=event.number + 1) for event in a_stream()[:2]]
    assert as_plain(stored) == as_plain(expected, 8)


def test_a_follower_refuses_gaps_repeats_and_false_snapshots() -> None:
    """Each with the numbers, and it still knows what it knew."""
    traffic, follower = Traffic(2, 99), BatchFollower()
    traffic.run(20)
    first, second, third, *_ = traffic.ring.since(0)
    follower.read(first)
    known = set(follower.index.digests)
    for wrong, reason in (
        (third, "batches 1 to 1 were missed, the oldest one left is 2"),
        (first, "batch 0 was read already, the next is 1"),
        (EventBatch(1, b"?"), "1 bytes are no batch"),
    ):
        with pytest.raises(PagedKVError, match=reason):
            follower.read(wrong)
    with pytest.raises(PagedKVError, match="batch 1 is no snapshot"):
        follower.resync(second)
    assert (follower.next_number, follower.index.digests) == (1, known)
    snapshot = traffic.ring.snapshot(0.0)
    for batch in traffic.ring.since(1):
        follower.read(batch)
    follower.resync(snapshot)  # the same moment: changes nothing
    traffic.run(10)
    for batch in traffic.ring.since(follower.next_number):
        follower.read(batch)
    with pytest.raises(PagedKVError, match="is older than batch"):
        follower.resync(snapshot)
    follower.check(traffic.ring.digests)


def test_check_says_how_far_the_index_is_off() -> None:
    """Missing and superfluous blocks are counted."""
    traffic, follower = Traffic(3, 99), BatchFollower()
    traffic.run(1)
    with pytest.raises(AssertionError, match=f"{len(traffic.ring.digests)} blocks are missing, 0 should"):
        follower.check(traffic.ring.digests)
    follower.read(traffic.ring.since(0)[0])
    with pytest.raises(AssertionError, match=f"0 blocks are missing, {len(traffic.ring.digests)} should"):
        follower.check([])


def test_events_that_contradict_each_other_are_found() -> None:
    """A block stored twice or behind nothing is an error of the writer, and the checker says so."""
    stored = a_stream()[0]
    payload = WireFormat().encode([stored, stored], 0.0)
    with pytest.raises(AssertionError, match="stored twice"):
        BatchFollower().read(EventBatch(0, payload))


@pytest.mark.parametrize("hashes", HASHES)
def test_a_router_finds_a_prompt_by_its_digests(hashes: Any) -> None:
    """`prefix_digests` of a prompt against what was read: the cached part, and no more."""
    ring, follower = BatchRing(9, WireFormat(hashes)), BatchFollower()
    batch = ring.publish(a_stream()[:1], 0.0)
    assert batch is not None
    follower.read(batch)
    digests = prefix_digests([1, 2, 3, 4, 5, 6], 2, seed=b"seed")
    assert [digest in follower for digest in digests] == [True, True, False]


def test_a_snapshot_of_nothing_is_refused() -> None:
    """Before the first batch there is nothing to stand in for."""
    with pytest.raises(PagedKVError, match="0 were published"):
        BatchRing(1).snapshot(0.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hashes": "str"}, "hashes must be one of int, bytes, got 'str'"),
        ({"layout": "list"}, "layout must be one of map, array, got 'list'"),
        ({"medium": None}, "medium must be a string, got None"),
        ({"data_parallel_rank": -1}, "data_parallel_rank must be an integer of at least 0, got -1"),
        ({"data_parallel_rank": True}, "got True"),
    ],
)
def test_a_format_that_nobody_reads_is_refused(options: dict[str, Any], reason: str) -> None:
    """Choices are checked when they are made."""
    with pytest.raises(PagedKVError, match=reason):
        WireFormat(**options)


@pytest.mark.parametrize("capacity", [0, -3, 1.5, True])
def test_a_ring_holds_at_least_one_batch(capacity: Any) -> None:
    """A capacity is a positive integer."""
    with pytest.raises(PagedKVError, match="capacity must be an integer of at least 1"):
        BatchRing(capacity)


def test_without_msgspec_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the ring is made, before any event is at stake."""
    monkeypatch.setitem(sys.modules, "msgspec", None)
    for call in (lambda: BatchRing(1), lambda: decode_batch(b""), lambda: WireFormat().encode([], 0.0)):
        with pytest.raises(PagedKVError, match=r'pip install "pagedkv\[events\]"'):
            call()


def test_importing_the_module_needs_no_msgspec() -> None:
    """The package is loaded when it is used."""
    code = "import sys, pagedkv.event_batches; print({'msgspec', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@every_format
def test_other_tiers_have_a_medium_of_their_own(wire: WireFormat) -> None:
    """The host is "CPU", as routers expect it; another tier keeps its name. Snapshots tell of all tiers."""
    stored = a_stream()[0]
    assert isinstance(stored, BlocksStored)
    events: list[Event] = [
        stored._replace(number=0),
        stored._replace(number=1, tier=HOST),
        stored._replace(number=2, tier="disk"),
        BlocksRemoved(3, stored.digests[1:]),
    ]
    ring, follower, late = BatchRing(3, wire), BatchFollower(), BatchFollower()
    batch = ring.publish(events, 0.0)
    assert batch is not None
    assert b"GPU" in batch.payload and b"CPU" in batch.payload and b"disk" in batch.payload
    follower.read(batch)
    late.resync(ring.snapshot(0.0))
    for reader in (follower, late):
        reader.check(ring.digests)
        assert {tier: len(known) for tier, known in reader.index.others.items()} == {HOST: 2, "disk": 2}
        assert len(reader.index.digests) == 1
