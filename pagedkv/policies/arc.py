"""ARC: two LRU lists, for what was used once and what was used again, whose sizes learn from ghosts."""

import numpy as np

from pagedkv.block_tables import Int32Array
from pagedkv.policies.fingerprints import Fingerprints, Ghosts
from pagedkv.policies.leaf_policy import Candidates, Choice, LeafPolicy
from pagedkv.policies.policy import BlockView

_ONCE, _AGAIN = 0, 1


class ARC(LeafPolicy):
    """Balances recency and frequency.

    ::

        ghosts of [ used once ]  | target |  [ used again ] of ghosts
        content that was a ghost of either side moves the target towards that side, and is "used again"

    The published algorithm adapts when content is asked for, before it makes room. A manager learns a
    block's content only once it is computed, so here the target moves one eviction later.
    """

    lanes = 2

    def bind(self, view: BlockView) -> None:
        """Start with empty lists."""
        super().bind(view)
        self._is_known = self.per_block(False)
        self._sizes = [0, 0]  # held blocks included
        self._target = 0.0  # for the size of the list of what was used once
        self._ghosts = (Ghosts(), Ghosts())
        self._prints = Fingerprints(view, self.per_block(0))

    def score(self, block: int) -> int:
        """The time of the last use."""
        return self._pushed

    def push(self, ids: Int32Array) -> None:
        """Blocks became idle; those with new content enter a list."""
        new = [block for block in ids.tolist() if not self._is_known[block]]
        if new:
            self._prints.learn(new[0])
        for block in new:
            self._is_known[block] = True
            self._lane[block] = self._lane_of_new(self._prints[block])
            self._sizes[self._lane[block]] += 1
            self._trim_ghosts()
        super().push(ids)

    def hit(self, ids: Int32Array) -> None:
        """What was used once was used again."""
        for block in ids.tolist():
            if self._is_known[block]:
                self._sizes[self._lane[block]] -= 1
                self._sizes[_AGAIN] += 1
                self._lane[block] = _AGAIN

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Least recently used of the list that is above its target, none of ``keep``."""
        choice, kept, once = Choice(self), keep.tolist(), self._sizes[_ONCE]
        lists = [Candidates(leaves, kept) for leaves in self._leaves]
        while len(choice.blocks) < count:
            lane = _ONCE if once > self._target else _AGAIN
            key = lists[lane].pop() or lists[1 - lane].pop()
            if key is None:
                break
            once -= self._lane[key[-1]] == _ONCE
            exposed = choice.take(key[-1])
            if exposed is not None:
                lists[self._lane[exposed[-1]]].put(exposed)
        return np.array(choice.blocks, np.int32)

    def evict(self, ids: Int32Array) -> None:
        """Remember what goes."""
        for block in ids.tolist():
            self._ghosts[self._lane[block]].add(self._prints[block])
        self.forget(ids)

    def forget(self, ids: Int32Array) -> None:
        """Leave the lists."""
        for block in ids.tolist():
            if self._is_known[block]:
                self._sizes[self._lane[block]] -= 1
        super().forget(ids)

    def resize(self, num_blocks: int) -> None:
        """Keep the target within the cache, and no more ghosts than belong to it."""
        super().resize(num_blocks)
        self._target = min(self._target, float(num_blocks))
        self._trim_ghosts()

    def _trim_ghosts(self) -> None:
        """Each list with its ghosts is as long as the cache, or both together twice as long."""
        self._ghosts[_ONCE].trim(self.num_blocks - self._sizes[_ONCE])
        self._ghosts[_AGAIN].trim(2 * self.num_blocks - sum(self._sizes) - len(self._ghosts[_ONCE]))

    def _lane_of_new(self, fingerprint: int) -> int:
        """Where new content goes; a ghost moves the target."""
        once, again = len(self._ghosts[_ONCE]), len(self._ghosts[_AGAIN])
        if self._ghosts[_ONCE].remove(fingerprint):
            self._target = min(self._target + max(again / once, 1.0), float(self.num_blocks))
        elif self._ghosts[_AGAIN].remove(fingerprint):
            self._target = max(self._target - max(once / again, 1.0), 0.0)
        else:
            return _ONCE
        return _AGAIN
