"""Count honestly what a quantizer quantized and what stayed float: nodes, multiplications and bytes of weights.

Quantizers leave out what they do not know (bodies of If and Loop, weights that are computed, operators excluded by
name) without a word. Here every node that works on weights or multiplies matrices is looked for again afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
from onnx import TensorProto

from edgeinfer.artifact.manifest import StateSpec
from edgeinfer.errors import SessionError
from edgeinfer_tools.model_file import graphs, infer_shapes
from edgeinfer_tools.samples import NUMPY_TYPES, Array
from edgeinfer_tools.session import Runner

HEAVY = ("Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM", "GRU", "RNN", "Gather", "Einsum")
"""Operators that multiply much or hold much; the rest is noise beside them."""
_RECURRENT = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""Matrices per step."""
_SMALL = {
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT4,
    TensorProto.UINT4,
    TensorProto.INT16,
    TensorProto.FLOAT16,
}
_FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE}


@dataclass(frozen=True, slots=True)
class Work:
    """What one node of the float model does."""

    node: str
    op_type: str
    macs: int
    """Multiplications and additions of one probe request; 0 where shapes are unknown (bodies of loops)."""
    weight_bytes: int
    """Of its float constants."""
    in_body: bool
    """Inside a body of If, Loop or Scan."""


@dataclass(frozen=True, slots=True)
class Share:
    """Sums over the nodes of one operator type."""

    nodes: int
    float_nodes: int
    macs: int
    float_macs: int
    weight_bytes: int
    float_weight_bytes: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """What stayed float."""

    by_operator: Mapping[str, Share]
    float_nodes: tuple[str, ...]
    """Names of the heavy nodes that stayed float, the most work first."""
    bodies: int
    """Of these, how many lie in bodies of If, Loop or Scan."""

    @property
    def float_macs_share(self) -> float:
        """Share of the multiplications that stayed float."""
        return _share(self.by_operator, "float_macs", "macs")

    @property
    def float_weights_share(self) -> float:
        """Share of the bytes of weights that stayed float."""
        return _share(self.by_operator, "float_weight_bytes", "weight_bytes")

    def __str__(self) -> str:
        nodes = sum(item.nodes for item in self.by_operator.values())
        kept = sum(item.float_nodes for item in self.by_operator.values())
        types = ", ".join(f"{item.float_nodes} {name}" for name, item in self.by_operator.items() if item.float_nodes)
        bodies = f", {self.bodies} of them in bodies of If or Loop" if self.bodies else ""
        return (
            f"{kept} of {nodes} heavy nodes stayed float{f' ({types}{bodies})' if kept else ''}: "
            f"{self.float_macs_share:.0%} of the multiplications, {self.float_weights_share:.0%} of the weights"
        )


def _share(by_operator: Mapping[str, Share], part: str, whole: str) -> float:
    total = sum(getattr(item, whole) for item in by_operator.values())
    return float(sum(getattr(item, part) for item in by_operator.values()) / total) if total else 0.0


def workload(model: onnx.ModelProto, probe: Mapping[str, Array], state: list[StateSpec] | None = None) -> list[Work]:
    """Return what the heavy nodes of a float model do with one request, in the graph's order.

    Shapes are those of a real run; in bodies, those that can be inferred.
    """
    inputs = {**probe, **{s.input: np.zeros(s.shape, NUMPY_TYPES[s.datatype]) for s in state or []}}
    shapes = _shapes(model, inputs)
    found = []
    for index, graph in enumerate(graphs(model.graph)):
        constants = _constants(model.graph, graph)
        shapes |= {name: tuple(tensor.dims) for name, tensor in constants.items()}
        for node in graph.node:
            if node.op_type in HEAVY and node.domain in {"", "ai.onnx", "com.microsoft"}:
                weights = [constants[name] for name in node.input if name in constants]
                held = sum(4 * prod(item.dims) for item in weights if item.data_type in _FLOATS)
                if node.op_type == "Gather" and not held:
                    continue  # picks numbers out of activations
                found.append(Work(node.name, node.op_type, _macs(node, shapes), held, index > 0))
    return found


