"""How outcomes are made: one function, every ending, and no result that outlives its deadline unnoticed."""

from __future__ import annotations

from array import array

import pytest

from edgeinfer.errors import InternalError
from edgeinfer.request import (
    DataScope,
    Deadlines,
    Ending,
    Expired,
    Failure,
    InferRequest,
    Outcome,
    OutcomeKind,
    Payload,
    Placement,
    Reason,
    Refusal,
    Result,
    Timeline,
    conclude,
)  # fmt: skip

MS = 1_000_000


class Lease:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def _request(*, accept_late: bool = False, captured_ns: int | None = None) -> InferRequest:
    timeline = Timeline(10 * MS, captured_ns=captured_ns)
    return InferRequest("m", Payload(b"{}"), Deadlines(100 * MS), timeline, accept_late=accept_late)


def _result(lease: Lease | None = None) -> Result:
    return Result(Payload(b"{}"), Placement.NEARBY, "garage", "1.4.0", "int8", lease=lease)


def _end(ending: Ending, *, now_ms: float = 50, accept_late: bool = False, started: bool = True) -> Outcome:
    request = _request(accept_late=accept_late)
    request.timeline.dispatched_ns = 20 * MS if started else None
    return conclude(request, ending, now_ns=round(now_ms * MS), placement=Placement.LOCAL)


@pytest.mark.parametrize(
    ("ending", "kind", "reason"),
    [
        (_result(), OutcomeKind.OK, ""),
        (Refusal(Reason.THERMAL, "86 C"), OutcomeKind.REJECTED, "thermal"),
        (Failure("crashed", "SIGSEGV"), OutcomeKind.FAILED, "crashed"),
        (Expired(), OutcomeKind.EXPIRED, "running"),
        (None, OutcomeKind.CANCELLED, "caller_gone"),
    ],
)
def test_every_ending_has_its_outcome(ending: Ending, kind: OutcomeKind, reason: str) -> None:
    outcome = _end(ending)
    assert (outcome.kind, outcome.reason) == (kind, reason)
    assert outcome.in_time is (kind is OutcomeKind.OK)
    assert (outcome.result is None) is (kind is not OutcomeKind.OK)


def test_a_result_at_the_deadline_is_in_time_and_a_nanosecond_later_it_is_not() -> None:
    assert _end(_result(), now_ms=100).kind is OutcomeKind.OK
    lease = Lease()
    outcome = _end(_result(lease), now_ms=100.000001)
    assert (outcome.kind, outcome.reason) == (OutcomeKind.EXPIRED, "finished")
    assert outcome.result is None
    assert lease.released == 1, "the memory of a result that nobody gets must come back"


def test_a_late_result_reaches_whoever_accepts_it_and_stays_leased() -> None:
    lease = Lease()
    outcome = _end(_result(lease), now_ms=101, accept_late=True)
    assert outcome.kind is OutcomeKind.LATE
    assert outcome.result is not None
    assert not outcome.in_time
    assert lease.released == 0


def test_an_expiry_says_where_it_was_caught() -> None:
    assert _end(Expired("busy"), started=False).reason == "queued"
    assert _end(Expired("busy"), started=True).reason == "running"


def test_a_result_knows_better_where_it_ran() -> None:
    assert _end(_result()).placement is Placement.NEARBY
    assert _end(Failure("crashed")).placement is Placement.LOCAL


def test_latency_is_counted_from_capture_for_frames() -> None:
    assert conclude(_request(), None, now_ns=50 * MS).latency_ns == 40 * MS
    assert conclude(_request(captured_ns=4 * MS), None, now_ns=50 * MS).latency_ns == 46 * MS


def test_an_unknown_ending_is_a_bug() -> None:
    with pytest.raises(InternalError, match="unknown way"):
        conclude(_request(), "done", now_ns=0)  # type: ignore[arg-type]


def test_ids_grow_and_origins_name_the_stream_or_the_model() -> None:
    first, second = _request(), _request()
    assert second.id > first.id
    assert first.origin == "m"
    loop = InferRequest("m", Payload(b""), Deadlines(1), Timeline(0), stream="camera")
    assert loop.origin == "camera"


def test_queue_deadlines_end_the_waiting_early_but_never_late() -> None:
    assert Deadlines(100).start_by_ns == 100
    assert Deadlines(100, queue_ns=40).start_by_ns == 40
    assert Deadlines(100, queue_ns=400).start_by_ns == 100


def test_scopes_are_ordered_and_nothing_leaves_the_device_by_default() -> None:
    assert DataScope.DEVICE < DataScope.SITE < DataScope.ANY
    assert _request().scope is DataScope.DEVICE


def test_a_payload_knows_its_bytes_whatever_holds_them() -> None:
    payload = Payload(b"1234", (b"12", bytearray(3), memoryview(array("d", [1.0, 2.0]))))
    assert payload.size_bytes == 4 + 2 + 3 + 16


def test_releasing_a_result_without_lease_is_fine() -> None:
    _result().release()
