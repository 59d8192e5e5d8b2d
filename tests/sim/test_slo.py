"""Goodput: hand-checked requests, and the properties that any limits have."""

import argparse
import csv
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import PagedKVError
from pagedkv.sim.cli import main
from pagedkv.sim.output.latencies import COLUMNS, LATENCIES, Latencies, latencies_of, requests_csv
from pagedkv.sim.output.metrics import Distribution
from pagedkv.sim.output.records import Records
from pagedkv.sim.output.slo import SLO, check_slos, goodput, slo
from pagedkv.sim.replay import ReplayResult, ReplaySetup, run_replay
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long


@pytest.fixture(scope="module")
def result() -> ReplayResult:
    setup = ReplaySetup(load_model("llama-3.1-8b"), load_gpu("b200"), num_blocks=8000)
    return run_replay(chat_long(60), setup)


def by_hand() -> tuple[Trace, Records]:
    """Four requests: one good, one late, one slow, one of a single token that is on time."""
    trace = Trace.from_lengths([0.0, 1.0, 2.0, 3.0], [10, 10, 10, 10], [5, 5, 5, 1])
    records = Records(4)
    records.first_token_s[:] = [1.0, 4.0, 3.0, 4.0]  # TTFT 1, 3, 1, 1
    records.finish_s[:] = [1.2, 4.2, 5.0, 4.0]  # TPOT 0.05, 0.05, 0.5, none
    return trace, records


class TestGoodput:
    def test_four_requests_by_hand(self) -> None:
        """TTFT at most 2 s: 1, 3, 4; TPOT at most 0.1 s: 1, 2 and the one without; both: 1 and 4."""
        trace, records = by_hand()
        found = goodput(latencies_of(trace, records), [SLO("ttft", 2), SLO("tpot", 0.1)], makespan_s=5.0)
        assert found.met_alone == {"ttft": 3, "tpot": 3}
        assert found.requests_met == 2
        assert found.share == 0.5
        assert found.requests_per_s == 0.4
        assert found.worst.tolist() == pytest.approx([0.5, 1.5, 5.0, 0.5])

    def test_a_limit_that_is_met_exactly_is_met(self) -> None:
        """At most, not below."""
        trace, records = by_hand()
        assert goodput(latencies_of(trace, records), [SLO("ttft", 1.0)], 5.0).requests_met == 3

    def test_what_never_finished_meets_nothing(self) -> None:
        """Not even a limit of its first token."""
        trace, records = by_hand()
        records.finish_s[0] = math.nan
        found = goodput(latencies_of(trace, records), [SLO("ttft", 2)], 5.0)
        assert (found.requests_met, found.met_alone) == (2, {"ttft": 2})
        assert found.scale_for(1.0) is None

    def test_the_scale_for_a_share_is_what_meets_it(self) -> None:
        """Limits times that factor are met by the share, and by less just below it."""
        trace, records = by_hand()
        latencies = latencies_of(trace, records)
        factor = goodput(latencies, [SLO("ttft", 2), SLO("tpot", 0.1)], 5.0).scale_for(0.75)
        assert factor == 1.5
        looser = goodput(latencies, [SLO("ttft", 2 * factor), SLO("tpot", 0.1 * factor)], 5.0)
        assert looser.share == 0.75

    @settings(max_examples=60, deadline=None)
    @given(
        values=st.lists(
            st.tuples(st.floats(0, 9), st.floats(0, 1), st.floats(0, 99)), min_size=1, max_size=20
        ),
        limits=st.tuples(st.floats(0.01, 9), st.floats(0.01, 1), st.floats(0.1, 99)),
    )
    def test_it_is_a_count_of_requests(
        self, values: list[tuple[float, float, float]], limits: tuple[float, float, float]
    ) -> None:
        """Of those whose three latencies all keep their limits, one request at a time."""
        latencies = Latencies(*(np.array(column) for column in zip(*values, strict=True)))
        slos = [SLO(name, limit) for name, limit in zip(LATENCIES, limits, strict=True)]
        met = sum(all(v / limit <= 1 for v, limit in zip(row, limits, strict=True)) for row in values)
        found = goodput(latencies, slos, 2.0)
        assert found.requests_met == met
        assert found.requests_met <= min(found.met_alone.values())
        assert found.requests_per_s == met / 2

    def test_limits_that_contradict_are_refused(self) -> None:
        """None, and two of one latency; the message has both."""
        with pytest.raises(PagedKVError, match="at least one limit"):
            check_slos([])
        with pytest.raises(PagedKVError, match=r"2 limits of ttft, 1 and 2\.5 s"):
            check_slos([SLO("ttft", 1), SLO("tpot", 1), SLO("ttft", 2.5)])

    @pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=nan", "itl=1", "=1"])
    def test_text_that_is_no_limit_is_refused(self, text: str) -> None:
        """As argparse expects it."""
        with pytest.raises(argparse.ArgumentTypeError):
            slo(text)


class TestCommand:
    def test_the_command_line_says_what_the_document_says(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """A row per limit and one for all; without limits, no table."""
        options = ["replay", "--limit", "80", "--num-blocks", "9000", "--json", str(tmp_path / "r.json")]
        assert main([*options, "--slo", "ttft=1", "--slo", "e2e=3"]) == 0
        out = capsys.readouterr().out
        found = json.loads((tmp_path / "r.json").read_text())["goodput"]
        assert 0 < found["requests_met"] < 80
        assert f"Goodput: {found['requests_per_s']:,.3g} requests/s" in out
        rows = dict(re.findall(r"│ (TTFT|E2E|all limits).*?│ +(\d+) │", out.partition("Goodput")[2]))
        assert {name: int(met) for name, met in rows.items()} == {
            "TTFT": found["met_alone"]["ttft"],
            "E2E": found["met_alone"]["e2e"],
            "all limits": found["requests_met"],
        }
        assert main(options) == 0
        assert "Goodput" not in capsys.readouterr().out


class TestLatencies:
    def test_they_are_what_the_summary_describes(self, result: ReplayResult) -> None:
        """The same distributions, to the bit or nearly."""
        latencies = latencies_of(result.trace, result.records)
        for name in LATENCIES:
            values = latencies.of(name)
            again, stated = Distribution.of(values[~np.isnan(values)]), getattr(result.summary, name)
            assert again.count == stated.count
            assert again.p99 == pytest.approx(stated.p99, rel=1e-12)

    def test_the_table_has_a_row_per_request(self, result: ReplayResult) -> None:
        """In order, with the columns that it states, and times that add up."""
        rows = list(csv.DictReader(io.StringIO(requests_csv(result))))
        assert tuple(rows[0]) == COLUMNS
        assert [int(row["request"]) for row in rows] == list(range(1, 61))
        for row in rows:
            e2e = float(row["finish_s"]) - float(row["arrival_s"])
            assert float(row["e2e_s"]) == pytest.approx(e2e, abs=2e-9)
            if row["output_tokens"] == "1":
                assert row["tpot_s"] == ""
            else:
                gaps = (float(row["e2e_s"]) - float(row["ttft_s"])) / (int(row["output_tokens"]) - 1)
                assert float(row["tpot_s"]) == pytest.approx(gaps, abs=2e-9)

    def test_arrivals_of_the_run_come_before_those_of_the_trace(self) -> None:
        """A turn of a session may come later than the trace says."""
        trace, records = by_hand()
        records.arrival_s = trace.arrival_s + 0.5
        assert latencies_of(trace, records).ttft_s.tolist() == [0.5, 2.5, 0.5, 0.5]
