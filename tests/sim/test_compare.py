"""Results beside each other: what differs first, ratios that are right, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.sim.cli import main

Capture = pytest.CaptureFixture[str]


def run(*argv: object) -> int:
    try:
        return main([str(arg) for arg in argv])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three replays and a hits-only one."""
    folder = tmp_path_factory.mktemp("results")
    options: dict[str, tuple[object, ...]] = {
        "big": ("--num-blocks", 16_000),
        "small": ("--num-blocks", 8000, "--slo", "ttft=1"),
        "other": ("--num-blocks", 16_000, "--gpu", "h100", "--slo", "ttft=2"),
        "hits": ("--hits-only",),
        "arc": ("--hits-only", "--policy", "arc", "--num-blocks", 8000),
    }
    for name, stated in options.items():
        assert run("replay", "--limit", 60, *stated, "--json", folder / f"{name}.json") == 0
    return {name: folder / f"{name}.json" for name in options}


def compared(capsys: Capture, *paths: Path) -> Any:
    capsys.readouterr()
    assert run("compare", *paths, "--json", "-") == 0
    return json.loads(capsys.readouterr().out)


def test_conditions_that_differ_come_first(capsys: Capture, results: dict[str, Path]) -> None:
    """And no others; those that only one result has count as different."""
    document = compared(capsys, results["big"], results["small"])
    assert {row["condition"]: row["values"] for row in document["conditions"]} == {
        "num_blocks": [16_000, 8000],
        "goodput.slo_s.ttft": [None, 1.0],
    }
    assert document["same_conditions"] > 25
    run("compare", results["big"], results["small"])
    out = capsys.readouterr().out
    assert out.index("num_blocks") < out.index("latency_s.ttft.mean")


def test_ratios_and_differences_are_to_the_first(capsys: Capture, results: dict[str, Path]) -> None:
    """Of every figure, for every result."""
    paths = [results[name] for name in ("big", "small", "other")]
    documents = [json.loads(path.read_text()) for path in paths]
    figures = {row["figure"]: row for row in compared(capsys, *paths)["figures"]}
    row = figures["latency_s.ttft.p99"]
    values = [document["latency_s"]["ttft"]["p99"] for document in documents]
    assert row["values"] == values
    assert row["ratios"] == [1.0, values[1] / values[0], values[2] / values[0]]
    assert row["differences"] == [0.0, values[1] - values[0], values[2] - values[0]]
    assert figures["cache.bytes.reserved"]["ratios"] == [1.0, 0.5, 1.0]
    assert figures["goodput.share"]["values"][0] is None
    assert figures["goodput.share"]["ratios"] == [None, None, None]


def test_a_result_equals_itself(capsys: Capture, results: dict[str, Path]) -> None:
    """No condition differs, and every ratio is 1 or unknown."""
    document = compared(capsys, results["other"], results["other"])
    assert document["conditions"] == []
    assert {ratio for row in document["figures"] for ratio in row["ratios"]} <= {1.0, None}


def test_hits_can_be_compared_too(capsys: Capture, results: dict[str, Path]) -> None:
    """With the policy among the conditions."""
    document = compared(capsys, results["hits"], results["arc"])
    conditions = {row["condition"]: row["values"] for row in document["conditions"]}
    assert conditions["policy"] == ["lru", "arc"]
    assert "block_hit_rate" in {row["figure"] for row in document["figures"]}


def refused(capsys: Capture, *argv: object) -> str:
    assert run("compare", *argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_cannot_be_compared_is_refused(
    capsys: Capture, results: dict[str, Path], tmp_path: Path
) -> None:
    """One result, two kinds, another version, another meaning of a figure, a file that is read."""
    assert "at least 2 results, got 1" in refused(capsys, results["big"])
    line = refused(capsys, results["big"], results["hits"])
    assert "pagedkv.replay/1" in line and "pagedkv.hits/1" in line
    text = results["big"].read_text()
    later = tmp_path / "later.json"
    later.write_text(text.replace("pagedkv.replay/1", "pagedkv.replay/2"))
    line = refused(capsys, results["big"], later)
    assert "later.json has the schema 'pagedkv.replay/2'; this version reads" in line
    changed = tmp_path / "changed.json"
    changed.write_text(text.replace("first token - arrival, queueing included", "first token - admission"))
    assert "ttft is 'first token - arrival" in refused(capsys, results["big"], changed)
    assert "which is read" in refused(capsys, changed, results["big"], "--json", changed)
