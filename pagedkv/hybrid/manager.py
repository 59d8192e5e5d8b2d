"""The hybrid manager: sequences whose layers see different tokens, over one pool of equal blocks."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pagedkv.announced import Announced
from pagedkv.arithmetic import div_ceil
from pagedkv.block_ids import MOST_BLOCKS, require_num_blocks
from pagedkv.block_pool import BlockCounts
from pagedkv.block_tables import BlockTables, Int32Array, SeqId
from pagedkv.content import SequenceExtra, as_token_array
from pagedkv.drafts import accepted_tokens
from pagedkv.errors import PagedKVError, SequenceError, require_count
from pagedkv.hybrid.admission import Admission, chunk
from pagedkv.hybrid.content_tree import ContentTree
from pagedkv.hybrid.group import CacheGroup, check_groups
from pagedkv.hybrid.invariants import check_invariants
from pagedkv.hybrid.maintenance import GroupMaintenance
from pagedkv.hybrid.retention import GroupRetention
from pagedkv.hybrid.rows import Rows
from pagedkv.hybrid.stats import HybridStats, count_groups
from pagedkv.namespace import Media, Namespace
from pagedkv.opened import Lookup, Opened
from pagedkv.page_table import PageTable
from pagedkv.policies import EvictionPolicy, make_policy
from pagedkv.policies.residency import Residency
from pagedkv.stats import OpenCounters


class HybridKVCacheManager:
    """Decides which blocks hold which sequence, group of layers by group of layers.

    ::

        open                 prefill                  decode               close
        [hit | fresh]   ->   step runs, then commit   ->   step, commit ->   full blocks stay cached
         ^ every group                    '-> blocks that fell out of a window go back to the pool
           can serve it                       at once: cached if their content is known

    Bookkeeping only: numpy, no tensors, no clock, no threads. Not thread-safe: one scheduler owns it. All
    groups take blocks of one pool; ``tables[name]`` has the block tables of a group, NULL_BLOCK where a
    block fell out of its window (attention must honour the window, and so reads none of those). The other
    parts are as those of ``KVCacheManager``: ``copies`` (blocks to copy before the next write), ``fences``,
    ``retention`` (pins and priorities), ``events`` (by group), ``maintenance`` (reset, defragment, resize).
    What is refused changes nothing; ``None`` or ``False`` means "not now"; a mistake raises a
    ``ValueError`` subclass with the numbers.

    **A hit** is as long as every group can serve: groups without a window all of it, the others what the
    next token sees in its window, and the sinks.

    **Commit after the step.** A commit says that the step which computes these tokens has its block tables
    already: blocks that later tokens do not see are given up then, and are handed out to later steps.
    The window is counted from the last block boundary, not from the last token, so that a sequence that
    ends can be hit to its last full block. Nobody holds more for it: while it decodes, a sequence holds
    ``ceil((window - 1) / block_size) + 1`` blocks of a window group and its sinks, constantly. Drafts move
    no window before they are committed, so those that are rejected can be cut.

    **Long prompts.** ``open`` takes room for all tokens in all groups unless ``max_fresh_tokens`` says to
    begin with fewer; then ``append`` the next chunk when the last one is committed.

    **Eviction** is block by block, as the policy says, exactly the shortfall. Blocks that fell out of a
    window go at their own age; of blocks let go of together, the deepest first, of one depth those of window
    groups first. So a block goes before what it builds on, no cached block is ever cut off from its
    prefix, and under LRU what no hit can use any more goes first (unless committed tokens were cut, or
    some were loaded).

    Memory: 106 bytes of arrays per block, 4 more for each of its tokens and for each group (170 for two
    groups and blocks of 16 tokens), and a page table per group. Without a group that keeps everything,
    contents may outlive their blocks: there is room for ``max_seqs * ceil(max_seq_len / block_size)`` more
    contents then, so state both limits, and for more only when pins and fences hold more.

    >>> groups = CacheGroup("full", (1,)), CacheGroup("local", (0, 2), window=4)
    >>> manager = HybridKVCacheManager(groups, num_blocks=12, block_size=2)
    >>> manager.open("a", range(10))
    Opened(num_tokens=10, num_cached_tokens=0)
    >>> manager.commit("a", range(10))
    >>> [manager.tables[name].block_ids("a").tolist() for name in ("full", "local")]
    [[1, 2, 3, 4, 5], [0, 0, 0, 9, 10]]
    >>> manager.counts
    BlockCounts(free=2, cached=3, active=7)
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        block_size: int = 16,
        *,
        max_seqs: int = 256,
        max_seq_len: int | None = None,
        watermark: float = 0.0,
        policy: str | EvictionPolicy | None = "lru",
    ) -> None:
        """Make a manager of ``num_blocks`` usable blocks, each for ``block_size`` tokens of one group.

        ``max_seqs`` sequences can be open at once, each of at most ``max_seq_len`` tokens (default: as many
        as one group could hold in the whole pool). ``open`` leaves the share ``watermark`` of the pool
        available for the growth of sequences that are open. ``policy`` decides which cached block goes first:
        a name of `pagedkv.policies.POLICIES`, or a policy that no other manager has. With None there is no
        prefix cache: no content is kept or looked up.
        """
        self.groups = check_groups(groups)
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
        order = make_policy("lru" if policy is None else policy)
        width = div_ceil(self.max_seq_len, self.block_size)
        tables = [BlockTables(max_seqs, width, self.block_size) for _ in self.groups]
        self.tables: Mapping[str, PageTable] = MappingProxyType(
            {group.name: PageTable(table) for group, table in zip(self.groups, tables, strict=True)}
        )
        keeps_all = any(group.window is None for group in self.groups)
        num_nodes = num_blocks if keeps_all else num_blocks + max_seqs * width
        self._tree = ContentTree(self.groups, num_blocks, self.block_size, num_nodes, order)
        self._rows = Rows(self._tree, tables, self.prefix_caching)
        self._table = tables[0]  # all tables agree about rows and lengths
        self.copies, self.fences, self.events = self._tree.copies, self._tree.fences, self._tree.events
        self.retention = GroupRetention(self._rows)
        self.maintenance = GroupMaintenance(self._rows, self.retention)
        self._admission = Admission(self._rows, self.max_seq_len, watermark, self.prefix_caching)
        self._announced = Announced()
        self._counters = OpenCounters()

    @property
    def counts(self) -> BlockCounts:
        """Free, cached and active blocks now, of all groups. Cost: O(1)."""
        return self._tree.pool.counts

    @property
    def num_blocks(self) -> int:
        """Usable blocks; ids are 1..num_blocks."""
        return self._tree.pool.num_blocks

    # -- sequences

    def lookup(
        self,
        tokens: Any,
        max_new_tokens: int = 0,
        *,
        namespace: Namespace | None = None,
        media: Iterable[Media] = (),
        max_fresh_tokens: int | None = None,
    ) -> Lookup:
        """Tell what ``open`` would find, and whether ``max_new_tokens`` of growth would fit as well.

        Growth is counted token by token, each committed before the next; with ``max_fresh_tokens`` the prompt
        is, chunk by chunk. ``num_coming_tokens`` are announced by others, and a hit unless a group has lost
        them by then. Raises ``NeverFits`` if prompt and growth can never fit. Changes nothing.
        Cost: as ``open``, O(chunks), and O(n) for each prompt that is announced.
        """
        prompt = as_token_array(tokens)
        num_tokens, growth = len(prompt), require_count("max_new_tokens", max_new_tokens, 0)
        extra = SequenceExtra.build(namespace, media, num_tokens, self.block_size)
        room = chunk(max_fresh_tokens, num_tokens)
        hit = self._admission.match(prompt, extra, num_tokens - 1)
        cached, coming = hit.position, 0
        needed = self._admission.most_needed(hit, num_tokens, growth, room)
        if len(self._announced) and num_tokens > 1:
            common = self._announced.common(prompt[:-1], extra, self.block_size)
            coming = max(0, common * self.block_size - cached)
        fits = self._table.num_free_rows > 0 and self._admission.can_have(needed)
        return Lookup(num_tokens, cached, coming, fits)

    def open(
        self,
        seq_id: SeqId,
        tokens: Any,
        *,
        namespace: Namespace | None = None,
        media: Iterable[Media] = (),
        max_cached_tokens: int | None = None,
        max_fresh_tokens: int | None = None,
        loaded_tokens: int = 0,
        partial_hits: bool = False,
        announce: bool = False,
    ) -> Opened | None:
        """Open a sequence with its prompt: find the longest prefix that every group has, hold what is needed.

        ``tokens`` int [n], n >= 0. At most ``max_cached_tokens`` are taken from the cache (default n - 1: a
        model has to run at least one token). Behind the hit there is room for the rest of the prompt, or
        for ``max_fresh_tokens`` of it if that is less: the length of the sequence, and ``num_tokens`` of
        the result, say how much; ``append`` makes room for more.

        The first ``loaded_tokens`` have K and V elsewhere, on a host or another device: beyond the hit, which
        is then counted to the first block that has to be filled, there are blocks for what the token behind
        them sees, and NULL_BLOCK for the rest. Fill those from ``num_cached_tokens`` on, then commit.

        With ``partial_hits`` the hit may end inside a block that every group has, by a copy of it in each
        (run ``copies`` before the prefill). With ``announce``, ``lookup`` tells others of the prompt until
        it is committed.

        Returns None when it does not fit now: not enough available blocks above the watermark (which does
        not bind the only sequence), or ``max_seqs`` are open. Raises ``NeverFits`` if the pool cannot hold
        what the sequence must hold at once, even if it were alone: now (a smaller ``max_fresh_tokens`` may
        help) or at the end of the prompt. Raises ``SequenceError`` if ``seq_id`` is open. Cost:
        O(groups x n), vectorised.
        """
        prompt = as_token_array(tokens)
        if seq_id in self._table:
            raise SequenceError(f"sequence {seq_id!r} is open already")
        num_tokens = len(prompt)
        self._admission.require_fits(np.array([max(0, num_tokens - 1)]), np.array([num_tokens]))
        extra = SequenceExtra.build(namespace, media, num_tokens, self.block_size)
        limit = num_tokens - 1
        if max_cached_tokens is not None:
            limit = min(require_count("max_cached_tokens", max_cached_tokens, 0), num_tokens)
        room, loaded = chunk(max_fresh_tokens, num_tokens), require_count("loaded_tokens", loaded_tokens, 0)
        if loaded > num_tokens:
            raise PagedKVError(f"{loaded} tokens cannot be loaded of a prompt of {num_tokens}")
        plan = self._admission.plan(prompt, extra, limit, room, loaded=loaded, partial_hits=partial_hits)
        if plan is None:
            return None
        announced = prompt.copy() if announce and self.prefix_caching else None
        full, cached = len(plan.hit.nodes), plan.num_cached_tokens
        row = self._rows.add(seq_id, extra, plan, prompt[full * self.block_size : cached])
        self._counters.count_open(num_tokens, self.block_size, full, cached)
        if announced is not None:
            self._announced.add(row, announced, extra)
            self._announced.cut(row, cached, self.max_seq_len)  # all of it may have been a hit
        return Opened(plan.num_tokens, cached)

    def append(self, seq_id: SeqId, num_tokens: int = 1) -> bool:
        """``step`` for one sequence."""
        return self.step([seq_id], num_tokens)

    def step(self, seq_ids: Sequence[SeqId], num_tokens: int = 1) -> bool:
        """Make room for ``num_tokens`` more of each of several distinct sequences, or of none and False.

        Drafts that are yet to be verified count: ask for 1 + k.
        A partial tail that somebody else can see is replaced by a copy, in every group: run ``copies``
        before writing. A tail that nobody else can see stays, and its content is forgotten. False when the
        blocks are not available now (for an only sequence, while uncommitted tokens take the room: commit or
        cut it first). Raises ``NeverFits`` beyond ``max_seq_len``, or if one of the sequences could not hold
        so many uncommitted tokens even alone. Cost: O(groups x (batch + blocks)).
        """
        rows = self._table.rows(seq_ids)
        num_tokens = require_count("num_tokens", num_tokens, 0)
        lens = self._table.seq_len[rows]
        self._admission.require_length(int(lens.max(initial=0)) + num_tokens)
        self._admission.require_fits(lens, lens + num_tokens)
        return self._rows.extend(rows, num_tokens)

    def commit(self, seq_id: SeqId, tokens: Any, *, media: Iterable[Media] = ()) -> None:
        """Say which tokens the next positions hold, now that they are final and their step has its tables.

        ``tokens`` int [n] continue where the last commit (or the hit of ``open``) ended and may not go
        beyond the sequence's length (``SequenceError``). ``media`` that starts among them and was not given
        to ``open`` is given here. Blocks that became full are shared, and where a group has an equal one
        already, the sequence takes that one. Blocks that fell out of a window are given up. Tables change.
        Cost: O(groups x n), vectorised.
        """
        row = self._table.row(seq_id)
        ids = as_token_array(tokens)
        start, length = int(self._table.committed[row]), int(self._table.seq_len[row])
        stop = start + len(ids)
        if stop > length:
            raise SequenceError(
                f"cannot commit {len(ids)} more tokens of {seq_id!r}: {start} of its {length} are committed"
            )
        extra = self._rows.extra(row).extended(media, start, stop, self.block_size)
        if len(ids):
            self._require_copied(row, start // self.block_size, div_ceil(stop, self.block_size))
            self._commit_row(row, ids, extra)

    def commit_step(
        self, seq_ids: Sequence[SeqId], tokens: Any, num_accepted: Sequence[int] | None = None
    ) -> None:
        """``commit`` one token of each of several distinct sequences: ``tokens`` int [len(seq_ids)].

        With ``num_accepted``, int [len(seq_ids)], ``tokens`` has a row of drafts for each sequence, of which
        the first so many are final: they are committed, and the sequence is cut behind them (a prompt that
        was not committed counts as drafts, too). Raises ``SequenceError`` if any of them has too few
        uncommitted tokens left; none changes then. Cost: O(groups x batch), vectorised, and as ``commit``
        for each sequence whose block became full; with ``num_accepted`` as ``commit`` and ``truncate`` of
        each.
        """
        rows = self._table.rows(seq_ids)
        if num_accepted is not None:
            drafts = accepted_tokens(self._table, self.copies, seq_ids, tokens, num_accepted)
            stops = self._table.committed[rows] + np.fromiter(map(len, drafts), np.int64, len(rows))
            self._rows.require_seen(seq_ids, rows, stops)
            for row, stop, accepted in zip(rows.tolist(), stops.tolist(), drafts, strict=True):
                self._commit_row(row, accepted, self._rows.extra(row))
                self._cut_row(row, stop)
            return
        ids = as_token_array(tokens)
        if len(ids) != len(rows):
            raise SequenceError(f"{len(rows)} sequences, but {len(ids)} tokens to commit")
        start = self._table.committed[rows]
        left = start < self._table.seq_len[rows]
        if not left.all():
            raise SequenceError(f"sequence {seq_ids[int(left.argmin())]!r} has no uncommitted token left")
        if len(self.copies):
            for row, column in zip(rows.tolist(), (start // self.block_size).tolist(), strict=True):
                self._require_copied(row, column, column + 1)
        self._rows.commit_one(rows, ids)
        for row in rows.tolist() if len(self._announced) else ():
            self._announced.cut(row, int(self._table.committed[row]), self.max_seq_len)

    def fork(self, seq_id: SeqId, child_id: SeqId) -> bool:
        """Open ``child_id`` as a copy of ``seq_id`` that shares every block, the partial tail included.

        Whoever grows first copies the tail. Returns False when ``max_seqs`` are open. With prefix
        caching the sequence must be committed to its end (``SequenceError``). Cost: O(groups x blocks).
        """
        row = self._table.row(seq_id)
        if child_id in self._table:
            raise SequenceError(f"sequence {child_id!r} is open already")
        length, committed = int(self._table.seq_len[row]), int(self._table.committed[row])
        if self.prefix_caching and committed < length:
            raise SequenceError(
                f"commit or truncate {seq_id!r} before a fork: {committed} of {length} tokens are committed"
            )
        if not self._table.num_free_rows:
            return False
        if committed < length:
            last = div_ceil(length, self.block_size)
            self._require_copied(row, last - 1, last)
        self._rows.copy(row, child_id)
        return True

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Cut a sequence to its first ``num_tokens``, as when drafts are rejected; frees what is beyond.

        Raises ``SequenceError`` unless ``0 <= num_tokens <= length``, or if the token at that position sees
        a block that fell out of a window: drafts can always be cut, committed tokens a little way, and all
        of them (to 0). Cost: O(groups x blocks given up).
        """
        self._rows.require_cut(seq_id, num_tokens)
        self._cut_row(self._table.row(seq_id), int(num_tokens))

    def close(self, seq_id: SeqId) -> None:
        """Give up a sequence: full committed blocks stay cached, others become free.

        Raises ``SequenceError`` if it is not open. Cost: O(groups x blocks).
        """
        row = self._table.row(seq_id)
        self._rows.remove(seq_id)
        self._announced.cut(row, 0, 0)

    # -- being watched

    def stats(self) -> HybridStats:
        """Snapshot of states and counters. Cost: O(num_blocks), vectorised."""
        counts, policy = self.counts, self._tree.policy
        return HybridStats(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            active_blocks=counts.active,
            groups=count_groups(self.groups, self._tree.group_of, self._tree.pool.state),
            fenced_blocks=len(self._tree.fenced_only()),
            pinned_blocks=self.retention.num_pinned,
            num_nodes=len(self._tree.index),
            num_seqs=len(self._table),
            fallen_blocks=self._rows.num_fallen,
            evicted_blocks=self._tree.num_evicted,
            copied_blocks=self._tree.num_copied,
            residency=policy.histograms() if isinstance(policy, Residency) else None,
            **vars(self._counters),
        )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if any two parts disagree. Cost: O(groups x (pool + table) + nodes)."""
        check_invariants(self._tree, self._rows, self.retention.held())

    # -- inner steps: ``_commit_row`` and ``_cut_row`` refuse nothing any more

    def _commit_row(self, row: int, ids: Int32Array, extra: SequenceExtra) -> None:
        if len(ids):
            self._rows.commit(row, ids, extra)
            self._announced.cut(row, int(self._table.committed[row]), self.max_seq_len)

    def _cut_row(self, row: int, num_tokens: int) -> None:
        if num_tokens < self._table.seq_len[row]:
            self._rows.cut(row, num_tokens, self._rows.extra(row).truncated(num_tokens, self.block_size))
            self._announced.cut(row, int(self._table.committed[row]), num_tokens)

    def _require_copied(self, row: int, first: int, last: int) -> None:
        if len(self.copies):
            for blocks in self._rows.blocks[:, row, first:last]:
                self.copies.require_done(blocks)
