"""A trace larger than memory: the numbers of its requests as arrays, their prompts read as they are used."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from pagedkv.sim.readers.columns import Numbers
from pagedkv.sim.readers.reading import Reading
from pagedkv.sim.readers.row import Row
from pagedkv.sim.readers.tokens import Int32Array, Int64Array, content_pairs, output_tokens, prompt_tokens
from pagedkv.sim.trace import TraceError, sped_up


class StreamedTrace:
    r"""The requests of a file, which is read twice: once for their numbers, and again for their prompts.

    The second pass goes on whenever a request is asked for that it has not come to. What it passes is held
    until it is forgotten::

        file      0   1   2   3   4   5   6   7   8   9
                  forgotten | held          | not read again
                  finished    in flight       to come

    Memory: 64 bytes a request, what the format's reader names, and 8 bytes per content id of the requests
    that are held: those that run, and those that an order of service passes over (a longer prompt, a lower
    priority, a turn of a session that waits for the one before).

    >>> import tempfile; from pathlib import Path
    >>> from pagedkv.sim.readers.reading import open_trace
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "demo.jsonl")
    ...     line = '{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [46, 47]}\n'
    ...     _ = path.write_text(3 * line)
    ...     trace = StreamedTrace(open_trace(path))
    ...     len(trace), trace.tokens(1)[:2].tolist(), trace.num_held
    ...     trace.forget(0), trace.forget(1), trace.num_held
    (3, [46, 0], 2)
    (None, None, 0)
    """

    def __init__(self, reading: Reading, limit: int | None = None) -> None:
        """Read the file once, or its first ``limit`` requests. O(size of the file).

        Raises ``TraceError`` as reading does, for a file without requests, and from ``tokens`` for a file
        that has changed since.
        """
        numbers, self._stamp = Numbers(), reading.source.stamp()
        for row in islice(reading, limit):
            numbers.add(row)
        if not numbers.num_requests:
            raise reading.source.error("the file holds no requests")
        columns = numbers.trace(reading.source.name, reading.notes.lines())
        self.name, self.notes = columns.name, columns.notes
        self.arrival_s, self.input_len, self.output_len = (
            columns.arrival_s,
            columns.input_len,
            columns.output_len,
        )
        self.session, self.think_s = columns.session, columns.think_s
        self.deadline_s, self.priority = columns.deadline_s, columns.priority
        self.content_block_size = numbers.block_size
        self._reading = reading
        self._begin()

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival_s)

    @property
    def num_held(self) -> int:
        """Requests whose content is in memory."""
        return len(self._held)

    def tokens(self, i: int) -> npt.NDArray[np.int32]:
        """Return the prompt of request ``i``, which is not forgotten: [input_len[i]] int32."""
        while self._num_passed <= i:
            self._pass_one()
        if i not in self._held:
            raise TraceError(f"request {i} of {self.name} is forgotten: a streamed trace serves one replay")
        return prompt_tokens(self._held[i], self.content_block_size, i, int(self.input_len[i]))

    def output_tokens(self, i: int) -> Int32Array:
        """Return the output of request ``i``: [output_len[i]] int32, tokens that occur nowhere else."""
        return output_tokens(i, int(self.output_len[i]))

    def forget(self, i: int) -> None:
        """Let go of the prompt of request ``i``."""
        self._held.pop(i, None)

    def faster(self, speed: float) -> StreamedTrace:
        """Return the same requests arriving ``speed`` times as fast; they read the file anew."""
        other = copy.copy(self)
        other.arrival_s = sped_up(self.arrival_s, speed)
        other._begin()
        return other

    def _begin(self) -> None:
        self._held: dict[int, Int64Array] = {}
        self._rows: Iterator[Row] | None = None
        self._num_passed = 0

    def _pass_one(self) -> None:
        source = self._reading.source
        if self._rows is None:
            if source.stamp() not in (None, self._stamp):
                raise source.error("the file has changed since its requests were counted")
            self._rows = iter(self._reading)
        i, row = self._num_passed, next(self._rows, None)
        if row is None or row.input_len != self.input_len[i]:
            raise source.error(f"the file has changed: request {i + 1} is another one")
        self._held[i] = content_pairs(row)
        self._num_passed += 1
