"""Write a recipe's sample inputs as files: what demos and tests replay instead of a camera or a microphone."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.errors import ConfigError, Problem
from edgeinfer_tools import recipe_code
from edgeinfer_tools.fetch import fetch
from edgeinfer_tools.recipe import load_recipe


def write_samples(recipe_folder: Path, output: Path) -> list[Path]:
    """Write what the recipe's `samples()` yields into `output` and return the files, in order.

    Raises:
        ConfigError: the recipe is wrong, or has no samples.
        RecipeCodeFailed: its data.py raised something.
        FetchError: its data cannot be had.
    """
    recipe = load_recipe(recipe_folder)
    hook = recipe.hook("data", "samples")
    if hook is None:
        raise ConfigError(str(recipe.code("data")), (Problem("samples", "is missing"),))
    files = {item.key: fetch(item, folder=recipe.folder) for item in recipe.file.data}
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for item in recipe_code.items(recipe.code("data"), hook, files):
        with recipe_code.blamed_on(recipe.code("data"), line=recipe_code.first_line(hook)):
            name, content = item
            path, data = output / name, bytes(memoryview(content))
        path.write_bytes(data)
        written.append(path)
    return written
