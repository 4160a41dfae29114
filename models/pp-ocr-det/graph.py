"""Bake into the detector's graph what a camera loop would do around it.

Before: an RGB frame of any size is resized, normalised as in RapidOCR and laid out as the detector wants. After: the
1.2 MB probability map becomes a coarse grid and two numbers.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEIGHT, WIDTH = 384, 512
CELL = 8
TEXT_THRESHOLD = 0.3
"""Probability from which RapidOCR counts a pixel as text."""


def prepare(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = model.graph
    source, result = graph.input[0].name, graph.output[0].name
    model.CopyFrom(onnx.version_converter.convert_version(model, 18))
    graph = model.graph
    _take_rgb(graph, source)
    constants = {
        "size": np.array([1, HEIGHT, WIDTH, 3], np.int64),
        "scale": np.array(1 / 127.5, np.float32),
        "one": np.array(1, np.float32),
        "text_threshold": np.array(TEXT_THRESHOLD, np.float32),
        "map_shape": np.array([1, HEIGHT // CELL, WIDTH // CELL], np.int64),
        "single": np.array([1], np.int64),
    }
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    before = [
        helper.make_node("Resize", ["image", "", "", "size"], ["frame_u8"], name="resize", mode="linear",
                         coordinate_transformation_mode="half_pixel"),
        helper.make_node("Cast", ["frame_u8"], ["frame"], name="to_float", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["frame", "scale"], ["scaled"], name="scale_pixels"),
        helper.make_node("Sub", ["scaled", "one"], ["centred"], name="centre_pixels"),
        helper.make_node("Transpose", ["centred"], [source], name="to_nchw", perm=[0, 3, 1, 2]),
    ]  # fmt: skip
    after = [
        helper.make_node(
            "AveragePool", [result], ["cells"], name="coarsen", kernel_shape=[CELL, CELL], strides=[CELL, CELL]
        ),
        helper.make_node("Reshape", ["cells", "map_shape"], ["text_map"], name="shape_map"),
        helper.make_node("ReduceMax", [result], ["highest"], name="find_highest", keepdims=0),
        helper.make_node("Reshape", ["highest", "single"], ["score"], name="shape_score"),
        helper.make_node("GreaterOrEqual", [result, "text_threshold"], ["is_text"], name="find_text"),
        helper.make_node("Cast", ["is_text"], ["text_share"], name="count_text", to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["text_share"], ["covered"], name="average_text", keepdims=0),
        helper.make_node("Reshape", ["covered", "single"], ["coverage"], name="shape_coverage"),
    ]
    nodes = [*before, *graph.node, *after]
    del graph.node[:], graph.input[:], graph.output[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info("image", TensorProto.UINT8, [1, "height", "width", 3]))
    graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("text_map", [1, HEIGHT // CELL, WIDTH // CELL]), ("score", [1]), ("coverage", [1]))
    )
    return model


def _take_rgb(graph: onnx.GraphProto, source: str) -> None:
    """Swap the first convolution's input channels: it was trained on BGR, frames are RGB."""
    first = next(node for node in graph.node if node.op_type == "Conv" and source in node.input)
    weights = next(item for item in graph.initializer if item.name == first.input[1])
    weights.CopyFrom(
        numpy_helper.from_array(np.ascontiguousarray(numpy_helper.to_array(weights)[:, ::-1]), weights.name)
    )
