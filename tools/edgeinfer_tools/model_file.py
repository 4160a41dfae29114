"""Read and write ONNX files for the quantizers: names for all nodes, types for all tensors, external data past 2 GB.

Quantizers name nodes to leave out and look up the types of tensors; graphs that come from exporters often have
neither. What a name or a type is, is settled here once, so that every step means the same node.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from edgeinfer.errors import SessionError
from edgeinfer_tools.faults import ModelRefused, plain
from edgeinfer_tools.session import Runner

EXTERNAL_FROM_BYTES = 1 << 30
"""Larger models keep their weights in a file of their own: protobuf ends at 2 GiB."""


def load(path: Path) -> onnx.ModelProto:
    """Return the model with a name for every node (and its weights, wherever they lie).

    Raises:
        ModelRefused: it cannot be read.
    """
    try:
        model = onnx.load(str(path))
    except Exception as error:  # protobuf's errors share no base with onnx's
        raise ModelRefused(f"{path.name} is not an ONNX model: {plain(str(error))}") from error
    name_nodes(model)
    return model


def weights_bytes(model: onnx.ModelProto) -> int:
    """Return the size of all constants: initializers, and tensors in attributes (Constant nodes have theirs there)."""
    total = 0
    for graph in graphs(model.graph):
        held = [item.t for node in graph.node for item in node.attribute if item.HasField("t")]
        total += sum(_tensor_bytes(item) for item in (*graph.initializer, *held))
    return total


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    if tensor.data_type == TensorProto.STRING:
        return sum(len(item) for item in tensor.string_data)
    item = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize if tensor.data_type else 0
    return int(np.prod(tensor.dims, dtype=np.int64)) * item


def is_large(model: onnx.ModelProto, limit_bytes: int | None = None) -> bool:
    """Return whether the model needs a file of its own for its weights. Counts, and serializes nothing."""
    return weights_bytes(model) >= (EXTERNAL_FROM_BYTES if limit_bytes is None else limit_bytes)


def lift_constants(model: onnx.ModelProto) -> None:
    """Turn Constant nodes into initializers, which can lie outside; `model` is changed."""
    for graph in graphs(model.graph):
        made = {item.name for item in graph.output}
        kept = []
        for node in graph.node:
            value = next((item for item in node.attribute if item.name == "value" and item.HasField("t")), None)
            if node.op_type != "Constant" or value is None or node.output[0] in made:
                kept.append(onnx.NodeProto.FromString(node.SerializeToString()))
                continue
            graph.initializer.add().CopyFrom(value.t)
            graph.initializer[-1].name = node.output[0]
        if len(kept) < len(graph.node):
            del graph.node[:]
            graph.node.extend(kept)


@contextmanager
def loadable(model: onnx.ModelProto) -> Iterator[Path | bytes]:
    """Yield the model as a runtime takes it: bytes, or a file for the block's time when it is too large for that."""
    if not is_large(model):
        yield model.SerializeToString()
        return
    with tempfile.TemporaryDirectory(prefix="edgeinfer-model-") as folder:
        save(model, Path(folder) / "model.onnx")
        yield Path(folder) / "model.onnx"


def save(model: onnx.ModelProto, path: Path, *, external_from_bytes: int | None = None) -> None:
    """Write the model, its weights beside it as `NAME.data` when they are too many for one file."""
    if is_large(model, external_from_bytes):
        large = onnx.ModelProto()
        large.CopyFrom(model)  # saving turns its tensors into references
        lift_constants(large)
        model = large
        onnx.save(
            model, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=f"{path.name}.data"
        )
    else:
        onnx.save(model, str(path))


