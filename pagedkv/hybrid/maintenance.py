"""What is done to a whole hybrid pool while it is in use."""

from pagedkv.hybrid.retention import GroupRetention
from pagedkv.hybrid.rows import Rows
from pagedkv.maintenance import Maintenance


class GroupMaintenance(Maintenance):
    """As `Maintenance`; a block that moves stays with its group, and with its content.

    A pool that grows gets room for as many more contents; when it shrinks, that room stays.

    >>> from pagedkv.hybrid import CacheGroup, HybridKVCacheManager
    >>> groups = CacheGroup("full", (1,)), CacheGroup("local", (0,), window=2)
    >>> manager = HybridKVCacheManager(groups, num_blocks=8, block_size=2)
    >>> for name in "ab":
    ...     _ = manager.open(name, [1, 2, 3, 4])
    >>> manager.close("a"); manager.maintenance.resize(4)
    BlockCopies(src=array([5, 6, 7, 8], dtype=int32), dst=array([1, 2, 3, 4], dtype=int32))
    >>> [table.block_ids("b").tolist() for table in manager.tables.values()]
    [[1, 2], [3, 4]]
    """

    def __init__(self, rows: Rows, retention: GroupRetention) -> None:
        """Look after the blocks of all groups, which ``rows`` and ``retention`` hold."""
        super().__init__(rows.tree, rows, retention)
        self._contents = rows.tree.nodes

    def reset(self) -> bool:
        """Forget all cached content: every block is free then. False while any block is held, or content.

        (A pin, a fence, or a sequence whose windows are shorter than a block may hold contents alone.)
        Cost: O(cached blocks).
        """
        return not self._contents.num_active and super().reset()
