"""Writes down the state of a run at regular moments, and the occupancy between them."""

from __future__ import annotations

import math

from pagedkv.block_pool import BlockCounts
from pagedkv.sim.engine.pool import Pool
from pagedkv.sim.output.records import FloatArray, Records, Sample, Steps
from pagedkv.sim.timing.step_cost import span_s


class RunTimeline:
    """Samples of one engine, at most one for a moment."""

    def __init__(self, records: Records, manager: Pool, interval_s: float) -> None:
        """Start at time 0; a sample is due every ``interval_s``."""
        self._records, self._manager, self._interval_s = records, manager, interval_s
        self._itl_sum, self._itl_count = 0.0, 0
        self.next_s = 0.0

    def take(self, steps: Steps, waited_s: FloatArray, before: BlockCounts, grown: int) -> float:
        """Write down steps that are taken now; returns the seconds that they last.

        The manager has ``grown`` slots for them since the counts were ``before``. ``waited_s`` [num_late]:
        since when the late ones have been waiting.
        """
        seconds = span_s(steps.num_steps, steps.first_s, steps.growth_s)
        self._records.steps.append(steps)
        if len(waited_s):
            self._records.resume_gaps_s.extend((waited_s + steps.first_s).tolist())
            self._itl_sum += float(waited_s.sum())
        used, counts = self._manager.used_slots, self._manager.counts
        self._records.occupancy.add(seconds, steps.num_steps, before, counts, (used - grown, used))
        self._itl_sum += seconds * steps.num_decoding
        self._itl_count += steps.num_steps * steps.num_decoding
        return seconds

    def pass_time(self, seconds: float) -> None:
        """Let time pass in which no step runs and nothing changes."""
        counts: BlockCounts = self._manager.counts
        used = self._manager.used_slots
        self._records.occupancy.add(seconds, 1, counts, counts, (used, used))

    def sample_if_due(self, now_s: float, num_running: int, num_waiting: int) -> None:
        """Take a sample if its moment has come."""
        if now_s >= self.next_s:
            self.sample(now_s, num_running, num_waiting)
            self.next_s = (math.floor(now_s / self._interval_s) + 1) * self._interval_s

    def sample(self, now_s: float, num_running: int, num_waiting: int) -> None:
        """Take a sample, unless this moment has one."""
        samples = self._records.samples
        if samples and samples[-1].time_s == now_s:
            return
        stats = self._manager.stats()
        samples.append(
            Sample(
                time_s=now_s,
                num_running=num_running,
                num_waiting=num_waiting,
                free_blocks=stats.free_blocks,
                cached_blocks=stats.cached_blocks,
                active_blocks=stats.active_blocks,
                used_slots=stats.used_slots,
                mean_itl_s=self._itl_sum / self._itl_count if self._itl_count else None,
                queried_tokens=stats.queried_tokens,
                hit_tokens=stats.hit_tokens,
                preemptions=self._records.num_preemptions,
            )
        )
        self._itl_sum, self._itl_count = 0.0, 0
