"""Workers of a sweep: whatever runs the points, the bytes are the serial run's, after a kill too."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import PagedKVError
from pagedkv.sim.cli import main
from pagedkv.sim.sweep.grid import Grid, Setting
from pagedkv.sim.sweep.sweep import Sweep, SweepResult
from pagedkv.sim.sweep.sweep_backends import Workers
from pagedkv.sim.sweep.sweep_store import PointStore
from pagedkv.sim.sweep.sweep_table import rows_csv
from pagedkv.sim.workload import chat_long

REQUESTS = 15
AXES: dict[str, tuple[Setting, ...]] = {
    "gpu": ("h100", "b200"),
    "block-size": ("16", "64"),
    "kv-dtype": ("bf16", "int8"),
    "num-blocks": ("300", "20000"),
}
NUM_POINTS = 16
Capture = pytest.CaptureFixture[str]


def sweep(requests: int = REQUESTS) -> Sweep:
    return Sweep(chat_long(requests), Grid(AXES))


def csv_of(result: SweepResult) -> str:
    return rows_csv(result.columns, result.rows)


def points_in(folder: Path) -> list[Path]:
    """Files of finished points; one that a kill left half put in place begins with a dot."""
    return list(folder.glob("[!.]*.json"))


def files_of(store: PointStore) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in points_in(store.folder)}


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The table of the serial run, which every other one must equal."""
    return csv_of(sweep().run(PointStore(tmp_path_factory.mktemp("serial") / "points")))


@pytest.fixture
def store(tmp_path: Path) -> PointStore:
    return PointStore(tmp_path / "points")


