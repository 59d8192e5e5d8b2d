"""The tables that a replay writes, typed by the names of their columns: as columns, and as Parquet."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from pagedkv.errors import PagedKVError
from pagedkv.sim.output.outputs import STANDARD_OUTPUT, Writer, is_stream, text_writer

Column = list[int | None] | list[float | None]

PARQUET = (".parquet", ".pq")
CSV = (".csv", "")


def columns_of(text: str) -> dict[str, Column]:
    """The columns of a CSV: seconds (``..._s``) are float, all others int; an empty cell is None.

    >>> columns_of("time_s,running\\n0.5,1\\n,2\\n")
    {'time_s': [0.5, None], 'running': [1, 2]}
    """
    header, *rows = csv.reader(io.StringIO(text))
    cells = zip(*rows, strict=True) if rows else [()] * len(header)
    return {name: _typed(name, column) for name, column in zip(header, cells, strict=True)}


def _typed(name: str, cells: tuple[str, ...]) -> Column:
    if name.endswith("_s"):
        return [float(cell) if cell else None for cell in cells]
    return [int(cell) if cell else None for cell in cells]


def require_table(path: str) -> None:
    """Refuse before the work what could not be written after it: a suffix of neither kind, or no pyarrow.

    >>> require_table("timeline.csv"); require_table("-"); require_table("timeline.xls")
    Traceback (most recent call last):
        ...
    pagedkv.errors.PagedKVError: cannot write timeline.xls: a table is .csv, .parquet or .pq, got '.xls'
    """
    suffix = Path(path).suffix
    if not (is_parquet(path) or suffix.lower() in CSV or is_stream(path)):
        kinds = ".csv, .parquet or .pq"
        raise PagedKVError(f"cannot write {path}: a table is {kinds}, got {suffix!r}")
    if not is_parquet(path):
        return
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise PagedKVError('Parquet needs pyarrow: pip install "pagedkv[parquet]"') from None


def is_parquet(path: str) -> bool:
    """Tell whether a path names Parquet; everything else means CSV."""
    return path not in STANDARD_OUTPUT and Path(path).suffix.lower() in PARQUET


def table_writer(path: str, text: str) -> Writer:
    """A writer of a table that is given as CSV, in the format that the path's suffix names."""
    if not is_parquet(path):
        return text_writer(text)

    def write(target: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        columns = {
            name: pyarrow.array(column, pyarrow.float64() if name.endswith("_s") else pyarrow.int64())
            for name, column in columns_of(text).items()
        }
        parquet.write_table(pyarrow.table(columns), target)

    return write
