"""Preemption by swapping: blocks go to a host pool and come back, over a link of stated speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.errors import require_count
from pagedkv.manager import KVCacheManager
from pagedkv.sim.engine.hybrid_pool import HybridPool
from pagedkv.sim.engine.link import Link, LinkSpeed
from pagedkv.sim.timing.step_time import StepTimeModel
from pagedkv.swap import SwapSpace
from pagedkv.swap_advisor import SwapAdvisor

_PROBE = 8192
"""Tokens before the second chunk by which attention's share of a prefill is found."""


@dataclass(frozen=True)
class SwapSettings:
    """A host pool of ``num_host_blocks`` blocks of ``bytes_per_block`` behind a link.

    ``always`` swaps whatever finds room; otherwise each preemption is decided by a `SwapAdvisor`.
    """

    num_host_blocks: int
    bytes_per_block: int
    link: LinkSpeed
    always: bool = False

    def __post_init__(self) -> None:
        """Check the counts."""
        require_count("num_host_blocks", self.num_host_blocks, 1)
        require_count("bytes_per_block", self.bytes_per_block, 1)


class ComingBack(NamedTuple):
    """A sequence on its way back: when its blocks are there, and the transfer to report then."""

    done_s: float
    transfer: int


class Swapper:
    """Sequences of one engine that are on the host, and the link that takes them there.

    An engine that swaps out waits until the copies have run, because only then are the blocks free; one
    that swaps in goes on with the others meanwhile. Both directions share the link.
    """

    def __init__(
        self,
        pool: KVCacheManager | HybridPool,
        settings: SwapSettings,
        step_time: StepTimeModel,
        token_budget: int,
    ) -> None:
        """Make an empty host pool."""
        self._pool = pool
        count = settings.num_host_blocks
        self.space = pool.swap_space(count) if isinstance(pool, HybridPool) else SwapSpace(pool, count)
        self.link = Link(settings.link)
        self._settings = settings
        self._advisor = (
            None if settings.always else _advisor(settings, pool.block_size, step_time, token_budget)
        )

    def __contains__(self, request: int) -> bool:
        """Tell whether the request is on the host."""
        return request in self.space

    def swap_out(self, request: int, num_computed: int, now_s: float) -> float | None:
        """When the blocks of the request are on the host; None if it had better compute again, or must.

        ``num_computed`` of its tokens have K and V.
        """
        if not num_computed or self._num_blocks(request) > self.space.counts.free:
            return None
        if self._advisor is not None and not self._prefers_swap(self._advisor, request, num_computed):
            return None
        out = self.space.swap_out(request)
        if out is None:
            return None
        self.space.done(out.transfer)  # bookkeeping: the engine does nothing before the copies have run
        return self.link.begin(now_s, len(out.copies.src) * self._settings.bytes_per_block)

    def _num_blocks(self, request: int) -> int:
        pool = self._pool
        if isinstance(pool, HybridPool):
            return pool.num_held_blocks(request)
        return div_ceil(pool.tables.num_tokens(request), pool.block_size)

    def _prefers_swap(self, advisor: SwapAdvisor, request: int, num_computed: int) -> bool:
        if not isinstance(self._pool, HybridPool):
            return advisor.prefers_swap(num_computed)
        # an advisor counts blocks of all layers; here groups of layers have more or fewer of their own
        each_way_s = self._settings.link.seconds(self._num_blocks(request) * self._settings.bytes_per_block)
        return 2 * each_way_s < advisor.costs(num_computed).recompute_s

    def swap_in(self, request: int, now_s: float) -> ComingBack | None:
        """Take the request's blocks on the device again; None if there is no room now."""
        back = self.space.swap_in(request)
        if back is None:
            return None
        num_bytes = len(back.copies.src) * self._settings.bytes_per_block
        return ComingBack(self.link.begin(now_s, num_bytes), back.transfer)


def _advisor(
    settings: SwapSettings, block_size: int, step_time: StepTimeModel, token_budget: int
) -> SwapAdvisor:
    """An advisor whose prefill rates are those of the step-time model, from two chunks of a full budget."""
    nobody = np.empty(0, np.int64)

    def chunk_s(start: int) -> float:
        return step_time.durations(nobody, [(start, token_budget)], 0)(0)

    pairs = token_budget * (token_budget + 1) / 2
    per_pair = max(0.0, chunk_s(_PROBE) - chunk_s(0)) / (token_budget * _PROBE)
    return SwapAdvisor(
        bytes_per_block=settings.bytes_per_block,
        block_size=block_size,
        link_bytes_per_s=settings.link.bytes_per_s,
        prefill_tokens_per_s=token_budget / max(chunk_s(0) - per_pair * pairs, 1e-12),
        transfer_s=settings.link.latency_s,
        attention_s_per_pair=per_pair,
    )
