"""The prefix index in numpy: the reference, and the engine where there is no compiled core."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from pagedkv.block_ids import as_renaming, refuse_above, resized
from pagedkv.block_tables import NULL_BLOCK, Int32Array
from pagedkv.errors import BlockError

ROOT = NULL_BLOCK
"""Parent of the first block of every sequence."""

MOST_CHILDREN = 64
"""As many children, the newest, ``best_child`` looks at."""

_Key = tuple[int, int, bytes]


class _Run:
    """Consecutive blocks of one branch: ``ids[:length]``, growing at the end, evicted from the end.

    ``children`` has the runs behind the last block, the oldest first, each under its ``birth``.
    """

    __slots__ = ("birth", "children", "ids", "key", "length", "number", "parent")

    def __init__(self, number: int, parent: "_Run | None", key: _Key, ids: Int32Array) -> None:
        self.number = self.birth = number
        self.parent = parent
        self.key = key
        self.ids = ids
        self.length = len(ids)
        self.children: dict[int, _Run] = {}

    def extend(self, ids: Int32Array) -> None:
        end = self.length + len(ids)
        if end > len(self.ids):
            grown: Int32Array = np.zeros(2 * end, np.int32)
            grown[: self.length] = self.ids[: self.length]
            self.ids = grown
        self.ids[self.length : end] = ids
        self.length = end

    def extend_by_one(self, block: int) -> None:
        if self.length == len(self.ids):
            self.extend(np.array([block], np.int32))
        else:
            self.ids[self.length] = block
            self.length += 1


class NumpyPrefixIndex:
    """What `pagedkv.prefix_index.PrefixIndex` says, as a radix tree whose edges are whole runs.

    ::

        root --[b1 b2 b3]--+--[b4 b5]        two prompts share three blocks, then part
                           '--[b6]

    Runs part only at block boundaries, so following a prompt costs one dict lookup per branch and one
    array comparison per run, not one step per block; a new suffix of any length is one insertion.
    A key holds the first block's tokens themselves and every further token is compared.

    Per block, besides the public arrays, where it stands: run number and position in the run.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Make an empty index for ids ``1..num_blocks``."""
        self.tokens: Int32Array = np.zeros((num_blocks + 1, block_size), np.int32)
        self.extra: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self.indexed: npt.NDArray[np.bool_] = np.zeros(num_blocks + 1, np.bool_)
        self._run_of: npt.NDArray[np.int64] = np.zeros(num_blocks + 1, np.int64)
        self._position: Int32Array = np.zeros(num_blocks + 1, np.int32)
        self._root = _Run(0, None, (-1, 0, b""), np.zeros(0, np.int32))
        self._runs = {0: self._root}
        self._children: dict[_Key, _Run] = {}
        self._num_runs_made = 1
        self._size = 0

    def __len__(self) -> int:
        """Return the number of indexed blocks."""
        return self._size

    def match(self, tokens: Int32Array, extra: Int32Array, parent: int = ROOT) -> Int32Array:
        """Longest run of indexed blocks that continues ``parent`` with exactly this content.

        ``tokens`` [n, block_size] int32, ``extra`` [n] int32. Returns ids, int32 [0..n]; changes
        nothing. Cost: O(hit length x block_size) compared as arrays, plus O(1) per branch.
        """
        parts: list[Int32Array] = []
        run, at = self._after(parent)
        done, n = 0, len(tokens)
        while done < n:
            if at == run.length:
                child = self._children.get((run.number, int(extra[done]), tokens[done].tobytes()))
                if child is None:
                    break
                run, at = child, 0
            ids = run.ids[at : min(run.length, at + n - done)]
            stop = done + len(ids)
            same = (self.tokens[ids] == tokens[done:stop]).all(axis=1) & (self.extra[ids] == extra[done:stop])
            equal = len(ids) if same.all() else int(same.argmin())
            parts.append(ids[:equal])
            done, at = done + equal, at + equal
            if equal < len(ids):
                break
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def best_child(
        self, row: Int32Array, extra: int, parent: int = ROOT, at_least: int = 1
    ) -> tuple[int, int]:
        """The child of ``parent`` that shares most tokens with the start of ``row``, and how many.

        ``row`` [0..block_size] int32; only children with the extra key ``extra`` count. Of equally good
        ones the newest; (0, 0) if none shares ``at_least`` tokens, of which 1 is the least. Looks at the
        newest 64 children only.
        """
        run, at = self._after(parent)
        if at < run.length:
            heads = [int(run.ids[at])]
        else:
            newest = islice(reversed(run.children.values()), MOST_CHILDREN)
            heads = [int(child.ids[0]) for child in newest]
        ids = np.array([block for block in heads if self.extra[block] == extra], np.int32)
        if not len(ids) or not len(row):
            return 0, 0
        differs = self.tokens[ids, : len(row)] != row
        shared = np.where(differs.any(axis=1), differs.argmax(axis=1), len(row))
        best = int(shared.argmax())
        return (int(ids[best]), int(shared[best])) if shared[best] >= max(at_least, 1) else (0, 0)

    def is_leaf(self, block: int) -> bool:
        """Tell whether no indexed block continues this one. Cost: O(1)."""
        run, at = self._after(block)
        return at == run.length and not run.children

    def insert(self, ids: Int32Array, extra: Int32Array, parent: int) -> None:
        """Index consecutive blocks after ``parent``; their ``tokens`` rows are already written.

        The caller has matched: nothing indexed continues ``parent`` with the first of them.
        Cost: O(n), plus O(length of the run) when a run has to part at ``parent``.
        """
        run, at = self._after(parent)
        if at < run.length:
            run = self._part(run, at)
        self.extra[ids] = extra
        self.indexed[ids] = True
        self._size += len(ids)
        if run is self._root or run.children:
            run = self._add(run, ids)
        else:
            run.extend(ids)
        self._run_of[ids] = run.number
        self._position[ids] = np.arange(run.length - len(ids), run.length)

    def grow(self, ids: Int32Array, parents: Int32Array) -> npt.NDArray[np.bool_]:
        """Add block ``ids[i]``, without extra keys, behind ``parents[i]`` wherever that ends a run without
        children, where no indexed block can equal it; tell for which. Cost: O(1) each.
        """
        numbers, behind = self._run_of[parents], self._position[parents] + 1
        grown = np.zeros(len(ids), np.bool_)
        for i, (number, at, block) in enumerate(
            zip(numbers.tolist(), behind.tolist(), ids.tolist(), strict=True)
        ):
            run = self._runs[number]
            if at == run.length and not run.children and run is not self._root:
                run.extend_by_one(block)
                grown[i] = True
        new = ids[grown]
        self.extra[new] = 0
        self.indexed[new] = True
        self._run_of[new] = numbers[grown]
        self._position[new] = behind[grown]
        self._size += len(new)
        return grown

    def remove(self, ids: Int32Array) -> None:
        """Forget blocks whose children are forgotten too. Cost: O(n) as arrays, O(1) per run touched."""
        numbers = self._run_of[ids]
        stops = [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(ids)]
        self.indexed[ids] = False
        self._size -= len(ids)
        start = 0
        for stop in stops:
            run = self._runs[int(numbers[start])]
            run.length -= stop - start
            start = stop
            if not run.length and run.parent is not None:
                del run.parent.children[run.birth]
                del self._runs[run.number], self._children[run.key]

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Let blocks ``old[i]`` be called ``new[i]``: tokens move, and what is indexed is so as ``new[i]``.

        Raises ``BlockError``, with nothing changed, if a new id is indexed or any id is out of range or
        named twice. Cost: O(n).
        """
        old, new = as_renaming(old, new, len(self.indexed) - 1)
        refuse_indexed(self.indexed, new)
        self.tokens[new], self.extra[new] = self.tokens[old], self.extra[old]
        here = self.indexed[old]
        old, new = old[here], new[here]
        numbers, positions = self._run_of[old], self._position[old]
        for number, position, block in zip(numbers.tolist(), positions.tolist(), new.tolist(), strict=True):
            self._runs[number].ids[position] = block
        self._run_of[new], self._position[new] = numbers, positions
        self.indexed[old], self.indexed[new] = False, True

    def resize(self, num_blocks: int) -> None:
        """Let ids be ``1..num_blocks`` from now on.

        Raises ``BlockError``, with nothing changed, if one above is indexed. Cost: O(blocks), vectorised.
        """
        refuse_above(np.flatnonzero(self.indexed).astype(np.int32), num_blocks, "indexed")
        # in one assignment: what cannot be allocated changes nothing
        self.tokens, self.extra, self.indexed, self._run_of, self._position = (
            resized(self.tokens, num_blocks),
            resized(self.extra, num_blocks),
            resized(self.indexed, num_blocks),
            resized(self._run_of, num_blocks),
            resized(self._position, num_blocks),
        )

    def behind(self, blocks: Int32Array) -> Int32Array:
        """All indexed blocks that continue any of ``blocks``, children first and oldest branches first.

        Cost: O(blocks found).
        """
        parts: list[Int32Array] = []
        for block in blocks:
            run, at = self._after(int(block))
            parts.append(run.ids[at : run.length])
            runs = list(run.children.values())
            while runs:
                run = runs.pop()
                parts.append(run.ids[: run.length])
                runs += run.children.values()
        return reversed_once(parts)

    def chains(self) -> Iterator[tuple[int, Int32Array]]:
        """Every run as (id of the block before it, its ids): the whole tree, for checks and exports."""
        for run in self._runs.values():
            if run.parent is not None:
                before = int(run.parent.ids[run.parent.length - 1]) if run.parent.parent is not None else ROOT
                yield before, run.ids[: run.length]

    def parent(self, block: int) -> int:
        """The block before this one, ``ROOT`` for the first of a branch. Cost: O(1)."""
        run, at = self._runs[int(self._run_of[block])], int(self._position[block])
        if at:
            return int(run.ids[at - 1])
        assert run.parent is not None
        return int(run.parent.ids[run.parent.length - 1]) if run.parent is not self._root else ROOT

    def path(self, block: int) -> Int32Array:
        """All blocks from the first of the branch to this one. Cost: O(length) as arrays, O(1) per run."""
        run, stop = self._after(block)
        parts = [run.ids[:stop]]
        while run.parent is not None and run.parent is not self._root:
            run = run.parent
            parts.append(run.ids[: run.length])
        return np.concatenate(parts[::-1])

    def _after(self, block: int) -> tuple[_Run, int]:
        """The place in the tree just behind a block."""
        if block == ROOT:
            return self._root, 0
        return self._runs[int(self._run_of[block])], int(self._position[block]) + 1

    def _add(self, parent: _Run, ids: Int32Array) -> _Run:
        """Hang a new run of ``ids`` under ``parent``."""
        number, self._num_runs_made = self._num_runs_made, self._num_runs_made + 1
        run = _Run(number, parent, self._key(parent, int(ids[0])), ids.copy())
        self._runs[number] = self._children[run.key] = run
        parent.children[number] = run
        return run

    def _part(self, run: _Run, at: int) -> _Run:
        """Split a run before position ``at``; returns the new head.

        The tail keeps the run's number, so that the keys of its children stay right.
        """
        parent = run.parent
        assert parent is not None
        head_ids, tail_ids = run.ids[:at], run.ids[at : run.length].copy()
        head = self._add(parent, head_ids)
        # the head is as old as the run was
        del parent.children[head.birth]
        head.birth = run.birth
        parent.children[head.birth] = head
        self._run_of[head_ids] = head.number
        self._position[tail_ids] -= at
        run.ids, run.length, run.parent = tail_ids, len(tail_ids), head
        run.key = self._key(head, int(tail_ids[0]))
        self._children[run.key] = run
        head.children[run.birth] = run
        return head

    def _key(self, parent: _Run, block: int) -> _Key:
        return parent.number, int(self.extra[block]), self.tokens[block].tobytes()


def refuse_indexed(indexed: npt.NDArray[np.bool_], ids: Int32Array) -> None:
    """Raise ``BlockError`` if one of ``ids``, names to give, is indexed."""
    known = ids[indexed[ids]]
    if len(known):
        raise BlockError(f"cannot rename a block to {known[0]}, which is indexed")


def reversed_once(parts: list[Int32Array]) -> Int32Array:
    """All parts as one array, backwards, each id where it comes first."""
    ids = np.concatenate(parts)[::-1] if parts else np.zeros(0, np.int32)
    first = np.unique(ids, return_index=True)[1]
    return ids if len(first) == len(ids) else ids[np.sort(first)]
