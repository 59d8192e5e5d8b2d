"""Command-line options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import math
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pagedkv.errors import PagedKVError
from pagedkv.sim.gpus import GPU, load_gpu
from pagedkv.sim.models import Model, load_model
from pagedkv.sim.replay import blocks_in_memory
from pagedkv.spec import ELEMENT_BYTES

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}

DEFAULT_MODEL, DEFAULT_GPU = "llama-3.1-8b", "B200 SXM"


def size(text: str) -> float:
    """Bytes from text such as ``24GiB``, ``80GB``, ``14e9``.

    >>> size("24GiB"), size("80GB"), size("14e9")
    (25769803776.0, 80000000000.0, 14000000000.0)
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 24GiB, 80GB or 14e9")
    return positive(str(float(match[1]) * _UNITS[match[2]]))


def positive(text: str) -> float:
    """A number above 0, and of a size that something could have."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1e-18 <= value <= 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 (up to 1e18)")
    return value


def share(text: str) -> float:
    """A number in (0, 1]."""
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not in (0, 1]")
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


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Model, cache and GPU."""
    group = parser.add_argument_group("model and hardware")
    group.add_argument(
        "--model", default=None, help=f"name (see `pagedkv models`) or config.json (default {DEFAULT_MODEL})"
    )
    group.add_argument("--kv-dtype", default="bf16", choices=sorted(ELEMENT_BYTES), help="dtype of K and V")
    group.add_argument("--weight-bits", type=positive, default=16, help="bits per weight (default 16)")
    group.add_argument(
        "--block-size", type=at_least(1), default=16, help="tokens per block (default %(default)s)"
    )
    group.add_argument("--gpu", default=None, help=f"name (see `pagedkv gpus`) (default {DEFAULT_GPU})")
    group.add_argument("--gpu-memory", type=size, help="memory, such as 24GiB (default: the GPU's)")
    group.add_argument(
        "--memory-utilization",
        type=share,
        default=0.9,
        help="share of the memory for weights and cache (default %(default)s)",
    )
    group.add_argument("--tflops", type=positive, help="dense 16-bit TFLOPS (default: the GPU's)")


def read_model(args: argparse.Namespace) -> Model:
    """The model that the options name."""
    return load_model(args.model or DEFAULT_MODEL, kv_dtype=args.kv_dtype, block_size=args.block_size)


def read_gpu(args: argparse.Namespace) -> GPU:
    """The GPU that the options name, with memory and FLOPS as they say."""
    gpu = load_gpu(args.gpu or DEFAULT_GPU)
    if args.gpu_memory is not None:
        gpu = replace(gpu, memory_bytes=int(args.gpu_memory))
    if args.tflops is not None:
        gpu = replace(gpu, fp16_flops=args.tflops * 1e12)
    return gpu


def read_num_blocks(args: argparse.Namespace, model: Model, gpu: GPU) -> int:
    """Blocks as stated, or as many as the memory holds beside the weights."""
    if getattr(args, "num_blocks", None):
        return int(args.num_blocks)
    return blocks_in_memory(model, gpu.memory_bytes, args.memory_utilization, args.weight_bits)


def require_writable(*paths: str | None) -> None:
    """Refuse output files whose folder is missing, before the work and not after it."""
    for path in paths:
        if path is not None and path != "-" and not Path(path).resolve().parent.is_dir():
            raise PagedKVError(f"cannot write {path}: no folder {Path(path).resolve().parent}")
        if path is not None and Path(path).is_dir():
            raise PagedKVError(f"cannot write {path}: it is a folder")


def write_whole(path: str, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path`` and put it in place whole, or leave nothing."""
    target = Path(path)
    handle, name = tempfile.mkstemp(suffix=target.suffix, prefix=f".{target.stem}-", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
