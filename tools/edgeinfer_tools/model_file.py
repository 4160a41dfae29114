"""Read and write ONNX files for the quantizers: names for all nodes, types for all tensors, external data past 2 GB.

Quantizers name nodes to leave out and look up the types of tensors; graphs that come from exporters often have
neither. What a name or a type is, is settled here once, so that every step means the same node.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto, shape_inference

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


def save(model: onnx.ModelProto, path: Path, *, external_from_bytes: int = EXTERNAL_FROM_BYTES) -> None:
    """Write the model, its weights beside it as `NAME.data` when they are too many for one file."""
    if model.ByteSize() >= external_from_bytes:
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


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the types and shapes that ONNX's own inference finds; past 2 GiB by way of files."""
    if model.ByteSize() < EXTERNAL_FROM_BYTES:
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
