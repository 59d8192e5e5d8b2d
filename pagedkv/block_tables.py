"""The block tables of all sequences: which blocks each holds, and how many tokens are in them."""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.dropped import Dropped
from pagedkv.errors import PagedKVError, SequenceError

NULL_BLOCK = 0
"""Reserved block id: never handed out, never counted; pads every table."""

MOST_TOKENS = 2**31 - 1
"""Of a block."""

MOST_ENTRIES = 2**48
"""Of block tables: more than any address space holds."""

SeqId = Hashable
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NO_BATCH: tuple[list[SeqId], Int64Array] = [], np.zeros(0, np.int64)


class BlockTables:
    """A row of block ids for each open sequence, in one array; the manager alone writes them.

    ::

        blocks : [max_seqs, max_blocks_per_seq] int32, NULL_BLOCK beyond a sequence's blocks
        seq_len: [max_seqs] int64, tokens of the sequence that have a slot (written or about to be)
        committed: [max_seqs] int64, how many of them are final

        row     0    1    2    3        seq_len = 37, block_size = 16
              | 7  | 3  | 9  | 0 | ...  position p lives in slot blocks[p // 16] * 16 + p % 16

    Others read them through `pagedkv.page_table.PageTable`. Cost of each method: O(blocks touched).
    """

    def __init__(self, max_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        """Make empty rows; memory is committed by the operating system only as they are used.

        Raises ``PagedKVError`` for sizes that no array can have.
        """
        if block_size > MOST_TOKENS or max_seqs * max_blocks_per_seq > MOST_ENTRIES:
            raise PagedKVError(
                f"block tables of {max_seqs} x {max_blocks_per_seq} entries, at most {MOST_ENTRIES} can be, "
                f"and blocks of {block_size} tokens, at most {MOST_TOKENS}"
            )
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

    def all_rows(self) -> Int64Array:
        """Rows of the open sequences, in the order in which they were opened."""
        return np.fromiter(self._rows.values(), np.int64, len(self._rows))

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
        if isinstance(seq_ids, str) or not is_batch(seq_ids):
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

    def num_dropped(self, row: int) -> int:
        """Blocks that a row has dropped from the middle of its context."""
        return self.dropped[row].num_blocks if row in self.dropped else 0

    def num_blocks(self, row: int) -> int:
        """Blocks of a row."""
        return div_ceil(int(self.seq_len[row]), self.block_size)

    def slots(self, rows: Int64Array, starts: Int64Array, count: int) -> Int64Array:
        """Slots of ``count`` positions from ``starts`` on, row after row: int64 [len(rows) * count]."""
        positions = (starts[:, None] + np.arange(count)).astype(np.int64, copy=False)
        block = self.blocks[rows[:, None], positions // self.block_size].astype(np.int64)
        return (block * self.block_size + positions % self.block_size).reshape(-1)

    def add(self, seq_id: SeqId) -> int:
        """Give a new, empty sequence a row; the caller knows that one is free."""
        row = self._free_rows.pop()
        try:
            self._rows[seq_id] = row
        except BaseException:
            self._free_rows.append(row)
            raise
        return row

    def fill(self, row: int, hit: Int32Array, num_tokens: int, committed: int) -> Int32Array:
        """Let an empty row hold the blocks ``hit``; returns the places of those behind them, to be filled."""
        self.seq_len[row], self.committed[row] = num_tokens, committed
        self.blocks[row, : len(hit)] = hit
        return self.blocks[row, len(hit) : self.num_blocks(row)]

    def copy(self, row: int, child: int) -> None:
        """Let an empty row hold the same as another."""
        num_blocks = self.num_blocks(row)
        self.seq_len[child], self.committed[child] = self.seq_len[row], self.committed[row]
        self.blocks[child, :num_blocks] = self.blocks[row, :num_blocks]
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


def is_batch(given: object) -> bool:
    """Whether something has entries to be taken in order: a sequence, or an array of any dimension but 0."""
    return given.ndim > 0 if isinstance(given, np.ndarray) else isinstance(given, Sequence)


def _same(seq_ids: list[SeqId], other: list[SeqId]) -> bool:
    """Whether two batches are equal; ids that cannot be compared, such as arrays, are none."""
    try:
        return bool(seq_ids == other)
    except ValueError:
        return False
