"""Prompts as token ids straight from a row: no table of contents, so that a stream needs no memory."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from pagedkv.sim.readers.row import Row

Int32Array = npt.NDArray[np.int32]

_LOW_31 = np.uint64(2**31 - 1)


def prompt_tokens(row: Row, num_tokens: int) -> Int32Array:
    """The first ``num_tokens`` tokens of a prompt, [num_tokens] int32, made from 62 bits of each content.

    Equal contents at equal depth give equal tokens, in any process and any order of requests; different ones
    give different tokens but for a chance of 2**-62 for each pair (2**-31 where a content is one token).
    Tokens that no content covers are unique to the request's place in its file. O(num_tokens).

    >>> from pathlib import Path
    >>> from pagedkv.sim.readers.place import Place
    >>> a = Row(Place(Path("demo"), 1), 0.0, 5, 1, [7, 9], 2)
    >>> b = Row(Place(Path("demo"), 2), 0.0, 4, 1, [7, 8], 2)
    >>> (prompt_tokens(a, 4) == prompt_tokens(b, 4)).tolist()
    [True, True, False, False]
    """
    block_size = row.block_size or num_tokens
    contents = row.content_keys()
    num_ids = -(-num_tokens // block_size) if num_tokens else 0
    named = [_digest("content", key) for key in contents[:num_ids]]
    if len(named) < num_ids:
        own = _digest("request", (row.place.line, row.place.item))
        named += [(own + i) % 2**64 for i in range(num_ids - len(named))]
    bits = np.array(named, np.uint64)
    halves = np.stack([bits & _LOW_31, (bits >> np.uint64(31)) & _LOW_31], axis=1).astype(np.int32)
    # low half, high half, low half, ... through each block
    pattern = np.arange(block_size) % 2
    tokens: Int32Array = halves[:, pattern].reshape(-1)[:num_tokens]
    return tokens


def _digest(kind: str, key: object) -> int:
    content = repr((kind, key)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
