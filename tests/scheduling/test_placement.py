"""The placement table, row by row, and which of two refusals is told."""

from __future__ import annotations

import pytest

from edgeinfer.execution.executor import Estimate
from edgeinfer.request import Deadlines, InferRequest, Payload, Placement, Reason, Refusal, Timeline
from edgeinfer.scheduling.admission import Admission
from edgeinfer.scheduling.forecast import Expectation
from edgeinfer.scheduling.placement import Placed, place, settled

MS = 1_000_000
_EXPECTED = Expectation(0, 10 * MS, 10 * MS)
FITS = Admission(_EXPECTED, certain=True)
LIKELY = Admission(_EXPECTED, certain=False)
COSTS = Admission(_EXPECTED, certain=True, victims=(1,))
REPLACES = Admission(_EXPECTED, certain=True, replaces=(1,))
BUSY = Refusal(Reason.DEADLINE_UNREACHABLE, "90 ms of work ahead")
HOT = Refusal(Reason.THERMAL, "zone cpu 86 C")
MISSING = Refusal(Reason.MODEL_UNAVAILABLE, "no model of that name is installed")
SCOPE = Refusal(Reason.DATA_SCOPE, "the data may not leave the device")
DOWN = Refusal(Reason.MODEL_UNAVAILABLE, "the link is down")
FAST = Estimate(10 * MS, 20 * MS, cores=0)
RISKY = Estimate(30 * MS, 80 * MS, cores=0)
SLOW = Estimate(60 * MS, 90 * MS, wait_ns=5 * MS, cores=0)
HERE, NEXT_DOOR = Placement.LOCAL, Placement.NEARBY


def _request(*, firm: bool, accept_late: bool = False) -> InferRequest:
    return InferRequest("m", Payload(b"{}"), Deadlines(50 * MS), Timeline(0), firm=firm, accept_late=accept_late)


@pytest.mark.parametrize(
    ("local", "nearby", "firm", "expected"),
    [
        (FITS, FAST, True, HERE),  # data stays where it is
        (FITS, None, True, HERE),
        (FITS, DOWN, True, HERE),
        (COSTS, FAST, True, NEXT_DOOR),  # rather than drop somebody
        (REPLACES, FAST, False, NEXT_DOOR),
        (LIKELY, FAST, False, NEXT_DOOR),
        (COSTS, RISKY, True, HERE),
        (COSTS, DOWN, True, HERE),
        (REPLACES, None, False, HERE),
        (LIKELY, RISKY, False, HERE),
        (BUSY, FAST, True, NEXT_DOOR),
        (HOT, FAST, True, NEXT_DOOR),
        (MISSING, FAST, True, NEXT_DOOR),
        (BUSY, RISKY, False, NEXT_DOOR),  # a frame takes its chance
        (BUSY, RISKY, True, Reason.DEADLINE_UNREACHABLE),  # a promise doesn't
        (BUSY, SLOW, False, Reason.DEADLINE_UNREACHABLE),
        (HOT, SCOPE, True, Reason.THERMAL),
        (HOT, None, True, Reason.THERMAL),
        (BUSY, DOWN, True, Reason.DEADLINE_UNREACHABLE),
        (MISSING, SCOPE, True, Reason.DATA_SCOPE),  # it could only have run next door
        (MISSING, SLOW, True, Reason.DEADLINE_UNREACHABLE),
        (MISSING, DOWN, True, Reason.MODEL_UNAVAILABLE),
        (BUSY, Refusal(Reason.INPUT_INVALID, "x is FP64"), True, Reason.INPUT_INVALID),
    ],
)
def test_the_table(
    local: Admission | Refusal, nearby: Estimate | Refusal | None, firm: bool, expected: Placement | Reason
) -> None:
    answer = place(_request(firm=firm), local, nearby, now_ns=0)
    got = answer.placement if isinstance(answer, Placed) else answer.reason
    assert got is expected


def test_only_what_costs_nobody_anything_is_settled_without_asking_next_door() -> None:
    assert settled(FITS)
    assert not any(settled(answer) for answer in (LIKELY, COSTS, REPLACES, BUSY))


def test_a_refusal_tells_both_stories() -> None:
    refusal = place(_request(firm=True), HOT, SCOPE, now_ns=0)
    assert isinstance(refusal, Refusal)
    assert "86 C" in refusal.detail
    assert "may not leave" in refusal.detail


def test_late_next_door_is_better_than_never_where_that_is_accepted() -> None:
    assert isinstance(place(_request(firm=True, accept_late=True), BUSY, SLOW, now_ns=0), Placed)


def test_the_time_left_counts_not_the_whole_deadline() -> None:
    assert isinstance(place(_request(firm=True), BUSY, FAST, now_ns=29 * MS), Placed)
    assert isinstance(place(_request(firm=True), BUSY, FAST, now_ns=31 * MS), Refusal)
