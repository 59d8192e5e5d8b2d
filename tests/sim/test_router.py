"""Routers: what they choose, what they know, and that they know it from events alone."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import KVCacheManager
from pagedkv.block_tables import Int32Array
from pagedkv.errors import PagedKVError
from pagedkv.events import BlocksRemoved, BlocksStored, prefix_digests
from pagedkv.sim.fleet.router import (
    ROUTERS,
    Choice,
    LeastLoaded,
    PrefixAware,
    ReplicaLoad,
    RoundRobin,
    make_router,
)
from pagedkv.sim.fleet.router_index import ReplicaIndex

BLOCK = 4


def prompt(*blocks: int, tail: int = 1) -> Int32Array:
    """A full block per number, and more tokens that fill none."""
    return np.concatenate([np.repeat(np.array(blocks, np.int32), BLOCK), np.full(tail, 99, np.int32)])


def loads(
    *queued: int, routed: Sequence[int] | None = None, opened: Sequence[int] | None = None
) -> list[ReplicaLoad]:
    sent = routed or [0] * len(queued)
    held = opened or [0] * len(queued)
    return [ReplicaLoad(*load) for load in zip(sent, queued, held, strict=True)]


def manager_with(*prompts: Int32Array) -> KVCacheManager:
    manager = KVCacheManager(64, BLOCK)
    manager.events.record()
    for i, tokens in enumerate(prompts):
        opened = manager.open(i, tokens)
        assert opened is not None
        manager.commit(i, tokens[opened.num_cached_tokens :])
        manager.close(i)
    return manager


class TestRoundRobin:
    def test_takes_turns(self) -> None:
        """Each replica in order, whatever its load."""
        router, sent = RoundRobin(), [0, 0, 0]
        turns = []
        for _ in range(7):
            choice = router.choose(0.0, prompt(1), loads(9, 0, 5, routed=sent))
            turns.append(choice.replica)
            sent[choice.replica] += 1
        assert turns == [0, 1, 2, 0, 1, 2, 0]


class TestLeastLoaded:
    def test_weighs_queued_and_open_tokens(self) -> None:
        """600 + 0.5 x 0 is less than 100 + 0.5 x 1100, and more than with a weight of 0.25."""
        state = loads(600, 100, opened=[0, 1100])
        assert LeastLoaded(0.5).choose(0.0, prompt(1), state).replica == 0
        assert LeastLoaded(0.25).choose(0.0, prompt(1), state).replica == 1

    def test_equals_go_to_whom_was_sent_least(self) -> None:
        """An idle fleet is filled evenly; the first of what is left."""
        router = LeastLoaded()
        assert router.choose(0.0, prompt(1), loads(0, 0, 0, routed=[2, 1, 1])) == Choice(1, 0)


class TestPrefixAware:
    def test_follows_the_cache(self) -> None:
        """A prompt goes where most of it is cached, and the choice says how much that is."""
        router = PrefixAware(3, BLOCK)
        router.hear(1, 0.0, manager_with(prompt(1, 2)).events.take())
        router.hear(2, 0.0, manager_with(prompt(1, 2, 3)).events.take())
        assert router.choose(0.0, prompt(1, 2, 3, 4), loads(0, 0, 0)) == Choice(2, 3 * BLOCK)
        assert router.choose(0.0, prompt(1, 9), loads(0, 0, 0)) == Choice(1, BLOCK)
        assert router.choose(0.0, prompt(8), loads(0, 0, 0)) == Choice(0, 0)

    def test_goes_elsewhere_when_the_queue_costs_more_than_the_hit(self) -> None:
        """8 cached tokens are worth a queue of 7 tokens, not one of 9."""
        router = PrefixAware(2, BLOCK, load_weight=0.0)
        router.hear(1, 0.0, manager_with(prompt(1, 2)).events.take())
        assert router.choose(0.0, prompt(1, 2), loads(0, 7)) == Choice(1, 8)
        assert router.choose(0.0, prompt(1, 2), loads(0, 9)) == Choice(0, 0)

    def test_the_last_token_is_never_a_hit(self) -> None:
        """Of a prompt of whole blocks that is cached, the last block is computed, as the manager does."""
        tokens = prompt(1, 2, tail=0)
        manager, router = manager_with(tokens), PrefixAware(1, BLOCK)
        router.hear(0, 0.0, manager.events.take())
        opened = manager.open("again", tokens)
        assert opened is not None
        assert router.choose(0.0, tokens, loads(0)).num_cached_tokens == opened.num_cached_tokens == BLOCK

    def test_events_count_from_their_delay_on(self) -> None:
        """Sent at 10 s, known at 12.5 s; then also that the block is gone again."""
        router = PrefixAware(2, BLOCK, event_delay_s=2.5)
        manager = manager_with(prompt(1))
        router.hear(1, 10.0, manager.events.take())
        manager.maintenance.reset()
        router.hear(1, 20.0, manager.events.take())
        known = [router.choose(now, prompt(1), loads(0, 0)).replica for now in (12.0, 12.5, 22.0, 22.5)]
        assert known == [0, 1, 1, 0]

    def test_a_lost_event_is_noticed(self) -> None:
        """What is missing would never be known otherwise."""
        events, index = manager_with(prompt(1), prompt(2)).events.take(), ReplicaIndex()
        index.hear(0.0, events[1:])
        with pytest.raises(PagedKVError, match="event 1 was heard, the next is 0"):
            index.digests(0.0)

    def test_what_lies_in_another_tier_is_no_hit(self) -> None:
        """The replica would have to load it first."""
        manager, index = manager_with(prompt(1)), ReplicaIndex()
        stored = manager.events.take()[0]
        assert isinstance(stored, BlocksStored)
        manager.events.report(BlocksRemoved(0, stored.digests, tier="host"))
        manager.events.report(stored._replace(digests=(b"other",), tier="host"))
        index.hear(0.0, [stored, *manager.events.take()])
        assert index.digests(0.0) == set(stored.digests)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), max_size=12))
    def test_knows_what_a_small_manager_holds(self, prompts: list[list[int]]) -> None:
        """After any prompts, evictions included, the index is the manager's, and so is every hit."""
        manager, index = KVCacheManager(6, BLOCK, max_seq_len=6 * BLOCK), ReplicaIndex()
        manager.events.record()
        for i, blocks in enumerate(prompts):
            tokens = prompt(*blocks)
            index.hear(float(i), manager.events.take())
            expected = index.num_cached(float(i), prefix_digests(tokens, BLOCK))
            opened = manager.open(i, tokens)
            assert opened is not None
            assert opened.num_cached_tokens == expected * BLOCK
            manager.commit(i, tokens[opened.num_cached_tokens :])
            manager.close(i)
        index.hear(99.0, manager.events.take())
        assert index.digests(99.0) == manager.events.digests()


class TestMakeRouter:
    @pytest.mark.parametrize("name", ROUTERS)
    def test_every_name_makes_one(self, name: str) -> None:
        """Each answers with a replica that exists."""
        assert make_router(name, 2, BLOCK).choose(0.0, prompt(1), loads(0, 0)).replica in (0, 1)

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("nearest", {}, "round-robin"),
            ("least-loaded", {"load_weight": -1.0}, "load weight must be 0 to 1e6, got -1.0"),
            ("prefix-aware", {"load_weight": float("nan")}, "got nan"),
            ("prefix-aware", {"event_delay_s": -0.5}, "0 seconds or more, got -0.5"),
        ],
    )
    def test_refuses(self, name: str, options: dict[str, float], message: str) -> None:
        """A name that is unknown, and numbers that mean nothing."""
        with pytest.raises(PagedKVError, match=message):
            make_router(name, 2, BLOCK, **options)

    def test_refuses_an_empty_fleet(self) -> None:
        """There must be somewhere to go."""
        with pytest.raises(PagedKVError, match="num_replicas"):
            make_router("round-robin", 0, BLOCK)
