"""The manager: sequences over a block pool, with exact prefix reuse, copy-on-write and eviction."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_pool import FREE, NO_BLOCKS, BlockCounts, BlockPool
from pagedkv.content import NO_EXTRA, SequenceExtra, as_token_array, extra_ids
from pagedkv.errors import NeverFits, PagedKVError, SequenceError
from pagedkv.eviction import LRUOrder
from pagedkv.invariants import check_invariants
from pagedkv.namespace import ExtraKeys, Media, Namespace
from pagedkv.page_table import Int32Array, Int64Array, PageTable, SeqId
from pagedkv.prefix_index import ROOT, PrefixIndex
from pagedkv.stats import ManagerStats


class Opened(NamedTuple):
    """Result of ``open``: the first ``num_cached_tokens`` of ``num_tokens`` need no prefill."""

    num_tokens: int
    num_cached_tokens: int


class BlockCopies(NamedTuple):
    """Blocks to copy, ``src[i]`` to ``dst[i]``, both int32 [n]: read all sources before writing any."""

    src: Int32Array
    dst: Int32Array


class KVCacheManager:
    """Decides which blocks hold which sequence. Bookkeeping only: numpy, no tensors, no clock, no threads.

    ::

        open            prefill            decode                 finish
        [hit | fresh] -> commit(tokens) -> step/append, commit -> close
         ^ shared, already computed                                '-> full blocks stay cached

    A *committed* token is final and its K and V are written (or will be, before any later work on the
    same stream). Only full committed blocks are ever shared, so draft tokens never leak.

    Every method either happens whole or changes nothing. ``None`` or ``False`` means "not now": try
    again when sequences have closed. A mistake raises a ``ValueError`` subclass: ``SequenceError``
    for a wrong sequence or position, ``NeverFits`` for what this pool can never hold.
    Not thread-safe: one scheduler owns it.

    Memory: 33 bytes of arrays per block plus 4 per token slot, plus the hash table (about 100 bytes per
    cached block) and 4 bytes per entry of the page table that was ever used.

    >>> manager = KVCacheManager(num_blocks=8, block_size=4)
    >>> manager.open("a", [5, 6, 7, 8, 9])
    Opened(num_tokens=5, num_cached_tokens=0)
    >>> manager.commit("a", [5, 6, 7, 8, 9])
    >>> manager.append("a").tolist()
    [9]
    >>> manager.open("b", [5, 6, 7, 8, 1])
    Opened(num_tokens=5, num_cached_tokens=4)
    >>> manager.close("a"); manager.close("b")
    >>> manager.stats().cached_blocks
    1
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        max_seqs: int = 256,
        max_seq_len: int | None = None,
        prefix_caching: bool = True,
        watermark: float = 0.0,
    ) -> None:
        """Make a manager of ``num_blocks`` usable blocks of ``block_size`` tokens.

        ``max_seqs`` sequences can be open at once, each of at most ``max_seq_len`` tokens (default:
        the whole pool). ``open`` leaves the share ``watermark`` of the pool available for the growth
        of sequences that are open. ``prefix_caching=False`` neither looks up nor keeps content.
        """
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size), ("max_seqs", max_seqs)):
            _require_count(name, value, 1)
        max_seq_len = num_blocks * block_size if max_seq_len is None else max_seq_len
        _require_count("max_seq_len", max_seq_len, 1)
        if not 0.0 <= watermark < 1.0:
            raise PagedKVError(f"watermark must be in [0, 1), got {watermark}")
        self.block_size = block_size
        self.max_seq_len = max_seq_len
        self.prefix_caching = prefix_caching
        self.tables = PageTable(max_seqs, div_ceil(max_seq_len, block_size), block_size)
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex(num_blocks, block_size)
        self._order = LRUOrder(num_blocks)
        self._extra_keys = ExtraKeys()
        self._extra: dict[int, SequenceExtra] = {}
        self._committed: Int64Array = np.zeros(max_seqs, np.int64)
        self._num_indexed: Int64Array = np.zeros(max_seqs, np.int64)
        self._copies: dict[int, int] = {}
        self._watermark_blocks = int(watermark * num_blocks)
        self._counters = _Counters()

    @property
    def num_blocks(self) -> int:
        """Usable blocks; ids are 1..num_blocks."""
        return self._pool.num_blocks

    @property
    def counts(self) -> BlockCounts:
        """Free, cached and active blocks now. Cost: O(1)."""
        return self._pool.counts

    # -- sequences

    def open(
        self,
        seq_id: SeqId,
        tokens: Any,
        *,
        namespace: Namespace | None = None,
        media: Iterable[Media] = (),
        max_cached_tokens: int | None = None,
    ) -> Opened | None:
        """Open a sequence with its prompt: find the longest cached prefix, hold it, allocate the rest.

        One step: nothing can evict the hit in between. ``tokens`` int [n], n >= 0. At most
        ``max_cached_tokens`` are taken from the cache (default n - 1, because a model has to run at
        least one token to say what follows; pass n when no logits are needed).

        Returns None when it does not fit now: not enough available blocks above the watermark (which
        does not bind the only sequence), or ``max_seqs`` are open. Raises ``NeverFits`` if it can never
        fit, ``SequenceError`` if ``seq_id`` is open. Cost: O(n), vectorised.
        """
        prompt = as_token_array(tokens)
        if seq_id in self.tables:
            raise SequenceError(f"sequence {seq_id!r} is open already")
        num_tokens = len(prompt)
        self._require_fits(num_tokens)
        extra = SequenceExtra.build(namespace, media, num_tokens, self.block_size)
        hit = self._match(prompt, extra, max_cached_tokens)
        fresh = div_ceil(num_tokens, self.block_size) - len(hit)
        if not self.tables.num_free_rows or not self._fits_now(hit, fresh, reserve=len(self.tables) > 0):
            return None
        new = self._acquire(fresh, shared=hit)
        row = self.tables.add(seq_id, np.concatenate([hit, new]), num_tokens)
        self._hold_extra(row, extra)
        self._committed[row] = len(hit) * self.block_size
        self._num_indexed[row] = len(hit)
        self._counters.count_open(num_tokens, self.block_size, len(hit))
        return Opened(num_tokens, len(hit) * self.block_size)

    def can_admit(
        self,
        tokens: Any,
        max_new_tokens: int,
        *,
        namespace: Namespace | None = None,
        media: Iterable[Media] = (),
    ) -> bool:
        """Tell whether ``open`` and then ``max_new_tokens`` of growth would fit now, if nobody else grew.

        Raises ``NeverFits`` if they can never fit. Changes nothing. Cost: O(n), like ``open``.
        """
        prompt = as_token_array(tokens)
        _require_count("max_new_tokens", max_new_tokens, 0)
        total = len(prompt) + max_new_tokens
        self._require_fits(total)
        extra = SequenceExtra.build(namespace, media, len(prompt), self.block_size)
        hit = self._match(prompt, extra, None)
        fresh = div_ceil(total, self.block_size) - len(hit)
        return self.tables.num_free_rows > 0 and self._fits_now(hit, fresh, reserve=len(self.tables) > 0)

    def append(self, seq_id: SeqId, num_tokens: int = 1) -> Int64Array | None:
        """Make room for ``num_tokens`` more tokens, drafts included; returns their slots, int64 [n].

        A tail block that somebody else can see is copied first: run ``take_copies`` before writing.
        Returns None when the blocks are not available now. Raises ``NeverFits`` beyond ``max_seq_len``.
        Cost: O(num_tokens).
        """
        _require_count("num_tokens", num_tokens, 0)
        return self._extend(np.array([self.tables.row(seq_id)]), num_tokens)

    def step(self, seq_ids: Sequence[SeqId], num_tokens: int = 1) -> Int64Array | None:
        """``append`` for a whole batch of distinct sequences: all of them grow, or none and None.

        Returns the slots, int64 [len(seq_ids) * num_tokens], sequence after sequence; for one token
        each this is the ``slot_mapping`` of the decode step. Cost: O(batch), vectorised.
        """
        _require_count("num_tokens", num_tokens, 0)
        return self._extend(self.tables.rows(seq_ids), num_tokens)

    def commit(self, seq_id: SeqId, tokens: Any) -> None:
        """Say which tokens the next positions hold, now that they are final; shares what became full.

        ``tokens`` int [n] continue where the last commit (or the hit of ``open``) ended and may not go
        beyond the sequence's length (``SequenceError``). If an equal block is cached already, the
        sequence takes that one and gives up its own. Cost: O(n), vectorised.
        """
        row = self.tables.row(seq_id)
        ids = as_token_array(tokens)
        start = int(self._committed[row])
        stop, length = start + len(ids), int(self.tables.seq_len[row])
        if stop > length:
            raise SequenceError(
                f"cannot commit {len(ids)} more tokens of {seq_id!r}: {start} of its {length} are committed"
            )
        self._committed[row] = stop
        if self.prefix_caching and len(ids):
            self._write_tokens(row, start, ids)
            if stop // self.block_size > start // self.block_size:
                self._share_full_blocks(row)

    def fork(self, seq_id: SeqId, child_id: SeqId) -> bool:
        """Open ``child_id`` as a copy of ``seq_id`` that shares every block, the partial tail included.

        Whoever grows first copies the tail. Returns False when ``max_seqs`` are open. With prefix
        caching the sequence must be committed to its end (``SequenceError``): two sequences must not
        disagree about what a shared slot holds. Cost: O(blocks), vectorised; allocates nothing.
        """
        row = self.tables.row(seq_id)
        if child_id in self.tables:
            raise SequenceError(f"sequence {child_id!r} is open already")
        length, committed = int(self.tables.seq_len[row]), int(self._committed[row])
        if self.prefix_caching and committed < length:
            raise SequenceError(
                f"commit or truncate {seq_id!r} before the fork: {committed} of its {length} tokens are committed"
            )
        if not self.tables.num_free_rows:
            return False
        blocks = self.tables.block_ids(seq_id)
        self._pool.acquire(0, shared=blocks)
        child = self.tables.add(child_id, blocks, length)
        self._hold_extra(child, self._extra.get(row, NO_EXTRA))
        self._committed[child] = committed
        self._num_indexed[child] = self._num_indexed[row]
        return True

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Cut a sequence to its first ``num_tokens``, as when drafts are rejected; frees what is beyond.

        Raises ``SequenceError`` unless ``0 <= num_tokens <= length``. Cost: O(blocks given up).
        """
        row = self.tables.row(seq_id)
        length = int(self.tables.seq_len[row])
        if not isinstance(num_tokens, (int, np.integer)) or not 0 <= num_tokens <= length:
            raise SequenceError(f"cannot truncate sequence {seq_id!r} of {length} tokens to {num_tokens}")
        keep, had = div_ceil(num_tokens, self.block_size), self.tables.num_blocks(row)
        cut = self.tables.blocks[row, keep:had][::-1].copy()
        self._release(cut)
        self.tables.blocks[row, keep:had] = 0
        self.tables.seq_len[row] = num_tokens
        self._committed[row] = min(int(self._committed[row]), num_tokens)
        self._num_indexed[row] = min(int(self._num_indexed[row]), num_tokens // self.block_size)
        if row in self._extra:
            shorter = self._extra[row].truncated(num_tokens, self.block_size)
            if shorter is not self._extra[row]:
                old = self._extra.pop(row)
                self._hold_extra(row, shorter)
                self._drop_extra(old)

    def close(self, seq_id: SeqId) -> None:
        """Give up a sequence: full committed blocks stay cached, others become free.

        Raises ``SequenceError`` if it is not open. Cost: O(blocks), vectorised.
        """
        row = self.tables.row(seq_id)
        self._release(self.tables.block_ids(seq_id)[::-1])
        self.tables.remove(seq_id)
        self._committed[row] = self._num_indexed[row] = 0
        if row in self._extra:
            self._drop_extra(self._extra.pop(row))

    def take_copies(self) -> BlockCopies:
        """Hand over the pending copy-on-write copies; run them before any later write to the storage."""
        copies = BlockCopies(
            np.fromiter(self._copies.values(), np.int32, len(self._copies)),
            np.fromiter(self._copies.keys(), np.int32, len(self._copies)),
        )
        self._copies.clear()
        return copies

    # -- being watched

    def num_committed(self, seq_id: SeqId) -> int:
        """Tokens of the sequence that are committed."""
        return int(self._committed[self.tables.row(seq_id)])

    def stats(self) -> ManagerStats:
        """Snapshot of states and counters. Cost: O(open sequences)."""
        counts = self._pool.counts
        return ManagerStats(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            active_blocks=counts.active,
            used_slots=counts.active * self.block_size - self._unused_slots(),
            indexed_blocks=len(self._index),
            num_seqs=len(self.tables),
            **vars(self._counters),
        )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if any two parts disagree. Cost: O(pool + table), vectorised."""
        check_invariants(
            self._pool,
            self._index,
            self._order,
            self.tables,
            self._committed,
            self._num_indexed,
            self._extra_keys,
        )

    # -- inner steps: everything that can refuse comes before the first change

    def _require_fits(self, num_tokens: int) -> None:
        blocks = div_ceil(num_tokens, self.block_size)
        if num_tokens > self.max_seq_len:
            raise NeverFits(f"{num_tokens} tokens can never fit: a sequence holds at most {self.max_seq_len}")
        if blocks > self.num_blocks:
            raise NeverFits(
                f"{num_tokens} tokens can never fit: they need {blocks} of {self.num_blocks} blocks"
            )

    def _fits_now(self, hit: Int32Array, fresh: int, reserve: bool) -> bool:
        idle_hits = int(np.count_nonzero(self._pool.ref_count[hit] == 0))
        spare = self._pool.num_available - idle_hits - (self._watermark_blocks if reserve else 0)
        return fresh <= spare or fresh == 0

    def _match(self, prompt: Int32Array, extra: SequenceExtra, max_cached_tokens: int | None) -> Int32Array:
        limit = len(prompt) - 1 if max_cached_tokens is None else max_cached_tokens
        full = max(0, min(limit, len(prompt))) // self.block_size
        if not self.prefix_caching or not full:
            return NO_BLOCKS
        tokens = prompt[: full * self.block_size].reshape(full, self.block_size)
        return self._index.match(tokens, extra_ids(self._extra_keys, extra, 0, full))

    def _acquire(self, num_new: int, shared: Int32Array = NO_BLOCKS) -> Int32Array:
        """Take references and new blocks, evicting exactly the shortfall; the caller knows that it fits."""
        shortfall = num_new - self._pool.num_free
        victims = self._order.first(shortfall, keep=shared) if shortfall > 0 else NO_BLOCKS
        new = self._pool.acquire(num_new, shared, victims)
        if len(victims):
            self._forget(victims)
            self._order.discard(victims)
            self._drop_copies(victims)
            self._counters.evicted_blocks += len(victims)
        self._order.discard(shared)
        return new

    def _release(self, ids: Int32Array) -> None:
        """Drop one reference each, deepest block first, so that children are evicted before parents."""
        cached = self._pool.release(ids, self._index.indexed[ids])
        self._order.push(cached)
        self._drop_copies(ids[self._pool.state[ids] == FREE])

    def _drop_copies(self, ids: Int32Array) -> None:
        """Forget pending copies into blocks that no longer have content."""
        if self._copies:
            for block in ids.tolist():
                self._copies.pop(block, None)

    def _forget(self, ids: Int32Array) -> None:
        """Remove evicted blocks from the index, and their extra keys with them."""
        for extra_id in self._index.extra[ids][self._index.extra[ids] > 0].tolist():
            self._extra_keys.drop(extra_id)
        self._index.remove(ids)

    def _extend(self, rows: Int64Array, num_tokens: int) -> Int64Array | None:
        lens = self.tables.seq_len[rows]
        new_lens = lens + num_tokens
        self._require_fits(int(new_lens.max(initial=0)))
        have, need = -(-lens // self.block_size), -(-new_lens // self.block_size)
        grow = need - have
        copied = self._tails_to_copy(rows, lens) if num_tokens else NO_BLOCKS
        total = int(grow.sum()) + len(copied)
        if total > self._pool.num_available:
            return None
        if total:
            new = self._acquire(total)
            if len(copied):
                self._copy_tails(rows[copied], have[copied] - 1, new[: len(copied)])
            first = np.repeat(np.cumsum(grow) - grow, grow)
            columns = np.repeat(have, grow) + np.arange(len(first)) - first
            self.tables.blocks[np.repeat(rows, grow), columns] = new[len(copied) :]
        self.tables.seq_len[rows] = new_lens
        return self.tables.slots_of(rows, lens, num_tokens)

    def _tails_to_copy(self, rows: Int64Array, lens: Int64Array) -> Int32Array:
        """Which of ``rows`` end in a partial block that they may not write: shared, or cached content."""
        partial = lens % self.block_size != 0
        tails = self.tables.blocks[rows, np.where(partial, lens // self.block_size, 0)]
        shared = partial & (self._index.indexed[tails] | (self._pool.ref_count[tails] > 1))
        found = np.flatnonzero(shared).astype(np.int32)
        if len(found) < 2:
            return found
        # If all holders of a private tail grow in this batch, the last of them may keep it.
        unique, last, holders = np.unique(tails[found][::-1], return_index=True, return_counts=True)
        keeps = (holders == self._pool.ref_count[unique]) & ~self._index.indexed[unique]
        return np.delete(found, len(found) - 1 - last[keeps])

    def _copy_tails(self, rows: Int64Array, columns: Int64Array, new: Int32Array) -> None:
        """Replace shared tails by ``new`` blocks and note the copies for the storage."""
        old = self.tables.blocks[rows, columns]
        self._index.tokens[new] = self._index.tokens[old]
        self.tables.blocks[rows, columns] = new
        for src, dst in zip(old.tolist(), new.tolist(), strict=True):
            # A source whose own copy is still pending has its content in that copy's source.
            self._copies[dst] = self._copies.get(src, src)
        for block in old:
            self._release(block.reshape(1))
        self._counters.copied_blocks += len(new)

    def _write_tokens(self, row: int, start: int, tokens: Int32Array) -> None:
        first, stop = start // self.block_size, start + len(tokens)
        ids = self.tables.blocks[row, first : div_ceil(stop, self.block_size)]
        content = self._index.tokens[ids]
        content.reshape(-1)[start - first * self.block_size : stop - first * self.block_size] = tokens
        self._index.tokens[ids] = content

    def _share_full_blocks(self, row: int) -> None:
        """Index the row's full committed blocks, taking equal blocks that are indexed already."""
        first, last = int(self._num_indexed[row]), int(self._committed[row]) // self.block_size
        blocks = self.tables.blocks[row]
        parent = int(blocks[first - 1]) if first else ROOT
        ids = blocks[first:last].copy()
        extra = extra_ids(self._extra_keys, self._extra.get(row, NO_EXTRA), first, last - first)
        known = self._index.match(self._index.tokens[ids], extra, parent)
        n = len(known)
        if n:
            self._pool.acquire(0, shared=known)
            self._order.discard(known)
            blocks[first : first + n] = known
            self._release(ids[:n][::-1])
            parent = int(known[-1])
        if n < len(ids):
            self._index.insert(ids[n:], extra[n:], parent)
            for extra_id in extra[n:][extra[n:] > 0].tolist():
                self._extra_keys.share(extra_id)
        self._num_indexed[row] = last

    def _hold_extra(self, row: int, extra: SequenceExtra) -> None:
        if extra.by_block or extra.media:
            self._extra[row] = extra
            for key in extra.by_block.values():
                self._extra_keys.take(key)

    def _drop_extra(self, extra: SequenceExtra) -> None:
        for key in extra.by_block.values():
            self._extra_keys.drop(self._extra_keys.find(key))

    def _unused_slots(self) -> int:
        """Slots of active blocks without a token: the ends of partial tails, a shared tail counted once."""
        rows = self.tables.rows(self.tables.seq_ids)
        lens = self.tables.seq_len[rows]
        filled = lens % self.block_size
        rows, lens, filled = rows[filled > 0], lens[filled > 0], filled[filled > 0]
        tails = self.tables.blocks[rows, lens // self.block_size]
        private = self._pool.ref_count[tails] == 1
        unused = int((self.block_size - filled)[private & ~self._index.indexed[tails]].sum())
        for block in np.unique(tails[~private & ~self._index.indexed[tails]]):
            unused += self.block_size - self._filled_slots(int(block))
        return unused

    def _filled_slots(self, block: int) -> int:
        """Slots of a shared private block that at least one sequence has reached."""
        rows, columns = np.nonzero(self.tables.blocks == block)
        reached = self.tables.seq_len[rows] - columns * self.block_size
        return int(np.minimum(reached, self.block_size).max())


class _Counters:
    """What happened since the manager was made."""

    def __init__(self) -> None:
        self.num_opened = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.queried_blocks = 0
        self.hit_blocks = 0
        self.evicted_blocks = 0
        self.copied_blocks = 0

    def count_open(self, num_tokens: int, block_size: int, hit_blocks: int) -> None:
        self.num_opened += 1
        self.queried_tokens += num_tokens
        self.queried_blocks += num_tokens // block_size
        self.hit_blocks += hit_blocks
        self.hit_tokens += hit_blocks * block_size


def _require_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise PagedKVError(f"{name} must be an integer of at least {least}, got {value!r}")
