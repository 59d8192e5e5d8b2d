"""``pagedkv fleet``: a trace through several replicas behind a router, one run per router."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from pagedkv import __version__
from pagedkv.errors import PagedKVError
from pagedkv.sim.books import require_books_fit
from pagedkv.sim.commands import replay_command
from pagedkv.sim.commands.options import add_json_option, at_least, not_negative, positive
from pagedkv.sim.commands.reading_options import add_reading_options
from pagedkv.sim.commands.trace_source import BUILT_IN
from pagedkv.sim.console import progress, show_table
from pagedkv.sim.fleet.fleet import run_fleet
from pagedkv.sim.fleet.fleet_summary import BALANCE_FORMULA, FleetSummary, fleet_document, summarize_fleet
from pagedkv.sim.fleet.router import COST_FORMULA, DEFAULT_LOAD_WEIGHT, ROUTERS
from pagedkv.sim.output.metrics import FORMULAS
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.output.report import HIT_RATE_FORMULAS, milliseconds, times_are
from pagedkv.sim.output.result_file import result_text
from pagedkv.sim.replay import ReplaySetup
from pagedkv.sim.sweep.sweep_options import add_axes, parse_axes, setup_of
from pagedkv.sim.trace import Trace

SCHEMA: Final = "pagedkv.fleet/1"
DEFAULT_REPLICAS: Final = 4


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "fleet",
        help="replay a trace through several replicas behind a router",
        description="Replay a trace through several replicas, each an engine over a cache manager of its "
        "own, behind a router; several routers are compared.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "trace",
        nargs="?",
        default=BUILT_IN,
        help=f"trace of any known format, or {BUILT_IN} (built in, default)",
    )
    parser.add_argument("--limit", type=at_least(1, most=10_000_000), help="first N requests only")
    parser.add_argument("--speed", type=positive, help="arrivals this many times as fast (default 1)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of the built-in trace")
    group = parser.add_argument_group("fleet")
    group.add_argument(
        "--replicas",
        type=at_least(1, most=10_000),
        default=DEFAULT_REPLICAS,
        help=f"how many, all equal (default {DEFAULT_REPLICAS})",
    )
    group.add_argument(
        "--router", nargs="+", choices=ROUTERS, default=ROUTERS, help="one or several (default: all)"
    )
    group.add_argument(
        "--load-weight",
        type=not_negative,
        default=DEFAULT_LOAD_WEIGHT,
        help=f"of an open prompt token in the cost of a replica (default {DEFAULT_LOAD_WEIGHT}); "
        f"cost = {COST_FORMULA}",
    )
    group.add_argument(
        "--event-delay",
        type=not_negative,
        default=0.0,
        help="modelled seconds until the prefix-aware router hears of a cache (default 0)",
    )
    add_json_option(parser)
    add_reading_options(parser)
    add_axes(parser, several=False)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    for name in args.router:
        if list(args.router).count(name) > 1:
            raise PagedKVError(f"--router states {name} twice")
    quiet = check_outputs(args.trace, json=args.json)
    setup = setup_of(parse_axes(args.axes))
    require_books_fit(setup.num_blocks, setup.model.spec.block_size, args.replicas)
    trace = replay_command.read_replayed(args)
    with progress("replaying", len(trace) * len(args.router)) as update:
        summaries = {
            name: _served(args, trace, setup, name, partial(_onward, update, i * len(trace)))
            for i, name in enumerate(args.router)
        }
    if not quiet:
        _show(trace, setup, summaries)
    if args.json is not None:
        write_outputs((args.json, text_writer(result_text(_document(args, trace, setup, summaries)))))
    return 0


def _served(
    args: argparse.Namespace,
    trace: Trace,
    setup: ReplaySetup,
    router: str,
    on_progress: Callable[[int], None],
) -> FleetSummary:
    result = run_fleet(
        trace,
        setup,
        args.replicas,
        router,
        on_progress,
        load_weight=args.load_weight,
        event_delay_s=args.event_delay,
    )
    return summarize_fleet(result)


def _onward(update: Callable[[int], None], before: int, done: int) -> None:
    update(before + done)


def _document(
    args: argparse.Namespace, trace: Trace, setup: ReplaySetup, summaries: dict[str, FleetSummary]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "pagedkv_version": __version__,
        "kind": f"{times_are(setup.step_time.attention_time)}; hits were counted by the cache managers",
        "inputs": {
            "trace": trace.name,
            "requests": len(trace),
            "limit": args.limit,
            "seed": args.seed,
            "speed": args.speed or 1.0,
            "replicas": args.replicas,
            "load_weight": args.load_weight,
            "event_delay_s": args.event_delay,
            "model": setup.model.name,
            "gpu": setup.gpu.name,
            "kv_dtype": setup.model.spec.dtype,
            "block_size": setup.model.spec.block_size,
            "num_blocks_per_replica": setup.num_blocks,
            "options": args.axes,
            "trace_notes": list(trace.notes),
        },
        "formulas": FORMULAS | HIT_RATE_FORMULAS | {"imbalance": BALANCE_FORMULA, "cost": COST_FORMULA},
        "routers": {name: fleet_document(summary) for name, summary in summaries.items()},
    }


def _show(trace: Trace, setup: ReplaySetup, summaries: dict[str, FleetSummary]) -> None:
    several = len(next(iter(summaries.values())).replicas)
    show_table(
        f"{trace.name}: {len(trace):,} requests, {several} x {setup.model.name} on {setup.gpu.name}, "
        f"each with {setup.num_blocks:,} blocks of {setup.model.spec.block_size} tokens",
        ("router", *summaries),
        [(name, *(text(summary) for summary in summaries.values())) for name, text in _ROWS.items()],
        [f"{name.upper()} = {formula}" for name, formula in FORMULAS.items()]
        + [f"imbalance = {BALANCE_FORMULA}", f"cost of a replica, for the routers = {COST_FORMULA}"]
        + list(trace.notes),
    )
    for name, summary in summaries.items():
        show_table(
            f"Replicas, {name}",
            ("replica", "requests", "prompt tokens", "hit rate", "busy, modelled", "evicted blocks"),
            [
                (
                    str(i),
                    f"{replica.requests:,}",
                    f"{replica.input_tokens:,}",
                    f"{replica.token_hit_rate:.2%}",
                    f"{replica.busy_s / summary.makespan_s:.1%}",
                    f"{replica.evicted_blocks:,}",
                )
                for i, replica in enumerate(summary.replicas)
            ],
        )


_ROWS: Final[dict[str, Callable[[FleetSummary], str]]] = {
    "hit rate, tokens": lambda s: f"{s.token_hit_rate:.2%}",
    "hit tokens": lambda s: f"{s.hit_tokens:,}",
    "TTFT mean [ms]": lambda s: milliseconds(s.ttft)[0],
    "TTFT p50 [ms]": lambda s: milliseconds(s.ttft)[1],
    "TTFT p99 [ms]": lambda s: milliseconds(s.ttft)[4],
    "TPOT mean [ms]": lambda s: milliseconds(s.tpot)[0],
    "TPOT p99 [ms]": lambda s: milliseconds(s.tpot)[4],
    "output tokens/s": lambda s: f"{s.output_tokens_per_s:,.1f}",
    "imbalance": lambda s: f"{s.imbalance:.3f}",
    "preemptions": lambda s: f"{s.preemptions:,}",
}
