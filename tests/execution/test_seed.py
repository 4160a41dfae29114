"""What a run is taken to last before one was seen: measured here, else as the bundle says."""

from __future__ import annotations

import pytest

from edgeinfer.artifact.profile import Latency
from edgeinfer.execution.seed import Seed, seed_of
from tests.execution.local_rig import variant

MS = 1_000_000


@pytest.mark.parametrize(
    ("latency_us", "threads", "seed_ms"),
    [({}, 1, 100), ({"2": 8}, 1, 0.008), ({"1": 9, "2": 5, "4": 3}, 3, 0.005), ({"1": 9, "2": 5}, 8, 0.005)],
)
def test_the_seed_is_the_figure_of_as_many_threads_or_fewer(
    latency_us: dict[str, int], threads: int, seed_ms: float
) -> None:
    seed_ns = round(seed_ms * MS)
    assert seed_of(variant("fp32", latency_us=latency_us), threads) == Seed(seed_ns, seed_ns)


def test_what_this_device_has_measured_counts_more_and_has_a_median() -> None:
    measured = Latency(p50_us=2000, p90_us=3000, p99_us=5000, mean_us=2200, runs=100)
    assert seed_of(variant("fp32", latency_us={"1": 9000}), 1, measured) == Seed(2 * MS, 5 * MS)
