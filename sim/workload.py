"""``chat-long``: a built-in, seeded workload of long chats, for use where no trace file is at hand.

It is fitted to the public Mooncake conversation trace (kvcache-ai/Mooncake at 3b5a594, file
FAST25-release/traces/conversation_trace.jsonl: 12,031 requests in 59 minutes; Qin et al., FAST'25).
Measured at 12,031 requests, the generated column as mean over seeds 0 to 9 (in brackets: standard deviation
from seed to seed). Hit rates are shares of prompt tokens, full blocks of 512, LRU that evicts leaves first::

    statistic                                 real   generated
    requests per second                      3.401       3.419   (0.05)
    input tokens, mean                      12,035      11,993   (248)
    input tokens, p50                        6,909       6,876   (111)
    input tokens, p90                       27,367      27,441   (633)
    input tokens, p99                       85,400      85,458   (4,387)
    output tokens, mean                        343         346   (3)
    output tokens, p50                         350         351   (2)
    output tokens, p90                         597         600   (5)
    output tokens, p99                       1,119       1,161   (52)
    hit rate, no capacity limit             37.3 %      37.1 %   (0.9)
    hit rate, 30,000 blocks                 33.7 %      33.9 %   (0.8)
    hit rate, 10,000 blocks                 21.9 %      22.9 %   (0.6)
    hit rate, 5,000 blocks                  12.1 %      13.2 %   (0.5)
    hit rate, 2,000 blocks                   5.6 %       5.8 %   (0.2)
    first 4,000 requests, no limit          33.1 %      31.7 %   (1.8)
    first 1,000 requests, no limit          21.5 %      19.8 %   (2.3)
    first 4,000 requests, 5,000 blocks      11.7 %      12.8 %   (1.1)
    first 1,000 requests, 5,000 blocks      10.5 %      11.9 %   (1.3)

Not imitated: the real rate grows within the hour (3.1 per second over the first 4,000 requests), its prompts
get shorter meanwhile, answers and pauses within a chat resemble each other (correlation of logarithms 0.6 and
0.3), and the shortest first prompts are rarely followed up.

How a chat goes: it starts with a prompt whose first block, the system prompt, all chats share. After a while
the user returns, or never does. The next prompt is the last one, its answer and some new text, which may be a
document; it keeps the full blocks of the last prompt. A long prompt is sometimes trimmed instead: only its
beginning stays. Chats have been running before the trace begins, so its first requests are in mid-chat.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.sim.mooncake import MOONCAKE_BLOCK_SIZE
from pagedkv.sim.trace import Trace, TraceError

# Each constant below was counted in the real trace, where a request follows the latest earlier one that holds
# the deepest of its full blocks already seen. "Adjusted" says that it was then moved to fit the table above,
# mostly because a window of one hour cuts chats at both ends.

TICK_S = 3.0
"""Arrivals are stamped in batches: the real trace has 1,180 of them, 3.0 s apart, Poisson-like in size."""

STARTS_PER_S = 1.97
"""New chats per second. Adjusted: 2.1 requests per second of the real trace's last 40 minutes start one."""

RETURN_A, RETURN_B = 1.53, 3.0
"""After turn k = 0, 1, ... the user returns with probability (A + k) / (A + B + k), a beta-geometric law:
0.34, 0.46, 0.54, 0.60, 0.65, 0.69; counted: 0.30, 0.42, 0.51, 0.58, 0.59, 0.68. Adjusted."""

MAX_TURNS = 100
"""Turns per chat; the longest of the real trace has about 40."""

MAX_INPUT = 126_195
"""Longest prompt of the real trace; a chat that would outgrow it ends."""

TRIM_FROM, TRIM_SHARE = 7_000, 0.25
"""Prompts from this length on may be trimmed at the next turn, with this probability. Counted: 15 % of all
returns, nine in ten of them from above 7,800 tokens. Adjusted."""

WARMUP_S = 3600.0
"""Chats start up to this long before the trace does; no longer than the longest pause."""

# Tables of quantiles, all at these percentages; values between them are interpolated linearly.
PERCENTS = (0, 1, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 100)

# fmt: off
FIRST_INPUT = (891, 893, 894, 897, 904, 1160, 1700, 3900, 5450, 7500, 10900, 14800, 23500, 34000, 57000,
               80000, 106000, 126000)
