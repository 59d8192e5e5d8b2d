"""How far each request of a run has come."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedkv.block_tables import Int32Array
from pagedkv.sim.requests import Requests


class RequestState:
    """Counts of every request, as arrays over the trace: [n] each.

    ::

        input_len            generated
        |------ prompt ------|-- output so far --|
        |- committed -|- computed -|             the last output token is not fed back yet
              |- dropped -|                      of the committed ones
    """

    def __init__(self, trace: Requests) -> None:
        """Nothing has been computed."""
        self._trace = trace
        self.input_len = trace.input_len
        self.output_len = trace.output_len
        self.computed = np.zeros(len(trace), np.int64)
        """Tokens whose K and V exist."""
        self.committed = np.zeros(len(trace), np.int64)
        """Tokens that the manager has been told."""
        self.dropped = np.zeros(len(trace), np.int64)
        """Tokens of the middle of the context whose K and V were given up."""
        self.generated = np.zeros(len(trace), np.int64)
        self.decodes = np.zeros(len(trace), np.bool_)
        """Whether a request that has blocks has its first token from them."""
        self.was_admitted = np.zeros(len(trace), np.bool_)
        self.last_token_s = np.zeros(len(trace), np.float64)

    def known(self, request: int) -> int:
        """Tokens of the prompt and of the output so far."""
        return int(self.input_len[request] + self.generated[request])

    def left_to_prefill(self, request: int) -> int:
        """Known tokens without K and V."""
        return self.known(request) - int(self.computed[request])

    def contexts(self, requests: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens that the next decode step of these requests reads, its own included: [n] int64."""
        return self.input_len[requests] + self.generated[requests] - self.dropped[requests]

    def has_full_block(self, requests: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.bool_]:
        """Which of these requests have filled a block that is not committed: [n] bool."""
        full: npt.NDArray[np.bool_] = (
            self.computed[requests] // block_size > self.committed[requests] // block_size
        )
        return full

    def tokens(self, request: int, start: int, stop: int) -> Int32Array:
        """Tokens at positions ``start .. stop - 1``: [stop - start] int32, the prompt, then the output."""
        num_prompt = int(self.input_len[request])
        parts = []
        if start < num_prompt:
            parts.append(self._trace.tokens(request)[start:stop])
        if stop > num_prompt:
            parts.append(self._trace.output_tokens(request)[max(0, start - num_prompt) : stop - num_prompt])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
