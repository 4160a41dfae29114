"""What follows from a worker's death, as a table and as properties."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.clock import NS_PER_S
from edgeinfer.execution.crashes import CrashPolicy, Verdict, judge_crash

POLICY = CrashPolicy(max_crashes=4, window_ns=60 * NS_PER_S, first_pause_ns=200_000_000, longest_pause_ns=NS_PER_S // 2)


@pytest.mark.parametrize(
    ("crashes_s", "now_s", "verdict"),
    [
        ([0], 0, Verdict(quarantine=False, pause_ns=200_000_000)),
        ([0, 1], 1, Verdict(quarantine=False, pause_ns=400_000_000)),
        ([0, 1, 2], 2, Verdict(quarantine=False, pause_ns=500_000_000)),  # the longest pause
        ([0, 1, 2, 3], 3, Verdict(quarantine=True)),
        ([0, 1, 2, 60], 60, Verdict(quarantine=True)),  # exactly the window
        ([0, 1, 2, 61], 61, Verdict(quarantine=False, pause_ns=500_000_000)),  # one has been forgiven
        ([0, 100, 200, 300, 400], 400, Verdict(quarantine=False, pause_ns=200_000_000)),  # once in a while
    ],
)
def test_verdicts(crashes_s: list[int], now_s: int, verdict: Verdict) -> None:
    assert judge_crash(tuple(at * NS_PER_S for at in crashes_s), POLICY, now_ns=now_s * NS_PER_S) == verdict


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30).map(sorted))
def test_no_window_ever_sees_more_crashes_than_allowed(at_s: list[int]) -> None:
    """A worker that is restarted whenever the verdict allows it."""
    allowed: list[int] = []
    for second in at_s:
        now_ns = second * NS_PER_S
        allowed.append(now_ns)
        verdict = judge_crash(tuple(allowed), POLICY, now_ns=now_ns)
        if verdict.quarantine:
            break
        assert POLICY.first_pause_ns <= verdict.pause_ns <= POLICY.longest_pause_ns
    for start in allowed:
        assert sum(start <= at <= start + POLICY.window_ns for at in allowed) <= POLICY.max_crashes
    assert all(earlier <= later for earlier, later in pairwise(allowed))
