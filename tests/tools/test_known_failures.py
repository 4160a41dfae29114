"""What quantizers are known to do to people, case by case: here the result is right, or refused in words.

The numbers in the names are those of the field's list of failures (A: export and quantization).
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeinfer.artifact.board import Board
from edgeinfer.artifact.manifest import TensorSpec
from edgeinfer.errors import EdgeInferError, RuntimeUnusable, SessionError
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.faults import DataRefused, ModelRefused
from edgeinfer_tools.quantize import Quantized, quantize
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.samples import Array, Stream
from edgeinfer_tools.scheme import Scheme, default_scheme
from edgeinfer_tools.session import Runner
from edgeinfer_tools.targets import Target, target_of
from tests.tools.conftest import conv_net, matmul_net

AVX2 = Target("avx2-box", "x86_64", ("avx2", "fma"))
VNNI = Target("vnni-box", "x86_64", ("avx2", "avx512_vnni"))
STATIC = Scheme(method="static", per_channel=True)
DYNAMIC = Scheme(method="dynamic")


def tensor(array: object, name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(array, np.float32), name)


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int | str]]],
    outputs: dict[str, list[int | str] | None],
    weights: list[onnx.TensorProto],
    opset: int = 18,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def reader(samples: list[dict[str, Array]], specs: list[TensorSpec]) -> Callable[[], CheckedSamples]:
    def none() -> Runner:
        raise AssertionError

    return lambda: CheckedSamples(
        iter([Stream(f"s{index}", [sample]) for index, sample in enumerate(samples)]), specs, state=[], float_model=none
    )


def spec(name: str, array: Array, datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=list(array.shape))


class Bench:
    """A folder with a float model, and whatever is made of it."""

    def __init__(self, folder: Path, model: onnx.ModelProto, probe: dict[str, Array]) -> None:
        self.source, self.out = folder / "float.onnx", folder / "out" / "int8.onnx"
        onnx.save(model, self.source)
        self.probe = probe

    def make(
        self, scheme: Scheme, target: Target = AVX2, *, samples: list[dict[str, Array]] | None = None, **more: object
    ) -> Quantized:
        kinds = {np.dtype(np.float32): "FP32", np.dtype(np.int64): "INT64"}
        specs = [spec(name, array, kinds[array.dtype]) for name, array in self.probe.items()]
        calibration = Calibration(self.probe, samples=reader(samples or [self.probe], specs))
        return quantize(self.source, scheme, target, calibration, self.out)

    def error(self, probe: dict[str, Array] | None = None) -> float:
        """Return the largest difference of any output from the float model's, over the largest float value."""
        asked = probe or self.probe
        want, got = Runner(self.source).run(asked), Runner(self.out).run(asked)
        assert want.keys() == got.keys()
        return max(float(np.abs(got[n] - want[n]).max() / max(np.abs(want[n]).max(), 1e-9)) for n in want)

    def left(self) -> list[str]:
        return [path.name for path in self.out.parent.iterdir()] if self.out.parent.exists() else []


def int8_weights(path: Path) -> Array:
    arrays = [numpy_helper.to_array(item) for item in onnx.load(str(path)).graph.initializer]
    return np.concatenate([array.reshape(-1) for array in arrays if array.dtype == np.int8 and array.size > 8])


# A1: full-range weights saturate on CPUs without VNNI


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_a1_a_target_without_vnni_gets_weights_that_cannot_saturate(tmp_path: Path, method: str) -> None:
    bench = Bench(tmp_path, matmul_net(), {"x": normal(1, 64)})
    made = bench.make(default_scheme(method, AVX2))  # type: ignore[arg-type]
    weights = int8_weights(bench.out)
    assert (weights.min() >= -64, weights.max() <= 64) == (True, True)
    assert made.instruction_sets == ()
    full = bench.make(default_scheme(method, VNNI), VNNI)  # type: ignore[arg-type]
    assert np.abs(int8_weights(bench.out).astype(int)).max() > 64
    assert full.instruction_sets == ("avx512_vnni",)


