"""A source becomes a graph that computes the same, in the form that devices read; or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer_tools import graph, model_file, shapes, simplify
from edgeinfer_tools.build import Options, build
from edgeinfer_tools.cli import main
from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.prepare import prepare, requests_of, shared_weights
from edgeinfer_tools.recipe import Recipe, load_recipe
from edgeinfer_tools.runtimes import READS, check_runtime, reads
from edgeinfer_tools.sources.obtain import obtain
from tests.tools.conftest import RecipeMaker, conv_net, matmul_net

RANDOM = np.random.default_rng(0)


def prepared(recipe: Recipe, model: onnx.ModelProto) -> Any:
    onnx.save(model, recipe.folder / "model.onnx")
    return prepare(recipe, obtain(recipe), requests_of(recipe, {}))


# A14: versions


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "ir_version", 99), r"IR version 99, this toolchain reads up to \d+: export it again"),
        (lambda m: setattr(m, "ir_version", 1), "IR version 1, this toolchain reads from 3"),
        (lambda m: setattr(m.opset_import[0], "version", 99), "opset 99, this toolchain builds from 7 to 21; .* lower"),
        (lambda m: setattr(m.opset_import[0], "version", 3), "opset 3, this toolchain builds from 7 to 21; .* higher"),
    ],
    ids=["IR 99", "IR 1", "opset 99", "opset 3"],
)
def test_a14_versions_out_of_range_are_refused_in_words(
    conv_recipe: RecipeMaker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[onnx.ModelProto], None],
    words: str,
) -> None:
    recipe, model = conv_recipe(), conv_net()
    change(model)
    (recipe / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelRefused, match=words):
        graph.load_source(recipe / "model.onnx")
    assert main(["build", str(recipe), "--board", "generic-x86", "-o", str(tmp_path / "out" / "b")]) == 65
    assert ".cc" not in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a14_an_opset_that_the_devices_runtime_does_not_read_is_refused_before_anything_is_done() -> None:
    with pytest.raises(ModelRefused, match=r"opset is 21, and onnxruntime 1\.16\.3.*reads up to 19: set opset = 19"):
        check_runtime(21, "1.16.3")
    check_runtime(19, "1.16.3")
    check_runtime(21, "")
    assert [release for release, _, _ in READS] == sorted(release for release, _, _ in READS)


def test_a14_the_graph_is_written_in_the_format_that_the_devices_runtime_reads(conv_recipe: RecipeMaker) -> None:
    recipe = conv_recipe()
    (recipe / "recipe.toml").write_text('onnxruntime = "1.15.0"\n' + (recipe / "recipe.toml").read_text())
    made = prepared(load_recipe(recipe), conv_net()).model
    assert (made.ir_version, reads("1.15.0")) == (9, (19, 9))


@pytest.mark.parametrize("content", [b"", b"<html>404 Not Found</html>"], ids=["empty", "a page"])
def test_what_is_no_model_is_refused_by_the_command(
    conv_recipe: RecipeMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    recipe = conv_recipe()
    (recipe / "model.onnx").write_bytes(content)
    assert main(["build", str(recipe), "--board", "generic-x86", "-o", str(tmp_path / "out" / "b")]) == 65
    assert "model.onnx" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


# A4: operators of one runtime


def test_a4_a_graph_that_was_optimised_for_one_runtime_is_refused_with_the_node() -> None:
    model = matmul_net()
    model.graph.node[0].op_type, model.graph.node[0].domain = "FusedMatMul", "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(ModelRefused, match=r"uses FusedMatMul of com\.microsoft \(node 'multiply'\): it was optimised"):
        graph.check_source(model, "m.onnx")


# A12: tied weights


def test_a12_weights_that_several_nodes_share_are_reported() -> None:
    nodes = [
        helper.make_node("Gather", ["e", "ids"], ["h"], name="embed"),
        helper.make_node("Gemm", ["h", "e"], ["y"], name="head", transB=1),
    ]
    made = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("ids", TensorProto.INT64, [4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 64])],
            [numpy_helper.from_array(RANDOM.normal(size=(64, 32)).astype(np.float32), "e")],
        )
    )
    assert shared_weights(made) == [{"weight": "e", "used_by": ["Gather embed", "Gemm head"]}]


# A13: models over the limit of one file


def constants_net() -> onnx.ModelProto:
    """x[1,3,16,16] -> y[1,8,16,16], its weights partly in Constant nodes, as exporters leave them."""
    model = conv_net()
    big = numpy_helper.from_array(RANDOM.normal(0, 0.1, (1 << 11, 256)).astype(np.float32), "")  # 2 MB
    nodes = [
        helper.make_node("Constant", [], ["big"], name="big", value=big),
        helper.make_node("ReduceMean", ["big"], ["mean"], name="mean", keepdims=0),
        *model.graph.node[:-1],
        helper.make_node("Conv", ["r", "w2", "b2"], ["c"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("ReduceMax", ["r"], ["m"], name="max", keepdims=1),
        helper.make_node("Mul", ["m", "big"], ["spread"], name="spread"),
        helper.make_node("ReduceMean", ["spread"], ["shift"], name="shift", keepdims=0),
        helper.make_node("Add", ["c", "shift"], ["y"], name="add"),
    ]
    del nodes[1], model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def test_a13_weights_in_constant_nodes_count() -> None:
    model = constants_net()
    assert model_file.weights_bytes(model) > 1 << 21
    assert model_file.is_large(model, 1 << 21)
    assert not model_file.is_large(conv_net(), 1 << 21)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("opset", [11, 18])
def test_a13_a_model_over_the_limit_becomes_a_bundle_with_its_weights_beside(
    conv_recipe: RecipeMaker, board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opset: int
) -> None:
    monkeypatch.setattr(model_file, "EXTERNAL_FROM_BYTES", 1 << 20)
    recipe = conv_recipe()
    text = (recipe / "recipe.toml").read_text()
    int8 = text.index('[[variants]]\nname = "int8"')
    (recipe / "recipe.toml").write_text(text[:int8] + text[text.index("[[gates]]") :])
    model = constants_net()
    model.opset_import[0].version = opset
    onnx.save(model, recipe / "model.onnx")
    result = build(load_recipe(recipe), board, tmp_path / "out" / "bundle", Options(seconds=0.05), lambda _: None)
    manifest, _ = verify_bundle(result.bundle)
    data = [name for name in manifest.files if name.endswith(".data")]
    assert len(data) == 1
    assert manifest.files[data[0]].size_bytes >= 1 << 21
    assert manifest.files["model/fp32.onnx"].size_bytes < 1 << 20
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []
    (result.bundle / data[0]).unlink()
    with pytest.raises(Exception, match=r"\.data"):
        verify_bundle(result.bundle)


def test_a13_weights_that_are_not_beside_their_model_are_named(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelRefused, match=r"keeps weights in w\.bin, which is not beside it"):
        graph.load_source(tmp_path / "m.onnx")


# A20: dimensions


def dynamic_net() -> onnx.ModelProto:
    model = matmul_net()
    for item in (model.graph.input[0], model.graph.output[0]):
        item.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


def test_a20_a_batch_that_is_baked_cannot_vary_in_the_recipe(conv_recipe: RecipeMaker) -> None:
    recipe = conv_recipe()
    text = (recipe / "recipe.toml").read_text()
    (recipe / "recipe.toml").write_text(
        text.replace("shape = [1, 3, 16, 16]", "shape = [-1, 3, 16, 16]\nmax_shape = [8, 3, 16, 16]", 1)
    )
    with pytest.raises(ModelRefused, match=r"dimension 0 of input 'x' is fixed to 1 in the graph.*write 1"):
        prepared(load_recipe(recipe), conv_net())


def test_dimensions_are_fixed_by_name_and_by_the_recipes_shapes() -> None:
    model = dynamic_net()
    shapes.fix_dimensions(model, {"batch": 3})
    assert [item.type.tensor_type.shape.dim[0].dim_value for item in (*model.graph.input, *model.graph.output)] == [
        3,
        3,
    ]
    with pytest.raises(ModelRefused, match=r"no dynamic dimension 'btach' \(it has: batch\)"):
        shapes.fix_dimensions(dynamic_net(), {"btach": 1})
    narrowed = dynamic_net()
    shapes.narrow(narrowed, {"x": [1, 64]})
    assert narrowed.graph.output[0].type.tensor_type.shape.dim[0].dim_value == 1
    free = dynamic_net()
    shapes.narrow(free, {"x": [-1, 64]})
    assert free.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_shapes_that_nobody_can_infer_cost_a_note_and_nothing_else() -> None:
    model = matmul_net()
    inferred, note = shapes.infer(model)
    assert (note, len(inferred.graph.node)) == ("", 1)
    model.graph.node[0].op_type, model.graph.node[0].domain = "Frobnicate", "org.example"
    same, _ = shapes.infer(model)
    assert same.graph.node[0].op_type == "Frobnicate"


# Simplification is proved


def test_a_pass_that_changes_an_answer_or_fails_is_left_out_with_a_note() -> None:
    model, requests = matmul_net(), [{"x": RANDOM.normal(size=(1, 64)).astype(np.float32)}]

    def spoil(made: onnx.ModelProto) -> onnx.ModelProto:
        weights = numpy_helper.to_array(made.graph.initializer[0]) * np.float32(1.01)
        made.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights, "w"))
        return made

    def explode(_: onnx.ModelProto) -> onnx.ModelProto:
        raise IndexError("/src/thing.cc:99 boom")

    spoiled = simplify.attempt("the pass", spoil, model, requests, [])
    assert spoiled.model is model
    assert "the pass changed an answer, so it was left out: output 'y' differs by up to" in spoiled.note
    exploded = simplify.attempt("the pass", explode, model, requests, [])
    assert (exploded.model is model, exploded.note) == (True, "the pass was left out: IndexError: boom")


def test_dead_ends_and_repetitions_go() -> None:
    model = conv_net()
    model.graph.node.insert(2, helper.make_node("Identity", ["r"], ["r2"], name="through"))
    model.graph.node.append(helper.make_node("Relu", ["a"], ["nobody"], name="dead"))
    model.graph.node[3].input[0] = "r2"
    requests = [{"x": RANDOM.normal(size=(1, 3, 16, 16)).astype(np.float32)}]
    passed = simplify.attempt("onnxslim", simplify.slim, model, requests, [])
    assert passed.note == ""
    assert len(passed.model.graph.node) <= 3
