"""``pagedkv itl``, ``size``, ``models``, ``gpus``: what a step costs and what fits, by arithmetic."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import (
    add_json_option,
    add_model_options,
    at_least,
    names_of,
    option,
    read_gpu,
    read_model,
    read_num_blocks,
    size,
)
from pagedkv.sim.commands.step_time_options import add_step_time_options, read_step_time
from pagedkv.sim.console import human_bytes, show_table
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.output.report import kind_of_times, to_json
from pagedkv.sim.timing.gpus import GPU, gpu_names, load_gpu
from pagedkv.sim.timing.models import Model, load_model, model_names, model_source
from pagedkv.sim.timing.roofline import Roofline, origin_of
from pagedkv.sim.timing.step_time import StepTimeModel

STEP_FORMULA = "launch + max(compute, weight bytes / bandwidth) + max(KV compute, KV bytes / bandwidth)"
CONTEXTS = (0, 4096, 32768, 131072)
REPEATS = 5
"""Calls per context, of which the median counts, where attention is measured."""

Commands = argparse._SubParsersAction


def add_parsers(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    itl = commands.add_parser(
        "itl",
        help="ITL and tokens/s against context",
        description=f"ITL of a decode step = {STEP_FORMULA}.",
    )
    itl.set_defaults(run=run_itl)
    itl.add_argument("--weight-bytes", type=size, help="bytes of weights per step (default: the model's)")
    itl.add_argument(
        "--bandwidth",
        type=size,
        help="bytes per second, reached in full, without launch cost or compute (default: the GPU's, "
        "with its efficiencies)",
    )
    itl.add_argument(
        "--batch", type=at_least(1, most=1_000_000), default=1, help="sequences per step (default 1)"
    )
    itl.add_argument("--context", type=at_least(0), nargs="+", default=CONTEXTS, help="tokens per sequence")
    fits = commands.add_parser(
        "size",
        help="how many blocks, tokens and sequences fit",
        description="What fits into the memory beside the weights.",
    )
    fits.set_defaults(run=run_size)
    fits.add_argument(
        "--context", type=at_least(1), nargs="+", default=CONTEXTS[1:], help="tokens per sequence"
    )
    add_model_options(itl, memory=False)
    add_step_time_options(itl)
    add_model_options(fits, compute=False)
    for parser in (itl, fits):
        add_json_option(parser)
    models = commands.add_parser("models", help="list the built-in models", description="Built-in models.")
    models.set_defaults(run=run_models)
    gpus = commands.add_parser("gpus", help="list the built-in GPUs", description="Built-in GPUs.")
    gpus.set_defaults(run=run_gpus)


def _step_time(args: argparse.Namespace, model: Model) -> tuple[StepTimeModel, str]:
    """The step-time model, and where its rates come from."""
    if args.bandwidth is None and args.weight_bytes is not None:
        raise PagedKVError("--weight-bytes goes with --bandwidth: state both, or a --model and a --gpu")
    if args.bandwidth is not None:
        _exclude(args, "bandwidth", "gpu", "hardware", "tflops", "attention_table", "measure_attention")
        step = _bandwidth_alone(args, model)
        weights = human_bytes(step.weight_bytes(args.batch))
        return step, f"{weights} of weights at {args.bandwidth / 1e9:,.0f} GB/s, reached in full"
    gpu = read_gpu(args)
    base = Roofline.from_gpu(model, gpu, weight_bits=option(args, "weight_bits"))
    num_blocks = args.batch * div_ceil(max(1, *args.context), model.spec.block_size)
    step = read_step_time(args, base, model, gpu, num_blocks, repeats=REPEATS)
    if step is base:
        return step, f"{gpu.name}, {origin_of(gpu, model.spec.dtype)}"
    attention = f"of {args.attention_table}" if args.attention_table else f"run on {args.measure_attention}"
    return step, f"{gpu.name}, published efficiencies, attention {attention}"


def _bandwidth_alone(args: argparse.Namespace, model: Model) -> StepTimeModel:
    if args.weight_bytes is not None:
        _exclude(args, "weight_bytes", "weight_bits")
        return Roofline.from_rates(args.weight_bytes, args.bandwidth, model.spec)
    weight_bytes = option(args, "weight_bits") / 8
    return Roofline.from_rates(
        (model.params_active - model.params_experts * model.expert_share) * weight_bytes,
        args.bandwidth,
        model.spec,
        expert_weight_bytes=model.params_experts * weight_bytes,
        expert_share=model.expert_share,
    )


def _exclude(args: argparse.Namespace, stated: str, *others: str) -> None:
    for other in others:
        if getattr(args, other) is not None:
            raise PagedKVError(f"{names_of([stated])} and {names_of([other])} exclude each other: state one")


def run_itl(args: argparse.Namespace) -> int:
    """Print ITL against context."""
    quiet = check_outputs(args.model, args.hardware, json=args.json)
    model = read_model(args)
    step, rates = _step_time(args, model)
    rows = []
    for context in args.context:
        contexts = np.full(args.batch, context, np.int64)
        kv_bytes, seconds = step.kv_bytes(contexts), step.decode_s(contexts)
        rows.append(
            {
                "context": context,
                "itl_s": seconds,
                "tokens_per_s": args.batch / seconds,
                "kv_bytes": kv_bytes,
                "kv_s": step.decode_kv_s(contexts),
            }
        )
    inputs = {
        "kv_of": model.name,
        "kv_dtype": model.spec.dtype,
        "batch": args.batch,
        "weight_bytes": step.weight_bytes(args.batch),
    }
    kind = kind_of_times(step.attention_time)
    document = {"schema": "pagedkv.itl/1", "kind": kind, "inputs": inputs, "rows": rows}
    if not quiet:
        _show_itl(f"batch {args.batch}, {model.spec.dtype} K and V of {model.name}: {rates}", rows, kind)
    if args.json is not None:
        write_outputs((args.json, text_writer(to_json(document))))
    return 0


def _show_itl(title: str, rows: Sequence[Mapping[str, Any]], kind: str) -> None:
    show_table(
        f"Decode step, {title}",
        ("context", "ITL [ms]", "tokens/s", "KV bytes read", "KV adds [ms]"),
        [
            (
                f"{row['context']:,}",
                f"{row['itl_s'] * 1e3:,.1f}",
                f"{row['tokens_per_s']:,.1f}",
                human_bytes(row["kv_bytes"]),
                f"{row['kv_s'] * 1e3:,.1f}",
            )
            for row in rows
        ],
        [f"{kind}: ITL = {STEP_FORMULA}"],
    )


def run_size(args: argparse.Namespace) -> int:
    """Print what fits."""
    quiet = check_outputs(args.model, args.hardware, json=args.json)
    model, gpu = read_model(args), read_gpu(args)
    blocks = read_num_blocks(args, model, gpu)
    spec = model.spec
    weights = model.params_total * option(args, "weight_bits") / 8
    sequences = {context: blocks // -(-context // spec.block_size) for context in args.context}
    document = {
        "schema": "pagedkv.size/1",
        "inputs": {
            "model": model.name,
            "gpu": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "kv_dtype": spec.dtype,
        },
        "weight_bytes": weights,
        "bytes_per_token": spec.bytes_per_token,
        "bytes_per_block": spec.bytes_per_block,
        "num_blocks": blocks,
        "num_tokens": blocks * spec.block_size,
        "sequences": {str(context): count for context, count in sequences.items()},
    }
    if not quiet:
        _show_size(model, gpu, option(args, "memory_utilization"), document)
    if args.json is not None:
        write_outputs((args.json, text_writer(to_json(document))))
    return 0


def _show_size(model: Model, gpu: GPU, utilization: float, document: Mapping[str, Any]) -> None:
    spec = model.spec
    rows = [
        (f"memory, {utilization:.0%} of {gpu.name}", human_bytes(gpu.memory_bytes * utilization)),
        ("weights", human_bytes(document["weight_bytes"])),
        (f"KV bytes per token, {spec.dtype}", f"{spec.bytes_per_token:,}"),
        (f"KV bytes per block of {spec.block_size}", f"{spec.bytes_per_block:,}"),
        ("blocks", f"{document['num_blocks']:,}"),
        ("tokens", f"{document['num_tokens']:,}"),
        *(
            (f"sequences of {int(context):,} tokens", f"{count:,}")
            for context, count in document["sequences"].items()
        ),
    ]
    show_table(f"What fits: {model.name} on {gpu.name}", ("", "value"), rows)


def run_models(args: argparse.Namespace) -> int:
    """List the models."""
    rows: list[Sequence[str]] = []
    for name in model_names():
        model = load_model(name)
        rows.append(
            (name, f"{model.params_total / 1e9:,.1f}", f"{model.spec.bytes_per_token:,}", model_source(name))
        )
    show_table("Built-in models", ("name", "10^9 weights", "KV bytes/token, bf16", "config of"), rows)
    return 0


def run_gpus(args: argparse.Namespace) -> int:
    """List the GPUs."""
    rows: list[Sequence[str]] = []
    for name in gpu_names():
        gpu = load_gpu(name)
        flops = "-" if gpu.fp16_flops is None else f"{gpu.fp16_flops / 1e12:,.0f}"
        rows.append(
            (name, f"{gpu.memory_bytes / 2**30:,.0f}", f"{gpu.bandwidth / 1e9:,.0f}", flops, gpu.source)
        )
    show_table("Built-in GPUs", ("name", "GiB", "GB/s", "fp16 TFLOPS", "source"), rows)
    return 0
