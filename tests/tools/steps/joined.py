"""Join steps to a model that does nothing, and run what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.errors import Problem
from edgeinfer_tools.recipe import Recipe, RecipeFile
from edgeinfer_tools.samples import Array
from edgeinfer_tools.session import Runner
from edgeinfer_tools.steps.answers import ONNX_OF_OIP
from edgeinfer_tools.steps.chain import bake
from edgeinfer_tools.steps.schema import parse_steps

Tensors = Mapping[str, tuple[str, list[int]]]
"""Datatype and shape by name."""


def recipe_of(
    inputs: Tensors,
    outputs: Tensors,
    *,
    preprocess: list[dict[str, Any]] | None = None,
    postprocess: list[dict[str, Any]] | None = None,
) -> Recipe:
    """Return a recipe of steps alone."""
    problems: list[Problem] = []
    specs = [
        [
            TensorSpec(name=n, datatype=d, shape=s, max_shape=[1 << 12] * len(s) if -1 in s else [])
            for n, (d, s) in part.items()
        ]
        for part in (inputs, outputs)
    ]
    before = parse_steps(preprocess or [], "preprocess", problems)
    after = parse_steps(postprocess or [], "postprocess", problems)
    assert problems == []
    file = RecipeFile("m", "1.0.0", "test", [], [], [], [])
    return Recipe(Path("m"), file, specs[0], specs[1], [], None, before, after)


def identity(inputs: Tensors, outputs: Mapping[str, str]) -> onnx.ModelProto:
    """Return a model whose outputs are its inputs: `outputs` says which."""
    graph = helper.make_graph(
        [helper.make_node("Identity", [source], [name], name=f"id.{name}") for name, source in outputs.items()],
        "identity",
        [helper.make_tensor_value_info(n, ONNX_OF_OIP[d], [x if x >= 0 else f"{n}{i}" for i, x in enumerate(s)]) for n, (d, s) in inputs.items()],
        [helper.make_tensor_value_info(n, ONNX_OF_OIP[inputs[s][0]], [x if x >= 0 else f"{s}{i}" for i, x in enumerate(inputs[s][1])]) for n, s in outputs.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def before(steps: list[dict[str, Any]], image: Array, shape: list[int], *, dynamic: bool = True) -> Array:
    """Return what a model is fed when a picture goes through preprocessing steps; `shape` is what it takes."""
    kind = "UINT8" if image.dtype.kind == "u" else "FP32"
    fed = (
        "FP32"
        if kind == "FP32" or any(step["step"] == "normalise" or step.get("order") == "grey" for step in steps)
        else kind
    )
    taken = [1, -1, -1, image.shape[3]] if dynamic else list(image.shape)
    recipe = recipe_of({"image": (kind, taken)}, {"y": (fed, shape)}, preprocess=steps)
    model = bake(identity({"x": (fed, shape)}, {"y": "x"}), recipe)
    onnx.checker.check_model(model, full_check=True)
    assert [item.name for item in model.graph.input] == ["image"]
    return Runner(model.SerializeToString()).run({"image": image})["y"]


def after(
    steps: list[dict[str, Any]], tensors: Mapping[str, Array], outputs: Tensors, kinds: Mapping[str, str] | None = None
) -> dict[str, Array]:
    """Return the outputs when a model gives `tensors`."""
    shapes: Tensors = {n: ((kinds or {}).get(n, "FP32"), list(a.shape)) for n, a in tensors.items()}
    recipe = recipe_of({f"{n}_in": shapes[n] for n in tensors}, outputs, postprocess=steps)
    model = bake(identity({f"{n}_in": shapes[n] for n in tensors}, {n: f"{n}_in" for n in tensors}), recipe)
    onnx.checker.check_model(model, full_check=True)
    assert [item.name for item in model.graph.output] == list(outputs)
    return Runner(model.SerializeToString()).run({f"{n}_in": a for n, a in tensors.items()})
