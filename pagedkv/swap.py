"""Swapping: sequences that give up their blocks on the device and keep their content on the host."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.arithmetic import div_ceil
from pagedkv.block_ids import require_num_blocks
from pagedkv.block_pool import NO_BLOCKS, BlockCounts, BlockPool
from pagedkv.block_tables import Int32Array, SeqId
from pagedkv.copies import BlockCopies, PendingCopies
from pagedkv.errors import NeverFits, PagedKVError, SequenceError, check
from pagedkv.fences import Fences
from pagedkv.manager import KVCacheManager
from pagedkv.namespace import Media, Namespace


class SwapOut(NamedTuple):
    """Result of ``swap_out``: run ``copies`` (``src`` on the device, ``dst`` on the host), then ``done``."""

    copies: BlockCopies
    transfer: int


class SwapIn(NamedTuple):
    """Result of ``swap_in``: run ``copies`` (``src`` on the host, ``dst`` on the device), then ``done``.

    The first ``num_cached_tokens`` were still on the device, and are not copied.
    """

    copies: BlockCopies
    transfer: int
    num_cached_tokens: int


@dataclass(frozen=True)
class SwapStats:
    """Host blocks and counters of a swap space at one moment.

    ``free_blocks + used_blocks == num_blocks``. ``num_seqs`` sequences are swapped out, ``num_transfers`` are
    not done yet. Since the space was made, over ``num_swapped_out`` and ``num_swapped_in`` calls that were
    granted, ``copied_out_blocks`` and ``copied_in_blocks`` were to be copied; ``hit_blocks`` came back from
    the prefix cache instead.
    """

    num_blocks: int
    free_blocks: int
    used_blocks: int
    num_seqs: int
    num_transfers: int
    num_swapped_out: int
    num_swapped_in: int
    copied_out_blocks: int
    copied_in_blocks: int
    hit_blocks: int


class Device(Protocol):
    """What every manager has whose sequences can be swapped."""

    copies: PendingCopies
    fences: Fences

    def close(self, seq_id: SeqId) -> None:
        """Give up a sequence."""


class Swapped(NamedTuple):
    """A sequence on the host."""

    blocks: Int32Array
    """Host blocks, in the order of the sequence."""
    tokens: Int32Array
    """What it was, committed tokens first; those that are not committed are unknown, and 0."""
    num_committed: int
    namespace: Namespace | None
    media: tuple[Media, ...]
    transfer: int
    """The transfer that brought it to the host."""
    starts: tuple[int, ...] = ()
    """For each group of layers, if there are several, its first block that did not fall out of a window."""


class Reopened(NamedTuple):
    """A sequence that is open again, and the copies that it needs."""

    source: Int32Array
    """Host blocks to read."""
    target: Int32Array
    """Device blocks to fill, not findable before that is undone or done."""
    num_cached_tokens: int
    num_hit_blocks: int


class _Transfer(NamedTuple):
    """Copies that were handed out and may still run."""

    fence: int
    """Keeps the device blocks of the copies from being handed out."""
    freed: Int32Array
    """Host blocks to free when it is done."""
    filled: Int32Array
    """Device blocks whose content is right only when it is done."""


class SwapSpace:
    """Host blocks for sequences that are swapped out of a manager. Bookkeeping only, like the manager.

    What it keeps can be hit by nobody, so ``manager.events`` do not tell of it.

    ::

                  swap_out              done(out)              swap_in               done(in)
        on device --------> going out -----------> on the host --------> coming back --------> on device
        device    open      fenced                 free | cached         open, being filled    open
        host      -         being filled           held                  held (being read)     free

    ::

        out = space.swap_out("a")                            back = space.swap_in("a")
        device.copy_blocks_to(host, *out.copies)             host.copy_blocks_to(device, *back.copies)
        space.done(out.transfer)                             space.done(back.transfer)

    The engine runs the copies of a result at once, in the order in which results are handed out, and says
    ``done(transfer)`` when they have run. (What it runs later on the same stream may rely on them before
    that.) Until then no block that they read or write is handed out again on either side: the manager keeps
    the device blocks behind a fence. If the sequence is closed while it comes back, run the copies all the
    same: others may have hit its blocks. A sequence comes back only when its way out is done.

    The whole sequence goes out, the uncommitted slots and the partial tail too, or nothing. On the device
    its full committed blocks stay in the prefix cache until they are evicted: those that are still there when
    it comes back are hit again, and only the others are copied. It comes back as it was: lengths, committed
    tokens, namespace, media. Each sequence has host blocks of its own, even where forks share device blocks.

    While it is swapped out, a sequence is not open: its id may be used for another, but then neither can
    change sides until one of them is gone. What is refused changes nothing. If memory runs out in
    ``swap_out`` or ``swap_in``, that is undone, but what was evicted for it stays evicted. Not thread-safe,
    like the manager.

    Memory: 17 bytes per host block, and 4 per token that is swapped out.

    >>> manager = KVCacheManager(num_blocks=2, block_size=4)
    >>> space = SwapSpace(manager, num_host_blocks=4)
    >>> _ = manager.open("a", [1, 2, 3, 4, 5]); manager.commit("a", [1, 2, 3, 4, 5])
    >>> out = space.swap_out("a"); out.copies
    BlockCopies(src=array([1, 2], dtype=int32), dst=array([1, 2], dtype=int32))
    >>> space.done(out.transfer)                       # the copies have run
    >>> manager.counts
    BlockCounts(free=1, cached=1, active=0)
    >>> back = space.swap_in("a"); back.num_cached_tokens, back.copies.dst.tolist()
    (4, [2])
    >>> space.done(back.transfer); space.counts.free
    4
    """

    def __init__(self, manager: KVCacheManager, num_host_blocks: int) -> None:
        """Make ``num_host_blocks`` host blocks, ids 1..num_host_blocks, for the sequences of ``manager``."""
        if not isinstance(manager, KVCacheManager):
            raise PagedKVError(f"a swap space needs a KVCacheManager, got {manager!r}")
        self._manager = manager
        self._start(manager, num_host_blocks)

    def _start(self, device: Device, num_host_blocks: int) -> None:
        num_host_blocks = require_num_blocks("num_host_blocks", num_host_blocks)
        self._device = device
        self._pool = BlockPool(num_host_blocks)
        self._swapped: dict[SeqId, Swapped] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._next = 0
        self._stats = SwapStats(num_host_blocks, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    def __contains__(self, seq_id: SeqId) -> bool:
        """Tell whether the sequence is swapped out."""
        return seq_id in self._swapped

    @property
    def seq_ids(self) -> list[SeqId]:
        """Ids of the sequences that are swapped out, longest ago first."""
        return list(self._swapped)

    @property
    def counts(self) -> BlockCounts:
        """Free and active host blocks; none is ever cached. Cost: O(1)."""
        return self._pool.counts

    def swap_out(self, seq_id: SeqId) -> SwapOut | None:
        """Close a sequence on the device and keep all its blocks on the host.

        Its device blocks are available to others once ``done`` is said. Returns None when it does not go
        now: too few free host blocks, or one of its blocks is still being filled from there. Raises
        ``NeverFits`` if the host has too few blocks at all, ``SequenceError`` if the sequence is not open,
        if another of this id is swapped out, if it has dropped blocks of its context, or if
        ``manager.copies`` into one of its blocks wait to be run. Cost: O(n), vectorised.
        """
        device, blocks = self._device, self._blocks_of(seq_id)
        if seq_id in self._swapped:
            raise SequenceError(f"another sequence {seq_id!r} is swapped out: bring it back or drop it first")
        if len(blocks) > self._pool.num_blocks:
            raise NeverFits(
                f"sequence {seq_id!r} can never be swapped out: "
                f"it has {len(blocks)} blocks, the host {self._pool.num_blocks}"
            )
        device.copies.require_done(blocks)
        if len(blocks) > self._pool.num_free or self._is_being_filled(blocks):
            return None
        swapped = self._read(seq_id, blocks)
        with ExitStack() as undo:
            host = self._pool.acquire(len(blocks))
            undo.callback(self._free, host)
            fence = device.fences.open()
            undo.callback(device.fences.signal, fence)
            transfer = self._begin(_Transfer(fence, NO_BLOCKS, NO_BLOCKS))
            undo.callback(self._transfers.pop, transfer)
            self._swapped[seq_id] = swapped._replace(blocks=host, transfer=transfer)
            undo.callback(self._swapped.pop, seq_id)
            device.close(seq_id)
            undo.pop_all()
        self._count(num_swapped_out=1, copied_out_blocks=len(blocks))
        return SwapOut(BlockCopies(blocks, host), transfer)

    def swap_in(self, seq_id: SeqId) -> SwapIn | None:
        """Open a swapped sequence on the device again, as it was, and copy what is no longer there.

        Run the copies before anything else reads or writes its blocks: it is committed already, so others
        may hit them. It is admitted like one that ``manager.open`` opens: the watermark binds it, and it
        counts in ``manager.stats()``. A prompt that it had announced is not announced again.

        Returns None when it does not come back now: its way out is not done, too few blocks are available,
        or ``max_seqs`` are open. Raises ``NeverFits`` if the manager has become too small for it, and
        ``SequenceError`` if it is not swapped out or if another of this id is open. Cost: O(n), vectorised.
        """
        device, swapped = self._device, self._get(seq_id)
        if self._is_open(seq_id):
            raise SequenceError(f"another sequence {seq_id!r} is open: close it first")
        if swapped.transfer in self._transfers:
            return None
        with ExitStack() as undo:
            reopened = self._reopen(seq_id, swapped)
            if reopened is None:
                return None
            undo.callback(device.close, seq_id)
            source, blocks, cached, num_hit = reopened
            undo.callback(self._withdraw, blocks)
            fence = device.fences.open()
            undo.callback(device.fences.signal, fence)
            transfer = self._begin(_Transfer(fence, swapped.blocks, blocks))
            undo.pop_all()
        del self._swapped[seq_id]
        self._count(num_swapped_in=1, copied_in_blocks=len(blocks), hit_blocks=num_hit)
        return SwapIn(BlockCopies(source, blocks), transfer, cached)

    def done(self, transfer: int) -> None:
        """Say that the copies of a ``swap_out`` or ``swap_in`` have run: frees what they read.

        Raises ``PagedKVError`` if the transfer is done already, or was never begun. Cost: O(blocks).
        """
        if isinstance(transfer, bool) or transfer not in self._transfers:
            raise PagedKVError(f"transfer {transfer!r} is not under way, these are: {list(self._transfers)}")
        self._free(self._transfers[transfer].freed)
        self._device.fences.signal(self._transfers.pop(transfer).fence)

    def drop(self, seq_id: SeqId) -> None:
        """Give up a sequence that is swapped out; its host blocks are free once its way out is done.

        Raises ``SequenceError`` if it is not swapped out. (One that comes back is open: close it there.)
        """
        swapped = self._get(seq_id)
        if swapped.transfer in self._transfers:
            going = self._transfers[swapped.transfer]
            self._transfers[swapped.transfer] = going._replace(freed=swapped.blocks)
        else:
            self._free(swapped.blocks)
        del self._swapped[seq_id]

    def stats(self) -> SwapStats:
        """Snapshot of host blocks and counters. Cost: O(1)."""
        counts = self.counts
        return replace(
            self._stats,
            free_blocks=counts.free,
            used_blocks=counts.active,
            num_seqs=len(self._swapped),
            num_transfers=len(self._transfers),
        )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the parts disagree. Cost: O(host blocks), vectorised."""
        self._pool.check_invariants()
        held = [s.blocks for s in self._swapped.values()] + [t.freed for t in self._transfers.values()]
        references = np.bincount(np.concatenate([*held, NO_BLOCKS]), minlength=self._pool.num_blocks + 1)
        check(np.array_equal(references, self._pool.ref_count), "a host block has no holder, or several")
        for swapped in self._swapped.values():
            check(
                len(swapped.blocks) == self._num_blocks_of(swapped),
                "a swapped sequence has not the blocks that it needs",
            )
            check(swapped.num_committed <= len(swapped.tokens), "more tokens are committed than there are")

    # -- inner steps

    def _get(self, seq_id: SeqId) -> Swapped:
        try:
            return self._swapped[seq_id]
        except KeyError:
            count = len(self._swapped)
            raise SequenceError(f"sequence {seq_id!r} is not swapped out ({count} are)") from None

    def _is_being_filled(self, blocks: Int32Array) -> bool:
        return any(
            bool(np.isin(blocks, transfer.filled).any())
            for transfer in self._transfers.values()
            if len(transfer.filled)
        )

    def _begin(self, transfer: _Transfer) -> int:
        number, self._next = self._next, self._next + 1
        self._transfers[number] = transfer
        return number

    def _free(self, host: Int32Array) -> None:
        retain: npt.NDArray[np.bool_] = np.zeros(len(host), np.bool_)
        self._pool.release(host[::-1], retain)

    def _count(self, **more: int) -> None:
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()}
        )

    # -- what hangs on the kind of manager

    def _is_open(self, seq_id: SeqId) -> bool:
        return seq_id in self._manager.tables

    def _blocks_of(self, seq_id: SeqId) -> Int32Array:
        """Device blocks of an open sequence, in an order that stays."""
        tables = self._manager.tables
        blocks = tables.block_ids(seq_id)
        dropped = tables.num_dropped(seq_id)
        if dropped:
            raise SequenceError(
                f"sequence {seq_id!r} has dropped {dropped} blocks: it cannot be opened again"
            )
        return blocks

    def _num_blocks_of(self, swapped: Swapped) -> int:
        return div_ceil(len(swapped.tokens), self._manager.block_size)

    def _read(self, seq_id: SeqId, blocks: Int32Array) -> Swapped:
        """What the manager knows of an open sequence."""
        manager = self._manager
        length, committed = manager.tables.num_tokens(seq_id), manager.tables.num_committed(seq_id)
        tokens: Int32Array = np.zeros(length, np.int32)
        if manager.prefix_caching:
            tokens[:committed] = manager._cache.index.tokens[blocks].reshape(-1)[:committed]
        extra = manager._seqs.extra(manager._tables.row(seq_id))
        return Swapped(NO_BLOCKS, tokens, committed, extra.namespace, extra.media, -1)

    def _reopen(self, seq_id: SeqId, swapped: Swapped) -> Reopened | None:
        """Open a sequence as it was, and commit it; None, or an error, if nothing has changed."""
        manager = self._manager
        with ExitStack() as undo:
            opened = manager.open(
                seq_id,
                swapped.tokens,
                namespace=swapped.namespace,
                media=swapped.media,
                max_cached_tokens=swapped.num_committed,
            )
            if opened is None:
                return None
            undo.callback(manager.close, seq_id)
            cached = opened.num_cached_tokens
            hit = cached // manager.block_size
            blocks = manager.tables.block_ids(seq_id)[hit:]
            undo.callback(self._withdraw, blocks)
            # finds nothing more to share than open did, so the table stays as it is
            manager.commit(seq_id, swapped.tokens[cached : swapped.num_committed])
            undo.pop_all()
        return Reopened(swapped.blocks[hit:], blocks, cached, hit)

    def _withdraw(self, blocks: Int32Array) -> None:
        """Let nobody hit blocks that are not going to be filled."""
        cache = self._manager._cache
        indexed = blocks[cache.index.indexed[blocks]]
        if len(indexed):
            cache.withdraw(indexed[::-1])
