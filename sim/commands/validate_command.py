"""``pagedkv validate``: the simulator against every measurement that a folder holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import add_json_option
from pagedkv.sim.console import console, progress, show_table
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.output.report import to_json
from pagedkv.sim.validation.measured_kernels import KERNEL_FILE, find_kernels, read_kernels
from pagedkv.sim.validation.measured_rates import RATES_FILE, find_rates, read_rates
from pagedkv.sim.validation.measured_run import FILES, MeasuredRun, find_runs, read_run
from pagedkv.sim.validation.series_error import SeriesError, Unused
from pagedkv.sim.validation.validate_kernels import kernel_errors
from pagedkv.sim.validation.validate_rates import rate_errors
from pagedkv.sim.validation.validation import Comparison, compare, replay_like

SCHEMA = "pagedkv.validate/1"
TABLES = (".csv", ".json", ".jsonl")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "validate",
        help="compare the simulator with measurements",
        description=f"Print the error against everything measured below a folder: serving runs "
        f"({', '.join(FILES)}), calls of attention kernels ({KERNEL_FILE}) and speeds of models "
        f"({RATES_FILE}). Nothing is fitted to a run; a speed is predicted after one or two others of its "
        "series. Says what it could not use. Exit code 1 if a difference is larger than allowed.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("directory", help="folder with measurements")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    quiet = check_outputs(json=args.json)
    directory = Path(args.directory)
    folders, kernels, rates = find_runs(directory), find_kernels(directory), find_rates(directory)
    if not (folders or kernels or rates):
        raise PagedKVError(
            f"no measured run below {args.directory}: a run is a folder with {', '.join(FILES)}; nor a "
            f"{KERNEL_FILE} or {RATES_FILE}"
        )
    runs = _compared(folders)
    of_kernels, unused = kernel_errors([rows for path in kernels for rows in read_kernels(path)])
    of_rates, too = rate_errors([row for path in rates for row in read_rates(path)])
    unused += [*too, *_unknown(directory, folders, {*kernels, *rates})]
    if not quiet:
        _show(runs, of_kernels, of_rates, unused)
    if args.json is not None:
        write_outputs((args.json, text_writer(to_json(_document(runs, of_kernels, of_rates, unused)))))
    all_hold = all(c.holds for _, comparisons in runs for c in comparisons)
    return 0 if all_hold and all(e.holds for e in (*of_kernels, *of_rates)) else 1


Runs = list[tuple[MeasuredRun, list[Comparison]]]


def _compared(folders: Sequence[Path]) -> Runs:
    found = []
    with progress("replaying", len(folders)) as update:
        for folder in folders:
            measured = read_run(folder)
            found.append((measured, compare(measured, replay_like(measured))))
            update(len(found))
    return found


def _unknown(directory: Path, folders: Sequence[Path], known: set[Path]) -> list[Unused]:
    """Tables that are neither known by name nor part of a run."""
    found = []
    for path in sorted(directory.rglob("*")):
        if path.suffix not in TABLES or path in known or not path.is_file():
            continue
        if not (path.parent in folders and path.name in FILES):
            near = [name for name in FILES if (path.parent / name).is_file()]
            missing = [name for name in FILES if name not in near]
            part = path.name in FILES and near
            why = (
                f"a run without {', '.join(missing)}" if part else "no measurement that is known by its name"
            )
            found.append(Unused(str(path.relative_to(directory)), why))
    return found


def _document(
    runs: Runs, kernels: Sequence[SeriesError], rates: Sequence[SeriesError], unused: Sequence[Unused]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "runs": [
            {"run": measured.name, "comparisons": [asdict(c) | {"holds": c.holds} for c in comparisons]}
            for measured, comparisons in runs
        ],
        "kernels": [error.document() for error in kernels],
        "end_to_end": [error.document() for error in rates],
        "unused": [asdict(item) for item in unused],
    }


def _show(
    runs: Runs, kernels: Sequence[SeriesError], rates: Sequence[SeriesError], unused: Sequence[Unused]
) -> None:
    for measured, comparisons in runs:
        title = f"{measured.name}: {measured.model} on {measured.gpu}, {len(measured.trace)} requests"
        columns = ("figure", "measured", "modelled", "error", "allowed", "")
        show_table(title, columns, [_run_row(c) for c in comparisons])
    for title, errors in (
        ("Decode attention, calls of one layer", kernels),
        ("Whole models, calibrated to a point of a series and predicting the others", rates),
    ):
        if errors:
            show_table(title, COLUMNS, [_series_row(e) for e in errors], NOTES)
    for item in unused:
        console().print(f"not used: {item.what}: {item.why}", style="dim", markup=False, soft_wrap=True)


COLUMNS = ("series", "rows", "peak rates", "as it is", "error", "worst", "allowed", "")
NOTES = (
    "error: mean |modelled / measured - 1|, after the calibration stated; as it is: without; peak rates: of "
    "bytes and FLOPS over the peaks alone",
)


def _run_row(c: Comparison) -> tuple[str, ...]:
    if c.unit == "relative":
        error, allowed = f"{c.error:+.1%}", f"{c.allowed:.0%}"
    else:
        error, allowed = f"{c.error:.2f} {c.unit}", f"{c.allowed:g} {c.unit}"
    return c.name, f"{c.measured:,.4g}", f"{c.modelled:,.4g}", error, allowed, "ok" if c.holds else "FAILS"


def _series_row(e: SeriesError) -> tuple[str, ...]:
    return (
        f"{e.name}\n{e.condition}",
        str(e.num_rows),
        "-" if e.baseline is None else f"{e.baseline:.1%}",
        "-" if e.uncalibrated is None else f"{e.uncalibrated:.1%}",
        f"{e.error:.1%}",
        f"{e.worst:+.1%}",
        "-" if e.allowed is None else f"{e.allowed:.1%}",
        "" if e.allowed is None else "ok" if e.holds else "FAILS",
    )
