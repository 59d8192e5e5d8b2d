"""``pagedkv replay`` with the features of the engine: what the options do, and which do not go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.sim.cli import main
from pagedkv.sim.output.result_file import result_schema

Capture = pytest.CaptureFixture[str]

SWAP = ("--preemption", "swap", "--host-memory", "64GiB", "--host-bandwidth", "25GB")
HOST = ("--host-cache", "500GiB", "--host-bandwidth", "60GB")
DISK = ("--disk-cache", "1TB", "--disk-read-bandwidth", "7GB", "--disk-write-bandwidth", "5GB")
KV = ("--disaggregate", "--kv-bandwidth", "50GB")
TP = ("--tensor-parallel", "2", "--tp-bandwidth", "450GB", "--tp-latency-us", "5")


def document(capsys: Capture, *options: str, requests: int = 25) -> dict[str, Any]:
    assert main(["replay", "--limit", str(requests), "--speed", "20", "--json", "-", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def refusal(capsys: Capture, *options: str) -> str:
    try:
        code = main(["replay", "--limit", "5", *options])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    return line


def test_nothing_is_on_that_was_not_asked_for(capsys: Capture) -> None:
    """The inputs say so, and no feature has figures."""
    found = document(capsys)
    assert found["features"] == {}
    inputs = found["inputs"]
    assert (inputs["tensor_parallel"], inputs["disaggregation"], inputs["hybrid"]) == (None, None, False)
    engine = inputs["engine"]
    assert (engine["swap"], engine["speculation"], engine["queue"]) == (None, None, "fcfs")
    assert not (engine["prefill_first"] or engine["coalesce"] or engine["partial_hits"])


def test_swapping_says_what_went_over_the_link(capsys: Capture) -> None:
    """A pool so small that somebody is preempted; bytes are whole blocks of 2 MiB."""
    found = document(capsys, "--num-blocks", "7000", "--watermark", "0", *SWAP, requests=120)
    swapping = found["features"]["swapping"]
    assert found["preemptions"] == swapping["preemptions_swapped"] + swapping["preemptions_recomputed"]
    assert swapping["preemptions_swapped"] > 0
    assert swapping["bytes_on_link"] == swapping["bytes_out"] + swapping["bytes_in"]
    assert swapping["bytes_on_link"] % found["inputs"]["bytes_per_block"] == 0
    assert swapping["link_busy_s"] == pytest.approx(swapping["bytes_on_link"] / 25e9)
    assert found["inputs"]["engine"]["swap"]["num_host_blocks"] == 64 * 2**30 // (2 * 2**20)


def test_a_host_cache_says_what_it_brought_back(capsys: Capture) -> None:
    """A pool that forgets, and a host that does not."""
    options = ("--num-blocks", "7000", "--gpu", "h100")
    found = document(capsys, *options, *HOST, requests=120)
    tier = found["features"]["host_tier"]
    assert tier["tokens_loaded"] > 0
    assert tier["bytes_in"] == tier["tokens_loaded"] * found["inputs"]["bytes_per_token"]
    assert tier["bytes_on_link"] == tier["bytes_in"] + tier["bytes_out"]


def test_a_disk_says_what_it_brought_back(capsys: Capture) -> None:
    """A device and a host that forget, and a disk that does not: fewer tokens are computed."""
    options = ("--num-blocks", "7000", "--gpu", "h100", "--host-cache", "16GiB", "--host-bandwidth", "60GB")
    without = document(capsys, *options, requests=120)
    found = document(capsys, *options, *DISK, requests=120)
    disk, size = found["features"]["disk_tier"], found["inputs"]["bytes_per_block"]
    assert disk["bytes_in"] == disk["tokens_read"] * found["inputs"]["bytes_per_token"] > 0
    assert disk["bytes_out"] % size == 0 < disk["bytes_out"]
    assert disk["read_busy_s"] == pytest.approx(disk["bytes_in"] / 7e9)
    assert disk["write_busy_s"] == pytest.approx(disk["bytes_out"] / 5e9)
    loaded = [d["features"]["host_tier"]["tokens_loaded"] for d in (without, found)]
    assert loaded[0] < loaded[1]


def test_a_budget_makes_steps_shorter_and_caches_smaller(capsys: Capture) -> None:
    """Decoding reads 1,024 tokens of each context; which of them stay changes neither bytes nor times."""
    options = ("--no-prefix-caching",)
    plain = document(capsys, *options)
    some = [
        document(capsys, *options, "--kv-budget", "1030", "--kv-keep", rule)
        for rule in ("streaming", "heavy-hitters")
    ]
    for found in some:
        assert found["features"]["kv_budget"]["tokens_per_sequence"] == 1024
        assert found["features"]["kv_budget"]["blocks_dropped"] > 0
        assert found["latency_s"] == some[0]["latency_s"]
        assert found["cache"]["bytes"] == some[0]["cache"]["bytes"]
        assert found["latency_s"]["itl"]["mean"] < plain["latency_s"]["itl"]["mean"]
        assert found["cache"]["bytes"]["mean_active"] < plain["cache"]["bytes"]["mean_active"]


def test_speculation_makes_fewer_steps(capsys: Capture) -> None:
    """And says how many tokens each gave."""
    plain, drafted = document(capsys), document(capsys, "--drafts", "3", "--accept-rate", "0.8")
    assert drafted["steps"] < plain["steps"]
    figures = drafted["features"]["speculation"]
    assert figures["expected_tokens_per_step"] == pytest.approx(2.952)
    assert figures["tokens_per_step"] == pytest.approx(2.952, rel=0.05)
    assert drafted["latency_s"]["itl"]["count"] == plain["latency_s"]["itl"]["count"]
    assert drafted["latency_s"]["itl"]["p50"] == 0.0  # most tokens come together with another


def test_two_gpus_hold_half_the_bytes_of_each_token(capsys: Capture) -> None:
    """And take less time for it."""
    one, two = document(capsys), document(capsys, *TP)
    assert two["inputs"]["bytes_per_token"] * 2 == one["inputs"]["bytes_per_token"]
    assert two["inputs"]["num_blocks"] > 2 * one["inputs"]["num_blocks"]
    assert two["features"]["tensor_parallel"] == {
        "gpus": 2,
        "kv_heads_per_gpu": [4],
        "bytes_are_of": "one GPU",
    }
    assert two["latency_s"]["tpot"]["mean"] < one["latency_s"]["tpot"]["mean"]


def test_disaggregation_says_what_was_sent(capsys: Capture) -> None:
    """A transfer per request with more than a token; what the other side has is not sent."""
    found = document(capsys, *KV)
    figures = found["features"]["disaggregation"]
    assert figures["transfer_s"]["count"] == found["inputs"]["requests"]
    block = found["inputs"]["bytes_per_block"]
    sent = figures["bytes_on_link"] // block * 16 + figures["hit_tokens_not_sent"]
    assert found["tokens"]["input"] <= sent <= found["tokens"]["input"] + 16 * found["inputs"]["requests"]
    assert figures["link_busy_s"] == pytest.approx(figures["bytes_on_link"] / 50e9)


def test_a_hybrid_pool_takes_policies_swaps_and_partial_hits(capsys: Capture) -> None:
    """Host blocks are counted in the bytes of the pool's own blocks."""
    more = ("--hybrid", "--policy", "lfu", "--coalesce", "--partial-hits", *SWAP)
    found = document(capsys, "--model", "gpt-oss-20b", "--limit", "20", *more)
    assert found["inputs"]["hybrid"] and found["inputs"]["policy"] == "lfu"
    assert {"swapping", "coalescing", "partial_hits"} <= set(found["features"])


