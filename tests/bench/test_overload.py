from __future__ import annotations

import pytest

from edgeinfer.request import (
    Deadlines,
    Ending,
    Expired,
    InferRequest,
    Payload,
    Placement,
    Reason,
    Refusal,
    Result,
    Timeline,
    conclude,
)  # fmt: skip
from edgeinfer_bench.overload import WINDOW_S, schedule
from edgeinfer_bench.player import Sent, Tally, count, count_all
from edgeinfer_bench.trace import LONG_US, SHORT_US, generate

SERVICE_NS = {SHORT_US: 1_200_000, LONG_US: 9_000_000}
ANSWER = Result(Payload(b""), Placement.LOCAL, "here", "1", "fp32")


@pytest.mark.parametrize("load", [0.5, 1.0, 3.0])
def test_a_load_is_as_much_work_as_so_many_cores_can_do(load: float) -> None:
    jobs = schedule(generate("mixed", "poisson"), load, SERVICE_NS)
    assert sum(job.service_ns for job in jobs) / 1e9 / WINDOW_S == pytest.approx(load, rel=0.15)
    assert all(0 <= job.at_ns < WINDOW_S * 1e9 + 1 for job in jobs)


def test_load_changes_who_comes_when_but_not_the_slack() -> None:
    trace = generate("mixed", "bursty")
    slow, fast = schedule(trace, 1.0, SERVICE_NS)[10], schedule(trace, 2.0, SERVICE_NS)[10]
    assert fast.at_ns == pytest.approx(slow.at_ns / 2, abs=2)
    assert fast.due_ns - fast.at_ns == slow.due_ns - slow.at_ns == slow.service_ns + trace.slack_us[10] * 1000


def tally_of(ending: Ending, *, ended_ms: int, dispatched_ms: int | None = None, admitted: bool = True) -> Tally:
    timeline = Timeline(0, admitted_ns=0 if admitted else None)
    if dispatched_ms is not None:
        timeline.dispatched_ns = dispatched_ms * 1_000_000
    request = InferRequest("m", Payload(b""), Deadlines(20_000_000), timeline)
    tally = Tally()
    count(conclude(request, ending, now_ns=ended_ms * 1_000_000), Sent(0, 20_000_000, 9_000_000, LONG_US, True), tally)
    return tally


def test_an_answer_in_time_is_worth_its_service_time() -> None:
    tally = tally_of(ANSWER, ended_ms=15, dispatched_ms=4)
    assert (tally.ours_ns, tally.ran_ns, tally.wasted_ns) == (9_000_000, 11_000_000, 0)
    assert (tally.promised, tally.broken) == (1, 0)


def test_a_late_answer_is_wasted_and_a_broken_promise() -> None:
    tally = tally_of(ANSWER, ended_ms=21, dispatched_ms=4)
    assert (tally.ours_ns, tally.wasted_ns) == (0, 17_000_000)
    assert (tally.promised, tally.broken) == (1, 1)


def test_what_was_admitted_and_then_waited_too_long_is_broken_but_wastes_nothing() -> None:
    tally = tally_of(Expired(), ended_ms=20)
    assert (tally.ran_ns, tally.wasted_ns) == (0, 0)
    assert (tally.promised, tally.broken) == (1, 1)


def test_what_was_refused_was_never_promised() -> None:
    tally = tally_of(Refusal(Reason.DEADLINE_UNREACHABLE), ended_ms=0, admitted=False)
    assert (tally.promised, tally.broken) == (0, 0)
    assert tally.reasons == {"rejected deadline_unreachable": 1}


def test_a_run_that_was_sent_behind_another_one_took_the_core_only_after_that_one() -> None:
    ended, sent, tally = [], {}, Tally()
    for dispatched_ms, ended_ms in ((0, 9), (1, 17)):
        timeline = Timeline(0, admitted_ns=0, dispatched_ns=dispatched_ms * 1_000_000)
        request = InferRequest("m", Payload(b""), Deadlines(20_000_000), timeline)
        ended.append(conclude(request, ANSWER, now_ns=ended_ms * 1_000_000))
        sent[request.id] = Sent(0, 20_000_000, 8_000_000, LONG_US, True)
    count_all(ended, sent, tally)
    assert tally.ran_ns == 17_000_000
