"""The order of the queue, its bound, and what streams add to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.errors import InternalError
from edgeinfer.request import Deadlines, InferRequest, Payload, Timeline
from edgeinfer.scheduling.deadline_queue import DeadlineQueue
from edgeinfer.scheduling.forecast import Job

MS = 1_000_000


def _request(due: int, *, firm: bool = True, stream: str | None = None, priority: int = 0) -> InferRequest:
    return InferRequest("m", Payload(b""), Deadlines(due), Timeline(0), firm=firm, stream=stream, priority=priority)


def _push(
    queue: DeadlineQueue[str], request: InferRequest, *, run_ns: int = 1, spare: bool = False, start_by_ns: int = 0
) -> Job:
    job = Job(
        id=request.id, key=("m", ""), rank=queue.rank(request, spare=spare), due_ns=request.deadlines.total_ns,
        start_by_ns=start_by_ns or request.deadlines.total_ns, firm=request.firm, priority=request.priority,
        p50_ns=run_ns, p99_ns=run_ns, cores=1,
    )  # fmt: skip
    queue.push(job, f"item {request.id}", stream=request.stream)
    return job


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2), st.booleans()), max_size=30))
def test_earliest_deadline_first_then_priority_then_arrival_and_spare_last(rows: list[tuple[int, int, bool]]) -> None:
    queue: DeadlineQueue[str] = DeadlineQueue(30)
    made = []
    for due, priority, spare in rows:
        request = _request(due, priority=priority)
        _push(queue, request, spare=spare)
        made.append((spare, due, -priority, request.id))
    assert [entry.job.id for entry in queue] == [row[-1] for row in sorted(made)]


def test_a_full_queue_and_a_doubled_request_are_bugs_of_the_caller() -> None:
    queue: DeadlineQueue[str] = DeadlineQueue(1)
    job = _push(queue, _request(5))
    assert queue.full
    with pytest.raises(InternalError, match="1 of 1 places"):
        _push(queue, _request(6))
    roomy: DeadlineQueue[str] = DeadlineQueue(5)
    roomy.push(job, "x")
    with pytest.raises(InternalError):
        roomy.push(job, "x")


def test_expires_at_the_latest_start_and_not_before() -> None:
    queue: DeadlineQueue[str] = DeadlineQueue(9)
    early, late = _request(10), _request(20)
    _push(queue, early)
    _push(queue, late, start_by_ns=8)
    assert queue.next_expiry_ns() == 8
    assert queue.pop_expired(7) == []
    assert [entry.job.id for entry in queue.pop_expired(8)] == [late.id]
    assert [entry.job.id for entry in queue.pop_expired(10)] == [early.id]
    assert len(queue) == 0
    assert queue.next_expiry_ns() is None


def test_removes_whoever_stands_anywhere_and_only_once() -> None:
    queue: DeadlineQueue[str] = DeadlineQueue(9)
    requests = [_request(5) for _ in range(4)]
    for request in requests:
        _push(queue, request)
    entry = queue.remove(requests[2].id)
    assert entry is not None
    assert entry.item == f"item {requests[2].id}"
    assert queue.remove(requests[2].id) is None
    assert [e.job.id for e in queue] == [requests[0].id, requests[1].id, requests[3].id]


def test_a_newer_frame_supersedes_only_older_frames_of_its_own_stream() -> None:
    queue: DeadlineQueue[str] = DeadlineQueue(9)
    old = _request(5, firm=False, stream="camera")
    for request in (old, _request(6, stream="camera"), _request(7, firm=False, stream="door"), _request(8, firm=False)):
        _push(queue, request)
    newer = _request(9, firm=False, stream="camera")
    assert [entry.job.id for entry in queue.superseded_by(newer)] == [old.id]
    assert queue.superseded_by(_request(9, stream="camera")) == []
    assert queue.superseded_by(_request(9, firm=False)) == []


def test_a_newer_frame_takes_the_place_of_the_older_so_that_its_stream_gets_its_turn() -> None:
    """Otherwise a stream with a long deadline whose frames come fast always has the latest deadline, and starves."""
    queue: DeadlineQueue[str] = DeadlineQueue(9)
    _push(queue, _request(100, firm=False, stream="slow"))
    _push(queue, _request(120))
    rank = queue.rank(_request(200, firm=False, stream="slow"))
    assert rank.due_ns == 100


def test_firm_requests_of_a_stream_never_overtake_each_other() -> None:
    queue: DeadlineQueue[str] = DeadlineQueue(9)
    first = _request(100, stream="speech")
    _push(queue, first)
    second = _request(50, stream="speech")
    _push(queue, second)
    _push(queue, other := _request(60))
    assert [entry.job.id for entry in queue] == [other.id, first.id, second.id]


def test_work_ahead_counts_what_is_due_before() -> None:
    queue: DeadlineQueue[str] = DeadlineQueue(9)
    for due, run in ((10, 3), (20, 4), (30, 5)):
        _push(queue, _request(due), run_ns=run)
    _push(queue, _request(5), run_ns=100, spare=True)
    assert [queue.work_ahead_ns(due) for due in (9, 10, 25, 99)] == [0, 3, 7, 12]


def test_what_waits_can_be_rated_anew_without_losing_its_place() -> None:
    queue: DeadlineQueue[str] = DeadlineQueue(9)
    jobs = [_push(queue, _request(due)) for due in (7, 7, 9)]
    queue.rate(replace(jobs[1], p50_ns=5))
    assert [entry.job.p50_ns for entry in queue] == [1, 5, 1]
    removed = queue.remove(jobs[1].id)
    assert removed is not None
    assert removed.job.p50_ns == 5
    queue.rate(jobs[1])
    assert len(queue) == 2
