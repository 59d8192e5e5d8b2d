"""The threads of the native CPU backend, in processes of their own."""

import subprocess
import sys

import pytest

from pagedkv import native

pytestmark = pytest.mark.skipif(native.reason() is not None, reason=str(native.reason()))

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


MANY_THREADS = """
import os, torch
from pagedkv.attention.testing import make_batch
batch = make_batch([3000], heads=(4, 2), dims=(64, 64), block_size=16).to(torch.float32)
torch.set_num_threads(200)  # which starts 199 of torch's own
before = len(os.listdir("/proc/self/task"))
batch.attend("native")
print(len(os.listdir("/proc/self/task")) - before < 3000 // 256 * 2 + 4)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it counts threads in /proc")
def test_no_more_threads_than_work_items() -> None:
    """A number of threads beyond all reason starts no thread that would find nothing to do."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_THREADS], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "True"
