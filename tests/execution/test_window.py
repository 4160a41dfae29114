"""Percentiles of the newest durations, from a seed that is soon forgotten."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.execution.window import SEED_SAMPLES, LatencyWindow


@given(st.integers(0, 10**10), st.lists(st.integers(0, 10**10), max_size=300))
def test_percentiles_are_those_of_the_newest_and_in_order(seed: int, samples: list[int]) -> None:
    window = LatencyWindow(seed_p99_ns=seed, size=100)
    for sample in samples:
        window.add(sample)
    newest = sorted(samples[-100:])
    assert 1 <= window.p50_ns <= window.p99_ns
    if len(newest) >= SEED_SAMPLES:
        assert window.p50_ns == max(1, newest[math.ceil(len(newest) / 2) - 1])
        assert window.p99_ns == max(1, newest[math.ceil(len(newest) * 0.99) - 1])


def test_the_seed_holds_until_enough_was_seen() -> None:
    window = LatencyWindow(seed_p99_ns=1000)
    assert (window.p50_ns, window.p99_ns) == (500, 1000)
    for _ in range(SEED_SAMPLES - 1):
        window.add(10)
    assert (window.p50_ns, window.p99_ns) == (10, 1000)
    window.add(10)
    assert window.p99_ns == 10
