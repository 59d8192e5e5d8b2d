"""Eviction policies beside each other at one capacity, and Belady's policy as a bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedkv import __version__
from pagedkv.policies import POLICIES
from pagedkv.sim.console import show_table
from pagedkv.sim.hits import Hits, replay_hits
from pagedkv.sim.output.report import HIT_RATE_FORMULAS
from pagedkv.sim.trace import Trace

BOUND = "belady"
POLICIES_SCHEMA = "pagedkv.policies/1"
BOUND_FORMULA = (
    "hit blocks / hit blocks of belady, which knows the future: no policy that, like the manager, caches "
    "everything it computes hits more"
)


def hits_by_policy(
    trace: Trace,
    policies: Sequence[str],
    num_blocks: int,
    block_size: int,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, Hits]:
    """A hits-only replay for each policy, in the order given. Cost: that many times ``replay_hits``.

    >>> from pagedkv.sim.workload import chat_long
    >>> found = hits_by_policy(chat_long(60), ("lru", "belady"), num_blocks=1500, block_size=64)
    >>> found["lru"].stats.hit_blocks <= found["belady"].stats.hit_blocks
    True
    """
    done, found = 0, {}
    for policy in policies:
        base = done

        def update(requests: int, base: int = base) -> None:
            if on_progress is not None:
                on_progress(base + requests)

        found[policy] = replay_hits(trace, num_blocks, block_size, update, policy=policy)
        done += len(trace)
    return found


def policies_to_run(stated: Sequence[str] | None, bound: bool) -> tuple[str, ...]:
    """The policies that were stated, or all; Belady's last if it is the bound.

    >>> policies_to_run(["arc"], bound=True)
    ('arc', 'belady')
    """
    names = [name for name in stated or POLICIES if name != BOUND or not bound]
    return (*dict.fromkeys(names), BOUND) if bound else tuple(dict.fromkeys(names))


def policies_document(trace_name: str, found: Mapping[str, Hits], given: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of every policy; ``of_bound`` is None without Belady's policy."""
    first = next(iter(found.values()))
    stats = first.stats
    return {
        "schema": POLICIES_SCHEMA,
        "pagedkv_version": __version__,
        "inputs": dict(given),
        "trace": trace_name,
        "requests": first.requests,
        "block_size": stats.block_size,
        "num_blocks": stats.num_blocks,
        "formulas": HIT_RATE_FORMULAS | {"of_bound": BOUND_FORMULA},
        "input_tokens": first.input_tokens,
        "queried_blocks": stats.queried_blocks,
        "rows": [
            {
                "policy": policy,
                "hit_blocks": hits.stats.hit_blocks,
                "hit_tokens": hits.stats.hit_tokens,
                "block_hit_rate": hits.stats.block_hit_rate,
                "token_hit_rate": hits.token_hit_rate,
                "evicted_blocks": hits.stats.evicted_blocks,
                "of_bound": _of_bound(hits, found.get(BOUND)),
            }
            for policy, hits in found.items()
        ],
    }


def show_policies(document: Mapping[str, Any], bounded: bool) -> None:
    """Print a row per policy."""
    pool = f"{document['num_blocks']:,} blocks" if bounded else "unbounded"
    show_table(
        f"{document['trace']}: {document['requests']:,} requests, blocks of {document['block_size']} tokens, "
        f"pool {pool}",
        ("policy, hits counted by the manager", "hit blocks", "blocks", "tokens", "of belady", "evicted"),
        [
            (
                row["policy"],
                f"{row['hit_blocks']:,}",
                f"{row['block_hit_rate']:.2%}",
                f"{row['token_hit_rate']:.2%}",
                "-" if row["of_bound"] is None else f"{row['of_bound']:.1%}",
                f"{row['evicted_blocks']:,}",
            )
            for row in document["rows"]
        ],
        [
            "blocks = hit / full prompt blocks, tokens = hit / all prompt tokens",
            f"of belady = {BOUND_FORMULA}",
        ],
    )


def _of_bound(hits: Hits, bound: Hits | None) -> float | None:
    if bound is None or not bound.stats.hit_blocks:
        return None
    return hits.stats.hit_blocks / bound.stats.hit_blocks
