"""``pagedkv trace info``, ``convert``, ``sample`` and ``synth``: what they write, and what they refuse."""

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from pagedkv.sim.cli import main
from pagedkv.sim.readers import open_trace, read_trace
from pagedkv.sim.readers.info import INFO_SCHEMA, describe
from pagedkv.sim.readers.sampling import Sample, sample_rows
from pagedkv.sim.readers.source import Source
from pagedkv.sim.readers.writing import write_trace
from pagedkv.sim.trace import TraceError
from pagedkv.sim.workload import chat_long

Capture = pytest.CaptureFixture[str]

LINES = [
    {"timestamp": 1000 * i, "input_length": 10 + i, "output_length": 1 + i, "hash_ids": [0], "session_id": s}
    for i, s in enumerate("abacabac")
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def run(*words: object) -> int:
    return main([str(word) for word in ("trace", *words)])


def printed(capsys: Capture, *words: object) -> str:
    assert run(*words) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *words: object) -> str:
    try:
        code = run(*words)
    except SystemExit as stopped:  # the parser's way
        code = int(str(stopped.code))
    assert code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("pagedkv: error: ")
    return err


def inputs(path: Path) -> list[int]:
    return [row.input_len for row in open_trace(path)]


class TestInfo:
    def test_the_document_says_what_is_inside(self, capsys: Capture, trace: Path) -> None:
        document = json.loads(printed(capsys, "info", trace, "--json", "-"))
        assert document["schema"] == INFO_SCHEMA and document["format"] == "mooncake"
        assert document["requests"] == 8
        assert document["input_tokens"]["total"] == sum(range(10, 18))
        assert document["input_tokens"]["percentiles"]["p50"] == 13.5
        assert document["output_tokens"] | {"percentiles": {}} == {
            "total": 36, "mean": 4.5, "least": 1, "percentiles": {}, "most": 8,
        }  # fmt: skip
        assert document["arrivals"] == {"span_s": 7.0, "per_s": 1.0, "gap_cv": 0.0}
        assert document["sessions"] == {"sessions": 3, "requests": 8, "mean_turns": 8 / 3, "most_turns": 4}
        assert document["sharing"]["hit_blocks"] == 0 and document["sharing"]["full_blocks"] == 0
        assert document["missing"] == ["think times", "deadlines", "adapters", "priorities"]

    def test_the_table_says_it_too(self, capsys: Capture, trace: Path) -> None:
        out = printed(capsys, "info", trace)
        for text in (
            "small",
            "mooncake",
            "10 / 13.5 / 17",
            "sessions",
            "2.67 / 4",
            "not in the file: think times",
        ):
            assert text in out

    def test_gaps_that_vary_are_measured(self, tmp_path: Path, capsys: Capture) -> None:
        """Gaps 1, 1, 4: mean 2, variance 2."""
        path = tmp_path / "a.csv"
        stamps = "".join(f"{at},5,1\n" for at in (0, 1, 2, 6))
        path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + stamps)
        document = json.loads(printed(capsys, "info", path, "--json", "-"))
        assert document["arrivals"] == {"span_s": 6.0, "per_s": 0.5, "gap_cv": pytest.approx(2**0.5 / 2)}
        assert document["sharing"] is None and document["sessions"] is None
        assert document["notes"] == ["no content: no two prompts share a prefix"]

    def test_limit_sort_and_skip_are_heeded(self, tmp_path: Path, capsys: Capture, trace: Path) -> None:
        assert json.loads(printed(capsys, "info", trace, "--limit", 3, "--json", "-"))["requests"] == 3
        path = tmp_path / "a.csv"
        path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5,5,1\n3,6,0\n4,7,1\n")
        assert "line 3: arrived_at decreases from 5 to 3 s (--sort" in refused(capsys, "info", path)
        assert "line 3: num_decode_tokens must be" in refused(capsys, "info", path, "--sort")
        document = json.loads(printed(capsys, "info", path, "--sort", "--skip-failed", "--json", "-"))
        assert document["requests"] == 2
        assert "1 requests left out, whose num_decode_tokens is 0" in document["notes"]


