"""Decide, from one reading, how much local work the board can bear: pure.

The levels say how close the board is to the temperature at which its firmware acts, with hysteresis and dwell; within
a level the duty cycle follows the temperature (proportional control), because a board that is paced just enough loses
fewer results than one that is switched between full and half. Given the same state, a hotter board never gets more.

A trusted forecast replaces the curve: the duty cycle is then the one that leads the board to the *target*, a little
below the critical trip, and keeps it there. So it begins to pace before the target is reached, and not before it must.
Whatever the forecast says, the duty cycle stays below a line that falls from 1 at the target to 0 at the critical trip,
and the levels are the trips' alone: a wrong model can cost results, or some degrees, never the promise.

| sensor | level | duty cycle |
|---|---|---|
| believed | by trips, hysteresis, dwell | nominal 1.0; warm, hot by the curve; critical that of its trip |
| believed, with a forecast | the same | what leads to the target, under the line; critical that of its trip |
| in doubt (one sample) | as before | as before |
| fault, for up to a minute | as before, at least as below | the lower of before and `fault_duty_cycle` |
| fault, longer | warm (nominal if it may run freely, critical if not at all) | `fault_duty_cycle` |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeinfer.artifact.board import Thermal
from edgeinfer.clock import NS_PER_S
from edgeinfer.governor.thermal_model import Forecast
from edgeinfer.governor.trip import TripPoint, duty_at, duty_curve, level_at
from edgeinfer.limits import ThermalLevel
from edgeinfer.sensors.thermal import ThermalReading

_HOLD_NS = 60 * NS_PER_S
"""How long a sensor fault leaves a stricter pace in force: by then a board that was hot has cooled under it."""
_STEPS = 100
"""Duty cycles are whole percents, rounded down: the noise of a sensor is no news."""
_TARGET_GAP_MC = 1_500
"""Least distance of the target from the critical trip: five times a sensor's flicker, or a step of a coarse one."""
_TARGET_GAP = 0.4
"""The same, as a share of what lies between the hot and the critical trip."""
_STEER_SHARE = 1 / 6
_STEER_S = (3.0, 20.0)
"""Within what time the target is to be reached: a sixth of the time constant, several steps, not too rash."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do at which temperature, on one board."""

    trips: tuple[TripPoint, ...]
    """Rising in level and temperature."""
    curve: tuple[tuple[int, float], ...]
    dwell_ns: int
    """Shortest stay in a level before it may fall."""
    fault_duty_cycle: float
    firmware_trip_mc: int

    @property
    def target_mc(self) -> int | None:
        """Where a forecast leads the board to; None where the last trip isn't critical."""
        if not self.trips or self.trips[-1].level is not ThermalLevel.CRITICAL:
            return None
        critical_mc = self.trips[-1].trip_mc
        below_mc = self.trips[-2].trip_mc if len(self.trips) > 1 else critical_mc
        return critical_mc - max(_TARGET_GAP_MC, round(_TARGET_GAP * (critical_mc - below_mc)))

    @classmethod
    def of(cls, thermal: Thermal) -> Policy:
        """Return the policy of a board file."""
        trips = tuple(TripPoint.of(trip) for trip in thermal.trips)
        return cls(trips, duty_curve(trips), thermal.dwell, thermal.fault_duty_cycle, thermal.firmware_trip_c)


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What a step must know of the steps before it."""

    level: ThermalLevel = ThermalLevel.NOMINAL
    duty_cycle: float = 1.0
    since_ns: int | None = None
    """When `level` began; None before the first change."""
    fault_since_ns: int | None = None
    """When the sensor's fault began; None while there is none."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What holds until the next step."""

    level: ThermalLevel
    duty_cycle: float
    reason: str


