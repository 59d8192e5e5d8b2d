"""``pagedkv bench``: what it prints and writes, and that every mistake ends in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv.attention import backends
from pagedkv.attention.bench.cell import ColdSets
from pagedkv.attention.bench.contender import Contender
from pagedkv.attention.bench.peers import PEERS, Peer
from pagedkv.sim.cli import main

Capture = pytest.CaptureFixture[str]

# One small layer; the numbers mean nothing, their presence does.
SMALL = ("--q-heads", "4", "--kv-heads", "2", "--head-dim", "16", "--seconds", "0.001", "--cold-bytes", "1MB")
ONE_CELL = (*SMALL, "--batch", "2", "--context", "64", "--dtype", "bf16", "--peers", "sdpa", "gather")


def run(*argv: object) -> int:
    """Exit code of ``pagedkv bench``."""
    try:
        return main(["bench", *map(str, argv)])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def refused(capsys: Capture, *argv: object) -> str:
    """The message of a command that must end with exit code 2 and one line."""
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == "" and line.startswith("pagedkv: error: "), (out, err)
    return line


def document(capsys: Capture, *argv: object) -> dict[str, Any]:
    """The JSON of a command that must succeed; there is nothing else on standard output."""
    assert run("attention", *argv, "--json", "-") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def lying_peer() -> Peer:
    def make(sets: ColdSets) -> Contender:
        return Contender("liar", lambda index: torch.zeros_like(sets.q), sets.cell.kv_bytes)

    return Peer(make)


def test_the_table_says_what_was_measured_and_how(capsys: Capture) -> None:
    """Figures without their conditions are worth nothing."""
    assert run("attention", *ONE_CELL) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in ("read ceiling", "torch", "sdpa", "gather", "us/call", "GB/s", "% of ceiling", "x SDPA"):
        assert text in out
    for text in ("measured on", f"torch {torch.__version__}", "interleaved rounds", "last-level cache"):
        assert text in out
    for info in backends():
        assert info.available or f"{info.name}: {info.reason}" in out


def test_every_combination_is_a_cell(capsys: Capture) -> None:
    """dtype by block size by batch by context."""
    found = document(
        capsys, *SMALL, "--batch", 1, 2, "--context", 16, 40, "--dtype", "fp32", "int8", "--block-size", 8,
        "--peers",
    )  # fmt: skip
    cells = [(c["dtype"], c["block_size"], c["batch"], c["context"]) for c in found["cells"]]
    assert cells == [(d, 8, b, n) for d in ("fp32", "int8") for b in (1, 2) for n in (16, 40)]
    assert found["cells"][1]["kv_bytes"] == 40 * 2 * 2 * 16 * 4


def test_json_holds_figures_formulas_and_conditions(capsys: Capture) -> None:
    """All that the table shows, for machines."""
    found = document(capsys, *ONE_CELL)
    assert found["schema"] == "pagedkv.bench.attention/1"
    assert found["kind"] == "measured"
    assert set(found["formulas"]) == {"gb_per_s", "of_ceiling", "speedup", "error"}
    conditions = found["conditions"]
    assert conditions["layer"] == {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    assert conditions["cold_bytes"] == 1_000_000
    assert conditions["threads"] == torch.get_num_threads()
    (cell,) = found["cells"]
    timed = {row["name"]: row for row in cell["rows"] if row["seconds"] is not None}
    assert {"read ceiling", "torch", "sdpa", "gather"} <= set(timed)
    assert timed["sdpa"]["speedup"] == 1.0 and cell["baseline"] == "sdpa"
    assert all(row["gb_per_s"] > 0 and row["rounds"] >= 3 for row in timed.values())


def test_no_peers_if_none_are_named(capsys: Capture) -> None:
    """``--peers`` alone leaves the backends."""
    (cell,) = document(capsys, *ONE_CELL, "--peers", "--backends", "torch")["cells"]
    assert [row["name"] for row in cell["rows"]] == ["read ceiling", "torch"]
    assert cell["baseline"] is None


def test_what_needs_too_much_memory_is_left_out_visibly(capsys: Capture) -> None:
    """The other cells are measured."""
    assert run("attention", *ONE_CELL, "--context", 64, 10_000, "--max-bytes", "2MB") == 0
    out = capsys.readouterr().out
    assert "not measured: the pool needs 0.0 GiB, allowed are 0.0 GiB [bf16, block 16, 2 x 10,000]" in out
    assert "│ torch" in out


def test_flex_is_left_out_unless_asked_for(capsys: Capture) -> None:
    """It compiles for half a minute, and the note says how to have it."""
    assert run("attention", *SMALL, "--batch", 1, "--context", 16, "--dtype", "fp32") == 0
    assert "flex: left out unless asked for (--peers flex)" in capsys.readouterr().out


def test_a_wrong_result_is_exit_code_1(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no figure is shown for it."""
    monkeypatch.setitem(PEERS, "liar", lying_peer())
    assert run("attention", *ONE_CELL, "--peers", "liar") == 1
    out = capsys.readouterr().out
    assert "liar: wrong result" in out
    assert "│ liar" not in out


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(capsys: Capture, tmp_path: Path, suffix: str) -> None:
    """A picture in the format of the suffix, also of cells of which one was left out."""
    picture = tmp_path / f"bench.{suffix}"
    assert run("attention", *ONE_CELL, "--context", 64, 100_000, "--max-bytes", "5MB", "--plot", picture) == 0
    start = picture.read_bytes()[:100]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start


def test_plot_of_nothing(tmp_path: Path) -> None:
    """All cells were left out: an empty picture, no failure."""
    picture = tmp_path / "bench.png"
    assert run("attention", *ONE_CELL, "--max-bytes", 1000, "--plot", picture) == 0
    assert picture.stat().st_size > 0


def test_threads_are_set(capsys: Capture) -> None:
    """And noted."""
    before = torch.get_num_threads()
    try:
        assert document(capsys, *ONE_CELL, "--threads", 1)["conditions"]["threads"] == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "the following arguments are required: WHAT"),
        (("attention", "--backends", "fast"), "no attention backend 'fast', there are: reference, torch"),
        (("attention", "--peers", "fast"), "no peer 'fast', there are: sdpa"),
        (("attention", "--device", "tpu"), "device must be cpu or cuda, got 'tpu'"),
        (("attention", "--q-heads", 3, "--kv-heads", 2), "3 query heads are no multiple of 2 KV heads"),
        (("attention", "--context", 0), "argument --context"),
        (("attention", "--dtype", "int4"), "argument --dtype"),
        (("attention", "--seconds", 0), "argument --seconds"),
        (("attention", "--plot", "picture.docx"), "cannot plot to picture.docx"),
        (("attention", "--json", "/nowhere/x.json"), "no folder /nowhere"),
    ],
)
def test_mistakes(capsys: Capture, argv: tuple[object, ...], message: str) -> None:
    """Before any work, in one line."""
    assert message in refused(capsys, *argv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys: Capture) -> None:
    """A device that is not there is a mistake of the call."""
    assert "no device 'cuda'" in refused(capsys, "attention", "--device", "cuda")


def test_help_names_every_peer(capsys: Capture) -> None:
    """The command does not import torch for its help, so the names are written down there."""
    assert run("attention", "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    for name in PEERS:
        assert name in out.replace("flashinfer- planned", "flashinfer-planned").replace("- ", "-")
