"""One worked example per format, made by hand, and what real files are known to hold."""

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from pagedkv.errors import PagedKVError
from pagedkv.events import BlocksRemoved, BlocksStored, Event
from pagedkv.sim.readers import FORMATS, ReadOptions, Row, open_trace, read_trace
from pagedkv.sim.readers.info import describe
from pagedkv.sim.readers.kv_events import event_line
from pagedkv.sim.trace import TraceError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*texts: str, name: str = "demo") -> Path:
        path = tmp_path / name
        path.write_text("".join(text + "\n" for text in texts))
        return path

    return lines


def rows(path: Path, format: str | None = None, **options: Any) -> list[Row]:
    return list(open_trace(path, format=format, options=ReadOptions(**options)))


def lengths(path: Path, **options: Any) -> list[tuple[float | None, int, int]]:
    return [(row.arrival_s, row.input_len, row.output_len) for row in rows(path, **options)]


def format_of(path: Path) -> str:
    return open_trace(path).format.name


def refusal(path: Path, format: str | None = None, **options: Any) -> str:
    with pytest.raises(TraceError) as error:
        rows(path, format, **options)
    return str(error.value)


class TestMooncake:
    LINES = (
        '{"timestamp": 100, "input_length": 1100, "output_length": 7, "hash_ids": [46, 47, 48]}',
        '{"timestamp": 1600, "input_length": 512, "output_length": 1, "hash_ids": [46], "session_id": "x"}',
    )

    def test_it_is_recognised_and_read(self, write: Write) -> None:
        path = write(*self.LINES)
        assert format_of(path) == "mooncake"
        first, second = rows(path)
        assert first[1:7] == (0.0, 1100, 7, [46, 47, 48], 512, None)
        assert second[1:7] == (1.5, 512, 1, [46], 512, "x")

    def test_a_session_that_is_no_name_is_refused(self, write: Write) -> None:
        path = write(self.LINES[1].replace('"x"', "[3]"))
        assert "line 1: session_id must be an integer of 64 bits or text up to 200, got [3]" in refusal(path)

    def test_a_block_size_is_settled_by_the_first_lines_that_tell(self, write: Write) -> None:
        """A prompt without a full block agrees with both sizes, the next one does not."""
        small = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}'
        large = '{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}'
        assert [row.block_size for row in rows(write(small, large))] == [16, 16]
        assert [row.block_size for row in rows(write(small, self.LINES[0]))] == [512, 512]

    def test_a_settled_block_size_that_is_contradicted_later_is_refused(self, write: Write) -> None:
        agent = '{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}'
        message = refusal(write(agent, self.LINES[0]))
        assert "line 2: hash_ids has 3 ids for input_length 1100, but blocks of 16 tokens" in message
        assert "--trace-block-size" in message


class TestBailian:
    """Chat 7 follows chat 5, chat 8 follows 7; chat 9's parent lies before the file."""

    LINES = (
        '{"chat_id": 5, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 33, "output_length": 4, '
        '"type": "text", "turn": 1, "hash_ids": [10, 11, 12]}',
        '{"chat_id": 9, "parent_chat_id": 2, "timestamp": 61.5, "input_length": 32, "output_length": 2, '
        '"type": "search", "turn": 4, "hash_ids": [20, 21]}',
        '{"chat_id": 7, "parent_chat_id": 5, "timestamp": 63.25, "input_length": 47, "output_length": 4, '
        '"type": "text", "turn": 2, "hash_ids": [10, 11, 13]}',
        '{"chat_id": 8, "parent_chat_id": 7, "timestamp": 64.25, "input_length": 60, "output_length": 1, '
        '"type": "text", "turn": 3, "hash_ids": [10, 11, 13, 14]}',
    )

    def test_it_is_recognised_and_read(self, write: Write) -> None:
        path = write(*self.LINES)
        assert format_of(path) == "bailian"
        assert lengths(path) == [(0.0, 33, 4), (0.25, 32, 2), (2.0, 47, 4), (3.0, 60, 1)]
        assert [row.session for row in rows(path)] == [5, 2, 5, 5]
        assert {row.block_size for row in rows(path)} == {16}

    def test_its_hit_rate_is_the_one_counted_by_hand(self, write: Write) -> None:
        """Full blocks 2 + 2 + 2 + 3; hits: 10, 11 twice (13 was partial, but its id was seen)."""
        sharing = describe(open_trace(write(*self.LINES))).sharing
        assert sharing is not None
        assert (sharing.full_blocks, sharing.hit_blocks, sharing.unique_contents) == (9, 5, 7)
        assert sharing.token_hit_rate == 5 * 16 / (33 + 32 + 47 + 60)

    def test_errors_name_line_and_field(self, write: Write) -> None:
        wrong = self.LINES[2].replace('"chat_id": 7', '"chat_id": 5')
        assert "line 2: chat_id 5 occurs a second time" in refusal(write(self.LINES[0], wrong))
        wrong = self.LINES[1].replace("[20, 21]", "[20]")
        assert "line 1: hash_ids has 1 ids for 32 prompt tokens, but blocks of 16" in refusal(write(wrong))
        assert "line 2: timestamp decreases from 61.5 to 61.25 s" in refusal(
            write(self.LINES[1], self.LINES[0])
        )


