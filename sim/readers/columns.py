"""The requests read so far, as growing columns: their numbers, and what their prompts hold."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Any

import numpy as np

from pagedkv.sim.readers.row import Row
from pagedkv.sim.trace import NO_DEADLINE, Trace


class Numbers:
    """All of each request but its content. Memory: 64 bytes a request, and its sessions' names."""

    def __init__(self) -> None:
        """Start with no request."""
        self.num_requests = 0
        self.block_size = 0
        """Tokens per content, 0 as long as there was none."""
        self._arrival_s, self._think_s, self._deadline_s = array("d"), array("d"), array("d")
        self._input_len, self._output_len, self._priority = array("q"), array("q"), array("q")
        self._session, self._adapter = array("q"), array("q")
        self._sessions: dict[Hashable, int] = {}
        self._adapters: dict[str, int] = {}

    def add(self, row: Row) -> None:
        """Take a request; ``TraceError`` if its blocks have another size than those before."""
        if row.block_size != self.block_size and row.contents:
            if self.block_size:
                raise row.place.error(f"blocks of {row.block_size} tokens after blocks of {self.block_size}")
            self.block_size = row.block_size
        self.num_requests += 1
        self._arrival_s.append(row.arrival_s or 0.0)
        self._input_len.append(row.input_len)
        self._output_len.append(row.output_len)
        self._session.append(_number(self._sessions, row.session))
        self._adapter.append(_number(self._adapters, row.adapter))
        self._think_s.append(np.nan if row.think_s is None else row.think_s)
        self._deadline_s.append(NO_DEADLINE if row.deadline_s is None else row.deadline_s)
        self._priority.append(row.priority)

    def trace(self, name: str, notes: tuple[str, ...], contents: Contents | None = None) -> Trace:
        """The requests as a trace, without ``contents`` as one that says nothing about content."""
        offsets = np.zeros(self.num_requests + 1, np.int64)
        ids, block_size, num_contents = np.empty(0, np.int32), 0, 0
        if contents is not None:
            ids, offsets, block_size = np.array(contents.ids), np.array(contents.offsets), self.block_size
            num_contents = contents.num_contents
        return Trace(
            name,
            np.array(self._arrival_s),
            np.array(self._input_len),
            np.array(self._output_len),
            ids,
            offsets,
            block_size,
            num_contents,
            session=np.array(self._session),
            think_s=np.array(self._think_s),
            deadline_s=np.array(self._deadline_s),
            priority=np.array(self._priority),
            adapter=np.array(self._adapter),
            adapter_names=tuple(self._adapters),
            notes=notes,
        )


class Contents:
    """Contents renumbered in order of appearance. Memory: 4 bytes each, and an entry per distinct one."""

    def __init__(self) -> None:
        """Start with no request."""
        self.ids, self.offsets = array("i"), array("q", [0])
        self._known: dict[Hashable, int] = {}

    @property
    def num_contents(self) -> int:
        """Distinct ones."""
        return len(self._known)

    def add(self, row: Row) -> None:
        """Take those of a request."""
        known = self._known
        self.ids.extend([known.setdefault(key, len(known)) for key in row.content_keys()])
        self.offsets.append(len(self.ids))


def _number(numbers: dict[Any, int], key: Any) -> int:
    """The number of a key, from 0 in order of appearance; -1 for none."""
    return -1 if key is None else numbers.setdefault(key, len(numbers))
