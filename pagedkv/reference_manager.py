"""A slow, obviously right model of the manager."""

from collections.abc import Hashable, Sequence

from pagedkv.namespace import Namespace
from pagedkv.reference_policies import REFERENCE_POLICIES, ModelBlock, Path


class _Sequence:
    def __init__(self, namespace: Namespace | None, blocks: list[ModelBlock], length: int) -> None:
        self.namespace = namespace
        self.blocks = blocks
        self.length = length
        self.tokens: list[int] = []  # the committed ones

    def path(self, num_tokens: int) -> Path:
        return (self.namespace, *self.tokens[:num_tokens])


class ReferenceManager:
    """The rules of ``KVCacheManager``, one block at a time: lists, dicts and whole-prefix keys, no hashes."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_seqs: int = 256,
        watermark: float = 0.0,
        policy: str = "lru",
    ) -> None:
        """Make a model with the same sizes and policy as the manager it is compared with."""
        self.num_blocks, self.block_size, self.max_seqs = num_blocks, block_size, max_seqs
        self.watermark_blocks = int(watermark * num_blocks)
        self.free = num_blocks
        self.policy = REFERENCE_POLICIES[policy](num_blocks, block_size)
        self.by_path: dict[Path, ModelBlock] = {}
        self.cached: list[ModelBlock] = []  # least recently released first
        self.seqs: dict[Hashable, _Sequence] = {}
        self.evicted = self.copied = 0
        self.pins: dict[int, list[ModelBlock]] = {}
        self.open_fences: list[int] = []
        self.fenced: list[tuple[set[int], ModelBlock]] = []  # (open fences that it waits for, block)

    def state(self) -> tuple[object, ...]:
        """Everything that must agree with ``manager_state`` of the manager."""
        return (
            (self.free, len(self.cached), self.num_blocks - self.free - len(self.cached)),
            {seq_id: (s.length, len(s.tokens)) for seq_id, s in self.seqs.items()},
            (self.evicted, self.copied),
            len(self.by_path),
            self.used_slots(),
            len({id(block) for blocks in self.pins.values() for block in blocks}),
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
        hit: list[ModelBlock] = []
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
        for block in hit:
            self.policy.hit(block)
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
                self.policy.forgotten(block)
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

    def _shared_tails(
        self, seqs: list[_Sequence]
    ) -> tuple[list[_Sequence], list[ModelBlock], list[ModelBlock]]:
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

    def _behind(self, block: ModelBlock) -> list[Path]:
        path = block.path
        if path is None:
            return []
        return [p for p in self.by_path if len(p) > len(path) and p[: len(path)] == path]

    def _evict(self, paths: set[Path]) -> None:
        for path in paths:
            block = self.by_path.pop(path)
            self.cached.remove(block)
            self.policy.forgotten(block)
            self.evicted += 1
            self.free += 1

    def _take(self, count: int) -> list[ModelBlock]:
        for _ in range(count - self.free):
            victim = self.policy.choose(self._leaves())
            assert victim.path is not None
            self.cached.remove(victim)
            del self.by_path[victim.path]
            self.policy.evicted(victim, self._leaves())
            self.evicted += 1
            self.free += 1
        self.free -= max(count, 0)
        return [ModelBlock() for _ in range(count)]

    def _leaves(self) -> list[ModelBlock]:
        return [block for block in self.cached if not self._behind(block)]

    def _hold(self, block: ModelBlock) -> None:
        if not block.refs:
            self.cached.remove(block)
        block.refs += 1

    def pin(self, seq_id: Hashable, num_blocks: int, number: int) -> None:
        """Hold the first blocks of a sequence."""
        self.pins[number] = self.seqs[seq_id].blocks[:num_blocks]
        for block in self.pins[number]:
            block.refs += 1

    def unpin(self, number: int) -> None:
        """Let them go, deepest first."""
        for block in reversed(self.pins.pop(number)):
            self._release(block)

    def retain(self, seq_id: Hashable, start: int, stop: int, priority: int) -> int:
        """Set the priority of the full committed blocks that hold tokens of this range."""
        seq = self.seqs[seq_id]
        full = len(seq.tokens) // self.block_size
        ids = {t // self.block_size for t in range(start, stop)} & set(range(full))
        for i in sorted(ids):
            self.policy.retain(seq.blocks[i], priority)
        return len(ids)

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

    def _release(self, block: ModelBlock) -> None:
        if self.open_fences:
            self.fenced.append((set(self.open_fences), block))
        else:
            self._give_up(block)

    def _give_up(self, block: ModelBlock) -> None:
        block.refs -= 1
        if not block.refs and block.path is not None:
            self.cached.append(block)
            self.policy.released(block)
        elif not block.refs:
            self.free += 1
