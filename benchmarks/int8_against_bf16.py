"""Decode attention of int8 against bf16 blocks in one run: both pools side by side, called in random order.

    python benchmarks/int8_against_bf16.py --batch 8 --context 1024

A layer of Llama-3-8B, blocks of 16, cold: every call reads other blocks of a pool of 512 MiB or more. Prints
the median microseconds of each, its share of a read-only pass, and the median of the ratios within a round.
"""

import argparse
import random
import statistics

import torch

from pagedkv.attention.bench.cell import Cell, ColdSets
from pagedkv.attention.bench.contender import Contender
from pagedkv.attention.bench.measure import backend_contender
from pagedkv.attention.bench.read_ceiling import read_ceiling
from pagedkv.attention.bench.rounds import call_seconds

COLD_BYTES = 2**29


def contenders_of(dtype: str, batch: int, context: int) -> tuple[Contender, Contender, int]:
    """The native backend, the read-only pass, and how many sets of blocks take turns."""
    sets = ColdSets(Cell((context,) * batch, dtype, 16, 32, 8, 128), COLD_BYTES)
    return backend_contender(sets, "native"), read_ceiling(sets)[0], len(sets)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    order, calls = random.Random(0), 0
    entrants: dict[str, tuple[Contender, int]] = {}
    for dtype in ("bf16", "int8"):
        attend, read, num_sets = contenders_of(dtype, args.batch, args.context)
        entrants[dtype], entrants[f"{dtype} read"] = (attend, num_sets), (read, num_sets)
    rounds: list[dict[str, float]] = []
    for _ in range(args.rounds):
        spent = {}
        for name in order.sample(list(entrants), len(entrants)):
            contender, num_sets = entrants[name]
            spent[name] = call_seconds(contender, calls % num_sets, "cpu")
            calls += 1
        rounds.append(spent)
    print(f"{args.batch} x {args.context:,} tokens, {args.rounds} rounds, {torch.get_num_threads()} threads")
    for dtype in ("bf16", "int8"):
        micros = statistics.median(spent[dtype] for spent in rounds) * 1e6
        share = statistics.median(spent[f"{dtype} read"] / spent[dtype] for spent in rounds)
        print(f"{dtype}: {micros:,.0f} us, {share:.0%} of the read-only pass")
    ratio = statistics.median(spent["bf16"] / spent["int8"] for spent in rounds)
    print(f"int8 has {ratio:.2f} times the tokens per second of bf16")


if __name__ == "__main__":
    main()
