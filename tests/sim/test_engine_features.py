"""Each feature of the engine loop, by examples worked out by hand."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import NeverFits, PagedKVError, SpecError
from pagedkv.manager import KVCacheManager
from pagedkv.policies import POLICIES
from pagedkv.sim.engine.arrivals import Arrivals
from pagedkv.sim.engine.conservation import check_disk, check_link, check_pool, check_tokens
from pagedkv.sim.engine.disaggregation import Disaggregated, TransferSettings
from pagedkv.sim.engine.disk_tier import DiskTierSettings
from pagedkv.sim.engine.engine import Engine, EngineConfig
from pagedkv.sim.engine.host_tier import HostTierSettings
from pagedkv.sim.engine.hybrid_pool import HybridPool, hybrid_block_bytes
from pagedkv.sim.engine.kv_budget import RULES, KVBudget
from pagedkv.sim.engine.link import Link, LinkSpeed
from pagedkv.sim.engine.speculation import Guesses, Speculation
from pagedkv.sim.engine.swapping import SwapSettings
from pagedkv.sim.engine.waiting import QUEUES
from pagedkv.sim.output.records import Records, StepLog
from pagedkv.sim.output.report import replay_document
from pagedkv.sim.replay import ReplaySetup, blocks_in_memory, run_replay
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.timing.roofline import Roofline
from pagedkv.sim.timing.tensor_parallel import TensorParallel, TensorParallelStepTime, shard
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long
from pagedkv.spec import KVCacheSpec, LayerSpec

SIZE = 4
SPEC = KVCacheSpec.uniform(num_layers=2, num_kv_heads=1, head_dim=8, block_size=SIZE)


def steady(launch_s: float = 1.0, per_token_s: float = 0.0) -> Roofline:
    """A step takes ``launch_s``, and ``per_token_s`` for each token that it computes."""
    flops = per_token_s * 1e6
    return Roofline(launch_s, math.inf, math.inf, 1e6, 0.0, flops_per_token=flops)


def lengths(inputs: list[int], outputs: list[int], arrivals: list[float] | None = None, **more: Any) -> Trace:
    offsets = np.zeros(len(inputs) + 1, np.int64)
    arrival: Any = [0.0] * len(inputs) if arrivals is None else arrivals
    empty: Any = np.empty(0, np.int32)
    return Trace("made", arrival, inputs, outputs, empty, offsets, 0, 0, **more)  # type: ignore[arg-type]


def equal_prompts(num: int, length: int, outputs: int, arrivals: list[float] | None = None) -> Trace:
    """Requests with one and the same prompt."""
    ids: Any = np.tile(np.arange(length), num)
    arrival: Any = [0.0] * num if arrivals is None else arrivals
    offsets: Any = np.arange(num + 1) * length
    return Trace("equal", arrival, [length] * num, [outputs] * num, ids, offsets, 1, length)  # type: ignore[arg-type]


def shared_prompts(rng: np.random.Generator, num: int) -> Trace:
    """Requests of up to 60 + 20 tokens that branch off three prompts."""
    ids, offsets, unused = [], [0], 300
    for _ in range(num):
        base, kept = int(rng.integers(3)), int(rng.integers(1, 50))
        own = int(rng.integers(1, 11))
        ids += [100 * base + i for i in range(kept)] + list(range(unused, unused + own))
        unused += own
        offsets.append(len(ids))
    arrival = np.sort(rng.random(num) * 40.0)
    outputs = rng.integers(1, 20, num)
    return Trace("branches", arrival, np.diff(offsets), outputs, np.array(ids), np.array(offsets), 1, unused)


def engine_of(trace: Trace, num_blocks: int, model: Any = None, **options: Any) -> Engine:
    config = EngineConfig(**{"interval_s": 1e6, **options})
    longest = int((trace.input_len + trace.output_len).max()) + config.num_drafts
    manager = KVCacheManager(num_blocks, SIZE, max_seqs=config.max_batch, max_seq_len=longest)
    return Engine(trace, manager, model or steady(), config)


def sorted_gaps(records: Records) -> list[float]:
    gaps = records.gaps()
    return sorted(np.repeat(*gaps.piece(0, len(gaps))).tolist())


def computed_tokens(records: Records) -> int:
    return sum(s.num_steps * s.num_prefill_tokens for s in records.steps)


class TestCoalescing:
    def test_two_equal_prompts_compute_the_shared_part_once(self) -> None:
        """40 tokens twice: 80, or 40 and the last block of 4, which a model has to run anyway."""
        trace = equal_prompts(2, 40, 3)
        assert computed_tokens(engine_of(trace, 100).run()) == 80
        engine = engine_of(trace, 100, coalesce=True)
        records = engine.run()
        assert computed_tokens(records) == 40 + 4
        assert (records.num_coalesced, records.hit_tokens) == (1, 36)
        assert records.first_token_s.tolist() == [1.0, 2.0]

    def test_who_shares_nothing_passes_by(self) -> None:
        """The third request starts with the first; the second waits for its prefix."""
        ids: Any = [*range(8), *range(8), *range(10, 18)]
        offsets: Any = [0, 8, 16, 24]
        trace = Trace("three", [0, 0, 0], [8] * 3, [1] * 3, ids, offsets, 1, 18)  # type: ignore[arg-type]
        records = engine_of(trace, 100, coalesce=True).run()
        assert records.first_token_s.tolist() == [1.0, 2.0, 1.0]

    def test_a_crowd_is_not_asked_again_at_every_step(self) -> None:
        """200 equal prompts behind a prefill of 50 steps: each is passed over once, not 50 times."""
        trace = equal_prompts(200, 400, 1)
        records = engine_of(trace, 400, coalesce=True, max_batch=8, token_budget=8, interval_s=0.9).run()
        assert records.num_coalesced <= 200
        assert computed_tokens(records) == 400 + 199 * 4


class TestPartialHits:
    def test_the_hit_ends_inside_a_block(self) -> None:
        """Six of eight tokens are shared: a block of four, or all six, with one block copied."""
        ids: Any = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 8, 9]
        arrival: Any = [0.0, 5.0]
        trace = Trace("partial", arrival, [8, 8], [1, 1], ids, [0, 8, 16], 1, 10)  # type: ignore[arg-type]
        for partial, hit, copied in ((False, 4, 0), (True, 6, 1)):
            engine = engine_of(trace, 20, partial_hits=partial)
            records = engine.run()
            assert (records.hit_tokens, engine.manager.stats().copied_blocks) == (hit, copied)
            assert computed_tokens(records) == 16 - hit


class TestSwapping:
    TRACE = lengths([8, 8], [9, 9])

    def run(self, **link: float) -> Engine:
        swap = SwapSettings(10, 100, LinkSpeed(**{"bytes_per_s": 100.0, **link}), always=True)
        engine = engine_of(self.TRACE, 6, swap=swap)
        engine.run()
        check_pool(engine)
        return engine

    def test_bytes_on_the_link_are_blocks_times_bytes(self) -> None:
        """Both grow to 12 tokens in 3 blocks; one goes out, and loses a cached block to the other."""
        engine = self.run()
        assert engine.host.swapper is not None
        stats, records = engine.host.swapper.space.stats(), engine.records
        assert (records.num_preemptions, records.num_swapped_out) == (1, 1)
        assert (stats.copied_out_blocks, stats.copied_in_blocks, stats.hit_blocks) == (3, 1, 2)
        assert engine.host.swapper.link.num_bytes == 400
        assert computed_tokens(records) == 16  # nothing was computed twice

    def test_the_others_wait_for_the_way_out_and_not_for_the_way_back(self) -> None:
        """A step, and a block on the link, take 1 s each; who comes back lacks one block."""
        engine = self.run()
        # prompts by 1 s, tokens 2..5 by 5 s, copies out by 8 s, four tokens by 12 s, a block by 13 s
        assert engine.records.stall_s == 3.0
        assert engine.records.finish_s.tolist() == [12.0, 17.0]
        assert sorted_gaps(engine.records) == [1.0] * 14 + [4.0, 9.0]

    def test_what_is_no_longer_cached_comes_back_over_the_link(self) -> None:
        """Without a prefix cache all three blocks do, and each way has its latency."""
        swap = SwapSettings(10, 100, LinkSpeed(100.0, 0.5), always=True)
        manager = KVCacheManager(6, SIZE, max_seqs=256, max_seq_len=20, policy=None)
        engine = Engine(self.TRACE, manager, steady(), EngineConfig(interval_s=1e6, swap=swap))
        engine.run()
        assert engine.host.swapper is not None
        assert (engine.host.swapper.link.num_transfers, engine.host.swapper.link.num_bytes) == (2, 600)
        assert engine.host.swapper.link.busy_s == 2 * (0.5 + 3.0)
        assert engine.records.finish_s.tolist() == [12.5, 12.5 + 3.5 + 4]

    def test_a_full_host_leaves_nothing_but_computing_again(self) -> None:
        """Two host blocks do not take three."""
        swap = SwapSettings(2, 100, LinkSpeed(100.0), always=True)
        engine = engine_of(self.TRACE, 6, swap=swap)
        records = engine.run()
        assert (records.num_preemptions, records.num_swapped_out, records.stall_s) == (1, 0, 0.0)

    @pytest.mark.parametrize(("bandwidth", "swapped"), [(100.0, 0), (1e4, 1)])
    def test_auto_compares_the_link_with_the_prefill(self, bandwidth: float, swapped: int) -> None:
        """12 tokens at 0.01 s each: 0.12 s, against 6 blocks of 100 bytes both ways."""
        swap = SwapSettings(10, 100, LinkSpeed(bandwidth))
        engine = engine_of(self.TRACE, 6, steady(0.0, 0.01), swap=swap)
        assert engine.run().num_swapped_out == swapped

    def test_the_link_is_shared(self) -> None:
        """Transfers never take less time than their bytes at the stated bandwidth, all together."""
        trace = lengths([6] * 12, [30] * 12)
        swap = SwapSettings(200, 100, LinkSpeed(70.0), always=True)
        engine = engine_of(trace, 24, swap=swap)
        records = engine.run()
        assert engine.host.swapper is not None and records.num_swapped_out > 4
        assert engine.host.swapper.link.num_bytes / 70.0 <= records.finish_s.max()
        check_pool(engine)


class TestHostTier:
    TIER = HostTierSettings(100, 100, LinkSpeed(100.0))

    def engine(self, trace: Trace, num_blocks: int, **options: Any) -> Engine:
        return engine_of(trace, num_blocks, host_tier=self.TIER, **options)

    def test_what_the_device_lost_comes_back_over_the_link(self) -> None:
        """Prompts of 5 blocks in a pool of 6: the third finds the first on the host, and computes a block."""
        ids: Any = [*range(20), *range(20, 40), *range(20)]
        arrival: Any = [0.0, 50.0, 100.0]
        trace = Trace("three", arrival, [20] * 3, [2] * 3, ids, [0, 20, 40, 60], 1, 40)  # type: ignore[arg-type]
        engine = self.engine(trace, 6)
        records = engine.run()
        tier = engine.host.tier
        assert tier is not None
        # the last block of a prompt has to be run: of the five two survived on the device, two are read
        found = engine.manager.stats().hit_tokens // SIZE
        assert (tier.num_stored, tier.num_loaded) == (10, 4 - found)
        assert computed_tokens(records) == 20 + 20 + 4
        assert records.first_token_s[2] == 100.0 + tier.num_loaded + 1.0
        check_pool(engine)

    def test_nobody_takes_a_block_that_is_being_written(self) -> None:
        """Five blocks are written by 6 s; until then the next prompt of five has no room in a pool of 6."""
        trace = lengths([20, 20], [1, 1])
        assert engine_of(trace, 6).run().first_token_s.tolist() == [1.0, 2.0]
        assert self.engine(trace, 6).run().first_token_s.tolist() == [1.0, 7.0]

    def test_equal_blocks_are_written_once(self) -> None:
        """Ten requests with one prompt of five blocks: 500 bytes."""
        engine = self.engine(equal_prompts(10, 20, 2), 100)
        engine.run()
        assert engine.host.link is not None
        assert engine.host.link.num_bytes == 500

    def test_a_prompt_larger_than_the_host_is_kept_in_part(self) -> None:
        """Three host blocks of a prompt of five."""
        tier = HostTierSettings(3, 100, LinkSpeed(100.0))
        engine = engine_of(lengths([20], [1]), 6, host_tier=tier)
        engine.run()
        assert engine.host.tier is not None and engine.host.tier.num_stored == 3
        check_pool(engine)

    def test_two_links_to_one_host_are_refused(self) -> None:
        """Swapping and the tier share one."""
        swap = SwapSettings(3, 100, LinkSpeed(99.0))
        with pytest.raises(PagedKVError, match="one link to the host"):
            EngineConfig(swap=swap, host_tier=self.TIER)


class TestDiskTier:
    HOST = HostTierSettings(5, 100, LinkSpeed(100.0))
    DISK = DiskTierSettings(100, 100, read=LinkSpeed(50.0), write=LinkSpeed(100.0))

    def engine(self, disk: DiskTierSettings | None = DISK, arrival_s: float = 100.0) -> Engine:
        """Prompts A, B, A of 5 blocks, on a device of 6 and a host of 5 blocks."""
        ids: Any = [*range(20), *range(20, 40), *range(20)]
        arrival: Any = [0.0, 50.0, arrival_s]
        trace = Trace("three", arrival, [20] * 3, [2] * 3, ids, [0, 20, 40, 60], 1, 40)  # type: ignore[arg-type]
        engine = engine_of(trace, 6, host_tier=self.HOST, disk_tier=disk)
        engine.run()
        check_pool(engine)
        return engine

    def test_what_the_host_lost_is_read_and_then_sent(self) -> None:
        """Four blocks of A: two seconds each from the disk, then a second each over the link; then a step."""
        engine = self.engine()
        tier = engine.host.tier
        assert tier is not None and tier.disk is not None
        found = engine.manager.stats().hit_tokens // SIZE
        assert (tier.disk.num_read, tier.num_loaded) == (4, 4 - found)
        assert engine.records.first_token_s[2] == 100.0 + 8.0 + tier.num_loaded + 1.0
        assert computed_tokens(engine.records) == 20 + 20 + 4

    def test_a_prefix_is_written_once(self) -> None:
        """A for B's five blocks, B for the four of A that come back; the last block of B is there already."""
        tier = self.engine().host.tier
        assert tier is not None and tier.disk is not None
        assert tier.disk.num_written == 10
        assert (tier.disk.write_link.num_bytes, tier.disk.read_link.num_bytes) == (1000, 400)

    def test_a_read_waits_for_the_writes(self) -> None:
        """B is on the host at 51 s, from when on A is written for 5 s; A is asked for at 53 s."""
        engine = self.engine(arrival_s=53.0)
        tier = engine.host.tier
        assert tier is not None and tier.disk is not None
        asked_s = float(engine.records.arrival_s[2])  # type: ignore[index]
        assert asked_s == 53.0
        # B's blocks are pinned until they are on the host, at 56 s; the disk is free then
        assert engine.records.first_token_s[2] == 56.0 + 8.0 + tier.num_loaded + 1.0

    def test_without_a_disk_it_is_computed_again(self) -> None:
        """The host has nothing of A."""
        engine = self.engine(None)
        found = engine.manager.stats().hit_tokens
        assert computed_tokens(engine.records) == 60 - found

    def test_a_small_disk_keeps_what_was_used_last(self) -> None:
        """Room for two blocks: the first two of A are read, if nothing else came since."""
        engine = self.engine(replace(self.DISK, num_blocks=2))
        tier = engine.host.tier
        assert tier is not None and tier.disk is not None
        assert tier.disk.num_read <= 2
        assert tier.disk.pool.stats().evicted_blocks > 0

    def test_a_disk_needs_a_host(self) -> None:
        """It keeps what leaves that."""
        with pytest.raises(PagedKVError, match="no host cache"):
            EngineConfig(disk_tier=self.DISK)

    def test_bytes_that_no_block_explains_are_told(self) -> None:
        """The check of a run can fail: a block that was not counted, a disk that did two things at once."""
        tier = self.engine().host.tier
        assert tier is not None and tier.disk is not None
        tier.disk.num_read += 1
        with pytest.raises(AssertionError, match="400 bytes on the link, 500 in blocks"):
            check_disk(tier.disk, 100)
        tier.disk.num_read -= 1
        check_disk(tier.disk, 100)
        tier.disk.read_link._queue.free_s = 10.0
        with pytest.raises(AssertionError, match=r"busy 18\.0 s until 10\.0 s"):
            check_disk(tier.disk, 100)


