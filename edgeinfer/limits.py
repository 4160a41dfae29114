"""Say what the board can bear right now: the only thing governor and scheduler share.

The governor makes a `Limits` each step; the scheduler, the planner and the executors obey the newest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ThermalLevel(IntEnum):
    """How close the board is to the temperature at which its firmware throttles."""

    NOMINAL = 0
    """Below every trip point."""
    WARM = 1
    """Above the first trip: local work is paced."""
    HOT = 2
    """Close to the firmware's trip: only a small share of local work."""
    CRITICAL = 3
    """At the last trip: no local work at all."""


CLOCK_STEP = 0.05
"""Finer changes of the clock are noise, and would be news every second."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be used, from now until the next one is published."""

    level: ThermalLevel
    cpus: frozenset[int]
    """CPUs that workers may run on; never empty."""
    duty_cycle: float
    """Share of the time that local workers may run, 0.0 (not at all) to 1.0."""
    memory_ceiling_bytes: int
    """Ceiling of the memory ledger."""
    max_freq_hz: int | None = None
    """Frequency cap asked of the kernel, None when none is asked or it is not permitted."""
    clock_share: float = 1.0
    """At which share of the full clock a busy core runs, in steps of `CLOCK_STEP`; 1.0 where it is unknown."""
    reason: str = ""
    """Why, in words for people and reports: `zone cpu-thermal 81.2 C >= 80.0 C`."""

    @property
    def throttled(self) -> bool:
        """Whether local work is held back because of heat."""
        return self.level > ThermalLevel.NOMINAL or self.duty_cycle < 1.0
