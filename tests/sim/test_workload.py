"""The built-in workload, against the statistics of the trace that it is fitted to."""

import hashlib
import os
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.sim.mooncake import read_mooncake
from pagedkv.sim.trace import Trace, TraceError
from pagedkv.sim.workload import chat_long

UNLIMITED = 10**9
SEEDS = range(10)

# Facts about kvcache-ai/Mooncake at 3b5a594, FAST25-release/traces/conversation_trace.jsonl
# (12,031 requests).
REAL_LENGTHS = {
    "requests per second": 3.4015,
    "input mean": 12035.06,
    "input p50": 6909.0,
    "input p90": 27367.0,
    "input p99": 85400.4,
    "output mean": 342.62,
    "output p50": 350.0,
    "output p90": 597.0,
    "output p99": 1118.5,
}
REAL_INPUT_TOKENS = 144_793_823
REAL_HIT_TOKENS = {
    UNLIMITED: 54_063_104,
    30_000: 48_812_544,
    10_000: 31_746_560,
    5_000: 17_506_816,
    2_000: 8_163_328,
}
REAL_HEAD_HIT_RATES = {  # (first requests, capacity in blocks)
    (1_000, UNLIMITED): 2_959_360 / 13_732_944,
    (4_000, UNLIMITED): 17_639_424 / 53_249_359,
    (1_000, 5_000): 1_442_304 / 13_732_944,
    (4_000, 5_000): 6_244_352 / 53_249_359,
}


def lengths(trace: Trace) -> dict[str, float]:
    """Return the statistics named in REAL_LENGTHS."""
    found = {"requests per second": len(trace) / float(trace.arrival_s[-1])}
    for name, values in (("input", trace.input_len), ("output", trace.output_len)):
        found[f"{name} mean"] = float(values.mean())
        for percent in (50, 90, 99):
            found[f"{name} p{percent}"] = float(np.percentile(values, percent))
    return found


