"""What each release of ONNX Runtime reads, so that a model is refused here and not on the device.

The pairs come from ONNX Runtime's own compatibility table; a release reads everything up to them.
"""

from __future__ import annotations

import re

import onnx

from edgeinfer_tools.faults import ModelRefused

READS: tuple[tuple[tuple[int, int], int, int], ...] = (
    ((1, 9), 14, 7),
    ((1, 10), 15, 8),
    ((1, 12), 17, 8),
    ((1, 14), 18, 8),
    ((1, 15), 19, 9),
    ((1, 17), 20, 9),
    ((1, 18), 21, 10),
    ((1, 21), 22, 10),
    ((1, 23), 23, 11),
)
"""Release, highest opset, highest IR version; ascending."""
OPSETS = (7, 21)
"""What this toolchain builds from: older ones lack a conversion, newer ones the quantizers do not know."""
IR_VERSION = 10
"""What this toolchain writes, where the device's runtime reads it: opset 21 needs it, later ones gain nothing."""
LOWEST_IR_VERSION = 3


def reads(runtime: str) -> tuple[int, int]:
    """Return the highest opset and IR version that a release reads; of an empty text, what this toolchain writes."""
    found = re.match(r"(\d+)\.(\d+)", runtime)
    release = (int(found[1]), int(found[2])) if found else (99, 0)
    opset, ir_version = next(((o, i) for since, o, i in reversed(READS) if release >= since), READS[0][1:])
    return min(opset, OPSETS[1]), min(ir_version, IR_VERSION)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the default operator set."""
    return next((int(item.version) for item in model.opset_import if item.domain in {"", "ai.onnx"}), 0)


def check_versions(model: onnx.ModelProto, name: str) -> None:
    """Refuse a model whose format or operators are newer or older than what can be built.

    Raises:
        ModelRefused: with the value, the bound, and what to do.
    """
    if model.ir_version > onnx.IR_VERSION:
        raise ModelRefused(
            f"{name} has IR version {model.ir_version}, this toolchain reads up to {onnx.IR_VERSION}: export it again "
            f"with an older onnx, which writes IR version {IR_VERSION}"
        )
    if model.ir_version < LOWEST_IR_VERSION:
        raise ModelRefused(
            f"{name} has IR version {model.ir_version}, this toolchain reads from {LOWEST_IR_VERSION}: export it again "
            "from its framework"
        )
    opset, (low, high) = opset_of(model), OPSETS
    if not low <= opset <= high:
        raise ModelRefused(
            f"{name} has opset {opset}, this toolchain builds from {low} to {high}; export it again with opset "
            f"{high if opset > high else low} or {'lower' if opset > high else 'higher'}"
        )


def check_runtime(opset: int, runtime: str) -> None:
    """Refuse an opset that the lowest runtime of the recipe's devices does not read.

    Raises:
        ModelRefused: with both numbers, and what to do.
    """
    highest, _ = reads(runtime)
    if opset > highest:
        raise ModelRefused(
            f"the recipe's opset is {opset}, and onnxruntime {runtime}, which it says devices have, reads up to "
            f"{highest}: set opset = {highest}, or raise onnxruntime"
        )