class TestBudget:
    def engine(self, inputs: list[int], outputs: list[int], tokens: int = 12, **options: Any) -> Engine:
        engine = engine_of(lengths(inputs, outputs), 100, kv_budget=KVBudget(tokens), **options)
        engine.run()
        check_pool(engine)
        return engine

    def test_a_step_reads_what_is_kept(self) -> None:
        """20 tokens are cut to 8, which grow to 12 with the tokens of four steps; then a block goes."""
        engine = self.engine([20], [9])
        decoding = [(s.num_steps, s.context_tokens) for s in engine.records.steps if s.num_decoding]
        assert decoding == [(4, 9), (4, 9)]
        assert engine.keeper is not None and engine.keeper.num_dropped == 4
        assert engine.records.occupancy.peak_active_blocks == 5

    def test_a_large_budget_changes_nothing(self) -> None:
        """As many tokens as there ever are."""
        plain = engine_of(lengths([20, 7], [9, 30]), 100).run()
        engine = self.engine([20, 7], [9, 30], tokens=40)
        assert engine.keeper is not None and engine.keeper.num_dropped == 0
        assert engine.records.finish_s.tolist() == plain.finish_s.tolist()

    def test_budgets_let_more_sequences_decode_at_once(self) -> None:
        """Four outputs of 40 tokens in a pool of 14 blocks: without a budget somebody is preempted."""
        trace = lengths([4] * 4, [40] * 4)
        assert engine_of(trace, 14).run().num_preemptions > 0
        engine = engine_of(trace, 14, kv_budget=KVBudget(12))
        records = engine.run()
        check_pool(engine)
        assert records.num_preemptions == 0
        assert records.occupancy.peak_active_blocks == 12

    def test_what_is_dropped_in_one_piece_is_still_a_hit(self) -> None:
        """Blocks 1..7 of ten go, so eight are found by the next; a random choice leaves a gap earlier."""
        hits = {}
        for rule in RULES:
            arrival = [0.0, 50.0]
            engine = engine_of(equal_prompts(2, 40, 30, arrival), 100, kv_budget=KVBudget(16, rule, seed=3))
            hits[rule] = engine.run().hit_tokens
        assert hits["streaming"] == 32
        assert hits["heavy-hitters"] < 32

    def test_budgets_that_cannot_work_are_refused(self) -> None:
        """No room for the first block, the newest and a step; and what cannot be swapped or is hybrid."""
        with pytest.raises(PagedKVError, match="must hold 3 blocks of 4 tokens"):
            self.engine([4], [4], tokens=11)
        with pytest.raises(PagedKVError, match="must hold 4 blocks"):
            self.engine([4], [4], tokens=15, speculation=Speculation(4, 0.5))
        with pytest.raises(PagedKVError, match="cannot be swapped"):
            EngineConfig(kv_budget=KVBudget(12), swap=SwapSettings(1, 1, LinkSpeed(1.0)))


