"""A second tier for prefixes: what is computed is written to host memory, and read instead of recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.errors import require_count
from pagedkv.manager import KVCacheManager
from pagedkv.page_table import Int32Array
from pagedkv.sim.engine.departures import Departures
from pagedkv.sim.engine.disk_tier import DiskTier
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
    """The first ``num_tokens`` of a prompt will be in host memory at ``ready_s``."""

    num_tokens: int
    ready_s: float


class HostTier:
    """Host blocks with prefixes, counted by a manager of their own, least recently used out first.

    Every full block that the device commits is written through, once. Loads and writes share the link. With
    a disk, what is evicted here is stored there, and what is hit there comes back through here.

    >>> import numpy as np
    >>> tier = HostTier(HostTierSettings(4, 100, LinkSpeed(100.0)), block_size=2, max_seqs=8)
    >>> tokens = np.arange(6)
    >>> tier.store(0, tokens, now_s=1.0)               # three blocks of a second each
    4.0
    >>> tier.load(1, tokens, num_cached=2, now_s=5.0)  # the device has the first block, the last must be run
    Loaded(num_tokens=4, ready_s=5.0)
    >>> tier.send(1, now_s=5.0); tier.loaded(1); tier.num_stored, tier.num_loaded
    6.0
    (3, 1)
    """

    def __init__(
        self,
        settings: HostTierSettings,
        block_size: int,
        max_seqs: int,
        link: Link | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        """Start empty; ``link`` is one that is used for something else, too."""
        self.pool = KVCacheManager(settings.num_blocks, block_size, max_seqs=max_seqs + 1)
        self.link = link or Link(settings.link)
        self.disk = disk
        self.num_stored = self.num_loaded = 0
        self._bytes_per_block = settings.bytes_per_block
        self._departures = Departures(self.pool) if disk is not None else None
        self._promoted: dict[int, Int32Array] = {}  # tokens of blocks that are read from the disk
        self._to_send: dict[int, int] = {}

    def load(self, request: int, tokens: Int32Array, num_cached: int, now_s: float) -> Loaded | None:
        """Find what there is of a prompt beyond ``num_cached`` tokens; None if that is nothing.

        It is kept until ``loaded``; ``send`` it once it is ready. What the host lacks is read from the disk,
        if there is room for it.
        """
        size, tokens = self.pool.block_size, tokens[: self.pool.max_seq_len]
        here = self.pool.lookup(tokens).num_cached_tokens
        there = self.disk.find(tokens) if self.disk is not None else 0
        ready_s = None
        if self.disk is not None and there > max(here, num_cached):
            ready_s = self._promote(request, tokens[:there], self.disk, now_s)
        found = here if ready_s is None else there
        if found <= num_cached:
            return None
        if ready_s is None:
            opened = self.pool.open(request, tokens[:found], max_cached_tokens=found)
            assert opened is not None  # it needs no block that is not there
        blocks = found // size - num_cached // size
        self.num_loaded += blocks
        self._to_send[request] = blocks
        return Loaded(found, now_s if ready_s is None else ready_s)

    def send(self, request: int, now_s: float) -> float:
        """When what was found for the request is on the device."""
        return self.link.begin(now_s, self._to_send.pop(request) * self._bytes_per_block)

    def loaded(self, request: int) -> None:
        """Say that the request's blocks have come."""
        if request in self._promoted:
            assert self.disk is not None
            self.disk.close(request)
            self.pool.commit(request, self._promoted.pop(request))
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
        self._demote(now_s)
        blocks = (full - cached) // size
        self.num_stored += blocks
        return self.link.begin(now_s, blocks * self._bytes_per_block) if blocks else None

    def _promote(self, request: int, prefix: Int32Array, disk: DiskTier, now_s: float) -> float | None:
        """When a prefix has come from the disk, as far as it is not here; None if there is no room for it."""
        opened = self.pool.open(request, prefix, max_cached_tokens=len(prefix))
        if opened is None:
            return None
        self._promoted[request] = prefix[opened.num_cached_tokens :]
        blocks = len(self._promoted[request]) // self.pool.block_size
        done_s = disk.read(request, prefix, blocks, now_s)
        self._demote(now_s)
        return done_s

    def _demote(self, now_s: float) -> None:
        """Let the disk have what was just evicted."""
        if self._departures is not None and self.disk is not None:
            for prefix in self._departures.take():
                self.disk.store(prefix, now_s)
