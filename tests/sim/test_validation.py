"""Measured kernels and speeds against the model: which rows count, what is refused, goals on real data."""

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import PagedKVError
from pagedkv.sim.cli import main
from pagedkv.sim.timing.attention_constants import fitted_kernels
from pagedkv.sim.validation.measured_kernels import read_kernels
from pagedkv.sim.validation.measured_rates import RateRow, read_rates
from pagedkv.sim.validation.validate_kernels import COLD, kernel_errors
from pagedkv.sim.validation.validate_rates import rate_errors

KERNEL = next(k for k in fitted_kernels() if k.gpu == "H100 SXM" and k.is_default and k.kv_dtype == "bf16")
FRAMEWORK, VERSION, SOURCE = KERNEL.kernel.split()


Capture = pytest.CaptureFixture[str]


def kernel_row(batch: int, context: int, seconds: float | None = None, **changes: Any) -> dict[str, Any]:
    """A call on an H100, by default exactly as the constants say."""
    kv_bytes = batch * context * 4096.0
    size, heads, row_bytes = (np.array([value]) for value in (kv_bytes, batch * 8.0, 256.0))
    modelled = float(KERNEL.constants.seconds(size, heads, row_bytes, 3.35e12)[0])
    return {
        "system": "h100",
        "device": "NVIDIA H100 80GB HBM3",
        "framework": FRAMEWORK,
        "version": VERSION,
        "kernel_source": SOURCE,
        "geometry": "Llama-3.1-8B",
        "batch_size": batch,
        "num_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "window_size": 0,
        "kv_cache_dtype": "bfloat16",
        "ctx": context,
        "latency_ms_per_layer": (seconds or modelled) * 1e3,
        "kv_bytes_per_layer": kv_bytes,
        "suspect": 0,
        **changes,
    }


def rate_row(batch: int, context: int, ms: float, **changes: Any) -> dict[str, Any]:
    return {
        "model": "llama-3.1-8b",
        "weight_dtype": "bf16",
        "gpu": "h100_sxm",
        "tp": 1,
        "batch": batch,
        "context": float(context),
        "kv_dtype": "bf16",
        "tok_s": "",
        "itl_ms": ms,
        "engine": "vllm 1",
        "method": "decode",
        "source": "somewhere",
        **changes,
    }


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_kernels(folder: Path, *rows: dict[str, Any]) -> Path:
    return write(folder, "decode_attention_per_layer.csv", list(rows))


def write_rates(folder: Path, *rows: dict[str, Any]) -> Path:
    return write(folder, "itl_end_to_end.csv", list(rows))


