"""The native format: a worked example, every rule of docs/trace-format.md, and round trips."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.sim.readers import ReadOptions, Row, open_trace, read_trace
from pagedkv.sim.readers.info import describe
from pagedkv.sim.readers.native import FIELDS
from pagedkv.sim.readers.writing import rows_of, write_trace
from pagedkv.sim.trace import TraceError

HEADER: dict[str, Any] = {"format": "pagedkv-trace", "version": 1, "block_size": 4}
REQUESTS: list[dict[str, Any]] = [
    {"arrival_s": 5.0, "input_len": 10, "output_len": 3, "block_hashes": ["a", "b", "c"], "session": "s"},
    {"arrival_s": 6.5, "input_len": 8, "output_len": 2, "block_hashes": ["a", "b"], "adapter": "sql"},
    {"input_len": 12, "output_len": 1, "block_hashes": ["a", "b", "d"], "session": "s", "think_s": 2.5},
    {"arrival_s": 7, "input_len": 3, "output_len": 1, "block_hashes": [], "deadline_s": 0.5, "priority": -1},
]


def write(folder: Path, *requests: dict[str, Any], header: Any = HEADER, name: str = "demo.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *requests)))
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as error:
        list(open_trace(path, format="native", options=ReadOptions(**options)))
    return str(error.value)


def said(row: Row) -> tuple[Any, ...]:
    """A row but for its place."""
    return row[1:]


class TestReading:
    def test_a_trace_with_everything(self, tmp_path: Path) -> None:
        path = write(tmp_path, *REQUESTS)
        assert open_trace(path).format.name == "native"
        assert [said(row) for row in open_trace(path)] == [
            (0.0, 10, 3, ["a", "b", "c"], 4, "s", None, None, None, 0),
            (1.5, 8, 2, ["a", "b"], 4, None, None, None, "sql", 0),
            (1.5, 12, 1, ["a", "b", "d"], 4, "s", 2.5, None, None, 0),
            (2.0, 3, 1, [], 4, None, None, 0.5, None, -1),
        ]

    def test_as_arrays(self, tmp_path: Path) -> None:
        """An adapter's contents are its own; the turn with a think time waits for the one before it."""
        trace = read_trace(write(tmp_path, *REQUESTS))
        assert trace.content_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 5]
        assert (trace.session.tolist(), trace.adapter.tolist()) == ([0, -1, 0, -1], [-1, 0, -1, -1])
        assert trace.adapter_names == ("sql",)
        assert trace.deadline_s.tolist() == [np.inf, np.inf, np.inf, 0.5]
        assert trace.priority.tolist() == [0, 0, 0, -1]
        assert np.isnan(trace.think_s[[0, 1, 3]]).all() and trace.think_s[2] == 2.5

    def test_the_hit_rate_counted_by_hand(self, tmp_path: Path) -> None:
        """Full blocks 2 + 2 + 3 + 0; hits only 2, of the third request, as the second has an adapter."""
        info = describe(open_trace(write(tmp_path, *REQUESTS)))
        assert info.sharing is not None and info.sessions is not None
        assert (info.sharing.full_blocks, info.sharing.hit_blocks) == (7, 2)
        assert info.sharing.token_hit_rate == 8 / 33
        assert (info.sessions.sessions, info.sessions.requests) == (1, 2)
        assert (info.with_think_time, info.with_deadline, info.with_priority) == (1, 1, 1)
        assert info.adapters == {"sql": 1} and info.missing == ()

    def test_token_ids_share_by_blocks_and_may_stand_for_the_length(self, tmp_path: Path) -> None:
        path = write(
            tmp_path,
            {"output_len": 1, "token_ids": [1, 2, 3, 4, 5, 6]},
            {"output_len": 1, "token_ids": [1, 2, 3, 4, 5, 7], "input_len": 6},
            {"output_len": 1, "token_ids": [9, 2, 3, 4, 5, 6]},
        )
        ids = read_trace(path).content_ids.tolist()
        assert ids == [0, 1, 0, 2, 3, 4]
        header = {"format": "pagedkv-trace", "version": 1}
        path = write(tmp_path, {"output_len": 1, "token_ids": [1, 2, 3]}, header=header)
        assert read_trace(path).content_block_size == 16
        assert read_trace(path, options=ReadOptions(block_size=2)).content_ids.tolist() == [0, 1]

    def test_lengths_alone(self, tmp_path: Path) -> None:
        trace = read_trace(
            write(tmp_path, {"input_len": 5, "output_len": 1}, {"input_len": 9, "output_len": 2})
        )
        assert (trace.content_block_size, trace.arrival_s.tolist()) == (0, [0.0, 0.0])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"deadline": 1}, "unknown field 'deadline', known are: arrival_s"),
            ({"arrival_s": 4.0}, "arrival_s decreases from 5 to 4 s"),
            ({"arrival_s": -1}, "arrival_s must be seconds from 0 to 2**43, got -1"),
            ({"arrival_s": None}, "arrival_s is missing; only a turn with think_s may leave it out"),
            ({"input_len": 0}, "input_len must be an integer from 1 to 2**31 - 1, got 0"),
            ({"output_len": None}, "output_len is missing"),
            ({"output_len": 2.0}, "output_len must be an integer"),
            ({"block_hashes": ["a"]}, "block_hashes has 1 ids for 10 prompt tokens"),
            ({"block_hashes": ["a", "b", {}]}, "block_hashes[2] must be an integer of 64 bits or text"),
            ({"block_hashes": None}, "block_hashes: missing, unlike in the first request"),
            ({"token_ids": [1]}, "block_hashes and token_ids are both there"),
            (
                {"block_hashes": None, "token_ids": [1]},
                "input_len must be 1, the number of token_ids, got 10",
            ),
            ({"session": []}, "session must be an integer of 64 bits or text"),
            ({"session": "new", "think_s": 1}, "think_s needs an earlier request of the same session"),
            ({"think_s": -1}, "think_s must be seconds from 0"),
            ({"deadline_s": float("nan")}, "deadline_s must be seconds from 0"),
            ({"adapter": ""}, "adapter must be text of 1 to 200 characters"),
            ({"priority": 1.5}, "priority must be an integer from"),
        ],
    )
    def test_errors_name_line_and_field(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        path = write(tmp_path, REQUESTS[0], REQUESTS[0] | change)
        assert f"demo.jsonl, line 3: {message}" in refusal(path)

    def test_arrivals_are_there_for_all_or_for_none(self, tmp_path: Path) -> None:
        path = write(
            tmp_path, {"input_len": 5, "output_len": 1}, {"arrival_s": 1, "input_len": 5, "output_len": 1}
        )
        assert "line 3: arrival_s is there, but not in the first request" in refusal(path)

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            (HEADER | {"version": 2}, "version must be 1, the one known, got 2"),
            (HEADER | {"format": "x"}, "format must be 'pagedkv-trace', got 'x'"),
            (HEADER | {"block_size": 0}, "block_size must be an integer from 1 to"),
            (HEADER | {"blocksize": 4}, "unknown field 'blocksize'"),
            (HEADER | {"notes": "x"}, "notes must be a list of texts"),
            (HEADER | {"name": 3}, "name must be text"),
            ([], "must be a JSON object, got []"),
        ],
    )
    def test_a_wrong_header_is_refused(self, tmp_path: Path, header: Any, message: str) -> None:
        assert f"line 1: {message}" in refusal(write(tmp_path, *REQUESTS, header=header))

    def test_hashes_need_a_block_size_and_not_another_one(self, tmp_path: Path) -> None:
        path = write(tmp_path, *REQUESTS, header={"format": "pagedkv-trace", "version": 1})
        assert "line 2: block_hashes need the header's block_size" in refusal(path)
        path = write(tmp_path, *REQUESTS)
        assert "line 1: block_size must be 8 as asked for, got 4" in refusal(path, block_size=8)

    def test_a_file_of_a_header_alone_holds_no_requests(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"demo\.jsonl: the file holds no requests"):
            read_trace(write(tmp_path))

    def test_the_document_names_every_field(self) -> None:
        document = Path(__file__).parents[3] / "docs/trace-format.md"
        if not document.exists():
            pytest.skip("the documents are not beside the tests")
        text = document.read_text(encoding="utf-8")
        assert all(f"| `{field}` |" in text for field in FIELDS)

    def test_the_documents_example_is_read(self, tmp_path: Path) -> None:
        document = Path(__file__).parents[3] / "docs/trace-format.md"
        if not document.exists():
            pytest.skip("the documents are not beside the tests")
        path = tmp_path / "example.jsonl"
        path.write_text(document.read_text(encoding="utf-8").split("```json\n")[1].split("```")[0])
        assert len(list(open_trace(path))) == len(path.read_text().splitlines()) - 1 >= 3


