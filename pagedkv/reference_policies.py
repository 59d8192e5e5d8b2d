"""Slow, obviously right models of the eviction policies: one block at a time, lists and whole prefixes."""

from collections.abc import Callable, Iterable, Sequence

from pagedkv.namespace import Namespace
from pagedkv.reference_blocks import ModelBlock, Path


class ReferencePolicy:
    """Least recently used; the other models say what differs.

    The manager's model calls ``released`` when a block becomes idle, then asks for the ``surplus``; ``hit``
    when an open found it, ``choose`` for a victim among the idle leaves (least recently released first),
    then ``evicted``, and ``forgotten`` when content is lost otherwise. Write one for a policy of your own to
    compare it: a subclass says what differs.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Model a pool of this size."""
        self.num_blocks, self.block_size = num_blocks, block_size

    def released(self, block: ModelBlock) -> None:
        """Nobody holds the block any more."""

    def retain(self, block: ModelBlock, priority: int) -> None:
        """The block has a priority."""

    def resize(self, num_blocks: int) -> None:
        """The pool has another size."""
        self.num_blocks = num_blocks

    def hit(self, block: ModelBlock) -> None:
        """An open found the block."""

    def surplus(self, leaves: Callable[[], Sequence[ModelBlock]]) -> ModelBlock | None:
        """A leaf that must go although nobody needs the room."""
        return None

    def choose(self, leaves: Sequence[ModelBlock]) -> ModelBlock:
        """The leaf to give up."""
        return leaves[0]

    def evicted(self, block: ModelBlock, leaves: Sequence[ModelBlock]) -> None:
        """The block that was chosen is gone, these are leaves now."""
        self.forgotten(block)

    def forgotten(self, block: ModelBlock) -> None:
        """The block has no content any more."""


class ReferenceLFU(ReferencePolicy):
    """Least often hit, then least recently used."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start without hits."""
        super().__init__(num_blocks, block_size)
        self.hits: dict[ModelBlock, int] = {}

    def hit(self, block: ModelBlock) -> None:
        """Count."""
        self.hits[block] = self.hits.get(block, 0) + 1

    def choose(self, leaves: Sequence[ModelBlock]) -> ModelBlock:
        """Fewest hits; ``min`` takes the first of equals."""
        return min(leaves, key=lambda block: self.hits.get(block, 0))

    def forgotten(self, block: ModelBlock) -> None:
        """No hits."""
        self.hits.pop(block, None)


class ReferenceCost(ReferenceLFU):
    """Age + uses x cost, fixed when the block is released."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start at age 0."""
        super().__init__(num_blocks, block_size)
        self.age = 0.0
        self.worth: dict[ModelBlock, float] = {}

    def released(self, block: ModelBlock) -> None:
        """Fix what it is worth."""
        assert block.path is not None
        depth = len(block.path) - 1
        self.worth[block] = self.age + (self.hits.get(block, 0) + 1) * (1.0 + (depth - 1) / 2000)

    def choose(self, leaves: Sequence[ModelBlock]) -> ModelBlock:
        """What is worth least."""
        return min(leaves, key=self.worth.__getitem__)

    def evicted(self, block: ModelBlock, leaves: Sequence[ModelBlock]) -> None:
        """Age."""
        self.age = max(self.age, self.worth[block])
        self.forgotten(block)


class ReferencePriority(ReferencePolicy):
    """Lowest priority first, then least recently used."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Give every block the default."""
        super().__init__(num_blocks, block_size)
        self.priority: dict[ModelBlock, int] = {}

    def retain(self, block: ModelBlock, priority: int) -> None:
        """Note."""
        self.priority[block] = priority

    def choose(self, leaves: Sequence[ModelBlock]) -> ModelBlock:
        """Lowest priority; ``min`` takes the first of equals."""
        return min(leaves, key=lambda block: self.priority.get(block, 35))

    def forgotten(self, block: ModelBlock) -> None:
        """Back to the default."""
        self.priority.pop(block, None)


