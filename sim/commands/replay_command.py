"""``pagedkv replay``: a trace through the manager, as a table, JSON, a timeline and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pagedkv.errors import PagedKVError
from pagedkv.policies import POLICIES
from pagedkv.sim.commands.engine_options import (
    add_engine_options,
    check_hybrid,
    check_prefix_caching,
    engine_config,
    tensor_parallel,
    transfer,
)
from pagedkv.sim.commands.hits_only import run_hits
from pagedkv.sim.commands.options import (
    add_model_options,
    at_least,
    not_negative,
    option,
    positive,
    read_gpu,
    read_model,
    read_num_blocks,
    share,
    share_below_1,
)
from pagedkv.sim.commands.reading_options import add_reading_options
from pagedkv.sim.commands.replay_outputs import add_output_options, check, one_policy, write
from pagedkv.sim.commands.step_time_options import add_step_time_options, read_step_time
from pagedkv.sim.commands.trace_source import BUILT_IN, read_requests, read_whole
from pagedkv.sim.console import human_bytes, progress, show_table
from pagedkv.sim.engine.engine import EngineConfig
from pagedkv.sim.engine.hybrid_pool import hybrid_block_bytes
from pagedkv.sim.output.features import feature_rows
from pagedkv.sim.output.metrics import FORMULAS, bytes_of
from pagedkv.sim.output.report import hit_rate_rows, kind_of_times, milliseconds
from pagedkv.sim.replay import ReplayResult, ReplaySetup, run_replay
from pagedkv.sim.timing.efficiency import Efficiency
from pagedkv.sim.timing.roofline import Roofline, efficiency_of
from pagedkv.sim.timing.tensor_parallel import shard
from pagedkv.sim.trace import Trace


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "replay",
        help="replay a trace through the cache manager",
        description="Replay a trace through the real cache manager in modelled time.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "trace",
        nargs="?",
        default=BUILT_IN,
        help=f"trace of any known format (.gz, .zst), or {BUILT_IN} (built in, default)",
    )
    parser.add_argument(
        "--limit", type=at_least(1, most=10_000_000), help="first N requests only (chat-long: how many)"
    )
    parser.add_argument("--speed", type=positive, help="arrivals this many times as fast (default 1)")
    parser.add_argument("--seed", type=at_least(0), default=0, help=f"seed of {BUILT_IN}")
    parser.add_argument(
        "--hits-only",
        action="store_true",
        default=None,
        help="count prefix hits only: no time, no decode; the pool is unbounded unless --num-blocks is given",
    )
    add_reading_options(parser)
    add_model_options(parser)
    add_step_time_options(parser)
    _add_engine_options(parser)
    add_engine_options(parser)
    add_output_options(parser)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--num-blocks", type=at_least(1), help="blocks in the pool (default: what fits)")
    group.add_argument(
        "--max-batch",
        type=at_least(1, most=1_000_000),
        help=f"sequences at once (default {EngineConfig.max_batch})",
    )
    group.add_argument(
        "--token-budget", type=at_least(1), help=f"tokens per step (default {EngineConfig.token_budget})"
    )
    group.add_argument(
        "--watermark",
        type=share_below_1,
        help=f"share of the pool kept for growth (default {ReplaySetup.watermark})",
    )
    group.add_argument(
        "--policy",
        type=_policies,
        metavar="NAME",
        help=f"what is evicted first, of {', '.join(POLICIES)} (default {ReplaySetup.policy}); belady, and "
        "several with commas between them, go with --hits-only alone",
    )
    group.add_argument(
        "--bound",
        action="store_true",
        default=None,
        help="with --hits-only: each policy (default: all) beside belady, which knows the future",
    )
    group.add_argument(
        "--no-prefix-caching", action="store_true", default=None, help="share nothing, keep nothing"
    )
    group = parser.add_argument_group("efficiency, as shares of the peak")
    for name, what in (
        ("weights", "bandwidth on weights"),
        ("kv", "bandwidth on K and V"),
        ("compute", "FLOPS"),
    ):
        group.add_argument(
            f"--{name}-efficiency",
            type=share,
            help=f"{what} (default {getattr(Efficiency, name)}, or what is known of the GPU)",
        )
    group.add_argument(
        "--launch-us",
        type=not_negative,
        help=f"fixed microseconds per layer and step (default {Efficiency.launch_s_per_layer * 1e6:g}, or "
        "what is known of the GPU)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if args.hits_only:
        return run_hits(args)
    if args.bound:
        raise PagedKVError("--bound compares hits: it goes with --hits-only")
    quiet = check(args)
    setup = _setup(args)
    trace = read_requests(args)
    trace = trace if args.speed is None else trace.faster(args.speed)
    with progress("replaying", len(trace)) as update:
        result = run_replay(trace, setup, update)
    if not quiet:
        _show(result)
    write(args, result, _given(args), quiet)
    return 0


def _setup(args: argparse.Namespace) -> ReplaySetup:
    check_hybrid(args)
    check_prefix_caching(args)
    model, gpu = shard(read_model(args), args.tensor_parallel or 1), read_gpu(args)
    launch_s = None if args.launch_us is None else args.launch_us * 1e-6
    num_blocks, weight_bits = read_num_blocks(args, model, gpu), option(args, "weight_bits")
    efficiency = replace(
        efficiency_of(gpu, model.spec),
        **_stated(
            weights=args.weights_efficiency,
            kv=args.kv_efficiency,
            compute=args.compute_efficiency,
            launch_s_per_layer=launch_s,
        ),
    )
    base = Roofline.from_gpu(model, gpu, efficiency, weight_bits)
    bytes_per_block = hybrid_block_bytes(model.spec) if args.hybrid else model.spec.bytes_per_block
    return ReplaySetup(
        model=model,
        gpu=gpu,
        num_blocks=num_blocks,
        engine=engine_config(args, bytes_per_block),
        efficiency=efficiency,
        step_model=read_step_time(args, base, model, gpu, num_blocks),
        weight_bits=weight_bits,
        prefix_caching=not args.no_prefix_caching,
        tensor_parallel=tensor_parallel(args),
        transfer=transfer(args, bytes_per_block),
        hybrid=bool(args.hybrid),
        **_stated(watermark=args.watermark, policy=one_policy(args.policy)),
    )


def _stated(**options: Any) -> dict[str, Any]:
    """Without those that keep their default."""
    return {name: value for name, value in options.items() if value is not None}


def read_replayed(args: argparse.Namespace) -> Trace:
    """The whole trace, for commands that replay it more than once, as fast as ``--speed`` says."""
    trace = read_whole(args)
    return trace if args.speed is None else trace.faster(args.speed)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Inputs that a result does not know; without a limit the whole trace was served."""
    return {
        "seed": args.seed,
        "limit": args.limit,
        "attention_table": args.attention_table,
        "extrapolate": bool(args.extrapolate),
        "measure_attention": args.measure_attention,
        "speed": args.speed or 1.0,
        "memory_utilization": None if args.num_blocks else option(args, "memory_utilization"),
    }


