"""Goodput: how many requests meet stated limits of latency, and how many per second."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pagedkv.errors import PagedKVError
from pagedkv.sim.commands.options import positive
from pagedkv.sim.output.latencies import LATENCIES, Latencies
from pagedkv.sim.output.records import FloatArray

GOODPUT_FORMULA = (
    "requests that keep every limit / all requests, and / makespan; a latency that a request does not have "
    "(TPOT of one output token) breaks no limit, a request that never finished meets none"
)


class SLO(NamedTuple):
    """A limit of one latency, in seconds; a request that takes exactly that long meets it."""

    latency: str
    seconds: float


@dataclass(frozen=True)
class Goodput:
    """Requests that meet limits. ``worst`` is, for each request, its largest latency over its limit."""

    slos: tuple[SLO, ...]
    worst: FloatArray
    """[requests] float64; a request meets all limits if this is at most 1, inf if it never finished."""
    met_alone: dict[str, int]
    """Requests that meet one limit, whatever the others say."""
    makespan_s: float

    @property
    def requests_met(self) -> int:
        """Requests that meet all limits."""
        return int(np.count_nonzero(self.worst <= 1))

    @property
    def share(self) -> float:
        """Requests that meet all limits over all requests."""
        return self.requests_met / len(self.worst)

    @property
    def requests_per_s(self) -> float:
        """Requests that meet all limits over the makespan."""
        return self.requests_met / self.makespan_s

    def scale_for(self, share: float) -> float | None:
        """The smallest factor on all limits at which this share of requests meets them; None if none is.

        Cost: O(requests log requests).
        """
        rank = max(1, -(-round(share * 1e6) * len(self.worst) // 10**6))
        factor = float(np.sort(self.worst)[rank - 1])
        return factor if np.isfinite(factor) else None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "slo_s": {slo.latency: slo.seconds for slo in self.slos},
            "formula": GOODPUT_FORMULA,
            "requests_met": self.requests_met,
            "share": self.share,
            "requests_per_s": self.requests_per_s,
            "met_alone": self.met_alone,
        }


def slo(text: str) -> SLO:
    """A limit from text: ``ttft=2``, in seconds.

    >>> slo("tpot=0.05")
    SLO(latency='tpot', seconds=0.05)
    """
    name, equals, seconds = text.partition("=")
    if not equals or name not in LATENCIES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no limit: write {', '.join(f'{known}=SECONDS' for known in LATENCIES)}"
        )
    return SLO(name, positive(seconds))


def goodput(latencies: Latencies, slos: Sequence[SLO], makespan_s: float) -> Goodput:
    """Compare each request with the limits. O(requests) per limit.

    Raises:
        PagedKVError: no limit, or two of one latency.

    >>> import numpy as np
    >>> from pagedkv.sim.output.latencies import Latencies
    >>> two = Latencies(np.array([1.0, 3.0]), np.array([0.1, 0.1]), np.array([9.0, 9.0]))
    >>> found = goodput(two, [SLO("ttft", 2.0), SLO("tpot", 0.1)], makespan_s=10.0)
    >>> found.requests_met, found.share, found.requests_per_s, found.met_alone
    (1, 0.5, 0.1, {'ttft': 1, 'tpot': 2})
    """
    check_slos(slos)
    finished = np.isfinite(latencies.e2e_s)
    ratios = {limit.latency: latencies.of(limit.latency) / limit.seconds for limit in slos}
    for ratio in ratios.values():
        ratio[np.isnan(ratio) & finished] = 0.0
        ratio[~finished] = np.inf
    alone = {name: int(np.count_nonzero(ratio <= 1)) for name, ratio in ratios.items()}
    return Goodput(tuple(slos), np.max(list(ratios.values()), axis=0), alone, makespan_s)


def check_slos(slos: Sequence[SLO]) -> None:
    """Refuse no limit at all, and two limits of one latency."""
    names = [limit.latency for limit in slos]
    if not names:
        raise PagedKVError("goodput needs at least one limit")
    for name in names:
        if names.count(name) > 1:
            limits = [f"{limit.seconds:g}" for limit in slos if limit.latency == name]
            raise PagedKVError(f"{len(limits)} limits of {name}, {' and '.join(limits)} s: state one")