class ReferenceQuotas(ReferencePolicy):
    """Least recently used, and of some namespaces at most so many."""

    def __init__(self, num_blocks: int, block_size: int, limits: Iterable[tuple[Namespace, int]]) -> None:
        """Give each of these namespaces a limit."""
        super().__init__(num_blocks, block_size)
        self.limits = dict(limits)
        self.idle: list[ModelBlock] = []

    def released(self, block: ModelBlock) -> None:
        """Count."""
        if block not in self.idle:
            self.idle.append(block)

    def surplus(self, leaves: Callable[[], Sequence[ModelBlock]]) -> ModelBlock | None:
        """The least recently used of a namespace that has too many."""
        for namespace, limit in self.limits.items():
            if sum(_namespace(block) == namespace for block in self.idle if not block.refs) > limit:
                return next(block for block in leaves() if _namespace(block) == namespace)
        return None

    def forgotten(self, block: ModelBlock) -> None:
        """Do not count it any more."""
        if block in self.idle:
            self.idle.remove(block)


def _namespace(block: ModelBlock) -> Namespace | None:
    assert block.path is not None
    namespace: Namespace | None = block.path[0]
    return namespace


class ReferenceFIFO(ReferencePolicy):
    """What has its content longest."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start with an empty queue."""
        super().__init__(num_blocks, block_size)
        self.queue: list[ModelBlock] = []

    def released(self, block: ModelBlock) -> None:
        """New content joins the end."""
        if block not in self.queue:
            self.queue.append(block)

    def choose(self, leaves: Sequence[ModelBlock]) -> ModelBlock:
        """The first of the queue that is a leaf."""
        return min(leaves, key=self.queue.index)

    def forgotten(self, block: ModelBlock) -> None:
        """Leave the queue."""
        if block in self.queue:
            self.queue.remove(block)


class ReferenceSIEVE(ReferenceFIFO):
    """The hand stands before ``ahead``; it sees leaves only."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Put the hand before the oldest."""
        super().__init__(num_blocks, block_size)
        self.was_hit: set[ModelBlock] = set()
        self.ahead: list[ModelBlock] | None = None  # what was newer than the last victim, None: start over

    def hit(self, block: ModelBlock) -> None:
        """Mark."""
        self.was_hit.add(block)

    def released(self, block: ModelBlock) -> None:
        """New content is ahead of the hand, wherever that is."""
        if block not in self.queue and self.ahead is not None:
            self.ahead.append(block)
        super().released(block)

    def choose(self, leaves: Sequence[ModelBlock]) -> ModelBlock:
        """Walk on to the next leaf without a mark, removing marks."""
        while True:
            for block in list(self.queue if self.ahead is None else self.ahead):
                if block in leaves and block not in self.was_hit:
                    self.ahead = self.queue[self.queue.index(block) + 1 :]
                    return block
                if block in leaves:
                    self.was_hit.discard(block)
            self.ahead = None

    def evicted(self, block: ModelBlock, leaves: Sequence[ModelBlock]) -> None:
        """Start over if no leaf is ahead."""
        self.forgotten(block)
        if self.ahead is not None and not set(self.ahead) & set(leaves):
            self.ahead = None

    def forgotten(self, block: ModelBlock) -> None:
        """Leave the queue, without a mark."""
        super().forgotten(block)
        self.was_hit.discard(block)
        if self.ahead is not None and block in self.ahead:
            self.ahead.remove(block)


