"""What a run is taken to last before one was seen: measured here, else as the bundle says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgeinfer.artifact.manifest import File, read_manifest
from edgeinfer.artifact.profile import Latency
from edgeinfer.execution.seed import Seed, load_guess_ns, seed_of
from tests.execution.local_rig import variant, write_bundle
from tests.worker import graphs

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


def test_a_load_is_guessed_from_what_was_measured_else_from_what_there_is_to_read(tmp_path: Path) -> None:
    manifest, _ = read_manifest(write_bundle(tmp_path, "echo", graphs.identity()))
    small_ns = load_guess_ns(manifest, "")
    assert 20 * MS < small_ns < 100 * MS
    assert load_guess_ns(manifest, "fp32", [20.0, 310.0]) == pytest.approx(310 * MS, rel=0.2)
    weights = {**manifest.files, "model/weights.bin": File("0" * 64, 200_000_000)}
    assert load_guess_ns(msgspec.structs.replace(manifest, files=weights), "fp32") == pytest.approx(2050 * MS, rel=0.01)
