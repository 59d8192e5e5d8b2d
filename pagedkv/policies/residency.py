"""Residency: any policy, and how long content stays, waits and rests, by a clock that is passed in."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pagedkv.block_ids import resized
from pagedkv.block_tables import Int32Array
from pagedkv.histogram import HistogramRecorder, ResidencyHistograms
from pagedkv.policies import make_policy
from pagedkv.policies.policy import BlockView, EvictionPolicy


class Residency(EvictionPolicy):
    """Measures under another policy, which decides as if it were alone.

    ::

        stored        idle          held again       idle             evicted
          |------------|- reuse gap ----|--------------|- idle before ---|
          |------------------------ lifetime ----------------------------|

    Content counts as evicted when it had to go for something else, or for a quota; what is dropped for
    another reason counts nowhere. Held again is what an open found, or a commit that computed it once more.

    Cost: that of the policy, one reading of the clock per call, and O(blocks) as arrays; 16 bytes per block.

    >>> from pagedkv import KVCacheManager
    >>> now = 0.0
    >>> measured = Residency("lru", clock=lambda: now)
    >>> manager = KVCacheManager(2, block_size=2, policy=measured)
    >>> for now, tokens in ((0.0, [1, 2]), (3.0, [1, 2]), (8.0, [3, 4, 5, 6])):
    ...     opened = manager.open("a", tokens, max_cached_tokens=2)
    ...     manager.commit("a", tokens[opened.num_cached_tokens:]); manager.close("a")
    >>> found = measured.histograms()
    >>> found.reuse_gap.mean, found.idle_before_eviction.mean, found.lifetime.mean
    (3.0, 5.0, 8.0)
    """

    def __init__(self, policy: str | EvictionPolicy, clock: Callable[[], float]) -> None:
        """Measure a new ``policy``, or one by name; ``clock`` returns seconds and never goes back."""
        self._policy = make_policy(policy)
        self._clock = clock

    def bind(self, view: BlockView) -> None:
        """Start with nothing measured."""
        super().bind(view)
        self._policy.bind(view)
        self._stored: npt.NDArray[np.float64] = np.full(view.num_blocks + 1, np.nan)
        self._idle: npt.NDArray[np.float64] = np.full(view.num_blocks + 1, np.nan)  # since when; nan: held
        self._lifetime = HistogramRecorder()
        self._idle_before_eviction = HistogramRecorder()
        self._reuse_gap = HistogramRecorder()

    def histograms(self) -> ResidencyHistograms:
        """What was measured until now."""
        return ResidencyHistograms(
            self._lifetime.histogram(), self._idle_before_eviction.histogram(), self._reuse_gap.histogram()
        )

    def stored(self, ids: Int32Array) -> None:
        """Lives begin."""
        self._policy.stored(ids)
        if len(ids):
            self._stored[ids] = self._clock()

    def push(self, ids: Int32Array) -> None:
        """Blocks became idle."""
        self._policy.push(ids)
        if len(ids):
            self._idle[ids] = self._clock()

    def discard(self, ids: Int32Array) -> None:
        """Blocks are held; those that were idle are used again."""
        self._policy.discard(ids)
        since = self._idle[ids]
        since = since[~np.isnan(since)]
        if len(since):
            self._reuse_gap.add(self._clock() - since)
            self._idle[ids] = np.nan

    def hit(self, ids: Int32Array) -> None:
        """An open found these blocks and holds them now."""
        self._policy.hit(ids)

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Who goes next, as the policy says."""
        return self._policy.first(count, keep)

    def evict(self, ids: Int32Array) -> None:
        """Lives end."""
        self._policy.evict(ids)
        if len(ids):
            now = self._clock()
            self._lifetime.add(now - self._stored[ids])
            self._idle_before_eviction.add(now - self._idle[ids])
            self._idle[ids] = np.nan

    def forget(self, ids: Int32Array) -> None:
        """Content is lost in a way that is not measured."""
        self._policy.forget(ids)
        self._idle[ids] = np.nan

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Times go with the content."""
        self._policy.rename(old, new)
        self._stored[new] = self._stored[old]
        self._idle[new], self._idle[old] = self._idle[old], np.nan

    def resize(self, num_blocks: int) -> None:
        """Ids are ``1..num_blocks`` from now on; what was measured stays."""
        unheard_of = slice(self.num_blocks + 1, None)
        super().resize(num_blocks)
        self._policy.resize(num_blocks)
        self._stored = resized(self._stored, num_blocks)
        self._idle = resized(self._idle, num_blocks)
        self._stored[unheard_of] = self._idle[unheard_of] = np.nan

    def surplus(self) -> Int32Array | None:
        """Idle blocks that shall go although nobody needs the room, as the policy says."""
        return self._policy.surplus()

    def retain(self, ids: Int32Array, priority: int, ttl: float | None) -> None:
        """Blocks with content get a priority, if the policy knows any."""
        self._policy.retain(ids, priority, ttl)

    def make_room(self, count: int) -> None:
        """Make sure that ``count`` blocks can be pushed."""
        self._policy.make_room(count)
