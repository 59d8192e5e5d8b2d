"""The content of a sequence as the prefix index sees it: full blocks of tokens, extra keys, hashes."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pagedkv.block_hash import UInt64Array
from pagedkv.errors import PagedKVError
from pagedkv.namespace import ExtraKeys, Media, Namespace, digest64, extra_keys_by_block
from pagedkv.page_table import Int32Array
from pagedkv.prefix_index import PrefixIndex

MAX_TOKEN_ID = 2**31 - 1


class Content(NamedTuple):
    """Consecutive full blocks: tokens [n, block_size] int32, extra [n] int32, hashes [n] uint64."""

    tokens: Int32Array
    extra: Int32Array
    hashes: UInt64Array


class SequenceExtra(NamedTuple):
    """Namespace and media of one sequence, and (key, digest) of each block that has an extra key."""

    namespace: Namespace | None
    media: tuple[Media, ...]
    by_block: dict[int, tuple[tuple[object, ...], int]]

    @classmethod
    def build(
        cls, namespace: Namespace | None, media: Iterable[Media], num_tokens: int, block_size: int
    ) -> "SequenceExtra":
        """Work out the extra keys; raises ``PagedKVError`` for bad media or a bad namespace."""
        if namespace is None and media == ():
            return NO_EXTRA
        items = tuple(Media(*item) for item in media)
        keys = extra_keys_by_block(namespace, items, num_tokens, block_size)
        return cls(namespace, items, {i: (key, digest64(key)) for i, key in keys.items()})

    def truncated(self, num_tokens: int, block_size: int) -> "SequenceExtra":
        """What is left when the sequence is cut to ``num_tokens``."""
        media = tuple(item for item in self.media if item.offset < num_tokens)
        if media == self.media:
            return self
        return SequenceExtra.build(self.namespace, media, num_tokens, block_size)


NO_EXTRA = SequenceExtra(None, (), {})


def as_token_array(tokens: Any) -> Int32Array:
    """Token ids as int32 [n]; ``PagedKVError`` unless they are integers in 0..2^31 - 1, in one dimension."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise PagedKVError(f"tokens must have one dimension, got shape {array.shape}")
    if not array.size:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        raise PagedKVError(f"tokens must be integers, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN_ID:
        raise PagedKVError(f"token ids must be in 0..{MAX_TOKEN_ID}, got {low if low < 0 else high}")
    return array.astype(np.int32, copy=False)


def read_content(
    index: PrefixIndex, keys: ExtraKeys, extra: SequenceExtra, tokens: Int32Array, first: int, parent: int
) -> Content:
    """Content of the blocks ``first ..`` of a sequence, given as tokens [n, block_size].

    ``parent`` is the indexed block before them, ``ROOT`` for the first. Changes nothing.
    """
    n = len(tokens)
    extra_ids = np.zeros(n, np.int32)
    digests: UInt64Array | None = None
    if extra.by_block:
        digests = np.zeros(n, np.uint64)
        for i, (key, digest) in extra.by_block.items():
            if first <= i < first + n:
                extra_ids[i - first], digests[i - first] = keys.find(key), digest
    hashes = index.hasher.chain(tokens, digests, first, index.hash[parent])
    return Content(tokens, extra_ids, hashes)
