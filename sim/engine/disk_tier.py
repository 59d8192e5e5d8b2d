"""A third tier for prefixes: what host memory has no room for goes to a disk, and comes back on a hit."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.block_tables import Int32Array
from pagedkv.errors import require_count
from pagedkv.manager import KVCacheManager
from pagedkv.sim.engine.link import Link, LinkSpeed


@dataclass(frozen=True)
class DiskTierSettings:
    """A prefix cache of ``num_blocks`` blocks of ``bytes_per_block`` on a disk, which reads or writes."""

    num_blocks: int
    bytes_per_block: int
    read: LinkSpeed
    write: LinkSpeed

    def __post_init__(self) -> None:
        """Check the counts."""
        require_count("num_blocks", self.num_blocks, 1)
        require_count("bytes_per_block", self.bytes_per_block, 1)


class DiskTier:
    """Disk blocks with prefixes, counted by a manager of their own, least recently used out first.

    A prefix is stored as a whole, what is there already is not written again, and it stays when it is read.
    Reads and writes wait for one another. Nobody waits for a write: the host copies what it gives up.

    >>> import numpy as np
    >>> disk = DiskTier(DiskTierSettings(4, 100, LinkSpeed(100.0), LinkSpeed(50.0)), block_size=2, max_seqs=8)
    >>> disk.store(np.arange(6), now_s=1.0); disk.find(np.arange(9))   # three blocks of two seconds each
    6
    >>> disk.read(1, np.arange(6), 2, now_s=5.0)                       # waits for the writes, reads two
    9.0
    >>> disk.close(1); disk.num_written, disk.num_read
    (3, 2)
    """

    def __init__(self, settings: DiskTierSettings, block_size: int, max_seqs: int) -> None:
        """Start empty."""
        self.pool = KVCacheManager(settings.num_blocks, block_size, max_seqs=max_seqs + 1)
        self.read_link = Link(settings.read)
        self.write_link = Link(settings.write, other=self.read_link)
        self.num_written = self.num_read = 0
        self._bytes_per_block = settings.bytes_per_block

    def find(self, tokens: Int32Array) -> int:
        """How many of a prompt's first tokens are here, in whole blocks and fewer than all."""
        return self.pool.lookup(tokens[: self.pool.max_seq_len]).num_cached_tokens

    def read(self, request: int, tokens: Int32Array, num_blocks: int, now_s: float) -> float:
        """When the last ``num_blocks`` of a prefix that is here have been read; it stays until ``close``."""
        opened = self.pool.open(request, tokens, max_cached_tokens=len(tokens))
        assert opened is not None  # it needs no block that is not there
        self.num_read += num_blocks
        return self.read_link.begin(now_s, num_blocks * self._bytes_per_block)

    def close(self, request: int) -> None:
        """Say that what was read has been used."""
        self.pool.close(request)

    def store(self, prefix: Int32Array, now_s: float) -> None:
        """Write what is not here of full blocks, as far as there is room beside what is being read."""
        tokens = prefix[: self.pool.max_seq_len]
        opened = self.pool.open("store", tokens, max_cached_tokens=len(tokens))
        if opened is None:
            return
        self.pool.commit("store", tokens[opened.num_cached_tokens :])
        self.pool.close("store")
        blocks = (len(tokens) - opened.num_cached_tokens) // self.pool.block_size
        self.num_written += blocks
        self.write_link.begin(now_s, blocks * self._bytes_per_block)
