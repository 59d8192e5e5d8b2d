"""Damaged files of every format are read right, or refused with file and line: no crash, no silent skip."""

import csv
import io
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.sim.readers import FORMATS, Row, open_trace
from pagedkv.sim.readers.reading import trace_of
from pagedkv.sim.trace import TraceError

Expected = list[tuple[int, int]]  # prompt and output tokens of each request

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(0, 40)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**400, -1, 0, "7", "NaN", 1e308]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
CSV_VALUES = st.text(max_size=8) | st.sampled_from(
    [
        "",
        "null",
        "nan",
        "inf",
        "-1",
        "0",
        "1e400",
        "1_0",
        "9" * 40,
        "0x10",
        '"',
        "1,2",
        "\uff17",
        "2023-02-30 00:00:00",
    ]
)

SAMPLES: dict[str, list[str]] = {
    "mooncake": [
        json.dumps(
            {"timestamp": 3000 * i, "input_length": 500 + 300 * i, "output_length": 9 + i, "hash_ids": ids}
        )
        for i, ids in enumerate(([0], [0, 14], [0, 14, 2**63]))
    ],
    "bailian": [
        json.dumps(
            {
                "chat_id": 10 + i,
                "parent_chat_id": 9 + i if i else -1,
                "timestamp": 61.25 + i,
                "type": "text",
                "input_length": 16 * i + 20,
                "output_length": 5,
                "turn": i + 1,
                "hash_ids": list(range(i + 2)),
            }
        )
        for i in range(3)
    ],
    "kv-cache-tester": [
        json.dumps(
            {
                "block_size": 64,
                "requests": [
                    {"t": 0.0, "type": "n", "in": 130 + i, "out": 7, "hash_runs": [[0, 2]]},
                    {"t": 1.5, "type": "subagent"},
                    {"t": 40.5, "type": "s", "in": 200, "out": 8 + i, "hash_runs": [[0, 2], [9, 1]]},
                ],
            }
        )
        for i in range(2)
    ],
    "azure": [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,3180,8",
        "2024-05-10 00:00:00.009930+00:00,110,27",
    ],
    "burstgpt": [
        "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,s1,ChatGPT,472,18,490,Conversation log",
        "45.5,,GPT-4,1087,230,1317,API log",
        "45.5,s1,GPT-4,417,276,693,API log",
    ],
    "vidur": [
        "arrived_at,num_prefill_tokens,num_decode_tokens,session_id,block_hash_ids",
        "0.0,32,30,7,11|22",
        "0.5,33,5,7,11|22",
        '1.5,48,6,8,"[11, 22, 33]"',
    ],
    "sharegpt": [
        json.dumps(
            {
                "id": f"c{i}",
                "conversations": [
                    {"from": "human", "value": "tell me " * (9 + i)},
                    {"from": "gpt", "value": "no" * (1 + i)},
                ],
            }
        )
        for i in range(3)
    ],
    "vllm-bench": [
        json.dumps({"prompt": "word " * 20, "output_tokens": 7}),
        json.dumps({"prompt": list(range(20)), "output_tokens": 8}),
        json.dumps({"prompt": "word"}),
    ],
    "kv-events": [
        json.dumps(
            {
                "ts": 1.0 + i,
                "events": [
                    {
                        "type": "BlockStored",
                        "block_hashes": [f"{i}a", f"{i}b"],
                        "parent_block_hash": None,
                        "token_ids": [1, 2, 3, 4],
                        "block_size": 2,
                        "lora_id": None,
                        "medium": "GPU",
                    },
                    {"type": "BlockRemoved", "block_hashes": [f"{i}b"], "medium": "GPU"},
                ],
            }
        )
        for i in range(3)
    ],
    "native": [
        json.dumps({"format": "pagedkv-trace", "version": 1, "block_size": 4}),
        json.dumps(
            {
                "arrival_s": 0.5,
                "input_len": 10,
                "output_len": 3,
                "block_hashes": ["a", 2],
                "session": 1,
                "priority": 2,
                "deadline_s": 1.5,
                "adapter": "x",
            }
        ),
        json.dumps(
            {"input_len": 12, "output_len": 1, "block_hashes": ["a", 2, 3], "session": 1, "think_s": 1}
        ),
        json.dumps({"arrival_s": 7, "input_len": 3, "output_len": 4, "block_hashes": []}),
    ],
}


def parsed(content: bytes) -> list[Any]:
    text = content.decode("utf-8-sig")
    return [json.loads(line) for line in text.rstrip().split("\n")]


def by_names(input_name: str, output_name: str) -> Callable[[bytes], Expected]:
    return lambda content: [(row[input_name], row[output_name]) for row in parsed(content)]


def by_columns(input_name: str, output_name: str) -> Callable[[bytes], Expected]:
    def read(content: bytes) -> Expected:
        lines = csv.DictReader(io.StringIO(content.decode("utf-8-sig").rstrip()), skipinitialspace=True)
        lines.fieldnames = [name.strip() for name in lines.fieldnames or ()]
        return [(int(float(row[input_name])), int(float(row[output_name]))) for row in lines]

    return read


