"""Turn a float model into one quantized form of it, prove that it runs, and say what became of it.

`quantize` is a function of its arguments: a search may call it many times with the same calibration, whose statistics
are kept between calls. It refuses what cannot come out right, and writes `out` only when the artefact ran here (and
under the device's runtime, where that is given). How good the artefact is, is judged by `evaluate`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import TensorProto

from edgeinfer.errors import EdgeInferError
from edgeinfer_tools import float16, model_file
from edgeinfer_tools.coverage import Coverage, coverage, workload
from edgeinfer_tools.faults import ModelRefused, plain
from edgeinfer_tools.graph import quantized_operators
from edgeinfer_tools.ranges import Calibration, encode_ranges
from edgeinfer_tools.scheme import CLIPPING, Scheme
from edgeinfer_tools.sizes import human
from edgeinfer_tools.smoke import smoke
from edgeinfer_tools.targets import Target

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

POOR_RATIO = 0.6
"""An 8-bit file that is larger than this share of the float one was hardly quantized."""
LARGE_DISAGREEMENT = 0.1
"""Share of the largest output by which fused kernels may differ from the plain graph; a step of 8 bits is 0.4 %."""
_TYPES = {"u8": "QUInt8", "s8": "QInt8", "u16": "QUInt16", "s16": "QInt16"}


@dataclass(frozen=True, slots=True)
class Duplicate:
    """One constant of the float model that the artefact holds more than once."""

    name: str
    copies: tuple[str, ...]
    size_bytes: int
    """Of all copies."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """What `quantize` made."""

    scheme: Scheme
    path: Path
    size_bytes: int
    """Of all its files."""
    float_size_bytes: int
    calibrator: str
    """The method that the ranges really come from; empty without calibration."""
    calibration_samples: int
    coverage: Coverage
    duplicates: tuple[Duplicate, ...]
    instruction_sets: tuple[str, ...]
    """What a CPU must have for the number range to be right."""
    runtime: str
    """The oldest onnxruntime that it was proved with."""
    seconds: float
    notes: tuple[str, ...] = field(default=())
    """What the user should know, in words."""

    @property
    def ratio(self) -> float:
        """Size against the float model's."""
        return self.size_bytes / self.float_size_bytes


@dataclass(frozen=True, slots=True)
class _Made:
    """A model before it is proved."""

    model: onnx.ModelProto
    calibrator: str = ""
    samples: int = 0
    notes: tuple[str, ...] = ()


def quantize(model_path: Path, scheme: Scheme, target: Target, calibration: Calibration, out: Path) -> Quantized:
    """Write the model, quantized by `scheme` for `target`, as `out`; large weights lie beside it as `OUT.data`.

    Nothing is written unless the artefact loads and runs with and without graph optimisation. The source is only read.

    Raises:
        ConfigError: the scheme contradicts itself.
        ModelRefused: the model is quantized already, is in half precision, or has nothing that the scheme quantizes.
        DataRefused: the calibration data are unusable.
        SessionError: the artefact does not load or run.
    """
    began = time.monotonic()
    scheme.check()
    source = model_file.load(model_path)
    _refuse(source, scheme, model_path.name)
    work = workload(source, calibration.probe, calibration.state)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        made = convert(model_path, source, scheme, calibration)
        staged = Path(folder) / out.name
        if scheme.method == "keep":
            _copy(model_path, Path(folder), out.name)
        else:
            model_file.save(made.model, staged)
        proof = smoke(staged, calibration.probe, calibration.state)
        runtime = proof.onnxruntime
        if target.runtime_python is not None:
            python = target.runtime_python
            runtime = smoke(staged, calibration.probe, calibration.state, python=python).onnxruntime
        kept = coverage(work, made.model)
        size, before = model_file.size_bytes(staged), model_file.size_bytes(model_path)
        copies = duplicates(source, made.model)
        for item in sorted(Path(folder).iterdir(), key=lambda path: path == staged):  # the model last, its data first
            item.replace(out.parent / item.name)
    notes = [*made.notes, *_notes(scheme, target, (size, before), kept, copies)]
    if proof.disagreement > LARGE_DISAGREEMENT:
        notes.append(
            f"its outputs change by {proof.disagreement:.0%} of their largest value when the runtime optimises the "
            "graph: rounding is amplified that much, or this machine's 8-bit kernels compute something else than the "
            "graph says; believe nothing but the gates"
        )
    exact = not scheme.quantized or scheme.unsigned_weights or scheme.method == "weights"
    return Quantized(
        scheme=scheme,
        path=out,
        size_bytes=size,
        float_size_bytes=before,
        calibrator=made.calibrator,
        calibration_samples=made.samples,
        coverage=kept,
        duplicates=copies,
        instruction_sets=() if exact or scheme.reduced_range else target.weights.instruction_sets,
        runtime=runtime,
        seconds=time.monotonic() - began,
        notes=tuple(notes),
    )