def test_a1_a_range_that_saturates_there_is_never_a_default_and_is_told_when_asked_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, matmul_net(), {"x": normal(1, 64)})
    assert not any("saturate" in note for note in bench.make(default_scheme("static", AVX2)).notes)
    asked = bench.make(STATIC)
    assert any("saturate on avx2-box (x86-avx2)" in note for note in asked.notes)
    unsigned = bench.make(Scheme(method="static", unsigned_weights=True))
    assert not any("saturate" in note for note in unsigned.notes)
    assert bench.error() < 0.05


def test_a1_the_bundle_names_the_flag_so_that_a_device_without_it_leaves_the_variant_out(
    vnni_board: Board, tmp_path: Path
) -> None:
    target = target_of(vnni_board)
    made = Bench(tmp_path, matmul_net(), {"x": normal(1, 64)}).make(default_scheme("static", target), target)
    device = {"avx2", "fma"}  # as its /proc/cpuinfo lists them; execution/loader.py asks just this
    assert not device.issuperset(made.instruction_sets)
    assert {*device, "avx512_vnni"}.issuperset(made.instruction_sets)


# A2 is in test_build: a variant that misses a gate ends with status 4, and nothing is published.


def test_a2_what_a_clip_throws_away_is_not_part_of_the_range(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"], name="c"),
        helper.make_node("Clip", ["h", "zero", "six"], ["y"], name="clip"),
    ]
    loud = np.array([100, 0.3, 0.3, 0.3]).reshape(4, 1, 1, 1)  # one channel is far beyond 6 before the clip
    weights = [tensor(normal(4, 3, 3, 3) * loud, "w")]
    weights += [numpy_helper.from_array(np.float32(value), name) for value, name in ((0, "zero"), (6, "six"))]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [1, 3, 8, 8])}, {"y": None}, weights)
    bench = Bench(tmp_path, model, {"x": normal(1, 3, 8, 8)})

    def quiet_channels() -> float:
        want, got = (Runner(path).run(bench.probe)["y"][0, 1:] for path in (bench.source, bench.out))
        return float(np.abs(got - want).mean())

    bench.make(STATIC)
    together = quiet_channels()
    bench.make(Scheme(method="static", per_channel=True, operators=("Conv",)))
    assert together < 0.1 * quiet_channels()


# A3: a dynamic Conv becomes ConvInteger, which older runtimes cannot load


def conv_only() -> onnx.ModelProto:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="convolve")
    return model_of([node], {"x": (TensorProto.FLOAT, [1, 3, 8, 8])}, {"y": None}, [tensor(normal(4, 3, 3, 3), "w")])


def test_a3_dynamic_does_not_touch_convolutions_unless_asked(tmp_path: Path) -> None:
    bench = Bench(tmp_path, conv_only(), {"x": normal(1, 3, 8, 8)})
    with pytest.raises(ModelRefused, match="none of MatMul, Gemm, Gather to quantize"):
        bench.make(DYNAMIC)
    assert bench.left() == []


OLD_RUNTIME = '''#!{python}
"""A stand-in for a Python whose older onnxruntime has no kernel for ConvInteger."""
import sys, types, runpy
sys.path[:] = [path for path in {path!r}] + sys.path
fake = types.ModuleType("onnxruntime")
fake.__version__ = "1.17.3"
fake.GraphOptimizationLevel = types.SimpleNamespace(ORT_DISABLE_ALL=0, ORT_ENABLE_ALL=99)
fake.SessionOptions = type("SessionOptions", (), {{}})
def load(path, *_, **__):
    if b"ConvInteger" in open(path, "rb").read():
        raise RuntimeError("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for "
                           "ConvInteger(10) node with name 'convolve_quant'")
    return types.SimpleNamespace(run=lambda *_: [])
fake.InferenceSession = load
sys.modules["onnxruntime"] = fake
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
'''


