"""The documentation names every command, option, metric and recipe key, and its example is built."""

from __future__ import annotations

import argparse
import dataclasses
import re
import runpy
from pathlib import Path

import pytest

from edgeinfer_tools.cli import build_parser, main
from edgeinfer_tools.origin import ModuleInput, PackageFile, Source, Validation, Wheel
from edgeinfer_tools.recipe import METHODS, METRICS, Gate, RecipeFile, VariantRecipe
from edgeinfer_tools.steps.schema import STEPS, step_names
from tests.tools.conftest import MODELS, REPOSITORY

TEXT = (REPOSITORY / "docs" / "toolchain.md").read_text(encoding="utf-8")


def options() -> list[str]:
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = [f"edgeinfer-tools {name}" for name in commands.choices]
    for command in commands.choices.values():
        found += [f"`{flag}`" for action in command._actions for flag in action.option_strings if action.dest != "help"]
    return sorted(set(found))


@pytest.mark.parametrize("word", options())
def test_every_command_and_option_is_documented(word: str) -> None:
    assert word in TEXT


@pytest.mark.parametrize("word", [*METRICS, *METHODS, *sorted(path.name for path in MODELS.iterdir() if path.is_dir())])
def test_every_metric_method_and_recipe_is_documented(word: str) -> None:
    assert f"`{word}`" in TEXT


@pytest.mark.parametrize(
    "table", [RecipeFile, PackageFile, VariantRecipe, Gate, Source, ModuleInput, Wheel, Validation]
)
def test_every_recipe_key_is_documented(table: type) -> None:
    text = TEXT + (REPOSITORY / "docs" / "importing.md").read_text(encoding="utf-8")
    missing = [field.name for field in dataclasses.fields(table) if field.name not in text]
    assert not missing


@pytest.mark.parametrize("step", STEPS, ids=step_names())
def test_every_step_and_its_keys_are_documented(step: type) -> None:
    text = (REPOSITORY / "docs" / "importing.md").read_text(encoding="utf-8")
    tag = step.__struct_config__.tag  # type: ignore[attr-defined]
    assert f"`{tag}`" in text
    assert [name for name in step.__struct_fields__ if f"`{name}`" not in text] == []  # type: ignore[attr-defined]


@pytest.mark.system
@pytest.mark.slow
def test_the_example_recipe_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three files of the page, written as they stand there, make a bundle that proves itself."""
    files = re.findall(r"```(?:python|toml)\n# (sensor/\S+)\n(.*?)```", TEXT, re.DOTALL)
    assert [name for name, _ in files] == ["sensor/make_model.py", "sensor/recipe.toml", "sensor/data.py"]
    (tmp_path / "sensor").mkdir()
    for name, content in files:
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("sensor/make_model.py")
    assert main(["build", "sensor", "--board", "generic-x86", "-o", "bundle", "--seconds", "0.05"]) == 0
    assert main(["inspect", "bundle", "--verify"]) == 0
    assert "verified  every byte; 3 golden requests, 2 variants: ok" in capsys.readouterr().out
    assert main(["inspect", "bundle", "--verify", "--json"]) == 0
    assert '"verified": true' in capsys.readouterr().out
