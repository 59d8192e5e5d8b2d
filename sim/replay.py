"""One replay: a trace, a model on a GPU, and an engine over the real manager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pagedkv.errors import PagedKVError
from pagedkv.manager import KVCacheManager
from pagedkv.sim.books import require_books_fit
from pagedkv.sim.engine.conservation import check_link, check_pool, check_tokens
from pagedkv.sim.engine.disaggregation import Disaggregated, TransferSettings
from pagedkv.sim.engine.engine import Engine, EngineConfig
from pagedkv.sim.engine.hybrid_pool import HybridPool, hybrid_block_bytes
from pagedkv.sim.engine.pool import Pool
from pagedkv.sim.output.features import Features, features_of
from pagedkv.sim.output.metrics import Summary, summarize
from pagedkv.sim.output.records import Records
from pagedkv.sim.requests import Requests
from pagedkv.sim.timing.gpus import GPU
from pagedkv.sim.timing.models import Model
from pagedkv.sim.timing.roofline import Roofline, efficiency_of
from pagedkv.sim.timing.step_time import Efficiency, StepTimeModel
from pagedkv.sim.timing.tensor_parallel import TensorParallel, TensorParallelStepTime
from pagedkv.spec import NUM_RESERVED_BLOCKS


@dataclass(frozen=True)
class ReplaySetup:
    """What serves the trace. ``num_blocks`` blocks of ``model.spec.block_size`` tokens hold the cache.

    With ``tensor_parallel``, ``model`` is what one GPU holds (`timing.tensor_parallel.shard`), and
    everything else is of one GPU, too. With ``transfer``, prefill and decode have such a device each.
    ``hybrid`` gives back what fell out of sliding windows.
    """

    model: Model
    gpu: GPU
    num_blocks: int
    engine: EngineConfig = field(default_factory=EngineConfig)
    efficiency: Efficiency | None = None
    """None: what is known of the GPU, see ``rates``."""
    weight_bits: float = 16
    watermark: float = 0.01
    prefix_caching: bool = True
    policy: str = "lru"
    step_model: StepTimeModel | None = None
    """None: a roofline of the GPU and the rates."""
    tensor_parallel: TensorParallel | None = None
    transfer: TransferSettings | None = None
    hybrid: bool = False

    @property
    def rates(self) -> Efficiency:
        """The efficiency that was stated, or what is known of the GPU."""
        return self.efficiency or efficiency_of(self.gpu, self.model.spec)

    @property
    def step_time(self) -> StepTimeModel:
        """The model of a step's duration, communication included."""
        base = self.step_model or Roofline.from_gpu(self.model, self.gpu, self.rates, self.weight_bits)
        if self.tensor_parallel is None:
            return base
        return TensorParallelStepTime(base, self.model, self.tensor_parallel)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: in all layers, or in one group of them if the pool is hybrid."""
        return hybrid_block_bytes(self.model.spec) if self.hybrid else self.model.spec.bytes_per_block

    def pool(self, trace: Requests) -> Pool:
        """An empty pool that can hold each request of the trace, if any of this size can.

        Raises ``PagedKVError`` if this machine cannot hold the pool's bookkeeping.
        """
        require_books_fit(self.num_blocks, self.model.spec.block_size)
        longest = int((trace.input_len + trace.output_len).max()) + self.engine.num_drafts
        if self.hybrid:
            return HybridPool(
                self.model.spec,
                self.num_blocks,
                max_seqs=self.engine.max_batch,
                max_seq_len=longest,
                watermark=self.watermark,
                policy=self.policy if self.prefix_caching else None,
            )
        return KVCacheManager(
            self.num_blocks,
            self.model.spec.block_size,
            max_seqs=self.engine.max_batch,
            max_seq_len=longest,
            watermark=self.watermark,
            policy=self.policy if self.prefix_caching else None,
        )


@dataclass(frozen=True)
class ReplayResult:
    """A finished replay: figures, and everything that was written down."""

    trace: Requests
    setup: ReplaySetup
    summary: Summary
    records: Records
    features: Features = field(default_factory=dict)
    """What was on beside the basic loop, and what it did."""


def blocks_in_memory(
    model: Model, memory_bytes: float, utilization: float, weight_bits: float, *, hybrid: bool = False
) -> int:
    """Blocks that fit beside the weights in a share of the memory; activations are not reserved for.

    >>> from pagedkv.sim.timing.models import load_model
    >>> blocks_in_memory(load_model("llama-3.1-8b"), 80 * 2**30, 0.9, 16)
    29205
    """
    weights = model.params_total * weight_bits / 8
    left = int(memory_bytes * utilization - weights)
    block = hybrid_block_bytes(model.spec) if hybrid else model.spec.bytes_per_block
    if left < 2 * block:
        raise PagedKVError(
            f"{model.name} does not fit: weights of {weights / 2**30:,.1f} GiB and 2 blocks of "
            f"{block / 2**30:,.3f} GiB are more than {memory_bytes * utilization / 2**30:,.1f} GiB; "
            "use more memory (--gpu, --gpu-memory), fewer weight bits (--weight-bits) or smaller blocks"
        )
    return left // block - NUM_RESERVED_BLOCKS


def run_replay(
    trace: Requests, setup: ReplaySetup, on_progress: Callable[[int], None] | None = None
) -> ReplayResult:
    """Serve the trace; ``on_progress`` hears how many requests have finished.

    Raises ``NeverFits`` before anything runs if one request exceeds the pool. The result depends on
    the arguments alone: same arguments, same numbers, in any process.

    Cost: linear in the requests. Memory: the pool's bookkeeping, the prompts that the trace holds, and some
    800 bytes a request for its numbers and for what is written down of its steps.

    >>> from pagedkv.sim.timing.gpus import load_gpu
    >>> from pagedkv.sim.timing.models import load_model
    >>> from pagedkv.sim.workload import chat_long
    >>> setup = ReplaySetup(load_model("llama-3.1-8b"), load_gpu("b200"), num_blocks=20_000)
    >>> result = run_replay(chat_long(50), setup)
    >>> result.summary.requests, result.summary.preemptions
    (50, 0)
    """
    if setup.transfer is not None:
        return _run_apart(trace, setup, setup.transfer, on_progress)
    engine = Engine(trace, setup.pool(trace), setup.step_time, setup.engine, on_progress)
    records = engine.run()
    check_pool(engine)
    check_tokens(trace, records)
    summary = summarize(trace, records, engine.manager.stats())
    return ReplayResult(trace, setup, summary, records, features_of(trace, setup, engine, None))


def _run_apart(
    trace: Requests, setup: ReplaySetup, transfer: TransferSettings, on_progress: Callable[[int], None] | None
) -> ReplayResult:
    """Serve the trace with a device for prefills and one for decodes."""
    pools = setup.pool(trace), setup.pool(trace)
    apart = Disaggregated(trace, pools, setup.step_time, setup.engine, transfer, on_progress)
    records = apart.run()
    check_tokens(trace, records)
    for engine in (apart.prefill, apart.decode):
        check_pool(engine)
    check_link(apart.decode.link, apart.decode.num_fetched_blocks * transfer.bytes_per_block)
    summary = summarize(trace, records, apart.prefill.manager.stats())
    return ReplayResult(trace, setup, summary, records, features_of(trace, setup, apart.decode, apart))
