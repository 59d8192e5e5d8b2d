"""``pagedkv validate``: the simulator against measured runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from pagedkv.errors import PagedKVError
from pagedkv.sim.console import show_table
from pagedkv.sim.measured_run import FILES, find_runs, read_run
from pagedkv.sim.options import add_json_option
from pagedkv.sim.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.report import to_json
from pagedkv.sim.validation import Comparison, compare, replay_like


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "validate",
        help="compare the simulator with measured runs",
        description=f"Replay every measured run below a folder ({', '.join(FILES)}) and print the error. "
        "Nothing is fitted to the run. Exit code 1 if a difference is larger than allowed.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("directory", help="folder with measured runs")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    quiet = check_outputs(json=args.json)
    folders = find_runs(Path(args.directory))
    if not folders:
        raise PagedKVError(
            f"no measured run below {args.directory}: a run is a folder with {', '.join(FILES)}"
        )
    documents, all_hold = [], True
    for folder in folders:
        measured = read_run(folder)
        comparisons = compare(measured, replay_like(measured))
        all_hold &= all(c.holds for c in comparisons)
        documents.append(
            {"run": measured.name, "comparisons": [asdict(c) | {"holds": c.holds} for c in comparisons]}
        )
        if not quiet:
            title = f"{measured.name}: {measured.model} on {measured.gpu}, {len(measured.trace)} requests"
            rows = [_row(c) for c in comparisons]
            show_table(title, ("figure", "measured", "modelled", "error", "allowed", ""), rows)
    if args.json is not None:
        document = {"schema": "pagedkv.validate/1", "runs": documents}
        write_outputs((args.json, text_writer(to_json(document))))
    return 0 if all_hold else 1


def _row(c: Comparison) -> tuple[str, ...]:
    if c.unit == "relative":
        error, allowed = f"{c.error:+.1%}", f"{c.allowed:.0%}"
    else:
        error, allowed = f"{c.error:.2f} {c.unit}", f"{c.allowed:g} {c.unit}"
    return c.name, f"{c.measured:,.4g}", f"{c.modelled:,.4g}", error, allowed, "ok" if c.holds else "FAILS"