def command(out: Path, *options: object, requests: int = REQUESTS) -> list[str]:
    axes = [part for name, values in AXES.items() for part in (f"--{name}", *map(str, values))]
    return ["sweep", "--limit", str(requests), *axes, "--out", str(out), *map(str, options)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_AUTH_MODE": "disabled"}


def spawned(*argv: str, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pagedkv", *argv],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def wait_for(condition: Callable[[], bool], timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class TestWorkers:
    def test_two_processes_make_the_same_bytes(self, tmp_path: Path, serial: str) -> None:
        """loky, through the command."""
        pytest.importorskip("joblib", reason="joblib is not installed")
        out = tmp_path / "out.csv"
        done = spawned(*command(out, "--jobs", 2))
        assert done.returncode == 1, done.stderr  # the points that never fit
        assert out.read_text() == serial

    def test_a_killed_sweep_goes_on(self, tmp_path: Path) -> None:
        """SIGKILL in the middle: what is done is whole and is not done again; the serial run's bytes."""
        pytest.importorskip("joblib", reason="joblib is not installed")
        slow = 150  # requests: points must be going on when three are done
        serial = csv_of(sweep(slow).run(PointStore(tmp_path / "serial")))
        out, folder = tmp_path / "out.csv", tmp_path / "out.csv.points"
        options = command(out, "--jobs", 2, requests=slow)
        argv = [sys.executable, "-m", "pagedkv", *options]
        nowhere = subprocess.DEVNULL
        process = subprocess.Popen(
            argv, env=environment(), stdout=nowhere, stderr=nowhere, start_new_session=True
        )
        try:
            wait_for(lambda: len(points_in(folder)) >= 3 or process.poll() is not None)
        finally:
            # the workers too, who would finish their points after that
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        store = PointStore(folder)
        before = files_of(store)
        assert 3 <= len(before) < NUM_POINTS
        assert not out.exists()
        assert all(json.loads(content)["schema"] == "pagedkv.sweep-point/1" for _, content in before.values())
        again = spawned(*options)
        assert f"{NUM_POINTS} points: {len(before)} were done before" in again.stdout
        assert before.items() <= files_of(store).items()
        assert len(files_of(store)) == NUM_POINTS
        assert out.read_text() == serial

    @pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")
    def test_workers_end_with_a_killed_sweep(self, tmp_path: Path) -> None:
        """Nobody goes on computing for a sweep that is gone."""
        pytest.importorskip("joblib", reason="joblib is not installed")
        work = tmp_path / "idling.py"
        work.write_text(
            "import os, time\n"
            "from pathlib import Path\n"
            "from pagedkv.sim.sweep.sweep_backends import Workers\n"
            "def idle(folder, item):\n"
            "    Path(folder, str(os.getpid())).touch()\n"
            "    time.sleep(300)\n"
        )
        pids = tmp_path / "pids"
        pids.mkdir()
        code = f"import idling\nlist(idling.Workers('loky', 2).run(idling.idle, {str(pids)!r}, [1, 2]))\n"
        path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        process = subprocess.Popen([sys.executable, "-c", code], env=environment() | path)
        try:
            wait_for(lambda: len(list(pids.iterdir())) == 2)
        finally:
            process.kill()
            process.wait()
        wait_for(lambda: not any(is_running(int(pid.name)) for pid in pids.iterdir()), timeout=20)

    @pytest.mark.filterwarnings("ignore")
    def test_a_dask_cluster_of_two_workers(self, store: PointStore, serial: str) -> None:
        """Reached by its address; both workers take part, and the table is the serial one's."""
        distributed = pytest.importorskip("distributed", reason="dask and distributed are not installed")
        pytest.importorskip("joblib", reason="joblib is not installed")
        with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
            address = cluster.scheduler_address
            result = sweep().run(store, Workers("dask", address=address))
            with distributed.Client(address, set_as_default=False) as client:
                executed = client.run(lambda dask_worker: dask_worker.state.executed_count)
        assert csv_of(result) == serial
        assert len(executed) == 2
        assert min(executed.values()) > 0
        assert len(files_of(store)) == NUM_POINTS

    def test_a_dask_cluster_of_its_own(self, tmp_path: Path, serial: str) -> None:
        """Without an address, the command starts two workers, and they end with it."""
        pytest.importorskip("distributed", reason="dask and distributed are not installed")
        pytest.importorskip("joblib", reason="joblib is not installed")
        out = tmp_path / "out.csv"
        done = spawned(*command(out, "--backend", "dask", "--jobs", 2))
        assert done.returncode == 1, done.stderr
        assert out.read_text() == serial

    def test_a_ray_cluster_of_its_own(self, tmp_path: Path, serial: str) -> None:
        """The same through Ray."""
        pytest.importorskip("ray", reason="ray is not installed")
        pytest.importorskip("joblib", reason="joblib is not installed")
        out = tmp_path / "out.csv"
        done = spawned(*command(out, "--backend", "ray", "--jobs", 2), timeout=180)
        assert done.returncode == 1, done.stderr
        assert out.read_text() == serial

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"backend": "mpi"}, "serial, loky, dask, ray, got 'mpi'"),
            ({"backend": "serial", "jobs": 2}, "serial is one job, got --jobs 2"),
            ({"backend": "loky", "jobs": 0}, "at least 1, got 0"),
            ({"backend": "loky", "address": "tcp://x:1"}, "loky has no --address"),
        ],
    )
    def test_refuses(self, options: dict[str, Any], message: str) -> None:
        """What the backend has no use for."""
        with pytest.raises(PagedKVError, match=message):
            Workers(**options)

    def test_a_missing_package_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        """With what to install."""
        monkeypatch.setitem(sys.modules, "joblib", None)
        assert main(command(tmp_path / "out.csv", "--jobs", 2)) == 2
        assert 'pip install "pagedkv[sweep]"' in capsys.readouterr().err

    def test_workers_that_die_end_the_sweep_and_lose_nothing(self, tmp_path: Path) -> None:
        """A worker that is killed is no row: the command says so, and what is done stays."""
        pytest.importorskip("joblib", reason="joblib is not installed")
        with pytest.raises(PagedKVError, match="the loky workers failed"):
            list(Workers("loky", 2).run(_die, None, [1, 2, 3]))


def _die(shared: None, item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
