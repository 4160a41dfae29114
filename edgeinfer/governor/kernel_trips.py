"""Fit a generic board's policy to the trip points that the kernel knows for its zone: pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from edgeinfer.governor.policy import Policy
from edgeinfer.governor.trip import duty_curve
from edgeinfer.sensors.trips import KernelTrip

_BELIEVABLE_MC = range(60_000, 110_001)
"""Below it is a threshold of somebody's own program or a fan's, above it silicon doesn't work for long."""
_BEFORE_MC = 5_000
"""A `hot` or `critical` trip stops the board: it must have slowed down so far below."""


def firmware_trip(trips: Iterable[KernelTrip], stated_mc: int) -> int:
    """Return where the kernel begins to slow the board down.

    That is its coolest passive trip. Without one, its other trips can only lower what the board file states.
    """
    believable = [trip for trip in trips if trip.temp_mc in _BELIEVABLE_MC]
    passive = [trip.temp_mc for trip in believable if trip.kind == "passive"]
    if passive:
        return min(passive)
    stopping = [trip.temp_mc - _BEFORE_MC for trip in believable if trip.kind in {"hot", "critical"}]
    return min([stated_mc, *stopping])


def fitted(policy: Policy, trips: Iterable[KernelTrip]) -> Policy:
    """Return the policy with all its trips as far below the kernel's trip as they were below the stated one."""
    found_mc = firmware_trip(trips, policy.firmware_trip_mc)
    shift_mc = found_mc - policy.firmware_trip_mc
    if shift_mc == 0:
        return policy
    moved = tuple(replace(trip, trip_mc=trip.trip_mc + shift_mc) for trip in policy.trips)
    return replace(policy, trips=moved, curve=duty_curve(moved), firmware_trip_mc=found_mc)
