"""Where the points of a sweep run: here, in processes of this machine, or on a cluster, through joblib."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, TypeVar

from pagedkv.errors import PagedKVError

BACKENDS: Final = ("serial", "loky", "dask", "ray")

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Workers:
    """Where to run, and with how many workers.

    Args:
        backend: one of ``BACKENDS``; loky: processes of this machine.
        jobs: how many points at once; None: all cores, or whatever the cluster at ``address`` has.
        address: of a Dask scheduler or a Ray cluster; None: one that is started here, and ends with the work.

    Raises:
        PagedKVError: an unknown backend, a number below 1, or an option that the backend has no use for.
    """

    backend: str = "serial"
    jobs: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.backend not in BACKENDS:
            raise PagedKVError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.jobs is not None and self.jobs < 1:
            raise PagedKVError(f"--jobs must be at least 1, got {self.jobs}")
        if self.backend == "serial" and (self.jobs or 1) > 1:
            raise PagedKVError(f"--backend serial is one job, got --jobs {self.jobs}")
        if self.address is not None and self.backend not in ("dask", "ray"):
            raise PagedKVError(f"--backend {self.backend} has no --address: it goes with dask and ray")

    def run(
        self, function: Callable[[Any, Item], Result], shared: Any, items: Sequence[Item]
    ) -> Iterator[tuple[int, Result]]:
        """Yield (position, ``function(shared, item)``) of every item, in the order in which they end.

        ``function`` must be importable on the workers, and its arguments and results picklable. ``shared``
        is sent once where the backend can. Ray hands results over in rounds of two per job.

        Raises ``PagedKVError`` for a missing package, a cluster that does not answer, or workers that died;
        an exception of ``function`` counts as that, too.
        """
        if self.backend == "serial":
            yield from ((i, function(shared, item)) for i, item in enumerate(items))
            return
        with ExitStack() as stack:
            parallel = self._entered(stack, shared)
            try:
                yield from self._results(parallel, function, shared, items)
            except Exception as error:
                raise PagedKVError(
                    f"the {self.backend} workers failed: {type(error).__name__}: {error}; "
                    "what is done is kept: give the same command again"
                ) from error

    def _results(
        self, parallel: Any, function: Callable[[Any, Item], Result], shared: Any, items: Sequence[Item]
    ) -> Iterator[tuple[int, Result]]:
        import joblib

        call = joblib.delayed(partial(_numbered, os.getpid() if self.backend == "loky" else None))
        if self.backend != "ray":
            yield from parallel(call(function, shared, i, item) for i, item in enumerate(items))
            return
        # Ray's backend returns a round whole: short ones, so that little is lost if the sweep is killed
        with parallel:
            size = 2 * joblib.effective_n_jobs(self.jobs or -1)
            for start in range(0, len(items), size):
                some = list(enumerate(items))[start : start + size]
                yield from parallel(call(function, shared, i, item) for i, item in some)

    def _entered(self, stack: ExitStack, shared: Any) -> Any:
        """A joblib.Parallel on the backend, which ends with ``stack``."""
        try:
            import joblib
        except ImportError:
            raise PagedKVError('workers need joblib: pip install "pagedkv[sweep]"') from None
        options: dict[str, Any] = {"n_jobs": self.jobs or -1}
        if self.backend == "loky":
            options["inner_max_num_threads"] = 1
        elif self.backend == "dask":
            options |= {"client": self._dask_client(stack), "scatter": [shared]}
        else:
            self._start_ray(stack)
        stack.enter_context(joblib.parallel_config(self.backend, **options))
        return_as = "list" if self.backend == "ray" else "generator_unordered"
        return joblib.Parallel(return_as=return_as, batch_size=1)

    def _dask_client(self, stack: ExitStack) -> Any:
        try:
            from distributed import Client, LocalCluster
        except ImportError:
            raise PagedKVError("--backend dask needs Dask: pip install dask distributed") from None
        address = self.address
        try:
            if address is None:
                cluster = LocalCluster(n_workers=self.jobs, threads_per_worker=1, dashboard_address=None)
                address = stack.enter_context(cluster).scheduler_address
            return stack.enter_context(Client(address, set_as_default=False))
        except (OSError, ValueError) as error:
            raise PagedKVError(f"cannot reach a Dask scheduler at {address}: {error}") from None

    def _start_ray(self, stack: ExitStack) -> None:
        try:
            import ray
            from ray.util.joblib import register_ray
        except ImportError:
            raise PagedKVError("--backend ray needs Ray: pip install ray") from None
        if not ray.is_initialized():
            own = {"num_cpus": self.jobs, "include_dashboard": False} if self.address is None else {}
            try:
                ray.init(self.address or "local", log_to_driver=False, logging_level="error", **own)
            except (OSError, ValueError, RuntimeError) as error:
                raise PagedKVError(f"cannot reach a Ray cluster at {self.address}: {error}") from None
            stack.callback(ray.shutdown)
        register_ray()


def _numbered(
    parent: int | None, function: Callable[[Any, Item], Result], shared: Any, position: int, item: Item
) -> tuple[int, Result]:
    if parent is not None:
        _end_with(parent)
    return position, function(shared, item)


@cache
def _end_with(parent: int) -> None:
    """Let this process end soon after its parent, which loky's workers outlive by minutes if it is killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
