"""Eviction policies behind one small contract; each is imported when it is asked for by name."""

import importlib

from pagedkv.errors import PagedKVError
from pagedkv.policies.policy import BlockView, EvictionPolicy

__all__ = ["POLICIES", "BlockView", "EvictionPolicy", "make_policy"]

POLICIES = {
    "lru": "pagedkv.policies.lru:LRU",
    "fifo": "pagedkv.policies.fifo:FIFO",
    "lfu": "pagedkv.policies.lfu:LFU",
    "sieve": "pagedkv.policies.sieve:SIEVE",
    "s3fifo": "pagedkv.policies.s3fifo:S3FIFO",
    "arc": "pagedkv.policies.arc:ARC",
    "priority": "pagedkv.policies.priority:Priority",
    "cost": "pagedkv.policies.cost:CostAware",
    "belady": "pagedkv.policies.belady:Belady",
}
"""Where each policy is. A name makes one with its defaults; import the class to say more."""


def make_policy(policy: "str | EvictionPolicy") -> EvictionPolicy:
    """A new policy by name, or the one given. Raises ``PagedKVError`` for an unknown name.

    >>> type(make_policy("lru")).__name__
    'LRU'
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise PagedKVError(
            f"policy must be an EvictionPolicy or one of {', '.join(POLICIES)}, got {policy!r}"
        )
    module, name = POLICIES[policy].split(":")
    made: EvictionPolicy = getattr(importlib.import_module(module), name)()
    return made