def _constants(main: onnx.GraphProto, body: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the constants that a graph's nodes may name: its own and the main graph's."""
    found: dict[str, onnx.TensorProto] = {}
    for graph in (main, body):
        found |= {item.name: item for item in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                found.update((node.output[0], item.t) for item in node.attribute if item.name == "value")
    return found


def _shapes(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that heavy nodes take and give."""
    shapes: dict[str, tuple[int, ...]] = {}
    inferred = infer_shapes(model)
    for graph in graphs(inferred.graph):
        for item in (*graph.value_info, *graph.output, *graph.input):
            dims = [dim.dim_value for dim in item.type.tensor_type.shape.dim]
            if item.type.tensor_type.HasField("shape") and all(dims):
                shapes[item.name] = tuple(dims)
    shapes |= {name: array.shape for name, array in inputs.items()}
    wanted = {n for node in model.graph.node if node.op_type in HEAVY for n in (*node.input, *node.output) if n}
    made = {name for node in model.graph.node for name in node.output}
    probe = onnx.ModelProto()
    probe.CopyFrom(inferred)
    del probe.graph.output[:]
    measured = sorted((wanted & made) - shapes.keys())
    for number, name in enumerate(measured):
        probe.graph.node.append(onnx.helper.make_node("Shape", [name], [f"edgeinfer.shape.{number}"]))
        output = onnx.helper.make_tensor_value_info(f"edgeinfer.shape.{number}", TensorProto.INT64, None)
        probe.graph.output.append(output)
    if measured:
        try:
            answers = Runner(probe.SerializeToString(), level="none", threads=0).run(inputs)
        except (SessionError, ValueError):  # ValueError: protobuf's, past 2 GiB; then less is known, no more
            return shapes
        shapes |= {n: tuple(map(int, answers[f"edgeinfer.shape.{i}"])) for i, n in enumerate(measured)}
    return shapes


def _macs(node: onnx.NodeProto, shapes: Mapping[str, tuple[int, ...]]) -> int:
    first, second, out = (shapes.get(name) for name in (*node.input[:2], node.output[0])) if len(node.input) > 1 else (
        None, None, None
    )  # fmt: skip
    if first is None or second is None:
        return 0
    match node.op_type:
        case "MatMul":
            return prod(out) * first[-1] if out and first else 0
        case "Gemm":
            turned = any(item.name == "transA" and item.i for item in node.attribute)
            return prod(out) * first[0 if turned else 1] if out else 0
        case "Conv":
            return prod(out) * prod(second[1:]) if out else 0
        case "ConvTranspose":
            return prod(first) * prod(second[1:])
        case "LSTM" | "GRU" | "RNN":
            steps, batch, width = first
            directions, _, _ = second
            hidden = second[1] // _RECURRENT[node.op_type]
            return steps * batch * directions * _RECURRENT[node.op_type] * hidden * (width + hidden)
    return 0


def coverage(work: list[Work], made: onnx.ModelProto) -> Coverage:
    """Return which of the float model's heavy nodes still compute in float in the quantized one."""
    still = _float_nodes(made)
    kept = [item for item in work if (item.node, item.op_type) in still]
    found = {}
    for operator in sorted({item.op_type for item in work}):
        every = [item for item in work if item.op_type == operator]
        floats = [item for item in kept if item.op_type == operator]
        found[operator] = Share(
            len(every),
            len(floats),
            sum(item.macs for item in every),
            sum(item.macs for item in floats),
            sum(item.weight_bytes for item in every),
            sum(item.weight_bytes for item in floats),
        )
    kept.sort(key=lambda item: (-item.macs, -item.weight_bytes))
    return Coverage(found, tuple(item.node for item in kept), sum(item.in_body for item in kept))


def _float_nodes(made: onnx.ModelProto) -> set[tuple[str, str]]:
    """Return name and type (as in the float model) of the nodes that take no quantized tensor."""
    found = set()
    every = list(graphs(infer_shapes(made).graph))  # bodies name tensors of the graphs around them
    producers = {name: node for graph in every for node in graph.node for name in node.output}
    small = {item.name for graph in every for item in graph.initializer if item.data_type in _SMALL}
    small |= {
        item.name
        for graph in every
        for item in (*graph.value_info, *graph.input, *graph.output)
        if item.type.tensor_type.elem_type == TensorProto.FLOAT16
    }
    for graph in every:
        for node in graph.node:
            if node.op_type not in HEAVY or node.domain not in {"", "ai.onnx"}:
                continue
            judged = node.input[: 1 if node.op_type == "Gather" else 2]
            if all(_is_quantized(name, producers, small) for name in judged):
                continue
            found.add((node.name, node.op_type))
            if node.op_type == "MatMul" and node.name.endswith("_MatMul"):  # what quantizers make of Gemm
                found.add((node.name.removesuffix("_MatMul"), "Gemm"))
    return found


def _is_quantized(name: str, producers: Mapping[str, onnx.NodeProto], small: set[str]) -> bool:
    """Whether a tensor is an integer or half constant, or comes out of DequantizeLinear."""
    node = producers.get(name)
    return name in small or (node is not None and node.op_type == "DequantizeLinear")
