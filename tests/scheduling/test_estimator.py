"""Estimates follow what is seen, never get stuck on what once was, and know about fewer cores."""

from __future__ import annotations

from edgeinfer.execution.executor import Estimate
from edgeinfer.scheduling.estimator import MIN_RUNS, MOST_RUNS, RECENT_NS, STALE_NS, WINDOW_RUNS, Estimator, slowdown

MS = 1_000_000
KEY = ("person-detect", "")
SEED = Estimate(20 * MS, 30 * MS, wait_ns=5 * MS, cores=2, lanes=3)


def _refine(estimator: Estimator, now_ns: int = 0, factor: float = 1.0) -> tuple[float, float]:
    estimate = estimator.refine(SEED, KEY, now_ns=now_ns, slowdown=factor)
    return estimate.p50_ns / MS, estimate.p99_ns / MS


def _observe(estimator: Estimator, *durations_ms: float, now_ns: int = 0, origin: str = "") -> None:
    for duration in durations_ms:
        estimator.observe(KEY, round(duration * MS), now_ns=now_ns, origin=origin)


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
    estimator.observe_stopped(KEY, 5_000 * MS, estimate, now_ns=0, slowdown=1.0)
    assert _refine(estimator) == (10, 10)
    estimator.observe_stopped(KEY, 5_000 * MS, estimate, now_ns=0, slowdown=1.0)
    assert _refine(estimator) == (10, 40), "and two count as no more than four times what is normal"


def test_a_short_deadline_says_nothing_about_the_model() -> None:
    estimator = Estimator()
    _observe(estimator, *[10] * 20)
    estimator.observe_stopped(
        KEY, 3 * MS, estimator.refine(SEED, KEY, now_ns=0), now_ns=0, slowdown=1.0
    )  # fmt: skip
    assert _refine(estimator) == (10, 10)


def test_an_attempt_that_was_stopped_counts_as_one() -> None:
    estimator = Estimator()
    estimator.observe_stopped(KEY, 3 * MS, SEED, now_ns=0, slowdown=1.0)
    assert not estimator.stale(KEY, STALE_NS)
    assert estimator.stale(KEY, STALE_NS + 1)
    assert _refine(estimator) == (20, 30)


def test_fewer_cores_than_threads_are_foreseen_and_taken_out_of_what_is_learnt() -> None:
    estimator = Estimator()
    _observe(estimator, *[10] * 20)
    assert _refine(estimator, factor=slowdown(2, 1)) == (20, 20)
    for _ in range(WINDOW_RUNS):
        estimator.observe(KEY, 20 * MS, now_ns=0, slowdown=slowdown(2, 1))
    assert _refine(estimator) == (10, 10)
    assert slowdown(1, 4) == 1.0