class TestSpeculation:
    @pytest.mark.parametrize(("drafts", "rate"), [(1, 0.6), (3, 0.5), (4, 0.8), (7, 0.9)])
    def test_tokens_per_step_are_as_many_as_expected(self, drafts: int, rate: float) -> None:
        """``(1 - p^(k+1)) / (1 - p)``, over 40,000 tokens, to four standard errors."""
        trace = lengths([4] * 8, [5000] * 8)
        speculation = Speculation(drafts, rate, seed=3)
        records = engine_of(trace, 20_000, speculation=speculation, max_batch=8).run()
        steps = sum(s.num_steps * s.num_decoding for s in records.steps)
        mean = (steps + records.accepted_tokens) / steps
        assert speculation.expected_tokens == pytest.approx(sum(rate**i for i in range(drafts + 1)))
        assert abs(mean - speculation.expected_tokens) < 4 * (drafts / 2) / math.sqrt(steps)

    def test_right_guesses_divide_the_steps(self) -> None:
        """41 tokens: one from the prefill, then 40 in tens of four, with a gap of a second per four."""
        trace = lengths([8], [41])
        records = engine_of(trace, 20, speculation=Speculation(3, 1.0)).run()
        assert records.finish_s.tolist() == [11.0]
        assert sorted_gaps(records) == [0.0] * 30 + [1.0] * 10
        assert (records.drafted_tokens, records.accepted_tokens) == (30, 30)

    def test_wrong_guesses_cost_slots_and_no_tokens(self) -> None:
        """One token a step, in room for four; the last token is cut to the output's length."""
        trace = lengths([8], [5])
        engine = engine_of(trace, 4, speculation=Speculation(3, 0.0))
        records = engine.run()
        assert records.finish_s.tolist() == [5.0]
        assert records.accepted_tokens == 0
        assert records.occupancy.peak_used_slots == 8 + 4 + 3
        with pytest.raises(NeverFits, match="needs 4 blocks"):
            engine_of(trace, 3, speculation=Speculation(3, 0.0))

    def test_verifying_costs_what_a_prompt_chunk_behind_the_context_does(self) -> None:
        """Three tokens of each of two sequences a step, each 0.1 s, and 0.05 s to draft each of two."""
        trace = lengths([4, 4], [4, 4])
        model = steady(1.0, 0.1)
        records = engine_of(trace, 20, model, speculation=Speculation(2, 1.0, draft_s=0.05)).run()
        # Roofline takes the longer of compute and weights, so a step is 1 + 0.1 * tokens
        np.testing.assert_allclose(records.finish_s, [1.8 + 1.6 + 0.1] * 2)

    def test_guesses_do_not_depend_on_who_else_runs(self) -> None:
        """The same output positions are right in any order of asking."""
        trace = lengths([4, 4], [50, 50])
        one, other = (Guesses(Speculation(3, 0.5, seed=9), trace) for _ in range(2))
        first = one.tokens_of_step(np.array([0, 1]), np.array([7, 9]))
        other.tokens_of_step(np.array([1]), np.array([30]))
        assert other.tokens_of_step(np.array([1, 0]), np.array([9, 7])).tolist() == first[::-1].tolist()


