"""``benchmarks/bench_manager.py``: its workloads in small, the hits that they must find, and its table."""

import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "bench_manager.py"

if not SCRIPT.is_file():
    pytest.skip("needs the checkout: benchmarks are not installed", allow_module_level=True)

from benchmarks import bench_manager, manager_workloads  # noqa: E402
from benchmarks.manager_peers import (  # noqa: E402
    BLOCK_SIZE,
    PEERS,
    MakePeer,
    PagedKV,
    Peer,
    Pool,
    find_peer,
    prompt,
)
from benchmarks.manager_workloads import (  # noqa: E402
    WORKLOADS,
    Churn,
    Eviction,
    Fork,
    Length,
    Lifecycle,
    Measured,
    MultiTurn,
    SharedPrefix,
    Stopwatch,
    Tree,
    Workload,
    ZipfDocuments,
    bytes_per_block,
)
from pagedkv.block_tables import Int32Array  # noqa: E402

TINY: dict[str, Workload] = {
    "lifecycle": Lifecycle(3, prompt=40, steps=20),
    "lifecycle without prefix cache": Lifecycle(3, prompt=40, steps=20, prefix_caching=False),
    "shared prefix": SharedPrefix(shared=64, own=20, seqs=3),
    "shared prefix, at once": SharedPrefix(shared=64, own=20, seqs=3, at_once=True),
    "zipf": ZipfDocuments(documents=12, document_blocks=4, warm=10, requests=80),
    "churn": Churn(prompt=48, requests=9, num_blocks=10),
    "eviction": Eviction(num_cached=10, filler=64, requests=12),
    "eviction of several": Eviction(num_cached=10, filler=64, prompt=48, requests=12),
    "fork": Fork(parents=2, children=3, prompt=40),
    "multi-turn": MultiTurn(conversations=3, turns=4, question=30, answer=10),
    "length": Length(100, seqs=2, steps=3),
    "tree": Tree(seqs=60, most_new=64, num_blocks=60),
}
PHASES = {"open", "commit", "step", "fork", "close"}


