from __future__ import annotations

import pytest

from edgeinfer.artifact.board import known_boards, load_board
from edgeinfer.governor.kernel_trips import firmware_trip, fitted
from edgeinfer.governor.policy import Policy
from edgeinfer.sensors.trips import KernelTrip

POLICY = Policy.of(load_board(known_boards()["generic-arm64"]).thermal)

TRIPS = [
    ([], 85_000),
    ([("passive", 95_000)], 95_000),
    ([("passive", 70_000), ("passive", 85_000), ("critical", 115_000)], 70_000),
    ([("active", 50_000), ("critical", 125_000)], 85_000),
    ([("critical", 85_000)], 80_000),
    ([("hot", 105_000)], 85_000),  # stopping trips only lower
    ([("passive", 45_000)], 85_000),  # a fan's, or a program's own
    ([("passive", 125_000)], 85_000),
]


@pytest.mark.parametrize(("trips", "expected_mc"), TRIPS)
def test_policy_moves_with_the_kernels_trip(trips: list[tuple[str, int]], expected_mc: int) -> None:
    kernel = [KernelTrip(kind, temp_mc, 0) for kind, temp_mc in trips]
    assert firmware_trip(kernel, POLICY.firmware_trip_mc) == expected_mc
    found = fitted(POLICY, kernel)
    assert found.firmware_trip_mc == expected_mc
    assert [found.firmware_trip_mc - trip.trip_mc for trip in found.trips] == [13_000, 8_000, 4_000]
    assert found.curve[-1] == (expected_mc - 4_000, 0.0)
