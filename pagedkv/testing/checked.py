"""A manager with the slow model beside it: the same calls, compared after each."""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from pagedkv.copies import BlockCopies
from pagedkv.errors import PagedKVError
from pagedkv.events import BlocksRemoved, BlocksStored, Event
from pagedkv.manager import KVCacheManager
from pagedkv.namespace import Media, Namespace
from pagedkv.opened import Lookup, Opened
from pagedkv.policies import POLICIES
from pagedkv.reference_blocks import Content, ModelEvent, Path
from pagedkv.reference_dropping import drop_blocks
from pagedkv.reference_manager import ReferenceManager
from pagedkv.reference_policies import ReferencePolicy
from pagedkv.testing.shadows import ShadowIndex

MakeModel = Callable[[int, int], ReferencePolicy]
Around = Callable[[str], AbstractContextManager[Any]]


def manager_state(manager: KVCacheManager) -> dict[str, object]:
    """What ``ReferenceManager.state`` must equal."""
    stats = manager.stats()
    return {
        "counts": (stats.free_blocks, stats.cached_blocks, stats.active_blocks),
        "sequences": {
            i: (manager.tables.num_tokens(i), manager.tables.num_committed(i)) for i in manager.tables.seq_ids
        },
        "indexed": stats.indexed_blocks,
        "used_slots": stats.used_slots,
        "pinned": stats.pinned_blocks,
        "fenced": stats.fenced_blocks,
        "counters": {
            "evicted": stats.evicted_blocks,
            "copied": stats.copied_blocks,
            "dropped": stats.dropped_blocks,
            "opened": stats.num_opened,
            "queried_tokens": stats.queried_tokens,
            "hit_tokens": stats.hit_tokens,
            "queried_blocks": stats.queried_blocks,
            "hit_blocks": stats.hit_blocks,
        },
    }


