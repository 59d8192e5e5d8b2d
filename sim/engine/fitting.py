"""Whether a pool can hold every request of a trace, said before anything runs."""

from __future__ import annotations

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.errors import NeverFits
from pagedkv.sim.engine.engine_config import EngineConfig
from pagedkv.sim.engine.hybrid_pool import HybridPool
from pagedkv.sim.engine.pool import Pool
from pagedkv.sim.requests import Requests


def require_all_fit(trace: Requests, pool: Pool, config: EngineConfig) -> None:
    """Refuse a trace with a request that this pool can never hold, before anything runs.

    The last token takes no slot; drafts do while a request decodes. Raises ``NeverFits``.
    """
    total = trace.input_len + trace.output_len - 1 + np.where(trace.output_len > 1, config.num_drafts, 0)
    worst = int(total.argmax())
    tokens = int(total[worst])
    blocks = div_ceil(tokens, pool.block_size)
    if isinstance(pool, HybridPool):
        blocks = pool.most_blocks(tokens, config.token_budget)
    if blocks > pool.num_blocks or tokens > pool.max_seq_len:
        raise NeverFits(
            f"request {worst + 1} of {trace.name} needs {blocks} blocks of {pool.block_size} tokens, "
            f"the pool has {pool.num_blocks} and a sequence at most {pool.max_seq_len} tokens: "
            "give it more blocks (--num-blocks, or --gpu-memory and a smaller --kv-dtype)"
        )
