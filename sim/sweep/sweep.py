"""A sweep: every point of a grid is one replay, run anywhere, done once, and a row in grid order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from pagedkv import __version__
from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import DEFAULTS
from pagedkv.sim.output.slo import SLO
from pagedkv.sim.replay import run_replay
from pagedkv.sim.sweep.grid import Grid, Point
from pagedkv.sim.sweep.sweep_backends import Workers
from pagedkv.sim.sweep.sweep_columns import FIGURES, Column, Row, columns_of, conditions_of, figures_of
from pagedkv.sim.sweep.sweep_options import check_axes, parse_point, setup_of
from pagedkv.sim.sweep.sweep_store import Outcome, PointStore, files_digest, trace_digest
from pagedkv.sim.trace import Trace

NO_FIGURES: Final[Row] = {column.name: None for column in FIGURES}


class Task(NamedTuple):
    """What a worker is told of a point, besides the trace."""

    point: Point
    slos: tuple[SLO, ...]
    version: str
    """The library's where the sweep was started."""


class SweepResult(NamedTuple):
    """A finished sweep. ``rows`` are in grid order; a row has figures, or an ``error``."""

    columns: tuple[Column, ...]
    rows: list[Row]
    num_found: int
    """Points that were done before."""

    @property
    def failed(self) -> list[Row]:
        """Rows of points that have no figures."""
        return [row for row in self.rows if row["error"] is not None]


class Sweep:
    """A grid over one trace, checked: each point's conditions are known, and none has been run.

    Raises ``PagedKVError`` for an option or a value that a replay does not take, a model, GPU or policy that
    does not exist, and a file that cannot be read. What only one combination cannot do (no room for the
    weights, a request that never fits) is no error here, but in that row.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from pagedkv.sim.workload import chat_long
    >>> sweep = Sweep(chat_long(20), Grid({"block-size": ["16", "64"], "gpu-memory": ["1GB", "80GB"]}))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = sweep.run(PointStore(Path(folder)))
    ...     again = sweep.run(PointStore(Path(folder)))
    >>> [(row["block_size"], row["hit_tokens"], row["error"] is None) for row in first.rows]
    [(16, None, False), (16, 9216, True), (64, None, False), (64, 9216, True)]
    >>> first.failed[0]["error"][:25]
    'llama-3.1-8b does not fit'
    >>> again.rows == first.rows, first.num_found, again.num_found
    (True, 0, 4)
    """

    def __init__(self, trace: Trace, grid: Grid, slos: Sequence[SLO] = ()) -> None:
        """Check every point. O(points)."""
        check_axes(grid.axes)
        self.trace, self.grid, self.slos = trace, grid, tuple(slos)
        self.columns = columns_of(list(grid.axes))
        self.points = list(grid)
        of_trace: Row = {"trace": trace.name, "requests": len(trace)}
        self._conditions = [of_trace | conditions_of(point, parse_point(point)) for point in self.points]
        of_all = {"pagedkv_version": __version__, "trace": trace_digest(trace), "slo": dict(self.slos)}
        self._keys = [of_all | _settings_key(point) for point in self.points]

    def run(
        self,
        store: PointStore,
        workers: Workers | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> SweepResult:
        """Run what ``store`` does not have, and put it there; ``on_progress`` hears how many points are done.

        The rows depend on the trace and the grid alone: not on the workers, nor on what was done before.
        """
        outcomes: dict[int, Outcome] = {}
        for i, key in enumerate(self._keys):
            found = store.get(key)
            if found is not None:
                outcomes[i] = found
        num_found, missing = len(outcomes), [i for i in range(len(self.points)) if i not in outcomes]
        _tell(on_progress, num_found)
        tasks = [Task(self.points[i], self.slos, __version__) for i in missing]
        for position, outcome in (workers or Workers()).run(run_task, self.trace, tasks) if tasks else ():
            i = missing[position]
            if outcome.is_final:
                store.put(self._keys[i], outcome)
            outcomes[i] = outcome
            _tell(on_progress, len(outcomes))
        rows = [
            {**NO_FIGURES, **conditions, **outcomes[i].figures, "error": outcomes[i].error}
            for i, conditions in enumerate(self._conditions)
        ]
        return SweepResult(self.columns, rows, num_found)


def run_task(trace: Trace, task: Task) -> Outcome:
    """Replay one point; what goes wrong is its outcome. Depends on the arguments alone."""
    if task.version != __version__:
        error = f"the sweep is of pagedkv {task.version}, this worker has {__version__}"
        return Outcome({}, error, is_final=False)
    try:
        args = parse_point(task.point)
        setup = setup_of(args)
        result = run_replay(trace if args.speed is None else trace.faster(args.speed), setup)
        return Outcome(figures_of(result, task.slos))
    except PagedKVError as refusal:
        return Outcome({}, str(refusal))
    except Exception as failure:  # a bug or a lack of memory: others go on, this one is tried again next time
        return Outcome({}, f"{type(failure).__name__}: {failure}", is_final=False)


def _settings_key(point: Point) -> dict[str, Any]:
    """A point's settings with defaults filled in, flags not given left out, and what its files hold."""
    defaults = {name.replace("_", "-"): str(value) for name, value in DEFAULTS.items()}
    settings = defaults | {name: value for name, value in point.items() if value is not False}
    return {"settings": settings, "files": files_digest(settings)}


def _tell(on_progress: Callable[[int], None] | None, done: int) -> None:
    if on_progress is not None:
        on_progress(done)
