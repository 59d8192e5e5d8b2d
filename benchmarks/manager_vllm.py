"""vLLM's own manager as a peer, called as its scheduler calls it (written against 0.32).

================  =======================================================================================
``open``          the request's block hashes (sha256, its default; made when a request is constructed, but
                  the construction itself is not timed), ``get_computed_blocks``, ``allocate_slots`` for the
                  whole prompt at once, and the list of block ids that goes to the worker
``commit``        nothing: ``allocate_slots`` has cached the full blocks already
``step``          per request ``append_output_token_ids`` and ``allocate_slots`` for one token, and the ids
                  of new blocks
``close``         ``free``
``fork``          ``open`` of a second request with the same tokens: it has no fork, and samples several
                  answers to one prompt as several requests
================  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from benchmarks.manager_peers import BLOCK_SIZE, Pool
from pagedkv.block_tables import Int32Array

_HASH = get_hash_fn_by_name("sha256")
_SAMPLING = SamplingParams(max_tokens=1_000_000)

init_none_hash(_HASH)


class VLLM:
    """One group of full attention, statistics and events off."""

    def __init__(self, pool: Pool) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=pool.num_blocks + 1,  # one of them is its null block
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            max_model_len=pool.max_seq_len,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=pool.prefix_caching,
        )
        self._hasher = get_request_block_hasher(BLOCK_SIZE, _HASH) if pool.prefix_caching else None

    def request(self, name: str, tokens: Int32Array) -> Any:
        request = Request(name, tokens.tolist(), _SAMPLING, None)
        request._block_hasher = self._hasher  # asked in open, where it is timed
        return request

    def open(self, request: Any) -> int | None:
        request.update_block_hashes()
        blocks, num_cached, _ = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_cached
        found = self.manager.allocate_slots(request, num_new, num_cached, blocks, full_sequence_must_fit=True)
        if found is None:
            return None
        self.manager.get_block_ids(request.request_id)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        return int(num_cached)

    def commit(self, request: Any) -> None:
        pass

    def step(self, requests: Sequence[Any], tokens: Int32Array) -> None:
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.append_output_token_ids(token)
            blocks = self.manager.allocate_slots(request, 1)
            if blocks is None:
                raise MemoryError("the pool is too small for this step")
            blocks.get_block_ids(allow_none=True)
            request.num_computed_tokens += 1

    def close(self, request: Any) -> None:
        self.manager.free(request)

    def fork(self, request: Any, child: Any) -> None:
        if self.open(child) is None:
            raise MemoryError("the pool is too small for the child")

    def available(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())
