"""Quotas: how many cached blocks a namespace may have, each with an order of its own."""

from collections.abc import Callable, Iterator, Mapping
from heapq import merge
from itertools import islice

import numpy as np
import numpy.typing as npt

from pagedkv.block_ids import resized
from pagedkv.block_tables import Int32Array, Int64Array
from pagedkv.errors import PagedKVError
from pagedkv.namespace import Namespace
from pagedkv.policies.lru import LRU
from pagedkv.policies.policy import NO_BLOCKS, BlockView, EvictionPolicy

_UNKNOWN, _OTHERS = -1, 0


class NamespaceQuotas(EvictionPolicy):
    """At most so many idle blocks for each namespace with a quota: what is too many goes when it is released.

    Each of them, and all others together, have a policy of their own, which says who of them goes first.
    When room is needed, it is made by whoever's next victim has been idle longest.

    Cost: as the policies, and O(namespaces with a quota) as arrays per call.

    >>> from pagedkv import KVCacheManager, Namespace
    >>> tenant = Namespace(salt="tenant")
    >>> manager = KVCacheManager(8, block_size=2, policy=NamespaceQuotas({tenant: 1}))
    >>> for name, namespace in (("a", tenant), ("b", None)):
    ...     _ = manager.open(name, range(4), namespace=namespace)
    ...     manager.commit(name, range(4)); manager.close(name)
    >>> manager.counts, manager.stats().evicted_blocks
    (BlockCounts(free=5, cached=3, active=0), 1)
    """

    def __init__(
        self, limits: Mapping[Namespace, int], make_policy: Callable[[], EvictionPolicy] = LRU
    ) -> None:
        """Give each namespace of ``limits`` at most that many idle blocks, ordered by a new policy."""
        for namespace, limit in limits.items():
            if not isinstance(namespace, Namespace):
                raise PagedKVError(f"a quota is for a Namespace, got {namespace!r}")
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise PagedKVError(
                    f"the quota of {namespace} must be an integer of at least 0, got {limit!r}"
                )
        self._part_numbers: dict[Namespace | None, int] = {
            None if namespace == Namespace() else namespace: i for i, namespace in enumerate(limits, start=1)
        }
        self._limits = [None, *limits.values()]
        self._parts = [make_policy() for _ in self._limits]
        self._tells_stored = any(type(part).stored is not EvictionPolicy.stored for part in self._parts)

    def bind(self, view: BlockView) -> None:
        """Start with no idle block in any part."""
        super().bind(view)
        for part in self._parts:
            part.bind(view)
        size = view.num_blocks + 1
        self._part_of: Int32Array = np.full(size, _UNKNOWN, np.int32)
        self._idle: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)
        self._since: Int64Array = np.zeros(size, np.int64)
        self._time = 0
        self._counts = [0] * len(self._parts)  # idle blocks of each

    def stored(self, ids: Int32Array) -> None:
        """Blocks got content just now and are held; only parts that want to know are told."""
        if not self._tells_stored:
            return
        for block in ids.tolist():
            number = self._part_of[self.view.parent(block)]  # unknown behind none
            if number == _UNKNOWN:
                number = self._part_numbers.get(self.view.namespace(block), _OTHERS)
            self._part_of[block] = number
        for number, some in self._by_part(ids):
            self._parts[number].stored(some)

    def push(self, ids: Int32Array) -> None:
        """Blocks became idle: consecutive ones of one branch, deepest first."""
        if not len(ids):
            return
        self._learn(ids, int(ids[0])).push(ids)
        self._idle[ids] = True
        self._counts[self._part_of[ids[0]]] += len(ids)
        self._since[ids] = np.arange(self._time, self._time + len(ids))
        self._time += len(ids)

    def discard(self, ids: Int32Array) -> None:
        """Blocks are not idle any more, if they were."""
        for number, some in self._by_part(ids):
            self._parts[number].discard(some)

    def hit(self, ids: Int32Array) -> None:
        """An open found these blocks and holds them now, shallowest first."""
        if len(ids):
            self._learn(ids, int(ids[-1])).hit(ids)

    def first(self, count: int, keep: Int32Array) -> Int32Array:
        """Whoever is idle longest among those whom the parts would give up next."""
        lists = [part.first(count, keep).tolist() for part in self._parts]
        merged = merge(*lists, key=self._since.__getitem__)
        return np.fromiter(islice(merged, max(count, 0)), np.int32)

    def evict(self, ids: Int32Array) -> None:
        """What ``first`` or ``surplus`` named has lost its content."""
        for number, some in self._by_part(ids):
            self._parts[number].evict(some)
        self._part_of[ids] = _UNKNOWN

    def forget(self, ids: Int32Array) -> None:
        """Blocks, idle or held, have lost their content for another reason."""
        for number, some in self._by_part(ids):
            self._parts[number].forget(some)
        self._part_of[ids] = _UNKNOWN

    def rename(self, old: Int32Array, new: Int32Array) -> None:
        """Blocks are called otherwise from now on, in their part too."""
        numbers = self._part_of[old]
        for number in np.unique(numbers[numbers >= 0]).tolist():
            self._parts[number].rename(old[numbers == number], new[numbers == number])
        self._part_of[new], self._part_of[old] = numbers, _UNKNOWN
        self._idle[new], self._idle[old] = self._idle[old], False
        self._since[new] = self._since[old]

    def resize(self, num_blocks: int) -> None:
        """Ids are ``1..num_blocks`` from now on; quotas stay."""
        unheard_of = slice(self.num_blocks + 1, None)
        super().resize(num_blocks)
        for part in self._parts:
            part.resize(num_blocks)
        self._part_of = resized(self._part_of, num_blocks)
        self._part_of[unheard_of] = _UNKNOWN
        self._idle = resized(self._idle, num_blocks)
        self._since = resized(self._since, num_blocks)

    def surplus(self) -> Int32Array | None:
        """The first of each namespace that has too many."""
        over = [
            part.first(count - limit, NO_BLOCKS)
            for part, count, limit in zip(self._parts, self._counts, self._limits, strict=True)
            if limit is not None and count > limit
        ]
        return np.concatenate(over) if over else None

    def retain(self, ids: Int32Array, priority: int, ttl: float | None) -> None:
        """Blocks with content, held or idle, get a priority, for ``ttl`` from now or for good."""
        if len(ids):
            self._learn(ids, int(ids[-1])).retain(ids, priority, ttl)

    def make_room(self, count: int) -> None:
        """Make sure that ``count`` blocks can be pushed."""
        for part in self._parts:
            part.make_room(count)

    def _learn(self, ids: Int32Array, block: int) -> EvictionPolicy:
        """The part of one branch, of which ``block`` is known to be indexed."""
        number = int(self._part_of[block])
        if number == _UNKNOWN:
            number = self._part_numbers.get(self.view.namespace(block), _OTHERS)
        self._part_of[ids] = number
        return self._parts[number]

    def _by_part(self, ids: Int32Array) -> Iterator[tuple[int, Int32Array]]:
        """Ids that are known, in their order, by the part that knows them; they are idle no longer."""
        numbers = self._part_of[ids]
        for number in np.unique(numbers[numbers >= 0]).tolist():
            some = ids[numbers == number]
            self._counts[number] -= int(np.count_nonzero(self._idle[some]))
            self._idle[some] = False
            yield number, some
