"""Make a source model fit to be built: check it, fix its opset, optimise it, and hold it against the contract.

Every refusal names the node, tensor or number at fault and what to do. The graph that leaves here uses standard ONNX
operators only, so that any later runtime and any quantizer can read it.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, checker, helper, inliner, version_converter

from edgeinfer.artifact.epcontext import refuse_compiled_contexts
from edgeinfer.artifact.external_data import external_locations
from edgeinfer.errors import ArtifactError
from edgeinfer_tools.faults import ModelRefused, plain
from edgeinfer_tools.model_file import is_large, lift_constants, loadable
from edgeinfer_tools.recipe import Recipe
from edgeinfer_tools.runtimes import IR_VERSION, check_versions, opset_of

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

ASIDE_FROM_BYTES = 1 << 10
"""Smaller constants stay in the graph where large ones are kept outside: shapes and axes must be seen."""
_QUANTIZED = (
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "MatMulInteger",
    "ConvInteger",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
    "MatMulNBits",
    "QAttention",
    "MatMulIntegerToFloat",
)
_STANDARD_DOMAINS = {"", "ai.onnx", "ai.onnx.ml"}

OIP_OF_ONNX = {
    TensorProto.FLOAT: "FP32",
    TensorProto.UINT8: "UINT8",
    TensorProto.INT8: "INT8",
    TensorProto.UINT16: "UINT16",
    TensorProto.INT16: "INT16",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.STRING: "BYTES",
    TensorProto.BOOL: "BOOL",
    TensorProto.FLOAT16: "FP16",
    TensorProto.DOUBLE: "FP64",
    TensorProto.UINT32: "UINT32",
    TensorProto.UINT64: "UINT64",
    TensorProto.BFLOAT16: "BF16",
}


def load_source(path: Path) -> onnx.ModelProto:
    """Read and check a source model.

    Raises:
        ModelRefused: not an ONNX model, or one that cannot be built from.
        UnsignedContext: it holds code that an execution provider has compiled.
    """
    refuse_compiled_contexts(path)
    try:
        model = onnx.load(str(path))
    except Exception as error:  # protobuf's errors share no base with onnx's
        if (missing := _missing_data(path)) and isinstance(error, FileNotFoundError | checker.ValidationError):
            raise ModelRefused(f"{path} keeps weights in {missing}, which is not beside it") from error
        raise ModelRefused(f"{path} is not an ONNX model: {plain(str(error))}") from error
    if model.functions:
        model = inliner.inline_local_functions(model)
    check_source(model, str(path))
    return model


def _missing_data(path: Path) -> str:
    try:
        return ", ".join(sorted(name for name in external_locations(path) if not (path.parent / name).is_file()))
    except ArtifactError:
        return ""


def check_source(model: onnx.ModelProto, name: str) -> None:
    """Refuse what would only fail later, or silently.

    Raises:
        ModelRefused: already quantized, an opset out of range, or two nodes of one name.
    """
    if not model.graph.node:
        raise ModelRefused(f"{name} has no nodes; it is empty, or not an ONNX model")
    if any(node.op_type == "EPContext" for node in all_nodes(model.graph)):
        raise ModelRefused(
            f"{name} holds code that an execution provider has compiled (EPContext), which devices refuse; start from "
            "the plain model, exported without ep.context_enable"
        )
    if found := quantized_operators(model):
        raise ModelRefused(f"{name} is already quantized (it has {', '.join(found)}); start from the float model")
    check_versions(model, name)
    foreign = next((node for node in all_nodes(model.graph) if node.domain not in _STANDARD_DOMAINS), None)
    if foreign is not None:
        what = f"{foreign.op_type} of {foreign.domain} (node {foreign.name or foreign.output[0]!r})"
        why = "it was optimised for one runtime; " if foreign.domain == "com.microsoft" else ""
        raise ModelRefused(f"{name} uses {what}: {why}start from the plain export, with standard ONNX operators only")
    repeated = [
        item for item, count in Counter(node.name for node in model.graph.node if node.name).items() if count > 1
    ]
    if repeated:
        culprits = [f"{node.op_type} -> {node.output[0]}" for node in model.graph.node if node.name == repeated[0]]
        raise ModelRefused(
            f"{name} has {len(culprits)} nodes named {repeated[0]!r} ({'; '.join(culprits)}); names must differ"
        )


def quantized_operators(model: onnx.ModelProto) -> list[str]:
    """Return the types of the operators that only quantized graphs have."""
    kinds = {node.op_type for node in all_nodes(model.graph)}
    return sorted(kind for kind in kinds if kind in _QUANTIZED or kind.startswith("QLinear"))


def to_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Return the model at `opset` or above, checked.

    Old opsets lack what quantization needs (per-channel DequantizeLinear came with 13), so they are converted.

    Raises:
        ModelRefused: it cannot be; the text names the operator.
    """
    bare, aside = _weights_aside(model) if is_large(model) else (model, [])
    try:
        if opset_of(bare) < opset:
            bare = version_converter.convert_version(bare, opset)
        bare.ir_version = IR_VERSION
        checker.check_model(bare)
    except Exception as error:  # onnx raises RuntimeError, ConvertError and ValidationError from C++
        raise ModelRefused(f"the graph cannot be brought to opset {opset}: {plain(str(error))}") from error
    if aside:
        names = {item.name for item in aside}
        inputs = [
            onnx.ValueInfoProto.FromString(i.SerializeToString()) for i in bare.graph.input if i.name not in names
        ]
        del bare.graph.input[:]
        bare.graph.input.extend(inputs)
        bare.graph.initializer.extend(aside)
    return bare


