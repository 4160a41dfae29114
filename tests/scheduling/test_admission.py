"""Admission's promise: firm means in time at p99, and nobody who was promised something pays for a newcomer."""

from __future__ import annotations

import random
from bisect import bisect
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.limits import ThermalLevel
from edgeinfer.request import Reason, Refusal
from edgeinfer.scheduling.admission import GUARD, Admission, Load, _fit, admit, shed
from edgeinfer.scheduling.forecast import ROUNDING_NS, Expectation, Job, Machine, forecast, meets
from tests.scheduling.jobs import NOW_NS, job, load, running
from tests.scheduling.world import limits


def admitted(candidate: Job, busy: Load, *, replaces: tuple[int, ...] = ()) -> Admission:
    answer = admit(candidate, busy, replaces=replaces, now_ns=NOW_NS)
    assert isinstance(answer, Admission), answer
    return answer


def refused(candidate: Job, busy: Load) -> Refusal:
    answer = admit(candidate, busy, now_ns=NOW_NS)
    assert isinstance(answer, Refusal), answer
    assert answer.detail, "a refusal says why, for people"
    return answer


def test_admits_what_fits_behind_the_work_ahead() -> None:
    answer = admitted(job(9, 30, 10), load(job(1, 10, 10), runs=(running(5),)))
    assert answer.certain
    assert not answer.costs
    assert answer.expectation.start_ns == 15_000_000


def test_refuses_when_the_estimate_exceeds_the_slack() -> None:
    refusal = refused(job(9, 24, 10), load(job(1, 10, 10), runs=(running(5),)))
    assert refusal.reason is Reason.DEADLINE_UNREACHABLE
    assert "25.0 ms" in refusal.detail
    assert "24.0 ms are left" in refusal.detail


def test_a_promise_is_made_with_p99_and_a_chance_with_the_median() -> None:
    assert refused(job(9, 15, 10, p99_ms=20), load()).reason is Reason.DEADLINE_UNREACHABLE
    chance = admitted(job(9, 15, 10, p99_ms=20, firm=False), load())
    assert not chance.certain


def test_refuses_what_would_make_an_admitted_firm_request_late() -> None:
    refusal = refused(job(9, 10, 5), load(job(1, 14, 10)))
    assert refusal.reason is Reason.DEADLINE_UNREACHABLE
    assert "request 1" in refusal.detail


def test_what_was_late_before_is_not_held_against_a_newcomer() -> None:
    admitted(job(9, 36, 5), load(job(1, 12, 10), runs=(running(20),)))


def test_displaces_the_least_work_that_is_enough() -> None:
    busy = load(job(1, 40, 6, firm=False), job(2, 40, 10, firm=False), job(3, 40, 8, firm=False))
    assert admitted(job(9, 14, 3), busy).victims == ()
    assert admitted(job(9, 24, 20), busy).victims == (1,)
    assert admitted(job(9, 24, 23), busy).victims == (3,)


def test_displaces_the_most_work_there_is_when_nobodys_is_enough() -> None:
    busy = load(job(1, 60, 16, firm=False), job(2, 60, 4, firm=False), job(3, 60, 30))
    assert admitted(job(9, 20, 13), busy).victims == (2,)
    assert admitted(job(9, 20, 19), busy).victims == (1,)
    assert admitted(job(9, 30, 28), busy).victims == (1, 2)


def test_a_promise_that_would_be_broken_says_who_goes_and_not_a_frame_in_front_of_it() -> None:
    busy = load(job(1, 30, 18, firm=False), job(2, 31, 5, firm=False), job(3, 40, 15))
    assert admitted(job(9, 10, 9), busy).victims == (1,), "dropping request 2 as well would be for nothing"


def test_an_admitted_promise_keeps_half_as_much_again_of_its_margin() -> None:
    for due_ms, fits in ((28, False), (31, True)):
        answer = admit(job(9, 14, 10), load(job(1, due_ms, 10, p99_ms=17)), now_ns=NOW_NS)
        assert isinstance(answer, Admission) is fits
    admitted(job(1, 28, 10, p99_ms=17), load(job(9, 14, 10)))


def test_a_promise_in_danger_lets_nobody_pass_and_a_lost_one_does() -> None:
    tight = job(1, 25, 10, p99_ms=16)
    assert refused(job(9, 14, 0.5), load(tight, runs=(running(10),))).reason is Reason.DEADLINE_UNREACHABLE
    admitted(job(9, 22, 5), load(tight, runs=(running(16),)))


