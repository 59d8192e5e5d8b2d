"""The whole manager under every policy against a slow model of that policy, and the same in any process."""

import subprocess
import sys
from typing import Any

import pytest

from pagedkv.policies import POLICIES
from pagedkv.policies.leaf_policy import LeafPolicy
from pagedkv.reference_policies import REFERENCE_POLICIES
from pagedkv.testing import random_walk

SIZES: dict[str, dict[str, Any]] = {
    "default": {},
    "one_block": {"num_blocks": 1, "block_size": 4, "max_seqs": 3},
    "one_token_blocks": {"num_blocks": 12, "block_size": 1, "max_seqs": 4},
    "many_sequences": {"num_blocks": 20, "block_size": 3, "max_seqs": 12},
    "one_token_vocabulary": {"num_blocks": 10, "block_size": 2, "vocabulary": 1, "max_seqs": 5},
    "roomy": {"num_blocks": 40, "block_size": 2, "max_seqs": 6},
    "watermark": {"num_blocks": 25, "block_size": 1, "max_seqs": 3, "vocabulary": 3, "watermark": 0.1},
}


def test_every_policy_has_a_model() -> None:
    """By the same name."""
    assert set(POLICIES) == set(REFERENCE_POLICIES)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", POLICIES)
def test_a_random_walk_agrees_with_the_model_of_the_policy(name: str, size: str) -> None:
    """Results, counts, the very contents that are cached, and invariants, after every operation."""
    random_walk(1_000, seed=1, policy=name, **SIZES[size])


@pytest.mark.parametrize("name", POLICIES)
def test_a_walk_finds_a_policy_with_another_order(name: str) -> None:
    """Compared with the model of another policy, a walk fails: the orders do differ."""
    other = "fifo" if name in ("lru", "priority", "belady") else "lru"
    original = REFERENCE_POLICIES[name]
    REFERENCE_POLICIES[name] = REFERENCE_POLICIES[other]
    try:
        with pytest.raises(AssertionError):
            for seed in range(8):
                random_walk(2_500, seed=seed, policy=name, **SIZES["roomy"])
    finally:
        REFERENCE_POLICIES[name] = original


def test_a_walk_finds_an_order_that_loses_its_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that is not exposed when its last child goes would never be evicted."""
    original = LeafPolicy.discard

    def forgetful(self: LeafPolicy, ids: Any) -> None:
        parents = [self._parent[block] for block in ids.tolist()]
        original(self, ids)
        for parent in parents:
            if not self._children[parent] and self._key[parent] is not None:
                self._leaves[self._lane[parent]].discard(self._key[parent])

    monkeypatch.setattr(LeafPolicy, "discard", forgetful)
    with pytest.raises(AssertionError):
        random_walk(2_000, seed=1, policy="lfu")


SCRIPT = """
from pagedkv.policies import POLICIES
from pagedkv.testing import random_walk
for name in POLICIES:
    manager = random_walk(400, seed=5, policy=name, num_blocks=25, block_size=1)
    policy = manager._cache.policy
    prints = policy._prints._of if hasattr(policy, "_prints") else None
    tables = [manager.tables.block_ids(seq_id).tolist() for seq_id in manager.tables.seq_ids]
    print(name, policy.ids().tolist(), manager.stats(), tables, prints)
"""


def test_the_same_calls_give_the_same_order_in_any_process() -> None:
    """Whatever the hash seed: orders, tables, counts, and the fingerprints that are remembered."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == len(POLICIES)
