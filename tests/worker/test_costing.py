"""Rounds are long enough to mean something, and slow models do not take minutes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.clock import NS_PER_S
from edgeinfer.worker.costing import MAX_RUNS, MIN_RUNS, SLOW_RUNS, _enough, latency_of


@pytest.mark.parametrize(
    ("runs", "took_s", "expected"),
    [
        (MIN_RUNS - 1, 1.0, False),  # the time is up, the runs are too few
        (MIN_RUNS, 0.3, False),
        (MIN_RUNS, 0.4, True),
        (MAX_RUNS, 0.1, True),
        (SLOW_RUNS - 1, 3.0, False),
        (SLOW_RUNS, 3.0, True),
    ],
)
def test_a_round_ends_with_enough_runs_in_its_time(runs: int, took_s: float, expected: bool) -> None:
    assert _enough(runs, int(took_s * NS_PER_S), int(0.4 * NS_PER_S)) is expected


@given(st.lists(st.floats(1, 1e7), min_size=1, max_size=300))
def test_percentiles_are_in_order_and_within_the_runs(micros: list[float]) -> None:
    found = latency_of(micros)
    assert round(min(micros)) <= found.p50_us <= found.p90_us <= found.p99_us <= round(max(micros))
    assert found.runs == len(micros)


def test_percentiles_are_interpolated() -> None:
    assert latency_of([10.0, 20.0]).p50_us == 15
    assert latency_of([float(n) for n in range(101)]).p99_us == 99