class TestKernels:
    def test_rows_are_cold_if_no_l2_holds_them_and_the_context_is_long(self, tmp_path: Path) -> None:
        """8,192 tokens and more than twice 50 MiB, full attention, not doubted."""
        path = write_kernels(
            tmp_path,
            kernel_row(4, 8192),  # 134 MB
            kernel_row(2, 8192),  # 67 MB: in L2
            kernel_row(64, 4096),  # short
            kernel_row(4, 8192, window_size=128),
            kernel_row(4, 8192, suspect=1),
        )
        (rows,) = read_kernels(path)
        assert rows.is_cold.tolist() == [True, False, False, False, False]
        assert rows.where(rows.is_cold).kv_bytes.tolist() == [4 * 8192 * 4096.0]
        assert (rows.gpu.name, rows.kernel, rows.kv_dtype) == ("H100 SXM", KERNEL.kernel, "bf16")

    def test_the_units_of_the_file_become_base_units(self, tmp_path: Path) -> None:
        """Milliseconds a layer become seconds, elements of a head become bytes of a row."""
        path = write_kernels(tmp_path, kernel_row(8, 8192, 2.5e-4), kernel_row(8, 8192, kv_cache_dtype="fp8"))
        narrow, wide = sorted(read_kernels(path), key=lambda rows: rows.row_bytes[0])
        assert wide.seconds[0] == pytest.approx(2.5e-4)
        assert (narrow.row_bytes[0], wide.row_bytes[0]) == (128.0, 256.0)
        (row,) = read_rates(write_rates(tmp_path, rate_row(1, 10, 7.5)))
        assert row.seconds == pytest.approx(7.5e-3)

    def test_calls_as_modelled_have_no_error_and_slower_ones_their_share(self, tmp_path: Path) -> None:
        """Twice as slow as modelled is an error of -50 %, and fails its bound."""
        exact = kernel_row(8, 8192)
        slow = kernel_row(8, 16_384)
        slow["latency_ms_per_layer"] *= 2
        for rows, error, holds in (([exact], 0.0, True), ([slow], 0.5, False), ([exact, slow], 0.25, False)):
            errors, unused = kernel_errors(read_kernels(write_kernels(tmp_path, *rows)))
            assert not unused
            assert [e.condition for e in errors] == [COLD, COLD]  # the kernel, and all of its width
            for found in errors:
                assert found.error == pytest.approx(error, abs=1e-9)
                assert found.holds == holds

    def test_what_has_no_bound_cannot_fail(self, tmp_path: Path) -> None:
        """Short calls and windows are shown."""
        rows = [kernel_row(8, 1024, 1.0), kernel_row(8, 8192, 1.0, window_size=128)]
        errors, _ = kernel_errors(read_kernels(write_kernels(tmp_path, *rows)))
        assert len(errors) == 2 and all(e.holds and e.allowed is None for e in errors)

    def test_a_kernel_without_constants_is_named_with_the_reason(self, tmp_path: Path) -> None:
        """Faster than the memory: not measured cold. Nothing but short calls: nothing to fit."""
        fast = kernel_row(8, 8192, 8 * 8192 * 4096 / 3.34e12, framework="Abacus")
        (item,) = kernel_errors(read_kernels(write_kernels(tmp_path, fast)))[1]
        assert "Abacus" in item.what and "1.00 of the peak" in item.why and "not measured cold" in item.why
        (item,) = kernel_errors(read_kernels(write_kernels(tmp_path, kernel_row(1, 9, framework="A"))))[1]
        assert "no rows with context" in item.why

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"device": "Abacus"}, "no GPU 'Abacus'"),
            ({"kv_cache_dtype": "int3"}, "'int3'"),
            ({"latency_ms_per_layer": 0}, "seconds is 0"),
            ({"latency_ms_per_layer": "nan"}, "seconds is nan"),
            ({"latency_ms_per_layer": ""}, "convert"),
            ({"batch_size": -1}, "batch is -1"),
            ({"ctx": math.inf}, "context is inf"),
            ({"head_dim": "x"}, "convert"),
        ],
    )
    def test_a_wrong_row_is_refused_with_file_and_line(
        self, tmp_path: Path, changes: dict[str, Any], says: str
    ) -> None:
        """Never skipped in silence."""
        path = write_kernels(tmp_path, kernel_row(8, 8192), kernel_row(8, 8192) | changes)
        with pytest.raises(PagedKVError, match=f"decode_attention_per_layer.csv, line 3: .*{says}"):
            read_kernels(path)

    def test_what_is_no_table_is_refused(self, tmp_path: Path) -> None:
        """Empty, without a column, or no text."""
        path = write_kernels(tmp_path, {"device": "h100"})
        with pytest.raises(PagedKVError, match="line 2: no field or value 'kv_cache_dtype'"):
            read_kernels(path)
        path.write_text("")
        with pytest.raises(PagedKVError, match="no rows"):
            read_kernels(path)
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(PagedKVError, match="no table"):
            read_kernels(path)