def test_a_hybrid_pool_holds_fewer_bytes(capsys: Capture) -> None:
    """gpt-oss-20b, half of whose layers have a window."""
    options = ("--model", "gpt-oss-20b", "--gpu", "h100")
    whole, hybrid = document(capsys, *options), document(capsys, *options, "--hybrid")
    assert hybrid["cache"]["bytes"]["mean_active"] < 0.75 * whole["cache"]["bytes"]["mean_active"]
    assert hybrid["inputs"]["bytes_per_block"] * 2 == whole["inputs"]["bytes_per_block"]


def test_queues_deadlines_and_sessions_come_from_the_trace(capsys: Capture, tmp_path: Path) -> None:
    """Three requests at once and one seat: the urgent one is first, and a follow-up waits for its turn."""
    path = tmp_path / "small.jsonl"
    rows: list[dict[str, Any]] = [
        {"format": "pagedkv-trace", "version": 1},
        {"arrival_s": 0, "input_len": 500, "output_len": 5, "priority": 3, "deadline_s": 100},
        {"arrival_s": 0, "input_len": 400, "output_len": 5, "priority": 1, "deadline_s": 1e-6},
        {"arrival_s": 0, "input_len": 300, "output_len": 5, "session": "a"},
        {"arrival_s": 0, "input_len": 300, "output_len": 5, "session": "a", "think_s": 7.5},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", str(path), "--max-batch", "1", "--queue", "deadline", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["features"]["deadlines"] == {"requests": 2, "met": 1, "met_share": 0.5}
    assert found["features"]["sessions"]["follow_ups"] == 1
    assert found["features"]["sessions"]["mean_delay_s"] > 7.5
    assert found["makespan_s"] > 7.5


def test_all_together_are_shown_in_a_table(capsys: Capture) -> None:
    """Swapping, speculation, tensor parallelism, disaggregation, coalescing, partial hits, in one run."""
    more = ("--drafts", "2", "--accept-rate", "0.5", "--coalesce", "--partial-hits", "--prefill-first")
    assert main(["replay", "--limit", "20", *SWAP, *KV, *TP, *more]) == 0
    out = capsys.readouterr().out
    for name in (
        "swapping",
        "speculation",
        "tensor parallel",
        "disaggregation",
        "coalescing",
        "partial hits",
    ):
        assert f"{name}: " in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--preemption", "swap"), "--preemption swap needs --host-memory"),
        (("--preemption", "auto", "--host-memory", "9GB"), "--preemption auto needs --host-bandwidth"),
        (("--preemption", "auto", "--host-memory", "9"), "--host-memory holds no block"),
        (("--host-bandwidth", "9GB"), "--host-bandwidth needs --preemption swap, or --host-cache"),
        (("--host-cache", "9GB"), "--host-cache needs --host-bandwidth"),
        (("--host-cache", "9GB", "--no-prefix-caching"), "leave out --no-prefix-caching"),
        (("--no-prefix-caching", "--coalesce"), "--coalesce does not go with --no-prefix-caching"),
        (("--no-prefix-caching", "--policy", "arc"), "--policy does not go with --no-prefix-caching"),
        (DISK, "--disk-cache keeps what leaves the host: it needs --host-cache"),
        (DISK[2:], "--disk-read-bandwidth, --disk-write-bandwidth needs --disk-cache"),
        ((*HOST, *DISK[:4]), "--disk-cache needs --disk-write-bandwidth"),
        ((*HOST, "--disk-cache", "9", *DISK[2:]), "--disk-cache holds no block"),
        (("--kv-keep", "streaming"), "--kv-keep needs --kv-budget"),
        (("--kv-budget", "47"), "must hold 3 blocks of 16 tokens"),
        (("--kv-budget", "64", *SWAP), "--kv-budget does not go with swapping"),
        (("--kv-budget", "64", "--hybrid"), "--kv-budget does not go with --hybrid"),
        (("--kv-budget", "64", "--kv-keep", "luck"), "invalid choice: 'luck'"),
        (("--host-memory", "9GB"), "--host-memory needs --preemption swap or auto"),
        (("--drafts", "3"), "--drafts needs --accept-rate"),
        (("--accept-rate", "0.3"), "--accept-rate needs --drafts"),
        (("--drafts", "3", "--accept-rate", "1.2"), "'1.2' is not in [0, 1]"),
        (("--drafts", "9", "--accept-rate", "1"), "verifies 2560 tokens a step, the budget is 2048"),
        (("--tensor-parallel", "2"), "--tensor-parallel needs --tp-bandwidth"),
        (("--tensor-parallel", "3", "--tp-bandwidth", "9GB"), "32 query heads cannot be split over 3 GPUs"),
        (("--tp-latency-us", "3"), "--tp-latency-us needs --tensor-parallel N of 2 or more"),
        (("--disaggregate",), "--disaggregate needs --kv-bandwidth"),
        (("--kv-bandwidth", "9GB"), "--kv-bandwidth needs --disaggregate"),
        (("--hybrid", *HOST, *DISK), "--disk-cache does not go with --hybrid"),
        (("--queue", "lifo"), "argument --queue: invalid choice: 'lifo'"),
        (("--hits-only", "--coalesce"), "leave out --coalesce"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    capsys: Capture, options: tuple[str, ...], message: str
) -> None:
    """In one line, before anything runs."""
    assert message in refusal(capsys, *options)


def test_shares_of_what_goes_on_after_the_last_token_are_of_the_makespan(capsys: Capture) -> None:
    """A link and a disk that never catch up were busy all the time, and not longer."""
    slow = ("--host-cache", "1GiB", "--host-bandwidth", "1MB", *DISK[:4], "--disk-write-bandwidth", "1MB")
    features = document(capsys, *slow)["features"]
    assert features["host_tier"]["link_busy_share"] == pytest.approx(1.0, abs=0.1)
    assert 0.9 < features["disk_tier"]["busy_share"] <= 1.0
    assert features["disk_tier"]["write_busy_s"] > 1000


def unnamed(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Entries of a document that the schema does not name."""
    if "$ref" in schema:
        schema = result_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    if not isinstance(value, dict):
        return []
    known, found = schema.get("properties", {}), []
    for name, item in value.items():
        inside = known.get(name)
        if inside is None and place not in (".formulas", ".goodput.slo_s", ".goodput.met_alone"):
            found.append(f"{place}.{name}")
        found.extend(unnamed(item, inside or {}, f"{place}.{name}"))
    return found


def test_the_schema_names_every_entry_of_every_feature(capsys: Capture, tmp_path: Path) -> None:
    """Inputs and figures, with everything on that goes together; a table is needed to say so."""
    path = tmp_path / "small.jsonl"
    rows: list[dict[str, Any]] = [
        {"format": "pagedkv-trace", "version": 1},
        {"arrival_s": 0, "input_len": 300, "output_len": 5, "session": "a", "deadline_s": 9},
        {"arrival_s": 0, "input_len": 300, "output_len": 5, "session": "a", "think_s": 7.5},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--drafts", "2", "--accept-rate", "0.5", "--coalesce", "--partial-hits", "--prefill-first")
    tier = ("--host-cache", "9GB", "--host-bandwidth", "25GB", *DISK, "--kv-budget", "64")
    schema, features = result_schema()["$defs"]["pagedkv.replay-1"], set[str]()
    for options in ((*SWAP, *KV, *TP, *more, "--slo", "ttft=1"), tier):
        assert main(["replay", str(path), *options, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert unnamed(found, schema) == []
        features |= set(found["features"])
    assert features == set(schema["properties"]["features"]["properties"])
    assert main(["replay", str(path), "--hits-only", "--json", "-"]) == 0
    assert unnamed(json.loads(capsys.readouterr().out), result_schema()["$defs"]["pagedkv.hits-1"]) == []
