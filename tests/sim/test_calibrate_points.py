"""A calibration to points gives the points back, or says why no device could have measured them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.calibrate_points import Point, calibrate, parse_point, points_hardware
from pagedkv.sim.timing.efficiency import Efficiency
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.hardware import read_hardware
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.timing.roofline import Roofline

WHEN = "2026-01-31T12:00:00+00:00"
MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma-2-9b")


model_of = cache(load_model)


def made_by(efficiency: Efficiency, sizes: list[tuple[int, int]], name: str, bits: float) -> list[Point]:
    """Points of a device with these rates."""
    step = Roofline.from_gpu(model_of(name), load_gpu("h100"), efficiency, bits)
    return [Point(b, c, step.decode_s(np.full(b, c, np.int64))) for b, c in sizes]


def seconds(points: list[Point], name: str, bits: float = 16) -> list[float]:
    """What the roofline says of the points once calibrated to them, through a hardware file."""
    model, gpu = model_of(name), load_gpu("h100")
    device = points_hardware(points, model, gpu, bits, WHEN).gpu
    step = Roofline.from_gpu(model, device, None, bits)
    return [step.decode_s(p.contexts) for p in points]


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    bits=st.sampled_from([16, 8, 4.25]),
    batch=st.integers(1, 64),
    context=st.integers(0, 100_000),
    slower=st.floats(1.01, 10),
)
def test_one_point_is_reproduced_exactly(
    name: str, bits: float, batch: int, context: int, slower: float
) -> None:
    """Any step that takes longer than the device's peaks allow."""
    model, gpu = model_of(name), load_gpu("h100")
    peak = Roofline.from_gpu(model, gpu, Efficiency(1.0, Efficiency.kv, Efficiency.compute, 0.0), bits)
    point = Point(batch, context, slower * peak.decode_s(np.full(batch, context, np.int64)))
    assert seconds([point], name, bits) == pytest.approx([point.seconds], rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    kv=st.floats(0.1, 1.0),
    launch=st.floats(0, 1e-3),
    per_sequence=st.floats(0, 1e-3),
    data=st.data(),
)
def test_points_of_a_device_give_its_rates(
    name: str, kv: float, launch: float, per_sequence: float, data: st.DataObject
) -> None:
    """Two points find the launch and K and V, three the seconds per sequence too; both meet their points."""
    two = Efficiency(kv=kv, launch_s_per_layer=launch)
    long = data.draw(st.integers(5_000, 50_000))
    points = made_by(two, [(1, 200), (1, long)], name, 16)
    found = calibrate(points, model_of(name), load_gpu("h100"))
    assert found.kv == pytest.approx(kv, rel=1e-5)
    assert found.launch_s_per_layer == pytest.approx(launch, abs=1e-9)
    three = Efficiency(kv=kv, launch_s_per_layer=launch, per_sequence_s=per_sequence)
    batch = data.draw(st.integers(2, 8))
    points = made_by(three, [(1, 200), (1, long), (batch, 300)], name, 16)
    try:
        found = calibrate(points, model_of(name), load_gpu("h100"))
    except PagedKVError as error:  # of a rate that is 0, rounded to less
        assume("contradict" not in str(error))
        raise
    assert found.per_sequence_s == pytest.approx(per_sequence, abs=1e-9)
    assert seconds(points, name) == pytest.approx([p.seconds for p in points], rel=1e-9)


def test_two_batches_of_one_context_in_all_find_the_seconds_per_sequence() -> None:
    """8 x 1,000 and 4 x 2,000 read the same K and V."""
    made = Efficiency(launch_s_per_layer=5e-5, per_sequence_s=3e-5, kv=1 / 1.0553)
    points = made_by(made, [(4, 2000), (8, 1000)], "llama-3.1-8b", 16)
    found = calibrate(points, model_of("llama-3.1-8b"), load_gpu("h100"))
    assert found.per_sequence_s == pytest.approx(3e-5, rel=1e-3)
    assert seconds(points, "llama-3.1-8b") == pytest.approx([p.seconds for p in points], rel=1e-9)


def test_a_step_faster_than_published_weights_has_no_launch_cost_and_faster_weights() -> None:
    """0.97 of the bandwidth instead of 0.92."""
    points = made_by(Efficiency(weights=0.97, launch_s_per_layer=0.0, kv=0.9), [(1, 0)], "llama-3.1-8b", 16)
    found = calibrate(points, model_of("llama-3.1-8b"), load_gpu("h100"))
    assert found.weights == pytest.approx(0.97)
    assert found.launch_s_per_layer == 0.0


def test_one_point_with_a_known_kernel_keeps_its_attention() -> None:
    """What one point cannot say, the engine's name does."""
    model, gpu = model_of("llama-3.1-8b"), load_gpu("l40s")
    point = Point(1, 512, 0.03)
    plain, llama_cpp = (calibrate([point], model, gpu, 16, kernel) for kernel in (None, "llama.cpp"))
    assert llama_cpp.kv < plain.kv
    assert llama_cpp.launch_s_per_layer < plain.launch_s_per_layer


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([], "1 to 3 points, got 0"),
        ([(1, 10, 9.0)] * 4, "1 to 3 points, got 4"),
        ([(1, 10, 1.0)], "faster than H100 SXM reads 15.01 GB of weights"),
        ([(8, 100_000, 20.0)], "faster than H100 SXM"),
        ([(1, 10, 9.0), (1, 10, 9.0)], "do not determine 2 rates"),
        ([(1, 10, 9.0), (2, 10, 9.1), (4, 10, 9.3)], "do not determine 3 rates"),
        ([(1, 10, 9.0), (1, 10_000, 8.9)], "contradict"),
        ([(1, 10, 9.0), (1, 10_000, 9.0)], "contradict"),
        ([(1, 10, 9.0), (1, 100_000, 9.01)], "K and V at .* of the bandwidth"),
        ([(1, 10, 9.0), (1, 10_000, 9.9), (8, 1000, 7.0)], "contradict"),
    ],
)
def test_points_that_no_device_has_are_refused(points: list[tuple[int, int, float]], says: str) -> None:
    """With the numbers."""
    measured = [Point(b, c, ms / 1e3) for b, c, ms in points]
    with pytest.raises(PagedKVError, match=says):
        calibrate(measured, model_of("llama-3.1-8b"), load_gpu("h100"))


