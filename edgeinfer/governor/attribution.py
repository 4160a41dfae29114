"""Say whose fault it is that firmware slowed the board down: pure.

| firmware | without our heat the board would be | without anybody's | cause |
|---|---|---|---|
| power | | | power |
| thermal | below the temperature at which firmware lets go | | ours |
| thermal | above it | below it | others |
| thermal | above it | above it | ambient |

Without a forecast the loads alone decide: ours if at least half of the load is ours or nobody can tell, else others if
there is much load, else ambient.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from edgeinfer.governor.thermal_model import Forecast
from edgeinfer.sensors.firmware import Slowdown

_LET_GO_C = 3.0
"""Firmware lets go so far below its trip (Raspberry Pi: 2 to 5 C): heat that keeps it from that is to blame, too."""
_MUCH_LOAD = 0.3
_OWN_HALF = 0.5
_SMOOTH_S = 60.0


class Cause(StrEnum):
    """Why the board was slowed down."""

    OURS = "ours"
    """Our own heat: a failure of the governor."""
    OTHERS = "others"
    """Other processes' heat."""
    AMBIENT = "ambient"
    """It would have been too hot without any load: sun, a dead fan, a hot neighbour."""
    POWER = "power"
    """The supply is too weak."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Our and the whole load of the last minute."""

    ours: float = 0.0
    whole: float = 0.0
    seen_s: float = 0.0

    def after(self, ours: float | None, whole: float | None, dt_s: float) -> Shares:
        """Return the shares after `dt_s` with these loads, 0 to 1; what is unknown counts as ours."""
        if whole is None:
            return self
        own = whole if ours is None else min(ours, whole)
        seen_s = min(_SMOOTH_S, self.seen_s + dt_s)  # before a minute is over: the mean of what there was
        weight = min(1.0, dt_s / seen_s) if seen_s else 0.0
        return Shares(self.ours + weight * (own - self.ours), self.whole + weight * (whole - self.whole), seen_s)

    @property
    def own_part(self) -> float:
        """Return which part of the load was ours, 0 to 1."""
        return self.ours / self.whole if self.whole > 0 else 1.0


def cause(slowdown: Slowdown, forecast: Forecast | None, shares: Shares, firmware_trip_c: float) -> Cause | None:
    """Return why the board is slowed down; None when it isn't, or nobody can tell that it is."""
    if slowdown is Slowdown.POWER:
        return Cause.POWER
    if slowdown is not Slowdown.THERMAL:
        return None
    if forecast is None:
        if shares.own_part >= _OWN_HALF:
            return Cause.OURS
        return Cause.OTHERS if shares.whole >= _MUCH_LOAD else Cause.AMBIENT
    let_go_c = firmware_trip_c - _LET_GO_C
    if forecast.settles_c(forecast.load * (1 - shares.own_part)) < let_go_c:
        return Cause.OURS
    return Cause.OTHERS if forecast.idle_c < let_go_c else Cause.AMBIENT
