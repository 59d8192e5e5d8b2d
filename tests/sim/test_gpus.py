"""The table of GPUs: units, names, and agreement with the figures it was taken from."""

import csv
import os
import re
from pathlib import Path

import pytest

from pagedkv.errors import SpecError
from pagedkv.sim.timing.gpus import GPU, gpu_names, load_gpu

# the one capacity that a driver reports in decimal units
DECIMAL_CAPACITY = "B300 SXM"


def test_an_h100_has_its_published_figures_in_base_units() -> None:
    gpu = load_gpu("h100")
    assert gpu == GPU(
        name="H100 SXM",
        memory_bytes=80 * 2**30,
        bandwidth=3.35e12,
        l2_bytes=50 * 2**20,
        fp16_flops=989e12,
        fp8_flops=1979e12,
        int8_ops=1979e12,
        source=gpu.source,
        architecture="Hopper",
    )


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("a100", "A100-80 SXM"),
        ("A100 40 SXM", "A100-40 SXM"),
        ("h100-sxm", "H100 SXM"),
        ("H100_PCIe", "H100 PCIe"),
        ("h200", "H200 SXM"),
        ("b200", "B200 SXM"),
        ("rtx4090", "RTX 4090"),
        ("RTX-4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("mi300x", "MI300X"),
        ("gaudi3", "Gaudi 3"),
        ("DGX Spark", "GB10 (DGX Spark)"),
        ("m2 ultra", "Apple M2 Ultra"),
        ("m4-max", "Apple M4 Max 16c"),
    ],
)
def test_short_names_find_the_device_they_usually_mean(alias: str, name: str) -> None:
    assert load_gpu(alias).name == name


@pytest.mark.parametrize("name", gpu_names())
def test_every_name_finds_itself_however_it_is_written(name: str) -> None:
    for written in (name, name.lower(), name.upper().replace(" ", "-"), name.replace(" ", "")):
        assert load_gpu(written).name == name


@pytest.mark.parametrize("name", gpu_names())
def test_every_row_is_plausible_and_says_where_it_comes_from(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.source
    assert gpu.architecture
    assert gpu.rates is None
    assert 2**34 <= gpu.memory_bytes <= 2**39
    assert 1e11 < gpu.bandwidth < 1e13
    assert gpu.l2_bytes is None or 2**22 < gpu.l2_bytes < gpu.memory_bytes
    assert gpu.fp16_flops is None or 5e13 < gpu.fp16_flops < 5e15
    assert gpu.fp8_flops is None or (gpu.fp16_flops is not None and gpu.fp8_flops >= gpu.fp16_flops)


def test_consumer_cards_state_the_rate_with_fp32_accumulation() -> None:
    assert load_gpu("rtx4090").fp16_flops == pytest.approx(165.2e12)
    assert load_gpu("rtx3090").fp16_flops == pytest.approx(71e12)


def test_an_unknown_figure_is_none_and_never_zero() -> None:
    spark = load_gpu("gb10")
    assert (spark.l2_bytes, spark.fp16_flops, spark.fp8_flops, spark.int8_ops) == (None, None, None, None)


def test_an_unknown_name_is_refused_with_close_names() -> None:
    with pytest.raises(SpecError, match="no GPU 'h1000'; close names: H100 SXM"):
        load_gpu("h1000")
    with pytest.raises(SpecError, match="no GPU 'abacus machine'; known: RTX 3090"):
        load_gpu("abacus machine")
    with pytest.raises(SpecError, match="no GPU ''"):
        load_gpu("")


def first_number(text: str) -> float | None:
    found = re.match(r"[\d.]+", text)
    return float(found.group()) if found else None


def external_rows() -> list[dict[str, str]]:
    folder = os.environ.get("PAGEDKV_DATA")
    if folder is None:
        pytest.skip("PAGEDKV_DATA is not set: no external table to compare with")
    path = Path(folder) / "specs" / "gpu_specs.csv"
    if not path.exists():
        pytest.skip(f"{path} does not exist: no external table to compare with")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def test_every_row_agrees_with_the_external_table() -> None:
    rows = {row["name"]: row for row in external_rows()}
    for name in gpu_names():
        gpu, row = load_gpu(name), rows[name]
        if name != DECIMAL_CAPACITY:
            assert gpu.memory_bytes == int(row["mem_GB"]) * 2**30, name
        assert gpu.bandwidth == float(row["bw_GBps"]) * 1e9, name
        assert gpu.l2_bytes == scaled(first_number(row["l2_MB"]), 2**20), name
        assert gpu.fp16_flops == scaled(first_number(row["fp16_dense_TFLOPS"]), 1e12), name
        assert gpu.fp8_flops == scaled(first_number(row["fp8_dense_TFLOPS"]), 1e12), name
        assert gpu.int8_ops == scaled(first_number(row["int8_dense_TOPS"]), 1e12), name
