"""Prometheus metrics of managers. Needs prometheus-client: ``pip install "pagedkv[prometheus]"``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pagedkv.errors import PagedKVError
from pagedkv.histogram import BOUNDS, Histogram
from pagedkv.stats import ManagerStats

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class _Field(NamedTuple):
    """One field of ``ManagerStats``, or of its ``residency``, and the metric that shows it."""

    field: str
    metric: str
    help: str


# the three disjoint states: their sum is the pool
_STATES = ("free", "cached", "active")
_BLOCKS = "Blocks of the pool by state, in blocks: free (no content), cached (evictable) or active (held)."

_GAUGES = (
    _Field("fenced_blocks", "pagedkv_fenced_blocks", "Active blocks held by fences or copies, in blocks."),
    _Field("pinned_blocks", "pagedkv_pinned_blocks", "Active blocks that have a pin, in blocks."),
    _Field("indexed_blocks", "pagedkv_indexed_blocks", "Blocks that can be found by content, in blocks."),
    _Field("used_slots", "pagedkv_used_tokens", "Slots of active blocks that are in use, in tokens."),
    _Field("block_size", "pagedkv_block_size_tokens", "Slots of one block, in tokens."),
    _Field("num_seqs", "pagedkv_open_sequences", "Sequences that are open, in sequences."),
)

_COUNTERS = (
    _Field("num_opened", "pagedkv_opened_sequences_total", "Successful opens, in sequences."),
    _Field("queried_tokens", "pagedkv_queried_tokens_total", "Prompt tokens of opens, in tokens."),
    _Field("hit_tokens", "pagedkv_hit_tokens_total", "Prompt tokens that were in the cache, in tokens."),
    _Field("queried_blocks", "pagedkv_queried_blocks_total", "Full prompt blocks of opens, in blocks."),
    _Field("hit_blocks", "pagedkv_hit_blocks_total", "Full prompt blocks that were cached, in blocks."),
    _Field("evicted_blocks", "pagedkv_evicted_blocks_total", "Cached blocks that were evicted, in blocks."),
    _Field("copied_blocks", "pagedkv_copied_blocks_total", "Blocks copied before a write, in blocks."),
    _Field("dropped_blocks", "pagedkv_dropped_blocks_total", "Blocks dropped from contexts, in blocks."),
    _Field("dropped_tokens", "pagedkv_dropped_tokens_total", "Tokens dropped from contexts, in tokens."),
)

_HISTOGRAMS = (
    _Field(
        "lifetime",
        "pagedkv_block_lifetime_seconds",
        "Age of content when it was evicted, per block, in seconds.",
    ),
    _Field(
        "idle_before_eviction",
        "pagedkv_idle_before_eviction_seconds",
        "Time since evicted content was last held, per block, in seconds.",
    ),
    _Field(
        "reuse_gap",
        "pagedkv_reuse_gap_seconds",
        "Time that cached content was idle before it was held again, per block, in seconds.",
    ),
)


class ManagerCollector:
    """Metrics of one or more managers, read when Prometheus scrapes; register one per registry.

    ``sources`` maps the value of the label ``manager`` to a call that returns its stats. It is read at each
    scrape: add or remove managers there. A scrape makes one call per manager and changes nothing. It runs
    in the thread of the exporter: where the manager is busy in another thread, let the source return a
    snapshot that this thread took.

    Gauges: ``pagedkv_blocks{state="free|cached|active"}``, whose sum is the pool, ``pagedkv_fenced_blocks``,
    ``pagedkv_pinned_blocks``, ``pagedkv_indexed_blocks``, ``pagedkv_used_tokens``,
    ``pagedkv_block_size_tokens``, ``pagedkv_open_sequences``. Counters: ``pagedkv_opened_sequences_total``,
    and ``pagedkv_{queried,hit,dropped}_tokens_total``,
    ``pagedkv_{queried,hit,evicted,copied,dropped}_blocks_total``. Hit rate over five minutes:
    ``rate(pagedkv_hit_tokens_total[5m]) / rate(pagedkv_queried_tokens_total[5m])``.
    Histograms, of managers whose policy is a ``Residency`` with a clock in seconds:
    ``pagedkv_block_lifetime_seconds``, ``pagedkv_idle_before_eviction_seconds``,
    ``pagedkv_reuse_gap_seconds``.

    >>> from prometheus_client import CollectorRegistry
    >>> from pagedkv import KVCacheManager
    >>> manager, registry = KVCacheManager(num_blocks=8, block_size=2), CollectorRegistry()
    >>> registry.register(ManagerCollector({"main": manager.stats}))
    >>> _ = manager.open("a", [1, 2, 3])
    >>> registry.get_sample_value("pagedkv_blocks", {"manager": "main", "state": "active"})
    2
    """

    def __init__(self, sources: Mapping[str, Callable[[], ManagerStats]]) -> None:
        """Watch ``sources``. Raises ``PagedKVError`` without prometheus-client."""
        try:
            import prometheus_client  # noqa: F401
        except ImportError:
            raise PagedKVError('metrics need prometheus-client: pip install "pagedkv[prometheus]"') from None
        self._sources = sources

    def describe(self) -> Iterator[Metric]:
        """The metrics without values, for the registry; asks no manager."""
        return _metrics({})

    def collect(self) -> Iterator[Metric]:
        """The metrics of all managers. Cost: one ``stats()`` per manager."""
        # a list first: another thread may add a manager meanwhile
        return _metrics({name: stats() for name, stats in list(self._sources.items())})


def _metrics(stats: Mapping[str, ManagerStats]) -> Iterator[Metric]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    blocks = GaugeMetricFamily("pagedkv_blocks", _BLOCKS, labels=["manager", "state"])
    for name, of in stats.items():
        for state in _STATES:
            blocks.add_metric([name, state], getattr(of, f"{state}_blocks"))
    yield blocks
    for family, fields in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for field in fields:
            metric = family(field.metric, field.help, labels=["manager"])
            for name, of in stats.items():
                metric.add_metric([name], getattr(of, field.field))
            yield metric
    for field in _HISTOGRAMS:
        histogram = HistogramMetricFamily(field.metric, field.help, labels=["manager"])
        for name, of in stats.items():
            if of.residency is not None:
                measured: Histogram = getattr(of.residency, field.field)
                histogram.add_metric([name], _buckets(measured), measured.sum)
        yield histogram


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Pairs of an upper bound, as Prometheus writes it, and how many values are not above it."""
    from prometheus_client.utils import floatToGoString

    bounds = map(floatToGoString, (*BOUNDS, math.inf))
    return list(zip(bounds, histogram.cumulative(), strict=True))
