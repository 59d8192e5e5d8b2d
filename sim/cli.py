"""The command line: ``pagedkv COMMAND``. A user's mistake ends with one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pagedkv import __version__
from pagedkv.errors import PagedKVError

EXAMPLES = """examples:
  pagedkv replay                                    the built-in workload, in seconds
  pagedkv replay trace.jsonl.gz --gpu h100 --plot out.png
  pagedkv replay trace.jsonl.gz --hits-only --block-size 512 --num-blocks 10000
  pagedkv itl --model llama-3.1-70b --gpu h200 --batch 8
  pagedkv size --model qwen3-32b --gpu h100 --kv-dtype int8
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Raises ``PagedKVError`` without rich."""
    from pagedkv.sim import plan_commands, replay_command, trace_command, validate_command

    parser = argparse.ArgumentParser(
        prog="pagedkv",
        description="Replay long-context traces through a real KV-cache manager, and plan with its bytes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pagedkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (replay_command, validate_command, trace_command):
        module.add_parser(commands)
    plan_commands.add_parsers(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 a check failed, 2 a mistake, 130 interrupted."""
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader left (head, less): say nothing, and let nothing be flushed into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (PagedKVError, OSError) as error:
        print(f"pagedkv: error: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("pagedkv: error: not enough memory for these sizes", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pagedkv: interrupted", file=sys.stderr)
        return 130
