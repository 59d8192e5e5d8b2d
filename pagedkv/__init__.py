"""pagedkv: an embeddable KV-cache memory manager.

``import pagedkv`` needs numpy only. ``KVStorage`` and ``PagedKVCache`` import torch when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pagedkv.block_pool import BlockPool
from pagedkv.block_tables import NULL_BLOCK
from pagedkv.copies import BlockCopies
from pagedkv.errors import BlockError, NeverFits, PagedKVError, SequenceError, SpecError
from pagedkv.events import BlocksCleared, BlocksRemoved, BlocksStored, prefix_digests
from pagedkv.manager import KVCacheManager
from pagedkv.namespace import Media, Namespace
from pagedkv.opened import Lookup, Opened
from pagedkv.page_table import PAD_SLOT, PageTable
from pagedkv.spec import KVCacheSpec, LayerSpec
from pagedkv.stats import CacheBytes, ManagerStats
from pagedkv.swap import SwapIn, SwapOut, SwapSpace, SwapStats
from pagedkv.swap_advisor import SwapAdvisor, SwapCosts

if TYPE_CHECKING:
    from pagedkv.cache import DecodeBatch, PagedKVCache
    from pagedkv.storage import KVStorage

__version__ = "0.1.0"

__all__ = [
    "NULL_BLOCK",
    "PAD_SLOT",
    "BlockCopies",
    "BlockError",
    "BlockPool",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "CacheBytes",
    "DecodeBatch",
    "KVCacheManager",
    "KVCacheSpec",
    "KVStorage",
    "LayerSpec",
    "Lookup",
    "ManagerStats",
    "Media",
    "Namespace",
    "NeverFits",
    "Opened",
    "PageTable",
    "PagedKVCache",
    "PagedKVError",
    "SequenceError",
    "SpecError",
    "SwapAdvisor",
    "SwapCosts",
    "SwapIn",
    "SwapOut",
    "SwapSpace",
    "SwapStats",
    "prefix_digests",
]


_NEEDS_TORCH = {
    "PagedKVCache": "pagedkv.cache",
    "DecodeBatch": "pagedkv.cache",
    "KVStorage": "pagedkv.storage",
}


def __getattr__(name: str) -> Any:
    """Import the classes that need torch only when they are asked for."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
    return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)


def __dir__() -> list[str]:
    """Names for completion, the lazy ones included."""
    return sorted({*globals(), *__all__})
