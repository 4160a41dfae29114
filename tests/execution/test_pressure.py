"""Pressure lowers the ceiling: by a table, without flapping, within bounds, and it recovers by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.clock import NS_PER_S
from edgeinfer.execution.pressure import CALM, FALL_NS, RISE_NS, THRESHOLDS, Pressure, PressureState, judge, step
from edgeinfer.sensors.pressure import PressureSample

MIB = 1 << 20
QUIET = PressureSample()
_VALUES = st.one_of(st.none(), st.floats(0, 1e9))
SAMPLES = st.builds(PressureSample, _VALUES, _VALUES, _VALUES, _VALUES)


def only(sensor: str, value: float) -> PressureSample:
    changed: Any = {sensor: value}
    return replace(QUIET, **changed)


def test_every_row_of_the_table_means_its_level_from_the_threshold_on() -> None:
    for sensor, thresholds in THRESHOLDS.items():
        if sensor == "group_faults_s":  # of others, see below
            continue
        assert list(thresholds) == sorted(thresholds)
        for level, threshold in enumerate(thresholds, start=1):
            assert judge(only(sensor, threshold)) is Pressure(level)
            assert judge(only(sensor, threshold * 0.999)) is Pressure(level - 1)
    assert judge(QUIET) is Pressure.NONE


def test_what_the_whole_machine_waits_for_holds_us_back_and_evicts_nobody() -> None:
    assert judge(PressureSample(some_percent=100, full_percent=100)) is Pressure.SEVERE
    everybody = PressureSample(some_percent=100, full_percent=100, machine_wide=True)
    assert judge(everybody) is Pressure.SOME
    assert run((600, everybody)).cap_bytes == 400 * MIB
    assert judge(PressureSample(group_faults_s=5000)) is Pressure.SOME
    assert judge(replace(everybody, major_faults_s=5000)) is Pressure.SEVERE, "and we suffer from it"


def run(
    *spans: tuple[float, PressureSample],
    state: PressureState = CALM,
    available: int = 1000 * MIB,
    reserved: int = 400 * MIB,
) -> PressureState:
    """Step once a second through spans of (seconds, sample); what is reserved follows the ceiling down."""
    at_ns = state.at_ns or 0
    for seconds, sample in spans:
        for _ in range(round(seconds)):
            at_ns += NS_PER_S
            state = step(state, sample, available_bytes=available, reserved_bytes=reserved, now_ns=at_ns)
    return state


def of(level: Pressure) -> PressureSample:
    return PressureSample(refault_bytes_s=THRESHOLDS["refault_bytes_s"][level - 1] * 1.1)


def test_a_burst_changes_nothing() -> None:
    assert run((3, of(Pressure.SEVERE)), (1, QUIET), (3, of(Pressure.SEVERE)), (1, QUIET)).cap_bytes is None


def test_some_pressure_holds_what_is_reserved_and_adds_nothing() -> None:
    state = run((60, of(Pressure.SOME)))
    assert (state.level, state.ceiling(1000 * MIB)) == (Pressure.SOME, 400 * MIB)
    assert state.why == "refaults of 1.2 MB/s"


def test_high_pressure_goes_on_cutting_down_to_half_and_severe_is_faster() -> None:
    ten_high, ten_severe = run((10, of(Pressure.HIGH))), run((10, of(Pressure.SEVERE)))
    assert 200 * MIB < (ten_severe.cap_bytes or 0) < (ten_high.cap_bytes or 0) < 400 * MIB
    assert run((3600, of(Pressure.SEVERE))).cap_bytes == 200 * MIB


def test_it_falls_one_level_at_a_time_after_a_calm_and_recovers_in_a_minute() -> None:
    state = run((60, of(Pressure.HIGH)))
    assert run((9, QUIET), state=state).level is Pressure.HIGH
    assert run((12, QUIET), state=state).level is Pressure.SOME
    low = run((24, QUIET), state=state)
    assert low.level is Pressure.NONE
    assert low.cap_bytes is not None
    assert low.cap_bytes < 300 * MIB, "not at once"
    assert run((70, QUIET), state=state) == replace(CALM, at_ns=(60 + 70) * NS_PER_S)


def test_a_value_that_stays_near_its_threshold_does_not_flap() -> None:
    near = PressureSample(some_percent=THRESHOLDS["some_percent"][0] * 0.9)
    state, levels = run((10, of(Pressure.SOME))), set()
    for _ in range(100):
        state = run((1, near), (1, of(Pressure.SOME)), state=state)
        levels.add(state.level)
    assert levels == {Pressure.SOME}


def test_one_episode_after_the_other_goes_no_lower_than_half_of_the_first() -> None:
    state = CALM
    for _ in range(20):
        state = run((30, of(Pressure.SEVERE)), (31, QUIET), state=state, reserved=state.ceiling(400 * MIB))
        assert (state.cap_bytes or 0) >= 200 * MIB


def test_a_missing_sensor_is_no_pressure_and_does_not_hide_another() -> None:
    assert judge(PressureSample(None, None, None, None)) is Pressure.NONE
    assert judge(PressureSample(None, 5000.0, None, None)) is Pressure.SEVERE


@pytest.mark.parametrize("sensor", sorted(THRESHOLDS))
def test_the_reason_names_the_sensor_and_its_value(sensor: str) -> None:
    state = run((10, only(sensor, THRESHOLDS[sensor][1])))
    assert any(character.isdigit() for character in state.why)
    assert not run((10, QUIET)).why


@given(SAMPLES, SAMPLES)
def test_more_pressure_never_means_less(one: PressureSample, other: PressureSample) -> None:
    worst = worst_of(one, other)
    assert judge(worst) >= max(judge(one), judge(other))


def worst_of(one: PressureSample, other: PressureSample) -> PressureSample:
    return PressureSample(
        refault_bytes_s=max(one.refault_bytes_s or 0, other.refault_bytes_s or 0),
        major_faults_s=max(one.major_faults_s or 0, other.major_faults_s or 0),
        some_percent=max(one.some_percent or 0, other.some_percent or 0),
        full_percent=max(one.full_percent or 0, other.full_percent or 0),
    )


STATES = st.lists(
    st.tuples(SAMPLES, st.integers(0, 5 * NS_PER_S), st.integers(0, 2000), st.integers(0, 2000)), max_size=30
)


@given(STATES)
def test_the_ceiling_is_never_above_the_budget_nor_below_half_of_what_was_reserved(
    steps: list[tuple[PressureSample, int, int, int]],
) -> None:
    state, at_ns, least = CALM, 0, 2000
    for sample, wait_ns, available, reserved in steps:
        at_ns += wait_ns
        state = step(state, sample, available_bytes=available, reserved_bytes=reserved, now_ns=at_ns)
        least = min(least, reserved, available)
        assert 0 <= state.ceiling(available) <= available
        assert state.ceiling(2000) >= least // 2
        assert bool(state.why) == (state.level > Pressure.NONE)
    calm = round(3 * FALL_NS / NS_PER_S + 60)
    for _ in range(calm):
        at_ns += NS_PER_S
        state = step(state, QUIET, available_bytes=2000, reserved_bytes=0, now_ns=at_ns)
    assert state.ceiling(2000) == 2000, "it recovers from anything"


@given(STATES, SAMPLES, SAMPLES)
def test_more_pressure_never_raises_the_ceiling(
    steps: list[tuple[PressureSample, int, int, int]], sample: PressureSample, more: PressureSample
) -> None:
    state, at_ns = CALM, 0
    for before, wait_ns, available, reserved in steps:
        at_ns += wait_ns
        state = step(state, before, available_bytes=available, reserved_bytes=reserved, now_ns=at_ns)
    worse = worst_of(sample, more)
    at_ns += RISE_NS
    little = step(state, sample, available_bytes=1000, reserved_bytes=500, now_ns=at_ns)
    much = step(state, worse, available_bytes=1000, reserved_bytes=500, now_ns=at_ns)
    assert much.level >= little.level
    assert much.ceiling(1000) <= little.ceiling(1000)
