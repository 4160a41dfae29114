"""Steps are joined where the recipe says, or it is said what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import ConfigError, Problem
from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.recipe import load_recipe
from edgeinfer_tools.session import Runner
from edgeinfer_tools.steps.chain import bake
from edgeinfer_tools.steps.schema import parse_steps
from tests.tools.conftest import RecipeMaker
from tests.tools.steps.joined import Tensors, after, identity, recipe_of

FLOATS: Tensors = {"x": ("FP32", [1, 4])}
ROW = np.array([[3, -1, 2, 0]], np.float32)


def test_two_inputs_have_a_chain_each_and_a_third_goes_through() -> None:
    taken: Tensors = {"a": ("FP32", [1, 4]), "b": ("FP32", [1, 4]), "c": ("FP32", [1, 4])}
    steps: list[dict[str, Any]] = [
        {"step": "normalise", "scale": 2, "takes": ["left"], "gives": ["a"]},
        {"step": "normalise", "scale": 3, "takes": ["right"]},
        {"step": "normalise", "mean": [1], "gives": ["b"]},
    ]
    inputs: Tensors = {"left": ("UINT8", [1, 4]), "right": ("UINT8", [1, 4]), "c": ("FP32", [1, 4])}
    recipe = recipe_of(inputs, {"p": ("FP32", [1, 4])}, preprocess=steps)
    model = bake(identity(taken, {"p": "a", "q": "b", "r": "c"}), recipe)
    ones = np.ones((1, 4), np.uint8)
    found = Runner(model.SerializeToString()).run({"left": ones, "right": ones, "c": ROW})
    assert (found["p"][0, 0], found["q"][0, 0], found["r"][0, 0]) == (2, 2, 3)


def test_an_input_may_keep_its_name_although_it_changes() -> None:
    recipe = recipe_of(
        {"x": ("UINT8", [1, 4])}, {"y": ("FP32", [1, 4])}, preprocess=[{"step": "normalise", "scale": 0.5}]
    )
    model = bake(identity(FLOATS, {"y": "x"}), recipe)
    found = Runner(model.SerializeToString()).run({"x": np.full((1, 4), 8, np.uint8)})
    np.testing.assert_array_equal(found["y"], np.full((1, 4), 4, np.float32))


def test_outputs_are_those_of_the_recipe_in_its_order() -> None:
    steps = [{"step": "sigmoid", "takes": ["x"], "gives": ["p"]}, {"step": "rename", "takes": ["y"], "gives": ["raw"]}]
    found = after(steps, {"x": ROW, "y": ROW, "z": ROW}, {"raw": ("FP32", [1, 4]), "p": ("FP32", [1, 4])})
    np.testing.assert_array_equal(found["raw"], ROW)
    assert found["p"][0, 3] == 0.5


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([{"step": "softmax", "takes": ["z"]}], "softmax takes 'z', which nothing gives; there are x, x_in, y"),
        ([{"step": "softmax"}], r"softmax: say takes = \[\.\.\]"),
        ([{"step": "softmax", "takes": ["x"], "gives": ["other"]}], "no step gives output 'p'"),
        ([{"step": "top_k", "k": 1, "takes": ["x"], "gives": ["p"]}], "top_k gives 2 tensors, gives names 1"),
        ([{"step": "softmax", "axis": 3, "takes": ["x"]}], r"'x' has shape \[1, 4\] and no axis 3"),
        ([{"step": "softmax", "takes": ["x", "y"]}], "takes one tensor, 2 are named"),
    ],
)
def test_what_leads_nowhere_is_named(steps: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ModelRefused, match=words):
        after(steps, {"x": ROW, "y": ROW}, {"p": ("FP32", [1, 4])})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"step": "rotate"}, "one of resize, crop"),
        ({"step": "resize"}, "missing required field `size`"),
        ({"step": "resize", "size": [1, 2], "colour": 1}, "unknown field `colour`"),
        ({"step": "layout", "to": "hwc"}, "Invalid enum value 'hwc'"),
        ({}, "one of resize, crop"),
    ],
)
def test_a_step_that_cannot_be_right_is_refused_at_its_key(table: dict[str, Any], words: str) -> None:
    problems: list[Problem] = []
    assert parse_steps([table], "preprocess", problems) == []
    assert problems[0].path == "preprocess[0]"
    assert words in problems[0].message


def test_steps_need_an_opset_that_has_them(conv_recipe: RecipeMaker, tmp_path: Path) -> None:
    recipe = conv_recipe()
    step = 'opset = 13\npreprocess = [{ step = "normalise" }]\n'
    (recipe / "recipe.toml").write_text(step + (recipe / "recipe.toml").read_text())
    with pytest.raises(ConfigError, match="opset: 13 is below 18, which preprocess and postprocess need"):
        load_recipe(recipe)
