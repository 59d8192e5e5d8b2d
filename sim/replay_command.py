"""``pagedkv replay``: a trace through the manager, as a table, JSON, a timeline and a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from pagedkv.errors import PagedKVError
from pagedkv.sim.console import human_bytes, progress, show_table
from pagedkv.sim.engine import EngineConfig
from pagedkv.sim.hits import Hits, replay_hits
from pagedkv.sim.metrics import FORMULAS, bytes_of
from pagedkv.sim.options import (
    add_model_options,
    at_least,
    positive,
    read_gpu,
    read_model,
    read_num_blocks,
    require_writable,
    share,
    write_whole,
)
from pagedkv.sim.plot import plot_replay, require_plottable
from pagedkv.sim.replay import ReplayResult, ReplaySetup, run_replay
from pagedkv.sim.report import hits_document, milliseconds, replay_document, to_json
from pagedkv.sim.step_time import Efficiency
from pagedkv.sim.timeline import timeline_csv
from pagedkv.sim.trace import MOONCAKE_BLOCK_SIZE, Trace, read_mooncake
from pagedkv.sim.workload import chat_long

BUILT_IN = "chat-long"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "replay",
        help="replay a trace through the cache manager",
        description="Replay a trace through the real cache manager in modelled time.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "trace", nargs="?", default=BUILT_IN, help=f"Mooncake JSONL (.gz, .zst) or {BUILT_IN} (default)"
    )
    parser.add_argument(
        "--limit", type=at_least(1, most=10_000_000), help="first N requests only (chat-long: how many)"
    )
    parser.add_argument("--speed", type=positive, default=1.0, help="arrivals this many times as fast")
    parser.add_argument("--seed", type=at_least(0), default=0, help=f"seed of {BUILT_IN}")
    parser.add_argument(
        "--trace-block-size",
        type=at_least(1),
        default=MOONCAKE_BLOCK_SIZE,
        help="tokens per hash id in the file (default %(default)s)",
    )
    parser.add_argument(
        "--hits-only",
        action="store_true",
        help="count prefix hits only: no time, no decode; the pool is unbounded unless --num-blocks is given",
    )
    add_model_options(parser)
    _add_engine_options(parser)
    _add_output_options(parser)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--num-blocks", type=at_least(1), help="blocks in the pool (default: what fits)")
    group.add_argument(
        "--max-batch",
        type=at_least(1, most=1_000_000),
        default=256,
        help="sequences at once (default %(default)s)",
    )
    group.add_argument(
        "--token-budget", type=at_least(1), default=2048, help="tokens per step (default %(default)s)"
    )
    group.add_argument(
        "--watermark",
        type=float,
        default=0.01,
        help="share of the pool kept for growth (default %(default)s)",
    )
    group.add_argument("--no-prefix-caching", action="store_true", help="share nothing, keep nothing")
    group = parser.add_argument_group("efficiency, as shares of the peak")
    defaults = Efficiency()
    for name, what in (
        ("weights", "bandwidth on weights"),
        ("kv", "bandwidth on K and V"),
        ("compute", "FLOPS"),
    ):
        value = getattr(defaults, name)
        group.add_argument(
            f"--{name}-efficiency", type=share, default=value, help=f"{what} (default {value})"
        )
    group.add_argument(
        "--launch-us",
        type=float,
        default=defaults.launch_s_per_layer * 1e6,
        help="fixed microseconds per layer and step (default %(default)s)",
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write the result as JSON (- for standard output)")
    group.add_argument("--timeline", metavar="FILE.csv", help="write the state at each interval")
    group.add_argument(
        "--interval", type=positive, default=1.0, help="modelled seconds per row of the timeline (default 1)"
    )
    group.add_argument("--plot", metavar="FILE.png", help="draw cache bytes and ITL")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    require_writable(args.json, args.timeline, args.plot)
    if args.plot:
        require_plottable(args.plot)
    if args.hits_only:
        if args.timeline or args.plot:
            raise PagedKVError("--hits-only has no time: no --timeline and no --plot")
        return _run_hits(args)
    model, gpu = read_model(args), read_gpu(args)
    setup = ReplaySetup(
        model=model,
        gpu=gpu,
        num_blocks=read_num_blocks(args, model, gpu),
        engine=EngineConfig(args.max_batch, args.token_budget, args.interval),
        efficiency=Efficiency(
            args.weights_efficiency, args.kv_efficiency, args.compute_efficiency, args.launch_us * 1e-6
        ),
        weight_bits=args.weight_bits,
        watermark=args.watermark,
        prefix_caching=not args.no_prefix_caching,
    )
    trace = _read_trace(args)
    with progress("replaying", len(trace)) as update:
        result = run_replay(trace, setup, update)
    if args.json != "-":
        _show(result)
    _write_outputs(args, result)
    return 0


def _read_trace(args: argparse.Namespace) -> Trace:
    if args.trace == BUILT_IN and not Path(BUILT_IN).exists():
        trace = chat_long(args.limit or 2000, args.seed)
    else:
        trace = read_mooncake(args.trace, block_size=args.trace_block_size, limit=args.limit)
    return trace if args.speed == 1.0 else trace.faster(args.speed)


def _write_outputs(args: argparse.Namespace, result: ReplayResult) -> None:
    if args.json:
        _write_text(args.json, to_json(replay_document(result)))
    if args.timeline:
        _write_text(args.timeline, timeline_csv(result))
    if args.plot:
        write_whole(args.plot, lambda path: plot_replay(result, path))


def _write_text(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
    else:
        write_whole(path, lambda temporary: _write_utf8(temporary, text))


def _write_utf8(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _show(result: ReplayResult) -> None:
    s, setup = result.summary, result.setup
    spec = setup.model.spec
    show_table(
        f"{result.trace.name}: {s.requests:,} requests, {s.input_tokens:,} prompt tokens, "
        f"{s.output_tokens:,} output tokens",
        ("latency, modelled [ms]", "mean", "p50", "p90", "p95", "p99"),
        [(name.upper(), *milliseconds(getattr(s, name))) for name in FORMULAS],
        [f"{name.upper()} = {formula}" for name, formula in FORMULAS.items()],
    )
    used = bytes_of(s.use, spec, setup.num_blocks)
    show_table(
        f"{setup.model.name} on {setup.gpu.name}, {spec.dtype} cache, {setup.num_blocks:,} blocks of "
        f"{spec.block_size} tokens",
        ("cache, counted by the manager", "value"),
        [
            ("bytes reserved (the pool)", human_bytes(used["reserved"])),
            *_peak_and_mean(
                "bytes active (blocks held)", used["peak_active"], used["mean_active"], human_bytes
            ),
            *_peak_and_mean("bytes used (tokens stored)", used["peak_used"], used["mean_used"], human_bytes),
            ("internal fragmentation, mean", f"{s.use.mean_fragmentation:.2%}"),
            *_hit_rows(s.stats.token_hit_rate, s.stats.block_hit_rate),
            ("evicted blocks", f"{s.stats.evicted_blocks:,}"),
            ("preemptions", f"{s.preemptions:,}"),
            ("makespan, modelled", f"{s.makespan_s:,.1f} s"),
            ("output throughput, modelled", f"{s.output_tokens_per_s:,.1f} tokens/s"),
        ],
    )


def _peak_and_mean(
    name: str, peak: float, mean: float, text: Callable[[float], str]
) -> list[tuple[str, str]]:
    return [(f"{name}, peak", text(peak)), (f"{name}, mean", text(mean))]


def _hit_rows(token_rate: float, block_rate: float) -> list[tuple[str, str]]:
    return [
        ("hit rate, tokens (hit / all prompt tokens)", f"{token_rate:.2%}"),
        ("hit rate, blocks (hit / full prompt blocks)", f"{block_rate:.2%}"),
    ]


def _run_hits(args: argparse.Namespace) -> int:
    trace = _read_trace(args)
    with progress("replaying", len(trace)) as update:
        hits = replay_hits(trace, args.num_blocks or 0, args.block_size, update)
    if args.json != "-":
        _show_hits(trace, hits, bounded=args.num_blocks is not None)
    if args.json:
        _write_text(args.json, to_json(hits_document(trace.name, hits)))
    return 0


def _show_hits(trace: Trace, hits: Hits, bounded: bool) -> None:
    stats = hits.stats
    pool = f"{stats.num_blocks:,} blocks" if bounded else "unbounded"
    show_table(
        f"{trace.name}: {hits.requests:,} requests, blocks of {stats.block_size} tokens, pool {pool}",
        ("prefix hits, counted by the manager", "value"),
        [
            ("full blocks", f"{stats.queried_blocks:,}"),
            ("hit blocks", f"{stats.hit_blocks:,}"),
            ("hit tokens", f"{stats.hit_tokens:,}"),
            *_hit_rows(hits.token_hit_rate, stats.block_hit_rate),
            ("evicted blocks", f"{stats.evicted_blocks:,}"),
        ],
    )
