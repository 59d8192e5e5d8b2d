"""Which part of its tokens a sequence still attends to: blocks dropped from the middle of its context."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.announced import Announced
from pagedkv.block_cache import BlockCache
from pagedkv.block_pool import NO_BLOCKS
from pagedkv.block_tables import BlockTables, Int32Array, Int64Array, SeqId
from pagedkv.dropped import Dropped
from pagedkv.errors import SequenceError
from pagedkv.token_eviction import as_columns


class Context:
    """Token-level eviction, a block at a time: sequences that keep only a part of what they have computed.

    ::

        block table       | 7 | 3 | 9 | 4 | 6 |      seq_len 18, blocks of 4 tokens
        drop_blocks([1, 2])
        block table       | 7 | 4 | 6 |              seq_len 10: attention reads 10 tokens
        positions         the newest token is still number 17

    Keys carry the position at which they were computed, so attention over the shorter row needs nothing else.
    What a sequence is given and asked by position from then on (``slots``, ``truncate``, ``num_tokens``,
    media of a ``commit``) counts the tokens that it keeps; ``tables.positions`` tells the true ones, for
    rotary embeddings. A sliding window counts kept tokens, too.

    What was dropped is free at once, or cached if it can still be hit; see `pagedkv.dropped` for what others
    keep. The tokens that come after a drop saw only a part of what came before them: they are never shared.
    `pagedkv.token_eviction` chooses the blocks.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(num_blocks=8, block_size=4)
    >>> _ = manager.open("a", range(18)); manager.commit("a", range(18))
    >>> manager.context.drop_blocks("a", [1, 2])
    2
    >>> manager.tables.block_ids("a").tolist(), manager.tables.num_tokens("a"), manager.counts
    ([1, 4, 5], 10, BlockCounts(free=3, cached=2, active=3))
    >>> manager.tables.positions(["a"]).tolist(), manager.lookup(range(18)).num_cached_tokens
    ([17], 12)
    """

    def __init__(self, cache: BlockCache, tables: BlockTables, announced: Announced) -> None:
        """Drop blocks of ``cache`` from the rows of ``tables``."""
        self._cache = cache
        self._tables = tables
        self._announced = announced

    def drop_blocks(self, seq_id: SeqId, columns: Any) -> int:
        """Take blocks out of a sequence's context; returns how many it gave up, at most those it dropped.

        ``columns`` int [n] are distinct places in its block table as it is now, in any order, of full
        committed blocks; the block with the newest token stays. The row closes up, in the same order. With
        several blocks to drop, one call is best: whatever is kept behind the first one leaves the prefix
        cache. Blocks that others hold, by a fork, a hit, a pin or a fence, remain theirs. Those that must be
        held for now, since something that is kept and shared comes behind them, are given up by a later call,
        which may drop nothing, or by ``close``.

        A sequence that has dropped blocks can be forked, grow and be cut as far back as the last gap. Pins
        and priorities reach its blocks before the first gap; it cannot be swapped; what it had announced is
        not coming any more. Raises ``SequenceError`` for a sequence that is not open, a block that may not
        go, or a sequence that was cut inside a cached block and has not grown since, or that awaits one of
        ``copies``; ``PagedKVError`` for columns that are no distinct columns of its table. Nothing has
        changed then. Cost: O(blocks of the sequence and what is cached behind them), vectorised.
        """
        tables, size = self._tables, self._tables.block_size
        row = tables.row(seq_id)
        length, committed = int(tables.seq_len[row]), int(tables.committed[row])
        gone = as_columns(columns, tables.num_blocks(row))
        limit = min(committed // size, (length - 1) // size if length else 0)
        if len(gone) and gone[-1] >= limit:
            raise SequenceError(
                f"cannot drop block {gone[-1]} of {seq_id!r}: {committed} of {length} tokens are committed, "
                f"in blocks of {size}, and the newest token stays"
            )
        if length % size and self._cache.index.indexed[tables.blocks[row, length // size]]:
            raise SequenceError(f"the last block of {seq_id!r} is still cached as it was: append to it first")
        if len(self._cache.copies):  # which hold a block, and rely on the row for what comes before it
            self._cache.copies.require_done(tables.blocks[row, : tables.num_blocks(row)])
        known = tables.dropped.get(row)
        if not len(gone) and (known is None or not len(known.held)):
            return 0
        state = known or self._whole(row, committed // size)
        return self._drop(row, state, gone)

    def least_tokens(self, seq_id: SeqId) -> int:
        """How far back the sequence can be cut: 0, or up to the last gap, or to a shared block behind one."""
        state = self._tables.dropped.get(self._tables.row(seq_id))
        return state.least_columns * self._tables.block_size if state else 0

    # -- the manager's side

    def require_cut(self, seq_id: SeqId, num_tokens: int) -> None:
        """Refuse to cut a sequence to what is no length of it, or to so few tokens that a gap goes too."""
        length, least = int(self._tables.seq_len[self._tables.row(seq_id)]), self.least_tokens(seq_id)
        whole = isinstance(num_tokens, (int, np.integer)) and not isinstance(num_tokens, bool)
        if not whole or not 0 <= num_tokens <= length:
            raise SequenceError(f"cannot truncate sequence {seq_id!r} of {length} tokens to {num_tokens}")
        if num_tokens < least:
            raise SequenceError(
                f"cannot truncate sequence {seq_id!r} of {length} tokens to {num_tokens}: "
                f"blocks were dropped, the first {least} tokens that are left must stay"
            )

    # -- inner steps

    def _whole(self, row: int, num_full: int) -> Dropped:
        """The state of a row without a gap."""
        chain = self._tables.blocks[row, :num_full].copy()
        if not self._cache.index.indexed[chain].all():  # without prefix caching, none is
            chain = NO_BLOCKS
        return Dropped(0, chain, np.ones(len(chain), np.bool_), 0)

    def _drop(self, row: int, state: Dropped, gone: Int64Array) -> int:
        tables, cache = self._tables, self._cache
        from_chain = gone[: np.searchsorted(gone, state.num_chained)]
        private = tables.blocks[row, gone[len(from_chain) :]]
        kept = np.delete(tables.blocks[row, : tables.num_blocks(row)], gone)
        chain, in_row = state.chain, state.in_row.copy()
        in_row[np.flatnonzero(in_row)[from_chain]] = False
        end, hidden_from = self._ends(chain, in_row)
        hidden = chain[hidden_from:]
        given_up = np.concatenate([chain[end:hidden_from], hidden[~in_row[hidden_from:]], private])[::-1]
        left = Dropped(
            state.num_blocks + len(gone), chain[:end].copy(), in_row[:end].copy(), self._least(state, gone)
        )
        left.least_columns = max(left.least_columns, left.num_chained)
        if len(hidden):
            cache.withdraw(hidden[::-1], "dropped")
        cache.release(given_up)
        tables.close_up(row, kept)
        tables.dropped[row] = left
        cache.num_dropped += len(gone)
        self._announced.cut(row, int(tables.committed[row]), 0)
        return len(given_up)

    @staticmethod
    def _least(state: Dropped, gone: Int64Array) -> int:
        """The column behind the last gap, once the row has closed up."""
        before = state.least_columns - int(np.count_nonzero(gone < state.least_columns))
        return max(before, int(gone[-1]) + 1 - len(gone)) if len(gone) else before

    def _ends(self, chain: Int32Array, in_row: npt.NDArray[np.bool_]) -> tuple[int, int]:
        """Where the chain ends from now on, and from where on its blocks leave the index.

        What is between is given up, and stays cached behind the chain's last block.
        """
        n = len(chain)
        gaps = np.flatnonzero(~in_row)
        kept_behind = np.flatnonzero(in_row[gaps[0] :]) + gaps[0] if len(gaps) else gaps
        if not len(kept_behind):
            return (int(gaps[0]) if len(gaps) else n), n
        first = self._private_from(chain, int(kept_behind[0]))
        before, behind = np.flatnonzero(in_row[:first]), np.flatnonzero(in_row[first:])
        return (int(before[-1]) + 1 if len(before) else 0), (first + int(behind[0]) if len(behind) else n)

    def _private_from(self, chain: Int32Array, least: int) -> int:
        """The first place, ``least`` or later, from which on nobody else holds or builds on the chain."""
        shared = np.flatnonzero(self._cache.pool.ref_count[chain[least:]] > 1)
        low, high = least + (int(shared[-1]) + 1 if len(shared) else 0), len(chain)
        while low < high:  # what builds on a block builds on those before it, too
            middle = (low + high) // 2
            if self._others_build_on(chain, middle):
                low = middle + 1
            else:
                high = middle
        return low

    def _others_build_on(self, chain: Int32Array, place: int) -> bool:
        return len(self._cache.index.behind(chain[place : place + 1])) != len(chain) - 1 - place
