"""What ``pagedkv replay`` writes: its options, checked before the work, and the files after it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import add_json_option, positive
from pagedkv.sim.console import human_bytes, show_table
from pagedkv.sim.engine.engine import EngineConfig
from pagedkv.sim.output.html_report import report_html
from pagedkv.sim.output.latencies import latencies_of, requests_csv
from pagedkv.sim.output.outputs import STANDARD_OUTPUT, Writer, check_outputs, text_writer, write_outputs
from pagedkv.sim.output.plot import plot_replay, require_plottable
from pagedkv.sim.output.report import kind_of_times, replay_document
from pagedkv.sim.output.result_file import result_text
from pagedkv.sim.output.series import series_of
from pagedkv.sim.output.slo import GOODPUT_FORMULA, Goodput, check_slos, goodput, slo
from pagedkv.sim.output.tables import require_table, table_writer
from pagedkv.sim.output.timeline import timeline_csv
from pagedkv.sim.replay import ReplayResult


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options."""
    group = parser.add_argument_group("output (.csv or, with pyarrow, .parquet for tables)")
    add_json_option(group)
    group.add_argument("--html", metavar="FILE.html", help="write a report with charts, one file")
    group.add_argument(
        "--timeline", metavar="FILE.csv", help="write the state at each interval (- for standard output)"
    )
    group.add_argument("--requests", metavar="FILE.csv", help="write the latencies of each request")
    group.add_argument(
        "--interval",
        type=positive,
        help=f"modelled seconds per row of the timeline (default {EngineConfig.interval_s:g})",
    )
    group.add_argument("--plot", metavar="FILE.png", help="draw cache bytes and ITL")
    group.add_argument(
        "--slo",
        type=slo,
        action="append",
        metavar="LATENCY=SECONDS",
        help="limit of ttft, tpot or e2e for goodput; repeat it for several, which all must hold",
    )


def check(args: argparse.Namespace) -> bool:
    """Refuse what cannot be written; tells whether standard output is taken."""
    quiet = check_outputs(
        args.trace,
        args.model,
        args.hardware,
        json=args.json,
        html=args.html,
        timeline=args.timeline,
        requests=args.requests,
        plot=args.plot,
    )
    if args.plot is not None:
        require_plottable(args.plot)
    for path in (args.timeline, args.requests):
        if path is not None:
            require_table(path)
    if args.slo is not None:
        check_slos(args.slo)
    return quiet


def write(args: argparse.Namespace, result: ReplayResult, given: Mapping[str, Any], quiet: bool) -> None:
    """Show goodput, write every file that was asked for, and say how large the report is."""
    found = None
    if args.slo is not None:
        makespan_s = result.summary.makespan_s
        found = goodput(latencies_of(result.trace, result.records), args.slo, makespan_s)
        if not quiet:
            show_goodput(found, kind_of_times(result.setup.step_time.attention_time))
    report = ""
    outputs: list[tuple[str, Writer]] = []
    if args.json is not None or args.html is not None:
        document = full_document(result, given, found)
        if args.json is not None:
            outputs.append((args.json, text_writer(result_text(document))))
        if args.html is not None:
            report = report_html(document)
            outputs.append((args.html, text_writer(report)))
    for path, table in ((args.timeline, timeline_csv), (args.requests, requests_csv)):
        if path is not None:
            outputs.append((path, table_writer(path, table(result))))
    if args.plot is not None:
        outputs.append((args.plot, lambda path: plot_replay(result, path)))
    write_outputs(*outputs)
    if args.html is not None and not quiet:
        say_written(args.html, report)


def full_document(
    result: ReplayResult, given: Mapping[str, Any], goodput: Goodput | None = None
) -> dict[str, Any]:
    """The document of a replay with goodput, if limits were stated, and the series of the charts."""
    document = replay_document(result, given)
    if goodput is not None:
        document["goodput"] = goodput.document()
    document["series"] = series_of(result, goodput)
    return document


def show_goodput(found: Goodput, kind: str) -> None:
    """Print a row per limit, and one for all; ``kind`` says what the latencies are."""
    requests = len(found.worst)
    rows = [
        (f"{limit.latency.upper()} at most {limit.seconds:g} s", found.met_alone[limit.latency])
        for limit in found.slos
    ]
    rows.append(("all limits", found.requests_met))
    show_table(
        f"Goodput: {found.requests_per_s:,.3g} requests/s",
        (f"limit, latencies {kind}", "requests", "share"),
        [(name, f"{met:,}", f"{met / requests:.2%}") for name, met in rows],
        [f"goodput = {GOODPUT_FORMULA}"],
    )


def say_written(path: str, text: str) -> None:
    """Say where a report is and how large; to standard output, unless the report went there."""
    if path not in STANDARD_OUTPUT:
        print(f"wrote {path}, {human_bytes(len(text.encode()))}", file=sys.stdout)


def one_policy(policy: str | None) -> str | None:
    """The policy of a replay in time. Raises ``PagedKVError`` for several, and for the one that knows all."""
    if policy is not None and "," in policy:
        raise PagedKVError(f"--policy {policy}: several policies go with --hits-only alone")
    if policy == "belady":
        raise PagedKVError("--policy belady knows the future of a replay with --hits-only alone")
    return policy
