"""The page table: which blocks hold which sequence, and the two batch dialects that kernels read."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.dropped import Dropped
from pagedkv.errors import PagedKVError, SequenceError

NULL_BLOCK = 0
"""Reserved block id: never handed out, never counted; pads every table."""

PAD_SLOT = -1
"""Slot of a padded row: nothing is written for it."""

SeqId = Hashable
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NO_BATCH: tuple[list[SeqId], Int64Array] = [], np.zeros(0, np.int64)


class PageTable:
    """All sequences' rows of block ids, as one array.

    ::

        blocks : [max_seqs, max_blocks_per_seq] int32, NULL_BLOCK beyond a sequence's blocks
        seq_len: [max_seqs] int64, tokens of the sequence that have a slot (written or about to be)
        committed: [max_seqs] int64, how many of them are final

        row     0    1    2    3        seq_len = 37, block_size = 16
              | 7  | 3  | 9  | 0 | ...  position p lives in slot blocks[p // 16] * 16 + p % 16

    The manager is the only writer. Readers use the methods below; all of them are O(blocks touched).
    """

    def __init__(self, max_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        """Make an empty table; memory is committed by the operating system only as rows are used."""
        self.block_size = block_size
        self.blocks: Int32Array = np.zeros((max_seqs, max_blocks_per_seq), np.int32)
        self.seq_len: Int64Array = np.zeros(max_seqs, np.int64)
        self.committed: Int64Array = np.zeros(max_seqs, np.int64)
        self.dropped: dict[int, Dropped] = {}
        """Rows that lack blocks of the middle of their context."""
        self._rows: dict[SeqId, int] = {}
        self._last_batch: tuple[list[SeqId], Int64Array] = _NO_BATCH
        self._free_rows = list(range(max_seqs - 1, -1, -1))

    def __len__(self) -> int:
        """Return the number of open sequences."""
        return len(self._rows)

    def __contains__(self, seq_id: SeqId) -> bool:
        """Tell whether the sequence is open."""
        return seq_id in self._rows

    @property
    def seq_ids(self) -> list[SeqId]:
        """Ids of the open sequences, in the order in which they were opened."""
        return list(self._rows)

    @property
    def num_free_rows(self) -> int:
        """How many more sequences can be open at once."""
        return len(self._free_rows)

    def open_rows(self) -> Int64Array:
        """Rows of the open sequences, in the order in which they were opened."""
        return np.fromiter(self._rows.values(), np.int64, len(self._rows))

    # -- reading one sequence

    def row(self, seq_id: SeqId) -> int:
        """Row of an open sequence; raises ``SequenceError`` for any other."""
        try:
            return self._rows[seq_id]
        except KeyError:
            raise SequenceError(f"sequence {seq_id!r} is not open ({len(self)} are)") from None

    def rows(self, seq_ids: Sequence[SeqId]) -> Int64Array:
        """Rows of distinct open sequences, in the order given; ``SequenceError`` otherwise."""
        last_ids, last_rows = self._last_batch
        # a decoding batch rarely changes; comparing costs a tenth of looking up
        if type(seq_ids) is list and _same(seq_ids, last_ids):
            return last_rows
        if isinstance(seq_ids, str) or not isinstance(seq_ids, (Sequence, np.ndarray)):
            raise SequenceError(f"a batch is a list of sequence ids, got {seq_ids!r}")
        try:
            rows = list(map(self._rows.__getitem__, seq_ids))
        except KeyError as error:
            raise SequenceError(f"sequence {error.args[0]!r} is not open ({len(self)} are)") from None
        if len(set(rows)) != len(rows):
            raise SequenceError(f"a batch of {len(rows)} names only {len(set(rows))} distinct sequences")
        found = np.array(rows, np.int64)
        found.setflags(write=False)
        self._last_batch = list(seq_ids), found
        return found

    def num_tokens(self, seq_id: SeqId) -> int:
        """Tokens of the sequence that have a slot."""
        return int(self.seq_len[self.row(seq_id)])

    def num_committed(self, seq_id: SeqId) -> int:
        """Tokens of the sequence that are committed."""
        return int(self.committed[self.row(seq_id)])

    def positions(self, seq_ids: Sequence[SeqId]) -> Int64Array:
        """True position of each sequence's newest token, those dropped counted, for rotary embeddings.

        int64 [n]: ``seq_len - 1`` for who has dropped nothing, and -1 for an empty sequence. Raises
        ``SequenceError`` as ``rows``. Cost: O(n).
        """
        rows = self.rows(seq_ids)
        newest: Int64Array = self.seq_len[rows] - 1
        if self.dropped:
            newest += self.block_size * np.array(list(map(self.num_dropped, rows.tolist())), np.int64)
        return newest

    def num_dropped(self, row: int) -> int:
        """Blocks that a row has dropped from the middle of its context."""
        return self.dropped[row].num_blocks if row in self.dropped else 0

    def num_blocks(self, row: int) -> int:
        """Blocks of a row."""
        return div_ceil(int(self.seq_len[row]), self.block_size)

    def block_ids(self, seq_id: SeqId) -> Int32Array:
        """Copy of the block table of a sequence: int32 [ceil(num_tokens / block_size)]."""
        row = self.row(seq_id)
        return self.blocks[row, : self.num_blocks(row)].copy()

    def slots(self, seq_id: SeqId, start: int = 0, stop: int | None = None) -> Int64Array:
        """Slots of the positions ``start <= p < stop`` (default: to the end): int64 [stop - start].

        This is the ``slot_mapping`` of a prefill chunk. Raises ``SequenceError`` outside the sequence.
        """
        row = self.row(seq_id)
        length = int(self.seq_len[row])
        stop = length if stop is None else stop
        whole = all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in (start, stop))
        if not whole or not 0 <= start <= stop <= length:
            raise SequenceError(
                f"positions {start}..{stop} are outside sequence {seq_id!r} of {length} tokens"
            )
        return self.slots_of(np.array([row]), np.array([start]), stop - start)

    def slots_of(self, rows: Int64Array, starts: Int64Array, count: int) -> Int64Array:
        """Slots of ``count`` positions from ``starts`` on, row after row: int64 [len(rows) * count]."""
        positions = (starts[:, None] + np.arange(count)).astype(np.int64, copy=False)
        block = self.blocks[rows[:, None], positions // self.block_size].astype(np.int64)
        return (block * self.block_size + positions % self.block_size).reshape(-1)

    # -- writing a batch into caller-owned buffers

    def write_block_tables(
        self,
        seq_ids: Sequence[SeqId],
        block_tables: Int32Array,
        seq_lens: Int32Array,
        slot_mapping: Int64Array | None = None,
    ) -> int:
        """Write a decode batch in the dialect of vLLM and FlashAttention; returns the columns used.

        ``block_tables`` int32 [batch, columns], ``seq_lens`` int32 [batch] and, if given,
        ``slot_mapping`` int64 [batch] (the slot of each sequence's newest token) are overwritten
        whole: rows beyond the sequences become NULL_BLOCK, 0 and PAD_SLOT, so a padded row writes
        nothing and no stale column survives. An empty sequence also gets PAD_SLOT.

        Raises ``PagedKVError`` for a buffer of another dtype, shape, or too small, before any write.
        Cost: O(batch x columns).

        >>> from pagedkv import KVCacheManager
        >>> manager = KVCacheManager(num_blocks=8, block_size=4)
        >>> _ = manager.open("a", [1, 2, 3, 4, 5])
        >>> tables, lens = np.empty((2, 3), np.int32), np.empty(2, np.int32)
        >>> slots = np.empty(2, np.int64)
        >>> manager.tables.write_block_tables(["a"], tables, lens, slots)
        2
        >>> tables.tolist(), lens.tolist(), slots.tolist()
        ([[1, 2, 0], [0, 0, 0]], [5, 0], [8, -1])
        """
        rows = self.rows(seq_ids)
        lens = self.seq_len[rows]
        width = div_ceil(int(lens.max(initial=0)), self.block_size)
        _require(seq_lens, "seq_lens", np.int32, (None,), (len(rows),))
        batch = len(seq_lens)
        _require(block_tables, "block_tables", np.int32, (batch, None), (len(rows), width))
        if slot_mapping is not None:
            _require(slot_mapping, "slot_mapping", np.int64, (batch,), (len(rows),))
        n = len(rows)
        block_tables[:n, :width] = self.blocks[rows, :width]
        block_tables[:n, width:] = NULL_BLOCK
        block_tables[n:] = NULL_BLOCK
        seq_lens[:n] = lens
        seq_lens[n:] = 0
        if slot_mapping is not None:
            slot_mapping[:n] = np.where(lens > 0, self.slots_of(rows, np.maximum(lens - 1, 0), 1), PAD_SLOT)
            slot_mapping[n:] = PAD_SLOT
        return width

    def write_csr(
        self,
        seq_ids: Sequence[SeqId],
        kv_indptr: Int32Array,
        kv_indices: Int32Array,
        kv_last_page_len: Int32Array,
    ) -> int:
        """Write a batch in the dialect of FlashInfer; returns the number of entries in ``kv_indices``.

        ``kv_indptr`` int32 [batch + 1], ``kv_indices`` int32 [capacity], ``kv_last_page_len`` int32
        [batch]. Sequence i owns ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``; an empty sequence and a
        padded row have no pages and last_page_len 0. Entries beyond the last are NULL_BLOCK.

        Raises ``PagedKVError`` for a buffer of another dtype, shape, or too small, before any write.
        Cost: O(batch x longest row).

        >>> from pagedkv import KVCacheManager
        >>> manager = KVCacheManager(num_blocks=8, block_size=4)
        >>> _ = manager.open("a", [1, 2, 3, 4, 5]), manager.open("b", [9])
        >>> indptr, indices, last = np.empty(4, np.int32), np.empty(6, np.int32), np.empty(3, np.int32)
        >>> manager.tables.write_csr(["a", "b"], indptr, indices, last)
        3
        >>> indptr.tolist(), indices.tolist(), last.tolist()
        ([0, 2, 3, 3], [1, 2, 3, 0, 0, 0], [1, 1, 0])
        """
        rows = self.rows(seq_ids)
        lens = self.seq_len[rows]
        counts = div_ceil(lens, self.block_size)
        n, total = len(rows), int(counts.sum())
        _require(kv_last_page_len, "kv_last_page_len", np.int32, (None,), (n,))
        _require(kv_indptr, "kv_indptr", np.int32, (len(kv_last_page_len) + 1,), (n + 1,))
        _require(kv_indices, "kv_indices", np.int32, (None,), (total,))
        width = int(counts.max(initial=0))
        kv_indptr[0] = 0
        kv_indptr[1 : n + 1] = np.cumsum(counts)
        kv_indptr[n + 1 :] = total
        kv_indices[:total] = self.blocks[rows, :width][np.arange(width) < counts[:, None]]
        kv_indices[total:] = NULL_BLOCK
        kv_last_page_len[:n] = lens - np.maximum(counts - 1, 0) * self.block_size
        kv_last_page_len[n:] = 0
        return total

    # -- the manager's side

    def add(self, seq_id: SeqId) -> int:
        """Give a new, empty sequence a row; the caller knows that one is free."""
        row = self._free_rows[-1]
        self._rows[seq_id] = row
        self._free_rows.pop()
        return row

    def fill(self, row: int, hit: Int32Array, new: Int32Array, num_tokens: int, committed: int) -> None:
        """Let an empty row hold the blocks ``hit`` and then ``new``."""
        self.blocks[row, : len(hit)] = hit
        self.blocks[row, len(hit) : len(hit) + len(new)] = new
        self.seq_len[row] = num_tokens
        self.committed[row] = committed

    def copy(self, row: int, child: int) -> None:
        """Let an empty row hold the same as another."""
        num_blocks = self.num_blocks(row)
        self.blocks[child, :num_blocks] = self.blocks[row, :num_blocks]
        self.seq_len[child], self.committed[child] = self.seq_len[row], self.committed[row]
        if row in self.dropped:
            self.dropped[child] = self.dropped[row].copy()

    def beyond(self, row: int, num_tokens: int) -> Int32Array:
        """Copy of a row's entries behind its first ``num_tokens``."""
        return self.blocks[row, div_ceil(num_tokens, self.block_size) : self.num_blocks(row)].copy()

    def cut(self, row: int, num_tokens: int) -> None:
        """Forget what a row has behind its first ``num_tokens``."""
        self.blocks[row, div_ceil(num_tokens, self.block_size) : self.num_blocks(row)] = NULL_BLOCK
        self.seq_len[row] = num_tokens
        self.committed[row] = min(int(self.committed[row]), num_tokens)

    def close_up(self, row: int, kept: Int32Array) -> None:
        """Let a row have the blocks ``kept`` alone; it loses full ones."""
        num_blocks = self.num_blocks(row)
        self.blocks[row, : len(kept)] = kept
        self.blocks[row, len(kept) : num_blocks] = NULL_BLOCK
        self.seq_len[row] -= (num_blocks - len(kept)) * self.block_size
        self.committed[row] -= (num_blocks - len(kept)) * self.block_size

    def held(self, row: int) -> Int32Array:
        """Every block that a row holds, in it or not, parents before their children."""
        blocks = self.blocks[row, : self.num_blocks(row)]
        if row not in self.dropped:
            return blocks.copy()
        state = self.dropped[row]
        return np.concatenate([state.chain, blocks[state.num_chained :]])

    def rename(self, name: Int32Array) -> None:
        """Block ``b`` is called ``name[b]`` from now on."""
        for state in self.dropped.values():
            state.rename(name)
        for row in self._rows.values():
            held = self.blocks[row, : self.num_blocks(row)]
            held[:] = name[held]

    def remove(self, seq_id: SeqId) -> None:
        """Forget a sequence of no tokens."""
        row = self._rows.pop(seq_id)
        self.dropped.pop(row, None)
        self._last_batch = _NO_BATCH
        self._free_rows.append(row)


def _same(seq_ids: list[SeqId], other: list[SeqId]) -> bool:
    """Whether two batches are equal; ids that cannot be compared, such as arrays, are none."""
    try:
        return bool(seq_ids == other)
    except ValueError:
        return False


def _require(
    buffer: "npt.NDArray[Any]",
    name: str,
    dtype: "npt.DTypeLike",
    shape: tuple[int | None, ...],
    at_least: tuple[int, ...],
) -> None:
    """Refuse a buffer whose dtype or shape differs from what the dialect says, or that cannot take it."""
    if not isinstance(buffer, np.ndarray):
        raise PagedKVError(f"{name} must be a numpy array, got {type(buffer).__name__}")
    if buffer.dtype != dtype or not buffer.flags.writeable:
        state = "" if buffer.flags.writeable else "read-only "
        raise PagedKVError(f"{name} must be writable {np.dtype(dtype)}, got {state}{buffer.dtype}")
    if buffer.ndim != len(shape) or any(
        s is not None and s != b for s, b in zip(shape, buffer.shape, strict=True)
    ):
        wanted = tuple("any" if s is None else s for s in shape)
        raise PagedKVError(f"{name} must have shape {wanted}, got {buffer.shape}")
    if any(b < a for a, b in zip(at_least, buffer.shape, strict=True)):
        raise PagedKVError(f"{name} of shape {buffer.shape} is too small: this batch needs {at_least}")
