"""``pagedkv report``: the HTML report of a replay that was saved as JSON."""

from __future__ import annotations

import argparse

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.replay_outputs import say_written
from pagedkv.sim.output.html_report import report_html
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.output.report import REPLAY_SCHEMA
from pagedkv.sim.output.result_file import read_result


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "report",
        help="an HTML report of a saved replay",
        description="Make the report that `pagedkv replay --html` writes, from a JSON result: one file that "
        "loads nothing. The same result gives the same bytes.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("result", metavar="RESULT.json", help="what `pagedkv replay --json` wrote")
    parser.add_argument(
        "-o", "--output", metavar="FILE.html", required=True, help="what to write (- for standard output)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    quiet = check_outputs(args.result, output=args.output)
    document = read_result(args.result, REPLAY_SCHEMA)
    if "series" not in document:
        raise PagedKVError(f"{args.result} has no series to draw: write it anew with `pagedkv replay --json`")
    text = report_html(document)
    write_outputs((args.output, text_writer(text)))
    if not quiet:
        say_written(args.output, text)
    return 0
