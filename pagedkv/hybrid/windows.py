"""What the groups of a model see from a position, in whole blocks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.block_tables import Int64Array
from pagedkv.hybrid.group import CacheGroup


class Windows:
    """All groups at once: which blocks a token at a position needs of each.

    >>> groups = CacheGroup("full", (1,)), CacheGroup("local", (0,), window=4, sinks=1)
    >>> windows = Windows(groups, block_size=2)
    >>> windows.first_blocks(10), windows.seen(5, 10)[1].tolist()
    ([0, 3], [True, False, False, True, True])
    """

    def __init__(self, groups: Sequence[CacheGroup], block_size: int) -> None:
        """Look at ``groups`` in blocks of ``block_size`` tokens."""
        self.groups = groups
        self.block_size = block_size
        self.sink_blocks = np.array([group.sink_blocks(block_size) for group in groups])

    def first_blocks(self, position: int) -> list[int]:
        """Of each group, the first block that a query at ``position`` sees besides sinks."""
        return [group.first_block(position, self.block_size) for group in self.groups]

    def seen(self, num_blocks: int, position: int) -> npt.NDArray[np.bool_]:
        """Which of the first blocks each group needs for a query at ``position``: [groups, num_blocks]."""
        index, first = np.arange(num_blocks), np.array(self.first_blocks(position))
        seen: npt.NDArray[np.bool_] = (index >= first[:, None]) | (index < self.sink_blocks[:, None])
        return seen

    def num_held(self, committed: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """Blocks of all groups that sequences of so many tokens hold when so many of them are committed."""
        total, at = div_ceil(num_tokens, self.block_size), committed // self.block_size * self.block_size
        held = np.zeros_like(total)
        for group, sinks in zip(self.groups, self.sink_blocks, strict=True):
            held += total - np.maximum(group.first_block(at, self.block_size) - sinks, 0)
        return held
