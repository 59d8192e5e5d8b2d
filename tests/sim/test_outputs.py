"""What a replay leaves behind: JSON against its schema, tables as CSV and Parquet, policies with a bound."""

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import PagedKVError
from pagedkv.policies import POLICIES
from pagedkv.sim.cli import main
from pagedkv.sim.commands.replay_outputs import full_document
from pagedkv.sim.hits import replay_hits
from pagedkv.sim.output.latencies import latencies_of
from pagedkv.sim.output.result_file import check_result, read_result, result_schema, result_text
from pagedkv.sim.output.series import MOST_ROWS, overtaking_context, series_of
from pagedkv.sim.output.slo import SLO, goodput
from pagedkv.sim.output.tables import columns_of
from pagedkv.sim.policy_bound import hits_by_policy, policies_document, policies_to_run
from pagedkv.sim.replay import ReplayResult, ReplaySetup, run_replay
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.timing.step_time import StepTimeModel
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long

SCHEMAS = ("pagedkv.replay/1", "pagedkv.hits/1", "pagedkv.policies/1")


def replayed(num_requests: int = 80, **options: Any) -> ReplayResult:
    setup = ReplaySetup(load_model("llama-3.1-8b"), load_gpu("b200"), **({"num_blocks": 9000} | options))
    return run_replay(chat_long(num_requests), setup)


@pytest.fixture(scope="module")
def result() -> ReplayResult:
    return replayed()


@pytest.fixture(scope="module")
def document(result: ReplayResult) -> dict[str, Any]:
    limits = [SLO("ttft", 1.0), SLO("tpot", 0.02)]
    found = goodput(latencies_of(result.trace, result.records), limits, result.summary.makespan_s)
    return full_document(result, {"seed": 0}, found)


def run(*argv: object) -> int:
    try:
        return main([str(arg) for arg in argv])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


class TestSeries:
    def test_every_row_adds_up_to_the_pool(self, result: ReplayResult, document: dict[str, Any]) -> None:
        """Free, cached and active bytes of the thinned timeline, and used is part of active."""
        timeline = document["series"]["timeline"]
        reserved = document["cache"]["bytes"]["reserved"]
        for free, cached, active, used in zip(
            *(timeline[f"bytes_{state}"] for state in ("free", "cached", "active", "used")), strict=True
        ):
            assert free + cached + active == reserved
            assert 0 <= used <= active

    def test_thinning_keeps_the_peak_and_both_ends(self) -> None:
        """Of 0.01 s samples, which are far more than the most rows."""
        from pagedkv.sim.engine.engine import EngineConfig

        result = replayed(engine=EngineConfig(interval_s=0.01))
        samples = result.records.samples
        timeline = series_of(result)["timeline"]
        assert len(samples) > 2 * MOST_ROWS
        assert MOST_ROWS / 2 <= len(timeline["time_s"]) <= MOST_ROWS + 2
        peak = max(sample.active_blocks for sample in samples)
        assert max(timeline["bytes_active"]) == peak * result.setup.model.spec.bytes_per_block
        assert timeline["time_s"][0] == 0
        assert timeline["time_s"][-1] == pytest.approx(samples[-1].time_s, rel=1e-5)
        assert timeline["time_s"] == sorted(timeline["time_s"])

    def test_quantiles_are_those_of_the_summary(self, document: dict[str, Any]) -> None:
        """At 50, 90, 95 and 99 percent, to six digits."""
        quantiles = document["series"]["quantiles"]
        for name, stated in document["latency_s"].items():
            column = dict(zip(quantiles["percent"], quantiles[f"{name}_s"], strict=True))
            for percent in (50, 90, 95, 99):
                assert column[percent] == pytest.approx(stated[f"p{percent}"], rel=1e-5)
            assert quantiles[f"{name}_s"] == sorted(quantiles[f"{name}_s"])

    def test_the_factor_on_the_limits_crosses_one_where_goodput_is(self, document: dict[str, Any]) -> None:
        """As many percent of the requests have a factor of at most 1 as meet the limits."""
        quantiles, share = document["series"]["quantiles"], document["goodput"]["share"]
        met = [
            p
            for p, f in zip(quantiles["percent"], quantiles["slo_factor"], strict=True)
            if f is not None and f <= 1
        ]
        assert 0 < share < 1
        assert max(met) <= 100 * share < max(met) + 1.01

    def test_kv_bytes_overtake_weight_bytes_where_they_are_equal(self, result: ReplayResult) -> None:
        """One token of the batch earlier they do not."""
        series, step = series_of(result)["itl_by_context"], result.setup.step_time
        batch, tokens = series["batch"], series["overtake_tokens"]
        spec = result.setup.model.spec
        assert tokens % batch == 0
        assert (
            (tokens - batch) * spec.bytes_per_token
            <= step.weight_bytes(batch)
            < tokens * spec.bytes_per_token
        )

    def test_windows_may_keep_kv_bytes_below_weight_bytes(self) -> None:
        """Then there is no such context."""
        assert overtaking_context(StepTimeModel.from_rates(1e9, 1e12), batch=4) is None