"""Tokens of a chat's first prompt, of those after minute 20. Adjusted: the values at 20 to 70 % are 12 %
higher and those from 90 % on about 5 % lower than counted."""

OUTPUT = (1, 3, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 892, 1119, 1568, 2000)
"""Tokens of an answer, of all requests; the real trace limits them to 2,000."""

PAUSE_S = (3, 13, 18, 30, 42, 60, 77, 102, 135, 180, 250, 370, 600, 900, 2000, 2800, 3300, 3600)
"""Seconds between a request and the chat's next one. Adjusted, since the hour hides long pauses: counted were
135 -> 123 at 50 %, 370 -> 318 at 80 %, 600 -> 483 at 90 %, 2000 -> 1032 at 98 %."""

NEW_TEXT = (-461, -256, -82, -17, -2, 8, 11, 16, 26, 53, 179, 705, 4229, 6948, 11810, 16705, 22268, 91467)
"""Tokens by which a prompt exceeds the last prompt and its answer; negative where part of the answer is left
out, down to all of it."""

TRIM_KEPT = (.015, .031, .037, .054, .07, .1, .136, .178, .233, .305, .416, .577, .909, .952, .978, 1, 1, 1)
"""Share of the last prompt's full blocks that a trimmed prompt keeps."""

TRIM_GROWTH = (.174, .291, .383, .507, .612, .726, .84, .934, .994, 1.026, 1.072, 1.156, 1.379, 1.675, 2.367,
               2.816, 2.968, 7.721)
"""Length of a trimmed prompt relative to the last prompt."""
# fmt: on

_REQUESTS_PER_S = 3.4
_BLOCK = MOONCAKE_BLOCK_SIZE

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


