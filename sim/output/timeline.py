"""The timeline of a replay as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

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


def timeline_csv(result: ReplayResult, kept: Sequence[int] | None = None) -> str:
    """One row per sample, or of those that are ``kept``: sequences, bytes by state, mean ITL since the sample
    before (empty if none).
    """
    block = result.setup.bytes_per_block
    token = block // result.setup.model.spec.block_size
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    samples = result.records.samples
    for s in samples if kept is None else [samples[i] for i in kept]:
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
