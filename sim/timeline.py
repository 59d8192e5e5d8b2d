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
)


def timeline_csv(result: ReplayResult) -> str:
    """One row per sample: sequences, bytes by state, mean ITL since the row before (empty if none)."""
    spec = result.setup.model.spec
    block, token = spec.bytes_per_block, spec.bytes_per_token
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
        writer.writerow((f"{s.time_s:.6f}", s.num_running, s.num_waiting, *states, itl))
    return text.getvalue()
