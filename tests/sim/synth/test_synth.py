"""Synthetic workloads have the distributions, the sharing and the determinism that they say they have."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.sim.hits import replay_hits
from pagedkv.sim.synth.arrivals import ArrivalProcess
from pagedkv.sim.synth.lengths import parse_lengths
from pagedkv.sim.synth.prompts import Piece, PromptBook
from pagedkv.sim.synth.workloads import KINDS, Agents, Independent, LongContext, PrefixTree, Workload
from pagedkv.sim.trace import Trace, TraceError

N = 100_000


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def row_of(trace: Trace, i: int) -> list[int]:
    return list(trace.content_ids[trace.content_offsets[i] : trace.content_offsets[i + 1]].tolist())


def digest(trace: Trace) -> str:
    columns = (trace.arrival_s, trace.input_len, trace.output_len, trace.content_ids, trace.session)
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


class TestArrivals:
    @pytest.mark.parametrize(
        ("process", "cv"),
        [
            (ArrivalProcess("constant", 4.0), 0.0),
            (ArrivalProcess("poisson", 4.0), 1.0),
            (ArrivalProcess("gamma", 4.0, cv=1.0), 1.0),
            (ArrivalProcess("gamma", 4.0, cv=3.0), 3.0),
            (ArrivalProcess("gamma", 4.0, cv=0.5), 0.5),
        ],
        ids=lambda value: getattr(value, "kind", None),
    )
    def test_gaps_have_the_stated_mean_and_variation(self, process: ArrivalProcess, cv: float) -> None:
        """A Gamma law of shape 1 / cv**2 has that variation; Poisson gaps have 1."""
        arrival_s = process.draw(rng(), N)
        gaps = np.diff(arrival_s)
        assert arrival_s[0] == 0.0 and len(arrival_s) == N and (gaps >= 0).all()
        assert gaps.mean() == pytest.approx(0.25, rel=5 * max(cv, 1e-6) / N**0.5)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)

    def test_bursts_have_the_rate_of_the_whole_and_are_busier_inside(self) -> None:
        """10 s on and 30 s off at 4 per second: 16 per second in a burst, nothing in a quarter's rest."""
        process = ArrivalProcess("bursty", 4.0, on_s=10.0, off_s=30.0)
        arrival_s = process.draw(rng(), N)
        gaps = np.diff(arrival_s)
        assert (N - 1) / arrival_s[-1] == pytest.approx(4.0, rel=0.2)
        assert np.median(gaps) == pytest.approx(np.log(2) / 16, rel=0.03)
        # a burst ends after 160 requests in the mean, so one gap in 160 holds a pause of 30 s in the mean
        assert (gaps > 1.0).mean() == pytest.approx(1 / 160 * np.exp(-1 / 30), rel=0.2)
        assert gaps.std() / gaps.mean() > 3

    def test_few_requests(self) -> None:
        for kind in ("poisson", "gamma", "constant", "bursty"):
            assert ArrivalProcess(kind).draw(rng(), 1).tolist() == [0.0]
            assert len(ArrivalProcess(kind).draw(rng(), 2)) == 2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kind": "weekly"}, "unknown arrivals 'weekly', known are: poisson"),
            ({"per_s": 0.0}, "per_s must be a finite number above 0, got 0.0"),
            ({"cv": float("nan")}, "cv must be"),
            ({"on_s": -1.0}, "on_s must be"),
            ({"off_s": float("inf")}, "off_s must be"),
        ],
    )
    def test_numbers_out_of_their_range_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(TraceError, match=message):
            ArrivalProcess(**options)


