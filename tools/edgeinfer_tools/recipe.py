"""Read a recipe: models/NAME/recipe.toml and the Python beside it.

Owns the recipe's schema. The recipe says where the model and the data come from, what the device will be asked
(inputs, outputs, state), which variants to build and how good they must be. `[source]` and `[[data]]` are `origin`'s,
preprocess and postprocess `steps.schema`'s. Two optional Python files say the rest:

- graph.py: `make_graph() -> onnx.ModelProto` makes the model (no `[source]` then); `prepare(model) -> model` changes
  it as no step can.
- data.py: `calibration(files)`, `evaluation(files)` and `samples(files)`, see `edgeinfer_tools.samples`.

They are the recipe's author's code and run with the author's rights: build only recipes that you trust.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.artifact.manifest import Classes, StateSpec, TensorSpec
from edgeinfer.artifact.provider import CPU_PROVIDER, check_providers
from edgeinfer.errors import ConfigError, Problem
from edgeinfer.toml_file import load_toml, make_converter, structure
from edgeinfer_tools.metrics import SCORES, WITHOUT_OUTPUT
from edgeinfer_tools.origin import PackageFile, Source, check_package, check_source
from edgeinfer_tools.recipe_code import blamed_on
from edgeinfer_tools.steps.schema import STEPS_OPSET, AnyStep, parse_steps

RECIPE_FILE = "recipe.toml"
METHODS = ("keep", "static", "dynamic", "weights", "fp16")
METRICS = ("label_agreement", "label_accuracy", "iou", "max_abs_error", "mean_abs_error", "macro_f1", *SCORES)


@dataclass(frozen=True, slots=True)
class VariantRecipe:
    """One form of the model to build."""

    name: str
    method: str
    """`keep` (as prepared), `static`, `dynamic`, `weights` or `fp16`: see `edgeinfer_tools.scheme`."""
    operators: list[str] = field(default_factory=list)
    """Operator types to quantize; empty: what the method does by default."""
    scheme: dict[str, Any] = field(default_factory=dict)
    """Parameters of the scheme that differ from what suits the board, as `edgeinfer_tools.scheme.Scheme` has them."""
    keep_sensitive: bool = False
    """When it misses a gate, keep in float what measurably costs most quality, until the gates hold."""
    optional: bool = False
    """A variant that misses its gates is left out, with a note in the report, instead of failing the build."""
    tolerance: float = 1e-6
    """Least golden tolerance; what was measured raises it (see docs/toolchain.md)."""
    providers: list[str] = field(default_factory=lambda: [CPU_PROVIDER])
    """Execution providers in order of precedence, see docs/accelerators.md; they must be installed here too."""
    provider_options: dict[str, Any] = field(default_factory=dict)
    """Options of each, a table of texts."""
    source: Source | None = None
    """Another network of the same contract, a smaller one say, that it is made from instead of the recipe's."""

    @property
    def quantized(self) -> bool:
        """Whether it computes with integers."""
        return self.method not in {"keep", "fp16"}


