"""S3-FIFO: a small queue for what is new, a main queue for what was hit, and the ghosts of the small one."""

import numpy as np

from pagedkv.block_tables import Int32Array
from pagedkv.policies.fingerprints import Fingerprints, Ghosts
from pagedkv.policies.leaf_policy import Candidates, Choice, LeafPolicy
from pagedkv.policies.policy import NO_BLOCKS, BlockView

_SMALL, _MAIN = 0, 1
_MOST_HITS = 3
_HITS_FOR_MAIN = 2


class S3FIFO(LeafPolicy):
    """Gives up quickly what is hit less than twice while it is new.

    ::

        new ---> [ small: 1/10 ] --- hit twice ---> [ main ] ---> gone
         |             '---> gone, a ghost            ^  '- hit: back to the end, one hit less
         '------------- is a ghost -------------------'

    9/10 as many ghosts are remembered as there are blocks. Until the first eviction, what the small
    queue has no room for goes to the main one.
    """

    lanes = 2

    def bind(self, view: BlockView) -> None:
        """Start with empty queues."""
        super().bind(view)
        self._hits = self.per_block(0)
        self._place = self.per_block(0)  # in its queue; 0: in none
        self._entered = 0
        self._sizes = [0, 0]  # held blocks included
        self._has_evicted = False
        self._prints = Fingerprints(view, self.per_block(0))
        self._ghosts = Ghosts()
        self._share_out()

    def score(self, block: int) -> int:
        """Its place in its queue."""
        return self._place[block]

    def push(self, ids: Int32Array) -> None:
        """Blocks became idle; those with new content enter a queue."""
        new = [block for block in ids.tolist() if not self._place[block]]
        if new:
            self._prints.learn(new[0])
        for block in new:
            full = not self._has_evicted and self._sizes[_SMALL] >= self._small_size
            to_main = self._ghosts.remove(self._prints[block]) or full
            self._enter(block, _MAIN if to_main else _SMALL)
        super().push(ids)

    def hit(self, ids: Int32Array) -> None:
        """Count, up to 3."""
        for block in ids.tolist():
            self._hits[block] = min(self._hits[block] + 1, _MOST_HITS)

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Whom the queues would let go, none of ``keep``."""
        return np.array(_Plan(self, count, keep).choice.blocks, np.int32)

    def evict(self, ids: Int32Array) -> None:
        """Give the second chances that led to these victims."""
        for block, hits in _Plan(self, len(ids), NO_BLOCKS).second_chances:
            self._hits[block] = hits
            self._sizes[self._lane[block]] -= 1
            old = self._lane[block]
            self._enter(block, _MAIN)
            self.rescore(block, old)
        for block in ids.tolist():
            if self._lane[block] == _SMALL:
                # one more than there is room for, as this may make room for the oldest ghost itself
                self._ghosts.trim(self._most_ghosts)
                self._ghosts.add(self._prints[block])
        self._has_evicted = self._has_evicted or len(ids) > 0
        self.forget(ids)

    def forget(self, ids: Int32Array) -> None:
        """Leave the queues."""
        for block in ids.tolist():
            if self._place[block]:
                self._sizes[self._lane[block]] -= 1
        super().forget(ids)

    def resize(self, num_blocks: int) -> None:
        """Give the queues and the ghosts their shares of the new size."""
        super().resize(num_blocks)
        self._ghosts.trim(self._most_ghosts)  # the one too many that ``evict`` may have left
        self._share_out()
        self._ghosts.trim(self._most_ghosts)

    def _share_out(self) -> None:
        self._small_size = max(1, self.num_blocks // 10)
        self._main_size = self.num_blocks - self._small_size
        self._most_ghosts = self.num_blocks * 9 // 10

    def _enter(self, block: int, lane: int) -> None:
        self._entered += 1
        self._place[block] = self._entered
        self._lane[block] = lane
        self._sizes[lane] += 1


class _Plan:
    """What evicting some blocks would do: whom it takes, and who gets a second chance, with how many hits."""

    def __init__(self, policy: S3FIFO, count: int, keep: Int32Array) -> None:
        self.choice = Choice(policy)
        self.second_chances: list[tuple[int, int]] = []
        self._policy = policy
        kept = keep.tolist()
        self._queues = [Candidates(leaves, kept) for leaves in policy._leaves]
        self._sizes = list(policy._sizes)
        self._hits: dict[int, int] = {}
        self._entered = policy._entered
        while len(self.choice.blocks) < count and self._take_one():
            pass

    def _take_one(self) -> bool:
        main_first = self._sizes[_MAIN] > self._policy._main_size or not self._sizes[_SMALL]
        lanes = (_MAIN, _SMALL) if main_first else (_SMALL, _MAIN)
        return self._take_from(lanes[0]) or self._take_from(lanes[1])

    def _take_from(self, lane: int) -> bool:
        while (key := self._queues[lane].pop()) is not None:
            block = key[-1]
            hits = self._hits.get(block, self._policy._hits[block])
            if lane == _SMALL and hits >= _HITS_FOR_MAIN:
                self._move(block, lane, 0)
            elif lane == _MAIN and hits:
                self._move(block, lane, hits - 1)
            else:
                self._sizes[lane] -= 1
                exposed = self.choice.take(block)
                if exposed is not None:
                    self._queues[self._policy._lane[exposed[-1]]].put(exposed)
                return True
        return False

    def _move(self, block: int, lane: int, hits: int) -> None:
        self._hits[block] = hits
        self.second_chances.append((block, hits))
        self._sizes[lane] -= 1
        self._sizes[_MAIN] += 1
        self._entered += 1
        self._queues[_MAIN].put((self._entered, block))
