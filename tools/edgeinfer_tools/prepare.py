"""Make of a source the float graph that every variant is made from, and prove that it still computes the same.

Owns the order: the export is held against the model's own framework, then the recipe's code, dimensions and steps
change what the graph is, then optimisers change only how it is written. What each of these does is another module's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgeinfer.errors import ConfigError, Problem
from edgeinfer_tools import graph, model_file, recipe_code, shapes
from edgeinfer_tools.faults import ExportDiffers, RecipeCodeFailed
from edgeinfer_tools.recipe import Recipe
from edgeinfer_tools.runtimes import check_runtime, reads
from edgeinfer_tools.samples import NUMPY_TYPES, Array, decode_inputs
from edgeinfer_tools.simplify import answers, attempt, slim
from edgeinfer_tools.sources.obtain import Obtained
from edgeinfer_tools.steps.chain import bake, front, open_inputs
from edgeinfer_tools.validate import compare, problems

VALIDATION_REQUESTS = 8
"""So many requests hold an export against its framework, and a simplified graph against the one before."""
GENERATED = 4
"""So many generated requests, where the recipe has none that fit; their dynamic dimensions are this long."""
Requests = Sequence[Mapping[str, Array]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The float graph."""

    model: onnx.ModelProto
    notes: list[str]
    """What could not be done, in words."""
    report: dict[str, Any] = field(default_factory=dict)
    """For report.json: where it came from, how it was validated, what was simplified."""


def requests_of(recipe: Recipe, files: Mapping[str, Path], count: int = VALIDATION_REQUESTS) -> list[dict[str, Array]]:
    """Return the first decoded requests of the recipe's evaluation, of one stream where the model has state.

    Raises:
        ConfigError: data.py has no evaluation.
        DataRefused: a request does not fit the contract.
    """
    hook = recipe.hook("data", "evaluation")
    if hook is None:
        raise ConfigError(str(recipe.code("data")), (Problem("evaluation", "is missing"),))
    streams = recipe_code.streams(recipe.code("data"), hook, files)
    if recipe.state:
        streams = islice(streams, 1)
    found = (request for stream in streams for request in stream.requests)
    return [decode_inputs(request, recipe.inputs) for request in islice(found, count)]


def prepare(recipe: Recipe, obtained: Obtained | None, requests: Requests, say: Say = lambda _: None) -> Prepared:
    """Return the float graph, held against the recipe's contract.

    `requests` are real ones, as the recipe's inputs have them.

    Raises:
        ModelRefused: the source or the prepared graph is not fit.
        ExportDiffers: the export does not compute what the model does, and the recipe has no waiver.
        ConfigError: graph.py makes no model, and there is no source.
        RecipeCodeFailed: graph.py raised something, or returned no model.
    """
    check_runtime(recipe.file.opset, recipe.file.onnxruntime)
    notes: list[str] = []
    model = _source(recipe, obtained)
    report: dict[str, Any] = {}
    if obtained is not None and obtained.facts:
        report["source"], more = _validated(recipe, obtained, model, requests, say)
        notes += more
    if tied := shared_weights(model):
        report["tied_weights"] = tied
    if (surgery := recipe.hook("graph", "prepare")) is not None:
        model = _model_of(recipe, surgery, model)
        graph.check_source(model, f"{recipe.file.name} as prepared by graph.py")
    model = _shaped(graph.to_opset(model, recipe.file.opset), recipe)
    before = len(model.graph.node)
    graph.optimise(model)  # first: when the runtime rejects the graph itself, that is the reason to tell
    for name, change in (("onnxslim", slim), ("onnxruntime's basic optimisation", graph.optimise)):
        passed = attempt(name, change, model, requests, recipe.state)
        notes += [passed.note] if passed.note else []
        model = passed.model
    model, note = shapes.infer(model)
    notes += [note] if note else []
    model = graph.finish(model, ir_version=reads(recipe.file.onnxruntime)[1])
    graph.check_contract(model, recipe)
    report |= {"nodes_before": before, "nodes": len(model.graph.node), "weights_bytes": model_file.weights_bytes(model)}
    return Prepared(model, notes, report)


def _source(recipe: Recipe, obtained: Obtained | None) -> onnx.ModelProto:
    if obtained is not None:
        return graph.load_source(obtained.path)
    make = recipe.hook("graph", "make_graph")
    if make is None:
        raise ConfigError(str(recipe.code("graph")), (Problem("make_graph", "is missing, and there is no source"),))
    model = _model_of(recipe, make)
    graph.check_source(model, f"{recipe.file.name}'s make_graph()")
    return model


def _model_of(recipe: Recipe, function: Callable[..., Any], *arguments: onnx.ModelProto) -> onnx.ModelProto:
    made = recipe_code.call(recipe.code("graph"), function, *arguments)
    if not isinstance(made, onnx.ModelProto):
        text = f"{function.__name__}() returns {type(made).__name__}, not an onnx.ModelProto"
        raise RecipeCodeFailed(recipe.code("graph"), recipe_code.first_line(function), text)
    return made


