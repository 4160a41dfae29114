"""A recipe is read completely, or refused with everything that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.errors import ConfigError
from edgeinfer_tools.recipe import load_recipe
from tests.tools.conftest import MODELS

WRONG = """\
name = "x"
version = "1.0.0"
task = "test"
colour = "red"

[source]
file = "model.onnx"
pypi = "package"

[[inputs]]
name = "x"
datatype = "FP32"

[[outputs]]
name = "y"
datatype = "FP32"
shape = [1]

[[variants]]
name = "int8"
method = "magic"

[[variants]]
name = "int8"
method = "keep"

[[gates]]
metric = "iou"
output = "z"
minimum = 1
maximum = 2
"""


@pytest.mark.parametrize("name", sorted(path.parent.name for path in MODELS.glob("*/recipe.toml")))
def test_the_recipes_that_we_ship_are_right(name: str) -> None:
    recipe = load_recipe(MODELS / name)
    assert recipe.file.name == name
    for item in (recipe.file.source, *recipe.file.data):
        assert item is None or (item.sha256 and (item.pypi or item.debian)), (
            "offline builds need a digest and an origin"
        )


def test_all_problems_are_told_at_once_with_their_paths(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(WRONG.replace('colour = "red"\n', ""))
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path)
    found = {problem.path for problem in caught.value.problems}
    assert {"inputs[0]", "variants[0].method", "variants[1].name", "source.pypi", "source.sha256", "gates[0]",
            "gates[0].output"} <= found  # fmt: skip


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(WRONG)
    with pytest.raises(ConfigError, match="colour: unknown key"):
        load_recipe(tmp_path)


def test_a_recipe_without_source_and_graph_is_refused(tmp_path: Path) -> None:
    text = (MODELS / "support-intent" / "recipe.toml").read_text()
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"source: is missing, and there is no graph\.py"):
        load_recipe(tmp_path)
