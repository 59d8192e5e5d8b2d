"""Measuring this machine: what is written down, and that the file serves a step model."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from pagedkv.sim.timing import calibrate
from pagedkv.sim.timing.calibrate import Measurement, hardware_from, measure, num_measurements
from pagedkv.sim.timing.hardware import read_hardware
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.timing.roofline import Roofline, efficiency_of

WHEN = "2026-01-31T12:00:00+00:00"

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def attention(dtype: str, batch: int, context: int, fixed_s: float, rate: float) -> Measurement:
    size = batch * context * 4096.0 / (1 if dtype == "bf16" else 2)
    seconds = fixed_s + size / rate
    return Measurement("attention", "attention", size, "bytes", seconds, 9, dtype, batch, context)


def made_up() -> list[Measurement]:
    """A machine of 1e11 bytes/s whose bf16 attention reaches 0.5 and int8 0.25 of it, after 10 us."""
    return [
        Measurement("copy", "copy", 8e9, "bytes", 0.1, 5),
        Measurement("weights", "linear", 1e9, "bytes", 0.01, 5),
        Measurement("gemm", "linear", 3e12, "FLOP", 2.0, 5),
        Measurement("small", "small", 1.0, "call", 2e-6, 5),
        *(attention("bf16", b, c, 1e-5, 5e10) for b in (1, 8) for c in (1024, 4096)),
        *(attention("int8", b, c, 1e-5, 2.5e10) for b in (1, 8) for c in (1024, 4096)),
    ]


@needs_torch
def test_rates_are_shares_of_the_fastest_thing_that_was_measured() -> None:
    """Weights at 1e11 bytes/s are the peak here; attention's fixed cost and rate are found exactly."""
    gpu = hardware_from(made_up(), "cpu", WHEN, {"cpu": "a machine"}).gpu
    assert (gpu.bandwidth, gpu.fp16_flops) == pytest.approx((1e11, 1.5e12))
    bf16 = efficiency_of(gpu, load_model("llama-3.1-8b").spec)
    int8 = efficiency_of(gpu, load_model("llama-3.1-8b", kv_dtype="int8").spec)
    assert (bf16.weights, bf16.kv, int8.kv) == pytest.approx((1.0, 0.5, 0.25))
    assert bf16.launch_s_per_layer == pytest.approx(7 * 2e-6 + 1e-5)


@needs_torch
def test_noise_that_gives_a_negative_fixed_cost_is_fitted_through_the_origin() -> None:
    """Short calls faster than the line through the long ones."""
    measurements = [m for m in made_up() if m.kind != "attention"]
    for dtype in ("bf16", "int8"):
        for context, seconds in ((1024, 1e-5), (4096, 1e-4)):
            measurements.append(
                Measurement("attention", "x", context * 4096.0, "bytes", seconds, 3, dtype, 1, context)
            )
    hardware = hardware_from(measurements, "cpu", WHEN, {"cpu": "a machine"})
    assert hardware.attention["bf16"]["fixed_s"].value == 0.0
    assert hardware.attention["bf16"]["byte_cost"].value >= 1.0


@needs_torch
class TestHere:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sizes that a test can afford; what they measure is no property of the machine."""
        monkeypatch.setattr(calibrate, "LEAST_COPY_BYTES", 2**20)
        monkeypatch.setattr(calibrate, "CACHES", 0)
        monkeypatch.setattr(calibrate, "LINEAR", (128, 256))
        monkeypatch.setattr(calibrate, "GEMM_TOKENS", 16)

    def test_everything_is_timed_several_times(self) -> None:
        """As many measurements as promised; attention in both dtypes at every size."""
        found = list(measure("cpu", 0.1, (64, 256), (1, 2)))
        assert len(found) == num_measurements((64, 256), (1, 2)) == 12
        assert all(m.seconds > 0 and m.repetitions >= 3 for m in found)
        cells = {(m.dtype, m.batch, m.context) for m in found if m.kind == "attention"}
        assert cells == {(d, b, c) for d in ("bf16", "int8") for b in (1, 2) for c in (64, 256)}
        by_size = {m.context: m.amount for m in found if (m.dtype, m.batch) == ("int8", 2)}
        assert by_size == {64: 2 * 64 * 2112, 256: 2 * 256 * 2112}

    def test_the_clock_of_one_thread_is_refused_for_several(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """It would not see the others' work; nothing is written."""
        from pagedkv.sim.cli import main

        path = tmp_path / "hw.json"
        assert main(["calibrate", str(path), "--clock", "cpu", "--threads", "2"]) == 2
        assert "needs one thread on a CPU, got 2" in capsys.readouterr().err
        assert not path.exists()

    def test_the_command_writes_a_file_that_a_step_model_takes(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the conditions of every figure; ``-`` prints it."""
        from pagedkv.sim.cli import main
        from pagedkv.sim.commands import calibrate_command

        monkeypatch.setattr(calibrate_command, "CONTEXTS", (64, 256))
        monkeypatch.setattr(calibrate_command, "BATCHES", (1, 2))
        path = tmp_path / "hw.json"
        assert main(["calibrate", str(path), "--seconds", "0.1", "--threads", "1", "--clock", "cpu"]) == 0
        assert "paged attention int8, batch 2, context 256" in capsys.readouterr().out
        hardware = read_hardware(path)
        assert (hardware.conditions["threads"], hardware.conditions["clock"]) == (1, "cpu")
        assert len(hardware.measurements) == 12
        for figure in (*hardware.figures.values(), *hardware.attention["bf16"].values()):
            assert figure.how in ("measured", "fitted", "reported", "stated")
            assert figure.repetitions >= 3 or figure.how in ("reported", "stated")
        step = Roofline.from_gpu(load_model("tinyllama-1.1b"), hardware.gpu)
        assert step.decode_s(np.array([100, 200])) > 0
        assert main(["calibrate", "-", "--seconds", "0.1"]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == "pagedkv.hardware/1"
