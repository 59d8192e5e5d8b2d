"""``pagedkv sweep``: one replay per combination of options, in one table, on any number of workers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands import replay_command
from pagedkv.sim.commands.options import at_least, names_of
from pagedkv.sim.commands.reading_options import add_reading_options
from pagedkv.sim.commands.trace_source import BUILT_IN
from pagedkv.sim.console import progress, show_table
from pagedkv.sim.output.outputs import STANDARD_OUTPUT, Writer, check_outputs, write_outputs
from pagedkv.sim.output.plot import require_plottable
from pagedkv.sim.output.slo import check_slos, slo
from pagedkv.sim.output.tables import require_table
from pagedkv.sim.sweep.grid import Grid, read_grid_file
from pagedkv.sim.sweep.sweep import Sweep, SweepResult
from pagedkv.sim.sweep.sweep_backends import BACKENDS, Workers
from pagedkv.sim.sweep.sweep_columns import FIGURES, Row, Value
from pagedkv.sim.sweep.sweep_options import add_axes, check_axes
from pagedkv.sim.sweep.sweep_pareto import DEFAULT_AXES, check_figures, pareto, plot_pareto
from pagedkv.sim.sweep.sweep_store import PointStore
from pagedkv.sim.sweep.sweep_table import rows_writer

EXAMPLES = """examples:
  pagedkv sweep --block-size 16 64 --gpu h100 b200 --out sweep.csv
  pagedkv sweep trace.jsonl.gz --grid grid.toml --out sweep.parquet --jobs 8 --plot pareto.png
  pagedkv sweep trace.jsonl.gz --grid grid.toml --out sweep.csv --backend dask --address tcp://host:8786
"""
MOST_SHOWN = 30
MOST_ERRORS = 3


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "sweep",
        help="replay a trace under every combination of options",
        description="Replay a trace under every combination of options, and write a table with a row for "
        "each. Points that are done are kept: after an interruption the same command does the rest.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, speed=None)
    parser.add_argument(
        "trace",
        nargs="?",
        default=BUILT_IN,
        help=f"trace of any known format, or {BUILT_IN} (built in, default); before options "
        "with several values",
    )
    parser.add_argument("--limit", type=at_least(1, most=10_000_000), help="first N requests only")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of the built-in trace")
    parser.add_argument("--grid", metavar="FILE", help="options and their values, TOML or .json")
    _add_outputs(parser)
    _add_workers(parser)
    add_reading_options(parser)
    add_axes(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out", metavar="FILE", required=True, help="the table: .csv or, with pyarrow, .parquet (- for CSV)"
    )
    group.add_argument(
        "--points", metavar="DIR", help="folder of the points that are done (default: beside OUT)"
    )
    group.add_argument(
        "--slo", type=slo, action="append", metavar="LATENCY=SECONDS", help="limit for goodput; repeatable"
    )
    group.add_argument(
        "--pareto",
        nargs=2,
        metavar=("X", "Y"),
        help=f"figures to weigh against each other (default {' '.join(DEFAULT_AXES)})",
    )
    group.add_argument("--plot", metavar="FILE.png", help="draw all points, and those that no other beats")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workers")
    group.add_argument("--backend", choices=BACKENDS, help="default: serial, or loky if --jobs is given")
    group.add_argument("--jobs", type=at_least(1, most=100_000), help="points at once (default: all cores)")
    group.add_argument(
        "--address", help="of a Dask scheduler or Ray cluster (default: one on this machine, for this sweep)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 if a point has no figures."""
    workers = Workers(args.backend or ("serial" if args.jobs is None else "loky"), args.jobs, args.address)
    x, y = args.pareto or DEFAULT_AXES
    quiet = _check(args, x, y)
    grid = _grid(args)
    sweep = Sweep(replay_command.read_replayed(args), grid, args.slo or ())
    store = PointStore(_points_folder(args))
    with progress("sweeping", len(grid)) as update:
        result = sweep.run(store, workers, update)
    color_by = grid.varying[0].replace("-", "_") if grid.varying else None
    outputs: list[tuple[str, Writer]] = [(args.out, rows_writer(args.out, result.columns, result.rows))]
    front = pareto(result.rows, x, y)
    if args.plot is not None:
        title = f"{sweep.trace.name}: {len(grid):,} replays (times are modelled)"
        outputs.append(
            (args.plot, lambda path: plot_pareto(result.rows, x, y, _color(color_by), title, path))
        )
    write_outputs(*outputs)
    if not quiet:
        _show(result, front, grid.varying, x, y, sweep.trace.notes)
    return 1 if result.failed else 0


def _check(args: argparse.Namespace, x: str, y: str) -> bool:
    """Refuse what could not be written, before the work; tells whether standard output is taken."""
    check_figures((x, y))
    if args.slo is not None:
        check_slos(args.slo)
    elif any(name.startswith("goodput") for name in (x, y)):
        raise PagedKVError("goodput needs limits: state --slo, for example --slo ttft=2")
    quiet = check_outputs(args.trace, args.grid, out=args.out, plot=args.plot)
    require_table(args.out)
    if args.plot is not None:
        require_plottable(args.plot)
    if args.out in STANDARD_OUTPUT and args.points is None:
        raise PagedKVError("--out - has no place beside it for what is done: state --points, too")
    return quiet


def _grid(args: argparse.Namespace) -> Grid:
    """The axes of the file, then those of the command line."""
    in_file = read_grid_file(args.grid) if args.grid is not None else {}
    check_axes(in_file, f"{args.grid}: ")
    both = set(in_file) & set(args.axes)
    if both:
        raise PagedKVError(
            f"{names_of(sorted(both))} is on the command line and in {args.grid}: state it once"
        )
    return Grid({**in_file, **args.axes})


def _points_folder(args: argparse.Namespace) -> Path:
    return Path(args.points if args.points is not None else f"{os.path.realpath(args.out)}.points")


def _color(option: str | None) -> str | None:
    """The column that shows an option, if it is one."""
    return {"gpu_memory": "gpu_memory_bytes", "no_prefix_caching": "prefix_caching", "hardware": "gpu"}.get(
        option or "", option
    )


def _show(
    result: SweepResult, front: list[Row], varying: list[str], x: str, y: str, trace_notes: Sequence[str]
) -> None:
    better = {column.name: column.better for column in FIGURES}
    names = list(dict.fromkeys(_color(name.replace("-", "_")) or "" for name in varying))
    show_table(
        "Points that no other beats: "
        + ", ".join(f"{'more' if better[name] > 0 else 'less'} {name}" for name in (x, y)),
        ("point", x, y),
        [(_point(row, names), _text(row[x]), _text(row[y])) for row in front[:MOST_SHOWN]],
        [*_notes(result, len(front)), *trace_notes],
    )


def _notes(result: SweepResult, num_shown: int) -> list[str]:
    errors = list(dict.fromkeys(str(row["error"]) for row in result.failed))
    notes = [
        f"{len(result.rows):,} points: {result.num_found:,} were done before, {len(result.failed):,} failed",
        *(f"failed: {error}" for error in errors[:MOST_ERRORS]),
    ]
    if len(errors) > MOST_ERRORS:
        notes.append(f"{len(errors) - MOST_ERRORS} more errors are in the table")
    if num_shown > MOST_SHOWN:
        notes.append(f"{num_shown - MOST_SHOWN} more points that no other beats are in the table")
    return notes


def _point(row: Row, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {_text(row[name])}" for name in names) or "the only one"


def _text(value: Value) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else value