class TestRoundTrips:
    @pytest.mark.parametrize("suffix", [".jsonl", ".gz", ".zst", ".parquet"])
    def test_what_is_written_is_read_again(self, tmp_path: Path, suffix: str) -> None:
        if suffix == ".zst":
            pytest.importorskip("zstandard", reason="the extra pagedkv[zstd] is not installed")
        if suffix == ".parquet":
            pytest.importorskip("pyarrow", reason="the extra pagedkv[parquet] is not installed")
        reading = open_trace(write(tmp_path, *REQUESTS))
        path = tmp_path / f"again{suffix}"
        assert write_trace(reading, path, name="demo", notes=lambda: ("as told",)) == 4
        again = open_trace(path)
        assert again.format.name == "native"
        assert [said(row) for row in again] == [said(row) for row in reading]
        assert again.notes.lines() == ("as told",)
        once = path.read_bytes()
        write_trace(reading, path, name="demo", notes=lambda: ("as told",))
        assert path.read_bytes() == once

    def test_arrays_become_rows_and_arrays_again(self, tmp_path: Path) -> None:
        trace = read_trace(write(tmp_path, *REQUESTS))
        path = tmp_path / "again.jsonl"
        write_trace(rows_of(trace), path)
        again = read_trace(path)
        for name in ("arrival_s", "input_len", "output_len", "content_offsets", "session", "priority"):
            assert getattr(again, name).tolist() == getattr(trace, name).tolist(), name
        assert np.array_equal(again.think_s, trace.think_s, equal_nan=True)
        assert again.content_ids.tolist() == trace.content_ids.tolist()

    def test_mooncake_holds_what_it_can_and_refuses_the_rest(self, tmp_path: Path) -> None:
        plain = {
            "arrival_s": 0.25,
            "input_len": 8,
            "output_len": 2,
            "block_hashes": [7, 2**64 - 1],
            "session": 3,
        }
        reading = open_trace(write(tmp_path, plain))
        path = tmp_path / "again.jsonl"
        write_trace(reading, path, format="mooncake")
        assert json.loads(path.read_text()) == {
            "timestamp": 0,
            "input_length": 8,
            "output_length": 2,
            "hash_ids": [7, 2**64 - 1],
            "session_id": 3,
        }
        for change in ({"priority": 1}, {"block_hashes": ["a", "b"]}, {"deadline_s": 1}, {"arrival_s": None}):
            request = {k: v for k, v in (plain | change).items() if v is not None}
            with pytest.raises(TraceError, match=r"line 2: Mooncake's .*; write the native"):
                write_trace(open_trace(write(tmp_path, request)), path, format="mooncake")

    def test_gzip_holds_no_time(self, tmp_path: Path) -> None:
        path = tmp_path / "again.gz"
        write_trace(open_trace(write(tmp_path, *REQUESTS)), path)
        assert path.read_bytes()[4:8] == bytes(4)
        assert gzip.decompress(path.read_bytes()).startswith(b'{"format":"pagedkv-trace","version":1,')

    def test_nothing_to_write_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="no request is left to write"):
            write_trace([], tmp_path / "none.jsonl")


