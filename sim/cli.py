"""The command line: ``pagedkv COMMAND``. A user's mistake ends with one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pagedkv import __version__
from pagedkv.errors import PagedKVError

EXAMPLES = """examples:
  pagedkv replay                                    the built-in workload, in seconds
  pagedkv replay trace.jsonl.gz --gpu h100 --html report.html --slo ttft=2 --slo tpot=0.05
  pagedkv replay trace.jsonl.gz --hits-only --block-size 512 --num-blocks 10000
  pagedkv sweep --gpu h100 b200 --kv-dtype bf16 int8 --out sweep.csv
  pagedkv fleet trace.jsonl.gz --replicas 4 --router prefix-aware
  pagedkv trace info trace.jsonl.gz                 what is inside, and how much of it is shared
  pagedkv itl --model llama-3.1-70b --gpu h200 --batch 8
  pagedkv calibrate here.json                       this machine, for --hardware here.json
  pagedkv bench attention --dtype bf16 int8         this machine against its memory
  pagedkv size --model qwen3-32b --gpu h100 --kv-dtype int8
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all errors of the command line are."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options where they stand, so that the error names the command."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, which would bury it."""
        _print_error(f"{message} (see {self.prog} --help)")
        self.exit(2)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Raises ``PagedKVError`` without rich."""
    from pagedkv.sim.commands import (
        bench_command,
        calibrate_command,
        compare_command,
        fleet_command,
        plan_commands,
        replay_command,
        report_command,
        sweep_command,
        trace_command,
        validate_command,
    )

    parser: argparse.ArgumentParser = _Parser(
        prog="pagedkv",
        description="Replay long-context traces through a real KV-cache manager, and plan with its bytes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pagedkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (
        replay_command,
        sweep_command,
        fleet_command,
        report_command,
        compare_command,
        validate_command,
        trace_command,
        bench_command,
        calibrate_command,
    ):
        module.add_parser(commands)
    plan_commands.add_parsers(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 a check failed, 2 a mistake, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if list(argv) == ["--version"]:  # before the commands are imported, which need rich
            print(f"pagedkv {__version__}", flush=True)
            return 0
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader left (head, less): say nothing, and let nothing be flushed into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PagedKVError, OSError) as error:
        _print_error(str(error))
        return 2
    except MemoryError:
        _print_error("not enough memory for these sizes")
        return 2
    except KeyboardInterrupt:
        print("pagedkv: interrupted", file=sys.stderr)
        return 130


def _print_error(message: str) -> None:
    # a path or an argument may hold a line break
    print(f"pagedkv: error: {' '.join(message.splitlines())}", file=sys.stderr)