def call(t: float, tokens: int, runs: list[list[int]], out: int = 1, kind: str = "n") -> dict[str, Any]:
    return {"t": t, "type": kind, "in": tokens, "out": out, "hash_runs": runs}


class TestAgentSessions:
    """Blocks of 64: the second session begins at 30 s, between the calls of the first one."""

    LINES = (
        json.dumps(
            {
                "id": "a",
                "block_size": 64,
                "hash_id_scope": "local",
                "requests": [
                    call(0.0, 130, [[0, 2]]),
                    {"t": 1.0, "type": "subagent", "requests": []},
                    call(40.0004, 200, [[0, 2], [7, 1]], kind="s"),
                ],
            }
        ),
        json.dumps({"id": "b", "block_size": 64, "requests": [call(0.0, 70, [[0, 1]], out=3)]}),
    )

    def test_sessions_are_interleaved_by_time(self, write: Write) -> None:
        path = write(*self.LINES)
        assert format_of(path) == "kv-cache-tester"
        assert lengths(path) == [(0.0, 130, 1), (30.0, 70, 3), (40.0, 200, 1)]
        assert [row.session for row in rows(path)] == [0, 1, 0]

    def test_ids_are_those_of_their_session(self, write: Write) -> None:
        """Full blocks 2 + 1 + 3; hits: the first two of the second call of session a."""
        reading = open_trace(write(*self.LINES))
        sharing = describe(reading).sharing
        assert sharing is not None
        assert (sharing.full_blocks, sharing.hit_blocks, sharing.unique_contents) == (6, 2, 4)
        assert "1 requests of sub-agents left out" in reading.notes.lines()

    def test_it_streams_and_comes_in_order(self, write: Write) -> None:
        """Sessions of 100 s overlap with three later ones; ties go to the earlier session."""
        session = {"block_size": 64, "requests": [call(t, 10, []) for t in (0.0, 30.0, 60.0, 100.0)]}
        found = rows(write(*[json.dumps(session)] * 5))
        arrivals = [row.arrival_s or 0.0 for row in found]
        assert arrivals == sorted(arrivals) and len(found) == 20
        assert [row.session for row in found if row.arrival_s == 60.0] == [0, 1, 2]

    def test_errors_name_line_request_and_field(self, write: Write) -> None:
        def wrong(**changes: Any) -> str:
            request = call(0.0, 130, [[0, 2]]) | changes
            return refusal(write(self.LINES[1], json.dumps({"block_size": 64, "requests": [request]})))

        assert "line 2, request 1: t must be seconds from 0" in wrong(t=-1)
        assert "line 2, request 1: in must be an integer" in wrong(**{"in": 0})
        assert "request 1: hash_runs[0][1] must be an integer from 1 to 3, got 1000000000" in wrong(
            hash_runs=[[0, 10**9]]
        )
        assert "request 1: hash_runs has 1 ids for 130 prompt tokens" in wrong(hash_runs=[[5, 1]])
        assert "request 1: hash_runs[0] must be [start, length], got 5" in wrong(hash_runs=[5])
        assert "line 1: requests must be a list, got 3" in refusal(
            write('{"block_size": 64, "requests": 3}'), "kv-cache-tester"
        )


