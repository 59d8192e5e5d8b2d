"""The timeline of a replay as CSV."""

from __future__ import annotations

import csv
import io

from pagedkv.sim.replay import ReplayResult

COLUMNS = (
    "time_s",
    "running",
    "waiting",
    "bytes_free",
    "bytes_cached",
    "bytes_active",
    "bytes_used",
    "mean_itl_s",
    "queried_tokens",
    "hit_tokens",
    "preemptions",
)


def timeline_csv(result: ReplayResult) -> str:
    """One row per sample: sequences, bytes by state, mean ITL since the row before (empty if none)."""
    block = result.setup.bytes_per_block
    token = block // result.setup.model.spec.block_size
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for s in result.records.samples:
        itl = "" if s.mean_itl_s is None else f"{s.mean_itl_s:.9f}"
        states = (
            s.free_blocks * block,
            s.cached_blocks * block,
            s.active_blocks * block,
            s.used_slots * token,
        )
        counters = (s.queried_tokens, s.hit_tokens, s.preemptions)
        writer.writerow((f"{s.time_s:.6f}", s.num_running, s.num_waiting, *states, itl, *counters))
    return text.getvalue()
