"""Step times whose attention comes from a table or from this machine, alone and under the engine."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import PagedKVError
from pagedkv.manager import KVCacheManager
from pagedkv.sim.cli import main
from pagedkv.sim.engine.engine import Engine, EngineConfig
from pagedkv.sim.output.records import Records
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.kernel_table import KernelTable
from pagedkv.sim.timing.measured_step_time import MeasuredStepTime
from pagedkv.sim.timing.models import Model, load_model
from pagedkv.sim.timing.roofline import Roofline
from pagedkv.sim.timing.step_time import Contexts, StepTimeModel
from pagedkv.sim.timing.table_step_time import TableStepTime
from pagedkv.sim.trace import Trace

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def contexts(*values: int) -> Contexts:
    return np.array(values, np.int64)


def base_of(name: str, **options: Any) -> tuple[Model, Roofline]:
    model = load_model(name, **options)
    return model, Roofline.from_gpu(model, load_gpu("h100"))


def affine_table(model: Model, base: Roofline) -> KernelTable:
    """A profile that says of full attention what the roofline says: seconds per token of one layer."""
    layer = model.spec.layers[0].bytes_per_token(model.spec.dtype) / base.kv_bytes_per_s
    points = [(b, c, layer * b * c) for b in (1, 2, 8, 32) for c in (1, 50, 1000, 30_000)]
    return KernelTable.from_points(points)


def replay(trace: Trace, step_time: StepTimeModel, num_blocks: int = 300) -> Records:
    manager = KVCacheManager(num_blocks, 16, max_seqs=8, max_seq_len=2000)
    return Engine(trace, manager, step_time, EngineConfig(8, 256, interval_s=0.01)).run()


def small_trace() -> Trace:
    rng = np.random.default_rng(3)
    return Trace.from_lengths(np.arange(6) * 0.003, rng.integers(20, 400, 6), rng.integers(2, 60, 6))


class TestTable:
    @settings(max_examples=50, deadline=None)
    @given(lengths=st.lists(st.integers(1, 30_000), min_size=1, max_size=32))
    def test_a_table_of_the_roofline_s_own_attention_gives_the_roofline(self, lengths: list[int]) -> None:
        """In every batch and mix of contexts, since both are affine in the tokens read."""
        model, base = base_of("llama-3.1-8b")
        table = TableStepTime.of_model(base, affine_table(model, base), model)
        now = contexts(*lengths)
        assert table.decode_s(now) == pytest.approx(base.decode_s(now), rel=1e-9)
        assert (table.kv_bytes(now), table.weight_bytes(3)) == (base.kv_bytes(now), base.weight_bytes(3))

    def test_sliding_layers_count_the_window(self) -> None:
        """gpt-oss: 12 layers of 128 tokens, 12 of all; one sequence of 1,000."""
        model, base = base_of("gpt-oss-20b")
        table = KernelTable.from_points([(1, 1, 1e-6), (1, 128, 1e-5), (1, 1000, 1e-4)])
        step = TableStepTime.of_model(base, table, model)
        assert step.decode_kv_s(contexts(1000)) == pytest.approx(12 * 1e-5 + 12 * 1e-4, rel=1e-12)

    @settings(max_examples=50, deadline=None)
    @given(lengths=st.lists(st.integers(1, 900), min_size=1, max_size=4))
    def test_durations_grow_evenly_for_as_many_steps_as_promised(self, lengths: list[int]) -> None:
        """Up to the next measured context or filled window."""
        model, base = base_of("gpt-oss-20b")
        points = [(b, c, 1e-6 * b * c**0.7) for b in (1, 4) for c in (1, 33, 128, 400, 2000)]
        step = TableStepTime.of_model(base, KernelTable.from_points(points), model)
        now = contexts(*lengths)
        promised = step.steps_of_same_growth(now)
        assert promised is not None and promised >= 1
        seconds = step.durations(now)
        growth = np.diff([seconds(k) for k in range(min(promised, 60))])
        assert np.ptp(growth) <= 1e-12 if len(growth) else True

    def test_the_engine_serves_the_same_trace_in_the_same_time_as_with_the_roofline(self) -> None:
        """Jumping over many steps at once, and preempting."""
        model, base = base_of("llama-3.1-8b")
        trace, table = small_trace(), affine_table(model, base)
        by_table = replay(trace, TableStepTime.of_model(base, table, model), num_blocks=34)
        by_roofline = replay(trace, base, num_blocks=34)
        assert by_table.num_finished == by_roofline.num_finished == 6
        assert by_table.num_preemptions == by_roofline.num_preemptions > 0
        np.testing.assert_allclose(by_table.finish_s, by_roofline.finish_s, rtol=1e-9)

    def test_outside_the_table_a_step_is_refused(self) -> None:
        """With the range of the profile; an empty batch needs none."""
        model, base = base_of("llama-3.1-8b")
        step = TableStepTime.of_model(base, affine_table(model, base), model)
        with pytest.raises(PagedKVError, match=r"context 40000 is outside.*1 to 30000"):
            step.decode_s(contexts(40_000))
        assert step.decode_kv_s(contexts()) == 0


@needs_torch
class TestMeasured:
    def small(self, name: str = "tinyllama-1.1b", num_blocks: int = 128, **options: Any) -> MeasuredStepTime:
        kv_dtype = options.pop("kv_dtype", "bf16")
        model, base = base_of(name, kv_dtype=kv_dtype)
        return MeasuredStepTime(base, model, num_blocks, **options)

    @pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp32"])
    def test_a_step_takes_what_its_attention_takes_here_and_the_rest_as_modelled(self, kv_dtype: str) -> None:
        """Above the roofline without attention, in seconds that a clock here could have counted."""
        step = self.small(kv_dtype=kv_dtype, repeats=3)
        now = contexts(900, 33, 700)
        assert 0 < step.decode_kv_s(now) < 60
        assert step.decode_s(now) > step.base.fixed_s(3, 3)
        assert step.decode_kv_s(contexts()) == 0
        assert step.kv_bytes(now) == step.base.kv_bytes(now)

    def test_more_context_takes_longer(self) -> None:
        """64 times as many tokens, medians of several calls."""
        step = self.small(num_blocks=1100, repeats=5)
        assert step.decode_kv_s(contexts(16_384)) > step.decode_kv_s(contexts(256))

    def test_each_step_is_measured_once_and_alone(self) -> None:
        """The engine asks again for the same step, and gets the same answer."""
        step = self.small()
        seconds = step.durations(contexts(50))
        assert seconds(0) == seconds(0)
        assert step.steps_of_same_growth(contexts(50)) == 1
        assert step.steps_of_same_growth(contexts()) is None

    def test_windows_of_different_layers_are_measured_apart(self) -> None:
        """gpt-oss has two kinds of layers; the blocks before the window are not read."""
        step = self.small("gpt-oss-20b", num_blocks=64)
        assert [(kind.layer.window, kind.num_layers) for kind in step._kinds] == [(128, 12), (None, 12)]
        assert step.decode_kv_s(contexts(600, 30)) > 0

    def test_blocks_of_a_manager_are_read_if_it_says_which(self) -> None:
        """The tables that the caller gives reach the operation; a block out of the pool does not."""
        seen: list[Contexts] = []

        def tables(now: Contexts) -> Any:
            seen.append(now)
            return np.array([[7, 3, 1]], np.int32)

        step = self.small(num_blocks=8, block_tables=tables)
        assert step.decode_kv_s(contexts(40)) > 0
        assert seen[0].tolist() == [40]

    def test_the_engine_serves_a_trace_with_it(self) -> None:
        """Every request finishes, later than with no attention at all."""
        model, base = base_of("smollm2-135m")
        trace = small_trace()
        records = replay(trace, MeasuredStepTime(base, model, 300))
        assert records.num_finished == len(trace)
        assert {s.num_steps for s in records.steps if s.num_decoding} == {1}
        assert float(records.finish_s.max()) > 60 * base.fixed_s(1, 1)

    @pytest.mark.parametrize(
        ("name", "options", "says"),
        [
            ("tinyllama-1.1b", {"device": "abacus"}, "device must be cpu or cuda"),
            ("tinyllama-1.1b", {"num_blocks": 0}, "at least 1 block"),
            ("tinyllama-1.1b", {"repeats": 0}, "1 repeat"),
            ("deepseek-v2", {}, r"latent \(MLA\)"),
        ],
    )
    def test_what_cannot_be_measured_is_refused(self, name: str, options: dict[str, Any], says: str) -> None:
        """Before anything is allocated."""
        with pytest.raises(PagedKVError, match=says):
            self.small(name, **options)

    def test_a_sequence_longer_than_the_pool_is_refused(self) -> None:
        """With the blocks that it needs; many short ones share the blocks that there are."""
        step = self.small(num_blocks=4)
        with pytest.raises(PagedKVError, match="65 tokens needs 5 blocks of 4"):
            step.decode_kv_s(contexts(65))
        assert step.decode_kv_s(contexts(64, 64, 64)) > 0


class TestOptions:
    """``pagedkv itl`` with attention from a table or from this machine."""

    TABLE = "batch,context,seconds\n1,1,1e-5\n1,131072,4e-4\n8,1,2e-5\n8,131072,2e-3\n"

    def itl(self, capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
        assert main(["itl", *map(str, argv), "--json", "-"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    def test_a_table_replaces_attention_and_the_launch_of_its_call(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """32 calls of 2 ms, beside the roofline's step without K and V and without 16.6 us a call."""
        path = tmp_path / "t.csv"
        path.write_text(self.TABLE)
        argv = ("--gpu", "h100", "--batch", 8, "--context", 131_072)
        (row,) = self.itl(capsys, *argv, "--attention-table", path)["rows"]
        (plain,) = self.itl(capsys, *argv)["rows"]
        assert row["kv_s"] == pytest.approx(32 * 2e-3)
        rest = row["itl_s"] - row["kv_s"]
        assert rest == pytest.approx(plain["itl_s"] - plain["kv_s"] - 32 * 16.64e-6, rel=1e-3)
        assert row["kv_bytes"] == plain["kv_bytes"]

    @needs_torch
    def test_this_machine_runs_the_attention(self, capsys: pytest.CaptureFixture[str]) -> None:
        """And the document says so."""
        argv = ("--model", "tinyllama-1.1b", "--gpu", "h100", "--context", 100, "--measure-attention", "cpu")
        document = self.itl(capsys, *argv)
        assert document["kind"] == "attention measured, rest modelled"
        assert 0 < document["rows"][0]["kv_s"] < 60

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (("--attention-table", "absent.csv"), "absent.csv"),
            (("--attention-table", "x", "--measure-attention", "cpu"), "exclude each other"),
            (("--extrapolate",), "--extrapolate goes with --attention-table"),
            (("--measure-attention", "abacus"), "device must be"),
            (("--bandwidth", "1e12", "--attention-table", "x"), "exclude each other"),
        ],
    )
    def test_mistakes_end_with_one_line(
        self, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
    ) -> None:
        """Exit code 2."""
        assert main(["itl", *argv]) == 2
        assert says in capsys.readouterr().err

    def test_a_context_outside_the_table_needs_extrapolation(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Refused with the range; with the option the last slope goes on."""
        path = tmp_path / "t.csv"
        path.write_text(self.TABLE)
        argv = ("--gpu", "h100", "--context", "262144", "--attention-table", str(path))
        assert main(["itl", *argv]) == 2
        assert "1 to 131072" in capsys.readouterr().err
        (row,) = self.itl(capsys, *argv, "--extrapolate")["rows"]
        assert row["kv_s"] == pytest.approx(32 * (4e-4 + 3.9e-4 * 131_072 / 131_071), rel=1e-6)
