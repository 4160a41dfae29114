"""Store a model in half precision, with inputs and outputs (and state) in float32.

The converter is ONNX Runtime's own; onnxconverter-common's is its ancestor and gets no more fixes. On most CPUs the
runtime computes in float32 all the same and casts: half the file, hardly ever faster.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from edgeinfer_tools.model_file import graphs
from edgeinfer_tools.scheme import Scheme

LARGEST = float(np.finfo(np.float16).max)


def halve(model: onnx.ModelProto, scheme: Scheme) -> onnx.ModelProto:
    """Return the model in half precision, but for the excluded nodes and what has no half kernels."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    kept = list(scheme.exclude)
    if scheme.operators:
        kept += [
            node.name for graph in graphs(model.graph) for node in graph.node if node.op_type not in scheme.operators
        ]
    made: onnx.ModelProto = convert_float_to_float16(
        model, keep_io_types=True, op_block_list=list(DEFAULT_OP_BLOCK_LIST), node_block_list=kept
    )
    return made


def too_large(model: onnx.ModelProto) -> list[str]:
    """Return the constants of a float model that half precision cannot hold."""
    return [
        item.name
        for graph in graphs(model.graph)
        for item in graph.initializer
        if item.data_type == TensorProto.FLOAT and np.abs(numpy_helper.to_array(item)).max(initial=0) > LARGEST
    ]
