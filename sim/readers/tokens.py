"""Prompts as token ids straight from a row: no table of contents, so that a stream needs no memory."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.sim.readers.row import Row

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_UNIQUE = 2**30
"""From here on first tokens belong to one request alone."""

_MASK = 2**64 - 1


def content_pairs(row: Row) -> Int64Array:
    """Two tokens for each content of a prompt, [contents] int64: the first one in the lower half.

    Equal contents have equal pairs, in any process and any order of requests. Integers from 0 to 2**30 - 1
    stand for themselves, so that different ones differ in the first token already; others differ but for a
    chance of 2**-60 for each two (2**-30 for the first token alone). O(contents), 0.1 us each, 2 us
    where they are text, of an adapter, or beyond int64.
    """
    keys = _numbered(row.content_keys())
    if not len(keys) or keys.max() < _UNIQUE:
        return keys.view(np.int64)
    mixed = keys ^ (keys >> np.uint64(30))  # the finalizer of SplitMix64: one to one
    mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed = mixed * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    first = mixed & np.uint64(_UNIQUE - 1)
    second = (mixed >> np.uint64(33)) % np.uint64(2**31 - 1) + np.uint64(1)
    pairs = np.where(keys < _UNIQUE, keys, first | (second << np.uint64(32)))
    return pairs.view(np.int64)


def prompt_tokens(pairs: Int64Array, block_size: int, request: int, num_tokens: int) -> Int32Array:
    """The first ``num_tokens`` tokens of a prompt, [num_tokens] int32, from the pairs of its contents.

    Tokens that no content covers are unique to the ``request``. O(num_tokens), two numpy passes.

    >>> from pathlib import Path
    >>> from pagedkv.sim.readers.place import Place
    >>> a = Row(Place(Path("demo"), 1), 0.0, 5, 1, [7, 9], 2)
    >>> b = Row(Place(Path("demo"), 2), 0.0, 4, 1, [7, 8], 2)
    >>> prompt_tokens(content_pairs(a), 2, 0, 5).tolist(), prompt_tokens(content_pairs(b), 2, 1, 3).tolist()
    ([7, 0, 9, 0, 1073741824], [7, 0, 8])
    """
    named = _spread(pairs, block_size)[:num_tokens]
    if len(named) == num_tokens:
        return named
    return np.concatenate([named, _unique(2 * request, num_tokens - len(named))])


def output_tokens(request: int, num_tokens: int) -> Int32Array:
    """An output: [num_tokens] int32, tokens that occur nowhere else."""
    return _unique(2 * request + 1, num_tokens)


def _unique(number: int, num_tokens: int) -> Int32Array:
    pair = np.array([_UNIQUE + number % _UNIQUE + (number // _UNIQUE << 32)], np.int64)
    return _spread(pair, num_tokens)


def _spread(pairs: Int64Array, block_size: int) -> Int32Array:
    """Each pair as a block of tokens: first, second, first, and so on."""
    even = block_size + block_size % 2
    tokens = pairs.astype("<i8", copy=False).repeat(even // 2).view("<i4").astype(np.int32, copy=False)
    if even == block_size:
        return tokens
    odd: Int32Array = tokens.reshape(-1, even)[:, :block_size].reshape(-1)
    return odd


def _numbered(keys: Sequence[Hashable]) -> UInt64Array:
    """Contents as 64 bits: integers as they are, everything else by a digest."""
    if set(map(type, keys)) <= {int}:
        try:
            return np.array(keys, np.int64).view(np.uint64)
        except OverflowError:
            pass
    return np.array([_bits(key) for key in keys], np.uint64)


def _bits(key: Hashable) -> int:
    if type(key) is int and -(2**63) <= key < 2**63:
        return key & _MASK
    content = repr(key).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
