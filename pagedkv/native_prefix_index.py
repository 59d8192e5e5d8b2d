"""The prefix index on the compiled core: one small step per block, nearly always without a hash."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import _core
from pagedkv.block_ids import as_renaming, refuse_above, resized
from pagedkv.block_tables import Int32Array
from pagedkv.numpy_prefix_index import ROOT, refuse_indexed, reversed_once

_BY_BLOCK = ("tokens", "extra", "indexed", "_parent", "_first_child", "_next", "_prev")


class NativePrefixIndex(_core.Index):
    """What `pagedkv.prefix_index.PrefixIndex` says, as links between blocks and one hash table.

    ::

        _first_child[p] -> newest child of p -> _next -> ... -> oldest      _prev the other way
                                                '-- all but the newest are in the table --'

    A child is looked for first as the newest one, by its content alone, and in the table only where the
    parent has several: of a chain, nothing is ever hashed.

    Bookkeeping per block, besides its tokens: 21 bytes of links and flags, 12 to 24 of the table.
    """

    hash_mask = 2**64 - 1
    """What is left of a hash: 0 makes all of them equal, to test that hits stay exact."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Make an empty index for ids ``1..num_blocks``."""
        self.tokens: Int32Array = np.zeros((num_blocks + 1, block_size), np.int32)
        self.extra: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self.indexed: npt.NDArray[np.bool_] = np.zeros(num_blocks + 1, np.bool_)
        self._parent: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self._first_child: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self._next: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self._prev: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self._table = _empty_table(num_blocks)
        self._attach_core()

    def _attach_core(self) -> None:
        self._attach(
            len(self.indexed) - 1,
            self.tokens.shape[1],
            *(getattr(self, name) for name in _BY_BLOCK),
            self._table,
            _SEED,
            self.hash_mask,
        )

    def __len__(self) -> int:
        """Return the number of indexed blocks."""
        return self._size

    def match(self, tokens: Int32Array, extra: Int32Array, parent: int = ROOT) -> Int32Array:
        """Longest run of indexed blocks that continues ``parent`` with exactly this content.

        ``tokens`` [n, block_size] int32, ``extra`` [n] int32. Returns ids, int32 [0..n]; changes
        nothing. Cost: O(hit length x block_size).
        """
        found: Int32Array = np.empty(len(tokens), np.int32)
        count = self._match(tokens, extra, parent, found)
        if count < 0:
            count = self._match(np.ascontiguousarray(tokens), extra, parent, found)
        return found if count == len(found) else found[:count].copy()

    def best_child(
        self, row: Int32Array, extra: int, parent: int = ROOT, at_least: int = 1
    ) -> tuple[int, int]:
        """The child of ``parent`` that shares most tokens with the start of ``row``, and how many.

        ``row`` [0..block_size] int32; only children with the extra key ``extra`` count. Of equally good
        ones the newest; (0, 0) if none shares ``at_least`` tokens, of which 1 is the least. Looks at the
        newest 64 children only.
        """
        best = self._best_child(row, extra, parent, at_least)
        if isinstance(best, int):
            best = self._best_child(np.ascontiguousarray(row), extra, parent, at_least)
        assert isinstance(best, tuple)
        return best

    def insert(self, ids: Int32Array, extra: Int32Array, parent: int) -> None:
        """Index consecutive blocks after ``parent``; their ``tokens`` rows are already written.

        The caller has matched: nothing indexed continues ``parent`` with the first of them. Raises
        ``BlockError``, with nothing changed, for an id that is indexed or a parent that is not. Cost: O(n).
        """
        self._insert(ids, extra, parent)

    def grow(self, ids: Int32Array, parents: Int32Array) -> npt.NDArray[np.bool_]:
        """Add block ``ids[i]``, without extra keys, behind ``parents[i]`` wherever that is a leaf, where no
        indexed block can equal it; tell for which. Cost: O(1) each.
        """
        grown: npt.NDArray[np.bool_] = np.empty(len(ids), np.bool_)
        self._grow(ids, parents, grown)
        return grown

    def remove(self, ids: Int32Array) -> None:
        """Forget blocks whose children are forgotten too. Cost: O(n).

        Raises ``BlockError``, with nothing changed, if a block is not indexed or a child would stay.
        """
        self._remove(ids)

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Let blocks ``old[i]`` be called ``new[i]``: tokens move, and what is indexed is so as ``new[i]``.

        Raises ``BlockError``, with nothing changed, if a new id is indexed or any id is out of range or
        named twice. Cost: O(n log n + their children).
        """
        old, new = as_renaming(old, new, len(self.indexed) - 1)
        refuse_indexed(self.indexed, new)
        self._rename(old, new)

    def resize(self, num_blocks: int) -> None:
        """Let ids be ``1..num_blocks`` from now on.

        Raises ``BlockError``, with nothing changed, if one above is indexed. Cost: O(blocks).
        """
        refuse_above(np.flatnonzero(self.indexed).astype(np.int32), num_blocks, "indexed")
        table = _empty_table(num_blocks)
        arrays = {name: resized(getattr(self, name), num_blocks) for name in _BY_BLOCK}
        vars(self).update(arrays, _table=table)
        self._attach_core()
        self._rebuild()

    def behind(self, blocks: Int32Array) -> Int32Array:
        """All indexed blocks that continue any of ``blocks``, children first and oldest branches first.

        Cost: O(blocks found).
        """
        found: Int32Array = np.empty(self._size, np.int32)
        return reversed_once([found[: self._walk(int(block), found)].copy() for block in blocks])

    def chains(self) -> Iterator[tuple[int, Int32Array]]:
        """Every stretch without a branch as (id of the block before it, its ids): the whole tree."""
        ids: Int32Array = np.empty(self._size, np.int32)
        self._walk(ROOT, ids)
        alone = (self._next[ids] == 0) & (self._prev[ids] == 0) & (self._parent[ids] != ROOT)
        starts = np.flatnonzero(~alone)
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(ids)], strict=False):
            yield int(self._parent[ids[start]]), ids[start:stop]

    def path(self, block: int) -> Int32Array:
        """All blocks from the first of the branch to this one. Cost: O(length)."""
        path: Int32Array = np.empty(self._depth(block), np.int32)
        self._climb(block, path)
        return path

    def __getstate__(self) -> dict[str, Any]:
        """Everything to copy; what the core points to is said anew."""
        return vars(self) | {"_size": self._size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over copied arrays."""
        for name, value in state.items():
            setattr(self, name, value)
        self._attach_core()
        self._rebuild()


# Differs from process to process unless PYTHONHASHSEED is set, so that nobody outside can make keys that
# collide; nothing but the time of a lookup depends on it.
_SEED = hash(b"pagedkv.prefix_index") % 2**64


def _empty_table(num_blocks: int) -> npt.NDArray[np.uint64]:
    """At most two thirds full with all blocks in it."""
    return np.zeros(1 << (num_blocks * 3 // 2).bit_length(), np.uint64)