@pytest.fixture
def old_runtime(tmp_path: Path) -> Path:
    path = tmp_path / "old-python"
    path.write_text(OLD_RUNTIME.format(python=sys.executable, path=[p for p in sys.path if p]))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a3_what_the_devices_runtime_cannot_load_is_refused_in_words(tmp_path: Path, old_runtime: Path) -> None:
    bench = Bench(tmp_path, conv_only(), {"x": normal(1, 3, 8, 8)})
    device = Target("old", "x86_64", ("avx2",), old_runtime)
    integer = Scheme(method="dynamic", operators=("Conv",))
    with pytest.raises(
        SessionError, match=r"onnxruntime 1\.17\.3: the runtime has no kernel for ConvInteger\(10\)"
    ) as e:
        bench.make(integer, device)
    assert "ONNXRuntimeError" not in str(e.value)
    assert bench.left() == []
    made = bench.make(default_scheme("static", device), device)
    assert made.runtime == "1.17.3"


@pytest.mark.skipif("EDGEINFER_OLD_PYTHON" not in os.environ, reason="needs a Python with an older onnxruntime")
def test_a3_a_real_older_runtime_judges(tmp_path: Path) -> None:
    model = conv_only()
    model.ir_version = 8
    bench = Bench(tmp_path, model, {"x": normal(1, 3, 8, 8)})
    device = Target("old", "x86_64", ("avx2",), Path(os.environ["EDGEINFER_OLD_PYTHON"]))
    made = bench.make(default_scheme("static", device), device)
    assert made.runtime < "1.32"
    bench.out.unlink()
    with pytest.raises(SessionError, match="onnxruntime 1"):
        bench.make(Scheme(method="static", activations="u16"), device)
    assert bench.left() == []


def test_a3_a_runtime_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, conv_only(), {"x": normal(1, 3, 8, 8)})
    with pytest.raises(RuntimeUnusable, match="/nowhere/python cannot be started"):
        bench.make(STATIC, Target("gone", "x86_64", (), Path("/nowhere/python")))
    assert bench.left() == []


# A4: quantizing what is quantized already; types that nobody inferred


def two_matmuls() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="one"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "b"], ["y"], name="two"),
    ]
    weights = [tensor(normal(16, 16, seed=seed), name) for seed, name in enumerate("ab")]
    return model_of(nodes, {"x": (TensorProto.FLOAT, [1, 16])}, {"y": [1, 16]}, weights)


@pytest.mark.parametrize(
    "first", [DYNAMIC, STATIC, Scheme(method="weights", weight_bits=4)], ids=["dynamic", "static", "weights"]
)
def test_a4_a_quantized_model_is_refused(tmp_path: Path, first: Scheme) -> None:
    bench = Bench(tmp_path, two_matmuls(), {"x": normal(1, 16)})
    bench.make(first)
    again = Bench(tmp_path, onnx.load(str(bench.out)), bench.probe)
    again.out = tmp_path / "again" / "twice.onnx"
    for scheme in (DYNAMIC, STATIC, Scheme(method="weights"), Scheme(method="fp16")):
        with pytest.raises(ModelRefused, match=r"float\.onnx is already quantized \(it has .*\); start from the float"):
            again.make(scheme)
    assert again.left() == []


def test_a4_types_that_onnx_cannot_infer_are_asked_of_the_runtime(tmp_path: Path) -> None:
    model = two_matmuls()
    model.graph.node[1].op_type = "FastGelu"
    model.graph.node[1].domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    bench = Bench(tmp_path, model, {"x": normal(1, 16)})
    made = bench.make(STATIC, samples=[{"x": normal(1, 16, seed=seed)} for seed in range(8)])
    assert made.coverage.float_nodes == ()
    assert bench.error() < 0.05


def test_a4_an_operator_that_nobody_knows_is_named(tmp_path: Path) -> None:
    model = two_matmuls()
    model.graph.node[1].op_type = "Frobnicate"
    model.graph.node[1].domain = "org.example"
    model.opset_import.append(helper.make_opsetid("org.example", 1))
    bench = Bench(tmp_path, model, {"x": normal(1, 16)})
    with pytest.raises(ModelRefused, match=r"the type of 'r', made by Frobnicate 'relu', is unknown"):
        bench.make(STATIC)