class TestAzure:
    HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"

    def test_2023_has_seven_digits(self, write: Write) -> None:
        path = write(self.HEADER, "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8")
        assert format_of(path) == "azure"
        assert lengths(path) == [(0.0, 4808, 10), (0.052, 3180, 8)]
        assert open_trace(path).options.block_size is None

    def test_2024_has_offsets_and_may_lack_a_fraction(self, write: Write) -> None:
        path = write(
            self.HEADER,
            "2024-05-10 23:59:59.009930+00:00,2162,5",
            "2024-05-11 00:00:00+00:00,2399,6",
            "2024-05-11 02:00:01+02:00,1,1",
        )
        assert [arrival for arrival, _, _ in lengths(path)] == [0.0, 0.99007, 1.99007]

    def test_it_says_that_it_knows_no_content(self, write: Write) -> None:
        trace = read_trace(write(self.HEADER, "2024-05-10 00:00:00,5,1"))
        assert trace.content_block_size == 0
        assert trace.notes == ("no content: no two prompts share a prefix",)

    @pytest.mark.parametrize(
        ("line", "field"),
        [
            ("2023-13-16 18:17:03,1,1", "TIMESTAMP must be a time such as .*month must be in 1..12"),
            ("yesterday,1,1", "TIMESTAMP must be a time"),
            ("2023-11-16 18:17:03,1.5,1", "ContextTokens must be an integer from 1 to"),
            ("2023-11-16 18:17:03,1,nan", "GeneratedTokens must be"),
            ("2023-11-16 18:17:03,1", "GeneratedTokens: 2 fields, but the header has 3"),
            ("2023-11-16 18:17:03,1,1,1", "field 4: 4 fields"),
            ('2023-11-16 18:17:03,"1,1', "not CSV"),
            ("2023-11-16 18:17:03,\r,1", "not CSV: a carriage return or NUL inside the line"),
            ("2023-11-16 18:17:03,1,1\0", "not CSV: a carriage return or NUL inside the line"),
            ("2022-11-16 18:17:03,1,1", "TIMESTAMP decreases from"),
        ],
    )
    def test_errors_name_line_and_field(self, write: Write, line: str, field: str) -> None:
        path = write(self.HEADER, "2023-11-16 18:17:03,1,1", line)
        with pytest.raises(TraceError, match=f"demo, line 3: {field}"):
            rows(path)

    def test_a_header_that_lacks_a_column_is_refused(self, write: Write) -> None:
        assert "line 1: TIMESTAMP is missing in the header" in refusal(
            write("ContextTokens,GeneratedTokens", "1,1")
        )
        assert "'ContextTokens' stands twice" in refusal(write(self.HEADER + ",ContextTokens", "x"))


class TestBurstGPT:
    HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    LINES = (
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,1087,0,1087,Conversation log",
        "110.5,GPT-4,417,505,922,API log",
    )

    def test_it_is_recognised_and_read(self, write: Write) -> None:
        path = write(self.HEADER, self.LINES[0], self.LINES[2])
        assert format_of(path) == "burstgpt"
        assert lengths(path) == [(0.0, 472, 18), (105.5, 417, 505)]

    def test_failed_requests_are_refused_or_left_out_and_counted(self, write: Write) -> None:
        path = write(self.HEADER, *self.LINES)
        assert "line 3: Response tokens must be an integer from 1 to" in refusal(path)
        reading = open_trace(path, options=ReadOptions(skip_failed=True))
        assert [row.input_len for row in reading] == [472, 417]
        assert "1 requests left out, whose Response tokens is 0" in reading.notes.lines()

    def test_sessions_are_kept(self, write: Write) -> None:
        path = write(self.HEADER + ",Session ID", self.LINES[0] + ",s1", self.LINES[2] + ",")
        assert [row.session for row in rows(path)] == ["s1", None]