def _show(result: ReplayResult) -> None:
    s, setup = result.summary, result.setup
    spec, kind = setup.model.spec, kind_of_times(setup.step_time.attention_time)
    show_table(
        f"{result.trace.name}: {s.requests:,} requests, {s.input_tokens:,} prompt tokens, "
        f"{s.output_tokens:,} output tokens",
        (f"latency, {kind} [ms]", "mean", "p50", "p90", "p95", "p99"),
        [(name.upper(), *milliseconds(getattr(s, name))) for name in FORMULAS],
        [*(f"{name.upper()} = {formula}" for name, formula in FORMULAS.items()), *result.trace.notes],
    )
    used = bytes_of(s.use, spec, setup.num_blocks, setup.bytes_per_block)
    show_table(
        f"{setup.model.name} on {setup.gpu.name}, {spec.dtype} cache, {setup.num_blocks:,} blocks of "
        f"{spec.block_size} tokens",
        ("cache, counted by the manager", "value"),
        [
            ("bytes reserved (the pool)", human_bytes(used["reserved"])),
            *_peak_and_mean(
                "bytes active (blocks held)", used["peak_active"], used["mean_active"], human_bytes
            ),
            *_peak_and_mean("bytes used (slots assigned)", used["peak_used"], used["mean_used"], human_bytes),
            ("internal fragmentation, mean", f"{s.use.mean_fragmentation:.2%}"),
            *hit_rate_rows(s.token_hit_rate, s.block_hit_rate),
            ("evicted blocks", f"{s.stats.evicted_blocks:,}"),
            ("preemptions", f"{s.preemptions:,}"),
            (f"makespan, {kind}", f"{s.makespan_s:,.1f} s"),
            (f"output throughput, {kind}", f"{s.output_tokens_per_s:,.1f} tokens/s"),
        ],
    )
    if result.features:
        show_table("features", (f"times: {kind}; the rest counted", "value"), feature_rows(result.features))


def _peak_and_mean(
    name: str, peak: float, mean: float, text: Callable[[float], str]
) -> list[tuple[str, str]]:
    return [(f"{name}, peak", text(peak)), (f"{name}, mean", text(mean))]


def _policies(text: str) -> str:
    """One policy or several, separated by commas; as written."""
    for name in text.split(","):
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(POLICIES)}")
    return text
