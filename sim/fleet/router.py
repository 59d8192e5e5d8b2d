"""Routers: which replica of a fleet serves a request, decided when it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from pagedkv.block_tables import Int32Array
from pagedkv.errors import PagedKVError, require_count
from pagedkv.events import Event, prefix_digests
from pagedkv.sim.fleet.router_index import ReplicaIndex

ROUTERS: Final = ("round-robin", "least-loaded", "prefix-aware")

DEFAULT_LOAD_WEIGHT: Final = 0.05

COST_FORMULA: Final = (
    "prompt tokens not cached there + prompt tokens queued there + load weight x prompt tokens open there; "
    "queued: of requests without a first token, as far as the router expected no hit; open: of requests that "
    "are not finished"
)


class ReplicaLoad(NamedTuple):
    """What a router knows of a replica from what it sent there and what came back."""

    num_routed: int = 0
    """Requests ever sent there."""
    queued_tokens: int = 0
    """Prompt tokens that the router expects to be computed, of requests without a first token."""
    open_tokens: int = 0
    """Prompt tokens of requests that are not finished."""


class Choice(NamedTuple):
    """Where a request goes, and how much of its prompt the router expects to be cached there."""

    replica: int
    num_cached_tokens: int = 0


class Router(Protocol):
    """Decides for one request after the other, in order of arrival."""

    follows_events: bool
    """Whether ``hear`` must be told what the replicas' managers say."""

    def choose(self, now_s: float, prompt: Int32Array, loads: Sequence[ReplicaLoad]) -> Choice:
        """Route a prompt, [n] int32, that comes at ``now_s``; one load per replica."""

    def hear(self, replica: int, time_s: float, events: Sequence[Event]) -> None:
        """Take in what a replica's manager said at a time."""


def make_router(
    name: str,
    num_replicas: int,
    block_size: int,
    *,
    load_weight: float = DEFAULT_LOAD_WEIGHT,
    event_delay_s: float = 0.0,
) -> Router:
    """A router by its name in ``ROUTERS``; numbers as in `LeastLoaded` and `PrefixAware`.

    Raises ``PagedKVError`` for an unknown name, fewer than one replica, or negative numbers.
    """
    require_count("num_replicas", num_replicas, 1)
    if name == "round-robin":
        return RoundRobin()
    if name == "least-loaded":
        return LeastLoaded(load_weight)
    if name == "prefix-aware":
        return PrefixAware(num_replicas, block_size, load_weight, event_delay_s)
    raise PagedKVError(f"router must be one of {', '.join(ROUTERS)}, got {name!r}")


class RoundRobin:
    """One replica after the other.

    >>> router = RoundRobin()
    >>> [router.choose(0.0, [], [ReplicaLoad(sent), ReplicaLoad(1)]).replica for sent in (1, 2)]
    [0, 1]
    """

    follows_events = False

    def choose(self, now_s: float, prompt: Int32Array, loads: Sequence[ReplicaLoad]) -> Choice:
        """The next in turn."""
        return Choice(sum(load.num_routed for load in loads) % len(loads))

    def hear(self, replica: int, time_s: float, events: Sequence[Event]) -> None:
        """Nothing to learn."""


class LeastLoaded:
    """The replica with the lowest cost, knowing nothing of caches; ``COST_FORMULA`` with no hit anywhere.

    >>> LeastLoaded(0.1).choose(0.0, [], [ReplicaLoad(1, 500, 500), ReplicaLoad(1, 0, 2000)])
    Choice(replica=1, num_cached_tokens=0)
    """

    follows_events = False

    def __init__(self, load_weight: float = DEFAULT_LOAD_WEIGHT) -> None:
        """``load_weight`` is what an open prompt token counts, where one to be computed counts 1."""
        self.load_weight = _weight(load_weight)

    def choose(self, now_s: float, prompt: Int32Array, loads: Sequence[ReplicaLoad]) -> Choice:
        """The cheapest; among equals the one that was sent the fewest requests, then the first."""
        return _cheapest([0] * len(loads), loads, self.load_weight)

    def hear(self, replica: int, time_s: float, events: Sequence[Event]) -> None:
        """Nothing to learn."""


class PrefixAware:
    """The replica with the lowest cost, as far as the managers' events say what is cached where.

    It knows events ``event_delay_s`` after they were sent, and nothing else of the caches: a prompt that is
    being computed is no hit yet. Cost: O(prompt), and O(log blocks) per replica.

    >>> from pagedkv import KVCacheManager
    >>> manager, router = KVCacheManager(9, block_size=2), PrefixAware(2, 2)
    >>> manager.events.record()
    >>> _ = manager.open("a", [5, 6, 7, 8]); manager.commit("a", [5, 6, 7, 8])
    >>> router.hear(1, 3.0, manager.events.take())
    >>> idle = [ReplicaLoad(), ReplicaLoad()]
    >>> router.choose(2.0, [5, 6, 9], idle), router.choose(3.0, [5, 6, 9], idle)
    (Choice(replica=0, num_cached_tokens=0), Choice(replica=1, num_cached_tokens=2))
    """

    follows_events = True

    def __init__(
        self,
        num_replicas: int,
        block_size: int,
        load_weight: float = DEFAULT_LOAD_WEIGHT,
        event_delay_s: float = 0.0,
    ) -> None:
        """Know nothing; the managers must record events without a seed."""
        self.load_weight, self.block_size = _weight(load_weight), block_size
        self.indexes = [ReplicaIndex(event_delay_s) for _ in range(num_replicas)]

    def choose(self, now_s: float, prompt: Int32Array, loads: Sequence[ReplicaLoad]) -> Choice:
        """The cheapest; among equals the one that was sent the fewest requests, then the first."""
        # the last token is computed in any case, for the first one of the output
        digests = prefix_digests(prompt[: len(prompt) - 1], self.block_size)
        cached = [index.num_cached(now_s, digests) * self.block_size for index in self.indexes]
        return _cheapest(cached, loads, self.load_weight)

    def hear(self, replica: int, time_s: float, events: Sequence[Event]) -> None:
        """Keep events until they are due."""
        self.indexes[replica].hear(time_s, events)


def _cheapest(cached: Sequence[int], loads: Sequence[ReplicaLoad], load_weight: float) -> Choice:
    def cost(i: int) -> tuple[float, int, int]:
        load = loads[i]
        # the prompt's own length is the same everywhere
        return load.queued_tokens + load_weight * load.open_tokens - cached[i], load.num_routed, i

    best = min(range(len(loads)), key=cost)
    return Choice(best, cached[best])


def _weight(value: float) -> float:
    if not 0 <= value <= 1e6:
        raise PagedKVError(f"load weight must be 0 to 1e6, got {value}")
    return value
