"""Bake into the recogniser's graph what stands around it in RapidOCR: the resizing of one line, and its characters.

Before: an RGB picture of one line of text, of any size, is brought to 48 rows with its proportions kept. After: of each
step the most probable character, "" where the step says nothing new (blank, or the character of the step before), so
that joining them gives the text: no device needs the dictionary of 18708 characters.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEIGHT = 48
WIDTHS = (32, 2048)
"""Fewer columns than the first are stretched, more than the second are squeezed."""


def prepare(model: onnx.ModelProto) -> onnx.ModelProto:
    characters = _characters(model)
    model.CopyFrom(onnx.version_converter.convert_version(model, 18))
    graph = model.graph
    source, result = graph.input[0].name, graph.output[0].name
    _take_rgb(graph, source)
    constants = {
        "height_at": np.array([1], np.int64),
        "width_at": np.array([2], np.int64),
        "rows": np.array([HEIGHT], np.int64),
        "narrowest": np.array([WIDTHS[0]], np.int64),
        "widest": np.array([WIDTHS[1]], np.int64),
        "round_up": np.array([1], np.int64),
        "batch": np.array([1], np.int64),
        "colours": np.array([3], np.int64),
        "scale": np.array(1 / 127.5, np.float32),
        "one": np.array(1, np.float32),
        "blank": np.array(0, np.int64),
        "nothing": np.array("", object),
        "none_before": np.array([[0]], np.int64),
        "from_first": np.array([0], np.int64),
        "to_last": np.array([-1], np.int64),
        "along": np.array([1], np.int64),
        "flat": np.array([-1], np.int64),
        "characters_known": np.array(characters, object),
    }
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    nodes = [*_before(source), *graph.node, *_after(result)]
    del graph.node[:], graph.input[:], graph.output[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info("image", TensorProto.UINT8, [1, "height", "width", 3]))
    graph.output.append(helper.make_tensor_value_info("characters", TensorProto.STRING, ["steps"]))
    graph.output.append(helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["steps"]))
    return model


def _before(source: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Shape", ["image"], ["image_shape"], name="image_shape"),
        helper.make_node("Gather", ["image_shape", "height_at"], ["height"], name="height"),
        helper.make_node("Gather", ["image_shape", "width_at"], ["width"], name="width"),
        helper.make_node("Mul", ["width", "rows"], ["area"], name="scale_width"),
        helper.make_node("Add", ["area", "height"], ["more"], name="round_width"),
        helper.make_node("Sub", ["more", "round_up"], ["almost"], name="round_width_up"),
        helper.make_node("Div", ["almost", "height"], ["columns_wanted"], name="divide_width"),
        helper.make_node("Max", ["columns_wanted", "narrowest"], ["columns_enough"], name="widen"),
        helper.make_node("Min", ["columns_enough", "widest"], ["columns"], name="squeeze"),
        helper.make_node("Concat", ["batch", "rows", "columns", "colours"], ["size"], name="size", axis=0),
        helper.make_node("Resize", ["image", "", "", "size"], ["line_u8"], name="resize", mode="linear",
                         coordinate_transformation_mode="half_pixel"),
        helper.make_node("Cast", ["line_u8"], ["line"], name="to_float", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["line", "scale"], ["scaled"], name="scale_pixels"),
        helper.make_node("Sub", ["scaled", "one"], ["centred"], name="centre_pixels"),
        helper.make_node("Transpose", ["centred"], [source], name="to_nchw", perm=[0, 3, 1, 2]),
    ]  # fmt: skip


def _after(result: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("ReduceMax", [result, "width_at"], ["highest"], name="find_highest", keepdims=0),
        helper.make_node("Reshape", ["highest", "flat"], ["probabilities"], name="shape_probabilities"),
        helper.make_node("ArgMax", [result], ["found"], name="find_character", axis=2, keepdims=0),
        helper.make_node("Slice", ["found", "from_first", "to_last", "along"], ["earlier"], name="shift"),
        helper.make_node("Concat", ["none_before", "earlier"], ["before"], name="begin", axis=1),
        helper.make_node("Equal", ["found", "before"], ["repeated"], name="find_repeated"),
        helper.make_node("Equal", ["found", "blank"], ["empty"], name="find_blank"),
        helper.make_node("Or", ["repeated", "empty"], ["silent"], name="find_silent"),
        helper.make_node("Gather", ["characters_known", "found"], ["spelt"], name="spell"),
        helper.make_node("Where", ["silent", "nothing", "spelt"], ["said"], name="say"),
        helper.make_node("Reshape", ["said", "flat"], ["characters"], name="shape_characters"),
    ]


def _characters(model: onnx.ModelProto) -> list[str]:
    """Return the text of each class: the blank, what the file's own metadata lists, and the space."""
    (listed,) = (item.value for item in model.metadata_props if item.key == "character")
    return ["", *listed.splitlines(), " "]


def _take_rgb(graph: onnx.GraphProto, source: str) -> None:
    """Swap the first convolution's input channels: it was trained on BGR, pictures are RGB."""
    first = next(node for node in graph.node if node.op_type == "Conv" and source in node.input)
    weights = next(item for item in graph.initializer if item.name == first.input[1])
    weights.CopyFrom(
        numpy_helper.from_array(np.ascontiguousarray(numpy_helper.to_array(weights)[:, ::-1]), weights.name)
    )
