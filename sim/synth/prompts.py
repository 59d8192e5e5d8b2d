"""Prompts put together from pieces that others use too: the contents come out as block ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pagedkv.sim.trace import Trace, TraceError


class Piece(NamedTuple):
    """A text: equal ``key`` means the same text, of which a prompt takes the first ``num_tokens``."""

    key: tuple[int, ...]
    num_tokens: int


class PromptBook:
    """Names the blocks of prompts, so that two prompts share exactly the blocks that their pieces make equal.

    A block is named by the text from the prompt's start to the block's end. Memory: one entry per distinct
    block; O(blocks) per prompt, about 1 us each.
    """

    def __init__(self, block_size: int) -> None:
        """Start with no block known."""
        self.block_size = block_size
        self._ids: dict[tuple[object, ...], int] = {}
        self.content_ids: list[int] = []
        self.offsets = [0]
        self.input_len: list[int] = []

    @property
    def num_contents(self) -> int:
        """Number of distinct contents so far."""
        return len(self._ids)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Append a prompt made of pieces, one behind the other.

        >>> book = PromptBook(4)
        >>> book.add([Piece((0,), 6), Piece((1,), 4)]); book.add([Piece((0,), 6), Piece((2,), 2)])
        >>> book.content_ids, book.offsets, book.input_len
        ([0, 1, 2, 0, 3], [0, 3, 5], [10, 8])
        """
        parent, room = -1, self.block_size
        waiting: list[object] = []  # text in the block begun, in which ``room`` tokens still fit
        for key, num_tokens in pieces:
            at = 0
            while num_tokens - at >= room:
                waiting += (key, at, at + room)
                parent = self._block(parent, waiting)
                at, waiting, room = at + room, [], self.block_size
            if num_tokens > at:
                waiting += (key, at, num_tokens)
                room -= num_tokens - at
        if waiting:
            self._block(parent, waiting)
        self.offsets.append(len(self.content_ids))
        self.input_len.append(sum(piece.num_tokens for piece in pieces))

    def _block(self, parent: int, text: list[object]) -> int:
        content = self._ids.setdefault((parent, *text), len(self._ids))
        self.content_ids.append(content)
        return content

    def trace(self, name: str, arrival_s: object, output_len: object, **columns: object) -> Trace:
        """All prompts as a trace; ``columns`` are optional ones of `Trace`."""
        if not self.input_len:
            raise TraceError("a workload needs at least one request, got 0")
        given: dict[str, object] = {
            "name": name,
            "arrival_s": arrival_s,
            "input_len": np.array(self.input_len, np.int64),
            "output_len": output_len,
            "content_ids": np.array(self.content_ids, np.int32),
            "content_offsets": np.array(self.offsets, np.int64),
            "content_block_size": self.block_size,
            "num_contents": self.num_contents,
        }
        return Trace(**given, **columns)  # type: ignore[arg-type]  # Trace checks them
