"""Say at which temperatures a board changes its thermal level, and when it changes back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.artifact.board import Trip
from edgeinfer.limits import ThermalLevel


@dataclass(frozen=True, slots=True)
class TripPoint:
    """Temperature at which a level begins, and how far it must fall before the level ends.

    Hysteresis keeps a board that sits at the threshold from toggling with every sample: once tripped it stays tripped
    until the temperature is below `trip_mc - hysteresis_mc`.
    """

    level: ThermalLevel
    trip_mc: int
    hysteresis_mc: int
    duty_cycle: float
    """Share of the time that local workers may run at exactly `trip_mc`; between trips it is interpolated."""

    @classmethod
    def of(cls, trip: Trip) -> TripPoint:
        """Return the trip point that a board file describes."""
        return cls(trip.thermal_level, trip.at_c, trip.hysteresis_c, trip.duty_cycle)

    @property
    def release_mc(self) -> int:
        """Below this the level ends."""
        return self.trip_mc - self.hysteresis_mc


def level_at(trips: Sequence[TripPoint], temp_mc: int, current: ThermalLevel, *, may_fall: bool) -> ThermalLevel:
    """Return the level at `temp_mc` when it has been `current` until now.

    Rises at once, to the highest trip reached. Falls only with `may_fall`, and then to the highest level that has not
    been released yet, so that a fall through several levels is one change. `trips` rise in level and temperature.
    """
    reached = max((trip.level for trip in trips if temp_mc >= trip.trip_mc), default=ThermalLevel.NOMINAL)
    if reached >= current:
        return reached
    if not may_fall:
        return current
    held = (trip.level for trip in trips if trip.level <= current and temp_mc >= trip.release_mc)
    return max(held, default=ThermalLevel.NOMINAL)


def duty_curve(trips: Sequence[TripPoint]) -> tuple[tuple[int, float], ...]:
    """Return the corners (temperature, duty cycle) of the curve that paces work between the trips.

    1.0 up to where the first level is released, then straight to each trip's duty cycle at its trip temperature. As the
    whole hysteresis band of the first level is on the slope, the board settles inside it: no cycle of tripping,
    cooling down and tripping again.
    """
    if not trips:
        return ()
    return ((trips[0].release_mc, 1.0), *((trip.trip_mc, trip.duty_cycle) for trip in trips))


def duty_at(curve: Sequence[tuple[int, float]], temp_mc: int) -> float:
    """Return the duty cycle of `curve` at `temp_mc`; flat outside its corners."""
    if not curve:
        return 1.0
    if temp_mc <= curve[0][0]:
        return curve[0][1]
    for (cool_mc, cool_duty), (hot_mc, hot_duty) in itertools.pairwise(curve):
        if temp_mc <= hot_mc:
            return cool_duty + (hot_duty - cool_duty) * (temp_mc - cool_mc) / (hot_mc - cool_mc)
    return curve[-1][1]
