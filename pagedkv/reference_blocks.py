"""What the slow models are made of: blocks, sequences, and whole prefixes as keys."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pagedkv.namespace import Media, Namespace


class Content(NamedTuple):
    """What one block holds itself: its tokens, and media as (offset in the block, content id)."""

    tokens: tuple[int, ...]
    media: tuple[tuple[int, str], ...]


Path = tuple[Any, ...]
"""All that a block's K and V hang on: the namespace or None, then the ``Content`` of every block up to it."""


def path_of(
    namespace: Namespace | None, media: Iterable[Media], tokens: Sequence[int], block_size: int
) -> Path:
    """The path of a whole sequence, its partial block included.

    >>> path_of(None, [Media(2, "cat")], [5, 6, 7], block_size=2)
    (None, Content(tokens=(5, 6), media=()), Content(tokens=(7,), media=((0, 'cat'),)))
    """
    items = sorted({(m.offset, m.content_id) for m in media})
    blocks = []
    for start in range(0, len(tokens), block_size):
        inside = tuple((at - start, name) for at, name in items if start <= at < start + block_size)
        blocks.append(Content(tuple(tokens[start : start + block_size]), inside))
    return (None if namespace == Namespace() else namespace, *blocks)


def num_common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


class ModelBlock:
    """A block as the models know it: how many hold it, and the prefix that it is cached for, if any."""

    def __init__(self) -> None:
        """Start held once, without content."""
        self.refs = 1
        self.path: Path | None = None


class ModelSequence:
    """A sequence: what it holds, and what it was given."""

    def __init__(self, namespace: Namespace | None, media: Iterable[Media], length: int) -> None:
        """Hold nothing yet."""
        self.namespace = namespace
        self.media = set(media)
        self.length = length
        self.blocks: list[ModelBlock] = []
        self.tokens: list[int] = []  # the committed ones


class Announced(NamedTuple):
    """A prompt that a sequence is about to compute; ``tokens`` as far as the sequence still has them."""

    tokens: list[int]
    path: Path


class ModelEvent(NamedTuple):
    """``kind`` "stored" or "removed" of one content, with the reason of a removal; or "cleared"."""

    kind: str
    path: Path
    reason: str