class TestVidur:
    def test_with_arrivals_sessions_and_blocks(self, write: Write) -> None:
        path = write(
            "arrived_at,num_prefill_tokens,num_decode_tokens,session_id,block_hash_ids",
            "1.0,32,30,7,11|22",
            '1.5,33,5,7,"[11, 22, 33]"',
        )
        assert format_of(path) == "vidur"
        assert lengths(path) == [(0.0, 32, 30), (0.5, 33, 5)]
        assert [(row.contents, row.block_size, row.session) for row in rows(path)] == [
            ([11, 22], 16, "7"),
            ([11, 22, 33], 16, "7"),
        ]

    def test_lengths_alone_have_no_arrivals(self, write: Write) -> None:
        path = write("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio", "74,918,992,0.08")
        assert lengths(path) == [(None, 74, 918)]
        info = describe(open_trace(path))
        assert info.arrivals is None and {"arrivals", "content"} <= set(info.missing)

    def test_a_total_that_is_no_sum_is_refused(self, write: Write) -> None:
        path = write("num_prefill_tokens,num_decode_tokens,num_total_tokens", "74,918,993")
        assert "line 2: num_total_tokens must be the sum of the others, 992, got '993'" in refusal(path)


class TestRealRows:
    """First rows of published files: facts of their authors, who are named with the licence."""

    def test_burstgpt_of_2023(self, write: Write) -> None:
        """BurstGPT_1.csv, HPMLL, CC BY 4.0."""
        path = write(
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "5,ChatGPT,472,18,490,Conversation log",
            "45,ChatGPT,1087,230,1317,Conversation log",
            "118,GPT-4,417,276,693,Conversation log",
        )
        assert format_of(path) == "burstgpt"
        assert lengths(path) == [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]

    def test_burstgpt_with_sessions(self, write: Write) -> None:
        """BurstGPT_3.csv, HPMLL, CC BY 4.0: two columns more, in the middle, and times far from zero."""
        path = write(
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log",
            "19440161.0,d5983bf9-4b48-497b-892b-a58995247443,2,ChatGPT,36,29,65,Conversation log",
            "19440192.0,a5c69b35-4fbc-45e9-955e-18715e376d74,8,GPT-4,1779,123,1902,Conversation log",
        )
        assert format_of(path) == "burstgpt"
        assert lengths(path) == [(0.0, 906, 446), (51.0, 36, 29), (82.0, 1779, 123)]
        assert rows(path)[1].session == "d5983bf9-4b48-497b-892b-a58995247443"

    def test_azure_of_2024(self, write: Write) -> None:
        """AzureLLMInferenceTrace_code_1week.csv, Microsoft, CC BY 4.0."""
        path = write(
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2024-05-10 00:00:00.009930+00:00,2162,5",
            "2024-05-10 00:00:00.017335+00:00,2399,6",
            "2024-05-10 00:00:00.022314+00:00,76,15",
        )
        assert format_of(path) == "azure"
        assert lengths(path) == [(0.0, 2162, 5), (0.007405, 2399, 6), (0.012384, 76, 15)]

    def test_bailian_thinking(self, write: Write) -> None:
        """qwen_thinking_blksz_16.jsonl, Alibaba, Apache-2.0: 31 full blocks and a partial one have an id."""
        path = write(
            '{"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 502, '
            f'"output_length": 1494, "type": "thinking", "turn": 1, "hash_ids": {list(range(32))}}}'
        )
        assert format_of(path) == "bailian"
        assert lengths(path) == [(0.0, 502, 1494)]
        assert read_trace(path).tokens(0)[[0, 495, 496, 501]].tolist() == [0, 30, 31, 31]


