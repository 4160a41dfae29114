"""Say what a board's 8-bit kernels compute exactly, and how fast they are: which number ranges suit it.

On x86 without VNNI the 8-bit kernels add pairs of products in 16 bits and saturate: full-range signed weights against
unsigned activations are silently wrong there. Weights of 7 bits ("reduced range") are right everywhere. aarch64
accumulates exactly, and is quick at it only with the dot-product instructions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.artifact.board import Board

_VNNI = ("avx512_vnni", "avx_vnni")


@dataclass(frozen=True, slots=True)
class Kernels:
    """One family of 8-bit kernels."""

    name: str
    exact: bool
    """Whether full-range signed weights against unsigned activations give exact sums."""
    quick: bool
    """Whether 8 bits can be expected to beat float: there is an instruction for sums of 8-bit products."""
    activations: str
    """Type of 8-bit activations that the kernels take without conversion: `u8` or `s8`."""


KERNELS = {
    "x86-vnni": Kernels("x86-vnni", exact=True, quick=True, activations="u8"),
    "x86-avx512-novnni": Kernels("x86-avx512-novnni", exact=False, quick=True, activations="u8"),
    "x86-avx2": Kernels("x86-avx2", exact=False, quick=True, activations="u8"),
    "x86-sse": Kernels("x86-sse", exact=False, quick=False, activations="u8"),
    "arm-dotprod": Kernels("arm-dotprod", exact=True, quick=True, activations="s8"),
    "arm-nodotprod": Kernels("arm-nodotprod", exact=True, quick=False, activations="s8"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a model is quantized for."""

    name: str
    architecture: str
    """`aarch64` or `x86_64`."""
    instruction_sets: tuple[str, ...]
    """/proc/cpuinfo flags, sorted."""
    runtime_python: Path | None = None
    """A Python with NumPy and the device's own (older) onnxruntime: artefacts must run there too. None: only here."""

    @property
    def kernels(self) -> Kernels:
        """The 8-bit kernels that the runtime will choose there."""
        flags = set(self.instruction_sets)
        if self.architecture == "aarch64":
            return KERNELS["arm-dotprod" if "asimddp" in flags else "arm-nodotprod"]
        if not flags.isdisjoint(_VNNI):
            return KERNELS["x86-vnni"]
        if any(flag.startswith("avx512") for flag in flags):
            return KERNELS["x86-avx512-novnni"]
        return KERNELS["x86-avx2" if "avx2" in flags else "x86-sse"]

    @property
    def weights(self) -> WeightRange:
        """How wide signed 8-bit weights may be."""
        if self.architecture == "aarch64":
            # Both the dot-product and the widening kernels accumulate exactly; asimd keeps the variant off x86.
            return WeightRange(
                reduced=False, instruction_sets=("asimd",), reason="aarch64 accumulates 8-bit products exactly"
            )
        for flag in _VNNI:
            if flag in self.instruction_sets:
                return WeightRange(reduced=False, instruction_sets=(flag,), reason=f"{self.name} has {flag}")
        return WeightRange(
            reduced=True,
            instruction_sets=(),
            reason=f"{self.name} lists no {' or '.join(_VNNI)}: full-range products would saturate in 16 bits",
        )


@dataclass(frozen=True, slots=True)
class WeightRange:
    """How wide 8-bit weights may be on a board, and what a CPU must have for them to be right."""

    reduced: bool
    """True: 7 bits, -64..64."""
    instruction_sets: tuple[str, ...]
    reason: str


def target_of(board: Board, *, runtime_python: Path | None = None) -> Target:
    """Return the board as a target."""
    return Target(board.name, board.cpu.architecture, tuple(sorted(board.cpu.instruction_sets)), runtime_python)


def weight_range(board: Board) -> WeightRange:
    """Return the range for 8-bit weights on `board`."""
    return target_of(board).weights


def sums_exactly(weights: WeightRange, flags: Iterable[str], architecture: str) -> bool:
    """Return whether a CPU's 8-bit kernels compute weights of this range without saturating."""
    return weights.reduced or architecture == "aarch64" or not set(_VNNI).isdisjoint(flags)
