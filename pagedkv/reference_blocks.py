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
        self.chain: list[ModelBlock] | None = None  # indexed blocks that it holds, once it has dropped some

    def held(self) -> list[ModelBlock]:
        """All that it holds, parents before their children."""
        chain = self.chain or []
        return chain + [block for block in self.blocks if block not in chain]


class Announced(NamedTuple):
    """A prompt that a sequence is about to compute; ``tokens`` as far as the sequence still has them."""

    tokens: list[int]
    path: Path


class ModelEvent(NamedTuple):
    """``kind`` "stored" or "removed" of one content, with the reason of a removal; or "cleared"."""

    kind: str
    path: Path
    reason: str


def best_child(
    by_path: dict[Path, ModelBlock], prompt: Path, depth: int, limit: int
) -> tuple[ModelBlock | None, int]:
    """Of the blocks behind the first ``depth`` of ``prompt``, the newest that shares most of what follows.

    ``by_path`` has the oldest first. Returns (None, 0) if none shares any of the next ``limit`` tokens.
    """
    best, most = None, 0
    wanted = prompt[depth + 1] if depth + 1 < len(prompt) else Content((), ())
    for path, block in reversed(by_path.items()):
        if path[:-1] == prompt[: depth + 1] and path[-1].media == wanted.media:
            count = num_common_tokens(path[-1].tokens, wanted.tokens[: max(limit, 0)])
            if count > most:
                best, most = block, count
    return best, most


def used_slots(by_path: dict[Path, ModelBlock], seqs: Iterable[ModelSequence], block_size: int) -> int:
    """Slots of held blocks that a sequence has reached, and all of a block that is indexed."""
    filled: dict[int, int] = {id(b): block_size for b in by_path.values() if b.refs}
    for seq in seqs:
        for i, block in enumerate(seq.blocks):
            reached = min(block_size, seq.length - i * block_size)
            filled[id(block)] = max(filled.get(id(block), 0), reached)
    return sum(filled.values())


def num_held_alone(references: Sequence[ModelBlock]) -> int:
    """How many blocks nothing else holds: ``references`` names each as often as it is held there."""
    counts: dict[int, int] = {}
    for block in references:
        counts[id(block)] = counts.get(id(block), 0) + 1
    return sum(block.refs == counts.pop(id(block), -1) for block in references)


def paths_behind(by_path: Iterable[Path], block: ModelBlock) -> list[Path]:
    """What builds on a block, deepest first."""
    path = block.path
    if path is None:
        return []
    found = [p for p in by_path if len(p) > len(path) and p[: len(path)] == path]
    return sorted(found, key=len, reverse=True)


def shared_tails(
    by_path: Iterable[Path], seqs: Sequence[ModelSequence], block_size: int
) -> tuple[list[ModelSequence], list[ModelBlock], list[ModelBlock]]:
    """What must happen to the partial tails of sequences that are to grow.

    Returns the sequences that must copy theirs, tails that the longest of their holders (and the last of
    several) keeps, and tails that it would keep if nothing cached built on them.
    """
    partial = [s for s in seqs if s.length % block_size]
    copies = [s for s in partial if s.blocks[-1].refs > 1 or s.blocks[-1].path is not None]
    kept, burdened = [], []
    for block in {id(s.blocks[-1]): s.blocks[-1] for s in copies}.values():
        holders = [s for s in copies if s.blocks[-1] is block]
        if len(holders) == block.refs and paths_behind(by_path, block):
            burdened.append(block)
        elif len(holders) == block.refs:
            copies.remove(max(reversed(holders), key=lambda s: s.length))
            kept.append(block)
    return copies, kept, burdened
