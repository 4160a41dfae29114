"""Turn the float graph into one variant of it: as it is, static QDQ per channel, or dynamic.

Owns the choice of number ranges. On x86 without VNNI the 8-bit kernels add pairs of products in 16 bits and saturate:
full-range weights are silently wrong there. A board whose instruction sets have no VNNI gets weights of 7 bits
("reduced range"), which are right everywhere; a board with it gets full range, and the variant says what it needs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx

from edgeinfer.artifact.board import Board
from edgeinfer_tools.calibration import CheckedSamples
from edgeinfer_tools.faults import ModelRefused
from edgeinfer_tools.graph import all_nodes, has_float16
from edgeinfer_tools.recipe import VariantRecipe

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

STATIC_OPERATORS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
"""Where the time goes; pre- and post-processing stays as it is."""
DYNAMIC_OPERATORS = ("MatMul", "Gemm")
"""Not Conv: ConvInteger is slow, and older runtimes cannot load it."""
_VNNI = ("avx512_vnni", "avx_vnni")


@dataclass(frozen=True, slots=True)
class WeightRange:
    """How wide 8-bit weights may be on a board, and what a CPU must have for them to be right."""

    reduced: bool
    """True: 7 bits, -64..63."""
    instruction_sets: tuple[str, ...]
    reason: str


def weight_range(board: Board) -> WeightRange:
    """Return the range for 8-bit weights on `board`."""
    flags = board.cpu.instruction_sets
    if board.cpu.architecture == "aarch64":
        # Both the dot-product and the widening kernels accumulate exactly; asimd keeps the variant off x86.
        return WeightRange(
            reduced=False, instruction_sets=("asimd",), reason="aarch64 accumulates 8-bit products exactly"
        )
    for flag in _VNNI:
        if flag in flags:
            return WeightRange(reduced=False, instruction_sets=(flag,), reason=f"{board.name} has {flag}")
    return WeightRange(
        reduced=True,
        instruction_sets=(),
        reason=f"{board.name} lists no {' or '.join(_VNNI)}: full-range products would saturate in 16 bits",
    )


def sums_exactly(weights: WeightRange, flags: list[str], architecture: str) -> bool:
    """Return whether a CPU's 8-bit kernels compute weights of this range without saturating."""
    return weights.reduced or architecture == "aarch64" or not set(_VNNI).isdisjoint(flags)


def quantize(
    source: Path, target: Path, variant: VariantRecipe, *, weights: WeightRange, samples: Callable[[], CheckedSamples]
) -> int:
    """Write the variant's file and return how many calibration samples it took (0 when it needs none).

    Raises:
        ModelRefused: the graph has nothing to quantize, or half-precision weights.
        DataRefused: the calibration data are unusable.
    """
    if variant.method == "keep":
        target.write_bytes(source.read_bytes())
        return 0
    operators = list(variant.operators or (STATIC_OPERATORS if variant.method == "static" else DYNAMIC_OPERATORS))
    model = onnx.load(str(source))
    if has_float16(model):
        raise ModelRefused(f"variant {variant.name!r}: the graph has float16 weights; quantize from the float32 model")
    if not any(node.op_type in operators for node in all_nodes(model.graph)):
        raise ModelRefused(f"variant {variant.name!r}: the graph has none of {', '.join(operators)} to quantize")
    with _quiet():
        if variant.method == "dynamic":
            quantize_dynamic(
                str(source),
                str(target),
                op_types_to_quantize=operators,
                per_channel=False,
                reduce_range=weights.reduced,
                weight_type=QuantType.QInt8,
            )
            return 0
        reader = samples()
        quantize_static(
            str(source),
            str(target),
            _Reader(reader),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=operators,
            per_channel=True,
            reduce_range=weights.reduced,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
        )
        return reader.count


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the quantizer's advice, which goes to the root logger, from the user's terminal."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(before)


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """Lend `CheckedSamples` the base class that the quantizer insists on."""

    def __init__(self, samples: CheckedSamples) -> None:
        self._samples = samples

    def get_next(self) -> dict[str, object] | None:
        found = self._samples.get_next()
        return None if found is None else dict(found)
