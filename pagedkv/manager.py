"""The manager: sequences over a block pool, with exact prefix reuse, copy-on-write and eviction."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_cache import BlockCache, BlockCopies
from pagedkv.block_pool import NO_BLOCKS, BlockCounts
from pagedkv.content import NO_EXTRA, SequenceExtra, as_token_array
from pagedkv.errors import NeverFits, PagedKVError, SequenceError, require_count
from pagedkv.events import Event, EventLog
from pagedkv.invariants import check_invariants
from pagedkv.namespace import Media, Namespace
from pagedkv.page_table import Int32Array, Int64Array, PageTable, SeqId
from pagedkv.policies import EvictionPolicy, make_policy
from pagedkv.prefix_index import ROOT
from pagedkv.stats import ManagerStats, OpenCounters
from pagedkv.tails import NO_TAILS, shared_tails, unused_slots

MOST_BLOCKS = 2**31 - 2


class Opened(NamedTuple):
    """Result of ``open``: the first ``num_cached_tokens`` of ``num_tokens`` need no prefill."""

    num_tokens: int
    num_cached_tokens: int


class KVCacheManager:
    """Decides which blocks hold which sequence. Bookkeeping only: numpy, no tensors, no clock, no threads.

    ::

        open            prefill            decode                 finish
        [hit | fresh] -> commit(tokens) -> step/append, commit -> close
         ^ shared, already computed                                '-> full blocks stay cached

    A *committed* token is final and its K and V are written (or will be, before any later work on the
    same stream). Only full committed blocks are ever shared, so draft tokens never leak.

    What is refused changes nothing: everything that can refuse, and taking blocks, comes before the first
    change, and ``open`` and ``fork`` are undone even if they fail in the middle. (Running out of memory
    in the middle of another call is not undone.) ``None`` or ``False`` means "not now": try again when
    sequences have closed. A mistake raises a ``ValueError`` subclass: ``SequenceError``
    for a wrong sequence or position, ``NeverFits`` for what this pool can never hold. (A sequence id
    must be hashable; Python's ``TypeError`` says so, and nothing has changed.)
    Not thread-safe: one scheduler owns it.

    Memory: 70 bytes of arrays per block and 4 per token slot, 4 per entry of the page table that was
    ever used, and some 600 bytes per branch of the prefix tree.

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
        prefix_caching: bool = True,
        watermark: float = 0.0,
        policy: str | EvictionPolicy = "lru",
    ) -> None:
        """Make a manager of ``num_blocks`` usable blocks of ``block_size`` tokens.

        ``max_seqs`` sequences can be open at once, each of at most ``max_seq_len`` tokens (default: the
        whole pool; state it for a large one, since the page table reserves room for both). ``open``
        leaves the share ``watermark`` of the pool available for the growth of sequences that are open.
        ``prefix_caching=False`` neither looks up nor keeps content. ``policy`` decides which cached content
        goes first: a name of `pagedkv.policies.POLICIES`, or a policy that no other manager has.
        """
        num_blocks = require_count("num_blocks", num_blocks, 1)
        if num_blocks > MOST_BLOCKS:
            raise PagedKVError(
                f"num_blocks must be at most {MOST_BLOCKS}, as ids are int32, got {num_blocks}"
            )
        self.block_size = require_count("block_size", block_size, 1)
        max_seqs = require_count("max_seqs", max_seqs, 1)
        whole_pool = num_blocks * self.block_size
        self.max_seq_len = whole_pool if max_seq_len is None else require_count("max_seq_len", max_seq_len, 1)
        if not isinstance(watermark, (int, float)) or not 0.0 <= watermark < 1.0:
            raise PagedKVError(f"watermark must be in [0, 1), got {watermark!r}")
        self.prefix_caching = prefix_caching
        self.tables = PageTable(max_seqs, div_ceil(self.max_seq_len, self.block_size), self.block_size)
        self._cache = BlockCache(num_blocks, self.block_size, make_policy(policy))
        self._extra: dict[int, SequenceExtra] = {}
        self._committed: Int64Array = np.zeros(max_seqs, np.int64)
        self._maybe_shared: set[int] = set()
        self._watermark_blocks = int(watermark * num_blocks)
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
        return self.counts.active * self.block_size - unused_slots(
            self._cache, self.tables, self._maybe_shared
        )

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
        if not self.tables.num_free_rows or not self._fits_now(hit, fresh):
            return None
        row, new = self._add_sequence(seq_id, extra, fresh, hit)
        self.tables.fill(row, hit, new, num_tokens)
        self._cache.policy.hit(hit)
        self._committed[row] = len(hit) * self.block_size
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
        total = len(prompt) + require_count("max_new_tokens", max_new_tokens, 0)
        self._require_fits(total)
        extra = SequenceExtra.build(namespace, media, len(prompt), self.block_size)
        hit = self._match(prompt, extra, None)
        fresh = div_ceil(total, self.block_size) - len(hit)
        return self.tables.num_free_rows > 0 and self._fits_now(hit, fresh)

    def append(self, seq_id: SeqId, num_tokens: int = 1) -> bool:
        """Make room for ``num_tokens`` more tokens, drafts included; ``tables.slots`` says where.

        A partial tail that somebody else can see is replaced by a copy: run ``take_copies`` before
        writing. A tail that nobody else can see stays, and leaves the prefix cache if it was in it.
        False when the blocks are not available now. Raises ``NeverFits`` beyond ``max_seq_len``.
        Cost: O(num_tokens / block_size).
        """
        return self._extend(np.array([self.tables.row(seq_id)]), require_count("num_tokens", num_tokens, 0))

    def step(self, seq_ids: Sequence[SeqId], num_tokens: int = 1) -> bool:
        """``append`` for a whole batch of distinct sequences: all of them grow, or none and False.

        ``tables.write_block_tables`` then gives tables, lengths and slots of the decode step.
        Cost: O(batch + new blocks), vectorised.
        """
        return self._extend(self.tables.rows(seq_ids), require_count("num_tokens", num_tokens, 0))

    def commit(self, seq_id: SeqId, tokens: Any, *, media: Iterable[Media] = ()) -> None:
        """Say which tokens the next positions hold, now that they are final; shares what became full.

        ``tokens`` int [n] continue where the last commit (or the hit of ``open``) ended and may not go
        beyond the sequence's length (``SequenceError``). ``media`` that starts among them and was not
        given to ``open`` is given here, with offsets in the sequence. If an equal block is cached
        already, the sequence takes that one and gives up its own, so tables change. The manager keeps no
        prompt: that these are the tokens given to ``open`` is the caller's word. Cost: O(n), vectorised.
        """
        row = self.tables.row(seq_id)
        ids = as_token_array(tokens)
        start, length = int(self._committed[row]), int(self.tables.seq_len[row])
        stop = start + len(ids)
        if stop > length:
            raise SequenceError(
                f"cannot commit {len(ids)} more tokens of {seq_id!r}: {start} of its {length} are committed"
            )
        extra = self._extra.get(row, NO_EXTRA).extended(media, start, stop, self.block_size)
        if len(ids):
            first, last = start // self.block_size, div_ceil(stop, self.block_size)
            self._cache.require_copied(self.tables.blocks[row, first:last])
        if self.prefix_caching and len(ids):
            self._commit_content(row, start, ids, extra)
        self._committed[row] = stop

    def commit_step(self, seq_ids: Sequence[SeqId], tokens: Any) -> None:
        """``commit`` one token of each of several distinct sequences: ``tokens`` int [len(seq_ids)].

        Raises ``SequenceError`` if any of them has no uncommitted token left; none changes then.
        Cost: O(batch), vectorised, plus O(block_size) for each sequence whose block became full.
        """
        rows, ids = self.tables.rows(seq_ids), as_token_array(tokens)
        if len(ids) != len(rows):
            raise SequenceError(f"{len(rows)} sequences, but {len(ids)} tokens to commit")
        start = self._committed[rows]
        done = np.flatnonzero(start >= self.tables.seq_len[rows])
        if len(done):
            raise SequenceError(f"sequence {seq_ids[done[0]]!r} has no uncommitted token left")
        blocks = self.tables.blocks[rows, start // self.block_size]
        self._cache.require_copied(blocks)
        if self.prefix_caching:
            self._cache.index.tokens[blocks, start % self.block_size] = ids
            full = rows[(start + 1) % self.block_size == 0]
            if len(full):
                self._share_full(full)
        self._committed[rows] = start + 1

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
                f"commit or truncate {seq_id!r} before a fork: {committed} of {length} tokens are committed"
            )
        if not self.tables.num_free_rows:
            return False
        blocks = self.tables.block_ids(seq_id)
        if committed < length:
            self._cache.require_copied(blocks[-1:])
        child, none = self._add_sequence(child_id, self._extra.get(row, NO_EXTRA), 0, blocks)
        self.tables.fill(child, blocks, none, length)
        self._committed[child] = committed
        self._maybe_shared |= {row, child}
        return True

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Cut a sequence to its first ``num_tokens``, as when drafts are rejected; frees what is beyond.

        Raises ``SequenceError`` unless ``0 <= num_tokens <= length``. Cost: O(blocks given up).
        """
        row = self.tables.row(seq_id)
        length = int(self.tables.seq_len[row])
        whole = isinstance(num_tokens, (int, np.integer)) and not isinstance(num_tokens, bool)
        if not whole or not 0 <= num_tokens <= length:
            raise SequenceError(f"cannot truncate sequence {seq_id!r} of {length} tokens to {num_tokens}")
        num_tokens = int(num_tokens)
        extra = self._extra.get(row, NO_EXTRA).truncated(num_tokens, self.block_size)
        keep, had = div_ceil(num_tokens, self.block_size), self.tables.num_blocks(row)
        self._cache.release(self.tables.blocks[row, keep:had][::-1].copy())
        self.tables.blocks[row, keep:had] = 0
        self.tables.seq_len[row] = num_tokens
        self._committed[row] = min(int(self._committed[row]), num_tokens)
        self._maybe_shared.add(row)
        self._set_extra(row, extra)

    def close(self, seq_id: SeqId) -> None:
        """Give up a sequence: full committed blocks stay cached, others become free.

        Raises ``SequenceError`` if it is not open. Cost: O(blocks), vectorised.
        """
        row = self.tables.row(seq_id)
        self._cache.release(self.tables.block_ids(seq_id)[::-1])
        self.tables.remove(seq_id)
        self._committed[row] = 0
        self._maybe_shared.discard(row)
        self._set_extra(row, NO_EXTRA)

    def take_copies(self) -> BlockCopies:
        """Hand over the pending copy-on-write copies; run them before any later write to the storage."""
        return self._cache.take_copies()

    @property
    def pending_copies(self) -> BlockCopies:
        """What ``take_copies`` would return; nothing is forgotten, so a copy that fails can be run again."""
        return self._cache.pending_copies

    def open_fence(self) -> int:
        """Say that work starts which may touch any block held now: an asynchronous step, a copy.

        From now on no block that is given up is handed out or evicted before the fence is signalled.
        It counts as active until then, and can be hit if its content is cached. Cost: O(1).

        >>> manager = KVCacheManager(num_blocks=1, block_size=4)
        >>> _ = manager.open("a", [1, 2])
        >>> fence = manager.open_fence()
        >>> manager.close("a"); manager.open("b", [3]) is None
        True
        >>> manager.signal(fence); manager.open("b", [3])
        Opened(num_tokens=1, num_cached_tokens=0)
        """
        return self._cache.fences.open()

    def signal(self, fence: int) -> None:
        """Say that the work behind a fence is done. Raises ``PagedKVError`` if the fence is not open."""
        self._cache.signal(fence)

    # -- what stays

    def pin(self, seq_id: SeqId, num_tokens: int | None = None) -> int:
        """Keep the full blocks of the first ``num_tokens`` committed tokens (default: all) until ``unpin``.

        They count as active, survive ``close``, are never evicted, and can be hit. A block may have several
        pins. Raises ``SequenceError`` if there is no such full block. Cost: O(blocks), vectorised.

        >>> manager = KVCacheManager(num_blocks=2, block_size=4)
        >>> _ = manager.open("system", [1, 2, 3, 4, 5]); manager.commit("system", [1, 2, 3, 4, 5])
        >>> pin = manager.pin("system"); manager.close("system"); manager.counts
        BlockCounts(free=1, cached=0, active=1)
        >>> manager.unpin(pin); manager.counts
        BlockCounts(free=1, cached=1, active=0)
        """
        committed = self.num_committed(seq_id)
        wanted = committed if num_tokens is None else num_tokens
        blocks = self._committed_blocks(seq_id, 0, wanted)[: wanted // self.block_size]
        if not len(blocks):
            raise SequenceError(
                f"nothing to pin: {committed} tokens of {seq_id!r} are committed, "
                f"{wanted} of them asked for, in blocks of {self.block_size}"
            )
        return self._cache.pin(blocks)

    def unpin(self, pin: int) -> None:
        """Undo one ``pin``. Raises ``PagedKVError`` if it is undone already. Cost: O(blocks), vectorised."""
        self._cache.unpin(pin)

    def retain(
        self,
        seq_id: SeqId,
        priority: int,
        *,
        start: int = 0,
        stop: int | None = None,
        ttl: float | None = None,
    ) -> int:
        """Set the priority, 0..100, of full committed blocks with tokens ``start..stop`` (default: all).

        Needs ``policy="priority"`` or another policy that knows priorities. With ``ttl``, the priority holds
        that long by the policy's clock. It belongs to the content, whoever uses it, and the last word counts.
        Returns how many blocks that are. Cost: O(log n) per block.
        """
        blocks = self._committed_blocks(seq_id, start, stop)
        self._cache.policy.retain(blocks, priority, ttl)
        return len(blocks)

    # -- being watched

    def record_events(self, seed: bytes = b"") -> None:
        """Record from now on what becomes findable and what ceases to be; see `pagedkv.events`.

        ``seed`` (at most 64 bytes) keys the digests. Raises ``PagedKVError`` if blocks are cached already,
        since the stream would not be complete.
        """
        if len(self._cache.index):
            raise PagedKVError(
                f"too late to record events: {len(self._cache.index)} blocks are indexed already"
            )
        if self._cache.events is not None:
            raise PagedKVError("events are recorded already")
        if not isinstance(seed, bytes) or len(seed) > 64:
            raise PagedKVError(f"the seed must be at most 64 bytes, got {seed!r}")
        self._cache.events = EventLog(seed)

    def take_events(self) -> list[Event]:
        """Hand over the events since the last call, oldest first; none unless they are recorded."""
        return self._cache.events.take() if self._cache.events is not None else []

    def num_committed(self, seq_id: SeqId) -> int:
        """Tokens of the sequence that are committed."""
        return int(self._committed[self.tables.row(seq_id)])

    def stats(self) -> ManagerStats:
        """Snapshot of states and counters. Cost: as ``used_slots``."""
        counts = self.counts
        return ManagerStats(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            active_blocks=counts.active,
            used_slots=self.used_slots,
            fenced_blocks=len(self._cache.fenced_only()),
            pinned_blocks=self._cache.num_pinned,
            indexed_blocks=len(self._cache.index),
            num_seqs=len(self.tables),
            evicted_blocks=self._cache.num_evicted,
            copied_blocks=self._cache.num_copied,
            **vars(self._counters),
        )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if any two parts disagree. Cost: O(pool + table), vectorised."""
        check_invariants(self._cache, self.tables, self._committed, self.prefix_caching)

    # -- inner steps: everything that can refuse comes before the first change

    def _require_fits(self, num_tokens: int) -> None:
        blocks = div_ceil(num_tokens, self.block_size)
        if num_tokens > self.max_seq_len:
            raise NeverFits(f"{num_tokens} tokens can never fit: a sequence holds at most {self.max_seq_len}")
        if blocks > self.num_blocks:
            raise NeverFits(
                f"{num_tokens} tokens can never fit: they need {blocks} of {self.num_blocks} blocks"
            )

    def _fits_now(self, hit: Int32Array, fresh: int) -> bool:
        """Tell whether ``fresh`` blocks and the idle ones among ``hit`` can be had above the watermark."""
        pool = self._cache.pool
        need = fresh + (int(np.count_nonzero(pool.ref_count[hit] == 0)) if len(hit) else 0)
        reserve = self._watermark_blocks if len(self.tables) else 0
        return need == 0 or need <= pool.num_available - reserve

    def _committed_blocks(self, seq_id: SeqId, start: int, stop: int | None) -> Int32Array:
        """Full committed blocks that can be found by content and hold any of the tokens ``start..stop``."""
        row = self.tables.row(seq_id)
        committed = int(self._committed[row])
        stop = committed if stop is None else require_count("stop", stop, 0)
        if not require_count("start", start, 0) <= stop <= committed:
            raise SequenceError(f"{committed} tokens of {seq_id!r} are committed, got {start}..{stop}")
        full = committed // self.block_size if self.prefix_caching else 0
        last = min(full, div_ceil(stop, self.block_size)) if start < stop else 0
        return self.tables.blocks[row, start // self.block_size : last].copy()

    def _match(self, prompt: Int32Array, extra: SequenceExtra, max_cached_tokens: int | None) -> Int32Array:
        limit = len(prompt) - 1
        if max_cached_tokens is not None:
            limit = min(require_count("max_cached_tokens", max_cached_tokens, 0), len(prompt))
        full = max(0, limit) // self.block_size
        if not self.prefix_caching or not full:
            return NO_BLOCKS
        tokens = prompt[: full * self.block_size].reshape(full, self.block_size)
        return self._cache.index.match(tokens, extra.ids(self._cache.extra_keys, 0, full))

    def _add_sequence(
        self, seq_id: SeqId, extra: SequenceExtra, num_new: int, shared: Int32Array
    ) -> tuple[int, Int32Array]:
        """Row and new blocks of a sequence that holds ``shared``; nothing is left of it if that fails."""
        row = self.tables.add(seq_id)
        try:
            self._set_extra(row, extra)
            return row, self._cache.acquire(num_new, shared)
        except BaseException:
            self._set_extra(row, NO_EXTRA)
            self.tables.remove(seq_id)
            raise

    def _extend(self, rows: Int64Array, num_tokens: int) -> bool:
        lens = self.tables.seq_len[rows]
        self._require_fits(int(lens.max(initial=0)) + num_tokens)
        have, need = div_ceil(lens, self.block_size), div_ceil(lens + num_tokens, self.block_size)
        grow = need - have
        tails = NO_TAILS
        if self._maybe_shared and num_tokens:
            tails = shared_tails(self._cache, self.tables, rows)
        available, doomed = self._cache.pool.num_available, NO_BLOCKS
        total = int(grow.sum()) + len(tails.copied)
        if total - len(tails.burdened) <= available < total:
            # Cached content that builds on our own tails alone must not keep us from growing for ever.
            behind = self._cache.idle_behind(tails.burdened)
            if behind is not None:
                doomed, tails = behind, tails.unburdened()
                total = int(grow.sum()) + len(tails.copied)
        if total > available:
            return False
        copied = tails.copied
        grown_rows = np.repeat(rows, grow)
        columns = np.repeat(have - np.cumsum(grow) + grow, grow) + np.arange(len(grown_rows))
        if total or len(doomed):
            new = self._cache.acquire(total, doomed=doomed)
            self.tables.blocks[grown_rows, columns] = new[len(copied) :]
        if len(copied):
            places = rows[copied], have[copied] - 1
            old = self.tables.blocks[places]
            self.tables.blocks[places] = new[: len(copied)]
            self._cache.replace(old, new[: len(copied)])
        if len(tails.private):
            self._cache.withdraw(tails.private)
        self.tables.seq_len[rows] += num_tokens
        return True

    def _commit_content(self, row: int, start: int, tokens: Int32Array, extra: SequenceExtra) -> None:
        """Store committed tokens, and share the blocks that they fill; nobody else holds those blocks."""
        first, offset = divmod(start, self.block_size)
        stop = start + len(tokens)
        blocks = self.tables.blocks[row]
        ids = blocks[first : div_ceil(stop, self.block_size)].copy()
        content: Int32Array = np.zeros((len(ids), self.block_size), np.int32)
        flat = content.reshape(-1)
        flat[:offset] = self._cache.index.tokens[ids[0], :offset]
        flat[offset : offset + len(tokens)] = tokens
        self._cache.index.tokens[ids] = content
        self._set_extra(row, extra)
        self._share_blocks(row, first, content[: stop // self.block_size - first])

    def _share_blocks(self, row: int, first: int, content: Int32Array) -> None:
        """Index the row's blocks from ``first`` on, full of ``content``, or hold equal ones instead."""
        if not len(content):
            return
        blocks, last = self.tables.blocks[row], first + len(content)
        own = blocks[first:last].copy()
        parent = int(blocks[first - 1]) if first else ROOT
        extra = self._extra.get(row, NO_EXTRA).ids(self._cache.extra_keys, first, len(content))
        held = self._cache.share(own, content, extra, parent)
        if held is not own:
            blocks[first:last] = held
            self._cache.release(own[held != own][::-1])

    def _share_full(self, rows: Int64Array) -> None:
        """Index the block of each row that its next committed token fills, or hold an equal one instead."""
        if not self._extra and self._cache.events is None:
            # most blocks continue a prompt that nobody else has: those need no search
            at = self._committed[rows] // self.block_size
            parents = np.where(at > 0, self.tables.blocks[rows, at - 1], ROOT)
            rows = rows[~self._cache.index.grow(self.tables.blocks[rows, at], parents)]
        for row in rows.tolist():
            first = int(self._committed[row]) // self.block_size
            block = self.tables.blocks[row, first]
            self._share_blocks(row, first, self._cache.index.tokens[block].reshape(1, -1))

    def _set_extra(self, row: int, extra: SequenceExtra) -> None:
        """Let the row use the keys of ``extra`` in place of those that it used."""
        old = self._extra.get(row, NO_EXTRA)
        if extra is old:
            return
        self._cache.extra_keys.exchange(old.by_block.values(), extra.by_block.values())
        if extra is NO_EXTRA:
            del self._extra[row]
        else:
            self._extra[row] = extra
