from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.governor.trip import TripPoint, duty_at, duty_curve, level_at
from edgeinfer.limits import ThermalLevel
from edgeinfer.limits import ThermalLevel as L

TRIPS = (
    TripPoint(L.WARM, 72_000, 3_000, 0.75),
    TripPoint(L.HOT, 75_000, 4_000, 0.4),
    TripPoint(L.CRITICAL, 78_000, 3_000, 0.0),
)


@pytest.mark.parametrize(
    ("temp_mc", "current", "expected"),
    [
        (71_999, L.NOMINAL, L.NOMINAL),
        (72_000, L.NOMINAL, L.WARM),
        (76_000, L.NOMINAL, L.HOT),  # rises through several levels at once
        (90_000, L.NOMINAL, L.CRITICAL),
        (69_000, L.WARM, L.WARM),  # exactly released_mc still holds
        (68_999, L.WARM, L.NOMINAL),
        (71_000, L.HOT, L.HOT),
        (70_999, L.HOT, L.WARM),  # below HOT's release, above WARM's
        (50_000, L.CRITICAL, L.NOMINAL),  # falls through several levels at once
        (75_000, L.CRITICAL, L.CRITICAL),
        (74_999, L.CRITICAL, L.HOT),
    ],
)
def test_levels_with_hysteresis(temp_mc: int, current: ThermalLevel, expected: ThermalLevel) -> None:
    assert level_at(TRIPS, temp_mc, current, may_fall=True) is expected


def test_level_never_falls_during_its_dwell_but_rises() -> None:
    assert level_at(TRIPS, 20_000, L.HOT, may_fall=False) is L.HOT
    assert level_at(TRIPS, 78_000, L.HOT, may_fall=False) is L.CRITICAL


@pytest.mark.parametrize(
    ("temp_mc", "duty"),
    [(20_000, 1.0), (69_000, 1.0), (70_500, 0.875), (72_000, 0.75), (73_500, 0.575), (75_000, 0.4), (76_500, 0.2),
     (78_000, 0.0), (99_000, 0.0)],
)  # fmt: skip
def test_duty_curve(temp_mc: int, duty: float) -> None:
    assert duty_at(duty_curve(TRIPS), temp_mc) == pytest.approx(duty)


def test_board_without_trips_is_never_held_back() -> None:
    assert level_at((), 150_000, L.NOMINAL, may_fall=True) is L.NOMINAL
    assert duty_at(duty_curve(()), 150_000) == 1.0


@given(st.integers(-40_000, 125_000), st.integers(-40_000, 125_000), st.sampled_from(ThermalLevel), st.booleans())
def test_hotter_is_never_a_lower_level(one: int, other: int, current: ThermalLevel, may_fall: bool) -> None:
    low, high = sorted((one, other))
    cool, hot = (level_at(TRIPS, temp, current, may_fall=may_fall) for temp in (low, high))
    assert cool <= hot
