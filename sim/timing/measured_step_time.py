"""A step's time with decode attention run on this machine, and the rest from a roofline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_tables import Int32Array
from pagedkv.errors import PagedKVError
from pagedkv.sim.timing.attention_group import Contexts
from pagedkv.sim.timing.models import Model
from pagedkv.sim.timing.roofline import Roofline
from pagedkv.sim.timing.step_time import Chunk, Durations, StepTimeModel
from pagedkv.spec import KVCacheSpec, LayerSpec

if TYPE_CHECKING:
    import torch

    from pagedkv.storage import KVStorage

BlockTables = Callable[[Contexts], Int32Array]
"""[num_seqs, max_blocks] int32 block ids of the sequences with these contexts."""


class MeasuredStepTime(StepTimeModel):
    """Runs ``paged_attention`` over the blocks of a pool at every step, once for each kind of layer.

    ::

        step = base without attention + sum over kinds (layers of the kind x seconds of one call)

    A kind is a layer shape with its window. The pool holds one layer of each kind and as many blocks as the
    engine's; which blocks a step reads, ``block_tables`` says, by default blocks in random order, as in a
    pool long in use. Two replays give two times: the machine is not the same twice.

    >>> from pagedkv.sim.timing.gpus import load_gpu
    >>> from pagedkv.sim.timing.models import load_model
    >>> model = load_model("tinyllama-1.1b")
    >>> base = Roofline.from_gpu(model, load_gpu("h100"))
    >>> measured = MeasuredStepTime(base, model, num_blocks=64)
    >>> measured.decode_s(np.array([100, 17])) > base.fixed_s(2, 2)
    True
    """

    def __init__(
        self,
        base: Roofline,
        model: Model,
        num_blocks: int,
        *,
        device: str = "cpu",
        backend: str = "auto",
        repeats: int = 1,
        block_tables: BlockTables | None = None,
    ) -> None:
        """Allocate the pool; imports torch.

        Args:
            base: of the same model, for weights, compute and prefill.
            num_blocks: of the pool, ``model.spec.block_size`` tokens each.
            device: cpu or cuda.
            backend: as in ``paged_attention``.
            repeats: calls per kind and step, of which the median counts.
            block_tables: the tables of a step, such as a manager's; ids from 1 to ``num_blocks``.

        Raises:
            PagedKVError: no such device, MLA layers (whose attention is another operation), or no memory.
        """
        from pagedkv.attention.bench.conditions import check_device

        check_device(device)
        if num_blocks < 1 or repeats < 1:
            raise PagedKVError(f"need at least 1 block and 1 repeat, got {num_blocks} and {repeats}")
        if any(layer.is_latent for layer in model.spec.layers):
            raise PagedKVError(f"{model.name} has latent (MLA) layers, which are not measured")
        self.base, self.block_size = base, model.spec.block_size
        self._backend, self._repeats, self._device = backend, repeats, device
        kinds = list(dict.fromkeys(model.spec.layers))
        counts = [model.spec.layers.count(kind) for kind in kinds]
        self._kinds = [
            _Kind(kind, count, model, num_blocks, device) for kind, count in zip(kinds, counts, strict=True)
        ]
        self._tables = block_tables or _scattered(num_blocks, self.block_size)

    @property
    def attention_time(self) -> str:
        """Measured."""
        return "measured"

    def decode_kv_s(self, contexts: Contexts) -> float:
        """Seconds of attention in all layers, measured now."""
        if not len(contexts):
            return 0.0
        tables = self._tables(contexts)
        return sum(kind.num_layers * self._seconds(kind, contexts, tables) for kind in self._kinds)

    def durations(self, contexts: Contexts, chunks: Sequence[Chunk] = (), num_ending: int = 0) -> Durations:
        """Seconds of the k-th step, each measured once."""
        num_tokens = len(contexts) + sum(n for _, n in chunks)
        num_samples = len(contexts) + num_ending
        known: dict[int, float] = {}

        def seconds(k: int) -> float:
            if k not in known:
                kv_s = self.decode_kv_s(contexts + k)
                known[k] = self.base.step_s(num_tokens, num_samples, kv_s, chunks, k)
            return known[k]

        return seconds

    def steps_of_same_growth(self, contexts: Contexts) -> int | None:
        """1 while sequences decode: every step is measured."""
        return 1 if len(contexts) else None

    def kv_bytes(self, contexts: Contexts) -> int:
        """As in ``base``."""
        return self.base.kv_bytes(contexts)

    def weight_bytes(self, num_tokens: int) -> float:
        """As in ``base``."""
        return self.base.weight_bytes(num_tokens)

    def _seconds(self, kind: _Kind, contexts: Contexts, tables: Int32Array) -> float:
        import torch

        call = kind.call(contexts, tables, self._backend, self._device)
        if not kind.is_warm:
            call()  # compiles, and pages memory in
            kind.is_warm = True
        spent = []
        for _ in range(self._repeats):
            if self._device.startswith("cuda"):
                torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            call()
            if self._device.startswith("cuda"):
                torch.cuda.synchronize(self._device)
            spent.append(time.perf_counter() - start)
        return float(np.median(spent))


@dataclass
class _Kind:
    """Layers of one shape: a pool of one of them, and queries."""

    layer: LayerSpec
    num_layers: int
    model: Model
    num_blocks: int
    device: str
    is_warm: bool = False
    storage: KVStorage = field(init=False)

    def __post_init__(self) -> None:
        """Allocate and fill the pool: memory that nobody wrote is not really there."""
        from pagedkv.storage import KVStorage

        spec = self.model.spec
        one = KVCacheSpec((self.layer,), spec.dtype, spec.block_size)
        try:
            self.storage = KVStorage(one, self.num_blocks, device=self.device)
            for buffer in self.storage.buffers:
                buffer.fill_(1)
        except RuntimeError as error:  # what torch raises when there is no memory
            needed = one.bytes_per_block * (self.num_blocks + 1) / 2**30
            raise PagedKVError(f"no pool of {needed:.1f} GiB: {str(error).splitlines()[0]}") from None

    def call(
        self, contexts: Contexts, tables: Int32Array, backend: str, device: str
    ) -> Callable[[], torch.Tensor]:
        """One layer's attention over these blocks; the tensors of the step are made outside the time."""
        import torch

        from pagedkv.attention import paged_attention

        kv = self.storage.layer(0)
        float_dtype = kv.k.dtype if kv.k.dtype in (torch.float32, torch.float16) else torch.bfloat16
        shape = (len(contexts), self.model.num_q_heads, self.layer.head_dim)
        q = torch.ones(shape, dtype=float_dtype, device=device)
        lens = torch.from_numpy(contexts.astype(np.int32)).to(device)
        ids = torch.from_numpy(tables).to(device)

        def run() -> torch.Tensor:
            return paged_attention(
                q,
                kv.k,
                kv.v,
                ids,
                lens,
                k_scale=kv.k_scale,
                v_scale=kv.v_scale,
                window=kv.window,
                backend=backend,
            )

        return run


def _scattered(num_blocks: int, block_size: int) -> BlockTables:
    """Tables over a pool in random order; sequences that need more blocks than it has share some."""
    order = (1 + np.random.default_rng(0).permutation(num_blocks)).astype(np.int32)

    def tables(contexts: Contexts) -> Int32Array:
        counts = div_ceil(contexts, block_size)
        most = int(counts.max())
        if most > num_blocks:
            raise PagedKVError(
                f"a sequence of {int(contexts.max())} tokens needs {most} blocks of {num_blocks}"
            )
        starts = np.cumsum(counts) - counts
        at = (starts[:, None] + np.arange(most)[None, :]) % num_blocks
        found: Int32Array = np.ascontiguousarray(order[at])
        return found

    return tables
