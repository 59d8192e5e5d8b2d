"""The threads of the native CPU backend, mostly in processes of their own."""

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pagedkv import native
from pagedkv.attention.testing import make_batch

pytestmark = pytest.mark.skipif(native.reason() is not None, reason=str(native.reason()))

JOB = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
TEAM = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)

FORK = """
import os, torch
from pagedkv.attention.testing import make_batch
torch.set_num_threads(3)
batch = make_batch([4000], heads=(8, 4), dims=(64, 64), block_size=16).to(torch.float32)
before = batch.attend("native")
child = os.fork()
same = torch.equal(batch.attend("native"), before)
if child == 0:
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
print(same and os.waitstatus_to_exitcode(status) == 0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_works_on_both_sides_of_a_fork() -> None:
    """The child's pool is its own; nobody waits for threads that it does not have."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "True"


def _printed(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


COUNTED = """
import os, torch
from contextlib import nullcontext
from pagedkv import native
from pagedkv.attention.testing import make_batch
batch = make_batch([3000], heads=(4, 2), dims=(64, 64), block_size=16).to(torch.float32)
def new_threads(context):
    before = len(os.listdir("/proc/self/task"))
    with context:
        batch.attend("native")
    return len(os.listdir("/proc/self/task")) - before
"""

MANY_THREADS = """
torch.set_num_threads(200)  # which starts 199 of torch's own
print(new_threads(native.own_threads()) < 3000 // 256 * 2 + 4)
"""

TORCHS_THREADS = """
torch.set_num_threads(3)
torch.ones(10**7).sum()  # torch's threads are there now
print(new_threads(nullcontext()), new_threads(native.own_threads()), native._team_of_torch() is not None)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it counts threads in /proc")
def test_no_more_threads_than_work_items() -> None:
    """A number of threads beyond all reason starts no thread that would find nothing to do."""
    assert _printed(COUNTED + MANY_THREADS) == "True"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it counts threads in /proc")
def test_it_computes_on_the_threads_that_torch_has() -> None:
    """Where torch computes with OpenMP no thread is added; a pool of our own adds two beside the caller."""
    from_team, from_pool, has_team = _printed(COUNTED + TORCHS_THREADS).split()
    assert from_pool == "2"
    assert from_team == ("0" if has_team == "True" else "2")


def test_both_kinds_of_threads_give_the_same_bits() -> None:
    """In turn, so that neither is left in a state that the other cannot use."""
    batch = make_batch([700, 3, 4000], heads=(8, 4), dims=(64, 64), block_size=16).to(torch.float32)
    with two_threads():
        expected = batch.attend("native")
        for _ in range(3):
            with native.own_threads():
                assert torch.equal(batch.attend("native"), expected)
            assert torch.equal(batch.attend("native"), expected)


def test_a_team_that_keeps_its_caller_waiting_is_left_for_a_while() -> None:
    """It ends with its last thread, which on a busy machine waits for a core; our own pool does not."""
    batch = make_batch([4000], heads=(8, 4), dims=(64, 64), block_size=16).to(torch.float32)
    calls: list[int] = []
    pause = 0.0

    def team(job: int, context: int, threads: int, _flags: int) -> None:
        JOB(job)(context)
        calls.append(threads)
        time.sleep(pause)

    library, callback = native.library(), TEAM(team)

    def served_of_three() -> int:
        calls.clear()
        library.pagedkv_use_team(ctypes.cast(callback, ctypes.c_void_p))
        for _ in range(3):
            assert torch.equal(batch.attend("native"), expected)
        assert set(calls) == {2}
        return len(calls)

    with two_threads():
        expected = batch.attend("native")
        try:
            # on a busy machine this team, too, keeps its caller waiting now and then
            assert any(served_of_three() == 3 for _ in range(50))
            pause = 0.01
            assert served_of_three() == 1
        finally:
            with native.own_threads():  # leaving it brings torch's team back
                pass


@contextmanager
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)
