from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.artifact.board import known_boards, load_board
from edgeinfer.governor.policy import Decision, Policy, PolicyState, step
from edgeinfer.governor.thermal_model import Forecast
from edgeinfer.governor.trip import TripPoint, duty_curve
from edgeinfer.limits import ThermalLevel
from edgeinfer.limits import ThermalLevel as L
from edgeinfer.sensors.state import SensorState
from edgeinfer.sensors.thermal import ThermalReading
from edgeinfer.sensors.zone import Belief, observe, parse_temp

S = 1_000_000_000
TRIPS = (
    TripPoint(L.WARM, 80_000, 4_000, 0.7),
    TripPoint(L.HOT, 88_000, 4_000, 0.35),
    TripPoint(L.CRITICAL, 95_000, 5_000, 0.0),
)
POLICY = Policy(TRIPS, duty_curve(TRIPS), 5 * S, 0.5, 100_000)
BOARDS = [load_board(path) for path in known_boards().values()]


def ok(temp_mc: int) -> ThermalReading:
    return ThermalReading(temp_mc, "cpu-thermal", SensorState.OK)


def fault(state: SensorState = SensorState.MISSING) -> ThermalReading:
    return ThermalReading(None, "", state, "thermal_zone0(cpu-thermal): No such device")


def run(
    readings: Iterable[ThermalReading], *, policy: Policy = POLICY, state: PolicyState | None = None, period_ns: int = S
) -> list[Decision]:
    state = state or PolicyState()
    decisions = []
    for index, reading in enumerate(readings):
        state, decision = step(policy, state, reading, index * period_ns)
        decisions.append(decision)
    return decisions


# Each row is one step: level before, how long it has held, temperature; level, duty cycle and reason after.
STEPS = [
    (L.NOMINAL, 100, 50_000, L.NOMINAL, 1.0, "zone cpu-thermal 50.0 C"),
    (L.NOMINAL, 100, 79_999, L.NOMINAL, 1.0, "zone cpu-thermal 80.0 C"),
    (L.NOMINAL, 100, 80_000, L.WARM, 0.7, "zone cpu-thermal 80.0 C >= 80.0 C"),
    (L.NOMINAL, 0, 81_250, L.WARM, 0.64, "zone cpu-thermal 81.2 C >= 80.0 C"),
    (L.WARM, 100, 84_000, L.WARM, 0.52, "zone cpu-thermal 84.0 C >= 80.0 C"),
    (L.WARM, 100, 78_000, L.WARM, 0.85, "zone cpu-thermal 78.0 C, warm until below 76.0 C"),
    (L.WARM, 100, 76_000, L.WARM, 1.0, "zone cpu-thermal 76.0 C, warm until below 76.0 C"),
    (L.WARM, 100, 75_999, L.NOMINAL, 1.0, "zone cpu-thermal 76.0 C"),
    (L.WARM, 4, 60_000, L.WARM, 1.0, "zone cpu-thermal 60.0 C, warm until below 76.0 C"),  # dwell
    (L.WARM, 5, 60_000, L.NOMINAL, 1.0, "zone cpu-thermal 60.0 C"),
    (L.WARM, 0, 88_000, L.HOT, 0.35, "zone cpu-thermal 88.0 C >= 88.0 C"),  # rising needs no dwell
    (L.HOT, 100, 86_000, L.HOT, 0.43, "zone cpu-thermal 86.0 C, hot until below 84.0 C"),
    (L.HOT, 100, 82_000, L.WARM, 0.61, "zone cpu-thermal 82.0 C >= 80.0 C"),
    (L.HOT, 100, 94_990, L.HOT, 0.0, "zone cpu-thermal 95.0 C >= 88.0 C"),
    (L.HOT, 0, 95_000, L.CRITICAL, 0.0, "zone cpu-thermal 95.0 C >= 95.0 C"),
    (L.CRITICAL, 100, 91_000, L.CRITICAL, 0.0, "zone cpu-thermal 91.0 C, critical until below 90.0 C"),
    (L.CRITICAL, 4, 60_000, L.CRITICAL, 0.0, "zone cpu-thermal 60.0 C, critical until below 90.0 C"),
    (L.CRITICAL, 5, 89_000, L.HOT, 0.3, "zone cpu-thermal 89.0 C >= 88.0 C"),
    (L.CRITICAL, 5, 60_000, L.NOMINAL, 1.0, "zone cpu-thermal 60.0 C"),
]


