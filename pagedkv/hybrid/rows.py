"""What the sequences of a hybrid manager hold, once nothing can refuse it any more."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.block_pool import NO_BLOCKS
from pagedkv.block_tables import NULL_BLOCK, BlockTables, Int32Array, Int64Array, SeqId
from pagedkv.content import NO_EXTRA, SequenceExtra
from pagedkv.errors import SequenceError
from pagedkv.hybrid.content_tree import ContentTree
from pagedkv.hybrid.hits import Hits, Plan
from pagedkv.hybrid.tails import NO_TAILS, shared_tails
from pagedkv.hybrid.windows import Windows
from pagedkv.prefix_index import ROOT


class Rows:
    """One row per sequence: a block table per group, and the contents of its full committed blocks.

    ::

        tokens   | t t t t | t t t t | t t t t | t t t t | t t t .     4 full blocks, a tail
        nodes    |    3    |    8    |    9    |    2    |    0
        full     |    5    |    7    |   11    |   12    |   20
        window   |    0    |    0    |   13    |   14    |   21        start = 2: what fell out is 0

    A cut inside a full block leaves its node in place: the tail then has content that others may find.
    """

    def __init__(self, tree: ContentTree, tables: Sequence[BlockTables], keeps_content: bool) -> None:
        """Start with no sequence in ``tables``, one per group; they become views of the arrays here.

        Without ``keeps_content`` nobody ever finds what a sequence has committed.
        """
        self.tree = tree
        self.groups = groups = tree.groups
        self.keeps_content = keeps_content
        self.tables = tables
        max_seqs, width = tables[0].blocks.shape
        self.block_size = tables[0].block_size
        self.windows = Windows(groups, self.block_size)
        self.sink_blocks = self.windows.sink_blocks
        self.hits = Hits(tree, self.windows)
        self.blocks: Int32Array = np.zeros((len(groups), max_seqs, width), np.int32)
        self.seq_len, self.committed = tables[0].seq_len, tables[0].committed
        for table, blocks in zip(tables, self.blocks, strict=True):
            table.blocks, table.seq_len, table.committed = blocks, self.seq_len, self.committed
        self.nodes: Int32Array = np.zeros((max_seqs, width), np.int32)
        self.tail_tokens: Int32Array = np.zeros((max_seqs, self.block_size), np.int32)
        self.start: Int64Array = np.zeros((len(groups), max_seqs), np.int64)
        self.maybe_shared: set[int] = set()
        """Rows whose partial tail others might see: only a fork or a truncation makes one."""
        self.num_fallen = 0
        self._extra: dict[int, SequenceExtra] = {}

    # -- looking

    def extra(self, row: int) -> SequenceExtra:
        """Namespace and media of the row."""
        return self._extra.get(row, NO_EXTRA)

    # -- changing

    def add(self, seq_id: SeqId, extra: SequenceExtra, plan: Plan, tail: Int32Array) -> int:
        """Open a sequence as planned, with the committed tokens ``tail`` behind its contents.

        They are in the first new blocks once those are copies of ``plan.source``. Returns the row.
        """
        hit, source = plan.hit, plan.source
        at, total = len(hit.nodes), len(hit.nodes) + plan.fresh.shape[1]
        row = self.new_row(seq_id)
        try:
            self.set_extra(row, extra)
            held = np.concatenate([hit.held, source]) if len(source) else hit.held
            new = self.tree.acquire(int(np.count_nonzero(plan.fresh)), held, hit.nodes)
        except BaseException:
            self.forget_row(seq_id, row)
            raise
        self.nodes[row, :at] = hit.nodes
        self.blocks[:, row, :at] = hit.blocks
        self.blocks[:, row, at:total] = fresh = self.share_out(new, plan.fresh)
        self.seq_len[row], self.committed[row] = plan.num_tokens, plan.num_cached_tokens
        self.start[:, row] = self.windows.first_blocks(hit.position)
        if len(source):
            self.tail_tokens[row, : len(tail)] = tail
            self.tree.copy(source.reshape(-1, 1), fresh[:, :1])
        self.tree.note_hit(hit.blocks)
        return row

    def copy(self, row: int, seq_id: SeqId) -> None:
        """Open a sequence that shares everything of ``row``."""
        total = self.tables[0].num_blocks(row)
        blocks, nodes = self.blocks[:, row, :total], self.nodes[row, :total]
        child = self.new_row(seq_id)
        try:
            self.set_extra(child, self.extra(row))
            self.tree.acquire(0, blocks[blocks != NULL_BLOCK], nodes[nodes != ROOT])
        except BaseException:
            self.forget_row(seq_id, child)
            raise
        self.blocks[:, child, :total], self.nodes[child, :total] = blocks, nodes
        for array in (self.seq_len, self.committed, self.tail_tokens):
            array[child] = array[row]
        self.start[:, child] = self.start[:, row]
        self.maybe_shared |= {row, child}

    def remove(self, seq_id: SeqId) -> None:
        """Give up a sequence."""
        row = self.tables[0].row(seq_id)
        self._release(row, 0)
        self.forget_row(seq_id, row)

    def require_cut(self, seq_id: SeqId, num_tokens: int) -> None:
        """Refuse to cut a sequence to what is no length of it, or where a window sees what is gone."""
        row = self.tables[0].row(seq_id)
        length = int(self.seq_len[row])
        whole = isinstance(num_tokens, (int, np.integer)) and not isinstance(num_tokens, bool)
        if not whole or not 0 <= num_tokens <= length:
            raise SequenceError(f"cannot truncate sequence {seq_id!r} of {length} tokens to {num_tokens}")
        self.require_seen([seq_id], np.array([row]), np.array([int(num_tokens)]))

    def require_seen(self, seq_ids: Sequence[SeqId], rows: Int64Array, lengths: Int64Array) -> None:
        """Refuse to cut any of these rows to a length where a window sees what is gone."""
        starts, keep = self.start[:, rows], div_ceil(lengths, self.block_size)
        for group, sinks, start in zip(self.groups, self.sink_blocks, starts, strict=True):
            first = np.maximum(group.first_block(lengths, self.block_size), sinks)
            lost = first < np.minimum(start, keep)
            if lost.any():
                at = int(lost.argmax())
                raise SequenceError(
                    f"cannot truncate {seq_ids[at]!r} from {self.seq_len[rows[at]]} to {lengths[at]} tokens: "
                    f"positions from {first[at] * self.block_size} on fell out of a window or were not loaded"
                )

    def cut(self, row: int, num_tokens: int, extra: SequenceExtra) -> None:
        """Keep the first ``num_tokens`` of a sequence, and give up the blocks beyond."""
        tree, keep, offset = self.tree, div_ceil(num_tokens, self.block_size), num_tokens % self.block_size
        if offset and self.nodes[row, keep - 1] != ROOT:
            self.tail_tokens[row, :offset] = tree.index.tokens[self.nodes[row, keep - 1], :offset]
        self._release(row, keep)
        self.seq_len[row] = num_tokens
        self.committed[row] = min(int(self.committed[row]), num_tokens)
        self.start[:, row] = np.minimum(self.start[:, row], keep)
        if offset and (self.nodes[row, keep - 1] or tree.pool.ref_count[self.blocks[0, row, keep - 1]] > 1):
            self.maybe_shared.add(row)
        self.set_extra(row, extra)

    def extend(self, rows: Int64Array, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more in each row, or in none."""
        lens, width = self.seq_len[rows], len(self.groups)
        have, need = div_ceil(lens, self.block_size), div_ceil(lens + num_tokens, self.block_size)
        grow = need - have
        tails = NO_TAILS
        if self.maybe_shared and num_tokens:
            tails = shared_tails(self.tree, self.tables[0], self.nodes, rows)
        available, doomed = self.tree.pool.num_available, NO_BLOCKS
        total = int(grow.sum()) + len(tails.copied)
        if (total - len(tails.burdened)) * width <= available < total * width:
            # Cached content that builds on our own tails alone must not keep us from growing for ever.
            behind = self.tree.idle_behind(self.nodes[rows[tails.burdened], have[tails.burdened] - 1])
            if behind is not None:
                doomed, tails = behind, tails.unburdened()
                total = int(grow.sum()) + len(tails.copied)
        if total * width > available:
            return False
        if total or len(doomed):
            new, copied = self.tree.acquire(total * width, doomed=doomed), len(tails.copied)
            new = self.share_out(new, np.ones((width, total), np.bool_))
            grown_rows = np.repeat(rows, grow)
            columns = np.repeat(have - np.cumsum(grow) + grow, grow) + np.arange(len(grown_rows))
            self.blocks[:, grown_rows, columns] = new[:, copied:]
            self._copy_tails(rows[tails.copied], have[tails.copied] - 1, new[:, :copied])
        for i in tails.private:
            self.tree.withdraw(int(self.nodes[rows[i], have[i] - 1]))
            self.nodes[rows[i], have[i] - 1] = ROOT
        self.seq_len[rows] += num_tokens
        # unless fences or copies still hold what others gave up
        if self.maybe_shared and num_tokens and not self.tree.fences and not len(self.tree.copies):
            self.maybe_shared.difference_update(rows.tolist())
        return True

    def commit(self, row: int, tokens: Int32Array, extra: SequenceExtra) -> None:
        """Store committed tokens, share the blocks that they fill, and let go of what no later one sees."""
        start = int(self.committed[row])
        first, offset = divmod(start, self.block_size)
        content = np.concatenate([self.tail_tokens[row, :offset], tokens])
        full = len(content) // self.block_size
        rest = content[full * self.block_size :]
        before = self.extra(row)
        self.set_extra(row, extra)
        if full and self.keeps_content:
            try:
                self._share(row, first, content[: full * self.block_size].reshape(full, self.block_size))
            except BaseException:
                self.set_extra(row, before)
                raise
        self.tail_tokens[row, : len(rest)] = rest
        self.committed[row] = start + len(tokens)
        if full:
            self._slide(row, (first + full) * self.block_size)

    def commit_one(self, rows: Int64Array, tokens: Int32Array) -> None:
        """``commit`` one token of each row."""
        offset = self.committed[rows] % self.block_size
        full = offset == self.block_size - 1
        growing = rows[~full]
        self.tail_tokens[growing, offset[~full]] = tokens[~full]
        self.committed[growing] += 1
        for i in np.flatnonzero(full):
            row = int(rows[i])
            self.commit(row, tokens[i : i + 1], self.extra(row))

    # -- inner steps

    def new_row(self, seq_id: SeqId) -> int:
        """All tables add and remove together, so that a sequence has the same row in each."""
        rows = [table.add(seq_id) for table in self.tables]
        return rows[0]

    def forget_row(self, seq_id: SeqId, row: int) -> None:
        """Take a row that holds nothing out of all tables."""
        for table in self.tables:
            table.remove(seq_id)
        self.start[:, row] = 0
        self.maybe_shared.discard(row)
        self.set_extra(row, NO_EXTRA)

    def share_out(self, new: Int32Array, wanted: npt.NDArray[np.bool_]) -> Int32Array:
        """Give new blocks to the groups, where ``wanted`` [groups, n]: as many in all; else NULL_BLOCK."""
        if len(new) < wanted.size:
            shares = np.zeros(wanted.shape, np.int32)
            shares[wanted] = new
            self.tree.group_of[new] = np.nonzero(wanted)[0]
            return shares
        shares = new.reshape(wanted.shape)
        self.tree.group_of[shares] = np.arange(len(shares))[:, None]
        return shares

    def _release(self, row: int, first: int) -> None:
        """Give up all blocks from ``first`` on."""
        last = self.tables[0].num_blocks(row)
        if first == last:
            return
        blocks, nodes = self.tree.by_node(self.blocks[:, row, first:last]), self.nodes[row, first:last][::-1]
        self.tree.let_go(blocks, nodes[nodes != ROOT])  # which may run out of memory
        self.blocks[:, row, first:last] = NULL_BLOCK
        self.nodes[row, first:last] = ROOT

    def _share(self, row: int, first: int, content: Int32Array) -> None:
        """Make the row's blocks from ``first`` on, full of ``content``, findable, or hold equal ones."""
        last = first + len(content)
        parent = int(self.nodes[row, first - 1]) if first else ROOT
        extra = self.extra(row).ids(self.tree.extra_keys, first, len(content))
        nodes = self.tree.grow(parent, content, extra)
        own = self.blocks[:, row, first:last]
        try:
            held = self.tree.adopt(own, nodes)
        except BaseException:
            self.tree.let_go(NO_BLOCKS, nodes[::-1])
            raise
        self.nodes[row, first:last] = nodes
        if held is not own:
            spare = own[held != own]
            self.blocks[:, row, first:last] = held
            self.tree.let_go(spare)

    def _slide(self, row: int, position: int) -> None:
        """Let go of what fell out of the windows, seen from ``position``, the last block boundary."""
        firsts = np.array(self.windows.first_blocks(position))
        lows = np.maximum(self.start[:, row], self.sink_blocks)
        low, high = int(lows.min()), int(firsts.max())
        if low < high:
            index = np.arange(low, high)
            gone = (lows[:, None] <= index) & (index < firsts[:, None])
            held = self.blocks[:, row, low:high]
            fallen = self.tree.by_node(np.where(gone, held, NULL_BLOCK))
            self.tree.let_go(fallen)  # if that runs out of memory, the next block that fills tries again
            held[gone] = NULL_BLOCK
            self.num_fallen += len(fallen)
        self.start[:, row] = np.maximum(self.start[:, row], firsts)

    def _copy_tails(self, rows: Int64Array, columns: Int64Array, new: Int32Array) -> None:
        """Let the blocks ``new`` [groups, n] take the place of tails that others can see."""
        old, nodes = self.blocks[:, rows, columns], self.nodes[rows, columns]
        self.blocks[:, rows, columns], self.nodes[rows, columns] = new, ROOT
        self.tree.replace(old, new)
        for content in nodes[nodes != ROOT].reshape(-1, 1):  # several rows may have the same
            self.tree.let_go(NO_BLOCKS, content)

    def rename(self, name: Int32Array) -> None:
        """Block ``b`` is called ``name[b]`` from now on."""
        for row in self.tables[0].all_rows().tolist():
            held = self.blocks[:, row, : self.tables[0].num_blocks(row)]
            held[:] = name[held]

    def set_extra(self, row: int, extra: SequenceExtra) -> None:
        """Let the row use the keys of ``extra`` in place of those that it used."""
        old = self._extra.get(row, NO_EXTRA)
        if extra is old:
            return
        self.tree.extra_keys.exchange(old.by_block.values(), extra.by_block.values())
        if extra is NO_EXTRA:
            del self._extra[row]
        else:
            self._extra[row] = extra
