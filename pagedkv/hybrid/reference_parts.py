"""What the slow model of the hybrid manager is made of: blocks, sequences, and whole prefixes as keys."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagedkv.hybrid.group import CacheGroup
from pagedkv.namespace import Namespace
from pagedkv.reference_blocks import ModelBlock, num_common_tokens

Prefix = tuple[object, ...]
"""Namespace and all tokens up to the end of a block: a content."""


class HybridBlock(ModelBlock):
    """A block of one group; ``path`` is its place in the tree of blocks that the policy sees."""

    def __init__(self, group: int) -> None:
        """Start held once, without content."""
        super().__init__()
        self.group = group
        self.prefix: Prefix | None = None  # what it holds, once others may find it


class HybridSequence:
    """A sequence: what it holds in each group, and its tokens."""

    def __init__(
        self, namespace: Namespace | None, blocks: list[list[HybridBlock | None]], length: int
    ) -> None:
        """Hold ``blocks``, per group; None where a block fell out of the window."""
        self.namespace, self.blocks, self.length = namespace, blocks, length
        self.tokens: list[int] = []  # the committed ones

    def tail(self) -> HybridBlock:
        """The last block of the first group; whoever shares it shares the last block of every group."""
        block = self.blocks[0][-1]
        assert block is not None
        return block

    def prefixes(self, block_size: int) -> list[Prefix]:
        """The contents that it holds, the shortest first: full committed blocks, and that of a cut tail."""
        full = range(1, len(self.tokens) // block_size + 1)
        found: list[Prefix] = [(self.namespace, *self.tokens[: i * block_size]) for i in full]
        if self.length % block_size and (tail := self.tail().prefix) is not None:
            found.append(tail)
        return found


class HybridEvent(NamedTuple):
    """``kind`` "stored" or "removed", of which content in which group, with the reason of a removal."""

    kind: str
    group: int
    prefix: Prefix
    reason: str


class Held(NamedTuple):
    """What a pin holds, or a fence: blocks, and contents, the longest first."""

    blocks: list[HybridBlock]
    prefixes: list[Prefix]


def tree_path(groups: Sequence[CacheGroup], group: int, prefix: Prefix, block_size: int) -> Prefix:
    """Where a policy sees a block: behind those of all groups without a window, if there are any."""
    full = [g for g, other in enumerate(groups) if other.window is None][::-1]
    if not full:
        return prefix[0], (prefix, group)
    ends = range(block_size + 1, len(prefix) + 1, block_size)
    path = [(prefix[end - block_size : end], g) for end in ends for g in full]
    if group in full:
        return prefix[0], *path[: len(path) - (len(full) - 1 - full.index(group))]
    return prefix[0], *path, (prefix[-block_size:], group)


def best_child(
    known: Iterable[Prefix], parent: Prefix, wanted: Sequence[int], block_size: int
) -> tuple[Prefix | None, int]:
    """Of the contents behind ``parent``, the newest that shares most of ``wanted``.

    ``known`` has the oldest first.
    """
    best, most = None, 0
    for prefix in reversed(list(known)):
        if len(prefix) == len(parent) + block_size and prefix[: len(parent)] == parent:
            tokens = [token for token in prefix[len(parent) :] if isinstance(token, int)]
            if (count := num_common_tokens(tokens, wanted)) > most:
                best, most = prefix, count
    return best, most


def let_go(groups: Sequence[CacheGroup], rows: Sequence[Sequence[HybridBlock | None]]) -> list[HybridBlock]:
    """Blocks as they are let go of: the deepest first, of one depth those of window groups first."""
    found: list[HybridBlock] = []
    for column in reversed(list(zip(*rows, strict=True))):
        present = [block for block in column if block is not None]
        found += sorted(present, key=lambda b: groups[b.group].window is None)
    return found


def continues(prefix: Prefix, other: Prefix | None) -> bool:
    """Whether a content builds on another."""
    return other is not None and len(prefix) > len(other) and prefix[: len(other)] == other