# A5: per-channel dynamic weights that are outputs too; the axis of ConvTranspose


def test_a5_a_weight_that_is_also_an_output(tmp_path: Path) -> None:
    model = matmul_net()
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [64, 64]))
    bench = Bench(tmp_path, model, {"x": normal(1, 64)})
    bench.make(Scheme(method="dynamic", per_channel=True))
    assert bench.error() < 0.05


def test_a5_transposed_convolutions_have_their_own_axis(tmp_path: Path) -> None:
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], name="up", strides=[2, 2])
    # Channels of very different size: a scale along the wrong axis would lose the small ones.
    weights = normal(3, 6, 3, 3) * np.array([1, 1e-3, 1, 1e-3, 1, 1], np.float32).reshape(1, 6, 1, 1)
    model = model_of([node], {"x": (TensorProto.FLOAT, [1, 3, 8, 8])}, {"y": None}, [tensor(weights, "w")])
    bench = Bench(tmp_path, model, {"x": normal(1, 3, 8, 8)})
    bench.make(STATIC, samples=[{"x": normal(1, 3, 8, 8, seed=seed)} for seed in range(8)] + [bench.probe])
    assert bench.error() < 0.05
    scales = [item for item in onnx.load(str(bench.out)).graph.initializer if item.name == "w_scale"]
    assert list(scales[0].dims) == [6]


# A6: Gemm with a transposed weight


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC, Scheme(method="weights")], ids=["dynamic", "static", "weights"])
def test_a6_gemm_with_transb(tmp_path: Path, scheme: Scheme) -> None:
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="g", transB=1)]
    weights = [tensor(normal(24, 32), "w"), tensor(normal(24, seed=1), "b")]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [4, 32])}, {"y": [4, 24]}, weights)
    bench = Bench(tmp_path, model, {"x": normal(4, 32)})
    made = bench.make(scheme)
    assert bench.error() < 0.05
    assert made.coverage.float_nodes == ()


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC, Scheme(method="weights")], ids=["dynamic", "static", "weights"])
def test_a6_one_weight_in_two_gemms_both_ways(tmp_path: Path, scheme: Scheme) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["h"], name="straight"),
        helper.make_node("Gemm", ["h", "w"], ["y"], name="turned", transB=1),
    ]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [4, 32])}, {"y": [4, 32]}, [tensor(normal(32, 32), "w")])
    bench = Bench(tmp_path, model, {"x": normal(4, 32)})
    made = bench.make(scheme)
    assert bench.error() < 0.08
    # Once per axis of the scales; with one copy the fused 8-bit kernel was 22 % off, and nothing said so.
    assert [item.name for item in made.duplicates] == ["w"]
    assert any("tied weights 'w' are stored 2 times" in note for note in made.notes)


def test_a6_kernels_that_disagree_with_the_graph_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer_tools.model_file.with_own_axes", lambda model: model)
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["h"], name="straight"),
        helper.make_node("Gemm", ["h", "w"], ["y"], name="turned", transB=1),
    ]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [4, 32])}, {"y": [4, 32]}, [tensor(normal(32, 32), "w")])
    made = Bench(tmp_path, model, {"x": normal(4, 32)}).make(STATIC)
    assert any("8-bit kernels compute something else than the graph says" in note for note in made.notes)


# A7: variable lengths


