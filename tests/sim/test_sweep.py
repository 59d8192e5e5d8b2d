"""Sweeps: the same rows whatever ran them, points that are done once, and failures that stay in their row."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import PagedKVError
from pagedkv.sim.cli import main
from pagedkv.sim.output.slo import SLO
from pagedkv.sim.replay import ReplaySetup, blocks_in_memory, run_replay
from pagedkv.sim.sweep import sweep as sweep_module
from pagedkv.sim.sweep.grid import Grid, Setting
from pagedkv.sim.sweep.sweep import Sweep, SweepResult, Task, run_task
from pagedkv.sim.sweep.sweep_store import Outcome, PointStore, trace_digest
from pagedkv.sim.sweep.sweep_table import rows_csv
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.workload import chat_long

REQUESTS = 15
AXES: dict[str, tuple[Setting, ...]] = {
    "gpu": ("h100", "b200"),
    "block-size": ("16", "64"),
    "kv-dtype": ("bf16", "int8"),
    "num-blocks": ("300", "20000"),
}
OPTIONS = [part for name, values in AXES.items() for part in (f"--{name}", *map(str, values))]
NUM_POINTS = 16
Capture = pytest.CaptureFixture[str]


def sweep(**more: tuple[Setting, ...]) -> Sweep:
    return Sweep(chat_long(REQUESTS), Grid({**AXES, **more}))


def csv_of(result: SweepResult) -> str:
    return rows_csv(result.columns, result.rows)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The table of the serial run, which every other one must equal."""
    return csv_of(sweep().run(PointStore(tmp_path_factory.mktemp("serial") / "points")))


@pytest.fixture
def store(tmp_path: Path) -> PointStore:
    return PointStore(tmp_path / "points")