class TestConvert:
    @pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.parquet"])
    def test_the_same_requests_come_out(
        self, tmp_path: Path, trace: Path, name: str, capsys: Capture
    ) -> None:
        if name.endswith("zst"):
            pytest.importorskip("zstandard", reason="the extra pagedkv[zstd] is not installed")
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow", reason="the extra pagedkv[parquet] is not installed")
        out = tmp_path / name
        assert run("convert", trace, out) == 0
        assert capsys.readouterr().err == "8 requests\n"
        assert [row[1:] for row in open_trace(out)] == [row[1:] for row in open_trace(trace)]
        assert open_trace(out).format.name == "native"

    def test_to_mooncake_and_back(self, tmp_path: Path, trace: Path, capsys: Capture) -> None:
        text = printed(capsys, "convert", trace, "-", "--to", "mooncake")
        assert [json.loads(line) for line in text.splitlines()] == LINES

    def test_arrivals_can_be_given_to_lengths(self, tmp_path: Path, capsys: Capture) -> None:
        path, out = tmp_path / "a.csv", tmp_path / "out.jsonl"
        path.write_text("num_prefill_tokens,num_decode_tokens\n" + "5,1\n" * 4)
        assert run("convert", path, out, "--arrivals", "constant", "--rate", 2) == 0
        assert [row.arrival_s for row in open_trace(out)] == [0.0, 0.5, 1.0, 1.5]
        assert read_trace(out).notes == (
            "no content: no two prompts share a prefix",
            "arrivals drawn: constant at 2 per second, seed 0",
        )
        assert run("convert", path, out, "--arrivals", "gamma", "--cv", 2, "--seed", 1) == 0
        once = out.read_bytes()
        assert run("convert", path, out, "--arrivals", "gamma", "--cv", 2, "--seed", 1) == 0
        assert out.read_bytes() == once
        capsys.readouterr()
        assert "--cv says nothing about poisson" in refused(
            capsys, "convert", path, out, "--arrivals", "poisson", "--cv", 2
        )
        assert "state --arrivals" in refused(capsys, "convert", path, out, "--rate", 2)

    @pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["itself", "a link", "a hard link"])
    def test_an_output_that_is_the_input_is_refused(
        self, tmp_path: Path, trace: Path, link: Any, capsys: Capture
    ) -> None:
        out = trace
        if link is not None:
            out = tmp_path / "other.jsonl"
            link(trace, out)
        before = trace.read_bytes()
        for words in (("convert", trace, out), ("sample", trace, out, "--first", 1)):
            assert f"OUT would overwrite {out}, which is read" in refused(capsys, *words)
        assert trace.read_bytes() == before

    def test_a_damaged_input_leaves_no_output(self, tmp_path: Path, trace: Path, capsys: Capture) -> None:
        with trace.open("a") as file:
            file.write("damaged\n")
        out = tmp_path / "out.jsonl"
        assert "line 9: not JSON" in refused(capsys, "convert", trace, out)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["small.jsonl"]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("convert", "absent", "out"), "absent: no such file"),
            (("convert", "small.jsonl", "no/out"), "cannot write no/out: no folder"),
            (("convert", "small.jsonl", "out", "--format", "nothing"), "invalid choice: 'nothing'"),
            (("convert", "small.jsonl", "out", "--format", "azure"), "line 1: TIMESTAMP is missing"),
            (("convert", "small.jsonl", "out", "--trace-block-size", "5"), "blocks of 5 tokens make"),
            (("convert", "small.jsonl", "out.parquet", "--to", "mooncake"), "mooncake is JSON lines"),
            (("sample", "small.jsonl", "out"), "say which requests: one of --first, --random, --window"),
            (("sample", "small.jsonl", "out", "--first", "1", "--random", "2"), "say which requests"),
            (
                ("sample", "small.jsonl", "out", "--random", "9"),
                "9 random requests asked for, the file holds 8",
            ),
            (("sample", "small.jsonl", "out", "--window", "9:12"), "no request is in the sample"),
            (("sample", "small.jsonl", "out", "--window", "5:2"), "'5:2' is no window: write FROM:TO"),
            (("info", "small.jsonl", "--json", "small.jsonl"), "--json would overwrite small.jsonl"),
            (("synth", "weather", "-o", "out"), "invalid choice: 'weather'"),
            (("synth", "agents"), "required: -o/--output"),
            (("synth", "agents", "-o", "out", "--turns", "uniform:9"), "lengths 'uniform:9' are none of"),
            (("synth", "agents", "-o", "out", "--turns", "absent.csv:input"), "absent.csv: no such file"),
            (("synth", "agents", "-o", "out", "--max-context", "5"), "max_context must be from 2,002"),
            (("synth", "independent", "-o", "out", "--to", "mooncake"), "Mooncake's format needs contents"),
            (("synth", "agents", "-o", "out", "--cv", "2"), "--cv says nothing about poisson arrivals"),
        ],
    )
    def test_a_users_mistake_is_one_line(
        self,
        trace: Path,
        capsys: Capture,
        monkeypatch: pytest.MonkeyPatch,
        words: tuple[str, ...],
        message: str,
    ) -> None:
        if "out.parquet" in words:
            pytest.importorskip("pyarrow", reason="the extra pagedkv[parquet] is not installed")
        monkeypatch.chdir(trace.parent)
        assert message in refused(capsys, *words)
        assert [path.name for path in trace.parent.iterdir()] == ["small.jsonl"]