class CheckedManager:
    """Stands in for a ``KVCacheManager`` and raises ``AssertionError`` where it and the slow model differ.

    Every call is made on the manager and on a ``ReferenceManager``; results, counts, counters, events with
    their reasons, and ``check_invariants`` are compared after each. What is refused, or fails, must have
    changed nothing. Whatever is not a call that changes something (``tables``, ``stats``, ...) is the
    manager's own. Cost: some 0.3 ms per call for tiny pools, O(blocks^2) for others. Not thread-safe.

    >>> checked = CheckedManager(KVCacheManager(8, block_size=4))
    >>> checked.open("a", [5, 6, 7, 8, 9]); checked.commit("a", [5, 6, 7, 8, 9])
    Opened(num_tokens=5, num_cached_tokens=0)
    >>> checked.close("a"); checked.counts
    BlockCounts(free=7, cached=1, active=0)
    >>> checked.manager.truncate  # doctest: +ELLIPSIS
    <bound method KVCacheManager.truncate of ...>
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        reference: MakeModel | None = None,
        around: Around | None = None,
        invariants_every: int = 1,
    ) -> None:
        """Watch a new ``manager``; its events too, if it records them already.

        ``reference`` models its policy: (num_blocks, block_size) -> ``ReferencePolicy``; needed unless the
        policy is one of ``POLICIES`` with its defaults. ``around(name)`` is entered around each call of the
        manager itself. ``check_invariants`` runs after every ``invariants_every``-th call. Raises
        ``PagedKVError`` for a policy without a model, or a manager that was used already.
        """
        if manager.stats().num_opened or len(manager.copies) or manager.fences:
            raise PagedKVError(
                f"only a new manager can be checked, this one opened {manager.stats().num_opened}"
            )
        self.manager = manager
        self.model = ReferenceManager(
            manager.num_blocks,
            manager.block_size,
            manager._tables.num_free_rows,
            manager._watermark,
            _model_of(manager, reference),
        )
        self.follower = ShadowIndex()
        self.copies = _CheckedCopies(self)
        self.fences = _CheckedFences(self)
        self.retention = _CheckedRetention(self)
        self.context = _CheckedContext(self)
        self.maintenance = _CheckedMaintenance(self)
        self.taken: list[Event] = []
        """Events so far; empty it when you have read them."""
        self._around: Around = around or (lambda name: nullcontext())
        self._invariants_every = invariants_every
        self._num_calls = 0
        self._digests: dict[Path, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        """Whatever is not checked is the manager's own."""
        return getattr(self.manager, name)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make one call of the manager alone; if it fails, all must be as it was."""
        call: Any = self.manager
        for part in name.split("."):
            call = getattr(call, part)
        try:
            with self._around(name):
                return call(*args, **options)
        except Exception:
            self.compare()
            raise

    def lookup(
        self,
        tokens: Any,
        max_new_tokens: int = 0,
        *,
        namespace: Namespace | None = None,
        media: Iterable[Media] = (),
    ) -> Lookup:
        """As the manager's."""
        found: Lookup = self.call("lookup", tokens, max_new_tokens, namespace=namespace, media=media)
        self._same(found, self.model.lookup(_ints(tokens), max_new_tokens, namespace, media), "lookup")
        return found

    def open(
        self, seq_id: Hashable, tokens: Any, *, media: Iterable[Media] = (), **options: Any
    ) -> Opened | None:
        """As the manager's."""
        media = tuple(media)
        opened: Opened | None = self.call("open", seq_id, tokens, media=media, **options)
        cached = self.model.open(seq_id, _ints(tokens), media=media, **options)
        self._same(opened and opened.num_cached_tokens, cached, "open")
        return opened

    def append(self, seq_id: Hashable, num_tokens: int = 1) -> bool:
        """As the manager's."""
        grown: bool = self.call("append", seq_id, num_tokens)
        self._same(grown, self.model.step([seq_id], num_tokens), "append")
        return grown

    def step(self, seq_ids: Sequence[Hashable], num_tokens: int = 1) -> bool:
        """As the manager's."""
        grown: bool = self.call("step", seq_ids, num_tokens)
        self._same(grown, self.model.step(seq_ids, num_tokens), "step")
        return grown

    def commit(self, seq_id: Hashable, tokens: Any, *, media: Iterable[Media] = ()) -> None:
        """As the manager's."""
        media = tuple(media)
        self.call("commit", seq_id, tokens, media=media)
        self.model.commit(seq_id, _ints(tokens), media)
        self.compare()

    def commit_step(
        self, seq_ids: Sequence[Hashable], tokens: Any, num_accepted: Sequence[int] | None = None
    ) -> None:
        """As the manager's."""
        self.call("commit_step", seq_ids, tokens, num_accepted)
        if num_accepted is None:
            self.model.commit_step(seq_ids, _ints(tokens))
        else:
            self.model.accept(seq_ids, list(map(_ints, tokens)), num_accepted)
        self.compare()

    def fork(self, seq_id: Hashable, child_id: Hashable) -> bool:
        """As the manager's."""
        forked: bool = self.call("fork", seq_id, child_id)
        self._same(forked, self.model.fork(seq_id, child_id), "fork")
        return forked

    def truncate(self, seq_id: Hashable, num_tokens: int) -> None:
        """As the manager's."""
        self.call("truncate", seq_id, num_tokens)
        self.model.truncate(seq_id, num_tokens)
        self.compare()

    def close(self, seq_id: Hashable) -> None:
        """As the manager's."""
        self.call("close", seq_id)
        self.model.close(seq_id)
        self.compare()

    # -- comparing

    def compare(self) -> None:
        """Raise ``AssertionError`` unless manager and model agree."""
        self._num_calls += 1
        if self._num_calls % self._invariants_every == 0:
            self.manager.check_invariants()
        real, model = manager_state(self.manager), self.model.state()
        for name, value in real.items():
            assert value == model[name], f"{name}: manager {value}, model {model[name]}"
        expected, self.model.events = self.model.events, []
        if self.manager.events.recording:
            self._compare_events(self.manager.events.take(), expected)

    def _same(self, real: object, model: object, name: str) -> None:
        assert real == model, f"{name} gave {real}, the model {model}"
        self.compare()

    def _compare_events(self, events: list[Event], expected: list[ModelEvent]) -> None:
        """What became findable and ceased to be, with reasons; and the whole index that this gives."""
        for event in events:
            self.follower.apply(event)
        self.taken += events
        real = sorted(change for event in events for change in _changes(event))
        model = sorted((e.kind, self._digest(e.path) if e.path else b"", e.reason) for e in expected)
        assert real == model, f"events {events}, the model's {expected}"
        if len(self._digests) > 4 * (self.manager.num_blocks + 100):
            self._digests.clear()
        digests = set(map(self._digest, self.model.by_path))
        assert self.follower.digests == digests, "the events do not give the index"

    def _digest(self, path: Path) -> bytes:
        """Digest of a whole prefix, worked out anew from what `pagedkv.events` says of it."""
        if len(path) == 1:
            return bytes(32)
        if path not in self._digests:
            block: Content = path[-1]
            namespace = path[0] if len(path) == 2 else None
            extra = repr((namespace, block.media)) if namespace is not None or block.media else ""
            text = self._digest(path[:-1]) + np.array(block.tokens, "<i4").tobytes() + extra.encode()
            seed = self.manager.events._seed or b""
            self._digests[path] = hashlib.blake2b(text, digest_size=32, key=seed).digest()
        return self._digests[path]


