"""Whether this machine can hold the bookkeeping of a pool, whatever holds its tensors."""

from __future__ import annotations

import os

from pagedkv.errors import PagedKVError

BYTES_PER_BLOCK, BYTES_PER_SLOT = 68, 4
"""What `pagedkv.manager.KVCacheManager` says that it takes at least."""


def require_books_fit(num_blocks: int, block_size: int, num_pools: int = 1) -> None:
    """Refuse pools whose books exceed the memory of this machine, which would end the process.

    Raises:
        PagedKVError: with both sizes.

    >>> require_books_fit(2_000_000, 16)
    """
    books = num_pools * num_blocks * (BYTES_PER_BLOCK + BYTES_PER_SLOT * block_size)
    memory = _memory_bytes()
    if memory is not None and books > memory:
        pools = f"{num_pools:,} pools of " if num_pools > 1 else ""
        raise PagedKVError(
            f"the books of {pools}{num_blocks:,} blocks of {block_size:,} tokens take "
            f"{books / 2**30:,.0f} GiB, this machine has {memory / 2**30:,.0f}: use fewer "
            "(--num-blocks, --gpu-memory)"
        )


def _memory_bytes() -> int | None:
    """Physical memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
