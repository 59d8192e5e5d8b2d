"""Prefix hits of a trace that is larger than memory: requests pass by one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pagedkv.errors import NeverFits, PagedKVError
from pagedkv.manager import KVCacheManager
from pagedkv.policies import make_policy
from pagedkv.sim.books import require_books_fit
from pagedkv.sim.hits import Hits
from pagedkv.sim.readers.row import Row
from pagedkv.sim.readers.tokens import content_pairs, prompt_tokens

BELADY = "belady"


def stream_hits(
    rows: Iterable[Row],
    num_blocks: int,
    block_size: int,
    on_progress: Callable[[int], None] | None = None,
    *,
    name: str = "the stream",
    policy: str = "lru",
) -> Hits:
    """What `replay_hits` counts, from a stream: `open_trace`'s, for example.

    Memory: the pool and one request, however long the trace. ``num_blocks`` is at least 1, since a pool that
    never evicts grows with the trace, and ``policy`` knows no future. ``name`` appears in errors.

    Raises ``NeverFits`` at the first prompt that exceeds the pool, ``PagedKVError`` for an empty stream.
    Cost: O(tokens).

    >>> from pagedkv.sim.readers.writing import rows_of
    >>> from pagedkv.sim.workload import chat_long
    >>> hits = stream_hits(rows_of(chat_long(100)), num_blocks=3000, block_size=512)
    >>> hits.requests, hits.stats.evicted_blocks
    (100, 0)
    """
    if policy == BELADY:
        raise PagedKVError("policy belady knows the future, and a stream has none: read the trace whole")
    if num_blocks < 1:
        raise PagedKVError(f"a stream needs a pool of at least 1 block, got {num_blocks}")
    require_books_fit(num_blocks, block_size)
    manager = KVCacheManager(
        num_blocks, block_size, max_seqs=1, max_seq_len=num_blocks * block_size, policy=make_policy(policy)
    )
    requests = input_tokens = 0
    for row in rows:
        blocks = row.input_len // block_size
        if blocks > num_blocks:
            raise NeverFits(
                f"{row.place.path}, {row.place.unit} {row.place.line}: the prompt has {blocks} full blocks "
                f"of {block_size} tokens, the pool only {num_blocks}: raise --num-blocks"
            )
        prompt = prompt_tokens(content_pairs(row), row.block_size, requests, blocks * block_size)
        opened = manager.open(requests, prompt, max_cached_tokens=len(prompt))
        assert opened is not None  # the pool has no other user
        manager.commit(requests, prompt[opened.num_cached_tokens :])
        manager.close(requests)
        requests += 1
        input_tokens += row.input_len
        if on_progress is not None:
            on_progress(requests)
    if not requests:
        raise PagedKVError(f"{name} holds no requests")
    return Hits(requests, input_tokens, manager.stats())