class TestRates:
    def test_a_series_over_contexts_is_calibrated_at_its_median_and_its_ends(self, tmp_path: Path) -> None:
        """An affine series: one point leaves the slope to the GPU's kernel, two find it."""
        rows = [rate_row(1, c, 10 + c / 8192) for c in (8, 4096, 8192, 16_384, 32_768)]
        errors, unused = rate_errors(read_rates(write_rates(tmp_path, *rows)))
        assert not unused
        one, two = errors
        assert (one.condition, one.num_rows, one.allowed) == ("contexts; 1 point: context 8,192", 4, 0.02)
        assert 0.01 < one.error < 0.2
        assert two.num_rows == 3
        assert two.error == pytest.approx(0, abs=1e-9)
        assert one.uncalibrated is not None and one.baseline is not None

    @pytest.mark.parametrize(("dtype", "allowed"), [("bf16", 0.02), ("q4_0", 0.046), ("int8", None)])
    def test_the_bound_depends_on_the_bits(self, tmp_path: Path, dtype: str, allowed: float | None) -> None:
        """16 and 4 bits have one."""
        rows = [rate_row(1, c, 10 + c / 8192, weight_dtype=dtype) for c in (8, 8192)]
        (found,) = rate_errors(read_rates(write_rates(tmp_path, *rows)))[0]
        assert found.allowed == allowed

    def test_one_context_of_several_models_is_calibrated_on_the_smallest(self, tmp_path: Path) -> None:
        """And one row alone is compared as it is."""
        rows = [rate_row(1, 100, 5.2, model="llama-2-7b"), rate_row(1, 100, 6.0)]
        (found,) = rate_errors(read_rates(write_rates(tmp_path, *rows)))[0]
        assert (found.condition, found.num_rows) == ("other models; 1 point: llama-2-7b", 1)
        (found,) = rate_errors(read_rates(write_rates(tmp_path, rows[1])))[0]
        assert (found.condition, found.error) == ("one row, not calibrated", found.uncalibrated)

    def test_served_rows_contain_the_prefill_of_others(self, tmp_path: Path) -> None:
        """The lengths stand in the source; without them a row is refused."""
        served = {"method": "served TPOT", "source": "id=x_agg_1024x512_c8_tp1"}
        rows = [rate_row(8, 1280, 7.42, **served), rate_row(16, 1280, 8.5, **served)]
        read = read_rates(write_rates(tmp_path, *rows))
        assert [row.served for row in read] == [(1024, 512)] * 2
        (found,) = rate_errors(read)[0]
        assert found.condition == "served, prefill modelled; 1 point: batch 8, context 1,280"
        assert found.error < 0.1 and found.allowed is None
        with pytest.raises(PagedKVError, match=r"line 2: no lengths of the requests in 'somewhere'"):
            read_rates(write_rates(tmp_path, rate_row(8, 1280, 7.42, method="served TPOT")))

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"gpu": "Abacus"}, "no GPU 'Abacus'"),
            ({"model": "nobody/nothing"}, "no model 'nothing'"),
            ({"tp": 2}, "2 GPUs: tensor parallelism"),
            ({"weight_dtype": "int3"}, "bits per weight are not known"),
            ({"batch": 1000, "context": 8192.0}, "more weights and bf16 K and V than H100 SXM holds"),
        ],
    )
    def test_rows_that_cannot_be_modelled_are_named_with_the_reason(
        self, tmp_path: Path, changes: dict[str, Any], why: str
    ) -> None:
        """Once for several rows of one reason; the others are compared."""
        wrong = [rate_row(1, c, 9.0) | changes for c in (10, 20)]
        errors, unused = rate_errors(read_rates(write_rates(tmp_path, rate_row(1, 100, 6.5), *wrong)))
        assert len(errors) == 1
        assert sum(int(item.what.split(": ")[1].split()[0]) for item in unused) == 2
        assert all(why in item.why for item in unused)

    def test_a_row_faster_than_the_memory_is_named(self, tmp_path: Path) -> None:
        """16 GB of weights in 1 ms: another model, dtype or number of GPUs."""
        errors, unused = rate_errors(
            read_rates(write_rates(tmp_path, *(rate_row(1, c, 1.0) for c in (8, 99))))
        )
        assert not errors
        assert "faster than H100 SXM reads" in unused[0].why

    @pytest.mark.parametrize("engine", ["llama.cpp fa=1", "llama.cpp batched-bench"])
    def test_an_engine_with_constants_of_its_own_is_recognised(self, engine: str) -> None:
        """llama.cpp reads K and V slower than the GPU's default kernel."""
        row = RateRow("m", "", "g", 1, 1, 1, "", engine, 1.0, None)
        assert row.kernel == "llama.cpp"

    @pytest.mark.parametrize(
        "changes", [{"itl_ms": 0}, {"itl_ms": "nan"}, {"batch": 0}, {"context": "x"}, {"context": math.inf}]
    )
    def test_a_wrong_row_is_refused_with_file_and_line(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        """Never skipped in silence."""
        path = write_rates(tmp_path, rate_row(1, 1, 9.0), rate_row(1, 1, 9.0) | changes)
        with pytest.raises(PagedKVError, match=r"itl_end_to_end\.csv, line 3"):
            read_rates(path)


# ---------------------------------------------------------------- the command


def document_of(capsys: Capture, folder: Path, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["validate", str(folder), "--json", "-"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_kernels_and_speeds_alone_are_enough(capsys: Capture, tmp_path: Path) -> None:
    """A table for each, and JSON; both agree here."""
    write_kernels(tmp_path / "a", kernel_row(8, 8192))
    write_rates(tmp_path / "b" / "c", *(rate_row(1, c, 6.2) for c in (8, 16)))
    document = document_of(capsys, tmp_path)
    assert document["schema"] == "pagedkv.validate/1"
    assert (document["runs"], document["unused"]) == ([], [])
    assert [e["num_rows"] for e in document["kernels"]] == [1, 1]
    assert [e["num_rows"] for e in document["end_to_end"]] == [1]
    assert main(["validate", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "Decode attention" in out and "Whole models" in out and "not used" not in out


def test_an_error_beyond_its_bound_ends_with_1(capsys: Capture, tmp_path: Path) -> None:
    """A kernel a tenth slower than its constants say; a series whose slope no kernel has."""
    slow = kernel_row(8, 8192)
    slow["latency_ms_per_layer"] *= 1.1
    write_kernels(tmp_path, slow)
    document_of(capsys, tmp_path, code=1)
    write_kernels(tmp_path, kernel_row(8, 8192))
    write_rates(tmp_path, *(rate_row(1, c, 6 + c / 1000) for c in (8, 4000, 8000)))
    document = document_of(capsys, tmp_path, code=1)
    assert [e["holds"] for e in document["end_to_end"]] == [False, True]
    assert main(["validate", str(tmp_path)]) == 1
    assert "FAILS" in capsys.readouterr().out


def test_tables_that_are_not_known_are_named(capsys: Capture, tmp_path: Path) -> None:
    """By path, with the reason; a run without its timeline too."""
    write_kernels(tmp_path, kernel_row(8, 8192))
    (tmp_path / "prices.csv").write_text("a,b\n1,2\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "meta.json").write_text("{}")
    (run / "requests.jsonl").write_text("{}\n")
    unused = {item["what"]: item["why"] for item in document_of(capsys, tmp_path)["unused"]}
    assert unused["prices.csv"] == "no measurement that is known by its name"
    assert unused[str(Path("run/meta.json"))] == "a run without timeline.csv".replace(
        "timeline", "timeseries"
    )
    assert main(["validate", str(tmp_path)]) == 0
    assert "not used: prices.csv" in capsys.readouterr().out


@pytest.mark.skipif("PAGEDKV_DATA" not in os.environ, reason="PAGEDKV_DATA is not set: no measurements")
class TestRealData:
    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        path = tmp_path_factory.mktemp("validate") / "found.json"
        folder = Path(os.environ["PAGEDKV_DATA"], "measured_latency")
        assert main(["validate", str(folder), "--json", str(path)]) == 0
        document: dict[str, Any] = json.loads(path.read_text())
        return document

    def test_the_real_run_is_within_the_goals_with_constants_fitted_elsewhere(
        self, found: dict[str, Any]
    ) -> None:
        """RTX 4090, attention as on an L40S: TPOT within 2 %, TTFT 3 %, KV usage 2.5 points."""
        (run,) = found["runs"]
        errors = {c["name"].split(",")[0]: abs(c["error"]) for c in run["comparisons"]}
        assert errors["TPOT"] <= 0.02
        assert errors["TTFT"] <= 0.03
        assert errors["KV usage"] <= 2.5

    def test_cold_kernels_are_within_the_goals(self, found: dict[str, Any]) -> None:
        """5 % for bf16, 8 % for fp8: each kernel, and all of a width together."""
        cold = [e for e in found["kernels"] if e["condition"].startswith("context")]
        assert len(cold) == 11
        for error in cold:
            assert error["error"] <= (0.08 if "fp8" in error["name"] or "8-bit" in error["name"] else 0.05)
            assert error["error"] < error["baseline"]

    def test_one_calibration_point_brings_whole_models_within_the_goals(self, found: dict[str, Any]) -> None:
        """2 % for 16-bit weights (another model, same device), 4.6 % for 4-bit ones over contexts."""
        bounded = [e for e in found["end_to_end"] if e["allowed"] is not None]
        assert {e["allowed"] for e in bounded} == {0.02, 0.046}
        assert all(e["error"] <= e["allowed"] for e in bounded)
        assert all(e["error"] < e["uncalibrated"] for e in bounded)

    def test_what_it_leaves_out_is_named(self, found: dict[str, Any]) -> None:
        """The kernel faster than its memory, models that are not built in, several GPUs."""
        reasons = " ".join(f"{item['what']}: {item['why']}" for item in found["unused"])
        for part in ("TRTLLM 1.0.0", "tensor parallelism", "minimax", "not measured cold", "holds"):
            assert part in reasons