class _CheckedCopies:
    """As ``manager.copies``."""

    def __init__(self, checked: CheckedManager) -> None:
        self._checked = checked

    def __len__(self) -> int:
        return len(self._checked.manager.copies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checked.manager.copies, name)

    def take(self) -> BlockCopies:
        copies: BlockCopies = self._checked.call("copies.take")
        num_copies = len(self._checked.model.copies)
        self._checked.model.take_copies()
        self._checked._same(len(copies.src), num_copies, "take")
        return copies


class _CheckedFences:
    """As ``manager.fences``."""

    def __init__(self, checked: CheckedManager) -> None:
        self._checked = checked

    def __bool__(self) -> bool:
        return bool(self._checked.manager.fences)

    def open(self) -> int:
        number: int = self._checked.call("fences.open")
        self._checked.model.open_fence(number)
        self._checked.compare()
        return number

    def signal(self, number: int) -> None:
        self._checked.call("fences.signal", number)
        self._checked.model.signal(number)
        self._checked.compare()


class _CheckedRetention:
    """As ``manager.retention``; priorities without a time to live."""

    def __init__(self, checked: CheckedManager) -> None:
        self._checked = checked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checked.manager.retention, name)

    def pin(self, seq_id: Hashable, num_tokens: int | None = None) -> int:
        number: int = self._checked.call("retention.pin", seq_id, num_tokens)
        if num_tokens is None:
            num_tokens = self._checked.manager.tables.num_committed(seq_id)
        self._checked.model.pin(seq_id, num_tokens // self._checked.manager.block_size, number)
        self._checked.compare()
        return number

    def unpin(self, pin: int) -> None:
        self._checked.call("retention.unpin", pin)
        self._checked.model.unpin(pin)
        self._checked.compare()

    def set_priority(
        self, seq_id: Hashable, priority: int, *, start: int = 0, stop: int | None = None
    ) -> int:
        count: int = self._checked.call("retention.set_priority", seq_id, priority, start=start, stop=stop)
        last = self._checked.manager.tables.num_committed(seq_id) if stop is None else stop
        self._checked._same(count, self._checked.model.retain(seq_id, start, last, priority), "set_priority")
        return count


class _CheckedContext:
    """As ``manager.context``."""

    def __init__(self, checked: CheckedManager) -> None:
        self._checked = checked

    def drop_blocks(self, seq_id: Hashable, columns: Any) -> int:
        count: int = self._checked.call("context.drop_blocks", seq_id, columns)
        ids = np.asarray(columns, np.int64).tolist()
        self._checked._same(count, drop_blocks(self._checked.model, seq_id, ids), "drop_blocks")
        return count


class _CheckedMaintenance:
    """As ``manager.maintenance``."""

    def __init__(self, checked: CheckedManager) -> None:
        self._checked = checked

    def reset(self) -> bool:
        done: bool = self._checked.call("maintenance.reset")
        self._checked._same(done, self._checked.model.reset(), "reset")
        return done

    def defragment(self) -> BlockCopies | None:
        busy = len(self._checked.manager.copies) > 0 or bool(self._checked.model.open_fences)
        moves: BlockCopies | None = self._checked.call("maintenance.defragment")
        self._checked._same(moves is None, busy, "defragment")
        return moves

    def resize(self, num_blocks: int) -> BlockCopies | None:
        busy = len(self._checked.manager.copies) > 0
        moves: BlockCopies | None = self._checked.call("maintenance.resize", num_blocks)
        done = not busy and self._checked.model.resize(num_blocks)
        self._checked._same(moves is not None, done, "resize")
        return moves


def _model_of(manager: KVCacheManager, reference: MakeModel | None) -> str | MakeModel | None:
    if not manager.prefix_caching or reference is not None:
        return reference
    kind = type(manager._cache.policy)
    for name, place in POLICIES.items():
        if place == f"{kind.__module__}:{kind.__name__}":
            return name
    raise PagedKVError(f"there is no model of {kind.__name__}: give one as reference")


def _changes(event: Event) -> list[tuple[str, bytes, str]]:
    if isinstance(event, BlocksStored):
        return [("stored", digest, "") for digest in event.digests]
    if isinstance(event, BlocksRemoved):
        return [("removed", digest, event.reason) for digest in event.digests]
    return [("cleared", b"", "")]


def _ints(tokens: Any) -> list[int]:
    ids: list[int] = np.asarray(tokens, np.int64).tolist()
    return ids
