"""What fails on the way leaves every policy as it was."""

import copy
import random
from typing import Any

import pytest

from pagedkv import BlockPool, KVCacheManager
from pagedkv.block_cache import BlockCache
from pagedkv.policies import POLICIES
from pagedkv.policies.policy import EvictionPolicy
from pagedkv.testing import random_walk, snapshot

POINTS: dict[str, tuple[Any, str]] = {
    "acquire": (BlockPool, "acquire"),
    "forget": (BlockCache, "_forget"),
    "release": (BlockPool, "release"),
}


def fail(*args: object, **options: object) -> None:
    raise MemoryError("injected")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_failure_in_the_middle_leaves_the_order_as_it_was(
    name: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open or a close that fails has told the policy nothing."""
    rng = random.Random(1)
    failed = 0
    look = ordered if point == "forget" else inside

    def attempt(walked: KVCacheManager) -> None:
        nonlocal failed
        if rng.random() < 0.6:
            return
        manager = copy.deepcopy(walked)
        manager._cache._all_compiled = False  # one compiled call has no middle
        before = look(manager)
        with monkeypatch.context() as patch:
            patch.setattr(*POINTS[point], fail)
            try:
                if point != "release":
                    manager.open("injected", [rng.randrange(2) for _ in range(14)])
                elif len(manager.tables):
                    manager.close(manager.tables.seq_ids[0])
                return
            except MemoryError:
                failed += 1
        assert look(manager) == before
        manager.check_invariants()

    random_walk(500, seed=3, policy=name, before_op=attempt, vocabulary=3)
    assert failed > 5


def inside(manager: KVCacheManager) -> object:
    """Everything but scratch."""
    return snapshot(manager, ("_seen", "_head", "_spare", "_next", "_last_batch"))


def ordered(manager: KVCacheManager) -> object:
    """The order alone: blocks that were handed out and given back may be free in another order."""
    policy: EvictionPolicy = manager._cache.policy
    return policy.ids().tolist(), manager.counts, manager.stats()