@pytest.mark.parametrize(("level", "held_s", "temp_mc", "expected", "duty", "reason"), STEPS)
def test_step(level: ThermalLevel, held_s: int, temp_mc: int, expected: ThermalLevel, duty: float, reason: str) -> None:
    state = PolicyState(level, 0.5, since_ns=1000 * S)
    after, decision = step(POLICY, state, ok(temp_mc), (1000 + held_s) * S)
    assert decision == Decision(expected, duty, reason)
    assert (after.level, after.duty_cycle) == (expected, duty)
    assert after.since_ns == ((1000 + held_s) * S if expected is not level else 1000 * S)


FAULTS = [
    # level and duty before, seconds since the fault began; level, duty after
    (L.NOMINAL, 1.0, 0.5, 0, L.WARM, 0.5),
    (L.WARM, 0.7, 0.5, 0, L.WARM, 0.5),
    (L.WARM, 0.4, 0.5, 59, L.WARM, 0.4),
    (L.CRITICAL, 0.0, 0.5, 0, L.CRITICAL, 0.0),
    (L.CRITICAL, 0.0, 0.5, 59, L.CRITICAL, 0.0),
    (L.CRITICAL, 0.0, 0.5, 60, L.WARM, 0.5),
    (L.NOMINAL, 1.0, 1.0, 0, L.NOMINAL, 1.0),
    (L.HOT, 0.2, 1.0, 0, L.HOT, 0.2),
    (L.NOMINAL, 1.0, 0.0, 0, L.CRITICAL, 0.0),
]


@pytest.mark.parametrize("state", [item for item in SensorState if item.fault])
@pytest.mark.parametrize(("level", "duty", "fault_duty", "lasts_s", "expected", "expected_duty"), FAULTS)
def test_sensor_fault(
    state: SensorState, level: ThermalLevel, duty: float, fault_duty: float, lasts_s: int,
    expected: ThermalLevel, expected_duty: float,
) -> None:  # fmt: skip
    policy = Policy(TRIPS, POLICY.curve, 5 * S, fault_duty, 100_000)
    before = PolicyState(level, duty, 0, fault_since_ns=1000 * S)
    after, decision = step(policy, before, fault(state), (1000 + lasts_s) * S)
    assert (decision.level, decision.duty_cycle) == (expected, expected_duty)
    assert state.value in decision.reason
    assert after.fault_since_ns == 1000 * S


def test_recovery_from_a_fault_needs_no_restart() -> None:
    decisions = run([ok(50_000), fault(), fault(), *[ok(50_000)] * 8])
    assert [item.duty_cycle for item in decisions[:3]] == [1.0, 0.5, 0.5]
    assert (decisions[-1].level, decisions[-1].duty_cycle) == (L.NOMINAL, 1.0)


def test_awaiting_the_first_confirmation_changes_nothing() -> None:
    waiting = ThermalReading(None, "", SensorState.UNCONFIRMED, "85000 is not confirmed yet")
    assert run([waiting])[0].duty_cycle == 1.0
    before = PolicyState(L.HOT, 0.3, 0)
    after, decision = step(POLICY, before, waiting, 99 * S)
    assert (after, decision.level, decision.duty_cycle) == (before, L.HOT, 0.3)


def through_filter(samples: list[str]) -> list[ThermalReading]:
    belief, readings = Belief(), []
    for sample in samples:
        belief = observe(belief, parse_temp(sample))
        readings.append(ThermalReading(belief.temp_mc, "cpu-thermal", belief.state, belief.detail))
    return readings


@pytest.mark.parametrize("bogus", ["85000", "124000", "-650788984", "garbage", "", "-40000", "0"])
@pytest.mark.parametrize("position", [0, 1, 2, 5])
def test_no_action_on_one_bogus_sample(bogus: str, position: int) -> None:
    samples = ["51000"] * 8
    samples[position] = bogus
    decisions = run(through_filter(samples))
    assert {(item.level, item.duty_cycle) for item in decisions} == {(L.NOMINAL, 1.0)}


