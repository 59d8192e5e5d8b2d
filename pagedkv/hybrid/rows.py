"""What the sequences of a hybrid manager hold, once nothing can refuse it any more."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.block_pool import NO_BLOCKS
from pagedkv.content import NO_EXTRA, SequenceExtra
from pagedkv.errors import NeverFits
from pagedkv.hybrid.content_tree import ContentTree
from pagedkv.hybrid.tails import NO_TAILS, shared_tails
from pagedkv.page_table import NULL_BLOCK, Int32Array, Int64Array, PageTable, SeqId
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

    def __init__(self, tree: ContentTree, tables: Sequence[PageTable], keeps_content: bool) -> None:
        """Start with no sequence in ``tables``, one per group; they become views of the arrays here.

        Without ``keeps_content`` nobody ever finds what a sequence has committed.
        """
        self.tree = tree
        self.groups = groups = tree.groups
        self.keeps_content = keeps_content
        self.tables = tables
        max_seqs, width = tables[0].blocks.shape
        self.block_size = tables[0].block_size
        self.blocks: Int32Array = np.zeros((len(groups), max_seqs, width), np.int32)
        self.seq_len, self.committed = tables[0].seq_len, tables[0].committed
        for table, blocks in zip(tables, self.blocks, strict=True):
            table.blocks, table.seq_len, table.committed = blocks, self.seq_len, self.committed
        self.nodes: Int32Array = np.zeros((max_seqs, width), np.int32)
        self.tail_tokens: Int32Array = np.zeros((max_seqs, self.block_size), np.int32)
        self.start: Int64Array = np.zeros((len(groups), max_seqs), np.int64)
        self.sink_blocks = np.array([group.sink_blocks(self.block_size) for group in groups])
        self.maybe_shared: set[int] = set()
        """Rows whose partial tail others might see: only a fork or a truncation makes one."""
        self.num_fallen = 0
        self._extra: dict[int, SequenceExtra] = {}

    # -- looking

    def extra(self, row: int) -> SequenceExtra:
        """Namespace and media of the row."""
        return self._extra.get(row, NO_EXTRA)

    def match(self, prompt: Int32Array, extra: SequenceExtra, limit: int) -> Int32Array:
        """Nodes of the longest prefix of at most ``limit`` tokens that every group can serve."""
        full = max(0, limit) // self.block_size
        if not full:
            return NO_BLOCKS
        tokens = prompt[: full * self.block_size].reshape(full, self.block_size)
        return self.tree.match(tokens, extra.ids(self.tree.extra_keys, 0, full))

    def match_tail(
        self, prompt: Int32Array, extra: SequenceExtra, nodes: Int32Array, limit: int
    ) -> tuple[Int32Array, int]:
        """Blocks [groups] of the content behind ``nodes`` that shares the most tokens, and how many.

        None, and 0, unless every group has a block of it.
        """
        start = len(nodes) * self.block_size
        tokens = prompt[start : min(limit, start + self.block_size)]
        if not len(tokens):
            return NO_BLOCKS, 0
        extra_id = int(extra.ids(self.tree.extra_keys, len(nodes), 1)[0])
        node, count = self.tree.index.best_child(tokens, extra_id, int(nodes[-1]) if len(nodes) else ROOT)
        blocks = self.tree.block_of[:, node]
        return (blocks, count) if blocks.all() else (NO_BLOCKS, 0)

    def hit_blocks(self, nodes: Int32Array) -> Int32Array:
        """Blocks [groups, len(nodes)] that a sequence holds of a hit; NULL_BLOCK where it needs none."""
        blocks: Int32Array = self.tree.block_of[:, nodes]
        blocks[~self.seen(len(nodes), len(nodes) * self.block_size)] = NULL_BLOCK
        return blocks

    def seen(self, num_blocks: int, position: int) -> npt.NDArray[np.bool_]:
        """Which of the first blocks each group needs for a query at ``position``: [groups, num_blocks]."""
        index, first = np.arange(num_blocks), np.array(self._first_blocks(position))
        seen: npt.NDArray[np.bool_] = (index >= first[:, None]) | (index < self.sink_blocks[:, None])
        return seen

    def held_blocks(self, committed: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """Blocks of all groups that sequences of so many tokens hold when so many of them are committed."""
        total, at = div_ceil(num_tokens, self.block_size), committed // self.block_size * self.block_size
        held = np.zeros_like(total)
        for group, sinks in zip(self.groups, self.sink_blocks, strict=True):
            held += total - np.maximum(group.first_block(at, self.block_size) - sinks, 0)
        return held

    def needed(self, hit: Int32Array, committed: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """Available blocks that a sequence with the blocks ``hit`` takes at such points of its life.

        As ``held_blocks``, less those of the hit that somebody else holds now.
        Cost: O(groups x (hit + points)).
        """
        needed, length = self.held_blocks(committed, num_tokens), hit.shape[1]
        in_use: Int64Array = np.zeros((len(self.groups), length + 1), np.int64)
        np.cumsum((hit != NULL_BLOCK) & (self.tree.pool.ref_count[hit] > 0), axis=1, out=in_use[:, 1:])
        at = committed // self.block_size * self.block_size
        for group, sinks, counts in zip(self.groups, self.sink_blocks.tolist(), in_use, strict=True):
            last_sink = min(sinks, length)
            first = np.clip(group.first_block(at, self.block_size), last_sink, length)
            needed = needed - counts[last_sink] - (counts[length] - counts[first])
        return needed

    def require_fits(self, committed: Int64Array, num_tokens: Int64Array) -> None:
        """Refuse what a sequence could not hold if it were alone, with so many of its tokens committed."""
        have, longest = self.tree.pool.num_blocks, int(num_tokens.max(initial=0))
        if div_ceil(longest, self.block_size) * len(self.groups) <= have:
            return
        need = self.held_blocks(committed, num_tokens)
        most = int(need.argmax())
        if need[most] > have:
            raise NeverFits(
                f"{num_tokens[most]} tokens, {committed[most]} of them computed before, can never fit: "
                f"all groups together need {need[most]} of {have} blocks"
            )

    # -- changing

    def add(
        self,
        seq_id: SeqId,
        extra: SequenceExtra,
        nodes: Int32Array,
        hit: Int32Array,
        num_tokens: int,
        tail: tuple[Int32Array, Int32Array] = (NO_BLOCKS, NO_BLOCKS),
    ) -> int:
        """Open a sequence that holds the blocks ``hit`` [groups, n] of ``nodes`` and new ones behind.

        The first of those become copies of the blocks ``tail[0]`` [groups], if there are any, and the tokens
        ``tail[1]`` at their start are committed, too. Returns the row.
        """
        at, total = len(nodes), div_ceil(num_tokens, self.block_size)
        source, tokens = tail
        row = self.new_row(seq_id)
        try:
            self.set_extra(row, extra)
            new = self._give(
                self.tree.acquire(
                    len(self.groups) * (total - at), hit[hit != NULL_BLOCK], nodes, spared=source
                )
            )
        except BaseException:
            self.forget_row(seq_id, row)
            raise
        self.nodes[row, :at] = nodes
        self.blocks[:, row, :at] = hit
        self.blocks[:, row, at:total] = new
        self.seq_len[row], self.committed[row] = num_tokens, at * self.block_size + len(tokens)
        self.start[:, row] = self._first_blocks(at * self.block_size)
        if len(source):
            self.tail_tokens[row, : len(tokens)] = tokens
            self._note_copies(source, new[:, 0])
        if len(nodes):
            self.tree.policy.hit(self.tree.by_node(hit)[::-1])
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

    def first_lost(self, row: int, num_tokens: int) -> int | None:
        """A block that position ``num_tokens`` sees and that has fallen out of a window; None without any."""
        keep = div_ceil(num_tokens, self.block_size)
        first = np.maximum(self._first_blocks(num_tokens), self.sink_blocks)
        lost = first[first < np.minimum(self.start[:, row], keep)]
        return int(lost[0]) if len(lost) else None

    def cut(self, row: int, num_tokens: int, extra: SequenceExtra) -> None:
        """Keep the first ``num_tokens`` of a sequence, and give up the blocks beyond."""
        keep, offset = div_ceil(num_tokens, self.block_size), num_tokens % self.block_size
        if offset and self.nodes[row, keep - 1] != ROOT:
            self.tail_tokens[row, :offset] = self.tree.index.tokens[self.nodes[row, keep - 1], :offset]
        self._release(row, keep)
        self.seq_len[row] = num_tokens
        self.committed[row] = min(int(self.committed[row]), num_tokens)
        self.start[:, row] = np.minimum(self.start[:, row], keep)
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
            new, copied = self._give(self.tree.acquire(total * width, doomed=doomed)), len(tails.copied)
            grown_rows = np.repeat(rows, grow)
            columns = np.repeat(have - np.cumsum(grow) + grow, grow) + np.arange(len(grown_rows))
            self.blocks[:, grown_rows, columns] = new[:, copied:]
            self._copy_tails(rows[tails.copied], have[tails.copied] - 1, new[:, :copied])
        for i in tails.private:
            self.tree.withdraw(int(self.nodes[rows[i], have[i] - 1]))
            self.nodes[rows[i], have[i] - 1] = ROOT
        self.seq_len[rows] += num_tokens
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

    def _first_blocks(self, position: int) -> list[int]:
        """Of each group, the first block that a query at ``position`` sees besides sinks."""
        return [group.first_block(position, self.block_size) for group in self.groups]

    def _give(self, new: Int32Array) -> Int32Array:
        """Share new blocks out among the groups: [groups, n]."""
        shares = new.reshape(len(self.groups), -1)
        self.tree.group_of[shares] = np.arange(len(shares))[:, None]
        return shares

    def _release(self, row: int, first: int) -> None:
        """Give up all blocks from ``first`` on."""
        last = self.tables[0].num_blocks(row)
        blocks, nodes = self.tree.by_node(self.blocks[:, row, first:last]), self.nodes[row, first:last][::-1]
        ids = np.concatenate([blocks, -nodes[nodes != ROOT]])
        self.blocks[:, row, first:last] = NULL_BLOCK
        self.nodes[row, first:last] = ROOT
        self.tree.release(ids)

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
            self.tree.release(-nodes[::-1])
            raise
        self.nodes[row, first:last] = nodes
        if held is not own:
            spare = own[held != own]
            self.blocks[:, row, first:last] = held
            self.tree.release(spare)

    def _slide(self, row: int, position: int) -> None:
        """Let go of what fell out of the windows, seen from ``position``, the last block boundary."""
        firsts = np.array(self._first_blocks(position))
        lows = np.maximum(self.start[:, row], self.sink_blocks)
        self.start[:, row] = np.maximum(self.start[:, row], firsts)
        low, high = int(lows.min()), int(firsts.max())
        if low >= high:
            return
        index = np.arange(low, high)
        gone = (lows[:, None] <= index) & (index < firsts[:, None])
        held = self.blocks[:, row, low:high]
        fallen = self.tree.by_node(np.where(gone, held, NULL_BLOCK))
        held[gone] = NULL_BLOCK
        self.num_fallen += len(fallen)
        self.tree.release(fallen)

    def _copy_tails(self, rows: Int64Array, columns: Int64Array, new: Int32Array) -> None:
        """Let the blocks ``new`` [groups, n] take the place of tails that others can see."""
        old, nodes = self.blocks[:, rows, columns], self.nodes[rows, columns]
        self.blocks[:, rows, columns], self.nodes[rows, columns] = new, ROOT
        self._note_copies(old, new)
        for i in range(len(rows)):
            content = nodes[i : i + 1]
            self.tree.release(
                np.concatenate([self.tree.by_node(old[:, i : i + 1]), -content[content != ROOT]])
            )

    def _note_copies(self, old: Int32Array, new: Int32Array) -> None:
        self.tree.copies.note(old.reshape(-1), new.reshape(-1))
        self.tree.num_copied += new.size

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
