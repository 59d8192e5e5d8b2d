"""The base of policies that give every idle block a score: only leaves stand in the order."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any, TypeVar

import numpy as np
from sortedcontainers import SortedList

from pagedkv.block_tables import Int32Array
from pagedkv.policies.policy import BlockView, EvictionPolicy

Key = tuple[Any, ...]
"""A score, least first, that ends in the block's id."""

T = TypeVar("T")


class LeafPolicy(EvictionPolicy):
    """Gives up the leaf with the least score, then whichever leaf has the least score.

    A *leaf* is an idle block without idle children. Whoever is no leaf is in no container, only counts
    its children, so that releasing or evicting a long branch touches the container once.

    A subclass says the score of a block in ``score``, when the block becomes idle; the score stays until
    the block is held again. It may spread blocks over several ``lanes``, each with an order of its own,
    by writing ``_lane`` before the block becomes idle.

    What it remembers of each block it keeps in lists from ``per_block``, made in ``bind``: they forget,
    move and grow with the blocks. What else names blocks, or depends on how many there are, is to be seen
    to in ``rename`` and ``resize``.

    Cost: O(log n) to add or remove a leaf, O(1) for any other block, whatever the number idle.
    """

    lanes = 1

    def bind(self, view: BlockView) -> None:
        """Make empty orders."""
        super().bind(view)
        self._lists: list[tuple[list[Any], Any]] = []  # all that ``per_block`` made, with their defaults
        self._key: list[Key | None] = self.per_block(None)  # None: not idle
        self._lane = self.per_block(0)
        self._parent = self.per_block(0)
        self._children = self.per_block(0)  # how many are idle
        self._leaves: list[SortedList[Key]] = [SortedList() for _ in range(self.lanes)]
        self._pushed = 0

    def per_block(self, default: T) -> list[T]:
        """A list to be indexed by block id: ``default`` for whoever has no content or is not known yet."""
        values = [default] * (self.num_blocks + 1)
        self._lists.append((values, default))
        return values

    @abstractmethod
    def score(self, block: int) -> Any:
        """What a block that becomes idle now is worth: numbers, or equally long tuples of them.

        ``self._pushed`` counts the blocks that became idle, this one included: a time. No two blocks may
        have the same score, or their ids decide.
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

    def forget(self, ids: Int32Array) -> None:
        """Blocks have lost their content, and all that is known of it goes back to the defaults."""
        self.discard(ids)
        blocks = ids.tolist()
        for values, default in self._lists:
            for block in blocks:
                values[block] = default

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Move what is known of blocks. Cost: O(log n) for each, and O(num_blocks) if one is a parent."""
        names = dict(zip(old.tolist(), new.tolist(), strict=True))
        for block in names:
            if self._key[block] is not None and not self._children[block]:
                self._leaves[self._lane[block]].remove(self._key[block])
        for values, default in self._lists:
            for block, name in names.items():
                values[name], values[block] = values[block], default
        for name in names.values():
            key = self._key[name]
            if key is not None:
                self._key[name] = (*key[:-1], name)
                if not self._children[name]:
                    self._leaves[self._lane[name]].add(self._key[name])
        parents = {block: name for block, name in names.items() if self._children[name]}
        if parents:
            self._parent[:] = [parents.get(parent, parent) for parent in self._parent]

    def resize(self, num_blocks: int) -> None:
        """Let the lists have as many entries. Cost: O(num_blocks), without a step per block."""
        super().resize(num_blocks)
        for values, default in self._lists:
            del values[num_blocks + 1 :]
            values += [default] * (num_blocks + 1 - len(values))

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
