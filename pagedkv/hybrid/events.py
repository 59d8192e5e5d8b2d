"""The events of a hybrid manager: which contents each group has blocks for, and no longer has."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedkv.block_tables import NULL_BLOCK, Int32Array
from pagedkv.events import BlocksRemoved, BlocksStored, EventLog, chain_digests
from pagedkv.prefix_index import ROOT

if TYPE_CHECKING:
    from pagedkv.hybrid.content_tree import ContentTree


class GroupEvents(EventLog):
    """The log of a hybrid manager: an event is about one group, ``event.group`` in the order of its groups.

    A digest stands for a content and its whole prefix, whichever groups have it; `prefix_digests` gives the
    same. In a group without a window, what comes after a content goes before it. In one with a window,
    the contents before may be gone, or never have been there: `longest_hit` says what a hit needs of each.

    >>> from pagedkv.hybrid import CacheGroup, HybridKVCacheManager
    >>> groups = CacheGroup("full", (1,)), CacheGroup("local", (0,), window=2)
    >>> manager = HybridKVCacheManager(groups, num_blocks=4, block_size=2)
    >>> manager.events.record()
    >>> _ = manager.open("a", [1, 2, 3]); manager.commit("a", [1, 2, 3])
    >>> [(event.group, event.tokens.tolist()) for event in manager.events.take()]
    [(0, [[1, 2]]), (1, [[1, 2]])]
    """

    def __init__(self, tree: "ContentTree") -> None:
        """Record nothing yet; the contents are those of ``tree``."""
        super().__init__(tree.index)
        self._tree = tree

    def digests(self, group: int = 0) -> set[bytes]:
        """Digests of all contents that a group has a block for. Cost: O(blocks)."""
        nodes = np.flatnonzero(self._tree.block_of[group]).tolist()
        return {self._digest_of[node] for node in nodes}

    # -- the manager's side

    def learn(self, nodes: Int32Array, parent: int) -> None:
        """Work out the digests of new contents, each behind the one before."""
        assert self._seed is not None
        before = self._digest_of[parent] if parent != ROOT else None
        tokens = self._tree.index.tokens[nodes]
        digests = chain_digests(tokens, self._extra_keys(nodes), before, self._seed)
        self._digest_of.update(zip(nodes.tolist(), digests, strict=True))

    def forget(self, nodes: Int32Array) -> None:
        """Contents are not known any more."""
        for node in nodes.tolist():
            del self._digest_of[node]

    def stored_where(self, stored: npt.NDArray[np.bool_], nodes: Int32Array) -> None:
        """Note that group g has a block of consecutive ``nodes[i]`` wherever ``stored[g, i]``."""
        for group, row in enumerate(stored):
            columns = np.flatnonzero(row)
            for run in np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1) if len(columns) else ():
                self._stored(group, nodes[run])

    def removed_from(self, blocks: Int32Array, reason: str) -> None:
        """Note that groups have these blocks no longer, whose contents are still theirs."""
        groups, nodes = self._tree.group_of[blocks], self._tree.node_of[blocks]
        for group in np.unique(groups).tolist():
            digests = tuple(self._digest_of[node] for node in nodes[groups == group].tolist())
            self._events.append(BlocksRemoved(self._next, digests, reason, group))
            self._next += 1

    def _stored(self, group: int, nodes: Int32Array) -> None:
        parent = self._tree.index.parent(int(nodes[0]))
        before = self._digest_of[parent] if parent != NULL_BLOCK else None
        digests = tuple(self._digest_of[node] for node in nodes.tolist())
        keys = self._extra_keys(nodes)
        extra = tuple(keys) if any(key is not None for key in keys) else ()
        tokens = self._tree.index.tokens[nodes]
        self._events.append(BlocksStored(self._next, before, digests, tokens, extra, group))
        self._next += 1

    def _extra_keys(self, nodes: Int32Array) -> list[tuple[object, ...] | None]:
        keys = self._tree.extra_keys
        return [keys.key(extra) if extra else None for extra in self._tree.index.extra[nodes].tolist()]
