"""What a trace asks for next, against a scan of the prompts; and what a policy can make of it."""

import math
from typing import Any

import numpy as np
import pytest

from pagedkv.policies import POLICIES
from pagedkv.sim.cli import main
from pagedkv.sim.future import next_uses
from pagedkv.sim.hits import replay_hits
from pagedkv.sim.trace import Trace
from pagedkv.sim.workload import chat_long


def small_trace(seed: int) -> Trace:
    """Prompts that branch off one another; content ids of 6 tokens, some without the partial last one."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    lengths, unused = [], 0
    for _ in range(40):
        length = int(rng.integers(1, 60))
        num_ids = length // 6 if rng.random() < 0.5 else -(-length // 6)
        kept = rows[int(rng.integers(0, len(rows)))][: int(rng.integers(0, length // 6 + 1))] if rows else []
        rows.append(kept + list(range(unused, unused + num_ids - len(kept))))
        unused += num_ids - len(kept)
        lengths.append(length)
    ids = np.array([content for row in rows for content in row], np.int32)
    offsets = np.cumsum([0, *map(len, rows)])
    ones = np.ones(40, np.int64)
    return Trace("small", np.zeros(40), np.array(lengths), ones, ids, offsets, 6, unused)


def scanned(trace: Trace, block_size: int) -> list[list[float]]:
    prompts = [tuple(trace.tokens(i).tolist()) for i in range(len(trace))]
    uses: list[list[float]] = []
    for i, prompt in enumerate(prompts):
        uses.append([])
        for end in range(block_size, len(prompt) + 1, block_size):
            later = (j for j in range(i + 1, len(prompts)) if prompts[j][:end] == prompt[:end])
            uses[-1].append(next(later, math.inf))
    return uses


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6, 7, 12])
def test_the_next_use_is_the_next_prompt_with_that_prefix(block_size: int) -> None:
    """Whether or not the block size divides a content id."""
    for seed in range(4):
        trace = small_trace(seed)
        assert next_uses(trace, block_size) == scanned(trace, block_size)


def test_a_trace_without_content_uses_nothing_again() -> None:
    """Prompts known by length alone share nothing."""
    trace = Trace.from_lengths([0.0, 1.0], [8, 5], [1, 1])
    assert next_uses(trace, 4) == [[math.inf] * 2, [math.inf]]


@pytest.mark.parametrize("num_blocks", [1_000, 2_000])
def test_no_policy_hits_more_than_belady(num_blocks: int) -> None:
    """And an unbounded pool hits at least as much as that."""
    trace = chat_long(250, seed=1)
    hits = {name: replay_hits(trace, num_blocks, 512, policy=name).stats.hit_blocks for name in POLICIES}
    assert hits["belady"] == max(hits.values())
    assert len(set(hits.values())) > 2
    assert hits["belady"] <= replay_hits(trace, 0, 512).stats.hit_blocks


def test_the_command_line_takes_a_policy(capsys: Any) -> None:
    """It is named in the title; the engine's replay takes any that does not need the future."""
    options = ["replay", "--limit", "60", "--hits-only", "--block-size", "512", "--num-blocks", "400"]
    assert main([*options, "--policy", "belady"]) == 0
    assert "400 blocks, belady" in capsys.readouterr().out
    assert main(["replay", "--limit", "20", "--policy", "s3fifo", "--json", "-"]) == 0
    assert '"policy": "s3fifo"' in capsys.readouterr().out
    assert main(["replay", "--limit", "20", "--policy", "belady"]) == 2
    assert "--hits-only alone" in capsys.readouterr().err
