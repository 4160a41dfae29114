"""The classifier's graph: count known words, weigh them, squash."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeinfer_tools.graph import compose

WEIGHTS = {"refund": 2.2, "charged": 1.8, "invoice": 1.4, "error": 0.9, "hello": -0.8, "thanks": -0.5}
BIAS = -0.4


def make_graph() -> onnx.ModelProto:
    words = list(WEIGHTS)
    nodes = [
        helper.make_node(
            "TfIdfVectorizer", ["text"], ["counts"], name="count", mode="TF", min_gram_length=1, max_gram_length=1,
            max_skip_count=0, ngram_counts=[0], ngram_indexes=list(range(len(words))), pool_strings=words,
        ),
        helper.make_node("Unsqueeze", ["counts", "first_axis"], ["row"], name="row"),
        helper.make_node("Gemm", ["row", "weights", "bias"], ["score"], name="weigh"),
        helper.make_node("Sigmoid", ["score"], ["share"], name="squash"),
        helper.make_node("Reshape", ["share", "one"], ["probability"], name="flatten"),
    ]  # fmt: skip
    constants = [
        numpy_helper.from_array(np.array(list(WEIGHTS.values()), np.float32)[:, np.newaxis], "weights"),
        numpy_helper.from_array(np.array([BIAS], np.float32), "bias"),
        numpy_helper.from_array(np.array([0], np.int64), "first_axis"),
        numpy_helper.from_array(np.array([1], np.int64), "one"),
    ]
    return compose(
        nodes,
        [helper.make_tensor_value_info("text", TensorProto.STRING, ["words"])],
        [helper.make_tensor_value_info("probability", TensorProto.FLOAT, [1])],
        constants,
        name="support_intent",
        opset=18,
    )
