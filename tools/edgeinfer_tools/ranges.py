"""Watch a float model's activations on calibration data, in memory that does not grow with the data.

Keeps per tensor its extremes and, for the histogram methods, one histogram of fixed size that rescales itself by
merging neighbours; of a large activation an even thinning is counted. So samples may have any number and any length.
ONNX Runtime's own histogram calibrators keep every activation of every sample and need equal shapes; here the runtime
only gets the ranges that come out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper

from edgeinfer.artifact.manifest import StateSpec
from edgeinfer.errors import mib
from edgeinfer_tools import model_file
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.faults import DataRefused, ModelRefused
from edgeinfer_tools.samples import Array
from edgeinfer_tools.scheme import Calibrator
from edgeinfer_tools.session import Runner

BINS = 8192
"""Of a histogram, over [-reach, reach]; the reach is a power of two, so at least a quarter of them hold values."""
VALUES_PER_TENSOR = 1 << 16
"""More values of one activation are thinned by an odd stride; extremes are always exact."""
ENTROPY_BINS = 2048
ENTROPY_LEVELS = 128
"""Bins of the entropy search, and how many levels 8 bits leave of one sign, as TensorRT's published method has them."""
ENTROPY_LEAST = 0.99
"""A range holds at least this share of the values: divergence alone can be fooled by peaks, as at the 6 of ReLU6."""