def test_known_bogus_sequence_of_a_raspberry_pi_changes_nothing() -> None:
    decisions = run(through_filter(["51000", "85000", "51000", "-650788984", "51000"]))
    assert {item.duty_cycle for item in decisions} == {1.0}


def changes(decisions: list[Decision]) -> int:
    levels = [L.NOMINAL, *(decision.level for decision in decisions)]
    return sum(one is not other for one, other in itertools.pairwise(levels))


def test_sine_around_a_threshold_for_an_hour_is_at_most_two_changes() -> None:
    sine = [ok(round(80_000 + 1_000 * math.sin(2 * math.pi * second / 60))) for second in range(3600)]
    assert 1 <= changes(run(sine)) <= 2


@given(
    st.sampled_from(BOARDS),
    st.sampled_from([0, 1, 2]),
    st.floats(0, 0.99),
    st.floats(2, 7200),
    st.floats(0, 2 * math.pi),
)
def test_no_sine_within_the_hysteresis_flaps_on_any_board(
    board: object, trip_index: int, share: float, period_s: float, phase: float
) -> None:
    assert hasattr(board, "thermal")
    policy = Policy.of(board.thermal)
    trip = policy.trips[trip_index]
    readings = (
        ok(round(trip.trip_mc + share * trip.hysteresis_mc * math.sin(phase + 2 * math.pi * second / period_s)))
        for second in range(0, 3600, 5)
    )
    assert changes(run(readings, policy=policy, period_ns=5 * S)) <= 2


readings = st.one_of(
    st.integers(-40_000, 125_000).map(ok),
    st.sampled_from([item for item in SensorState if item.fault]).map(fault),
)


@given(st.sampled_from(BOARDS), st.lists(readings, max_size=60), st.integers(1, 30))
def test_at_or_above_the_critical_trip_no_local_work_runs(
    board: object, sequence: list[ThermalReading], period_s: int
) -> None:
    assert hasattr(board, "thermal")
    policy = Policy.of(board.thermal)
    critical = policy.trips[-1]
    assert critical.level is L.CRITICAL
    for reading, decision in zip(sequence, run(sequence, policy=policy, period_ns=period_s * S), strict=True):
        if reading.temp_mc is not None and reading.temp_mc >= critical.trip_mc:
            assert (decision.level, decision.duty_cycle) == (L.CRITICAL, 0.0)
        if decision.level is L.CRITICAL:
            assert decision.duty_cycle == 0.0
        assert 0 <= decision.duty_cycle <= 1


states = st.builds(
    PolicyState,
    st.sampled_from(ThermalLevel),
    st.floats(0, 1),
    st.none() | st.integers(0, 100 * S),
    st.none() | st.integers(0, 100 * S),
)


@given(
    st.sampled_from(BOARDS), states, st.integers(-40_000, 125_000), st.integers(-40_000, 125_000), st.integers(0, 99)
)
def test_hotter_never_gets_more(board: object, state: PolicyState, one: int, other: int, after_s: int) -> None:
    assert hasattr(board, "thermal")
    policy = Policy.of(board.thermal)
    low, high = sorted((one, other))
    now_ns = (100 + after_s) * S
    cool, hot = (step(policy, state, ok(temp), now_ns)[1] for temp in (low, high))
    assert cool.level <= hot.level
    assert cool.duty_cycle >= hot.duty_cycle


@given(states, readings, st.integers(0, 200))
def test_step_depends_on_its_arguments_alone(state: PolicyState, reading: ThermalReading, at_s: int) -> None:
    assert step(POLICY, state, reading, at_s * S) == step(POLICY, state, reading, at_s * S)


# With a forecast.

forecasts = st.builds(Forecast, st.floats(-40, 110), st.floats(3, 120), st.floats(4, 440), st.floats(0, 1))
PI_LIKE = Forecast(idle_c=52, rise_c=40, tau_s=125, load=0.6)

