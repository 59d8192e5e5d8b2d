"""The cache object most users hold: the manager's bookkeeping and the storage's tensors, kept in step."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.arithmetic import div_ceil
from pagedkv.manager import KVCacheManager, Opened
from pagedkv.namespace import Media, Namespace
from pagedkv.page_table import SeqId
from pagedkv.spec import KVCacheSpec
from pagedkv.stats import ManagerStats
from pagedkv.storage import KVPair, KVStorage, LayerKV, Layout


class DecodeBatch(NamedTuple):
    """What a decode step of several sequences needs, on the storage's device.

    block_tables: [num_seqs, max_blocks] int32, NULL_BLOCK beyond a sequence's blocks.
    seq_lens: [num_seqs] int32, tokens to attend to, the newest included.
    slot_mapping: [num_seqs] int64, slot of each sequence's newest token (PAD_SLOT if it has none).
    """

    block_tables: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor


class PagedKVCache:
    """A ``KVCacheManager`` and a ``KVStorage`` of the same blocks.

    The sequence methods are the manager's; those that grow also run the copies that copy-on-write
    asks for, so the storage is always ready to be written. ``manager`` and ``storage`` are there for
    everything else (``manager.tables`` writes batches into your own buffers).

    >>> import torch
    >>> from pagedkv.attention import paged_attention
    >>> spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=4, dtype="fp32", block_size=4)
    >>> cache = PagedKVCache(spec, num_blocks=16)
    >>> prompt = [3, 1, 4, 1, 5]
    >>> cache.open("a", prompt)
    Opened(num_tokens=5, num_cached_tokens=0)
    >>> k = v = torch.ones(5, 1, 4)
    >>> cache.write(0, k, v, cache.slots("a"))
    >>> cache.commit("a", prompt)
    >>> cache.step(["a"])
    True
    >>> batch = cache.batch(["a"])
    >>> cache.write(0, k[:1], v[:1], batch.slot_mapping)
    >>> kv = cache.layer(0)
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
        max_seqs: int = 256,
        prefix_caching: bool = True,
    ) -> None:
        """Allocate ``num_blocks`` usable blocks of ``spec`` (see ``spec.num_blocks_for(memory_bytes)``)."""
        self.manager = KVCacheManager(
            num_blocks, spec.block_size, max_seqs=max_seqs, prefix_caching=prefix_caching
        )
        self.storage = KVStorage(spec, num_blocks, device=device, layout=layout)

    def open(
        self, seq_id: SeqId, tokens: Any, *, namespace: Namespace | None = None, media: Iterable[Media] = ()
    ) -> Opened | None:
        """Open a sequence with its prompt; see ``KVCacheManager.open``. Prefill after ``num_cached_tokens``."""
        return self.manager.open(seq_id, tokens, namespace=namespace, media=media)

    def append(self, seq_id: SeqId, num_tokens: int = 1) -> bool:
        """Make room for more tokens of one sequence; False if the blocks are not available now."""
        return self._after_growth(self.manager.append(seq_id, num_tokens) is not None)

    def step(self, seq_ids: Sequence[SeqId]) -> bool:
        """Make room for one more token of each sequence, for all or for none."""
        return self._after_growth(self.manager.step(seq_ids) is not None)

    def commit(self, seq_id: SeqId, tokens: Any) -> None:
        """Say which tokens were written, in order; see ``KVCacheManager.commit``."""
        self.manager.commit(seq_id, tokens)

    def fork(self, seq_id: SeqId, child_id: SeqId) -> bool:
        """Share every block with a new sequence; see ``KVCacheManager.fork``."""
        return self.manager.fork(seq_id, child_id)

    def truncate(self, seq_id: SeqId, num_tokens: int) -> None:
        """Cut a sequence; see ``KVCacheManager.truncate``."""
        self.manager.truncate(seq_id, num_tokens)

    def close(self, seq_id: SeqId) -> None:
        """Give up a sequence; see ``KVCacheManager.close``."""
        self.manager.close(seq_id)

    def slots(self, seq_id: SeqId, start: int = 0, stop: int | None = None) -> Tensor:
        """Slots of a range of positions, int64 [stop - start]: the ``slot_mapping`` of a prefill chunk."""
        return torch.from_numpy(self.manager.tables.slots(seq_id, start, stop)).to(self.storage.device)

    def batch(self, seq_ids: Sequence[SeqId]) -> DecodeBatch:
        """Tables of a decode step in new tensors; for your own buffers use ``manager.tables``."""
        tables = self.manager.tables
        lengths = tables.seq_len[tables.rows(seq_ids)]
        columns = max(1, div_ceil(int(lengths.max(initial=0)), tables.block_size))
        block_tables = np.empty((len(lengths), columns), np.int32)
        seq_lens, slots = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int64)
        tables.write_block_tables(seq_ids, block_tables, seq_lens, slots)
        return DecodeBatch(
            *(torch.from_numpy(x).to(self.storage.device) for x in (block_tables, seq_lens, slots))
        )

    def write(self, layer: int, k: Tensor, v: Tensor | None, slot_mapping: Tensor) -> None:
        """Store keys and values of tokens at their slots; see ``KVStorage.write``."""
        self.storage.write(layer, k, v, slot_mapping)

    def layer(self, index: int) -> LayerKV:
        """Views of one layer for ``paged_attention``; see ``KVStorage.layer``."""
        return self.storage.layer(index)

    def gather(self, seq_id: SeqId, layer: int) -> KVPair:
        """Contiguous keys and values of a whole sequence, for prefill or inspection."""
        tables = self.manager.tables
        return self.storage.gather(layer, tables.block_ids(seq_id), tables.num_tokens(seq_id))

    def stats(self) -> ManagerStats:
        """Snapshot; bytes by ``cache.stats().bytes(cache.storage.spec)``."""
        return self.manager.stats()

    def _after_growth(self, grown: bool) -> bool:
        copies = self.manager.take_copies()
        if len(copies.src):
            self.storage.copy_blocks(copies.src, copies.dst)
        return grown
