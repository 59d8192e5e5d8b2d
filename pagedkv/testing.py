"""A slow, obviously right model of the manager, and a random walk that compares the two.

For engine authors too: run ``random_walk`` with your sizes, or drive ``ReferenceManager`` beside your
own calls and compare ``state``.
"""

import hashlib
import random
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import numpy as np

from pagedkv.events import BlocksStored, Event
from pagedkv.manager import KVCacheManager
from pagedkv.namespace import Namespace

Path = tuple[Any, ...]


class _Block:
    """One block: how many sequences hold it, and the prefix it is cached for, if any."""

    def __init__(self) -> None:
        self.refs = 1
        self.path: Path | None = None


class _Sequence:
    def __init__(self, namespace: Namespace | None, blocks: list[_Block], length: int) -> None:
        self.namespace = namespace
        self.blocks = blocks
        self.length = length
        self.tokens: list[int] = []  # the committed ones

    def path(self, num_tokens: int) -> Path:
        return (self.namespace, *self.tokens[:num_tokens])


class ReferenceManager:
    """The rules of ``KVCacheManager``, one block at a time: lists, dicts and whole-prefix keys, no hashes."""

    def __init__(self, num_blocks: int, block_size: int, max_seqs: int = 256, watermark: float = 0.0) -> None:
        """Make a model with the same sizes as the manager it is compared with."""
        self.num_blocks, self.block_size, self.max_seqs = num_blocks, block_size, max_seqs
        self.watermark_blocks = int(watermark * num_blocks)
        self.free = num_blocks
        self.by_path: dict[Path, _Block] = {}
        self.cached: list[_Block] = []  # least recently used first
        self.seqs: dict[Hashable, _Sequence] = {}
        self.evicted = self.copied = 0
        self.open_fences: list[int] = []
        self.fenced: list[tuple[set[int], _Block]] = []  # (open fences that it waits for, block)

    def state(self) -> tuple[object, ...]:
        """Everything that must agree with ``manager_state`` of the manager."""
        return (
            (self.free, len(self.cached), self.num_blocks - self.free - len(self.cached)),
            {seq_id: (s.length, len(s.tokens)) for seq_id, s in self.seqs.items()},
            (self.evicted, self.copied),
            len(self.by_path),
            self.used_slots(),
        )

    def used_slots(self) -> int:
        """Slots of held blocks that a sequence has reached, and all of a block that is indexed."""
        filled: dict[int, int] = {id(b): self.block_size for b in self.by_path.values() if b.refs}
        for seq in self.seqs.values():
            for i, block in enumerate(seq.blocks):
                reached = min(self.block_size, seq.length - i * self.block_size)
                filled[id(block)] = max(filled.get(id(block), 0), reached)
        return sum(filled.values())

    def open(self, seq_id: Hashable, tokens: Sequence[int], namespace: Namespace | None = None) -> int | None:
        """Cached tokens of the new sequence, or None."""
        length, size = len(tokens), self.block_size
        hit: list[_Block] = []
        while (len(hit) + 1) * size < length:
            block = self.by_path.get((namespace, *tokens[: (len(hit) + 1) * size]))
            if block is None:
                break
            hit.append(block)
        fresh = self._blocks_for(length) - len(hit)
        need = fresh + sum(block in hit for block in self.cached)
        reserve = self.watermark_blocks if self.seqs else 0
        if len(self.seqs) == self.max_seqs or (need and need > self.free + len(self.cached) - reserve):
            return None
        for block in hit:
            self._hold(block)
        seq = _Sequence(namespace, hit + self._take(fresh), length)
        seq.tokens = list(tokens[: len(hit) * size])
        self.seqs[seq_id] = seq
        return len(hit) * size

    def step(self, seq_ids: Sequence[Hashable], count: int) -> bool:
        """Grow every sequence, or none and False."""
        seqs = [self.seqs[seq_id] for seq_id in seq_ids]
        grow = [self._blocks_for(s.length + count) - len(s.blocks) for s in seqs]
        copies, private, burdened = self._shared_tails(seqs) if count else ([], [], [])
        available = self.free + len(self.cached)
        total = sum(grow) + len(copies)
        behind = {path for block in burdened for path in self._behind(block)}
        idle = not any(self.by_path[path].refs for path in behind)
        if total - len(burdened) <= available < total and idle:
            self._evict(behind)
            copies, private, _ = self._shared_tails(seqs)
        if sum(grow) + len(copies) > self.free + len(self.cached):
            return False
        fresh = self._take(sum(grow) + len(copies))
        for s in copies:
            old, s.blocks[-1] = s.blocks[-1], fresh.pop()
            self._release(old)
        for block in private:
            if block.path is not None:
                del self.by_path[block.path]
                block.path = None
        for s, n in zip(seqs, grow, strict=True):
            s.blocks += [fresh.pop() for _ in range(n)]
            s.length += count
        self.copied += len(copies)
        return True

    def commit(self, seq_id: Hashable, tokens: Sequence[int]) -> None:
        """Record final tokens; full blocks become shared, or are replaced by equal ones."""
        seq = self.seqs[seq_id]
        start = len(seq.tokens) // self.block_size
        seq.tokens += tokens
        for i in range(start, len(seq.tokens) // self.block_size):
            path = seq.path((i + 1) * self.block_size)
            known = self.by_path.get(path)
            if known is None:
                self.by_path[path] = seq.blocks[i]
                seq.blocks[i].path = path
            elif known is not seq.blocks[i]:
                self._hold(known)
                old, seq.blocks[i] = seq.blocks[i], known
                self._release(old)

    def fork(self, seq_id: Hashable, child_id: Hashable) -> bool:
        """Share every block."""
        if len(self.seqs) == self.max_seqs:
            return False
        seq = self.seqs[seq_id]
        child = _Sequence(seq.namespace, list(seq.blocks), seq.length)
        child.tokens = list(seq.tokens)
        for block in child.blocks:
            block.refs += 1
        self.seqs[child_id] = child
        return True

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Give up blocks from the end."""
        seq = self.seqs[seq_id]
        while len(seq.blocks) > self._blocks_for(length):
            self._release(seq.blocks.pop())
        seq.length = length
        del seq.tokens[length:]

    def close(self, seq_id: Hashable) -> None:
        """Give up everything."""
        self.truncate(seq_id, 0)
        del self.seqs[seq_id]

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _shared_tails(self, seqs: list[_Sequence]) -> tuple[list[_Sequence], list[_Block], list[_Block]]:
        """Sequences that must copy their partial tail, tails that the last of their holders keeps, and
        tails that it would keep if nothing cached built on them.
        """
        partial = [s for s in seqs if s.length % self.block_size]
        copies = [s for s in partial if s.blocks[-1].refs > 1 or s.blocks[-1].path is not None]
        kept, burdened = [], []
        for block in {id(s.blocks[-1]): s.blocks[-1] for s in copies}.values():
            holders = [s for s in copies if s.blocks[-1] is block]
            if len(holders) == block.refs and self._behind(block):
                burdened.append(block)
            elif len(holders) == block.refs:
                copies.remove(holders[-1])
                kept.append(block)
        return copies, kept, burdened

    def _behind(self, block: _Block) -> list[Path]:
        path = block.path
        if path is None:
            return []
        return [p for p in self.by_path if len(p) > len(path) and p[: len(path)] == path]

    def _evict(self, paths: set[Path]) -> None:
        for path in paths:
            self.cached.remove(self.by_path.pop(path))
            self.evicted += 1
            self.free += 1

    def _take(self, count: int) -> list[_Block]:
        for _ in range(count - self.free):
            victim = self.cached.pop(0)
            assert victim.path is not None
            del self.by_path[victim.path]
            self.evicted += 1
            self.free += 1
        self.free -= max(count, 0)
        return [_Block() for _ in range(count)]

    def _hold(self, block: _Block) -> None:
        if not block.refs:
            self.cached.remove(block)
        block.refs += 1

    def open_fence(self, number: int) -> None:
        """Blocks given up from now on wait for it."""
        self.open_fences.append(number)

    def signal(self, number: int) -> None:
        """Release the blocks that waited for this fence alone."""
        self.open_fences.remove(number)
        for fences, _ in self.fenced:
            fences.discard(number)
        while self.fenced and not self.fenced[0][0]:
            self._give_up(self.fenced.pop(0)[1])

    def _release(self, block: _Block) -> None:
        if self.open_fences:
            self.fenced.append((set(self.open_fences), block))
        else:
            self._give_up(block)

    def _give_up(self, block: _Block) -> None:
        block.refs -= 1
        if not block.refs and block.path is not None:
            self.cached.append(block)
        elif not block.refs:
            self.free += 1


def manager_state(manager: KVCacheManager) -> tuple[object, ...]:
    """What ``ReferenceManager.state`` must equal."""
    stats = manager.stats()
    return (
        (stats.free_blocks, stats.cached_blocks, stats.active_blocks),
        {i: (manager.tables.num_tokens(i), manager.num_committed(i)) for i in manager.tables.seq_ids},
        (stats.evicted_blocks, stats.copied_blocks),
        stats.indexed_blocks,
        stats.used_slots,
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
        if isinstance(value, (list, tuple)):
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
    before_op: Callable[[KVCacheManager], None] | None = None,
) -> KVCacheManager:
    """Do ``num_ops`` random operations on a manager and on the model; compare everything after each.

    Checks results, counts, contents of every slot, and ``check_invariants``. Raises ``AssertionError``
    with the seed and the operation at the first difference. Tiny sizes make collisions, forks,
    evictions and refusals frequent. Returns the manager as it was left.

    >>> random_walk(200, seed=1).stats().num_opened > 10
    True
    """
    walk = _Walk(random.Random(seed), num_blocks, block_size, max_seqs, vocabulary, watermark)
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
    ) -> None:
        self.random = rng
        self.vocabulary = vocabulary
        self.max_len = num_blocks * block_size
        self.manager = KVCacheManager(num_blocks, block_size, max_seqs=max_seqs, watermark=watermark)
        self.model = ReferenceManager(num_blocks, block_size, max_seqs, watermark)
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

    def close(self) -> None:
        seq_id = self._any()
        if seq_id is not None:
            self.manager.close(seq_id)
            self.model.close(seq_id)
