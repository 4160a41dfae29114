from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.external_data import check_external_data, external_locations
from edgeinfer.errors import ArtifactError, ManifestInvalid
from tests.artifact.making import ONNX, make_bundle


def _external(location: str) -> Any:
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("offset", "0"), ("location", location), ("length", "16")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def _model(where: str, location: str) -> bytes:
    """Return a model that hides an external tensor in one of the places that can hold one."""
    tensor = _external(location)
    add = helper.make_node("Add", ["x", "w"], ["y"])
    value = helper.make_tensor_value_info
    graph = helper.make_graph([add], "g", [value("x", TensorProto.FLOAT, [4])], [value("y", TensorProto.FLOAT, [4])])
    functions = []
    if where == "initializer":
        graph.initializer.append(tensor)
    elif where == "constant":
        graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    elif where == "subgraph":
        inner = helper.make_graph([helper.make_node("Identity", ["w"], ["z"])], "inner", [], [], [tensor])
        graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner))
    elif where == "function":
        constant = helper.make_node("Constant", [], ["w"], value=tensor)
        functions = [helper.make_function("d", "f", [], ["w"], [constant], [helper.make_opsetid("", 17)])]
    elif where == "sparse":
        sparse = onnx.SparseTensorProto()
        sparse.values.CopyFrom(tensor)
        graph.sparse_initializer.append(sparse)
    elif where == "tensors attribute":
        graph.node.append(helper.make_node("Odd", [], ["o"], several=[tensor, tensor]))
    model = helper.make_model(graph, functions=functions, opset_imports=[helper.make_opsetid("", 17)])
    if where == "training":
        info = model.training_info.add()
        info.algorithm.initializer.append(tensor)
    return bytes(model.SerializeToString())


PLACES = ["initializer", "constant", "subgraph", "function", "sparse", "tensors attribute", "training"]


@pytest.mark.parametrize("where", PLACES)
def test_finds_external_data_in(where: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(_model(where, "weights.bin"))
    assert external_locations(path) == {"weights.bin"}
    check_external_data(path, {"model/m.onnx", "model/weights.bin"}, PurePosixPath("model/m.onnx"))


def test_a_model_that_is_whole_has_none(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(_model("nowhere", ""))
    assert external_locations(path) == set()


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../x", "other.bin", "", "./w.bin/../../x"])
def test_refuses_data_outside_the_bundle_at(location: str, tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", model=_model("initializer", location), files={"model/w.bin": b"0" * 16})
    (tmp_path / "secret.bin").write_bytes(b"0" * 16)
    with pytest.raises(ArtifactError, match="not a file of this bundle"):
        verify_bundle(tmp_path / "b")


def test_takes_data_inside_the_bundle(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", model=_model("initializer", "./w.bin"), files={"model/w.bin": b"0" * 16})
    verify_bundle(tmp_path / "b")


@pytest.mark.parametrize(
    "data",
    [b"", bytes(4096), ONNX[:-1], b"<html>404</html>", b"version https://git-lfs.github.com/spec/v1\noid sha256:00"],
    ids=["empty", "zeros", "half", "html", "git-lfs pointer"],
)
def test_refuses_what_is_no_model(data: bytes, tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", model=data)
    with pytest.raises(ManifestInvalid, match="not an ONNX model"):
        verify_bundle(tmp_path / "b")


@given(st.binary(max_size=300))
def test_any_bytes_are_judged_without_a_crash(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.onnx"
    path.write_bytes(data)
    with contextlib.suppress(ManifestInvalid):
        external_locations(path)


def test_nesting_is_bounded(tmp_path: Path) -> None:
    """A graph in an attribute in a node in a graph …: a stack overflow in others."""

    def wrap(tag: int, body: bytes) -> bytes:
        length, size = len(body), b""
        while length > 0x7F:
            size += bytes([length & 0x7F | 0x80])
            length >>= 7
        return bytes([tag << 3 | 2]) + size + bytes([length]) + body

    graph = b""
    for _ in range(200):
        graph = wrap(1, wrap(5, wrap(6, graph)))
    path = tmp_path / "deep.onnx"
    path.write_bytes(wrap(7, graph))
    with pytest.raises(ManifestInvalid, match="nested deeper"):
        external_locations(path)
