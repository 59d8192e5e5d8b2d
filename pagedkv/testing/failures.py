"""Failures: the k-th call of named functions raises."""

import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any

_ROW, _ROWS = "pagedkv.block_tables:BlockTables.row", "pagedkv.block_tables:BlockTables.rows"
_TOKENS = "pagedkv.manager:as_token_array"
_MATCH = "pagedkv.prefix_index:PrefixIndex.match"
_TAKE = ("pagedkv.block_cache:BlockCache.acquire",)
_GROW = (
    _ROWS,
    "pagedkv.sequences:plan_growth",
    "pagedkv.sequences:shared_tails",
    "pagedkv.prefix_index:PrefixIndex.is_leaf",
    *_TAKE,
)
_ADD = (
    "pagedkv.block_tables:BlockTables.add",
    "pagedkv.sequences:Sequences.set_extra",
    "pagedkv.namespace:ExtraKeys.exchange",
    "pagedkv.namespace:ExtraKeys.take",
)
_GIVE_UP = ("pagedkv.block_cache:BlockCache.cut_row",)

FAILURE_POINTS: dict[str, tuple[str, ...]] = {
    "lookup": ("pagedkv.content:SequenceExtra.build", _MATCH),
    "open": (
        _TOKENS,
        "pagedkv.content:SequenceExtra.build",
        _MATCH,
        "pagedkv.prefix_index:PrefixIndex.best_child",
        *_ADD,
        *_TAKE,
    ),
    "step": _GROW,
    "append": _GROW,
    "commit": (
        _ROW,
        _TOKENS,
        "pagedkv.content:SequenceExtra.extended",
        "pagedkv.copies:PendingCopies.require_done",
    ),
    "commit_step": (_ROWS, _TOKENS, "pagedkv.copies:PendingCopies.require_done"),
    "fork": ("pagedkv.block_tables:BlockTables.held", *_ADD, *_TAKE),
    "truncate": ("pagedkv.block_cache:BlockCache.is_shared", *_GIVE_UP),
    "close": (_ROW, *_GIVE_UP),
    "retention.pin": (_ROW, "pagedkv.block_pool:BlockPool.acquire"),
    "retention.set_priority": (_ROW,),
}
"""For each call of a manager, functions that may fail there, whichever call of them, and all is as it was."""


class FailureInjector:
    """Makes one call of the functions that it is given raise; counts the calls otherwise.

    A function is named "module:name" or "module:Class.name", like "pagedkv.block_cache:BlockCache.acquire"
    (see ``FAILURE_POINTS``), or "numpy:concatenate" for an allocation: of what is not pagedkv's, only
    calls by pagedkv count. It raises once, so that what takes a change back may call the same function.

    >>> from pagedkv import KVCacheManager
    >>> manager = KVCacheManager(4, block_size=2)
    >>> injector = FailureInjector("pagedkv.block_cache:BlockCache.acquire")
    >>> with injector.failing(at=1):
    ...     manager.open("a", [1, 2, 3])
    Traceback (most recent call last):
    MemoryError: injected into BlockCache.acquire
    >>> manager.counts
    BlockCounts(free=4, cached=0, active=0)
    >>> with injector.counting():
    ...     manager.open("a", [1, 2, 3])
    Opened(num_tokens=3, num_cached_tokens=0)
    >>> injector.calls
    1
    """

    def __init__(
        self,
        *points: str,
        error: type[BaseException] = MemoryError,
        only_when: Callable[[FrameType], bool] | None = None,
    ) -> None:
        """Watch these functions; ``only_when`` says of the calling frame whether the call counts."""
        self.points = points
        self.calls = 0
        """Calls that counted, in the last block."""
        self.has_failed = False
        """Whether the last block got the error."""
        self._error = error
        self._only_when = only_when
        self._fail_at = 0

    @contextmanager
    def failing(self, at: int = 1) -> Iterator["FailureInjector"]:
        """Within the block, let the ``at``-th call fail (1: the first). Not to be nested with itself."""
        self.calls, self.has_failed, self._fail_at = 0, False, at
        with ExitStack() as stack:
            for point in self.points:
                stack.callback(self._replace(point))
            yield self

    def counting(self) -> Any:
        """A block in which nothing fails, to learn how many ``calls`` an operation makes."""
        return self.failing(at=0)

    def _replace(self, point: str) -> Callable[[], None]:
        """Put a function that counts in the place of one; returns what undoes it."""
        module, _, qualname = point.partition(":")
        parent, _, name = qualname.rpartition(".")
        owner = pkgutil.resolve_name(f"{module}:{parent}" if parent else module)
        original = getattr(owner, name)
        foreign = not module.startswith("pagedkv")

        def replaced(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if not foreign or _is_library(frame):
                self._count(frame, qualname)
            return original(*args, **kwargs)

        inherited = name not in vars(owner)
        before = vars(owner).get(name)
        bound = not isinstance(owner, ModuleType) and isinstance(before, (classmethod, staticmethod))
        setattr(owner, name, staticmethod(replaced) if bound else replaced)
        return lambda: delattr(owner, name) if inherited else setattr(owner, name, before)

    def _count(self, frame: FrameType, qualname: str) -> None:
        if self._only_when is not None and not self._only_when(frame):
            return
        self.calls += 1
        if self.calls == self._fail_at:
            self.has_failed = True
            raise self._error(f"injected into {qualname}")


def _is_library(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("pagedkv") and not name.startswith("pagedkv.testing")
