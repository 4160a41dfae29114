"""Weight-only schemes: the codes mean what the runtime reads, and the better algorithms are better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgeinfer_tools.quantize import quantize
from edgeinfer_tools.ranges import Calibration
from edgeinfer_tools.samples import Array
from edgeinfer_tools.scheme import Scheme
from edgeinfer_tools.session import Runner
from edgeinfer_tools.targets import Target
from tests.tools.test_known_failures import model_of, normal, reader, spec, tensor

TARGET = Target("t", "x86_64", ("avx2",))
RTN4 = Scheme(method="weights", weight_bits=4)


def heavy_tailed(rows: int, columns: int) -> Array:
    """Weights with a few large ones, as trained matrices have."""
    return np.random.default_rng(3).standard_t(3, size=(rows, columns)).astype(np.float32)


def activations(count: int, width: int, seed: int) -> Array:
    """Inputs of low rank and unequal size, as hidden states are: what GPTQ lives on."""
    rng = np.random.default_rng(7)
    mix = rng.normal(size=(width // 4, width)) * rng.lognormal(0, 1, size=width)
    noise = np.random.default_rng(seed)
    return (noise.normal(size=(count, width // 4)) @ mix + 0.05 * noise.normal(size=(count, width))).astype(np.float32)


def error(tmp_path: Path, scheme: Scheme, *, rows: int = 128, columns: int = 48) -> float:
    """Return the relative squared error of x @ w on fresh inputs."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="m")
    weights = [tensor(heavy_tailed(rows, columns), "w")]
    source, out = tmp_path / "float.onnx", tmp_path / f"{hash(scheme)}.onnx"
    onnx.save(model_of([node], {"x": (TensorProto.FLOAT, ["n", rows])}, {"y": ["n", columns]}, weights), source)
    samples = [{"x": activations(32, rows, seed)} for seed in range(4)]
    calibration = Calibration(samples[0], samples=reader(samples, [spec("x", samples[0]["x"])]))
    made = quantize(source, scheme, TARGET, calibration, out)
    assert made.coverage.float_nodes == ()
    assert made.calibration_samples == (4 if scheme.algorithm == "gptq" else 0)
    fresh = {"x": activations(64, rows, 99)}
    want, got = Runner(source).run(fresh)["y"], Runner(out).run(fresh)["y"]
    return float(((got - want) ** 2).sum() / (want**2).sum())


@pytest.mark.parametrize("algorithm", ["rtn", "hqq", "gptq"])
@pytest.mark.parametrize(("bits", "bound"), [(8, 1e-3), (4, 0.05)])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("rows", "block"), [(128, 32), (100, 64), (16, 16)], ids=["even", "padded", "one-block"])
def test_the_runtime_reads_the_codes_as_they_are_meant(
    tmp_path: Path, algorithm: str, bits: int, bound: float, symmetric: bool, rows: int, block: int
) -> None:
    scheme = Scheme(method="weights", weight_bits=bits, algorithm=algorithm, symmetric=symmetric, block_size=block)  # type: ignore[arg-type]
    assert error(tmp_path, scheme, rows=rows) < bound


def test_gptq_halves_the_error_of_rounding(tmp_path: Path) -> None:
    plain = error(tmp_path, RTN4)
    assert error(tmp_path, replace(RTN4, algorithm="gptq")) < 0.5 * plain


def test_int8_compute_is_close(tmp_path: Path) -> None:
    assert error(tmp_path, Scheme(method="weights", int8_compute=True)) < 2e-3


def test_gptq_without_data_says_so(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="m")
    source = tmp_path / "float.onnx"
    onnx.save(model_of([node], {"x": (TensorProto.FLOAT, [1, 16])}, {"y": None}, [tensor(normal(16, 8), "w")]), source)
    with pytest.raises(Exception, match="needs calibration data, and none are given"):
        quantize(
            source, replace(RTN4, algorithm="gptq"), TARGET, Calibration({"x": normal(1, 16)}), tmp_path / "m.onnx"
        )
    assert not (tmp_path / "m.onnx").exists()


def test_excluded_products_stay_as_they_are(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node("Gemm", ["h", "b"], ["y"], name="second"),
    ]
    weights = [tensor(normal(32, 32, seed=1), "a"), tensor(normal(32, 8, seed=2), "b")]
    source = tmp_path / "float.onnx"
    onnx.save(model_of(nodes, {"x": (TensorProto.FLOAT, [1, 32])}, {"y": [1, 8]}, weights), source)
    for name in ("first", "second"):
        made = quantize(source, RTN4.without(name), TARGET, Calibration({"x": normal(1, 32)}), tmp_path / "m.onnx")
        assert made.coverage.float_nodes == (name,)
