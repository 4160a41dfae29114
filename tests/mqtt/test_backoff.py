"""Waits between attempts grow, are capped and jittered, and aren't forgotten after a short session."""

from __future__ import annotations

import random

import pytest

from edgeinfer.clock import NS_PER_S
from edgeinfer.mqtt.backoff import SHORT_SESSIONS, STABLE_NS, WAITS, Backoff, LinkState


def attempts_within(cause: LinkState, seconds: float, *, seed: int, lived_s: float | None = None) -> int:
    backoff, now_s, attempts = Backoff(random.Random(seed)), 0.0, 0
    lived_ns = None if lived_s is None else round(lived_s * NS_PER_S)
    while now_s < seconds:
        attempts += 1
        now_s += (lived_s or 0.0) + backoff.next(cause, lived_ns=lived_ns)[1] / NS_PER_S
    return attempts


@pytest.mark.parametrize("seed", range(20))
def test_rejected_credentials_are_tried_at_most_ten_times_in_five_minutes(seed: int) -> None:
    assert attempts_within(LinkState.AUTH_FAILED, 300, seed=seed) <= 10


@pytest.mark.parametrize("outage_s", [1, 5, 10, 60])
def test_recovery_takes_a_fraction_of_the_outage(outage_s: float) -> None:
    """At most 3 s after 10 s without a broker."""
    backoff, now_s = Backoff(random.Random(3)), 0.0
    while now_s < outage_s:
        now_s += backoff.next(LinkState.UNREACHABLE, lived_ns=None)[1] / NS_PER_S
    assert now_s - outage_s <= max(0.5, 0.3 * outage_s)


@pytest.mark.parametrize("cause", WAITS)
def test_waits_are_capped_for_ever(cause: LinkState) -> None:
    backoff = Backoff(random.Random(5))
    waits = [backoff.next(cause, lived_ns=None)[1] for _ in range(2000)]
    assert max(waits) <= WAITS[cause].cap_ns
    assert min(waits[-100:]) >= WAITS[cause].cap_ns // 2


def test_devices_of_a_site_do_not_come_back_in_step() -> None:
    waits = {Backoff(random.Random(seed)).next(LinkState.UNREACHABLE, lived_ns=None)[1] for seed in range(50)}
    assert max(waits) > 1.5 * min(waits)


def test_a_short_session_does_not_reset_the_waits_and_a_long_one_does() -> None:
    backoff = Backoff(random.Random(7))
    for _ in range(30):
        backoff.next(LinkState.UNREACHABLE, lived_ns=None)
    assert backoff.next(LinkState.UNREACHABLE, lived_ns=NS_PER_S)[1] > 10 * NS_PER_S
    assert backoff.next(LinkState.UNREACHABLE, lived_ns=STABLE_NS)[1] <= NS_PER_S // 4


def test_a_second_client_with_our_id_is_suspected_and_avoided() -> None:
    """mosquitto doesn't say so: sessions are just short. A failed attempt between them clears the suspicion."""
    backoff = Backoff(random.Random(9))
    for _ in range(SHORT_SESSIONS - 1):
        assert backoff.next(LinkState.UNREACHABLE, lived_ns=NS_PER_S)[0] is LinkState.UNREACHABLE
    cause, wait_ns = backoff.next(LinkState.UNREACHABLE, lived_ns=NS_PER_S)
    assert cause is LinkState.TAKEN_OVER
    assert wait_ns >= 2 * NS_PER_S
    assert backoff.next(LinkState.UNREACHABLE, lived_ns=None)[0] is LinkState.UNREACHABLE
    assert backoff.next(LinkState.UNREACHABLE, lived_ns=NS_PER_S)[0] is LinkState.UNREACHABLE


def test_a_pair_with_one_id_settles_to_few_connections() -> None:
    """Each throws the other out whenever it connects: a dozen connections in ten minutes, not one a second."""
    assert attempts_within(LinkState.TAKEN_OVER, 600, seed=1, lived_s=5) <= 12