def quarter(text: str) -> int:
    return max(1, (len(text.encode("utf-8", "surrogatepass")) + 3) // 4)


def of_conversations(content: bytes) -> Expected:
    found = []
    for talk in parsed(content):
        before = ""
        for message in talk.get("conversations", talk.get("conversation", talk.get("messages"))):
            said = message.get("value", message.get("content"))
            who = message.get("from", message.get("role")).lower()
            if who in ("gpt", "assistant", "chatgpt", "bing", "bard", "claude", "model") and before:
                found.append((quarter(before), quarter(said)))
            before += said
    return found


def of_prompts(content: bytes) -> Expected:
    return [
        (
            quarter(row["prompt"]) if isinstance(row["prompt"], str) else len(row["prompt"]),
            256 if row.get("output_tokens") is None else row["output_tokens"],
        )
        for row in parsed(content)
    ]


def of_events(content: bytes) -> Expected:
    """Prompts, by following parents; events that go on are told by what is open."""
    depth: dict[Any, int] = {}
    found: list[tuple[int, int]] = []
    last: Any = None
    for batch in parsed(content):
        events = batch["events"] if isinstance(batch, dict) and "events" in batch else [batch]
        if isinstance(batch, list):
            events = batch[1]
        for event in events:
            if event.get("medium") not in (None, "GPU") or event["type"] != "BlockStored":
                continue
            parent = event.get("parent_block_hash")
            total = (depth[parent] if parent is not None else 0) + len(event["block_hashes"])
            adapter = event.get("lora_name", event.get("lora_id"))
            if parent is not None and last == (parent, adapter):
                found.pop()
            found.append((total * event["block_size"], 1))
            depth.update(
                {h: total - len(event["block_hashes"]) + k + 1 for k, h in enumerate(event["block_hashes"])}
            )
            last = (event["block_hashes"][-1], adapter)
    return found


def of_sessions(content: bytes) -> Expected:
    """By time, then session, then turn."""
    calls = [
        (30_000 * session + round(1000 * request["t"]), session, turn, request["in"], request["out"])
        for session, record in enumerate(parsed(content))
        for turn, request in enumerate(record["requests"])
        if request.get("type") != "subagent"
    ]
    return [call[3:] for call in sorted(calls)]


def of_native(content: bytes) -> Expected:
    return [
        (row["input_len"] if row.get("input_len") is not None else len(row["token_ids"]), row["output_len"])
        for row in parsed(content)[1:]
    ]


EXPECTED: dict[str, Callable[[bytes], Expected]] = {
    "mooncake": by_names("input_length", "output_length"),
    "bailian": by_names("input_length", "output_length"),
    "kv-cache-tester": of_sessions,
    "azure": by_columns("ContextTokens", "GeneratedTokens"),
    "burstgpt": by_columns("Request tokens", "Response tokens"),
    "vidur": by_columns("num_prefill_tokens", "num_decode_tokens"),
    "sharegpt": of_conversations,
    "vllm-bench": of_prompts,
    "kv-events": of_events,
    "native": of_native,
}


def mutated_field(draw: st.DrawFn, line: str) -> str:
    """One value replaced, removed, or swapped with another, wherever in the line it stands."""
    if not line.startswith("{"):
        fields = line.split(",")
        a, b = (draw(st.integers(0, len(fields) - 1)) for _ in range(2))
        how = draw(st.sampled_from(["replace", "remove", "swap"]))
        if how == "replace":
            fields[a] = draw(CSV_VALUES)
        elif how == "remove":
            del fields[a]
        else:
            fields[a], fields[b] = fields[b], fields[a]
        return ",".join(fields)
    value: Any = json.loads(line)
    holder: Any = value
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return line
        key = draw(st.sampled_from(keys))
        if not isinstance(holder[key], (dict, list)) or draw(st.booleans()):
            break
        holder = holder[key]
    how = draw(st.sampled_from(["replace", "remove", "swap", "rename"]))
    if how == "replace":
        holder[key] = draw(JSON_VALUES)
    elif how == "remove":
        del holder[key]
    elif how == "swap":
        other = draw(st.sampled_from(keys))
        holder[key], holder[other] = holder[other], holder[key]
    elif isinstance(holder, dict):
        holder[draw(st.text(max_size=4))] = holder.pop(key)
    return json.dumps(value)


@st.composite
def damaged(draw: st.DrawFn, samples: list[str]) -> bytes:
    """A few lines, some of them mutated, out of order, repeated or missing; then perhaps bytes changed."""
    lines = list(samples)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(["field", "field", "field", "delete", "repeat", "move", "blank"]))
        if how == "field":
            lines[at] = mutated_field(draw, lines[at])
        elif how == "delete" and len(lines) > 1:
            del lines[at]
        elif how == "repeat":
            lines.insert(at, lines[at])
        elif how == "move":
            lines.append(lines.pop(at))
        elif how == "blank":
            lines.insert(at, "")
    content = bytearray("".join(line + "\n" for line in lines).encode())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        how = draw(st.sampled_from(["byte", "cut", "hole"]))
        if len(content) < 2:
            break
        at = draw(st.integers(0, len(content) - 1))
        if how == "byte":
            content[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del content[at:]
        else:
            del content[at : at + draw(st.integers(1, 9))]
    return bytes(content)


def read(content: bytes, format: str | None, name: str = "demo.trace") -> list[Row] | str:
    """The requests, or the message of the refusal, without the folder's name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        try:
            reading = open_trace(path, format=format)
            rows = list(reading)
            if rows:  # as arrays, too
                trace = trace_of(reading)
                assert trace.input_len.tolist() == [row.input_len for row in rows]
            return rows
        except TraceError as error:
            return str(error).removeprefix(str(path))


def check(content: bytes, format: str, found: list[Row] | str) -> None:
    if isinstance(found, str):
        assert re.match(r"(, (line|row) \d+(, [a-z]+ \d+)?)?: .", found), found
        assert re.match(r", (line|row) \d+", found) or "the file holds no requests" in found, found
        return
    content = content.removeprefix(b"\xef\xbb\xbf")
    expected = EXPECTED[format](content) if content.strip() else []
    assert [(row.input_len, row.output_len) for row in found] == expected
    arrivals = [row.arrival_s for row in found if row.arrival_s is not None]
    assert arrivals == sorted(arrivals) and (not arrivals or arrivals[0] == 0.0)
    for row in found:
        full = row.input_len // row.block_size if row.block_size else 0
        assert full <= len(row.contents) <= full + 1


@pytest.mark.parametrize("format", FORMATS)
def test_the_samples_themselves_are_read_right(format: str) -> None:
    content = "".join(line + "\n" for line in SAMPLES[format]).encode()
    found = read(content, None)
    check(content, format, found)
    assert len(found) >= 3 and not isinstance(found, str)


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files_are_read_right_or_refused(format: str) -> None:
    @settings(max_examples=250, deadline=None)
    @given(content=damaged(SAMPLES[format]))
    def fuzz(content: bytes) -> None:
        check(content, format, read(content, format))

    fuzz()


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_damaged_files_of_an_unstated_format_are_read_or_refused(data: st.DataObject) -> None:
    """Whatever the beginning looks like; a file may then be of another format than it was."""
    content = data.draw(damaged(SAMPLES[data.draw(st.sampled_from(list(FORMATS)))]))
    found = read(content, None)
    if isinstance(found, str):
        assert re.match(r"(, (line|row) \d+(, [a-z]+ \d+)?)?: .", found), found


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=80), format=st.sampled_from([None, *FORMATS]))
def test_bytes_that_are_no_trace_are_refused(content: bytes, format: str | None) -> None:
    found = read(content, format)
    assert isinstance(found, str) or not found


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_parquet_file_is_read_right_or_refused(data: st.DataObject) -> None:
    pytest.importorskip("pyarrow", reason="the extra pagedkv[parquet] is not installed")
    from pagedkv.sim.readers.writing import write_trace

    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder, "plain"), Path(folder, "packed.parquet")
        plain.write_text("".join(line + "\n" for line in SAMPLES["native"]).replace('"a"', "1"))
        write_trace(open_trace(plain), packed)
        content, whole = bytearray(packed.read_bytes()), [row[1:] for row in open_trace(packed)]
    pages = content.find(b"ARROW:schema")  # before it: the values, and their checksums
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, pages - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(5, len(content)))]
    found = read(bytes(content), "native", "demo.parquet")
    if isinstance(found, str):
        assert re.match(r", (row|line) \d+: .", found), found
    else:
        assert [row[1:] for row in found] == whole


@pytest.mark.skipif("PAGEDKV_DATA" not in os.environ, reason="PAGEDKV_DATA is not set: no trace files")
@pytest.mark.parametrize(
    ("format", "name", "lines"),
    [
        ("mooncake", "mooncake/conversation_trace.jsonl.gz", 4),
        ("mooncake", "lmcache_agent/miniswe_blk16.jsonl.gz", 2),
        ("azure", "azure2023/AzureLLMInferenceTrace_code.csv.gz", 5),
        ("vidur", "lengths/sharegpt_8k_lengths.csv.gz", 5),
    ],
)
def test_damaged_real_lines_are_read_right_or_refused(format: str, name: str, lines: int) -> None:
    import gzip

    with gzip.open(Path(os.environ["PAGEDKV_DATA"], "traces", name), "rt") as file:
        samples = [next(file).rstrip("\r\n") for _ in range(lines)]

    @settings(max_examples=150, deadline=None)
    @given(content=damaged(samples))
    def fuzz(content: bytes) -> None:
        check(content, format, read(content, format))

    fuzz()
