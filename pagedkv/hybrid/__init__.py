"""Hybrid models: layers with full attention beside layers with a sliding window, over one pool of blocks.

`HybridKVCacheManager` is the manager, `CacheGroup` what it has to know of some layers, `groups_for`
splits the layers of a model, and `HybridSwapSpace` takes sequences to the host. To try a manager: `checked`
(the slow model of `reference` beside it) and `shadow` (what the events tell).
"""

from pagedkv.hybrid.group import CacheGroup
from pagedkv.hybrid.layout import bytes_per_block, groups_for
from pagedkv.hybrid.manager import HybridKVCacheManager
from pagedkv.hybrid.stats import GroupBlocks, HybridStats
from pagedkv.hybrid.swap import HybridSwapSpace

__all__ = [
    "CacheGroup",
    "GroupBlocks",
    "HybridKVCacheManager",
    "HybridStats",
    "HybridSwapSpace",
    "bytes_per_block",
    "groups_for",
]
