"""Command-line options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from pagedkv.errors import PagedKVError
from pagedkv.sim.replay import blocks_in_memory
from pagedkv.sim.timing.gpus import GPU, load_gpu
from pagedkv.sim.timing.hardware import read_hardware
from pagedkv.sim.timing.models import Model, load_model
from pagedkv.spec import ELEMENT_BYTES

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}

DEFAULTS: Final[Mapping[str, Any]] = {
    "model": "llama-3.1-8b",
    "gpu": "B200 SXM",
    "kv_dtype": "bf16",
    "weight_bits": 16,
    "block_size": 16,
    "memory_utilization": 0.9,
}
"""What an option means that nobody stated. The parser says None then, so that commands can tell."""


def size(text: str) -> float:
    """Bytes from text such as ``24GiB``, ``80GB``, ``14e9``.

    >>> size("24GiB"), size("80GB"), size("14e9")
    (25769803776.0, 80000000000.0, 14000000000.0)
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 24GiB, 80GB or 14e9")
    return positive(str(float(match[1]) * _UNITS[match[2]]))


def _number(text: str) -> float:
    """What a text says; NaN, which lies in no range, if it is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str) -> float:
    """A number above 0, and of a size that something could have."""
    value = _number(text)
    if not 1e-18 <= value <= 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 (up to 1e18)")
    return value


def not_negative(text: str) -> float:
    """A number of 0 or more, and of a size that something could have."""
    value = _number(text)
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1e9")
    return value


def share_below_1(text: str) -> float:
    """A number in [0, 1)."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not in [0, 1)")
    return value


def share(text: str) -> float:
    """A number in (0, 1]."""
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not in (0, 1]")
    return value


def share_or_0(text: str) -> float:
    """A number in [0, 1]."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not in [0, 1]")
    return value


def at_least(least: int, most: int = 2**31 - 2) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` to ``most``, by default as many as there are block ids."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most:,}")
        return value

    return parse


def add_model_options(parser: argparse.ArgumentParser, *, memory: bool = True, compute: bool = True) -> None:
    """Model, cache and GPU; what concerns the memory or the compute time only where that is asked about."""
    group = parser.add_argument_group("model and hardware")
    group.add_argument("--model", help=_help("name (see `pagedkv models`) or config.json", "model"))
    group.add_argument(
        "--kv-dtype", choices=sorted(ELEMENT_BYTES), help=_help("dtype of K and V", "kv_dtype")
    )
    group.add_argument("--weight-bits", type=positive, help=_help("bits per weight", "weight_bits"))
    group.add_argument("--gpu", help=_help("name (see `pagedkv gpus`)", "gpu"))
    group.add_argument("--hardware", metavar="FILE", help="a file of `pagedkv calibrate` in place of --gpu")
    if memory:
        group.add_argument(
            "--block-size", type=at_least(1, most=1 << 20), help=_help("tokens per block", "block_size")
        )
        group.add_argument("--gpu-memory", type=size, help="memory, such as 24GiB (default: the GPU's)")
        group.add_argument(
            "--memory-utilization",
            type=share,
            help=_help("share of the memory for weights and cache", "memory_utilization"),
        )
    if compute:
        group.add_argument("--tflops", type=positive, help="dense 16-bit TFLOPS (default: the GPU's)")


def add_json_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The same in every command that can say its result to machines."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON (- for standard output, without tables)"
    )


def option(args: argparse.Namespace, name: str) -> Any:
    """An option as stated, or its default; commands without the option have the default, too."""
    value = getattr(args, name, None)
    return DEFAULTS[name] if value is None else value


def names_of(options: Iterable[str]) -> str:
    """Options as a user writes them.

    >>> names_of(["gpu", "max_batch"])
    '--gpu, --max-batch'
    """
    return ", ".join("--" + name.replace("_", "-") for name in options)


def _help(text: str, name: str) -> str:
    return f"{text} (default {DEFAULTS[name]})"


def read_model(args: argparse.Namespace) -> Model:
    """The model that the options name."""
    return load_model(
        option(args, "model"), kv_dtype=option(args, "kv_dtype"), block_size=option(args, "block_size")
    )


def read_gpu(args: argparse.Namespace) -> GPU:
    """The GPU or hardware file that the options name, with memory and FLOPS as they say."""
    if getattr(args, "hardware", None) is None:
        gpu = load_gpu(option(args, "gpu"))
    elif args.gpu is None:
        gpu = read_hardware(args.hardware).gpu
    else:
        raise PagedKVError("--gpu and --hardware exclude each other: state one")
    if getattr(args, "gpu_memory", None) is not None:
        gpu = replace(gpu, memory_bytes=int(args.gpu_memory))
    if getattr(args, "tflops", None) is not None:
        gpu = replace(gpu, fp16_flops=args.tflops * 1e12)
    return gpu


def read_num_blocks(args: argparse.Namespace, model: Model, gpu: GPU) -> int:
    """Blocks as stated, or as many as the memory holds beside the weights."""
    if getattr(args, "num_blocks", None):
        return int(args.num_blocks)
    return blocks_in_memory(
        model,
        gpu.memory_bytes,
        option(args, "memory_utilization"),
        option(args, "weight_bits"),
        hybrid=bool(getattr(args, "hybrid", None)),
    )
