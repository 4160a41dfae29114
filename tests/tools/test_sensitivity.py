"""What stays float is what measurably hurts, no more of it than the bar asks, and nothing is measured twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgeinfer.errors import EdgeInferError
from edgeinfer_tools.quantize import quantize
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.samples import Array
from edgeinfer_tools.scheme import Scheme
from edgeinfer_tools.sensitivity import OutputError, Sensitivity, rank, rescue
from edgeinfer_tools.targets import Target
from tests.tools.test_known_failures import model_of, normal, reader, spec, tensor

TARGET = Target("t", "x86_64", ("avx2",))
SCHEME = Scheme(method="static")


def fragile() -> onnx.ModelProto:
    """Four products in a row; one has a single huge weight, so that one scale for the matrix loses all the others."""
    weights: list[Array] = [normal(32, 32, seed=seed) / 6 for seed in range(4)]
    weights[2] = weights[2].copy()
    weights[2][0, 0] = 300
    weights[1] = weights[1].copy()
    weights[1][:, 0] = 0  # that weight is always multiplied by 0: it spoils the range, and nothing else
    nodes = [
        helper.make_node("MatMul", [f"h{index}", f"w{index}"], [f"h{index + 1}"], name=f"layer{index}")
        for index in range(4)
    ]
    return model_of(
        nodes, {"h0": (TensorProto.FLOAT, [1, 32])}, {"h4": [1, 32]},
        [tensor(array, f"w{index}") for index, array in enumerate(weights)],
    )  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Calibration, OutputError]:
    path = tmp_path / "float.onnx"
    onnx.save(fragile(), path)
    samples = [{"h0": normal(1, 32, seed=seed)} for seed in range(6)]
    calibration = Calibration(samples[0], samples=reader(samples, [spec("h0", samples[0]["h0"])]))
    return path, calibration, OutputError(path, samples[:3])


def test_the_node_that_hurts_is_ranked_first(made: tuple[Path, Calibration, OutputError]) -> None:
    ranking = rank(made[0], SCHEME, made[1], made[2])
    assert ranking[0].nodes == ("layer2",)
    assert ranking[0].error > 20 * ranking[1].error
    assert sorted(node for item in ranking for node in item.nodes) == [f"layer{index}" for index in range(4)]


def test_only_that_node_stays_float_and_the_bar_holds(
    made: tuple[Path, Calibration, OutputError], tmp_path: Path
) -> None:
    path, calibration, error = made
    out, bar = tmp_path / "m.onnx", 0.01

    def holds(scheme: Scheme) -> bool:
        quantize(path, scheme, TARGET, calibration, out)
        return error.of(out) < bar

    assert not holds(SCHEME)
    found = rescue(SCHEME, rank(path, SCHEME, calibration, error), holds)
    assert found is not None
    assert found.exclude == ("layer2",)
    assert quantize(path, found, TARGET, calibration, out).coverage.float_nodes == ("layer2",)


def test_the_ranking_is_kept(made: tuple[Path, Calibration, OutputError], tmp_path: Path) -> None:
    lines: list[str] = []
    path, calibration, error = made
    first = rank(path, SCHEME, calibration, error, cache=tmp_path / "cache", say=lines.append)
    assert len(lines) == 4
    assert rank(path, SCHEME, calibration, error, cache=tmp_path / "cache", say=lines.append) == first
    assert len(lines) == 4
    rank(
        path, Scheme(method="static", per_channel=True), calibration, error, cache=tmp_path / "cache", say=lines.append
    )
    assert len(lines) == 8


def test_a_model_that_answers_nan_is_infinitely_wrong(made: tuple[Path, Calibration, OutputError]) -> None:
    model = fragile()
    model.graph.initializer[1].CopyFrom(tensor(np.full((32, 32), np.nan), "w1"))
    assert made[2].of(model.SerializeToString()) == float("inf")
    assert made[2].of(made[0]) == 0


def test_nothing_to_measure_on_is_refused(made: tuple[Path, Calibration, OutputError]) -> None:
    with pytest.raises(EdgeInferError, match="at least one request"):
        OutputError(made[0], [])


@given(st.integers(1, 40), st.integers(0, 45))
def test_the_fewest_groups_are_kept_float_in_few_trials(count: int, needed: int) -> None:
    ranking = [Sensitivity((f"n{index:02}",), float(count - index)) for index in range(count)]
    trials = 0

    def holds(scheme: Scheme) -> bool:
        nonlocal trials
        trials += 1
        return len(scheme.exclude) >= needed

    found = rescue(SCHEME, ranking, holds)
    if needed < count and count > 1:
        assert found is not None
        assert len(found.exclude) == max(1, needed)
    else:
        assert found is None
    assert trials <= 2 * count.bit_length() + 1
