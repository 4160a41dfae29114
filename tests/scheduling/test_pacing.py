"""The pace's promise: over any second, and over all time, no more core-time than the duty cycle allows, and in it a
share for the small."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.scheduling.pacing import BURST_NS, EXPRESS_SHARE, UNPACED, WINDOW_NS, Pace

MS = 1_000_000


def _paced(duty_cycle: float, cores: int = 1, now_ns: int = 0) -> Pace:
    return UNPACED.under(duty_cycle=duty_cycle, cores=cores, now_ns=now_ns)


@dataclass(frozen=True)
class Span:
    """One run."""

    start_ns: int
    end_ns: int


def _greedy(pace: Pace, until_ns: int, *loops: list[int], cores: int = 1, orderly: bool = True) -> list[list[Span]]:
    """Run `loops`, one job of each after the other, as early as cores and pace allow, and whoever may first first.

    So nothing is left that could be used: the worst that can happen to a promise about use. Returns the runs of each.
    Orderly: as in a queue in which small runs stand behind the first loop's; else whoever is fast is never behind.
    """
    free, runs, ready = [0] * cores, [list[Span]() for _ in loops], [0] * len(loops)
    while True:
        offers = []
        for number, costs in enumerate(loops):
            cost = costs[len(runs[number]) % len(costs)]
            behind = orderly and number > 0 and pace.is_small(cost)
            start_ns = (pace.express if behind else pace).ready_ns(cost, max(min(free), ready[number]))
            assert start_ns is not None
            offers.append((start_ns, number, cost))
        start_ns, number, cost = min(offers)
        if start_ns >= until_ns:
            return runs
        pace = pace.spent(cost, start_ns, express=pace.by_express(cost, start_ns))
        free[free.index(min(free))] = ready[number] = start_ns + cost
        runs[number].append(Span(start_ns, start_ns + cost))


def _busy(runs: list[Span], start_ns: int, end_ns: int) -> int:
    return sum(max(0, min(run.end_ns, end_ns) - max(run.start_ns, start_ns)) for run in runs)


_start = attrgetter("start_ns")
_costs_ms = st.lists(st.integers(1, 60), min_size=1, max_size=4)
_costs_us = st.lists(st.integers(300, 6_000), min_size=1, max_size=4)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.floats(0.05, 0.99), st.integers(1, 3), _costs_ms, _costs_us, st.integers(1, 2), st.booleans())
def test_over_any_second_or_more_the_share_stays_below_the_duty_cycle(
    duty_cycle: float, cores: int, long_ms: list[int], small_us: list[int], seconds: int, orderly: bool
) -> None:
    pace = _paced(duty_cycle, cores)
    long, small = [cost * MS for cost in long_ms], [cost * 1_000 for cost in small_us]
    runs = sorted(
        chain(*_greedy(pace, (seconds + 1) * WINDOW_NS, *[long] * cores, small, cores=cores, orderly=orderly)),
        key=_start,
    )
    starts, used = [run.start_ns for run in runs], [0, *accumulate(run.end_ns - run.start_ns for run in runs)]
    beyond_ns = max(0.0, max(long + small) - pace.budget.capacity)  # the part of one run that no bucket holds
    allowed_ns = duty_cycle * cores * seconds * WINDOW_NS + beyond_ns + 1_000
    for first, begin in enumerate(runs[:100]):
        end_ns = begin.start_ns + seconds * WINDOW_NS
        assert used[bisect_right(starts, end_ns)] - used[first] <= allowed_ns
        if cores == 1 and first % 20 == 0:
            assert _busy(runs, begin.start_ns, end_ns) <= allowed_ns


@settings(deadline=None, max_examples=25)
@given(st.floats(0.1, 0.95), st.integers(5, 3_000), st.integers(500, 900))
def test_over_all_time_even_long_runs_keep_the_share(duty_cycle: float, cost_ms: int, small_us: int) -> None:
    long, small = _greedy(_paced(duty_cycle), 20_000 * MS, [cost_ms * MS], [small_us * 1_000])
    last_ns = long[-1].start_ns
    most_ns = duty_cycle * last_ns + 2 * BURST_NS
    assert _busy(long + small, 0, last_ns) <= most_ns


def test_the_share_is_nearly_used_up_when_there_is_work_and_small_runs_leave_nothing_unused() -> None:
    least_ns = 0.5 * 10_000 * MS * WINDOW_NS / (WINDOW_NS + BURST_NS) - 30 * MS
    for loops in ([[10 * MS]], [[1 * MS]], [[10 * MS], [1 * MS]], [[160 * MS], [1 * MS]], [[160 * MS]]):
        runs = list(chain(*_greedy(_paced(0.5), 10_000 * MS, *loops)))
        assert _busy(runs, 0, 10_000 * MS) >= least_ns


def test_small_runs_start_while_a_long_one_is_paid_for_and_the_long_ones_get_the_rest() -> None:
    long, small = _greedy(_paced(0.35, cores=2), 10_000 * MS, [160 * MS], [MS // 2], cores=2)
    share = 2 * 0.35 * WINDOW_NS / (WINDOW_NS + BURST_NS)
    assert _busy(small, 0, 10_000 * MS) / (10_000 * MS) == pytest.approx(EXPRESS_SHARE * share, rel=0.05)
    assert _busy(long, 0, 10_000 * MS) / (10_000 * MS) == pytest.approx((1 - EXPRESS_SHARE) * share, rel=0.05)


def test_what_is_not_small_has_no_express_lane() -> None:
    rested = _paced(0.35).spent(160 * MS, 0)
    now_ns = 100 * MS
    limit = rested.express.capacity
    assert limit == pytest.approx(0.35 / 1.05 * BURST_NS * EXPRESS_SHARE)
    assert rested.ready_ns(limit, now_ns) == now_ns
    waits = rested.ready_ns(limit + 1, now_ns)
    assert waits is not None
    assert waits > 400 * MS


def test_idle_time_is_saved_up_but_only_so_much() -> None:
    pace = _paced(0.5)
    later_ns = 3_600_000 * MS
    assert pace.ready_ns(10 * MS, later_ns) == later_ns
    assert pace.budget.level_at(later_ns) + pace.express.level_at(later_ns) == pytest.approx(0.5 * BURST_NS / 1.05)
    waits = pace.spent(10 * MS, later_ns).spent(10 * MS, later_ns).ready_ns(10 * MS, later_ns)
    assert waits is not None
    assert waits > later_ns


def test_more_cores_pay_for_each_other() -> None:
    assert _paced(0.25, cores=4).budget.rate == pytest.approx(_paced(0.99, cores=1).budget.rate, rel=0.02)


@pytest.mark.parametrize("express", [False, True])
def test_a_run_that_took_longer_than_it_was_charged_leaves_a_debt_where_it_was_charged(express: bool) -> None:
    pace = _paced(0.5, now_ns=-(10**9)).spent(MS, 0, express=express).spent(200 * MS, 210 * MS, express=express)
    cost = MS if express else 10 * MS
    ready_ns = pace.ready_ns(cost, 210 * MS)
    assert ready_ns is not None
    assert ready_ns >= 410 * MS


def test_zero_stops_and_one_lets_go() -> None:
    stopped = _paced(0.9).under(duty_cycle=0.0, cores=1, now_ns=10**10)
    assert stopped.stopped
    assert stopped.ready_ns(1, 10**15) is None
    free = stopped.under(duty_cycle=1.0, cores=1, now_ns=5)
    assert not free.limited
    assert free.ready_ns(10**12, 5) == 5
    assert free.spent(10**12, 5) == free


def test_a_change_of_the_duty_cycle_keeps_the_debt_and_forgets_the_savings() -> None:
    indebted = _paced(0.5).spent(300 * MS, 0)
    assert indebted.under(duty_cycle=0.2, cores=1, now_ns=0).budget.level == pytest.approx(-300 * MS)
    saved = _paced(0.9)
    later = saved.under(duty_cycle=0.1, cores=1, now_ns=10**12)
    assert later.budget.level == later.budget.capacity < saved.budget.capacity
    assert later.express.level == later.express.capacity < saved.express.capacity


def test_pacing_that_begins_has_nothing_saved() -> None:
    pace = _paced(0.5, now_ns=10**12)
    assert pace.ready_ns(MS, 10**12) == pytest.approx(10**12 + 2.1 * MS, abs=MS // 10)


@given(st.floats(0.01, 0.99), st.lists(st.integers(100, 500_000), min_size=2, max_size=20))
def test_ready_means_ready(duty_cycle: float, costs_us: list[int]) -> None:
    """What was announced as the earliest moment holds when it comes: nobody wakes up in vain, or for ever."""
    pace, now_ns = _paced(duty_cycle), 0
    for cost, following in pairwise(cost * 1_000 for cost in costs_us):
        pace = pace.spent(cost, now_ns, express=pace.by_express(cost, now_ns))
        ready_ns = pace.ready_ns(following, now_ns)
        assert ready_ns is not None
        assert pace.ready_ns(following, ready_ns) == ready_ns
        now_ns = ready_ns