def test_displaces_the_least_important_before_the_least_work() -> None:
    busy = load(job(1, 20, 9, firm=False, priority=0), job(2, 20, 6, firm=False, priority=1))
    assert admitted(job(9, 15, 10), busy).victims == (1,)


def test_a_refusal_displaces_nobody() -> None:
    busy = load(job(1, 30, 10, firm=False), job(2, 12, 10))
    assert isinstance(admit(job(9, 8, 8), busy, now_ns=NOW_NS), Refusal)


def test_a_frame_gives_way_itself_unless_it_brings_more_work_than_it_costs() -> None:
    busy = load(job(1, 20, 8, firm=False), job(2, 20, 8, firm=False))
    assert refused(job(9, 20, 5, firm=False), busy).reason is Reason.DEADLINE_UNREACHABLE
    assert refused(job(9, 20, 8.5, firm=False), busy).reason is Reason.DEADLINE_UNREACHABLE
    assert admitted(job(9, 25, 12, firm=False), busy).victims == (2,)
    assert admitted(job(9, 20, 5, firm=False, priority=1), busy).victims == (2,)


def test_a_frame_never_displaces_a_firm_request() -> None:
    refused(job(9, 20, 5, firm=False, priority=9), load(job(1, 20, 18)))


def test_a_full_queue_refuses_unless_somebody_weaker_waits() -> None:
    firm = load(job(1, 900, 1), job(2, 900, 1), limit=2)
    assert refused(job(9, 900, 1), firm).reason is Reason.QUEUE_FULL
    frames = load(job(1, 900, 1, firm=False), job(2, 900, 2, firm=False), limit=2)
    assert admitted(job(9, 900, 1), frames).victims == (1,)
    assert refused(job(9, 900, 1, firm=False), frames).reason is Reason.QUEUE_FULL


def test_a_newer_frame_replaces_the_older_one_even_in_a_full_queue() -> None:
    answer = admitted(job(9, 50, 10, firm=False), load(job(1, 40, 10, firm=False), limit=1), replaces=(1,))
    assert answer.replaces == (1,)
    assert answer.victims == ()


def test_critical_heat_and_a_zero_duty_cycle_make_local_work_impossible() -> None:
    critical = limits(0.5, level=ThermalLevel.CRITICAL, reason="zone cpu-thermal 86.0 C >= 85.0 C")
    refusal = refused(job(9, 900, 1), load(bounds=critical))
    assert refusal.reason is Reason.THERMAL
    assert "86.0 C" in refusal.detail
    assert refused(job(9, 900, 1), load(bounds=limits(0.0, level=ThermalLevel.HOT))).reason is Reason.THERMAL


def test_heat_is_the_reason_only_where_heat_is_the_reason() -> None:
    paced = limits(0.1)
    assert refused(job(9, 50, 40), load(bounds=paced)).reason is Reason.THERMAL
    assert refused(job(9, 50, 60), load(bounds=paced)).reason is Reason.DEADLINE_UNREACHABLE


def test_spare_work_is_admitted_behind_everything_and_costs_nobody_anything() -> None:
    busy = load(job(1, 40, 30))
    spare = admitted(job(9, 5, 20, spare=True), busy)
    assert not spare.certain
    assert not spare.costs
    assert admitted(job(10, 60, 20), load(job(1, 40, 30), job(9, 5, 500, spare=True))).victims == ()


def test_shedding_drops_frames_until_the_rest_is_in_time_promises_first() -> None:
    busy = load(job(1, 30, 20, firm=False), job(2, 32, 5, firm=False), job(3, 40, 15), runs=(running(10),))
    verdict = shed(busy, NOW_NS)
    assert verdict.displaced == (1,)
    assert verdict.hopeless == ()
    assert verdict.endangered == ()


def test_shedding_names_firm_requests_that_nothing_can_save() -> None:
    verdict = shed(load(job(1, 12, 10), job(2, 40, 10), runs=(running(5),)), NOW_NS)
    assert verdict.endangered == (1,)


def test_shedding_keeps_everything_that_is_in_time() -> None:
    verdict = shed(load(job(1, 12, 10), job(2, 22, 10, firm=False)), NOW_NS)
    assert (verdict.hopeless, verdict.displaced, verdict.endangered) == ((), (), ())


_jobs = st.lists(
    st.tuples(st.integers(2, 60), st.integers(1, 20), st.integers(0, 6), st.booleans(), st.integers(0, 2)), max_size=10
)


