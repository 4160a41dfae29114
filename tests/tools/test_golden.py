"""Golden answers are a variant's own, and its tolerance is what CPUs may differ by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from edgeinfer_tools.golden import WAYS, GoldenRequest, Load, record, spread, tolerance
from edgeinfer_tools.samples import Array
from edgeinfer_tools.session import Level, Runner
from edgeinfer_tools.targets import WeightRange, sums_exactly

GOLDEN = [GoldenRequest({}, {"x": np.full(2, value, np.float32)}) for value in (1, 2, 3)]
FULL, REDUCED = (WeightRange(reduced=reduced, instruction_sets=(), reason="") for reduced in (False, True))


class Summing(Runner):
    """Adds up what it was asked since `reset`, and a rounding of its own."""

    def __init__(self, rounding: float) -> None:
        self.rounding = rounding
        self.total = 0.0

    def reset(self) -> None:
        self.total = 0.0

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.total += float(inputs["x"][0])
        return {"y": np.array([self.total + self.rounding], np.float64), "text": np.array(["a"], dtype=object)}


def rounding(**by_level: float) -> Load:
    def load(level: Level, threads: int) -> Runner:
        return Summing(by_level.get(f"{level}_{threads}", 0.0))

    return load


def test_answers_are_those_of_the_device_s_way_from_a_fresh_state() -> None:
    found = record(GOLDEN, rounding(), exact=True)
    assert [float(item["y"][0]) for item in found.answers] == [1, 3, 6]
    assert found.spread == 0


@pytest.mark.parametrize("way", [f"{level}_{threads}" for level, threads in WAYS[1:]])
def test_every_other_way_to_compute_them_counts(way: str) -> None:
    assert record(GOLDEN, rounding(**{way: -0.25}), exact=True).spread == 0.25


def test_where_the_kernels_saturate_the_answers_are_computed_in_float() -> None:
    found = record(GOLDEN, rounding(all_1=5.0), exact=False)
    assert [float(item["y"][0]) for item in found.answers] == [1, 3, 6]
    assert found.spread == 5.0


def test_integers_do_not_wrap_around() -> None:
    assert spread([{"y": np.array([250], np.uint8)}], [{"y": np.array([5], np.uint8)}]) == 245


def test_tolerance_is_the_largest_of_its_reasons() -> None:
    extents = [(0.0, 1.0), (-10.0, 2.0)]
    assert tolerance(1e-6, 0.0, extents, quantized=False) == pytest.approx(1e-3)  # 1e-4 of 10
    assert tolerance(1e-6, 0.0, extents, quantized=True) == pytest.approx(2 * 12 / 255, rel=1e-2)
    assert tolerance(1e-6, 0.5, extents, quantized=True) == pytest.approx(0.75)  # half as much again
    assert tolerance(0.9, 0.5, extents, quantized=True) == 0.9
    assert tolerance(1e-6, 0.0, [], quantized=True) == 1e-6


@pytest.mark.parametrize(
    ("weights", "flags", "architecture", "expected"),
    [
        (FULL, ["avx2"], "x86_64", False),
        (FULL, ["avx2", "avx_vnni"], "x86_64", True),
        (FULL, ["asimd"], "aarch64", True),
        (REDUCED, ["avx2"], "x86_64", True),
    ],
)
def test_full_range_weights_saturate_on_x86_without_vnni(
    weights: WeightRange, flags: list[str], architecture: str, expected: bool
) -> None:
    assert sums_exactly(weights, flags, architecture) is expected
