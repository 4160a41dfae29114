"""Bake into the graph what silero's Python code does around it: the context and the sample rate.

The detector looks at the last 64 samples of the chunk before; they become a state tensor beside the LSTM's.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CHUNK = 512
CONTEXT = 64
SAMPLE_RATE_HZ = 16000


def prepare(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = model.graph
    constants = {
        "sr": np.array(SAMPLE_RATE_HZ, np.int64),
        "context_begin": np.array([-CONTEXT], np.int64),
        "context_end": np.array([CHUNK], np.int64),
        "one": np.array([1], np.int64),
    }
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    before = [helper.make_node("Concat", ["context", "audio"], ["input"], name="join_context", axis=1)]
    after = [
        helper.make_node(
            "Slice", ["audio", "context_begin", "context_end", "one"], ["next_context"], name="keep_context"
        ),
        helper.make_node("Reshape", ["output", "one"], ["probability"], name="flatten"),
        helper.make_node("Identity", ["stateN"], ["next_state"], name="keep_state"),
    ]
    nodes = [*before, *graph.node, *after]
    del graph.node[:], graph.input[:], graph.output[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.input.extend([_tensor("audio", [1, CHUNK]), _tensor("context", [1, CONTEXT]), _tensor("state", [2, 1, 128])])
    graph.output.extend(
        [_tensor("probability", [1]), _tensor("next_context", [1, CONTEXT]), _tensor("next_state", [2, 1, 128])]
    )
    return model


def _tensor(name: str, shape: list[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
