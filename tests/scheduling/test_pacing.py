"""The pace's promise: over any second, and over all time, no more core-time than the duty cycle allows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.scheduling.pacing import BURST_NS, UNPACED, WINDOW_NS, Pace

MS = 1_000_000


def _paced(duty_cycle: float, cores: int = 1, now_ns: int = 0) -> Pace:
    return UNPACED.under(duty_cycle=duty_cycle, cores=cores, now_ns=now_ns)


def _greedy(pace: Pace, costs: list[int], until_ns: int) -> list[tuple[int, int]]:
    """Run one job after the other on one core as early as the pace allows; return (start, end) of each."""
    now_ns, runs, index = 0, [], 0
    while now_ns < until_ns:
        cost = costs[index % len(costs)]
        start_ns = pace.ready_ns(cost, now_ns)
        assert start_ns is not None
        pace = pace.spent(cost, start_ns)
        now_ns, index = start_ns + cost, index + 1
        runs.append((start_ns, now_ns))
    return runs


def _busy(runs: list[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    return sum(max(0, min(end, end_ns) - max(start, start_ns)) for start, end in runs)


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.floats(0.05, 0.99),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_over_any_second_the_share_stays_below_the_duty_cycle(duty_cycle: float, costs_ms: list[int]) -> None:
    pace = _paced(duty_cycle)
    runs = _greedy(pace, [cost * MS for cost in costs_ms], 4_000 * MS)
    beyond_ns = max(0, max(costs_ms) * MS - pace.capacity)  # the part of one run that no bucket holds
    for start_ns, _ in runs[:80]:
        used = _busy(runs, start_ns, start_ns + WINDOW_NS)
        assert used <= duty_cycle * WINDOW_NS + beyond_ns + 1_000


@settings(deadline=None)
@given(st.floats(0.1, 0.95), st.integers(5, 3_000))
def test_over_all_time_even_long_runs_keep_the_share(duty_cycle: float, cost_ms: int) -> None:
    runs = _greedy(_paced(duty_cycle), [cost_ms * MS], 20_000 * MS)
    last_start_ns = runs[-1][0]
    assert _busy(runs, 0, last_start_ns) <= duty_cycle * last_start_ns + 1_000


def test_the_share_is_nearly_used_up_when_there_is_work() -> None:
    runs = _greedy(_paced(0.5), [10 * MS], 10_000 * MS)
    assert _busy(runs, 0, 10_000 * MS) >= 0.5 * 10_000 * MS * WINDOW_NS / (WINDOW_NS + BURST_NS) - 30 * MS


def test_idle_time_is_saved_up_but_only_so_much() -> None:
    pace = _paced(0.5)
    after_a_pause = 3_600_000 * MS
    assert pace.ready_ns(10 * MS, after_a_pause) == after_a_pause
    assert pace.level_at(after_a_pause) == pytest.approx(0.5 * BURST_NS / 1.05)
    spent = pace.spent(10 * MS, after_a_pause).spent(10 * MS, after_a_pause)
    waits = spent.ready_ns(10 * MS, after_a_pause)
    assert waits is not None
    assert waits > after_a_pause


def test_more_cores_pay_for_each_other() -> None:
    assert _paced(0.25, cores=4).rate == pytest.approx(_paced(0.99, cores=1).rate, rel=0.02)


def test_a_run_that_took_longer_than_it_was_charged_leaves_a_debt() -> None:
    pace = _paced(0.5).spent(10 * MS, 0).spent(200 * MS, 210 * MS)
    ready_ns = pace.ready_ns(10 * MS, 210 * MS)
    assert ready_ns is not None
    assert ready_ns >= 410 * MS


def test_zero_stops_and_one_lets_go() -> None:
    stopped = _paced(0.0)
    assert stopped.stopped
    assert stopped.ready_ns(1, 10**15) is None
    free = stopped.under(duty_cycle=1.0, cores=1, now_ns=5)
    assert not free.limited
    assert free.ready_ns(10**12, 5) == 5
    assert free.spent(10**12, 5) == free


def test_a_change_of_the_duty_cycle_keeps_the_debt_and_forgets_the_savings() -> None:
    indebted = _paced(0.5).spent(300 * MS, 0)
    assert indebted.under(duty_cycle=0.2, cores=1, now_ns=0).level == pytest.approx(-300 * MS)
    saved = _paced(0.9)
    later = saved.under(duty_cycle=0.1, cores=1, now_ns=10**12)
    assert later.level == later.capacity < saved.capacity


@given(st.floats(0.01, 0.99), st.lists(st.integers(1, 500), min_size=2, max_size=20))
def test_ready_means_ready(duty_cycle: float, costs_ms: list[int]) -> None:
    """What was announced as the earliest moment holds when it comes: nobody wakes up in vain, or for ever."""
    pace, now_ns = _paced(duty_cycle), 0
    for cost, following in pairwise(cost * MS for cost in costs_ms):
        pace = pace.spent(cost, now_ns)
        ready_ns = pace.ready_ns(following, now_ns)
        assert ready_ns is not None
        assert pace.ready_ns(following, ready_ns) == ready_ns
        now_ns = ready_ns
