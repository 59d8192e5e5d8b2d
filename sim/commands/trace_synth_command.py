"""``pagedkv trace synth``: make a trace from a few numbers and a seed."""

from __future__ import annotations

import argparse
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Final

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import at_least, not_negative, positive
from pagedkv.sim.console import console
from pagedkv.sim.output.outputs import check_outputs, write_outputs
from pagedkv.sim.readers.writing import WRITE_FORMATS, check_suffix, rows_of, write_trace
from pagedkv.sim.synth.arrivals import ARRIVALS, ArrivalProcess
from pagedkv.sim.synth.lengths import LengthDistribution, parse_lengths
from pagedkv.sim.synth.workloads import KINDS, MOST_REQUESTS, Workload
from pagedkv.sim.trace import Trace, TraceError
from pagedkv.sim.workload import chat_long

CHAT_LONG: Final = "chat-long"
LENGTHS_HELP = "N, uniform:A,B, lognormal:MEAN,CV, or FILE:input, FILE:output of a trace"
_HELP = {
    "answer": "output tokens",
    "input": "prompt tokens",
    "block_size": "prompt tokens per content id",
    "depth": "shared texts in a prompt",
    "branching": "texts that follow on each shared one",
    "node": "tokens of a shared text",
    "suffix": "tokens of a prompt's own text",
    "skew": "Zipf exponent of the choice, 0: each as likely",
    "system": "tokens that all prompts begin with",
    "first": "tokens of a session's task",
    "growth": "tokens that a turn adds beside the last answer",
    "turns": "turns of a session",
    "think_s": "mean pause before a turn, in seconds",
    "seconds_per_token": "of the answer before, in an open loop",
    "max_context": "tokens before which a session ends",
    "closed_loop": "turns wait for the real end of the answer before",
    "documents": "how many there are",
    "per_prompt": "documents in a prompt",
    "document": "tokens of a document",
    "needle_share": "share of requests that search for a needle",
    "haystacks": "how many there are",
    "haystack": "tokens of a haystack",
    "needle": "tokens of a needle",
    "question": "tokens of a question",
}
_DESCRIPTIONS = {
    "independent": "prompts that share nothing",
    "prefix-tree": "prompts that share the paths of a tree",
    "agents": "sessions whose context grows turn by turn (--rate is of sessions)",
    "long-context": "retrieved documents, and needles in long texts",
}


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action, with a command of its own for each kind of workload."""
    parser = actions.add_parser(
        "synth",
        help="make a synthetic trace from a seed",
        description="Make a synthetic trace: the same numbers and seed give the same bytes.",
    )
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    for kind in KINDS:
        _add_kind(kinds, kind)
    chats = kinds.add_parser(
        CHAT_LONG, help="the built-in long chats", description="The built-in long chats."
    )
    chats.set_defaults(run=run_chat_long)
    _add_common(chats)


def add_arrival_numbers(group: argparse._ArgumentGroup) -> None:
    """The numbers of an arrival process; `arrival_process` takes them."""
    group.add_argument("--rate", type=positive, help="arrivals per second (default 1)")
    group.add_argument("--cv", type=positive, help="coefficient of variation of gamma gaps (default 1)")
    group.add_argument("--on-s", type=positive, help="mean seconds of a burst (default 10)")
    group.add_argument("--off-s", type=positive, help="mean seconds between bursts (default 30)")


def arrival_process(args: argparse.Namespace) -> ArrivalProcess:
    """The process that the options name; refuses numbers that its kind has no use for."""
    kind = args.arrivals or "poisson"
    used = {"gamma": ("rate", "cv"), "bursty": ("rate", "on_s", "off_s")}.get(kind, ("rate",))
    given = {name: getattr(args, name) for name in ("rate", "cv", "on_s", "off_s")}
    for name, value in given.items():
        if value is not None and name not in used:
            raise PagedKVError(f"--{name.replace('_', '-')} says nothing about {kind} arrivals: leave it out")
    stated = {name: value for name, value in given.items() if value is not None}
    return ArrivalProcess(kind, stated.pop("rate", 1.0), **stated)


def _add_kind(kinds: argparse._SubParsersAction[argparse.ArgumentParser], kind: type[Workload]) -> None:
    name = _name(kind)
    parser = kinds.add_parser(
        name,
        help=_DESCRIPTIONS[name],
        description=f"Make a trace of {_DESCRIPTIONS[name]}.",
    )
    parser.set_defaults(run=run_synth, kind=kind)
    _add_common(parser)
    group = parser.add_argument_group("arrivals")
    group.add_argument("--arrivals", choices=ARRIVALS, help="how requests arrive (default poisson)")
    add_arrival_numbers(group)
    group = parser.add_argument_group("workload", f"LENGTHS are {LENGTHS_HELP}.")
    for item in fields(kind):
        if item.name not in ("requests", "arrivals"):
            _add_number(group, item)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="the file (- for standard output)"
    )
    parser.add_argument(
        "--to", choices=WRITE_FORMATS, default="native", help="format to write (default native)"
    )
    parser.add_argument(
        "--requests", type=at_least(1, most=MOST_REQUESTS), default=1000, help="how many (default 1000)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the random numbers (default 0)")


def _add_number(group: argparse._ArgumentGroup, item: Field[Any]) -> None:
    default, flag, text = item.default, "--" + item.name.replace("_", "-"), _HELP[item.name]
    if isinstance(default, bool):
        group.add_argument(flag, action="store_true", help=text)
        return
    text += f" (default {default})"
    if isinstance(default, LengthDistribution):
        group.add_argument(flag, type=_lengths, default=default, metavar="LENGTHS", help=text)
    elif isinstance(default, int):
        group.add_argument(flag, type=at_least(0), default=default, metavar="N", help=text)
    else:
        group.add_argument(flag, type=not_negative, default=default, metavar="X", help=text)


def _lengths(text: str) -> LengthDistribution:
    try:
        return parse_lengths(text)
    except TraceError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _name(kind: type[Workload]) -> str:
    """Prefix-tree of PrefixTree."""
    return "".join("-" * c.isupper() + c.lower() for c in kind.__name__).removeprefix("-")


def run_synth(args: argparse.Namespace) -> int:
    """Make and write a trace of a kind."""
    _check_output(args)
    given = {item.name: getattr(args, item.name) for item in fields(args.kind) if item.name != "arrivals"}
    workload: Workload = args.kind(arrivals=arrival_process(args), **given)
    return _write(args, workload.make(args.seed))


def run_chat_long(args: argparse.Namespace) -> int:
    """Write the built-in workload."""
    _check_output(args)
    return _write(args, chat_long(args.requests, args.seed))


def _check_output(args: argparse.Namespace) -> None:
    check_outputs(output=args.output)
    check_suffix(args.output, args.to)


def _write(args: argparse.Namespace, trace: Trace) -> int:
    notes = (f"made by pagedkv trace synth with seed {args.seed}",)

    def write(path: Path) -> None:
        write_trace(rows_of(trace), path, format=args.to, name=trace.name, notes=lambda: notes)

    write_outputs((args.output, write))
    console(stderr=True).print(f"{len(trace):,} requests", markup=False, soft_wrap=True)
    return 0
