"""What the engine asks of a manager, answered by the hybrid one: blocks outside a window are given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_pool import BlockCounts
from pagedkv.block_tables import NULL_BLOCK, Int64Array, SeqId
from pagedkv.copies import PendingCopies
from pagedkv.hybrid import HybridKVCacheManager, HybridSwapSpace, bytes_per_block, groups_for
from pagedkv.opened import Lookup, Opened
from pagedkv.policies import EvictionPolicy
from pagedkv.spec import KVCacheSpec
from pagedkv.stats import ManagerStats


class HybridPool:
    """A `HybridKVCacheManager` of a model's layers. A block is of one group of layers, and so is a slot.

    A prompt takes room chunk by chunk; what no later token sees is given back when it is committed, after
    each chunk and then whenever a block is full.

    >>> from pagedkv.spec import LayerSpec
    >>> local, full = LayerSpec(1, 8, window=32), LayerSpec(1, 8)
    >>> pool = HybridPool(KVCacheSpec((local, full)), num_blocks=20, max_seqs=4, max_seq_len=160)
    >>> pool.open("a", range(160)), pool.counts.active
    (Opened(num_tokens=1, num_cached_tokens=0), 2)
    >>> pool.grow([], 1, {"a": 160}), pool.counts.active
    (True, 20)
    >>> pool.commit("a", range(160)); pool.counts.active
    12
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        max_seqs: int,
        max_seq_len: int,
        watermark: float = 0.0,
        policy: str | EvictionPolicy | None = "lru",
    ) -> None:
        """Make the manager; ``SpecError`` if the layers do not share blocks of one size.

        ``watermark`` and ``policy`` as for ``HybridKVCacheManager``; None: no prefix cache.
        """
        self._manager = HybridKVCacheManager(
            groups_for(spec),
            num_blocks,
            spec.block_size,
            max_seqs=max_seqs,
            max_seq_len=max_seq_len,
            watermark=watermark,
            policy=policy,
        )
        self.spec = spec
        self.num_blocks = num_blocks
        self.block_size = spec.block_size
        self.max_seq_len = max_seq_len
        self.prefix_caching = self._manager.prefix_caching
        self.num_groups = len(self._manager.groups)
        self.retention = self._manager.retention
        self._table = next(iter(self._manager.tables.values()))  # all of them agree about lengths

    @property
    def counts(self) -> BlockCounts:
        """Free, cached and active blocks of all groups."""
        return self._manager.counts

    @property
    def copies(self) -> PendingCopies:
        """Blocks to copy before anything else is written."""
        return self._manager.copies

    @property
    def used_slots(self) -> int:
        """Slots of active blocks with a token: all but those behind the end of a sequence, in each group."""
        unused = int((-self._table.seq_lens(self._table.seq_ids) % self.block_size).sum())
        return self.counts.active * self.block_size - unused * self.num_groups

    def open(
        self,
        seq_id: SeqId,
        tokens: Any,
        *,
        max_cached_tokens: int | None = None,
        max_fresh_tokens: int = 1,
        loaded_tokens: int = 0,
        announce: bool = False,
        partial_hits: bool = False,
    ) -> Opened | None:
        """Open a sequence with its hit, room to load the first ``loaded_tokens`` if those are more, and room
        for ``max_fresh_tokens`` behind, see ``grow``; None if it does not fit now.
        """
        return self._manager.open(
            seq_id,
            tokens,
            max_cached_tokens=max_cached_tokens,
            max_fresh_tokens=max_fresh_tokens,
            loaded_tokens=loaded_tokens,
            announce=announce,
            partial_hits=partial_hits,
        )

    def lookup(self, tokens: Any) -> Lookup:
        """As ``HybridKVCacheManager.lookup``, for a prompt that is computed block by block."""
        return self._manager.lookup(tokens, max_fresh_tokens=self.block_size)

    def swap_space(self, num_host_blocks: int) -> HybridSwapSpace:
        """Host blocks for the sequences of this pool."""
        return HybridSwapSpace(self._manager, num_host_blocks)

    def num_held_blocks(self, seq_id: SeqId, start: int = 0, stop: int | None = None) -> int:
        """Blocks of all groups that a sequence holds for its tokens from ``start`` to before ``stop``.

        Cost: O(groups x blocks).
        """
        tables, size = self._manager.tables.values(), self.block_size
        columns = slice(start // size, None if stop is None else div_ceil(stop, size))
        return sum(int(np.count_nonzero(table.block_ids(seq_id)[columns] != NULL_BLOCK)) for table in tables)

    def grow(self, decoding: list[Any], num_tokens: int, prefilling: Mapping[Any, int]) -> bool:
        """Make room for ``num_tokens`` more of those that decode and so many in all of those that prefill.

        In all of them, or in none and False when the blocks are not available now.
        """
        table, size = self._table, self.block_size
        lens = table.seq_lens([*decoding, *prefilling])
        wanted = lens + num_tokens
        wanted[len(decoding) :] = list(prefilling.values())
        wanted = np.maximum(lens, wanted)
        counts = self.counts
        need = self.num_groups * int((div_ceil(wanted, size) - div_ceil(lens, size)).sum())
        if need > counts.free + counts.cached or not self._manager.step(decoding, num_tokens):
            return False
        for request, more in zip(prefilling, (wanted - lens)[len(decoding) :].tolist(), strict=True):
            grown = self._manager.append(request, more)
            assert grown  # the blocks were counted
        return True

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence of so many tokens ever holds, if it is computed in chunks of this size."""
        groups, size = self._manager.groups, self.block_size
        held = sum(group.held_blocks(num_tokens, size) for group in groups)
        whole = self.num_groups * div_ceil(num_tokens, size)
        return min(whole, held + self.num_groups * (div_ceil(chunk, size) + 1))

    def commit(self, seq_id: SeqId, tokens: Any) -> None:
        """As ``HybridKVCacheManager.commit``."""
        self._manager.commit(seq_id, tokens)

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """As ``HybridKVCacheManager.truncate``."""
        self._manager.truncate(seq_id, num_tokens)

    def close(self, seq_id: SeqId) -> None:
        """As ``HybridKVCacheManager.close``."""
        self._manager.close(seq_id)

    def steps_until_full(self, lens: Int64Array) -> int:
        """Steps until one of these sequences [n] has a full block: that is when it must be committed."""
        return int((self.block_size - lens % self.block_size).min())

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if any two parts disagree."""
        self._manager.check_invariants()

    def stats(self) -> ManagerStats:
        """The counters in the words of the plain manager."""
        stats = self._manager.stats()
        return ManagerStats(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=stats.free_blocks,
            cached_blocks=stats.cached_blocks,
            active_blocks=stats.active_blocks,
            fenced_blocks=stats.fenced_blocks,
            pinned_blocks=stats.pinned_blocks,
            used_slots=self.used_slots,
            indexed_blocks=stats.num_nodes,
            num_seqs=stats.num_seqs,
            num_opened=stats.num_opened,
            queried_tokens=stats.queried_tokens,
            hit_tokens=stats.hit_tokens,
            queried_blocks=stats.queried_blocks,
            hit_blocks=stats.hit_blocks,
            evicted_blocks=stats.evicted_blocks,
            copied_blocks=stats.copied_blocks,
            residency=stats.residency,
        )


def hybrid_block_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a block of the hybrid pool of these layers."""
    return bytes_per_block(spec, groups_for(spec))
