"""A slow, obviously right model of the hybrid manager: lists, dicts and whole-prefix keys, no tree."""

from collections.abc import Callable, Hashable, Sequence

from pagedkv.errors import NeverFits
from pagedkv.hybrid.group import CacheGroup
from pagedkv.hybrid.reference_contents import ReferenceContents
from pagedkv.hybrid.reference_parts import (
    Held,
    HybridBlock,
    HybridSequence,
    Prefix,
    best_child,
    continues,
    let_go,
)
from pagedkv.namespace import Namespace
from pagedkv.reference_blocks import num_common_tokens
from pagedkv.reference_policies import ReferencePolicy


class ReferenceHybridManager(ReferenceContents):
    """The rules of ``HybridKVCacheManager``, one position and one block at a time.

    It trusts its caller: drive it beside a manager with calls that were not refused as mistakes.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        block_size: int,
        max_seqs: int = 256,
        max_nodes: int | None = None,
        watermark: float = 0.0,
        policy: str | Callable[[int, int], ReferencePolicy] = "lru",
    ) -> None:
        """Make a model with the same sizes and policy as the manager it is compared with."""
        super().__init__(groups, num_blocks, block_size, policy)
        self.max_seqs, self.max_nodes, self.watermark = max_seqs, max_nodes, watermark
        self.spare_nodes = (max_nodes or 0) - num_blocks
        self.births: dict[Prefix, int] = {}  # when each content became known
        self.num_births = 0
        self.announced: dict[Hashable, tuple[Namespace | None, list[int]]] = {}

    def lookup(
        self,
        tokens: Sequence[int],
        max_new_tokens: int = 0,
        namespace: Namespace | None = None,
        max_fresh_tokens: int | None = None,
    ) -> tuple[int, int, int, bool]:
        """Tokens, those cached, those coming, and whether prompt and growth fit now."""
        prefixes = self._longest_hit(namespace, tokens, len(tokens) - 1)
        cached, total = len(prefixes) * self.block_size, len(tokens) + max_new_tokens
        room = max_fresh_tokens or max(1, len(tokens))
        points = [(s, min(s + room, len(tokens))) for s in range(cached, max(len(tokens), cached + 1), room)]
        points += [(total - 1, total)] if max_new_tokens else []
        for committed, length in points:
            self._require_fits(committed, length)
        in_use = [{i for i, p in enumerate(prefixes) if p in by and by[p].refs} for by in self.by_prefix]
        need = max(
            sum(
                self.sees(group, committed // self.block_size * self.block_size, i) and i not in used
                for group, used in zip(self.groups, in_use, strict=True)
                for i in range(self._blocks_for(length))
            )
            for committed, length in points
        )
        common = [
            num_common_tokens(tokens[:-1], other) // self.block_size * self.block_size
            for other_namespace, other in self.announced.values()
            if other_namespace == namespace
        ]
        fits = len(self.seqs) < self.max_seqs and self._can_have(need)
        return len(tokens), cached, max([0, *(c - cached for c in common)]), fits

    def open(
        self,
        seq_id: Hashable,
        tokens: Sequence[int],
        namespace: Namespace | None = None,
        max_fresh_tokens: int | None = None,
        max_cached_tokens: int | None = None,
        loaded_tokens: int = 0,
        partial_hits: bool = False,
        announce: bool = False,
    ) -> tuple[int, int] | None:
        """Length of the new sequence and how many of its tokens are cached, or None."""
        self._require_fits(max(0, len(tokens) - 1), len(tokens))
        limit = len(tokens) - 1 if max_cached_tokens is None else min(max_cached_tokens, len(tokens))
        size, room = self.block_size, max_fresh_tokens or len(tokens)
        prefixes = self._longest_hit(namespace, tokens, limit)
        position = max(len(prefixes), loaded_tokens // size) * size
        if position > len(prefixes) * size:
            prefixes = self._there(namespace, tokens, min(limit, position), position)
        hit, cached = len(prefixes), len(prefixes) * size
        length = min(len(tokens), max(cached, loaded_tokens) + room)
        self._require_fits(position, length)
        held = [
            [by[p] if self.sees(group, position, i) else None for i, p in enumerate(prefixes)]
            for group, by in zip(self.groups, self.by_prefix, strict=True)
        ]
        idle = sum(b is not None and not b.refs for row in held for b in row)
        fresh = self._num_seen(position, hit, length)
        if len(self.seqs) == self.max_seqs or not self._can_have(fresh + idle):
            return None
        sources: list[HybridBlock] = []
        if partial_hits and loaded_tokens <= cached:
            parent: Prefix = prefixes[-1] if prefixes else (namespace,)
            wanted = tokens[cached : min(limit, cached + size)]
            known = sorted(self.nodes(), key=self.births.__getitem__)
            child, count = best_child(known, parent, wanted, size)
            found = [by[child] for by in self.by_prefix if child is not None and child in by]
            longer = min(len(tokens), cached + count + room)
            more = self._num_seen(position, hit, longer)
            idle += sum(not b.refs for b in found)
            if len(found) == len(self.groups) and self._can_have(more + idle):
                sources, length, fresh, cached = found, longer, more, cached + count
        for block in [*let_go(self.groups, held), *sources]:
            self._hold(block)
        self._make_room(fresh)
        for block in let_go(self.groups, held)[::-1]:
            self.policy.hit(block)
        for g, row in enumerate(held):
            more_blocks = range(hit, self._blocks_for(length))
            row += [self._new(g) if self.sees(self.groups[g], position, i) else None for i in more_blocks]
        self._copy([[block] for block in sources], [row[hit : hit + 1] for row in held])
        self.seqs[seq_id] = HybridSequence(namespace, held, length)
        self.seqs[seq_id].tokens = list(tokens[:cached])
        if announce:
            self.announced[seq_id] = namespace, list(tokens)
            self._cut_announced(seq_id, None)
        return length, cached

    def step(self, seq_ids: Sequence[Hashable], count: int) -> bool:
        """Grow every sequence, or none and False."""
        seqs = [self.seqs[seq_id] for seq_id in seq_ids]
        for s in seqs:
            self._require_fits(s.length, s.length + count)
        grow = [self._blocks_for(s.length + count) - self._blocks_for(s.length) for s in seqs]
        copies, private, burdened = self._shared_tails(seqs) if count else ([], [], [])
        width, available = len(self.groups), self.free + len(self.cached)
        total = sum(grow) + len(copies)
        behind = [b for s in burdened for b in self._behind(s.tail().prefix)]
        fenced = [p for _, item in self.fenced for p in item.prefixes]
        builds_on = [s for s in burdened if any(continues(p, s.tail().prefix) for p in fenced)]
        idle = not builds_on and not any(block.refs for block in behind)
        if (total - len(burdened)) * width <= available < total * width and idle:
            for cached in behind:
                self._evict(cached, "capacity")
            copies, private, _ = self._shared_tails(seqs)
            total = sum(grow) + len(copies)
        if total * width > self.free + len(self.cached):
            return False
        self._make_room(total * width)
        for s in copies:
            prefix = s.tail().prefix
            old = [[row[-1]] for row in s.blocks]
            for g, row in enumerate(s.blocks):
                row[-1] = self._new(g)
            self._copy(old, [row[-1:] for row in s.blocks])
            self._release([], [] if prefix is None else [prefix])
        for s in private:
            for row in s.blocks:
                block = row[-1]
                assert block is not None
                if block.prefix is not None:
                    self._forget(block, "rewritten")
        for s, n in zip(seqs, grow, strict=True):
            for g, row in enumerate(s.blocks):
                row += [self._new(g) for _ in range(n)]
            s.length += count
        return True

    def commit(self, seq_id: Hashable, tokens: Sequence[int]) -> None:
        """Record final tokens; share full blocks, or take equal ones; let go of what no later token sees."""
        seq, known = self.seqs[seq_id], self.nodes()
        start = len(seq.tokens) // self.block_size
        seq.tokens += tokens
        full = len(seq.tokens) // self.block_size
        for prefix in seq.prefixes(self.block_size)[start:full]:
            if prefix not in known:
                self.births[prefix] = self.num_births = self.num_births + 1
        while self.max_nodes is not None and len(self.nodes()) > self.max_nodes:
            if self.cached:
                self._evict(self.policy.choose(self._leaves()), "capacity", chosen=True)
            else:
                self.max_nodes *= 2
        for i, prefix in enumerate(seq.prefixes(self.block_size)[start:full], start):
            for g, (row, by) in enumerate(zip(seq.blocks, self.by_prefix, strict=True)):
                own, equal = row[i], by.get(prefix)
                if own is None:
                    continue  # nothing was to be loaded here
                if equal is None:
                    self._store(own, g, prefix)
                else:
                    self._hold(equal)
                    row[i] = equal
                    self._release([[own]])
        if full > start:
            self._slide(seq, full * self.block_size)
        self._cut_announced(seq_id, None)

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
        child = HybridSequence(seq.namespace, [list(row) for row in seq.blocks], seq.length)
        child.tokens = list(seq.tokens)
        for block in let_go(self.groups, child.blocks):
            block.refs += 1
        self.seqs[child_id] = child
        return True

    def can_truncate(self, seq_id: Hashable, length: int) -> bool:
        """Whether everything that position ``length`` sees is still there."""
        return not any(
            block is None and self.sees(group, length, i)
            for group, row in zip(self.groups, self.seqs[seq_id].blocks, strict=True)
            for i, block in enumerate(row[: self._blocks_for(length)])
        )

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Give up blocks from the end."""
        seq, keep = self.seqs[seq_id], self._blocks_for(length)
        prefixes = seq.prefixes(self.block_size)[keep:]
        given_up = [row[keep:] for row in seq.blocks]
        for row in seq.blocks:
            del row[keep:]
        shorter, seq.length = length < seq.length, length
        del seq.tokens[length:]
        self._release(given_up, prefixes[::-1])
        if shorter:
            self._cut_announced(seq_id, length)

    def close(self, seq_id: Hashable) -> None:
        """Give up everything."""
        self.truncate(seq_id, 0)
        self.announced.pop(seq_id, None)
        del self.seqs[seq_id]

    # -- what holds blocks besides sequences

    def can_pin(self, seq_id: Hashable, num_blocks: int) -> bool:
        """Whether each group still has what a hit of so many blocks needs."""
        prefixes = self.seqs[seq_id].prefixes(self.block_size)[:num_blocks]
        return all(self._serves(g, prefixes) for g in range(len(self.groups)))

    def pin(self, seq_id: Hashable, num_blocks: int, number: int) -> None:
        """Hold what a hit of so many blocks needs."""
        prefixes = self.seqs[seq_id].prefixes(self.block_size)[:num_blocks]
        rows = [
            [
                by[p] if self.sees(group, num_blocks * self.block_size, i) else None
                for i, p in enumerate(prefixes)
            ]
            for group, by in zip(self.groups, self.by_prefix, strict=True)
        ]
        self.pins[number] = Held(let_go(self.groups, rows), prefixes[::-1])
        for block in self.pins[number].blocks:
            self._hold(block)

    def unpin(self, number: int) -> None:
        """Let it go."""
        pin = self.pins.pop(number)
        self._release([pin.blocks[::-1]], pin.prefixes)

    def retain(self, seq_id: Hashable, start: int, stop: int, priority: int) -> int:
        """Set the priority of all blocks with content of tokens of this range."""
        full = range(len(self.seqs[seq_id].tokens) // self.block_size)
        wanted = {t // self.block_size for t in range(start, stop)} & set(full)
        prefixes = self.seqs[seq_id].prefixes(self.block_size)
        blocks = [by[prefixes[i]] for by in self.by_prefix for i in sorted(wanted) if prefixes[i] in by]
        for block in blocks:
            self.policy.retain(block, priority)
        return len(blocks)

    def resize(self, num_blocks: int) -> bool:
        """Have so many blocks, or False while more are held or a fence is open."""
        done = self._resize(num_blocks)
        if done and self.max_nodes is not None:
            self.max_nodes = max(self.max_nodes, num_blocks + self.spare_nodes)
        return done

    # -- inner steps

    def _can_have(self, need: int) -> bool:
        reserve = int(self.watermark * self.num_blocks) if self.seqs else 0
        return need == 0 or need <= self.free + len(self.cached) - reserve

    def _num_seen(self, position: int, first: int, length: int) -> int:
        """Blocks of all groups, from ``first`` on, that a token at ``position`` or a later one sees."""
        blocks = range(first, self._blocks_for(length))
        return sum(self.sees(group, position, i) for group in self.groups for i in blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _require_fits(self, committed: int, length: int) -> None:
        """Refuse what a sequence could not hold if it were alone."""
        position = committed // self.block_size * self.block_size
        total = range(self._blocks_for(length))
        if sum(self.sees(group, position, i) for group in self.groups for i in total) > self.num_blocks:
            raise NeverFits(f"{length} tokens never fit")

    def _longest_hit(self, namespace: Namespace | None, tokens: Sequence[int], limit: int) -> list[Prefix]:
        known = self.nodes()
        for hit in range(max(0, limit) // self.block_size, 0, -1):
            prefixes: list[Prefix] = [(namespace, *tokens[: (i + 1) * self.block_size]) for i in range(hit)]
            if prefixes[-1] in known and all(self._serves(g, prefixes) for g in range(len(self.groups))):
                return prefixes
        return []

    def _there(
        self, namespace: Namespace | None, tokens: Sequence[int], limit: int, position: int
    ) -> list[Prefix]:
        """Contents up to the first that is unknown, or of which a group lacks what ``position`` sees."""
        known, found = self.nodes(), list[Prefix]()
        for i in range(max(0, limit) // self.block_size):
            prefix: Prefix = (namespace, *tokens[: (i + 1) * self.block_size])
            has = [
                prefix in by or not self.sees(group, position, i)
                for group, by in zip(self.groups, self.by_prefix, strict=True)
            ]
            if prefix not in known or not all(has):
                break
            found.append(prefix)
        return found

    def _slide(self, seq: HybridSequence, position: int) -> None:
        fallen = [
            [None if self.sees(group, position, i) else b for i, b in enumerate(row)]
            for group, row in zip(self.groups, seq.blocks, strict=True)
        ]
        for row, gone in zip(seq.blocks, fallen, strict=True):
            for i, block in enumerate(gone):
                if block is not None:
                    row[i] = None
                    self.fallen += 1
        self._release(fallen)

    def _copy(
        self, old: Sequence[Sequence[HybridBlock | None]], new: Sequence[Sequence[HybridBlock | None]]
    ) -> None:
        """Hold ``old`` for the copies, or else what those are to be copies of."""
        for block, target in zip(let_go(self.groups, old), let_go(self.groups, new), strict=bool(old)):
            source = next((src for src, dst in self.copies if dst is block), block)
            self.copies.append((source, target))
            self.copied += 1
            if source is not block:
                source.refs += 1
                self._release([[block]])

    def _shared_tails(
        self, seqs: list[HybridSequence]
    ) -> tuple[list[HybridSequence], list[HybridSequence], list[HybridSequence]]:
        """Who must copy its tail, who keeps it as the longest holder, who would if nothing built on it."""
        partial = [s for s in seqs if s.length % self.block_size]
        copies = [s for s in partial if s.tail().prefix is not None or s.tail().refs > 1]
        kept, burdened = [], []
        for block in {id(s.tail()): s.tail() for s in copies}.values():
            holders = [s for s in copies if s.tail() is block]
            if len(holders) < max(self._num_users(block), block.refs):
                continue
            keeper = max(reversed(holders), key=lambda s: s.length)
            if block.prefix is not None and len(holders) > 1 and self.open_fences:
                continue  # the fence holds what the others let go of
            if any(continues(prefix, block.prefix) for prefix in self.nodes()):
                burdened.append(keeper)
            else:
                copies.remove(keeper)
                kept.append(keeper)
        return copies, kept, burdened

    def _num_users(self, block: HybridBlock) -> int:
        """Who holds a block or its content, which they may hold though they let the block go."""
        if block.prefix is None:
            return block.refs
        others = [*self.pins.values(), *(item for _, item in self.fenced)]
        held = [s.prefixes(self.block_size) for s in self.seqs.values()] + [item.prefixes for item in others]
        return sum(block.prefix in prefixes for prefixes in held)

    def _cut_announced(self, seq_id: Hashable, length: int | None) -> None:
        """Forget of an announced prompt what the sequence has lost, and all of it once it is committed."""
        if seq_id in self.announced:
            namespace, tokens = self.announced.pop(seq_id)
            if len(self.seqs[seq_id].tokens) < len(tokens[:length]):
                self.announced[seq_id] = namespace, tokens[:length]
