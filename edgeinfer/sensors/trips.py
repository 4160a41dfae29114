"""Read the trip points that the kernel knows for a thermal zone, with their types, from sysfs itself.

psutil 7.2 scales them wrongly and leaves out passive and hot ones. Placeholders are left out here: a trip at 0, at
-273150 or beyond what silicon survives is a driver's way of saying that there is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.sensors.probe import read_text

_MAX_TRIPS = 16
_HIGHEST_TRIP_MC = 150_000
_SLOWING = frozenset({"passive", "hot", "critical"})
"""Kinds at which the kernel slows the board down or stops it; `active` ones only start a fan."""


@dataclass(frozen=True, slots=True)
class KernelTrip:
    """A trip point as the kernel knows it; placeholders (0, -273150, …) are left out."""

    kind: str
    """`active`, `passive`, `hot` or `critical`."""
    temp_mc: int
    hysteresis_mc: int


def read_trips(folder: Path) -> tuple[KernelTrip, ...]:
    """Return a zone's trip points, coolest first. One that cannot be read is left out, the others stay."""
    trips = []
    for index in range(_MAX_TRIPS):
        stem = folder / f"trip_point_{index}"
        try:
            kind, temp_mc = read_text(f"{stem}_type"), int(read_text(f"{stem}_temp"))
        except FileNotFoundError:
            break
        except (OSError, ValueError):
            continue
        if is_threshold(temp_mc):
            trips.append(KernelTrip(kind, temp_mc, _hysteresis(f"{stem}_hyst")))
    return tuple(sorted(trips, key=lambda trip: trip.temp_mc))


def is_threshold(temp_mc: int | None) -> bool:
    """Return whether a trip point, or a `temp*_crit` of hwmon, is a temperature and no placeholder."""
    return temp_mc is not None and 0 < temp_mc <= _HIGHEST_TRIP_MC


def first_slowing(trips: Iterable[KernelTrip]) -> KernelTrip | None:
    """Return the coolest trip point at which the kernel itself slows the board down; None without one."""
    return min((trip for trip in trips if trip.kind in _SLOWING), key=lambda trip: trip.temp_mc, default=None)


def _hysteresis(path: str) -> int:
    try:
        return max(0, int(read_text(path)))
    except (OSError, ValueError):
        return 0
