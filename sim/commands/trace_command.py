"""``pagedkv trace``: get traces, look into them, convert, sample and make them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands import trace_synth_command
from pagedkv.sim.commands.options import add_json_option, at_least
from pagedkv.sim.commands.reading_options import add_reading_options, read_options
from pagedkv.sim.console import console, human_bytes, progress, show_table
from pagedkv.sim.download import KNOWN_TRACES, download
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.output.report import to_json
from pagedkv.sim.readers.info import describe, info_document, info_rows
from pagedkv.sim.readers.reading import Reading, open_trace, second_pass
from pagedkv.sim.readers.row import Row
from pagedkv.sim.readers.sampling import Sample, sample_rows
from pagedkv.sim.readers.writing import WRITE_FORMATS, check_suffix, write_trace
from pagedkv.sim.synth.arrivals import ARRIVALS, ArrivalProcess

MOST_REQUESTS: Final = 1_000_000_000


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "trace",
        help="download, inspect, convert, sample or make traces",
        description="Get traces to replay, and see what is inside.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_download(actions)
    _add_info(actions)
    _add_convert(actions)
    _add_sample(actions)
    trace_synth_command.add_parser(actions)


def _add_download(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    get = actions.add_parser(
        "download",
        help="fetch a public trace and check its SHA-256",
        description="Fetch a public trace from its project's repository and check its SHA-256.",
    )
    get.set_defaults(run=run_download)
    get.add_argument("name", choices=sorted(KNOWN_TRACES), help="which trace")
    get.add_argument("--dir", default=".", help="folder to put it in (default: here)")
    get.add_argument("--url", help="fetch it from elsewhere; the SHA-256 must be the same")


def _add_info(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "info",
        help="what is inside a trace, and what is not",
        description="Say what is inside a trace: requests, arrivals, lengths, sharing, sessions.",
    )
    parser.set_defaults(run=run_info)
    parser.add_argument("file", help="the trace (.gz, .zst)")
    parser.add_argument("--limit", type=at_least(1, most=MOST_REQUESTS), help="first N requests only")
    add_reading_options(parser)
    add_json_option(parser)


def _add_convert(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "convert",
        help="write a trace in the native format, or in Mooncake's",
        description="Write a trace in another format; .parquet, .gz and .zst in OUT say how it is packed.",
    )
    parser.set_defaults(run=run_convert)
    _add_files(parser)
    group = parser.add_argument_group("arrivals, instead of those in the file")
    group.add_argument("--arrivals", choices=ARRIVALS, help="how requests arrive")
    trace_synth_command.add_arrival_numbers(group)
    group.add_argument("--seed", type=at_least(0), default=0, help="of the arrivals (default 0)")
    add_reading_options(parser)


def _add_sample(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "sample",
        help="a part of a trace",
        description="Write a part of a trace: its beginning, a random part, or a window of time.",
    )
    parser.set_defaults(run=run_sample)
    _add_files(parser)
    group = parser.add_argument_group("which requests (one of)")
    group.add_argument("--first", type=at_least(1, most=MOST_REQUESTS), metavar="N", help="the first N")
    group.add_argument("--random", type=at_least(1, most=MOST_REQUESTS), metavar="N", help="N at random")
    group.add_argument(
        "--window", type=_window, metavar="FROM:TO", help="those from second FROM to before second TO"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="of --random (default 0)")
    parser.add_argument("--keep-sessions", action="store_true", help="keep or leave whole sessions")
    add_reading_options(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="the trace to read")
    parser.add_argument("output", metavar="OUT", help="the file to write (- for standard output)")
    parser.add_argument("--to", choices=WRITE_FORMATS, default="native", help="format to write")


def _window(text: str) -> tuple[float, float]:
    begin, _, end = text.partition(":")
    try:
        window = float(begin), float(end)
    except ValueError:
        window = 1.0, 0.0
    if not 0 <= window[0] < window[1] <= 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is no window: write FROM:TO in seconds, such as 60:120")
    return window


def run_download(args: argparse.Namespace) -> int:
    """Fetch and check the trace."""
    known = KNOWN_TRACES[args.name]
    with progress(f"downloading {args.name}", known.num_bytes) as update:
        path = download(args.name, args.dir, url=args.url, progress=lambda done, total: update(done))
    out = console()
    for line in (
        f"{path}: {human_bytes(known.num_bytes)}, SHA-256 as expected. {known.licence}.",
        f"Cite: {known.citation}",
        f"Replay it: pagedkv replay {path}",
    ):
        out.print(line, markup=False, soft_wrap=True)
    return 0


def run_info(args: argparse.Namespace) -> int:
    """Say what is inside a trace."""
    quiet = check_outputs(args.file, json=args.json)
    info = describe(_open(args, args.file), args.limit)
    if not quiet:
        missing = [f"not in the file: {', '.join(info.missing)}"] if info.missing else []
        show_table(info.name, ("trace", "value"), info_rows(info), [*missing, *info.notes])
    if args.json is not None:
        write_outputs((args.json, text_writer(to_json(info_document(info)))))
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Write a trace in another format."""
    process = trace_synth_command.arrival_process(args) if args.arrivals else None
    surplus = [name for name in ("rate", "cv", "on_s", "off_s") if getattr(args, name) is not None]
    if process is None and surplus:
        raise PagedKVError("numbers of arrivals need their kind: state --arrivals, too")
    reading = _open_for_writing(args)
    if process is None:
        return _write(args, reading, iter(reading))
    drawn = f"arrivals drawn: {process}, seed {args.seed}"
    return _write(args, reading, _arriving(reading, process, args.seed), drawn)


