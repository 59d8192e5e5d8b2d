"""Cost-aware: what is cheap to compute again and was seldom hit goes first, and everything ages."""

from collections.abc import Callable

from pagedkv.block_tables import Int32Array
from pagedkv.policies.leaf_policy import LeafPolicy
from pagedkv.policies.policy import BlockView


def prefill_cost(depth: int) -> float:
    """Work to compute a block again behind ``depth - 1`` others, in blocks without any attention.

    Attention of a token grows with what it reads. Behind some 2,000 blocks of 16 tokens it is as much work
    as all the rest of an 8B model.

    >>> prefill_cost(1), prefill_cost(2001)
    (1.0, 2.0)
    """
    return 1.0 + (depth - 1) / 2000


class CostAware(LeafPolicy):
    """Gives up the least of age + uses x cost; the age is that of the last block given up, and only grows.

    All blocks have one size. Of equals, the least recently used goes. ``cost(depth)`` is the work to compute
    the ``depth``-th block of a branch again, counted from 1; any unit.
    """

    def __init__(self, cost: Callable[[int], float] = prefill_cost) -> None:
        """Count with ``cost``, which must give the same for the same depth, and more than 0."""
        self._cost_at = cost

    def bind(self, view: BlockView) -> None:
        """Start at age 0."""
        super().bind(view)
        self._cost = self.per_block(0.0)  # 0: not known yet
        self._hits = self.per_block(0)
        self._age = 0.0

    def score(self, block: int) -> tuple[float, int]:
        """Age + uses x cost, then the time of the last use."""
        return self._age + (self._hits[block] + 1) * self._cost[block], self._pushed

    def push(self, ids: Int32Array) -> None:
        """Blocks became idle; find out how deep new content is."""
        blocks = ids.tolist()
        if not all(self._cost[block] for block in blocks):
            depth = len(self.view.path(blocks[0]))
            for i, block in enumerate(blocks):
                self._cost[block] = self._cost_at(depth - i)
        super().push(ids)

    def hit(self, ids: Int32Array) -> None:
        """Count."""
        for block in ids.tolist():
            self._hits[block] += 1

    def evict(self, ids: Int32Array) -> None:
        """Grow as old as what goes."""
        for block in ids.tolist():
            key = self._key[block]
            assert key is not None
            self._age = max(self._age, key[0][0])
        self.forget(ids)
