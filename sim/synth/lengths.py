"""How long prompts, answers and parts of prompts are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.sim.readers.reading import read_trace
from pagedkv.sim.readers.row import ReadOptions
from pagedkv.sim.trace import MAX_TOKENS, TraceError

MOST_TOKENS = 1 << 24
"""Longest length drawn; a lognormal's tail ends here."""

_KINDS = ("constant:N", "uniform:LEAST,MOST", "lognormal:MEAN,CV", "FILE[:input|output]")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LengthDistribution:
    """A distribution of lengths in tokens, at least 1; make one with `parse_lengths`.

    ``constant``: ``a`` always. ``uniform``: whole numbers from ``a`` to ``b``. ``lognormal``: mean ``a``,
    coefficient of variation ``b``, rounded. ``empirical``: one of ``values``, each as likely.
    """

    kind: str
    a: float = 0.0
    b: float = 0.0
    values: Ints | None = None

    def __str__(self) -> str:
        """As `parse_lengths` reads it; a file's lengths by their number.

        >>> str(parse_lengths("lognormal:800,1.5")), str(parse_lengths("7"))
        ('lognormal:800,1.5', 'constant:7')
        """
        if self.values is not None:
            return f"{len(self.values):,} lengths of a file"
        return f"{self.kind}:{self.a:g}" + (f",{self.b:g}" if self.b else "")

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        """[n] int64."""
        if self.kind == "constant":
            return np.full(n, int(self.a))
        if self.kind == "uniform":
            return rng.integers(int(self.a), int(self.b), n, endpoint=True)
        if self.kind == "empirical":
            assert self.values is not None
            return self.values[rng.integers(0, len(self.values), n)]
        sigma2 = math.log1p(self.b**2)
        drawn = np.exp(rng.standard_normal(n) * math.sqrt(sigma2) + math.log(self.a) - sigma2 / 2)
        return np.clip(np.rint(drawn), 1, MOST_TOKENS).astype(np.int64)


def parse_lengths(text: str) -> LengthDistribution:
    """A distribution from text: ``constant:512`` or ``512``, ``uniform:100,900``, ``lognormal:800,1.5``
    (mean and coefficient of variation), or the lengths of a trace file, ``FILE:input`` or ``FILE:output``.

    Raises ``TraceError`` for anything else, and for a file that cannot be read.

    >>> sorted(set(parse_lengths("uniform:2,4").draw(np.random.default_rng(0), 99).tolist()))
    [2, 3, 4]
    """
    kind, _, rest = text.partition(":")
    if text.isascii() and text.isdigit():
        kind, rest = "constant", text
    if kind == "constant":
        return LengthDistribution(kind, _numbers(text, rest, 1)[0])
    if kind == "uniform":
        least, most = _numbers(text, rest, 2)
        if least > most:
            raise TraceError(f"lengths {text!r}: {least:g} is more than {most:g}")
        return LengthDistribution(kind, least, most)
    if kind == "lognormal":
        mean, cv = _numbers(text, rest, 2, whole=False)
        return LengthDistribution(kind, mean, cv)
    return _empirical(text)


def _numbers(text: str, rest: str, count: int, *, whole: bool = True) -> list[float]:
    parts = rest.split(",")
    try:
        values = [float(int(part)) if whole else float(part) for part in parts]
    except ValueError:
        values = []
    if len(values) != count or not all(0 < value <= MOST_TOKENS for value in values):
        raise TraceError(
            f"lengths {text!r} are none of {', '.join(_KINDS)} with numbers above 0 and up to {MOST_TOKENS:,}"
        )
    return values


def _empirical(text: str) -> LengthDistribution:
    path, _, column = text.rpartition(":")
    if column not in ("input", "output") or not path:
        raise TraceError(f"lengths {text!r} are none of {', '.join(_KINDS)}")
    trace = read_trace(path, options=ReadOptions(skip_failed=True))
    values = trace.input_len if column == "input" else trace.output_len
    assert int(values.max()) <= MAX_TOKENS
    return LengthDistribution("empirical", values=values)
