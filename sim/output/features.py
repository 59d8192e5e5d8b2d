"""What the features of a run did, for people and machines: only those that were on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.sim.console import human_bytes
from pagedkv.sim.engine.disaggregation import Disaggregated
from pagedkv.sim.engine.disk_tier import DiskTier
from pagedkv.sim.engine.engine import Engine
from pagedkv.sim.engine.link import Link
from pagedkv.sim.output.metrics import Distribution, block_use
from pagedkv.sim.output.records import Records
from pagedkv.sim.requests import Requests

if TYPE_CHECKING:
    from pagedkv.sim.replay import ReplaySetup

Features = dict[str, dict[str, Any]]


def features_of(trace: Requests, setup: ReplaySetup, engine: Engine, apart: Disaggregated | None) -> Features:
    """Sections of the document, by feature; units are in the names. ``engine`` is the one that decodes."""
    records, makespan_s = engine.records, float(engine.records.finish_s.max())
    first: Engine = apart.prefill if apart else engine
    found: Features = {}
    if np.isfinite(trace.deadline_s).any():
        found["deadlines"] = _deadlines(trace, records)
    if records.arrival_s is not None and not np.isnan(trace.think_s).all():
        found["sessions"] = {
            "follow_ups": int((~np.isnan(trace.think_s)).sum()),
            "mean_delay_s": float((records.arrival_s - trace.arrival_s)[~np.isnan(trace.think_s)].mean()),
        }
    if setup.engine.coalesce:
        waits = records.num_coalesced + (apart.prefill.records.num_coalesced if apart else 0)
        found["coalescing"] = {"waits": waits}
    if setup.engine.partial_hits:
        found["partial_hits"] = {"tokens": first.records.partial_hit_tokens}
    if engine.host.swapper is not None and setup.engine.swap is not None:
        stats, size = engine.host.swapper.space.stats(), setup.engine.swap.bytes_per_block
        found["swapping"] = {
            "preemptions_swapped": records.num_swapped_out,
            "preemptions_recomputed": records.num_preemptions - records.num_swapped_out,
            "bytes_out": stats.copied_out_blocks * size,
            "bytes_in": stats.copied_in_blocks * size,
            "blocks_still_cached": stats.hit_blocks,
            "stalled_s": records.stall_s,
            **_link(engine.host.swapper.link, makespan_s),
        }
    if first.host.tier is not None and setup.engine.host_tier is not None:
        size = setup.engine.host_tier.bytes_per_block
        found["host_tier"] = {
            "tokens_loaded": first.host.tier.num_loaded_tokens,
            "bytes_in": first.host.tier.num_loaded * size,
            "bytes_out": first.host.tier.num_stored * size,
            "evicted_blocks": first.host.tier.pool.stats().evicted_blocks,
            "stalled_s": first.records.stall_s,
            **_link(first.host.tier.link, makespan_s),
        }
        if first.host.tier.disk is not None and setup.engine.disk_tier is not None:
            bytes_per_block = setup.engine.disk_tier.bytes_per_block
            found["disk_tier"] = _disk(first.host.tier.disk, bytes_per_block, makespan_s)
    if engine.keeper is not None:
        found["kv_budget"] = {
            "tokens_per_sequence": engine.keeper.max_tokens,
            "blocks_dropped": engine.keeper.num_dropped,
            "bytes_dropped": engine.keeper.num_dropped * setup.bytes_per_block,
        }
    if setup.engine.speculation is not None:
        found["speculation"] = _speculation(records, setup.engine.speculation.expected_tokens)
    if setup.tensor_parallel is not None:
        heads = {layer.num_kv_heads for layer in setup.model.spec.layers}
        found["tensor_parallel"] = {
            "gpus": setup.tensor_parallel.num_gpus,
            "kv_heads_per_gpu": sorted(heads),
            "bytes_are_of": "one GPU",
        }
    if apart is not None:
        found["disaggregation"] = _disaggregation(setup, apart, makespan_s)
    return found


def feature_rows(features: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Rows of a table, one per figure."""
    return [
        (f"{section.replace('_', ' ')}: {name.removesuffix('_s').replace('_', ' ')}", _text(name, value))
        for section, figures in features.items()
        for name, value in figures.items()
        if not isinstance(value, Mapping)
    ]


