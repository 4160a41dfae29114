"""Make the synthetic models that benchmarks run: chains of matrix products whose sizes set how long they take.

The sizes are constants and the weights come from a frozen generator, so that the bundle digests are the same on every
machine; what a run really takes on this one is measured beside it, every time. Packed with the toolchain's own writers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeinfer import oip
from edgeinfer.artifact.bundle import encode_golden
from edgeinfer.artifact.manifest import Golden, Manifest, Provenance, Runtime, TensorSpec, Variant, read_manifest
from edgeinfer.request import Payload
from edgeinfer_bench.bare import Feeds
from edgeinfer_tools.pack import file_table, staging, write_manifest

_OPSET = 21
_IR_VERSION = 10
_MIB = 1 << 20
_CLASSES = 8
_FILE = "model/fp32.onnx"
_GOLDEN = ("golden/request.bin", "golden/response.bin")


@dataclass(frozen=True, slots=True)
class Chain:
    """`layers` products of a [rows, width] activation with [width, width] weights, one after the other."""

    name: str
    rows: int
    width: int
    layers: int
    nominal_us: int
    """About what a run takes with one thread on a machine like the one that the sizes were chosen on."""
    version: str = "1.0.0"
    seed: int = 1

    @property
    def feeds(self) -> Feeds:
        """What a bare process feeds."""
        return {"x": ("float32", (self.rows, self.width))}

    @property
    def input_bytes(self) -> int:
        """Size of the one input."""
        return self.rows * self.width * 4

    @property
    def peak_bytes(self) -> int:
        """What loading and running it takes at most: weights as read and as packed, activations, and room."""
        return 2 * self.layers * self.width * self.width * 4 + 8 * self.input_bytes + 16 * _MIB


SHORT = Chain("bench-1ms", rows=128, width=256, layers=12, nominal_us=1_000)
LONG = Chain("bench-10ms", rows=256, width=256, layers=56, nominal_us=10_000)
SWAPPED = (
    Chain("bench-swap", rows=1, width=1024, layers=6, nominal_us=1_000, version="1.0.0", seed=2),
    Chain("bench-swap", rows=1, width=1024, layers=6, nominal_us=1_000, version="1.1.0", seed=3),
)
"""Two versions of one model with 24 MB of weights, for swaps."""

HEAVY = Chain("bench-heavy", rows=16, width=2048, layers=7, nominal_us=20_000, seed=4)
"""112 MB of weights, several rows: kernels want them packed."""
HEAVY_ROW = Chain("bench-heavy-row", rows=1, width=2048, layers=7, nominal_us=10_000, seed=4)
"""The same weights for one row at a time, for which raw ones are as fast."""

ONE_OPERATOR = "bench-one-operator"
"""Multiplies two N x N matrices in one operator, N given as input `n`: nothing can stop it half way."""


def build_chain(chain: Chain, folder: Path, *, golden: bool = False) -> Path:
    """Write the chain's bundle below `folder` and return it; one that is there already is taken as it is.

    With `golden` it has a request and its answer, which a device needs before it compiles a model.
    """
    specs = (
        [TensorSpec("x", "FP32", [chain.rows, chain.width])],
        [TensorSpec("y", "FP32", [chain.rows, _CLASSES])],
    )
    variant = Variant(
        name="fp32",
        file=_FILE,
        quality=1.0,
        load_peak_bytes=chain.peak_bytes,
        steady_bytes=chain.peak_bytes,
        latency_us={"1": chain.nominal_us * 3 // 2},
    )
    graph = _chain_graph(chain)
    answers = _golden(chain, graph) if golden else None
    return _pack(folder / f"{chain.name}-{chain.version}", graph, chain, specs, variant, golden=answers)


def build_one_operator(folder: Path, largest: int) -> Path:
    """Write the bundle of the model with one long operator, for N up to `largest`."""
    chain = Chain(ONE_OPERATOR, rows=1, width=1, layers=0, nominal_us=1_000)
    specs = ([TensorSpec("n", "INT64", [2])], [TensorSpec("y", "FP32", [1])])
    peak_bytes = 4 * 4 * largest * largest + 16 * _MIB
    variant = Variant(
        name="fp32", file=_FILE, quality=1.0, load_peak_bytes=peak_bytes, steady_bytes=peak_bytes,
        latency_us={"1": chain.nominal_us},
    )  # fmt: skip
    return _pack(folder / f"{ONE_OPERATOR}-1.0.0", _one_operator_graph(), chain, specs, variant)


def model_file(bundle: Path) -> Path:
    """Return the ONNX file of a bundle made here."""
    return bundle / _FILE


def digest_of(bundle: Path) -> str:
    """Return the bundle digest."""
    return read_manifest(bundle)[1]


def _pack(
    target: Path,
    graph: onnx.GraphProto,
    chain: Chain,
    specs: tuple[list[TensorSpec], list[TensorSpec]],
    variant: Variant,
    *,
    golden: tuple[Payload, Payload] | None = None,
) -> Path:
    if target.exists():
        return target
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    onnx.checker.check_model(model)
    with staging(target, replace=False) as folder:
        (folder / _FILE).parent.mkdir()
        (folder / _FILE).write_bytes(model.SerializeToString(deterministic=True))
        for name, payload in zip(_GOLDEN, golden or (), strict=False):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(encode_golden(payload))
        manifest = Manifest(
            schema=1,
            name=chain.name,
            version=chain.version,
            task="benchmark",
            inputs=specs[0],
            outputs=specs[1],
            variants=[variant],
            runtime=Runtime(onnxruntime="1.32.0", opset=_OPSET, ir_version=_IR_VERSION),
            files=file_table(folder),
            golden=[Golden(*_GOLDEN)] if golden else [],
            provenance=Provenance(source="made by the benchmarks", license="Apache-2.0"),
        )
        write_manifest(folder, manifest)
    return target


def _golden(chain: Chain, graph: onnx.GraphProto) -> tuple[Payload, Payload]:
    """Return a request and its answer; in double precision and then rounded: the same everywhere."""
    x = np.random.RandomState(chain.seed).uniform(-1, 1, (chain.rows, chain.width)).astype(np.float32)
    y = x.astype(np.float64)
    for weight in graph.initializer:
        y = y @ numpy_helper.to_array(weight).astype(np.float64)
    answer = y.astype(np.float32)
    return (
        oip.encode_request([("x", "FP32", list(x.shape), x.tobytes())]),
        oip.encode_response([("y", "FP32", list(answer.shape), answer.tobytes())]),
    )


def _chain_graph(chain: Chain) -> onnx.GraphProto:
    random = np.random.RandomState(chain.seed)
    shapes = [(chain.width, chain.width)] * chain.layers + [(chain.width, _CLASSES)]
    nodes, weights, at = [], [], "x"
    for index, shape in enumerate(shapes):
        values = random.uniform(-1, 1, shape) * np.sqrt(3 / chain.width)  # variance 1/width: magnitudes stay
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"w{index}"))
        after = "y" if index == chain.layers else f"h{index}"
        nodes.append(helper.make_node("MatMul", [at, f"w{index}"], [after], name=f"matmul{index}"))
        at = after
    return helper.make_graph(
        nodes,
        chain.name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [chain.rows, chain.width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [chain.rows, _CLASSES])],
        initializer=weights,
    )


def _one_operator_graph() -> onnx.GraphProto:
    half = numpy_helper.from_array(np.array([0.5], np.float32))
    nodes = [
        helper.make_node("ConstantOfShape", ["n"], ["square"], name="fill", value=half),
        helper.make_node("MatMul", ["square", "square"], ["product"], name="long"),
        helper.make_node("ReduceMax", ["product"], ["peak"], name="peak", keepdims=0),
        helper.make_node("Reshape", ["peak", "one"], ["y"], name="shape"),
    ]
    return helper.make_graph(
        nodes,
        ONE_OPERATOR,
        [helper.make_tensor_value_info("n", TensorProto.INT64, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        initializer=[numpy_helper.from_array(np.array([1], np.int64), "one")],
    )
