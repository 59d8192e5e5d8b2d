"""A slow, obviously right model of the hybrid manager: lists, dicts and whole-prefix keys, no tree."""

from collections.abc import Hashable, Iterable, Sequence

from pagedkv.errors import NeverFits
from pagedkv.hybrid.group import CacheGroup
from pagedkv.namespace import Namespace

Path = tuple[object, ...]
"""Namespace and all tokens up to the end of a block."""


class _Block:
    def __init__(self, group: int) -> None:
        self.group = group
        self.refs = 1
        self.path: Path | None = None  # what it holds, once others may find it


class _Sequence:
    def __init__(self, namespace: Namespace | None, blocks: list[list[_Block | None]], length: int) -> None:
        self.namespace = namespace
        self.blocks = blocks  # per group; None where the block fell out of the window
        self.length = length
        self.tokens: list[int] = []  # the committed ones

    def tail(self) -> _Block:
        """The last block of the first group; whoever shares it shares the last block of every group."""
        block = self.blocks[0][-1]
        assert block is not None
        return block


class ReferenceHybridManager:
    """The rules of ``HybridKVCacheManager``, one position and one block at a time."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        block_size: int,
        max_seqs: int = 256,
        max_nodes: int | None = None,
    ) -> None:
        """Make a model with the same sizes as the manager it is compared with."""
        self.groups, self.num_blocks, self.block_size = groups, num_blocks, block_size
        self.max_seqs, self.max_nodes = max_seqs, max_nodes
        self.free = num_blocks
        self.by_path: list[dict[Path, _Block]] = [{} for _ in groups]
        self.cached: list[_Block] = []  # least recently released first
        self.seqs: dict[Hashable, _Sequence] = {}
        self.evicted = self.copied = self.fallen = 0

    def state(self) -> dict[str, object]:
        """Everything that must agree with the manager."""
        held = {id(b): b for s in self.seqs.values() for row in s.blocks for b in row if b is not None}
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
            "nodes": len(self._nodes()),
            "counters": (self.evicted, self.copied, self.fallen),
        }

    def sees(self, group: CacheGroup, position: int, block: int) -> bool:
        """Whether the query at ``position``, or a later one, may read a position of a block."""
        positions = range(block * self.block_size, (block + 1) * self.block_size)
        return any(group.window is None or q > position - group.window or q < group.sinks for q in positions)

    def open(
        self,
        seq_id: Hashable,
        tokens: Sequence[int],
        namespace: Namespace | None = None,
        max_fresh_tokens: int | None = None,
    ) -> tuple[int, int] | None:
        """Length of the new sequence and how many of its tokens are cached, or None."""
        self._require_fits(max(0, len(tokens) - 1), len(tokens))
        size = self.block_size
        paths = self._longest_hit(namespace, tokens)
        hit = len(paths)
        length = min(len(tokens), hit * size + (max_fresh_tokens or len(tokens)))
        self._require_fits(hit * size, length)
        held = [
            [by[p] if self.sees(group, hit * size, i) else None for i, p in enumerate(paths)]
            for group, by in zip(self.groups, self.by_path, strict=True)
        ]
        fresh = (self._blocks_for(length) - hit) * len(self.groups)
        idle = sum(b is not None and not b.refs for row in held for b in row)
        if len(self.seqs) == self.max_seqs or fresh + idle > self.free + len(self.cached):
            return None
        for row in held:
            for block in row:
                if block is not None:
                    self._hold(block)
        self._make_room(fresh)
        for g, row in enumerate(held):
            row += [self._new(g) for _ in range(self._blocks_for(length) - hit)]
        self.seqs[seq_id] = _Sequence(namespace, held, length)
        self.seqs[seq_id].tokens = list(tokens[: hit * size])
        return length, hit * size

    def step(self, seq_ids: Sequence[Hashable], count: int) -> bool:
        """Grow every sequence, or none and False."""
        seqs = [self.seqs[seq_id] for seq_id in seq_ids]
        for s in seqs:
            self._require_fits(s.length, s.length + count)
        grow = [self._blocks_for(s.length + count) - self._blocks_for(s.length) for s in seqs]
        copies, private, burdened = self._shared_tails(seqs) if count else ([], [], [])
        width, available = len(self.groups), self.free + len(self.cached)
        total = sum(grow) + len(copies)
        if (total - len(burdened)) * width <= available < total * width:
            for cached in [b for s in burdened for b in self._behind(s.tail().path)]:
                self._evict(cached)
            copies, private, _ = self._shared_tails(seqs)
            total = sum(grow) + len(copies)
        if total * width > self.free + len(self.cached):
            return False
        self._make_room(total * width)
        for s in copies:
            old = [row[-1] for row in s.blocks]
            for g, row in enumerate(s.blocks):
                row[-1] = self._new(g)
            self._release([[block] for block in old])
        for s in private:
            for row, by in zip(s.blocks, self.by_path, strict=True):
                block = row[-1]
                assert block is not None
                if block.path is not None:
                    del by[block.path]
                    block.path = None
        for s, n in zip(seqs, grow, strict=True):
            for g, row in enumerate(s.blocks):
                row += [self._new(g) for _ in range(n)]
            s.length += count
        self.copied += len(copies) * width
        return True

    def commit(self, seq_id: Hashable, tokens: Sequence[int]) -> None:
        """Record final tokens; share full blocks, or take equal ones; let go of what no later token sees."""
        seq = self.seqs[seq_id]
        start = len(seq.tokens) // self.block_size
        seq.tokens += tokens
        full = len(seq.tokens) // self.block_size
        while self.max_nodes is not None and len(self._nodes()) > self.max_nodes:
            self._evict(self.cached[0])
        for i in range(start, full):
            path = (seq.namespace, *seq.tokens[: (i + 1) * self.block_size])
            for row, by in zip(seq.blocks, self.by_path, strict=True):
                own, known = row[i], by.get(path)
                assert own is not None
                if known is None:
                    by[path], own.path = own, path
                else:
                    self._hold(known)
                    row[i] = known
                    self._drop(own)
        if full > start:
            self._slide(seq, full * self.block_size)

    def fork(self, seq_id: Hashable, child_id: Hashable) -> bool:
        """Share every block."""
        if len(self.seqs) == self.max_seqs:
            return False
        seq = self.seqs[seq_id]
        child = _Sequence(seq.namespace, [list(row) for row in seq.blocks], seq.length)
        child.tokens = list(seq.tokens)
        for row in child.blocks:
            for block in row:
                if block is not None:
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
        given_up = [row[keep:] for row in seq.blocks]
        for row in seq.blocks:
            del row[keep:]
        seq.length = length
        del seq.tokens[length:]
        self._release(given_up)

    def close(self, seq_id: Hashable) -> None:
        """Give up everything."""
        self.truncate(seq_id, 0)
        del self.seqs[seq_id]

    def serves(self, path: Path) -> bool:
        """Whether a hit could end with the content of ``path``."""
        ends = range(self.block_size + 1, len(path) + 1, self.block_size)
        return all(self._serves(g, [path[:end] for end in ends]) for g in range(len(self.groups)))

    def uses(self, path: Path, block: _Block) -> bool:
        """Whether a hit that ends with the content of ``path`` would hold a block."""
        assert block.path is not None
        last = (len(block.path) - 1) // self.block_size - 1
        return path[: len(block.path)] == block.path and self.sees(
            self.groups[block.group], len(path) - 1, last
        )

    # -- inner steps

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _require_fits(self, committed: int, length: int) -> None:
        """Refuse what a sequence could not hold if it were alone."""
        position = committed // self.block_size * self.block_size
        total = range(self._blocks_for(length))
        if sum(self.sees(group, position, i) for group in self.groups for i in total) > self.num_blocks:
            raise NeverFits(f"{length} tokens never fit")

    def _longest_hit(self, namespace: Namespace | None, tokens: Sequence[int]) -> list[Path]:
        known = self._nodes()
        for hit in range(max(0, len(tokens) - 1) // self.block_size, 0, -1):
            paths: list[Path] = [(namespace, *tokens[: (i + 1) * self.block_size]) for i in range(hit)]
            if paths[-1] in known and all(self._serves(g, paths) for g in range(len(self.groups))):
                return paths
        return []

    def _serves(self, g: int, paths: Sequence[Path]) -> bool:
        """Whether a group has all that the token behind these blocks sees."""
        position = len(paths) * self.block_size
        return all(
            path in self.by_path[g] or not self.sees(self.groups[g], position, i)
            for i, path in enumerate(paths)
        )

    def _slide(self, seq: _Sequence, position: int) -> None:
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

    def _shared_tails(
        self, seqs: list[_Sequence]
    ) -> tuple[list[_Sequence], list[_Sequence], list[_Sequence]]:
        """Who must copy its tail, who keeps it as its last holder, and who would if nothing built on it."""
        partial = [s for s in seqs if s.length % self.block_size]
        copies = [s for s in partial if s.tail().path is not None or s.tail().refs > 1]
        kept, burdened = [], []
        for block in {id(s.tail()): s.tail() for s in copies}.values():
            holders = [s for s in copies if s.tail() is block]
            if len(holders) < self._num_users(block):
                continue
            if any(self._behind(block.path)):
                burdened.append(holders[-1])
            else:
                copies.remove(holders[-1])
                kept.append(holders[-1])
        return copies, kept, burdened

    def _num_users(self, block: _Block) -> int:
        """Sequences that hold a block, or that its content is a part of though they let it go."""
        return sum(
            block in s.blocks[0] or (block.path is not None and block.path in self._prefixes(s))
            for s in self.seqs.values()
        )

    def _prefixes(self, seq: _Sequence) -> set[Path]:
        full = len(seq.tokens) // self.block_size
        return {(seq.namespace, *seq.tokens[: (i + 1) * self.block_size]) for i in range(full)}

    def _nodes(self) -> set[Path]:
        """Contents that a block or a sequence has, and all that these continue."""
        ends = [path for by in self.by_path for path in by]
        ends += [s.tail().path or (None,) for s in self.seqs.values() if s.length % self.block_size]
        nodes = {end[: i + 1] for end in ends for i in range(self.block_size, len(end), self.block_size)}
        return nodes.union(*(self._prefixes(s) for s in self.seqs.values()))

    def _behind(self, path: Path | None) -> list[_Block]:
        """Blocks whose content continues ``path``."""
        if path is None:
            return []
        return [
            b for by in self.by_path for p, b in by.items() if len(p) > len(path) and p[: len(path)] == path
        ]

    def _make_room(self, count: int) -> None:
        while self.free < count:
            self._evict(self.cached[0])

    def _evict(self, block: _Block) -> None:
        assert block.path is not None
        self.cached.remove(block)
        del self.by_path[block.group][block.path]
        self.evicted += 1
        self.free += 1

    def _new(self, g: int) -> _Block:
        self.free -= 1
        return _Block(g)

    def _hold(self, block: _Block) -> None:
        if not block.refs:
            self.cached.remove(block)
        block.refs += 1

    def _drop(self, block: _Block) -> None:
        block.refs -= 1
        if not block.refs and block.path is not None:
            self.cached.append(block)
        elif not block.refs:
            self.free += 1

    def _release(self, rows: Sequence[Sequence[_Block | None]]) -> None:
        """Let go of blocks: the deepest first, and of one depth those of window groups first."""
        for column in reversed(list(zip(*rows, strict=True))):
            for block in sorted(_present(column), key=lambda b: self.groups[b.group].window is None):
                self._drop(block)


def _present(blocks: Iterable[_Block | None]) -> list[_Block]:
    return [block for block in blocks if block is not None]
