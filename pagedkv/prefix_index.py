"""The prefix index: finds cached blocks by content, exactly, with no hash to trust."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pagedkv.page_table import NULL_BLOCK, Int32Array

ROOT = NULL_BLOCK
"""Parent of the first block of every sequence."""

_Key = tuple[int, int, bytes]


class _Run:
    """Consecutive blocks of one branch: ``ids[:length]``, growing at the end, evicted from the end."""

    __slots__ = ("children", "ids", "key", "length", "number", "parent")

    def __init__(self, number: int, parent: "_Run | None", key: _Key, ids: Int32Array) -> None:
        self.number = number
        self.parent = parent
        self.key = key
        self.ids = ids
        self.length = len(ids)
        self.children = 0

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


class PrefixIndex:
    """A radix tree over blocks whose edges are whole runs, compared as arrays.

    ::

        root --[b1 b2 b3]--+--[b4 b5]        two prompts share three blocks, then part
                           '--[b6]

    Runs part only at block boundaries, so following a prompt costs one dict lookup per branch and one
    array comparison per run, not one step per block; a new suffix of any length is one insertion.
    A key holds the first block's tokens themselves and every further token is compared, so a hit is
    exact: parent, tokens and extra key (namespace, media) are equal, not merely their hashes.

    Per block, as arrays: ``tokens`` [num_blocks + 1, block_size] int32, ``extra`` (id of the extra
    key, 0 for none), ``indexed``, and where it stands (run number and position in the run).
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
                run.parent.children -= 1
                del self._runs[run.number], self._children[run.key]

    def behind(self, blocks: Int32Array) -> Int32Array:
        """All indexed blocks that continue any of ``blocks``, children first. Cost: O(runs)."""
        below: dict[int, list[_Run]] = {}
        for run in self._runs.values():
            if run.parent is not None:
                below.setdefault(run.parent.number, []).append(run)
        found = [self._runs[int(self._run_of[block])] for block in blocks]
        ends = self._position[blocks].tolist()
        parts = [run.ids[end + 1 : run.length][::-1] for run, end in zip(found, ends, strict=True)]
        while found:
            children = below.get(found.pop().number, [])
            found += children
            parts += [child.ids[: child.length][::-1] for child in children]
        return np.concatenate(parts[::-1])

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
        parent.children += 1
        return run

    def _part(self, run: _Run, at: int) -> _Run:
        """Split a run before position ``at``; returns the new head.

        The tail keeps the run's number, so that the keys of its children stay right.
        """
        assert run.parent is not None
        head_ids, tail_ids = run.ids[:at], run.ids[at : run.length].copy()
        run.parent.children -= 1
        head = self._add(run.parent, head_ids)
        self._run_of[head_ids] = head.number
        self._position[tail_ids] -= at
        run.ids, run.length, run.parent = tail_ids, len(tail_ids), head
        run.key = self._key(head, int(tail_ids[0]))
        self._children[run.key] = run
        head.children = 1
        return head

    def _key(self, parent: _Run, block: int) -> _Key:
        return parent.number, int(self.extra[block]), self.tokens[block].tobytes()
