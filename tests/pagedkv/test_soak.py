"""Long walks with failures in the middle of operations, after which nothing may be left over."""

import os
from functools import partial
from typing import Any

import numpy as np
import pytest

from pagedkv import KVCacheManager, Namespace
from pagedkv.policies import POLICIES
from pagedkv.policies.quotas import NamespaceQuotas
from pagedkv.reference_policies import ReferenceQuotas
from pagedkv.testing import FailureInjector, check_nothing_is_held, random_walk

SIZES: list[dict[str, Any]] = [
    {},
    {"num_blocks": 20, "block_size": 3, "max_seqs": 12},
    {"num_blocks": 12, "block_size": 2, "max_seqs": 5, "watermark": 0.3},
    {"num_blocks": 8, "block_size": 4, "max_seqs": 3},
    {"num_blocks": 12, "block_size": 1, "max_seqs": 4},
]
LIMITS = {Namespace(salt="tenant"): 2}
LONG = int(os.environ.get("PAGEDKV_SOAK_OPS", "0"))


def policy_options(name: str | None) -> dict[str, Any]:
    """A new policy for each walk, with its model."""
    if name != "quotas":
        return {"policy": name}
    return {"policy": NamespaceQuotas(LIMITS), "reference": partial(ReferenceQuotas, limits=LIMITS.items())}


BATCHES = [(name, size) for size in range(len(SIZES)) for name in [*POLICIES, "quotas", None]]
"""Every policy and no prefix cache, in every size."""


def soak(num_ops: int, seed: int, batches: list[tuple[str | None, int]]) -> int:
    """Walk so many operations in all, a tenth of which fail; every batch ends at the baseline."""
    evicted = 0
    for number, (name, size) in enumerate(batches):
        manager = random_walk(
            num_ops // len(batches),
            seed=seed + number,
            events=number % 2 == 0,
            failures=0.1,
            maintenance=True,
            drain=True,
            invariants_every=10,
            **policy_options(name),
            **SIZES[size],
        )
        evicted += manager.stats().evicted_blocks
        check_baseline(manager)
    return evicted


def check_baseline(manager: KVCacheManager) -> None:
    """Nothing is held, and without its cached content the pool is as it was made."""
    check_nothing_is_held(manager)
    assert manager.maintenance.reset()
    check_nothing_is_held(manager)
    new = KVCacheManager(manager.num_blocks, manager.block_size)._cache
    cache = manager._cache
    assert manager.counts == new.pool.counts
    assert np.array_equal(cache.pool.ref_count, new.pool.ref_count)
    assert np.array_equal(cache.pool.state, new.pool.state)
    assert sorted(cache.pool._free.tolist()) == sorted(new.pool._free.tolist())
    assert len(cache.index) == len(cache.extra_keys) == len(cache.policy.ids()) == 0
    assert not cache.index.indexed.any() and not list(cache.index.chains())
    assert not cache.events.digests()


def test_a_walk_with_failures_ends_at_the_baseline() -> None:
    """The short form: 22,000 operations, every policy, two sizes."""
    assert soak(22_000, seed=1, batches=BATCHES[:22]) > 500


@pytest.mark.skipif(not LONG, reason="takes minutes: PAGEDKV_SOAK_OPS=1000000 asks for a million operations")
def test_a_million_operations_with_failures_end_at_the_baseline() -> None:
    """Every policy in every size."""
    assert soak(LONG, seed=1_000, batches=BATCHES) > LONG // 100


def test_the_baseline_check_finds_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that is not given up shows at the end."""
    manager = random_walk(500, seed=1, drain=True)
    manager._cache.pool.acquire(1)
    with pytest.raises(AssertionError):
        check_baseline(manager)


def test_the_failures_do_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of the operations of a short walk do fail in the middle."""
    failed = 0
    original = FailureInjector._count

    def count(self: FailureInjector, *args: Any) -> None:
        nonlocal failed
        try:
            original(self, *args)
        finally:
            failed += self.has_failed and self.calls == self._fail_at

    monkeypatch.setattr(FailureInjector, "_count", count)
    random_walk(3_000, seed=5, failures=0.3)
    assert failed > 300
