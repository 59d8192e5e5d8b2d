"""What an engine keeps in host memory: swapped sequences, and prefixes; and the one link to there."""

from __future__ import annotations

from functools import partial

from pagedkv.block_tables import Int32Array
from pagedkv.sim.engine.disk_tier import DiskTier
from pagedkv.sim.engine.engine_config import EngineConfig
from pagedkv.sim.engine.happenings import Happenings
from pagedkv.sim.engine.host_tier import HostTier
from pagedkv.sim.engine.link import Link
from pagedkv.sim.engine.pool import Pool, plain
from pagedkv.sim.engine.swapping import Swapper
from pagedkv.sim.timing.step_time import StepTimeModel


class HostSide:
    """The swap space and the tier of an engine, if it has them. Copies into the tier pin what they read.

    Blocks that are being written cannot be handed out before that is done.
    """

    def __init__(self, pool: Pool, config: EngineConfig, step_time: StepTimeModel) -> None:
        """Make what ``config`` asks for; ``PagedKVError`` if that is a disk and the pool a hybrid one."""
        self.swapper: Swapper | None = None
        self.tier: HostTier | None = None
        self.link: Link | None = None
        self.writes: dict[int, float] = {}
        """Until when each pin holds."""
        self._pool = pool
        if config.swap is not None:
            self.swapper = Swapper(pool, config.swap, step_time, config.token_budget)
            self.link = self.swapper.link
        if config.host_tier is not None:
            disk = None
            if config.disk_tier is not None:
                disk = DiskTier(config.disk_tier, plain(pool, "disk cache").block_size, config.max_batch)
            self.tier = HostTier(config.host_tier, pool, config.max_batch, self.link, disk)
            self.link = self.tier.link

    def __contains__(self, request: int) -> bool:
        """Tell whether the request is swapped out."""
        return self.swapper is not None and request in self.swapper

    def write(
        self, request: int, tokens: Int32Array, start: int, now_s: float, happenings: Happenings
    ) -> None:
        """Write to the tier what it lacks of a request's committed tokens, until then hold it.

        They were committed just now from ``start`` on. What fell out of a window by that is not held.
        """
        done_s = self.tier.store(request, tokens, now_s, start) if self.tier is not None else None
        if done_s is not None:
            pin = self._pool.retention.pin(request)
            self.writes[pin] = done_s
            happenings.at(done_s, partial(self.end_write, pin))

    def end_write(self, pin: int) -> None:
        """Let go of what was written; does nothing the second time."""
        if self.writes.pop(pin, None) is not None:
            self._pool.retention.unpin(pin)

    def end_writes(self) -> None:
        """Let go of everything."""
        for pin in list(self.writes):
            self.end_write(pin)
