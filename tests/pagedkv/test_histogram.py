"""Histograms of durations: counted exactly, quantiles to within a factor of two."""

import math
from itertools import pairwise

import numpy as np
import pytest

from pagedkv import PagedKVError
from pagedkv.histogram import BOUNDS, Histogram, HistogramRecorder


def test_buckets_double_and_include_their_upper_bound() -> None:
    """From 1/1024 to 2**20; what is above all bounds has a bucket of its own."""
    assert BOUNDS[0] == 1 / 1024 and BOUNDS[-1] == 2.0**20
    assert all(b == 2 * a for a, b in pairwise(BOUNDS))
    found = Histogram.of([0.0, 1 / 1024, 1 / 1023, 1.0, 1.0001, 2.0**20, 2.0**20 + 1, math.inf])
    counts = {i: count for i, count in enumerate(found.counts) if count}
    assert counts == {0: 2, 1: 1, 10: 1, 11: 1, 30: 1, 31: 2}
    assert found.count == 8 and found.cumulative()[-1] == 8 and len(found.cumulative()) == len(BOUNDS) + 1


def test_sum_and_mean_are_exact_and_nothing_has_no_mean() -> None:
    """The values themselves are added up, not their buckets."""
    found = Histogram.of([0.25, 3.0, 100.0])
    assert (found.sum, found.count, found.mean) == (103.25, 3, 103.25 / 3)
    nothing = Histogram()
    assert nothing == Histogram.of([]) and nothing.count == 0
    assert math.isnan(nothing.mean) and math.isnan(nothing.quantile(0.5))


def test_quantiles_of_a_worked_example() -> None:
    """Four values in (2, 4] and four in (4, 8], spread evenly; beyond the bounds, the last one."""
    found = Histogram.of([3.0] * 4 + [5.0] * 4)
    expected = {0.0: 2.0, 0.25: 3.0, 0.5: 4.0, 0.75: 6.0, 1.0: 8.0}
    assert {q: found.quantile(q) for q in expected} == expected
    assert Histogram.of([1e9]).quantile(0.5) == 2.0**20
    assert Histogram.of([0.0, 0.0]).quantile(0.5) == 1 / 2048


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_a_factor_of_two_of_those_of_the_values(seed: int) -> None:
    """Of values over six decades, and they rise with q."""
    values = np.sort(np.exp(np.random.default_rng(seed).normal(2.0, 3.0, 1_000)))
    values = values[(values > BOUNDS[0]) & (values < BOUNDS[-1])]
    found, before = Histogram.of(values), 0.0
    for q in np.linspace(0.001, 1.0, 97).tolist():
        exact = values[math.ceil(q * len(values)) - 1]
        assert exact / 2 <= found.quantile(q) <= 2 * exact
        assert found.quantile(q) >= before
        before = found.quantile(q)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_share_that_is_none_is_refused_with_the_number(q: float) -> None:
    """Also for an empty histogram."""
    for found in (Histogram(), Histogram.of([1.0])):
        with pytest.raises(PagedKVError, match=f"from 0 to 1, got {q}"):
            found.quantile(q)


def test_what_was_counted_in_parts_equals_the_whole() -> None:
    """By one recorder over time, and by two that are added; a snapshot does not change any more."""
    values = [2.0**i for i in range(-12, 23)]
    recorder = HistogramRecorder()
    recorder.add(np.array(values[:9]))
    first = recorder.histogram()
    recorder.add(np.array(values[9:]))
    recorder.add(np.array([]))
    assert recorder.histogram() == Histogram.of(values) == Histogram.of(values[9:]) + first
    assert first == Histogram.of(values[:9]) and hash(first) == hash(Histogram.of(values[:9]))
    assert recorder.counts.dtype == np.int64
