"""``benchmarks/bench_replay.py --peers``: its own runs in small, and what it says of missing peers."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "bench_replay.py"

if not SCRIPT.is_file():
    pytest.skip("needs the checkout: benchmarks are not installed", allow_module_level=True)

from benchmarks import bench_replay, replay_peers  # noqa: E402
from benchmarks.replay_peers import CONTESTANTS, find_interpreters, hit_rate_of_last_half, run_once  # noqa: E402
from pagedkv.sim.hits import replay_hits  # noqa: E402
from pagedkv.sim.readers.writing import rows_of, write_trace  # noqa: E402
from pagedkv.sim.workload import chat_long  # noqa: E402

OURS = {contestant.name: contestant for contestant in CONTESTANTS if contestant.module == "pagedkv"}


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "chats.jsonl"
    write_trace(rows_of(chat_long(300)), path, format="mooncake", name="chats", notes=lambda: ())
    return path


def test_the_pool_is_64_gib_of_the_model() -> None:
    """What kvcache-simulator makes of its option, and what our command is given."""
    assert replay_peers.BLOCKS_OF_HITS == 1024


def test_a_run_is_a_process_with_its_own_times_and_hits(trace_file: Path) -> None:
    """The hit rate is that of the library in this process."""
    run = run_once(OURS["pagedkv --hits-only"], sys.executable, trace_file)
    assert run.hit_rate == replay_hits(chat_long(300), 1024, 512).token_hit_rate
    assert run.cpu_s > 0 and run.wall_s > 0 and run.peak_mib > 10


def test_the_last_half_is_what_the_first_leaves(trace_file: Path) -> None:
    """Hits and tokens of both halves add up."""
    whole, half = (replay_hits(chat_long(300).head(n), 1024, 512) for n in (300, 150))
    hits = whole.stats.hit_tokens - half.stats.hit_tokens
    expected = hits / (whole.input_tokens - half.input_tokens)
    assert hit_rate_of_last_half(trace_file, 300) == expected


def test_a_peer_that_fails_is_an_error_with_its_last_line(trace_file: Path, tmp_path: Path) -> None:
    """No row of zeros."""
    with pytest.raises(RuntimeError, match=r"pagedkv replay failed: pagedkv: error: .*absent: no such file"):
        run_once(OURS["pagedkv replay"], sys.executable, tmp_path / "absent")


def test_what_is_missing_is_said_with_the_way_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each, with the reason in each interpreter; the rest runs."""
    found, missing = find_interpreters([sys.executable, "/absent/python"])
    assert set(OURS) <= set(found)
    for line in missing:
        assert "pip install" in line and "/absent/python: no such interpreter" in line
    assert bench_replay.main(["--peers", "--requests", "40", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "40 requests, hits only" in out and "40 requests, with time and decode" in out
    assert "over the last half" in out
    for line in missing:
        assert line.partition(":")[0] in out


def test_it_runs_as_a_script_and_says_how_to_get_peers() -> None:
    """From anywhere."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0
    assert "pip install kvcache-simulator==0.1.3" in " ".join(done.stdout.split())
    assert "pip install ai-dynamo-runtime==1.6.1" in " ".join(done.stdout.split())
