"""Prefix hits alone: every request in file order, no time, no decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedkv.errors import NeverFits
from pagedkv.manager import KVCacheManager
from pagedkv.policies import make_policy
from pagedkv.policies.belady import Belady
from pagedkv.sim.books import require_books_fit
from pagedkv.sim.future import next_uses
from pagedkv.sim.trace import Trace
from pagedkv.stats import ManagerStats


@dataclass(frozen=True)
class Hits:
    """Counts of a hits-only replay, in the conventions of `replay_hits`."""

    requests: int
    input_tokens: int
    stats: ManagerStats

    @property
    def token_hit_rate(self) -> float:
        """Hit tokens over all prompt tokens, those of partial last blocks included."""
        return self.stats.hit_tokens / self.input_tokens


def replay_hits(
    trace: Trace,
    num_blocks: int,
    block_size: int,
    on_progress: Callable[[int], None] | None = None,
    *,
    policy: str = "lru",
) -> Hits:
    """Open each prompt, commit it, close it, one after the other; returns what the manager counted.

    Only the full blocks of a prompt take part, since nothing else can be cached; all of them may be
    hits, the last token included. ``num_blocks=0`` means a pool that never evicts. Blocks that a
    request hits are not evicted for it; ``policy`` says which leaf goes first, and knows the future if it
    is "belady".

    Raises ``NeverFits`` if the longest prompt exceeds the pool, ``PagedKVError`` if this machine cannot hold
    the pool's bookkeeping. Cost: O(tokens), about 0.3 ms per
    request of 750 blocks on one core.

    >>> from pagedkv.sim.workload import chat_long
    >>> hits = replay_hits(chat_long(200), num_blocks=0, block_size=512)
    >>> hits.requests, hits.stats.evicted_blocks
    (200, 0)
    """
    full = trace.input_len // block_size
    longest = int(full.max())
    if num_blocks and longest > num_blocks:
        worst = int(full.argmax()) + 1
        raise NeverFits(
            f"request {worst} of {trace.name} has {longest} full blocks of {block_size} tokens, "
            f"the pool only {num_blocks}: raise --num-blocks"
        )
    size = num_blocks or max(1, int(full.sum()))
    require_books_fit(size, block_size)
    order = make_policy(policy)
    future = next_uses(trace, block_size) if isinstance(order, Belady) else []
    manager = KVCacheManager(
        size,
        block_size,
        max_seqs=1,
        max_seq_len=max(1, longest * block_size),
        policy=order,
    )
    for request, blocks in enumerate(full.tolist()):
        prompt = trace.tokens(request)[: blocks * block_size]
        opened = manager.open(request, prompt, max_cached_tokens=len(prompt))
        assert opened is not None  # the pool has no other user
        manager.commit(request, prompt[opened.num_cached_tokens :])
        if isinstance(order, Belady):
            order.announce(manager.tables.block_ids(request), future[request])
        manager.close(request)
        if on_progress is not None:
            on_progress(request + 1)
    return Hits(len(trace), int(trace.input_len.sum()), manager.stats())