@pytest.mark.parametrize("calibrator", ["minmax", "entropy", "percentile"])
def test_a7_calibrators_take_samples_of_different_lengths(tmp_path: Path, calibrator: str) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="m")
    inputs: dict[str, tuple[int, list[int | str]]] = {"x": (TensorProto.FLOAT, [1, "n", 8])}
    source = tmp_path / "float.onnx"
    onnx.save(model_of([node], inputs, {"y": [1, "n", 8]}, [tensor(normal(8, 8), "w")]), source)
    contract = [TensorSpec(name="x", datatype="FP32", shape=[1, -1, 8], max_shape=[1, 16, 8])]
    samples = [{"x": normal(1, count, 8, seed=count)} for count in (3, 5, 9)]
    calibration = Calibration(samples[0], samples=reader(samples, contract))
    scheme = Scheme(method="static", calibrator=calibrator)  # type: ignore[arg-type]
    made = quantize(source, scheme, AVX2, calibration, tmp_path / "int8.onnx")
    assert (made.calibrator, made.calibration_samples) == (calibrator, 3)
    want, got = Runner(source).run(samples[1])["y"], Runner(tmp_path / "int8.onnx").run(samples[1])["y"]
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_a7_where_no_histogram_can_be_made_the_method_really_used_is_recorded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="live"),
        helper.make_node("Mul", ["h", "zero"], ["z"], name="mute"),
        helper.make_node("MatMul", ["z", "w"], ["y"], name="dead"),
    ]
    weights = [tensor(normal(8, 8), "w"), tensor([0], "zero")]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [1, 8])}, {"y": [1, 8]}, weights)
    made = Bench(tmp_path, model, {"x": normal(1, 8)}).make(Scheme(method="static", calibrator="entropy"))
    assert made.calibrator == "entropy; minmax for 2 of 4 tensors"
    assert any("always 0 or empty" in note for note in made.notes)


# A8 is in test_quantize: memory does not grow with the number of samples; and there is a cap.


def test_a8_the_memory_cap_ends_calibration_with_the_numbers(tmp_path: Path) -> None:
    probe = {"x": normal(1, 64)}
    bench = Bench(tmp_path, matmul_net(), probe)
    calibration = Calibration(probe, samples=reader([probe] * 3, [spec("x", probe["x"])]), cap_bytes=1 << 20)
    with pytest.raises(ModelRefused, match=r"calibrating took .* after 1 samples, the cap is 1\.0 MiB"):
        quantize(bench.source, STATIC, AVX2, calibration, bench.out)
    assert bench.left() == []


# A9: bias beside tiny weights


def test_a9_a_bias_beside_tiny_weights_survives(tmp_path: Path) -> None:
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], name="c")
    weights = [tensor(normal(2, 3, 3, 3) * 1e-9, "w"), tensor([5, -4.5], "b")]
    model = model_of([node], {"x": (TensorProto.FLOAT, [1, 3, 8, 8])}, {"y": None}, weights)
    bench = Bench(tmp_path, model, {"x": normal(1, 3, 8, 8)})
    for scheme in (STATIC, Scheme(method="static"), Scheme(method="static", per_channel=True, reduced_range=True)):
        bench.make(scheme)
        answer = Runner(bench.out).run(bench.probe)["y"]
        assert np.allclose(answer[0, 0], 5, atol=0.05)
        assert np.allclose(answer[0, 1], -4.5, atol=0.05)


@pytest.mark.parametrize("scheme", [STATIC, DYNAMIC, Scheme(method="weights")], ids=["static", "dynamic", "weights"])
def test_a9_a_bias_of_one_element(tmp_path: Path, scheme: Scheme) -> None:
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="g")
    weights = [tensor(normal(32, 16), "w"), tensor([3.5], "b")]
    model = model_of([node], {"x": (TensorProto.FLOAT, [2, 32])}, {"y": [2, 16]}, weights)
    bench = Bench(tmp_path, model, {"x": normal(2, 32)})
    bench.make(scheme)
    assert bench.error() < 0.05


# A10: degenerate data


