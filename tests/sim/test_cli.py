"""The command line: what each command prints and writes, and that every mistake ends in one line."""

import csv
import gzip
import hashlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv import __version__
from pagedkv.errors import PagedKVError
from pagedkv.sim.cli import main
from pagedkv.sim.commands import replay_command, replay_outputs
from pagedkv.sim.commands.options import size
from pagedkv.sim.commands.plan_commands import STEP_FORMULA
from pagedkv.sim.download import KNOWN_TRACES, KnownTrace
from pagedkv.sim.output.outputs import check_outputs, text_writer, write_outputs
from pagedkv.sim.replay import ReplaySetup, run_replay
from pagedkv.sim.timing.gpus import gpu_names, load_gpu
from pagedkv.sim.timing.models import load_model, model_names
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long

COLUMNS = (
    "time_s,running,waiting,bytes_free,bytes_cached,bytes_active,bytes_used,mean_itl_s,"
    "queried_tokens,hit_tokens,preemptions"
)
Capture = pytest.CaptureFixture[str]


def run(*argv: object) -> int:
    """Exit code of a command run in this process; any other exception than argparse's gets through."""
    try:
        return main([str(arg) for arg in argv])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def printed(capsys: Capture, *argv: object) -> str:
    """Standard output of a command that must succeed and say nothing on standard error."""
    assert run(*argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def assert_one_line(err: str) -> str:
    """Return the message: one line, whoever found the mistake."""
    (line,) = err.splitlines()
    assert re.match(r"pagedkv: error: \S", line), err
    return line


def refused(capsys: Capture, *argv: object) -> str:
    """The message of a command that must end with exit code 2."""
    code = run(*argv)
    err = capsys.readouterr().err
    assert code == 2, err
    return assert_one_line(err)


def spawned(*argv: object, before: str = "", timeout: float = 60) -> "subprocess.CompletedProcess[str]":
    """Run the console script's function in a process of its own."""
    code = f"import sys\n{before}\nfrom pagedkv.sim.cli import main\nsys.exit(main())\n"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "default"}


def flat(text: str) -> str:
    """Text of a table without borders and repeated blanks."""
    return re.sub(r"[│┃|\s]+", " ", text)


def row(**changes: Any) -> dict[str, Any]:
    base = {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [46, 47, 48]}
    return {**base, **changes}


