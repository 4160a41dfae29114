"""Name the states a sensor can be in, and say each change once.

A sensor that cannot be believed is a state, never a number: whoever decides by it must have an answer for each.
"""

from __future__ import annotations

import logging
from enum import StrEnum

from edgeinfer.clock import NS_PER_S

_log = logging.getLogger(__name__)

_QUIET_NS = 60 * NS_PER_S
"""A sensor that flaps is logged at most this often: logs must not fill the card."""


class SensorState(StrEnum):
    """Whether a sensor's value can be acted upon."""

    OK = "ok"
    UNCONFIRMED = "unconfirmed"
    """The newest sample is in doubt; the value, if there is one, is the last that was confirmed."""
    MISSING = "missing"
    """Not there, or it answers with an error."""
    NO_PERMISSION = "no_permission"
    """It is there, but this user may not read it."""
    ABSURD = "absurd"
    """It answers with what cannot be: no number, out of range, or jumping about."""
    FROZEN = "frozen"
    """It has answered the same for so long, while the load moved, that it does not measure."""
    BLOCKED = "blocked"
    """Its driver does not answer at all."""

    @property
    def fault(self) -> bool:
        """Whether there is no value to act upon."""
        return self not in {SensorState.OK, SensorState.UNCONFIRMED}


class ChangeLog:
    """Logs one line when a sensor's state has changed, at most one a minute for each sensor.

    A state that came and went within that minute is counted and told with the next line; the state a sensor ends up
    in is always logged. `unconfirmed` is a matter of one sample and not logged.
    """

    def __init__(self) -> None:
        self._logged: dict[str, tuple[SensorState, int]] = {}
        self._last: dict[str, SensorState] = {}
        self._unsaid: dict[str, int] = {}

    def note(self, sensor: str, state: SensorState, detail: str, now_ns: int) -> None:
        """Take notice of the state that `sensor` is in now."""
        if state is SensorState.UNCONFIRMED:
            return
        last = self._last.get(sensor)
        self._last[sensor] = state
        if last is not None and state is not last:
            self._unsaid[sensor] = self._unsaid.get(sensor, 0) + 1
        was, logged_ns = self._logged.get(sensor, (None, 0))
        if state is was or (was is not None and now_ns - logged_ns < _QUIET_NS):
            return
        changes = self._unsaid.pop(sensor, 0)
        self._logged[sensor] = (state, now_ns)
        level = logging.INFO if state is SensorState.OK else logging.WARNING
        _log.log(
            level, "sensor name=%s state=%s was=%s changes=%d detail=%r", sensor, state, was or "-", changes, detail
        )
