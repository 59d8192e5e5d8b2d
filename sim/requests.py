"""What a replay asks of a trace, whether it holds all of it or reads the prompts as it goes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Requests(Protocol):
    """Requests in replay order: their numbers as read-only arrays of [n], their tokens one by one.

    A `pagedkv.sim.trace.Trace` holds every prompt; a `pagedkv.sim.readers.streamed.StreamedTrace` holds those
    that were asked for and are not forgotten. What each column means is said in ``Trace``.
    """

    @property
    def name(self) -> str:
        """Of the trace, for reading."""

    @property
    def arrival_s(self) -> npt.NDArray[np.float64]:
        """[n] float64, non-decreasing."""

    @property
    def input_len(self) -> npt.NDArray[np.int64]:
        """[n] int64, prompt tokens."""

    @property
    def output_len(self) -> npt.NDArray[np.int64]:
        """[n] int64, generated tokens."""

    @property
    def session(self) -> npt.NDArray[np.int32]:
        """[n] int32, -1 for none."""

    @property
    def think_s(self) -> npt.NDArray[np.float64]:
        """[n] float64, NaN for none."""

    @property
    def deadline_s(self) -> npt.NDArray[np.float64]:
        """[n] float64, inf for none."""

    @property
    def priority(self) -> npt.NDArray[np.int64]:
        """[n] int64, lower first."""

    @property
    def content_block_size(self) -> int:
        """Prompt tokens per content id; 0 when the trace says nothing about content."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed or left out when the trace was read."""

    def __len__(self) -> int:
        """Return the number of requests."""

    def tokens(self, i: int) -> npt.NDArray[np.int32]:
        """Return the prompt of request ``i``: [input_len[i]] int32."""

    def output_tokens(self, i: int) -> npt.NDArray[np.int32]:
        """Return the output of request ``i``: [output_len[i]] int32, tokens that occur nowhere else."""

    def forget(self, i: int) -> None:
        """Say that nobody asks for the tokens of request ``i`` again."""

    def faster(self, speed: float) -> Requests:
        """Return the same requests arriving ``speed`` times as fast."""
