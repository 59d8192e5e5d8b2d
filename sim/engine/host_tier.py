"""A second tier for prefixes: what is computed is written to host memory, and read instead of recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.block_tables import Int32Array, SeqId
from pagedkv.errors import NeverFits, require_count
from pagedkv.opened import Opened
from pagedkv.sim.engine.departures import Departures
from pagedkv.sim.engine.disk_tier import DiskTier
from pagedkv.sim.engine.hybrid_pool import HybridPool
from pagedkv.sim.engine.link import Link, LinkSpeed
from pagedkv.sim.engine.pool import Pool, blocks_between, plain, tier_of


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
    a disk, what is evicted here is stored there, and what is hit there comes back through here. The tier of a
    hybrid pool has blocks of groups, too: a prefix is there if every group has what the next token sees.

    >>> import numpy as np
    >>> from pagedkv.manager import KVCacheManager
    >>> device = KVCacheManager(8, block_size=2)
    >>> tier = HostTier(HostTierSettings(4, 100, LinkSpeed(100.0)), device, max_seqs=8)
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
        device: Pool,
        max_seqs: int,
        link: Link | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        """Start empty; ``link`` is one that is used for something else, too."""
        self.pool = tier_of(device, settings.num_blocks, max_seqs + 1)
        self.link = link or Link(settings.link)
        self.disk = disk
        self.num_stored = self.num_loaded = 0
        """Blocks that were written and read."""
        self.num_loaded_tokens = 0
        self._device = device
        self._bytes_per_block = settings.bytes_per_block
        self._departures = Departures(plain(self.pool, "disk cache")) if disk is not None else None
        self._promoted: dict[int, Int32Array] = {}  # tokens of blocks that are read from the disk
        self._to_send: dict[int, int] = {}

    def find(self, tokens: Int32Array) -> int:
        """How many of a prompt's first tokens are in host memory, in whole blocks and fewer than all."""
        try:
            return self.pool.lookup(tokens[: self.pool.max_seq_len]).num_cached_tokens
        except NeverFits:  # not even what one token of such a prompt sees
            return 0

    def load(self, request: int, tokens: Int32Array, num_cached: int, now_s: float) -> Loaded | None:
        """Find what there is of a prompt beyond ``num_cached`` tokens; None if that is nothing.

        It is kept until ``loaded``; ``send`` it once it is ready. What the host lacks is read from the disk,
        if there is room for it.
        """
        size, tokens = self.pool.block_size, tokens[: self.pool.max_seq_len]
        here = self.find(tokens)
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
        blocks = blocks_between(self._device, request, num_cached, found)
        self.num_loaded += blocks
        self.num_loaded_tokens += found - num_cached // size * size
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

    def store(self, request: int, tokens: Int32Array, now_s: float, start: int = 0) -> float | None:
        """When the full blocks of ``tokens`` are on the host; None if none is written.

        They are there already, or no room can be made beside what is being loaded. The device has just
        computed those from ``start`` on; of the ones before, a hybrid pool holds what the next one sees.
        """
        size, writing = self.pool.block_size, ("store", request)
        full = min(len(tokens), self.pool.max_seq_len) // size * size
        opened = self._open_to_store(writing, tokens[:full], start // size * size) if full else None
        if opened is None:
            return None
        cached = opened.num_cached_tokens
        blocks = blocks_between(self.pool, writing, cached, full)
        self.pool.commit(writing, tokens[cached:full])
        self.pool.close(writing)
        self._demote(now_s)
        self.num_stored += blocks
        return self.link.begin(now_s, blocks * self._bytes_per_block) if blocks else None

    def _open_to_store(self, writing: SeqId, tokens: Int32Array, start: int) -> Opened | None:
        count = len(tokens)
        if not isinstance(self.pool, HybridPool):
            return self.pool.open(writing, tokens, max_cached_tokens=count)
        try:
            return self.pool.open(
                writing,
                tokens,
                max_cached_tokens=count,
                max_fresh_tokens=max(1, count - start),
                loaded_tokens=min(start, count),
            )
        except NeverFits:  # what the groups hold together can be too much
            return None

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