def _copy(source: Path, folder: Path, name: str) -> None:
    for path in model_file.files_of(source):
        shutil.copyfile(path, folder / (name if path == source else path.name))


def _refuse(model: onnx.ModelProto, scheme: Scheme, name: str) -> None:
    """Refuse what quantizers accept and spoil.

    Raises:
        ModelRefused: see `quantize`.
    """
    if scheme.method == "keep":
        return
    if found := quantized_operators(model):
        raise ModelRefused(f"{name} is already quantized (it has {', '.join(found)}); start from the float model")
    halves = [
        item.name
        for graph in model_file.graphs(model.graph)
        for item in graph.initializer
        if item.data_type == TensorProto.FLOAT16
    ]
    if halves:
        raise ModelRefused(
            f"{scheme.title}: the graph has float16 weights ({', '.join(halves[:3])}); quantize from the float32 model"
        )
    nodes = [node for graph in model_file.graphs(model.graph) for node in graph.node]
    if unknown := sorted(set(scheme.exclude) - {node.name for node in nodes}):
        raise ModelRefused(
            f"{scheme.title}: the graph has no node named {', '.join(map(repr, unknown[:3]))} to exclude"
        )
    kinds = [kind for kind in scheme.op_types if kind not in CLIPPING]
    wanted = [node.name for node in nodes if node.op_type in kinds]
    if scheme.op_types and not wanted:
        raise ModelRefused(f"{scheme.title}: the graph has none of {', '.join(kinds)} to quantize")
    if wanted and set(wanted) <= set(scheme.exclude):
        raise ModelRefused(f"{scheme.title}: every node is excluded; use the float model as it is")


def convert(model_path: Path, source: onnx.ModelProto, scheme: Scheme, calibration: Calibration) -> _Made:
    """Return the quantized model, unproved; `source` is what `model_path` holds, its nodes named.

    Raises:
        ModelRefused, DataRefused, SessionError: as `quantize`.
    """
    makers: dict[str, Callable[[], _Made]] = {
        "keep": lambda: _Made(source),
        "dynamic": lambda: _dynamic(source, scheme),
        "static": lambda: _static(model_path, source, scheme, calibration),
        "weights": lambda: _weights(source, scheme, calibration),
        "fp16": lambda: _fp16(source, scheme),
    }
    with _quiet():
        try:
            return makers[scheme.method]()
        except EdgeInferError:
            raise
        except MemoryError:
            raise ModelRefused(f"{scheme.title}: this machine has not enough memory for it") from None
        except Exception as error:  # the quantizers raise AssertionError, ValueError, KeyError and what C++ throws
            text = f"{type(error).__name__}: {plain(str(error))}"
            raise ModelRefused(f"{scheme.title}: the quantizer cannot take {model_path.name}: {text}") from error


def _dynamic(source: onnx.ModelProto, scheme: Scheme) -> _Made:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # The quantizer turns Gemm into MatMul first, under another name.
    kept = [name for node in scheme.exclude for name in (node, f"{node}_MatMul")]
    types = set(scheme.op_types)
    if "Gemm" in types and "MatMul" not in types:
        types.add("MatMul")
        nodes = (node for graph in model_file.graphs(source.graph) for node in graph.node)
        kept += [node.name for node in nodes if node.op_type == "MatMul"]
    with _written(model_file.infer_types(source)) as (path, made):
        quantize_dynamic(
            path,
            made,
            op_types_to_quantize=sorted(types),
            per_channel=scheme.per_channel,
            reduce_range=scheme.reduced_range,
            weight_type=QuantType.QUInt8 if scheme.unsigned_weights else QuantType.QInt8,
            nodes_to_exclude=kept,
            use_external_data_format=source.ByteSize() >= model_file.EXTERNAL_FROM_BYTES,
            extra_options={"EnableSubgraph": _has_bodies(source)},
        )
        return _Made(onnx.load(str(made)))