class TestQueues:
    @pytest.mark.parametrize(
        ("queue", "order"),
        [("fcfs", [0, 1, 2]), ("priority", [2, 0, 1]), ("shortest", [1, 2, 0]), ("deadline", [1, 0, 2])],
    )
    def test_one_at_a_time_in_the_order_of_the_queue(self, queue: str, order: list[int]) -> None:
        """Three requests at once, one seat: first tokens in the stated order."""
        trace = lengths([12, 4, 8], [2, 2, 2], priority=[1, 1, -5], deadline_s=[10.0, 3.0, math.inf])
        records = engine_of(trace, 50, queue=queue, max_batch=1).run()
        assert np.argsort(records.first_token_s).tolist() == order

    @pytest.mark.parametrize("queue", QUEUES)
    def test_whom_the_queue_serves_last_is_preempted_first(self, queue: str) -> None:
        """Two sequences grow in a pool for one and a half; who came first has the worse place but in fcfs."""
        trace = lengths([9, 8], [9, 9], [0.0, 0.5], priority=[5, 1], deadline_s=[99.0, 9.0])
        records = engine_of(trace, 6, queue=queue).run()
        assert records.num_preemptions >= 1
        first = 0 if queue == "fcfs" else 1
        assert records.finish_s[first] < records.finish_s[1 - first]

    def test_prompts_first_makes_decodes_wait(self) -> None:
        """A prompt of three budgets comes while another decodes: a gap of four steps, or none."""
        trace = lengths([4, 30], [8, 1], [0.0, 1.5])
        for first, longest in ((False, 1.0), (True, 4.0)):
            options = {"prefill_first": first, "max_batch": 4, "token_budget": 10}
            records = engine_of(trace, 50, **options).run()
            assert max(sorted_gaps(records)) == longest
            assert records.gaps().total == 7


