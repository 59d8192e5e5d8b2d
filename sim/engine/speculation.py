"""Speculative decoding: how many drafts a step verifies, and how many of them turn out right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.errors import PagedKVError
from pagedkv.sim.requests import Requests


@dataclass(frozen=True)
class Speculation:
    """A step verifies ``num_drafts`` tokens of each sequence, each right with probability ``accept_rate``.

    The first wrong one ends the run and is corrected, so a step gives 1 to ``num_drafts + 1`` tokens.
    ``draft_s`` is what it takes to draft one token of every sequence (0: looked up, not computed).

    Raises:
        PagedKVError: fewer than 1 draft, a rate outside [0, 1], a negative seed or time.

    >>> Speculation(num_drafts=3, accept_rate=0.5).expected_tokens
    1.875
    """

    num_drafts: int
    accept_rate: float
    seed: int = 0
    draft_s: float = 0.0

    def __post_init__(self) -> None:
        """Check every field."""
        if self.num_drafts < 1 or self.seed < 0:
            raise PagedKVError(f"need 1 draft or more and a seed from 0, got {self.num_drafts}, {self.seed}")
        if not (0.0 <= self.accept_rate <= 1.0 and 0.0 <= self.draft_s < math.inf):
            raise PagedKVError(
                f"need an accept rate in [0, 1] and a time from 0, got {self.accept_rate} and {self.draft_s}"
            )

    @property
    def expected_tokens(self) -> float:
        """Mean tokens of a step that no end cuts short: ``(1 - p^(k+1)) / (1 - p)``."""
        p, k = self.accept_rate, self.num_drafts
        return k + 1.0 if p == 1.0 else (1.0 - p ** (k + 1)) / (1.0 - p)


class Guesses:
    """Which output tokens are guessed right: drawn once per request, whoever else runs.

    >>> from pagedkv.sim.trace import Trace
    >>> guesses = Guesses(Speculation(2, 1.0), Trace.from_lengths([0], [4], [9]))
    >>> guesses.tokens_of_step(np.array([0, 0]), np.array([1, 7])).tolist()
    [3, 2]
    """

    def __init__(self, speculation: Speculation, trace: Requests) -> None:
        """Draw nothing yet."""
        self._speculation, self._trace = speculation, trace
        self._runs: dict[int, npt.NDArray[np.int32]] = {}

    def tokens_of_step(
        self, requests: npt.NDArray[np.int64], generated: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Tokens that a step gives requests with so many output tokens: right drafts and one, [n] int64."""
        found = [
            int(self._runs_of(request)[position])
            for request, position in zip(requests.tolist(), generated.tolist(), strict=True)
        ]
        left: npt.NDArray[np.int64] = self._trace.output_len[requests] - generated
        return np.minimum(np.array(found, np.int64) + 1, left)

    def forget(self, request: int) -> None:
        """Drop what was drawn for a request that is done."""
        self._runs.pop(request, None)

    def _runs_of(self, request: int) -> npt.NDArray[np.int32]:
        """[output_len] right guesses in a row from each output token on, ``num_drafts`` at most."""
        if request not in self._runs:
            s, length = self._speculation, int(self._trace.output_len[request])
            right = np.random.default_rng([s.seed, request]).random(length + s.num_drafts) < s.accept_rate
            wrong = np.append(np.flatnonzero(~right), len(right))
            positions = np.arange(length)
            runs = wrong[np.searchsorted(wrong, positions)] - positions
            self._runs[request] = np.minimum(runs, s.num_drafts).astype(np.int32)
        return self._runs[request]
