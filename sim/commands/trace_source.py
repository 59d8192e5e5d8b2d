"""The trace that a command replays: a file, or the built-in workload."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from pagedkv.sim.commands.reading_options import read_options
from pagedkv.sim.readers.reading import open_trace, read_trace
from pagedkv.sim.readers.streamed import StreamedTrace
from pagedkv.sim.requests import Requests
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long

BUILT_IN: Final = "chat-long"
BUILT_IN_REQUESTS: Final = 2000


def read_whole(args: argparse.Namespace) -> Trace:
    """The trace as the options say; its first ``limit`` requests if there is one."""
    if args.trace == BUILT_IN:  # a file of this name is ./chat-long
        return chat_long(args.limit or BUILT_IN_REQUESTS, args.seed)
    return read_trace(args.trace, format=args.format, options=read_options(args), limit=args.limit)


def read_requests(args: argparse.Namespace) -> Requests:
    """The same, with prompts that are read as they are used. A pipe, which cannot be read twice, is whole."""
    if args.trace == BUILT_IN or not Path(args.trace).is_file():
        return read_whole(args)
    reading = open_trace(args.trace, format=args.format, options=read_options(args))
    return StreamedTrace(reading, args.limit)
