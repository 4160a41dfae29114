"""Small real ONNX graphs that do one thing each: run, take long, remember, or go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, save

FLOAT, INT64, BOOL, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING

value = helper.make_tensor_value_info
node = helper.make_node


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    initializers: Sequence[TensorProto] = (),
) -> ModelProto:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def write(path: Path, graph: ModelProto) -> Path:
    save(graph, path)
    return path


def identity() -> ModelProto:
    """x[n] -> y = x."""
    return model([node("Identity", ["x"], ["y"])], [value("x", FLOAT, ["n"])], [value("y", FLOAT, ["n"])])


def linear(size: int = 8, layers: int = 1, seed: int = 0) -> ModelProto:
    """x[1,size] -> y, through `layers` constant matrices."""
    rng = np.random.default_rng(seed)
    weights = [
        numpy_helper.from_array((rng.standard_normal((size, size)) / np.sqrt(size)).astype(np.float32), f"w{i}")
        for i in range(layers)
    ]
    names = ["x", *(f"h{i}" for i in range(1, layers)), "y"]
    nodes = [node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)]
    return model(nodes, [value("x", FLOAT, [1, size])], [value("y", FLOAT, [1, size])], weights)


def slow_loop() -> ModelProto:
    """n[1], x[1] -> y = x + n, one addition at a time: stoppable between any two."""
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    body = helper.make_graph(
        [node("Identity", ["going"], ["going_on"]), node("Add", ["acc", "one"], ["acc_out"])],
        "body",
        [value("i", INT64, []), value("going", BOOL, []), value("acc", FLOAT, [1])],
        [value("going_on", BOOL, []), value("acc_out", FLOAT, [1])],
    )
    always = numpy_helper.from_array(np.array(True), "always")
    axes = numpy_helper.from_array(np.array([0], np.int64), "axes")
    return model(
        [node("Squeeze", ["n", "axes"], ["count"]), node("Loop", ["count", "always", "x"], ["y"], body=body)],
        [value("n", INT64, [1]), value("x", FLOAT, [1])],
        [value("y", FLOAT, [1])],
        [one, always, axes],
    )


def one_long_matmul() -> ModelProto:
    """x[n,n] -> y[1,1]: the corner of x @ x, computed by one operator that does not listen meanwhile."""
    ends = numpy_helper.from_array(np.array([1, 1], np.int64), "ends")
    starts = numpy_helper.from_array(np.array([0, 0], np.int64), "starts")
    return model(
        [
            node("Expand", ["v", "shape"], ["x"]),
            node("MatMul", ["x", "x"], ["p"]),
            node("Slice", ["p", "starts", "ends"], ["y"]),
        ],
        [value("v", FLOAT, [1]), value("shape", INT64, [2])],
        [value("y", FLOAT, ["a", "b"])],
        [starts, ends],
    )


def accumulator() -> ModelProto:
    """x[1], total[1] -> y = x + total, total_out = y: the state is the running sum."""
    return model(
        [node("Add", ["x", "total"], ["y"]), node("Identity", ["y"], ["total_out"])],
        [value("x", FLOAT, [1]), value("total", FLOAT, [1])],
        [value("y", FLOAT, [1]), value("total_out", FLOAT, [1])],
    )


def logarithm() -> ModelProto:
    """x[n] -> log(x): NaN below zero, minus infinity at zero."""
    return model([node("Log", ["x"], ["y"])], [value("x", FLOAT, ["n"])], [value("y", FLOAT, ["n"])])


def filled() -> ModelProto:
    """shape[1] -> y of that many zeros: a small file that can ask for any amount of memory."""
    return model([node("ConstantOfShape", ["shape"], ["y"])], [value("shape", INT64, [1])], [value("y", FLOAT, ["n"])])


def exploding() -> ModelProto:
    """shape[2], total[1] -> y[1] = e + total, total_out = y: two activations of that shape on the way."""
    ones = numpy_helper.from_array(np.ones(1, np.float32))
    one = numpy_helper.from_array(np.array([1], np.int64), "one")
    return model(
        [
            node("ConstantOfShape", ["shape"], ["s"], value=ones),
            node("Exp", ["s"], ["e"]),
            node("ReduceMax", ["e"], ["m"], keepdims=0),
            node("Reshape", ["m", "one"], ["flat"]),
            node("Add", ["flat", "total"], ["y"]),
            node("Identity", ["y"], ["total_out"]),
        ],
        [value("shape", INT64, [2]), value("total", FLOAT, [1])],
        [value("y", FLOAT, [1]), value("total_out", FLOAT, [1])],
        [one],
    )


def strings() -> ModelProto:
    """x[n] of strings -> y = x."""
    return model([node("Identity", ["x"], ["y"])], [value("x", STRING, ["n"])], [value("y", STRING, ["n"])])


def convolutions(channels: int = 16, layers: int = 4, table_mib: int = 0) -> ModelProto:
    """x[1,3,h,w] -> y[1,channels,1,1]: activations as large as the picture, a result that is not.

    With `table_mib`, so much of weights, of which a run looks up one row.
    """
    rng = np.random.default_rng(0)
    nodes, weights, last, width = [], [], "x", 3
    for i in range(layers):
        kernel = (rng.standard_normal((channels, width, 3, 3)) / np.sqrt(9 * width)).astype(np.float32)
        weights.append(numpy_helper.from_array(kernel, f"w{i}"))
        nodes += [node("Conv", [last, f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1]), node("Relu", [f"c{i}"], [f"r{i}"])]
        last, width = f"r{i}", channels
    nodes.append(node("GlobalAveragePool", [last], ["pooled"]))
    table = np.ones((4096, max(1, table_mib << 6)), np.float32)
    weights += [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array(2, np.int64), "two")]
    nodes += [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "two"], ["height"]),
        node("Gather", ["table", "height"], ["row"]),
        node("ReduceMean", ["row"], ["mean"], keepdims=0),
        node("Add", ["pooled", "mean"], ["y"]),
    ]
    return model(nodes, [value("x", FLOAT, [1, 3, "h", "w"])], [value("y", FLOAT, [1, channels, 1, 1])], weights)
