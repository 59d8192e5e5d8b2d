"""What a sequence holds, as the prefix index compares it: tokens and extra keys."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import core
from pagedkv.block_tables import Int32Array
from pagedkv.errors import PagedKVError
from pagedkv.namespace import ExtraKeys, Media, Namespace, extra_keys_by_block, require_media

MAX_TOKEN_ID = 2**31 - 1


class SequenceExtra(NamedTuple):
    """Namespace and media of one sequence, and the extra key of each block that has one."""

    namespace: Namespace | None
    media: tuple[Media, ...]
    by_block: dict[int, tuple[object, ...]]

    @classmethod
    def build(
        cls, namespace: Namespace | None, media: Iterable[Media], num_tokens: int, block_size: int
    ) -> "SequenceExtra":
        """Work out the extra keys; raises ``PagedKVError`` for bad media or a bad namespace."""
        if namespace is None and isinstance(media, tuple) and not media:
            return NO_EXTRA
        items = _as_tuple(media)
        by_block = extra_keys_by_block(namespace, items, num_tokens, block_size)
        return cls(namespace, items, by_block) if by_block else NO_EXTRA

    def extended(self, media: Iterable[Media], start: int, stop: int, block_size: int) -> "SequenceExtra":
        """With media that start at ``start <= offset < stop``; ``PagedKVError`` for any that do not."""
        new = _as_tuple(media)
        if not new:
            return self
        for item in new:
            require_media(item, stop)
            if item.offset < start:
                raise PagedKVError(
                    f"media {item.content_id!r} starts at {item.offset}, before the {start} committed tokens"
                )
        both = self.media + new
        last = max([stop, *(item.offset + 1 for item in both)])
        return SequenceExtra.build(self.namespace, both, last, block_size)

    def truncated(self, num_tokens: int, block_size: int) -> "SequenceExtra":
        """What is left when the sequence is cut to ``num_tokens``."""
        media = tuple(item for item in self.media if item.offset < num_tokens)
        if media == self.media:
            return self
        return SequenceExtra.build(self.namespace, media, num_tokens, block_size)

    def ids(self, keys: ExtraKeys, first: int, count: int) -> Int32Array:
        """Ids of the extra keys of ``count`` blocks: 0 for none, -1 for a key that nobody uses."""
        found: Int32Array = np.zeros(count, np.int32)
        if not self.by_block:
            return found
        for i, key in self.by_block.items():
            if first <= i < first + count:
                found[i - first] = keys.find(key)
        return found


NO_EXTRA = SequenceExtra(None, (), {})


def _as_tuple(media: Iterable[Media]) -> tuple[Media, ...]:
    try:
        return tuple(media)
    except TypeError:
        raise PagedKVError(f"media must be a sequence of Media(offset, content_id), got {media!r}") from None


def as_token_array(tokens: Any) -> Int32Array:
    """Token ids as int32 [n]; ``PagedKVError`` unless they are integers in 0..2^31 - 1, in one dimension."""
    if type(tokens) is np.ndarray and _are_tokens(tokens):  # a subclass may compare in another way
        return tokens
    try:
        array = np.asarray(tokens)
    except ValueError as error:
        raise PagedKVError(f"tokens must be a sequence of integers: {error}") from None
    if array.ndim != 1:
        raise PagedKVError(f"tokens must have one dimension, got shape {array.shape}")
    if not array.size:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        raise PagedKVError(f"tokens must be integers, got {array.dtype}")
    if array.dtype == np.int32:
        wrong = int(array.min())  # one pass suffices: nothing in int32 is too large
    else:
        low, high = int(array.min()), int(array.max())
        wrong = low if low < 0 else high
    if not 0 <= wrong <= MAX_TOKEN_ID:
        raise PagedKVError(f"token ids must be in 0..{MAX_TOKEN_ID}, got {wrong}")
    return np.require(array, np.int32, "A")


def _are_tokens(array: "npt.NDArray[Any]") -> bool:
    """Whether nothing has to be converted or refused; only the compiled core can tell at once."""
    return False


if not TYPE_CHECKING and core.reason() is None:
    from pagedkv._core import are_tokens as _are_tokens