class TestLengths:
    def test_constant_and_uniform(self) -> None:
        assert set(parse_lengths("512").draw(rng(), 5).tolist()) == {512}
        assert set(parse_lengths("constant:7").draw(rng(), 5).tolist()) == {7}
        drawn = parse_lengths("uniform:3,7").draw(rng(), N)
        assert sorted(set(drawn.tolist())) == [3, 4, 5, 6, 7]
        assert drawn.mean() == pytest.approx(5.0, abs=0.03)

    def test_lognormal_has_the_stated_mean_and_variation(self) -> None:
        drawn = parse_lengths("lognormal:800,1.5").draw(rng(), N)
        assert drawn.dtype == np.int64 and drawn.min() >= 1
        assert drawn.mean() == pytest.approx(800, rel=0.03)
        assert drawn.std() / drawn.mean() == pytest.approx(1.5, rel=0.1)
        # the median of a lognormal law is its mean over sqrt(1 + cv**2)
        assert np.median(drawn) == pytest.approx(800 / np.sqrt(1 + 1.5**2), rel=0.02)

    def test_those_of_a_trace(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text("num_prefill_tokens,num_decode_tokens\n5,100\n5,200\n8,100\n")
        drawn = parse_lengths(f"{path}:input").draw(rng(), N)
        assert sorted(set(drawn.tolist())) == [5, 8]
        assert (drawn == 5).mean() == pytest.approx(2 / 3, abs=0.01)
        assert sorted(set(parse_lengths(f"{path}:output").draw(rng(), 99).tolist())) == [100, 200]

    @pytest.mark.parametrize(
        "text",
        ["", "0", "-3", "uniform:5", "uniform:7,3", "uniform:0,3", "lognormal:1", "lognormal:0,1",
         "constant:", "normal:1,2", "lognormal:nan,1", "uniform:1.5,3", "99999999999", "²", ":input",
         "absent.csv:input"],
    )  # fmt: skip
    def test_what_is_no_distribution_is_refused(self, text: str) -> None:
        with pytest.raises(TraceError):
            parse_lengths(text)


class TestPrompts:
    def test_blocks_are_shared_up_to_the_first_difference(self) -> None:
        """Blocks of 4: the pieces of 6 tokens end inside the second block."""
        book = PromptBook(4)
        same, other = Piece((0,), 6), Piece((1,), 9)
        book.add([same, other])
        book.add([same, Piece((1,), 7)])  # the same text, cut short
        book.add([same, Piece((2,), 9)])
        book.add([Piece((0,), 5), other])  # the first piece is shorter
        rows = [book.content_ids[a:b] for a, b in zip(book.offsets, book.offsets[1:], strict=False)]
        assert rows == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6, 7], [0, 8, 9, 10]]
        assert book.input_len == [15, 13, 15, 14] and book.num_contents == 11

    def test_the_same_text_behind_another_one_is_another_content(self) -> None:
        book = PromptBook(2)
        book.add([Piece((0,), 2), Piece((9,), 2)])
        book.add([Piece((1,), 2), Piece((9,), 2)])
        assert book.content_ids == [0, 1, 2, 3]