class TestSessions:
    def test_a_turn_comes_after_the_one_before_and_its_think_time(self) -> None:
        """The first ends at 3 s, and the next comes 10 s later; the last not before its own time, 50 s."""
        trace = lengths(
            [4, 4, 4], [3, 1, 1], [0.0, 0.0, 50.0], session=[3, 3, 3], think_s=[math.nan, 10.0, 10.0]
        )
        engine = engine_of(trace, 20)
        records = engine.run()
        assert records.arrival_s is not None
        assert records.arrival_s.tolist() == [0.0, 13.0, 50.0]
        assert records.first_token_s.tolist() == [1.0, 14.0, 51.0]

    def test_sessions_without_think_times_come_when_the_trace_says(self) -> None:
        """And follow-ups of different sessions do not wait for one another."""
        nan = math.nan
        trace = lengths([4] * 4, [1] * 4, session=[1, 2, 1, 2], think_s=[nan, nan, nan, 5.0])
        arrivals = Arrivals(trace)
        assert arrivals.take(0.0) == [0, 1, 2]
        arrivals.finished(0, 7.0)
        assert arrivals.next_s == math.inf
        arrivals.finished(1, 8.0)
        assert (arrivals.next_s, arrivals.take(12.9), arrivals.take(13.0)) == (13.0, [], [3])


