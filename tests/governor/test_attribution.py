from __future__ import annotations

import pytest

from edgeinfer.governor.attribution import Cause, Shares, cause
from edgeinfer.governor.thermal_model import Forecast
from edgeinfer.sensors.firmware import Slowdown


def board(idle_c: float) -> Forecast:
    return Forecast(idle_c=idle_c, rise_c=40, tau_s=100, load=0.8)


# Firmware trips at 80 C and lets go at 77 C; the whole load heats by 32 C.
ROWS = [
    # slowdown, forecast, our and whole load, cause
    (Slowdown.NONE, board(50), Shares(0.8, 0.8), None),
    (Slowdown.UNKNOWN, board(50), Shares(0.8, 0.8), None),
    (Slowdown.POWER, board(90), Shares(0.8, 0.8), Cause.POWER),
    (Slowdown.THERMAL, board(50), Shares(0.8, 0.8), Cause.OURS),
    (Slowdown.THERMAL, board(50), Shares(0.2, 0.8), Cause.OURS),  # others' 24 C alone would not do it
    (Slowdown.THERMAL, board(60), Shares(0.2, 0.8), Cause.OTHERS),
    (Slowdown.THERMAL, board(60), Shares(0.6, 0.8), Cause.OURS),
    (Slowdown.THERMAL, board(78), Shares(0.8, 0.8), Cause.AMBIENT),
    (Slowdown.THERMAL, None, Shares(0.8, 0.8), Cause.OURS),
    (Slowdown.THERMAL, None, Shares(0.4, 0.8), Cause.OURS),
    (Slowdown.THERMAL, None, Shares(0.2, 0.8), Cause.OTHERS),
    (Slowdown.THERMAL, None, Shares(0.01, 0.1), Cause.AMBIENT),
    (Slowdown.THERMAL, None, Shares(), Cause.OURS),
]


@pytest.mark.parametrize(("slowdown", "said", "shares", "expected"), ROWS)
def test_cause(slowdown: Slowdown, said: Forecast | None, shares: Shares, expected: Cause | None) -> None:
    assert cause(slowdown, said, shares, 80.0) is expected


def test_shares_follow_the_last_minute_and_what_is_unknown_counts_as_ours() -> None:
    shares = Shares()
    for _ in range(300):
        shares = shares.after(0.2, 0.8, 1.0)
    assert shares.ours == pytest.approx(0.2, abs=0.01)
    assert shares.whole == pytest.approx(0.8, abs=0.01)
    assert shares.after(0.2, None, 1.0) == shares
    for _ in range(300):
        shares = shares.after(None, 0.8, 1.0)
    assert shares.own_part == pytest.approx(1, abs=0.01)
