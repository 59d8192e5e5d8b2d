"""``pagedkv trace``: get traces."""

from __future__ import annotations

import argparse

from pagedkv.sim.console import console, human_bytes, progress
from pagedkv.sim.download import KNOWN_TRACES, download


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("trace", help="download real traces", description="Get traces to replay.")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    get = actions.add_parser(
        "download",
        help="fetch a public trace and check its SHA-256",
        description="Fetch a public trace from its project's repository and check its SHA-256.",
    )
    get.set_defaults(run=run_download)
    get.add_argument("name", choices=sorted(KNOWN_TRACES), help="which trace")
    get.add_argument("--dir", default=".", help="folder to put it in (default: here)")
    get.add_argument("--url", help="fetch it from elsewhere; the SHA-256 must be the same")


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
