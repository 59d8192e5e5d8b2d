"""``pagedkv bench attention``: GB/s of decode attention here, beside what else there is."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.sim.commands.options import add_json_option, at_least, positive, size
from pagedkv.sim.console import human_bytes, progress, show_table
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.output.plot import require_plottable
from pagedkv.sim.output.report import to_json
from pagedkv.spec import ELEMENT_BYTES

if TYPE_CHECKING:
    from pagedkv.attention.bench.measure import CellResult, Row

SCHEMA = "pagedkv.bench.attention/1"
FORMULAS = {
    "gb_per_s": "bytes of K, V and scales that the contender has to read / median seconds of a call / 10^9",
    "of_ceiling": "median over rounds of its rate / the rate of the read-only pass in the same round",
    "speedup": "median over rounds of the baseline's seconds / its seconds; the baseline is the faster of "
    "sdpa and sdpa-rows, in the compute dtype (bf16 for int8 and fp8)",
    "error": "largest difference to the torch backend / largest entry of its result",
}
DEFAULT_BATCH, DEFAULT_CONTEXT, DEFAULT_DTYPE, DEFAULT_BLOCK_SIZE = (
    (1, 8),
    (1024, 8192),
    ("bf16", "int8"),
    (16,),
)
LEAST_COLD_BYTES = 2**29
CACHES = 4
SHARE_OF_MEMORY = 0.6

Commands = argparse._SubParsersAction


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    bench = commands.add_parser("bench", help="measure this machine", description="Measure this machine.")
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    parser = kinds.add_parser(
        "attention",
        help="decode attention: GB/s of each backend and of its peers",
        description="Time one layer of decode attention in every backend and every peer: cold (each call "
        "reads other blocks of a pool larger than the last-level cache), in interleaved rounds, against a "
        "read-only pass over the same blocks. The defaults take about a minute on two cores. Exit code 1 if "
        "a contender gives a wrong result.",
    )
    parser.set_defaults(run=run)
    _add_cells(parser)
    how = parser.add_argument_group("how to measure")
    how.add_argument("--backends", nargs="+", metavar="NAME", help="default: all that are available here")
    how.add_argument(
        "--peers",
        nargs="*",
        metavar="NAME",
        help="sdpa, sdpa-rows, gather, cat, flex, vllm, flashinfer-planned, vllm-triton, or nothing for none "
        "(default: all that run on the device, but not flex, which compiles for half a minute or more)",
    )
    how.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    how.add_argument("--layout", choices=("HND", "NHD"), default="HND", help="of the cache (default HND)")
    how.add_argument("--threads", type=at_least(1, most=4096), help="default: as torch has it")
    how.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: time that the one thread ran, for a machine that others use too; with --threads 1 "
        "(default wall)",
    )
    how.add_argument("--seconds", type=positive, default=3.0, help="of measuring per cell (default 3)")
    how.add_argument(
        "--cold-bytes",
        type=size,
        help=f"of the pool (default: {CACHES} last-level caches, at least {human_bytes(LEAST_COLD_BYTES)})",
    )
    how.add_argument(
        "--max-bytes",
        type=size,
        help="of memory; what needs more is left out "
        f"(default: {SHARE_OF_MEMORY * 100:.0f} %% of what is available)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the shares of the ceiling (.png, .svg, .pdf)")
    add_json_option(parser)


def _add_cells(parser: argparse.ArgumentParser) -> None:
    cells = parser.add_argument_group("what to measure, every combination")
    for name, default, most, text in (
        ("--batch", DEFAULT_BATCH, 65_536, "sequences"),
        ("--context", DEFAULT_CONTEXT, 2**24, "tokens per sequence"),
        ("--block-size", DEFAULT_BLOCK_SIZE, 65_536, "tokens per block"),
    ):
        number = at_least(1, most)
        cells.add_argument(name, type=number, nargs="+", default=default, help=_with(text, default))
    cells.add_argument(
        "--dtype",
        choices=sorted(ELEMENT_BYTES),
        nargs="+",
        default=DEFAULT_DTYPE,
        help=_with("dtype of K and V", DEFAULT_DTYPE),
    )
    layer = parser.add_argument_group("the layer (default: Llama-3-8B)")
    layer.add_argument("--q-heads", type=at_least(1, most=4096), default=32, help="query heads (default 32)")
    layer.add_argument("--kv-heads", type=at_least(1, most=4096), default=8, help="KV heads (default 8)")
    layer.add_argument("--head-dim", type=at_least(1, most=4096), default=128, help="default 128")


def _with(text: str, default: Sequence[object]) -> str:
    return f"{text} (default {' '.join(map(str, default))})"


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    quiet = check_outputs(json=args.json, plot=args.plot)
    if args.plot is not None:
        require_plottable(args.plot)
    results, conditions = _measure(args)
    if not quiet:
        _show(results, conditions)
    outputs = []
    if args.json is not None:
        outputs.append((args.json, text_writer(to_json(_document(results, conditions)))))
    if args.plot is not None:
        from pagedkv.sim.output.bench_plot import plot_bench

        outputs.append((args.plot, lambda path: plot_bench(results, conditions, Path(path))))
    write_outputs(*outputs)
    return int(any(row.is_wrong for result in results for row in result.rows))


def _measure(args: argparse.Namespace) -> tuple[list[CellResult], dict[str, Any]]:
    # torch is imported for what measures it, and for nothing else of the command line
    from pagedkv.attention.bench.cell import even_cell
    from pagedkv.attention.bench.conditions import (
        available_bytes,
        check_device,
        conditions,
        last_level_cache_bytes,
        set_threads,
    )
    from pagedkv.attention.bench.measure import Plan, measure_cell

    check_device(args.device)
    if args.threads is not None:
        set_threads(args.threads)
    cold = args.cold_bytes or max(CACHES * last_level_cache_bytes(), LEAST_COLD_BYTES)
    allowed = args.max_bytes or SHARE_OF_MEMORY * available_bytes(args.device)
    plan = Plan(
        args.backends,
        args.peers,
        seconds=args.seconds,
        cold_bytes=int(cold),
        max_bytes=int(allowed),
        device=args.device,
        layout=args.layout,
        clock=args.clock,
    )
    heads = (args.q_heads, args.kv_heads, args.head_dim)
    cells = [
        even_cell(batch, context, dtype, block_size, heads)
        for dtype, block_size, batch, context in itertools.product(
            args.dtype, args.block_size, args.batch, args.context
        )
    ]
    results = []
    with progress("cells", len(cells)) as update:
        for cell in cells:
            results.append(measure_cell(cell, plan))
            update(len(results))
    settings = {
        "device": args.device,
        "layout": args.layout,
        "clock": args.clock,
        "cold_bytes": plan.cold_bytes,
        "max_bytes": plan.max_bytes,
        "seconds_per_cell": plan.seconds,
        "layer": {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": heads[2]},
    }
    return results, conditions(args.device) | settings


def _show(results: Sequence[CellResult], conditions: dict[str, Any]) -> None:
    layer = conditions["layer"]
    title = (
        f"Decode attention, measured: one layer of {layer['num_q_heads']} query heads, "
        f"{layer['num_kv_heads']} KV heads, head_dim {layer['head_dim']}, {conditions['layout']}"
    )
    columns = ("", "dtype", "block", "batch", "context", "us/call", "GB/s", "% of ceiling", "x SDPA")
    rows = [_cells_of(result, row) for result in results for row in result.rows if row.seconds is not None]
    show_table(title, columns, rows, [*_notes(results), *_conditions_in_words(results, conditions)])


def _cells_of(result: CellResult, row: Row) -> tuple[str, ...]:
    cell = result.cell
    return (
        row.name,
        cell.dtype,
        str(cell.block_size),
        str(cell.batch),
        f"{cell.context:,}",
        f"{(row.seconds or 0) * 1e6:,.1f}",
        f"{row.gb_per_s:,.2f}",
        f"{(row.of_ceiling or 0) * 100:,.0f}",
        "-" if row.speedup is None else f"{row.speedup:,.2f}",
    )


def _notes(results: Sequence[CellResult]) -> list[str]:
    """Who is missing where, and why; the same reason is said once."""
    cells: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.note:
            cells.setdefault(("not measured", result.note), []).append(_label(result))
        for row in result.rows:
            if row.note:
                cells.setdefault((row.name, row.note), []).append(_label(result))
    notes = []
    for (name, why), where in cells.items():
        place = "" if len(where) == len(results) else f" [{'; '.join(where)}]"
        notes.append(f"{name}: {why}{place}")
    return notes


def _label(result: CellResult) -> str:
    cell = result.cell
    return f"{cell.dtype}, block {cell.block_size}, {cell.batch} x {cell.context:,}"


def _conditions_in_words(results: Sequence[CellResult], conditions: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    rounds = sorted({row.rounds for result in results for row in result.rows if row.rounds})
    ceilings = sorted({result.ceiling for result in results if result.ceiling})
    spans = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0] if rounds else 0}"
    return [
        f"measured on {conditions.get('gpu', conditions['cpu'])}, {conditions['threads']} of "
        f"{conditions['logical_cpus']} CPUs, load {conditions['load_average'] or 0:.1f}; {versions}",
        f"medians of {spans} interleaved rounds, {conditions['clock']} time; a pool of "
        f"{human_bytes(conditions['cold_bytes'])} or more (last-level cache "
        f"{human_bytes(conditions['last_level_cache_bytes'])}), other blocks at every call",
        *(f"read ceiling: {ceiling}" for ceiling in ceilings),
        "x SDPA: times as fast as contiguous scaled_dot_product_attention, the faster of sdpa and sdpa-rows",
    ]


def _document(results: Sequence[CellResult], conditions: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": "measured",
        "conditions": conditions,
        "formulas": FORMULAS,
        "cells": [_cell_document(result) for result in results],
    }


def _cell_document(result: CellResult) -> dict[str, Any]:
    cell = result.cell
    return {
        "dtype": cell.dtype,
        "block_size": cell.block_size,
        "batch": cell.batch,
        "context": cell.context,
        "kv_bytes": cell.kv_bytes,
        "num_sets": result.num_sets,
        "read_ceiling": result.ceiling,
        "baseline": result.baseline,
        "note": result.note,
        "rows": [asdict(row) for row in result.rows],
    }