def write_trace(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(
        tmp_path / "small.jsonl",
        row(),
        row(timestamp=500, input_length=1536, hash_ids=[46, 47, 5]),
        row(timestamp=900, output_length=1),
    )


class TestReplay:
    def test_the_default_replay_prints_latencies_and_cache(self, capsys: Capture) -> None:
        """Both tables, with formulas and with the words modelled and counted."""
        out = flat(printed(capsys, "replay", "--limit", 40))
        assert "chat-long: 40 requests" in out
        for name in ("TTFT", "ITL", "TPOT", "E2E"):
            assert f"{name} = " in out
        assert "latency, modelled [ms] mean p50 p90 p95 p99" in out
        assert "cache, counted by the manager" in out
        assert "llama-3.1-8b on B200 SXM, bf16 cache" in out
        assert "preemptions 0" in out

    def test_the_table_says_what_the_document_says(self, capsys: Capture, trace: Path) -> None:
        """Hit rate, reserved bytes and throughput agree."""
        options = ("replay", trace, "--num-blocks", 1000, "--gpu", "h100")
        out = flat(printed(capsys, *options))
        document = json.loads(printed(capsys, *options, "--json", "-"))
        assert f"{document['cache']['token_hit_rate']:.2%}" in out
        assert f"bytes reserved (the pool) {1000 * 16 * 131_072 / 2**30:.1f} GiB" in out
        assert f"{document['output_tokens_per_s']:,.1f} tokens/s" in out
        assert f"TTFT {document['latency_s']['ttft']['mean'] * 1e3:,.1f} " in out

    def test_json_on_standard_output_is_the_document_alone(self, capsys: Capture, trace: Path) -> None:
        """It parses, names its schema, and repeats the inputs."""
        document = json.loads(printed(capsys, "replay", trace, "--json", "-", "--seed", 3, "--speed", 2))
        assert document["schema"] == "pagedkv.replay/1"
        assert document["inputs"]["trace"] == "small"
        assert document["inputs"]["requests"] == 3
        assert document["tokens"] == {"input": 3736, "output": 15}
        assert document["latency_s"]["tpot"]["count"] == 2
        # the third prompt finds the first one's two full blocks of 512, at blocks of 16
        assert document["cache"]["hit_tokens"] == 1024 + 1088

    def test_json_repeats_what_the_result_depends_on(self, capsys: Capture, trace: Path) -> None:
        """As it was given, or the default; the version too, since another may model otherwise."""
        options = ("--seed", 3, "--limit", 2, "--speed", 2, "--gpu", "h100", "--gpu-memory", "40GiB")
        document = json.loads(printed(capsys, "replay", trace, *options, "--tflops", 500, "--json", "-"))
        inputs, gpu = document["inputs"], load_gpu("h100")
        assert document["pagedkv_version"] == __version__
        assert (inputs["seed"], inputs["limit"], inputs["speed"]) == (3, 2, 2.0)
        assert (inputs["gpu_memory_bytes"], inputs["gpu_fp16_flops"]) == (40 * 2**30, 500e12)
        assert inputs["gpu_bandwidth_bytes_per_s"] == gpu.bandwidth
        assert (inputs["memory_utilization"], inputs["trace_block_size"]) == (0.9, 512)
        argv = ("replay", "--limit", 5, "--num-blocks", 20_000, "--json", "-")
        inputs = json.loads(printed(capsys, *argv))["inputs"]
        assert (inputs["seed"], inputs["limit"], inputs["speed"]) == (0, 5, 1.0)
        assert inputs["memory_utilization"] is None
        hits = json.loads(printed(capsys, "replay", "--hits-only", "--limit", 5, "--json", "-"))
        assert hits["inputs"] == {"seed": 0, "limit": 5, "trace_notes": [], "policy": "lru"}
        assert hits["pagedkv_version"] == __version__

    def test_blocks_of_16_are_told_from_blocks_of_512(self, capsys: Capture, tmp_path: Path) -> None:
        """By the number of ids; another size has to be stated, and the message says how."""
        path = write_trace(tmp_path / "agent.jsonl", row(input_length=50, hash_ids=[1, 2, 3]))
        document = json.loads(printed(capsys, "replay", path, "--json", "-"))
        assert document["inputs"]["trace_block_size"] == 16
        path = write_trace(tmp_path / "other.jsonl", row(input_length=64, hash_ids=[1, 2]))
        assert "--trace-block-size" in refused(capsys, "replay", path)
        printed(capsys, "replay", path, "--trace-block-size", 32)

    def test_json_is_the_same_byte_for_byte(self, capsys: Capture, tmp_path: Path) -> None:
        """In a file, on standard output and in another process."""
        options = ("replay", "--limit", 30, "--seed", 4)
        printed(capsys, *options, "--json", tmp_path / "a.json")
        text = (tmp_path / "a.json").read_text()
        assert text == printed(capsys, *options, "--json", "-")
        assert text == spawned(*options, "--json", "-").stdout

    def test_gzip_gives_the_same_document(self, capsys: Capture, trace: Path) -> None:
        """The compression is told by the content."""
        packed = trace.with_suffix(".jsonl.gz")
        packed.write_bytes(gzip.compress(trace.read_bytes()))
        assert printed(capsys, "replay", trace, "--json", "-") == printed(
            capsys, "replay", packed, "--json", "-"
        )

    def test_limit_and_speed_and_seed_do_what_they_say(self, capsys: Capture, trace: Path) -> None:
        """Fewer requests; earlier arrivals; other requests."""

        def document(*options: object) -> Any:
            return json.loads(printed(capsys, "replay", *options, "--json", "-"))

        assert document(trace, "--limit", 2)["inputs"]["requests"] == 2
        assert document(trace, "--limit", 99)["inputs"]["requests"] == 3
        assert document(trace, "--speed", 100)["makespan_s"] < document(trace)["makespan_s"]
        tokens = [document("--limit", 20, "--seed", seed)["tokens"] for seed in (0, 1)]
        assert tokens[0] != tokens[1]

    def test_without_prefix_caching_nothing_hits(self, capsys: Capture, trace: Path) -> None:
        """All prompt tokens are computed."""
        cache = json.loads(printed(capsys, "replay", trace, "--no-prefix-caching", "--json", "-"))["cache"]
        assert (cache["hit_tokens"], cache["token_hit_rate"], cache["bytes"]["mean_cached"]) == (0, 0.0, 0.0)

    def test_the_timeline_conserves_bytes_in_every_row(self, capsys: Capture, tmp_path: Path) -> None:
        """free + cached + active is the pool; used is at most active; times increase; the pool ends idle."""
        path = tmp_path / "timeline.csv"
        printed(
            capsys, "replay", "--limit", 60, "--num-blocks", 12_000, "--timeline", path, "--interval", 0.5
        )
        assert path.read_text().splitlines()[0] == COLUMNS
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) > 10
        for r in rows:
            states = [int(r[f"bytes_{state}"]) for state in ("free", "cached", "active")]
            assert sum(states) == 12_000 * 16 * 131_072
            assert 0 <= int(r["bytes_used"]) <= states[2]
            assert not r["mean_itl_s"] or float(r["mean_itl_s"]) > 0
        times = [float(r["time_s"]) for r in rows]
        assert times == sorted(times)
        assert (rows[-1]["running"], rows[-1]["waiting"], rows[-1]["bytes_active"]) == ("0", "0", "0")

    @pytest.mark.parametrize(
        ("suffix", "magic"), [(".png", b"\x89PNG\r\n\x1a\n"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
    )
    def test_plot_writes_the_image_that_the_suffix_names(
        self, capsys: Capture, tmp_path: Path, suffix: str, magic: bytes
    ) -> None:
        """And nothing else into the folder."""
        pytest.importorskip("matplotlib")
        path = tmp_path / f"out{suffix}"
        printed(capsys, "replay", "--limit", 20, "--plot", path)
        assert path.read_bytes().startswith(magic)
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]

    @pytest.mark.parametrize("name", ["out", "-", "out."])
    def test_a_plot_without_a_suffix_is_an_image_or_refused(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """No empty file, and no stray one beside it."""
        pytest.importorskip("matplotlib")
        monkeypatch.chdir(tmp_path)
        code = run("replay", "--limit", 5, "--plot", name)
        left = {entry.name: entry.stat().st_size for entry in tmp_path.iterdir()}
        if code:
            assert (code, left) == (2, {})
        else:
            assert list(left) in ([name], [f"{name}.png"], [f"{name}png"])
            assert min(left.values()) > 1000

    def test_hits_only_counts_without_time(self, capsys: Capture, trace: Path) -> None:
        """Blocks of 512: 2 + 3 + 2 full ones, of which 2 and 2 are hits."""
        out = flat(printed(capsys, "replay", trace, "--hits-only", "--block-size", 512))
        assert "pool unbounded" in out
        assert "full blocks 7 hit blocks 4 hit tokens 2,048" in out
        assert f"{2048 / 3736:.2%}" in out
        assert f"{4 / 7:.2%}" in out

    def test_hits_only_json_has_its_own_schema(self, capsys: Capture, trace: Path, tmp_path: Path) -> None:
        """With the pool as stated, in a file and on standard output."""
        options = ("replay", trace, "--hits-only", "--block-size", 512, "--num-blocks", 3)
        document = json.loads(printed(capsys, *options, "--json", "-"))
        assert document["schema"] == "pagedkv.hits/1"
        assert (document["num_blocks"], document["requests"], document["input_tokens"]) == (3, 3, 3736)
        assert (document["queried_blocks"], document["hit_blocks"]) == (7, 4)
        printed(capsys, *options, "--json", tmp_path / "hits.json")
        assert json.loads((tmp_path / "hits.json").read_text()) == document

    def test_an_output_file_gets_the_usual_permissions(self, capsys: Capture, tmp_path: Path) -> None:
        """Those of a file that the shell makes, not those of a temporary one."""
        (tmp_path / "plain").write_text("")
        printed(capsys, "replay", "--limit", 3, "--json", tmp_path / "out.json")
        assert (tmp_path / "out.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


class TestPlanning:
    def test_itl_prints_the_worked_example(self, capsys: Capture) -> None:
        """14 GB at 800 GB/s: 17.5 ms, 57.1 tokens/s; then 0.7, 5.4 and 21.5 ms of KV more."""
        out = flat(printed(capsys, "itl", "--weight-bytes", "14e9", "--bandwidth", "800GB"))
        assert " 0 17.5 57.1 0 B 0.0 " in out
        assert " 4,096 18.2 55.0 512.0 MiB 0.7 " in out
        assert " 32,768 22.9 43.7 4.0 GiB 5.4 " in out
        assert " 131,072 39.0 25.7 16.0 GiB 21.5 " in out

    def test_itl_as_json_is_exact(self, capsys: Capture) -> None:
        """Batch 4, two contexts; tokens/s is the batch over the step."""
        argv = ("itl", "--weight-bytes", "14e9", "--bandwidth", "800e9", "--batch", 4, "--context", 0, 1000)
        document = json.loads(printed(capsys, *argv, "--json", "-"))
        assert document["schema"] == "pagedkv.itl/1"
        first, second = document["rows"]
        assert (first["context"], first["itl_s"], first["kv_bytes"]) == (0, 0.0175, 0)
        assert first["tokens_per_s"] == pytest.approx(4 / 0.0175)
        assert second["kv_bytes"] == 4 * 1000 * 131_072
        assert second["itl_s"] == pytest.approx(0.0175 + second["kv_bytes"] / 800e9)

    @pytest.mark.parametrize("batch", [1, 32])
    def test_itl_at_a_bandwidth_reads_the_experts_that_the_batch_touches(
        self, capsys: Capture, batch: int
    ) -> None:
        """Of 8 experts 2 for one token, nearly all for 32; at 8 bits half the bytes of 16."""
        model = load_model("mixtral-8x7b")
        touched = 1 - (1 - model.expert_share) ** batch
        params = model.params_active + model.params_experts * (touched - model.expert_share)
        argv = ("itl", "--model", model.name, "--bandwidth", "1e12", "--batch", batch, "--context", 0)
        for bits in (16, 8):
            document = json.loads(printed(capsys, *argv, "--weight-bits", bits, "--json", "-"))
            assert document["inputs"]["weight_bytes"] == pytest.approx(params * bits / 8)
            assert document["rows"][0]["itl_s"] == pytest.approx(params * bits / 8 / 1e12)

    def test_formulas_and_titles_are_not_broken_into_lines(self, capsys: Capture) -> None:
        """Where the output is no terminal, so that they can be searched for."""
        lines = printed(capsys, "itl", "--model", "mixtral-8x7b", "--bandwidth", "1e12").splitlines()
        assert lines[0].endswith("reached in full")
        assert lines[-1] == f"modelled: ITL = {STEP_FORMULA}"

    def test_itl_of_a_gpu_uses_its_efficiencies(self, capsys: Capture) -> None:
        """The title says where the rates come from."""
        out = flat(printed(capsys, "itl", "--model", "llama-3.1-8b", "--gpu", "h100"))
        assert "H100 SXM, published efficiencies" in out

    def test_size_counts_what_fits_beside_the_weights(self, capsys: Capture) -> None:
        """0.9 x 80 GiB less 2 bytes per parameter, over 2 MiB a block, less the null block."""
        weights = 2 * load_model("llama-3.1-8b").params_total
        blocks = int(0.9 * 80 * 2**30 - weights) // (16 * 131_072) - 1
        document = json.loads(
            printed(capsys, "size", "--gpu", "h100", "--context", 1, 16, 17, 4096, "--json", "-")
        )
        assert document["schema"] == "pagedkv.size/1"
        assert (document["num_blocks"], document["num_tokens"]) == (blocks, 16 * blocks)
        assert document["sequences"] == {
            "1": blocks, "16": blocks, "17": blocks // 2, "4096": blocks // 256,
        }  # fmt: skip
        out = flat(printed(capsys, "size", "--gpu", "h100"))
        assert f"blocks {blocks:,} tokens {16 * blocks:,}" in out

    def test_int8_entries_fit_nearly_twice_as_often(self, capsys: Capture) -> None:
        """Scales of 4 bytes per 128 elements: 2 / (1 + 1/32)."""

        def tokens(dtype: str) -> int:
            options = ("--gpu", "h100", "--kv-dtype", dtype, "--json", "-")
            return int(json.loads(printed(capsys, "size", *options))["num_tokens"])

        assert tokens("int8") / tokens("bf16") == pytest.approx(2 / (1 + 1 / 32), rel=1e-3)

    def test_models_and_gpus_list_every_row(self, capsys: Capture) -> None:
        """All names, in tables."""
        models, gpus = flat(printed(capsys, "models")), flat(printed(capsys, "gpus"))
        assert [name for name in model_names() if f" {name} " not in models] == []
        assert "131,072" in models
        assert [name for name in gpu_names() if name.split()[0] not in gpus] == []

    def test_a_config_file_serves_as_a_model(self, capsys: Capture, tmp_path: Path) -> None:
        """2 layers x 2 x 2 heads x 8 x 2 bytes."""
        config = {
            "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        for model in (tmp_path, tmp_path / "config.json"):
            document = json.loads(printed(capsys, "size", "--model", model, "--json", "-"))
            assert document["bytes_per_token"] == 2 * 2 * 2 * 8 * 2

    def test_help_and_version_exit_with_0(self, capsys: Capture) -> None:
        """Of the program and of every command."""
        assert re.match(r"pagedkv \d", printed(capsys, "--version"))
        for command in ([], ["replay"], ["validate"], ["trace"], ["trace", "download"], ["itl"], ["size"]):
            assert "usage: pagedkv" in printed(capsys, *command, "--help")

    @pytest.mark.parametrize(
        ("text", "count"),
        [("1", 1), ("2k", 2e3), ("2KiB", 2048), ("1.5 gb", 1.5e9), ("1e3MiB", 1000 * 2**20), ("3T", 3e12)],
    )
    def test_sizes_are_decimal_or_binary_as_written(self, text: str, count: float) -> None:
        """Case and blanks do not count."""
        assert size(text) == count


# ---------------------------------------------------------------- validation


def write_run(folder: Path, *, tpot_factor: float = 1.0, **meta_changes: Any) -> Path:
    """A measured run that the simulator itself made: it agrees perfectly, or with stretched decoding."""
    model, gpu = load_model("llama-3.1-8b"), load_gpu("rtx4090")
    rng = np.random.default_rng(7)
    trace = Trace.from_lengths(np.arange(30) * 0.4, rng.integers(100, 900, 30), rng.integers(2, 300, 30))
    result = run_replay(trace, ReplaySetup(model, gpu, num_blocks=2588, watermark=0.0))
    records = result.records
    folder.mkdir(parents=True)
    meta = {
        "model": "meta-llama/Llama-3.1-8B",
        "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
        "kv_cache": {"num_gpu_blocks": 2588, "block_size": 16},
        "scheduler": {"max_num_seqs": 256, "max_num_batched_tokens": 2048},
    }
    (folder / "meta.json").write_text(json.dumps({**meta, **meta_changes}))
    rows = []
    for i in range(30):
        first, last = float(records.first_token_s[i]), float(records.finish_s[i])
        rows.append(
            {
                "input_toks": int(trace.input_len[i]),
                "output_toks": int(trace.output_len[i]),
                "queued_ts": 1000 + 0.4 * i,
                "scheduled_ts": 1000 + 0.4 * i,
                "first_token_ts": 1000 + first,
                "last_token_ts": 1000 + first + (last - first) * tpot_factor,
            }
        )
    (folder / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    lines = ["t,running,waiting,kv_cache_pct"]
    lines += [
        f"{s.time_s},{s.num_running},{s.num_waiting},{100 * s.active_blocks / 2588}" for s in records.samples
    ]
    (folder / "timeseries.csv").write_text("\n".join(lines) + "\n")
    return folder


class TestValidate:
    def test_a_run_that_agrees_ends_with_0(self, capsys: Capture, tmp_path: Path) -> None:
        """All figures are ok, also as JSON; runs are found in folders below."""
        write_run(tmp_path / "deep" / "good")
        out = printed(capsys, "validate", tmp_path)
        assert "good: meta-llama/Llama-3.1-8B on NVIDIA GeForce RTX 4090, 30 requests" in out
        assert "FAILS" not in out
        document = json.loads(printed(capsys, "validate", tmp_path, "--json", "-"))
        assert document["schema"] == "pagedkv.validate/1"
        errors = {c["name"]: c["error"] for c in document["runs"][0]["comparisons"]}
        assert max(map(abs, errors.values())) < 1e-6

    def test_one_run_that_differs_ends_with_1(self, capsys: Capture, tmp_path: Path) -> None:
        """Decoding took 1.2 times as long: TPOT fails, TTFT holds, and the good run does not hide it."""
        write_run(tmp_path / "a")
        write_run(tmp_path / "b", tpot_factor=1.2)
        assert run("validate", tmp_path, "--json", "-") == 1
        out, err = capsys.readouterr()
        assert err == ""
        good, bad = (
            {c["name"].split(",")[0]: c["holds"] for c in r["comparisons"]} for r in json.loads(out)["runs"]
        )
        assert all(good.values())
        assert (bad["TTFT"], bad["TPOT"]) == (True, False)
        assert run("validate", tmp_path) == 1
        assert "FAILS" in capsys.readouterr().out

    @pytest.mark.skipif("PAGEDKV_DATA" not in os.environ, reason="PAGEDKV_DATA is not set: no measured run")
    def test_a_real_run_is_modelled_within_the_bounds(self, capsys: Capture) -> None:
        """RTX 4090, 300 requests: TPOT within 5 %, TTFT 10 %, KV usage 4 points, preemptions of its order."""
        folder = Path(os.environ["PAGEDKV_DATA"], "measured_latency")
        document = json.loads(printed(capsys, "validate", folder, "--json", "-"))
        found = {c["name"].split(",")[0].split(" (")[0]: c for c in document["runs"][0]["comparisons"]}
        assert abs(found["TPOT"]["modelled"] / found["TPOT"]["measured"] - 1) <= 0.05
        assert abs(found["TTFT"]["modelled"] / found["TTFT"]["measured"] - 1) <= 0.10
        assert found["KV usage"]["error"] <= 4.0
        assert found["preemptions"]["measured"] > 0
        assert 10**-0.5 <= found["preemptions"]["modelled"] / found["preemptions"]["measured"] <= 10**0.5

    def damaged(self, tmp_path: Path, name: str, change: Callable[[str], str | bytes]) -> Path:
        folder = write_run(tmp_path / "run")
        path = folder / name
        text = change(path.read_text())
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder

    @pytest.mark.parametrize("name", ["meta.json", "requests.jsonl", "timeseries.csv"])
    @pytest.mark.parametrize("what", ["empty", "no text", "cut", "array"])
    def test_damaged_files_are_refused(self, capsys: Capture, tmp_path: Path, name: str, what: str) -> None:
        """Empty, not UTF-8, ending in mid-row, or no objects."""
        change: dict[str, Callable[[str], str | bytes]] = {
            "empty": lambda text: "",
            "no text": lambda text: b"\xff\xfe\x00" + text.encode(),
            "cut": lambda text: text.rstrip()[:-3] if name != "timeseries.csv" else text.rsplit(",", 2)[0],
            "array": lambda text: "[1]\n",
        }
        assert "run" in refused(capsys, "validate", self.damaged(tmp_path, name, change[what]))

    @pytest.mark.parametrize(
        ("name", "old", "new"),
        [
            ("meta.json", '"block_size": 16', '"block_size": 0'),
            ("meta.json", '"num_gpu_blocks": 2588', '"num_gpu_blocks": -5'),
            ("meta.json", '"num_gpu_blocks": 2588', '"num_gpu_blocks": 1'),
            ("meta.json", '"num_gpu_blocks": 2588', '"num_gpu_blocks": null'),
            ("meta.json", '"num_gpu_blocks": 2588', '"num_gpu_blocks": 1e999'),
            ("meta.json", "NVIDIA GeForce RTX 4090", "NVIDIA Abacus"),
            ("meta.json", '"NVIDIA GeForce RTX 4090"', "4090"),
            ("meta.json", "meta-llama/Llama-3.1-8B", "nobody/nothing"),
            ("meta.json", '"kv_cache"', '"cache"'),
            ("requests.jsonl", '"input_toks": ', '"input_toks": -'),
            ("requests.jsonl", '"output_toks": ', '"outputs": '),
            ("requests.jsonl", '"first_token_ts": ', '"first_token_ts": NaN, "x": '),
            ("requests.jsonl", '"queued_ts": ', '"queued_ts": Infinity, "x": '),
            ("requests.jsonl", '"input_toks": ', '"input_toks": Infinity, "x": '),
            ("timeseries.csv", "kv_cache_pct", "usage"),
            ("timeseries.csv", "\n0", "\nx"),
        ],
    )
    def test_wrong_fields_are_refused(
        self, capsys: Capture, tmp_path: Path, name: str, old: str, new: str
    ) -> None:
        """One line, whatever the field holds; never an exit code that means a comparison was made."""

        def change(text: str) -> str:
            assert old in text
            return text.replace(old, new)

        refused(capsys, "validate", self.damaged(tmp_path, name, change), "--json", "-")

    def test_a_timeline_without_rows_is_refused(self, capsys: Capture, tmp_path: Path) -> None:
        """There is no usage to compare."""
        refused(
            capsys,
            "validate",
            self.damaged(tmp_path, "timeseries.csv", lambda text: text.splitlines()[0] + "\n"),
        )

    def test_requests_of_one_token_each_are_refused_or_compared(
        self, capsys: Capture, tmp_path: Path
    ) -> None:
        """No TPOT exists: not an exception, and no NaN in the output."""
        folder = self.damaged(
            tmp_path,
            "requests.jsonl",
            lambda text: re.sub(r'"output_toks": \d+', '"output_toks": 1', text),
        )
        assert run("validate", folder, "--json", "-") in (0, 1, 2)
        assert "NaN" not in capsys.readouterr().out

    def test_a_run_whose_first_tokens_come_at_once_is_refused_or_compared(
        self, capsys: Capture, tmp_path: Path
    ) -> None:
        """A measured TTFT of zero is nothing to divide by."""
        folder = self.damaged(
            tmp_path,
            "requests.jsonl",
            lambda text: re.sub(
                r'"queued_ts": ([\d.]+)(.*)"first_token_ts": [\d.]+',
                r'"queued_ts": \1\2"first_token_ts": \1',
                text,
            ),
        )
        assert run("validate", folder, "--json", "-") in (1, 2)

    def test_folders_without_a_run_are_refused(self, capsys: Capture, tmp_path: Path) -> None:
        """An empty folder, a missing one, a file."""
        assert "no measured run" in refused(capsys, "validate", tmp_path)
        assert "no folder" in refused(capsys, "validate", tmp_path / "absent")
        (tmp_path / "file").write_text("")
        refused(capsys, "validate", tmp_path / "file")


# ---------------------------------------------------------------- download

BODY = b"".join(json.dumps(row(timestamp=i)).encode() + b"\n" for i in range(50))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/absent":
            self.send_error(404)
            return
        body = BODY if self.path == "/good" else BODY[:-2] + b" \n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that has the trace, as far as the table of known traces can tell."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    known = KnownTrace(
        "demo.jsonl", "http://127.0.0.1:1/", hashlib.sha256(BODY).hexdigest(), len(BODY), "MIT", "Nobody"
    )
    monkeypatch.setitem(KNOWN_TRACES, "mooncake-conversation", known)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class TestDownload:
    def download(self, folder: Path, url: str) -> tuple[object, ...]:
        return ("trace", "download", "mooncake-conversation", "--dir", folder, "--url", url)

    def test_a_fetched_trace_can_be_replayed(self, capsys: Capture, tmp_path: Path, url: str) -> None:
        """It says licence and citation, and the command that it prints works."""
        folder = tmp_path / ("deep-" * 12) / ("down-" * 12)
        out = printed(capsys, *self.download(folder, f"{url}/good"))
        path = folder / "demo.jsonl"
        assert "SHA-256 as expected. MIT." in flat(out)
        assert "Cite: Nobody" in out
        assert f"Replay it: pagedkv replay {path}\n" in out
        assert path.read_bytes() == BODY
        assert "50 requests" in printed(capsys, "replay", path)

    @pytest.mark.parametrize("what", ["wrong", "absent"])
    def test_a_wrong_file_is_refused_and_the_old_one_stays(
        self, capsys: Capture, tmp_path: Path, url: str, what: str
    ) -> None:
        """Another hash or no file: exit code 2, nothing half-written."""
        (tmp_path / "demo.jsonl").write_text("old")
        message = refused(capsys, *self.download(tmp_path, f"{url}/{what}"))
        assert ("SHA-256" if what == "wrong" else "404") in message
        assert [entry.name for entry in tmp_path.iterdir()] == ["demo.jsonl"]
        assert (tmp_path / "demo.jsonl").read_text() == "old"

    def test_other_names_and_addresses_are_refused(self, capsys: Capture, tmp_path: Path) -> None:
        """Unknown trace, no http, nobody there."""
        refused(capsys, "trace", "download", "nothing")
        refused(capsys, "trace")
        refused(capsys, *self.download(tmp_path, "file:///etc/hostname"))
        refused(capsys, *self.download(tmp_path, "http://[bad"))
        assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- mistakes

BAD_TRACES = {
    "empty": "",
    "blank": "\n\n",
    "no JSON": "{oops\n",
    "no object": "[1]\n",
    "binary": "\x00\x01\x02",
    "negative": json.dumps(row(input_length=-1)),
    "zero": json.dumps(row(output_length=0)),
    "fraction": json.dumps(row(input_length=1.5)),
    "text": json.dumps(row(input_length="1100")),
    "null": json.dumps(row(hash_ids=None)),
    "too many ids": json.dumps(row(hash_ids=[1, 2, 3, 4])),
    "too few ids": json.dumps(row(hash_ids=[1])),
    "back in time": json.dumps(row(timestamp=5)) + "\n" + json.dumps(row(timestamp=4)),
    "no time": json.dumps(row()).replace('"timestamp": 0', '"timestamp": NaN'),
    "huge": json.dumps(row(input_length=2**31)),
    "deep": "[" * 100_000,
    "newline in a string": '{"a\\nb": 1}',
}
for _field in ("timestamp", "input_length", "output_length", "hash_ids"):
    BAD_TRACES[f"no {_field}"] = json.dumps({k: v for k, v in row().items() if k != _field})

BAD_OPTIONS = [
    "--model nothing",
    "--gpu abacus",
    "--kv-dtype int3",
    "--kv-dtype",
    "--num-blocks 0",
    "--num-blocks 1.5",
    "--num-blocks 10",
    "--block-size 0",
    "--limit 0",
    "--limit -3",
    "--limit x",
    "--speed 0",
    "--speed -1",
    "--speed inf",
    "--speed nan",
    "--speed 1e-308",
    "--seed -1",
    "--watermark nan",
    "--watermark 2",
    "--watermark 1",
    "--watermark -0.1",
    "--watermark inf",
    "--watermark x",
    "--launch-us -1",
    "--launch-us nan",
    "--launch-us inf",
    "--token-budget 100 --max-batch 200",
    "--max-batch 0",
    "--weights-efficiency 0",
    "--kv-efficiency 1.1",
    "--compute-efficiency nan",
    "--interval 0",
    "--interval inf",
    "--gpu-memory nonsense",
    "--gpu-memory 1.2.3GiB",
    "--gpu-memory 0",
    "--gpu-memory -5GiB",
    "--gpu-memory 24XiB",
    "--gpu-memory 10GiB",
    "--gpu-memory 1e308",
    "--gpu-memory 1e308TiB",
    "--memory-utilization 1.5",
    "--memory-utilization 0",
    "--weight-bits 0",
    "--weight-bits 1e308",
    "--weight-bits 1000",
    "--tflops 0",
    "--block-size 1000000000000",
    "--block-size 99999999999999999999999",
    "--num-blocks 1000000000000000",
    "--num-blocks 99999999999999999999999",
    "--max-batch 1000000000000 --token-budget 1000000000000",
    "--trace-block-size 0",
    "--hits-only --timeline x.csv",
    "--hits-only --plot x.png",
    "--hits-only --model nothing",
    "--hits-only --model llama-3.1-8b",
    "--hits-only --gpu h100",
    "--hits-only --gpu-memory 24GiB",
    "--hits-only --memory-utilization 0.9",
    "--hits-only --kv-dtype bf16",
    "--hits-only --weight-bits 16",
    "--hits-only --tflops 100",
    "--hits-only --max-batch 256",
    "--hits-only --token-budget 2048",
    "--hits-only --watermark 0",
    "--hits-only --no-prefix-caching",
    "--hits-only --kv-efficiency 0.9",
    "--hits-only --launch-us 0",
    "--hits-only --interval 1",
    "--hits-only --speed 1",
    "--hits-only --num-blocks 1 --block-size 16",
    "--hits-only --num-blocks 1000000000000000",
    "--json absent/out.json",
    "--timeline absent/out.csv",
    "--plot absent/out.png",
    "--json .",
    "--plot out.xyz",
    "--plot",
    "--unknown",
    "surplus-1 surplus-2",
]


class TestMistakes:
    @pytest.mark.parametrize("options", BAD_OPTIONS)
    def test_a_wrong_option_ends_in_one_line_and_writes_nothing(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: Path, options: str
    ) -> None:
        """Exit code 2; the folder is as it was, output files that exist included."""
        (tmp_path / "out.json").write_text("old")
        (tmp_path / "out.xyz").write_text("old")
        monkeypatch.chdir(tmp_path)
        json_option = [] if "--json" in options else ["--json", "out.json"]
        refused(capsys, "replay", trace.name, *json_option, *options.split())
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.json", "out.xyz", "small.jsonl"]
        assert (tmp_path / "out.json").read_text() == "old"
        assert (tmp_path / "out.xyz").read_text() == "old"

    @pytest.mark.parametrize("what", BAD_TRACES)
    @pytest.mark.parametrize("hits_only", [False, True], ids=["replay", "hits only"])
    def test_a_damaged_trace_ends_in_one_line(
        self, capsys: Capture, tmp_path: Path, what: str, hits_only: bool
    ) -> None:
        """With the file's name in it, and no output file."""
        path = tmp_path / "bad.jsonl"
        path.write_text(BAD_TRACES[what])
        out = tmp_path / "out.json"
        options = ["--hits-only"] if hits_only else []
        assert "bad.jsonl" in refused(capsys, "replay", path, "--json", out, *options)
        assert not out.exists()

    def test_what_is_no_file_is_refused(self, capsys: Capture, tmp_path: Path) -> None:
        """Missing, a folder, no name at all, cut gzip."""
        assert "no such file" in refused(capsys, "replay", tmp_path / "absent.jsonl")
        refused(capsys, "replay", tmp_path)
        refused(capsys, "replay", "")
        (tmp_path / "cut.gz").write_bytes(gzip.compress(json.dumps(row()).encode() * 999)[:-20])
        refused(capsys, "replay", tmp_path / "cut.gz")

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ("replay --launch-us -5", "argument --launch-us: '-5' is no number from 0 to 1e9"),
            ("replay --launch-us inf", "argument --launch-us: 'inf' is no number from 0 to 1e9"),
            ("replay --watermark 1", "argument --watermark: '1' is not in [0, 1)"),
            ("size --kv-dtype int3", "argument --kv-dtype: invalid choice: 'int3'"),
            ("itl --block-size 16", "unrecognized arguments: --block-size 16 (see pagedkv itl --help)"),
            ("trace download --x", "required: name (see pagedkv trace download --help)"),
            ("replay --hits-only --gpu h100 --max-batch 4", "leave out --gpu, --max-batch"),
            ("itl --bandwidth 1e12 --gpu h100", "--bandwidth and --gpu exclude each other"),
        ],
    )
    def test_the_line_names_the_option(self, capsys: Capture, argv: str, message: str) -> None:
        """In the words of the command line, without the usage."""
        assert message in refused(capsys, *argv.split())

    def test_a_line_break_in_an_argument_stays_one_line(self, capsys: Capture) -> None:
        """In a message of argparse and in one of ours."""
        assert "no such file" in refused(capsys, "replay", "ab\nsent")
        assert "unrecognized" in refused(capsys, "size", "surplus\nword")

    def test_a_pool_too_small_for_one_request_names_it(self, capsys: Capture, trace: Path) -> None:
        """Before anything runs: request 2 needs 1536 + 7 - 1 tokens."""
        message = refused(capsys, "replay", trace, "--num-blocks", 96)
        assert "request 2 of small needs 97 blocks of 16 tokens, the pool has 96" in message
        assert run("replay", trace, "--num-blocks", 97) == 0

    @pytest.mark.parametrize(
        "argv",
        [
            "",
            "nonsense",
            "itl --context -1",
            "itl --context 1.5",
            "itl --batch 0",
            "itl --bandwidth 0",
            "itl --bandwidth fast",
            "itl --weight-bytes 14e9",
            "itl --weight-bytes 14e9 --bandwidth 8e11 --gpu h100",
            "itl --model nothing",
            "itl --gpu nothing",
            "itl --context 10000000000000000000",
            "itl --batch 10000000000000",
            "itl --bandwidth 1e-300 --weight-bytes 1e300 --json -",
            "itl --bandwidth 1e308TiB --json -",
            "itl --bandwidth 8e11 --tflops 100",
            "itl --bandwidth 8e11 --weight-bytes 14e9 --weight-bits 8",
            "itl --gpu-memory 24GiB",
            "itl --memory-utilization 0.5",
            "itl --block-size 16",
            "itl --json",
            "itl --json absent/out.json",
            "size --tflops 100",
            "size --json absent/out.json",
            "validate . --json absent/out.json",
            "size --context 0",
            "size --model llama-3.1-405b --gpu rtx4090",
            "size --gpu-memory 1e308TiB",
            "size --weight-bits 1e308",
            "size --gpu-memory 1",
            "models surplus",
            "gpus --json",
        ],
    )
    def test_other_commands_refuse_in_one_line_too(self, capsys: Capture, argv: str) -> None:
        """Wrong numbers, contradicting options, and sizes that no machine has."""
        refused(capsys, *argv.split())

    def test_a_context_too_long_to_count_is_not_answered_with_nonsense(self, capsys: Capture) -> None:
        """10^18 tokens of 100 sequences: refused, or 100 times what one sequence reads; never negative."""
        options = ("--context", 10**17, "--bandwidth", "1e12", "--json", "-")
        for batch in (1, 100):
            if run("itl", "--batch", batch, *options):
                assert_one_line(capsys.readouterr().err)
            else:
                (found,) = json.loads(capsys.readouterr().out)["rows"]
                assert found["kv_bytes"] == batch * 10**17 * 131_072

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            '{"model_type": "mamba"}',
            '{"model_type": "llama"}',
            '{"model_type": "llama", "hidden_size": -1, "num_attention_heads": 4, "num_hidden_layers": 2}',
        ],
    )
    def test_an_unsupported_config_is_refused(self, capsys: Capture, tmp_path: Path, text: str) -> None:
        """As a file and as the folder of one; and a file that is not there."""
        (tmp_path / "config.json").write_text(text)
        for model in (tmp_path, tmp_path / "config.json"):
            refused(capsys, "size", "--model", model)
        refused(capsys, "size", "--model", tmp_path / "absent" / "config.json")

    def test_unknown_names_come_with_close_ones(self, capsys: Capture) -> None:
        """A typing error is answered with what may have been meant."""
        assert "llama-3.1-8b" in refused(capsys, "size", "--model", "llama-3.1-8")
        assert "H100" in refused(capsys, "size", "--gpu", "h1000")

    @pytest.mark.parametrize("interval", ["1e-308", "1e300", "1e308"])
    def test_any_interval_ends(self, interval: str) -> None:
        """Served or refused; neither a traceback nor a loop without end."""
        done = spawned("replay", "--limit", 5, "--json", "-", "--interval", interval, timeout=15)
        assert done.returncode in (0, 2)
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("limit", ["1000000000000000", "99999999999999999999999"])
    def test_more_requests_than_memory_are_refused(self, capsys: Capture, limit: str) -> None:
        """The built-in workload makes any number, but not this one."""
        refused(capsys, "replay", "--limit", limit)

    def test_a_write_that_fails_leaves_the_old_file(self, tmp_path: Path) -> None:
        """The temporary file is gone, the old one is whole."""
        path = tmp_path / "out.json"
        path.write_text("old")

        def fail(temporary: Path) -> None:
            temporary.write_text("half")
            raise OSError("disk full")

        with pytest.raises(PagedKVError, match=f"cannot write {path}: disk full"):
            write_outputs((str(path), fail))
        assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]
        assert path.read_text() == "old"

    def test_outputs_are_checked_before_the_work(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A missing folder and an unknown image format are found before the replay runs."""

        def must_not_run(*args: Any, **options: Any) -> Any:
            raise AssertionError("the replay ran")

        monkeypatch.setattr(replay_command, "run_replay", must_not_run)
        refused(capsys, "replay", "--limit", 5, "--json", tmp_path / "absent" / "x.json")
        assert not check_outputs(json=None, timeline=str(tmp_path / "fine.csv"))
        assert check_outputs(json="-", timeline=str(tmp_path / "fine.csv"))
        refused(capsys, "replay", "--limit", 5, "--plot", tmp_path / "x.xyz")


# ---------------------------------------------------------------- output files


def fail_to_plot(result: object, path: Path) -> None:
    path.write_text("half")
    raise OSError(28, "No space left on device", str(path))


class TestOutputs:
    REPLAY = ("replay", "--limit", 3)

    def test_every_command_writes_json_to_a_file_beside_its_tables(
        self, capsys: Capture, tmp_path: Path
    ) -> None:
        """And to standard output without them, the same bytes."""
        write_run(tmp_path / "run")
        for argv in (self.REPLAY, (*self.REPLAY, "--hits-only"), ("itl",), ("size",), ("validate", tmp_path)):
            path = tmp_path / "out.json"
            assert "┃" in printed(capsys, *argv, "--json", path)
            for name in ("-", "/dev/stdout"):
                assert path.read_text() == printed(capsys, *argv, "--json", name)

    def test_a_timeline_on_standard_output_is_alone_there(self, capsys: Capture, tmp_path: Path) -> None:
        """The tables are left out; the document goes to its file."""
        out = printed(capsys, *self.REPLAY, "--timeline", "-", "--json", tmp_path / "out.json")
        assert out.splitlines()[0] == COLUMNS
        assert all(line.count(",") == COLUMNS.count(",") for line in out.splitlines())
        assert json.loads((tmp_path / "out.json").read_text())["inputs"]["requests"] == 3

    @pytest.mark.parametrize(
        "options",
        [
            ("--json", "-", "--timeline", "-"),
            ("--json", "-", "--timeline", "/dev/stdout"),
            ("--json", "a.png", "--plot", "a.png"),
            ("--json", "a.json", "--timeline", "./x/../a.json"),
            ("--timeline", "link.csv", "--json", "a.json"),
        ],
    )
    def test_two_outputs_in_one_place_are_refused(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
    ) -> None:
        """However the place is written."""
        monkeypatch.chdir(tmp_path)
        Path("x").mkdir()
        Path("link.csv").symlink_to("a.json")
        assert "both write" in refused(capsys, *self.REPLAY, *options)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.csv", "x"]

    def test_an_output_that_fails_changes_no_other(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The picture cannot be written: document and timeline are as before, and nothing lies about."""
        monkeypatch.setattr(replay_outputs, "plot_replay", fail_to_plot)
        monkeypatch.setattr(replay_outputs, "require_plottable", lambda path: None)
        files = [tmp_path / name for name in ("a.json", "b.csv", "c.png")]
        for path in files[:2]:
            path.write_text("old")
        options = ("--json", files[0], "--timeline", files[1], "--plot", files[2])
        message = refused(capsys, *self.REPLAY, *options)
        assert message == f"pagedkv: error: cannot write {files[2]}: No space left on device"
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
            "a.json": "old",
            "b.csv": "old",
        }

    def test_a_link_stays_a_link(self, capsys: Capture, tmp_path: Path) -> None:
        """To a file that is there, keeping its permissions, and to one that is not yet."""
        (tmp_path / "far").mkdir()
        (tmp_path / "far" / "old.json").write_text("old")
        (tmp_path / "far" / "old.json").chmod(0o640)
        for name in ("old.json", "new.json"):
            link = tmp_path / name
            link.symlink_to(tmp_path / "far" / name)
            printed(capsys, *self.REPLAY, "--json", link)
            assert link.is_symlink()
            assert json.loads((tmp_path / "far" / name).read_text())["inputs"]["requests"] == 3
        assert (tmp_path / "far" / "old.json").stat().st_mode & 0o777 == 0o640
        assert len(list((tmp_path / "far").iterdir())) == 2

    @pytest.mark.skipif(os.name != "posix", reason="devices and pipes of POSIX")
    def test_what_is_no_regular_file_is_written_to(self, capsys: Capture, tmp_path: Path) -> None:
        """A pipe gets the document and is still a pipe; so is a device, also behind a link."""
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        (tmp_path / "null").symlink_to("/dev/null")
        heard: list[str] = []
        reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
        reader.start()
        printed(capsys, *self.REPLAY, "--json", pipe, "--timeline", tmp_path / "null")
        reader.join(timeout=30)
        assert json.loads(heard[0])["inputs"]["requests"] == 3
        assert pipe.is_fifo()
        assert (tmp_path / "null").is_symlink() and Path("/dev/null").is_char_device()

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
    def test_a_full_device_changes_no_file(self, capsys: Capture, tmp_path: Path) -> None:
        """It is written first, since it cannot be taken back."""
        (tmp_path / "b.csv").write_text("old")
        message = refused(capsys, *self.REPLAY, "--timeline", tmp_path / "b.csv", "--json", "/dev/full")
        assert message == "pagedkv: error: cannot write /dev/full: No space left on device"
        assert (tmp_path / "b.csv").read_text() == "old"

    @pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
    def test_a_reader_that_leaves_costs_no_file(self, tmp_path: Path) -> None:
        """`--json - | head` with a timeline: the timeline is there."""
        reader, writer = os.pipe()
        os.close(reader)
        code = "import sys\nfrom pagedkv.sim.cli import main\nsys.exit(main())\n"
        argv = [sys.executable, "-c", code, *map(str, self.REPLAY), "--json", "-"]
        argv += ["--timeline", str(tmp_path / "b.csv")]
        try:
            done = subprocess.run(argv, env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=60)
        finally:
            os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")
        assert (tmp_path / "b.csv").read_text().startswith(COLUMNS)

    @pytest.mark.parametrize("mistake", ["long", "loop", "below a file", "folder", "empty"])
    def test_impossible_paths_are_named_before_the_work(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
    ) -> None:
        """In the words of the system, with the path as given."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(replay_command, "run_replay", None)
        Path("loop").symlink_to("loop")
        Path("file").write_text("")
        names = {"long": 300 * "x", "below a file": "file/x.json", "folder": ".", "empty": ""}
        path = names.get(mistake, mistake)
        assert f"cannot write {path}: " in refused(capsys, *self.REPLAY, "--json", path)

    def test_missing_permissions_are_found_before_the_work(
        self, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To the folder of a new file, and to a file that is there (root may do anything, so we pretend)."""
        monkeypatch.setattr(replay_command, "run_replay", None)
        path, locked = tmp_path / "out.json", str(tmp_path)
        access = os.access
        monkeypatch.setattr(os, "access", lambda name, mode: str(name) != locked and access(name, mode))
        message = refused(capsys, *self.REPLAY, "--json", path)
        assert f"cannot write {path}: no permission to write into the folder {tmp_path}" in message
        path.write_text("old")
        locked = str(path)
        assert f"cannot write {path}: no permission" in refused(capsys, *self.REPLAY, "--json", path)

    def test_a_permission_lost_meanwhile_names_the_path_as_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not the temporary file, which nobody asked for."""

        def denied(*args: Any, **options: Any) -> Any:
            raise PermissionError(13, "Permission denied", str(tmp_path / ".pagedkv-abc.json"))

        monkeypatch.setattr(tempfile, "mkstemp", denied)
        with pytest.raises(PagedKVError) as refusal:
            write_outputs((str(tmp_path / "out.json"), text_writer("new")))
        assert str(refusal.value) == f"cannot write {tmp_path / 'out.json'}: Permission denied"


# ---------------------------------------------------------------- as a process

BLOCKER = """
import importlib.abc
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {name!r}:
            raise ImportError("blocked " + name)
