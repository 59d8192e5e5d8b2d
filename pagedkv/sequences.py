"""What happens to the sequences of a manager, once nothing can refuse it any more."""

from typing import NamedTuple

import numpy as np

from pagedkv.block_cache import BlockCache
from pagedkv.block_pool import NO_BLOCKS
from pagedkv.block_tables import BlockTables, Int32Array, Int64Array, SeqId
from pagedkv.content import NO_EXTRA, SequenceExtra
from pagedkv.prefix_index import ROOT
from pagedkv.row_batches import grow_rows, plan_growth, store_tokens
from pagedkv.tails import NO_TAILS, shared_tails


class Growth(NamedTuple):
    """What a batch of rows needs to grow."""

    rows: Int64Array
    num_tokens: int
    """More in each row."""
    longest: int
    """Tokens of the longest row then."""
    num_blocks: int
    """New blocks, without those for copies of tails."""
    shared: Int32Array
    """[2, n]: rows of the batch whose partial tail others can see, and those tails."""


class Sequences:
    """The rows of the page table, and what each holds of the block cache."""

    def __init__(self, cache: BlockCache, tables: BlockTables) -> None:
        """Start with no sequence in ``tables``."""
        self.cache = cache
        self.tables = tables
        self.block_size = tables.block_size
        self.maybe_shared: set[int] = set()
        """Rows whose partial tail others might see: only a fork or a truncation makes one."""
        self._extra: dict[int, SequenceExtra] = {}

    def extra(self, row: int) -> SequenceExtra:
        """Namespace and media of the row."""
        return self._extra.get(row, NO_EXTRA)

    def set_extra(self, row: int, extra: SequenceExtra) -> None:
        """Let the row use the keys of ``extra`` in place of those that it used."""
        old = self._extra.get(row, NO_EXTRA)
        if extra is old:
            return
        self.cache.extra_keys.exchange(old.by_block.values(), extra.by_block.values())
        if extra is NO_EXTRA:
            del self._extra[row]
        else:
            self._extra[row] = extra

    def match(self, prompt: Int32Array, extra: SequenceExtra, limit: int) -> Int32Array:
        """The cached blocks that hold the longest prefix of ``prompt``, of at most ``limit`` tokens."""
        full = max(0, limit) // self.block_size
        if not full:
            return NO_BLOCKS
        tokens = prompt[: full * self.block_size].reshape(full, self.block_size)
        return self.cache.index.match(tokens, extra.ids(self.cache.extra_keys, 0, full))

    def match_tail(
        self, prompt: Int32Array, extra: SequenceExtra, hit: Int32Array, limit: int
    ) -> tuple[int, int]:
        """The cached block behind ``hit`` that shares the most tokens, up to ``limit``, and how many."""
        start = len(hit) * self.block_size
        row = prompt[start : min(limit, start + self.block_size)]
        if not len(row):
            return 0, 0
        extra_id = int(extra.ids(self.cache.extra_keys, len(hit), 1)[0])
        return self.cache.index.best_child(row, extra_id, int(hit[-1]) if len(hit) else ROOT)

    def add(
        self,
        seq_id: SeqId,
        extra: SequenceExtra,
        num_tokens: int,
        num_cached: int,
        hit: Int32Array,
        tail: Int32Array,
    ) -> int:
        """Open a row that holds ``hit`` and then new blocks; nothing is left of it if that fails.

        The first new block becomes a copy of ``tail``, if there is one, which is held until it is.
        """
        row = self.tables.add(seq_id)
        try:
            self.set_extra(row, extra)
            new = self.tables.fill(row, hit, num_tokens, num_cached)
            self.cache.acquire(new, np.concatenate([hit, tail]) if len(tail) else hit)
        except BaseException:
            self._forget(seq_id, row)
            raise
        if len(tail):
            try:
                self.cache.copy(tail, new[:1])
            except BaseException:
                for ids in (new[::-1], tail, hit[::-1]):
                    self.cache.release(ids)
                self._forget(seq_id, row)
                raise
        return row

    def fork(self, row: int, blocks: Int32Array, child_id: SeqId) -> None:
        """Open a row that holds the same ``blocks`` as another; nothing is left of it if that fails."""
        shown: set[int] = set()
        child = self.tables.add(child_id)
        try:
            shown = {row, child} - self.maybe_shared
            self.set_extra(child, self.extra(row))
            self.tables.copy(row, child)
            self.maybe_shared |= shown
            self.cache.acquire(np.empty(0, np.int32), blocks)
        except BaseException:
            self.maybe_shared -= shown
            self._forget(child_id, child)
            raise

    def remove(self, seq_id: SeqId, row: int) -> None:
        """Give up a sequence and its row."""
        tables = self.tables
        if row in tables.dropped:
            self.cache.release(tables.held(row)[::-1])
            tables.cut(row, 0)
        else:
            self.cache.cut_row(tables, row, 0)
        tables.remove(seq_id)
        self.maybe_shared.discard(row)
        if row in self._extra:
            self.set_extra(row, NO_EXTRA)

    def _forget(self, seq_id: SeqId, row: int) -> None:
        """Take a row back that holds nothing yet."""
        self.tables.cut(row, 0)
        self.set_extra(row, NO_EXTRA)
        self.tables.remove(seq_id)

    def cut(self, row: int, num_tokens: int, extra: SequenceExtra) -> None:
        """Keep the first ``num_tokens`` of a sequence, and give up the blocks beyond."""
        last, rest = divmod(num_tokens, self.block_size)
        tail = self.tables.blocks[row, last : last + 1] if rest else NO_BLOCKS
        shared = bool(self.cache.is_shared(tail).any())
        self.cache.cut_row(self.tables, row, num_tokens)
        if shared:
            self.maybe_shared.add(row)
        self.set_extra(row, extra)

    def plan(self, rows: Int64Array, num_tokens: int) -> Growth:
        """What ``num_tokens`` more in each row need."""
        cache, tables = self.cache, self.tables
        room = len(rows) if self.maybe_shared and num_tokens else 0
        shared: Int32Array = np.empty((2, room), np.int32)
        longest, num_new, num_shared = plan_growth(
            cache.pool, cache.index, tables.blocks, tables.seq_len, rows, num_tokens, shared
        )
        return Growth(rows, num_tokens, longest, num_new, shared[:, :num_shared])

    def extend(self, growth: Growth) -> bool:
        """Make room for more in each row, as planned, or in none."""
        cache, tables = self.cache, self.tables
        rows, num_tokens, _, grown, shared = growth
        tails = shared_tails(cache, shared, tables.seq_len[rows]) if shared.size else NO_TAILS
        available, doomed = cache.pool.num_available, NO_BLOCKS
        total = grown + len(tails.copied)
        if total - len(tails.burdened) <= available < total:
            # Cached content that builds on our own tails alone must not keep us from growing for ever.
            behind = cache.idle_behind(tails.burdened)
            if behind is not None:
                doomed, tails = behind, tails.unburdened()
                total = grown + len(tails.copied)
        if total > available:
            return False
        num_copied, new = len(tails.copied), np.empty(total, np.int32)
        more: Int32Array = new[num_copied:]
        if total or len(doomed):
            cache.acquire(new, doomed=doomed)
        if num_copied:
            self._copy_tails(rows[tails.copied], new[:num_copied])
        try:
            grow_rows(tables.blocks, tables.seq_len, rows, self.block_size, num_tokens, more)
        except BaseException:
            cache.release(more[::-1])
            raise
        if len(tails.private):
            cache.withdraw(tails.private)
        if self.maybe_shared and num_tokens:
            self._note_shared(rows, shared[0], tails.copied)
        return True

    def _copy_tails(self, rows: Int64Array, new: Int32Array) -> None:
        """Let ``new`` blocks take the place of partial tails that others can see."""
        places = rows, self.tables.seq_len[rows] // self.block_size
        old = self.tables.blocks[places]
        self.tables.blocks[places] = new
        self.cache.replace(old, new)

    def _note_shared(self, rows: Int64Array, shared: Int32Array, copied: Int32Array) -> None:
        """Rows that have grown show nobody their tails, but for kept ones that fences or copies hold."""
        self.maybe_shared.difference_update(rows.tolist())
        if len(copied) < len(shared) and (self.cache.fences or len(self.cache.copies)):
            self.maybe_shared.update(rows[np.setdiff1d(shared, copied)].tolist())

    def commit(self, row: int, tokens: Int32Array, extra: SequenceExtra) -> None:
        """Commit tokens of a row, and share the blocks that they fill; nobody else holds those blocks."""
        before = self.extra(row)
        if extra is before is NO_EXTRA and self.cache.extend_content(self.tables, row, tokens):
            return
        start, size = int(self.tables.committed[row]), self.block_size
        stop = start + len(tokens)
        first, offset = divmod(start, size)
        blocks, stored = self.tables.blocks[row], self.cache.index.tokens
        if offset:
            tokens = np.concatenate([stored[blocks[first], :offset], tokens])
        full, rest = divmod(len(tokens), size)
        ids = blocks[first : first + full].copy()
        content = tokens[: full * size].reshape(full, size)
        stored[ids] = content
        if rest:
            stored[blocks[first + full], :rest] = tokens[full * size :]
        self.set_extra(row, extra)
        if full:
            try:
                self._share(row, first, ids, content)
            except BaseException:
                self.set_extra(row, before)
                raise
        self.tables.committed[row] = stop

    def commit_one(self, rows: Int64Array, tokens: Int32Array) -> bool:
        """``commit`` one token of each row; False if one of them has no uncommitted token left."""
        tables = self.tables
        full: Int32Array = np.empty(len(rows), np.int32)
        num_full = store_tokens(
            self.cache.index, tables.blocks, tables.seq_len, tables.committed, rows, tokens, full
        )
        if num_full > 0:
            self._share_full(rows[full[:num_full]])
        return num_full >= 0

    def _share(self, row: int, first: int, own: Int32Array, content: Int32Array) -> None:
        """Index the blocks ``own``, which stand from ``first`` on, or let the row hold equal ones instead."""
        blocks = self.tables.blocks[row]
        parent = int(blocks[first - 1]) if first else ROOT
        extra = self.extra(row).ids(self.cache.extra_keys, first, len(own))
        held = self.cache.share(own, content, extra, parent)
        if held is not own:
            blocks[first : first + len(own)] = held
            self.cache.release(own[held != own][::-1])

    def _share_full(self, rows: Int64Array) -> None:
        """Index the block that the next committed token of each row fills, or hold an equal one instead."""
        if self.tables.dropped:
            rows = rows[[row not in self.tables.dropped for row in rows.tolist()]]
        at = self.tables.committed[rows] // self.block_size
        blocks = self.tables.blocks[rows, at]
        if not self._extra and not self.cache.events.recording:
            # most blocks continue a prompt that nobody else has: those need no search
            parents = np.where(at > 0, self.tables.blocks[rows, at - 1], ROOT)
            grown = self.cache.index.grow(blocks, parents)
            self.cache.policy.stored(blocks[grown])
            rows, blocks = rows[~grown], blocks[~grown]
        for row, block in zip(rows.tolist(), blocks.tolist(), strict=True):
            first = int(self.tables.committed[row]) // self.block_size
            self._share(
                row, first, np.array([block], np.int32), self.cache.index.tokens[block].reshape(1, -1)
            )