class TestDocument:
    def test_every_kind_of_result_fits_its_schema(self, document: dict[str, Any], tmp_path: Path) -> None:
        """As read back from what the command line wrote."""
        written = {
            "replay.json": ("--limit", 30, "--slo", "ttft=1"),
            "hits.json": ("--limit", 30, "--hits-only"),
            "policies.json": ("--limit", 30, "--hits-only", "--policy", "lru,arc"),
            "bound.json": ("--limit", 30, "--hits-only", "--bound", "--num-blocks", 9000),
        }
        for name, options in written.items():
            assert run("replay", *options, "--json", tmp_path / name) == 0
            assert read_result(str(tmp_path / name), *SCHEMAS)["pagedkv_version"]
        check_result(document, "here", *SCHEMAS)

    def test_a_json_schema_library_agrees(self, document: dict[str, Any], tmp_path: Path) -> None:
        """The shipped schema is one, and real results are valid by it."""
        jsonschema = pytest.importorskip("jsonschema")
        jsonschema.Draft202012Validator.check_schema(result_schema())
        validator = jsonschema.Draft202012Validator(result_schema())
        validator.validate(json.loads(result_text(document)))
        for options in (("--hits-only",), ("--hits-only", "--bound")):
            assert run("replay", "--limit", 20, *options, "--json", tmp_path / "x.json") == 0
            validator.validate(json.loads((tmp_path / "x.json").read_text()))

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_what_it_refuses_a_json_schema_library_refuses(
        self, document: dict[str, Any], data: st.DataObject
    ) -> None:
        """Entries taken out or replaced at random: both say the same."""
        jsonschema = pytest.importorskip("jsonschema")
        changed = copy.deepcopy(document)
        # the long columns would cost a second each, and one row has the same types
        for table in (changed["series"]["timeline"], *changed["series"]["itl_by_context"].values()):
            if isinstance(table, dict):
                table.update({name: column[:1] for name, column in table.items() if isinstance(column, list)})
        changed["series"]["quantiles"] = {n: c[:1] for n, c in changed["series"]["quantiles"].items()}
        _mutate(changed, data)
        schema = {"$ref": "#/$defs/pagedkv.replay-1", "$defs": result_schema()["$defs"]}
        valid = jsonschema.Draft202012Validator(schema).is_valid(changed)
        try:
            check_result(changed, "here", "pagedkv.replay/1")
        except PagedKVError as error:
            assert not valid or "differ in length" in str(error), error
        else:
            assert valid

    def test_text_and_document_are_one(self, document: dict[str, Any]) -> None:
        """It parses to the same, and again to the same bytes."""
        text = result_text(document)
        assert json.loads(text) == document
        assert result_text(json.loads(text)) == text

    def test_without_limits_there_is_no_goodput(self, result: ReplayResult) -> None:
        """Neither a figure nor a column."""
        document = full_document(result, {})
        assert "goodput" not in document
        assert "slo_factor" not in document["series"]["quantiles"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is no JSON"),
            (b"{", "is no JSON"),
            (b"\xff", "is no JSON"),
            (b'{"a": NaN}', "NaN is no number"),
            (b"[" * 100_000, "is no JSON"),
            (b"[]", "has no schema; this version reads pagedkv.replay/1"),
            (b'{"schema": "pagedkv.replay/9"}', "has the schema 'pagedkv.replay/9'"),
            (b'{"schema": ["x"]}', "has the schema"),
            (b'{"schema": "pagedkv.replay/1"}', "pagedkv_version is missing"),
        ],
    )
    def test_what_is_no_result_is_refused(self, tmp_path: Path, content: bytes, message: str) -> None:
        """With the file's name and what is wrong."""
        path = tmp_path / "x.json"
        path.write_bytes(content)
        with pytest.raises(PagedKVError, match=message) as caught:
            read_result(str(path), "pagedkv.replay/1")
        assert str(path) in str(caught.value)

    def test_an_error_names_the_place(self, document: dict[str, Any]) -> None:
        """Down to the entry of a list."""
        broken = copy.deepcopy(document)
        broken["series"]["timeline"]["running"][3] = "many"
        with pytest.raises(PagedKVError, match=r"series\.timeline\.running\[3\] must be integer, got 'many'"):
            check_result(broken, "here", "pagedkv.replay/1")
        broken = copy.deepcopy(document)
        broken["series"]["timeline"]["running"].pop()
        with pytest.raises(PagedKVError, match=r"series\.timeline differ in length"):
            check_result(broken, "here", "pagedkv.replay/1")


def _mutate(document: dict[str, Any], data: st.DataObject) -> None:
    """Take out or replace one entry somewhere."""
    at: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        inside = at[key]
        if isinstance(inside, (dict, list)) and inside and data.draw(st.integers(0, 5)):
            at = inside
            continue
        if isinstance(at, dict) and data.draw(st.booleans()) and key != "schema":
            del at[key]
        elif key != "schema":
            at[key] = data.draw(st.sampled_from([None, True, "x", -1, 0, 2.0, 0.5, [], {}, [1], {"a": 1}]))
        return


