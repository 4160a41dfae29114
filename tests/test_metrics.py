"""The accounting identity, and percentiles that are as near as they say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import InternalError
from edgeinfer.metrics import Accounting, LatencyHistogram
from edgeinfer.request import (
    Deadlines,
    Ending,
    Expired,
    Failure,
    InferRequest,
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


def _request(stream: str | None = None) -> InferRequest:
    return InferRequest("m", Payload(b""), Deadlines(100 * MS), Timeline(0), stream=stream)


def _result() -> Result:
    return Result(Payload(b""), Placement.LOCAL, "here", "1.0.0", "int8")


_ENDINGS: list[Ending] = [_result(), Refusal(Reason.DISPLACED), Failure("crashed"), Expired(), None]


@given(st.lists(st.tuples(st.sampled_from([None, "camera", "door"]), st.sampled_from(range(5)), st.booleans())))
def test_the_identity_holds_at_every_instant_and_per_origin(rows: list[tuple[str | None, int, bool]]) -> None:
    accounting = Accounting()
    open_requests: list[tuple[InferRequest, int]] = []
    for stream, ending, end_one in rows:
        request = _request(stream)
        accounting.received(request)
        accounting.check()
        open_requests.append((request, ending))
        if end_one:
            oldest, how = open_requests.pop(0)
            accounting.ended(conclude(oldest, _ENDINGS[how], now_ns=50 * MS))
            accounting.check()
    total = accounting.total
    assert total.received == len(rows)
    assert total.in_flight == len(open_requests)
    assert total.received == sum(origin.received for origin in accounting.origins.values())
    for kind in OutcomeKind:
        assert total.ended[kind] == sum(origin.ended[kind] for origin in accounting.origins.values())


def test_an_outcome_that_was_never_received_is_found() -> None:
    accounting = Accounting()
    accounting.ended(conclude(_request(), None, now_ns=0))
    with pytest.raises(InternalError, match="total"):
        accounting.check()


def test_an_outcome_counted_twice_is_found() -> None:
    accounting = Accounting()
    request = _request()
    accounting.received(request)
    for _ in range(2):
        accounting.ended(conclude(request, None, now_ns=0))
    with pytest.raises(InternalError):
        accounting.check()


def test_reasons_placements_and_latencies_are_counted_by_origin() -> None:
    accounting = Accounting()
    for ending in (_result(), Refusal(Reason.DISPLACED), Refusal(Reason.DISPLACED)):
        request = _request("camera")
        accounting.received(request)
        accounting.ended(conclude(request, ending, now_ns=20 * MS))
    camera = accounting.origins["camera"]
    assert camera.reasons[OutcomeKind.REJECTED, "displaced"] == 2
    assert camera.placed[Placement.LOCAL, OutcomeKind.OK] == 1
    assert camera.latency[Placement.LOCAL].count == 1
    assert camera.deadline_hit_rate == pytest.approx(1 / 3)


def test_the_hit_rate_ignores_who_went_away_and_is_unknown_at_first() -> None:
    accounting = Accounting()
    assert accounting.total.deadline_hit_rate is None
    for ending in (_result(), None):
        request = _request()
        accounting.received(request)
        accounting.ended(conclude(request, ending, now_ns=0))
    assert accounting.total.deadline_hit_rate == 1.0


@given(st.lists(st.integers(1_000, 10**11), min_size=1), st.sampled_from([1, 50, 90, 99, 99.9, 100]))
def test_percentiles_are_at_most_four_percent_above_the_truth_and_never_below(
    values: list[int], percent: float
) -> None:
    histogram = LatencyHistogram()
    for value in values:
        histogram.add(value)
    truth = sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]
    got = histogram.percentile_ns(percent)
    assert got is not None
    assert truth * 0.999 <= got <= truth * 1.0401 + 1
    assert got <= histogram.max_ns == max(values)
    assert histogram.total_ns == sum(values)


def test_memory_grows_with_the_spread_and_not_with_the_count() -> None:
    histogram = LatencyHistogram()
    for index in range(20_000):
        histogram.add(5 * MS + index)
    assert len(histogram._buckets) <= 2
    assert histogram.count == 20_000


def test_nothing_counted_has_no_percentile_and_nonsense_counts_as_a_microsecond() -> None:
    histogram = LatencyHistogram()
    assert histogram.percentile_ns(99) is None
    histogram.add(-5)
    histogram.add(0)
    assert histogram.percentile_ns(99) == 1_000