class TestKinds:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_same_seed_gives_the_same_trace_and_another_one_another(self, kind: type[Workload]) -> None:
        workload = kind(requests=60)
        assert digest(workload.make(3)) == digest(workload.make(3)) != digest(workload.make(4))
        assert len(workload.make(3)) == 60

    def test_other_processes_draw_the_same(self) -> None:
        code = (
            "import hashlib\n"
            "from pagedkv.sim.synth.workloads import KINDS\n"
            "for kind in KINDS:\n"
            "    t = kind(requests=40).make(9)\n"
            "    c = (t.arrival_s, t.input_len, t.output_len, t.content_ids, t.session)\n"
            "    print(hashlib.sha256(b''.join(x.tobytes() for x in c)).hexdigest())\n"
        )
        expected = [digest(kind(requests=40).make(9)) for kind in KINDS]
        for seed in ("1", "random"):
            environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
            assert done.stdout.split() == expected

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("requests", [1, 2])
    def test_few_requests(self, kind: type[Workload], requests: int) -> None:
        assert len(kind(requests=requests).make(0)) == requests

    @pytest.mark.parametrize(
        ("kind", "options", "message"),
        [
            (Independent, {"requests": 0}, "requests must be from 1"),
            (PrefixTree, {"depth": 0}, "depth must be from 1"),
            (PrefixTree, {"skew": float("nan")}, "skew must be from 0"),
            (Agents, {"max_context": 2001}, "max_context must be from 2,002"),
            (LongContext, {"documents": 3, "per_prompt": 4}, "per_prompt must be from 1 to 3, got 4"),
            (LongContext, {"needle_share": 1.5}, "needle_share must be from 0 to 1"),
        ],
    )
    def test_numbers_out_of_their_range_are_refused(
        self, kind: type[Workload], options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(TraceError, match=message):
            kind(**options)
        with pytest.raises(TraceError, match="seed must be an integer of at least 0"):
            kind(requests=1).make(-1)

    def test_independent_prompts_share_nothing(self) -> None:
        hits = replay_hits(Independent(requests=50).make(0), 0, 16)
        assert hits.stats.hit_blocks == 0


class TestPrefixTree:
    def test_one_level_is_a_system_prompt(self) -> None:
        """64 shared tokens and 40 own ones: all but the first of 10 requests hit 4 blocks of 16."""
        workload = PrefixTree(requests=10, depth=1, node=parse_lengths("64"), suffix=parse_lengths("40"))
        trace = workload.make(5)
        assert set(trace.input_len.tolist()) == {104}
        assert replay_hits(trace, 0, 16).stats.hit_blocks == 9 * 4

    def test_every_path_is_stored_once(self) -> None:
        """Three levels of two texts of 32 tokens: 1 + 2 + 4 texts of 2 blocks, and a block per request."""
        workload = PrefixTree(
            requests=400, depth=3, branching=2, node=parse_lengths("32"), suffix=parse_lengths("16")
        )
        trace = workload.make(5)
        assert trace.num_contents == 7 * 2 + 400
        hits = replay_hits(trace, 0, 16).stats
        assert (hits.queried_blocks, hits.hit_blocks) == (400 * 7, 400 * 6 - 14)

    def test_skew_prefers_the_first_continuation(self) -> None:
        """Exponent 1 over two texts: 2/3 of the requests take the first one."""
        workload = PrefixTree(
            requests=3000, depth=2, branching=2, node=parse_lengths("16"), suffix=parse_lengths("1")
        )
        trace = workload.make(5)
        second = np.array([row_of(trace, i)[1] for i in range(3000)])
        _, counts = np.unique(second, return_counts=True)
        assert counts[np.argsort(counts)][-2:].max() / 3000 == pytest.approx(2 / 3, abs=0.03)


class TestAgents:
    WORKLOAD = Agents(
        requests=200,
        system=64,
        first=parse_lengths("32"),
        growth=parse_lengths("16"),
        answer=parse_lengths("16"),
        turns=parse_lengths("6"),
        arrivals=ArrivalProcess("constant", 0.5),
        think_s=3.0,
        seconds_per_token=0.125,
    )

    def test_each_turn_begins_with_the_whole_turn_before(self) -> None:
        trace = self.WORKLOAD.make(1)
        last: dict[int, list[int]] = {}
        turns: dict[int, int] = {}
        for i in range(len(trace)):
            session, row = int(trace.session[i]), row_of(trace, i)
            turn = turns.get(session, 0)
            assert int(trace.input_len[i]) == 64 + 32 + 32 * turn
            assert row[: len(last.get(session, row))] == last.get(session, row)
            last[session], turns[session] = row, turn + 1
        assert max(turns.values()) == 6

    def test_hits_are_all_but_what_is_new(self) -> None:
        """Whole blocks: 4 shared by all, 2 per task, 2 more per further turn."""
        trace = self.WORKLOAD.make(1)
        sessions = int(trace.session.max()) + 1
        hits = replay_hits(trace, 0, 16).stats
        new = 4 + 2 * sessions + 2 * (200 - sessions)
        assert hits.queried_blocks - hits.hit_blocks == new == trace.num_contents

    def test_turns_come_after_the_answer_and_a_pause(self) -> None:
        """2 s for an answer of 16 tokens, and 3 s of pause in the mean."""
        trace = self.WORKLOAD.make(1)
        gaps = [
            gap
            for session in range(int(trace.session.max()) + 1)
            for gap in np.diff(trace.arrival_s[trace.session == session]).tolist()
        ]
        assert min(gaps) > 2.0
        assert np.mean(gaps) == pytest.approx(5.0, abs=1.0)
        assert np.isnan(trace.think_s).all()

    def test_in_a_closed_loop_turns_have_think_times(self) -> None:
        from dataclasses import replace

        trace = replace(self.WORKLOAD, closed_loop=True).make(1)
        first = np.zeros(len(trace), np.bool_)
        first[np.unique(trace.session, return_index=True)[1]] = True
        assert np.array_equal(np.isnan(trace.think_s), first)
        assert np.nanmean(trace.think_s) == pytest.approx(3.0, abs=1.0)
        assert set(trace.arrival_s.tolist()) == {2.0 * i for i in range(int(first.sum()))}

    def test_contexts_end_before_the_limit(self) -> None:
        trace = Agents(requests=500, max_context=20_000, system=1000).make(2)
        assert int((trace.input_len + trace.output_len).max()) <= 20_000
        assert int(trace.input_len.max()) > 10_000


class TestLongContext:
    def test_retrieval_prompts_share_the_documents_they_begin_with(self) -> None:
        """Two documents of 32 tokens, both in each prompt: two orders, 4 blocks each, behind 2 for all."""
        workload = LongContext(
            requests=100,
            system=32,
            documents=2,
            per_prompt=2,
            document=parse_lengths("32"),
            question=parse_lengths("16"),
            needle_share=0.0,
        )
        trace = workload.make(3)
        assert set(trace.input_len.tolist()) == {32 + 64 + 16}
        assert trace.num_contents == 2 + 2 * 4 + 100
        hits = replay_hits(trace, 0, 16).stats
        assert hits.queried_blocks - hits.hit_blocks == 2 + 8 + 100

    def test_needle_prompts_share_the_haystack_up_to_the_needle(self) -> None:
        workload = LongContext(
            requests=300,
            system=0,
            needle_share=1.0,
            haystacks=1,
            haystack=parse_lengths("1600"),
            needle=16,
            question=parse_lengths("16"),
        )
        trace = workload.make(3)
        assert set(trace.input_len.tolist()) == {1600 + 16 + 16}
        common = [
            next(
                k
                for k, (a, b) in enumerate(zip(row_of(trace, i), row_of(trace, i + 1), strict=True))
                if a != b
            )
            for i in range(299)
        ]
        # the needle's depth is uniform over 100 blocks; the earlier of two such ends a third of the way
        assert np.mean(common) == pytest.approx(100 / 3, abs=5)

    def test_the_mix_has_the_stated_share(self) -> None:
        workload = LongContext(
            requests=1000,
            document=parse_lengths("16"),
            haystack=parse_lengths("1000"),
            question=parse_lengths("16"),
            needle_share=0.3,
        )
        trace = workload.make(3)
        assert (trace.input_len == 200 + 1000 + 40 + 16).mean() == pytest.approx(0.3, abs=0.05)

    @pytest.mark.parametrize("skew", [0.0, 1.0, 50.0])
    def test_no_document_stands_twice_in_a_prompt(self, skew: float) -> None:
        workload = LongContext(
            requests=50,
            documents=5,
            per_prompt=5,
            skew=skew,
            needle_share=0.0,
            document=parse_lengths("16"),
            system=0,
            question=parse_lengths("1"),
        )
        assert set(workload.make(1).input_len.tolist()) == {81}
