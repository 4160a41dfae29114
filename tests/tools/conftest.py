"""Boards to build for, and small recipes to build."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeinfer.artifact.board import Board, load_board, shipped_boards

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "models"


@pytest.fixture
def board() -> Board:
    """An x86 board without VNNI."""
    return load_board(shipped_boards() / "generic-x86.toml")


@pytest.fixture
def vnni_board(board: Board) -> Board:
    return replace(board, name="vnni", cpu=replace(board.cpu, instruction_sets=["avx2", "avx512_vnni"]))


@pytest.fixture
def arm_board(board: Board) -> Board:
    return replace(board, name="arm", cpu=replace(board.cpu, architecture="aarch64", instruction_sets=["asimd"]))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh cache, and pip that cannot reach any registry."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("EDGEINFER_CACHE", str(cache))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return cache


def conv_net(seed: int = 0) -> onnx.ModelProto:
    """x[1,3,16,16] -> two convolutions -> y[1,8,16,16]."""
    rng = np.random.default_rng(seed)
    shapes = {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (8, 8, 3, 3), "b2": (8,)}
    weights = [numpy_helper.from_array(rng.normal(0, 0.3, s).astype(np.float32), n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "w2", "b2"], ["y"], name="second", pads=[1, 1, 1, 1]),
    ]
    return _model(nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 8, 16, 16]}, weights)


def matmul_net(size: int = 64, seed: int = 0) -> onnx.ModelProto:
    """x[1,size] -> matrix -> y[1,size]."""
    weights = np.random.default_rng(seed).normal(0, 1, (size, size)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="multiply")]
    return _model(nodes, {"x": [1, size]}, {"y": [1, size]}, [numpy_helper.from_array(weights, "w")])


def _model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int]],
    outputs: dict[str, list[int]],
    weights: list[onnx.TensorProto],
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


CONV_RECIPE = """\
name = "conv-net"
version = "0.1.0"
task = "test"
golden = 2

[source]
file = "model.onnx"

[[inputs]]
name = "x"
datatype = "FP32"
shape = [1, 3, 16, 16]

[[outputs]]
name = "y"
datatype = "FP32"
shape = [1, 8, 16, 16]

[[variants]]
name = "fp32"
method = "keep"

[[variants]]
name = "int8"
method = "static"
{variant}

[[gates]]
metric = "mean_abs_error"
output = "y"
maximum = {maximum}
"""

CONV_DATA = """\
import numpy as np
from edgeinfer_tools.samples import Stream

def _streams(seed, count):
    rng = np.random.default_rng(seed)
    for index in range(count):
        yield Stream(f"s{{index}}", [{{"x": rng.normal(size=(1, 3, 16, 16)).astype(np.float32)}}])

def calibration(files):
    {calibration}

def evaluation(files):
    return _streams(2, 6)
"""

RecipeMaker = Callable[..., Path]


@pytest.fixture
def conv_recipe(tmp_path: Path) -> RecipeMaker:
    """Write a recipe of a small convolutional net; quality gate and data can be spoiled."""

    def make(*, maximum: float = 0.2, variant: str = "", calibration: str = "return _streams(1, 8)") -> Path:
        folder = tmp_path / "conv-net"
        folder.mkdir()
        onnx.save(conv_net(), folder / "model.onnx")
        (folder / "recipe.toml").write_text(CONV_RECIPE.format(maximum=maximum, variant=variant))
        (folder / "data.py").write_text(CONV_DATA.format(calibration=calibration))
        return folder

    return make
