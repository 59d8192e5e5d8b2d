"""Command-line options that say how to read a trace file, shared by the commands that do."""

from __future__ import annotations

import argparse
from typing import Final

from pagedkv.sim.commands.options import at_least
from pagedkv.sim.readers.formats import FORMATS
from pagedkv.sim.readers.reading import SORT_WINDOW
from pagedkv.sim.readers.row import DEFAULT_OUTPUT_LEN, ReadOptions

READING_OPTIONS: Final = ("format", "trace_block_size", "sort", "skip_failed", "output_len")
"""Their names in a parsed command line, where None means not stated."""


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Add them; `read_options` and the attribute ``format`` have the answers."""
    group = parser.add_argument_group("reading")
    group.add_argument(
        "--format", choices=sorted(FORMATS), help="what the file is (default: its content says)"
    )
    group.add_argument(
        "--trace-block-size",
        type=at_least(1, most=1 << 20),
        help="tokens per content id (default: what the format or its lengths say)",
    )
    group.add_argument(
        "--sort",
        action="store_true",
        default=None,
        help=f"put requests in order of arrival, within {SORT_WINDOW:,} of them (default: refuse disorder)",
    )
    group.add_argument(
        "--skip-failed",
        action="store_true",
        default=None,
        help="leave out requests without output, and count them (default: they are an error)",
    )
    group.add_argument(
        "--output-len",
        type=at_least(1),
        help=f"output tokens where the file does not say (default {DEFAULT_OUTPUT_LEN})",
    )


def read_options(args: argparse.Namespace) -> ReadOptions:
    """What `add_reading_options` asked for."""
    return ReadOptions(
        block_size=args.trace_block_size,
        sort_window=SORT_WINDOW if args.sort else 0,
        skip_failed=bool(args.skip_failed),
        output_len=args.output_len or DEFAULT_OUTPUT_LEN,
    )
