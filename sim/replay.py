"""One replay: a trace, a model on a GPU, and an engine over the real manager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pagedkv.errors import PagedKVError
from pagedkv.manager import KVCacheManager
from pagedkv.sim.engine import Engine, EngineConfig
from pagedkv.sim.gpus import GPU
from pagedkv.sim.metrics import Summary, summarize
from pagedkv.sim.models import Model
from pagedkv.sim.records import Records
from pagedkv.sim.step_time import Efficiency, StepTimeModel
from pagedkv.sim.trace import Trace


@dataclass(frozen=True)
class ReplaySetup:
    """What serves the trace. ``num_blocks`` blocks of ``model.spec.block_size`` tokens hold the cache."""

    model: Model
    gpu: GPU
    num_blocks: int
    engine: EngineConfig = field(default_factory=EngineConfig)
    efficiency: Efficiency = field(default_factory=Efficiency)
    weight_bits: float = 16
    watermark: float = 0.01
    prefix_caching: bool = True
    policy: str = "lru"

    @property
    def step_time(self) -> StepTimeModel:
        """The model of a step's duration."""
        return StepTimeModel.from_gpu(self.model, self.gpu, self.efficiency, self.weight_bits)


@dataclass(frozen=True)
class ReplayResult:
    """A finished replay: figures, and everything that was written down."""

    trace: Trace
    setup: ReplaySetup
    summary: Summary
    records: Records


def blocks_in_memory(model: Model, memory_bytes: float, utilization: float, weight_bits: float) -> int:
    """Blocks that fit beside the weights in a share of the memory; activations are not reserved for.

    >>> from pagedkv.sim.models import load_model
    >>> blocks_in_memory(load_model("llama-3.1-8b"), 80 * 2**30, 0.9, 16)
    29205
    """
    weights = model.params_total * weight_bits / 8
    left = int(memory_bytes * utilization - weights)
    if left < 2 * model.spec.bytes_per_block:
        raise PagedKVError(
            f"{model.name} does not fit: {weights / 2**30:.1f} GiB of weights leave "
            f"{left / 2**30:.1f} GiB of {memory_bytes * utilization / 2**30:.1f} GiB for the cache; "
            "use more memory (--gpu, --gpu-memory) or fewer weight bits (--weight-bits)"
        )
    return model.spec.num_blocks_for(left)


def run_replay(
    trace: Trace, setup: ReplaySetup, on_progress: Callable[[int], None] | None = None
) -> ReplayResult:
    """Serve the trace; ``on_progress`` hears how many requests have finished.

    Raises ``NeverFits`` before anything runs if one request exceeds the pool. The result depends on
    the arguments alone: same arguments, same numbers, in any process.

    >>> from pagedkv.sim.gpus import load_gpu
    >>> from pagedkv.sim.models import load_model
    >>> from pagedkv.sim.workload import chat_long
    >>> setup = ReplaySetup(load_model("llama-3.1-8b"), load_gpu("b200"), num_blocks=20_000)
    >>> result = run_replay(chat_long(50), setup)
    >>> result.summary.requests, result.summary.preemptions
    (50, 0)
    """
    longest = int((trace.input_len + trace.output_len).max())
    manager = KVCacheManager(
        setup.num_blocks,
        setup.model.spec.block_size,
        max_seqs=setup.engine.max_batch,
        max_seq_len=longest,
        prefix_caching=setup.prefix_caching,
        watermark=setup.watermark,
        policy=setup.policy,
    )
    records = Engine(trace, manager, setup.step_time, setup.engine, on_progress).run()
    manager.check_invariants()
    return ReplayResult(trace, setup, summarize(trace, records, manager.stats()), records)
