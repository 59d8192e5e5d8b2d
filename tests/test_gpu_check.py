"""``benchmarks/gpu_check.py``: a dry run of all of it, and that it finds what is wrong."""

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagedkv.attention import reference, registry
from pagedkv.attention.arguments import AttentionArguments

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_check.py"

if not SCRIPT.is_file():
    pytest.skip("needs the checkout: benchmarks are not installed", allow_module_level=True)

from benchmarks import gpu_report, gpu_workers  # noqa: E402
from benchmarks.gpu_cases import CASES, Case, Outcome, run_case  # noqa: E402
from benchmarks.gpu_speed import GROWTH, MIXES, beside_peers, growth, mixes  # noqa: E402
from pagedkv.attention.bench.measure import CellResult, Row  # noqa: E402

BASE = CASES[0].shrunk()


def script(*argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), *argv],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def test_dry_run(tmp_path: Path) -> None:
    """The whole script, shrunken, on a CPU: every check is made, every result right, no time pretended."""
    path = tmp_path / "result.json"
    done = script("--dry-run", "--json", str(path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["schema"] == "pagedkv.gpu_check/1"
    results = {line["what"]: line["result"] for line in found["lines"]}
    assert {results[case.name] for case in CASES} == {"right"}
    assert results["growing lengths, bf16"] == results["growing lengths, int8"] == "right"
    assert sum(what.startswith(("B1 ", "B32 ", "B64 ", "1 x 128k")) for what in results) == len(mixes())
    assert "timed" not in results.values()
    assert any("nothing was timed" in note for note in found["notes"])
    assert f"0 wrong of {len(found['lines'])}" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    """One line that says what to do, and an exit code of its own."""
    done = script()
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_check: error: ") and "--dry-run" in line


def broken_backend(monkeypatch: pytest.MonkeyPatch, breaks: str) -> str:
    """The reference with one mistake, registered as a backend; returns its name."""

    def attend(args: AttentionArguments) -> None:
        reference.attend(args)
        if breaks == "output":
            args.out[0, 0, 0, 0] += 0.5
        elif breaks == "nan":
            args.out[0, 0, 0, 0] = torch.nan
        elif breaks == "lse" and args.lse is not None:
            args.lse[0, 0, 0] += 0.01
        elif breaks == "mass" and args.block_mass is not None:
            args.block_mass[0, 0, 0, 0] += 0.01

    module = types.ModuleType(f"broken_{breaks}")
    vars(module).update(attend=attend, unavailable=reference.unavailable, unsupported=reference.unsupported)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry._MODULES, module.__name__, module.__name__)
    return module.__name__


@pytest.mark.parametrize("breaks", ["output", "nan", "lse", "mass"])
def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, breaks: str) -> None:
    """One number of one head suffices."""
    case = next(c for c in CASES if c.mass).shrunk() if breaks == "mass" else BASE
    name = broken_backend(monkeypatch, breaks)
    outcome = run_case(case, "cpu", name)
    assert outcome.is_wrong
    assert gpu_report.check_line(case.name, outcome).is_wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_hold_for_the_torch_backend(case: Case) -> None:
    """Poison reaches nothing that is compared, and the tolerances suffice for an honest backend."""
    outcome = run_case(case.shrunk(), "cpu", "torch")
    assert not outcome.is_wrong, outcome


def test_case_names_are_unique() -> None:
    """Results are kept by name."""
    assert len({case.name for case in CASES}) == len(CASES)
    shapes = [shape.name for shape in (*mixes(), *growth())]
    assert len(set(shapes)) == len(shapes)
    assert len({shape.name for shape in beside_peers()}) == len(beside_peers())


def test_a_refusal_is_wrong_unless_the_card_is_too_old() -> None:
    """A feature that the backend does not serve is missing; one that the card lacks is not."""
    assert Outcome("x", float("inf"), "cannot serve this call").is_wrong
    assert gpu_report.check_line("x", Outcome("x", None, "compute capability 8.0")).result == "skipped"


def row(name: str, seconds: float | None, note: str = "", is_wrong: bool = False) -> Row:
    return Row(name, seconds, None if seconds is None else 1.0 / seconds, note=note, is_wrong=is_wrong)


def test_speed_lines() -> None:
    """Ours must be right; a peer that differs is a line of its own; one that is absent is none."""
    shape = mixes()[0]
    rows = (
        row("read ceiling", 1.0),
        row("triton", None, "wrong result", True),
        row("sdpa", 2.0),
        row("flashinfer", None, "wrong result", True),
        row("flash-attn", None, "not installed"),
    )
    result = CellResult(shape.cell, rows)
    lines = gpu_report.speed_lines("shape", result, 1e9, "triton")
    assert [(line.what, line.result) for line in lines] == [
        ("shape: triton", "wrong"),
        ("shape: sdpa", "timed"),
        ("shape: flashinfer", "differs"),
    ]
    assert lines[1].of_read == pytest.approx(50.0)
    assert gpu_report.absent({"shape": result}) == ["flash-attn did not take part: not installed (shape)"]


def test_growth_and_int8_lines() -> None:
    """Differences between the ends, and ratios between dtypes, of what was timed."""
    results = {
        shape.name: CellResult(
            shape.cell,
            (row("read ceiling", 1.0), row("triton", shape.cell.kv_bytes * 1e-12)),
        )
        for shape in (*mixes(), *growth())
    }
    (bf16, int8) = gpu_report.growth_lines(results)
    assert bf16.what == f"ITL growth, {next(iter(GROWTH))} to {list(GROWTH)[-1]}, bf16"
    assert bf16.note.startswith("x 128.0; 33.55 us per layer and 1k tokens")
    assert int8.note.startswith("x 128.0; ")
    ratios = gpu_report.int8_lines(results)
    assert len(ratios) == 2 * len(MIXES) + len(GROWTH)
    assert all(line.note.startswith("1.94 x") for line in ratios)


def task(name: str, function: Callable[..., object], *arguments: object) -> gpu_workers.Task:
    """Of builtins, so that the processes of these tests need not import torch."""
    return gpu_workers.Task(name, function, arguments)


def test_a_process_that_dies_costs_one_check() -> None:
    """The others of its pool are run again; an error is a result; a lost device ends the process."""
    tasks = [
        task("a", abs, -1),
        task("b", os._exit, 3),
        task("c", exec, "raise ValueError('a mistake\\nof two lines')"),
        task("d", abs, -2),
        task("e", exec, "raise RuntimeError('CUDA error: an illegal memory access was encountered')"),
    ]
    found = gpu_workers.run_tasks(tasks, 2, gpu_workers.Box(60, 60))
    assert list(found) == list("abcde")
    assert found["a"] == 1 and found["d"] == 2
    assert found["b"] == found["e"] == gpu_workers.Failure(gpu_workers.DIED, is_wrong=True)
    assert found["c"] == gpu_workers.Failure("ValueError: a mistake of two lines", is_wrong=True)


def test_nothing_starts_when_the_time_is_over() -> None:
    """What did not start is no wrong result."""
    found = gpu_workers.run_tasks([task("a", abs, -1)], 1, gpu_workers.Box(0, 60))
    assert found["a"].reason.startswith("not started") and not found["a"].is_wrong


def test_what_hangs_is_ended() -> None:
    """The script returns, and says who did not."""
    found = gpu_workers.run_tasks([task("a", time.sleep, 600)], 1, gpu_workers.Box(1, 2))
    assert found["a"].reason.startswith("not finished") and found["a"].is_wrong
