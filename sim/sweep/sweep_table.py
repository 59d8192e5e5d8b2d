"""The table of a sweep as a file: CSV, or Parquet with the types of its columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from pagedkv.sim.output.outputs import Writer, text_writer
from pagedkv.sim.output.tables import is_parquet
from pagedkv.sim.sweep.sweep_columns import Column, Row, Value


def rows_writer(path: str, columns: Sequence[Column], rows: Sequence[Row]) -> Writer:
    """A writer of rows in the format that the path's suffix names. Same rows, same bytes."""
    if not is_parquet(path):
        return text_writer(rows_csv(columns, rows))

    def write(target: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        types = {
            str: pyarrow.string(),
            int: pyarrow.int64(),
            float: pyarrow.float64(),
            bool: pyarrow.bool_(),
        }
        table = {c.name: pyarrow.array([row.get(c.name) for row in rows], types[c.type]) for c in columns}
        parquet.write_table(pyarrow.table(table), target)

    return write


def rows_csv(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    r"""Rows with a header; floats so that they can be read back exactly, empty where there is no value.

    >>> rows_csv([Column("policy", str), Column("makespan_s", float)], [{"policy": "lru", "makespan_s": 0.5}])
    'policy,makespan_s\nlru,0.5\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows([[_cell(row.get(column.name)) for column in columns] for row in rows])
    return text.getvalue()


def _cell(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)
