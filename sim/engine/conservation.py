"""What must add up at the end of every run, whatever the options: a difference is a bug of ours."""

from __future__ import annotations

import math

import numpy as np

from pagedkv.errors import check
from pagedkv.sim.engine.disk_tier import DiskTier
from pagedkv.sim.engine.engine import Engine
from pagedkv.sim.engine.link import Link
from pagedkv.sim.output.records import Records
from pagedkv.sim.requests import Requests


def check_pool(engine: Engine) -> None:
    """Raise ``AssertionError`` unless the pool is whole again, and the host's, and nothing is under way."""
    engine.manager.check_invariants()
    counts = engine.manager.counts
    check(counts.active == 0, f"{counts.active} blocks are active after the last request")
    check(counts.free + counts.cached == engine.manager.num_blocks, f"blocks are missing: {counts}")
    moved = 0
    if engine.host.swapper is not None and engine.config.swap is not None:
        engine.host.swapper.space.check_invariants()
        stats = engine.host.swapper.space.stats()
        check(stats.num_seqs == stats.used_blocks == stats.num_transfers == 0, f"left on the host: {stats}")
        moved += (stats.copied_out_blocks + stats.copied_in_blocks) * engine.config.swap.bytes_per_block
    if engine.host.tier is not None and engine.config.host_tier is not None:
        engine.host.tier.pool.check_invariants()
        check(engine.host.tier.pool.counts.active == 0, "the host still holds what was loaded")
        moved += (
            engine.host.tier.num_stored + engine.host.tier.num_loaded
        ) * engine.config.host_tier.bytes_per_block
        if engine.host.tier.disk is not None and engine.config.disk_tier is not None:
            check_disk(engine.host.tier.disk, engine.config.disk_tier.bytes_per_block)
    if engine.host.link is not None:
        check_link(engine.host.link, moved)


def check_disk(disk: DiskTier, bytes_per_block: int) -> None:
    """Raise ``AssertionError`` unless the disk moved what it counted, and did one thing at a time."""
    disk.pool.check_invariants()
    check(disk.pool.counts.active == 0, "the disk still holds what was read")
    for link, blocks in ((disk.read_link, disk.num_read), (disk.write_link, disk.num_written)):
        check_link(link, blocks * bytes_per_block)
    busy_s, free_s = disk.read_link.busy_s + disk.write_link.busy_s, disk.read_link.free_s
    check(busy_s <= free_s * (1 + 1e-9), f"disk busy {busy_s} s until {free_s} s")


def check_link(link: Link, num_bytes: int) -> None:
    """Raise ``AssertionError`` unless the link took these bytes, one after the other, at its speed."""
    check(link.num_bytes == num_bytes, f"{link.num_bytes} bytes on the link, {num_bytes} in blocks")
    seconds = link.num_transfers * link.speed.latency_s + num_bytes / link.speed.bytes_per_s
    check(math.isclose(link.busy_s, seconds, rel_tol=1e-9), f"link busy {link.busy_s} s for {seconds} s")
    check(link.busy_s <= link.free_s * (1 + 1e-9), f"link busy {link.busy_s} s until {link.free_s} s")


def check_tokens(trace: Requests, records: Records) -> None:
    """Raise ``AssertionError`` unless every request was served, every token once, in order of time."""
    output = int(trace.output_len.sum())
    gaps = records.gaps().total
    check(gaps == output - len(trace), f"{gaps} gaps between {output} tokens of {len(trace)} requests")
    arrival_s = trace.arrival_s if records.arrival_s is None else records.arrival_s
    check(bool((arrival_s >= trace.arrival_s).all()), "a request came before its time")
    check(bool((records.first_token_s > arrival_s).all()), "a first token before its request")
    check(bool((records.finish_s >= records.first_token_s).all()), "an end before the first token")
    check(bool(np.isfinite(records.finish_s).all()), "a request without an end")
