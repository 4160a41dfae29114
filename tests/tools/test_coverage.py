"""What stayed float is counted from the artefact, bodies of If and Loop included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgeinfer_tools.coverage import workload
from edgeinfer_tools.quantize import quantize
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.scheme import Scheme, default_scheme
from edgeinfer_tools.session import Runner
from edgeinfer_tools.targets import Target
from tests.tools.conftest import conv_net
from tests.tools.test_known_failures import model_of, normal, reader, spec, tensor

TARGET = Target("t", "x86_64", ("avx2",))


def with_branches() -> onnx.ModelProto:
    """x -> MatMul -> If(flag): MatMul with one matrix, else with another."""

    def branch(weight: str) -> onnx.GraphProto:
        node = helper.make_node("MatMul", ["h", weight], [f"y_{weight}"], name=f"in_{weight}")
        output = helper.make_tensor_value_info(f"y_{weight}", TensorProto.FLOAT, [1, 32])
        return helper.make_graph([node], f"branch_{weight}", [], [output], [tensor(normal(32, 32, seed=5), weight)])

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="before"),
        helper.make_node("If", ["flag"], ["y"], name="choose", then_branch=branch("a"), else_branch=branch("b")),
    ]
    inputs: dict[str, tuple[int, list[int | str]]] = {
        "x": (TensorProto.FLOAT, [1, 32]), "flag": (TensorProto.BOOL, []),
    }  # fmt: skip
    return model_of(nodes, inputs, {"y": [1, 32]}, [tensor(normal(32, 32), "w")])


@pytest.mark.parametrize(
    ("scheme", "stays"),
    [
        (Scheme(method="static"), ("in_a", "in_b")),
        (Scheme(method="dynamic"), ()),
        (Scheme(method="weights"), ()),
        (Scheme(method="fp16"), ()),
        (Scheme(method="keep"), ("before", "in_a", "in_b")),
    ],
    ids=lambda value: value.method if isinstance(value, Scheme) else "",
)
def test_bodies_are_quantized_or_counted(tmp_path: Path, scheme: Scheme, stays: tuple[str, ...]) -> None:
    source, out = tmp_path / "float.onnx", tmp_path / "m.onnx"
    onnx.save(with_branches(), source)
    probe = {"x": normal(1, 32), "flag": np.array(True)}
    contract = [spec("x", probe["x"]), spec("flag", probe["flag"], "BOOL")]
    samples = [{"x": normal(1, 32, seed=seed), "flag": np.array(seed % 2 == 0)} for seed in range(4)]
    made = quantize(source, scheme, TARGET, Calibration(probe, samples=reader(samples, contract)), out)
    assert sorted(made.coverage.float_nodes) == sorted(stays)
    assert made.coverage.bodies == len([name for name in stays if name.startswith("in_")])
    if scheme.method == "static":
        assert made.coverage.float_weights_share == pytest.approx(2 / 3)
        assert any("2 MatMul, 2 of them in bodies of If or Loop" in note for note in made.notes)
    for flag in (True, False):
        asked = {"x": probe["x"], "flag": np.array(flag)}
        want, got = Runner(source).run(asked)["y"], Runner(out).run(asked)["y"]
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_work_is_counted_as_by_hand() -> None:
    work = {item.node: item for item in workload(conv_net(), {"x": normal(1, 3, 16, 16)})}
    assert work["first"].macs == 8 * 16 * 16 * 3 * 9
    assert work["second"].macs == 8 * 16 * 16 * 8 * 9
    assert work["first"].weight_bytes == 4 * (8 * 3 * 9 + 8)


def test_shapes_that_are_open_come_from_a_real_run() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["where"], name="find"),
        helper.make_node("Cast", ["where"], ["f"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["f"], ["t"], name="turn", perm=[1, 0]),
        helper.make_node("MatMul", ["t", "w"], ["y"], name="m"),
    ]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, ["a", "b"])}, {"y": None}, [tensor(normal(2, 7), "w")])
    work = workload(model, {"x": np.eye(5, dtype=np.float32)})
    assert [item.macs for item in work] == [5 * 2 * 7]


def test_excluded_nodes_are_counted_most_work_first(tmp_path: Path) -> None:
    source = tmp_path / "float.onnx"
    onnx.save(conv_net(), source)
    probe = {"x": normal(1, 3, 16, 16)}
    calibration = Calibration(probe, samples=reader([probe], [spec("x", probe["x"])]))
    made = quantize(source, default_scheme("static", TARGET).without("first"), TARGET, calibration, tmp_path / "m.onnx")
    assert made.coverage.float_nodes == ("first",)
    assert made.coverage.float_macs_share == pytest.approx(3 / 11)
    assert made.coverage.by_operator["Conv"].float_nodes == 1


def test_half_precision_keeps_inputs_and_outputs_in_float32(tmp_path: Path) -> None:
    source, out = tmp_path / "float.onnx", tmp_path / "half.onnx"
    model = conv_net()
    onnx.save(model, source)
    probe = {"x": normal(1, 3, 16, 16)}
    made = quantize(source, Scheme(method="fp16"), TARGET, Calibration(probe), out)
    half = onnx.load(str(out))
    assert {item.type.tensor_type.elem_type for item in (*half.graph.input, *half.graph.output)} == {TensorProto.FLOAT}
    assert made.coverage.float_nodes == ()
    assert np.abs(Runner(out).run(probe)["y"] - Runner(source).run(probe)["y"]).max() < 0.02


def test_constants_that_half_precision_cannot_hold_are_told(tmp_path: Path) -> None:
    source = tmp_path / "float.onnx"
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="m")
    onnx.save(model_of([node], {"x": (TensorProto.FLOAT, [1, 2])}, {"y": None}, [tensor([[1e6], [1]], "w")]), source)
    made = quantize(source, Scheme(method="fp16"), TARGET, Calibration({"x": normal(1, 2)}), tmp_path / "half.onnx")
    assert any("1 constants are beyond half precision" in note for note in made.notes)