@pytest.fixture(params=sorted(PEERS))
def make(request: pytest.FixtureRequest) -> MakePeer:
    """Each peer that can be had here; the others are skipped and say why."""
    found = find_peer(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def lru_hits(texts: Sequence[Int32Array], num_blocks: int) -> list[int]:
    """Cached tokens of requests one after another, by a plain count: a block's key is its whole prefix."""
    cached: OrderedDict[bytes, None] = OrderedDict()
    hits = []
    for text in texts:
        keys = [text[: end * BLOCK_SIZE].tobytes() for end in range(1, len(text) // BLOCK_SIZE + 1)]
        most = (len(text) - 1) // BLOCK_SIZE
        hit = next((i for i, key in enumerate(keys[:most]) if key not in cached), most)
        hits.append(hit * BLOCK_SIZE)
        for key in keys[:hit]:
            del cached[key]
        held = -(-len(text) // BLOCK_SIZE)
        while len(cached) + held > num_blocks:
            cached.popitem(last=False)
        for key in reversed(keys):  # the deepest goes first
            cached.pop(key, None)
            cached[key] = None
    return hits


@pytest.mark.parametrize("name", TINY)
def test_each_workload_runs_and_leaves_the_pool_as_it_was(name: str) -> None:
    """In small, on this library: nothing is left open, all invariants hold, phases are timed."""
    made: list[PagedKV] = []

    def make(pool: Pool) -> Peer:
        made.append(PagedKV(pool))
        return made[-1]

    measured = TINY[name].run(make)
    (peer,) = made
    peer.manager.check_invariants()
    stats = peer.manager.stats()
    assert (stats.num_seqs, stats.active_blocks, stats.used_slots) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
    assert measured.us.keys() <= PHASES
    assert all(us >= 0 for us in measured.us.values())


def test_every_kind_of_workload_runs_in_small() -> None:
    """No workload is without a small sister above."""
    assert {type(w) for w in WORKLOADS.values()} == {type(w) for w in TINY.values()}


def test_unique_prompts_hit_nothing(make: MakePeer) -> None:
    """Lifecycle, length, churn and eviction measure the work for new content only."""
    for name in ("lifecycle", "lifecycle without prefix cache", "length", "churn", "eviction"):
        measured = TINY[name].run(make)
        assert measured.asked_tokens > 0
        assert measured.hit_tokens == 0, name


@pytest.mark.parametrize("at_once", [False, True])
def test_the_shared_prefix_is_hit_by_all_but_the_first(make: MakePeer, at_once: bool) -> None:
    """Whether the requests come one after another or are open at once."""
    measured = SharedPrefix(shared=64, own=20, seqs=3, at_once=at_once).run(make)
    assert (measured.asked_tokens, measured.hit_tokens) == (3 * 84, 3 * 64)


def test_zipf_documents_hit_what_an_lru_count_says(make: MakePeer) -> None:
    """Requests after the warm-up only, in a pool smaller than the documents."""
    workload = ZipfDocuments(documents=12, document_blocks=4, warm=10, requests=80)
    length = 4 * BLOCK_SIZE + 1
    hits = lru_hits([prompt(1000 + d, length) for d in workload.order()], workload.num_blocks)
    measured = workload.run(make)
    assert measured.asked_tokens == 80 * length
    assert measured.hit_tokens == sum(hits[10:]) > 0


def test_the_tree_hits_what_an_lru_count_says(make: MakePeer) -> None:
    """Prompts that part anywhere, in a pool that cannot cache all of them."""
    workload = Tree(seqs=60, most_new=64, num_blocks=60)
    texts = workload.prompts()
    assert len(texts) == 60
    measured = workload.run(make)
    assert measured.asked_tokens == sum(map(len, texts))
    assert measured.hit_tokens == sum(lru_hits(texts, 60)) > 0


def test_a_turn_hits_all_full_blocks_of_the_turns_before(make: MakePeer) -> None:
    """The answers too, which were committed token by token."""
    workload = MultiTurn(conversations=3, turns=4, question=30, answer=10)
    measured = workload.run(make)
    assert measured.hit_tokens == 3 * sum(turn * 40 // BLOCK_SIZE * BLOCK_SIZE for turn in range(4))


def test_a_step_is_timed_per_token() -> None:
    """A phase of several units is divided by them, and the clock's own cost comes off once per call."""
    watch = Stopwatch()
    assert watch.timed("step", 4, sum, [1, 2]) == 3
    watch._ns["step"] = 9_000
    assert watch.us(1_000.0) == {"step": 2.0}
    assert watch.us(10_000.0) == {"step": 0.0}


def test_a_lost_block_is_noticed() -> None:
    """A manager that forgets to give something back fails the workload instead of looking fast."""

    class Leaky(PagedKV):
        def close(self, request: object) -> None:
            pass

    with pytest.raises(AssertionError, match="are left"):
        TINY["length"].run(Leaky)


def test_memory_counts_the_arrays() -> None:
    """At least the tokens, which are 4 bytes each, and less than twice of them and 200 bytes."""
    assert (
        4 * BLOCK_SIZE < bytes_per_block(PagedKV, num_blocks=65_536, prompt_blocks=256) < 4 * BLOCK_SIZE + 200
    )


def test_ratios_are_medians_of_ratios_within_rounds() -> None:
    """Not ratios of medians: a slow round slows both peers."""
    seconds = [(1.0, 10.0), (2.0, 60.0), (9.0, 180.0)]
    rounds = [
        {peer: Measured({"open": us - 0.5, "commit": 0.5}, 1, 0) for peer, us in zip("ab", pair, strict=True)}
        for pair in seconds
    ]
    (line,) = bench_manager.lines_of("w", rounds, ["a", "b"])
    assert line == ("w", "admit", {"a": 2.0, "b": 60.0}, {"b": 20.0})


def test_the_script_measures_and_writes_json(tmp_path: Path) -> None:
    """One workload, one round, as a program; the peer that is not there is named, not missed silently."""
    path = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--workloads", "w4", "--rounds", "1", "--no-memory"]
    peers = ["--peers", "pagedkv", "pagedkv-lists"]
    done = subprocess.run(
        [*command, *peers, "--json", str(path)], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["schema"] == bench_manager.SCHEMA
    assert [line["phase"] for line in found["lines"]] == ["step", "fork", "close"]
    assert len(found["rounds"]["w4"]) == 1
    assert "pagedkv-lists / pagedkv" in done.stdout


def test_an_absent_peer_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is made without it, and says why."""
    monkeypatch.setitem(PEERS, "vllm", "benchmarks.no_such_module:VLLM")
    monkeypatch.setitem(WORKLOADS, "w4", TINY["fork"])
    assert bench_manager.main(["--workloads", "w4", "--rounds", "1", "--no-memory"]) == 0
    assert "vllm is not importable here: ModuleNotFoundError" in capsys.readouterr().out


def test_tokens_of_steps_are_token_ids() -> None:
    """Within the vocabulary that prompts have, too."""
    tokens = manager_workloads.sampled(7, 300)
    assert tokens.dtype == np.int32
    assert 0 <= tokens.min() <= tokens.max() < 32_000
