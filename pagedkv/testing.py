"""Tools that try a manager: a slow model beside it, a random walk that compares the two, shadows, snapshots.

For engine authors too: run ``random_walk`` with your sizes, or drive ``ReferenceManager`` beside your
own calls and compare ``state``.
"""

import hashlib
import random
from collections.abc import Callable, Collection, Hashable, Sequence, Set
from typing import Any

import numpy as np

from pagedkv.events import BlocksStored, Event
from pagedkv.manager import KVCacheManager
from pagedkv.namespace import Namespace
from pagedkv.reference_manager import ReferenceManager

__all__ = ["ReferenceManager", "ShadowIndex", "ShadowStorage", "manager_state", "random_walk", "snapshot"]


def manager_state(manager: KVCacheManager) -> tuple[object, ...]:
    """What ``ReferenceManager.state`` must equal."""
    stats = manager.stats()
    return (
        (stats.free_blocks, stats.cached_blocks, stats.active_blocks),
        {i: (manager.tables.num_tokens(i), manager.num_committed(i)) for i in manager.tables.seq_ids},
        (stats.evicted_blocks, stats.copied_blocks),
        stats.indexed_blocks,
        stats.used_slots,
        stats.pinned_blocks,
    )


def snapshot(manager: KVCacheManager, ignore: Collection[str] = ("_seen", "_head")) -> object:
    """Every array, dict, list and number inside a manager, at any depth: two are equal if nothing changed.

    ``ignore`` names attributes that may differ all the same: scratch space, and the lazy head of the order.
    """
    numbers: dict[int, int] = {}

    def freeze(value: Any) -> object:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, dict):
            return tuple((key, freeze(item)) for key, item in value.items())
        if isinstance(value, Set):
            return frozenset(map(freeze, value))
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return tuple(map(freeze, value))
        if not type(value).__module__.startswith("pagedkv") or isinstance(value, Namespace):
            return value
        if id(value) in numbers:
            return "seen", numbers[id(value)]
        numbers[id(value)] = len(numbers)
        names = getattr(value, "__slots__", None) or sorted(vars(value))
        return tuple((name, freeze(getattr(value, name))) for name in names if name not in ignore)

    return freeze(manager)