def step(
    policy: Policy,
    state: PolicyState,
    reading: ThermalReading,
    now_ns: int,
    *,
    forecast: Forecast | None = None,
    others: float = 0.0,
) -> tuple[PolicyState, Decision]:
    """Return the state after `reading`, and what follows from it.

    Args:
        policy: The board's.
        state: After the step before.
        reading: The temperature.
        now_ns: Monotonic time.
        forecast: What the thermal model says; None while it isn't trusted.
        others: The load, 0 to 1, that is not ours: it heats, too, and leaves less for us.
    """
    if reading.state.fault:
        return _fault_step(policy, state, reading, now_ns)
    if reading.temp_mc is None:  # the first sample awaits its confirmation
        kept = PolicyState(state.level, state.duty_cycle, state.since_ns, state.fault_since_ns)
        return kept, Decision(state.level, state.duty_cycle, f"temperature not confirmed yet: {reading.detail}")
    may_fall = state.since_ns is None or now_ns - state.since_ns >= policy.dwell_ns
    level = level_at(policy.trips, reading.temp_mc, state.level, may_fall=may_fall)
    duty, reason = _duty(policy, level, reading.temp_mc), _reason(policy, level, reading)
    if forecast is not None and policy.target_mc is not None and level is not ThermalLevel.CRITICAL:
        duty = planned_duty(policy, forecast, reading.temp_mc, others)
        if duty < 1:
            reason = f"{reason}; {duty:.0%} leads to {celsius(policy.target_mc)}"
    return _enter(state, level, duty, None, now_ns), Decision(level, duty, reason)


def planned_duty(policy: Policy, forecast: Forecast, temp_mc: int, others: float) -> float:
    """Return the duty cycle that leads a board at `temp_mc` to the target; the policy must have one.

    It is taken to be used to the full: work that wants less heats less, and the next step allows more.
    """
    target_mc = policy.target_mc
    assert target_mc is not None
    critical_mc = policy.trips[-1].trip_mc
    within_s = min(_STEER_S[1], max(_STEER_S[0], forecast.tau_s * _STEER_SHARE))
    load = forecast.steering(temp_mc / 1000, target_mc / 1000, within_s) - others
    line = (critical_mc - temp_mc) / (critical_mc - target_mc)
    return _round_down(max(0.0, min(1.0, load, line)))


def _duty(policy: Policy, level: ThermalLevel, temp_mc: int) -> float:
    if level is ThermalLevel.NOMINAL:
        return 1.0
    if level is ThermalLevel.CRITICAL:
        return policy.trips[-1].duty_cycle
    return _round_down(duty_at(policy.curve, temp_mc))


def _fault_step(
    policy: Policy, state: PolicyState, reading: ThermalReading, now_ns: int
) -> tuple[PolicyState, Decision]:
    since_ns = now_ns if state.fault_since_ns is None else state.fault_since_ns
    level, duty = _fault_level(policy.fault_duty_cycle), policy.fault_duty_cycle
    if now_ns - since_ns < _HOLD_NS:
        level, duty = max(level, state.level), min(duty, state.duty_cycle)
    reason = f"temperature {reading.state}: {reading.detail}; duty cycle {duty:.2f} until a zone can be believed"
    return _enter(state, level, duty, since_ns, now_ns), Decision(level, duty, reason)


def _fault_level(duty_cycle: float) -> ThermalLevel:
    if duty_cycle >= 1:
        return ThermalLevel.NOMINAL
    return ThermalLevel.WARM if duty_cycle > 0 else ThermalLevel.CRITICAL


def _enter(
    state: PolicyState, level: ThermalLevel, duty: float, fault_since_ns: int | None, now_ns: int
) -> PolicyState:
    since_ns = state.since_ns if level is state.level else now_ns
    return PolicyState(level, duty, since_ns, fault_since_ns)


def _reason(policy: Policy, level: ThermalLevel, reading: ThermalReading) -> str:
    assert reading.temp_mc is not None
    text = f"zone {reading.zone} {celsius(reading.temp_mc)}"
    for trip in policy.trips:
        if trip.level is level:
            if reading.temp_mc >= trip.trip_mc:
                return f"{text} >= {celsius(trip.trip_mc)}"
            return f"{text}, {level.name.lower()} until below {celsius(trip.release_mc)}"
    return text


def _round_down(duty: float) -> float:
    return math.floor(duty * _STEPS + 1e-9) / _STEPS


def celsius(temp_mc: int) -> str:
    """Format a temperature for people: `81.2 C`."""
    return f"{temp_mc / 1000:.1f} C"
