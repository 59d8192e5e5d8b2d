"""The base of policies that give every idle block a score: only leaves stand in the order."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any

import numpy as np
from sortedcontainers import SortedList

from pagedkv.page_table import Int32Array
from pagedkv.policies.policy import BlockView, EvictionPolicy

Key = tuple[Any, ...]
"""A score, least first, that ends in the block's id."""


class LeafPolicy(EvictionPolicy):
    """Gives up the leaf with the least score, then whichever leaf has the least score.

    A *leaf* is an idle block without idle children. Whoever is no leaf is in no container, only counts
    its children, so that releasing or evicting a long branch touches the container once.

    A subclass says the score of a block in ``score``, when the block becomes idle; the score stays until
    the block is held again. It may spread blocks over several ``lanes``, each with an order of its own,
    by writing ``_lane`` before the block becomes idle.

    Cost: O(log n) to add or remove a leaf, O(1) for any other block, whatever the number idle.
    """

    lanes = 1

    def bind(self, view: BlockView) -> None:
        """Make empty orders."""
        super().bind(view)
        size = view.num_blocks + 1
        self._key: list[Key | None] = [None] * size  # None: not idle
        self._lane: list[int] = [0] * size
        self._parent: list[int] = [0] * size
        self._children: list[int] = [0] * size  # how many are idle
        self._leaves: list[SortedList[Key]] = [SortedList() for _ in range(self.lanes)]
        self._pushed = 0

    @abstractmethod
    def score(self, block: int) -> Any:
        """What a block that becomes idle now is worth: numbers, or equally long tuples of them.

        ``self._pushed`` counts the blocks that became idle, this one included: a time.
        """

    def push(self, ids: Int32Array) -> None:
        """Blocks became idle: consecutive ones of one branch, deepest first."""
        blocks = ids.tolist()
        if not blocks:
            return
        for block, parent in zip(blocks, [*blocks[1:], self.view.parent(blocks[-1])], strict=True):
            self._pushed += 1
            self._key[block] = (self.score(block), block)
            self._parent[block] = parent
            self._children[parent] += 1
            if not self._children[block]:
                self._leaves[self._lane[block]].add(self._key[block])

    def discard(self, ids: Int32Array) -> None:
        """Blocks are not idle any more, if they were."""
        gone = [block for block in ids.tolist() if self._key[block] is not None]
        for block in gone:
            if not self._children[block]:
                self._leaves[self._lane[block]].remove(self._key[block])
            self._key[block] = None
        for block in gone:
            parent = self._parent[block]
            self._children[parent] -= 1
            if not self._children[parent] and self._key[parent] is not None:
                self._leaves[self._lane[parent]].add(self._key[parent])

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Up to ``count`` idle blocks, none of ``keep``: each time the leaf with the least score."""
        choice = Choice(self)
        candidates = Candidates(self._leaves[0], keep.tolist())
        while len(choice.blocks) < count and (key := candidates.pop()) is not None:
            exposed = choice.take(key[-1])
            if exposed is not None:
                candidates.put(exposed)
        return np.array(choice.blocks, np.int32)

    def rescore(self, block: int, old_lane: int = 0) -> None:
        """Let an idle block stand where its score and lane say now, after they have changed."""
        key = self._key[block]
        assert key is not None
        self._key[block] = (self.score(block), block)
        if not self._children[block]:
            self._leaves[old_lane].remove(key)
            self._leaves[self._lane[block]].add(self._key[block])


class Candidates:
    """Keys in ascending order: those of a sorted iterable, and those that are put in on the way."""

    def __init__(self, keys: Iterable[Key], keep: Iterable[int] = ()) -> None:
        """Start before the least of ``keys``; blocks of ``keep`` are passed over."""
        self._keys: Iterator[Key] = iter(keys)
        self._keep = frozenset(keep)
        self._next = next(self._keys, None)
        self._put: list[Key] = []

    def put(self, key: Key) -> None:
        """Add a key."""
        heappush(self._put, key)

    def pop(self) -> Key | None:
        """The least key that is left, which is then gone; None without any."""
        while True:
            if self._put and (self._next is None or self._put[0] < self._next):
                key = heappop(self._put)
            elif self._next is not None:
                key, self._next = self._next, next(self._keys, None)
            else:
                return None
            if key[-1] not in self._keep:
                return key


class Choice:
    """Blocks chosen so far in one ``first``, and which parents that makes leaves."""

    def __init__(self, policy: LeafPolicy) -> None:
        """Choose nothing yet."""
        self.blocks: list[int] = []
        self._policy = policy
        self._left: dict[int, int] = {}  # idle children that are not chosen

    def take(self, block: int) -> Key | None:
        """Choose a leaf; returns the key of its parent if that is idle and a leaf now."""
        self.blocks.append(block)
        parent = self._policy._parent[block]
        left = self._left.get(parent, self._policy._children[parent]) - 1
        self._left[parent] = left
        return self._policy._key[parent] if not left else None