def hit_tokens(trace: Trace, capacity: int) -> int:
    """Return the prompt tokens found cached: leading full blocks, LRU, the deepest block touched first."""
    ids, offsets = trace.content_ids.tolist(), trace.content_offsets.tolist()
    full_blocks = (trace.input_len // trace.content_block_size).tolist()
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for start, num_full in zip(offsets, full_blocks, strict=False):
        blocks = ids[start : start + num_full]
        hits += next((depth for depth, block in enumerate(blocks) if block not in cache), num_full)
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits * trace.content_block_size


def hit_rate(trace: Trace, capacity: int) -> float:
    return hit_tokens(trace, capacity) / int(trace.input_len.sum())


def digest(trace: Trace) -> str:
    columns = (trace.arrival_s, trace.input_len, trace.output_len, trace.content_ids, trace.content_offsets)
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


@pytest.fixture(scope="module")
def full_size() -> list[Trace]:
    return [chat_long(12_031, seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def real() -> Trace:
    return read_mooncake(Path(os.environ["PAGEDKV_DATA"], "traces/mooncake/conversation_trace.jsonl.gz"))


class TestFit:
    """Means over ten seeds at the real trace's size."""

    @pytest.mark.parametrize("statistic", REAL_LENGTHS)
    def test_rate_and_lengths_are_those_of_the_real_trace(
        self, full_size: list[Trace], statistic: str
    ) -> None:
        generated = np.mean([lengths(trace)[statistic] for trace in full_size])
        tolerance = {"requests per second": 0.02, "input p99": 0.05, "output p99": 0.06}.get(statistic, 0.03)
        assert generated == pytest.approx(REAL_LENGTHS[statistic], rel=tolerance)

    @pytest.mark.parametrize("capacity", REAL_HIT_TOKENS)
    def test_hit_rates_are_those_of_the_real_trace(self, full_size: list[Trace], capacity: int) -> None:
        generated = np.mean([hit_rate(trace, capacity) for trace in full_size])
        assert generated == pytest.approx(REAL_HIT_TOKENS[capacity] / REAL_INPUT_TOKENS, abs=0.015)

    @pytest.mark.parametrize(("limit", "capacity"), REAL_HEAD_HIT_RATES)
    def test_hit_rates_of_the_beginning_are_those_of_the_real_trace(
        self, full_size: list[Trace], limit: int, capacity: int
    ) -> None:
        generated = np.mean([hit_rate(trace.head(limit), capacity) for trace in full_size])
        assert generated == pytest.approx(REAL_HEAD_HIT_RATES[limit, capacity], abs=0.02)

    def test_arrivals_come_in_batches_three_seconds_apart(self, full_size: list[Trace]) -> None:
        ticks, sizes = np.unique(full_size[0].arrival_s, return_counts=True)
        assert set(np.diff(ticks)) == {3.0}
        assert sizes.mean() == pytest.approx(10.2, rel=0.05) and sizes.var() == pytest.approx(11.2, rel=0.25)

    def test_the_default_resembles_the_real_traces_beginning(self) -> None:
        """The first 2,000 real requests: 2.99 per second, mean input 13,721 and output 352, 29.4 % hits."""
        trace = chat_long()
        assert len(trace) == 2000
        found = lengths(trace)
        assert found["requests per second"] == pytest.approx(2.99, rel=0.2)
        assert found["input mean"] == pytest.approx(13_721, rel=0.15)
        assert found["output mean"] == pytest.approx(352, rel=0.1)
        assert hit_rate(trace, UNLIMITED) == pytest.approx(0.294, abs=0.03)


class TestStructure:
    def test_every_chat_begins_with_the_one_system_prompt(self) -> None:
        trace = chat_long(500)
        assert (trace.content_ids[trace.content_offsets[:-1]] == 0).all()
        assert (trace.name, trace.content_block_size) == ("chat-long", 512)

    def test_equal_ids_mean_equal_prefixes(self) -> None:
        trace = chat_long(2000, seed=5)
        parent: dict[int, int] = {}
        for i in range(len(trace)):
            row = trace.content_ids[trace.content_offsets[i] : trace.content_offsets[i + 1]].tolist()
            for before, block in zip([-1, *row], row, strict=False):
                assert parent.setdefault(block, before) == before

    def test_partial_last_blocks_are_never_shared(self) -> None:
        trace = chat_long(2000, seed=5)
        last = trace.content_ids[trace.content_offsets[1:] - 1][trace.input_len % 512 > 0]
        assert (np.bincount(trace.content_ids)[last] == 1).all()

    def test_ids_are_dense_in_order_of_appearance(self) -> None:
        trace = chat_long(300, seed=2)
        ids, first = np.unique(trace.content_ids, return_index=True)
        assert ids.tolist() == list(range(trace.num_contents))
        assert (np.diff(first) > 0).all()

    def test_lengths_stay_in_the_real_range(self, full_size: list[Trace]) -> None:
        for trace in full_size:
            assert trace.input_len.min() >= 891 and trace.input_len.max() <= 126_195
            assert trace.output_len.min() >= 1 and trace.output_len.max() <= 2000


class TestDeterminism:
    GOLDEN = "2881bd6e0e4dc9ee032c185524ca3acd61bf30101b761990b9a3d3ab54cd02d0"

    def test_the_default_is_the_same_everywhere(self) -> None:
        assert digest(chat_long()) == self.GOLDEN

    def test_another_process_makes_the_same_bytes(self) -> None:
        code = (
            "from pagedkv.sim.workload import chat_long; print(chat_long(50, 3).content_ids.tobytes().hex())"
        )
        environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
        output = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout
        assert bytes.fromhex(output) == chat_long(50, 3).content_ids.tobytes()

    def test_seeds_differ(self) -> None:
        assert len({digest(chat_long(50, seed)) for seed in range(5)}) == 5


class TestArguments:
    @pytest.mark.parametrize("num_requests", [0, -1, True, 2.0, None])
    def test_a_number_of_requests_below_one_is_refused(self, num_requests: Any) -> None:
        with pytest.raises(TraceError, match="num_requests must be an integer of at least 1"):
            chat_long(num_requests)

    @pytest.mark.parametrize("seed", [-1, True, "0", None])
    def test_a_seed_that_is_no_count_is_refused(self, seed: Any) -> None:
        with pytest.raises(TraceError, match="seed must be an integer of at least 0"):
            chat_long(10, seed)

    @pytest.mark.parametrize("num_requests", [1, 2, 17])
    def test_any_number_of_requests_is_delivered(self, num_requests: int) -> None:
        for seed in range(20):
            assert len(chat_long(num_requests, seed)) == num_requests

    def test_twenty_thousand_requests_are_quick(self) -> None:
        start = time.perf_counter()
        chat_long(20_000)
        assert time.perf_counter() - start < 6.0


@pytest.mark.skipif("PAGEDKV_DATA" not in os.environ, reason="PAGEDKV_DATA is not set: no trace files")
class TestFacts:
    """The numbers at the top of this file, recounted from the real trace."""

    def test_lengths(self, real: Trace) -> None:
        assert lengths(real) == pytest.approx(REAL_LENGTHS, rel=1e-4)
        assert int(real.input_len.sum()) == REAL_INPUT_TOKENS
        assert (int(real.input_len.min()), int(real.input_len.max())) == (891, 126_195)

    @pytest.mark.parametrize("capacity", REAL_HIT_TOKENS)
    def test_hits(self, real: Trace, capacity: int) -> None:
        assert hit_tokens(real, capacity) == REAL_HIT_TOKENS[capacity]

    @pytest.mark.parametrize(("limit", "capacity"), REAL_HEAD_HIT_RATES)
    def test_hits_of_the_beginning(self, real: Trace, limit: int, capacity: int) -> None:
        assert hit_rate(real.head(limit), capacity) == REAL_HEAD_HIT_RATES[limit, capacity]

    def test_beginning(self, real: Trace) -> None:
        head = real.head(2000)
        assert lengths(head)["requests per second"] == pytest.approx(2.99, rel=0.01)
        assert lengths(head)["input mean"] == pytest.approx(13_721, rel=1e-3)
        assert lengths(head)["output mean"] == pytest.approx(352, rel=0.01)
        assert hit_rate(head, UNLIMITED) == pytest.approx(0.294, abs=1e-3)

    def test_batches(self, real: Trace) -> None:
        ticks, sizes = np.unique(real.arrival_s, return_counts=True)
        assert len(ticks) == 1180 and np.abs(np.diff(ticks) - 3.0).max() < 0.01
        assert sizes.mean() == pytest.approx(10.2, rel=0.01) and sizes.var() == pytest.approx(11.2, rel=0.01)