class TestTensorParallel:
    def test_each_gpu_holds_its_heads_and_its_share_of_the_weights(self) -> None:
        """Llama-3.1-70B has 64 query and 8 kv heads: 1 kv head each on 8 GPUs, and on 16 every one twice."""
        whole = load_model("llama-3.1-70b")
        for num, heads in ((1, 8), (2, 4), (8, 1), (16, 1)):
            part = shard(whole, num)
            assert {layer.num_kv_heads for layer in part.spec.layers} == {heads}
            assert part.num_q_heads == 64 // num
            assert part.params_total == -(-whole.params_total // num)
            assert part.spec.bytes_per_block * 8 == whole.spec.bytes_per_block * heads

    def test_the_latent_of_mla_is_on_every_gpu(self) -> None:
        """It is one vector for all heads."""
        whole = load_model("deepseek-v2")
        assert shard(whole, 8).spec == whole.spec

    @pytest.mark.parametrize("num", [0, 3, 6, 128])
    def test_heads_that_do_not_come_out_even_are_refused(self, num: int) -> None:
        """32 query heads over 3, 6 or 128 GPUs."""
        with pytest.raises(SpecError, match="cannot be split"):
            shard(load_model("llama-3.1-8b"), num)

    def test_kv_heads_that_fit_neither_way_are_refused(self) -> None:
        """12 query heads and 8 kv heads over 12 GPUs."""
        model = replace(load_model("llama-3.1-8b"), num_q_heads=12)
        with pytest.raises(SpecError, match="8 kv heads can neither be split nor repeated evenly on 12 GPUs"):
            shard(model, 12)

    def test_a_step_is_longer_by_two_all_reduces_a_layer(self) -> None:
        """Two sequences over 4 GPUs: 32 layers x 2 x (5 us + 2 x 3/4 x 2 x 4096 x 2 bytes / 100 GB/s)."""
        model, gpu = load_model("llama-3.1-8b"), load_gpu("h100")
        part = shard(model, 4)
        base = Roofline.from_gpu(part, gpu)
        both = TensorParallelStepTime(base, part, TensorParallel(4, LinkSpeed(100e9, 5e-6)))
        contexts = np.array([1000, 3000])
        reduces = 64 * (5e-6 + 2 * 0.75 * 2 * 4096 * 2 / 100e9)
        logits = 5e-6 + 0.75 * 2 * 128256 * 2 / 100e9
        assert both.decode_s(contexts) - base.decode_s(contexts) == pytest.approx(reduces + logits, rel=1e-9)
        for k in (0, 5, 100):
            found = both.durations(contexts, [(0, 500)])(k) - base.durations(contexts, [(0, 500)])(k)
            assert found == pytest.approx(64 * (5e-6 + 1.5 * 502 * 8192 / 100e9) + logits, rel=1e-6)
        assert both.kv_bytes(contexts) == 4000 * model.spec.bytes_per_token // 4

    def test_more_gpus_hold_more_blocks_and_take_less_time(self) -> None:
        """70B on 4 and 8 GPUs, which one cannot hold."""
        gpu, whole = load_gpu("h100"), load_model("llama-3.1-70b")
        with pytest.raises(PagedKVError, match="does not fit"):
            blocks_in_memory(whole, gpu.memory_bytes, 0.9, 16)
        found = []
        for num in (4, 8):
            part = shard(whole, num)
            blocks = blocks_in_memory(part, gpu.memory_bytes, 0.9, 16)
            parallel = TensorParallel(num, LinkSpeed(450e9, 5e-6))
            result = run_replay(chat_long(30), ReplaySetup(part, gpu, blocks, tensor_parallel=parallel))
            assert result.features["tensor_parallel"]["gpus"] == num
            found.append((blocks, result.summary.tpot.mean, result.summary.ttft.mean))
        assert found[0][0] < found[1][0]
        assert found[0][1] > found[1][1]  # type: ignore[operator]
        assert found[0][2] > found[1][2]  # type: ignore[operator]


class TestDisaggregation:
    TRANSFER = TransferSettings(LinkSpeed(100.0, 0.25), 100)

    def run(self, trace: Trace, num_blocks: int = 50, **options: Any) -> tuple[Disaggregated, Records]:
        config = EngineConfig(**{"interval_s": 1e6, **options})
        longest = int((trace.input_len + trace.output_len).max())
        pools = [
            KVCacheManager(num_blocks, SIZE, max_seqs=config.max_batch, max_seq_len=longest) for _ in range(2)
        ]
        apart = Disaggregated(trace, (pools[0], pools[1]), steady(), config, self.TRANSFER)
        records = apart.run()
        for engine in (apart.prefill, apart.decode):
            check_pool(engine)
        check_tokens(trace, records)
        return apart, records

    def test_the_second_token_waits_for_the_transfer(self) -> None:
        """A prefill of 1 s, 3 blocks in 0.25 + 3 s, then a second a token."""
        apart, records = self.run(lengths([10], [4]))
        assert records.first_token_s.tolist() == [1.0]
        assert records.finish_s.tolist() == [1.0 + 3.25 + 3.0]
        assert records.transfer_s.tolist() == [3.25]
        assert sorted_gaps(records) == [1.0, 1.0, 4.25]
        assert apart.decode.link.num_bytes == 300

    def test_what_the_decoding_pool_has_is_not_sent(self) -> None:
        """The second prompt of 10 tokens is like the first: two of its three blocks are there."""
        apart, records = self.run(equal_prompts(2, 10, 4, [0.0, 20.0]))
        assert records.transfer_s.tolist() == [3.25, 1.25]
        assert apart.num_hit_tokens_not_sent == 8
        assert records.hit_tokens == 8  # and so they were where it was prefilled

    def test_a_single_token_is_never_sent(self) -> None:
        """It is made where the prompt is computed."""
        apart, records = self.run(lengths([10], [1]))
        assert records.finish_s.tolist() == [1.0]
        assert apart.decode.link.num_transfers == 0
        assert apart.decode.now == records.occupancy.seconds == 1.0  # idle, to the end of the run

    def test_the_timeline_has_the_hits_of_the_prefills(self) -> None:
        """8 tokens of the second prompt: it is looked up at 5 s, and waits for a seat until 7.25 s."""
        apart, records = self.run(equal_prompts(2, 10, 4, [0.0, 5.0]), interval_s=1.0, max_batch=1)
        found = {sample.time_s: (sample.queried_tokens, sample.hit_tokens) for sample in records.samples}
        assert (found[4.25], found[6.25], found[max(found)]) == ((10, 0), (20, 8), (20, 8))
        assert apart.decode.now == apart.prefill.now == max(found)

    def test_prompts_keep_their_blocks_until_they_are_fetched(self) -> None:
        """Seats for one on each side: the second prompt starts when the first has been fetched."""
        apart, records = self.run(lengths([10, 10], [4, 4]), max_batch=1)
        assert [s.start_s for s in apart.prefill.records.steps] == [0.0, 4.25]
        # its transfer waits for the seat on the other side, which is free at 7.25 s
        assert records.finish_s.tolist() == [7.25, 7.25 + 3.25 + 3.0]

    def test_transfers_share_the_link(self) -> None:
        """Two prompts that end together: the second one's blocks come after the first one's."""
        _, records = self.run(lengths([10, 10], [4, 4]))
        assert records.transfer_s.tolist() == [3.25, 6.5]

    def test_who_is_preempted_where_it_decodes_computes_again_there(self) -> None:
        """Three sequences that grow in a pool for two."""
        apart, _ = self.run(lengths([10, 10, 10], [12, 12, 12]), num_blocks=12)
        assert apart.decode.records.num_preemptions >= 1
        assert apart.prefill.records.num_preemptions == 0
        assert any(s.num_prefill_tokens for s in apart.decode.records.steps)


class TestHybrid:
    LOCAL, FULL = LayerSpec(1, 8, window=8), LayerSpec(1, 8)
    SPEC = KVCacheSpec((LOCAL, LOCAL, FULL, FULL), block_size=SIZE)

    def test_blocks_outside_the_window_are_given_back(self) -> None:
        """At 80 tokens: 20 blocks of full attention, and of the window of 8 three."""
        trace = lengths([4], [77])
        pool = HybridPool(self.SPEC, 60, max_seqs=4, max_seq_len=81)
        engine = Engine(trace, pool, steady(), EngineConfig(interval_s=1e6))
        records = engine.run()
        assert records.occupancy.peak_active_blocks == 20 + 3
        assert records.finish_s.tolist() == [77.0]
        check_pool(engine)

    def test_a_block_is_of_one_group(self) -> None:
        """Two layers of each kind: half the bytes of a block of all four."""
        assert hybrid_block_bytes(self.SPEC) * 2 == self.SPEC.bytes_per_block

    def test_the_same_memory_holds_more(self) -> None:
        """gpt-oss-20b, half of whose layers see 128 tokens: fewer active bytes for the same requests."""
        model, gpu = load_model("gpt-oss-20b"), load_gpu("h100")
        found = []
        for hybrid in (False, True):
            blocks = blocks_in_memory(model, gpu.memory_bytes, 0.9, 16, hybrid=hybrid)
            setup = ReplaySetup(model, gpu, blocks, watermark=0.0, hybrid=hybrid)
            result = run_replay(chat_long(60, seed=1).faster(20), setup)
            document = replay_document(result)
            found.append(document["cache"]["bytes"]["mean_active"])
            assert document["inputs"]["bytes_per_block"] == setup.bytes_per_block
        assert 0.4 * found[0] < found[1] < 0.75 * found[0]

    def pool(self, num_blocks: int = 60, **options: Any) -> HybridPool:
        return HybridPool(self.SPEC, num_blocks, max_seqs=4, max_seq_len=81, **options)

    def test_an_equal_prompt_waits_for_the_one_that_is_computed(self) -> None:
        """All but the last block, which a model has to run anyway; without it, both are computed."""
        trace = equal_prompts(2, 40, 3)
        for coalesce, computed in ((True, 40 + 4), (False, 80)):
            config = EngineConfig(4, 200, interval_s=1e6, coalesce=coalesce)
            engine = Engine(trace, self.pool(), steady(), config)
            records = engine.run()
            assert computed_tokens(records) == computed
            assert (records.num_coalesced > 0) is coalesce
            check_pool(engine)

    def test_a_hit_may_end_inside_a_block(self) -> None:
        """The second prompt shares 6 tokens with the first; a block has 4."""
        ids: Any = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 8, 9]
        arrival: Any = [0.0, 5.0]
        trace = Trace("partial", arrival, [8, 8], [1, 1], ids, [0, 8, 16], 1, 10)  # type: ignore[arg-type]
        for partial_hits, hit in ((True, 6), (False, 4)):
            engine = Engine(trace, self.pool(), steady(), EngineConfig(1, partial_hits=partial_hits))
            assert engine.run().hit_tokens == hit
            assert engine.manager.stats().copied_blocks == (2 if partial_hits else 0)
            check_pool(engine)

    @pytest.mark.parametrize("always", [True, False])
    def test_a_preempted_sequence_swaps_what_its_groups_hold(self, always: bool) -> None:
        """Blocks of every group go out and come back over the link; a link that is too slow is not used."""
        trace = lengths([20, 20, 20], [30, 30, 30])
        for bytes_per_s, swaps in ((1e9, True), (1.0, always)):
            swap = SwapSettings(60, 100, LinkSpeed(bytes_per_s), always=always)
            engine = Engine(trace, self.pool(36), steady(), EngineConfig(4, 64, interval_s=1e6, swap=swap))
            records = engine.run()
            assert records.num_preemptions > 0 and (records.num_swapped_out > 0) is swaps
            assert np.isfinite(records.finish_s).all()
            check_pool(engine)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_any_policy_says_who_goes(self, policy: str) -> None:
        """And nothing is left behind."""
        trace = lengths([20] * 10, [20] * 10)
        engine = Engine(trace, self.pool(40, policy=policy), steady(), EngineConfig(2))
        engine.run()
        assert engine.manager.stats().evicted_blocks > 0
        check_pool(engine)

    def test_a_watermark_leaves_room_for_those_that_run(self) -> None:
        """Twelve of 20 blocks: who comes when one runs with eight finds none beyond them."""
        trace = lengths([16, 16], [20, 20], [0.0, 5.0])
        together = []
        for watermark in (0.0, 0.6):
            engine = Engine(trace, self.pool(20, watermark=watermark), steady(), EngineConfig(interval_s=1.0))
            together.append(max(sample.num_running for sample in engine.run().samples))
            check_pool(engine)
        assert together == [2, 1]

    def test_the_host_brings_back_what_every_group_has_to_see(self) -> None:
        """Of 36 tokens nine blocks of full attention, and of the window of 8 before the next token two."""
        ids = [*range(40), *range(40, 80), *range(40)]
        arrival: Any = [0.0, 100.0, 200.0]
        offsets: Any = [0, 40, 80, 120]
        trace = Trace("again", arrival, [40] * 3, [2] * 3, ids, offsets, 1, 80)  # type: ignore[arg-type]
        tier = HostTierSettings(80, 100, LinkSpeed(1000.0))
        engine = Engine(trace, self.pool(22), steady(), EngineConfig(4, 40, interval_s=1e6, host_tier=tier))
        records = engine.run()
        assert engine.host.tier is not None
        assert (engine.host.tier.num_loaded, engine.host.tier.num_loaded_tokens) == (11, 36)
        assert computed_tokens(records) == 40 + 40 + 4
        # each prompt has ten blocks in each group; what was read is not written again
        assert engine.host.tier.num_stored == 40
        # 11 blocks take 1.1 s, and the last chunk a step
        assert records.first_token_s[2] == pytest.approx(200.0 + 1.1 + 1.0)
        check_pool(engine)

    @pytest.mark.parametrize("cached", [False, True])
    def test_the_decoding_device_fetches_what_it_sees(self, cached: bool) -> None:
        """Of 40 tokens ten blocks of full attention and two of the window, of an equal one what lacks."""
        pools = self.pool(), self.pool(policy="lru" if cached else None)
        transfer = TransferSettings(LinkSpeed(10.0, 0.25), 10)
        trace = equal_prompts(2, 40, 3, [0.0, 50.0])
        apart = Disaggregated(trace, pools, steady(), EngineConfig(4, 40, interval_s=1e6), transfer)
        records = apart.run()
        assert records.transfer_s.tolist() == [12.25, 0.0 if cached else 12.25]
        assert apart.decode.num_fetched_blocks == (12 if cached else 24)
        assert records.finish_s[0] == 1.0 + 12.25 + 2.0
        for engine in (apart.prefill, apart.decode):
            check_pool(engine)
        check_tokens(trace, records)

    @pytest.mark.parametrize("seed", range(24))
    def test_everything_together_is_conserved(self, seed: int) -> None:
        """Small pools, all that goes together, apart or not: all is served, and every byte has its block."""
        rng = np.random.default_rng([seed, 41])
        apart, cached = bool(seed % 2), bool(rng.random() < 0.7)
        trace = shared_prompts(rng, 14)
        options: dict[str, Any] = {
            "coalesce": bool(rng.random() < 0.3),
            "partial_hits": bool(rng.random() < 0.3),
            "prefill_first": bool(rng.random() < 0.3),
        }
        link = LinkSpeed(float(rng.choice([20.0, 500.0])), 0.1)
        if cached and rng.random() < 0.7:
            options["host_tier"] = HostTierSettings(int(rng.integers(4, 60)), 10, link)
        if rng.random() < 0.4:
            options["swap"] = SwapSettings(int(rng.integers(5, 60)), 10, link, always=True)
        if rng.random() < 0.3:
            options["speculation"] = Speculation(2, 0.5)
        config = EngineConfig(3, int(rng.integers(9, 30)), interval_s=1e6, **options)
        few, mark = int(rng.integers(38, 50)), float(rng.choice([0.0, 0.2]))
        pools = [self.pool(few, watermark=mark, policy="lru" if cached else None) for _ in range(2)]
        if apart:
            both = Disaggregated(trace, (pools[0], pools[1]), steady(), config, TransferSettings(link, 10))
            records, engines = both.run(), [both.prefill, both.decode]
            check_link(both.decode.link, both.decode.num_fetched_blocks * 10)
        else:
            engine = Engine(trace, pools[0], steady(), config)
            records, engines = engine.run(), [engine]
        for one in engines:
            check_pool(one)
        check_tokens(trace, records)

    def test_what_it_does_not_have_is_refused(self) -> None:
        """Before anything runs."""
        disk = DiskTierSettings(4, 4, LinkSpeed(1.0), LinkSpeed(1.0))
        tier = HostTierSettings(4, 4, LinkSpeed(1.0))
        for config in (EngineConfig(host_tier=tier, disk_tier=disk), EngineConfig(kv_budget=KVBudget(64))):
            with pytest.raises(PagedKVError, match="a hybrid pool has no"):
                Engine(lengths([4], [3]), self.pool(), steady(), config)


