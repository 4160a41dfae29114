"""A silent peer stops being asked, and is found again with single probes."""

from __future__ import annotations

import random

from edgeinfer.clock import NS_PER_S
from edgeinfer.execution.breaker import BreakerState, CircuitBreaker

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def opened(now_ns: int = 0) -> CircuitBreaker:
    breaker = CircuitBreaker(random.Random(1))
    for _ in range(3):
        assert breaker.state(now_ns) is CLOSED
        breaker.asked(now_ns)
        breaker.silent(now_ns)
    return breaker


def test_three_silences_in_a_row_open_it() -> None:
    assert opened().state(0) is OPEN


def test_an_answer_between_silences_keeps_it_closed() -> None:
    breaker = CircuitBreaker(random.Random(1))
    for _ in range(10):
        breaker.silent(0)
        breaker.silent(0)
        breaker.answered()
    assert breaker.state(0) is CLOSED


def test_nobody_there_opens_it_at_once() -> None:
    breaker = CircuitBreaker(random.Random(1))
    breaker.absent(0)
    assert breaker.state(0) is OPEN


def test_one_probe_goes_through_and_no_second() -> None:
    breaker = opened()
    now_ns = NS_PER_S
    assert breaker.state(now_ns) is HALF_OPEN
    breaker.asked(now_ns)
    assert breaker.state(now_ns) is OPEN
    breaker.answered()
    assert breaker.state(now_ns) is CLOSED


def test_failed_probes_are_further_and_further_apart_up_to_a_limit() -> None:
    breaker, now_ns, gaps = opened(), 0, []
    for _ in range(12):
        waited_ns = 0
        while breaker.state(now_ns + waited_ns) is not HALF_OPEN:
            waited_ns += NS_PER_S // 100
        gaps.append(waited_ns)
        now_ns += waited_ns
        breaker.asked(now_ns)
        breaker.silent(now_ns)
    assert gaps[0] <= NS_PER_S
    assert gaps[5] > 5 * NS_PER_S
    assert max(gaps) <= 30 * NS_PER_S


def test_requests_that_were_under_way_when_it_opened_do_not_prolong_it() -> None:
    breaker = opened()
    for _ in range(20):
        breaker.silent(0)
    assert breaker.state(NS_PER_S) is HALF_OPEN


def test_a_probe_that_was_given_up_may_be_tried_again() -> None:
    breaker = opened()
    breaker.asked(NS_PER_S)
    breaker.abandoned()
    assert breaker.state(NS_PER_S) is HALF_OPEN


def test_a_sign_of_life_allows_a_probe_at_once() -> None:
    breaker = opened()
    breaker.heard(1)
    assert breaker.state(1) is HALF_OPEN


def test_a_late_answer_closes_it() -> None:
    breaker = opened()
    breaker.answered()
    assert breaker.state(0) is CLOSED
