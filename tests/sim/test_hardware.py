"""Hardware files: a round trip, the device in them, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.hardware import SCHEMA, Figure, Hardware, read_hardware
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.timing.roofline import efficiency_of, origin_of

WHEN = "2026-01-31T12:00:00+00:00"


def hardware(**changes: float) -> Hardware:
    values = {
        "memory_bytes": 2**34,
        "bandwidth": 1e12,
        "flops": 1e14,
        "weights": 0.8,
        "compute": 0.5,
        "layer_s": 1e-5,
        "per_sequence_s": 2e-6,
    }
    figures = {name: Figure(value, "measured", name, WHEN, 7) for name, value in (values | changes).items()}
    costs = {"fixed_s": 1e-6, "byte_cost": 1.25, "row_cost": 0.0, "head_cost": 0.0}
    attention = {
        "bf16": {name: Figure(value, "fitted", name, WHEN, 12) for name, value in costs.items()},
        "int8": {name: Figure(value * 2, "fitted", name, WHEN, 12) for name, value in costs.items()},
    }
    return Hardware("a machine", WHEN, figures, attention, {"threads": 2}, [{"kind": "copy"}])


def write(path: Path, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    document = hardware().document()
    if change is not None:
        change(document)
    path.write_text(json.dumps(document))
    return path


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """Every figure with its conditions."""
    assert read_hardware(write(tmp_path / "hw.json")) == hardware()


def test_its_device_has_the_rates_of_the_file(tmp_path: Path) -> None:
    """By KV dtype; the fixed cost of the attention call is part of the launch."""
    gpu = read_hardware(write(tmp_path / "hw.json")).gpu
    assert (gpu.name, gpu.memory_bytes, gpu.bandwidth, gpu.fp16_flops) == ("a machine", 2**34, 1e12, 1e14)
    found = efficiency_of(gpu, load_model("llama-3.1-8b").spec)
    assert (found.weights, found.kv, found.compute, found.per_sequence_s) == (0.8, 0.8, 0.5, 2e-6)
    assert found.launch_s_per_layer == pytest.approx(1.1e-5)
    assert efficiency_of(gpu, load_model("llama-3.1-8b", kv_dtype="int8").spec).kv == pytest.approx(0.4)
    assert origin_of(gpu, "bf16") == f"hardware file of {WHEN}"


def test_a_table_gpu_s_rates_come_from_no_file() -> None:
    """Names and files do not mix."""
    assert load_gpu("h100").rates is None


def test_every_number_says_how_when_and_how_often(tmp_path: Path) -> None:
    """In the file itself, which others read."""
    document = json.loads(write(tmp_path / "hw.json").read_text())
    assert document["schema"] == SCHEMA
    figures = [*document["figures"].values(), *document["attention"]["bf16"].values()]
    assert len(figures) == 11
    for figure in figures:
        assert set(figure) == {"value", "how", "what", "when", "repetitions"}


def set_in(*path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for name in path[:-1]:
            document = document[name]
        document[path[-1]] = value

    return change


def delete(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for name in path[:-1]:
            document = document[name]
        del document[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_in("schema", value="pagedkv.hardware/2"), "found 'pagedkv.hardware/2'"),
        (delete("schema"), "found None"),
        (delete("figures", "bandwidth"), "no field 'bandwidth'"),
        (delete("attention", "bf16", "byte_cost"), "no field 'byte_cost'"),
        (delete("conditions"), "no field 'conditions'"),
        (set_in("attention", value={}), "attention rates"),
        (set_in("attention", value=[]), "attribute"),
        (set_in("figures", "bandwidth", "value", value=0), "bandwidth must be above 0"),
        (set_in("figures", "flops", "value", value=-1), "flops must be above 0"),
        (set_in("figures", "weights", "value", value=1.5), "weights must be in"),
        (set_in("figures", "layer_s", "value", value=-1e-9), "launch_s_per_layer"),
        (set_in("figures", "weights", "value", value="fast"), "needs a number"),
        (set_in("figures", "weights", "value", value=True), "needs a number"),
        (set_in("figures", "weights", "value", value=float("nan")), "finite"),
        (set_in("figures", "weights", "how", value="guessed"), "guessed"),
        (set_in("figures", "weights", "unit", value="GB/s"), "unit"),
        (set_in("figures", "memory_bytes", "value", value=float("inf")), "finite"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    """One sentence, whatever is wrong."""
    with pytest.raises(PagedKVError, match=f"(?s)hw.json.*{says}"):
        read_hardware(write(tmp_path / "hw.json", change))


@pytest.mark.parametrize("content", ["", "[1]", "{", "null", '"x"'])
def test_what_is_no_document_is_refused(tmp_path: Path, content: str) -> None:
    """Nor is a folder, nor nothing at all."""
    path = tmp_path / "hw.json"
    path.write_text(content)
    with pytest.raises(PagedKVError, match=r"hw\.json"):
        read_hardware(path)
    with pytest.raises(PagedKVError, match="cannot read"):
        read_hardware(tmp_path)
    with pytest.raises(PagedKVError, match="cannot read"):
        read_hardware(tmp_path / "absent")
