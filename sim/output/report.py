"""What a replay says to machines: one JSON document with a versioned schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pagedkv import __version__
from pagedkv.sim.hits import Hits
from pagedkv.sim.output.metrics import FORMULAS, Distribution, bytes_of
from pagedkv.sim.replay import ReplayResult

REPLAY_SCHEMA = "pagedkv.replay/1"
HITS_SCHEMA = "pagedkv.hits/1"
HIT_RATE_FORMULAS = {
    "token_hit_rate": "prompt tokens found at the first admission / all prompt tokens",
    "block_hit_rate": "blocks found at the first admission / full prompt blocks, the only cacheable ones",
}


def replay_document(result: ReplayResult, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything the table shows, and the inputs; units are in the names. Same run, same bytes.

    ``given`` are inputs that the result does not know, such as the seed that its trace was made from.
    """
    summary, setup, spec = result.summary, result.setup, result.setup.model.spec
    stats, attention_time = summary.stats, setup.step_time.attention_time
    return {
        "schema": REPLAY_SCHEMA,
        "pagedkv_version": __version__,
        "kind": f"{times_are(attention_time)}; blocks, bytes and hits were counted by the cache manager",
        "inputs": {
            "trace": result.trace.name,
            "requests": summary.requests,
            "trace_block_size": result.trace.content_block_size,
            "model": setup.model.name,
            "gpu": setup.gpu.name,
            "gpu_memory_bytes": setup.gpu.memory_bytes,
            "gpu_bandwidth_bytes_per_s": setup.gpu.bandwidth,
            "gpu_fp16_flops": setup.gpu.fp16_flops,
            "kv_dtype": spec.dtype,
            "weight_bits": setup.weight_bits,
            "block_size": spec.block_size,
            "num_blocks": setup.num_blocks,
            "bytes_per_block": setup.bytes_per_block,
            "bytes_per_token": spec.bytes_per_token,
            "watermark": setup.watermark,
            "prefix_caching": setup.prefix_caching,
            "policy": setup.policy,
            "hybrid": setup.hybrid,
            "engine": asdict(setup.engine),
            "tensor_parallel": None if setup.tensor_parallel is None else asdict(setup.tensor_parallel),
            "disaggregation": None if setup.transfer is None else asdict(setup.transfer),
            "efficiency": asdict(setup.rates),
            "attention_time": attention_time,
            "trace_notes": list(result.trace.notes),
            **(given or {}),
        },
        "formulas": FORMULAS | HIT_RATE_FORMULAS,
        "tokens": {"input": summary.input_tokens, "output": summary.output_tokens},
        "makespan_s": summary.makespan_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "latency_s": {name: asdict(getattr(summary, name)) for name in FORMULAS},
        "cache": {
            "token_hit_rate": summary.token_hit_rate,
            "block_hit_rate": summary.block_hit_rate,
            "hit_tokens": summary.hit_tokens,
            "hit_blocks": summary.hit_blocks,
            "prompt_blocks": summary.prompt_blocks,
            "hit_tokens_after_preemption": stats.hit_tokens - summary.hit_tokens,
            "evicted_blocks": stats.evicted_blocks,
            "bytes": bytes_of(summary.use, spec, setup.num_blocks, setup.bytes_per_block),
            "mean_fragmentation": summary.use.mean_fragmentation,
        },
        "preemptions": summary.preemptions,
        "steps": summary.steps,
        "features": result.features,
    }


def hits_document(trace_name: str, hits: Hits, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The counts of a hits-only replay; ``given`` as in `replay_document`."""
    stats = hits.stats
    return {
        "schema": HITS_SCHEMA,
        "pagedkv_version": __version__,
        "inputs": dict(given or {}),
        "trace": trace_name,
        "requests": hits.requests,
        "block_size": stats.block_size,
        "num_blocks": stats.num_blocks,
        "formulas": HIT_RATE_FORMULAS,
        "input_tokens": hits.input_tokens,
        "queried_blocks": stats.queried_blocks,
        "hit_blocks": stats.hit_blocks,
        "hit_tokens": stats.hit_tokens,
        "block_hit_rate": stats.block_hit_rate,
        "token_hit_rate": hits.token_hit_rate,
        "evicted_blocks": stats.evicted_blocks,
    }


def hit_rate_rows(token_rate: float, block_rate: float) -> list[tuple[str, str]]:
    """Both hit rates as rows of a table."""
    return [
        ("hit rate, tokens (hit / all prompt tokens)", f"{token_rate:.2%}"),
        ("hit rate, blocks (hit / full prompt blocks)", f"{block_rate:.2%}"),
    ]


def times_are(attention_time: str) -> str:
    """What a document says of its times, given `StepTimeModel.attention_time`.

    >>> times_are("modelled"), times_are("measured")
    ('times are modelled', 'times are modelled, but for decode attention, which was measured')
    """
    if attention_time == "modelled":
        return "times are modelled"
    return f"times are modelled, but for decode attention, which was {attention_time}"


def kind_of_times(attention_time: str) -> str:
    """The same in a few words.

    >>> kind_of_times("modelled"), kind_of_times("measured")
    ('modelled', 'attention measured, rest modelled')
    """
    return "modelled" if attention_time == "modelled" else f"attention {attention_time}, rest modelled"


def time_kind(document: Mapping[str, Any]) -> str:
    """What the times of a document are, in a few words.

    >>> time_kind({"kind": "times are modelled, but for decode attention, which was measured; blocks were"})
    'attention measured, rest modelled'
    """
    times = document["kind"].partition(";")[0]
    how = next((how for how in ("measured", "profiled") if how in times), None)
    return "modelled time" if how is None else kind_of_times(how)


def to_json(document: dict[str, Any]) -> str:
    """Text of a document; NaN never occurs in one."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def milliseconds(distribution: Distribution) -> list[str]:
    """Mean, p50, p90, p95 and p99 for reading."""
    values = asdict(distribution)
    return [
        "-" if values[key] is None else f"{values[key] * 1e3:,.1f}"
        for key in ("mean", "p50", "p90", "p95", "p99")
    ]
