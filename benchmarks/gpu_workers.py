"""Run checks in processes of their own, so that kernels compile side by side and a crash costs one check."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

WAIT_S = 0.2
DIED = "the process died"


class Box:
    """The time there is: nothing starts after ``start_s``, and nothing is waited for after ``end_s``."""

    def __init__(self, start_s: float, end_s: float) -> None:
        """Start the clock."""
        self._begin = time.monotonic()
        self._start_s = start_s
        self._end_s = end_s

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    @property
    def may_start(self) -> bool:
        """Something new still fits."""
        return self.spent_s < self._start_s

    @property
    def left_s(self) -> float:
        """Seconds that results are waited for."""
        return max(0.0, self._end_s - self.spent_s)


class Task(NamedTuple):
    """A call in another process; everything in it can be pickled."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Failure(NamedTuple):
    """Why a task has no result. ``is_wrong``: it was tried, and ended badly."""

    reason: str
    is_wrong: bool


def run_tasks(tasks: Iterable[Task], workers: int, box: Box) -> dict[str, Any]:
    """The result of each task by name, or a `Failure`.

    A process that dies takes what it shares a pool with along: those tasks are run again, one process each.
    """
    waiting = {task.name: task for task in tasks}
    done = _run_pool(list(waiting.values()), workers, box)
    for name, result in done.items():
        if isinstance(result, Failure) and result.reason == DIED and box.may_start:
            done |= _run_pool([waiting[name]], 1, box)
    return done


def _run_pool(tasks: list[Task], workers: int, box: Box) -> dict[str, Any]:
    if not box.may_start:
        return {
            task.name: Failure(f"not started after {box.spent_s:.0f} s", is_wrong=False) for task in tasks
        }
    context = multiprocessing.get_context("spawn")  # a fork would inherit a state of CUDA that does not work
    executor = ProcessPoolExecutor(max_workers=max(1, min(workers, len(tasks))), mp_context=context)
    running: dict[str, Future[Any]] = {}
    try:
        running = {task.name: executor.submit(_call, task) for task in tasks}
        pending = set(running.values())
        while pending and box.left_s > 0:
            pending = wait(pending, timeout=WAIT_S).not_done
            if not box.may_start:
                pending = {future for future in pending if not future.cancel()}
        return {name: _result(future, box) for name, future in running.items()}
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        if not all(future.done() for future in running.values()):
            for process in multiprocessing.active_children():
                process.terminate()


def _call(task: Task) -> Any:
    """In the process: after an error of the device it could only fail, so it makes room for a new one."""
    try:
        return task.function(*task.arguments)
    except RuntimeError as error:
        if "CUDA error" not in str(error):
            raise
        print(f"{task.name}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _result(future: Future[Any], box: Box) -> Any:
    if not future.done():
        return Failure(f"not finished after {box.spent_s:.0f} s", is_wrong=True)
    try:
        return future.result()
    except CancelledError:
        return Failure(f"not started after {box.spent_s:.0f} s", is_wrong=False)
    except BrokenProcessPool:
        return Failure(DIED, is_wrong=True)
    except Exception as error:  # whatever a check raises is its result
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Failure(what, is_wrong=type(error).__name__ != "OutOfMemoryError")
