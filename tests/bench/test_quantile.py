from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer_bench.quantile import percentile


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0, 100))
def test_a_percentile_is_a_value_that_was_seen_and_enough_are_at_or_below_it(
    values: list[float], percent: float
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100 * (1 - 1e-9)


def test_the_p99_of_few_values_is_their_largest() -> None:
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile(list(range(1, 201)), 99) == 198


def test_there_is_no_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
