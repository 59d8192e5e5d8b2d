"""Is the CUDA path right, and how fast? ``python benchmarks/gpu_check.py``, under five minutes, one table.

Every feature is compared with the fp64 reference, a CUDA graph is replayed with growing lengths, and mixes of
lengths are timed against the measured bandwidth of the card, beside torch, FlashInfer, FlashAttention and
vLLM where they are installed. Nothing new starts after 200 s. Exit code 0: all results are right, 1: one is
wrong, 2: no GPU.

``--dry-run`` runs all of it in small on a CPU, with Triton's interpreter: it checks the script and the
arithmetic of the kernels, and times nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from benchmarks.gpu_report import Line

START_S, END_S = 200.0, 285.0
SCHEMA = "pagedkv.gpu_check/1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="all of it in small on a CPU, without times")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--workers", type=int, help="processes that compile and check side by side")
    args = parser.parse_args(argv)
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, here and in the processes
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        message = f"torch {torch.__version__} finds no GPU; --dry-run checks the script on a CPU"
        print(f"gpu_check: error: {message}", file=sys.stderr)
        return 2
    from benchmarks.gpu_run import run_all

    workers = args.workers or (2 if args.dry_run else min(8, os.cpu_count() or 1))
    lines, document = run_all(args.dry_run, workers, START_S, END_S)
    _print_table(lines, document)
    if args.json is not None:
        Path(args.json).write_text(json.dumps({"schema": SCHEMA, **document}, indent=2, default=str) + "\n")
    return int(any(line.is_wrong for line in lines))


def _print_table(lines: Sequence[Line], document: dict[str, Any]) -> None:
    width = max(len(line.what) for line in lines)
    print(f"{'':{width}}  {'result':8} {'us':>10} {'GB/s':>8} {'% read':>6}  note")
    for line in lines:
        figures = f"{_number(line.us, 10, 1)} {_number(line.gb_per_s, 8, 1)} {_number(line.of_read, 6, 0)}"
        print(f"{line.what:{width}}  {line.result:8} {figures}  {line.note}".rstrip())
    wrong = [line.what for line in lines if line.is_wrong]
    print()
    for note in document["notes"]:
        print(note)
    print(f"{len(wrong)} wrong of {len(lines)}" + (f": {'; '.join(wrong)}" if wrong else ""))


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'' if value is None else f'{value:,.{digits}f}':>{width}}"


if __name__ == "__main__":
    sys.exit(main())
