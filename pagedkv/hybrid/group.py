"""A cache group: layers that see the same tokens, and which blocks that makes them need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.block_tables import Int64Array
from pagedkv.errors import PagedKVError, require_count

MOST_POSITIONS = 2**63 - 1
"""More cannot be said in an int64."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table, because a query in any of them sees the same positions.

    ::

        window=6, sinks=3, block_size=4          the query at position 17 sees s and w

        position  0         4         8         12        16
                  s s s .   . . . .   . . . .   w w w w   w w
        block       0         1         2         3         4      0, 3 and 4 are kept

    Args:
        name: what the manager's ``tables`` call it.
        layers: indices of the model's layers, each at least 0; distinct.
        window: a query at position p sees the positions above ``p - window``. None: all of them.
        sinks: and the first so many positions, wherever it is. (The sinks of gpt-oss are learned numbers
            that no token belongs to: those are 0 here.)

    Raises:
        PagedKVError: no name or no layers, a number out of range, or sinks without a window.

    >>> local = CacheGroup("local", layers=(0, 2), window=128)
    >>> local.first_block(1000, block_size=16), local.held_blocks(1000, block_size=16)
    (54, 9)
    """

    name: str
    layers: tuple[int, ...]
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.name, str) or not self.name:
            raise PagedKVError(f"a group needs a name, got {self.name!r}")
        if not isinstance(self.layers, Sequence) or isinstance(self.layers, str) or not self.layers:
            raise PagedKVError(f"group {self.name!r} needs a tuple of layers, got {self.layers!r}")
        layers = tuple(require_count("a layer", layer, 0) for layer in self.layers)
        if len(set(layers)) < len(layers):
            raise PagedKVError(f"group {self.name!r} names a layer twice: {layers}")
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "sinks", _positions("sinks", self.sinks, 0))
        if self.window is not None:
            object.__setattr__(self, "window", _positions("window", self.window, 1))
        elif self.sinks:
            raise PagedKVError(
                f"group {self.name!r} has {self.sinks} sinks but no window: it sees all anyway"
            )

    @overload
    def first_block(self, position: int, block_size: int) -> int: ...
    @overload
    def first_block(self, position: Int64Array, block_size: int) -> Int64Array: ...
    def first_block(self, position: Any, block_size: int) -> Any:
        """First block that holds what a query at ``position`` sees in its window; 0 without a window."""
        if self.window is None:
            return position * 0
        start = position - self.window + 1
        return (np.maximum(start, 0) if isinstance(start, np.ndarray) else max(start, 0)) // block_size

    def sink_blocks(self, block_size: int) -> int:
        """Blocks that hold sinks; they are kept however far the window is."""
        return div_ceil(self.sinks, block_size)

    def held_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks of a sequence of ``num_tokens`` committed tokens: those of its sinks and of its window.

        The window is that of the last block boundary, see `HybridKVCacheManager`. The most that a sequence
        ever holds while it decodes is one block more than at a boundary.
        """
        full = num_tokens // block_size
        fallen = self.first_block(full * block_size, block_size) - self.sink_blocks(block_size)
        return div_ceil(num_tokens, block_size) - max(0, fallen)


def _positions(name: str, value: int, least: int) -> int:
    """A number of positions that an int64 can say."""
    count = require_count(name, value, least)
    if count > MOST_POSITIONS:
        raise PagedKVError(f"{name} must be at most {MOST_POSITIONS}, got {count}")
    return count


def check_groups(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """The groups of one model; ``PagedKVError`` unless their names and their layers are distinct."""
    if not isinstance(groups, Sequence) or not groups:
        raise PagedKVError(f"groups must be at least one CacheGroup, got {groups!r}")
    owner: dict[int, str] = {}
    names: set[str] = set()
    for group in groups:
        if not isinstance(group, CacheGroup):
            raise PagedKVError(f"groups must be CacheGroup, got {group!r}")
        if group.name in names:
            raise PagedKVError(f"two groups are called {group.name!r}")
        names.add(group.name)
        for layer in group.layers:
            if layer in owner:
                raise PagedKVError(f"layer {layer} is in group {owner[layer]!r} and in group {group.name!r}")
            owner[layer] = group.name
    return tuple(groups)


def longest_hit(groups: Sequence[CacheGroup], present: npt.NDArray[np.bool_], block_size: int) -> int:
    """How many blocks of a prefix can be taken from the cache: as many as every group can serve.

    ``present`` bool [len(groups), n]: which of the first n blocks each group has. A hit of d blocks needs
    what the next token, at position ``d * block_size``, sees: of a group without a window all d blocks,
    of others those of its window and of its sinks. Cost: O(groups x n), vectorised.

    >>> groups = CacheGroup("full", (0,)), CacheGroup("local", (1,), window=8)
    >>> longest_hit(groups, np.array([[1, 1, 1, 1], [0, 1, 1, 0]], bool), block_size=4)
    3
    >>> longest_hit(groups, np.array([[1, 1, 1, 1], [0, 1, 0, 1]], bool), block_size=4)
    0
    """
    depth = np.arange(present.shape[1] + 1)
    served = np.ones(len(depth), np.bool_)
    for group, has in zip(groups, present, strict=True):
        missing = np.flatnonzero(~has)
        if not len(missing):
            continue
        last_missing = np.full(len(depth), -1)
        last_missing[missing + 1] = missing
        last_missing = np.maximum.accumulate(last_missing)
        served &= last_missing < group.first_block(depth * block_size, block_size)
        if missing[0] < group.sink_blocks(block_size):
            served[missing[0] + 1 :] = False
    return int(np.flatnonzero(served)[-1])