def test_a_point_is_written_as_the_help_says() -> None:
    """In any order of the parts."""
    point = parse_point("ms=7.42,batch=8,context=1280")
    assert (point.batch, point.context) == (8, 1280)
    assert point.seconds == pytest.approx(7.42e-3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8,1280,7.42",
        "batch=8,context=1280",
        "batch=8,context=1280,ms=7,ms=8",
        "batch=x,context=1280,ms=7",
        "batch=1.5,context=1280,ms=7",
        "batch=0,context=1280,ms=7",
        "batch=8,context=-1,ms=7",
        "batch=8,context=1280,ms=0",
        "batch=8,context=1280,ms=nan",
        "batch=8,context=1280,ms=inf",
        "batch=8;context=1280;ms=7",
        "batch=8,context=1280,ms=7,tokens=3",
    ],
)
def test_what_is_no_point_is_refused(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(PagedKVError, match="point"):
        parse_point(text)


class TestCommand:
    def run(self, *argv: object) -> int:
        from pagedkv.sim.cli import main

        return main([str(arg) for arg in argv])

    def test_a_hardware_file_of_a_point_gives_the_point_in_itl(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The published point of an H100: 8 x 1,280 tokens in 7.42 ms."""
        path = tmp_path / "hw.json"
        argv = ("calibrate", path, "--point", "batch=8,context=1280,ms=7.42", "--gpu", "h100")
        assert self.run(*argv) == 0
        assert "calibrated" in capsys.readouterr().out
        assert self.run("itl", "--hardware", path, "--batch", 8, "--context", 1280, "--json", "-") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["rows"][0]["itl_s"] == pytest.approx(7.42e-3, rel=1e-9)

    def test_a_hardware_file_serves_replay_and_size_as_a_gpu_does(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The same memory, a slower step; the report names the calibration."""
        path = tmp_path / "hw.json"
        point = "batch=8,context=1280,ms=14.84"
        assert self.run("calibrate", path, "--point", point, "--gpu", "h100") == 0
        results: list[Any] = []
        for device in (("--gpu", "h100"), ("--hardware", path)):
            capsys.readouterr()
            assert self.run("replay", "--limit", 20, *device, "--json", "-") == 0
            results.append(json.loads(capsys.readouterr().out))
        by_name, by_file = results
        assert by_file["inputs"]["num_blocks"] == by_name["inputs"]["num_blocks"]
        assert by_file["latency_s"]["itl"]["mean"] > 1.3 * by_name["latency_s"]["itl"]["mean"]
        assert "calibrated" in by_file["inputs"]["gpu"]
        assert self.run("size", "--hardware", path) == 0

    def test_the_file_says_what_was_fitted_and_what_was_not(self, tmp_path: Path) -> None:
        """One point changes the launch alone."""
        path = tmp_path / "hw.json"
        assert self.run("calibrate", path, "--point", "batch=8,context=1280,ms=8", "--gpu", "h100") == 0
        hardware = read_hardware(path)
        how = {name: figure.how for name, figure in hardware.figures.items()}
        assert [name for name, origin in how.items() if origin == "fitted"] == ["layer_s"]
        assert hardware.figures["layer_s"].repetitions == 1
        assert hardware.conditions["model"] == "llama-3.1-8b"

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (("--point", "batch=8"), "no point"),
            (("--point", "batch=8,context=10,ms=9", "--seconds", "1"), "leave out --seconds"),
            (("--gpu", "h100"), "leave out --gpu"),
            (("--kernel", "vllm"), "leave out --kernel"),
            (("--device", "abacus"), "device must be cpu or cuda"),
            (("--point", "batch=8,context=10,ms=9", "--kernel", "abacus"), "no attention kernel"),
            (("--point", "batch=1,context=1,ms=9", "--gpu", "gb10"), "--tflops"),
        ],
    )
    def test_mistakes_end_with_one_line_and_no_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
    ) -> None:
        """Exit code 2."""
        path = tmp_path / "hw.json"
        assert self.run("calibrate", path, *argv) == 2
        assert says in capsys.readouterr().err
        assert not path.exists()

    def test_a_hardware_file_and_a_gpu_exclude_each_other(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """And a file that is read is not overwritten."""
        path = tmp_path / "hw.json"
        point = ("--point", "batch=8,context=1280,ms=8")
        assert self.run("calibrate", path, *point, "--gpu", "h100") == 0
        assert self.run("itl", "--hardware", path, "--gpu", "h100") == 2
        assert "exclude each other" in capsys.readouterr().err
        assert self.run("calibrate", path, *point, "--hardware", path) == 2
        assert "would overwrite" in capsys.readouterr().err
        assert self.run("itl", "--hardware", tmp_path / "absent") == 2
        assert "cannot read" in capsys.readouterr().err