class TestParquet:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        pytest.importorskip("pyarrow", reason="the extra pagedkv[parquet] is not installed")
        path = tmp_path / "demo.parquet"
        write_trace(open_trace(write(tmp_path, *REQUESTS)), path)
        return path

    def test_token_ids_in_a_column_are_read(self, tmp_path: Path) -> None:
        pa = pytest.importorskip("pyarrow", reason="the extra pagedkv[parquet] is not installed")
        import pyarrow.parquet as pq

        table = pa.table({"output_len": [1, 2], "token_ids": [[1, 2, 3], [1, 2]]})
        table = table.replace_schema_metadata({"pagedkv_trace": json.dumps(HEADER)})
        pq.write_table(table, tmp_path / "t.parquet")
        assert [(row.input_len, row.output_len) for row in open_trace(tmp_path / "t.parquet")] == [
            (3, 1),
            (2, 2),
        ]

    def test_a_wrong_value_is_named_with_row_and_field(self, tmp_path: Path) -> None:
        pa = pytest.importorskip("pyarrow", reason="the extra pagedkv[parquet] is not installed")
        import pyarrow.parquet as pq

        table = pa.table({"output_len": [1, -2], "input_len": [3, 3]})
        pq.write_table(table, tmp_path / "t.parquet")
        assert "row 0: pagedkv_trace is missing in the schema's metadata" in refusal(tmp_path / "t.parquet")
        table = table.replace_schema_metadata({"pagedkv_trace": json.dumps(HEADER)})
        pq.write_table(table, tmp_path / "t.parquet")
        assert "t.parquet, row 2: output_len must be an integer from 1" in refusal(tmp_path / "t.parquet")

    def test_a_file_that_is_cut_off_is_refused(self, path: Path) -> None:
        content = path.read_bytes()
        for end in (5, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:end])
            assert "demo.parquet, row 1: cannot be read" in refusal(path)

    def test_mixed_hashes_are_refused(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow", reason="the extra pagedkv[parquet] is not installed")
        mixed = REQUESTS[0] | {"block_hashes": ["a", 2, 3]}
        with pytest.raises(TraceError, match="block_hashes must be all integers or all text"):
            write_trace(open_trace(write(tmp_path, mixed)), tmp_path / "t.parquet")

    def test_a_missing_package_is_named_with_its_remedy(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        assert 'pip install "pagedkv[parquet]"' in refusal(path)