def run_sample(args: argparse.Namespace) -> int:
    """Write a part of a trace."""
    if sum(way is not None for way in (args.first, args.random, args.window)) != 1:
        raise PagedKVError("say which requests: one of --first, --random, --window")
    sample = Sample(args.first, args.random, args.window, args.seed, args.keep_sessions)
    reading = _open_for_writing(args)
    return _write(args, reading, sample_rows(reading, sample), wanted=args.first or 0)


def _open(args: argparse.Namespace, path: str) -> Reading:
    return open_trace(path, format=args.format, options=read_options(args))


def _open_for_writing(args: argparse.Namespace) -> Reading:
    """Refuse an output that cannot be, then tell what the input is."""
    try:
        check_outputs(args.input, output=args.output)
    except PagedKVError as error:
        # it is a position here, no option
        raise PagedKVError(str(error).replace("--output", "OUT")) from None
    check_suffix(args.output, args.to)
    return _open(args, args.input)


def _write(
    args: argparse.Namespace, reading: Reading, rows: Iterator[Row], arrivals: str = "", wanted: int = 0
) -> int:
    counts: list[int] = []

    def assumed() -> tuple[str, ...]:
        return reading.notes.assumptions() + ((arrivals,) if arrivals else ())

    def write(path: Path) -> None:
        name = reading.source.name
        counts.append(write_trace(rows, path, format=args.to, name=name, notes=assumed))

    write_outputs((args.output, write))
    err = console(stderr=True)
    short = (f"{wanted:,} were asked for, the file holds no more",) if counts[0] < wanted else ()
    for line in (f"{counts[0]:,} requests", *short, *reading.notes.lines()):
        err.print(line, markup=False, soft_wrap=True)
    return 0


def _arriving(reading: Reading, process: ArrivalProcess, seed: int) -> Iterator[Row]:
    """The requests in file order, at drawn arrivals; a first pass counts them."""
    reading.source.require_two_passes()
    arrivals = iter(process.draw_seeded(seed, sum(1 for _ in reading)).tolist())
    for row, arrival_s in second_pass(reading, arrivals):
        yield row._replace(arrival_s=arrival_s)
