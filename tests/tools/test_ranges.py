"""Ranges are those of all the data, though only a histogram of fixed size is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer_tools.ranges import BINS, VALUES_PER_TENSOR, TensorRange
from edgeinfer_tools.samples import Array


def seen(*parts: Array) -> TensorRange:
    found = TensorRange()
    for part in parts:
        found.add(np.asarray(part, np.float32), histogram=True)
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), min_size=1, max_size=8))
def test_extremes_are_exact_and_nothing_is_lost_when_the_histogram_rescales(parts: list[list[float]]) -> None:
    found = seen(*[np.array(part) for part in parts])
    values = np.array([value for part in parts for value in part], np.float32)
    assert (found.low, found.high) == (values.min(), values.max())
    if found.reach:
        counted = sum(
            len(part) for index, part in enumerate(parts) if any(np.any(p) for p in map(np.array, parts[: index + 1]))
        )
        assert found.counts.sum() == counted
        assert found.counts.size == BINS


def test_the_order_of_the_samples_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    small, large = rng.normal(size=4000), rng.normal(size=4000) * 500
    one, two = seen(small, large), seen(large, small)
    for calibrator in ("percentile", "entropy"):
        first, second = one.range(calibrator, 99.9), two.range(calibrator, 99.9)
        assert first == pytest.approx(second, rel=0.02)


@pytest.mark.parametrize("percentile", [90, 99, 99.9])
def test_percentiles_are_those_of_the_values(percentile: float) -> None:
    values = np.random.default_rng(1).normal(3, 2, size=50_000).astype(np.float32)
    low, high = seen(*np.split(values, 50)).range("percentile", percentile)
    cut = (100 - percentile) / 200 * values.size
    for outside in (np.count_nonzero(values < low), np.count_nonzero(values > high)):
        assert outside == pytest.approx(cut, abs=max(2, 0.02 * cut))


def test_percentile_100_and_minmax_keep_everything() -> None:
    found = seen(np.array([-1, 0.5, 7]))
    assert found.range("minmax", 50) == (-1, 7)
    assert found.range("percentile", 100) == (-1, 7)


def test_entropy_cuts_a_lonely_outlier_and_keeps_a_uniform_range() -> None:
    rng = np.random.default_rng(2)
    spiky = np.append(rng.normal(size=60_000), [100])
    low, high = seen(spiky).range("entropy", 0)
    assert high < 20
    assert low >= -high
    low, high = seen(rng.uniform(0, 1, 60_000)).range("entropy", 0)
    assert high > 0.95
    assert low == pytest.approx(0, abs=1e-3)


def test_a_large_activation_is_thinned_and_its_extremes_are_not() -> None:
    values = np.zeros(VALUES_PER_TENSOR * 5, np.float32)
    values[12345], values[54321] = -3, 9
    found = seen(values)
    assert (found.low, found.high) == (-3, 9)
    assert found.counts.sum() <= VALUES_PER_TENSOR + 1


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    found = seen(np.array([1, np.inf, -np.inf, np.nan, -2]))
    assert (found.low, found.high, found.not_finite) == (-2, 1, 3)
    assert seen(np.array([np.nan])).range("minmax", 0) == (0, 0)
