"""The work of a replay grows with the number of requests, counted in calls."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from pagedkv.sim.hits import replay_hits
from pagedkv.sim.readers.writing import rows_of
from pagedkv.sim.replay import ReplaySetup, run_replay
from pagedkv.sim.stream_hits import stream_hits
from pagedkv.sim.timing.gpus import load_gpu
from pagedkv.sim.timing.models import load_model
from pagedkv.sim.workload import chat_long

SHORT, LONG = 300, 1500


def calls_of(run: Callable[[], object]) -> int:
    """Calls of Python and C functions: a loop over all that came before shows as a square of them."""
    count = 0

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def hits(requests: int, block_size: int) -> Callable[[], object]:
    trace = chat_long(requests)
    return lambda: replay_hits(trace, 100_000 * 16 // block_size, block_size)


def streamed(requests: int, block_size: int) -> Callable[[], object]:
    rows = list(rows_of(chat_long(requests)))
    return lambda: stream_hits(rows, 100_000 * 16 // block_size, block_size)


def replayed(requests: int, block_size: int) -> Callable[[], object]:
    """Under a load that it can carry, so that the queue is as long at the end as in the middle."""
    trace = chat_long(requests).faster(0.5)
    setup = ReplaySetup(load_model("llama-3.1-8b", block_size=block_size), load_gpu("b200"), 20_000)
    return lambda: run_replay(trace, setup)


@pytest.mark.parametrize("make", [hits, streamed, replayed])
@pytest.mark.parametrize("block_size", [16, 64])
def test_five_times_the_requests_take_five_times_the_calls(
    make: Callable[[int, int], Callable[[], object]], block_size: int
) -> None:
    """Within a tenth, and what starts a run comes on top once."""
    make(20, block_size)()  # what is imported and cached once
    short, long = (calls_of(make(n, block_size)) for n in (SHORT, LONG))
    assert long < 1.1 * short * LONG / SHORT, (short, long)
