"""Estimates follow what is seen, never get stuck on what once was, and know about fewer cores."""

from __future__ import annotations

import random

import pytest

from edgeinfer.execution.executor import Estimate
from edgeinfer.scheduling.estimator import (
    FULL,
    MIN_RUNS,
    MOST_RUNS,
    RECENT_NS,
    STALE_NS,
    WINDOW_RUNS,
    Conditions,
    Estimator,
    conditions,
)

MS = 1_000_000
KEY = ("person-detect", "")
SEED = Estimate(20 * MS, 30 * MS, wait_ns=5 * MS, cores=2, lanes=3)


def _refine(estimator: Estimator, now_ns: int = 0, factor: float = 1.0, clock: float = 1.0) -> tuple[float, float]:
    estimate = estimator.refine(SEED, KEY, now_ns=now_ns, conditions=Conditions(factor, clock))
    return estimate.p50_ns / MS, estimate.p99_ns / MS


def _observe(estimator: Estimator, *durations_ms: float, now_ns: int = 0, origin: str = "", clock: float = 1.0) -> None:
    for duration in durations_ms:
        estimator.observe(
            KEY, round(duration * MS), now_ns=now_ns, origin=origin, conditions=Conditions(clock_share=clock)
        )


def test_the_seed_stands_until_something_was_seen() -> None:
    assert _refine(Estimator()) == (20, 30)


def test_wait_cores_and_lanes_are_the_executors_own() -> None:
    estimator = Estimator()
    _observe(estimator, *[1.0] * 20)
    refined = estimator.refine(SEED, KEY, now_ns=0)
    assert (refined.wait_ns, refined.cores, refined.lanes) == (5 * MS, 2, 3)


def test_a_few_runs_can_only_make_a_promise_more_careful() -> None:
    estimator = Estimator()
    _observe(estimator, *[10] * (MIN_RUNS - 1))
    assert _refine(estimator) == (20, 30)
    _observe(estimator, 10)
    assert _refine(estimator) == (10, 10)


def test_a_slower_machine_than_the_profile_said_is_noticed_with_the_first_run() -> None:
    estimator = Estimator()
    _observe(estimator, 80)
    assert _refine(estimator) == (80, 80)


def test_percentiles_of_the_window() -> None:
    estimator = Estimator()
    _observe(estimator, *range(1, 101))
    assert _refine(estimator) == (50, 99)


def test_mean_and_deviation_are_of_the_runs_in_the_window() -> None:
    estimator = Estimator()
    _observe(estimator, *[900] * 20)
    _observe(estimator, *[10, 14] * MOST_RUNS)
    times = estimator.refine(SEED, KEY, now_ns=0)
    assert times.mean_ns == 12 * MS
    assert abs(times.deviation_ns - 2 * MS) < MS // 100


def test_the_window_forgets() -> None:
    estimator = Estimator()
    _observe(estimator, *[50] * WINDOW_RUNS)
    _observe(estimator, *[5] * WINDOW_RUNS, now_ns=RECENT_NS + 1)
    assert _refine(estimator) == (5, 5)
    _observe(estimator, *[6] * MOST_RUNS, now_ns=RECENT_NS + 1)
    assert _refine(estimator) == (6, 6), "and so it does when they come fast"
    _observe(estimator, 7, now_ns=120_000 * MS)
    _observe(estimator, *[7] * (MIN_RUNS - 1), now_ns=120_000 * MS)
    assert _refine(estimator, now_ns=120_000 * MS) == (7, 7)


def test_another_variant_starts_afresh() -> None:
    estimator = Estimator()
    _observe(estimator, *[50] * 20, origin="digest fp32")
    _observe(estimator, *[8] * MIN_RUNS, origin="digest int8")
    assert _refine(estimator) == (8, 8)


def test_a_bad_minute_is_not_held_against_a_model_for_ever() -> None:
    """Nothing is admitted while the estimate is too high, so nothing new would ever be seen."""
    estimator = Estimator()
    _observe(estimator, *[900] * 20)
    assert _refine(estimator) == (900, 900)
    assert not estimator.stale(KEY, STALE_NS)
    assert _refine(estimator, now_ns=STALE_NS + 1) == (20, 30)
    assert estimator.stale(KEY, STALE_NS + 1)