class TestConservation:
    def test_a_block_that_is_still_held_is_told(self) -> None:
        """The check can fail."""
        engine = engine_of(lengths([8], [3]), 10)
        engine.run()
        check_pool(engine)
        engine.manager.open("left", [1, 2, 3])
        with pytest.raises(AssertionError, match="1 blocks are active"):
            check_pool(engine)

    def test_bytes_that_no_block_explains_are_told(self) -> None:
        """One byte more, or a link that was faster than it is."""
        link = Link(LinkSpeed(100.0, 0.5))
        link.begin(0.0, 200)
        check_link(link, 200)
        with pytest.raises(AssertionError, match="200 bytes on the link, 201 in blocks"):
            check_link(link, 201)
        link.busy_s -= 1.0
        with pytest.raises(AssertionError, match=r"busy 1\.5 s for 2\.5"):
            check_link(link, 200)

    def test_a_token_that_is_lost_is_told(self) -> None:
        """A gap less than there are tokens."""
        trace = lengths([8], [3])
        records = engine_of(trace, 10).run()
        check_tokens(trace, records)
        records.steps = StepLog(list(records.steps)[:-1])
        with pytest.raises(AssertionError, match="0 gaps between 3 tokens"):
            check_tokens(trace, records)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinkSpeed(0.0),
        lambda: LinkSpeed(math.inf),
        lambda: LinkSpeed(1.0, -1.0),
        lambda: Speculation(0, 0.5),
        lambda: Speculation(1, 1.5),
        lambda: Speculation(1, math.nan),
        lambda: Speculation(1, 0.5, seed=-1),
        lambda: Speculation(1, 0.5, draft_s=-1.0),
        lambda: SwapSettings(0, 1, LinkSpeed(1.0)),
        lambda: SwapSettings(1, 0, LinkSpeed(1.0)),
        lambda: HostTierSettings(0, 1, LinkSpeed(1.0)),
        lambda: HostTierSettings(1, 0, LinkSpeed(1.0)),
        lambda: DiskTierSettings(0, 1, LinkSpeed(1.0), LinkSpeed(1.0)),
        lambda: DiskTierSettings(1, 0, LinkSpeed(1.0), LinkSpeed(1.0)),
        lambda: KVBudget(0),
        lambda: KVBudget(9, "luck"),
        lambda: KVBudget(9, seed=-1),
        lambda: TransferSettings(LinkSpeed(1.0), 0),
        lambda: TensorParallel(1, LinkSpeed(1.0)),
        lambda: EngineConfig(queue="lifo"),
        lambda: EngineConfig(max_batch=10, token_budget=39, speculation=Speculation(3, 0.5)),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any) -> None:
    """With the numbers."""
    with pytest.raises(PagedKVError, match=r"got|budget is 39"):
        make()