@pytest.mark.parametrize("calibrator", ["minmax", "entropy", "percentile"])
@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"x": np.full((1, 3, 16, 16), np.nan, np.float32)}, r"input 'x' holds NaN or infinity"),
        ({"x": np.full((1, 3, 16, 16), np.inf, np.float32)}, r"input 'x' holds NaN or infinity"),
        ({"x": np.zeros((1, 3, 16, 16), np.float32)}, r"are the constant 0 in input 'x'"),
        (None, r"yields no sample"),
        ({"pixels": normal(1, 3, 16, 16)}, r"a sample has inputs pixels; the contract has x"),
    ],
    ids=["NaN", "inf", "zero", "empty", "wrong-name"],
)
def test_a10_degenerate_data_are_refused_by_name(
    tmp_path: Path, sample: dict[str, Array] | None, words: str, calibrator: str
) -> None:
    probe = {"x": normal(1, 3, 16, 16)}
    bench = Bench(tmp_path, conv_net(), probe)
    calibration = Calibration(probe, samples=reader([] if sample is None else [sample] * 3, [spec("x", probe["x"])]))
    scheme = Scheme(method="static", calibrator=calibrator)  # type: ignore[arg-type]
    with pytest.raises(DataRefused, match=words):
        quantize(bench.source, scheme, AVX2, calibration, bench.out)
    assert bench.left() == []


def test_a10_a_segment_number_may_be_constant_but_not_everything(tmp_path: Path) -> None:
    specs = [spec("x", normal(1, 4)), TensorSpec(name="segment", datatype="INT64", shape=[1, 4])]
    segment = np.zeros((1, 4), np.int64)
    good = reader([{"x": normal(1, 4, seed=seed), "segment": segment} for seed in range(3)], specs)()
    while good.get_next() is not None:
        pass
    bad = reader([{"x": np.zeros((1, 4), np.float32), "segment": segment}] * 3, specs)()
    for _ in range(3):
        bad.get_next()
    with pytest.raises(DataRefused, match="constant 0 in input 'x'"):
        bad.get_next()


def test_a10_infinities_that_the_float_model_makes_are_left_out_of_ranges(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Where", ["mask", "x", "hole"], ["h"], name="mask"),
        helper.make_node("MatMul", ["h", "w"], ["y"], name="m"),
        helper.make_node("Identity", ["h"], ["seen"], name="i"),
    ]
    mask = np.array([[True] * 15 + [False]])
    matrix = np.vstack([normal(15, 16), np.zeros((1, 16))])
    weights = [tensor(matrix, "w"), tensor([-np.inf], "hole"), numpy_helper.from_array(mask, "mask")]
    model = model_of(nodes, {"x": (TensorProto.FLOAT, [1, 16])}, {"y": [1, 16], "seen": [1, 16]}, weights)
    made = Bench(tmp_path, model, {"x": normal(1, 16)}).make(STATIC)
    assert any("the float model itself makes NaN or infinity in h" in note for note in made.notes)
    scale = next(item for item in onnx.load(str(made.path)).graph.initializer if item.name == "h_scale")
    assert 0 < float(numpy_helper.to_array(scale)) < 0.1


# A11: two nodes of one name


def test_a11_two_nodes_of_one_name_are_refused_with_both(tmp_path: Path) -> None:
    model = two_matmuls()
    model.graph.node[2].name = "one"
    bench = Bench(tmp_path, model, {"x": normal(1, 16)})
    with pytest.raises(ModelRefused, match=r"2 nodes are named 'one' \(MatMul -> h; MatMul -> y\); names must differ"):
        bench.make(DYNAMIC)
    assert bench.left() == []


@pytest.mark.parametrize("method", ["static", "dynamic", "weights", "fp16", "keep"])
def test_a11_nodes_without_names_get_some_and_the_artefact_runs_at_both_levels(tmp_path: Path, method: str) -> None:
    model = two_matmuls()
    for node in model.graph.node:
        node.name = ""
    bench = Bench(tmp_path, model, {"x": normal(1, 16)})
    bench.make(default_scheme(method, AVX2))  # type: ignore[arg-type]
    for level in ("none", "all"):
        Runner(bench.out, level=level).run(bench.probe)
    assert bench.error() < 0.05


# A12: tied weights


