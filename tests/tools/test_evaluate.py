"""The metrics are what their names say, and what cannot be judged is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.artifact.manifest import Classes, TensorSpec
from edgeinfer_tools.evaluate import evaluate, judge, quality
from edgeinfer_tools.faults import DataRefused, GateFailed
from edgeinfer_tools.recipe import Gate, Recipe, RecipeFile, VariantRecipe
from edgeinfer_tools.samples import Array, Stream
from edgeinfer_tools.session import Runner


class Echo(Runner):
    """Answers its input, changed by a function."""

    def __init__(self, offset: Array | float = 0.0) -> None:
        self.offset = offset

    def reset(self) -> None:
        pass

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": (inputs["x"] + self.offset).astype(np.float32)}


def recipe(*gates: Gate) -> Recipe:
    spec = TensorSpec(name="x", datatype="FP32", shape=[-1], max_shape=[8])
    file = RecipeFile(name="t", version="1.0.0", task="t", inputs=[], outputs=[], gates=list(gates),
                      variants=[VariantRecipe("v", "keep")])  # fmt: skip
    outputs = [TensorSpec(name="y", datatype="FP32", shape=[-1], max_shape=[8])]
    return Recipe(Path(), file, [spec], outputs, [], Classes(output="y", labels=["no", "yes"], threshold=0.5))


def stream(label: str, *requests: list[float]) -> Stream:
    return Stream("s", [{"x": np.array(request, np.float32)} for request in requests], label)


def value_of(gate: Gate, variant: Runner, *streams: Stream) -> float:
    found = recipe(gate)
    return judge(evaluate(variant, Echo(), streams, found), found.file.gates)[0].value


def test_iou_is_intersection_over_union_of_all_requests() -> None:
    gate = Gate("iou", minimum=0.0, output="y", threshold=0.5)
    # float: 1 1 0 0, variant: 0 1 1 0; then equal ones: 1 1.
    shifted = Echo(np.array([-1, 0, 1, 0]))
    assert value_of(gate, shifted, stream("", [1, 1, 0, 0])) == pytest.approx(1 / 3)
    assert value_of(gate, Echo(), stream("", [1, 1, 0, 0])) == 1.0


def test_errors_are_absolute() -> None:
    off = Echo(np.array([0.5, -0.25]))
    assert value_of(Gate("max_abs_error", maximum=1, output="y"), off, stream("", [1, 1])) == pytest.approx(0.5)
    assert value_of(Gate("mean_abs_error", maximum=1, output="y"), off, stream("", [1, 1])) == pytest.approx(0.375)


def test_label_agreement_counts_requests() -> None:
    gate = Gate("label_agreement", minimum=1)
    assert value_of(gate, Echo(0.2), stream("", [0.4], [0.9], [0.1], [0.31])) == pytest.approx(0.5)


def test_label_accuracy_counts_streams_and_one_positive_request_makes_a_stream_positive() -> None:
    gate = Gate("label_accuracy", minimum=1)
    streams = [stream("yes", [0.1], [0.9], [0.1]), stream("no", [0.1]), stream("no", [0.8]), stream("yes", [0.2])]
    assert value_of(gate, Echo(), *streams) == pytest.approx(0.5)


def test_data_that_cannot_decide_a_gate_are_refused() -> None:
    with pytest.raises(DataRefused, match="iou means nothing"):
        value_of(Gate("iou", minimum=0.5, output="y"), Echo(), stream("", [0, 0]))
    with pytest.raises(DataRefused, match="needs evaluation streams with labels"):
        value_of(Gate("label_accuracy", minimum=0.5), Echo(), stream("", [0]))
    with pytest.raises(DataRefused, match="yields no request"):
        value_of(Gate("label_agreement", minimum=0.5), Echo())


def test_an_output_that_is_not_finite_fails_by_name() -> None:
    with pytest.raises(GateFailed, match=r"s\[0\]: output 'y' holds NaN or infinity"):
        value_of(Gate("max_abs_error", maximum=1, output="y"), Echo(np.nan), stream("", [1]))


@pytest.mark.parametrize("metric", ["max_abs_error", "mean_abs_error", "label_agreement", "cosine"])
def test_a_variant_that_loses_numbers_fails_also_where_not_a_number_is_an_answer(metric: str) -> None:
    gate = Gate(metric, maximum=1, output="y") if metric.endswith("error") else Gate(metric, minimum=0, output="y")
    found = recipe(gate)
    outputs = [TensorSpec(name="y", datatype="FP32", shape=[-1], max_shape=[8], allow_non_finite=True)]
    found = replace(found, outputs=outputs)
    with pytest.raises(GateFailed, match=r"s\[0\]: 1 of 2 values of output 'y' are NaN or infinite, the float model's"):
        evaluate(Echo(np.array([0, np.nan])), Echo(), [stream("", [1, 1])], found)
    same = Echo(np.array([0, np.nan]))
    evaluate(same, same, [stream("", [1, 1])], found)


def test_another_shape_than_the_float_model_fails() -> None:
    with pytest.raises(GateFailed, match=r"shape \(2, 1\), the float model gives \(1,\)"):
        value_of(Gate("max_abs_error", maximum=1, output="y"), Echo(np.zeros((2, 1))), stream("", [1]))


@pytest.mark.parametrize(("maximum", "passes"), [(0.5, True), (0.4, False)])
def test_a_gate_includes_its_bound_and_says_the_numbers(maximum: float, passes: bool) -> None:
    found = recipe(Gate("max_abs_error", maximum=maximum, output="y"))
    verdict = judge(evaluate(Echo(0.5), Echo(), [stream("", [1])], found), found.file.gates)[0]
    assert verdict.passed is passes
    assert str(verdict) == f"max_abs_error(y) is 0.5000, the gate is <= {maximum:g}"


def test_quality_is_one_for_the_float_model_whatever_the_metric() -> None:
    for gate in (Gate("max_abs_error", maximum=1, output="y"), Gate("label_agreement", minimum=0.5)):
        found = recipe(gate)
        assert quality(judge(evaluate(Echo(), Echo(), [stream("", [1])], found), found.file.gates)[0]) == 1.0
