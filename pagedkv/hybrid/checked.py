"""A hybrid manager with the slow model beside it: the same calls, compared after each."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from pagedkv.block_tables import NULL_BLOCK
from pagedkv.copies import BlockCopies
from pagedkv.errors import NeverFits, PagedKVError
from pagedkv.events import BlocksCleared, BlocksRemoved, Event, prefix_digests
from pagedkv.hybrid.manager import HybridKVCacheManager
from pagedkv.hybrid.reference import ReferenceHybridManager
from pagedkv.hybrid.reference_parts import Prefix
from pagedkv.hybrid.shadow import GroupShadow
from pagedkv.namespace import Namespace
from pagedkv.opened import Lookup, Opened
from pagedkv.reference_policies import ReferencePolicy


def hybrid_state(manager: HybridKVCacheManager) -> dict[str, object]:
    """What ``ReferenceHybridManager.state`` must equal."""
    stats, tables = manager.stats(), manager.tables
    first = tables[manager.groups[0].name]
    return {
        "counts": (stats.free_blocks, stats.cached_blocks, stats.active_blocks),
        "lengths": {i: (first.num_tokens(i), first.num_committed(i)) for i in first.seq_ids},
        "tables": {
            i: [(table.block_ids(i) != NULL_BLOCK).tolist() for table in tables.values()]
            for i in first.seq_ids
        },
        "groups": [tuple(stats.groups[group.name]) for group in manager.groups],
        "nodes": stats.num_nodes,
        "pinned": stats.pinned_blocks,
        "fenced": stats.fenced_blocks,
        "counters": (stats.evicted_blocks, stats.copied_blocks, stats.fallen_blocks),
    }


class CheckedHybridManager:
    """Stands in for a ``HybridKVCacheManager`` and raises ``AssertionError`` where it and the model differ.

    Every call is made on the manager and on a ``ReferenceHybridManager``; results, state, events with their
    reasons, and ``check_invariants`` are compared after each. What is refused must have changed nothing that
    the model knows of. Whatever is not a call that changes something is the manager's own. Without media.
    Cost: some 0.5 ms per call for tiny pools, O(blocks^2) for others.

    >>> from pagedkv.hybrid import CacheGroup
    >>> groups = CacheGroup("full", (1,)), CacheGroup("local", (0,), window=2)
    >>> checked = CheckedHybridManager(HybridKVCacheManager(groups, 8, block_size=2))
    >>> checked.open("a", [1, 2, 3]); checked.commit("a", [1, 2, 3]); checked.close("a")
    Opened(num_tokens=3, num_cached_tokens=0)
    """

    def __init__(
        self,
        manager: HybridKVCacheManager,
        policy: str | Callable[[int, int], ReferencePolicy] = "lru",
    ) -> None:
        """Watch a new ``manager`` with a prefix cache; its events too, if it records them already.

        ``policy`` models its policy: a name of ``REFERENCE_POLICIES``, or (num_blocks, block_size) ->
        ``ReferencePolicy``. Raises ``PagedKVError`` for a manager that was used already.
        """
        if manager.stats().num_opened or not manager.prefix_caching:
            raise PagedKVError(
                "only a new manager with a prefix cache can be checked, "
                f"this one opened {manager.stats().num_opened}"
            )
        nodes = manager._tree.nodes.num_blocks
        self.manager = manager
        self.model = ReferenceHybridManager(
            manager.groups,
            manager.num_blocks,
            manager.block_size,
            manager._table.num_free_rows,
            nodes,
            manager._admission.watermark,
            policy,
        )
        self.follower = GroupShadow(manager.groups)
        self.num_never_fits = 0
        self._digests: dict[Prefix, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        """Whatever is not checked is the manager's own."""
        return getattr(self.manager, name)

    def lookup(
        self,
        tokens: Sequence[int],
        max_new_tokens: int = 0,
        namespace: Namespace | None = None,
        max_fresh_tokens: int | None = None,
    ) -> Lookup | None:
        """As the manager's; None if it can never fit."""
        found: Lookup | None = self._both(
            lambda: self.manager.lookup(
                tokens, max_new_tokens, namespace=namespace, max_fresh_tokens=max_fresh_tokens
            ),
            lambda: self.model.lookup(tokens, max_new_tokens, namespace, max_fresh_tokens),
        )
        return found

    def open(self, seq_id: Hashable, tokens: Sequence[int], **options: Any) -> Opened | None:
        """As the manager's; None, too, if it can never fit."""
        opened: Opened | None = self._both(
            lambda: self.manager.open(seq_id, tokens, **options),
            lambda: self.model.open(seq_id, tokens, **options),
        )
        return opened

    def step(self, seq_ids: Sequence[Hashable], num_tokens: int = 1) -> bool:
        """As the manager's; False, too, if one can never fit."""
        return bool(
            self._both(
                lambda: self.manager.step(seq_ids, num_tokens), lambda: self.model.step(seq_ids, num_tokens)
            )
        )

    def append(self, seq_id: Hashable, num_tokens: int = 1) -> bool:
        """As the manager's; False, too, if it can never fit."""
        return self.step([seq_id], num_tokens)

    def commit(self, seq_id: Hashable, tokens: Sequence[int]) -> None:
        """As the manager's."""
        self.manager.commit(seq_id, tokens)
        self.model.commit(seq_id, tokens)
        self.compare()

    def commit_step(
        self, seq_ids: Sequence[Hashable], tokens: Sequence[Any], num_accepted: Sequence[int] | None = None
    ) -> None:
        """As the manager's."""
        self.manager.commit_step(seq_ids, tokens, num_accepted)
        if num_accepted is None:
            for seq_id, token in zip(seq_ids, tokens, strict=True):
                self.model.commit(seq_id, [token])
        else:
            self.model.accept(seq_ids, tokens, num_accepted)
        self.compare()

    def fork(self, seq_id: Hashable, child_id: Hashable) -> bool:
        """As the manager's."""
        forked: bool = self._both(
            lambda: self.manager.fork(seq_id, child_id), lambda: self.model.fork(seq_id, child_id)
        )
        return forked

    def truncate(self, seq_id: Hashable, num_tokens: int) -> None:
        """As the manager's."""
        self.manager.truncate(seq_id, num_tokens)
        self.model.truncate(seq_id, num_tokens)
        self.compare()

    def close(self, seq_id: Hashable) -> None:
        """As the manager's."""
        self.manager.close(seq_id)
        self.model.close(seq_id)
        self.compare()

    def pin(self, seq_id: Hashable, num_tokens: int) -> int:
        """As ``retention.pin``."""
        number = self.manager.retention.pin(seq_id, num_tokens)
        self.model.pin(seq_id, num_tokens // self.manager.block_size, number)
        self.compare()
        return number

    def unpin(self, pin: int) -> None:
        """As ``retention.unpin``."""
        self.manager.retention.unpin(pin)
        self.model.unpin(pin)
        self.compare()

    def set_priority(self, seq_id: Hashable, priority: int, start: int, stop: int) -> int:
        """As ``retention.set_priority``."""
        count: int = self._both(
            lambda: self.manager.retention.set_priority(seq_id, priority, start=start, stop=stop),
            lambda: self.model.retain(seq_id, start, stop, priority),
        )
        return count

    def take_copies(self) -> BlockCopies:
        """As ``copies.take``."""
        copies, num_copies = self.manager.copies.take(), len(self.model.copies)
        assert len(copies.src) == num_copies, f"copies {copies}, the model's {num_copies}"
        self.model.take_copies()
        self.compare()
        return copies

    def reset(self) -> bool:
        """As ``maintenance.reset``."""
        return bool(self._both(self.manager.maintenance.reset, self.model.reset))

    def defragment(self) -> BlockCopies | None:
        """As ``maintenance.defragment``: afterwards no block with content has a higher id than a free one."""
        busy = bool(len(self.manager.copies) or self.model.open_fences)
        moves = self.manager.maintenance.defragment()
        assert (moves is None) == busy, f"moves {moves}, but work under way: {busy}"
        self.compare()
        used = self.manager.num_blocks - self.model.free
        assert busy or not self.manager._tree.pool.state[used + 1 :].any(), "a gap is left"
        return moves

    def resize(self, num_blocks: int) -> BlockCopies | None:
        """As ``maintenance.resize``."""
        busy = len(self.manager.copies) > 0
        moves = self.manager.maintenance.resize(num_blocks)
        assert (moves is not None) == (not busy and self.model.resize(num_blocks)), f"moves {moves}"
        self.compare()
        return moves

    def open_fence(self) -> int:
        """As ``fences.open``."""
        number = self.manager.fences.open()
        self.model.open_fence(number)
        return number

    def signal(self, number: int) -> None:
        """As ``fences.signal``."""
        self.manager.fences.signal(number)
        self.model.signal(number)
        self.compare()

    # -- comparing

    def compare(self) -> None:
        """Raise ``AssertionError`` unless manager and model agree."""
        self.manager.check_invariants()
        real, model = hybrid_state(self.manager), self.model.state()
        for name, value in real.items():
            assert value == model[name], f"{name}: manager {value}, model {model[name]}"
        expected, self.model.events = self.model.events, []
        if self.manager.events.recording:
            events = self.manager.events.take()
            for event in events:
                self.follower.apply(event)
            changes = sorted(change for event in events for change in _changes(event))
            model_changes = sorted(
                (e.kind, e.group, self._digest(e.prefix) if e.prefix else b"", e.reason) for e in expected
            )
            assert changes == model_changes, f"events {events}, the model's {expected}"
            for group, by in enumerate(self.model.by_prefix):
                digests = set(map(self._digest, by))
                assert self.follower.digests[group] == digests, "the events do not give the index"
                assert self.manager.events.digests(group) == digests, "the log does not know the index"

    def _both(self, real: Callable[[], Any], model: Callable[[], Any]) -> Any:
        """What both return; None if both say that it never fits."""
        results: list[Any] = []
        for call in (real, model):
            try:
                results.append(call())
            except NeverFits:
                results.append(NeverFits)
        assert results[0] == results[1], f"{results[0]}, the model {results[1]}"
        self.compare()
        if results[0] is NeverFits:
            self.num_never_fits += 1
            return None
        return results[0]

    def _digest(self, prefix: Prefix) -> bytes:
        """Digest of a content, worked out from its tokens."""
        if prefix not in self._digests:
            namespace = prefix[0] if isinstance(prefix[0], Namespace) else None
            seed = self.manager.events._seed or b""
            tokens = np.array(prefix[1:], np.int32)
            digests = prefix_digests(tokens, self.manager.block_size, seed=seed, namespace=namespace)
            self._digests[prefix] = digests[-1]
        return self._digests[prefix]


def _changes(event: Event) -> list[tuple[str, int, bytes, str]]:
    if isinstance(event, BlocksCleared):
        return [("cleared", 0, b"", "")]
    kind, reason = ("removed", event.reason) if isinstance(event, BlocksRemoved) else ("stored", "")
    return [(kind, event.group, digest, reason) for digest in event.digests]
