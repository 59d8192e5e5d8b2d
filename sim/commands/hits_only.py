"""``pagedkv replay --hits-only``: prefix hits without time, of requests that pass by if that is enough."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import names_of, option
from pagedkv.sim.commands.reading_options import READING_OPTIONS, read_options
from pagedkv.sim.commands.trace_source import BUILT_IN, read_whole
from pagedkv.sim.console import progress, show_table
from pagedkv.sim.hits import Hits, replay_hits
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.output.report import hit_rate_rows, hits_document
from pagedkv.sim.output.result_file import result_text
from pagedkv.sim.policy_bound import BOUND, hits_by_policy, policies_document, policies_to_run, show_policies
from pagedkv.sim.readers.reading import open_trace
from pagedkv.sim.replay import ReplaySetup
from pagedkv.sim.stream_hits import stream_hits
from pagedkv.sim.trace import Trace

TAKES: Final = frozenset(
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
"""What goes with ``--hits-only``, as names in a parsed command line."""


def run_hits(args: argparse.Namespace) -> int:
    """Count hits as the options say; returns the exit code."""
    surplus = [name for name, value in vars(args).items() if value is not None and name not in TAKES]
    if surplus:
        raise PagedKVError(
            "--hits-only counts hits in file order, without model, time or batches: "
            f"leave out {names_of(surplus)}"
        )
    quiet = check_outputs(args.trace, json=args.json)
    several = args.bound or "," in (args.policy or "")
    # a pool that never evicts grows with the trace, belady knows all of it, several policies read it again
    if args.trace != BUILT_IN and args.num_blocks and not several and args.policy != BOUND:
        return _run_stream(args, quiet)
    trace = read_whole(args)
    if several:
        return _run_policies(args, trace, quiet)
    with progress("replaying", len(trace)) as update:
        hits = replay_hits(
            trace, args.num_blocks or 0, option(args, "block_size"), update, policy=_policy(args)
        )
    _tell(args, trace.name, hits, trace.notes, quiet)
    return 0


def _run_stream(args: argparse.Namespace, quiet: bool) -> int:
    reading = open_trace(args.trace, format=args.format, options=read_options(args))
    with progress("replaying", args.limit) as update:
        hits = stream_hits(
            islice(reading, args.limit),
            args.num_blocks,
            option(args, "block_size"),
            update,
            name=args.trace,
            policy=_policy(args),
        )
    _tell(args, reading.source.name, hits, reading.notes.lines(), quiet)
    return 0


def _run_policies(args: argparse.Namespace, trace: Trace, quiet: bool) -> int:
    stated = args.policy.split(",") if args.policy else None
    policies = policies_to_run(stated, bool(args.bound))
    with progress("replaying", len(policies) * len(trace)) as update:
        found = hits_by_policy(trace, policies, args.num_blocks or 0, option(args, "block_size"), update)
    document = policies_document(trace.name, found, _given(args, trace.notes))
    if not quiet:
        show_policies(document, bounded=args.num_blocks is not None)
    if args.json is not None:
        write_outputs((args.json, text_writer(result_text(document))))
    return 0


def _policy(args: argparse.Namespace) -> str:
    return args.policy or ReplaySetup.policy


def _given(args: argparse.Namespace, notes: Sequence[str]) -> Mapping[str, Any]:
    """Inputs that the counts do not know; without a limit the whole trace was served."""
    return {"seed": args.seed, "limit": args.limit, "trace_notes": list(notes)}


def _tell(args: argparse.Namespace, name: str, hits: Hits, notes: Sequence[str], quiet: bool) -> None:
    """Show the counts, and write them if asked to."""
    if not quiet:
        _show(name, hits, _policy(args), notes, bounded=args.num_blocks is not None)
    if args.json is not None:
        document = hits_document(name, hits, {**_given(args, notes), "policy": _policy(args)})
        write_outputs((args.json, text_writer(result_text(document))))


def _show(name: str, hits: Hits, policy: str, notes: Sequence[str], bounded: bool) -> None:
    stats = hits.stats
    pool = f"{stats.num_blocks:,} blocks, {policy}" if bounded else "unbounded"
    show_table(
        f"{name}: {hits.requests:,} requests, blocks of {stats.block_size} tokens, pool {pool}",
        ("prefix hits, counted by the manager", "value"),
        [
            ("full blocks", f"{stats.queried_blocks:,}"),
            ("hit blocks", f"{stats.hit_blocks:,}"),
            ("hit tokens", f"{stats.hit_tokens:,}"),
            *hit_rate_rows(hits.token_hit_rate, stats.block_hit_rate),
            ("evicted blocks", f"{stats.evicted_blocks:,}"),
        ],
        notes,
    )
