"""How the engine schedules: every choice in one frozen place."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.errors import PagedKVError
from pagedkv.sim.engine.disk_tier import DiskTierSettings
from pagedkv.sim.engine.host_tier import HostTierSettings
from pagedkv.sim.engine.kv_budget import KVBudget
from pagedkv.sim.engine.speculation import Speculation
from pagedkv.sim.engine.swapping import SwapSettings
from pagedkv.sim.engine.waiting import QUEUES


@dataclass(frozen=True)
class EngineConfig:
    """How the engine schedules.

    ``max_batch`` sequences run at once; a step computes at most ``token_budget`` tokens, one per
    decoding sequence first and chunks of prompts with the rest; the timeline has a sample every
    ``interval_s`` modelled seconds.

    Args:
        queue: who is admitted first and preempted last, one of ``QUEUES``.
        prefill_first: steps compute prompts alone while there are any, and decoding sequences wait.
        coalesce: who waits passes over a prompt that a running prefill is about to make a hit.
        partial_hits: a hit may end inside a block, by a copy of it (whose time is not modelled).
        swap: what preempted sequences may go to the host with; None: they compute again.
        host_tier: prefixes that are read from the host if the device has lost them; with ``swap``, over the
            same link.
        disk_tier: prefixes that have no room on the host any more; needs ``host_tier``.
        speculation: drafts that each step verifies; None: one token a step.
        kv_budget: context that a decoding sequence keeps at most; None: all of it.

    Raises:
        PagedKVError: sizes below one, or a budget that cannot serve a full batch.
    """

    max_batch: int = 256
    token_budget: int = 2048
    interval_s: float = 1.0
    queue: str = "fcfs"
    prefill_first: bool = False
    coalesce: bool = False
    partial_hits: bool = False
    swap: SwapSettings | None = None
    speculation: Speculation | None = None
    host_tier: HostTierSettings | None = None
    kv_budget: KVBudget | None = None
    disk_tier: DiskTierSettings | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.max_batch < 1 or self.token_budget < self.max_batch:
            raise PagedKVError(
                f"need 1 <= max_batch <= token_budget, got {self.max_batch} and {self.token_budget}"
            )
        if self.max_batch * self.tokens_per_decode > self.token_budget:
            raise PagedKVError(
                f"a full batch of {self.max_batch} verifies {self.max_batch * self.tokens_per_decode} tokens "
                f"a step, the budget is {self.token_budget}: raise it (--token-budget), or speculate less"
            )
        if not 1e-3 <= self.interval_s <= 1e9:
            raise PagedKVError(f"interval must be 0.001 to 1e9 seconds, got {self.interval_s}")
        if self.swap and self.host_tier and self.swap.link != self.host_tier.link:
            raise PagedKVError(f"one link to the host, got {self.swap.link} and {self.host_tier.link}")
        if self.disk_tier and not self.host_tier:
            blocks = self.disk_tier.num_blocks
            raise PagedKVError(f"a disk keeps what leaves the host: got {blocks} blocks and no host cache")
        if self.swap and self.kv_budget:
            raise PagedKVError(
                f"who has dropped a part of its context cannot be swapped: got a budget of "
                f"{self.kv_budget.tokens} tokens and {self.swap.num_host_blocks} blocks to swap to"
            )
        if self.queue not in QUEUES:
            raise PagedKVError(f"queue must be one of {', '.join(QUEUES)}, got {self.queue!r}")

    @property
    def num_drafts(self) -> int:
        """Tokens of each decoding sequence that a step verifies beyond the next one."""
        return self.speculation.num_drafts if self.speculation else 0

    @property
    def tokens_per_decode(self) -> int:
        """Tokens that a step computes for each decoding sequence."""
        return 1 + self.num_drafts