def _shaped(model: onnx.ModelProto, recipe: Recipe) -> onnx.ModelProto:
    """Return the model with the recipe's dimensions and steps."""
    shapes.fix_dimensions(model, recipe.file.dimensions)
    wanted: dict[str, Sequence[int]] = {spec.input: spec.shape for spec in recipe.state}
    if recipe.preprocess:
        before = front(model, recipe)
        fed = {name: wire.shape for name, wire in before.feeds.items()}
        wanted |= {spec.name: spec.shape for spec in recipe.inputs if spec not in before.specs}
        wanted |= fed
    else:
        wanted |= {spec.name: spec.shape for spec in recipe.inputs}
    shapes.narrow(model, wanted)
    return bake(model, recipe)


def _validated(
    recipe: Recipe, obtained: Obtained, model: onnx.ModelProto, requests: Requests, say: Say
) -> tuple[dict[str, Any], list[str]]:
    """Return the report on how well the export agrees with the model itself, and notes.

    Raises:
        ExportDiffers: it does not, and there is no waiver.
    """
    source = recipe.file.source
    assert source is not None
    limits, facts = source.validation, obtained.facts
    fed, real = source_requests(model, recipe, requests)
    outputs = [item.name for item in model.graph.output]
    say(f"validated {'with' if real else 'with generated inputs only, beside'} the model in its own framework")
    found = compare(obtained.answers(fed, outputs), answers(model, fed, [], level="none"))
    wrong = problems(found, limits)
    if wrong and not limits.waiver:
        raise ExportDiffers(
            f"{facts['name']}: the exported graph does not compute what the model computes, on {len(fed)} "
            f"{'real' if real else 'generated'} requests: {'; '.join(wrong)}. Nothing was published; if this is right "
            "for your use, say why in source.validation.waiver"
        )
    notes = [] if real else [f"the export was validated on {len(fed)} generated requests: none of the recipe's fit it"]
    notes += [f"waived ({limits.waiver}): {text}" for text in wrong]
    notes += [f"tied weights in the source: {' = '.join(group)}" for group in facts.get("tied", [])]
    worst = max(found, key=lambda item: item.max_abs / max(item.largest, 1e-6))
    say(f"{'':<9} {len(fed)} {'real' if real else 'generated'} requests: max abs error {worst.max_abs:.3g}, cosine "
        f"{min(item.cosine for item in found):.6f}")  # fmt: skip
    told = ("kind", "task", "exporter", "tied")
    report: dict[str, Any] = {key: facts[key] for key in told if key in facts}
    report["validation"] = {
        "requests": len(fed),
        "inputs": "real" if real else "generated",
        "outputs": [item.report() for item in found],
        "waiver": limits.waiver if wrong else "",
    }
    return report, notes


def source_requests(model: onnx.ModelProto, recipe: Recipe, requests: Requests) -> tuple[list[dict[str, Array]], bool]:
    """Return requests for the bare model: the recipe's own, through its preprocessing; else generated ones and False.

    A state begins with zeros, as on the device.
    """
    inputs = {item.name: item for item in open_inputs(model)}
    states = {spec.input: np.zeros(spec.shape, NUMPY_TYPES[spec.datatype]) for spec in recipe.state}
    fed = [dict(request) for request in requests]
    if recipe.preprocess and fed:
        before = front(model, recipe)
        taken = {spec.name for spec in before.specs}
        names = list(before.feeds)
        given = answers(before.model(), [{n: a for n, a in r.items() if n in taken} for r in fed], [])
        wires = [wire.name for wire in before.feeds.values()]
        fed = [
            {**{n: a for n, a in r.items() if n not in taken}, **dict(zip(names, (g[w] for w in wires), strict=True))}
            for r, g in zip(fed, given, strict=True)
        ]
    fed = [{**request, **{n: a for n, a in states.items() if n in inputs}} for request in fed]
    fits = [all(name in request and _fits(request[name], item) for name, item in inputs.items()) for request in fed]
    if fed and all(fits):
        return [{name: request[name] for name in inputs} for request in fed], True
    random = np.random.default_rng(0)
    return [{name: _generated(item, random) for name, item in inputs.items()} for _ in range(GENERATED)], False


def _fits(array: Array, item: onnx.ValueInfoProto) -> bool:
    tensor = item.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
    kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return (
        array.dtype == kind
        and len(dims) == array.ndim
        and all(dim in {-1, got} for dim, got in zip(dims, array.shape, strict=True))
    )


def _generated(item: onnx.ValueInfoProto, random: np.random.Generator) -> Array:
    tensor = item.type.tensor_type
    shape = [dim.dim_value if dim.HasField("dim_value") else GENERATED for dim in tensor.shape.dim]
    if tensor.elem_type in {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}:
        return random.normal(size=shape).astype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if "mask" in item.name:
        return np.ones(shape, helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    high = 2 if "type" in item.name or tensor.elem_type == TensorProto.BOOL else 100
    return random.integers(0, high, shape).astype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))


def shared_weights(model: onnx.ModelProto) -> list[dict[str, Any]]:
    """Return the larger constants that several nodes use: quantizing may have to store them more than once."""
    users: dict[str, list[str]] = {}
    for part in model_file.graphs(model.graph):
        for node in part.node:
            for name in node.input:
                users.setdefault(name, []).append(f"{node.op_type} {node.name or node.output[0]}")
    large = [item for item in model.graph.initializer if int(np.prod(item.dims, dtype=np.int64)) >= 1 << 10]
    return [{"weight": item.name, "used_by": users[item.name]} for item in large if len(users.get(item.name, [])) > 1]
