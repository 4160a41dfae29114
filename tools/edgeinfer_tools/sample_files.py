"""Write a recipe's sample inputs as files: what demos and tests replay instead of a camera or a microphone."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.errors import ConfigError, Problem
from edgeinfer_tools.fetch import fetch
from edgeinfer_tools.recipe import load_recipe


def write_samples(recipe_folder: Path, output: Path) -> list[Path]:
    """Write what the recipe's `samples()` yields into `output` and return the files, in order.

    Raises:
        ConfigError: the recipe is wrong, or has no samples.
        FetchError: its data cannot be had.
    """
    recipe = load_recipe(recipe_folder)
    hook = recipe.hook("data", "samples")
    if hook is None:
        raise ConfigError(str(recipe_folder / "data.py"), (Problem("samples", "is missing"),))
    files = {item.key: fetch(item, folder=recipe.folder) for item in recipe.file.data}
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in hook(files):
        path = output / name
        path.write_bytes(content)
        written.append(path)
    return written