def chat_long(num_requests: int = 2000, seed: int = 0) -> Trace:
    """Return the first ``num_requests`` requests of the workload drawn from ``seed``.

    The same arguments give the same bytes in any process; another number of requests gives other requests
    (use ``head`` for a beginning). About 3.4 requests per second arrive and 100 requests hold 2,400 content
    ids. O(num_requests): 2,000 take 0.1 s and 20,000 take 0.3 s.

    Args:
        num_requests: how many, at least 1.
        seed: of the random numbers, at least 0.

    Raises:
        TraceError: an argument out of its range.

    >>> trace = chat_long(100, seed=7)
    >>> len(trace), trace.name, trace.content_block_size
    (100, 'chat-long', 512)
    >>> bool((trace.content_ids[trace.content_offsets[:-1]] == 0).all())  # one system prompt
    True
    """
    for name, value, least in (("num_requests", num_requests, 1), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            raise TraceError(f"{name} must be an integer of at least {least}, got {value!r}")
    rng = np.random.Generator(np.random.PCG64(seed))
    # a margin, so that chance never leaves too few requests
    turns = _all_turns(rng, end_s=600.0 + 1.2 * num_requests / _REQUESTS_PER_S)
    first = int(np.searchsorted(turns.time_s, 0.0))
    window = slice(first, first + num_requests)
    rows = _content_rows(turns)[window]
    assert len(rows) == num_requests
    content_ids, num_contents = _renumber(np.concatenate(rows))
    return Trace(
        "chat-long",
        np.floor(turns.time_s[window] / TICK_S) * TICK_S,
        turns.input_len[window],
        turns.output_len[window],
        content_ids,
        np.cumsum([0, *map(len, rows)]),
        _BLOCK,
        num_contents,
    )


@dataclass(frozen=True)
class _Turns:
    """Requests of many chats, as columns of equal length."""

    chat: _Ints
    time_s: _Floats
    input_len: _Ints
    output_len: _Ints
    kept_blocks: _Ints  # leading blocks shared with the chat's previous prompt

    def take(self, index: npt.NDArray[np.generic]) -> "_Turns":
        return _Turns(
            self.chat[index],
            self.time_s[index],
            self.input_len[index],
            self.output_len[index],
            self.kept_blocks[index],
        )


def _all_turns(rng: np.random.Generator, end_s: float) -> _Turns:
    """Return the turns of all chats before ``end_s``, in order of time, those before the trace included."""
    levels = [_first_turns(rng, end_s)]
    for turn in range(MAX_TURNS - 1):
        levels.append(_next_turns(rng, levels[-1], turn, end_s))
    turns = _Turns(
        np.concatenate([level.chat for level in levels]),
        np.concatenate([level.time_s for level in levels]),
        np.concatenate([level.input_len for level in levels]),
        np.concatenate([level.output_len for level in levels]),
        np.concatenate([level.kept_blocks for level in levels]),
    )
    return turns.take(np.argsort(turns.time_s, kind="stable"))


def _first_turns(rng: np.random.Generator, end_s: float) -> _Turns:
    n = round((WARMUP_S + end_s) * STARTS_PER_S)
    time_s = rng.random(n) * (WARMUP_S + end_s) - WARMUP_S
    system_prompt = np.ones(n, np.int64)
    return _Turns(
        np.arange(n), time_s, _draw_ints(rng, FIRST_INPUT, n), _draw_ints(rng, OUTPUT, n), system_prompt
    )


def _next_turns(rng: np.random.Generator, last: _Turns, turn: int, end_s: float) -> _Turns:
    """Return the turns that follow the chats' turns number ``turn``, of those chats that go on."""
    n = len(last.chat)
    returns = rng.random(n) < (RETURN_A + turn) / (RETURN_A + RETURN_B + turn)
    time_s = last.time_s + _draw(rng, PAUSE_S, n)
    grown_len, grown_kept = _grown(rng, last)
    trimmed_len, trimmed_kept = _trimmed(rng, last)
    trims = (last.input_len >= TRIM_FROM) & (rng.random(n) < TRIM_SHARE)
    input_len = np.where(trims, trimmed_len, grown_len)
    kept_blocks = np.where(trims, trimmed_kept, grown_kept)
    turns = _Turns(last.chat, time_s, input_len, _draw_ints(rng, OUTPUT, n), kept_blocks)
    return turns.take(returns & (time_s < end_s) & (input_len <= MAX_INPUT))


def _grown(rng: np.random.Generator, last: _Turns) -> tuple[_Ints, _Ints]:
    """Return prompt length and kept blocks where the chat is continued."""
    new_text = _draw_ints(rng, NEW_TEXT, len(last.chat))
    return last.input_len + np.maximum(last.output_len + new_text, 0), last.input_len // _BLOCK


def _trimmed(rng: np.random.Generator, last: _Turns) -> tuple[_Ints, _Ints]:
    """Return prompt length and kept blocks where only the prompt's beginning stays."""
    n = len(last.chat)
    input_len = (last.input_len * _draw(rng, TRIM_GROWTH, n)).astype(np.int64)
    kept = (last.input_len // _BLOCK * _draw(rng, TRIM_KEPT, n)).astype(np.int64)
    return input_len, np.clip(kept, 1, input_len // _BLOCK)


def _draw(rng: np.random.Generator, quantiles: tuple[float, ...], n: int) -> _Floats:
    return np.interp(rng.random(n) * 100.0, PERCENTS, quantiles)


def _draw_ints(rng: np.random.Generator, quantiles: tuple[float, ...], n: int) -> _Ints:
    return np.rint(_draw(rng, quantiles, n)).astype(np.int64)


def _content_rows(turns: _Turns) -> list[_Ints]:
    """Return the content ids of each turn: what it keeps of the chat's last prompt, then ids never used."""
    system_prompt = np.zeros(1, np.int64)
    last_row: dict[int, _Ints] = {}
    rows, unused = [], 1
    num_blocks = -(-turns.input_len // _BLOCK)
    for chat, kept, n in zip(
        turns.chat.tolist(), turns.kept_blocks.tolist(), num_blocks.tolist(), strict=True
    ):
        new = np.arange(unused, unused + n - kept)
        unused += n - kept
        last_row[chat] = np.concatenate([last_row.get(chat, system_prompt)[:kept], new])
        rows.append(last_row[chat])
    return rows


def _renumber(ids: _Ints) -> tuple[npt.NDArray[np.int32], int]:
    """Return the ids as 0, 1, ... in order of first appearance, and how many there are."""
    _, first_seen, position = np.unique(ids, return_index=True, return_inverse=True)
    dense = np.empty(len(first_seen), np.int32)
    dense[np.argsort(first_seen)] = np.arange(len(first_seen), dtype=np.int32)
    return dense[position], len(first_seen)