def files_of(path: Path) -> list[Path]:
    """Return the files that a model consists of: itself and the external data that it names."""
    model = onnx.load(str(path), load_external_data=False)
    beside = {
        entry.value
        for graph in graphs(model.graph)
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return [path, *(path.parent / name for name in sorted(beside))]


def size_bytes(path: Path) -> int:
    """Return the size of all files of a model."""
    return sum(item.stat().st_size for item in files_of(path))


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the bodies below it (If, Loop, Scan)."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)
            for body in attribute.graphs:
                yield from graphs(body)


def name_nodes(model: onnx.ModelProto) -> None:
    """Give unnamed nodes names, `OPERATOR_NUMBER`; deterministic, and none that exists.

    Raises:
        ModelRefused: two nodes have one name; both are named.
    """
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    taken = Counter(node.name for node in nodes if node.name)
    for name, count in taken.items():
        if count > 1:
            twins = [f"{node.op_type} -> {node.output[0]}" for node in nodes if node.name == name]
            raise ModelRefused(f"{count} nodes are named {name!r} ({'; '.join(twins)}); names must differ")
    numbers: Counter[str] = Counter()
    for node in nodes:
        while not node.name:
            candidate = f"{node.op_type}_{numbers[node.op_type]}"
            numbers[node.op_type] += 1
            if candidate not in taken:
                node.name = candidate


def with_plain_biases(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every constant bias of a Gemm as a vector, one number per column, or as an Add behind it.

    ONNX lets a bias be broadcast; the static quantizer takes it for a vector, and dies of any other.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    constants = {item.name: item for item in made.graph.initializer}
    nodes = []
    for node in made.graph.node:
        nodes.append(node)
        if node.op_type != "Gemm" or len(node.input) < 3 or not {*node.input[1:]} <= constants.keys():
            continue
        turned = any(item.name == "transB" and item.i for item in node.attribute)
        columns = constants[node.input[1]].dims[0 if turned else 1]
        bias = numpy_helper.to_array(constants[node.input[2]])
        if bias.shape == (columns,):
            continue
        if bias.size in {1, columns} and bias.shape[:-1] in {(), (1,)}:
            name = f"{node.input[2]}.edgeinfer.{columns}"
            if name not in constants:
                made.graph.initializer.append(
                    numpy_helper.from_array(np.broadcast_to(bias.reshape(-1), (columns,)).copy(), name)
                )
                constants[name] = made.graph.initializer[-1]
            node.input[2] = name
        elif not any(item.name == "beta" and item.f != 1 for item in node.attribute):
            product = f"{node.output[0]}.edgeinfer.product"
            behind = helper.make_node("Add", [product, node.input[2]], [node.output[0]], name=f"{node.name}.bias")
            del node.input[2]
            node.output[0] = product
            nodes.append(behind)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del made.graph.node[:]
    made.graph.node.extend(copies)
    return made


def with_own_axes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with a copy of a weight for each axis along which its users count output channels.

    A tensor has scales along one axis. A Gemm that takes the same weight turned gets scales along its inputs then,
    which the runtime's fused 8-bit kernels apply to its outputs: silently wrong.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    constants = {item.name: item for item in made.graph.initializer}
    axes: dict[str, int] = {}
    for node in made.graph.node:
        axis = _channel_axis(node)
        if axis is None or node.input[1] not in constants:
            continue
        name = node.input[1]
        if axes.setdefault(name, axis) == axis:
            continue
        copy = f"{name}.edgeinfer.axis{axis % 4}"
        if copy not in constants:
            made.graph.initializer.append(constants[name])
            made.graph.initializer[-1].name = copy
            constants[copy] = made.graph.initializer[-1]
        node.input[1] = copy
    return made


def _channel_axis(node: onnx.NodeProto) -> int | None:
    """Return the axis of its weight along which a node's output channels lie, counted from the end for matrices."""
    match node.op_type:
        case "Conv":
            return 0
        case "ConvTranspose":
            return 1
        case "MatMul":
            return -1
        case "Gemm":
            return -2 if any(item.name == "transB" and item.i for item in node.attribute) else -1
    return None


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the types and shapes that ONNX's own inference finds; past 2 GiB by way of files."""
    if not is_large(model):
        return shape_inference.infer_shapes(model, data_prop=True)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "inferred.onnx"
        save(model, source)
        shape_inference.infer_shapes_path(str(source), str(target), data_prop=True)
        return onnx.load(str(target))


def infer_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the types of its tensors written into it.

    ONNX's own inference knows the standard operators; for tensors behind others the runtime is asked.

    Raises:
        ModelRefused: a tensor's type cannot be found; the node that makes it is named.
    """
    try:
        inferred = infer_shapes(model)
    except Exception as error:  # onnx raises InferenceError and RuntimeError from C++
        raise ModelRefused(f"shape inference fails: {plain(str(error))}") from error
    graph = inferred.graph
    known = {item.name for item in (*graph.input, *graph.output, *graph.value_info, *graph.initializer)}
    missing = {name: node for node in graph.node for name in node.output if name and name not in known}
    if not missing:
        return inferred
    probe = onnx.ModelProto()
    probe.CopyFrom(inferred)
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in missing)
    try:
        types = Runner(probe.SerializeToString(), level="none").output_types()
    except SessionError as error:
        node = next(iter(missing.values()))
        raise ModelRefused(
            f"the type of {node.output[0]!r}, made by {node.op_type} {node.name!r}, is unknown"
        ) from error
    for name in missing:
        item = graph.value_info.add(name=name)
        item.type.tensor_type.elem_type = _ELEMENT_TYPES.get(types[name], TensorProto.UNDEFINED)
    return inferred


_ELEMENT_TYPES = {
    "tensor(float)": TensorProto.FLOAT,
    "tensor(float16)": TensorProto.FLOAT16,
    "tensor(double)": TensorProto.DOUBLE,
    "tensor(int8)": TensorProto.INT8,
    "tensor(uint8)": TensorProto.UINT8,
    "tensor(int32)": TensorProto.INT32,
    "tensor(int64)": TensorProto.INT64,
    "tensor(bool)": TensorProto.BOOL,
    "tensor(string)": TensorProto.STRING,
}
