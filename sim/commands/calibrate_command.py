"""``pagedkv calibrate``: a hardware file from this machine, or from measured decode steps of another."""

from __future__ import annotations

import argparse
import datetime
import time
from typing import Literal

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import (
    add_model_options,
    at_least,
    names_of,
    option,
    positive,
    read_gpu,
    read_model,
)
from pagedkv.sim.console import progress, show_table
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.output.report import to_json
from pagedkv.sim.timing.calibrate import BATCHES, CONTEXTS, hardware_from, measure, num_measurements
from pagedkv.sim.timing.calibrate_points import parse_point, points_hardware
from pagedkv.sim.timing.hardware import ATTENTION, FIGURES, Figure, Hardware

POINTS_ONLY = ("kernel", "model", "kv_dtype", "weight_bits", "gpu", "hardware", "tflops")
MACHINE_ONLY = ("device", "seconds", "threads", "clock")
DEFAULT_SECONDS = 20.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "calibrate",
        help="write a hardware file: what this machine, or one you measured, reaches",
        description="Without --point: measure this machine (copy, linear layers, paged attention in bf16 and "
        "int8 at several contexts). With --point, up to three times: fit a GPU's rates so that the model "
        "gives these decode steps exactly. The file goes to --hardware of other commands.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("output", metavar="FILE", help="hardware file to write (JSON; - for standard output)")
    parser.add_argument(
        "--point",
        action="append",
        metavar="batch=B,context=C,ms=T",
        help="a measured decode step: sequences, tokens per sequence, milliseconds",
    )
    parser.add_argument(
        "--kernel",
        metavar="NAME",
        help="attention kernel of the engine, such as vllm, sglang, llama.cpp: says what a single point does "
        "not (default: that of the GPU)",
    )
    machine = parser.add_argument_group("measuring this machine")
    machine.add_argument("--device", help="cpu or cuda (default cpu)")
    machine.add_argument("--seconds", type=positive, help=f"of measuring (default {DEFAULT_SECONDS:g})")
    machine.add_argument("--threads", type=at_least(1, most=4096), help="default: as torch has it")
    machine.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        help="cpu: time that the one thread ran, for a machine that others use too; with --threads 1 "
        "(default wall)",
    )
    add_model_options(parser, memory=False)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    quiet = check_outputs(args.model, args.hardware, output=args.output)
    hardware = _of_points(args) if args.point else _of_machine(args)
    if not quiet:
        _show(hardware)
    write_outputs((args.output, text_writer(to_json(hardware.document()))))
    return 0


def _exclude(args: argparse.Namespace, stated: str, names: tuple[str, ...]) -> None:
    surplus = [name for name in names if getattr(args, name) is not None]
    if surplus:
        raise PagedKVError(f"{stated}: leave out {names_of(surplus)}")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _of_points(args: argparse.Namespace) -> Hardware:
    _exclude(args, "--point fits a model on a GPU and measures nothing", MACHINE_ONLY)
    points = [parse_point(text) for text in args.point]
    return points_hardware(
        points, read_model(args), read_gpu(args), option(args, "weight_bits"), _now(), args.kernel
    )


def _of_machine(args: argparse.Namespace) -> Hardware:
    _exclude(args, "this machine is measured whatever the model (or state a --point)", POINTS_ONLY)
    # torch is imported for what measures it, and for nothing else of the command line
    from pagedkv.attention.bench.conditions import conditions, set_threads

    if args.threads is not None:
        set_threads(args.threads)
    device, seconds = args.device or "cpu", args.seconds or DEFAULT_SECONDS
    clock: Literal["wall", "cpu"] = args.clock or "wall"
    around, found, start = None, [], time.perf_counter()
    with progress("calibrating", num_measurements(CONTEXTS, BATCHES)) as update:
        for measurement in measure(device, seconds, CONTEXTS, BATCHES, clock):
            around = around or conditions(device)  # the load before ours
            found.append(measurement)
            update(len(found))
    spent = {"device": device, "clock": clock, "measured_s": round(time.perf_counter() - start, 1)}
    return hardware_from(found, device, _now(), {**(around or {}), **spent})


def _show(hardware: Hardware) -> None:
    rows = [_row(name, hardware.figures[name]) for name in FIGURES]
    for dtype, costs in hardware.attention.items():
        rows += [_row(f"attention {dtype}, {name}", costs[name]) for name in ATTENTION]
    attention = [row for row in hardware.measurements if row.get("kind") == "attention"]
    notes = [
        f"paged attention {row['dtype']}, batch {row['batch']}, context {row['context']:,}: "
        f"{row['seconds'] * 1e6:,.0f} us, {row['amount'] / row['seconds'] / 1e9:,.1f} GB/s"
        for row in attention
    ]
    load, cpus = hardware.conditions.get("load_average"), hardware.conditions.get("threads", 1)
    if hardware.conditions.get("clock") == "wall" and load is not None and load > cpus:
        notes.append(
            f"the load was {load:.1f} on {cpus} threads: others ran too, repeat this on an idle machine, or "
            "with --threads 1 --clock cpu"
        )
    show_table(hardware.name, ("figure", "value", "how", "of"), rows, notes)


def _row(name: str, figure: Figure) -> tuple[str, ...]:
    of = f"{figure.what} ({figure.repetitions} times)" if figure.repetitions else figure.what
    return name, f"{figure.value:,.4g}", figure.how, of
