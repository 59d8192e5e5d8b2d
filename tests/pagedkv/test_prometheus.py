"""Metrics show what ``stats()`` says, and reading them disturbs nothing."""

import math
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pagedkv import KVCacheManager, PagedKVError
from pagedkv.histogram import BOUNDS
from pagedkv.policies.residency import Residency
from pagedkv.prometheus import ManagerCollector
from pagedkv.stats import ManagerStats
from pagedkv.testing import random_walk, snapshot

GAUGES = {
    "fenced_blocks": "fenced_blocks",
    "pinned_blocks": "pinned_blocks",
    "indexed_blocks": "indexed_blocks",
    "used_tokens": "used_slots",
    "block_size_tokens": "block_size",
    "open_sequences": "num_seqs",
}
COUNTERS = {
    "opened_sequences_total": "num_opened",
    "queried_tokens_total": "queried_tokens",
    "hit_tokens_total": "hit_tokens",
    "queried_blocks_total": "queried_blocks",
    "hit_blocks_total": "hit_blocks",
    "evicted_blocks_total": "evicted_blocks",
    "copied_blocks_total": "copied_blocks",
    "dropped_blocks_total": "dropped_blocks",
    "dropped_tokens_total": "dropped_tokens",
}
HISTOGRAMS = {
    "block_lifetime_seconds": "lifetime",
    "idle_before_eviction_seconds": "idle_before_eviction",
    "reuse_gap_seconds": "reuse_gap",
}


def registered(**managers: KVCacheManager) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ManagerCollector({name: manager.stats for name, manager in managers.items()}))
    return registry


def value(registry: CollectorRegistry, metric: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"pagedkv_{metric}", labels)


def test_every_metric_equals_its_statistic() -> None:
    """After a walk that left none of the counters at zero."""
    manager = random_walk(1000, seed=4, drain=True)
    manager.open("long", range(7))
    manager.commit("long", range(7))
    manager.context.drop_blocks("long", [1])
    stats, registry = manager.stats(), registered(main=manager)
    assert min(getattr(stats, field) for field in COUNTERS.values()) > 0
    for metric, field in (GAUGES | COUNTERS).items():
        assert value(registry, metric, manager="main") == getattr(stats, field), metric
    blocks = [value(registry, "blocks", manager="main", state=s) for s in ("free", "cached", "active")]
    assert blocks == [stats.free_blocks, stats.cached_blocks, stats.active_blocks]
    assert sum(b or 0 for b in blocks) == stats.num_blocks


def test_a_scrape_changes_nothing() -> None:
    """Neither the manager's state, nor the next scrape."""
    manager = random_walk(300, seed=2)
    registry, before = registered(main=manager), snapshot(manager)
    first = generate_latest(registry)
    assert generate_latest(registry) == first
    assert snapshot(manager) == before


def test_a_scrape_asks_once_and_registering_not_at_all() -> None:
    """The cost is one `stats()` per manager and scrape."""
    manager, calls = KVCacheManager(4, 2), 0

    def stats() -> ManagerStats:
        nonlocal calls
        calls += 1
        return manager.stats()

    registry = CollectorRegistry(auto_describe=True)
    registry.register(ManagerCollector({"main": stats}))
    assert calls == 0
    generate_latest(registry)
    assert calls == 1


def test_names_types_and_help_follow_the_conventions() -> None:
    """One prefix; counters, and only they, end in _total; a help text that ends with the unit."""
    text = generate_latest(registered(main=KVCacheManager(4, 2))).decode()
    families = list(text_string_to_metric_families(text))
    assert len(families) == 1 + len(GAUGES) + len(COUNTERS) + len(HISTOGRAMS)
    for family in families:
        assert family.name.startswith("pagedkv_")
        assert family.type in ("gauge", "counter", "histogram")
        assert all(s.name.endswith("_total") == (family.type == "counter") for s in family.samples)
        unit = next(u for u in ("seconds", "tokens", "blocks", "sequences") if u in family.name)
        assert f"in {unit}" in family.documentation, family.name
        assert family.documentation.endswith(".")


def measured_manager() -> KVCacheManager:
    """One block: content that lived for 8 seconds and was used again after 3, then some that lived for 1."""
    now = 0.0
    manager = KVCacheManager(1, 2, policy=Residency("lru", lambda: now))
    for time, tokens in ((0.0, [1, 2]), (3.0, [1, 2]), (8.0, [3, 4]), (9.0, [5, 6])):
        now = time
        opened = manager.open("a", tokens, max_cached_tokens=2)
        assert opened is not None
        manager.commit("a", tokens[opened.num_cached_tokens :])
        manager.close("a")
    return manager


def test_histograms_are_shown_where_the_policy_measures_and_nowhere_else() -> None:
    """Cumulative buckets with their upper bounds, the count and the exact sum; a plain manager has none."""
    registry = registered(measured=measured_manager(), plain=KVCacheManager(4, 2))
    lifetime = {
        bound: value(registry, "block_lifetime_seconds_bucket", manager="measured", le=bound)
        for bound in ("0.5", "1.0", "4.0", "8.0", "1.048576e+06", "+Inf")
    }
    assert lifetime == {"0.5": 0, "1.0": 1, "4.0": 1, "8.0": 2, "1.048576e+06": 2, "+Inf": 2}
    sums = {name: value(registry, f"{name}_sum", manager="measured") for name in HISTOGRAMS}
    assert sums == {
        "block_lifetime_seconds": 9.0,
        "idle_before_eviction_seconds": 6.0,
        "reuse_gap_seconds": 3.0,
    }
    for name in HISTOGRAMS:
        assert value(registry, f"{name}_count", manager="plain") is None


def test_histograms_can_be_read_back_from_the_text_of_a_scrape() -> None:
    """Bucket by bucket what ``stats()`` says, for each of the three."""
    manager = measured_manager()
    residency = manager.stats().residency
    assert residency is not None
    text = generate_latest(registered(main=manager)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, field in HISTOGRAMS.items():
        samples = families[f"pagedkv_{name}"].samples
        buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
        assert [sample.value for sample in buckets] == getattr(residency, field).cumulative()
        assert [float(sample.labels["le"]) for sample in buckets] == [*BOUNDS, math.inf]


def test_managers_are_told_apart_by_their_label() -> None:
    """One family per metric, one sample per manager; more can join later."""
    sources = {"a": KVCacheManager(4, 2).stats, "b": KVCacheManager(9, 2).stats}
    registry = CollectorRegistry()
    registry.register(ManagerCollector(sources))
    assert value(registry, "blocks", manager="a", state="free") == 4
    assert value(registry, "blocks", manager="b", state="free") == 9
    sources["c"] = KVCacheManager(7, 2).stats
    del sources["a"]
    assert value(registry, "blocks", manager="c", state="free") == 7
    assert value(registry, "blocks", manager="a", state="free") is None
    text = generate_latest(registry).decode()
    assert text.count("# TYPE pagedkv_used_tokens gauge") == 1


def test_a_second_collector_in_one_registry_is_refused() -> None:
    """Each metric may be exposed once; the client library says so when it is registered."""
    registry = registered(main=KVCacheManager(4, 2))
    with pytest.raises(ValueError, match="pagedkv_blocks"):
        registry.register(ManagerCollector({"other": KVCacheManager(4, 2).stats}))


def test_without_the_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the collector is made."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(PagedKVError, match=r'pip install "pagedkv\[prometheus\]"'):
        ManagerCollector({})


def test_importing_the_module_needs_no_client() -> None:
    """The package is loaded when it is used."""
    code = "import sys, pagedkv.prometheus; print({'prometheus_client', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