sys.meta_path.insert(0, Blocker())
"""


class TestProcess:
    def test_exit_codes_reach_the_shell(self, tmp_path: Path) -> None:
        """0, 1 and 2, with their texts on the right streams."""
        done = spawned("itl", "--weight-bytes", "14e9", "--bandwidth", "800e9")
        assert (done.returncode, done.stderr) == (0, "")
        assert "57.1" in done.stdout
        write_run(tmp_path / "bad", tpot_factor=2.0)
        assert spawned("validate", tmp_path).returncode == 1
        done = spawned("replay", tmp_path / "absent.jsonl")
        assert (done.returncode, done.stdout) == (2, "")
        assert_one_line(done.stderr)

    def test_torch_is_never_imported(self) -> None:
        """A replay, hits, and planning, in a process that cannot import it."""
        blocked = BLOCKER.format(name="torch")
        for argv in (
            ("replay", "--limit", 5),
            ("replay", "--limit", 5, "--hits-only"),
            ("size",),
            ("models",),
        ):
            done = spawned(*argv, before=blocked)
            assert (done.returncode, done.stderr) == (0, "")

    def test_the_version_needs_no_extra(self) -> None:
        """Whoever asks for help with an installation is asked for it first."""
        done = spawned("--version", before=BLOCKER.format(name="rich"))
        assert (done.returncode, done.stdout, done.stderr) == (0, f"pagedkv {__version__}\n", "")

    @pytest.mark.parametrize("argv", [["--version"], ["itl", "--context", "1"], ["itl", "--batch", "0"]])
    def test_the_module_runs_like_the_console_script(self, argv: list[str]) -> None:
        """`python -m pagedkv`: same texts, same exit codes, same name in them."""
        code = [sys.executable, "-m", "pagedkv", *argv]
        done = subprocess.run(code, env=environment(), capture_output=True, text=True, timeout=60)
        script = spawned(*argv)
        assert (done.returncode, done.stdout, done.stderr) == (
            script.returncode,
            script.stdout,
            script.stderr,
        )

    def test_without_rich_the_extra_is_named(self) -> None:
        """One line that can be pasted, exit code 2."""
        done = spawned("models", before=BLOCKER.format(name="rich"))
        assert (done.returncode, done.stdout) == (2, "")
        assert 'pip install "pagedkv[cli]"' in assert_one_line(done.stderr)

    def test_without_matplotlib_a_plot_names_the_extra(self, tmp_path: Path) -> None:
        """And writes nothing; without --plot nobody misses it."""
        blocked = BLOCKER.format(name="matplotlib")
        assert spawned("replay", "--limit", 3, before=blocked).returncode == 0
        done = spawned("replay", "--limit", 3, "--plot", tmp_path / "out.png", before=blocked)
        assert done.returncode == 2
        assert 'pip install "pagedkv[plot]"' in assert_one_line(done.stderr)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
    @pytest.mark.parametrize("argv", [["models"], ["replay", "--limit", "5", "--json", "-"]])
    def test_a_reader_that_leaves_hears_no_traceback(self, argv: list[str]) -> None:
        """As with `| head`: nothing on standard error, and no failure."""
        reader, writer = os.pipe()
        os.close(reader)
        code = "import sys\nfrom pagedkv.sim.cli import main\nsys.exit(main())\n"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, *argv],
                env=environment(),
                stdout=writer,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
        finally:
            os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
    def test_an_interrupt_ends_with_130_and_no_traceback(self, tmp_path: Path) -> None:
        """In the middle of a replay; the output file does not appear."""
        code = (
            "import sys\nfrom pagedkv.sim.commands import replay_command\nfrom pagedkv.sim.cli import main\n"
            "serve = replay_command.run_replay\n"
            "def telling(trace, setup, update):\n"
            "    def heard(done):\n"
            "        update(done)\n"
            "        print('running', flush=True) if done == 1 else None\n"
            "    return serve(trace, setup, heard)\n"
            "replay_command.run_replay = telling\nsys.exit(main())\n"
        )
        out = tmp_path / "out.json"
        argv = [sys.executable, "-c", code, "replay", "--limit", "20000", "--json", str(out)]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err == "pagedkv: interrupted\n"
        assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_name_does_not_hide_the_built_in_workload(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    """Such a file is ./chat-long."""
    monkeypatch.chdir(tmp_path)
    trace.rename("chat-long")
    for name in ([], ["chat-long"]):
        assert "chat-long: 5 requests" in printed(capsys, "replay", *name, "--limit", 5)
    assert "chat-long: 3 requests" in printed(capsys, "replay", "./chat-long", "--limit", 5)


def test_the_workload_named_by_default_is_the_built_in_one(capsys: Capture) -> None:
    """Leaving the trace out and naming it give the same document."""
    options = ("--limit", 10, "--json", "-")
    assert printed(capsys, "replay", *options) == printed(capsys, "replay", "chat-long", *options)
    assert json.loads(printed(capsys, "replay", *options))["tokens"]["input"] == int(
        chat_long(10).input_len.sum()
    )


@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["itself", "a link", "a hard link"])
@pytest.mark.parametrize("option", ["--json", "--timeline", "--json --hits-only"])
def test_the_trace_that_is_read_is_never_overwritten(
    option: str, link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output that names the input, however, is refused before the work, and the trace stays."""
    trace, name = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl"
    text = '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}\n'
    trace.write_text(text)
    if link is not None:
        name = tmp_path / "other.jsonl"
        link(trace, name)
    flag, *more = option.split()
    assert main(["replay", str(trace), flag, str(name), *more]) == 2
    assert f"{flag} would overwrite {name}, which is read" in capsys.readouterr().err
    assert trace.read_text() == text
