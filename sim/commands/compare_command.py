"""``pagedkv compare``: results beside each other, and what differs in their conditions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from pagedkv.sim.commands.options import add_json_option
from pagedkv.sim.console import human_bytes, show_table
from pagedkv.sim.output.comparison import compare
from pagedkv.sim.output.html_report import plain_text
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.output.report import HITS_SCHEMA, REPLAY_SCHEMA
from pagedkv.sim.output.result_file import read_result, result_text


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "compare",
        help="results of replays beside each other",
        description="Compare results that `pagedkv replay --json` wrote: first the conditions in which they "
        "differ, then each figure with its ratio to that of the first result.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("results", nargs="+", metavar="RESULT.json", help="two or more, of one schema")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    quiet = check_outputs(*args.results, json=args.json)
    documents = [read_result(path, REPLAY_SCHEMA, HITS_SCHEMA) for path in args.results]
    document = compare(args.results, documents)
    if not quiet:
        _show(document)
    if args.json is not None:
        write_outputs((args.json, text_writer(result_text(document))))
    return 0


def _show(document: Mapping[str, Any]) -> None:
    names = document["results"]
    titles = [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(names))]
    show_table(
        f"Conditions that differ; {document['same_conditions']} are the same",
        ("condition", *titles),
        [(row["condition"], *map(_text, row["values"])) for row in document["conditions"]],
        [f"{title} = {name}" for title, name in zip(titles, names, strict=True)],
    )
    show_table(
        f"Figures, and their ratio to {titles[0]}",
        ("figure", *titles),
        [_row(row) for row in document["figures"]],
        document["kinds"],
    )


def _row(row: Mapping[str, Any]) -> Sequence[str]:
    cells = [f"{row['figure']} [{row['unit']}]" if row["unit"] else row["figure"]]
    for i, (value, ratio) in enumerate(zip(row["values"], row["ratios"], strict=True)):
        number = _number(value, row["unit"])
        cells.append(number if i == 0 or ratio is None else f"{number} (x{ratio:,.3g})")
    return cells


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return human_bytes(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _text(value: Any) -> str:
    return "-" if value is None else plain_text(value)