@dataclass(slots=True)
class TensorRange:
    """What was seen of one activation."""

    low: float = np.inf
    high: float = -np.inf
    not_finite: int = 0
    """NaN and infinities, which the float model itself makes (masks); ranges leave them out."""
    reach: float = 0.0
    counts: Array = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, array: Array, *, histogram: bool) -> None:
        """Count one sample's tensor."""
        flat = array.reshape(-1)
        low, high = (float(flat.min()), float(flat.max())) if flat.size else (0.0, 0.0)
        if not (np.isfinite(low) and np.isfinite(high)):
            finite = flat[np.isfinite(flat)]
            self.not_finite += flat.size - finite.size
            flat = finite
        if flat.size == 0:
            return
        self.extend(float(flat.min()), float(flat.max()))
        if histogram:
            self._count(flat[:: 1 if flat.size <= VALUES_PER_TENSOR else (flat.size // VALUES_PER_TENSOR) | 1])

    def extend(self, low: float, high: float) -> None:
        """Widen the extremes."""
        if np.isfinite(low) and np.isfinite(high):
            self.low, self.high = min(self.low, low), max(self.high, high)

    def _count(self, flat: Array) -> None:
        largest = max(-self.low, self.high)
        if largest == 0:
            return
        if self.reach == 0:
            self.reach = float(2.0 ** np.ceil(np.log2(largest)))
        while self.reach < largest:
            merged = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.concatenate([np.zeros(BINS // 4, np.int64), merged, np.zeros(BINS // 4, np.int64)])
            self.reach *= 2
        self.counts += np.histogram(flat, BINS, (-self.reach, self.reach))[0]

    def range(self, calibrator: Calibrator, percentile: float) -> tuple[float, float]:
        """Return the range by a method; the extremes where there is no histogram."""
        if self.low > self.high:
            return 0.0, 0.0
        if calibrator == "minmax" or self.reach == 0 or not self.counts.any():
            return self.low, self.high
        if calibrator == "percentile":
            low, high = self._percentile(percentile)
        else:
            high = self._entropy()
            low = -high
        return max(low, self.low), min(high, self.high)

    def _percentile(self, percentile: float) -> tuple[float, float]:
        share = np.cumsum(self.counts) / self.counts.sum()
        cut = (100 - percentile) / 200
        edges = np.linspace(-self.reach, self.reach, BINS + 1)
        # The bin in which the share is passed stays inside, on either side.
        return float(edges[np.searchsorted(share, cut, "right")]), float(edges[np.searchsorted(share, 1 - cut) + 1])

    def _entropy(self) -> float:
        """Return the threshold at which clipping and rounding lose least, by Kullback-Leibler divergence."""
        magnitudes = (self.counts[BINS // 2 :] + self.counts[: BINS // 2][::-1]).astype(np.float64)
        used = max(ENTROPY_LEVELS, int(np.ceil(max(-self.low, self.high) / self.reach * magnitudes.size)))
        fold = max(1, used // ENTROPY_BINS)
        bins = magnitudes[: -(-used // fold) * fold].reshape(-1, fold).sum(axis=1)
        width = self.reach / magnitudes.size * fold
        # Zeros come out right at any threshold; their peak (behind Relu, half of everything) would decide alone.
        bins[0] = bins[1]
        kept = np.cumsum(bins) / max(bins.sum(), 1)
        least = max(ENTROPY_LEVELS, int(np.searchsorted(kept, ENTROPY_LEAST)) + 1)
        best, threshold = np.inf, max(-self.low, self.high)
        for end in range(least, bins.size + 1, max(1, bins.size // 512)):
            loss = _divergence(bins, end)
            if loss <= best:
                best, threshold = loss, end * width
        return threshold


def _divergence(bins: Array, end: int) -> float:
    """Return KL(clipped at `end` bins || that, rounded to so many levels)."""
    kept = bins[:end]
    clipped = kept.copy()
    clipped[-1] += bins[end:].sum()
    edges = np.arange(ENTROPY_LEVELS) * end // ENTROPY_LEVELS
    sums = np.add.reduceat(kept, edges)
    filled = np.add.reduceat((kept > 0).astype(np.float64), edges)
    spread = np.repeat(
        np.divide(sums, filled, out=np.zeros_like(sums), where=filled > 0), np.diff(np.append(edges, end))
    )
    rounded = np.where(kept > 0, spread, 0)
    p, q = clipped / clipped.sum(), rounded / max(rounded.sum(), 1e-12)
    alive = p > 0
    return float(np.sum(p[alive] * np.log(p[alive] / np.maximum(q[alive], 1e-9))))


@dataclass(slots=True)
class Statistics:
    """What one pass over the calibration data found."""

    tensors: dict[str, TensorRange]
    samples: int
    histograms: bool

    def ranges(self, calibrator: Calibrator, percentile: float) -> dict[str, tuple[float, float]]:
        """Return the range of each activation."""
        return {name: item.range(calibrator, percentile) for name, item in self.tensors.items()}

    def not_finite(self) -> list[str]:
        """Return the activations in which the float model itself made NaN or infinity."""
        return sorted(name for name, item in self.tensors.items() if item.not_finite)


@dataclass(slots=True)
class Calibration:
    """Real data for quantizing: one request to prove artefacts with, and samples for the methods that need them.

    Statistics of a model are kept, so that a search reads the data once, not once per candidate.
    """

    probe: dict[str, Array]
    """One request, decoded: every input but the state."""
    state: list[StateSpec] = field(default_factory=list)
    samples: Callable[[], CheckedSamples] | None = None
    """Makes a fresh reader over the data."""
    cap_bytes: int | None = None
    """Most resident memory that calibrating may take."""
    _kept: dict[tuple[Path, int, str], Statistics] = field(default_factory=dict)

    def reader(self) -> CheckedSamples:
        """Return a fresh reader.

        Raises:
            DataRefused: there are no samples.
        """
        if self.samples is None:
            raise DataRefused("this scheme needs calibration data, and none are given; name some, or choose `dynamic`")
        return self.samples()

    def each(self) -> Iterator[dict[str, Array]]:
        """Yield every sample once, within the memory cap.

        Raises:
            DataRefused: the data are empty, constant, not finite, or not what the contract says.
            ModelRefused: the memory cap is passed.
        """
        reader, process = self.reader(), psutil.Process()
        while (sample := reader.get_next()) is not None:
            yield sample
            held = process.memory_info().rss  # the runtime's arena keeps what a run took
            if self.cap_bytes is not None and held > self.cap_bytes:
                raise ModelRefused(
                    f"calibrating took {mib(held)} after {reader.count} samples, the cap is {mib(self.cap_bytes)}; "
                    "use smaller inputs, the minmax calibrator (it keeps no activation), or a higher cap"
                )

    def statistics(
        self, model: Path, typed: onnx.ModelProto, op_types: Iterable[str], *, histograms: bool
    ) -> Statistics:
        """Return the ranges of all float inputs and outputs of these operators in the model's main graph.

        Raises:
            DataRefused, ModelRefused: as `each`.
            SessionError: the float model fails on a sample.
        """
        key = (model.resolve(), model.stat().st_mtime_ns, ",".join(sorted(op_types)))
        kept = self._kept.get(key)
        if kept is None or (histograms and not kept.histograms):
            tensors = activations(typed, op_types)
            kept = _collect(typed, tensors, self.each(), histograms=histograms)
            if not histograms and kept.not_finite():  # the finite extremes hide behind infinities: look at the values
                kept = _collect(typed, tensors, self.each(), histograms=True)
            self._kept[key] = kept
        return kept


def activations(model: onnx.ModelProto, op_types: Iterable[str]) -> list[str]:
    """Return the float tensors, no constants, that nodes of these types take or give; in the graph's order."""
    wanted, graph = set(op_types), model.graph
    types = {item.name: item.type.tensor_type.elem_type for item in (*graph.input, *graph.output, *graph.value_info)}
    constants = {item.name for item in graph.initializer}
    found: dict[str, None] = {}
    for node in graph.node:
        if node.op_type in wanted:
            for name in (*node.input, *node.output):
                if name not in constants and types.get(name) == TensorProto.FLOAT:
                    found[name] = None
    return list(found)


def _collect(
    model: onnx.ModelProto, tensors: list[str], samples: Iterable[dict[str, Array]], *, histograms: bool
) -> Statistics:
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    names = _expose(watched, tensors) if histograms else _reduce(watched, tensors)
    found = {name: TensorRange() for name in tensors}
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "watched.onnx"
        model_file.save(watched, path)
        del watched
        runner = Runner(path, level="none", threads=0)
        for sample in samples:
            count += 1
            values = runner.run(sample)
            for name in tensors:
                if histograms:
                    found[name].add(sample[name] if name in sample else values[names[name]], histogram=True)
                else:
                    low, high = values[f"{names[name]}.low"], values[f"{names[name]}.high"]
                    found[name].extend(float(low), float(high))
                    found[name].not_finite += int(not (np.isfinite(low) and np.isfinite(high)))
            del values
    return Statistics(found, count, histograms)


def _expose(model: onnx.ModelProto, tensors: list[str]) -> dict[str, str]:
    """Make the tensors outputs and drop the model's other ones."""
    inputs = {item.name for item in model.graph.input}
    wanted = [name for name in tensors if name not in inputs]
    types = {item.name: item for item in (*model.graph.value_info, *model.graph.output)}
    kept = [types[name] for name in wanted] or list(model.graph.output)
    copies = [onnx.ValueInfoProto.FromString(item.SerializeToString()) for item in kept]
    del model.graph.output[:]
    model.graph.output.extend(copies)
    return {name: name for name in tensors}


def _reduce(model: onnx.ModelProto, tensors: list[str]) -> dict[str, str]:
    """Let the graph itself find the extremes, so that no activation leaves it; return a prefix for each tensor."""
    del model.graph.output[:]
    names = {name: f"edgeinfer.range.{index}" for index, name in enumerate(tensors)}
    for name, prefix in names.items():
        for operator, end in (("ReduceMin", "low"), ("ReduceMax", "high")):
            output = f"{prefix}.{end}"
            model.graph.node.append(helper.make_node(operator, [name], [output], name=output, keepdims=0))
            model.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, []))
    return names


def encode_ranges(ranges: dict[str, tuple[float, float]], path: Path) -> None:
    """Write ranges as the calibration cache that `quantize_static` reads instead of calibrating."""
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorsData, save_tensors_data

    data = {name: (np.float32(low), np.float32(high)) for name, (low, high) in ranges.items()}
    save_tensors_data(
        TensorsData(CalibrationMethod.MinMax, {n: (np.array(a), np.array(b)) for n, (a, b) in data.items()}), path
    )