def test_one_hang_does_not_close_the_door() -> None:
    estimator = Estimator()
    _observe(estimator, *[10] * 127)
    estimate = estimator.refine(SEED, KEY, now_ns=0)
    estimator.observe_stopped(KEY, 5_000 * MS, estimate, now_ns=0)
    assert _refine(estimator) == (10, 10)
    estimator.observe_stopped(KEY, 5_000 * MS, estimate, now_ns=0)
    assert _refine(estimator) == (10, 40), "and two count as no more than four times what is normal"


def test_a_short_deadline_says_nothing_about_the_model() -> None:
    estimator = Estimator()
    _observe(estimator, *[10] * 20)
    estimator.observe_stopped(
        KEY, 3 * MS, estimator.refine(SEED, KEY, now_ns=0), now_ns=0
    )  # fmt: skip
    assert _refine(estimator) == (10, 10)


def test_an_attempt_that_was_stopped_counts_as_one() -> None:
    estimator = Estimator()
    estimator.observe_stopped(KEY, 3 * MS, SEED, now_ns=0)
    assert not estimator.stale(KEY, STALE_NS)
    assert estimator.stale(KEY, STALE_NS + 1)
    assert _refine(estimator) == (20, 30)


def test_fewer_cores_than_threads_are_foreseen_and_taken_out_of_what_is_learnt() -> None:
    estimator = Estimator()
    _observe(estimator, *[10] * 20)
    one_of_two = conditions(2, 1, 1.0)
    assert _refine(estimator, factor=one_of_two.slowdown) == (20, 20)
    for _ in range(WINDOW_RUNS):
        estimator.observe(KEY, 20 * MS, now_ns=0, conditions=one_of_two)
    assert _refine(estimator) == (10, 10)
    assert conditions(1, 4, 1.0) == FULL


def test_when_the_clock_falls_a_model_nobody_knows_is_taken_to_do_nothing_but_compute() -> None:
    assert _refine(Estimator(), clock=0.5) == (40, 60)
    estimator = Estimator()
    _observe(estimator, *[10] * 20)
    assert _refine(estimator, clock=0.5) == (20, 20)


def test_a_clock_that_rises_is_not_counted_on_before_it_was_seen_to_help() -> None:
    estimator = Estimator()
    _observe(estimator, *[10] * 20, clock=0.5)
    assert _refine(estimator, clock=0.5) == (10, 10)
    assert _refine(estimator, clock=1.0) == (10, 10)


@pytest.mark.parametrize(
    ("slope", "expected"),
    [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0), (-0.3, 0.0), (1.6, 1.0)],
    ids=["compute-bound", "in between", "memory-bound", "faster at a low clock: noise", "steeper than possible: noise"],
)
def test_the_slope_is_learnt_from_clocks_that_really_varied(slope: float, expected: float) -> None:
    estimator, rng = Estimator(), random.Random(5)
    for clock in (1.0, 0.8, 0.6):
        for number in range(20):
            hiccup = 4.0 if number % 7 == 0 else 1.0
            _observe(estimator, 10 * clock**-slope * rng.uniform(0.98, 1.02) * hiccup, clock=clock)
    full, half = _refine(estimator, clock=1.0)[0], _refine(estimator, clock=0.5)[0]
    assert half / full == pytest.approx(2**expected, rel=0.05)
    if 0 <= slope <= 1:
        assert full == pytest.approx(10, rel=0.05), "what was seen at other clocks is rated by the slope"


def test_clocks_that_hardly_differ_say_nothing_about_the_slope() -> None:
    estimator = Estimator()
    _observe(estimator, *[10] * 20, clock=1.0)
    _observe(estimator, *[9] * 20, clock=0.95)
    assert _refine(estimator, clock=0.475)[0] == pytest.approx(18, rel=0.06), "the default's"


def test_a_few_runs_at_another_clock_say_nothing_about_the_slope() -> None:
    estimator = Estimator()
    _observe(estimator, *[10] * 20, clock=1.0)
    _observe(estimator, *[10] * 4, clock=0.5)
    assert _refine(estimator, clock=0.5)[0] == 20
    _observe(estimator, 10, clock=0.5)
    assert _refine(estimator, clock=0.5)[0] == 10


def test_another_variant_learns_its_own_slope() -> None:
    estimator = Estimator()
    for clock in (1.0, 0.5):
        _observe(estimator, *[10] * 20, clock=clock)
    assert _refine(estimator, clock=0.25)[0] == 10
    _observe(estimator, *[10] * 20, origin="digest int8")
    assert _refine(estimator, clock=0.25)[0] == 40
