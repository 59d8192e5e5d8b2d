"""Hits-only replays, against independent counters and against published counts of real traces."""

import gzip
import hashlib
import json
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import NeverFits
from pagedkv.manager import KVCacheManager
from pagedkv.opened import Opened
from pagedkv.sim import hits as hits_module
from pagedkv.sim.hits import replay_hits
from pagedkv.sim.mooncake import read_mooncake
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long

needs_data = pytest.mark.skipif(
    "PAGEDKV_DATA" not in os.environ, reason="PAGEDKV_DATA is not set: no trace files"
)

# (hit blocks, hit tokens) of the Mooncake conversation trace, full blocks of 512, per capacity in blocks
CONVERSATION_BLOCKS = 276_491
CONVERSATION = {
    0: (105_592, 54_063_104),
    30_000: (95_337, 48_812_544),
    10_000: (62_005, 31_746_560),
    5_000: (34_193, 17_506_816),
    2_000: (15_944, 8_163_328),
    1_000: (12_990, 6_650_880),
}


class LeafLRU:
    """Hit blocks per request, counted without the manager: a prefix is a dict key, the order is one dict's.

    A request touches its blocks deepest first, so that the least recently used block is always a leaf; its
    own blocks are no victims.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.resident: OrderedDict[Any, None] = OrderedDict()

    def serve(self, keys: list[Any]) -> int:
        hits = 0
        while hits < len(keys) and keys[hits] in self.resident:
            hits += 1
        for key in keys[:hits]:
            del self.resident[key]
        while self.capacity and len(self.resident) + len(keys) > self.capacity:
            self.resident.popitem(last=False)
        for key in reversed(keys):
            self.resident[key] = None
        return hits


def prefix_keys(trace: Trace, request: int, block_size: int) -> list[Any]:
    """One key per full block, which stands for the block and all before it."""
    tokens = trace.tokens(request)
    digest, keys = hashlib.blake2b(digest_size=12), []
    for end in range(block_size, len(tokens) + 1, block_size):
        digest.update(tokens[end - block_size : end].tobytes())
        keys.append(digest.digest())
    return keys


def counted(trace: Trace, capacity: int, block_size: int) -> int:
    cache = LeafLRU(capacity)
    return sum(cache.serve(prefix_keys(trace, i, block_size)) for i in range(len(trace)))


def found(trace: Trace, capacity: int, block_size: int, policy: str = "lru") -> tuple[int, int]:
    stats = replay_hits(trace, capacity, block_size, policy=policy).stats
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
    assert stats.queried_blocks == int((trace.input_len // block_size).sum())
    return stats.hit_blocks, stats.hit_tokens


def random_trace(seed: int) -> Trace:
    """Prompts that branch off one another; content ids of 6 tokens."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    lengths, unused = [], 0
    for _ in range(60):
        length = int(rng.integers(1, 100))
        kept: list[int] = []
        if rows:
            parent = rows[int(rng.integers(max(0, len(rows) - 8), len(rows)))]
            kept = parent[: int(rng.integers(0, min(len(parent), length // 6) + 1))]
        num_ids = length // 6 if rng.random() < 0.5 else -(-length // 6)
        new = list(range(unused, unused + num_ids - len(kept)))
        unused += len(new)
        rows.append(kept + new)
        lengths.append(length)
    ids = np.array([content for row in rows for content in row], np.int32)
    times, outputs = np.zeros(60), np.ones(60, np.int64)
    offsets = np.cumsum([0, *map(len, rows)])
    return Trace("random", times, np.array(lengths), outputs, ids, offsets, 6, unused)


class TestAgainstASlowCounter:
    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6, 7, 12])
    def test_random_prompts_hit_as_counted(self, seed: int, block_size: int) -> None:
        """Block sizes that divide a content id, and some that do not."""
        trace = random_trace(seed)
        longest = max(1, int((trace.input_len // block_size).max()))
        for capacity in (0, longest, longest + 1, 2 * longest, 5 * longest):
            hits, tokens = found(trace, capacity, block_size)
            assert hits == counted(trace, capacity, block_size)
            assert tokens == hits * block_size

    @pytest.mark.parametrize("block_size", [512, 256, 128])
    def test_chat_long_hits_as_counted(self, block_size: int) -> None:
        """Unbounded and at three capacities, in tokens."""
        trace = chat_long(250, seed=1)
        for tokens in (0, 2_000_000, 500_000, 130_048):
            assert found(trace, tokens // block_size, block_size)[0] == counted(
                trace, tokens // block_size, block_size
            )

    def test_an_unbounded_pool_hits_each_prefix_but_its_first_time(self) -> None:
        """Queried blocks less distinct ones; nothing is evicted."""
        trace = chat_long(150, seed=2)
        distinct = {key for i in range(len(trace)) for key in prefix_keys(trace, i, 512)}
        stats = replay_hits(trace, 0, 512).stats
        assert stats.hit_blocks == stats.queried_blocks - len(distinct)
        assert stats.cached_blocks == len(distinct)
        assert stats.evicted_blocks == 0

    def test_more_blocks_never_hit_less(self) -> None:
        """LRU over leaves is a stack policy on these traces: hits grow with the pool."""
        trace = random_trace(99)
        hits = [found(trace, capacity, 2)[0] for capacity in range(50, 400, 50)]
        assert hits == sorted(hits)

    def test_halving_the_block_finds_at_least_as_many_tokens(self) -> None:
        """Unbounded: a smaller block matches a longer part of the same prefix."""
        trace = random_trace(5)
        tokens = [found(trace, 0, block_size)[1] for block_size in (12, 6, 3, 1)]
        assert tokens == sorted(tokens)


class TestConventions:
    def test_the_last_token_may_be_a_hit(self) -> None:
        """The same prompt of exactly two blocks again: both are hits, since nothing is computed."""
        trace = Trace("twice", np.zeros(2), [8, 8], [1, 1], [0, 1, 0, 1], [0, 2, 4], 4, 2)  # type: ignore[arg-type]
        assert found(trace, 0, 4) == (2, 8)

    def test_a_partial_last_block_is_no_block(self) -> None:
        """Prompts of 7 tokens have one full block of 4; the rate counts all 14 tokens."""
        trace = Trace("twice", np.zeros(2), [7, 7], [1, 1], [0, 1, 0, 1], [0, 2, 4], 4, 2)  # type: ignore[arg-type]
        hits = replay_hits(trace, 0, 4)
        assert (hits.stats.queried_blocks, hits.stats.hit_blocks, hits.stats.hit_tokens) == (2, 1, 4)
        assert hits.token_hit_rate == 4 / 14

    def test_prompts_shorter_than_a_block_are_served(self) -> None:
        """They query nothing, and rates are zero."""
        hits = replay_hits(Trace.from_lengths([0.0, 0.0], [3, 1], [1, 1]), 0, 16)
        assert (hits.requests, hits.stats.queried_blocks, hits.token_hit_rate) == (2, 0, 0.0)
        assert hits.stats.block_hit_rate == 0.0

    def test_a_pool_shorter_than_the_longest_prompt_is_refused_at_once(self) -> None:
        """The message names the request, counted from 1, and both sizes; nothing was replayed."""
        heard: list[int] = []
        trace = Trace.from_lengths([0.0] * 3, [16, 70, 16], [1, 1, 1])
        with pytest.raises(NeverFits, match=r"request 2 .* 4 full blocks of 16 tokens.* only 3"):
            replay_hits(trace, 3, 16, heard.append)
        assert heard == []
        assert replay_hits(trace, 4, 16).requests == 3

    def test_progress_is_heard_after_each_request(self) -> None:
        """1, 2, 3."""
        heard: list[int] = []
        replay_hits(Trace.from_lengths([0.0] * 3, [16, 7, 16], [1, 1, 1]), 0, 4, heard.append)
        assert heard == [1, 2, 3]


# ---------------------------------------------------------------- real traces


def data(*parts: str) -> Path:
    return Path(os.environ["PAGEDKV_DATA"], "traces", *parts)


def expected(name: str) -> dict[str, Any]:
    """Counts of leaf LRU over full blocks, in the engine convention, with ``inf`` among the capacities."""
    full = json.loads(data("expected.json").read_text())[name]["engine"]["full"]
    counts: dict[str, Any] = {**full["lru_leaf"], "inf": full["inf"], "blocks": full["blocks"]}
    return counts


def independent(name: str, policy: str) -> dict[str, tuple[int, int]]:
    """(hit blocks, hit tokens) of a policy over full blocks in the engine convention, by capacity."""
    counts = json.loads(data("expected.json").read_text())[name]["engine"]["full"][policy]
    return {capacity: (pair[0], pair[1]) for capacity, pair in counts.items()}


def fifo_hits(trace: Trace, capacity: int, block_size: int, leaves_first: bool) -> int:
    """Hit blocks of first in, first out over content ids, each of which has one parent."""
    admitted: dict[int, int] = {}  # content -> its parent, in order of admission
    children: Counter[int] = Counter()
    hits = 0
    for request in range(len(trace)):
        start, stop = trace.content_offsets[request : request + 2]
        ids = trace.content_ids[start:stop].tolist()[: int(trace.input_len[request]) // block_size]
        known = next((i for i, x in enumerate(ids) if x not in admitted), len(ids))
        hits += known
        parents = dict(zip(ids, [-1, *ids], strict=False))
        for new in reversed([x for x in ids if x not in admitted]):
            admitted[new] = parents[new]
            children[parents[new]] += 1
        for _ in range(len(admitted) - capacity):
            held = parents.keys()
            victim = next(x for x in admitted if x not in held and not (leaves_first and children[x]))
            children[admitted.pop(victim)] -= 1
    return hits


def assert_counts(trace: Trace, name: str, block_size: int) -> None:
    counts = expected(name)
    assert int((trace.input_len // block_size).sum()) == counts.pop("blocks")
    for capacity, wanted in counts.items():
        got = found(trace, 0 if capacity == "inf" else int(capacity), block_size)
        assert got == tuple(wanted), f"capacity {capacity}"


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return read_mooncake(data("mooncake", "conversation_trace.jsonl.gz"))


@needs_data
class TestRealTraces:
    @pytest.mark.parametrize("capacity", CONVERSATION)
    def test_the_conversation_trace_hits_exactly_as_published(
        self, conversation: Trace, capacity: int
    ) -> None:
        """12,031 requests; 0 stands for a pool without bounds."""
        hits = replay_hits(conversation, capacity, 512)
        assert (hits.stats.hit_blocks, hits.stats.hit_tokens) == CONVERSATION[capacity]
        assert hits.stats.queried_blocks == CONVERSATION_BLOCKS
        assert (hits.requests, hits.input_tokens) == (12_031, 144_793_823)

    def test_the_constants_are_those_of_the_table(self) -> None:
        """What this file writes down is what the data says."""
        counts = expected("mooncake_conversation")
        for capacity, pair in CONVERSATION.items():
            assert tuple(counts[str(capacity) if capacity else "inf"]) == pair

    def test_all_other_capacities_of_the_table_agree(self, conversation: Trace) -> None:
        """Twelve more, from 500 to 100,000 blocks."""
        counts = expected("mooncake_conversation")
        others = [c for c in counts if c not in ("blocks", "inf") and int(c) not in CONVERSATION]
        assert len(others) >= 10
        for capacity in others:
            assert found(conversation, int(capacity), 512) == tuple(counts[capacity]), capacity

    @pytest.mark.parametrize("limit", [1000, 4000])
    def test_the_beginning_of_the_trace_agrees(self, conversation: Trace, limit: int) -> None:
        """The first requests alone, at every listed capacity."""
        assert_counts(conversation.head(limit), f"mooncake_conversation_head{limit}", 512)

    @pytest.mark.parametrize("capacity", [10_000, 0])
    def test_every_single_request_hits_as_published(
        self, conversation: Trace, capacity: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SHA-256 over the hit blocks of each request, in decimal and joined by commas."""
        per_request: list[int] = []

        class Noting(KVCacheManager):
            def open(self, seq_id: Any, tokens: Any, **options: Any) -> Opened | None:
                opened = super().open(seq_id, tokens, **options)
                assert opened is not None
                per_request.append(opened.num_cached_tokens // 512)
                return opened

        monkeypatch.setattr(hits_module, "KVCacheManager", Noting)
        replay_hits(conversation, capacity, 512)
        digests = json.loads(data("expected.json").read_text())["matched_digests"]
        wanted = digests[f"conversation/full/lru_leaf/{capacity or 'inf'}"]
        assert per_request[:20] == wanted["first20"]
        assert sum(n > 0 for n in per_request) == wanted["nonzero"]
        assert hashlib.sha256(",".join(map(str, per_request)).encode()).hexdigest() == wanted["sha256"]

    def test_the_software_agent_trace_agrees(self) -> None:
        """402 calls of agents, blocks of 16, full blocks only."""
        trace = read_mooncake(data("lmcache_agent", "miniswe_blk16.jsonl.gz"), block_size=16)
        assert_counts(trace, "lmcache_miniswe", 16)

    @pytest.mark.parametrize(("policy", "published"), [("lfu", "lfu_leaf"), ("belady", "opt_leaf")])
    def test_other_policies_hit_exactly_as_published(
        self, conversation: Trace, policy: str, published: str
    ) -> None:
        """LFU with ties by recency, and the optimum that admits everything, at the listed capacities."""
        for limit in (1000, 4000):
            counts = independent(f"mooncake_conversation_head{limit}", published)
            assert len(counts) == 5
            for capacity, wanted in counts.items():
                assert found(conversation.head(limit), int(capacity), 512, policy) == wanted, capacity
        assert (
            found(conversation, 10_000, 512, policy)
            == (independent("mooncake_conversation", published)["10000"])
        )
        agents = read_mooncake(data("lmcache_agent", "miniswe_blk16.jsonl.gz"), block_size=16)
        for capacity, wanted in independent("lmcache_miniswe", published).items():
            assert found(agents, int(capacity), 16, policy) == wanted, capacity

    @pytest.mark.parametrize("limit", [1000, 4000])
    def test_fifo_differs_from_what_was_published_by_keeping_parents(
        self, conversation: Trace, limit: int
    ) -> None:
        """The published FIFO gives up a parent before a child that came later; this one never does."""
        head = conversation.head(limit)
        for capacity, wanted in independent(f"mooncake_conversation_head{limit}", "fifo_leaf").items():
            assert fifo_hits(head, int(capacity), 512, leaves_first=False) == wanted[0]
            leaves_first = fifo_hits(head, int(capacity), 512, leaves_first=True)
            assert found(head, int(capacity), 512, "fifo")[0] == leaves_first, capacity

    def test_the_composed_agent_sessions_agree(self) -> None:
        """64 sessions, 30 s apart, 2.6 million blocks of 64, at every capacity listed."""
        path = data("kv_cache_tester", "agentic_sessions_share.jsonl.gz")
        if not path.is_file() or not path.stat().st_size:
            pytest.skip(f"{path.name} is missing or empty: no agent sessions to compose")
        trace = composed_sessions(path)
        assert_counts(trace, "kv_cache_tester_share64", 64)


SESSION_GAP_MS = 30_000


def composed_sessions(path: Path, num_sessions: int = 64, longest: int = 131_072) -> Trace:
    """Interleave the main threads of the first sessions that stay below ``longest``, ids made global."""
    rows: list[tuple[int, int, int, dict[str, Any]]] = []
    session = 0
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            main = [r for r in json.loads(line)["requests"] if r["type"] != "subagent"]
            if session == num_sessions or any(r["in"] + r["out"] > longest for r in main):
                continue
            for turn, r in enumerate(main):
                rows.append((session * SESSION_GAP_MS + round(1000 * r["t"]), session, turn, r))
            session += 1
    rows.sort(key=lambda row: row[:3])
    dense: dict[tuple[int, int], int] = {}
    ids, offsets = [], [0]
    for _, owner, _, request in rows:
        for start, length in request["hash_runs"]:
            ids += [dense.setdefault((owner, local), len(dense)) for local in range(start, start + length)]
        offsets.append(len(ids))
    return Trace(
        "share64",
        np.array([row[0] for row in rows]) / 1000,
        np.array([row[3]["in"] for row in rows]),
        np.array([max(1, row[3]["out"]) for row in rows]),
        np.array(ids, np.int32),
        np.array(offsets),
        64,
        len(dense),
    )


def test_sessions_are_composed_by_start_turn_and_owner(tmp_path: Path) -> None:
    """Long sessions and sub-agents are left out; equal local ids of two sessions differ."""

    def call(t: float, tokens: int, runs: list[list[int]], kind: str = "n") -> dict[str, Any]:
        return {"t": t, "type": kind, "in": tokens, "out": 1, "hash_runs": runs}

    sessions = [
        [call(0.0, 130, [[0, 2]]), call(40.0, 192, [[0, 2], [7, 1]]), {"t": 1.0, "type": "subagent"}],
        [call(0.0, 131_072, [[0, 2048]])],
        [call(0.0, 70, [[0, 1]])],
    ]
    path = tmp_path / "sessions.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"requests": s}) + "\n" for s in sessions).encode()))
    trace = composed_sessions(path)
    assert trace.arrival_s.tolist() == [0.0, 30.0, 40.0]
    assert trace.input_len.tolist() == [130, 70, 192]
    assert trace.content_ids.tolist() == [0, 1, 2, 0, 1, 3]
    assert found(trace, 0, 64) == (2, 128)
