"""A replay of a file keeps the prompts of those requests that are in flight, whatever the file's length."""

import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.sim.cli import main
from pagedkv.sim.commands import trace_source
from pagedkv.sim.engine.engine_config import EngineConfig
from pagedkv.sim.readers import Row, open_trace, read_trace
from pagedkv.sim.readers import streamed as streamed_module
from pagedkv.sim.readers.reading import Reading
from pagedkv.sim.readers.streamed import StreamedTrace
from pagedkv.sim.readers.tokens import Int64Array, content_pairs
from pagedkv.sim.readers.writing import rows_of, write_trace
from pagedkv.sim.replay import ReplaySetup, run_replay
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.trace import TraceError
from pagedkv.sim.workload import chat_long

SETUP = ReplaySetup(load_model("llama-3.1-8b", block_size=64), load_gpu("b200"), 20_000)


class Watched(Reading):
    """How far the pass that is under way has come."""

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(super().__iter__(), start=1):
            object.__setattr__(self, "passed", number)
            yield row


def watched(path: Path) -> Watched:
    return Watched(**vars(open_trace(path)))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A load that the engine carries, so that requests in flight are few."""
    path = tmp_path_factory.mktemp("streamed") / "chats.jsonl"
    write_trace(rows_of(chat_long(600).faster(0.5)), path, format="mooncake")
    return path


def test_prompts_are_alive_as_long_as_their_requests(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by weak references; the file is read no further than the request that is opened next."""
    alive: list[weakref.ref[Int64Array]] = []

    def noted(row: Row) -> Int64Array:
        pairs = content_pairs(row)
        alive.append(weakref.ref(pairs))
        return pairs

    monkeypatch.setattr(streamed_module, "content_pairs", noted)
    reading = watched(chats)
    trace = StreamedTrace(reading)
    most_alive = most_ahead = 0

    def look(finished: int) -> None:
        nonlocal most_alive, most_ahead
        most_alive = max(most_alive, sum(ref() is not None for ref in alive))
        most_ahead = max(most_ahead, reading.passed - finished)  # type: ignore[attr-defined]

    result = run_replay(trace, SETUP, look)
    most_running = max(sample.num_running for sample in result.records.samples)
    assert len(alive) == len(trace) == 600 and trace.num_held == 0
    assert not any(ref() is not None for ref in alive)
    assert 3 < most_alive <= most_ahead < 60, (most_alive, most_ahead)
    assert most_alive >= most_running


def test_the_results_are_those_of_the_whole_trace(chats: Path) -> None:
    """To the last bit, at any pace, when shorter prompts overtake, and when hits end inside a block."""
    whole = read_trace(chats, limit=150)
    for engine in (EngineConfig(queue="shortest", max_batch=4), EngineConfig(partial_hits=True)):
        setup = replace(SETUP, engine=engine, num_blocks=3000)
        found, wanted = (
            run_replay(trace.faster(9.0), setup) for trace in (StreamedTrace(open_trace(chats), 150), whole)
        )
        assert found.summary == wanted.summary
        assert list(found.records.steps) == list(wanted.records.steps)
        assert np.array_equal(found.records.finish_s, wanted.records.finish_s)
        assert found.summary.stats.evicted_blocks > 0


def test_a_turn_that_waits_keeps_its_prompt_and_no_other(tmp_path: Path) -> None:
    """Think time lets later requests go first: what they pass is held, and it comes out the same."""
    path = tmp_path / "talk.jsonl"
    lines: list[dict[str, Any]] = [{"format": "pagedkv-trace", "version": 1, "block_size": 64}]
    for i in range(60):
        turn: dict[str, Any] = {"arrival_s": float(i), "input_len": 640, "output_len": 5, "session": i // 2}
        turn |= {"block_hashes": [f"{i // 2}-{k}" for k in range(10)]} | ({"think_s": 9.0} if i % 2 else {})
        lines.append(turn)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace, held = StreamedTrace(open_trace(path)), []
    found = run_replay(trace, SETUP, lambda _: held.append(trace.num_held))
    assert found.summary == run_replay(read_trace(path), SETUP).summary
    assert 3 <= max(held) <= 8 and held[-1] == 0


def test_contents_of_every_kind_differ(tmp_path: Path) -> None:
    """Texts, adapters, small integers, 64 bits of either sign: each is itself and nothing else."""
    kinds: list[Any] = [
        0,
        1,
        2**30 - 1,
        2**30,
        2**62,
        2**63 - 1,
        2**63,
        2**64 - 1,
        -1,
        -(2**63),
        "0",
        "1",
        "-1",
    ]
    rows = [Row(open_trace, 0.0, 1, 1, [kind], 1) for kind in kinds]  # type: ignore[arg-type]
    rows += [row._replace(adapter=adapter) for row in rows for adapter in ("a", "b")]
    pairs = [int(content_pairs(row)[0]) for row in rows]
    assert len(set(pairs)) == len(rows) == 3 * len(kinds)
    together = Row(open_trace, 0.0, len(kinds), 1, kinds, 1)  # type: ignore[arg-type]
    assert content_pairs(together).tolist() == pairs[: len(kinds)], "whatever stands beside it"
    assert all(0 <= half < 2**31 for pair in pairs for half in (pair & (2**32 - 1), pair >> 32))


def test_a_file_that_changes_and_a_second_replay_are_told(chats: Path, tmp_path: Path) -> None:
    """What was written to after the first pass, and, with the request's number, what became another one."""
    path = tmp_path / "changing.jsonl"
    lines = chats.read_text().splitlines(keepends=True)[:40]
    path.write_text("".join(lines))
    trace = StreamedTrace(open_trace(path))
    before = path.stat()
    path.write_text("".join(lines[:20] + lines[21:] + lines[20:21]))
    with pytest.raises(TraceError, match="the file has changed since its requests were counted"):
        run_replay(trace, SETUP)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(TraceError, match="the file has changed: request 21 is another one"):
        run_replay(trace, SETUP)
    with pytest.raises(TraceError, match="request 0 of changing is forgotten"):
        run_replay(trace, SETUP)


def test_the_command_streams_files_and_keeps_pipes(
    chats: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both say the same."""
    argv = ["replay", str(chats), "--limit", "30", "--gpu", "b200", "--json", "-"]
    assert main(argv) == 0
    streamed = capsys.readouterr().out
    monkeypatch.setattr(trace_source, "StreamedTrace", lambda *_: pytest.fail("a pipe was read twice"))
    monkeypatch.setattr(Path, "is_file", lambda path: path != chats)
    assert main([*argv, "--format", "mooncake"]) == 0
    assert capsys.readouterr().out == streamed
