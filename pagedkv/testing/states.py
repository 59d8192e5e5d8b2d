"""States: whether a manager agrees with itself, holds nothing any more, or has changed."""

from collections.abc import Collection, Sequence, Set
from types import MethodType
from typing import Any

import numpy as np

from pagedkv.errors import check
from pagedkv.manager import KVCacheManager
from pagedkv.namespace import Namespace


def check_invariants(manager: KVCacheManager) -> None:
    """Raise ``AssertionError`` if any two parts of the manager disagree. Cost: O(pool + table), vectorised.

    >>> check_invariants(KVCacheManager(4, block_size=2))
    """
    manager.check_invariants()


def check_nothing_is_held(manager: KVCacheManager) -> None:
    """Raise ``AssertionError`` unless all is given back: for the end of an engine's day.

    No sequence, pin or fence, no copy that waits, no active block; every extra key and every event's
    digest belongs to content that is cached. Cost: as ``check_invariants``.

    >>> manager = KVCacheManager(4, block_size=2)
    >>> _ = manager.open("a", [1, 2, 3]); manager.close("a"); check_nothing_is_held(manager)
    """
    manager.check_invariants()
    cache, counts = manager._cache, manager.counts
    check(not len(manager.tables), f"{len(manager.tables)} sequences are open")
    check(manager._tables.num_free_rows == len(manager._tables.seq_len), "a row of the page table is lost")
    check(not manager._tables.blocks.any(), "the page table names a block")
    check(not manager.retention.held(), f"{len(manager.retention.held())} pins are left")
    check(not cache.fences and not cache.fences.held(), "a fence is open")
    check(not len(manager.copies), f"{len(manager.copies)} copies wait")
    check(counts.active == 0, f"{counts.active} blocks are active")
    check(counts.free + counts.cached == manager.num_blocks, f"blocks are lost: {counts}")
    check(not len(manager._announced), "a prompt is announced by nobody")
    check(not manager._seqs._extra and not manager._seqs.maybe_shared, "a sequence has left something")
    used = set(cache.index.extra[cache.index.indexed].tolist()) - {0}
    check(cache.extra_keys.ids() == used, "an extra key is kept without content")
    if manager.events.recording:
        check(len(manager.events.digests()) == len(cache.index), "a digest is kept without content")


SCRATCH = ("_seen", "_head", "_spare", "_last_batch")
"""Attributes that may differ though nothing has changed: scratch, lazy heads, what was looked up last."""


def snapshot(manager: KVCacheManager, ignore: Collection[str] = SCRATCH) -> object:
    """Every array, dict, list and number inside a manager, at any depth: two are equal if nothing changed.

    ``ignore`` names attributes that may differ all the same.

    >>> manager = KVCacheManager(4, block_size=2)
    >>> before = snapshot(manager)
    >>> _ = manager.lookup([1, 2, 3]); snapshot(manager) == before
    True
    >>> _ = manager.open("a", [1, 2, 3]); snapshot(manager) == before
    False
    """
    numbers: dict[int, int] = {}

    def freeze(value: Any) -> object:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, dict):
            return tuple((key, freeze(item)) for key, item in value.items())
        if isinstance(value, Set):
            return frozenset(map(freeze, value))
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return tuple(map(freeze, value))
        if isinstance(value, MethodType):
            return value.__qualname__
        if not type(value).__module__.startswith("pagedkv") or isinstance(value, Namespace):
            return value
        if id(value) in numbers:
            return "seen", numbers[id(value)]
        numbers[id(value)] = len(numbers)
        attributes = _attributes(value)
        return tuple((name, freeze(attributes[name])) for name in sorted(attributes) if name not in ignore)

    return freeze(manager)


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds; of one on the compiled core, also the numbers that the core holds."""
    names = getattr(value, "__slots__", None)
    if names:
        return {name: getattr(value, name) for name in names}
    state: dict[str, Any] = vars(value)
    own = getattr(type(value), "__getstate__", None)
    if own is not None and own is not getattr(object, "__getstate__", None):
        state = own(value)
    return state
