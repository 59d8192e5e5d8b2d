"""First in, first out: hits do not count."""

from pagedkv.policies.leaf_policy import LeafPolicy
from pagedkv.policies.policy import BlockView


class FIFO(LeafPolicy):
    """Gives up what became idle for the first time longest ago, however often it was hit since.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(2, block_size=1, policy="fifo")
    >>> for seq_id, token in enumerate([7, 8, 7, 9, 7]):
    ...     opened = manager.open(seq_id, [token], max_cached_tokens=1)
    ...     manager.commit(seq_id, [token][opened.num_cached_tokens:]); manager.close(seq_id)
    >>> manager.stats().hit_tokens
    1
    """

    def bind(self, view: BlockView) -> None:
        """Remember since when each block has its content."""
        super().bind(view)
        self._since = self.per_block(0)

    def score(self, block: int) -> int:
        """When the content came."""
        if not self._since[block]:
            self._since[block] = self._pushed
        return self._since[block]
