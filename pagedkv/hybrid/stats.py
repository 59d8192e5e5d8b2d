"""Frozen snapshots of what the hybrid manager counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.block_pool import ACTIVE, CACHED
from pagedkv.histogram import ResidencyHistograms
from pagedkv.hybrid.group import CacheGroup


class GroupBlocks(NamedTuple):
    """Blocks that one group's open sequences hold (a shared one once), and blocks it has cached."""

    held: int
    cached: int


@dataclass(frozen=True)
class HybridStats:
    """State and counters of a hybrid manager at one moment.

    ``free_blocks + cached_blocks + active_blocks == num_blocks``, and the blocks of all ``groups`` add up to
    the cached and the active ones. ``num_nodes`` contents of one block are known, whichever groups have
    them. Counters since the manager was made: ``num_opened`` sequences asked for ``queried_tokens``
    prompt tokens, of which ``hit_tokens`` were cached, and ``queried_blocks`` full blocks of one group, of
    which ``hit_blocks`` were; ``fallen_blocks`` fell out of a window.
    ``fenced_blocks`` are held by fences and ``copies`` that wait alone, ``pinned_blocks`` have a pin.
    ``residency``, if the policy is a `Residency`: how long content stays, waits and rests.
    """

    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    fenced_blocks: int
    pinned_blocks: int
    groups: dict[str, GroupBlocks]
    num_nodes: int
    num_seqs: int
    num_opened: int
    queried_tokens: int
    hit_tokens: int
    queried_blocks: int
    hit_blocks: int
    fallen_blocks: int
    evicted_blocks: int
    copied_blocks: int
    residency: ResidencyHistograms | None = None

    @property
    def token_hit_rate(self) -> float:
        """``hit_tokens / queried_tokens``: share of all prompt tokens that need no prefill."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


def count_groups(
    groups: Sequence[CacheGroup], group_of: npt.NDArray[np.int16], state: npt.NDArray[np.uint8]
) -> dict[str, GroupBlocks]:
    """Blocks of each group by state; both arrays are [num_blocks + 1]. Cost: O(num_blocks)."""
    held = np.bincount(group_of[state == ACTIVE], minlength=len(groups)).tolist()
    cached = np.bincount(group_of[state == CACHED], minlength=len(groups)).tolist()
    return {group.name: GroupBlocks(h, c) for group, h, c in zip(groups, held, cached, strict=True)}
