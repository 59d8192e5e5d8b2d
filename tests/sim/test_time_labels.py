"""Where times come from is said wherever a time is: modelled, or decode attention profiled or measured."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from pagedkv.sim.cli import main
from pagedkv.sim.output.html_report import report_html

Capture = pytest.CaptureFixture[str]

TABLE = "batch,context,seconds\n1,1,2e-5\n1,100000,3e-4\n256,1,2e-5\n256,100000,3e-4\n"
MODELLED = ("modelled time", "modelled")
PROFILED = ("attention profiled, rest modelled",) * 2
MEASURED = ("attention measured, rest modelled",) * 2


def options(tmp_path: Path, how: str) -> tuple[str, ...]:
    table = tmp_path / "attention.csv"
    table.write_text(TABLE)
    return {
        "modelled": (),
        "profiled": ("--attention-table", str(table)),
        "measured": ("--measure-attention", "cpu", "--model", "tinyllama-1.1b", "--num-blocks", "4000"),
        "measured on two": (
            *("--measure-attention", "cpu", "--model", "tinyllama-1.1b", "--num-blocks", "4000"),
            *("--tensor-parallel", "2", "--tp-bandwidth", "450GB"),
        ),
    }[how]


@pytest.mark.parametrize(
    ("how", "labels"),
    [
        ("modelled", MODELLED),
        ("profiled", PROFILED),
        ("measured", MEASURED),
        ("measured on two", MEASURED),
    ],
)
def test_every_label_says_it(capsys: Capture, tmp_path: Path, how: str, labels: tuple[str, str]) -> None:
    """In the tables, the document and every figure of the report."""
    if how.startswith("measured") and importlib.util.find_spec("torch") is None:
        pytest.skip("measuring attention needs torch")
    in_figures, in_tables = labels
    path, page = tmp_path / "result.json", tmp_path / "report.html"
    common = ("--limit", "3", "--slo", "ttft=9", "--json", str(path), "--html", str(page))
    assert main(["replay", *common, *options(tmp_path, how)]) == 0
    out = " ".join(re.sub(r"[│┃\s]+", " ", capsys.readouterr().out).split())
    assert f"latency, {in_tables} [ms]" in out
    assert f"makespan, {in_tables} " in out and f"output throughput, {in_tables} " in out
    assert f"limit, latencies {in_tables}" in out
    document = json.loads(path.read_text())
    word = how.partition(" ")[0]
    assert document["inputs"]["attention_time"] == word
    times = document["kind"].partition(";")[0]
    assert times == "times are modelled" + (
        f", but for decode attention, which was {word}" if word != "modelled" else ""
    )
    html = page.read_text()
    assert html == report_html(document)
    assert document["kind"] in html
    assert html.count(in_figures) >= 12  # cards, latencies, each chart
    if how != "modelled":
        assert "modelled time" not in html and "modelled decode" not in html


def test_compare_says_what_the_times_of_each_are(capsys: Capture, tmp_path: Path) -> None:
    """Two kinds, two notes, and a condition that differs."""
    paths = []
    for how in ("modelled", "profiled"):
        paths.append(str(tmp_path / f"{how}.json"))
        assert main(["replay", "--limit", "3", "--json", paths[-1], *options(tmp_path, how)]) == 0
    capsys.readouterr()
    assert main(["compare", *paths, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    counted = "; blocks, bytes and hits were counted by the cache manager"
    assert found["kinds"] == [
        f"times are modelled{counted}",
        f"times are modelled, but for decode attention, which was profiled{counted}",
    ]
    differing = {row["condition"]: row["values"] for row in found["conditions"]}
    assert differing["attention_time"] == ["modelled", "profiled"]
    assert differing["attention_table"] == [None, str(tmp_path / "attention.csv")]
    assert main(["compare", *paths]) == 0
    out = capsys.readouterr().out
    assert f"times are modelled{counted}\n" in out and "which was profiled; blocks" in out


def test_hits_have_no_times(capsys: Capture, tmp_path: Path) -> None:
    """And compare does not say that they are modelled."""
    paths = [str(tmp_path / f"{name}.json") for name in ("a", "b")]
    for path in paths:
        assert main(["replay", "--hits-only", "--limit", "20", "--json", path]) == 0
    capsys.readouterr()
    assert main(["compare", *paths]) == 0
    out = capsys.readouterr().out
    assert "hits were counted by the cache manager, without time" in out and "modelled" not in out