class TestTables:
    @pytest.mark.parametrize("table", ["timeline", "requests"])
    def test_parquet_holds_what_csv_holds(self, tmp_path: Path, table: str) -> None:
        """The same columns in the same order, the same values; seconds are float64, all others int64."""
        parquet = pytest.importorskip("pyarrow.parquet")
        for suffix in ("csv", "parquet"):
            assert run("replay", "--limit", 40, f"--{table}", tmp_path / f"x.{suffix}") == 0
        found = parquet.read_table(tmp_path / "x.parquet")
        text = (tmp_path / "x.csv").read_text()
        assert found.to_pydict() == columns_of(text)
        assert found.column_names == next(csv.reader(io.StringIO(text)))
        for field in found.schema:
            assert str(field.type) == ("double" if field.name.endswith("_s") else "int64")

    def test_an_empty_column_keeps_its_type(self, tmp_path: Path) -> None:
        """One request of one token has no TPOT and no ITL."""
        parquet = pytest.importorskip("pyarrow.parquet")
        trace = tmp_path / "one.jsonl"
        trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n')
        assert run("replay", trace, "--requests", tmp_path / "x.parquet") == 0
        found = parquet.read_table(tmp_path / "x.parquet")
        assert found["tpot_s"].to_pylist() == [None]
        assert str(found.schema.field("tpot_s").type) == "double"

    @pytest.mark.parametrize("option", ["--timeline", "--requests"])
    def test_a_suffix_that_means_something_else_is_refused(
        self, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """By its name, before the work; no suffix promises nothing, and a device has none."""
        assert run("replay", "--limit", 9, option, tmp_path / "x.xls") == 2
        message = f"cannot write {tmp_path}/x.xls: a table is .csv, .parquet or .pq, got '.xls'"
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
        for path in (tmp_path / "x", tmp_path / "X.CSV", "/dev/null"):
            assert run("replay", "--limit", 9, option, path) == 0

    def test_parquet_is_the_same_byte_for_byte(self, tmp_path: Path) -> None:
        """Two runs, one file."""
        pytest.importorskip("pyarrow")
        for name in ("a", "b"):
            assert run("replay", "--limit", 20, "--requests", tmp_path / f"{name}.parquet") == 0
        assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()

    def test_the_table_and_the_series_have_the_same_columns(
        self, tmp_path: Path, result: ReplayResult
    ) -> None:
        """A reader of one finds the other."""
        assert run("replay", "--limit", 20, "--timeline", tmp_path / "x.csv") == 0
        assert list(series_of(result)["timeline"]) == list(columns_of((tmp_path / "x.csv").read_text()))


class TestPolicies:
    TRACE = chat_long(150)

    def test_no_policy_exceeds_the_bound(self) -> None:
        """Each is a replay by itself, and belady has the most hits at this capacity."""
        found = hits_by_policy(self.TRACE, policies_to_run(None, bound=True), 1500, 64)
        assert set(found) == set(POLICIES)
        assert list(found)[-1] == "belady"
        most = found["belady"].stats.hit_blocks
        assert found["lru"] == replay_hits(self.TRACE, 1500, 64, policy="lru")
        assert all(hits.stats.hit_blocks <= most for hits in found.values())
        assert found["lru"].stats.hit_blocks < most

    def test_the_bound_is_what_can_be_counted_by_hand(self) -> None:
        """Two blocks of room and A B C A B C: lru hits nothing, belady A once and C or B once."""
        ids = [0, 1, 2, 0, 1, 2]
        trace = Trace("abc", list(range(6)), [4] * 6, [1] * 6, ids, list(range(7)), 4, 3)  # type: ignore[arg-type]
        document = policies_document("abc", hits_by_policy(trace, ("lru", "belady"), 2, 4), {})
        assert [row["hit_blocks"] for row in document["rows"]] == [0, 2]
        assert [row["of_bound"] for row in document["rows"]] == [0.0, 1.0]

    def test_the_table_shows_each_beside_the_bound(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Once, although it was named too."""
        options = ("--hits-only", "--limit", 100, "--block-size", 64, "--num-blocks", 1500)
        assert run("replay", *options, "--policy", "arc,belady,lru", "--bound") == 0
        out = capsys.readouterr().out
        rows = [line.split()[1] for line in out.splitlines() if line.startswith("│")]
        assert rows == ["arc", "lru", "belady"]
        assert "100.0%" in out

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--policy", "lru,arc"), "go with --hits-only alone"),
            (("--bound",), "goes with --hits-only"),
            (("--policy", "lru,mru", "--hits-only"), "'mru' is none of lru"),
            (("--policy", "belady"), "knows the future"),
            (("--slo", "ttft=1", "--slo", "ttft=2"), "2 limits of ttft, 1 and 2 s"),
            (("--slo", "ttft=1", "--hits-only"), "leave out --slo"),
        ],
    )
    def test_what_makes_no_sense_is_refused(
        self, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
    ) -> None:
        """In one line, before any work."""
        assert run("replay", *options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