def _text(name: str, value: Any) -> str:
    if name.startswith("bytes_") and isinstance(value, int):
        return human_bytes(value)
    if isinstance(value, float):
        return f"{value:,.3f} s" if name.endswith("_s") else f"{value:,.3f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)


def _deadlines(trace: Requests, records: Records) -> dict[str, Any]:
    arrival_s = trace.arrival_s if records.arrival_s is None else records.arrival_s
    due = np.isfinite(trace.deadline_s)
    met = records.finish_s[due] - arrival_s[due] <= trace.deadline_s[due]
    return {"requests": int(due.sum()), "met": int(met.sum()), "met_share": float(met.mean())}


def _speculation(records: Records, expected: float) -> dict[str, Any]:
    verified = int((records.steps.column("num_steps") * records.steps.column("num_decoding")).sum())
    return {
        "drafted_tokens": records.drafted_tokens,
        "accepted_tokens": records.accepted_tokens,
        "itl_of_accepted_drafts_s": 0.0,
        "tokens_per_step": (verified + records.accepted_tokens) / verified if verified else None,
        "expected_tokens_per_step": expected,
    }


def _disaggregation(setup: ReplaySetup, apart: Disaggregated, makespan_s: float) -> dict[str, Any]:
    prefill, decode = apart.prefill, apart.decode
    use = block_use(prefill.records.occupancy, prefill.manager.block_size)
    return {
        "cache_and_steps_are_of": "decoding, hits and evictions of prefill",
        "transfer_counts_in": "the gap between the first token and the second",
        "transfer_s": asdict(Distribution.of(np.array(decode.records.transfer_s))),
        "mean_transfer_s": float(np.mean(decode.records.transfer_s)) if decode.records.transfer_s else None,
        **_link(decode.link, makespan_s),
        "hit_tokens_not_sent": apart.num_hit_tokens_not_sent,
        "evicted_blocks_decoding": decode.manager.stats().evicted_blocks,
        "prefill_steps": int(prefill.records.steps.column("num_steps").sum()),
        "prefill_preemptions": prefill.records.num_preemptions,
        "bytes_prefill_peak_active": use.peak_active_blocks * setup.bytes_per_block,
        "bytes_prefill_mean_active": round(use.mean_active_blocks * setup.bytes_per_block),
    }


def _disk(disk: DiskTier, bytes_per_block: int, makespan_s: float) -> dict[str, Any]:
    return {
        "tokens_read": disk.num_read * disk.pool.block_size,
        "bytes_in": disk.num_read * bytes_per_block,
        "bytes_out": disk.num_written * bytes_per_block,
        "evicted_blocks": disk.pool.stats().evicted_blocks,
        "reads": disk.read_link.num_transfers,
        "writes": disk.write_link.num_transfers,
        "read_busy_s": disk.read_link.busy_s,
        "write_busy_s": disk.write_link.busy_s,
        "busy_share": _busy_share(
            disk.read_link.busy_s + disk.write_link.busy_s, disk.read_link.free_s, makespan_s
        ),
    }


def _link(link: Link, makespan_s: float) -> dict[str, Any]:
    return {
        "transfers": link.num_transfers,
        "bytes_on_link": link.num_bytes,
        "link_busy_s": link.busy_s,
        "link_busy_share": _busy_share(link.busy_s, link.free_s, makespan_s),
    }


def _busy_share(busy_s: float, free_s: float, makespan_s: float) -> float:
    """Share of the makespan; what goes on after it, until ``free_s``, does so without a break.

    >>> _busy_share(3.0, 9.0, 10.0), _busy_share(8.0, 14.0, 10.0), _busy_share(14.0, 14.0, 10.0)
    (0.3, 0.4, 1.0)
    """
    return min(1.0, max(0.0, busy_s - max(0.0, free_s - makespan_s)) / makespan_s)
