"""Preemption by swap for hybrid models: what every group holds of a sequence goes to the host, and back."""

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.block_pool import NO_BLOCKS
from pagedkv.block_tables import NULL_BLOCK, Int32Array, SeqId
from pagedkv.content import SequenceExtra
from pagedkv.errors import NeverFits, PagedKVError
from pagedkv.hybrid.manager import HybridKVCacheManager
from pagedkv.hybrid.restoring import find, restore
from pagedkv.swap import Reopened, Swapped, SwapSpace


class HybridSwapSpace(SwapSpace):
    """Host blocks for sequences of a hybrid manager, see `SwapSpace`; a host block is of any group.

    Only what the groups still hold goes out: blocks that fell out of a window stay where they are, cached or
    gone. Of what comes back, every block that any group still has is hit again, whether or not a new
    sequence could hit it, and the others are copied; ``num_cached_tokens`` counts the tokens before the
    first block that is.

    >>> from pagedkv.hybrid import CacheGroup
    >>> groups = CacheGroup("full", (1,)), CacheGroup("local", (0,), window=2)
    >>> manager = HybridKVCacheManager(groups, num_blocks=10, block_size=2)
    >>> space = HybridSwapSpace(manager, num_host_blocks=8)
    >>> _ = manager.open("a", range(7)); manager.commit("a", range(7))
    >>> out = space.swap_out("a"); len(out.copies.src)     # 4 of the full group, 2 of the other
    6
    >>> space.done(out.transfer); back = space.swap_in("a"); back.num_cached_tokens, len(back.copies.src)
    (6, 2)
    >>> space.done(back.transfer)
    """

    def __init__(self, manager: HybridKVCacheManager, num_host_blocks: int) -> None:
        """Make ``num_host_blocks`` host blocks, ids 1..num_host_blocks, for the sequences of ``manager``."""
        if not isinstance(manager, HybridKVCacheManager):
            raise PagedKVError(f"a hybrid swap space needs a HybridKVCacheManager, got {manager!r}")
        self._hybrid = manager
        self._start(manager, num_host_blocks)

    # -- what hangs on the kind of manager

    def _is_open(self, seq_id: SeqId) -> bool:
        return seq_id in self._hybrid._rows.tables[0]

    def _blocks_of(self, seq_id: SeqId) -> Int32Array:
        """Blocks of the first group in the order of the sequence, then of the second, and so on."""
        blocks = self._hybrid._rows.blocks[:, self._hybrid._rows.tables[0].row(seq_id)]
        held: Int32Array = blocks[blocks != NULL_BLOCK]
        return held

    def _num_blocks_of(self, swapped: Swapped) -> int:
        return int(np.count_nonzero(self._held(swapped)))

    def _held(self, swapped: Swapped) -> npt.NDArray[np.bool_]:
        """Which blocks the sequence has, [groups, blocks of its length]."""
        rows = self._hybrid._rows
        index, starts = np.arange(div_ceil(len(swapped.tokens), rows.block_size)), np.array(swapped.starts)
        held: npt.NDArray[np.bool_] = (index >= starts[:, None]) | (index < rows.sink_blocks[:, None])
        return held

    def _read(self, seq_id: SeqId, blocks: Int32Array) -> Swapped:
        """What the manager knows of an open sequence."""
        rows = self._hybrid._rows
        table = rows.tables[0]
        row = table.row(seq_id)
        length, committed = int(table.seq_len[row]), int(table.committed[row])
        tokens: Int32Array = np.zeros(length, np.int32)
        if self._hybrid.prefix_caching:
            full, rest = divmod(committed, rows.block_size)
            tokens[: committed - rest] = rows.tree.index.tokens[rows.nodes[row, :full]].reshape(-1)
            tokens[committed - rest : committed] = rows.tail_tokens[row, :rest]
        extra, starts = rows.extra(row), tuple(rows.start[:, row].tolist())
        return Swapped(NO_BLOCKS, tokens, committed, extra.namespace, extra.media, -1, starts)

    def _reopen(self, seq_id: SeqId, swapped: Swapped) -> Reopened | None:
        """Open a sequence as it was, and commit it; None, or an error, if nothing has changed."""
        manager, rows, held = self._hybrid, self._hybrid._rows, self._held(swapped)
        if np.count_nonzero(held) > manager.num_blocks:
            raise NeverFits(
                f"sequence {seq_id!r} can never be swapped in: "
                f"it has {np.count_nonzero(held)} blocks, the pool {manager.num_blocks}"
            )
        extra = SequenceExtra.build(swapped.namespace, swapped.media, len(swapped.tokens), manager.block_size)
        limit = swapped.num_committed if manager.prefix_caching else 0
        found = find(rows, swapped.tokens[:limit], extra, held)
        hit = found.blocks[found.blocks != NULL_BLOCK]
        need = np.count_nonzero(found.missing) + np.count_nonzero(rows.tree.pool.ref_count[hit] == 0)
        if not rows.tables[0].num_free_rows or not manager._admission.can_have(int(need)):
            return None
        new = restore(rows, seq_id, extra, swapped, found)
        lacking = np.flatnonzero(found.missing.any(axis=0))
        num_hit = int(lacking[0]) if len(lacking) else found.missing.shape[1]
        cached = min(num_hit * manager.block_size, swapped.num_committed)
        manager._counters.count_open(len(swapped.tokens), manager.block_size, num_hit, cached)
        return Reopened(swapped.blocks[found.missing[held]], new, cached, len(hit))

    def _withdraw(self, blocks: Int32Array) -> None:
        """Let nobody hit blocks that are not going to be filled."""
        tree = self._hybrid._tree
        stored = blocks[tree.node_of[blocks] > 0]
        tree.disown(stored[::-1])