class ReferenceS3FIFO(ReferencePolicy):
    """Two queues and the ghosts of the small one."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start with empty queues."""
        super().__init__(num_blocks, block_size)
        self.small: list[ModelBlock] = []
        self.main: list[ModelBlock] = []
        self.hits: dict[ModelBlock, int] = {}
        self.ghosts: list[Path | None] = []
        self.small_size = max(1, num_blocks // 10)
        self.has_evicted = False

    def resize(self, num_blocks: int) -> None:
        """Other shares."""
        self._trim()
        super().resize(num_blocks)
        self._trim()
        self.small_size = max(1, num_blocks // 10)

    def _trim(self) -> None:
        del self.ghosts[: max(0, len(self.ghosts) - self.num_blocks * 9 // 10)]

    def released(self, block: ModelBlock) -> None:
        """New content enters the small queue, a ghost the main one."""
        if block in self.small + self.main:
            return
        if block.path in self.ghosts:
            self.ghosts.remove(block.path)
            self.main.append(block)
        elif not self.has_evicted and len(self.small) >= self.small_size:
            self.main.append(block)
        else:
            self.small.append(block)

    def hit(self, block: ModelBlock) -> None:
        """Count, up to 3."""
        self.hits[block] = min(3, self.hits.get(block, 0) + 1)

    def choose(self, leaves: Sequence[ModelBlock]) -> ModelBlock:
        """From the main queue if that is too long, else from the small one if it has a leaf to give."""
        main_first = len(self.main) > self.num_blocks - self.small_size or not self.small
        order = [self._from_main, self._from_small] if main_first else [self._from_small, self._from_main]
        victim = order[0](leaves) or order[1](leaves)
        assert victim is not None
        return victim

    def _from_small(self, leaves: Sequence[ModelBlock]) -> ModelBlock | None:
        for block in [block for block in self.small if block in leaves]:
            if self.hits.get(block, 0) < 2:
                return block
            self.small.remove(block)
            self.main.append(block)
            self.hits[block] = 0
        return None

    def _from_main(self, leaves: Sequence[ModelBlock]) -> ModelBlock | None:
        while any(block in leaves for block in self.main):
            block = next(block for block in self.main if block in leaves)
            if not self.hits.get(block, 0):
                return block
            self.main.remove(block)
            self.main.append(block)
            self.hits[block] -= 1
        return None

    def evicted(self, block: ModelBlock, leaves: Sequence[ModelBlock]) -> None:
        """Out of the small queue, become a ghost."""
        self.has_evicted = True
        if block in self.small:
            self._trim()
            self.ghosts.append(block.path)
        self.forgotten(block)

    def forgotten(self, block: ModelBlock) -> None:
        """Leave the queues."""
        for queue in (self.small, self.main):
            if block in queue:
                queue.remove(block)
        self.hits.pop(block, None)


class ReferenceARC(ReferencePolicy):
    """T1, T2, B1, B2 and p, by the names of the paper; p moves when the content comes back."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Start with empty lists."""
        super().__init__(num_blocks, block_size)
        self.t1: set[ModelBlock] = set()
        self.t2: set[ModelBlock] = set()
        self.b1: list[Path | None] = []
        self.b2: list[Path | None] = []
        self.p = 0.0

    def released(self, block: ModelBlock) -> None:
        """New content enters T1, a ghost T2."""
        if block in self.t1 | self.t2:
            return
        if block.path in self.b1:
            self.p = min(self.num_blocks, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self.b1.remove(block.path)
            self.t2.add(block)
        elif block.path in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self.b2.remove(block.path)
            self.t2.add(block)
        else:
            self.t1.add(block)
        self._trim()

    def resize(self, num_blocks: int) -> None:
        """Trim all to the new size."""
        super().resize(num_blocks)
        self.p = min(self.p, num_blocks)
        self._trim()

    def _trim(self) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > self.num_blocks:
            del self.b1[0]
        while self.b2 and len(self.t1 | self.t2) + len(self.b1) + len(self.b2) > 2 * self.num_blocks:
            del self.b2[0]

    def hit(self, block: ModelBlock) -> None:
        """Move to T2."""
        if block in self.t1:
            self.t1.remove(block)
            self.t2.add(block)

    def choose(self, leaves: Sequence[ModelBlock]) -> ModelBlock:
        """Least recently used leaf of T1 if that is longer than p, else of T2, if there is one."""
        wanted = self.t1 if len(self.t1) > self.p else self.t2
        return next((block for block in leaves if block in wanted), leaves[0])

    def evicted(self, block: ModelBlock, leaves: Sequence[ModelBlock]) -> None:
        """Become a ghost."""
        (self.b1 if block in self.t1 else self.b2).append(block.path)
        self.forgotten(block)

    def forgotten(self, block: ModelBlock) -> None:
        """Leave the lists."""
        self.t1.discard(block)
        self.t2.discard(block)


REFERENCE_POLICIES: dict[str, Callable[[int, int], ReferencePolicy]] = {
    "lru": ReferencePolicy,
    "fifo": ReferenceFIFO,
    "lfu": ReferenceLFU,
    "sieve": ReferenceSIEVE,
    "s3fifo": ReferenceS3FIFO,
    "arc": ReferenceARC,
    "priority": ReferencePriority,
    "cost": ReferenceCost,
    "belady": ReferencePolicy,
}
"""The model of each policy, by the same names; of "belady" while nothing is announced."""
