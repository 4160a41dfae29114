"""Quantize only the weights of matrix products, in blocks of 8 or 4 bits; activations stay float.

The graph surgery is ONNX Runtime's `MatMulNBitsQuantizer`, bodies of If and Loop included; so is rounding to nearest.
Its HQQ needs torch and its GPTQ keeps all samples in memory, so these two choose the codes here, after the published
methods, and hand them to the same surgery.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantizer as _Rtn

from edgeinfer_tools.model_file import graphs
from edgeinfer_tools.samples import Array
from edgeinfer_tools.scheme import Scheme
from edgeinfer_tools.session import Runner

INT8_COMPUTE = 4
"""The runtime's accuracy level that lets it round activations to 8 bits."""
DAMPING = 0.01
"""GPTQ: share of the mean diagonal that is added to the Hessian."""
LAZY = 128
"""GPTQ: columns whose updates are done together."""
HQQ_ROUNDS, HQQ_NORM, HQQ_BETA, HQQ_KAPPA = 20, 0.7, 10.0, 1.01
"""As in the method's publication."""


def quantize_weights(
    model: onnx.ModelProto, scheme: Scheme, samples: Iterable[Mapping[str, Array]] | None
) -> onnx.ModelProto:
    """Return the model with `MatMulNBits` in place of products by constant matrices.

    `samples` are for GPTQ, and read once; what they say about each matrix is kept, not they.
    """
    if "Gemm" in scheme.op_types:
        _gemm_to_matmul(model, set(scheme.exclude))
    config = DefaultWeightOnlyQuantConfig(
        block_size=scheme.block_size,
        is_symmetric=scheme.symmetric,
        bits=scheme.weight_bits,
        accuracy_level=INT8_COMPUTE if scheme.int8_compute else 0,
        op_types_to_quantize=("MatMul",),
    )
    quantizer = MatMulNBitsQuantizer(
        model,
        bits=scheme.weight_bits,
        block_size=scheme.block_size,
        is_symmetric=scheme.symmetric,
        nodes_to_exclude=list(scheme.exclude),
        algo_config=config,
    )
    if scheme.algorithm != "rtn":
        hessians = hessians_of(model, samples or (), scheme) if scheme.algorithm == "gptq" else None
        quantizer.node_quantizer = _Chosen(config, scheme, hessians)
    quantizer.process()
    made: onnx.ModelProto = quantizer.model.model
    return made


class _Chosen(_Rtn):  # type: ignore[misc]
    """The runtime's surgery with codes that HQQ or GPTQ chose."""

    def __init__(self, config: Any, scheme: Scheme, hessians: dict[str, Array] | None) -> None:
        super().__init__(config)
        self._scheme = scheme
        self._hessians = hessians
        self._node = ""

    def quantize_matmul(self, node: Any, graph_stack: Any) -> Any:
        self._node = node.name
        return super().quantize_matmul(node, graph_stack)

    def qbits_block_quant(self, fp32weight: Any) -> tuple[Array, Array, Array]:
        matrix = np.asarray(fp32weight)
        if self._hessians is None:
            codes, scales, zeros = hqq(matrix, self._scheme)
        elif self._node in self._hessians:
            codes, scales, zeros = gptq(matrix, self._hessians[self._node], self._scheme)
        else:  # in a body: what it is multiplied with was not seen
            plain: tuple[Array, Array, Array] = super().qbits_block_quant(fp32weight)
            return plain
        return pack(codes, self._scheme.weight_bits), scales.astype(matrix.dtype), _pack_zeros(zeros, self._scheme)


def block_parameters(blocks: Array, scheme: Scheme) -> tuple[Array, Array]:
    """Return scale and zero point of blocks `[…, block_size, columns]`, over their last axis but one.

    As the runtime's kernels have it: with zero points the range holds 0; symmetric blocks have the middle as zero.
    """
    top = (1 << scheme.weight_bits) - 1
    middle = 1 << (scheme.weight_bits - 1)
    if scheme.symmetric:
        scale = np.abs(blocks).max(axis=-2) / (middle - 1)
        scale[scale == 0] = 1
        return scale, np.full(scale.shape, float(middle))
    low, high = np.minimum(blocks.min(axis=-2), 0), np.maximum(blocks.max(axis=-2), 0)
    scale = (high - low) / top
    scale[scale == 0] = 1
    return scale, np.clip(np.round(-low / scale), 0, top)


def hqq(matrix: Array, scheme: Scheme) -> tuple[Array, Array, Array]:
    """Return codes `[blocks, block_size, N]`, scales and zero points `[N, blocks]` by half-quadratic quantization.

    Moves the zero points so that few large errors are preferred over many small ones (a norm below 1).
    """
    blocks = _blocks(matrix, scheme.block_size)
    top = (1 << scheme.weight_bits) - 1
    scale, zero = block_parameters(blocks, scheme)
    best, beta = zero, HQQ_BETA
    best_error: Array = np.full(zero.shape, np.inf, np.float64)
    for _ in range(0 if scheme.symmetric else HQQ_ROUNDS):
        codes = np.clip(np.round(blocks / scale[:, None] + zero[:, None]), 0, top)
        back = (codes - zero[:, None]) * scale[:, None]
        difference = blocks - back
        error: Array = np.asarray(np.abs(difference).mean(axis=1))
        best, best_error = np.where(error < best_error, zero, best), np.asarray(np.minimum(error, best_error))
        magnitude = np.abs(difference)
        shrunk = np.sign(difference) * np.maximum(magnitude - (magnitude + 1e-8) ** (HQQ_NORM - 1) / beta, 0)
        zero = np.asarray(np.clip(np.round(np.mean(codes - (blocks - shrunk) / scale[:, None], axis=1)), 0, top))
        beta *= HQQ_KAPPA
    codes = np.clip(np.round(blocks / scale[:, None] + best[:, None]), 0, top)
    return codes.astype(np.uint8), scale.T, best.T.astype(np.uint8)