class TestSample:
    """Requests 10 ... 17 of sessions a b a c a b a c."""

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (("--first", 3), [10, 11, 12]),
            (("--first", 99), list(range(10, 18))),
            (("--first", 2, "--keep-sessions"), [10, 12, 14, 16]),
            (("--first", 5, "--keep-sessions"), [10, 11, 12, 14, 15, 16]),
            (("--window", "2:4"), [12, 13]),
            (("--window", "1:3", "--keep-sessions"), [11, 15]),
        ],
    )
    def test_the_beginning_and_a_window(
        self, tmp_path: Path, trace: Path, words: tuple[object, ...], expected: list[int]
    ) -> None:
        out = tmp_path / "out.jsonl"
        assert run("sample", trace, out, *words) == 0
        assert inputs(out) == expected
        assert next(iter(open_trace(out))).arrival_s == 0.0

    def test_less_than_was_asked_for_is_said(self, tmp_path: Path, trace: Path, capsys: Capture) -> None:
        """Beside the result, as the number of requests is; whole sessions may be more, and are enough."""
        for words, said in ((("--first", 99), True), (("--first", 8), False), (("--window", "0:99"), False)):
            assert run("sample", trace, tmp_path / "out.jsonl", *words) == 0
            err = capsys.readouterr().err
            assert "8 requests" in err and ("99 were asked for, the file holds no more" in err) is said

    def test_a_path_may_be_text(self, tmp_path: Path, trace: Path) -> None:
        """As everywhere else."""
        assert write_trace(open_trace(trace), str(tmp_path / "out.jsonl.gz")) == 8
        assert inputs(tmp_path / "out.jsonl.gz") == list(range(10, 18))

    def test_random_requests_are_drawn_from_the_seed(self, tmp_path: Path, trace: Path) -> None:
        drawn = {}
        for seed in range(30):
            out = tmp_path / "out.jsonl"
            assert run("sample", trace, out, "--random", 4, "--seed", seed) == 0
            drawn[seed] = inputs(out)
            assert len(drawn[seed]) == 4 and drawn[seed] == sorted(drawn[seed])
            assert run("sample", trace, out, "--random", 4, "--seed", seed) == 0
            assert inputs(out) == drawn[seed]
        counts = [sum(length in found for found in drawn.values()) for length in range(10, 18)]
        assert min(counts) >= 6 and max(counts) <= 24  # 15 each in the mean

    def test_random_sessions_are_whole(self, tmp_path: Path, trace: Path) -> None:
        seen = set()
        for seed in range(20):
            rows = list(sample_rows(open_trace(trace), Sample(random=2, seed=seed, keep_sessions=True)))
            sessions = {row.session for row in rows}
            assert len(rows) == {"a": 4, "b": 2, "c": 2}[str(next(iter(sessions)))] and len(sessions) == 1
            seen |= sessions
        assert seen == {"a", "b", "c"}

    def test_a_turn_whose_session_began_outside_loses_its_think_time(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        lines = [{"format": "pagedkv-trace", "version": 1}] + [
            {"arrival_s": i, "input_len": 5 + i, "output_len": 1, "session": 1}
            | ({"think_s": 2} if i else {})
            for i in range(4)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        out = tmp_path / "out.jsonl"
        assert run("sample", path, out, "--window", "1:3") == 0
        assert [row.think_s for row in open_trace(out)] == [None, 2.0]

    def test_ways_that_contradict_are_refused(self) -> None:
        with pytest.raises(TraceError, match="state one of first, random and window"):
            Sample(first=1, random=1)
        with pytest.raises(TraceError, match="must not end before it begins"):
            Sample(window_s=(3.0, 3.0))

    def test_a_window_needs_arrivals(self, tmp_path: Path, capsys: Capture) -> None:
        path = tmp_path / "a.csv"
        path.write_text("num_prefill_tokens,num_decode_tokens\n5,1\n")
        assert "a window needs arrivals" in refused(
            capsys, "sample", path, tmp_path / "out", "--window", "0:1"
        )


@pytest.mark.parametrize("command", [("sample", "--random", 2), ("convert", "--arrivals", "poisson")])
def test_what_reads_twice_refuses_a_pipe_and_a_file_that_changed(
    capsys: Capture, trace: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...]
) -> None:
    """Nothing is left behind."""
    out = trace.with_name("out.jsonl")
    argv = (command[0], trace, out, *command[1:])
    with monkeypatch.context() as patch:
        patch.setattr(Source, "is_stream", True)
        assert "a stream cannot be read twice: save it as a file" in refused(
            capsys, *argv, "--format", "mooncake"
        )
    passes = iter((8, 7))
    everything = Source.lines
    monkeypatch.setattr(Source, "lines", lambda source: islice(everything(source), next(passes)))
    assert "it has fewer requests than before" in refused(capsys, *argv)
    assert not out.exists()


class TestSynth:
    def test_the_same_command_writes_the_same_bytes(self, tmp_path: Path, capsys: Capture) -> None:
        for kind in ("independent", "prefix-tree", "agents", "long-context", "chat-long"):
            once, again, other = (tmp_path / f"{kind}-{i}.jsonl" for i in range(3))
            for path, seed in ((once, 7), (again, 7), (other, 8)):
                assert run("synth", kind, "--requests", 20, "--seed", seed, "-o", path) == 0
            assert once.read_bytes() == again.read_bytes() != other.read_bytes()
            info = describe(open_trace(once))
            assert (info.format, info.requests) == ("native", 20)
            assert info.notes == ("made by pagedkv trace synth with seed 7",)
        assert capsys.readouterr().err == "20 requests\n" * 15

    def test_options_reach_the_workload(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        words = (
            "--requests",
            5,
            "--input",
            100,
            "--answer",
            "constant:7",
            "--arrivals",
            "constant",
            "--rate",
            4,
        )
        assert run("synth", "independent", "-o", path, *words) == 0
        trace = read_trace(path)
        assert trace.arrival_s.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
        assert set(trace.input_len.tolist()) == {100} and set(trace.output_len.tolist()) == {7}
        assert run("synth", "agents", "-o", path, "--requests", 30, "--closed-loop") == 0
        assert describe(open_trace(path)).with_think_time > 0

    def test_the_built_in_chats_are_those_of_replay(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        assert run("synth", "chat-long", "-o", path, "--requests", 40, "--seed", 3) == 0
        trace, expected = read_trace(path), chat_long(40, 3)
        assert trace.input_len.tolist() == expected.input_len.tolist()
        assert len(set(trace.content_ids.tolist())) == len(set(expected.content_ids.tolist()))
