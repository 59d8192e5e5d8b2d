"""Belady: what is used again last goes first; for replays, where the future is known."""

import math
from collections.abc import Iterable

from pagedkv.block_tables import Int32Array
from pagedkv.policies.leaf_policy import LeafPolicy
from pagedkv.policies.policy import BlockView


class Belady(LeafPolicy):
    """Gives up what is used again last, or never: an upper bound for all others.

    The caller announces when held blocks are used next, before they are released. What was not announced is
    never used again. A bound where sequences run one after the other; it holds for policies that, like a
    manager, cache everything that is computed.

    >>> from pagedkv import KVCacheManager
    >>> belady = Belady()
    >>> manager = KVCacheManager(2, block_size=1, policy=belady)
    >>> for token, next_use in ((7, 3), (8, 9), (9, 4), (7, 5)):
    ...     opened = manager.open("a", [token], max_cached_tokens=1)
    ...     manager.commit("a", [token][opened.num_cached_tokens:])
    ...     belady.announce(manager.tables.block_ids("a"), [next_use]); manager.close("a")
    >>> manager.stats().hit_tokens
    1
    """

    def bind(self, view: BlockView) -> None:
        """Expect nothing to be used."""
        super().bind(view)
        self._next_use = self.per_block(math.inf)

    def announce(self, ids: Int32Array, next_uses: Iterable[float]) -> None:
        """Say when each of these held blocks is used next, on any scale; ``math.inf`` for never."""
        for block, next_use in zip(ids.tolist(), next_uses, strict=True):
            self._next_use[block] = next_use

    def score(self, block: int) -> tuple[float, int]:
        """Last use first, then least recently used."""
        return -self._next_use[block], self._pushed
