"""Frozen snapshots of what the manager counted."""

from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.errors import PagedKVError
from pagedkv.histogram import ResidencyHistograms
from pagedkv.spec import KVCacheSpec


class CacheBytes(NamedTuple):
    """Bytes of the whole pool, of blocks held, of blocks kept for reuse, and of slots that tokens use.

    Usable blocks only: a storage also allocates the null block.
    """

    reserved: int
    active: int
    cached: int
    used: int


@dataclass(frozen=True)
class ManagerStats:
    """State and counters of a manager at one moment.

    Blocks: ``free_blocks + cached_blocks + active_blocks == num_blocks``; ``fenced_blocks`` of the active
    ones are held by fences and ``copies`` that wait alone, ``pinned_blocks`` of them have a pin.
    ``indexed_blocks`` can be found by content: the cached ones, and the full committed ones that are active.

    Slots: ``used_slots`` of the ``active_blocks * block_size`` are assigned to a token of an open sequence,
    written already or about to be, or belong to a full block that the prefix cache shares; a slot of
    several sequences counts once.

    Counters since the manager was made, over ``num_opened`` successful opens: ``queried_tokens`` prompt
    tokens, of which ``hit_tokens`` were in the cache; ``queried_blocks`` full prompt blocks, of which
    ``hit_blocks`` were. A sequence that is opened again after a preemption counts again. ``dropped_blocks``
    were taken out of the middle of a context, each for every sequence that did so. ``residency``, how
    long content lives, waits for reuse and idles, is measured where the policy is a ``Residency``.
    """

    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    fenced_blocks: int
    pinned_blocks: int
    used_slots: int
    indexed_blocks: int
    num_seqs: int
    num_opened: int
    queried_tokens: int
    hit_tokens: int
    queried_blocks: int
    hit_blocks: int
    evicted_blocks: int
    copied_blocks: int
    dropped_blocks: int = 0
    residency: ResidencyHistograms | None = None

    @property
    def usage(self) -> float:
        """Share of the pool that is active, 0..1: a share of blocks, not of tokens."""
        return self.active_blocks / self.num_blocks

    @property
    def internal_fragmentation(self) -> float:
        """Share of active slots that hold no token, 0..1 (0 for an idle pool)."""
        slots = self.active_blocks * self.block_size
        return 1 - self.used_slots / slots if slots else 0.0

    @property
    def dropped_tokens(self) -> int:
        """Tokens that sequences have ceased to attend to: dropped blocks are always full."""
        return self.dropped_blocks * self.block_size

    @property
    def token_hit_rate(self) -> float:
        """``hit_tokens / queried_tokens``: share of all prompt tokens that need no prefill."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        """``hit_blocks / queried_blocks``: share of the full prompt blocks, the only cacheable ones."""
        return self.hit_blocks / self.queried_blocks if self.queried_blocks else 0.0

    def bytes(self, spec: KVCacheSpec) -> CacheBytes:
        """The same in bytes of ``spec``, all layers together.

        Raises ``PagedKVError`` if the spec has blocks of another size.
        """
        if spec.block_size != self.block_size:
            raise PagedKVError(
                f"the spec has blocks of {spec.block_size} tokens, the manager of {self.block_size}"
            )
        block, token = spec.bytes_per_block, spec.bytes_per_token
        return CacheBytes(
            self.num_blocks * block,
            self.active_blocks * block,
            self.cached_blocks * block,
            self.used_slots * token,
        )


class OpenCounters:
    """What the opens since the manager was made asked for and found."""

    def __init__(self) -> None:
        """Nothing was opened yet."""
        self.num_opened = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.queried_blocks = 0
        self.hit_blocks = 0

    def count_open(self, num_tokens: int, block_size: int, hit_blocks: int, hit_tokens: int) -> None:
        """Count one sequence, and the blocks and tokens of its prompt that were found."""
        self.num_opened += 1
        self.queried_tokens += num_tokens
        self.queried_blocks += num_tokens // block_size
        self.hit_blocks += hit_blocks
        self.hit_tokens += hit_tokens
