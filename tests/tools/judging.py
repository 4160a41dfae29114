"""Judge a shipped recipe's schemes on a part of its data: what its build does, small enough for every test run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import onnx

from edgeinfer.artifact.board import Board
from edgeinfer_tools import recipe_code
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.evaluate import Evaluation, GateResult, evaluate, judge
from edgeinfer_tools.fetch import fetch
from edgeinfer_tools.prepare import prepare, requests_of
from edgeinfer_tools.quantize import quantize
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.recipe import Recipe, load_recipe
from edgeinfer_tools.samples import Stream
from edgeinfer_tools.scheme import Scheme, recipe_scheme
from edgeinfer_tools.session import Runner
from edgeinfer_tools.sources.obtain import obtain
from edgeinfer_tools.targets import target_of


@dataclass(slots=True)
class Bench:
    """One recipe, its float model prepared, ready to judge schemes."""

    recipe: Recipe
    files: dict[str, Path]
    model: Path
    board: Board
    every: int
    """Of so many streams of calibration and evaluation one is taken."""
    calibrations: list[Calibration] = field(default_factory=list)
    """The one that was made, so that the data are read once."""

    @classmethod
    def of(cls, folder: Path, board: Board, scratch: Path, *, every: int = 1) -> Bench:
        recipe = load_recipe(folder)
        files = {item.key: fetch(item, folder=recipe.folder) for item in recipe.file.data}
        made = prepare(recipe, obtain(recipe), requests_of(recipe, files, count=2))
        path = scratch / "float.onnx"
        onnx.save(made.model, str(path))
        return cls(recipe, files, path, board, every)

    def streams(self, function: str) -> Iterator[Stream]:
        hook = self.recipe.hook("data", function)
        assert hook is not None
        return islice(recipe_code.streams(self.recipe.code("data"), hook, self.files), 0, None, self.every)

    def scheme(self, variant: str) -> Scheme:
        found = next(item for item in self.recipe.file.variants if item.name == variant)
        return recipe_scheme(found.method, found.operators, found.scheme, target_of(self.board))

    def runner(self, model: Path) -> Runner:
        return Runner(model, state=self.recipe.state)

    def make(self, scheme: Scheme) -> Path:
        if not self.calibrations:
            probe = requests_of(self.recipe, self.files, count=1)[0]
            self.calibrations.append(Calibration(probe, self.recipe.state, self._samples))
        target = self.model.with_name("quantized.onnx")
        quantize(self.model, scheme, target_of(self.board), self.calibrations[0], target)
        return target

    def evaluate(self, model: Path) -> Evaluation:
        return evaluate(self.runner(model), self.runner(self.model), self.streams("evaluation"), self.recipe)

    def judge(self, model: Path) -> dict[str, GateResult]:
        return {item.metric: item for item in judge(self.evaluate(model), self.recipe.file.gates)}

    def _samples(self) -> CheckedSamples:
        return CheckedSamples(
            self.streams("calibration"),
            self.recipe.inputs,
            state=self.recipe.state,
            float_model=lambda: self.runner(self.model),
        )
