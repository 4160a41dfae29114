"""What the forecast foretells: deadline order, cores, lanes, loading, pacing, and honest margins."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.scheduling.forecast import MARGIN, SIGMAS, Job, Machine, Plan, forecast, meets, occupied
from edgeinfer.scheduling.pacing import UNPACED, Pace
from tests.scheduling.jobs import MS, NOW_NS, job, running


def starts(machine: Machine, *jobs: Job) -> list[float]:
    return [expected.start_ns / MS for expected in forecast(sorted(jobs, key=lambda j: j.rank), machine, NOW_NS)]


def test_one_core_runs_one_after_the_other() -> None:
    assert starts(Machine(1), job(1, 10, 5), job(2, 20, 5), job(3, 30, 5)) == [0, 5, 10]


def test_two_small_models_run_side_by_side() -> None:
    assert starts(Machine(2), job(1, 10, 5), job(2, 20, 8), job(3, 30, 5)) == [0, 0, 5]


def test_what_runs_is_waited_for() -> None:
    assert starts(Machine(1, (running(7),)), job(1, 20, 5)) == [7]
    assert starts(Machine(2, (running(7),)), job(1, 20, 5), job(2, 30, 5)) == [0, 5]


def test_a_wide_request_waits_for_all_its_cores_and_nobody_passes_it() -> None:
    assert starts(Machine(2, (running(7),)), job(1, 20, 5, cores=2), job(2, 30, 1)) == [7, 12]


def test_a_request_wider_than_the_machine_takes_all_of_it() -> None:
    assert starts(Machine(2), job(1, 20, 5, cores=4), job(2, 30, 1)) == [0, 5]


def test_a_mask_that_shrank_below_what_runs_frees_nothing_before_enough_has_ended() -> None:
    runs = tuple(running(end) for end in (3, 6, 9, 12))
    assert starts(Machine(2, runs), job(1, 50, 5)) == [9]


def test_a_busy_model_lets_others_pass_and_then_takes_its_lane() -> None:
    machine = Machine(2, (running(10, key="a"),))
    assert starts(machine, job(1, 50, 5, key="a", lanes=1), job(2, 60, 30, key="b")) == [10, 0]


def test_a_model_with_two_workers_runs_twice_at_once() -> None:
    three = [job(number, 50 + number, 5, key="a", lanes=2) for number in (1, 2, 3)]
    assert starts(Machine(4), *three) == [0, 0, 5]


def test_loading_is_charged_to_the_first_request_of_a_model_only() -> None:
    two = [job(number, 900 + number, 10, key="cold", wait_ms=500) for number in (1, 2)]
    assert [e.finish_ns / MS for e in forecast(two, Machine(1), NOW_NS)] == [510, 520]


def test_margins_add_up_as_independent_errors_do() -> None:
    four = [job(number, 900 + number, 10, p99_ms=20) for number in (1, 2, 3, 4)]
    ends = [[e.finish_ns / MS, e.finish_p99_ns / MS] for e in forecast(four, Machine(1), NOW_NS)]
    assert ends[0] == [10, 20]
    assert ends[3][0] == 40
    ahead = 3 * (SIGMAS * 10 / 2.33) ** 2 + (MARGIN * 10) ** 2
    assert ends[3][1] == pytest.approx(40 + (ahead + 10**2) ** 0.5, abs=0.001), "68, not the 80 of four p99s"


def test_what_is_ahead_takes_its_mean_and_varies_by_its_deviation_and_by_one_long_run() -> None:
    skewed = [
        replace(job(number, 900 + number, 10, p99_ms=20), mean_ns=11 * MS, deviation_ns=2 * MS) for number in range(26)
    ]
    *_, last = forecast(skewed, Machine(1), NOW_NS)
    assert (last.start_ns, last.finish_ns) == (25 * 11 * MS, (25 * 11 + 10) * MS)
    margin_ms = (25 * (SIGMAS * 2) ** 2 + (MARGIN * 10) ** 2 + 10**2) ** 0.5
    assert (last.finish_p99_ns - last.finish_ns) / MS == pytest.approx(margin_ms, abs=0.001)


def test_pacing_delays_starts_and_stopping_makes_them_never() -> None:
    half = UNPACED.under(duty_cycle=0.5, cores=1, now_ns=NOW_NS)
    paced = starts(Machine(1, (), half), job(1, 900, 20), job(2, 901, 20))
    assert paced[0] > 0
    assert paced[1] >= paced[0] + 40
    stopped = UNPACED.under(duty_cycle=0.0, cores=1, now_ns=NOW_NS)
    (never,) = forecast([job(1, 10**9, 1)], Machine(1, (), stopped), NOW_NS)
    assert not meets(job(1, 10**9, 1), never)


def _owing(debt_ms: float = 100, *, cores: int = 1) -> Pace:
    """Return a pace of half of each core that owes core-time, with a full express lane (of 5 ms for each core)."""
    pace = UNPACED.under(duty_cycle=0.525, cores=cores, now_ns=NOW_NS - 10**9)
    return pace.spent(pace.budget.capacity + debt_ms * MS, NOW_NS)


def test_a_small_run_passes_those_that_wait_for_the_budget_and_the_others_keep_their_order() -> None:
    long, small, medium = job(1, 100, 20), job(2, 900, 1), job(3, 901, 10)
    assert starts(Machine(1, (), _owing()), long, small, medium) == [240, 0, 262], "what small runs take is paid by all"


def test_a_small_run_passes_only_when_it_is_done_before_the_core_is_needed() -> None:
    machine = Machine(1, (), _owing(-3.9))
    long, fits, does_not_fit = job(1, 100, 6), job(2, 900, 4.1), job(3, 900, 4.3)
    assert starts(machine, long, fits) == [4.2, 0]
    assert starts(machine, long, does_not_fit) == [4.2, 10.2]


def test_a_small_run_passes_nobody_who_waits_for_a_core_or_for_several() -> None:
    rested = UNPACED.under(duty_cycle=0.525, cores=2, now_ns=NOW_NS - 10**9)
    assert starts(Machine(2, (running(7),), rested), job(1, 100, 5, cores=2), job(2, 900, 1)) == [7, 12]
    assert starts(Machine(1, (running(7),), rested), job(1, 100, 5), job(2, 900, 1)) == [7, 12]


def test_small_runs_keep_their_order_among_themselves() -> None:
    empty = replace(_owing(), express=replace(_owing().express, level=0.0, at_ns=NOW_NS))
    larger, smaller = job(1, 100, 3), job(2, 200, 0.5)
    assert starts(Machine(2, (), empty), larger, smaller) == [30, 35]


def test_a_wide_run_is_small_when_all_its_cores_together_are() -> None:
    pace = _owing(cores=2)
    limit_ms = pace.express.capacity / MS
    assert starts(Machine(2, (), pace), job(1, 900, limit_ms * 0.49, cores=2)) == [0]
    assert starts(Machine(2, (), pace), job(1, 900, limit_ms * 0.51, cores=2))[0] > 50


def test_a_promise_counts_with_all_that_small_runs_may_take_meanwhile_and_the_likely_end_does_not() -> None:
    pace = _owing()
    (expected,) = forecast([job(1, 900, 20)], Machine(1, (), pace), NOW_NS)
    assert expected.finish_ns == 260 * MS
    taken_ns = pace.express.capacity + 0.2 * pace.budget.rate * (expected.finish_p99_ns - 20 * MS)
    assert expected.finish_p99_ns - expected.finish_ns == pytest.approx(taken_ns / pace.budget.rate, abs=2)


def test_firm_is_judged_by_p99_displaceable_by_the_median_and_spare_not_at_all() -> None:
    tight = job(1, 15, 10, p99_ms=20)
    (expected,) = forecast([tight], Machine(1), NOW_NS)
    assert not meets(tight, expected)
    assert meets(replace(tight, firm=False), expected)
    assert meets(job(1, 5, 10, spare=True), expected)
    assert not meets(job(1, 50, 10, start_by_ms=0), expected), "it would start after its latest start"


def test_a_run_is_expected_at_its_median_then_at_p99_then_a_quarter_later_and_not_beyond_its_deadline() -> None:
    def spread(now_ms: float) -> float:
        run = occupied(
            ("a", ""), cores=1, started_ns=0, p50_ns=10 * MS, p99_ns=20 * MS, due_ns=900 * MS, now_ns=round(now_ms * MS)
        )
        return run.spread_ns / MS

    def end(now_ms: float, due_ms: float = 900) -> float:
        run = occupied(
            ("a", ""), cores=1, started_ns=0, p50_ns=10 * MS, p99_ns=20 * MS, due_ns=round(due_ms * MS),
            now_ns=round(now_ms * MS),
        )  # fmt: skip
        return run.end_ns / MS

    assert [end(5), end(10), end(15), end(20), end(40)] == [10, 20, 20, 20, 50]
    assert [spread(5), spread(15)] == [10, 5], "who is in overtime may well be longer still"
    assert end(40, due_ms=45) == 45
    assert end(60, due_ms=45) == 75, "it should have been stopped, and still isn't"


_jobs = st.lists(
    st.builds(
        lambda due, run, cores, key, lanes: (due, run, cores, key, lanes),
        st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), st.sampled_from("abc"), st.integers(1, 2),
    ),
    max_size=14,
)  # fmt: skip
_paces = st.one_of(
    st.just(UNPACED),
    st.builds(
        lambda duty_cycle, debt: UNPACED.under(duty_cycle=duty_cycle, cores=1, now_ns=-(10**9)).spent(debt * MS, 0),
        st.floats(0.1, 0.95),
        st.integers(0, 100),
    ),
)


@settings(deadline=None)
@given(_jobs, st.integers(1, 3), st.lists(st.integers(1, 30), max_size=3), _paces)
def test_cores_and_lanes_are_never_overbooked(
    rows: list[tuple[int, int, int, str, int]], cores: int, ends: list[int], pace: Pace
) -> None:
    lanes_of = {key: lanes for *_, key, lanes in rows}
    jobs = sorted(
        (
            job(number, due, run, cores=width, key=key, lanes=lanes_of[key])
            for number, (due, run, width, key, _) in enumerate(rows)
        ),
        key=lambda j: j.rank,
    )
    runs = tuple(running(end) for end in ends[:cores])
    expected = forecast(jobs, Machine(cores, runs, pace), NOW_NS)
    spans = [(e.start_ns, e.finish_ns, min(j.cores, cores), j.key) for j, e in zip(jobs, expected, strict=True)]
    spans += [(NOW_NS, run.end_ns, run.cores, run.key) for run in runs]
    for at_ns in {start for start, *_ in spans}:
        now = [(width, key) for start, end, width, key in spans if start <= at_ns < end]
        assert sum(width for width, _ in now) <= cores
        for key, lanes in lanes_of.items():
            assert sum(k == (key, "") for _, k in now) <= lanes


@settings(deadline=None)
@given(_jobs, st.integers(0, 14), st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=3), st.integers())
def test_the_short_ways_tell_the_same_as_the_long_one(
    rows: list[tuple[int, int, int, str, int]], passed: int, ends: list[tuple[int, int]], seed: int
) -> None:
    rng = random.Random(seed)
    jobs = [
        replace(
            job(number, 90 + number, run, p99_ms=run + rng.randint(0, 9), key=key, lanes=lanes, wait_ms=rng.choice((0, 0, 7))),
            mean_ns=rng.choice((0, run * MS + rng.randint(-MS // 2, MS))),
            deviation_ns=rng.choice((0, rng.randint(1, MS))),
        )
        for number, (_, run, _, key, lanes) in enumerate(rows)
    ]  # fmt: skip
    machine = Machine(1, tuple(running(end, key="abc"[end % 3], spread_ms=spread) for end, spread in ends))
    plain, short, shortest = (Plan(machine, NOW_NS) for _ in range(3))
    plain._single = False
    expected = [plain.place(j) for j in jobs]
    assert [short.place(j) for j in jobs] == expected
    shortest.pass_over(jobs[:passed])
    assert [shortest.place(j) for j in jobs[passed:]] == expected[passed:]


@settings(deadline=None)
@given(_jobs, st.integers(1, 3), st.integers(0, 13), _paces)
def test_taking_a_request_out_delays_nobody_in_front(
    rows: list[tuple[int, int, int, str, int]], cores: int, gone: int, pace: Pace
) -> None:
    jobs = sorted((job(n, due, run, cores=width) for n, (due, run, width, *_) in enumerate(rows)), key=lambda j: j.rank)
    before = forecast(jobs, Machine(cores, (), pace), NOW_NS)
    after = forecast(jobs[:gone], Machine(cores, (), pace), NOW_NS)
    assert after == before[:gone], "what comes later in the order changed what comes first"
