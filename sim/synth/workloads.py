"""The kinds of synthetic workload: each is a few numbers, and makes a trace from a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedkv.sim.synth.arrivals import ArrivalProcess
from pagedkv.sim.synth.lengths import LengthDistribution, parse_lengths
from pagedkv.sim.synth.prompts import Piece, PromptBook
from pagedkv.sim.trace import MAX_TOKENS, Trace, TraceError

MOST_REQUESTS = 10_000_000

# defaults of the kinds below
_ANSWER = parse_lengths("lognormal:250,1")
_INPUT = parse_lengths("lognormal:1000,1.5")
_NODE = parse_lengths("uniform:200,800")
_SUFFIX = parse_lengths("lognormal:200,1")
_FIRST = parse_lengths("lognormal:1000,1")
_GROWTH = parse_lengths("lognormal:1500,1.5")
_TURNS = parse_lengths("uniform:5,40")
_DOCUMENT = parse_lengths("lognormal:1500,0.7")
_HAYSTACK = parse_lengths("uniform:8000,120000")
_QUESTION = parse_lengths("lognormal:60,0.7")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """What all kinds have. The same numbers and seed give the same trace in any process (one numpy version).

    Raises ``TraceError`` for a number out of its range.
    """

    requests: int = 1000
    arrivals: ArrivalProcess = field(default_factory=ArrivalProcess)
    answer: LengthDistribution = _ANSWER
    """Output tokens."""
    block_size: int = 16
    """Prompt tokens per content id."""

    def __post_init__(self) -> None:
        """Refuse numbers out of their range."""
        self._check("requests", self.requests, 1, MOST_REQUESTS)
        self._check("block_size", self.block_size, 1, 1 << 20)

    def make(self, seed: int = 0) -> Trace:
        """The trace drawn from a seed."""
        if type(seed) is not int or seed < 0:
            raise TraceError(f"seed must be an integer of at least 0, got {seed!r}")
        return self._draw(np.random.Generator(np.random.PCG64(seed)))

    @abstractmethod
    def _draw(self, rng: np.random.Generator) -> Trace:
        """The trace that these random numbers give."""

    def _check(self, name: str, value: float, least: float, most: float) -> None:
        if not least <= value <= most:
            raise TraceError(f"{name} must be from {least:,} to {most:,}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Independent(Workload):
    """Prompts that share nothing.

    >>> trace = Independent(requests=3, input=parse_lengths("100"), answer=parse_lengths("8")).make(seed=1)
    >>> trace.input_len.tolist(), trace.content_block_size
    ([100, 100, 100], 0)
    """

    input: LengthDistribution = _INPUT
    """Prompt tokens."""

    def _draw(self, rng: np.random.Generator) -> Trace:
        arrival_s = self.arrivals.draw(rng, self.requests)
        inputs, outputs = (lengths.draw(rng, self.requests) for lengths in (self.input, self.answer))
        return Trace.from_lengths(arrival_s, inputs, outputs, name="independent")


@dataclass(frozen=True, kw_only=True)
class PrefixTree(Workload):
    """Prompts that share the paths of a tree: a root text, variants of its continuation, and so on.

    A prompt is the texts on a path from the root to a leaf, then a text of its own. With ``depth`` 1 there is
    one shared text only, such as a system prompt; ``branching`` texts follow on each before the leaves.
    """

    depth: int = 3
    branching: int = 4
    node: LengthDistribution = _NODE
    """Tokens of each shared text; drawn once per text."""
    suffix: LengthDistribution = _SUFFIX
    """Tokens of the prompt's own text."""
    skew: float = 1.0
    """Zipf exponent of the choice between continuations; 0: each as likely."""

    def __post_init__(self) -> None:
        """Refuse numbers out of their range."""
        super().__post_init__()
        self._check("depth", self.depth, 1, 64)
        self._check("branching", self.branching, 1, 1_000_000)
        self._check("skew", self.skew, 0, 100)

    def _draw(self, rng: np.random.Generator) -> Trace:
        n, book = self.requests, PromptBook(self.block_size)
        arrival_s, outputs = self.arrivals.draw(rng, n), self.answer.draw(rng, n)
        suffixes = self.suffix.draw(rng, n)
        choices = _zipf(rng, self.branching, self.skew, n * (self.depth - 1)).reshape(n, self.depth - 1)
        tokens_of: dict[tuple[int, ...], int] = {}
        for i, path in enumerate(choices.tolist()):
            pieces = []
            for level in range(self.depth):
                node = tuple(path[:level])
                if node not in tokens_of:
                    tokens_of[node] = int(self.node.draw(rng, 1)[0])
                pieces.append(Piece((0, *node), tokens_of[node]))
            book.add([*pieces, Piece((1, i), int(suffixes[i]))])
        return book.trace("prefix-tree", arrival_s, outputs)


