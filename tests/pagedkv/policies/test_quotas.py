"""Quotas: a namespace keeps at most so many cached blocks, its own go first, nobody else notices."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv import KVCacheManager, Namespace, PagedKVError
from pagedkv.policies import POLICIES, EvictionPolicy, make_policy
from pagedkv.policies.priority import Priority
from pagedkv.policies.quotas import NamespaceQuotas
from pagedkv.testing import ShadowIndex, manager_state

A, B = Namespace(salt="a"), Namespace(adapter="b")


def run(manager: KVCacheManager, tokens: range, namespace: Namespace | None = None) -> int:
    """Serve a prompt; returns how many tokens were cached."""
    opened = manager.open("s", tokens, namespace=namespace, max_cached_tokens=len(tokens))
    assert opened is not None
    manager.commit("s", tokens[opened.num_cached_tokens :])
    manager.close("s")
    return opened.num_cached_tokens


def test_a_namespace_with_a_quota_keeps_its_most_recent_and_gives_up_its_own() -> None:
    """Two blocks of A stay, whatever A computes; the cached blocks of all others are untouched."""
    manager = KVCacheManager(20, 2, policy=NamespaceQuotas({A: 2}))
    run(manager, range(8))
    run(manager, range(8), B)
    for start in (0, 20, 40):
        run(manager, range(start, start + 4), A)
        assert manager.counts.cached == 8 + 2
        manager.check_invariants()
    assert manager.stats().evicted_blocks == 4
    assert run(manager, range(40, 44), A) == 4
    assert run(manager, range(8)) == run(manager, range(8), B) == 8


def test_what_is_in_use_is_no_part_of_the_quota() -> None:
    """Blocks count once nobody holds them: then the children of too many go first."""
    manager = KVCacheManager(20, 2, policy=NamespaceQuotas({A: 3}))
    manager.open("long", range(12), namespace=A)
    manager.commit("long", range(12))
    assert manager.counts == (14, 0, 6)
    manager.close("long")
    assert manager.counts == (17, 3, 0)
    assert run(manager, range(12), A) == 6


def test_a_quota_of_nothing_keeps_nothing_and_the_default_namespace_may_have_one() -> None:
    """``Namespace()`` is that of sequences without any."""
    manager = KVCacheManager(9, 2, policy=NamespaceQuotas({Namespace(): 0}))
    run(manager, range(8))
    assert manager.counts.cached == 0
    run(manager, range(8), A)
    assert manager.counts.cached == 4


def test_room_is_made_by_whoever_is_idle_longest() -> None:
    """Within the quotas, namespaces are alike."""
    manager = KVCacheManager(4, 2, policy=NamespaceQuotas({A: 4}))
    run(manager, range(4), A)
    run(manager, range(4))
    run(manager, range(20, 24), B)
    assert run(manager, range(4)) == 4
    run(manager, range(30, 34))
    assert run(manager, range(4), A) == 0


def walk(manager: KVCacheManager, seed: int, check: Callable[[], None]) -> list[Any]:
    """Random sequences of three namespaces that overlap in time; returns all that could be seen."""
    rng = random.Random(seed)
    names: list[int] = []
    seen: list[Any] = []
    manager.events.record()
    follower = ShadowIndex()
    for name in range(400):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        opened = manager.open(name, prompt, namespace=rng.choice([None, A, B]))
        if opened is not None:
            manager.commit(name, prompt[opened.num_cached_tokens :])
            names.append(name)
        if len(names) > 2 or opened is None:
            manager.close(names.pop(rng.randrange(len(names))))
        manager.check_invariants()
        for event in manager.events.take():
            follower.apply(event)
        check()
        seen.append((opened, manager_state(manager), manager._cache.policy.ids().tolist()))
    assert len(follower.digests) == manager.stats().indexed_blocks
    return seen


def test_quotas_that_are_never_reached_change_nothing() -> None:
    """The same victims in the same order as plain LRU, whose order is the time of release."""
    plain = walk(KVCacheManager(14, 2), 1, lambda: None)
    policy = NamespaceQuotas({A: 14, B: 14})
    assert walk(KVCacheManager(14, 2, policy=policy), 1, lambda: None) == plain


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "belady"])
def test_no_namespace_ever_has_more_cached_than_its_quota(name: str) -> None:
    """Under every policy, with everything else in order too; and the quota is used to the full."""
    policy = NamespaceQuotas({A: 2, B: 3}, lambda: make_policy(name))
    manager = KVCacheManager(14, 2, policy=policy)
    most = {A: 0, B: 0}

    def check() -> None:
        idle = np.flatnonzero(manager._cache.pool.state == 1).tolist()
        owners = [policy.view.namespace(block) for block in idle]
        for namespace, limit in ((A, 2), (B, 3)):
            assert owners.count(namespace) <= limit
            most[namespace] = max(most[namespace], owners.count(namespace))

    walk(manager, 2, check)
    assert most == {A: 2, B: 3}


def test_priorities_work_within_quotas() -> None:
    """``retain`` reaches the part that knows the blocks."""
    manager = KVCacheManager(12, 2, policy=NamespaceQuotas({A: 2}, Priority))
    manager.open("s", range(4), namespace=A)
    manager.commit("s", range(4))
    assert manager.retention.set_priority("s", 90) == 2
    manager.close("s")
    run(manager, range(20, 24), A)
    assert run(manager, range(4), A) == 4


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({A: -1}, "at least 0, got -1"),
        ({A: True}, "at least 0, got True"),
        ({A: 1.5}, r"at least 0, got 1\.5"),
        ({"a": 1}, "a quota is for a Namespace, got 'a'"),
    ],
)
def test_misuse_is_refused_with_the_numbers(limits: Any, message: str) -> None:
    """At construction, before any block is cached."""
    with pytest.raises(PagedKVError, match=message):
        NamespaceQuotas(limits)


def test_each_part_has_a_policy_of_its_own() -> None:
    """One policy for two parts would be refused when the manager binds it."""
    one: EvictionPolicy = make_policy("lfu")
    with pytest.raises(PagedKVError, match="another manager already"):
        KVCacheManager(4, 2, policy=NamespaceQuotas({A: 1}, lambda: one))
