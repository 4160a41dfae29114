from __future__ import annotations

import os
import time

import pytest

from edgeinfer.clock import MonotonicClock
from edgeinfer.governor.own_load import OwnLoad


def test_own_cpu_time_is_seen_and_the_first_look_knows_nothing() -> None:
    meter = OwnLoad(lambda: (), clock=MonotonicClock())
    assert meter.share() is None
    began_ns, used_ns = time.monotonic_ns(), time.process_time_ns()
    while time.process_time_ns() - used_ns < 150_000_000:
        pass
    share = meter.share()
    spent_ns = time.monotonic_ns() - began_ns
    assert share == pytest.approx(150_000_000 / spent_ns / (os.cpu_count() or 1), rel=0.3)


def test_a_process_that_has_ended_counts_nothing() -> None:
    meter = OwnLoad(lambda: (2**22 - 1,), clock=MonotonicClock())
    assert meter.share() is None
    time.sleep(0.01)
    assert meter.share() is not None