@dataclass(frozen=True, kw_only=True)
class Agents(Workload):
    """Sessions whose context grows: each turn's prompt is all before it, the answer, and what tools returned.

    ``arrivals`` are those of sessions. A turn comes after the answer before it, at ``seconds_per_token``, and
    a pause. With ``closed_loop`` the pause is a think time instead, and counts from the real end of the
    answer. Sessions end after their turns, or before their context would exceed ``max_context``.
    """

    system: int = 2000
    """Tokens that all sessions begin with: the system prompt and the tools."""
    first: LengthDistribution = _FIRST
    """Tokens of a session's task."""
    growth: LengthDistribution = _GROWTH
    """Tokens that a turn adds beside the last answer."""
    turns: LengthDistribution = _TURNS
    think_s: float = 5.0
    """Mean of the pauses, which are exponential."""
    seconds_per_token: float = 0.025
    max_context: int = 131_072
    closed_loop: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers out of their range."""
        super().__post_init__()
        self._check("system", self.system, 0, MAX_TOKENS)
        self._check("think_s", self.think_s, 0, 1e9)
        self._check("seconds_per_token", self.seconds_per_token, 0, 1e3)
        self._check("max_context", self.max_context, self.system + 2, MAX_TOKENS)

    def _draw(self, rng: np.random.Generator) -> Trace:
        # each session has a request at its start, so the first n requests are of the first n sessions
        starts, turns = self.arrivals.draw(rng, self.requests), self.turns.draw(rng, self.requests)
        session = np.repeat(np.arange(self.requests), turns)
        begins = np.cumsum(turns) - turns
        outputs, growth = self.answer.draw(rng, len(session)), self.growth.draw(rng, len(session))
        own = np.repeat(self.first.draw(rng, self.requests), turns) + _ints_before(outputs + growth, begins)
        pauses = rng.standard_exponential(len(session)) * self.think_s
        elapsed = _sums_before(outputs * self.seconds_per_token + pauses, begins)
        arrival_s = starts[session] + elapsed
        fits = self.system + own + outputs <= self.max_context
        fits[begins] = True  # shortened below
        fits = _ints_before((~fits).astype(np.int64), begins) + ~fits == 0  # none behind one that is too long
        kept = np.flatnonzero(fits)
        kept = kept[np.argsort(arrival_s[kept], kind="stable")][: self.requests]
        return self._trace(
            session[kept],
            arrival_s[kept],
            np.minimum(own[kept], self.max_context - self.system - 1),
            outputs[kept],
            np.concatenate([[0.0], pauses])[kept],
            np.isin(kept, begins),
        )

    def _trace(
        self,
        session: Ints,
        arrival_s: Floats,
        own: Ints,
        outputs: Ints,
        pauses: Floats,
        first: npt.NDArray[np.bool_],
    ) -> Trace:
        book = PromptBook(self.block_size)
        shared = [Piece((0,), self.system)] if self.system else []
        for number, tokens in zip(session.tolist(), own.tolist(), strict=True):
            book.add([*shared, Piece((1, number), tokens)])
        outputs = np.minimum(outputs, self.max_context - np.array(book.input_len))
        _, numbers = np.unique(session, return_inverse=True)
        columns = {}
        if self.closed_loop:
            columns["think_s"] = np.where(first, np.nan, pauses)
            arrival_s = np.maximum.accumulate(np.where(first, arrival_s, 0.0))
        return book.trace("agents", arrival_s, outputs, session=numbers, **columns)


@dataclass(frozen=True, kw_only=True)
class LongContext(Workload):
    """A mix of retrieval (documents before a question) and needles (a sentence hidden in a long text).

    Retrieval prompts share the documents that they begin with in the same order; needle prompts share their
    haystack up to the needle's place.
    """

    system: int = 200
    """Tokens that all prompts begin with."""
    documents: int = 1000
    per_prompt: int = 5
    document: LengthDistribution = _DOCUMENT
    skew: float = 1.0
    """Zipf exponent of the choice of documents; 0: each as likely."""
    needle_share: float = 0.2
    """Share of requests that search for a needle."""
    haystacks: int = 20
    haystack: LengthDistribution = _HAYSTACK
    needle: int = 40
    """Tokens of a needle."""
    question: LengthDistribution = _QUESTION

    def __post_init__(self) -> None:
        """Refuse numbers out of their range."""
        super().__post_init__()
        self._check("system", self.system, 0, MAX_TOKENS)
        self._check("documents", self.documents, 1, MOST_REQUESTS)
        self._check("per_prompt", self.per_prompt, 1, self.documents)
        self._check("skew", self.skew, 0, 100)
        self._check("needle_share", self.needle_share, 0, 1)
        self._check("haystacks", self.haystacks, 1, MOST_REQUESTS)
        self._check("needle", self.needle, 1, MAX_TOKENS)

    def _draw(self, rng: np.random.Generator) -> Trace:
        n, book = self.requests, PromptBook(self.block_size)
        arrival_s, outputs = self.arrivals.draw(rng, n), self.answer.draw(rng, n)
        questions = self.question.draw(rng, n)
        is_needle = rng.random(n) < self.needle_share
        documents = self.document.draw(rng, self.documents)
        haystacks = self.haystack.draw(rng, self.haystacks)
        shared = [Piece((0,), self.system)] if self.system else []
        for i in range(n):
            body = self._needle(rng, i, haystacks) if is_needle[i] else self._retrieval(rng, documents)
            book.add([*shared, *body, Piece((1, i), int(questions[i]))])
        return book.trace("long-context", arrival_s, outputs)

    def _retrieval(self, rng: np.random.Generator, documents: Ints) -> list[Piece]:
        """The best documents first: drawn one after the other, none twice."""
        chosen: dict[int, None] = {}
        while len(chosen) < self.per_prompt:
            more = _zipf(rng, len(documents), self.skew, self.per_prompt)
            chosen.update(dict.fromkeys(more.tolist()))
            if self.skew > 2:  # what is left is drawn too seldom to wait for
                chosen.update(dict.fromkeys(range(self.per_prompt)))
        return [Piece((2, number), int(documents[number])) for number in list(chosen)[: self.per_prompt]]

    def _needle(self, rng: np.random.Generator, i: int, haystacks: Ints) -> list[Piece]:
        number = int(rng.integers(0, len(haystacks)))
        length = int(haystacks[number])
        depth = int(rng.integers(0, length, endpoint=True))
        pieces = [Piece((3, number), depth), Piece((4, i), self.needle), Piece((5, i), length - depth)]
        return [piece for piece in pieces if piece.num_tokens]


def _sums_before(values: Floats, begins: Ints) -> Floats:
    """Sum of the values before each one in its group; groups begin at ``begins``."""
    sums = np.cumsum(values) - values
    return sums - np.repeat(sums[begins], np.diff(begins, append=len(values)))


def _ints_before(values: Ints, begins: Ints) -> Ints:
    return np.rint(_sums_before(values.astype(np.float64), begins)).astype(np.int64)


def _zipf(rng: np.random.Generator, n: int, skew: float, count: int) -> Ints:
    """[count] int64 from 0 to n - 1, number k with probability proportional to (k + 1) ** -skew."""
    weights = np.cumsum(np.arange(1, n + 1, dtype=np.float64) ** -skew)
    found = np.searchsorted(weights, rng.random(count) * weights[-1], side="right")
    numbers: Ints = np.minimum(found, n - 1)
    return numbers


KINDS: Sequence[type[Workload]] = (Independent, PrefixTree, Agents, LongContext)
"""All kinds but the built-in chats, whose constants are measured and not free."""
