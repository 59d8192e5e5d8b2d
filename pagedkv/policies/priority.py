"""Priorities from 0 to 100, with a time to live; least recently used among equals."""

from collections.abc import Callable
from heapq import heappop, heappush

from pagedkv.block_tables import Int32Array
from pagedkv.errors import PagedKVError
from pagedkv.policies.leaf_policy import LeafPolicy
from pagedkv.policies.policy import BlockView

DEFAULT_PRIORITY = 35


class Priority(LeafPolicy):
    """Gives up the lowest priority first; of equals, the least recently used.

    ``KVCacheManager.retain`` says the priority of a sequence's blocks, all others have ``default``. With a
    ``ttl`` it holds until ``clock`` (any function without arguments that never goes back) says so; time
    counts when somebody looks for a victim.

    A low block below a high one goes first, a low one above a high one has to wait for it.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(4, block_size=2, policy=Priority())
    >>> for name, start in (("system", 0), ("chat", 10)):
    ...     _ = manager.open(name, range(start, start + 4)); manager.commit(name, range(start, start + 4))
    >>> manager.retention.set_priority("system", 90)
    2
    >>> manager.close("system"); manager.close("chat")
    >>> manager.open("new", range(20, 24)); manager.open("again", range(5))
    Opened(num_tokens=4, num_cached_tokens=0)
    >>> manager.close("new"); manager.open("again", range(5))
    Opened(num_tokens=5, num_cached_tokens=4)
    """

    def __init__(self, *, default: int = DEFAULT_PRIORITY, clock: Callable[[], float] | None = None) -> None:
        """Give every block ``default`` that nobody says anything about."""
        self._default = _priority(default)
        self._clock = clock

    def bind(self, view: BlockView) -> None:
        """Give every block the default."""
        super().bind(view)
        self._priority = self.per_block(self._default)
        self._until: dict[int, float] = {}
        self._expiries: list[tuple[float, int]] = []  # void unless _until says the same

    def score(self, block: int) -> tuple[int, int]:
        """Priority, then the time of the last use."""
        key = self._key[block]
        return self._priority[block], self._pushed if key is None else key[0][1]

    def retain(self, ids: Int32Array, priority: int, ttl: float | None) -> None:
        """Set the priority of blocks with content, for ``ttl`` from now or for good. Cost: O(log n) each."""
        priority = _priority(priority)
        until = None if ttl is None else self._until_after(ttl)
        for block in ids.tolist():
            self._until.pop(block, None)
            if until is not None:
                self._expire_at(block, until)
            self._set(block, priority)
        self._drop_void_expiries()

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Lowest priority first, none of ``keep``."""
        if self._clock is not None:
            self._expire(self._clock())
        return super().first(count, keep)

    def forget(self, ids: Int32Array) -> None:
        """The next content has the default."""
        super().forget(ids)
        for block in ids.tolist():
            self._until.pop(block, None)

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Let the time of each go on."""
        super().rename(old, new)
        for block, name in zip(old.tolist(), new.tolist(), strict=True):
            until = self._until.pop(block, None)
            if until is not None:
                self._expire_at(name, until)
        self._drop_void_expiries()

    def _until_after(self, ttl: float) -> float:
        if self._clock is None:
            raise PagedKVError(f"a ttl of {ttl!r} needs a clock: Priority(clock=...)")
        if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not ttl > 0:
            raise PagedKVError(f"ttl must be a number above 0, got {ttl!r}")
        return self._clock() + ttl

    def _expire_at(self, block: int, until: float) -> None:
        self._until[block] = until
        heappush(self._expiries, (until, block))

    def _drop_void_expiries(self) -> None:
        if len(self._expiries) > 2 * len(self._until) + 64:  # mostly void
            self._expiries = sorted((time, block) for block, time in self._until.items())

    def _expire(self, now: float) -> None:
        """Give back the default to blocks whose time is over."""
        while self._expiries and self._expiries[0][0] <= now:
            until, block = heappop(self._expiries)
            if self._until.get(block) == until:
                del self._until[block]
                self._set(block, self._default)

    def _set(self, block: int, priority: int) -> None:
        self._priority[block] = priority
        if self._key[block] is not None:
            self.rescore(block)


def _priority(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
        raise PagedKVError(f"a priority is an integer from 0 to 100, got {value!r}")
    return value