def _weights_aside(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """Return a copy that takes its large weights as inputs, and these weights; `model` has its constants lifted.

    ONNX's own tools hand models to C++ as bytes, which end at 2 GiB.
    """
    lift_constants(model)
    aside = [item for item in model.graph.initializer if len(item.raw_data) >= ASIDE_FROM_BYTES]
    names = {item.name for item in aside}
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph, whole = bare.graph, model.graph
    graph.name = whole.name
    graph.node.extend(whole.node)
    graph.input.extend(whole.input)
    graph.output.extend(whole.output)
    graph.value_info.extend(whole.value_info)
    graph.initializer.extend(item for item in whole.initializer if item.name not in names)
    there = {item.name for item in whole.input}
    graph.input.extend(
        helper.make_tensor_value_info(item.name, item.data_type, list(item.dims))
        for item in aside
        if item.name not in there
    )
    return bare, aside


def optimise(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model folded and fused with ONNX Runtime's basic (hardware-independent) level.

    Raises:
        ModelRefused: the runtime rejects it.
    """
    with tempfile.TemporaryDirectory() as folder, loadable(model) as source:
        target = Path(folder) / "optimised.onnx"
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(target)
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        if isinstance(source, Path):
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_min_size_in_bytes", str(ASIDE_FROM_BYTES)
            )
        try:
            ort.InferenceSession(
                source if isinstance(source, bytes) else str(source), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's errors share no other base
            raise ModelRefused(f"the runtime rejects the prepared graph: {plain(str(error))}") from error
        return onnx.load(str(target))


def finish(model: onnx.ModelProto, *, ir_version: int) -> onnx.ModelProto:
    """Return the model with standard operators only, the operator sets that it uses, and our name; it is changed.

    Raises:
        ModelRefused: it uses operators of somebody's own.
    """
    used = {node.domain for node in all_nodes(model.graph)}
    if foreign := sorted(used - _STANDARD_DOMAINS):
        raise ModelRefused(
            f"the graph uses operators of {', '.join(foreign)}; only standard ONNX operators can be built"
        )
    kept = [item for item in model.opset_import if item.domain in {"", "ai.onnx"} or item.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    model.ir_version = ir_version
    model.producer_name = "edgeinfer-tools"
    model.producer_version = ""
    return model


def check_contract(model: onnx.ModelProto, recipe: Recipe) -> None:
    """Hold the graph's inputs and outputs against the recipe.

    Raises:
        ModelRefused: names, types or shapes differ; all differences are named.
    """
    wanted_inputs = {spec.name: (spec.datatype, spec.shape) for spec in recipe.inputs}
    wanted_inputs |= {spec.input: (spec.datatype, spec.shape) for spec in recipe.state}
    wanted_outputs = {spec.name: (spec.datatype, spec.shape) for spec in recipe.outputs}
    wanted_outputs |= {spec.output: (spec.datatype, spec.shape) for spec in recipe.state}
    constants = {item.name for item in model.graph.initializer}
    problems = _differences(
        "input", {item.name: item for item in model.graph.input if item.name not in constants}, wanted_inputs
    )
    problems += _differences("output", {item.name: item for item in model.graph.output}, wanted_outputs)
    if problems:
        raise ModelRefused(f"{recipe.file.name}: the graph is not what the recipe says: " + "; ".join(problems))


def _differences(role: str, found: dict[str, Any], wanted: dict[str, tuple[str, list[int]]]) -> list[str]:
    problems = [f"{role} {name!r} is in the recipe only" for name in wanted if name not in found]
    problems += [f"{role} {name!r} is in the graph only" for name in found if name not in wanted]
    for name in sorted(set(found) & set(wanted)):
        tensor = found[name].type.tensor_type
        datatype, shape = wanted[name]
        got = OIP_OF_ONNX.get(tensor.elem_type, f"type {tensor.elem_type}")
        if got != datatype:
            problems.append(f"{role} {name!r} is {got} in the graph and {datatype} in the recipe")
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
        if tensor.HasField("shape") and (
            len(dims) != len(shape) or any(-1 not in {a, b} and a != b for a, b in zip(dims, shape, strict=True))
        ):
            problems.append(f"{role} {name!r} has shape {dims} in the graph and {shape} in the recipe")
        elif role == "input" and (axis := _baked(dims, shape)) is not None:
            problems.append(
                f"dimension {axis} of input {name!r} is fixed to {dims[axis]} in the graph, and the recipe lets it "
                f"vary: export it again with that axis dynamic, or write {dims[axis]}"
            )
    return problems


def _baked(dims: list[int], shape: list[int]) -> int | None:
    """Return the first axis that varies in the recipe alone."""
    return next((axis for axis, (got, want) in enumerate(zip(dims, shape, strict=False)) if want == -1 < got), None)


def all_nodes(graph: onnx.GraphProto) -> Any:
    """Yield every node, those of subgraphs too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from all_nodes(attribute.g)


def has_float16(model: onnx.ModelProto) -> bool:
    """Whether weights are stored in half precision."""
    return any(item.data_type == TensorProto.FLOAT16 for item in model.graph.initializer)


def compose(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    initializers: list[onnx.TensorProto],
    *,
    name: str,
    opset: int,
) -> onnx.ModelProto:
    """Return a model made of these parts; a convenience for recipes' graph.py."""
    graph = helper.make_graph(nodes, name, inputs, outputs, initializers)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION, producer_name="edgeinfer-tools"
    )