@pytest.mark.parametrize(
    ("scheme", "ratio"),
    [
        (Scheme(method="dynamic", operators=("Gemm",)), 1.2),
        (Scheme(method="dynamic", operators=("Gather", "Gemm")), 0.5),
        (DYNAMIC, 0.5),
        (Scheme(method="weights"), 1.2),
    ],
    ids=["gemm", "both", "default", "weights"],
)
def test_a12_tied_weights_that_come_apart_are_reported_with_the_ratio(
    tmp_path: Path, scheme: Scheme, ratio: float
) -> None:
    nodes = [
        helper.make_node("Gather", ["e", "ids"], ["h"], name="embed"),
        helper.make_node("Gemm", ["h", "e"], ["y"], name="head", transB=1),
    ]
    model = model_of(nodes, {"ids": (TensorProto.INT64, [4])}, {"y": [4, 256]}, [tensor(normal(256, 64), "e")])
    bench = Bench(tmp_path, model, {"ids": np.array([3, 1, 4, 200])})
    made = bench.make(scheme)
    assert made.ratio == pytest.approx(ratio, abs=0.1)
    assert [item.name for item in made.duplicates] == ["e"]
    assert len(made.duplicates[0].copies) == 2
    assert any("tied weights 'e' are stored 2 times" in note for note in made.notes)
    assert any("of the float model's size" in note for note in made.notes) == (ratio > 0.6)
    assert bench.error() < 0.08


# A17: 8 bits that are slower than float. Both latencies are in test_variants; the warning is here.


@pytest.mark.parametrize(("flags", "warned"), [(("asimd",), True), (("asimd", "asimddp"), False)], ids=["pi-4", "pi-5"])
def test_a17_an_arm_board_without_dot_product_is_warned_of(
    tmp_path: Path, flags: tuple[str, ...], warned: bool
) -> None:
    target = Target("board", "aarch64", flags)
    made = Bench(tmp_path, matmul_net(), {"x": normal(1, 64)}).make(default_scheme("static", target), target)
    assert any("lists no asimddp: 8 bits may be slower than float" in note for note in made.notes) == warned


# A18: half precision first


@pytest.mark.parametrize("method", ["dynamic", "static", "weights", "fp16"])
def test_a18_half_precision_weights_are_refused(tmp_path: Path, method: str) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="m")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [1, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [1, 16])],
        [numpy_helper.from_array(normal(16, 16).astype(np.float16), "w")],
    )
    source = tmp_path / "half.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), source)
    calibration = Calibration({"x": normal(1, 16).astype(np.float16)})
    with pytest.raises(ModelRefused, match=r"float16 weights \(w\); quantize from the float32 model") as refused:
        quantize(source, default_scheme(method, AVX2), AVX2, calibration, tmp_path / "out" / "m.onnx")  # type: ignore[arg-type]
    assert refused.value.exit_code != 0
    assert not (tmp_path / "out" / "m.onnx").exists()


# All of them: nothing is left, the source is untouched, and no C++ reaches the user


def test_a_fault_anywhere_leaves_nothing_and_does_not_touch_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, matmul_net(), {"x": normal(1, 64)})
    bench.out.parent.mkdir()
    bench.out.write_bytes(b"the last good one")
    before = bench.source.read_bytes()
    raw = "[ONNXRuntimeError] : 1 : FAIL : /onnxruntime_src/onnxruntime/core/graph/model.cc:149 onnxruntime::Model::Model(x) boom"

    def explode(*_: object, **__: object) -> None:
        raise RuntimeError(raw)

    monkeypatch.setattr("onnxruntime.quantization.quantize_static", explode)
    with pytest.raises(EdgeInferError, match=r"the quantizer cannot take float\.onnx") as refused:
        bench.make(STATIC)
    for trace in ("onnxruntime_src", ".cc", "::", "ONNXRuntimeError"):
        assert trace not in str(refused.value)
    assert bench.source.read_bytes() == before
    assert bench.left() == ["int8.onnx"]
    assert bench.out.read_bytes() == b"the last good one"


def test_the_report_of_a_scheme_is_plain_data(tmp_path: Path) -> None:
    made = Bench(tmp_path, matmul_net(), {"x": normal(1, 64)}).make(STATIC)
    assert json.loads(made.scheme.text()) == {"method": "static", "per_channel": True}
