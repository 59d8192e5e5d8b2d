"""Interleaved rounds: what disturbs the machine disturbs all alike, and ratios within a round hold."""

import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

import torch

from pagedkv.attention.bench.contender import Contender

MOST_ROUNDS = 200

# Who needs more than this share of the time of a cell for one call is left out of the later rounds.
SLOW_SHARE = 0.03

# About a millisecond, in which the host gets ahead: what is timed are kernels, not their launches.
HEAD_START_CYCLES = 2_000_000

Clock = Literal["wall", "cpu"]
Round = dict[str, float]
"""Seconds by the name of the contender."""


def interleaved(
    contenders: Sequence[Contender],
    num_sets: int,
    *,
    seconds: float,
    least_rounds: int,
    device: str = "cpu",
    clock: Clock = "wall",
) -> list[Round]:
    """Rounds in which everybody is called once, at first, and later those who are quick.

    Each call takes the next set, whoever calls. The order is another in every round (from a fixed seed): who
    comes after whom matters, since a call finds caches and threads as the one before has left them.

    Args:
        contenders: at least one.
        num_sets: sets that take turns.
        seconds: time for rounds beyond the first ``least_rounds``, in which all take part.
        device, clock: see `call_seconds`.
    """
    rounds: list[Round] = []
    order = random.Random(0)
    calls = 0
    active = list(contenders)
    end = time.perf_counter()
    while len(rounds) < least_rounds or (len(rounds) < MOST_ROUNDS and time.perf_counter() < end):
        spent = {}
        for contender in order.sample(active, len(active)):
            spent[contender.name] = call_seconds(contender, calls % num_sets, device, clock)
            calls += 1
        rounds.append(spent)
        if len(rounds) == least_rounds:
            limit = SLOW_SHARE * seconds
            active = [c for c in active if median_seconds(rounds, c.name) <= limit] or active[:1]
            end = time.perf_counter() + seconds
    return rounds


def call_seconds(contender: Contender, index: int, device: str, clock: Clock = "wall") -> float:
    """Seconds of one call.

    On a CPU wall time, or with clock "cpu" the time that the calling thread really ran, which is fair to all
    on a machine that others use too, as long as nothing is left to other threads. On a GPU the time between
    two events around the kernels.
    """
    if torch.device(device).type == "cuda":
        return _gpu_seconds(contender, index)
    now = time.thread_time if clock == "cpu" else time.perf_counter
    start = now()
    contender.call(index)
    return now() - start


def median_seconds(rounds: Sequence[Round], name: str) -> float:
    """Over the rounds in which the contender took part."""
    return median(spent[name] for spent in rounds if name in spent)


def median_ratio(rounds: Sequence[Round], above: str, below: str) -> float:
    """Of the seconds of two contenders, over the rounds in which both took part."""
    return median(spent[above] / spent[below] for spent in rounds if above in spent and below in spent)


def _gpu_seconds(contender: Contender, index: int) -> float:
    cuda: Any = torch.cuda  # some of it has no types
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(HEAD_START_CYCLES)
    start.record()
    contender.call(index)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
