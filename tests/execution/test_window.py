"""Percentiles of the newest durations, from a seed that is soon forgotten, and never for longer than they are true."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.execution.window import MAX_AGE_NS, SEED_SAMPLES, LatencyWindow

MS = 1_000_000


class HandClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at_ns = 10**12

    def now_ns(self) -> int:
        return self.at_ns


def window_of(*samples: int, seed_p99_ns: int = 0, clock: HandClock | None = None) -> LatencyWindow:
    window = LatencyWindow(clock or HandClock(), seed_p99_ns=seed_p99_ns)
    for sample in samples:
        window.add(sample)
    return window


@given(st.integers(0, 10**10), st.lists(st.integers(0, 10**10), max_size=300))
def test_percentiles_are_those_of_the_newest_and_in_order(seed: int, samples: list[int]) -> None:
    window = LatencyWindow(HandClock(), seed_p99_ns=seed, size=100)
    for sample in samples:
        window.add(sample)
    newest = sorted(samples[-100:])
    assert 1 <= window.p50_ns <= window.p99_ns
    if len(newest) >= SEED_SAMPLES:
        assert window.p50_ns == max(1, newest[math.ceil(len(newest) / 2) - 1])
        assert newest[-2] <= window.p99_ns <= max(1, newest[-1]), "few samples: the largest, unless it stands alone"
    if len(newest) == 100:
        assert window.p99_ns == max(1, newest[98])


@given(
    st.lists(st.tuples(st.integers(0, MAX_AGE_NS), st.integers(0, 10**10)), min_size=1, max_size=40),
    st.integers(0, 3 * MAX_AGE_NS),
)
def test_only_what_is_young_enough_counts(rows: list[tuple[int, int]], pause_ns: int) -> None:
    clock = HandClock()
    window, seen = LatencyWindow(clock, seed_p99_ns=0), []
    for gap_ns, sample in rows:
        clock.at_ns += gap_ns
        window.add(sample)
        seen.append((clock.at_ns, sample))
    clock.at_ns += pause_ns
    young = sorted(sample for at_ns, sample in seen if clock.at_ns - at_ns <= MAX_AGE_NS)
    assert len(window) == len(young)
    if young:
        assert window.p50_ns == max(1, young[math.ceil(len(young) / 2) - 1])
        assert window.p99_ns <= max(1, young[-1])


def test_the_seed_holds_until_enough_was_seen() -> None:
    window = window_of(seed_p99_ns=1000)
    assert (window.p50_ns, window.p99_ns) == (500, 1000)
    for _ in range(SEED_SAMPLES - 1):
        window.add(10)
    assert (window.p50_ns, window.p99_ns) == (10, 1000)
    window.add(10)
    assert window.p99_ns == 10


def test_one_outlier_among_few_is_not_the_p99_and_two_are() -> None:
    window = window_of(*[20 * MS] * 10, 25 * MS, 5_000 * MS)
    assert window.p99_ns == 50 * MS
    window.add(5_000 * MS)
    assert window.p99_ns == 5_000 * MS


def test_a_bad_minute_is_forgotten_although_nothing_new_was_seen() -> None:
    clock = HandClock()
    window = window_of(*[20 * MS] * 9, *[900 * MS] * 3, seed_p99_ns=200 * MS, clock=clock)
    assert window.p99_ns == 900 * MS
    clock.at_ns += MAX_AGE_NS + 1
    assert len(window) == 0
    assert (window.p50_ns, window.p99_ns) == (20 * MS, 40 * MS), "twice the median that was seen, and not the seed"


def test_a_peer_that_is_seldom_asked_gets_rid_of_its_seed_too() -> None:
    clock = HandClock()
    window = window_of(seed_p99_ns=200 * MS, clock=clock)
    for _ in range(SEED_SAMPLES):
        window.add(20 * MS)
        clock.at_ns += MAX_AGE_NS // 4
    assert len(window) < SEED_SAMPLES
    assert window.p99_ns == 40 * MS
