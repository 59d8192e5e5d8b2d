"""The columns of a sweep's table: the conditions of a point, and the figures of its replay."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final, NamedTuple

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import option, read_gpu, read_model
from pagedkv.sim.commands.replay_outputs import one_policy
from pagedkv.sim.engine.engine_config import EngineConfig
from pagedkv.sim.output.latencies import latencies_of
from pagedkv.sim.output.metrics import FORMULAS, bytes_of
from pagedkv.sim.output.slo import SLO, goodput
from pagedkv.sim.replay import ReplayResult, ReplaySetup
from pagedkv.sim.sweep.grid import Point
from pagedkv.sim.sweep.sweep_options import setup_of

Value = str | int | float | bool | None
Row = dict[str, Value]

LATENCY_FIGURES: Final = ("mean", "p50", "p90", "p99")


class Column(NamedTuple):
    """A column: its type, and for figures which way is better (1: more, -1: less, 0: neither)."""

    name: str
    type: type
    better: int = 0


CONDITIONS: Final = (
    Column("trace", str),
    Column("requests", int),
    Column("model", str),
    Column("gpu", str),
    Column("gpu_memory_bytes", int),
    Column("kv_dtype", str),
    Column("weight_bits", float),
    Column("block_size", int),
    Column("num_blocks", int),
    Column("policy", str),
    Column("prefix_caching", bool),
    Column("max_batch", int),
    Column("token_budget", int),
    Column("watermark", float),
    Column("speed", float),
)

FIGURES: Final = (
    Column("pool_bytes", int, -1),
    Column("makespan_s", float, -1),
    Column("output_tokens_per_s", float, 1),
    Column("goodput_share", float, 1),
    Column("goodput_requests_per_s", float, 1),
    *(Column(f"{name}_{figure}_s", float, -1) for name in FORMULAS for figure in LATENCY_FIGURES),
    Column("token_hit_rate", float, 1),
    Column("block_hit_rate", float, 1),
    Column("hit_tokens", int, 1),
    Column("evicted_blocks", int, -1),
    Column("preemptions", int, -1),
    Column("peak_active_bytes", int, -1),
    Column("mean_active_bytes", float, -1),
    Column("mean_fragmentation", float, -1),
)

ERROR: Final = Column("error", str)

_SHOWN = {column.name for column in CONDITIONS} | {"no_prefix_caching", "gpu_memory", "hardware"}


def columns_of(axes: Sequence[str]) -> tuple[Column, ...]:
    """All columns of a table: conditions, options that have no column of their own as text, figures."""
    more = [Column(name.replace("-", "_"), str) for name in axes if name.replace("-", "_") not in _SHOWN]
    return (*CONDITIONS, *more, ERROR, *FIGURES)


def conditions_of(point: Point, args: argparse.Namespace) -> Row:
    """The conditions of a point, those of the trace excepted.

    Raises ``PagedKVError`` for a model, GPU or policy that does not exist: no point of its own fails there.
    """
    model, gpu = read_model(args), read_gpu(args)
    return {
        "model": model.name,
        "gpu": gpu.name,
        "gpu_memory_bytes": gpu.memory_bytes,
        "kv_dtype": model.spec.dtype,
        "weight_bits": float(option(args, "weight_bits")),
        "block_size": model.spec.block_size,
        "num_blocks": _num_blocks(args),
        "policy": one_policy(args.policy) or ReplaySetup.policy,
        "prefix_caching": not args.no_prefix_caching,
        "max_batch": args.max_batch or EngineConfig.max_batch,
        "token_budget": args.token_budget or EngineConfig.token_budget,
        "watermark": ReplaySetup.watermark if args.watermark is None else args.watermark,
        "speed": args.speed or 1.0,
        **{
            name.replace("-", "_"): str(value).lower() if isinstance(value, bool) else value
            for name, value in point.items()
            if name.replace("-", "_") not in _SHOWN
        },
    }


def _num_blocks(args: argparse.Namespace) -> int | None:
    try:
        return setup_of(args).num_blocks
    except PagedKVError:  # the replay says why
        stated: int | None = args.num_blocks
        return stated


def figures_of(result: ReplayResult, slos: Sequence[SLO]) -> Row:
    """The figures of a finished replay; goodput only where there are limits."""
    s, setup = result.summary, result.setup
    used = bytes_of(s.use, setup.model.spec, setup.num_blocks, setup.bytes_per_block)
    met = goodput(latencies_of(result.trace, result.records), slos, s.makespan_s) if slos else None
    latencies = {name: asdict(getattr(s, name)) for name in FORMULAS}
    return {
        "pool_bytes": int(used["reserved"]),
        "makespan_s": s.makespan_s,
        "output_tokens_per_s": s.output_tokens_per_s,
        "goodput_share": met.share if met else None,
        "goodput_requests_per_s": met.requests_per_s if met else None,
        **{f"{name}_{figure}_s": latencies[name][figure] for name in FORMULAS for figure in LATENCY_FIGURES},
        "token_hit_rate": s.token_hit_rate,
        "block_hit_rate": s.block_hit_rate,
        "hit_tokens": s.hit_tokens,
        "evicted_blocks": s.stats.evicted_blocks,
        "preemptions": s.preemptions,
        "peak_active_bytes": int(used["peak_active"]),
        "mean_active_bytes": used["mean_active"],
        "mean_fragmentation": s.use.mean_fragmentation,
    }
