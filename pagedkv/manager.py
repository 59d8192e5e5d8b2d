"""The manager: sequences over a block pool, with exact prefix reuse, copy-on-write and eviction."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pagedkv.announced import Announced
from pagedkv.arithmetic import div_ceil
from pagedkv.block_cache import BlockCache
from pagedkv.block_ids import MOST_BLOCKS, require_num_blocks
from pagedkv.block_pool import NO_BLOCKS, BlockCounts
from pagedkv.block_tables import BlockTables, Int32Array, Int64Array, SeqId
from pagedkv.content import SequenceExtra, as_token_array
from pagedkv.context import Context
from pagedkv.drafts import accepted_tokens
from pagedkv.errors import NeverFits, PagedKVError, SequenceError, require_count
from pagedkv.invariants import check_invariants
from pagedkv.maintenance import Maintenance
from pagedkv.namespace import Media, Namespace
from pagedkv.opened import Lookup, Opened
from pagedkv.page_table import PageTable
from pagedkv.policies import EvictionPolicy, make_policy
from pagedkv.policies.residency import Residency
from pagedkv.retention import Retention
from pagedkv.sequences import Sequences
from pagedkv.stats import ManagerStats, OpenCounters
from pagedkv.tails import unused_slots


class KVCacheManager:
    """Decides which blocks hold which sequence. Bookkeeping only: numpy, no tensors, no clock, no threads.

    ::

        open            prefill            decode                 finish
        [hit | fresh] -> commit(tokens) -> step/append, commit -> close
         ^ shared, already computed                                '-> full blocks stay cached

    A *committed* token is final and its K and V are written (or will be, before any later work on the
    same stream). Only full committed blocks are ever shared, so draft tokens never leak.

    Its parts, each with methods of its own: ``tables`` (block tables, slots, lengths), ``copies`` (blocks to
    copy before the next write), ``fences`` (blocks that work under way may touch), ``retention`` (pins and
    priorities), ``events`` (what became findable, what ceased to be), ``maintenance`` (reset, defragment,
    resize), ``context`` (blocks that a sequence drops from the middle).

    What is refused changes nothing: everything that can refuse, and every allocation that grows with the
    request, comes before the first change. (Running out of memory for the few hundred bytes that copies of
    tails and ``commit_step`` need after it is not undone.) ``None`` or ``False`` means "not now": try again
    when sequences have closed. A mistake raises a ``ValueError`` subclass: ``SequenceError`` for a wrong
    sequence or position, ``NeverFits`` for what this pool can never hold. (A sequence id must be hashable;
    Python's ``TypeError`` says so, and nothing has changed.)
    Not thread-safe: one scheduler owns it.

    Memory: 68 bytes per block and 4 per token slot with the compiled core (`pagedkv.core`), 70 per block
    and some 600 per branch of the prefix tree without; 4 per entry of the page table that was ever used.

    >>> manager = KVCacheManager(num_blocks=8, block_size=4)
    >>> manager.open("a", [5, 6, 7, 8, 9])
    Opened(num_tokens=5, num_cached_tokens=0)
    >>> manager.commit("a", [5, 6, 7, 8, 9])
    >>> manager.append("a"), manager.tables.slots("a", 5).tolist()
    (True, [9])
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
        watermark: float = 0.0,
        policy: str | EvictionPolicy | None = "lru",
    ) -> None:
        """Make a manager of ``num_blocks`` usable blocks of ``block_size`` tokens.

        ``max_seqs`` sequences can be open at once, each of at most ``max_seq_len`` tokens (default: the
        whole pool; state it for a large one, since the page table reserves room for both). ``open``
        leaves the share ``watermark`` of the pool available for the growth of sequences that are open.
        ``policy`` decides which cached content goes first: a name of `pagedkv.policies.POLICIES`, or a policy
        that no other manager has. With None there is no prefix cache: nothing is looked up or kept.
        """
        num_blocks = require_num_blocks("num_blocks", num_blocks)
        self.block_size = require_count("block_size", block_size, 1)
        max_seqs = require_count("max_seqs", max_seqs, 1)
        whole_pool = num_blocks * self.block_size
        self.max_seq_len = whole_pool if max_seq_len is None else require_count("max_seq_len", max_seq_len, 1)
        if self.max_seq_len > MOST_BLOCKS * self.block_size:
            raise PagedKVError(f"max_seq_len must be at most {MOST_BLOCKS} blocks, got {max_seq_len} tokens")
        if not isinstance(watermark, (int, float)) or not 0.0 <= watermark < 1.0:
            raise PagedKVError(f"watermark must be in [0, 1), got {watermark!r}")
        self.prefix_caching = policy is not None
        self._tables = BlockTables(max_seqs, div_ceil(self.max_seq_len, self.block_size), self.block_size)
        self.tables = PageTable(self._tables)
        order = make_policy("lru" if policy is None else policy)
        self._cache = BlockCache(num_blocks, self.block_size, order)
        self._seqs = Sequences(self._cache, self._tables)
        self.copies, self.fences, self.events = self._cache.copies, self._cache.fences, self._cache.events
        self.retention = Retention(self._cache, self._tables)
        self.maintenance = Maintenance(self._cache, self._tables, self.retention)
        self._announced = Announced()
        self.context = Context(self._cache, self._tables, self._announced)
        self._watermark = watermark
        self._counters = OpenCounters()

    @property
    def num_blocks(self) -> int:
        """Usable blocks; ids are 1..num_blocks."""
        return self._cache.pool.num_blocks

    @property
    def counts(self) -> BlockCounts:
        """Free, cached and active blocks now. Cost: O(1)."""
        return self._cache.pool.counts

    @property
    def used_slots(self) -> int:
        """Slots of active blocks that a token of an open sequence is assigned to, a shared one once.

        Cost: O(max_seqs), and O(blocks of open sequences) for each partial tail that several share.
        """
        unused = unused_slots(self._cache, self._tables, self._seqs.maybe_shared)
        return self.counts.active * self.block_size - unused

    # -- sequences

    def lookup(
        self,
        tokens: Any,
        max_new_tokens: int = 0,
        *,
        namespace: Namespace | None = None,
        media: Iterable[Media] = (),
    ) -> Lookup:
        """Tell what ``open`` would find, and whether ``max_new_tokens`` of growth would fit as well.

        Raises ``NeverFits`` if they can never fit. Changes nothing. Cost: O(n), like ``open``, and O(n) for
        each prompt that is announced.
        """
        prompt = as_token_array(tokens)
        total = len(prompt) + require_count("max_new_tokens", max_new_tokens, 0)
        self._require_fits(total)
        extra = SequenceExtra.build(namespace, media, len(prompt), self.block_size)
        limit = len(prompt) - 1
        hit = self._match(prompt, extra, limit)
        coming = 0
        if len(self._announced) and limit > 0:
            coming = max(0, self._announced.common(prompt[:limit], extra, self.block_size) - len(hit))
        fits = self._tables.num_free_rows > 0 and self._fits_now(hit, self._blocks_for(total) - len(hit))
        return Lookup(len(prompt), len(hit) * self.block_size, coming * self.block_size, fits)

    def open(
        self,
        seq_id: SeqId,
        tokens: Any,
        *,
        namespace: Namespace | None = None,
        media: Iterable[Media] = (),
        max_cached_tokens: int | None = None,
        partial_hits: bool = False,
        announce: bool = False,
    ) -> Opened | None:
        """Open a sequence with its prompt: find the longest cached prefix, hold it, allocate the rest.

        One step: nothing can evict the hit in between. ``tokens`` int [n], n >= 0. At most
        ``max_cached_tokens`` are taken from the cache (default n - 1, because a model has to run at
        least one token to say what follows; pass n when no logits are needed).

        With ``partial_hits`` the hit may end inside a block: the first tokens of a cached block serve too, by
        a copy of it (run ``copies`` before the prefill). With ``announce``, ``lookup`` tells others of the
        prompt until it is committed.

        Returns None when it does not fit now: not enough available blocks above the watermark (which
        does not bind the only sequence), or ``max_seqs`` are open. Raises ``NeverFits`` if it can never
        fit, ``SequenceError`` if ``seq_id`` is open. Cost: O(n), vectorised.
        """
        prompt = as_token_array(tokens)
        if seq_id in self._tables:
            raise SequenceError(f"sequence {seq_id!r} is open already")
        num_tokens = len(prompt)
        self._require_fits(num_tokens)
        extra = SequenceExtra.build(namespace, media, num_tokens, self.block_size)
        limit = num_tokens - 1
        if max_cached_tokens is not None:
            limit = min(require_count("max_cached_tokens", max_cached_tokens, 0), num_tokens)
        hit = self._match(prompt, extra, limit)
        fresh = self._blocks_for(num_tokens) - len(hit)
        if not self._tables.num_free_rows or not self._fits_now(hit, fresh):
            return None
        cached, tail = len(hit) * self.block_size, NO_BLOCKS
        if partial_hits and self.prefix_caching:
            block, count = self._seqs.match_tail(prompt, extra, hit, limit)
            # the copied block itself must not be evicted to make the room
            if count and self._fits_now(np.append(hit, np.int32(block)), fresh):
                cached, tail = cached + count, np.array([block], np.int32)
        announced = prompt.copy() if announce and self.prefix_caching else None
        opened = Opened(num_tokens, cached)  # what can fail comes before the first change
        row = self._seqs.add(seq_id, extra, num_tokens, cached, hit, tail)
        self._cache.policy.hit(hit)
        self._counters.count_open(num_tokens, self.block_size, len(hit), cached)
        if announced is not None:
            self._announced.add(row, announced, extra)
        return opened

    def append(self, seq_id: SeqId, num_tokens: int = 1) -> bool:
        """``step`` for one sequence."""
        return self.step([seq_id], num_tokens)

    def step(self, seq_ids: Sequence[SeqId], num_tokens: int = 1) -> bool:
        """Make room for ``num_tokens`` more in each of several distinct sequences: in all, or in none.

        Drafts that are yet to be verified count: ask for 1 + k. ``tables.write_block_tables`` then gives
        tables, lengths and slots. A partial tail that somebody else can see is replaced by a copy: run
        ``copies`` before writing. A tail that nobody else can see stays, and leaves the prefix cache if it
        was in it. False when the blocks are not available now (for an only sequence, while it holds what it
        has dropped: ``context.drop_blocks(seq_id, [])`` gives that up). Raises ``NeverFits`` beyond
        ``max_seq_len``. Cost: O(batch + new blocks), vectorised.
        """
        rows = self._tables.rows(seq_ids)
        num_tokens = require_count("num_tokens", num_tokens, 0)
        if num_tokens > self.max_seq_len:  # and perhaps than an int64 can say
            self._require_fits(int(self._tables.seq_len[rows].max(initial=0)) + num_tokens)
        growth = self._seqs.plan(rows, num_tokens)
        self._require_fits(growth.longest)
        return self._seqs.extend(growth)

    def commit(self, seq_id: SeqId, tokens: Any, *, media: Iterable[Media] = ()) -> None:
        """Say which tokens the next positions hold, now that they are final; shares what became full.

        ``tokens`` int [n] continue where the last commit (or the hit of ``open``) ended and may not go
        beyond the sequence's length (``SequenceError``). ``media`` that starts among them and was not
        given to ``open`` is given here, with offsets in the sequence. If an equal block is cached
        already, the sequence takes that one and gives up its own, so tables change. The manager keeps no
        prompt: that these are the tokens given to ``open`` is the caller's word. Cost: O(n), vectorised.
        """
        row = self._tables.row(seq_id)
        ids = as_token_array(tokens)
        start, length = int(self._tables.committed[row]), int(self._tables.seq_len[row])
        stop = start + len(ids)
        if stop > length:
            raise SequenceError(
                f"cannot commit {len(ids)} more tokens of {seq_id!r}: {start} of its {length} are committed"
            )
        extra = self._seqs.extra(row).extended(media, start, stop, self.block_size)
        if not len(ids):
            return
        if len(self._cache.copies):
            first, last = start // self.block_size, div_ceil(stop, self.block_size)
            self._cache.copies.require_done(self._tables.blocks[row, first:last])
        self._commit_row(row, ids, extra)

    def commit_step(
        self, seq_ids: Sequence[SeqId], tokens: Any, num_accepted: Sequence[int] | None = None
    ) -> None:
        """``commit`` one token of each of several distinct sequences: ``tokens`` int [len(seq_ids)].

        With ``num_accepted``, int [len(seq_ids)], ``tokens`` has a row of drafts for each sequence, of which
        the first so many are final: they are committed, and the sequence is cut behind them (a prompt that
        was not committed counts as drafts, too). Raises ``SequenceError`` if any of them has too few
        uncommitted tokens left; none changes then. Cost: O(batch), vectorised, plus O(block_size) for each
        sequence whose block became full; with ``num_accepted`` as ``commit`` and ``truncate`` of each.
        """
        rows = self._tables.rows(seq_ids)
        if num_accepted is not None:
            drafts = accepted_tokens(self._tables, self.copies, seq_ids, tokens, num_accepted)
            for row, accepted in zip(rows.tolist(), drafts, strict=True):
                self._commit_row(row, accepted, self._seqs.extra(row))
                self._cut_row(row, int(self._tables.committed[row]))
            return
        ids = as_token_array(tokens)
        if len(ids) != len(rows):
            raise SequenceError(f"{len(rows)} sequences, but {len(ids)} tokens to commit")
        if len(self.copies) or not self.prefix_caching:
            self._require_uncommitted(seq_ids, rows)
            at = self._tables.committed[rows] // self.block_size
            self.copies.require_done(self._tables.blocks[rows, at])
        if self.prefix_caching and not self._seqs.commit_one(rows, ids):
            self._require_uncommitted(seq_ids, rows)
        self._tables.committed[rows] += 1
        if len(self._announced):
            for row in rows.tolist():
                self._announced.cut(row, int(self._tables.committed[row]), int(self._tables.seq_len[row]))

    def fork(self, seq_id: SeqId, child_id: SeqId) -> bool:
        """Open ``child_id`` as a copy of ``seq_id`` that shares every block, the partial tail included.

        Whoever grows first copies the tail. Returns False when ``max_seqs`` are open. With prefix
        caching the sequence must be committed to its end (``SequenceError``): two sequences must not
        disagree about what a shared slot holds. Cost: O(blocks), vectorised; allocates nothing.
        """
        row = self._tables.row(seq_id)
        if child_id in self._tables:
            raise SequenceError(f"sequence {child_id!r} is open already")
        length, committed = int(self._tables.seq_len[row]), int(self._tables.committed[row])
        if self.prefix_caching and committed < length:
            raise SequenceError(
                f"commit or truncate {seq_id!r} before a fork: {committed} of {length} tokens are committed"
            )
        if not self._tables.num_free_rows:
            return False
        blocks = self._tables.held(row)
        if committed < length:
            self._cache.copies.require_done(blocks[-1:])
        self._seqs.fork(row, blocks, child_id)
        return True

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Cut a sequence to its first ``num_tokens``, as when drafts are rejected; frees what is beyond.

        Raises ``SequenceError`` unless ``0 <= num_tokens <= length``, or at a gap. Cost: O(blocks given up).
        """
        self.context.require_cut(seq_id, num_tokens)
        self._cut_row(self._tables.row(seq_id), int(num_tokens))

    def close(self, seq_id: SeqId) -> None:
        """Give up a sequence: full committed blocks stay cached, others become free.

        Raises ``SequenceError`` if it is not open. Cost: O(blocks), vectorised.
        """
        row = self._tables.row(seq_id)
        self._seqs.remove(seq_id, row)
        if self._announced.prompts:
            self._announced.cut(row, 0, 0)

    # -- being watched

    def stats(self) -> ManagerStats:
        """Snapshot of states and counters. Cost: as ``used_slots``."""
        counts, policy = self.counts, self._cache.policy
        return ManagerStats(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            active_blocks=counts.active,
            used_slots=self.used_slots,
            fenced_blocks=len(self._cache.fenced_only()),
            pinned_blocks=self.retention.num_pinned,
            indexed_blocks=len(self._cache.index),
            num_seqs=len(self._tables),
            evicted_blocks=self._cache.num_evicted,
            copied_blocks=self._cache.num_copied,
            dropped_blocks=self._cache.num_dropped,
            residency=policy.histograms() if isinstance(policy, Residency) else None,
            **vars(self._counters),
        )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if any two parts disagree. Cost: O(pool + table), vectorised."""
        check_invariants(self._cache, self._tables, self.retention.held(), self.prefix_caching)

    # -- inner steps: ``_commit_row`` and ``_cut_row`` refuse nothing any more

    def _commit_row(self, row: int, ids: Int32Array, extra: SequenceExtra) -> None:
        if self.prefix_caching and len(ids) and row not in self._tables.dropped:
            self._seqs.commit(row, ids, extra)
        else:
            self._tables.committed[row] += len(ids)
        if len(self._announced):
            self._announced.cut(row, int(self._tables.committed[row]), int(self._tables.seq_len[row]))

    def _cut_row(self, row: int, num_tokens: int) -> None:
        self._seqs.cut(row, num_tokens, self._seqs.extra(row).truncated(num_tokens, self.block_size))
        if len(self._announced):
            self._announced.cut(row, int(self._tables.committed[row]), num_tokens)

    def _blocks_for(self, num_tokens: int) -> int:
        return div_ceil(num_tokens, self.block_size)

    def _require_fits(self, num_tokens: int) -> None:
        blocks = self._blocks_for(num_tokens)
        if num_tokens > self.max_seq_len:
            raise NeverFits(f"{num_tokens} tokens can never fit: a sequence holds at most {self.max_seq_len}")
        if blocks > self.num_blocks:
            raise NeverFits(
                f"{num_tokens} tokens can never fit: they need {blocks} of {self.num_blocks} blocks"
            )

    def _require_uncommitted(self, seq_ids: Sequence[SeqId], rows: Int64Array) -> None:
        left = self._tables.committed[rows] < self._tables.seq_len[rows]
        if not left.all():
            raise SequenceError(f"sequence {seq_ids[int(left.argmin())]!r} has no uncommitted token left")

    def _match(self, prompt: Int32Array, extra: SequenceExtra, limit: int) -> Int32Array:
        return self._seqs.match(prompt, extra, limit) if self.prefix_caching else NO_BLOCKS

    def _fits_now(self, held: Int32Array, fresh: int) -> bool:
        """Tell whether ``fresh`` blocks and the idle ones among ``held`` can be had above the watermark."""
        pool = self._cache.pool
        need = fresh + (int(np.count_nonzero(pool.ref_count[held] == 0)) if len(held) else 0)
        reserve = int(self._watermark * pool.num_blocks) if len(self._tables) else 0
        return need == 0 or need <= pool.num_available - reserve
