"""SIEVE: first in, first out, but a hand passes once over what was hit."""

from itertools import chain

import numpy as np

from pagedkv.block_tables import Int32Array
from pagedkv.policies.fifo import FIFO
from pagedkv.policies.leaf_policy import Candidates, Choice, Key
from pagedkv.policies.policy import BlockView

_START: Key = (0, 0)


class SIEVE(FIFO):
    """A hand goes from the oldest to the newest leaf, round and round, and takes the first that was not hit.

    ::

        oldest [ ] [hit] [ ] [hit] [ ] newest        [ ] was not hit since the hand last passed
                     ^ hand                          the hand forgives the hit, and takes the next

    One bit per block and no move on a hit; what was never hit goes soon, however new.
    """

    def bind(self, view: BlockView) -> None:
        """Put the hand before the oldest."""
        super().bind(view)
        self._was_hit = self.per_block(False)
        self._hand = _START

    def hit(self, ids: Int32Array) -> None:
        """The hand will pass over them once."""
        for block in ids.tolist():
            self._was_hit[block] = True

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Whom the hand would take, none of ``keep``."""
        return np.array(self._walk(count, keep.tolist())[0], np.int32)

    def evict(self, ids: Int32Array) -> None:
        """Let the hand go."""
        blocks, passed = self._walk(len(ids), [])
        for block in passed:
            self._was_hit[block] = False
        last = self._key[blocks[-1]] if blocks else None
        self.forget(ids)
        if last is not None:
            beyond = next(self._leaves[0].irange(last), None)
            self._hand = last if beyond is not None else _START

    def _walk(self, count: int, keep: list[int]) -> tuple[list[int], set[int]]:
        """Whom the hand takes, and whose hits it forgives on the way. Keys are (round, since, block)."""
        leaves, choice, passed = self._leaves[0], Choice(self), set[int]()
        ahead = ((0, *key) for key in leaves.irange(self._hand))
        behind = ((1, *key) for key in leaves.irange(None, self._hand, inclusive=(True, False)))
        candidates = Candidates(chain(ahead, behind), keep)
        while len(choice.blocks) < count and (key := candidates.pop()) is not None:
            turn, block = key[0], key[-1]
            if self._was_hit[block] and block not in passed:
                passed.add(block)
                candidates.put((turn + 1, *key[1:]))
                continue
            exposed = choice.take(block)
            if exposed is not None:
                candidates.put((turn + (exposed < key[1:]), *exposed))
        return choice.blocks, passed
