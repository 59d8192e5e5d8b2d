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
    engine_config,
    tensor_parallel,
    transfer,
)
from pagedkv.sim.commands.options import (
    add_model_options,
    at_least,
    names_of,
    not_negative,
    option,
    positive,
    read_gpu,
    read_model,
    read_num_blocks,
    share,
    share_below_1,
)
from pagedkv.sim.commands.reading_options import READING_OPTIONS, add_reading_options, read_options
from pagedkv.sim.commands.replay_outputs import add_output_options, check, one_policy, write
from pagedkv.sim.commands.step_time_options import add_step_time_options, read_step_time
from pagedkv.sim.console import human_bytes, progress, show_table
from pagedkv.sim.engine.engine import EngineConfig
from pagedkv.sim.hits import Hits, replay_hits
from pagedkv.sim.output.features import feature_rows
from pagedkv.sim.output.metrics import FORMULAS, bytes_of
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.output.report import hits_document, milliseconds
from pagedkv.sim.output.result_file import result_text
from pagedkv.sim.policy_bound import hits_by_policy, policies_document, policies_to_run, show_policies
from pagedkv.sim.readers.reading import read_trace
from pagedkv.sim.replay import ReplayResult, ReplaySetup, run_replay
from pagedkv.sim.timing.efficiency import Efficiency
from pagedkv.sim.timing.roofline import Roofline, efficiency_of
from pagedkv.sim.timing.tensor_parallel import shard
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long

BUILT_IN = "chat-long"
BUILT_IN_REQUESTS = 2000

HITS_ONLY_TAKES = frozenset(
    (
        "run",
        "trace",
        "limit",
        "seed",
        *READING_OPTIONS,
        "hits_only",
        "block_size",
        "num_blocks",
        "policy",
        "bound",
        "json",
    )
)


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
        return _run_hits(args)
    if args.bound:
        raise PagedKVError("--bound compares hits: it goes with --hits-only")
    quiet = check(args)
    setup = _setup(args)
    trace = _read_trace(args)
    with progress("replaying", len(trace)) as update:
        result = run_replay(trace, setup, update)
    if not quiet:
        _show(result)
    given = _given(args) | {
        "speed": args.speed or 1.0,
        "memory_utilization": None if args.num_blocks else option(args, "memory_utilization"),
    }
    write(args, result, given, quiet)
    return 0


def _setup(args: argparse.Namespace) -> ReplaySetup:
    check_hybrid(args)
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
    return ReplaySetup(
        model=model,
        gpu=gpu,
        num_blocks=num_blocks,
        engine=engine_config(args, model.spec.bytes_per_block),
        efficiency=efficiency,
        step_model=read_step_time(args, base, model, gpu, num_blocks),
        weight_bits=weight_bits,
        prefix_caching=not args.no_prefix_caching,
        tensor_parallel=tensor_parallel(args),
        transfer=transfer(args, model.spec.bytes_per_block),
        hybrid=bool(args.hybrid),
        **_stated(watermark=args.watermark, policy=one_policy(args.policy)),
    )


def _stated(**options: Any) -> dict[str, Any]:
    """Without those that keep their default."""
    return {name: value for name, value in options.items() if value is not None}


def _read_trace(args: argparse.Namespace) -> Trace:
    if args.trace == BUILT_IN:  # a file of this name is ./chat-long
        trace = chat_long(args.limit or BUILT_IN_REQUESTS, args.seed)
    else:
        trace = read_trace(args.trace, format=args.format, options=read_options(args), limit=args.limit)
    return trace if args.speed is None else trace.faster(args.speed)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Inputs that a result does not know; without a limit the whole trace was served."""
    return {"seed": args.seed, "limit": args.limit}


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
            *_hit_rows(s.token_hit_rate, s.block_hit_rate),
            ("evicted blocks", f"{s.stats.evicted_blocks:,}"),
            ("preemptions", f"{s.preemptions:,}"),
            ("makespan, modelled", f"{s.makespan_s:,.1f} s"),
            ("output throughput, modelled", f"{s.output_tokens_per_s:,.1f} tokens/s"),
        ],
    )
    if result.features:
        show_table("features", ("times modelled, the rest counted", "value"), feature_rows(result.features))


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
    surplus = [
        name for name, value in vars(args).items() if value is not None and name not in HITS_ONLY_TAKES
    ]
    if surplus:
        raise PagedKVError(
            "--hits-only counts hits in file order, without model, time or batches: "
            f"leave out {names_of(surplus)}"
        )
    quiet = check_outputs(args.trace, json=args.json)
    trace = _read_trace(args)
    if args.bound or "," in (args.policy or ""):
        return _run_policies(args, trace, quiet)
    with progress("replaying", len(trace)) as update:
        policy = args.policy or ReplaySetup.policy
        hits = replay_hits(trace, args.num_blocks or 0, option(args, "block_size"), update, policy=policy)
    if not quiet:
        _show_hits(trace, hits, policy, bounded=args.num_blocks is not None)
    if args.json is not None:
        document = hits_document(trace.name, hits, _given(args) | {"policy": policy})
        write_outputs((args.json, text_writer(result_text(document))))
    return 0


def _run_policies(args: argparse.Namespace, trace: Trace, quiet: bool) -> int:
    stated = args.policy.split(",") if args.policy else None
    policies = policies_to_run(stated, bool(args.bound))
    with progress("replaying", len(policies) * len(trace)) as update:
        found = hits_by_policy(trace, policies, args.num_blocks or 0, option(args, "block_size"), update)
    document = policies_document(trace.name, found, _given(args))
    if not quiet:
        show_policies(document, bounded=args.num_blocks is not None)
    if args.json is not None:
        write_outputs((args.json, text_writer(result_text(document))))
    return 0


def _policies(text: str) -> str:
    """One policy or several, separated by commas; as written."""
    for name in text.split(","):
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(POLICIES)}")
    return text


def _show_hits(trace: Trace, hits: Hits, policy: str, bounded: bool) -> None:
    stats = hits.stats
    pool = f"{stats.num_blocks:,} blocks, {policy}" if bounded else "unbounded"
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