class TestShareGPT:
    """Four bytes a token: "Hello, world" has 3, "Hi." one; 64 bytes are a block."""

    TALK: ClassVar[dict[str, Any]] = {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "Hello, world"},
            {"from": "gpt", "value": "Hi."},
            {"from": "human", "value": "x" * 60},
            {"from": "gpt", "value": "y" * 8},
        ],
    }

    def test_each_answer_is_a_request_after_all_text_before_it(self, write: Write) -> None:
        path = write(json.dumps([self.TALK], indent=1))
        assert format_of(path) == "sharegpt"
        assert lengths(path) == [(None, 3, 1), (None, 19, 2)]  # 12 bytes; 12 + 3 + 60 = 75 bytes
        assert [(row.session, row.think_s, len(row.contents)) for row in rows(path)] == [
            (0, None, 0),
            (0, 0.0, 1),
        ]

    def test_lines_and_other_names_mean_the_same(self, write: Write) -> None:
        renamed = {
            "messages": [
                {"role": "assistant" if m["from"] == "gpt" else "user", "content": m["value"]}
                for m in self.TALK["conversations"]
            ]
        }
        path = write(json.dumps(renamed), json.dumps(self.TALK))
        assert format_of(path) == "sharegpt"
        found = rows(path)
        assert [row[1:5] for row in found[:2]] == [row[1:5] for row in found[2:]]
        assert found[1].contents == found[3].contents  # equal texts share

    def test_what_makes_no_request_is_counted(self, write: Write) -> None:
        silent = {"conversations": [{"from": "human", "value": "anyone?"}]}
        early = {"conversations": [{"from": "gpt", "value": "first!"}, {"from": "human", "value": "?"}]}
        reading = open_trace(write(json.dumps([silent, early, self.TALK])))
        assert len(list(reading)) == 2
        assert "2 conversations without a request" in reading.notes.lines()
        assert "1 answers without a prompt made no request" in reading.notes.lines()

    def test_a_large_array_on_one_line_is_read_in_pieces(self, write: Write) -> None:
        talks = [
            {"conversations": [{"from": "human", "value": f"{i}" * 400}, {"from": "gpt", "value": "é" * i}]}
            for i in range(1, 600)
        ]
        path = write(json.dumps(talks, ensure_ascii=False))
        assert [row.output_len for row in rows(path)] == [-(-2 * i // 4) for i in range(1, 600)]

    def test_errors_name_line_conversation_and_field(self, write: Write) -> None:
        wrong = {"conversations": [{"from": "human", "value": None}]}
        message = refusal(write(json.dumps([self.TALK, wrong], indent=1)))
        assert "line 23, conversation 2: conversations[0].value must be text, got None" in message
        assert "conversation 2: not JSON" in refusal(write("[" + json.dumps(self.TALK) + ', {"conv'))
        assert "behind the end of the array: 'x'" in refusal(write(json.dumps([self.TALK]) + " x"))
        assert "conversation 1: must be a JSON object, got 3" in refusal(write("[3]"), "sharegpt")
        assert "conversations or conversation or messages is missing" in refusal(write("[{}]"), "sharegpt")


class TestVllmBench:
    def test_text_by_rule_and_tokens_exactly(self, write: Write) -> None:
        path = write(
            json.dumps({"prompt": "a" * 130, "output_tokens": 5}),
            json.dumps({"prompt": list(range(33))}),
            json.dumps({"prompt": list(range(40)), "output_tokens": None}),
        )
        assert format_of(path) == "vllm-bench"
        assert lengths(path, output_len=9) == [(None, 33, 5), (None, 33, 9), (None, 40, 9)]
        assert lengths(path)[1] == (None, 33, 256)
        first, second, third = rows(path)
        assert [len(row.contents) for row in (first, second, third)] == [2, 3, 3]
        assert second.contents[:2] == third.contents[:2] and second.contents[2] != third.contents[2]

    def test_errors_name_line_and_field(self, write: Write) -> None:
        good = '{"prompt": "hello"}'
        assert "line 2: prompt is missing" in refusal(write(good, "{}"))
        assert "line 2: prompt must be text or a list" in refusal(write(good, '{"prompt": 3}'))
        assert "line 1: prompt[1] must be a token id" in refusal(write('{"prompt": [1, -1]}'))


def stored(parent: str | None, hashes: list[str], tokens: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(tokens * len(hashes))),
        "block_size": tokens,
        **more,
    }


class TestKVEvents:
    def test_stored_prompts_with_all_that_precedes_them(self, write: Write) -> None:
        path = write(
            json.dumps({"ts": 10.0, "events": [stored(None, ["a", "b"]), stored("b", ["c"])]}),
            json.dumps({"ts": 10.5, "events": [stored("a", ["d"])]}),
            json.dumps({"ts": 11.0, "events": [{"type": "BlockRemoved", "block_hashes": ["c", "d"]}]}),
            json.dumps([12.0, [["BlockStored", [7], None, [1, 2], 2]], 0]),
        )
        assert format_of(path) == "kv-events"
        found = [(row.arrival_s, list(row.contents), row.input_len, row.output_len) for row in rows(path)]
        assert found == [(0.0, ["a", "b", "c"], 6, 1), (0.5, ["a", "d"], 4, 1), (2.0, [7], 2, 1)]

    def test_events_of_the_manager_become_lines(self, write: Write) -> None:
        tokens = np.arange(4, dtype=np.int32).reshape(2, 2)
        events: list[Event] = [
            BlocksStored(0, None, (b"\x01", b"\x02"), tokens),
            BlocksRemoved(1, (b"\x02",)),
        ]
        path = write(event_line(3.0, events).rstrip(), event_line(4.0, [events[0]]).rstrip())
        assert [(row.arrival_s, row.contents) for row in rows(path)] == [
            (0.0, ["01", "02"]),
            (1.0, ["01", "02"]),
        ]

    def test_the_tier_of_an_event_is_in_its_line(self, write: Write) -> None:
        tokens = np.arange(2, dtype=np.int32).reshape(1, 2)
        on_host = BlocksStored(1, None, (b"\x01",), tokens, tier="host")
        gone = BlocksRemoved(2, (b"\x01",), tier="host")
        line = event_line(3.0, [BlocksStored(0, None, (b"\x02",), tokens), on_host, gone])
        assert [e.get("medium") for e in json.loads(line)["events"]] == [None, "CPU", "CPU"]
        reading = open_trace(write(line.rstrip()))
        assert [row.contents for row in reading] == [["02"]]
        assert "2 events of other tiers than the GPU left out" in reading.notes.lines()

    def test_the_group_of_an_event_is_in_its_line_and_the_first_is_read(self, write: Write) -> None:
        tokens = np.arange(2, dtype=np.int32).reshape(1, 2)
        line = event_line(3.0, [BlocksStored(g, None, (b"\x01",), tokens, group=g) for g in range(3)])
        assert [e.get("group_idx") for e in json.loads(line)["events"]] == [None, 1, 2]
        reading = open_trace(write(line.rstrip()))
        assert [row.contents for row in reading] == [["01"]]
        assert "2 events of other groups of layers than the first left out" in reading.notes.lines()
        with pytest.raises(PagedKVError, match="group_idx"):
            list(open_trace(write(json.dumps(stored(None, ["a"]) | {"group_idx": "full"}))))

    def test_other_tiers_are_left_out_and_counted_and_adapters_kept(self, write: Write) -> None:
        path = write(
            json.dumps(stored(None, ["a"], medium="CPU")), json.dumps(stored(None, ["b"], lora_name="sql"))
        )
        reading = open_trace(path)
        assert [(row.contents, row.adapter, row.arrival_s) for row in reading] == [(["b"], "sql", None)]
        assert "1 events of other tiers than the GPU left out" in reading.notes.lines()

    def test_what_cannot_be_told_is_refused(self, write: Write) -> None:
        good = json.dumps(stored(None, ["a", "b"]))
        cases = {
            json.dumps(stored("x", ["c"])): "parent_block_hash must be behind blocks stored and not removed",
            json.dumps(stored("a", ["c"], 4)): "block_size must be 2 as before, got 4",
            json.dumps(stored("a", ["c"]) | {"token_ids": [1]}): "token_ids must be 1 blocks of 2 tokens",
            json.dumps(
                stored(None, ["b"])
            ): "block_hashes[0] must be a block behind one parent only, got 'b'",
            json.dumps(
                stored("b", ["a"])
            ): "block_hashes must be different from each other and from those before",
            '{"type": "BlockLost"}': "type must be BlockStored, BlockRemoved or AllBlocksCleared",
            '{"events": []}': "ts is missing",
            "[]": "event must be a map with its type",
        }
        for line, message in cases.items():
            assert f"line 2: {message}" in refusal(write(good, line))


class TestRecognition:
    def test_every_format_has_its_name_and_its_file(self) -> None:
        assert set(FORMATS) == {
            "mooncake", "bailian", "kv-cache-tester", "azure", "burstgpt", "vidur", "sharegpt",
            "vllm-bench", "kv-events", "native",
        }  # fmt: skip
        assert all(name == known.name for name, known in FORMATS.items())

    @pytest.mark.parametrize("text", ["hello", "{}", "[1, 2]", "a,b,c", "null", '{"format": "other"}'])
    def test_a_file_of_no_known_format_is_refused_with_the_names(self, write: Write, text: str) -> None:
        message = refusal(write(text))
        assert "line 1: " in message and ("--format" in message or "must be" in message)

    def test_an_unknown_name_is_refused(self, write: Write) -> None:
        assert "unknown format 'nothing', known are: mooncake" in refusal(write("{}"), "nothing")

    def test_compression_and_a_byte_order_mark_do_not_matter(self, tmp_path: Path) -> None:
        text = b"\xef\xbb\xbf" + TestAzure.HEADER.encode() + b"\r\n2023-11-16 18:17:03,5,1\r\n"
        for name, content in (("plain", text), ("packed", gzip.compress(text))):
            path = tmp_path / name
            path.write_bytes(content)
            assert (format_of(path), lengths(path)) == ("azure", [(0.0, 5, 1)])

    def test_a_pipe_needs_its_format_and_can_then_be_read(self, tmp_path: Path) -> None:
        native = '{"format": "pagedkv-trace", "version": 1}\n{"input_len": 9, "output_len": 1}\n'
        for format, text in ((None, native), ("native", native), ("mooncake", TestMooncake.LINES[0])):
            read_end, write_end = os.pipe()
            os.write(write_end, text.encode())
            os.close(write_end)
            path = Path(f"/proc/self/fd/{read_end}")
            if not path.exists():
                pytest.skip("no /proc")
            if format is None:
                assert "a stream cannot be read twice: state its --format" in refusal(path)
            else:
                assert len(rows(path, format)) == 1
            os.close(read_end)


class TestOrder:
    LINES = tuple(
        f'{{"timestamp": {stamp}, "input_length": {length}, "output_length": 1, "hash_ids": []}}'
        for stamp, length in ((3000, 1), (1000, 2), (2000, 3), (2000, 4), (4000, 5))
    )

    def test_disorder_is_refused_with_its_line(self, write: Write) -> None:
        path = write(*self.LINES)
        assert "line 2: timestamp decreases from 3000 to 1000 ms (--sort puts" in refusal(path)

    def test_disorder_within_the_window_is_sorted(self, write: Write) -> None:
        """Equal arrivals stay in file order; time counts from the first to arrive."""
        found = lengths(write(*self.LINES), sort_window=3)
        assert found == [(0.0, 2, 1), (1.0, 3, 1), (1.0, 4, 1), (2.0, 1, 1), (3.0, 5, 1)]

    def test_disorder_beyond_the_window_is_refused_with_its_line(self, write: Write) -> None:
        path = write(*self.LINES[2:], self.LINES[1])
        assert lengths(path, sort_window=3)[0] == (0.0, 2, 1)
        message = refusal(path, sort_window=2)
        assert "line 4: arrival is 1 s before that of a request more than 2 requests earlier" in message

    @pytest.mark.parametrize("window", [0, 100])
    def test_memory_does_not_grow_with_the_file(self, tmp_path: Path, window: int) -> None:
        """Eight times the requests, the same peak; sorting holds its window and no more."""
        peaks = []
        for count in (1_000, 8_000):
            path = tmp_path / f"{count}.jsonl.gz"
            with gzip.open(path, "wt", compresslevel=1) as file:
                for i in range(count):
                    file.write(
                        f'{{"timestamp": {i}, "input_length": 2560, "output_length": 9, '
                        f'"hash_ids": [0, {i + 1}, {i + 2}, {i + 3}, {i + 4}]}}\n'
                    )
            tracemalloc.start()
            found = sum(1 for _ in open_trace(path, options=ReadOptions(sort_window=window)))
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert found == count
        assert peaks[1] < 1.1 * peaks[0]

    def test_reading_is_lazy(self, write: Write) -> None:
        """A damaged line is met only when it is reached."""
        stream = iter(open_trace(write(TestMooncake.LINES[0], TestMooncake.LINES[1], "damaged")))
        assert (next(stream).input_len, next(stream).input_len) == (1100, 512)
        with pytest.raises(TraceError, match="line 3: not JSON"):
            next(stream)


@pytest.mark.skipif("PAGEDKV_DATA" not in os.environ, reason="PAGEDKV_DATA is not set: no trace files")
class TestRealFiles:
    """Against totals that were counted elsewhere, by other code."""

    @staticmethod
    def path(*parts: str) -> Path:
        return Path(os.environ["PAGEDKV_DATA"], "traces", *parts)

    @pytest.mark.parametrize(
        ("name", "key", "block_size"),
        [
            ("mooncake/conversation_trace.jsonl.gz", "mooncake_conversation", 512),
            ("lmcache_agent/miniswe_blk16.jsonl.gz", "lmcache_miniswe", 16),
        ],
    )
    def test_counts_and_the_unbounded_hit_rate(self, name: str, key: str, block_size: int) -> None:
        expected = json.loads(self.path("expected.json").read_text())[key]
        info = describe(open_trace(self.path(name)))
        assert info.format == "mooncake" and info.sharing is not None
        assert info.requests == expected["requests"]
        assert info.input_tokens.total == expected["input_tokens"]
        assert info.output_tokens.total == expected["output_tokens"]
        assert info.sharing.block_size == block_size == expected["block_size"]
        assert info.sharing.unique_contents == expected["unique_blocks"]
        full = expected["engine"]["full"]
        assert info.sharing.full_blocks == full["blocks"]
        assert [info.sharing.hit_blocks, info.sharing.hit_blocks * block_size] == full["inf"]

    def test_the_agent_sessions_hit_as_published(self, tmp_path: Path) -> None:
        """The 64 first sessions whose contexts stay below 131,072 tokens, as they were composed elsewhere."""
        path = self.path("kv_cache_tester/agentic_sessions_share.jsonl.gz")
        if not path.is_file() or not path.stat().st_size:
            pytest.skip(f"{path.name} is missing or empty")
        kept = [
            line
            for line in gzip.decompress(path.read_bytes()).decode().splitlines()
            if all(
                r["in"] + r["out"] <= 131_072 for r in json.loads(line)["requests"] if r["type"] != "subagent"
            )
        ][:64]
        part = tmp_path / "share64.jsonl"
        part.write_text("".join(line + "\n" for line in kept))
        expected = json.loads(self.path("expected.json").read_text())["kv_cache_tester_share64"]
        info = describe(open_trace(part))
        assert info.sharing is not None
        assert (info.requests, info.input_tokens.total) == (expected["requests"], expected["input_tokens"])
        assert info.sharing.unique_contents == expected["unique_blocks"]
        assert [info.sharing.hit_blocks, info.sharing.hit_blocks * 64] == expected["engine"]["full"]["inf"]

    def test_the_agent_trace_has_its_sessions(self) -> None:
        """20 sessions, as many as the file of their common prefixes has lines; and as many turns in each."""
        info = describe(open_trace(self.path("lmcache_agent/miniswe_blk16.jsonl.gz")))
        lcp = gzip.decompress(self.path("lmcache_agent/miniswe_lcp.jsonl.gz").read_bytes()).splitlines()
        turns = [len(json.loads(line)["tokens"]) for line in lcp]
        assert info.sessions is not None
        assert (info.sessions.sessions, info.sessions.most_turns) == (len(turns), max(turns))
        assert info.sessions.requests == sum(turns) == 402

    def test_the_azure_trace_has_its_published_totals(self) -> None:
        """Requests and the end of the last answer at 1000 ms + 30 ms per token."""
        expected = json.loads(self.path("expected.json").read_text())["live"]
        live = expected["azure2023_code(arrival rounded to ms from first request)"]
        trace = read_trace(self.path("azure2023/AzureLLMInferenceTrace_code.csv.gz"))
        assert len(trace) == live["requests"] == 8819
        arrival_ms = np.rint(trace.arrival_s * 1000)
        end_ms = arrival_ms + 1000 + 30 * trace.output_len
        assert int(end_ms.max()) == live["1"]["horizon_ms"]
        # tokens live at every ms, added up: the prompt for a second, then one more token every 30 ms
        tokens = trace.input_len * (1000 + 30 * trace.output_len) + 15 * trace.output_len * (
            trace.output_len - 1
        )
        assert int(tokens.sum()) == live["1"]["sum"]

    @pytest.mark.parametrize(
        ("name", "requests", "most"), [("sharegpt_8k", 30731, 8192), ("arxiv_summarization", 28257, 4096)]
    )
    def test_the_length_files_are_read_whole(self, name: str, requests: int, most: int) -> None:
        trace = read_trace(self.path("lengths", f"{name}_lengths.csv.gz"))
        lines = gzip.decompress(self.path("lengths", f"{name}_lengths.csv.gz").read_bytes()).splitlines()[1:]
        assert len(trace) == len(lines) == requests
        assert int((trace.input_len + trace.output_len).sum()) == sum(int(x.split(b",")[2]) for x in lines)
        assert int((trace.input_len + trace.output_len).max()) <= most
