"""Command-line options that choose where the time of decode attention comes from."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.gpus import GPU
from pagedkv.sim.timing.kernel_table import COLUMNS, KernelTable
from pagedkv.sim.timing.measured_step_time import MeasuredStepTime
from pagedkv.sim.timing.models import Model
from pagedkv.sim.timing.roofline import Roofline, attention_fixed_s
from pagedkv.sim.timing.step_time import StepTimeModel
from pagedkv.sim.timing.table_step_time import TableStepTime


def add_step_time_options(parser: argparse.ArgumentParser) -> None:
    """``--attention-table``, ``--extrapolate`` and ``--measure-attention``."""
    group = parser.add_argument_group("decode attention (default: bytes over the bandwidth it reaches)")
    group.add_argument(
        "--attention-table",
        metavar="FILE.csv",
        help=f"profiled seconds of one layer's call ({', '.join(COLUMNS)}), interpolated",
    )
    group.add_argument(
        "--extrapolate",
        action="store_true",
        default=None,
        help="let the table go on beyond its points: with its last slope in the context, in proportion to "
        "the batch (default: refuse)",
    )
    group.add_argument(
        "--measure-attention",
        metavar="DEVICE",
        help="run this library's attention on cpu or cuda at each step, and take its time",
    )


def read_step_time(
    args: argparse.Namespace,
    base: Roofline,
    model: Model,
    gpu: GPU,
    num_blocks: int,
    *,
    repeats: int = 1,
) -> StepTimeModel:
    """``base`` with the attention that the options name, or ``base`` itself.

    ``num_blocks`` and ``repeats`` are of ``MeasuredStepTime``.

    Raises:
        PagedKVError: both a table and a device, ``--extrapolate`` without a table, or a table or device that
            cannot be used.
    """
    table, device = args.attention_table, args.measure_attention
    if table is not None and device is not None:
        raise PagedKVError("--attention-table and --measure-attention exclude each other: state one")
    if args.extrapolate and table is None:
        raise PagedKVError("--extrapolate goes with --attention-table")
    if table is None and device is None:
        return base
    # the call's fixed cost is in what was profiled or is measured
    call_s = model.num_layers * attention_fixed_s(gpu, model.spec.dtype)
    rest = replace(base, launch_s=max(0.0, base.launch_s - call_s))
    if table is not None:
        profile = KernelTable.from_csv(Path(table), extrapolate=bool(args.extrapolate))
        return TableStepTime.of_model(rest, profile, model)
    return MeasuredStepTime(rest, model, num_blocks, device=device, repeats=repeats)
