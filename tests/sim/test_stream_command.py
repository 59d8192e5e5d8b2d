"""``pagedkv replay --hits-only`` with a pool: the counts of the whole trace, in memory that does not grow."""

import gc
import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedkv.sim.cli import main
from pagedkv.sim.commands import hits_only
from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.row import Row
from pagedkv.sim.readers.writing import rows_of, write_trace
from pagedkv.sim.stream_hits import stream_hits
from pagedkv.sim.workload import chat_long

Capture = pytest.CaptureFixture[str]
POOL = ("--block-size", "512", "--num-blocks", "400")


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream") / "chats.jsonl.gz"
    trace = chat_long(300)
    write_trace(rows_of(trace), path, format="mooncake", name=trace.name, notes=lambda: ())
    return path


def result(capsys: Capture, path: Path | str, *options: str) -> str:
    assert main(["replay", str(path), "--hits-only", *POOL, *options, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("options", [(), ("--limit", "77"), ("--policy", "fifo"), ("--sort",)])
def test_the_same_bytes_as_of_the_whole_trace(
    capsys: Capture, trace_file: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs included: how it was read is no condition of the result."""
    with monkeypatch.context() as patch:
        patch.setattr(hits_only, "read_whole", lambda _: pytest.fail("the trace was read whole"))
        streamed = result(capsys, trace_file, *options)
    monkeypatch.setattr(hits_only, "BUILT_IN", str(trace_file))  # which is read whole
    assert streamed == result(capsys, trace_file, *options)
    assert json.loads(streamed)["evicted_blocks"] > 0


def test_a_pipe_is_enough(trace_file: Path) -> None:
    """One pass, so that nothing has to be on a disk; the format has to be said."""
    code = "import sys; from pagedkv.sim.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "replay", "/dev/stdin", "--hits-only", *POOL]
    content = gzip.decompress(trace_file.read_bytes())
    options = {"input": content, "capture_output": True, "env": {"PYTHONPATH": ":".join(sys.path)}}
    done = subprocess.run([*command, "--format", "mooncake"], **options)  # type: ignore[call-overload]
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"300 requests" in done.stdout
    refused = subprocess.run(command, **options)  # type: ignore[call-overload]
    assert refused.returncode == 2 and b"state its --format" in refused.stderr


@pytest.mark.parametrize("options", [(), (*POOL, "--policy", "belady"), (*POOL, "--policy", "lru,fifo")])
def test_what_needs_the_whole_trace_reads_it(
    capsys: Capture, trace_file: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that never evicts, a policy that knows the future, and several policies."""
    monkeypatch.setattr(hits_only, "stream_hits", lambda *_, **__: pytest.fail("there is no stream"))
    assert main(["replay", str(trace_file), "--hits-only", *options]) == 0
    assert "300 requests" in capsys.readouterr().out


def test_an_empty_stream_and_a_late_mistake_name_the_file(capsys: Capture, tmp_path: Path) -> None:
    """As reading whole does."""
    path = tmp_path / "late.jsonl"
    good = {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [46, 47, 48]}
    path.write_text("".join(json.dumps(good) + "\n" for _ in range(20)) + '{"timestamp": 1}\n')
    assert main(["replay", str(path), "--hits-only", *POOL]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"{path}, line 21: " in err
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n")
    assert main(["replay", str(path), "--hits-only", *POOL]) == 2
    assert str(path) in capsys.readouterr().err


def test_requests_left_out_are_counted_aloud(capsys: Capture, tmp_path: Path) -> None:
    """Whether streamed, whole or in time: in the table and in the document."""
    path = tmp_path / "failed.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": n, "hash_ids": [46, 47, 48]}
        for n in (7, 0, 0, 5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    note = "2 requests left out, whose output_length is 0"
    for options in (("--hits-only", *POOL), ("--hits-only",), ()):
        for extra in ((), ("--json", "-")):
            assert main(["replay", str(path), "--skip-failed", *options, *extra]) == 0
            out = capsys.readouterr().out
            assert note in (json.loads(out)["inputs"]["trace_notes"] if extra else out)


def endless(count: int) -> Iterator[Row]:
    """Requests of which no two are alike but for their beginning, made one at a time."""
    for i in range(count):
        yield Row(Place(Path("endless"), i + 1), float(i), 2048, 1, [-1, *range(7 * i, 7 * i + 7)], 256)


def test_memory_does_not_grow_with_the_trace() -> None:
    """Ten times the requests, the same peak: the pool and one request."""
    peaks = []
    stream_hits(endless(50), 64, 256)  # what is imported and cached once
    for count in (300, 3000):
        tracemalloc.start()
        found = stream_hits(endless(count), 64, 256)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.requests == count and found.stats.evicted_blocks > 6 * count
    assert peaks[1] < 1.1 * peaks[0], peaks


def test_nor_does_it_from_the_command_line(capsys: Capture, tmp_path: Path) -> None:
    """A file of ten times the lines, readers included; with a pool that never evicts, the peak does grow."""
    peaks = {}
    for count in (200, 2000):
        path = tmp_path / f"{count}.jsonl"
        write_trace(endless(count), path, format="mooncake", name="endless", notes=lambda: ())
        for options in (("--num-blocks", "64"), ()):
            argv = ["replay", str(path), "--hits-only", "--block-size", "256", *options]
            gc.collect()
            tracemalloc.start()
            assert main([*argv, "--trace-block-size", "256"]) == 0
            peaks[bool(options), count] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    capsys.readouterr()
    # garbage in cycles may wait for its collector
    assert peaks[True, 2000] < 2 * peaks[True, 200] < peaks[False, 2000] / 2, peaks
