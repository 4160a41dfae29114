"""What callers of the scheduler can rely on, one promise at a time, on virtual time."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from edgeinfer.errors import InternalError
from edgeinfer.execution.executor import NOT_BEGUN, Estimate
from edgeinfer.limits import ThermalLevel
from edgeinfer.request import (
    DataScope,
    Expired,
    Failure,
    InferRequest,
    Outcome,
    OutcomeKind,
    Placement,
    Reason,
    Refusal,
    Result,
)
from edgeinfer.scheduling.scheduler import Scheduler
from tests.execution.fake import FakeExecutor
from tests.scheduling.world import MS, ROUNDING_NS, Script, World, check_punctual, limits, on_virtual_time, world
from tests.virtual_time import run_virtual

OK, REJECTED, EXPIRED = OutcomeKind.OK, OutcomeKind.REJECTED, OutcomeKind.EXPIRED


# Order and resources


@on_virtual_time()
async def test_runs_the_earliest_deadline_first(w: World) -> None:
    w.submit("5ms", 900)
    await w.sleep(1)
    for within in (80, 60, 70):
        w.submit("5ms", within)
    await w.scheduler.drained()
    dues = [outcome.request.deadlines.total_ns for outcome in w.outcomes[1:]]
    assert dues == sorted(dues)


@on_virtual_time(cores=2)
async def test_two_small_models_run_side_by_side(w: World) -> None:
    await asyncio.gather(w.submit("30ms", 31).outcome(), w.submit("20ms", 31).outcome())
    assert [kind for kind, _ in w.kinds()] == ["ok", "ok"]


@on_virtual_time(cores=4)
async def test_one_worker_runs_one_request_and_others_pass_meanwhile(w: World) -> None:
    w.scripts["two workers"] = Script(10 * MS, lanes=2)
    for _ in range(2):
        w.submit("30ms", 900)
        w.submit("two workers", 901)
    await w.sleep(11)
    assert [outcome.request.model for outcome in w.outcomes] == ["two workers"] * 2
    await w.scheduler.drained()
    assert w.local.waited_inside == 0
    assert (w.outcomes[-1].ended_ns - w.outcomes[-1].request.timeline.received_ns) // MS == 60


@on_virtual_time(cores=2)
async def test_a_stuck_model_takes_one_core_and_the_other_model_stays_on_time(w: World) -> None:
    w.scripts["stuck"] = Script(10 * MS, hangs=True, heeds_deadline=False)
    w.submit("stuck", 100)
    for _ in range(30):
        w.submit("8ms", 9.5)
        await w.sleep(10)
    on_time = [outcome.kind for outcome in w.outcomes if outcome.request.model == "8ms"]
    assert on_time == [OK] * 30


@on_virtual_time()
async def test_a_cold_models_loading_is_part_of_the_promise(w: World) -> None:
    w.scripts["cold"] = Script(510 * MS, estimate=Estimate(10 * MS, 10 * MS, wait_ns=500 * MS))
    assert (await w.submit("cold", 505).outcome()).reason == "deadline_unreachable"
    assert (await w.submit("cold", 515).outcome()).kind is OK


# Outcomes in time, whatever happens


@pytest.mark.parametrize("ignores_cancels", [0, 1])
def test_the_outcome_comes_at_the_deadline_whatever_the_executor_does(ignores_cancels: int) -> None:
    @on_virtual_time()
    async def scenario(w: World) -> None:
        w.scripts["deaf"] = Script(10 * MS, hangs=True, heeds_deadline=False, ignores_cancels=ignores_cancels)
        outcome = await w.submit("deaf", 50).outcome()
        assert (outcome.kind, outcome.reason, outcome.placement) == (EXPIRED, "running", Placement.LOCAL)
        check_punctual(outcome)
        snapshot = w.scheduler.snapshot()
        assert snapshot.cores_busy == 1, "the core isn't free while the worker still has it"
        await w.sleep(5_000)
        snapshot = w.scheduler.snapshot()
        assert snapshot.cores_busy == 0
        assert snapshot.abandoned_runs == ignores_cancels
        assert (await w.submit("5ms", 50).outcome()).kind is OK

    scenario()


@on_virtual_time()
async def test_a_result_that_comes_after_its_request_has_ended_is_released_and_nobodys_answer(w: World) -> None:
    w.keeps_results = True
    w.scripts["late"] = Script(80 * MS, estimate=Estimate(10 * MS, 10 * MS), heeds_deadline=False)
    late, following = w.submit("late", 50), w.submit("5ms", 200)
    assert (await late.outcome()).kind is EXPIRED
    outcome = await following.outcome()
    assert outcome.kind is OK
    assert outcome.latency_ns // MS == 85, "the core was taken until then"
    assert w.local.leased == 1
    assert outcome.result is not None
    outcome.result.release()


@on_virtual_time()
async def test_a_request_that_comes_too_late_expires_at_once(w: World) -> None:
    outcome = await w.submit("5ms", -3).outcome()
    assert (outcome.kind, outcome.reason) == (EXPIRED, "queued")
    assert "3.0 ms after its deadline" in outcome.detail


@on_virtual_time()
async def test_the_queue_deadline_ends_the_waiting(w: World) -> None:
    w.scripts["longer than it says"] = Script(100 * MS, estimate=Estimate(5 * MS, 5 * MS))
    w.submit("longer than it says", 900)
    outcome = await w.submit("5ms", 900, queue_ms=20).outcome()
    assert (outcome.kind, outcome.reason) == (EXPIRED, "queued")
    assert abs(outcome.latency_ns - 20 * MS) <= ROUNDING_NS


@on_virtual_time()
async def test_the_first_result_deadline_ends_a_run_that_shows_nothing(w: World) -> None:
    outcome = await w.submit("50ms", 100, first_ms=20).outcome()
    assert outcome.kind is EXPIRED
    assert "first result" in outcome.detail
    assert abs(outcome.latency_ns - 20 * MS) <= ROUNDING_NS
    await w.sleep(1)
    assert w.scheduler.snapshot().cores_busy == 0, "nobody wants the rest"


@on_virtual_time()
async def test_late_results_are_delivered_where_they_are_accepted(w: World) -> None:
    outcome = await w.submit("50ms", 20, accept_late=True).outcome()
    assert outcome.kind is OutcomeKind.LATE
    assert outcome.latency_ns // MS == 50


@on_virtual_time()
async def test_late_work_waits_behind_everything_that_can_still_be_in_time(w: World) -> None:
    w.submit("10ms", 900)
    await w.sleep(1)
    late = w.submit("10ms", 5, accept_late=True)
    w.submit("10ms", 500)
    w.submit("10ms", 600)
    assert (await late.outcome()).kind is OutcomeKind.LATE
    assert [kind for kind, _ in w.kinds()] == ["ok", "ok", "ok", "late"]


@on_virtual_time()
async def test_nobody_waits_for_a_late_result_for_ever(w: World) -> None:
    w.scripts["stuck"] = Script(10 * MS, hangs=True, heeds_deadline=False)
    outcome = await w.submit("stuck", 50, accept_late=True).outcome()
    assert outcome.kind is EXPIRED
    assert outcome.latency_ns <= 1_050 * MS + ROUNDING_NS


@on_virtual_time()
async def test_a_crash_is_the_callers_to_know_and_nobody_elses_problem(w: World) -> None:
    w.scripts["crash"] = Script(3 * MS, ending=Failure("crashed", "SIGSEGV in worker 12"))
    first, second = w.submit("crash", 50), w.submit("5ms", 50)
    assert ((await first.outcome()).kind, (await first.outcome()).reason) == (OutcomeKind.FAILED, "crashed")
    assert (await second.outcome()).kind is OK


@on_virtual_time()
async def test_hiccups_of_the_machine_do_not_shut_out_a_quick_model(w: World) -> None:
    """2 ms runs, three of which took 190 ms: requests due in 100 ms go on being taken by an idle machine."""
    w.scripts["quick"] = Script(2 * MS)
    for number in range(60):
        w.scripts["quick"] = Script(190 * MS if number in {20, 30, 40} else 2 * MS, estimate=Estimate(2 * MS, 2 * MS))
        await w.submit("quick", 500 if number in {20, 30, 40} else 100).outcome()
        await w.sleep(100)
    assert {outcome.kind for outcome in w.outcomes} == {OK}


# Frames


@on_virtual_time()
async def test_the_newest_frame_wins_and_the_older_is_told_at_once(w: World) -> None:
    w.submit("40ms", 200, firm=False, stream="camera")
    await w.sleep(5)
    older = w.submit("40ms", 200, firm=False, stream="camera")
    await w.sleep(5)
    w.submit("40ms", 200, firm=False, stream="camera")
    outcome = await older.outcome()
    assert (outcome.kind, outcome.reason) == (REJECTED, "superseded")
    assert outcome.latency_ns // MS == 5
    await w.scheduler.drained()
    assert [kind for kind, _ in w.kinds()] == ["rejected", "ok", "ok"]


@on_virtual_time()
async def test_a_slow_model_on_a_fast_source_stays_current(w: World) -> None:
    """30 frames a second into a model that does 5: results are never older than a period and a run."""
    for _ in range(30 * 60):
        request = w.request("200ms", 1_000, firm=False, stream="camera")
        request.timeline.captured_ns = w.clock.now_ns()
        w.tickets[request.id] = w.scheduler.submit(request)
        await w.sleep(1000 / 30)
    await w.scheduler.drained()
    ages = sorted(outcome.latency_ns for outcome in w.outcomes if outcome.kind is OK)
    assert len(ages) >= 5 * 60 - 2, "it never pauses"
    assert ages[int(len(ages) * 0.99)] < (1000 / 30 + 200) * MS + ROUNDING_NS
    reasons = {reason for kind, reason in w.kinds() if kind != "ok"}
    assert reasons == {"superseded"}


@on_virtual_time()
async def test_a_slow_loop_never_bursts_to_catch_up(w: World) -> None:
    """20 ms period, 50 ms runs; then the source pauses: nothing is left to catch up with."""
    for _ in range(200):
        w.submit("50ms", 120, firm=False, stream="camera")
        await w.sleep(20)
    at_the_end = len(w.local.started)
    await w.sleep(2_000)
    assert len(w.local.started) - at_the_end <= 1, "a backlog was worked off"
    starts = [run.started_ns for run in w.local.runs]
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert min(gaps) >= 50 * MS - ROUNDING_NS


@on_virtual_time()
async def test_a_stream_with_a_long_deadline_gets_its_turn_beside_a_busy_one_with_a_short(w: World) -> None:
    for index in range(400):
        w.submit("9ms", 40, firm=False, stream="busy")
        if index % 2 == 0:
            w.submit("9ms", 500, firm=False, stream="patient")
        await w.sleep(10)
    patient = [outcome.kind for outcome in w.outcomes if outcome.request.stream == "patient"]
    assert patient.count(OK) >= 10


@on_virtual_time()
async def test_a_displaced_frame_is_told_at_once(w: World) -> None:
    w.submit("20ms", 900)
    await w.sleep(1)
    frame = w.submit("30ms", 100, firm=False)
    firm = w.submit("60ms", 90)
    outcome = await frame.outcome()
    assert (outcome.kind, outcome.reason) == (REJECTED, "displaced")
    assert outcome.latency_ns <= ROUNDING_NS
    assert (await firm.outcome()).kind is OK


@on_virtual_time()
async def test_firm_requests_of_one_stream_run_in_the_order_they_came(w: World) -> None:
    w.submit("5ms", 900)
    await w.sleep(1)
    first = w.submit("5ms", 300, stream="speech")
    second = w.submit("5ms", 100, stream="speech")
    await asyncio.gather(first.outcome(), second.outcome())
    assert [outcome.request.deadlines.total_ns for outcome in w.outcomes[1:]] == [
        ticket.request.deadlines.total_ns for ticket in (first, second)  # type: ignore[attr-defined]
    ]  # fmt: skip


# Next door


@on_virtual_time(nearby_ms=30)
async def test_overload_goes_next_door_and_comes_back_by_itself(w: World) -> None:
    for _ in range(20):
        w.submit("20ms", 45)
        await w.sleep(10)
    await w.scheduler.drained()
    assert {outcome.kind for outcome in w.outcomes} == {OK}
    placed = [outcome.placement for outcome in w.outcomes]
    assert placed.count(Placement.LOCAL) >= 9
    assert placed.count(Placement.NEARBY) >= 8
    assert w.scheduler.snapshot().offload_open
    assert (await w.submit("20ms", 45).outcome()).placement is Placement.LOCAL
    await w.sleep(5_001)
    assert not w.scheduler.snapshot().offload_open


@on_virtual_time(nearby_ms=30)
async def test_a_superseded_frame_goes_next_door_if_it_is_in_time_there(w: World) -> None:
    """A loop that is faster than the board: the newest frames run here, the ones they overtake next door."""
    for _ in range(20):
        w.submit("40ms", 200, firm=False, stream="camera")
        await w.sleep(20)
    await w.scheduler.drained()
    assert {outcome.kind for outcome in w.outcomes} == {OK}
    placed = [outcome.placement for outcome in w.outcomes]
    assert placed.count(Placement.LOCAL) >= 9
    assert placed.count(Placement.NEARBY) >= 8


@on_virtual_time(nearby_ms=30)
async def test_slow_first_runs_do_not_end_trying_here(w: World) -> None:
    """Some runs on a busy machine took 300 ms, later ones take 40: next door takes over, and the board finds out."""
    for number in range(80):
        slow = number < 6
        w.scripts["camera"] = Script((300 if slow else 40) * MS, estimate=Estimate(300 * MS, 300 * MS))
        await w.submit("camera", 350 if slow else 200, firm=False, stream="camera").outcome()
        await w.sleep(100)
    placed = [outcome.placement for outcome in w.outcomes]
    assert placed[6:].count(Placement.NEARBY) > 60, "nobody risks every frame for it"
    assert placed[6:].count(Placement.LOCAL) >= 5, "one a second"
    assert {outcome.kind for outcome in w.outcomes} == {OK}


@on_virtual_time(nearby_ms=30)
async def test_a_superseded_frame_that_may_not_leave_is_told_so(w: World) -> None:
    w.submit("40ms", 200, firm=False, stream="camera", scope=DataScope.DEVICE)
    older = w.submit("40ms", 200, firm=False, stream="camera", scope=DataScope.DEVICE)
    w.submit("40ms", 200, firm=False, stream="camera", scope=DataScope.DEVICE)
    outcome = await older.outcome()
    assert (outcome.kind, outcome.reason) == (REJECTED, "superseded")
    assert w.nearby is not None
    assert w.nearby.started == []


@on_virtual_time(nearby_ms=1)
async def test_local_is_preferred_while_it_is_in_time_even_when_next_door_is_faster(w: World) -> None:
    assert (await w.submit("40ms", 45).outcome()).placement is Placement.LOCAL


@on_virtual_time(nearby_ms=10)
async def test_data_that_may_not_leave_stays(w: World) -> None:
    w.submit("40ms", 45)
    outcome = await w.submit("40ms", 45, scope=DataScope.DEVICE).outcome()
    assert (outcome.kind, outcome.reason) == (REJECTED, "deadline_unreachable")
    assert "may not leave" in outcome.detail
    assert w.nearby is not None
    assert w.nearby.started == []


@on_virtual_time(nearby_ms=10)
async def test_heat_sends_work_next_door(w: World) -> None:
    w.scheduler.set_limits(limits(0.0, level=ThermalLevel.CRITICAL))
    assert (await w.submit("10ms", 50).outcome()).placement is Placement.NEARBY


@on_virtual_time(nearby_ms=10)
async def test_a_model_that_is_not_here_runs_next_door(w: World) -> None:
    w.scripts["absent"] = Script(estimate=Refusal(Reason.MODEL_UNAVAILABLE, "no such model is installed"))
    assert (await w.submit("absent", 50).outcome()).placement is Placement.NEARBY


@on_virtual_time(nearby_ms=10)
async def test_what_next_door_lost_is_done_here_if_there_is_time(w: World) -> None:
    w.scripts["nearby 20ms"] = Script(5 * MS, ending=Failure("link_lost", "the broker is gone"), lanes=99)
    w.scripts["sooner than it says"] = Script(4 * MS, estimate=Estimate(60 * MS, 60 * MS))
    w.submit("sooner than it says", 900)
    await w.sleep(1)
    outcome = await w.submit("20ms", 40).outcome()
    assert (outcome.kind, outcome.placement) == (OK, Placement.LOCAL)
    w.submit("40ms", 900)
    await w.sleep(1)
    outcome = await w.submit("20ms", 40).outcome()
    assert (outcome.kind, outcome.reason, outcome.placement) == (OutcomeKind.FAILED, "link_lost", Placement.NEARBY)


@on_virtual_time(nearby_ms=10)
async def test_what_next_door_refused_is_done_here_if_there_is_time(w: World) -> None:
    w.scripts["nearby 20ms"] = Script(
        1 * MS, estimate=Estimate(9 * MS, 9 * MS, cores=0), ending=Refusal(Reason.QUEUE_FULL, "busy"), lanes=99
    )
    w.submit("20ms", 900)
    w.submit("15ms", 900, firm=False, stream="camera")
    await w.sleep(18)
    outcome = await w.submit("20ms", 23, firm=False, stream="camera").outcome()
    assert (outcome.kind, outcome.placement) == (OK, Placement.LOCAL)


@on_virtual_time(nearby_ms=10)
async def test_what_next_door_lost_starts_here_at_once_when_a_core_is_free(w: World) -> None:
    """Its first run is still being cleaned up when the second begins: the two must not be confused."""
    w.scripts["nearby 20ms"] = Script(3 * MS, ending=Failure("link_lost", "the broker is gone"), lanes=99)
    w.scheduler.set_limits(limits(0.0, level=ThermalLevel.CRITICAL))
    ticket = w.submit("20ms", 60)
    await w.sleep(1)
    w.scheduler.set_limits(limits())
    outcome = await ticket.outcome()
    assert (outcome.kind, outcome.placement) == (OK, Placement.LOCAL)
    assert outcome.latency_ns // MS == 23


@on_virtual_time(nearby_ms=10)
async def test_an_old_frame_that_next_door_lost_does_not_come_back_behind_a_newer_one(w: World) -> None:
    w.scripts["nearby 20ms"] = Script(35 * MS, ending=Failure("link_lost", "the broker is gone"), lanes=99)
    w.scripts["sooner than it says"] = Script(30 * MS, estimate=Estimate(200 * MS, 200 * MS))
    w.submit("sooner than it says", 900)
    await w.sleep(1)
    old = w.submit("20ms", 100, firm=False, stream="camera")
    await w.sleep(1)
    assert w.nearby is not None
    w.nearby.unavailable = Refusal(Reason.MODEL_UNAVAILABLE, "the link is down")
    w.submit("25ms", 240)
    newer = w.submit("20ms", 300, firm=False, stream="camera")
    outcome = await old.outcome()
    assert (outcome.reason, outcome.latency_ns // MS) == ("link_lost", 35)
    assert (await newer.outcome()).kind is OK


@on_virtual_time(nearby_ms=20, nearby_slots=2)
async def test_a_burst_is_bounded_by_what_next_door_takes_at_once(w: World) -> None:
    for _ in range(8):
        w.submit("30ms", 35)
    await w.scheduler.drained()
    assert w.nearby is not None
    assert w.nearby.runs, "nothing went next door"
    ok = [outcome for outcome in w.outcomes if outcome.kind is OK]
    assert len(ok) == 3
    assert all(outcome.kind is REJECTED for outcome in w.outcomes if outcome not in ok)


@on_virtual_time(nearby_ms=10)
async def test_a_displaced_frame_goes_next_door_if_it_may(w: World) -> None:
    assert w.nearby is not None
    w.nearby.unavailable = Refusal(Reason.MODEL_UNAVAILABLE, "the link is down")
    w.submit("20ms", 900)
    await w.sleep(1)
    frame = w.submit("30ms", 100, firm=False)
    w.scripts["nearby 60ms"] = Script(estimate=Refusal(Reason.DATA_SCOPE, "not this"))
    w.nearby.unavailable = None
    w.submit("60ms", 90)
    outcome = await frame.outcome()
    assert (outcome.kind, outcome.placement) == (OK, Placement.NEARBY)


@on_virtual_time(nearby_ms=10)
async def test_promises_that_a_stuck_run_endangers_are_kept_next_door(w: World) -> None:
    w.scripts["stuck"] = Script(10 * MS, hangs=True)
    w.submit("stuck", 200)
    await w.sleep(5)
    promised = w.submit("20ms", 60)
    outcome = await promised.outcome()
    assert (outcome.kind, outcome.placement) == (OK, Placement.NEARBY)


# Heat


def _share(w: World, start_ns: int, window_ns: int) -> float:
    used = sum(max(0, min(run.ended_ns, start_ns + window_ns) - max(run.started_ns, start_ns)) for run in w.local.runs)
    return used / window_ns


@pytest.mark.parametrize("duty_cycle", [0.2, 0.5, 0.8])
def test_the_busy_share_over_any_second_stays_below_the_duty_cycle(duty_cycle: float) -> None:
    @on_virtual_time()
    async def scenario(w: World) -> None:
        for index in range(400):
            if index == 50:
                w.scheduler.set_limits(limits(duty_cycle))
                changed_ns = w.clock.now_ns() + 10 * MS
            w.submit("7ms", 60, firm=index % 3 == 0, stream=None if index % 3 else "camera")
            await w.sleep(10)
        await w.scheduler.drained()
        windows = range(changed_ns, changed_ns + 2_400 * MS, 7 * MS)
        shares = [_share(w, start, 1_000 * MS) for start in windows]
        assert max(shares) <= duty_cycle + 1e-4
        assert min(shares) >= min(0.7, duty_cycle) * 0.8, "the share isn't used"
        refused = {reason for kind, reason in w.kinds() if kind == "rejected"}
        assert refused <= {"thermal", "deadline_unreachable", "superseded", "displaced"}
        if duty_cycle < 0.5:
            assert "thermal" in refused

    scenario()


@on_virtual_time()
async def test_estimates_that_are_wrong_do_not_break_the_duty_cycle(w: World) -> None:
    w.scheduler.set_limits(limits(0.3))
    for index in range(300):  # each is another model: nothing can be learnt
        w.scripts[f"liar {index}"] = Script(30 * MS, estimate=Estimate(3 * MS, 3 * MS))
        w.submit(f"liar {index}", 90, firm=False, stream="camera")
        await w.sleep(10)
    await w.scheduler.drained()
    start_ns = w.local.runs[0].started_ns
    assert _share(w, start_ns, 3_000 * MS) <= 0.31


@on_virtual_time(cores=2)
async def test_waiting_for_a_core_that_another_process_has_is_not_charged(w: World) -> None:
    w.scheduler.set_limits(limits(0.1))
    for index in range(200):
        late = index % 20 == 19  # not so often that it would be the median
        w.scripts["small"] = Script(MS, delay_ns=25 * MS if late else 0, estimate=Estimate(MS, MS))
        w.submit("small", 32, firm=False)
        await w.sleep(33)
    assert [kind for kind, _ in w.kinds()] == ["ok"] * 200


@on_virtual_time()
async def test_critical_heat_tells_those_who_wait_at_once_and_lets_what_runs_finish(w: World) -> None:
    running, waiting = w.submit("20ms", 900), w.submit("20ms", 901)
    await w.sleep(1)
    w.scheduler.set_limits(limits(0.5, level=ThermalLevel.CRITICAL, reason="zone cpu 86.0 C >= 85.0 C"))
    outcome = await waiting.outcome()
    assert (outcome.kind, outcome.reason) == (REJECTED, "thermal")
    assert "86.0 C" in outcome.detail
    assert outcome.latency_ns <= 1 * MS + ROUNDING_NS
    assert (await running.outcome()).kind is OK
    assert (await w.submit("1ms", 900).outcome()).reason == "thermal"
    w.scheduler.set_limits(limits())
    assert (await w.submit("1ms", 900).outcome()).kind is OK


@on_virtual_time(cores=4)
async def test_fewer_cpus_mean_fewer_at_once_and_longer_runs(w: World) -> None:
    w.scripts["wide"] = Script(10 * MS, cores=4)
    w.scheduler.set_limits(limits(cpus=2))
    assert (await w.submit("wide", 15).outcome()).reason == "deadline_unreachable", "4 threads on 2 cores take 20 ms"
    for model in ("10ms", "11ms", "12ms"):
        w.submit(model, 900)
    await w.sleep(5)
    assert w.scheduler.snapshot().cores_busy == 2


# Learning


@on_virtual_time()
async def test_a_model_that_is_faster_than_its_manifest_says_is_discovered_when_nothing_else_runs(w: World) -> None:
    w.scripts["modest"] = Script(10 * MS, estimate=Estimate(500 * MS, 800 * MS))
    assert (await w.submit("modest", 100).outcome()).reason == "deadline_unreachable", "no promise on hearsay"
    for _ in range(10):
        await w.submit("modest", 100, firm=False).outcome()
        await w.sleep(10_001)
    assert sum(kind == "ok" for kind, _ in w.kinds()) == 10


@on_virtual_time()
async def test_an_attempt_at_a_hopeless_model_is_made_once_and_not_all_the_time(w: World) -> None:
    w.scripts["hopeless"] = Script(500 * MS)
    for _ in range(50):
        await w.submit("hopeless", 100, firm=False).outcome()
        await w.sleep(100)
    assert len(w.local.started) <= 2


@on_virtual_time()
async def test_what_cannot_be_done_in_time_is_not_started(w: World) -> None:
    w.scripts["slower than it says"] = Script(100 * MS, estimate=Estimate(5 * MS, 5 * MS))
    w.submit("slower than it says", 900)
    await w.sleep(1)
    frame = w.submit("30ms", 60, firm=False)
    outcome = await frame.outcome()
    assert outcome.kind is REJECTED
    assert outcome.latency_ns < 40 * MS, "it was told before its deadline"
    await w.scheduler.drained()
    assert len(w.local.started) == 1


# Callers


@on_virtual_time()
async def test_cancelling_what_waits_frees_its_place(w: World) -> None:
    w.submit("20ms", 900)
    await w.sleep(1)
    waiting = w.submit("20ms", 900)
    waiting.cancel()
    waiting.cancel()
    assert (await waiting.outcome()).kind is OutcomeKind.CANCELLED
    assert w.scheduler.snapshot().queue_length == 0


@on_virtual_time()
async def test_cancelling_what_runs_stops_it(w: World) -> None:
    running = w.submit("800ms", 900)
    await w.sleep(10)
    running.cancel()
    outcome = await running.outcome()
    assert (outcome.kind, outcome.placement) == (OutcomeKind.CANCELLED, Placement.LOCAL)
    await w.sleep(1)
    assert w.scheduler.snapshot().cores_busy == 0
    assert w.local.runs[0].ended_ns - w.local.runs[0].started_ns <= 10 * MS + ROUNDING_NS


@on_virtual_time(nearby_ms=10)
async def test_cancelling_what_is_about_to_leave_keeps_it_here(w: World) -> None:
    w.submit("40ms", 45)
    leaving = w.submit("40ms", 45)
    leaving.cancel()
    await w.sleep(50)
    assert (await leaving.outcome()).kind is OutcomeKind.CANCELLED
    assert w.nearby is not None
    assert w.nearby.started == []


@on_virtual_time()
async def test_a_caller_that_stops_awaiting_does_not_take_the_outcome_with_it(w: World) -> None:
    ticket = w.submit("20ms", 50)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.005):
            await ticket.outcome()
    assert (await ticket.outcome()).kind is OK
    assert await ticket.outcome() is await ticket.outcome()


def test_a_result_that_nobody_took_is_released_when_its_caller_goes() -> None:
    async def main() -> None:
        async with world() as w:
            w.keeps_results = True
            ticket = w.submit("5ms", 50)
            await w.sleep(10)
            assert w.local.leased == 1
            ticket.cancel()
            assert w.local.leased == 0
            taken = w.submit("5ms", 50)
            outcome = await taken.outcome()
            taken.cancel()
            assert w.local.leased == 1, "somebody reads it"
            assert outcome.result is not None
            outcome.result.release()

    run_virtual(main())


@on_virtual_time(queue_limit=3)
async def test_a_full_queue_refuses(w: World) -> None:
    w.submit("20ms", 900)
    await w.sleep(1)
    tickets = [w.submit("1ms", 900) for _ in range(5)]
    outcomes = [await ticket.outcome() for ticket in tickets]
    assert [outcome.reason for outcome in outcomes] == ["", "", "", "queue_full", "queue_full"]


@on_virtual_time(nearby_ms=10)
async def test_draining_finishes_what_was_admitted_and_refuses_the_rest(w: World) -> None:
    admitted = [w.submit("20ms", 900) for _ in range(3)]
    w.scheduler.start_draining()
    refused = await w.submit("20ms", 900).outcome()
    assert (refused.kind, refused.reason) == (REJECTED, "draining")
    await w.scheduler.drained()
    assert [(await ticket.outcome()).kind for ticket in admitted] == [OK] * 3
    assert w.scheduler.snapshot().draining


@on_virtual_time()
async def test_what_would_be_refused_is_declined_before_its_data_comes_and_counted_like_any_other(w: World) -> None:
    assert w.scheduler.decline(w.request("20ms", 900)) is None
    assert w.scheduler.snapshot().in_flight == 0
    for _ in range(4):
        w.submit("20ms", 900)
    hopeless = w.scheduler.decline(w.request("20ms", 5))
    late = w.scheduler.decline(w.request("20ms", 0))
    assert hopeless is not None
    assert late is not None
    refused, expired = await hopeless.outcome(), await late.outcome()
    assert (refused.kind, refused.reason) == (REJECTED, "deadline_unreachable")
    assert expired.kind is EXPIRED
    assert w.accounting.total.received == 6
    w.scheduler.start_draining()
    drained = w.scheduler.decline(w.request("20ms", 900))
    assert drained is not None
    assert (await drained.outcome()).reason == "draining"


# The dispatcher itself


@on_virtual_time()
async def test_progress_grows_every_second_even_when_idle(w: World) -> None:
    await w.sleep(1)
    for _ in range(10):
        before = w.scheduler.progress
        await w.sleep(1_000)
        assert before < w.scheduler.progress <= before + 2


@on_virtual_time()
async def test_a_paced_or_stuck_dispatcher_does_not_spin(w: World) -> None:
    w.scripts["stuck"] = Script(10 * MS, hangs=True)
    w.scheduler.set_limits(limits(0.01))
    w.submit("stuck", 2_000, firm=False)
    w.submit("5ms", 2_000, firm=False)
    await w.sleep(2_000)
    assert w.scheduler.progress < 100


def test_when_it_is_stopped_everybody_is_told() -> None:
    async def main() -> None:
        async with world(nearby_ms=50) as w:
            tickets = [w.submit("40ms", 45) for _ in range(3)]
            await w.sleep(1)
            running = [task for task in asyncio.all_tasks() if task.get_name() == "scheduler"]
            running[0].cancel()
            outcomes = [await ticket.outcome() for ticket in tickets]
            assert {outcome.kind for outcome in outcomes} <= {OutcomeKind.FAILED, REJECTED}
            assert any(outcome.reason == "stopped" for outcome in outcomes)

    run_virtual(main())


class RaisingExecutor(FakeExecutor):
    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        raise ZeroDivisionError("a bug")


class BrokenExecutor(FakeExecutor):
    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        raise InternalError("an invariant")


def test_a_bug_in_an_executor_costs_the_request_that_met_it_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with world() as template:
            executor = RaisingExecutor(template.clock)
            scheduler = Scheduler(
                local=executor, nearby=None, clock=template.clock, accounting=template.accounting, queue_limit=4,
                cores=1, observe=template.observe,
            )  # fmt: skip
            running = asyncio.create_task(scheduler.run())
            for count in (1, 2):
                outcome = await scheduler.submit(template.request("m", 500)).outcome()
                assert (outcome.kind, outcome.reason) == (OutcomeKind.FAILED, "internal")
                assert "ZeroDivisionError" in outcome.detail
                assert scheduler.snapshot().raised_runs == count
            assert not running.done(), "the others' requests go on"
            assert "Traceback" in caplog.text
            running.cancel()
            await asyncio.wait([running])

    run_virtual(main())


def test_a_broken_invariant_ends_the_scheduler_and_nobody_is_left_waiting() -> None:
    async def main() -> None:
        async with world() as template:
            executor = BrokenExecutor(template.clock)
            outcomes: list[Outcome] = []
            scheduler = Scheduler(
                local=executor, nearby=None, clock=template.clock, accounting=template.accounting, queue_limit=4,
                cores=1, observe=outcomes.append,
            )  # fmt: skip
            ticket = scheduler.submit(template.request("m", 500))
            waiting = scheduler.submit(template.request("m", 500))
            with pytest.raises(ExceptionGroup) as crashed:
                await scheduler.run()
            assert isinstance(crashed.value.exceptions[0], InternalError)
            assert [(await t.outcome()).reason for t in (ticket, waiting)] == ["stopped", "stopped"]
            template.outcomes += outcomes

    run_virtual(main())


def test_a_short_request_is_in_the_worker_when_the_one_before_it_ends() -> None:
    async def main() -> None:
        async with world(begins=True) as w:
            w.submit("2ms", 50)
            w.submit("2ms", 50)
            w.submit("2ms", 50, firm=False)
            await w.sleep(1)
            assert list(w.local.behind) == ["2ms"], "one is under way, one behind it"
            snapshot = w.scheduler.snapshot()
            assert (snapshot.running_local, snapshot.cores_busy, snapshot.queue_length) == (2, 1, 1)
            await w.sleep(6)
            assert w.kinds() == [(OK, "")] * 3
            first, second, third = w.local.runs
            assert (second.started_ns, third.started_ns) == (first.ended_ns, second.ended_ns)
            assert w.local.waited_inside == 0

    run_virtual(main())


def test_long_requests_wait_where_they_can_be_displaced() -> None:
    async def main() -> None:
        async with world(begins=True) as w:
            w.submit("10ms", 50)
            w.submit("10ms", 50)
            await w.sleep(1)
            assert not w.local.behind
            assert w.scheduler.snapshot().queue_length == 1

    run_virtual(main())


def test_promises_count_who_is_behind_the_run_under_way() -> None:
    async def main() -> None:
        async with world(begins=True) as w:
            w.submit("2ms", 50)
            w.submit("2ms", 50)
            await w.sleep(1)
            kept = await w.submit("1ms", 4.5).outcome()
            assert kept.kind is OK
            assert [run.request.model for run in w.local.runs] == ["2ms", "2ms", "1ms"]
            w.submit("2ms", 50)
            w.submit("2ms", 50)
            await w.sleep(1)
            assert (await w.submit("1ms", 3.5).outcome()).reason == Reason.DEADLINE_UNREACHABLE

    run_virtual(main())


def test_cancelling_one_behind_another_is_exact_and_the_other_way_round() -> None:
    async def main() -> None:
        async with world(begins=True) as w:
            first, second = w.submit("2ms", 50), w.submit("2ms", 50)
            await w.sleep(1)
            second.cancel()
            assert (await first.outcome()).kind is OK
            assert len(w.local.runs) == 1, "the cancelled one never began"
            first, second = w.submit("2ms", 50), w.submit("2ms", 50)
            await w.sleep(1)
            first.cancel()
            began_ns = w.clock.now_ns()
            assert (await second.outcome()).kind is OK
            assert w.clock.now_ns() - began_ns == pytest.approx(2 * MS, abs=ROUNDING_NS)
            assert w.scheduler.snapshot().cores_busy == 0

    run_virtual(main())


def test_who_was_behind_a_run_that_killed_the_worker_is_taken_back() -> None:
    async def main() -> None:
        async with world(begins=True) as w:
            w.submit("2ms", 50)
            lost = w.submit("2ms", 50)
            await w.sleep(1)
            behind = w.local.behind["2ms"]
            behind.stop()
            behind.ended(Failure(NOT_BEGUN, "its worker died"))
            outcome = await lost.outcome()
            assert (outcome.kind, outcome.placement) == (OK, Placement.LOCAL)
            assert w.accounting.total.received == 2

    run_virtual(main())


def test_who_was_lost_before_it_began_is_placed_anew_also_when_it_was_behind_nobody() -> None:
    async def main() -> None:
        async with world(begins=True) as w:
            lost = w.submit("2ms", 50)
            (run,) = w.scheduler._runs
            run.stop()
            w.scheduler._runs._called_back(run, Failure(NOT_BEGUN, "its worker died"))
            outcome = await lost.outcome()
            assert (outcome.kind, outcome.placement) == (OK, Placement.LOCAL)
            assert w.accounting.total.received == 1

    run_virtual(main())