def _static(model_path: Path, source: onnx.ModelProto, scheme: Scheme, calibration: Calibration) -> _Made:
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    fit = model_file.with_plain_biases(source)
    typed = model_file.infer_types(model_file.with_own_axes(fit) if scheme.per_channel else fit)
    histograms = scheme.calibrator != "minmax"
    statistics = calibration.statistics(model_path, typed, scheme.op_types, histograms=histograms)
    ranges = statistics.ranges(scheme.calibrator, scheme.percentile)
    bare = [name for name, item in statistics.tensors.items() if histograms and item.reach == 0]
    notes = []
    used: str = scheme.calibrator
    if bare:
        used += f"; minmax for {len(bare)} of {len(ranges)} tensors"
        notes.append(f"{len(bare)} activations are always 0 or empty: no histogram can be made of them")
    if odd := statistics.not_finite():
        notes.append(f"the float model itself makes NaN or infinity in {', '.join(odd[:3])}; ranges leave them out")
    with _written(typed) as (path, made):
        table = path.with_name("ranges.json")
        encode_ranges(ranges, table)
        quantize_static(
            path,
            made,
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(scheme.op_types),
            per_channel=scheme.per_channel,
            reduce_range=scheme.reduced_range,
            activation_type=QuantType[_TYPES[scheme.activations]],
            weight_type=QuantType.QUInt8 if scheme.unsigned_weights else QuantType.QInt8,
            nodes_to_exclude=list(scheme.exclude),
            calibrate_method=CalibrationMethod.MinMax,
            calibration_cache_path=table,
            use_external_data_format=source.ByteSize() >= model_file.EXTERNAL_FROM_BYTES,
            extra_options={
                "ActivationSymmetric": scheme.symmetric,
                "WeightSymmetric": not scheme.unsigned_weights,
            },
        )
        return _Made(onnx.load(str(made)), used, statistics.samples, tuple(notes))


def _weights(source: onnx.ModelProto, scheme: Scheme, calibration: Calibration) -> _Made:
    from edgeinfer_tools.weights import quantize_weights

    model = onnx.ModelProto()
    model.CopyFrom(source)
    if scheme.algorithm != "gptq":
        return _Made(quantize_weights(model, scheme, None))
    count = 0

    def counted() -> Iterator[dict[str, object]]:
        nonlocal count
        for sample in calibration.each():
            count += 1
            yield dict(sample)

    made = quantize_weights(model, scheme, counted())  # type: ignore[arg-type]
    return _Made(made, "gptq", count)


def _fp16(source: onnx.ModelProto, scheme: Scheme) -> _Made:
    notes = []
    if large := float16.too_large(source):
        notes.append(f"{len(large)} constants are beyond half precision and were clipped: {', '.join(large[:3])}")
    model = onnx.ModelProto()
    model.CopyFrom(source)
    return _Made(float16.halve(model, scheme), notes=tuple(notes))


def _has_bodies(model: onnx.ModelProto) -> bool:
    return sum(1 for _ in model_file.graphs(model.graph)) > 1


@contextmanager
def _written(model: onnx.ModelProto) -> Iterator[tuple[Path, Path]]:
    """Lend a path at which the model lies and one for what is made of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        model_file.save(model, path)
        yield path, Path(folder) / "made.onnx"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the quantizers' advice, which goes to the root logger, from the user's terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


_COPY = re.compile(r"(?:_Transposed(?:_\d+)?|\.edgeinfer\.(?:axis\d|transposed))?(?:_quantized|_Q[248])?")


def duplicates(source: onnx.ModelProto, made: onnx.ModelProto) -> tuple[Duplicate, ...]:
    """Return the float model's constants that are in the artefact more than once: tied weights, pulled apart."""
    held = {item.name: len(item.SerializeToString()) for g in model_file.graphs(made.graph) for item in g.initializer}
    found = []
    for graph in model_file.graphs(source.graph):
        for item in graph.initializer:
            if item.data_type != TensorProto.FLOAT or len(item.dims) < 2:
                continue
            copies = [name for name in held if name.startswith(item.name) and _COPY.fullmatch(name[len(item.name) :])]
            if len(copies) > 1:
                found.append(Duplicate(item.name, tuple(sorted(copies)), sum(held[name] for name in copies)))
    return tuple(found)


def _notes(
    scheme: Scheme, target: Target, sizes: tuple[int, int], kept: Coverage, copies: tuple[Duplicate, ...]
) -> list[str]:
    """Say what a user would want to know before choosing this artefact; `sizes` are its own and the float model's."""
    notes = []
    size, before = sizes
    if scheme.method != "keep" and (ratio := size / before) > POOR_RATIO:
        notes.append(f"has {ratio:.0%} of the float model's size ({human(size)} of {human(before)}): little is smaller")
    notes += [
        f"tied weights {item.name!r} are stored {len(item.copies)} times: {', '.join(item.copies)}, "
        f"{human(item.size_bytes)} in all"
        for item in copies
    ]
    if scheme.method != "keep" and (kept.float_macs_share > 0.05 or kept.float_weights_share > 0.05 or kept.bodies):
        notes.append(str(kept))
    if scheme.method in {"static", "dynamic"}:
        kernels = target.kernels
        full = not scheme.reduced_range and not scheme.unsigned_weights
        if full and not kernels.exact and scheme.activations in {"u8", "s8"}:
            notes.append(f"full-range weights saturate on {target.name} ({kernels.name}): use the reduced range")
        if not kernels.quick:
            lacks = "asimddp" if target.architecture == "aarch64" else "AVX2"
            notes.append(f"{target.name} lists no {lacks}: 8 bits may be slower than float there")
    return notes
