"""Source models are made fit, or refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeinfer_tools import graph
from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.recipe import load_recipe
from edgeinfer_tools.runtimes import opset_of
from edgeinfer_tools.session import Runner
from tests.tools.conftest import RecipeMaker, conv_net, matmul_net


def test_two_nodes_of_one_name_are_both_named() -> None:
    model = conv_net()
    model.graph.node[2].name = "first"
    with pytest.raises(ModelRefused, match=r"2 nodes named 'first' .*Conv -> a; Conv -> y"):
        graph.check_source(model, "m.onnx")


@pytest.mark.parametrize("operator", ["QuantizeLinear", "QLinearConv", "MatMulNBits", "DynamicQuantizeLinear"])
def test_an_already_quantized_model_is_refused(operator: str) -> None:
    model = matmul_net()
    model.graph.node.append(helper.make_node(operator, ["y"], ["q"], name="quantized"))
    with pytest.raises(ModelRefused, match=f"already quantized .*{operator}.*start from the float model"):
        graph.check_source(model, "m.onnx")


@pytest.mark.parametrize("opset", [3, 99])
def test_an_opset_out_of_range_is_refused_with_the_numbers(opset: int) -> None:
    model = matmul_net()
    model.opset_import[0].version = opset
    with pytest.raises(ModelRefused, match=f"opset {opset}, this toolchain builds from 7 to 21"):
        graph.check_source(model, "m.onnx")


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"<html>404 Not Found</html>"])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelRefused, match=r"m\.onnx"):
        graph.load_source(path)


def test_an_old_opset_is_raised_without_changing_a_result() -> None:
    model = conv_net()
    model.opset_import[0].version = 11
    x = {"x": np.random.default_rng(0).normal(size=(1, 3, 16, 16)).astype(np.float32)}
    before = Runner(model.SerializeToString()).run(x)["y"]
    raised = graph.optimise(graph.to_opset(model, 18))
    assert opset_of(raised) == 18
    np.testing.assert_allclose(Runner(raised.SerializeToString()).run(x)["y"], before, atol=1e-6)


def test_only_standard_operators_are_left() -> None:
    normal = graph.finish(graph.optimise(graph.to_opset(conv_net(), 18)), ir_version=10)
    assert {item.domain for item in normal.opset_import} == {""}


def test_a_graph_that_the_runtime_rejects_is_refused() -> None:
    model = matmul_net()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 63
    with pytest.raises(ModelRefused, match=r"rejects the prepared graph|cannot be brought"):
        graph.optimise(graph.to_opset(model, 18))


def test_every_difference_from_the_contract_is_named(conv_recipe: RecipeMaker) -> None:
    recipe = load_recipe(conv_recipe())
    model = conv_net()
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 32
    model.graph.output[0].name = "z"
    with pytest.raises(ModelRefused) as caught:
        graph.check_contract(model, recipe)
    text = str(caught.value)
    for expected in (
        "'x' is FP64 in the graph and FP32 in the recipe",
        "'x' has shape [1, 3, 32, 16] in the graph",
        "output 'y' is in the recipe only",
        "output 'z' is in the graph only",
    ):
        assert expected in text


def test_half_precision_weights_are_seen() -> None:
    model = matmul_net()
    assert not graph.has_float16(model)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(2, np.float16), "half"))
    assert graph.has_float16(model)
    onnx.checker.check_model(model)
