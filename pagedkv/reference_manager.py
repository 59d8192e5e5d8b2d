"""A slow, obviously right model of the manager."""

from collections.abc import Callable, Hashable, Iterable, Sequence

from pagedkv.namespace import Media, Namespace
from pagedkv.reference_blocks import (
    Announced,
    ModelBlock,
    ModelEvent,
    ModelSequence,
    Path,
    best_child,
    num_held_alone,
    path_of,
    paths_behind,
    shared_tails,
    used_slots,
)
from pagedkv.reference_policies import REFERENCE_POLICIES, ReferencePolicy


class ReferenceManager:
    """The rules of ``KVCacheManager``, one block at a time: lists, dicts and whole-prefix keys, no hashes.

    It trusts its caller: drive it beside a manager, as ``CheckedManager`` does, with calls that were
    not refused as mistakes.

    >>> model = ReferenceManager(num_blocks=8, block_size=4)
    >>> model.open("a", [5, 6, 7, 8, 9]); model.commit("a", [5, 6, 7, 8, 9])
    0
    >>> model.open("b", [5, 6, 7, 8, 1])
    4
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_seqs: int = 256,
        watermark: float = 0.0,
        policy: str | Callable[[int, int], ReferencePolicy] | None = "lru",
    ) -> None:
        """Make a model with the same sizes and policy as the manager it is compared with.

        ``policy`` is a name of ``REFERENCE_POLICIES``, something that makes a model from (num_blocks,
        block_size), or None for no prefix cache.
        """
        self.num_blocks, self.block_size, self.max_seqs = num_blocks, block_size, max_seqs
        self.watermark, self.free = watermark, num_blocks
        self.prefix_caching = policy is not None
        make = REFERENCE_POLICIES[policy or "lru"] if not callable(policy) else policy
        self.policy = make(num_blocks, block_size)
        self.by_path: dict[Path, ModelBlock] = {}  # oldest content first
        self.cached: list[ModelBlock] = []  # least recently released first
        self.seqs: dict[Hashable, ModelSequence] = {}
        names = "evicted copied dropped opened queried_tokens hit_tokens queried_blocks hit_blocks"
        self.counters = dict.fromkeys(names.split(), 0)
        self.announced: dict[Hashable, Announced] = {}
        self.pins: dict[int, list[ModelBlock]] = {}
        self.open_fences: list[int] = []
        self.fenced: list[tuple[set[int], ModelBlock]] = []  # (open fences that it waits for, block)
        self.copies: list[tuple[ModelBlock, ModelBlock]] = []  # (source, which it holds, and destination)
        self.events: list[ModelEvent] = []

    def state(self) -> dict[str, object]:
        """Everything that must agree with ``manager_state`` of the manager."""
        waiting = [block for _, block in self.fenced] + [source for source, _ in self.copies]
        return {
            "counts": (self.free, len(self.cached), self.num_blocks - self.free - len(self.cached)),
            "sequences": {seq_id: (s.length, len(s.tokens)) for seq_id, s in self.seqs.items()},
            "indexed": len(self.by_path),
            "used_slots": used_slots(self.by_path, self.seqs.values(), self.block_size),
            "pinned": len({id(block) for blocks in self.pins.values() for block in blocks}),
            "fenced": num_held_alone(waiting),
            "counters": self.counters,
        }

    # -- sequences

    def lookup(
        self,
        tokens: Sequence[int],
        max_new_tokens: int = 0,
        namespace: Namespace | None = None,
        media: Iterable[Media] = (),
    ) -> tuple[int, int, int, bool]:
        """Tokens, those cached, those coming, and whether prompt and growth fit now."""
        limit = len(tokens) - 1
        prompt = self._path(namespace, media, tokens)
        hit = self._hit(prompt, limit)
        coming = 0
        for other in self.announced.values():
            common = 1  # the namespace, then whole blocks
            whole = min(max(limit, 0), len(other.tokens)) // self.block_size + 1
            while common < whole and prompt[: common + 1] == other.path[: common + 1]:
                common += 1
            coming = max(coming, common - 1 - len(hit))
        fresh = self._blocks_for(len(tokens) + max_new_tokens) - len(hit)
        fits = len(self.seqs) < self.max_seqs and self._fits(hit, fresh)
        return len(tokens), len(hit) * self.block_size, coming * self.block_size, fits

    def open(
        self,
        seq_id: Hashable,
        tokens: Sequence[int],
        *,
        namespace: Namespace | None = None,
        media: Iterable[Media] = (),
        max_cached_tokens: int | None = None,
        partial_hits: bool = False,
        announce: bool = False,
    ) -> int | None:
        """Cached tokens of the new sequence, or None."""
        length, media = len(tokens), tuple(media)
        limit = length - 1 if max_cached_tokens is None else min(max_cached_tokens, length)
        prompt = self._path(namespace, media, tokens)
        hit = self._hit(prompt, limit)
        fresh = self._blocks_for(length) - len(hit)
        if len(self.seqs) == self.max_seqs or not self._fits(hit, fresh):
            return None
        most = limit - len(hit) * self.block_size if partial_hits else 0
        source, count = best_child(self.by_path, prompt, len(hit), most)
        if source is None or not self._fits([*hit, source], fresh):
            source, count = None, 0
        cached = len(hit) * self.block_size + count
        seq = ModelSequence(prompt[0], media, length)
        for block in [*hit, *([source] if source else [])]:
            self._hold(block)
        seq.blocks = hit + self._take(fresh)
        if source:
            self.copies.append((source, seq.blocks[len(hit)]))
        seq.tokens = list(tokens[:cached])
        for block in hit:
            self.policy.hit(block)
        self.seqs[seq_id] = seq
        if announce and self.prefix_caching:
            self.announced[seq_id] = Announced(list(tokens), prompt)
        self._count(
            copied=source is not None,
            opened=1,
            queried_tokens=length,
            hit_tokens=cached,
            queried_blocks=length // self.block_size,
            hit_blocks=len(hit),
        )
        return cached

    def step(self, seq_ids: Sequence[Hashable], count: int = 1) -> bool:
        """Grow every sequence, or none and False."""
        seqs = [self.seqs[seq_id] for seq_id in seq_ids]
        grow = [self._blocks_for(s.length + count) - len(s.blocks) for s in seqs]
        copies, private, burdened = (
            shared_tails(self.by_path, seqs, self.block_size) if count else ([], [], [])
        )
        available = self.free + len(self.cached)
        total = sum(grow) + len(copies)
        behind = [path for block in burdened for path in paths_behind(self.by_path, block)]
        idle = not any(self.by_path[path].refs for path in behind)
        if total - len(burdened) <= available < total and idle:
            for path in dict.fromkeys(behind):
                self._evict(self.by_path[path], "capacity")
            copies, private, _ = shared_tails(self.by_path, seqs, self.block_size)
        if sum(grow) + len(copies) > self.free + len(self.cached):
            return False
        fresh = self._take(sum(grow) + len(copies))
        for s in copies:
            old, s.blocks[-1] = s.blocks[-1], fresh.pop()
            self._copy(old, s.blocks[-1])
        for block in private:
            if block.path is not None:
                self._forget(block, "rewritten")
        for s, n in zip(seqs, grow, strict=True):
            s.blocks += [fresh.pop() for _ in range(n)]
            s.length += count
        self._count(copied=len(copies))
        return True

    def commit(self, seq_id: Hashable, tokens: Sequence[int], media: Iterable[Media] = ()) -> None:
        """Record final tokens; full blocks become shared, or are replaced by equal ones."""
        seq = self.seqs[seq_id]
        start = len(seq.tokens) // self.block_size
        seq.tokens += tokens
        seq.media |= set(media)
        full = len(seq.tokens) // self.block_size
        path = self._path(seq.namespace, seq.media, seq.tokens)
        for i in range(start, full if self.prefix_caching and seq.chain is None else 0):
            known = self.by_path.get(path[: i + 2])
            if known is None:
                seq.blocks[i].path = path[: i + 2]
                self.by_path[path[: i + 2]] = seq.blocks[i]
                self.events.append(ModelEvent("stored", path[: i + 2], ""))
            elif known is not seq.blocks[i]:
                self._hold(known)
                seq.blocks[i], own = known, seq.blocks[i]
                self._release(own)
        self._cut_announced(seq_id)

    def commit_step(self, seq_ids: Sequence[Hashable], tokens: Sequence[int]) -> None:
        """Commit one token of each."""
        for seq_id, token in zip(seq_ids, tokens, strict=True):
            self.commit(seq_id, [token])

    def accept(
        self, seq_ids: Sequence[Hashable], drafts: Sequence[Sequence[int]], num_accepted: Sequence[int]
    ) -> None:
        """``commit_step`` with ``num_accepted``: commit the first so many of each row, cut behind them."""
        for seq_id, row, count in zip(seq_ids, drafts, num_accepted, strict=True):
            self.commit(seq_id, row[:count])
            self.truncate(seq_id, len(self.seqs[seq_id].tokens))

    def fork(self, seq_id: Hashable, child_id: Hashable) -> bool:
        """Share every block."""
        if len(self.seqs) == self.max_seqs:
            return False
        seq = self.seqs[seq_id]
        child = ModelSequence(seq.namespace, seq.media, seq.length)
        child.blocks, child.tokens = list(seq.blocks), list(seq.tokens)
        child.chain = None if seq.chain is None else list(seq.chain)
        for block in child.held():
            block.refs += 1
        self.seqs[child_id] = child
        return True

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Give up blocks from the end."""
        seq = self.seqs[seq_id]
        while len(seq.blocks) > self._blocks_for(length):
            self._release(seq.blocks.pop())
        seq.length = length
        seq.media = {item for item in seq.media if item.offset < length}
        del seq.tokens[length:]
        self._cut_announced(seq_id)

    def close(self, seq_id: Hashable) -> None:
        """Give up everything."""
        for block in reversed(self.seqs.pop(seq_id).held()):
            self._release(block)
        self.announced.pop(seq_id, None)

    # -- what holds blocks besides sequences

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

    def take_copies(self) -> None:
        """Let go of what the copies read."""
        copies, self.copies = self.copies, []
        for source, _ in copies:
            self._release(source)

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

    # -- the whole pool

    def reset(self) -> bool:
        """Forget all, if nobody holds anything."""
        if self.free + len(self.cached) < self.num_blocks:
            return False
        if self.cached:
            self.events.append(ModelEvent("cleared", (), ""))
        for block in self.cached:
            self.policy.forgotten(block)
        self._count(evicted=len(self.cached))
        self.by_path.clear()
        self.cached.clear()
        self.free = self.num_blocks
        return True

    def resize(self, num_blocks: int) -> bool:
        """Have so many blocks, or False while more are held or a fence is open."""
        active = self.num_blocks - self.free - len(self.cached)
        if self.open_fences or active > num_blocks:
            return False
        while active + len(self.cached) > num_blocks:
            self._evict(self.policy.choose(self._leaves()), "capacity", chosen=True)
        self.policy.resize(num_blocks)
        self.num_blocks, self.free = num_blocks, num_blocks - active - len(self.cached)
        return True

    # -- inner steps

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _path(self, namespace: Namespace | None, media: Iterable[Media], tokens: Sequence[int]) -> Path:
        return path_of(namespace, media, tokens, self.block_size)

    def _hit(self, prompt: Path, limit: int) -> list[ModelBlock]:
        hit: list[ModelBlock] = []
        while self.prefix_caching and (len(hit) + 1) * self.block_size <= limit:
            block = self.by_path.get(prompt[: len(hit) + 2])
            if block is None:
                break
            hit.append(block)
        return hit

    def _fits(self, held: Sequence[ModelBlock], fresh: int) -> bool:
        need = fresh + sum(not block.refs for block in held)
        reserve = int(self.watermark * self.num_blocks) if self.seqs else 0
        return need == 0 or need <= self.free + len(self.cached) - reserve

    def _cut_announced(self, seq_id: Hashable) -> None:
        """Forget of an announced prompt what the sequence has lost, and all of it once it is committed."""
        if seq_id in self.announced:
            seq, prompt = self.seqs[seq_id], self.announced.pop(seq_id)
            if len(seq.tokens) < min(len(prompt.tokens), seq.length):
                self.announced[seq_id] = prompt._replace(tokens=prompt.tokens[: seq.length])

    def _leaves(self) -> list[ModelBlock]:
        parents = {path[:-1] for path in self.by_path}
        return [block for block in self.cached if block.path not in parents]

    def _take(self, count: int) -> list[ModelBlock]:
        for _ in range(count - self.free):
            self._evict(self.policy.choose(self._leaves()), "capacity", chosen=True)
        self.free -= max(count, 0)
        return [ModelBlock() for _ in range(count)]

    def _evict(self, block: ModelBlock, reason: str, chosen: bool = False) -> None:
        """Make a cached block free; ``chosen`` by the policy or not."""
        self.cached.remove(block)
        self._forget(block, reason, chosen)
        self.free += 1
        self._count(evicted=1)

    def _forget(self, block: ModelBlock, reason: str, chosen: bool = False) -> None:
        assert block.path is not None
        del self.by_path[block.path]
        self.events.append(ModelEvent("removed", block.path, reason))
        if chosen:
            self.policy.evicted(block, self._leaves())
        else:
            self.policy.forgotten(block)
        block.path = None

    def _hold(self, block: ModelBlock) -> None:
        if not block.refs:
            self.cached.remove(block)
        block.refs += 1

    def _copy(self, old: ModelBlock, new: ModelBlock) -> None:
        """Hold ``old`` for the copy, in place of a sequence; or else what ``old`` is to be a copy of."""
        source = next((src for src, dst in self.copies if dst is old), old)
        self.copies.append((source, new))
        if source is not old:
            source.refs += 1
            self._release(old)

    def _release(self, block: ModelBlock) -> None:
        alone = block.refs == 1 + sum(block is other for _, other in self.fenced)
        for copy in [c for c in self.copies if alone and c[1] is block]:
            self.copies.remove(copy)  # nobody is left for it
            self._release(copy[0])
        if self.open_fences:
            self.fenced.append((set(self.open_fences), block))
        else:
            self._give_up(block)

    def _give_up(self, block: ModelBlock) -> None:
        block.refs -= 1
        if not block.refs and block.path is not None:
            self.cached.append(block)
            self.policy.released(block)
            surplus = self.policy.surplus(self._leaves)
            if surplus is not None:
                self._evict(surplus, "policy", chosen=True)
        elif not block.refs:
            self.free += 1

    def _count(self, **more: int) -> None:
        for name, count in more.items():
            self.counters[name] += count
