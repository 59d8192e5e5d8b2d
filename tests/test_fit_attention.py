"""``benchmarks/fit_attention.py``: it finds the constants that made its rows, and the committed ones."""

import csv
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
if not (ROOT / "benchmarks" / "fit_attention.py").is_file():
    pytest.skip("needs the checkout: benchmarks are not installed", allow_module_level=True)

from benchmarks.fit_attention import (  # noqa: E402
    OUTPUT,
    Slope,
    engine_lines,
    errors,
    fit,
    lines,
    predict,
    slopes,
    table,
    write,
)
from pagedkv.sim.timing.attention_constants import AttentionConstants  # noqa: E402
from pagedkv.sim.timing.gpus import load_gpu  # noqa: E402
from pagedkv.sim.validation.measured_kernels import KernelRows  # noqa: E402


def rows_of(
    constants: AttentionConstants, noise: float = 0.0, dims: tuple[int, ...] = (64, 128)
) -> KernelRows:
    """Cold calls of three geometries on an H100, as the constants say, some of them disturbed."""
    cells = [(b, h, d, c) for d in dims for h in (1, 8) for b in (1, 8, 64) for c in (8192, 65_536, 131_072)]
    batch, heads, dim, context = np.array(cells, np.float64).T
    kv_bytes = batch * heads * dim * context * 4
    rows = KernelRows(
        load_gpu("h100"),
        "made up",
        "bf16",
        np.array([f"{h:g} heads of {d:g}" for h, d in zip(heads, dim, strict=True)]),
        batch,
        heads,
        context,
        np.zeros(len(cells)),
        dim * 2,
        kv_bytes,
        np.ones(len(cells)),
        np.zeros(len(cells), np.bool_),
    )
    seconds = predict(rows, constants)
    seconds[::7] *= 1 + noise
    return replace(rows, seconds=seconds)


@settings(max_examples=15, deadline=None)
@given(
    fixed=st.floats(0, 5e-5),
    byte=st.floats(1.0, 2.0),
    row=st.floats(0.05, 1.0),
    noise=st.sampled_from([0.0, 0.3]),
)
def test_constants_are_found_again_beside_outliers(
    fixed: float, byte: float, row: float, noise: float
) -> None:
    """A seventh of the rows a third slower does not pull the fit: least absolute errors."""
    made = AttentionConstants(fixed, byte, row)
    found = fit(rows_of(made, noise)).constants
    assert found.fixed_s == pytest.approx(fixed, abs=2e-6)
    assert found.byte_cost == pytest.approx(byte, rel=0.02)
    assert found.row_cost == pytest.approx(row, abs=0.03)
    assert found.head_cost == 0 or errors(rows_of(made), found).max() < 0.02


def test_a_kernel_that_does_not_split_is_seen_by_its_heads() -> None:
    """One sequence and head alone gets a fortieth of the bandwidth."""
    made = AttentionConstants(1e-5, 1.2, 0.0, head_cost=40.0)
    found = fit(rows_of(made))
    assert found.constants.head_cost == pytest.approx(40.0)
    assert found.error < 1e-3


def test_rows_of_one_width_say_nothing_of_the_cost_of_a_row() -> None:
    """It is left at 0, and bytes take it all."""
    found = fit(rows_of(AttentionConstants(1e-5, 1.0, 0.4), dims=(128,))).constants
    assert found.row_cost == 0.0
    assert found.byte_cost == pytest.approx(1.1, rel=1e-3)


def test_the_cost_of_an_engine_is_the_slope_of_its_series() -> None:
    """Three models whose steps grow by 1.5 times the time of their K and V."""
    at_peak = np.array([0.0, 1e-3, 2e-3, 4e-3])
    made = [Slope("GB10", "an engine", at_peak, base + 1.5 * at_peak) for base in (0.01, 0.02, 0.03)]
    (line,) = engine_lines(made)
    assert line.cost == pytest.approx(1.5)
    assert line.num_rows == 12
    assert (line.error, line.left_out) == pytest.approx((0, 0), abs=1e-6)


@pytest.mark.skipif("PAGEDKV_DATA" not in os.environ, reason="PAGEDKV_DATA is not set: no measured kernels")
def test_the_committed_constants_are_those_of_the_data(tmp_path: Path) -> None:
    """To the digits of the file, and the table holds every group with its error."""
    folder = Path(os.environ["PAGEDKV_DATA"], "measured_latency")
    found, engines = lines(folder), engine_lines(slopes(folder))
    write(found, engines, tmp_path / "constants.csv")
    committed, again = (
        list(csv.reader(path.read_text().splitlines())) for path in (OUTPUT, tmp_path / "constants.csv")
    )
    assert [row[:3] for row in again] == [row[:3] for row in committed]
    for new, old in zip(again[1:], committed[1:], strict=True):
        assert [float(x) for x in new[3:7]] == pytest.approx([float(x) for x in old[3:7]], rel=1e-2, abs=2e-2)
    text = table(found, engines)
    assert text.count("\n|") == 1 + len(found) + len(engines)
    assert "TRTLLM 1.0.0 torch_flow (not used)" in text
