"""What happens to the sequences of a manager, once nothing can refuse it any more."""

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_cache import BlockCache
from pagedkv.block_pool import NO_BLOCKS
from pagedkv.content import NO_EXTRA, SequenceExtra
from pagedkv.page_table import Int32Array, Int64Array, PageTable, SeqId
from pagedkv.prefix_index import ROOT
from pagedkv.tails import NO_TAILS, shared_tails


class Sequences:
    """The rows of the page table, and what each holds of the block cache."""

    def __init__(self, cache: BlockCache, tables: PageTable) -> None:
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
        self, seq_id: SeqId, extra: SequenceExtra, num_new: int, shared: Int32Array, tail: Int32Array
    ) -> tuple[int, Int32Array]:
        """Row and new blocks of a sequence that holds ``shared``; nothing is left of it if that fails.

        The first new block becomes a copy of ``tail``, if there is one, which is not evicted for them.
        """
        row = self.tables.add(seq_id)
        try:
            self.set_extra(row, extra)
            new = self.cache.acquire(num_new, shared, spared=tail)
        except BaseException:
            self.set_extra(row, NO_EXTRA)
            self.tables.remove(seq_id)
            raise
        if len(tail):
            self.cache.copy(tail, new[:1])
        return row, new

    def remove(self, seq_id: SeqId, row: int) -> None:
        """Give up a sequence and its row."""
        self.cache.release(self.tables.blocks[row, : self.tables.num_blocks(row)][::-1].copy())
        self.tables.remove(seq_id)
        self.maybe_shared.discard(row)
        self.set_extra(row, NO_EXTRA)

    def cut(self, row: int, num_tokens: int, extra: SequenceExtra) -> None:
        """Keep the first ``num_tokens`` of a sequence, and give up the blocks beyond."""
        keep, had = div_ceil(num_tokens, self.block_size), self.tables.num_blocks(row)
        tail = self.tables.blocks[row, keep - 1 : keep] if num_tokens % self.block_size else NO_BLOCKS
        shared = bool(self.cache.is_shared(tail).any())
        self.cache.release(self.tables.blocks[row, keep:had][::-1].copy())
        self.tables.blocks[row, keep:had] = 0
        self.tables.seq_len[row] = num_tokens
        self.tables.committed[row] = min(int(self.tables.committed[row]), num_tokens)
        if shared:
            self.maybe_shared.add(row)
        self.set_extra(row, extra)

    def extend(self, rows: Int64Array, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more in each row, or in none."""
        lens = self.tables.seq_len[rows]
        have, need = div_ceil(lens, self.block_size), div_ceil(lens + num_tokens, self.block_size)
        grow = need - have
        tails = NO_TAILS
        if self.maybe_shared and num_tokens:
            tails = shared_tails(self.cache, self.tables, rows)
        available, doomed = self.cache.pool.num_available, NO_BLOCKS
        total = int(grow.sum()) + len(tails.copied)
        if total - len(tails.burdened) <= available < total:
            # Cached content that builds on our own tails alone must not keep us from growing for ever.
            behind = self.cache.idle_behind(tails.burdened)
            if behind is not None:
                doomed, tails = behind, tails.unburdened()
                total = int(grow.sum()) + len(tails.copied)
        if total > available:
            return False
        copied = tails.copied
        if total or len(doomed):
            new = self.cache.acquire(total, doomed=doomed)
            grown_rows = np.repeat(rows, grow)
            columns = np.repeat(have - np.cumsum(grow) + grow, grow) + np.arange(len(grown_rows))
            self.tables.blocks[grown_rows, columns] = new[len(copied) :]
        if len(copied):
            places = rows[copied], have[copied] - 1
            old = self.tables.blocks[places]
            self.tables.blocks[places] = new[: len(copied)]
            self.cache.replace(old, new[: len(copied)])
        if len(tails.private):
            self.cache.withdraw(tails.private)
        self.tables.seq_len[rows] += num_tokens
        return True

    def commit(self, row: int, tokens: Int32Array, extra: SequenceExtra) -> None:
        """Store committed tokens, and share the blocks that they fill; nobody else holds those blocks."""
        start, size = int(self.tables.committed[row]), self.block_size
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
        before = self.extra(row)
        self.set_extra(row, extra)
        if full:
            try:
                self._share(row, first, ids, content)
            except BaseException:
                self.set_extra(row, before)
                raise

    def commit_one(self, rows: Int64Array, blocks: Int32Array, tokens: Int32Array) -> None:
        """``commit`` one token of each row, into ``blocks``."""
        start = self.tables.committed[rows]
        offset = start % self.block_size
        self.cache.index.tokens[blocks, offset] = tokens
        full = offset == self.block_size - 1
        if full.any():
            self._share_full(rows[full], blocks[full])

    def _share(self, row: int, first: int, own: Int32Array, content: Int32Array) -> None:
        """Index the blocks ``own``, which stand from ``first`` on, or let the row hold equal ones instead."""
        blocks = self.tables.blocks[row]
        parent = int(blocks[first - 1]) if first else ROOT
        extra = self.extra(row).ids(self.cache.extra_keys, first, len(own))
        held = self.cache.share(own, content, extra, parent)
        if held is not own:
            blocks[first : first + len(own)] = held
            self.cache.release(own[held != own][::-1])

    def _share_full(self, rows: Int64Array, blocks: Int32Array) -> None:
        """Index ``blocks``, which the next committed token of each row fills, or hold equal ones instead."""
        if not self._extra and not self.cache.events.recording:
            # most blocks continue a prompt that nobody else has: those need no search
            at = self.tables.committed[rows] // self.block_size
            parents = np.where(at > 0, self.tables.blocks[rows, at - 1], ROOT)
            grown = self.cache.index.grow(blocks, parents)
            self.cache.policy.stored(blocks[grown])
            rows, blocks = rows[~grown], blocks[~grown]
        for row, block in zip(rows.tolist(), blocks.tolist(), strict=True):
            first = int(self.tables.committed[row]) // self.block_size
            self._share(
                row, first, np.array([block], np.int32), self.cache.index.tokens[block].reshape(1, -1)
            )