@settings(deadline=None)
@given(_jobs, st.tuples(st.integers(2, 60), st.integers(1, 20), st.booleans()), st.integers(1, 3), st.integers(1, 10))
def test_after_an_admission_everybody_who_was_promised_something_is_in_time(
    rows: list[tuple[int, int, int, bool, int]], row: tuple[int, int, bool], cores: int, limit: int
) -> None:
    waiting = [
        job(number, due, run, p99_ms=run + more, firm=firm, priority=priority)
        for number, (due, run, more, firm, priority) in enumerate(rows)
    ]
    busy = load(*waiting, cores=cores, limit=limit)
    due, run, firm = row
    candidate = job(99, due, run, firm=firm)
    in_time_before = {
        j.id for j, e in zip(busy.waiting, forecast(busy.waiting, busy.machine, NOW_NS), strict=True) if meets(j, e)
    }
    answer = admit(candidate, busy, now_ns=NOW_NS)
    if isinstance(answer, Refusal):
        return
    gone = set(answer.victims)
    assert not any(j.firm for j in waiting if j.id in gone), "a firm request was displaced"
    plan = sorted([*(j for j in waiting if j.id not in gone), candidate], key=lambda j: j.rank)
    assert len(plan) <= limit
    for j, e in zip(plan, forecast(plan, busy.machine, NOW_NS), strict=True):
        if j is candidate or j.id in in_time_before:
            assert meets(j, e), f"job {j.id} became late"


@settings(deadline=None)
@given(_jobs, st.integers(1, 3))
def test_shedding_leaves_nobody_late_but_those_it_names(
    rows: list[tuple[int, int, int, bool, int]], cores: int
) -> None:
    waiting = [job(n, due, run, p99_ms=run + more, firm=firm) for n, (due, run, more, firm, _) in enumerate(rows)]
    busy = load(*waiting, cores=cores)
    verdict = shed(busy, NOW_NS)
    gone = {*verdict.hopeless, *verdict.displaced}
    assert not any(j.firm for j in waiting if j.id in gone)
    plan = [j for j in busy.waiting if j.id not in gone]
    for j, e in zip(plan, forecast(plan, busy.machine, NOW_NS), strict=True):
        assert meets(j, e) or j.id in verdict.endangered


def _plainly(candidate: Job, waiting: list[Job], machine: Machine) -> Job | None:
    """Say by two whole forecasts who would be late because of a newcomer: what `admit` finds out in one pass."""
    plan = sorted([*waiting, candidate], key=lambda j: j.rank)
    then = dict(zip([j.id for j in plan], forecast(plan, machine, NOW_NS), strict=True))
    before = dict(zip([j.id for j in waiting], forecast(waiting, machine, NOW_NS), strict=True))
    if not meets(candidate, then[candidate.id]):
        return candidate
    late = []
    for j in waiting:
        was, now = before[j.id], then[j.id]
        lost = was.start_ns >= j.start_by_ns or was.finish_ns > j.due_ns
        margin_ns = GUARD * (now.finish_p99_ns - now.finish_ns) + ROUNDING_NS if j.firm else 0
        safe = now.start_ns < j.start_by_ns and now.finish_ns + margin_ns <= j.due_ns
        if not (j.rank < candidate.rank or j.spare or lost or safe or now == was):
            late.append(j)
    return next((j for j in late if j.firm), late[0] if late else None)


@pytest.mark.slow
def test_one_pass_finds_whom_two_whole_forecasts_find() -> None:
    rng = random.Random(1)
    seen: Counter[str] = Counter()
    for _ in range(2_000):
        waiting = [
            job(
                number, rng.randint(10, 45), rng.randint(2, 9), p99_ms=rng.randint(9, 12), firm=rng.random() < 0.2,
                key=rng.choice("abc"), lanes=2, spare=rng.random() < 0.1,
            )
            for number in range(rng.randint(2, 8))
        ]  # fmt: skip
        cores = rng.choice((1, 1, 2, 3))
        busy = load(
            *waiting,
            runs=tuple(running(rng.randint(1, 9)) for _ in range(rng.randint(0, cores))),
            cores=cores,
            bounds=limits(rng.choice((1.0, 1.0, 0.8, 0.5))),
        )
        candidate = job(99, rng.randint(8, 30), rng.randint(1, 12), firm=rng.random() < 0.5, spare=rng.random() < 0.1)
        ordered = list(busy.waiting)
        place = bisect(ordered, candidate.rank, key=lambda j: j.rank)
        found = _fit(candidate, ordered, place, busy.machine, NOW_NS)
        late = _plainly(candidate, ordered, busy.machine)
        assert (None if isinstance(found, Expectation) else found.late) is late
        seen["nobody" if late is None else "itself" if late is candidate else "firm" if late.firm else "frame"] += 1
    assert min(seen[who] for who in ("nobody", "itself", "firm", "frame")) > 30, seen
