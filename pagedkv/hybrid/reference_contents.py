"""What the slow model of the hybrid manager knows of blocks and contents, whichever sequence holds them."""

from collections.abc import Callable, Hashable, Sequence

from pagedkv.hybrid.group import CacheGroup
from pagedkv.hybrid.reference_parts import (
    Held,
    HybridBlock,
    HybridEvent,
    HybridSequence,
    Prefix,
    continues,
    let_go,
    tree_path,
)
from pagedkv.reference_policies import REFERENCE_POLICIES, ReferencePolicy


class ReferenceContents:
    """Blocks by content and group, who holds them, and who goes when room is needed."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        block_size: int,
        policy: str | Callable[[int, int], ReferencePolicy],
    ) -> None:
        """Start with free blocks."""
        self.groups, self.num_blocks, self.block_size = groups, num_blocks, block_size
        make = policy if callable(policy) else REFERENCE_POLICIES[policy]
        self.policy = make(num_blocks, block_size)
        self.free = num_blocks
        self.by_prefix: list[dict[Prefix, HybridBlock]] = [{} for _ in groups]
        self.cached: list[HybridBlock] = []  # least recently released first
        self.seqs: dict[Hashable, HybridSequence] = {}
        self.pins: dict[int, Held] = {}
        self.open_fences: list[int] = []
        self.fenced: list[tuple[set[int], Held]] = []  # (open fences that it waits for, one block or content)
        self.events: list[HybridEvent] = []
        self.copies: list[tuple[HybridBlock, HybridBlock]] = []  # (source, which it holds, and destination)
        self.evicted = self.copied = self.fallen = 0

    def state(self) -> dict[str, object]:
        """Everything that must agree with the manager."""
        held = {id(b): b for s in self.seqs.values() for row in s.blocks for b in row if b is not None}
        others = [*self.pins.values(), *(item for _, item in self.fenced)]
        held |= {id(b): b for item in others for b in item.blocks}
        held |= {id(b): b for b, _ in self.copies}
        return {
            "counts": (self.free, len(self.cached), self.num_blocks - self.free - len(self.cached)),
            "lengths": {seq_id: (s.length, len(s.tokens)) for seq_id, s in self.seqs.items()},
            "tables": {
                seq_id: [[b is not None for b in row] for row in s.blocks] for seq_id, s in self.seqs.items()
            },
            "groups": [
                (sum(b.group == g for b in held.values()), sum(b.group == g for b in self.cached))
                for g in range(len(self.groups))
            ],
            "nodes": len(self.nodes()),
            "pinned": len({id(b) for pin in self.pins.values() for b in pin.blocks}),
            "fenced": self._num_fenced_only(),
            "counters": (self.evicted, self.copied, self.fallen),
        }

    def sees(self, group: CacheGroup, position: int, block: int) -> bool:
        """Whether the query at ``position``, or a later one, may read a position of a block."""
        positions = range(block * self.block_size, (block + 1) * self.block_size)
        return any(group.window is None or q > position - group.window or q < group.sinks for q in positions)

    def nodes(self) -> set[Prefix]:
        """Contents that a block, a sequence, a pin or a fence has, and all that these continue."""
        ends = [prefix for by in self.by_prefix for prefix in by]
        ends += [p for s in self.seqs.values() for p in s.prefixes(self.block_size)]
        others = [*self.pins.values(), *(item for _, item in self.fenced)]
        ends += [prefix for item in others for prefix in item.prefixes]
        size = self.block_size
        return {end[: i + 1] for end in set(ends) for i in range(size, len(end), size)}

    def serves(self, prefix: Prefix) -> bool:
        """Whether a hit could end with this content."""
        ends = range(self.block_size + 1, len(prefix) + 1, self.block_size)
        return all(self._serves(g, [prefix[:end] for end in ends]) for g in range(len(self.groups)))

    def uses(self, prefix: Prefix, block: HybridBlock) -> bool:
        """Whether a hit that ends with this content would hold a block."""
        assert block.prefix is not None
        last = (len(block.prefix) - 1) // self.block_size - 1
        return prefix[: len(block.prefix)] == block.prefix and self.sees(
            self.groups[block.group], len(prefix) - 1, last
        )

    def open_fence(self, number: int) -> None:
        """What is given up from now on waits for it."""
        self.open_fences.append(number)

    def signal(self, number: int) -> None:
        """Give up what waited for this fence alone."""
        self.open_fences.remove(number)
        for fences, _ in self.fenced:
            fences.discard(number)
        while self.fenced and not self.fenced[0][0]:
            _, item = self.fenced.pop(0)
            for block in item.blocks:
                self._give_up(block)

    def take_copies(self) -> None:
        """Let go of what the copies read."""
        copies, self.copies = self.copies, []
        for source, _ in copies:
            self._release([[source]])

    def reset(self) -> bool:
        """Forget all, if nobody holds a block or a content."""
        others = [*self.pins.values(), *(item for _, item in self.fenced)]
        held = any(item.prefixes for item in others)
        held = held or any(s.prefixes(self.block_size) for s in self.seqs.values())
        if held or self.free + len(self.cached) < self.num_blocks:
            return False
        if self.cached:
            self.events.append(HybridEvent("cleared", 0, (), ""))
        for block in self.cached:
            self.policy.forgotten(block)
        self.evicted += len(self.cached)
        self.cached.clear()
        self.by_prefix = [{} for _ in self.groups]
        self.free = self.num_blocks
        return True

    # -- inner steps

    def _resize(self, num_blocks: int) -> bool:
        active = self.num_blocks - self.free - len(self.cached)
        if self.open_fences or active > num_blocks:
            return False
        while active + len(self.cached) > num_blocks:
            self._evict(self.policy.choose(self._leaves()), "capacity", chosen=True)
        self.num_blocks, self.free = num_blocks, num_blocks - active - len(self.cached)
        self.policy.resize(num_blocks)
        return True

    def _serves(self, g: int, prefixes: Sequence[Prefix]) -> bool:
        """Whether a group has all that the token behind these blocks sees."""
        position = len(prefixes) * self.block_size
        return all(
            prefix in self.by_prefix[g] or not self.sees(self.groups[g], position, i)
            for i, prefix in enumerate(prefixes)
        )

    def _behind(self, prefix: Prefix | None) -> list[HybridBlock]:
        """Blocks whose content continues ``prefix``."""
        return [b for by in self.by_prefix for p, b in by.items() if continues(p, prefix)]

    def _leaves(self) -> list[HybridBlock]:
        parents = {b.path[:-1] for by in self.by_prefix for b in by.values() if b.path is not None}
        return [block for block in self.cached if block.path not in parents]

    def _make_room(self, count: int) -> None:
        while self.free < count:
            victim = self.policy.choose(self._leaves())
            assert isinstance(victim, HybridBlock)
            self._evict(victim, "capacity", chosen=True)

    def _evict(self, block: object, reason: str, chosen: bool = False) -> None:
        assert isinstance(block, HybridBlock)
        self.cached.remove(block)
        self._forget(block, reason, chosen)
        self.evicted += 1
        self.free += 1

    def _store(self, block: HybridBlock, group: int, prefix: Prefix) -> None:
        self.by_prefix[group][prefix], block.prefix = block, prefix
        block.path = tree_path(self.groups, group, prefix, self.block_size)
        self.events.append(HybridEvent("stored", group, prefix, ""))

    def _forget(self, block: HybridBlock, reason: str, chosen: bool = False) -> None:
        assert block.prefix is not None
        del self.by_prefix[block.group][block.prefix]
        self.events.append(HybridEvent("removed", block.group, block.prefix, reason))
        if chosen:
            self.policy.evicted(block, self._leaves())
        else:
            self.policy.forgotten(block)
        block.prefix = block.path = None

    def _new(self, g: int) -> HybridBlock:
        self.free -= 1
        return HybridBlock(g)

    def _hold(self, block: HybridBlock) -> None:
        if not block.refs:
            self.cached.remove(block)
        block.refs += 1

    def _release(self, rows: Sequence[Sequence[HybridBlock | None]], prefixes: Sequence[Prefix] = ()) -> None:
        """Let go of blocks and contents, or leave them to the fences that are open."""
        for block in let_go(self.groups, rows):
            fenced = [other for _, item in self.fenced for other in item.blocks]
            for copy in [c for c in self.copies if c[1] is block and block.refs == 1 + fenced.count(block)]:
                self.copies.remove(copy)  # nobody is left for it
                self._release([[copy[0]]])
        items = [Held([block], []) for block in let_go(self.groups, rows)]
        items += [Held([], [prefix]) for prefix in prefixes]
        for item in items:
            if self.open_fences:
                self.fenced.append((set(self.open_fences), item))
            for block in () if self.open_fences else item.blocks:
                self._give_up(block)

    def _give_up(self, block: HybridBlock) -> None:
        block.refs -= 1
        if block.refs:
            return
        if block.prefix is None:
            self.free += 1
            return
        self.cached.append(block)
        self.policy.released(block)
        surplus = self.policy.surplus(self._leaves)
        if surplus is not None:
            self._evict(surplus, "policy", chosen=True)

    def _num_fenced_only(self) -> int:
        waiting = [block for _, item in self.fenced for block in item.blocks]
        waiting += [source for source, _ in self.copies]
        return sum(block.refs == waiting.count(block) for block in set(waiting))