# Trips 80, 88 and 95 C: the target is 92.2 C, where PI_LIKE holds a load of 1.0.
FORESEEN = [
    # level before, temperature, forecast, load of others; level, duty cycle after
    (L.NOMINAL, 60_000, PI_LIKE, 0.0, L.NOMINAL, 1.0),
    (L.NOMINAL, 84_000, PI_LIKE, 0.0, L.WARM, 1.0),  # the trips alone would pace to 0.52
    (L.WARM, 92_200, Forecast(72.2, 40, 125, 0.5), 0.0, L.HOT, 0.5),  # holds what it holds
    (L.WARM, 92_200, Forecast(72.2, 40, 125, 0.5), 0.2, L.HOT, 0.3),  # others heat, too
    (L.WARM, 90_200, Forecast(72.2, 40, 125, 0.5), 0.0, L.HOT, 0.78),  # and begins before the target
    (L.WARM, 94_000, Forecast(0.0, 40, 125, 0.5), 0.0, L.HOT, 0.35),  # the line, whatever the forecast says
    (L.HOT, 95_000, Forecast(0.0, 40, 125, 0.5), 0.0, L.CRITICAL, 0.0),
    (L.CRITICAL, 91_000, Forecast(0.0, 40, 125, 0.5), 0.0, L.CRITICAL, 0.0),
]


@pytest.mark.parametrize(("level", "temp_mc", "forecast", "others", "expected", "duty"), FORESEEN)
def test_step_with_a_forecast(
    level: ThermalLevel, temp_mc: int, forecast: Forecast, others: float, expected: ThermalLevel, duty: float
) -> None:
    state = PolicyState(level, 0.5, since_ns=0)
    _, decision = step(POLICY, state, ok(temp_mc), 100 * S, forecast=forecast, others=others)
    assert (decision.level, decision.duty_cycle) == (expected, duty)


@given(
    st.sampled_from(BOARDS), states, st.integers(-40_000, 125_000), st.integers(-40_000, 125_000), forecasts,
    st.floats(0, 1),
)  # fmt: skip
def test_with_any_forecast_hotter_never_gets_more(
    board: object, state: PolicyState, one: int, other: int, forecast: Forecast, others: float
) -> None:
    assert hasattr(board, "thermal")
    policy = Policy.of(board.thermal)
    low, high = sorted((one, other))
    cool, hot = (step(policy, state, ok(temp), 200 * S, forecast=forecast, others=others)[1] for temp in (low, high))
    assert cool.level <= hot.level
    assert cool.duty_cycle >= hot.duty_cycle


@given(st.sampled_from(BOARDS), states, readings, forecasts, st.floats(0, 1))
def test_a_forecast_changes_no_level_and_nothing_at_the_critical_trip_or_in_a_fault(
    board: object, state: PolicyState, reading: ThermalReading, forecast: Forecast, others: float
) -> None:
    assert hasattr(board, "thermal")
    policy = Policy.of(board.thermal)
    alone = step(policy, state, reading, 200 * S)[1]
    decision = step(policy, state, reading, 200 * S, forecast=forecast, others=others)[1]
    assert decision.level is alone.level
    assert 0 <= decision.duty_cycle <= 1
    if reading.temp_mc is None or reading.temp_mc >= policy.trips[-1].trip_mc:
        assert decision == alone


@given(st.sampled_from(BOARDS))
def test_the_target_leaves_room_to_the_critical_trip(board: object) -> None:
    assert hasattr(board, "thermal")
    policy = Policy.of(board.thermal)
    assert policy.target_mc is not None
    assert policy.trips[0].trip_mc < policy.target_mc <= policy.trips[-1].trip_mc - 1_500


def test_without_a_critical_trip_there_is_no_target_and_a_forecast_says_nothing() -> None:
    policy = Policy(TRIPS[:1], duty_curve(TRIPS[:1]), 5 * S, 0.5, 100_000)
    assert policy.target_mc is None
    decision = step(policy, PolicyState(), ok(82_000), 0, forecast=PI_LIKE)[1]
    assert decision == step(policy, PolicyState(), ok(82_000), 0)[1]
