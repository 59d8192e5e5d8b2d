"""A second tier for prefixes: what is computed is written to host memory, and read instead of recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.errors import require_count
from pagedkv.manager import KVCacheManager
from pagedkv.page_table import Int32Array
from pagedkv.sim.engine.link import Link, LinkSpeed


@dataclass(frozen=True)
class HostTierSettings:
    """A prefix cache of ``num_blocks`` blocks of ``bytes_per_block`` in host memory, behind a link."""

    num_blocks: int
    bytes_per_block: int
    link: LinkSpeed

    def __post_init__(self) -> None:
        """Check the counts."""
        require_count("num_blocks", self.num_blocks, 1)
        require_count("bytes_per_block", self.bytes_per_block, 1)


class Loaded(NamedTuple):
    """The first ``num_tokens`` of a prompt will be on the device at ``done_s``."""

    num_tokens: int
    done_s: float


class HostTier:
    """Host blocks with prefixes, counted by a manager of their own, least recently used out first.

    Every full block that the device commits is written through, once. Loads and writes share the link.

    >>> import numpy as np
    >>> tier = HostTier(HostTierSettings(4, 100, LinkSpeed(100.0)), block_size=2, max_seqs=8)
    >>> tokens = np.arange(6)
    >>> tier.store(0, tokens, now_s=1.0)               # three blocks of a second each
    4.0
    >>> tier.load(1, tokens, num_cached=2, now_s=5.0)  # the device has the first block, the last must be run
    Loaded(num_tokens=4, done_s=6.0)
    >>> tier.loaded(1); tier.num_stored, tier.num_loaded
    (3, 1)
    """

    def __init__(
        self, settings: HostTierSettings, block_size: int, max_seqs: int, link: Link | None = None
    ) -> None:
        """Start empty; ``link`` is one that is used for something else, too."""
        self.pool = KVCacheManager(settings.num_blocks, block_size, max_seqs=max_seqs + 1)
        self.link = link or Link(settings.link)
        self.num_stored = self.num_loaded = 0
        self._bytes_per_block = settings.bytes_per_block

    def load(self, request: int, tokens: Int32Array, num_cached: int, now_s: float) -> Loaded | None:
        """Bring what the host has of a prompt beyond ``num_cached`` tokens; None if that is nothing.

        The host keeps it until ``loaded``.
        """
        size = self.pool.block_size
        found = self.pool.lookup(tokens[: self.pool.max_seq_len]).num_cached_tokens
        if found <= num_cached:
            return None
        opened = self.pool.open(request, tokens[:found], max_cached_tokens=found)
        assert opened is not None  # it needs no block that is not there
        blocks = found // size - num_cached // size
        self.num_loaded += blocks
        return Loaded(found, self.link.begin(now_s, blocks * self._bytes_per_block))

    def loaded(self, request: int) -> None:
        """Say that the request's blocks have come."""
        self.pool.close(request)

    def store(self, request: int, tokens: Int32Array, now_s: float) -> float | None:
        """When the full blocks of ``tokens`` are on the host; None if none is written.

        They are there already, or no room can be made beside what is being loaded.
        """
        size, writing = self.pool.block_size, ("store", request)
        full = min(len(tokens) // size * size, self.pool.max_seq_len)
        opened = self.pool.open(writing, tokens[:full], max_cached_tokens=full) if full else None
        if opened is None:
            return None
        cached = opened.num_cached_tokens
        self.pool.commit(writing, tokens[cached:full])
        self.pool.close(writing)
        blocks = (full - cached) // size
        self.num_stored += blocks
        return self.link.begin(now_s, blocks * self._bytes_per_block) if blocks else None