@dataclass(frozen=True, slots=True)
class Gate:
    """What every variant must reach."""

    metric: str
    minimum: float | None = None
    maximum: float | None = None
    output: str = ""
    """Output that is compared; not for label metrics."""
    threshold: float = 0.5
    """`iou`: where the output is binarised."""


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """The whole of recipe.toml."""

    name: str
    version: str
    task: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    variants: list[VariantRecipe]
    gates: list[Gate]
    """The first one is the variant's quality."""
    source: Source | None = None
    preprocess: list[dict[str, Any]] = field(default_factory=list)
    """Steps from the recipe's inputs to the model's, see `edgeinfer_tools.steps.schema`."""
    postprocess: list[dict[str, Any]] = field(default_factory=list)
    """Steps from the model's outputs to the recipe's."""
    dimensions: dict[str, Any] = field(default_factory=dict)
    """Sizes of the model's dynamic dimensions, by the names that the graph has for them."""
    data: list[PackageFile] = field(default_factory=list)
    state: list[dict[str, Any]] = field(default_factory=list)
    classes: dict[str, Any] | None = None
    deadline_ms: float | None = None
    description: str = ""
    license: str = ""
    revision: str = ""
    budget: dict[str, Any] = field(default_factory=dict)
    """What the bundle may cost, see `edgeinfer_tools.search.budget`: the build then searches for the best variants."""
    golden: int = 3
    """How many of the evaluation's first requests become golden ones."""
    opset: int = 18
    onnxruntime: str = ""
    """Lowest version that a device must have, where that is below the one that builds; the device's probe proves it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe that was read and checked."""

    folder: Path
    file: RecipeFile
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    state: list[StateSpec]
    classes: Classes | None
    preprocess: list[AnyStep] = field(default_factory=list)
    postprocess: list[AnyStep] = field(default_factory=list)

    def code(self, module: str) -> Path:
        """Return where a Python file of the recipe is, or would be."""
        return self.folder / f"{module}.py"

    def hook(self, module: str, function: str) -> Callable[..., Any] | None:
        """Return a function of the Python file beside the recipe, or None when there is none.

        Call it through `recipe_code`, which says where it went wrong.

        Raises:
            RecipeCodeFailed: the file cannot be imported.
        """
        path = self.code(module)
        if not path.is_file():
            return None
        spec = importlib.util.spec_from_file_location(f"recipe_{self.folder.name.replace('-', '_')}_{module}", path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded  # dataclasses look their module up
        with blamed_on(path):
            spec.loader.exec_module(loaded)
        found = getattr(loaded, function, None)
        return found if callable(found) else None


def load_recipe(folder: Path) -> Recipe:
    """Read `folder`/recipe.toml; the file itself may be named too.

    Raises:
        ConfigError: with every problem found.
    """
    if folder.name == RECIPE_FILE and folder.is_file():
        folder = folder.parent
    path = folder / RECIPE_FILE
    converter = make_converter()
    converter.register_structure_hook_func(lambda kind: kind in {dict[str, Any], Any}, lambda value, _: value)
    parsed = structure(load_toml(path), RecipeFile, str(path), converter)
    problems: list[Problem] = []
    inputs = _specs(parsed.inputs, TensorSpec, "inputs", problems)
    outputs = _specs(parsed.outputs, TensorSpec, "outputs", problems)
    state = _specs(parsed.state, StateSpec, "state", problems)
    classes = _specs([parsed.classes] if parsed.classes is not None else [], Classes, "classes", problems)
    before = parse_steps(parsed.preprocess, "preprocess", problems)
    after = parse_steps(parsed.postprocess, "postprocess", problems)
    recipe = Recipe(folder, parsed, inputs, outputs, state, classes[0] if classes else None, before, after)
    problems += _check(recipe)
    if problems:
        raise ConfigError(str(path), tuple(problems))
    return recipe


def _specs(tables: list[dict[str, Any]], kind: Any, where: str, problems: list[Problem]) -> list[Any]:
    """Convert tables to the manifest's own structs, so that a recipe cannot say what a manifest can't."""
    found = []
    for index, table in enumerate(tables):
        try:
            found.append(msgspec.convert(table, kind))
        except msgspec.ValidationError as error:
            problems.append(Problem(f"{where}[{index}]", str(error)))
    return found


def _check(recipe: Recipe) -> list[Problem]:
    file = recipe.file
    problems = []
    outputs = {spec.name for spec in recipe.outputs}
    if not file.variants:
        problems.append(Problem("variants", "needs at least one"))
    names = [variant.name for variant in file.variants]
    for index, variant in enumerate(file.variants):
        if variant.method not in METHODS:
            problems.append(Problem(f"variants[{index}].method", f"{variant.method!r} is not {', '.join(METHODS)}"))
        problems += _check_variant_providers(variant, f"variants[{index}].providers")
        if variant.source is not None:
            wrong = check_source(variant.source, has_steps=bool(file.preprocess or file.postprocess))
            problems += [replace(problem, path=f"variants[{index}].{problem.path}") for problem in wrong]
        if names.count(variant.name) > 1:
            problems.append(Problem(f"variants[{index}].name", f"{variant.name!r} appears twice"))
        if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", variant.name):
            problems.append(Problem(f"variants[{index}].name", f"{variant.name!r} is not a plain lower-case name"))
    if not file.gates:
        problems.append(Problem("gates", "needs at least one: a variant without a gate proves nothing"))
    for index, gate in enumerate(file.gates):
        problems += _check_gate(gate, f"gates[{index}]", outputs, has_classes=recipe.classes is not None)
    if file.golden < 1:
        problems.append(Problem("golden", f"{file.golden} is not at least 1"))
    if file.source is not None:
        problems += check_source(file.source, has_steps=bool(file.preprocess or file.postprocess))
    for index, item in enumerate(file.data):
        problems += check_package(item, f"data[{index}]")
    if (file.preprocess or file.postprocess) and file.opset < STEPS_OPSET:
        problems.append(Problem("opset", f"{file.opset} is below {STEPS_OPSET}, which preprocess and postprocess need"))
    problems += [
        Problem(f"dimensions.{name}", f"{size!r} is no size: a whole number of at least 1")
        for name, size in file.dimensions.items()
        if not isinstance(size, int) or isinstance(size, bool) or size < 1
    ]
    keys = [item.key for item in file.data]
    problems += [
        Problem("data", f"two files are named {key!r}; set name") for key in sorted(set(keys)) if keys.count(key) > 1
    ]
    if file.source is None and not (recipe.folder / "graph.py").is_file():
        problems.append(Problem("source", "is missing, and there is no graph.py that makes the model"))
    return problems


def _check_variant_providers(variant: VariantRecipe, path: str) -> list[Problem]:
    try:
        options = msgspec.convert(variant.provider_options, dict[str, dict[str, str]])
    except msgspec.ValidationError as error:
        return [Problem(path.removesuffix("s") + "_options", f"{error}: each provider has a table of texts")]
    return [Problem(path, problem) for problem in check_providers(variant.providers, options)]


def _check_gate(gate: Gate, path: str, outputs: set[str], *, has_classes: bool) -> list[Problem]:
    problems = []
    if gate.metric not in METRICS:
        problems.append(Problem(f"{path}.metric", f"{gate.metric!r} is not {', '.join(METRICS)}"))
    if (gate.minimum is None) == (gate.maximum is None):
        problems.append(Problem(path, "needs either minimum or maximum"))
    if gate.metric in {"label_agreement", "label_accuracy", "macro_f1", "top1_accuracy", "top5_accuracy"}:
        if not has_classes:
            problems.append(Problem(f"{path}.metric", f"{gate.metric} needs [classes]"))
    elif gate.metric not in WITHOUT_OUTPUT and gate.output not in outputs:
        problems.append(Problem(f"{path}.output", f"{gate.output!r} is not an output ({', '.join(sorted(outputs))})"))
    return problems