FEATURES = """
import hashlib
from dataclasses import replace
import numpy as np
from pagedkv.sim.engine.disaggregation import TransferSettings
from pagedkv.sim.engine.disk_tier import DiskTierSettings
from pagedkv.sim.engine.engine import EngineConfig
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.engine.host_tier import HostTierSettings
from pagedkv.sim.engine.link import LinkSpeed
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.replay import ReplaySetup, run_replay
from pagedkv.sim.output.report import replay_document, to_json
from pagedkv.sim.engine.speculation import Speculation
from pagedkv.sim.engine.swapping import SwapSettings
from pagedkv.sim.timing.tensor_parallel import TensorParallel, shard
from pagedkv.sim.workload import chat_long
model, trace = shard(load_model("llama-3.1-8b"), 2), chat_long(60, seed=5)
turns, size = np.arange(60) % 7, model.spec.bytes_per_block
trace = replace(trace, session=turns, think_s=np.where(np.arange(60) < 7, np.nan, 3.0), priority=turns % 3)
config = EngineConfig(
    64, queue="priority", prefill_first=True, coalesce=True, partial_hits=True,
    swap=SwapSettings(4000, size, LinkSpeed(25e9)), host_tier=HostTierSettings(9000, size, LinkSpeed(25e9)),
    speculation=Speculation(3, 0.6, 11),
    disk_tier=DiskTierSettings(20000, size, LinkSpeed(7e9), LinkSpeed(5e9)),
)
parallel, kv = TensorParallel(2, LinkSpeed(450e9)), TransferSettings(LinkSpeed(50e9), size)
for apart in (None, kv):
    setup = ReplaySetup(model, load_gpu("h100"), 9_000, config, tensor_parallel=parallel, transfer=apart)
    text = to_json(replay_document(run_replay(trace, setup)))
    print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_all_features_together_give_the_same_bytes_in_any_process() -> None:
    """Whatever the hash seed, and for all that is drawn."""
    found = set()
    for seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", FEATURES],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(set(found.pop().split())) == 2
