"""Traces and the Mooncake reader: what they hold, and that nothing damaged gets through."""

import gzip
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.sim.mooncake import read_mooncake
from pagedkv.sim.trace import Trace, TraceError

ROW: dict[str, Any] = {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [46, 47, 48]}


def line(**changes: Any) -> str:
    return json.dumps({**ROW, **changes})


def write(folder: Path, *lines: str, name: str = "demo.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(text + "\n" for text in lines))
    return path


def row_of(trace: Trace, i: int) -> list[int]:
    return list(trace.content_ids[trace.content_offsets[i] : trace.content_offsets[i + 1]].tolist())


def small(**changes: Any) -> Trace:
    columns = {
        "name": "small",
        "arrival_s": [0.0, 1.0],
        "input_len": [6, 9],
        "output_len": [2, 3],
        "content_ids": [0, 1, 0, 2],
        "content_offsets": [0, 2, 4],
        "content_block_size": 4,
        "num_contents": 3,
    }
    return Trace(**{**columns, **changes})


class TestTrace:
    def test_tokens_repeat_each_content_id_and_are_cut_to_the_prompt(self) -> None:
        assert small().tokens(0).tolist() == [0, 0, 0, 0, 1, 1]

    def test_tokens_without_a_content_id_are_unique_to_their_request(self) -> None:
        trace = small(input_len=[11, 11])
        assert trace.tokens(0)[:8].tolist() == [0] * 4 + [1] * 4
        tails = [set(trace.tokens(i)[8:].tolist()) for i in range(2)]
        assert all(len(tail) == 1 for tail in tails)
        assert len(tails[0] | tails[1] | {0, 1, 2}) == 5

    def test_equal_ids_at_equal_depth_give_equal_prefixes(self) -> None:
        first, second = small().tokens(0), small().tokens(1)
        assert first[:4].tolist() == second[:4].tolist()
        assert first[4] != second[4]

    def test_outputs_are_unique_to_their_request_and_to_no_prompt(self) -> None:
        trace = small()
        outputs = [set(trace.output_tokens(i).tolist()) for i in range(2)]
        prompts = set(trace.tokens(0).tolist()) | set(trace.tokens(1).tolist())
        assert [len(trace.output_tokens(i)) for i in range(2)] == [2, 3]
        assert outputs[0].isdisjoint(outputs[1] | prompts) and outputs[1].isdisjoint(prompts)

    def test_all_tokens_are_int32(self) -> None:
        trace = small(input_len=[11, 11])
        assert {trace.tokens(0).dtype, trace.output_tokens(0).dtype} == {np.dtype(np.int32)}
        assert small().tokens(0).dtype == np.int32

    def test_lengths_only_make_prompts_that_share_nothing(self) -> None:
        trace = Trace.from_lengths([0, 1], [5, 4], [1, 2], name="mine")
        assert (trace.name, trace.content_block_size, trace.num_contents) == ("mine", 0, 0)
        assert len(trace.tokens(0)) == 5 and len(set(trace.tokens(0).tolist())) == 1
        assert set(trace.tokens(0).tolist()).isdisjoint(trace.tokens(1).tolist())

    def test_columns_have_their_declared_dtypes_and_are_read_only(self) -> None:
        trace = small()
        assert trace.arrival_s.dtype == np.float64
        assert {trace.input_len.dtype, trace.output_len.dtype, trace.content_offsets.dtype} == {
            np.dtype(np.int64)
        }
        assert trace.content_ids.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            trace.input_len[0] = 3

    def test_callers_arrays_stay_writable(self) -> None:
        lengths = np.array([5, 6])
        Trace.from_lengths([0, 1], lengths, [1, 1])
        lengths[0] = 7

    def test_head_keeps_the_beginning_and_counts_its_contents(self) -> None:
        head = small().head(1)
        assert (len(head), head.num_contents, row_of(head, 0)) == (1, 2, [0, 1])
        assert len(small().head(99)) == 2

    @pytest.mark.parametrize("limit", [0, -1, True, 1.5])
    def test_head_refuses_a_limit_that_is_no_count(self, limit: Any) -> None:
        with pytest.raises(TraceError, match="limit must be an integer of at least 1"):
            small().head(limit)

    def test_faster_divides_arrivals_and_keeps_the_rest(self) -> None:
        trace = small().faster(4)
        assert trace.arrival_s.tolist() == [0.0, 0.25]
        assert trace.tokens(1).tolist() == small().tokens(1).tolist()

    @pytest.mark.parametrize("speed", [0, -1.0, float("nan"), float("inf")])
    def test_faster_refuses_a_speed_that_is_not_positive_and_finite(self, speed: float) -> None:
        with pytest.raises(TraceError, match="speed must be"):
            small().faster(speed)

    @pytest.mark.parametrize("i", [-1, 2])
    def test_requests_out_of_range_are_refused(self, i: int) -> None:
        with pytest.raises(TraceError, match=f"request {i} is out of range: the trace has 2 requests"):
            small().tokens(i)
        with pytest.raises(TraceError, match="out of range"):
            small().output_tokens(i)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"arrival_s": [0.0]}, "columns must have one length"),
            ({"arrival_s": [1.0, 0.5]}, "must not decrease.*got 0.5"),
            ({"arrival_s": [0.0, float("nan")]}, "arrival_s is wrong at 1: got nan"),
            ({"arrival_s": [-1.0, 0.0]}, "arrival_s is wrong at 0: got -1.0"),
            ({"arrival_s": [[0.0, 1.0]]}, "arrival_s must have one dimension, got 2"),
            ({"arrival_s": ["a", "b"]}, "arrival_s must hold float64 values"),
            ({"input_len": [6, 0]}, "input_len is wrong at 1: got 0"),
            ({"input_len": [6, 9.0]}, "input_len must hold int64 values, got float64"),
            ({"input_len": [6, 2**31]}, "input_len is wrong at 1: got 2147483648"),
            ({"input_len": [6, 13]}, "contradicts the number of ids. is wrong at 1: got 13"),
            ({"input_len": [6, 3]}, "contradicts the number of ids. is wrong at 1: got 3"),
            ({"output_len": [0, 3]}, "output_len is wrong at 0: got 0"),
            ({"output_len": [True, True]}, "output_len must hold int64 values, got bool"),
            ({"content_ids": [0, 1, 0, 3]}, "content_ids is wrong at 3: got 3"),
            ({"content_ids": [0, 1, 0, -1]}, "content_ids is wrong at 3: got -1"),
            ({"content_ids": [0, 1, 0, 2**40]}, "content_ids must fit int32, got values up to 1099511627776"),
            ({"content_offsets": [0, 4]}, "content_offsets must be 3 values from 0 to 4"),
            ({"content_offsets": [0, 2, 3]}, "content_offsets must be 3 values from 0 to 4"),
            ({"content_offsets": [0, 5, 4]}, "contradicts the number of ids"),
            ({"content_block_size": 0}, "content_block_size 0 contradicts 4 content ids"),
            ({"content_block_size": -4}, "content_block_size -4 contradicts"),
            ({"num_contents": 2**31 - 3}, "need ids beyond int32"),
        ],
    )
    def test_columns_that_contradict_are_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(TraceError, match=message):
            small(**changes)

    def test_what_nobody_states_of_requests_has_its_default(self) -> None:
        trace = small()
        assert (trace.session.tolist(), trace.adapter.tolist(), trace.priority.tolist()) == (
            [-1, -1],
            [-1, -1],
            [0, 0],
        )
        assert np.isnan(trace.think_s).all() and np.isinf(trace.deadline_s).all()
        assert trace.session.dtype == trace.adapter.dtype == np.int32 and trace.priority.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            trace.priority[0] = 1

    def test_head_and_faster_keep_what_is_stated_of_requests(self) -> None:
        stated: dict[str, Any] = {
            "session": [4, 4],
            "think_s": [np.nan, 2.0],
            "deadline_s": [1.0, 3.0],
            "priority": [7, -7],
            "adapter": [1, 0],
        }
        trace = small(**stated, adapter_names=("a", "b"), notes=("as told",))
        for other in (trace.head(2), trace.faster(2.0)):
            for name, values in stated.items():
                assert np.array_equal(getattr(other, name), values, equal_nan=True), name
            assert (other.adapter_names, other.notes) == (("a", "b"), ("as told",))
        assert trace.head(1).priority.tolist() == [7]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"session": [0]}, "columns must have one length"),
            ({"session": [0, -2]}, "session is wrong at 1: got -2"),
            ({"think_s": [np.nan, 1.0]}, "think_s .without a session. is wrong at 1"),
            ({"think_s": [np.nan, -1.0], "session": [0, 0]}, "think_s is wrong at 1: got -1.0"),
            ({"deadline_s": [1.0, np.nan]}, "deadline_s is wrong at 1: got nan"),
            ({"adapter": [0, -1]}, "adapter is wrong at 0: got 0"),
            ({"priority": [0.5, 1.0]}, "priority must hold int64 values, got float64"),
        ],
    )
    def test_statements_about_requests_that_contradict_are_refused(
        self, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(TraceError, match=message):
            small(**changes)

    def test_a_trace_without_requests_is_refused(self) -> None:
        with pytest.raises(TraceError, match="at least one request"):
            Trace.from_lengths([], [], [])


class TestReading:
    def test_a_file_becomes_columns_in_its_own_order(self, tmp_path: Path) -> None:
        path = write(tmp_path, line(), line(timestamp=1500, input_length=512, hash_ids=[46], session_id="x"))
        trace = read_mooncake(path)
        assert (trace.name, len(trace), trace.content_block_size) == ("demo", 2, 512)
        assert trace.arrival_s.tolist() == [0.0, 1.5]
        assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([1100, 512], [7, 7])
        assert (row_of(trace, 0), row_of(trace, 1), trace.num_contents) == ([0, 1, 2], [0], 3)

    def test_arrivals_count_from_the_first_request(self, tmp_path: Path) -> None:
        path = write(tmp_path, line(timestamp=1_700_000_000_000), line(timestamp=1_700_000_000_250.5))
        assert read_mooncake(path).arrival_s.tolist() == [0.0, 0.2505]

    def test_ids_of_any_64_bits_are_renumbered_by_appearance(self, tmp_path: Path) -> None:
        path = write(tmp_path, line(hash_ids=[2**64 - 1, -(2**63), 5]), line(hash_ids=[2**64 - 1, 5, -1]))
        trace = read_mooncake(path)
        assert (row_of(trace, 0), row_of(trace, 1), trace.num_contents) == ([0, 1, 2], [0, 2, 3], 4)

    def test_ids_may_cover_full_blocks_only(self, tmp_path: Path) -> None:
        trace = read_mooncake(write(tmp_path, line(hash_ids=[1, 2]), line(input_length=3, hash_ids=[])))
        assert [len(trace.tokens(0)), len(trace.tokens(1))] == [1100, 3]

    @pytest.mark.parametrize("ids", [[1], [1, 2, 3, 4], []])
    def test_another_number_of_ids_is_an_error_with_the_numbers(self, tmp_path: Path, ids: list[int]) -> None:
        path = write(tmp_path, line(), line(hash_ids=ids))
        wanted = (
            f"line 2: hash_ids has {len(ids)} ids for input_length 1100, but blocks of 512 tokens make 2 or 3"
        )
        with pytest.raises(TraceError, match=wanted):
            read_mooncake(path)

    def test_block_size_is_told_or_inferred(self, tmp_path: Path) -> None:
        large, agent = line(), line(input_length=50, hash_ids=[1, 2, 3])
        assert read_mooncake(write(tmp_path, large), block_size=None).content_block_size == 512
        assert read_mooncake(write(tmp_path, agent), block_size=None).content_block_size == 16
        assert read_mooncake(write(tmp_path, agent), block_size=16).content_block_size == 16
        with pytest.raises(
            TraceError, match=r"line 2: hash_ids has 3 ids .* blocks of 512 tokens make 0 or 1"
        ):
            read_mooncake(write(tmp_path, large, agent), block_size=None)
        with pytest.raises(TraceError, match="512 tokens make 0 or 1; blocks of 16 tokens make 3 or 4"):
            read_mooncake(write(tmp_path, line(input_length=50, hash_ids=[1, 2])), block_size=None)

    def test_a_block_size_that_was_only_guessed_is_asked_for(self, tmp_path: Path) -> None:
        """Blocks of 32: the message says how to state it; whoever stated one is not told to."""
        path = write(tmp_path, line(input_length=64, hash_ids=[1, 2]))
        with pytest.raises(TraceError, match=r"16 tokens make 4; state the right .*--trace-block-size"):
            read_mooncake(path, block_size=None)
        assert read_mooncake(path, block_size=32).content_block_size == 32
        with pytest.raises(TraceError) as stated:
            read_mooncake(path, block_size=16)
        assert "--trace-block-size" not in str(stated.value)

    @pytest.mark.parametrize("option", ["block_size", "limit"])
    @pytest.mark.parametrize("value", [0, -1, True, 512.0])
    def test_options_that_are_no_counts_are_refused(self, tmp_path: Path, option: str, value: Any) -> None:
        with pytest.raises(TraceError, match=f"{option} must be an integer of at least 1"):
            read_mooncake(write(tmp_path, line()), **{option: value})

    def test_limit_reads_the_head_and_nothing_behind_it(self, tmp_path: Path) -> None:
        path = write(tmp_path, line(), line(timestamp=10, hash_ids=[46, 9, 10]), "damaged")
        limited = read_mooncake(path, limit=1)
        assert (len(limited), limited.num_contents) == (1, 3)
        assert len(read_mooncake(path, limit=2)) == 2

    @pytest.mark.parametrize("name", ["demo.jsonl", "demo.jsonl.gz", "demo"])
    def test_gzip_is_told_by_its_content(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_bytes(gzip.compress((line() + "\n").encode()))
        trace = read_mooncake(path)
        assert (trace.name, len(trace)) == ("demo", 1)

    def test_the_last_newline_may_be_missing_and_blank_lines_may_end_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "demo.jsonl"
        path.write_text(line())
        assert len(read_mooncake(path)) == 1
        path.write_text(line() + "\r\n" + line() + "\n\n  \n")
        assert len(read_mooncake(path)) == 2

    def test_progress_ends_at_the_files_size(self, tmp_path: Path) -> None:
        calls: list[tuple[int, int]] = []
        path = write(tmp_path, *[line()] * 600)
        read_mooncake(path, progress=lambda done, total: calls.append((done, total)))
        size = path.stat().st_size
        assert len(calls) == 3 and calls[-1] == (size, size) and calls == sorted(calls)

    def test_an_error_of_the_progress_callback_passes_through(self, tmp_path: Path) -> None:
        def broken(done: int, total: int) -> None:
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            read_mooncake(write(tmp_path, line()), progress=broken)


class TestDamage:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("timestamp", True, "timestamp must be milliseconds from 0 to 2\\*\\*53, got True"),
            ("timestamp", "0", "timestamp must be .* got '0'"),
            ("timestamp", -1, "timestamp must be .* got -1"),
            ("timestamp", float("nan"), "timestamp must be .* got nan"),
            ("timestamp", float("inf"), "timestamp must be .* got inf"),
            ("timestamp", 10**400, "timestamp must be"),
            ("timestamp", None, "timestamp must be .* got None"),
            ("input_length", 0, "input_length must be an integer from 1 to .* got 0"),
            ("input_length", 1100.0, "input_length must be .* got 1100.0"),
            ("input_length", True, "input_length must be .* got True"),
            ("input_length", 2**31, "input_length must be .* got 2147483648"),
            ("output_length", -3, "output_length must be .* got -3"),
            ("output_length", "7", "output_length must be .* got '7'"),
            ("output_length", [7], "output_length must be .* got \\[7\\]"),
            ("hash_ids", None, "hash_ids must be a list of integers, got None"),
            ("hash_ids", {"0": 1}, "hash_ids must be a list"),
            ("hash_ids", [1, 2.0, 3], "hash_ids\\[1\\] must be an integer of 64 bits, got 2.0"),
            ("hash_ids", [1, 2, True], "hash_ids\\[2\\] must be .* got True"),
            ("hash_ids", [1, "2", 3], "hash_ids\\[1\\] must be .* got '2'"),
            ("hash_ids", [2**64, 2, 3], "hash_ids\\[0\\] must be .* got 18446744073709551616"),
            ("hash_ids", [1, 2, -(2**63) - 1], "hash_ids\\[2\\] must be"),
        ],
    )
    def test_a_wrong_value_is_named_with_file_and_line(
        self, tmp_path: Path, field: str, value: Any, message: str
    ) -> None:
        path = write(tmp_path, line(), line(**{field: value}))
        with pytest.raises(TraceError, match=f"{re.escape(str(path))}, line 2: {message}"):
            read_mooncake(path)

    @pytest.mark.parametrize("field", list(ROW))
    def test_a_missing_field_is_named(self, tmp_path: Path, field: str) -> None:
        row = {key: value for key, value in ROW.items() if key != field}
        with pytest.raises(TraceError, match=f"line 1: {field} is missing"):
            read_mooncake(write(tmp_path, json.dumps(row)))

    def test_a_long_value_is_shortened(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError) as error:
            read_mooncake(write(tmp_path, line(output_length="7" * 10_000)))
        assert len(str(error.value)) < 300 + len(str(tmp_path))

    @pytest.mark.parametrize(
        "text",
        [
            "[1, 2]",
            "3",
            "null",
            '"text"',
            "{",
            "{'timestamp': 0}",
            line() + line(),
            "[" * 100_000,
            "1" * 5000,
        ],
    )
    def test_a_line_that_is_no_json_object_is_an_error(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(TraceError, match=r"line 2: (not JSON|must be a JSON object)"):
            read_mooncake(write(tmp_path, line(), text))

    def test_a_line_that_is_no_utf8_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "demo.jsonl"
        path.write_bytes(line().encode() + b"\n" + line().encode("utf-16"))
        with pytest.raises(TraceError, match=r"line 2: not UTF-8 text: .* at byte 0"):
            read_mooncake(path)

    def test_decreasing_timestamps_are_an_error(self, tmp_path: Path) -> None:
        path = write(tmp_path, line(timestamp=3000), line(timestamp=3000), line(timestamp=2999))
        with pytest.raises(TraceError, match="line 3: timestamp decreases from 3000 to 2999 ms"):
            read_mooncake(path)

    def test_a_blank_line_inside_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="line 2: blank line inside the trace"):
            read_mooncake(write(tmp_path, line(), "", "", line()))

    def test_a_missing_file_and_a_directory_are_errors(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="absent: no such file"):
            read_mooncake(tmp_path / "absent")
        with pytest.raises(TraceError, match="cannot be opened: "):
            read_mooncake(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"\n\n", gzip.compress(b"")])
    def test_a_file_without_requests_is_an_error(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "demo.jsonl"
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"demo.jsonl: the file holds no requests"):
            read_mooncake(path)

    def test_gzip_that_is_cut_off_or_damaged_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "demo.jsonl.gz"
        whole = gzip.compress("".join(line(session_id=i) + "\n" for i in range(5000)).encode())
        damaged = whole[:600] + bytes(byte ^ 255 for byte in whole[600:700]) + whole[700:]
        for content in (whole[:15], whole[: len(whole) // 2], whole[:-4], damaged, whole + b"trailing"):
            path.write_bytes(content)
            with pytest.raises(TraceError, match=r"demo.jsonl.gz, line \d+: (cannot be read|not JSON)"):
                read_mooncake(path)


class TestZstd:
    MAGIC = b"\x28\xb5\x2f\xfd"

    def test_a_missing_package_is_named_with_its_remedy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "zstandard", None)
        path = tmp_path / "demo.jsonl.zst"
        path.write_bytes(self.MAGIC + b"anything")
        with pytest.raises(TraceError, match=r'pip install "pagedkv\[zstd\]"'):
            read_mooncake(path)

    def test_zstd_is_told_by_its_content_and_may_have_several_frames(self, tmp_path: Path) -> None:
        zstandard = pytest.importorskip("zstandard", reason="the extra pagedkv[zstd] is not installed")
        text = "".join(line(session_id=i) + "\n" for i in range(5000)).encode()
        path = tmp_path / "demo.jsonl"
        compress = zstandard.ZstdCompressor().compress
        path.write_bytes(compress(text[:100_001]) + compress(text[100_001:].rstrip()))
        assert len(read_mooncake(path)) == 5000

    def test_zstd_that_is_cut_off_or_damaged_is_an_error(self, tmp_path: Path) -> None:
        zstandard = pytest.importorskip("zstandard", reason="the extra pagedkv[zstd] is not installed")
        whole = zstandard.ZstdCompressor().compress((line() + "\n").encode() * 50)
        path = tmp_path / "demo.jsonl.zst"
        for content in (whole[:6], whole[:-1], whole + b"trailing", self.MAGIC + b"\xff" * 50):
            path.write_bytes(content)
            with pytest.raises(TraceError, match=r"demo.jsonl.zst, line \d+: cannot be read"):
                read_mooncake(path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@st.composite
def mutated_lines(draw: st.DrawFn) -> bytes:
    """A few good lines, then perhaps one field replaced, one byte changed, or the end cut off."""
    rows = []
    for i in range(draw(st.integers(1, 3))):
        input_len = draw(st.integers(1, 3000))
        ids = draw(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=7, max_size=7))
        ids = ids[: input_len // 512 + draw(st.integers(0, 1))]
        rows.append({**ROW, "timestamp": 3000 * i, "input_length": input_len, "hash_ids": ids})
    if draw(st.booleans()):
        row = draw(st.sampled_from(rows))
        row[draw(st.sampled_from(list(ROW)))] = draw(JSON_VALUES)
    content = bytearray("".join(json.dumps(row) + "\n" for row in rows).encode())
    if draw(st.booleans()):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        del content[draw(st.integers(1, len(content))) :]
    return bytes(content)


def independent_rows(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(text) for text in content.decode().rstrip().split("\n")]


@settings(max_examples=500, deadline=None)
@given(content=mutated_lines())
def test_mutated_traces_are_read_right_or_refused_with_the_line(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "demo.jsonl")
        path.write_bytes(content)
        try:
            trace = read_mooncake(path)
        except TraceError as error:
            assert re.search(r"demo.jsonl(, line \d+)?: ", str(error))
            return
    rows = independent_rows(content)
    assert trace.input_len.tolist() == [row["input_length"] for row in rows]
    assert trace.output_len.tolist() == [row["output_length"] for row in rows]
    assert trace.arrival_s.tolist() == [(row["timestamp"] - rows[0]["timestamp"]) / 1000 for row in rows]
    seen: dict[int, int] = {}
    for i, row in enumerate(rows):
        assert row_of(trace, i) == [seen.setdefault(content_id, len(seen)) for content_id in row["hash_ids"]]
        assert len(trace.tokens(i)) == row["input_length"]


@pytest.mark.skipif("PAGEDKV_DATA" not in os.environ, reason="PAGEDKV_DATA is not set: no trace files")
class TestRealFiles:
    def test_the_conversation_trace_has_its_published_totals(self) -> None:
        path = Path(os.environ["PAGEDKV_DATA"], "traces/mooncake/conversation_trace.jsonl.gz")
        trace = read_mooncake(path, block_size=None)
        assert (len(trace), trace.content_block_size, trace.num_contents) == (12031, 512, 182790)
        assert (int(trace.input_len.sum()), int(trace.output_len.sum())) == (144793823, 4122048)
        assert (len(trace.content_ids), int(np.diff(trace.content_offsets).max())) == (288500, 247)
        head, limited = trace.head(1000), read_mooncake(path, limit=1000)
        assert len(head.content_ids) == 27305 and head.num_contents == limited.num_contents == 21514
        assert head.content_ids.tobytes() == limited.content_ids.tobytes()

    def test_the_agent_trace_has_blocks_of_16_and_full_blocks_only(self) -> None:
        path = Path(os.environ["PAGEDKV_DATA"], "traces/lmcache_agent/miniswe_blk16.jsonl.gz")
        trace = read_mooncake(path, block_size=None)
        assert trace.content_block_size == 16
        assert np.array_equal(np.diff(trace.content_offsets), trace.input_len // 16)
        with pytest.raises(TraceError, match="blocks of 512"):
            read_mooncake(path)
