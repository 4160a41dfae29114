"""Steps on what a model answers: scores, tokens' embeddings, plain tensors."""

from __future__ import annotations

from onnx import TensorProto

from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.steps.schema import Cast, L2Normalise, Pool, Reshape, Sigmoid, Softmax, TopK
from edgeinfer_tools.steps.wiring import FLOAT, INT64, Wire, Wiring

ONNX_OF_OIP = {
    "FP32": TensorProto.FLOAT,
    "FP16": TensorProto.FLOAT16,
    "FP64": TensorProto.DOUBLE,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "BOOL": TensorProto.BOOL,
    "BYTES": TensorProto.STRING,
}
LEAST_LENGTH = 1e-12
"""Vectors that are shorter stay short instead of becoming NaN; as torch's `normalize`."""
LEAST_TOKENS = 1e-9
"""As sentence-transformers' mean pooling."""


def cast(step: Cast, wiring: Wiring, wire: Wire) -> Wire:
    """Return the tensor in another datatype."""
    kind = ONNX_OF_OIP[step.datatype]
    return Wire(wiring.node("Cast", [wire.name], to=kind), kind, wire.shape)


def reshape(step: Reshape, wiring: Wiring, wire: Wire) -> Wire:
    """Return the tensor in another shape."""
    kept = []
    for axis, dim in enumerate(step.shape):
        if dim == 0 and axis >= len(wire.shape):
            raise ModelRefused(f"step reshape: {wire.name!r} has shape {list(wire.shape)} and no axis {axis} to keep")
        kept.append(wire.shape[axis] if dim == 0 else dim)
    return Wire(wiring.node("Reshape", [wire.name, wiring.ints(step.shape)]), wire.kind, tuple(kept))


def softmax(step: Softmax, wiring: Wiring, wire: Wire) -> Wire:
    """Return shares along an axis."""
    axis = wire.axis(step.axis, "softmax")
    return Wire(wiring.node("Softmax", [wiring.to_float(wire).name], axis=axis), FLOAT, wire.shape)


def sigmoid(_: Sigmoid, wiring: Wiring, wire: Wire) -> Wire:
    """Return probabilities."""
    return Wire(wiring.node("Sigmoid", [wiring.to_float(wire).name]), FLOAT, wire.shape)


def top_k(step: TopK, wiring: Wiring, wire: Wire) -> list[Wire]:
    """Return the k highest values, in order, and their indices."""
    axis = wire.axis(step.axis, "top_k")
    if 0 <= wire.shape[axis] < step.k:
        raise ModelRefused(f"step top_k: {wire.name!r} has shape {list(wire.shape)}, fewer than k = {step.k}")
    shape = tuple(step.k if index == axis else dim for index, dim in enumerate(wire.shape))
    values, indices = wiring.split("TopK", [wire.name, wiring.ints([step.k])], 2, axis=axis, largest=1, sorted=1)
    return [Wire(values, wire.kind, shape), Wire(indices, INT64, shape)]


def pool(step: Pool, wiring: Wiring, hidden: Wire, mask: Wire | None) -> Wire:
    """Return one vector per row of tokens."""
    if len(hidden.shape) != 3:
        raise ModelRefused(f"step pool: {hidden.name!r} has shape {list(hidden.shape)}, not [batch, tokens, width]")
    shape = (hidden.shape[0], hidden.shape[2])
    if step.method == "cls":
        name = wiring.node("Gather", [hidden.name, wiring.ints(0)], axis=1)
    elif mask is None or len(mask.shape) != 2:
        raise ModelRefused("step pool: takes tokens' embeddings and their mask [batch, tokens]; say takes = [.., ..]")
    else:
        present = wiring.node("Unsqueeze", [wiring.to_float(mask).name, wiring.ints([2])])
        name = _mean(wiring, hidden, present) if step.method == "mean" else _max(wiring, hidden, present)
    found = Wire(name, FLOAT, shape)
    return l2_normalise(L2Normalise(axis=1), wiring, found) if step.normalise else found


def _mean(wiring: Wiring, hidden: Wire, present: str) -> str:
    total = wiring.node("ReduceSum", [wiring.node("Mul", [hidden.name, present]), wiring.ints([1])], keepdims=0)
    count = wiring.node("ReduceSum", [present, wiring.ints([1])], keepdims=0)
    return wiring.node("Div", [total, wiring.node("Max", [count, wiring.floats(LEAST_TOKENS)])])


def _max(wiring: Wiring, hidden: Wire, present: str) -> str:
    there = wiring.node("Greater", [present, wiring.floats(0)])
    masked = wiring.node("Where", [there, hidden.name, wiring.floats(-1e9)])
    return wiring.node("ReduceMax", [masked, wiring.ints([1])], keepdims=0)


def l2_normalise(step: L2Normalise, wiring: Wiring, wire: Wire) -> Wire:
    """Return vectors of length 1."""
    axis = wire.axis(step.axis, "l2_normalise")
    length = wiring.node("ReduceL2", [wire.name, wiring.ints([axis])], keepdims=1)
    floor = wiring.node("Max", [length, wiring.floats(LEAST_LENGTH)])
    return Wire(wiring.node("Div", [wire.name, floor]), wire.kind, wire.shape)