def gptq(matrix: Array, hessian: Array, scheme: Scheme) -> tuple[Array, Array, Array]:
    """Return codes, scales and zero points like `hqq`: each row's error is paid back by the rows still to come."""
    rows, columns = matrix.shape
    size, top = scheme.block_size, (1 << scheme.weight_bits) - 1
    weights, curvature = matrix.astype(np.float64).copy(), hessian.astype(np.float64).copy()
    dead = np.diag(curvature) == 0
    curvature[dead, dead] = 1
    curvature[np.diag_indices(rows)] += DAMPING * np.mean(np.diag(curvature))
    upper = np.linalg.cholesky(np.linalg.inv(curvature)).T
    count = -(-rows // size)
    codes = np.zeros((count * size, columns), np.uint8)
    scales, zeros = np.ones((count, columns)), np.zeros((count, columns))
    for start in range(0, rows, LAZY):
        end = min(start + LAZY, rows)
        errors = np.zeros((end - start, columns))
        for row in range(start, end):
            block = row // size
            if row % size == 0:
                # Later rows of a lazy batch are up to date only within it; blocks longer than a batch see stale rows.
                scales[block], zeros[block] = block_parameters(weights[row : row + size], scheme)
            code = np.clip(np.round(weights[row] / scales[block] + zeros[block]), 0, top)
            codes[row] = code
            errors[row - start] = (weights[row] - (code - zeros[block]) * scales[block]) / upper[row, row]
            weights[row + 1 : end] -= np.outer(upper[row, row + 1 : end], errors[row - start])
        weights[end:] -= upper[start:end, end:].T @ errors
    padding = np.arange(rows, count * size)
    codes[padding] = zeros[-1]
    return codes.reshape(count, size, columns), scales.T, zeros.T.astype(np.uint8)


def hessians_of(model: onnx.ModelProto, samples: Iterable[Mapping[str, Array]], scheme: Scheme) -> dict[str, Array]:
    """Return, by node, the sum of outer products of what each constant matrix is multiplied with."""
    constants = {item.name for item in model.graph.initializer}
    watched = {
        node.name: node.input[0]
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in constants and node.name not in scheme.exclude
    }
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    inputs = {item.name for item in model.graph.input}
    del probe.graph.output[:]
    names = sorted(set(watched.values()) - inputs)
    probe.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    runner = Runner(probe.SerializeToString(), level="basic", threads=0) if names else None
    sums: dict[str, Array] = {}
    for sample in samples:
        values = {**sample, **(runner.run(sample) if runner else {})}
        for name in set(watched.values()):
            flat = values[name].reshape(-1, values[name].shape[-1]).astype(np.float32)
            sums[name] = sums.get(name, np.float32(0)) + flat.T @ flat
    return {node: sums[name] for node, name in watched.items() if name in sums}


def _blocks(matrix: Array, size: int) -> Array:
    """Return `[blocks, size, columns]`, padded with zeros."""
    rows, columns = matrix.shape
    count = -(-rows // size)
    padded = np.zeros((count * size, columns), np.float32)
    padded[:rows] = matrix
    return padded.reshape(count, size, columns)


def pack(codes: Array, bits: int) -> Array:
    """Return codes `[blocks, block_size, N]` as the runtime stores them: `[N, blocks, bytes]`, low bits first."""
    turned = np.ascontiguousarray(codes.transpose(2, 0, 1))
    if bits == 8:
        return turned
    packed: Array = turned[:, :, 0::2] | (turned[:, :, 1::2] << 4)
    return packed


def _pack_zeros(zeros: Array, scheme: Scheme) -> Array:
    """Return zero points `[N, blocks]` packed along the blocks."""
    if scheme.weight_bits == 8:
        return np.ascontiguousarray(zeros)
    if zeros.shape[1] % 2:
        zeros = np.pad(zeros, ((0, 0), (0, 1)))
    packed: Array = zeros[:, 0::2] | (zeros[:, 1::2] << 4)
    return packed


def _gemm_to_matmul(model: onnx.ModelProto, exclude: set[str]) -> None:
    """Turn Gemm by a constant matrix into MatMul and Add, in every body, under the same name."""
    for graph in graphs(model.graph):
        constants = {item.name: item for item in graph.initializer}
        nodes, used = [], {}
        for node in graph.node:
            attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
            factors = tuple(attributes.get(name, usual) for name, usual in (("alpha", 1), ("beta", 1), ("transA", 0)))
            plain = factors == (1, 1, 0)
            if node.op_type != "Gemm" or node.input[1] not in constants or not plain or node.name in exclude:
                nodes.append(node)
                continue
            weight = node.input[1]
            if attributes.get("transB", 0):
                weight = f"{weight}.edgeinfer.transposed"
                used[weight] = numpy_helper.from_array(
                    np.ascontiguousarray(numpy_helper.to_array(constants[node.input[1]]).T), weight
                )
            bias = len(node.input) > 2 and node.input[2]
            product = f"{node.output[0]}.edgeinfer.product" if bias else node.output[0]
            nodes.append(helper.make_node("MatMul", [node.input[0], weight], [product], name=node.name))
            if bias:
                name = f"{node.name}.edgeinfer.bias"
                nodes.append(helper.make_node("Add", [product, node.input[2]], [node.output[0]], name=name))
        del graph.node[:]
        graph.node.extend(nodes)
        graph.initializer.extend(used.values())
