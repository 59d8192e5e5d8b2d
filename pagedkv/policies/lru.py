"""Least recently used, leaves first: the default policy."""

from typing import TYPE_CHECKING

from pagedkv import core
from pagedkv.policies.numpy_lru import NumpyLRU

if TYPE_CHECKING or core.reason() is not None:
    _Engine = NumpyLRU
else:
    from pagedkv.policies.native_lru import NativeLRU as _Engine

__all__ = ["LRU"]


class LRU(_Engine):
    """Gives up what was released longest ago.

    Leaves come first by construction: a sequence releases its blocks deepest first, and a block can
    only be used while its whole prefix is, so a parent is never less recent than its child.

    Cost: O(1) per block, amortised in the numpy engine, whatever the number cached.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(2, block_size=1, policy="lru")
    >>> for seq_id, token in enumerate([7, 8, 7, 9, 7]):
    ...     opened = manager.open(seq_id, [token], max_cached_tokens=1)
    ...     manager.commit(seq_id, [token][opened.num_cached_tokens:]); manager.close(seq_id)
    >>> manager.stats().hit_tokens
    2
    """
