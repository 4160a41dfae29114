"""Weights have the range that the board computes right, and what cannot be quantized is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.quantize import quantize
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.samples import Stream
from edgeinfer_tools.scheme import Method, default_scheme
from edgeinfer_tools.session import Runner
from edgeinfer_tools.targets import target_of, weight_range
from tests.tools.conftest import conv_net, matmul_net


def int8_weights(path: Path) -> np.ndarray:
    arrays = [numpy_helper.to_array(item) for item in onnx.load(str(path)).graph.initializer]
    return np.concatenate([a.reshape(-1) for a in arrays if a.dtype == np.int8 and a.size > 8])


def samples_of(*shape: int) -> CheckedSamples:
    rng = np.random.default_rng(0)
    streams = (Stream(str(i), [{"x": rng.normal(size=shape).astype(np.float32)}]) for i in range(8))
    return CheckedSamples(
        streams, [TensorSpec(name="x", datatype="FP32", shape=list(shape))], state=[], float_model=none
    )


def none() -> Runner:
    raise AssertionError


def build(board: Board, tmp_path: Path, method: Method, model: onnx.ModelProto, *shape: int) -> Path:
    source, out = tmp_path / "float.onnx", tmp_path / f"{board.name}-{method}.onnx"
    onnx.save(model, source)
    calibration = Calibration({"x": np.zeros(shape, np.float32)}, samples=lambda: samples_of(*shape))
    target = target_of(board)
    return quantize(source, default_scheme(method, target), target, calibration, out).path


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_a_board_without_vnni_gets_seven_bits(board: Board, tmp_path: Path, method: Method) -> None:
    weights = int8_weights(build(board, tmp_path, method, matmul_net(), 1, 64))
    assert weights.min() >= -64
    assert weights.max() <= 64
    assert weight_range(board).instruction_sets == ()


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_a_board_with_vnni_gets_eight_bits_and_the_variant_says_so(
    vnni_board: Board, tmp_path: Path, method: Method
) -> None:
    weights = int8_weights(build(vnni_board, tmp_path, method, matmul_net(), 1, 64))
    assert max(-int(weights.min()), int(weights.max())) > 64
    assert weight_range(vnni_board).instruction_sets == ("avx512_vnni",)


def test_an_arm_board_gets_eight_bits_that_no_x86_may_run(arm_board: Board) -> None:
    found = weight_range(arm_board)
    assert not found.reduced
    assert found.instruction_sets == ("asimd",)


def test_convolutions_are_quantized_per_channel(board: Board, tmp_path: Path) -> None:
    path = build(board, tmp_path, "static", conv_net(), 1, 3, 16, 16)
    model = onnx.load(str(path))
    scales = {item.name: item for item in model.graph.initializer if item.name.endswith("_scale")}
    assert list(scales["w1_scale"].dims) == [8]
    Runner(path).run({"x": np.zeros((1, 3, 16, 16), np.float32)})


def test_half_precision_is_refused(board: Board, tmp_path: Path) -> None:
    model = matmul_net()
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(2, np.float16), "half"))
    with pytest.raises(ModelRefused, match=r"dynamic .*float16 weights .half.*float32"):
        build(board, tmp_path, "dynamic", model, 1, 64)


def test_a_graph_with_nothing_to_quantize_is_refused(board: Board, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="none of MatMul, Gemm"):
        build(board, tmp_path, "dynamic", conv_net(), 1, 3, 16, 16)


_CALIBRATE = """
import resource, sys
from pathlib import Path
import numpy as np, onnx
from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.quantize import quantize
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.samples import Stream
from edgeinfer_tools.scheme import Scheme
from edgeinfer_tools.targets import Target
from tests.tools.conftest import conv_net

folder, count, calibrator = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
model = conv_net()
for item in (*model.graph.input, *model.graph.output):
    for axis in (2, 3):
        item.type.tensor_type.shape.dim[axis].dim_value = 256
onnx.save(model, folder / "float.onnx")
rng = np.random.default_rng(0)
streams = (Stream(str(i), [{"x": rng.normal(size=(1, 3, 256, 256)).astype(np.float32)}]) for i in range(count))
samples = CheckedSamples(streams, [TensorSpec(name="x", datatype="FP32", shape=[1, 3, 256, 256])], state=[],
                         float_model=lambda: None)
calibration = Calibration({"x": np.zeros((1, 3, 256, 256), np.float32)}, samples=lambda: samples)
made = quantize(folder / "float.onnx", Scheme(method="static", calibrator=calibrator), Target("t", "x86_64", ()),
                calibration, folder / "int8.onnx")
assert (made.calibration_samples, made.calibrator) == (count, calibrator)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("calibrator", ["minmax", "percentile"])
def test_calibration_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path, calibrator: str) -> None:
    def peak_kib(count: int) -> int:
        command = [sys.executable, "-c", _CALIBRATE, str(tmp_path), str(count), calibrator]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)

    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "ORT_DISABLE_TELEMETRY": "1"}
    assert peak_kib(128) < 1.3 * peak_kib(8)