class ShadowStorage:
    """Which token each slot holds, written and copied as an engine would: finds shared slots that changed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """All slots start empty (-1)."""
        self.slots = np.full((num_blocks + 1, block_size), -1)

    def copy(self, manager: KVCacheManager) -> None:
        """Run the pending copies."""
        copies = manager.take_copies()
        self.slots[copies.dst] = self.slots[copies.src]

    def write(self, slots: Any, tokens: Sequence[int]) -> None:
        """Store one token per slot."""
        self.slots.reshape(-1)[np.asarray(slots, np.int64)] = tokens

    def read(self, manager: KVCacheManager, seq_id: Hashable) -> list[int]:
        """The committed tokens of a sequence, read through its block table."""
        slots = manager.tables.slots(seq_id, 0, manager.num_committed(seq_id))
        tokens: list[int] = self.slots.reshape(-1)[slots].tolist()
        return tokens


def random_walk(
    num_ops: int,
    *,
    seed: int = 0,
    num_blocks: int = 9,
    block_size: int = 3,
    max_seqs: int = 4,
    vocabulary: int = 2,
    watermark: float = 0.0,
    policy: str = "lru",
    before_op: Callable[[KVCacheManager], None] | None = None,
) -> KVCacheManager:
    """Do ``num_ops`` random operations on a manager and on the model; compare everything after each.

    Checks results, counts, contents of every slot, and ``check_invariants``. Raises ``AssertionError``
    with the seed and the operation at the first difference. Tiny sizes make collisions, forks,
    evictions and refusals frequent. Returns the manager as it was left.

    >>> random_walk(200, seed=1).stats().num_opened > 10
    True
    """
    walk = _Walk(random.Random(seed), num_blocks, block_size, max_seqs, vocabulary, watermark, policy)
    for number in range(num_ops):
        if before_op is not None:
            before_op(walk.manager)
        name = walk.random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        try:
            getattr(walk, name)()
            walk.compare()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, operation {number} ({name}): {error}") from error
    return walk.manager


_WEIGHTS = {
    "open": 8,
    "step": 12,
    "append": 4,
    "commit": 16,
    "fork": 2,
    "truncate": 2,
    "close": 6,
    "open_fence": 1,
    "signal": 2,
    "pin": 1,
    "unpin": 2,
    "retain": 2,
}


class ShadowIndex:
    """What a follower of the event stream knows: it sees events only. Raises ``AssertionError`` on a gap."""

    def __init__(self) -> None:
        """Start like a manager: empty, expecting event 0."""
        self.digests: set[bytes] = set()
        self.next_number = 0

    def apply(self, event: Event) -> None:
        """Take in one event."""
        assert event.number == self.next_number, f"event {event.number}, expected {self.next_number}"
        self.next_number += 1
        if isinstance(event, BlocksStored):
            assert event.parent is None or event.parent in self.digests, "stored behind an unknown parent"
            assert not self.digests & set(event.digests), "stored twice"
            self.digests |= set(event.digests)
        else:
            assert self.digests >= set(event.digests), "removed what was not there"
            self.digests -= set(event.digests)


class _Walk:
    """A manager, the model and the shadow storage, driven together."""

    def __init__(
        self,
        rng: random.Random,
        num_blocks: int,
        block_size: int,
        max_seqs: int,
        vocabulary: int,
        watermark: float,
        policy: str,
    ) -> None:
        self.random = rng
        self.vocabulary = vocabulary
        self.policy = policy
        self.max_len = num_blocks * block_size
        self.manager = KVCacheManager(
            num_blocks, block_size, max_seqs=max_seqs, watermark=watermark, policy=policy
        )
        self.model = ReferenceManager(num_blocks, block_size, max_seqs, watermark, policy)
        self.manager.record_events(b"walk")
        self.shadow = ShadowStorage(num_blocks, block_size)
        self.follower = ShadowIndex()
        self.prompts: dict[Hashable, list[int]] = {}
        self.next_id = 0

    def compare(self) -> None:
        self.manager.check_invariants()
        for event in self.manager.take_events():
            self.follower.apply(event)
        assert self.follower.digests == self._digests_by_content(), "the events do not give the index"
        real, model = manager_state(self.manager), self.model.state()
        assert real == model, f"manager {real} != model {model}"
        if len(self.manager.pending_copies.src):
            return  # the slots are right again when the copies have run, before the next write
        for seq_id, seq in self.model.seqs.items():
            held = self.shadow.read(self.manager, seq_id)
            assert held == seq.tokens, f"slots of {seq_id} hold {held}, committed were {seq.tokens}"

    def _digests_by_content(self) -> set[bytes]:
        """Digests of the contents that the model has cached, computed from whole prefixes."""
        size, digests = self.model.block_size, set()
        for path in self.model.by_path:
            digest = bytes(32)
            for i in range(1, len(path), size):
                extra = repr((path[0], ())) if i == 1 and path[0] is not None else ""
                content = digest + np.array(path[i : i + size], "<i4").tobytes() + extra.encode()
                digest = hashlib.blake2b(content, digest_size=32, key=b"walk").digest()
            digests.add(digest)
        return digests

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(count)]

    def _any(self) -> Hashable | None:
        return self.random.choice(list(self.model.seqs)) if self.model.seqs else None

    def _prompt(self) -> tuple[list[int], Namespace | None]:
        """Half of the prompts begin like something that is cached."""
        namespace = self.random.choice([None, None, Namespace(salt="tenant")])
        tokens = self._tokens(self.random.randrange(self.max_len // 2))
        if self.model.by_path and self.random.random() < 0.5:
            path = self.random.choice(list(self.model.by_path))
            namespace = path[0]
            tokens = [*path[1 : self.random.randint(1, len(path))], *tokens[: self.random.randrange(4)]]
        return tokens[: self.max_len - 1], namespace

    def open(self) -> None:
        tokens, namespace = self._prompt()
        seq_id, self.next_id = self.next_id, self.next_id + 1
        opened = self.manager.open(seq_id, tokens, namespace=namespace)
        cached = self.model.open(seq_id, tokens, namespace)
        assert (opened.num_cached_tokens if opened else None) == cached, f"hit {opened}, expected {cached}"
        if cached is not None:
            self.prompts[seq_id] = tokens

    def _expect(self, seq_ids: list[Hashable], count: int, grown: bool) -> None:
        expected = self.model.step(seq_ids, count)
        assert grown == expected, f"grew: {grown}, expected {expected}"

    def step(self) -> None:
        ids = [i for i in self.model.seqs if self.model.seqs[i].length < self.max_len - 1]
        batch = self.random.sample(ids, self.random.randint(0, len(ids)))
        self._expect(batch, 1, self.manager.step(batch))

    def append(self) -> None:
        seq_id, count = self._any(), self.random.randrange(6)
        if seq_id is not None and self.model.seqs[seq_id].length + count <= self.max_len:
            self._expect([seq_id], count, self.manager.append(seq_id, count))

    def commit(self) -> None:
        seq_id = self._any()
        if seq_id is None:
            return
        seq = self.model.seqs[seq_id]
        start = len(seq.tokens)
        count = self.random.choice([seq.length - start, self.random.randint(0, seq.length - start)])
        self.shadow.copy(self.manager)
        known = self.prompts.get(seq_id, [])[start : start + count]
        tokens = known + self._tokens(count - len(known))
        self.shadow.write(self.manager.tables.slots(seq_id, start, start + count), tokens)
        if count == 1 and self.random.random() < 0.5:
            self.manager.commit_step([seq_id], tokens)
        else:
            self.manager.commit(seq_id, tokens)
        self.model.commit(seq_id, tokens)

    def fork(self) -> None:
        seq_id = self._any()
        if seq_id is not None and len(self.model.seqs[seq_id].tokens) == self.model.seqs[seq_id].length:
            child, self.next_id = self.next_id, self.next_id + 1
            assert self.manager.fork(seq_id, child) == self.model.fork(seq_id, child)

    def truncate(self) -> None:
        seq_id = self._any()
        if seq_id is not None:
            length = self.random.randint(0, self.model.seqs[seq_id].length)
            self.manager.truncate(seq_id, length)
            self.model.truncate(seq_id, length)
            self.prompts[seq_id] = self.prompts.get(seq_id, [])[:length]

    def open_fence(self) -> None:
        self.model.open_fence(self.manager.open_fence())

    def signal(self) -> None:
        if self.model.open_fences:
            fence = self.random.choice(self.model.open_fences)
            self.manager.signal(fence)
            self.model.signal(fence)

    def pin(self) -> None:
        seq_id = self._any()
        if seq_id is None:
            return
        num_tokens = self.random.randint(0, len(self.model.seqs[seq_id].tokens))
        num_blocks = num_tokens // self.model.block_size
        if num_blocks:
            self.model.pin(seq_id, num_blocks, self.manager.pin(seq_id, num_tokens))

    def unpin(self) -> None:
        if self.model.pins:
            pin = self.random.choice(list(self.model.pins))
            self.manager.unpin(pin)
            self.model.unpin(pin)

    def retain(self) -> None:
        seq_id, priority = self._any(), self.random.choice([0, 35, 100])
        if seq_id is None or self.policy != "priority":
            return
        committed = len(self.model.seqs[seq_id].tokens)
        start, stop = sorted(self.random.randint(0, committed) for _ in range(2))
        retained = self.manager.retain(seq_id, priority, start=start, stop=stop)
        assert retained == self.model.retain(seq_id, start, stop, priority)

    def close(self) -> None:
        seq_id = self._any()
        if seq_id is not None:
            self.manager.close(seq_id)
            self.model.close(seq_id)
