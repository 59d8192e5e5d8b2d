"""A link of stated speed that transfers share: one after the other, in the order in which they begin."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedkv.errors import PagedKVError


@dataclass(frozen=True)
class LinkSpeed:
    """Bytes per second in both directions together, and the seconds that each transfer takes besides.

    Raises:
        PagedKVError: a bandwidth that is not above 0 and finite, or a negative latency.

    >>> LinkSpeed(1e9, 0.001).seconds(2_000_000)
    0.003
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Check both."""
        if not (0.0 < self.bytes_per_s < math.inf and 0.0 <= self.latency_s < math.inf):
            raise PagedKVError(
                f"a link needs bytes/s above 0 and a latency of 0 or more, got {self.bytes_per_s} "
                f"and {self.latency_s}"
            )

    def seconds(self, num_bytes: int) -> float:
        """What a transfer takes that has the link for itself; nothing takes nothing."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0


class _Queue:
    """When everything that waits for one bandwidth is done."""

    free_s = 0.0


class Link:
    """Who uses the link when. A transfer has the whole bandwidth, and waits until those before it are done.

    Two links are one where they are told so, as the ways in and out of a disk: then only one of them is busy
    at a time, whatever the speed of each.

    >>> link = Link(LinkSpeed(bytes_per_s=100.0))
    >>> link.begin(10.0, 200), link.begin(11.0, 100), link.begin(11.0, 0)
    (12.0, 13.0, 11.0)
    >>> link.num_transfers, link.num_bytes, link.busy_s
    (2, 300, 3.0)
    >>> back = Link(LinkSpeed(bytes_per_s=50.0), other=link)
    >>> back.begin(11.0, 100), link.begin(11.0, 100)
    (15.0, 16.0)
    """

    def __init__(self, speed: LinkSpeed, other: Link | None = None) -> None:
        """Start idle at time 0; with ``other``, wait for its transfers, too, and let it wait for these."""
        self.speed = speed
        self._queue: _Queue = _Queue() if other is None else other._queue
        self.num_transfers = 0
        self.num_bytes = 0
        self.busy_s = 0.0

    @property
    def free_s(self) -> float:
        """When everything that was asked for so far is done."""
        return self._queue.free_s

    def begin(self, now_s: float, num_bytes: int) -> float:
        """When a transfer that is asked for now will be done; at once if it has no bytes."""
        if not num_bytes:
            return now_s
        seconds = self.speed.seconds(num_bytes)
        self._queue.free_s = max(now_s, self._queue.free_s) + seconds
        self.num_transfers += 1
        self.num_bytes += num_bytes
        self.busy_s += seconds
        return self._queue.free_s
