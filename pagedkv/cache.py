"""The cache object most users hold: the manager's bookkeeping and the storage's tensors, kept in step."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.arithmetic import div_ceil
from pagedkv.block_tables import SeqId
from pagedkv.errors import PagedKVError
from pagedkv.manager import KVCacheManager
from pagedkv.namespace import Media, Namespace
from pagedkv.opened import Opened
from pagedkv.spec import KVCacheSpec
from pagedkv.storage import KVStorage, Layout


class DecodeBatch(NamedTuple):
    """What a decode step of several sequences needs, on the storage's device.

    block_tables: [num_seqs, max_blocks] int32, NULL_BLOCK beyond a sequence's blocks.
    seq_lens: [num_seqs] int32, tokens to attend to, the newest included.
    slot_mapping: [num_seqs] int64, slot of each sequence's newest token (PAD_SLOT if it has none).
    positions: [num_seqs] int64, true position of each sequence's newest token, for rotary embeddings.
    """

    block_tables: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    positions: Tensor


class PagedKVCache:
    """A ``KVCacheManager`` and a ``KVStorage`` of the same blocks.

    The sequence methods are the manager's. Copies that copy-on-write and partial hits ask for are run when a
    sequence opens or grows, and again before a write, so no write is lost to one. ``manager`` and ``storage``
    are there for everything else: ``manager.lookup``, ``manager.stats``, fences, events, ``manager.tables``;
    ``storage.layer`` for attention, ``storage.gather`` for contiguous tensors.
    To grow or shrink, use ``resize`` here, which keeps both in step; after ``manager.maintenance.defragment``
    run ``storage.copy_blocks`` on its moves. Not thread-safe, like its manager.

    >>> import torch
    >>> from pagedkv.attention import paged_attention
    >>> spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype="fp32", block_size=4)
    >>> cache = PagedKVCache(spec, num_blocks=16)
    >>> prompt = [3, 1, 4, 1, 5]
    >>> opened = cache.open("a", prompt); opened
    Opened(num_tokens=5, num_cached_tokens=0)
    >>> new = prompt[opened.num_cached_tokens :]
    >>> k = v = torch.ones(len(new), 1, 4)
    >>> cache.write(0, k, v, cache.slots("a"))
    >>> cache.commit("a", new)
    >>> cache.step(["a"])
    True
    >>> batch = cache.batch(["a"])
    >>> cache.write(0, k[:1], v[:1], batch.slot_mapping)
    >>> kv = cache.storage.layer(0)
    >>> paged_attention(torch.ones(1, 1, 4), kv.k, kv.v, batch.block_tables, batch.seq_lens).tolist()
    [[[1.0, 1.0, 1.0, 1.0]]]
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        device: str | torch.device = "cpu",
        layout: Layout = "HND",
        manager: KVCacheManager | None = None,
    ) -> None:
        """Allocate ``num_blocks`` usable blocks of ``spec`` (see ``spec.num_blocks_for(memory_bytes)``).

        ``manager`` brings options other than the defaults; ``PagedKVError`` unless it is empty and has
        the same blocks.
        """
        self.manager = manager or KVCacheManager(num_blocks, spec.block_size)
        if (self.manager.num_blocks, self.manager.block_size) != (num_blocks, spec.block_size):
            raise PagedKVError(
                f"the manager has {self.manager.num_blocks} blocks of {self.manager.block_size} tokens, "
                f"the storage would have {num_blocks} of {spec.block_size}"
            )
        if self.manager.counts.free != num_blocks:
            raise PagedKVError(f"the manager holds content that a new storage lacks: {self.manager.counts}")
        self.storage = KVStorage(spec, num_blocks, device=device, layout=layout)

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
        """Open a sequence with its prompt; prefill what is not cached. See ``KVCacheManager.open``."""
        opened = self.manager.open(
            seq_id,
            tokens,
            namespace=namespace,
            media=media,
            max_cached_tokens=max_cached_tokens,
            partial_hits=partial_hits,
            announce=announce,
        )
        self._run_copies()  # a prompt that is wholly cached is read without any write
        return opened

    def step(self, seq_ids: Sequence[SeqId], num_tokens: int = 1) -> bool:
        """Make room for more tokens of each sequence, for all or for none; see ``KVCacheManager.step``."""
        grown = self.manager.step(seq_ids, num_tokens)
        self._run_copies()
        return grown

    def commit(self, seq_id: SeqId, tokens: Any, *, media: Iterable[Media] = ()) -> None:
        """Say which tokens were written, in order; see ``KVCacheManager.commit``."""
        self.manager.commit(seq_id, tokens, media=media)

    def commit_step(
        self, seq_ids: Sequence[SeqId], tokens: Any, num_accepted: Sequence[int] | None = None
    ) -> None:
        """Commit one token of each sequence, or accepted drafts; see ``KVCacheManager.commit_step``."""
        self.manager.commit_step(seq_ids, tokens, num_accepted)

    def fork(self, seq_id: SeqId, child_id: SeqId) -> bool:
        """Share every block with a new sequence; see ``KVCacheManager.fork``."""
        return self.manager.fork(seq_id, child_id)

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Cut a sequence; see ``KVCacheManager.truncate``."""
        self.manager.truncate(seq_id, num_tokens)

    def close(self, seq_id: SeqId) -> None:
        """Give up a sequence; see ``KVCacheManager.close``."""
        self.manager.close(seq_id)

    def resize(self, num_blocks: int) -> bool:
        """Grow or shrink the pool and its tensors; False while more is held, or work under way may touch it.

        The old tensors and the new ones exist at the same time; ask ``layer`` for its views again. See
        ``Maintenance.resize``. Cost: every block with content is copied once.
        """
        whole = KVStorage(
            self.storage.spec, num_blocks, device=self.storage.device, layout=self.storage.layout
        )
        self._run_copies()
        moves = self.manager.maintenance.resize(num_blocks)
        if moves is None:
            return False
        self.storage.copy_blocks(*moves)
        kept = range(1, min(num_blocks, self.storage.num_blocks) + 1)
        self.storage.copy_blocks_to(whole, kept, kept)
        self.storage = whole
        return True

    def slots(self, seq_id: SeqId, start: int | None = None, stop: int | None = None) -> Tensor:
        """Slots of a range of positions, int64 [stop - start]: the ``slot_mapping`` of a prefill chunk.

        By default all that is not committed yet. What is committed may be shared: never write it again.
        """
        start = self.manager.tables.num_committed(seq_id) if start is None else start
        return torch.from_numpy(self.manager.tables.slots(seq_id, start, stop)).to(self.storage.device)

    def batch(self, seq_ids: Sequence[SeqId]) -> DecodeBatch:
        """Tables of a decode step in new tensors; for your own buffers use ``manager.tables``."""
        tables = self.manager.tables
        lengths = tables.seq_lens(seq_ids)
        columns = max(1, div_ceil(int(lengths.max(initial=0)), tables.block_size))
        block_tables = np.empty((len(lengths), columns), np.int32)
        seq_lens, slots = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int64)
        tables.write_block_tables(seq_ids, block_tables, seq_lens, slots)
        parts = block_tables, seq_lens, slots, tables.positions(seq_ids)
        return DecodeBatch(*(torch.from_numpy(x).to(self.storage.device) for x in parts))

    def write(self, layer: int, k: Tensor, v: Tensor | None, slot_mapping: Tensor) -> None:
        """Store keys and values of tokens at their slots; see ``KVStorage.write``."""
        self._run_copies()
        self.storage.write(layer, k, v, slot_mapping)

    def _run_copies(self) -> None:
        """Run pending copies; they stay pending if that fails."""
        if len(self.manager.copies):
            self.storage.copy_blocks(*self.manager.copies.pending)
            self.manager.copies.take()
