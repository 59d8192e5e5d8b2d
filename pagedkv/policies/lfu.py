"""Least frequently used, among equals least recently used."""

from pagedkv.block_tables import Int32Array
from pagedkv.policies.leaf_policy import LeafPolicy
from pagedkv.policies.policy import BlockView


class LFU(LeafPolicy):
    """Gives up what was hit least often since it has its content; of equals, the least recently used.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(2, block_size=1, policy="lfu")
    >>> for seq_id, token in enumerate([7, 7, 8, 9, 7]):
    ...     opened = manager.open(seq_id, [token], max_cached_tokens=1)
    ...     manager.commit(seq_id, [token][opened.num_cached_tokens:]); manager.close(seq_id)
    >>> manager.stats().hit_tokens
    2
    """

    def bind(self, view: BlockView) -> None:
        """Start without hits."""
        super().bind(view)
        self._hits = self.per_block(0)

    def score(self, block: int) -> tuple[int, int]:
        """Hits, then the time of the last use."""
        return self._hits[block], self._pushed

    def hit(self, ids: Int32Array) -> None:
        """Count."""
        for block in ids.tolist():
            self._hits[block] += 1
