"""Parquet files of the project's own format; needs pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pagedkv.sim.readers.json_rows import as_object, parse_json
from pagedkv.sim.readers.place import Place
from pagedkv.sim.readers.source import Source
from pagedkv.sim.trace import TraceError

MAGIC = b"PAR1"
HEADER_KEY = b"pagedkv_trace"

_BATCH_ROWS = 256


def is_parquet(source: Source) -> bool:
    """Tell whether the file is Parquet, by its first bytes; a stream, which cannot be searched, is not."""
    return not source.is_stream and source.head(len(MAGIC)) == MAGIC


def records(source: Source) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the header, then the columns of each row that are not null. Memory: 256 rows."""
    parquet = require_parquet(source.path)
    arrow_error = _errors()
    row = 0
    try:
        with parquet.ParquetFile(source.path, page_checksum_verification=True) as file:
            metadata = file.schema_arrow.metadata or {}
            place = Place(source.path, 0, unit="row")
            if HEADER_KEY not in metadata:
                raise place.error(f"{HEADER_KEY.decode()} is missing in the schema's metadata")
            yield place, as_object(place, parse_json(place, metadata[HEADER_KEY]))
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for record in batch.to_pylist():
                    row += 1
                    given = {name: value for name, value in record.items() if value is not None}
                    yield Place(source.path, row, unit="row"), given
            if row != file.metadata.num_rows:
                damage = f"{row:,} rows found, {file.metadata.num_rows:,} announced"
                raise Place(source.path, row + 1, unit="row").error(f"cannot be read: {damage}")
    except arrow_error as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Place(source.path, row + 1, unit="row").error(f"cannot be read: {text}") from error


class ParquetWriter:
    """Writes records in batches to a file; a context, at whose end the file is whole.

    Columns: those of the format but ``token_ids``. Hashes are integers of 64 bits (signed) or text,
    whichever the first record with hashes has.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Begin a file."""
        self._parquet = require_parquet(path)
        self._path, self._header = path, header
        self._rows: list[dict[str, Any]] = []
        self._writer: Any = None
        self._schema: Any = None

    def write(self, record: dict[str, Any]) -> None:
        """Add a record; written once there are 4,096 of them."""
        self._rows.append(record)
        if len(self._rows) == 4096:
            self._flush()

    def __enter__(self) -> ParquetWriter:
        """Begin to write."""
        return self

    def __exit__(self, *error: object) -> None:
        """Write what is left, unless there was an error."""
        if error[0] is None:
            self._flush()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        import pyarrow

        if self._writer is None:
            self._schema = _schema(self._rows, self._header)
            self._writer = self._parquet.ParquetWriter(
                self._path, self._schema, compression="zstd", write_page_checksum=True
            )
        table = pyarrow.table({name: self._column(name) for name in self._schema.names}, self._schema)
        self._writer.write_table(table)
        self._rows = []

    def _column(self, name: str) -> list[Any]:
        values = [record.get(name) for record in self._rows]
        if name in ("session", "block_hashes"):
            kind = str if "string" in str(self._schema.field(name).type) else int
            for value in values:
                items = value if isinstance(value, list) else [] if value is None else [value]
                if any(type(item) is not kind for item in items):
                    raise TraceError(f"{self._path}: {name} must be all integers or all text for Parquet")
            return [_signed(value) for value in values]
        return values


def require_parquet(path: Path) -> ModuleType:
    """The package's Parquet part, or an error that says how to get it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TraceError(f'{path}: Parquet needs: pip install "pagedkv[parquet]"') from error
    module: ModuleType = pyarrow.parquet
    return module


def _errors() -> tuple[type[Exception], ...]:
    import pyarrow

    # damaged metadata surfaces as any of these
    return (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError)


def _signed(value: Any) -> Any:
    """Integers from 2**63 on as the negative numbers of the same 64 bits."""
    if isinstance(value, list):
        return [_signed(item) for item in value]
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _schema(rows: list[dict[str, Any]], header: dict[str, Any]) -> Any:
    import pyarrow as pa

    hashes = next((record["block_hashes"] for record in rows if record.get("block_hashes")), [0])
    session = next((record["session"] for record in rows if record.get("session") is not None), 0)
    kinds = {int: pa.int64(), str: pa.string()}
    fields = [
        ("arrival_s", pa.float64()),
        ("input_len", pa.int64()),
        ("output_len", pa.int64()),
        ("block_hashes", pa.list_(kinds[type(hashes[0])])),
        ("session", kinds[type(session)]),
        ("think_s", pa.float64()),
        ("deadline_s", pa.float64()),
        ("adapter", pa.string()),
        ("priority", pa.int64()),
    ]
    return pa.schema(fields, metadata={HEADER_KEY: json.dumps(header)})
