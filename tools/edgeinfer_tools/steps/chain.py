"""Join declared steps to a model: which tensor goes where, and what the graph's inputs and outputs are afterwards.

A tensor is named by what makes it: the recipe's inputs, the model's inputs and outputs, and what earlier steps give.
Where a name of the recipe means something else inside the model (an input `x` before and after normalisation), the
model's own tensor steps aside as `model.x`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.model_file import graphs
from edgeinfer_tools.recipe import Recipe
from edgeinfer_tools.steps import answers, boxes, image
from edgeinfer_tools.steps.answers import ONNX_OF_OIP
from edgeinfer_tools.steps.schema import (
    STEPS_OPSET,
    AnyStep,
    Cast,
    Colour,
    Crop,
    L2Normalise,
    Layout,
    Nms,
    Normalise,
    Pool,
    Rename,
    Reshape,
    Resize,
    Sigmoid,
    Softmax,
    TopK,
)
from edgeinfer_tools.steps.wiring import Wire, Wiring

RESULTS = {"top_k": 2, "nms": 3}
"""How many tensors a step gives, where it is not one."""


@dataclass(frozen=True, slots=True)
class Front:
    """Preprocessing, as a graph of its own."""

    wiring: Wiring
    specs: list[TensorSpec]
    """The recipe's inputs that it takes."""
    feeds: dict[str, Wire]
    """What it gives, by the model's input."""

    def model(self) -> onnx.ModelProto:
        """Return it as a model that gives what the bare model would be fed."""
        graph = helper.make_graph(
            self.wiring.nodes,
            "front",
            [input_of(spec) for spec in self.specs],
            [helper.make_tensor_value_info(wire.name, wire.kind, _dims(wire)) for wire in self.feeds.values()],
            self.wiring.constants,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", STEPS_OPSET)], ir_version=10)


def front(model: onnx.ModelProto, recipe: Recipe) -> Front:
    """Return the recipe's preprocessing for this model.

    Raises:
        ModelRefused: a step does not fit what it takes, or the model's inputs are not all fed.
    """
    steps = recipe.preprocess
    wanted = {item.name: item for item in open_inputs(model)}
    states = {state.input for state in recipe.state}
    specs = {spec.name: spec for spec in recipe.inputs}
    wires = {name: Wire(name, ONNX_OF_OIP[spec.datatype], tuple(spec.shape)) for name, spec in specs.items()}
    consumed: list[str] = []
    wiring, feeds, last = Wiring("pre."), {}, ""
    named = {name for step in steps for name in step.gives}
    open_names = [name for name in wanted if name not in specs and name not in states and name not in named]
    if len(wanted) - len(states) == 1:
        open_names = [name for name in wanted if name not in states and name not in named]
    for index, step in enumerate(steps):
        takes = list(step.takes) or ([last] if last else list(specs) if len(specs) == 1 else [])
        found = _apply(step, wiring, _find(takes, wires, step, "preprocess"))
        names = list(step.gives)
        if not names and index == len(steps) - 1:
            if len(open_names) != 1:
                which = ", ".join(open_names) or "none"
                raise ModelRefused(
                    f"preprocess[{index}] {_kind(step)}: say gives = [..], the model's input ({which} open)"
                )
            names = open_names
        names = names or [f"{wiring.prefix}{index}"]
        _check_count(names, found, step)
        consumed += takes
        for name, wire in zip(names, found, strict=True):
            if name in wanted and name not in states:
                feeds[name] = wire
            wires[name] = wire
            last = name
    taken = [specs[name] for name in specs if name in consumed]
    return Front(wiring, taken, feeds)


def bake(model: onnx.ModelProto, recipe: Recipe) -> onnx.ModelProto:
    """Return the model with the recipe's steps around it; the model itself when there are none.

    Raises:
        ModelRefused: a step does not fit what it takes, or a name leads nowhere.
    """
    if not recipe.preprocess and not recipe.postprocess:
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    _bake_front(made, recipe)
    if recipe.postprocess:
        _bake_back(made, recipe)
    return made


def _bake_front(model: onnx.ModelProto, recipe: Recipe) -> None:
    if not recipe.preprocess:
        return
    before = front(model, recipe)
    graph = model.graph
    for name, wire in before.feeds.items():
        feed = f"model.{name}"
        _rename(graph, name, feed)
        before.wiring.nodes.append(helper.make_node("Identity", [wire.name], [feed], name=f"pre.feed.{name}"))
    kept = [item for item in graph.input if item.name not in {f"model.{name}" for name in before.feeds}]
    taken = {spec.name for spec in before.specs}
    kept = [item for item in kept if item.name not in taken]
    inputs = [*(input_of(spec) for spec in before.specs), *map(_copy, kept)]
    nodes = [*before.wiring.nodes, *map(_copy, graph.node)]
    del graph.input[:], graph.node[:]
    graph.input.extend(inputs)
    graph.node.extend(nodes)
    graph.initializer.extend(before.wiring.constants)


def _bake_back(model: onnx.ModelProto, recipe: Recipe) -> None:
    graph, steps = model.graph, recipe.postprocess
    states = {state.output for state in recipe.state}
    given = {name for step in steps for name in step.gives}
    public = [spec.name for spec in recipe.outputs]
    outputs = [item.name for item in graph.output if item.name not in states]
    inner: dict[str, str] = {}
    last_step = steps[-1]
    count = RESULTS.get(_kind(last_step), 1)
    unmade = [name for name in public if name not in given and name not in outputs]
    if not last_step.gives and len(unmade) != count and len(public) == count:
        unmade = public  # the result takes the name that the model's own output had
    closing = list(last_step.gives) or unmade
    for name in {*given, *closing} & _names(graph):
        inner[name] = f"model.{name}"
        _rename(graph, name, inner[name])
    wires = {item.name: _wire(item) for item in (*graph.input, *graph.output)}
    wires |= {name: wires[renamed] for name, renamed in inner.items() if renamed in wires}
    wiring, last = Wiring("post."), ""
    first = [inner.get(name, name) for name in outputs]
    for index, step in enumerate(steps):
        takes = list(step.takes) or ([last] if last else first if len(first) == 1 else [])
        found = _apply(step, wiring, _find(takes, wires, step, "postprocess"))
        names = list(step.gives) or (closing if index == len(steps) - 1 else [])
        if not names and len(found) == 1:
            names = [f"post.{index}"]
        _check_count(names, found, step)
        for name, wire in zip(names, found, strict=True):
            wiring.nodes.append(helper.make_node("Identity", [wire.name], [name], name=f"post.give.{name}"))
            wires[name] = Wire(name, wire.kind, wire.shape)
            last = name
    if missing := [name for name in public if name not in wires]:
        raise ModelRefused(f"postprocess: no step gives output {missing[0]!r}; name it in a step's gives")
    kept = [_copy(item) for item in graph.output if item.name in states]
    del graph.output[:]
    graph.output.extend(
        helper.make_tensor_value_info(name, wires[name].kind, _dims(wires[name], name)) for name in public
    )
    graph.output.extend(kept)
    graph.node.extend(wiring.nodes)
    graph.initializer.extend(wiring.constants)


def _apply(step: AnyStep, wiring: Wiring, wires: Sequence[Wire]) -> list[Wire]:
    match step:
        case Nms():
            if len(wires) != 2:
                raise ModelRefused(f"step nms takes boxes and scores, {len(wires)} tensors are named")
            return boxes.nms(step, wiring, *wires)
        case Pool():
            if not 1 <= len(wires) <= 2:
                raise ModelRefused(f"step pool takes tokens' embeddings and a mask, {len(wires)} tensors are named")
            return [answers.pool(step, wiring, wires[0], wires[1] if len(wires) == 2 else None)]
    if len(wires) != 1:
        raise ModelRefused(f"step {_kind(step)} takes one tensor, {len(wires)} are named")
    (wire,) = wires
    match step:
        case Rename():
            return [wire]
        case Resize():
            return [image.resize(step, wiring, wire)]
        case Crop():
            return [image.crop(step, wiring, wire)]
        case Colour():
            return [image.colour(step, wiring, wire)]
        case Normalise():
            return [image.normalise(step, wiring, wire)]
        case Layout():
            return [image.layout(step, wiring, wire)]
        case Cast():
            return [answers.cast(step, wiring, wire)]
        case Reshape():
            return [answers.reshape(step, wiring, wire)]
        case Softmax():
            return [answers.softmax(step, wiring, wire)]
        case Sigmoid():
            return [answers.sigmoid(step, wiring, wire)]
        case TopK():
            return answers.top_k(step, wiring, wire)
        case L2Normalise():
            return [answers.l2_normalise(step, wiring, wire)]


def _find(takes: list[str], wires: dict[str, Wire], step: AnyStep, where: str) -> list[Wire]:
    if not takes:
        raise ModelRefused(f"{where} {_kind(step)}: say takes = [..]; there are {', '.join(sorted(wires))}")
    if unknown := [name for name in takes if name not in wires]:
        known = ", ".join(sorted(wires))
        raise ModelRefused(f"{where} {_kind(step)} takes {unknown[0]!r}, which nothing gives; there are {known}")
    return [wires[name] for name in takes]


def _check_count(names: list[str], found: list[Wire], step: AnyStep) -> None:
    if len(names) != len(found):
        raise ModelRefused(f"step {_kind(step)} gives {len(found)} tensors, gives names {len(names)}: {names}")


def _kind(step: AnyStep) -> str:
    return str(step.__struct_config__.tag)


def open_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that are no constants."""
    constants = {item.name for item in model.graph.initializer}
    return [item for item in model.graph.input if item.name not in constants]


def input_of(spec: TensorSpec) -> onnx.ValueInfoProto:
    """Return a graph input as the recipe has it."""
    dims = [dim if dim >= 0 else f"{spec.name}_{axis}" for axis, dim in enumerate(spec.shape)]
    return helper.make_tensor_value_info(spec.name, ONNX_OF_OIP[spec.datatype], dims)


def _wire(item: onnx.ValueInfoProto) -> Wire:
    tensor = item.type.tensor_type
    dims = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return Wire(item.name, tensor.elem_type, dims)


def _dims(wire: Wire, name: str = "") -> list[int | str]:
    stem = name or wire.name
    return [dim if dim >= 0 else f"{stem}_{axis}" for axis, dim in enumerate(wire.shape)]


def _names(graph: onnx.GraphProto) -> set[str]:
    made = {name for node in graph.node for name in node.output}
    return made | {item.name for item in (*graph.input, *graph.initializer)}


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Give a tensor another name, wherever it is used, bodies included."""
    for part in graphs(graph):
        for node in part.node:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name == old:
                        names[index] = new
        for item in (*part.input, *part.output, *part.value_info, *part.initializer):
            if item.name == old:
                item.name = new


def _copy(message: Any) -> Any:
    """Return a copy that outlives the field it was in."""
    made = type(message)()
    made.CopyFrom(message)
    return made
