"""Command-line options that say how the engine schedules, preempts, speculates and spreads over GPUs."""

from __future__ import annotations

import argparse
from typing import Any

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import at_least, names_of, not_negative, share_or_0, size
from pagedkv.sim.engine.disaggregation import TransferSettings
from pagedkv.sim.engine.disk_tier import DiskTierSettings
from pagedkv.sim.engine.engine_config import EngineConfig
from pagedkv.sim.engine.host_tier import HostTierSettings
from pagedkv.sim.engine.kv_budget import RULES, KVBudget
from pagedkv.sim.engine.link import LinkSpeed
from pagedkv.sim.engine.speculation import Speculation
from pagedkv.sim.engine.swapping import SwapSettings
from pagedkv.sim.engine.waiting import QUEUES
from pagedkv.sim.timing.tensor_parallel import TensorParallel

PREEMPTIONS = ("recompute", "swap", "auto")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the groups of options; nothing is on unless it is stated."""
    _add_scheduling(parser.add_argument_group("scheduling"))
    _add_preemption(parser.add_argument_group("preemption, host memory (times of copies are modelled)"))
    _add_disk(parser.add_argument_group("a disk under the host cache (times are modelled)"))
    _add_budget(parser.add_argument_group("token-level eviction (which blocks go is modelled)"))
    _add_speculation(parser.add_argument_group("speculative decoding (times are modelled)"))
    _add_gpus(parser.add_argument_group("several GPUs (times of links are modelled)"))


def _add_scheduling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--queue",
        choices=QUEUES,
        help="who is admitted first and preempted last: by arrival, the trace's priority, prompt length, or "
        f"the trace's deadline (default {EngineConfig.queue})",
    )
    _add_flag(group, "--prefill-first", "steps compute prompts alone while there are any; decodes wait")
    _add_flag(group, "--coalesce", "let a prompt wait for an equal prefix that is being computed")
    _add_flag(group, "--partial-hits", "let a hit end inside a block, by a copy of it")
    _add_flag(
        group,
        "--hybrid",
        "give back the blocks of sliding-window layers outside the window: groups of layers share one pool",
    )


def _add_preemption(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preemption",
        choices=PREEMPTIONS,
        help="compute again what is lost, swap it to the host, or whichever is faster (default recompute)",
    )
    group.add_argument("--host-memory", type=size, help="memory for swapped sequences, such as 64GiB")
    group.add_argument(
        "--host-cache",
        type=size,
        help="memory for prefixes: blocks are written to it when computed, and again when it has lost them",
    )
    _add_link(group, "host", "between GPU and host, both directions and both uses together")


def _add_disk(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--disk-cache", type=size, help="disk for prefixes that leave the host cache; a hit brings them back"
    )
    for what in ("read", "write"):
        group.add_argument(
            f"--disk-{what}-bandwidth",
            metavar="SIZE",
            type=size,
            help=f"bytes per second of a {what}; one read or write at a time",
        )
    group.add_argument(
        "--disk-latency-us",
        metavar="US",
        type=not_negative,
        help="microseconds of each read or write (default 0)",
    )


def _add_budget(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-budget",
        metavar="TOKENS",
        type=at_least(1),
        help="context that a decoding sequence keeps, in whole blocks: others go from the middle; prompts "
        "are computed whole",
    )
    group.add_argument(
        "--kv-keep",
        choices=RULES,
        help="what stays: the first block and the newest, or the first, the newer half and the heaviest by "
        f"random weights, since a replay has no attention (default {RULES[0]})",
    )
    group.add_argument("--kv-seed", type=at_least(0), help="seed of the weights (default 0)")


def _add_speculation(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--drafts", type=at_least(1, most=1000), help="drafted tokens that a step verifies per sequence"
    )
    group.add_argument("--accept-rate", type=share_or_0, help="probability that a draft is right, 0 to 1")
    group.add_argument(
        "--draft-ms", type=not_negative, help="milliseconds to draft one token of all (default 0)"
    )
    group.add_argument("--draft-seed", type=at_least(0), help="seed of what is right (default 0)")


def _add_gpus(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tensor-parallel",
        metavar="N",
        type=at_least(1, most=4096),
        help="split heads and weights over N GPUs; bytes and blocks are of one of them",
    )
    _add_link(group, "tp", "of a GPU to the others, each way")
    _add_flag(group, "--disaggregate", "prefill on one device and decode on another, with a pool each")
    _add_link(group, "kv", "from the one to the other")


def _add_flag(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    group.add_argument(name, action="store_true", default=None, help=text)


def _add_link(group: argparse._ArgumentGroup, name: str, what: str) -> None:
    group.add_argument(
        f"--{name}-bandwidth", metavar="SIZE", type=size, help=f"bytes per second {what}, such as 25GB"
    )
    group.add_argument(
        f"--{name}-latency-us",
        metavar="US",
        type=not_negative,
        help="its microseconds per transfer (default 0)",
    )


def engine_config(args: argparse.Namespace, bytes_per_block: int) -> EngineConfig:
    """How the options say that the engine works; ``PagedKVError`` for options that do not go together."""
    stated = {
        "max_batch": args.max_batch,
        "token_budget": args.token_budget,
        "interval_s": args.interval,
        "queue": args.queue,
        "prefill_first": args.prefill_first,
        "coalesce": args.coalesce,
        "partial_hits": args.partial_hits,
    }
    return EngineConfig(
        swap=_swap(args, bytes_per_block),
        speculation=_speculation(args),
        host_tier=_host_tier(args, bytes_per_block),
        disk_tier=_disk_tier(args, bytes_per_block),
        kv_budget=_kv_budget(args),
        **{name: value for name, value in stated.items() if value is not None},
    )


def tensor_parallel(args: argparse.Namespace) -> TensorParallel | None:
    """The GPUs that share a model, and their link; None for one."""
    if (args.tensor_parallel or 1) == 1:
        _refuse(args, ("tp_bandwidth", "tp_latency_us"), "needs --tensor-parallel N of 2 or more")
        return None
    return TensorParallel(args.tensor_parallel, _link(args, "tp", "--tensor-parallel"))


def transfer(args: argparse.Namespace, bytes_per_block: int) -> TransferSettings | None:
    """The link between prefill and decode; None if one device does both."""
    if not args.disaggregate:
        _refuse(args, ("kv_bandwidth", "kv_latency_us"), "needs --disaggregate")
        return None
    return TransferSettings(_link(args, "kv", "--disaggregate"), bytes_per_block)


def check_hybrid(args: argparse.Namespace) -> None:
    """Refuse with ``--hybrid`` what its manager does not have."""
    if args.hybrid:
        _refuse(args, ("disk_cache", "kv_budget"), "does not go with --hybrid")


def check_prefix_caching(args: argparse.Namespace) -> None:
    """Refuse with ``--no-prefix-caching`` what has an effect on prefixes alone."""
    if args.no_prefix_caching:
        _refuse(args, ("policy", "coalesce", "partial_hits"), "does not go with --no-prefix-caching")


def _swap(args: argparse.Namespace, bytes_per_block: int) -> SwapSettings | None:
    if (args.preemption or "recompute") == "recompute":
        _refuse(args, ("host_memory",), "needs --preemption swap or auto")
        if args.host_cache is None:
            _refuse(args, ("host_bandwidth", "host_latency_us"), "needs --preemption swap, or --host-cache")
        return None
    if args.host_memory is None:
        raise PagedKVError(f"--preemption {args.preemption} needs --host-memory")
    blocks = _blocks(args, "host_memory", bytes_per_block)
    link = _link(args, "host", f"--preemption {args.preemption}")
    return SwapSettings(blocks, bytes_per_block, link, always=args.preemption == "swap")


def _host_tier(args: argparse.Namespace, bytes_per_block: int) -> HostTierSettings | None:
    if args.host_cache is None:
        return None
    if args.no_prefix_caching:
        raise PagedKVError("--host-cache keeps prefixes: leave out --no-prefix-caching")
    blocks = _blocks(args, "host_cache", bytes_per_block)
    return HostTierSettings(blocks, bytes_per_block, _link(args, "host", "--host-cache"))


def _disk_tier(args: argparse.Namespace, bytes_per_block: int) -> DiskTierSettings | None:
    speeds = "disk_read_bandwidth", "disk_write_bandwidth"
    if args.disk_cache is None:
        _refuse(args, (*speeds, "disk_latency_us"), "needs --disk-cache")
        return None
    if args.host_cache is None:
        raise PagedKVError("--disk-cache keeps what leaves the host: it needs --host-cache")
    for name in speeds:
        if getattr(args, name) is None:
            raise PagedKVError(f"--disk-cache needs {names_of([name])}")
    latency_s = (args.disk_latency_us or 0.0) * 1e-6
    read, write = (LinkSpeed(getattr(args, name), latency_s) for name in speeds)
    return DiskTierSettings(_blocks(args, "disk_cache", bytes_per_block), bytes_per_block, read, write)


def _kv_budget(args: argparse.Namespace) -> KVBudget | None:
    if args.kv_budget is None:
        _refuse(args, ("kv_keep", "kv_seed"), "needs --kv-budget")
        return None
    if (args.preemption or "recompute") != "recompute":
        raise PagedKVError("--kv-budget does not go with swapping: leave out --preemption")
    return KVBudget(args.kv_budget, args.kv_keep or RULES[0], args.kv_seed or 0)


def _blocks(args: argparse.Namespace, name: str, bytes_per_block: int) -> int:
    blocks = int(getattr(args, name) // bytes_per_block)
    if not blocks:
        raise PagedKVError(f"{names_of([name])} holds no block of {bytes_per_block:,} bytes: give it more")
    return blocks


def _speculation(args: argparse.Namespace) -> Speculation | None:
    if args.drafts is None:
        _refuse(args, ("accept_rate", "draft_ms", "draft_seed"), "needs --drafts")
        return None
    if args.accept_rate is None:
        raise PagedKVError("--drafts needs --accept-rate")
    return Speculation(args.drafts, args.accept_rate, args.draft_seed or 0, (args.draft_ms or 0.0) * 1e-3)


def _link(args: argparse.Namespace, name: str, whose: str) -> LinkSpeed:
    bandwidth = getattr(args, f"{name}_bandwidth")
    if bandwidth is None:
        raise PagedKVError(f"{whose} needs --{name}-bandwidth")
    return LinkSpeed(bandwidth, (getattr(args, f"{name}_latency_us") or 0.0) * 1e-6)


def _refuse(args: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    stated: list[Any] = [name for name in names if getattr(args, name) is not None]
    if stated:
        raise PagedKVError(f"{names_of(stated)} {why}")
