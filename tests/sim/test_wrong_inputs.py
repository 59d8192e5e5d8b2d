"""What a stranger gets wrong: one line that says what, before memory or time is spent, no traceback."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from pagedkv.errors import PagedKVError
from pagedkv.sim import books, console
from pagedkv.sim.books import require_books_fit
from pagedkv.sim.cli import main
from pagedkv.sim.commands.replay_outputs import full_document
from pagedkv.sim.hits import replay_hits
from pagedkv.sim.output.comparison import compare
from pagedkv.sim.output.html_report import report_html
from pagedkv.sim.output.latencies import latencies_of
from pagedkv.sim.output.result_file import check_result, read_result
from pagedkv.sim.output.slo import SLO, goodput
from pagedkv.sim.replay import ReplaySetup, run_replay
from pagedkv.sim.stream_hits import stream_hits
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.workload import chat_long

Capture = pytest.CaptureFixture[str]
SCHEMA = "pagedkv.replay/1"


def refused(capsys: Capture, *argv: object) -> str:
    """The one line of a command that must end with exit code 2."""
    try:
        code = main([str(arg) for arg in argv])
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    return line


class TestBooks:
    """Sizes for which the system would end the process."""

    @pytest.mark.parametrize(
        "argv",
        [
            ("replay", "--limit", 5, "--num-blocks", 2_000_000_000),
            ("replay", "--limit", 5, "--hits-only", "--num-blocks", 2_000_000_000),
            ("replay", "--limit", 5, "--gpu-memory", "4e15"),
            ("fleet", "--limit", 5, "--num-blocks", 2_000_000, "--replicas", 10_000),
        ],
    )
    def test_pools_beyond_the_memory_are_refused_at_once(
        self, capsys: Capture, argv: tuple[object, ...]
    ) -> None:
        """With the sizes and what to change."""
        line = refused(capsys, *argv)
        assert "the books of" in line and "GiB, this machine has" in line and "--num-blocks" in line

    def test_a_stream_is_too(self, capsys: Capture, tmp_path: Path) -> None:
        """Before a line is read."""
        with pytest.raises(PagedKVError, match="the books of 2,000,000,000 blocks of 16 tokens take 246 GiB"):
            stream_hits(iter(()), 2_000_000_000, 16)

    def test_the_limit_is_the_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """To the byte; and there is none where the system does not say how much it has."""
        trace = chat_long(3)
        monkeypatch.setattr(books, "_memory_bytes", lambda: 9000 * (68 + 4 * 16))
        require_books_fit(9000, 16)
        assert replay_hits(trace, 9000, 16).requests == 3
        with pytest.raises(PagedKVError, match="9,001 blocks"):
            replay_hits(trace, 9001, 16)
        with pytest.raises(PagedKVError, match="3 pools of 3,001 blocks"):
            require_books_fit(3001, 16, 3)
        monkeypatch.setattr(books, "_memory_bytes", lambda: None)
        require_books_fit(2**31, 1 << 20)

    def test_a_block_has_at_most_a_million_tokens(self, capsys: Capture) -> None:
        """No prompt is longer, and one such block took all memory."""
        assert "from 1 to 1,048,576" in refused(capsys, "replay", "--hits-only", "--block-size", 2**31 - 2)


def test_weights_that_do_not_fit_are_said_without_negative_sizes(capsys: Capture) -> None:
    """What they take, and what there is."""
    line = refused(capsys, "replay", "--gpu-memory", "1GB")
    assert "weights of 15.0 GiB and 2 blocks of 0.002 GiB are more than 0.8 GiB" in line


def test_a_folder_is_no_attention_table(capsys: Capture, tmp_path: Path) -> None:
    """Said as for every other file."""
    line = refused(capsys, "replay", "--limit", 3, "--attention-table", tmp_path)
    assert line == f"pagedkv: error: cannot read {tmp_path}: Is a directory"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    setup = ReplaySetup(load_model("llama-3.1-8b"), load_gpu("b200"), num_blocks=20_000)
    result = run_replay(chat_long(12), setup)
    limits = [SLO("ttft", 1.0)]
    met = goodput(latencies_of(result.trace, result.records), limits, result.summary.makespan_s)
    found: dict[str, Any] = json.loads(json.dumps(full_document(result, {"seed": 0, "limit": 12}, met)))
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"makespan_s": 10**400}, "is no JSON: 1000"),
        ({"preemptions": 10**31}, "is beyond 1e+30"),
        ({"makespan_s": -1e31}, "-1e+31 is beyond 1e+30"),
    ],
)
def test_numbers_beyond_reckoning_are_refused(
    document: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Whole or not: a report could only fail on them later."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**document, **change}))
    with pytest.raises(PagedKVError) as caught:
        read_result(str(path), SCHEMA)
    assert message in str(caught.value)


def test_a_pool_without_bytes_is_no_result(document: dict[str, Any]) -> None:
    """Shares of it are in every report."""
    changed = copy.deepcopy(document)
    changed["cache"]["bytes"]["reserved"] = 0
    with pytest.raises(PagedKVError, match=r"cache\.bytes\.reserved must be at least 1, got 0"):
        check_result(changed, "here", SCHEMA)


@pytest.mark.parametrize("seed", range(4))
def test_what_passes_the_check_can_be_drawn_and_compared(document: dict[str, Any], seed: int) -> None:
    """Results changed at random, often so that they still fit the schema: a page, or an error of ours."""
    rng, drawn = random.Random(seed), 0
    for _ in range(250):
        changed = copy.deepcopy(document)
        for _ in range(rng.choice((1, 1, 2))):
            _change(changed, rng)
        try:
            check_result(changed, "here", SCHEMA)
            if "series" not in changed:  # which the command says
                continue
            assert report_html(changed).startswith("<!")
            compare(["a", "b"], [document, changed])
            drawn += 1
        except PagedKVError:
            pass
    assert drawn > 20


def _change(document: dict[str, Any], rng: random.Random) -> None:
    """Take out or replace one entry somewhere."""
    at: Any = document
    while True:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        inside = at[key]
        if isinstance(inside, (dict, list)) and inside and rng.random() < 0.85:
            at = inside
            continue
        numbers = [None, -1, 0, 1, 0.5, 1e30, -1e30, 10**30, 1e-300]
        if isinstance(inside, list):
            at[key] = [rng.choice(numbers)] * len(inside)
        elif isinstance(at, dict) and rng.random() < 0.2 and key != "schema":
            del at[key]
        elif key != "schema":
            at[key] = rng.choice([*numbers, True, "x", [], {}, {"a": 1}])
        return


def test_progress_moves_whatever_the_steps_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download comes in pieces that no round number divides; an unknown total is fine, too."""
    moved: list[float] = []
    monkeypatch.setattr(Progress, "update", lambda self, task, completed: moved.append(completed))
    with console.progress("downloading", 10_000) as update:
        for done in range(0, 10_000, 333):
            update(done)
        update(10_000)
    assert len(moved) > 25 and moved[-1] == 10_000
    moved.clear()
    with console.progress("streaming", None) as update:
        for done in range(5000):
            update(done)
    assert 5 <= len(moved) <= 20
