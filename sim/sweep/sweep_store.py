"""The finished points of a sweep: one small file each, so that a killed sweep goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from pagedkv.errors import PagedKVError
from pagedkv.sim.output.outputs import text_writer, write_outputs
from pagedkv.sim.sweep.sweep_columns import Row
from pagedkv.sim.trace import Trace

SCHEMA: Final = "pagedkv.sweep-point/1"


class Outcome(NamedTuple):
    """What became of a point: the figures of its replay, or why there are none."""

    figures: Row
    error: str | None = None
    is_final: bool = True
    """Whether another try would end the same."""


class PointStore:
    """A folder of finished points, each named by the hash of everything that it depends on.

    A point is done if its file is there, whole, and says that it is this point's. Files are put in place
    at once, so that a killed sweep leaves whole ones only.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = PointStore(Path(folder, "points"))
    ...     store.put({"block-size": "16"}, Outcome({"makespan_s": 0.1}))
    ...     store.get({"block-size": "16"}), store.get({"block-size": "32"})
    (Outcome(figures={'makespan_s': 0.1}, error=None, is_final=True), None)
    """

    def __init__(self, folder: Path) -> None:
        """Use a folder; make it if it is not there."""
        self.folder = folder
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise PagedKVError(f"cannot make the folder {folder}: {error.strerror or error}") from None

    def path(self, key: Mapping[str, Any]) -> Path:
        """Where a point's file is, once it is done."""
        return self.folder / f"{_digest(key)[:32]}.json"

    def get(self, key: Mapping[str, Any]) -> Outcome | None:
        """What became of a point; None if it is not done."""
        try:
            document = json.loads(self.path(key).read_bytes())
            whole = document.pop("sha256") == _digest(document)
            if not whole or document["schema"] != SCHEMA or document["key"] != key:
                return None
            return Outcome(document["figures"], document["error"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def put(self, key: Mapping[str, Any], outcome: Outcome) -> None:
        """Keep what became of a point, at once or not at all."""
        document = {"schema": SCHEMA, "key": key, "figures": outcome.figures, "error": outcome.error}
        document["sha256"] = _digest(document)
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        write_outputs((str(self.path(key)), text_writer(text)))


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def trace_digest(trace: Trace) -> str:
    """SHA-256 of everything that a replay reads of a trace, its name excepted. O(size of the trace).

    >>> trace = Trace.from_lengths([0, 3], [5, 5], [1, 1])
    >>> [trace_digest(other) == trace_digest(trace) for other in (trace.faster(1.0), trace.head(1))]
    [True, False]
    """
    found = hashlib.sha256()
    for name, value in sorted(vars(trace).items()):
        if name in ("name", "notes"):
            continue
        if isinstance(value, np.ndarray):
            little = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False))
            found.update(f"{name} {little.dtype.str} {little.shape}\n".encode())
            found.update(little.data)
        else:
            found.update(f"{name} {value!r}\n".encode())
    return found.hexdigest()


def files_digest(settings: Mapping[str, object]) -> dict[str, str]:
    """SHA-256 of the files that settings name, by setting: their content decides, not their name."""
    found = {}
    for name, value in settings.items():
        if isinstance(value, str) and value:
            path = Path(value, "config.json") if Path(value).is_dir() else Path(value)
            if path.is_file():
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