def files_of(store: PointStore) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in store.folder.glob("*.json")}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per replay that is run in this process from now on."""
    calls: list[int] = []

    def count(*args: Any) -> Any:
        calls.append(len(calls))
        return run_replay(*args)

    monkeypatch.setattr(sweep_module, "run_replay", count)
    return calls


def command(out: Path, *options: object) -> list[str]:
    return ["sweep", "--limit", str(REQUESTS), *OPTIONS, "--out", str(out), *map(str, options)]


class TestRows:
    def test_a_row_is_a_replay(self, store: PointStore) -> None:
        """The figures of one point are those of the same replay, run by itself."""
        found = Sweep(
            chat_long(40),
            Grid({"block-size": ("64",), "gpu": ("h100",), "speed": ("2",)}),
            [SLO("ttft", 1.0)],
        ).run(store)
        (row,) = found.rows
        model, gpu = load_model("llama-3.1-8b", block_size=64), load_gpu("h100")
        num_blocks = blocks_in_memory(model, gpu.memory_bytes, 0.9, 16)
        alone = run_replay(chat_long(40).faster(2.0), ReplaySetup(model, gpu, num_blocks)).summary
        assert (row["num_blocks"], row["block_size"], row["speed"]) == (num_blocks, 64, 2.0)
        assert row["pool_bytes"] == num_blocks * model.spec.bytes_per_block
        assert row["makespan_s"] == alone.makespan_s
        assert row["ttft_p99_s"] == alone.ttft.p99
        assert row["itl_p99_s"] == alone.itl.p99
        assert row["hit_tokens"] == alone.hit_tokens
        assert row["evicted_blocks"] == alone.stats.evicted_blocks
        met = row["goodput_share"]
        assert isinstance(met, float)
        assert 0 < met < 1

    def test_rows_are_in_grid_order_with_their_conditions(self, store: PointStore) -> None:
        """The last axis varies fastest, and every row says what it was run with."""
        rows = sweep().run(store).rows
        assert [row["num_blocks"] for row in rows] == [300, 20000] * 8
        assert [row["gpu"] for row in rows] == ["H100 SXM"] * 8 + ["B200 SXM"] * 8
        assert {row["requests"] for row in rows} == {REQUESTS}

    def test_what_fails_is_a_row_and_stops_nothing(self, store: PointStore) -> None:
        """300 blocks hold no prompt of this trace; the others have their figures."""
        result = sweep().run(store)
        assert len(result.failed) == NUM_POINTS // 2
        for row in result.rows:
            assert (row["error"] is None) == (row["num_blocks"] == 20000)
            assert (row["makespan_s"] is None) == (row["error"] is not None)
        assert "the pool has 300" in str(result.rows[0]["error"])

    def test_an_option_without_a_column_gets_one(self, store: PointStore) -> None:
        """Whatever replay has can be swept: flags, and options that nobody listed."""
        grid = Grid({"queue": ("fcfs", "shortest"), "no-prefix-caching": (False, True)})
        result = Sweep(chat_long(REQUESTS), grid).run(store)
        assert [row["queue"] for row in result.rows] == ["fcfs", "fcfs", "shortest", "shortest"]
        assert [row["prefix_caching"] for row in result.rows] == [True, False, True, False]
        assert "queue" in [column.name for column in result.columns]

    @pytest.mark.parametrize(
        ("axes", "message"),
        [
            ({"model": ("llama-9-8b",)}, "llama-9-8b"),
            ({"gpu": ("h100", "h1000")}, "h1000"),
            ({"policy": ("lru,arc",)}, "several policies"),
            ({"policy": ("belady",)}, "knows the future"),
        ],
    )
    def test_names_that_do_not_exist_are_refused_at_once(self, axes: Any, message: str) -> None:
        """A slip of the pen is no condition: nothing runs."""
        with pytest.raises(PagedKVError, match=message):
            Sweep(chat_long(3), Grid(axes))


class TestDoneOnce:
    def test_the_second_run_replays_nothing(
        self, store: PointStore, serial: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Everything is found, failures included; no file changes, and the table is the same."""
        sweep().run(store)
        before, calls = files_of(store), counted(monkeypatch)
        assert len(before) == NUM_POINTS
        again = sweep().run(store)
        assert calls == []
        assert again.num_found == NUM_POINTS
        assert files_of(store) == before
        assert csv_of(again) == serial

    def test_an_interrupted_sweep_does_the_rest(
        self, store: PointStore, serial: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stopped after five points, five are kept and eleven are done."""

        def stop(done: int) -> None:
            if done == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sweep().run(store, on_progress=stop)
        before, calls = files_of(store), counted(monkeypatch)
        assert len(before) == 5
        result = sweep().run(store)
        assert len(calls) == NUM_POINTS - 5
        assert before.items() <= files_of(store).items()
        assert csv_of(result) == serial

    def test_a_larger_grid_does_what_is_new(self, store: PointStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """A value more on an axis: the points of the others are found."""
        sweep().run(store)
        calls = counted(monkeypatch)
        result = sweep(gpu=("h100", "b200", "l40s")).run(store)
        assert (len(calls), result.num_found) == (NUM_POINTS // 2, NUM_POINTS)

    @pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b'{"sha256": 1}'])
    def test_a_damaged_file_is_a_point_to_do(
        self, store: PointStore, serial: str, damage: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever is in it, it is done again and replaced."""
        sweep().run(store)
        before, calls = files_of(store), counted(monkeypatch)
        victim = store.folder / sorted(before)[3]
        victim.write_bytes(damage)
        assert csv_of(sweep().run(store)) == serial
        assert len(calls) == 1
        assert victim.read_bytes() == before[victim.name][1]

    def test_a_changed_figure_is_noticed(self, store: PointStore) -> None:
        """A file that was edited is not believed."""
        key = {"settings": {"block-size": "16"}}
        store.put(key, Outcome({"makespan_s": 1.0}))
        path = store.path(key)
        path.write_text(path.read_text().replace("1.0", "2.0"))
        assert store.get(key) is None

    def test_a_file_of_another_point_is_not_taken(self, store: PointStore) -> None:
        """A copy under the wrong name says of which point it is."""
        store.put({"settings": 1}, Outcome({}))
        store.path({"settings": 1}).rename(store.path({"settings": 2}))
        assert store.get({"settings": 2}) is None

    def test_another_trace_or_version_makes_new_points(
        self, store: PointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing of before is taken for what it is not."""
        grid = Grid({"num-blocks": ("20000",)})
        assert Sweep(chat_long(5), grid).run(store).num_found == 0
        assert Sweep(chat_long(6), grid).run(store).num_found == 0
        assert Sweep(chat_long(5, seed=1), grid).run(store).num_found == 0
        assert Sweep(chat_long(5), grid, [SLO("ttft", 1.0)]).run(store).num_found == 0
        monkeypatch.setattr(sweep_module, "__version__", "99.0")
        assert Sweep(chat_long(5), grid).run(store).num_found == 0
        assert len(files_of(store)) == 5
        assert Sweep(chat_long(5), grid).run(store).num_found == 1

    def test_a_files_content_counts_and_not_its_name(self, store: PointStore, tmp_path: Path) -> None:
        """A model's config that changes under its name makes new points."""
        config = {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 1000,
        }
        path = tmp_path / "config.json"
        for layers, found in ((2, 0), (3, 0), (2, 1)):
            path.write_text(json.dumps(config | {"num_hidden_layers": layers}))
            grid = Grid({"model": (str(path),), "num-blocks": ("20000",)})
            assert Sweep(chat_long(5), grid).run(store).num_found == found

    def test_a_bug_is_a_row_that_is_tried_again(
        self, store: PointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is no refusal of the library may go away: the row says what it was, and no file is kept."""

        def broken(*args: Any) -> Any:
            raise MemoryError("no room")

        grid = Grid({"num-blocks": ("20000",)})
        with monkeypatch.context() as patch:
            patch.setattr(sweep_module, "run_replay", broken)
            assert Sweep(chat_long(5), grid).run(store).failed[0]["error"] == "MemoryError: no room"
        assert files_of(store) == {}
        assert Sweep(chat_long(5), grid).run(store).failed == []

    def test_a_worker_of_another_version_says_so(self) -> None:
        """Its figures would be somebody else's; the point is tried again."""
        outcome = run_task(chat_long(3), Task({}, (), "99.0"))
        assert outcome.error is not None
        assert "the sweep is of pagedkv 99.0, this worker has" in outcome.error
        assert not outcome.is_final


class TestTraceDigest:
    def test_its_name_does_not_count_and_all_else_does(self) -> None:
        """Times, lengths, contents."""
        trace = chat_long(30)
        others = [trace.faster(2.0), trace.head(29), chat_long(30, seed=2)]
        assert len({trace_digest(other) for other in [trace, *others]}) == 4
        assert trace_digest(chat_long(30)) == trace_digest(trace)


class TestCommand:
    def test_the_table_the_picture_and_the_exit_code(
        self, tmp_path: Path, serial: str, capsys: Capture
    ) -> None:
        """1, since half the points never fit; they are named, and the others are weighed."""
        out, plot = tmp_path / "out.csv", tmp_path / "pareto.png"
        assert main(command(out, "--plot", plot)) == 1
        shown = capsys.readouterr()
        assert out.read_text() == serial
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert "Points that no other beats: less pool_bytes, more output_tokens_per_s" in shown.out
        assert "16 points: 0 were done before, 8 failed" in shown.out
        assert shown.err == ""

    def test_exit_code_0_if_every_point_has_figures(self, tmp_path: Path) -> None:
        """And a grid file with flags on top, in that order."""
        grid, out = tmp_path / "grid.toml", tmp_path / "out.csv"
        grid.write_text("block-size = [16, 64]\n")
        argv = ["sweep", "--limit", "5", "--grid", str(grid), "--policy", "lru", "arc", "--out", str(out)]
        assert main(argv) == 0
        with out.open() as file:
            rows = list(csv.DictReader(file))
        assert [(row["block_size"], row["policy"]) for row in rows] == [
            ("16", "lru"),
            ("16", "arc"),
            ("64", "lru"),
            ("64", "arc"),
        ]

    def test_parquet_holds_the_same(self, tmp_path: Path, serial: str) -> None:
        """Typed; twice the same bytes."""
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
        for path in paths:
            assert main(command(path)) == 1
        assert paths[0].read_bytes() == paths[1].read_bytes()
        table = parquet.read_table(paths[0])
        columns = sweep().columns
        assert table.column_names == [column.name for column in columns]
        assert rows_csv(columns, table.to_pylist()) == serial
        assert str(table.schema.field("num_blocks").type) == "int64"
        assert str(table.schema.field("prefix_caching").type) == "bool"

    def test_csv_on_standard_output(self, tmp_path: Path, serial: str, capsys: Capture) -> None:
        """And nothing else there."""
        assert main([*command(Path("-")), "--points", str(tmp_path / "points")]) == 1
        assert capsys.readouterr().out == serial

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--out", "-"], "state --points, too"),
            (["--out", "x.csv", "--pareto", "gpu", "pool_bytes"], "no figure 'gpu'"),
            (["--out", "x.csv", "--pareto", "goodput_share", "pool_bytes"], "state --slo"),
            (
                ["--out", "x.csv", "--gpu", "h100", "--grid", "grid.toml"],
                "--gpu is on the command line and in",
            ),
            (["--out", "no/such/x.csv"], "no folder"),
            (["--out", "x.csv", "--block-size", "0"], "'0' is no whole number"),
            (["--out", "grid.toml", "--grid", "grid.toml"], "would overwrite"),
            (["--out", "x.csv", "--points", "no/such"], "cannot make the folder no/such"),
        ],
    )
    def test_refuses(
        self,
        options: list[str],
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: Capture,
    ) -> None:
        """In one line, before anything runs."""
        monkeypatch.chdir(tmp_path)
        Path("grid.toml").write_text('gpu = "h100"\n')
        assert main(["sweep", "--limit", "3", *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not Path("x.csv").exists()
