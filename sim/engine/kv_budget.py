"""A budget of context per sequence: who decodes beyond it drops blocks from the middle of its context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.arithmetic import div_ceil
from pagedkv.block_tables import Int64Array
from pagedkv.errors import PagedKVError, require_count
from pagedkv.manager import KVCacheManager
from pagedkv.token_eviction import BlockMass, FloatArray, lightest_blocks, outside_window

RULES: Final = ("streaming", "heavy-hitters")
"""Which blocks go: all but the first and the newest; or the lightest between the first and the newer half."""

_SINKS = 1


@dataclass(frozen=True)
class KVBudget:
    """At most ``tokens`` of context, in whole blocks, for each sequence that decodes.

    A prompt is computed whole, then cut to the budget. There are no attention scores here: for
    "heavy-hitters" each block has a random weight for life. Which blocks go changes neither the bytes nor the
    time of a step, only what of the dropped others can still hit.

    Raises:
        PagedKVError: no tokens, or a rule that is none of ``RULES``.
    """

    tokens: int
    rule: str = RULES[0]
    seed: int = 0

    def __post_init__(self) -> None:
        """Check all."""
        require_count("tokens", self.tokens, 1)
        require_count("seed", self.seed, 0)
        if self.rule not in RULES:
            raise PagedKVError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")


class BudgetKeeper:
    """Drops blocks of a manager's sequences, so that each has room for its next step within the budget.

    >>> manager = KVCacheManager(16, 4, max_seqs=1)
    >>> _ = manager.open(0, range(30)); manager.commit(0, range(30))
    >>> keeper = BudgetKeeper(KVBudget(16), manager, tokens_per_step=1)
    >>> keeper.max_tokens, keeper.excess(np.array([30, 15])).tolist()
    (16, [4, 0])
    >>> keeper.drop(0, 4), manager.tables.num_tokens(0)
    (16, 14)
    """

    def __init__(self, budget: KVBudget, manager: KVCacheManager, tokens_per_step: int) -> None:
        """Keep to ``budget``; ``PagedKVError`` if it has no room for a sink, the newest tokens and a step."""
        self._budget, self._manager, self._tokens_per_step = budget, manager, tokens_per_step
        size = manager.block_size
        self._num_blocks = budget.tokens // size
        self._recent = 1 + div_ceil(tokens_per_step, size)
        if self._num_blocks < _SINKS + self._recent:
            raise PagedKVError(
                f"a budget of {budget.tokens} tokens is too small: it must hold {_SINKS + self._recent} "
                f"blocks of {size} tokens, for the first block, the newest one and the next step"
            )
        self.max_tokens = self._num_blocks * size
        self.num_dropped = 0
        """Blocks that were dropped."""
        self._weights: dict[int, BlockMass] = {}

    def excess(self, kept: Int64Array) -> Int64Array:
        """Blocks to drop of sequences with ``kept`` [n] tokens before their next step: int64 [n]."""
        need = div_ceil(kept + self._tokens_per_step, self._manager.block_size)
        beyond: Int64Array = np.maximum(need - self._num_blocks, 0)
        return beyond

    def drop(self, request: int, count: int) -> int:
        """Drop blocks of a request, all of whose tokens are committed; returns how many tokens those hold."""
        num_blocks = self._num_blocks + count
        if self._budget.rule == RULES[0]:
            columns = outside_window(num_blocks, self._num_blocks, sinks=_SINKS)
        else:
            columns = self._lightest(request, num_blocks)
        self._manager.context.drop_blocks(request, columns)
        self.num_dropped += count
        return count * self._manager.block_size

    def forget(self, request: int) -> None:
        """Drop what is known of a request that gives up its blocks."""
        self._weights.pop(request, None)

    def _lightest(self, request: int, num_blocks: int) -> Int64Array:
        known = self._weights.setdefault(request, BlockMass(window=1))
        weights = known.total
        dropped = self._manager.tables.num_dropped(request)
        new = block_weights(self._budget.seed, request, dropped + num_blocks)[dropped + len(weights) :]
        known.add(np.append(weights, new))
        columns = lightest_blocks(
            known.total, self._num_blocks, sinks=_SINKS, recent=max(self._recent, self._num_blocks // 2)
        )
        known.drop(columns)
        return columns


def block_weights(seed: int, request: int, num_blocks: int) -> FloatArray:
    """Weights of the blocks of a request's whole context, from the first on: [num_blocks]."""
    return np.random.default_rng([seed, request]).random(num_blocks)
