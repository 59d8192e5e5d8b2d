"""The page table: what readers see of the block tables, and the two batch dialects that kernels read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.block_tables import NULL_BLOCK, BlockTables, Int32Array, Int64Array, SeqId
from pagedkv.errors import PagedKVError, SequenceError

PAD_SLOT = -1
"""Slot of a padded row: nothing is written for it."""


class PageTable:
    """Reads which blocks hold which open sequence; ``manager.tables`` is one. `BlockTables` has the drawing.

    ``len`` is the number of open sequences, ``in`` tells whether one is open. All methods raise
    ``SequenceError`` for a sequence that is not open, and for a batch that names one twice.
    Cost of each: O(blocks touched).
    """

    def __init__(self, tables: BlockTables) -> None:
        """Read ``tables``."""
        self._tables = tables
        self.block_size = tables.block_size

    def __len__(self) -> int:
        """Return the number of open sequences."""
        return len(self._tables)

    def __contains__(self, seq_id: SeqId) -> bool:
        """Tell whether the sequence is open."""
        return seq_id in self._tables

    @property
    def seq_ids(self) -> list[SeqId]:
        """Ids of the open sequences, in the order in which they were opened."""
        return self._tables.seq_ids

    def num_tokens(self, seq_id: SeqId) -> int:
        """Tokens of the sequence that have a slot."""
        return int(self._tables.seq_len[self._tables.row(seq_id)])

    def num_committed(self, seq_id: SeqId) -> int:
        """Tokens of the sequence that are committed."""
        return int(self._tables.committed[self._tables.row(seq_id)])

    def num_dropped(self, seq_id: SeqId) -> int:
        """Blocks that the sequence has dropped from the middle of its context."""
        return self._tables.num_dropped(self._tables.row(seq_id))

    def seq_lens(self, seq_ids: Sequence[SeqId]) -> Int64Array:
        """``num_tokens`` of each of several distinct sequences: int64 [n]."""
        lens: Int64Array = self._tables.seq_len[self._tables.rows(seq_ids)]
        return lens

    def positions(self, seq_ids: Sequence[SeqId]) -> Int64Array:
        """True position of each sequence's newest token, those dropped counted, for rotary embeddings.

        int64 [n]: ``seq_len - 1`` for who has dropped nothing, and -1 for an empty sequence.
        """
        tables, rows = self._tables, self._tables.rows(seq_ids)
        newest: Int64Array = tables.seq_len[rows] - 1
        if tables.dropped:
            newest += self.block_size * np.array(list(map(tables.num_dropped, rows.tolist())), np.int64)
        return newest

    def block_ids(self, seq_id: SeqId) -> Int32Array:
        """Copy of the block table of a sequence: int32 [ceil(num_tokens / block_size)]."""
        tables, row = self._tables, self._tables.row(seq_id)
        return tables.blocks[row, : tables.num_blocks(row)].copy()

    def slots(self, seq_id: SeqId, start: int = 0, stop: int | None = None) -> Int64Array:
        """Slots of the positions ``start <= p < stop`` (default: to the end): int64 [stop - start].

        This is the ``slot_mapping`` of a prefill chunk. Raises ``SequenceError`` outside the sequence.
        """
        row = self._tables.row(seq_id)
        length = int(self._tables.seq_len[row])
        stop = length if stop is None else stop
        whole = all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in (start, stop))
        if not whole or not 0 <= start <= stop <= length:
            raise SequenceError(
                f"positions {start}..{stop} are outside sequence {seq_id!r} of {length} tokens"
            )
        return self._tables.slots(np.array([row]), np.array([start]), stop - start)

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
        rows = self._tables.rows(seq_ids)
        lens = self._tables.seq_len[rows]
        width = div_ceil(int(lens.max(initial=0)), self.block_size)
        _require(seq_lens, "seq_lens", np.int32, (None,), (len(rows),))
        batch = len(seq_lens)
        _require(block_tables, "block_tables", np.int32, (batch, None), (len(rows), width))
        if slot_mapping is not None:
            _require(slot_mapping, "slot_mapping", np.int64, (batch,), (len(rows),))
        n = len(rows)
        block_tables[:n, :width] = self._tables.blocks[rows, :width]
        block_tables[:n, width:] = NULL_BLOCK
        block_tables[n:] = NULL_BLOCK
        seq_lens[:n] = lens
        seq_lens[n:] = 0
        if slot_mapping is not None:
            newest = self._tables.slots(rows, np.maximum(lens - 1, 0), 1)
            slot_mapping[:n] = np.where(lens > 0, newest, PAD_SLOT)
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
        rows = self._tables.rows(seq_ids)
        lens = self._tables.seq_len[rows]
        counts = div_ceil(lens, self.block_size)
        n, total = len(rows), int(counts.sum())
        _require(kv_last_page_len, "kv_last_page_len", np.int32, (None,), (n,))
        _require(kv_indptr, "kv_indptr", np.int32, (len(kv_last_page_len) + 1,), (n + 1,))
        _require(kv_indices, "kv_indices", np.int32, (None,), (total,))
        width = int(counts.max(initial=0))
        kv_indptr[0] = 0
        kv_indptr[1 : n + 1] = np.cumsum(counts)
        kv_indptr[n + 1 :] = total
        kv_indices[:total] = self._tables.blocks[rows, :width][np.arange(width) < counts[:, None]]
        kv_indices[total:] = NULL_BLOCK
        kv_last_page_len[:n] = lens - np.maximum(counts - 1, 0) * self.block_size
        kv_last_page_len[n:] = 0
        return total


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
