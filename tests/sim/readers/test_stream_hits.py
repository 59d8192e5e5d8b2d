"""Hits counted from a stream are those counted from the whole trace, and those published elsewhere."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from pagedkv.errors import NeverFits, PagedKVError
from pagedkv.policies import POLICIES
from pagedkv.sim.hits import replay_hits
from pagedkv.sim.readers import Row, open_trace
from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.tokens import Int32Array, content_pairs, prompt_tokens
from pagedkv.sim.readers.writing import rows_of
from pagedkv.sim.stream_hits import stream_hits
from pagedkv.sim.synth.lengths import parse_lengths
from pagedkv.sim.synth.workloads import Agents, Independent, PrefixTree
from pagedkv.sim.workload import chat_long

TRACES = {
    "chats": chat_long(150, seed=1),
    "agents": Agents(requests=150, system=300, growth=parse_lengths("50"), first=parse_lengths("90")).make(1),
    "tree": PrefixTree(requests=150, block_size=8, suffix=parse_lengths("uniform:1,40")).make(1),
    "lengths": Independent(requests=50, input=parse_lengths("uniform:1,300")).make(1),
}


def row(
    contents: list[int | str], input_len: int, block_size: int = 4, line: int = 1, adapter: str | None = None
) -> Row:
    return Row(Place(Path("demo"), line), 0.0, input_len, 1, contents, block_size, adapter=adapter)


def tokens_of(row: Row, num_tokens: int) -> Int32Array:
    return prompt_tokens(content_pairs(row), row.block_size, row.place.line, num_tokens)


class TestTokens:
    def test_equal_prefixes_and_only_those_are_equal(self) -> None:
        a, b = tokens_of(row([1, 2, 3], 12), 12), tokens_of(row([1, 2, "3"], 12), 12)
        assert a.dtype == np.int32 and a.min() >= 0
        assert a[:8].tolist() == b[:8].tolist() and (a[8:] != b[8:]).all()
        assert (tokens_of(row([1], 4, adapter="x"), 4) != a[:4]).all()

    @pytest.mark.parametrize("block_size", [3, 4])
    def test_what_no_content_covers_is_unique(self, block_size: int) -> None:
        a, b = (tokens_of(row([1], 10, block_size, line=line), 10) for line in (1, 2))
        assert a[:block_size].tolist() == b[:block_size].tolist()
        assert a[block_size] != b[block_size] and a[block_size:].min() >= 0
        assert len(tokens_of(row([], 3), 0)) == 0

    def test_ids_of_64_bits_do_not_collide(self) -> None:
        """10,000 neighbouring ids: as many pairs of tokens."""
        tokens = tokens_of(row(list(range(2**62, 2**62 + 10_000)), 20_000, block_size=2), 20_000)
        assert len({tuple(pair) for pair in tokens.reshape(-1, 2).tolist()}) == 10_000


class TestStream:
    @pytest.mark.parametrize("name", TRACES)
    @pytest.mark.parametrize("block_size", [8, 16, 24, 512])
    def test_the_counts_are_those_of_the_whole_trace(self, name: str, block_size: int) -> None:
        trace = TRACES[name]
        pool = 2 * int(trace.input_len.max()) // block_size + 1
        assert stream_hits(rows_of(trace), pool, block_size) == replay_hits(trace, pool, block_size)

    @pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "belady"])
    def test_every_policy_counts_alike(self, policy: str) -> None:
        trace = TRACES["tree"]
        streamed = stream_hits(rows_of(trace), 300, 16, policy=policy)
        assert streamed == replay_hits(trace, 300, 16, policy=policy)
        assert streamed.stats.evicted_blocks > 0

    def test_what_a_stream_cannot_have_is_refused(self) -> None:
        rows = [row([1, 2, 3], 12, line=7)]
        with pytest.raises(PagedKVError, match="knows the future"):
            stream_hits(rows, 3, 4, policy="belady")
        with pytest.raises(PagedKVError, match="at least 1 block, got 0"):
            stream_hits(rows, 0, 4)
        with pytest.raises(
            NeverFits, match="demo, line 7: the prompt has 3 full blocks of 4 tokens, the pool only 2"
        ):
            stream_hits(rows, 2, 4)
        with pytest.raises(PagedKVError, match="holds no requests"):
            stream_hits([], 2, 4)

    def test_progress_counts_requests(self) -> None:
        calls: list[int] = []
        stream_hits([row([1], 4, line=i) for i in range(3)], 3, 4, calls.append)
        assert calls == [1, 2, 3]


@pytest.mark.skipif("PAGEDKV_DATA" not in os.environ, reason="PAGEDKV_DATA is not set: no trace files")
@pytest.mark.parametrize("capacity", [1000, 10_000])
def test_the_conversation_trace_hits_as_published(capacity: int) -> None:
    folder = Path(os.environ["PAGEDKV_DATA"], "traces")
    expected = json.loads((folder / "expected.json").read_text())["mooncake_conversation"]["engine"]["full"]
    stats = stream_hits(open_trace(folder / "mooncake/conversation_trace.jsonl.gz"), capacity, 512).stats
    assert [stats.hit_blocks, stats.hit_tokens] == expected["lru_leaf"][str(capacity)]
