"""Compare two ways to compute the same outputs, and judge the difference.

Used wherever a model changes form: exported from its framework, simplified, optimised. A difference over the tolerance
is never only a warning; what accepts it all the same is a waiver that the recipe states and the bundle keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer_tools.origin import Validation
from edgeinfer_tools.samples import Array

Answers = Sequence[Mapping[str, Array]]
"""Outputs by name, one mapping per request."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far one output is from what it should be, over all requests."""

    output: str
    max_abs: float
    """Infinite when NaN or infinity came where none should, or the shape differs."""
    mean_abs: float
    cosine: float
    """Of the outputs as vectors, the least of all requests."""
    largest: float
    """Largest absolute value that it should have."""
    fault: str = ""
    """What no number says: NaN, another shape, another text."""

    def problem(self, limits: Validation) -> str:
        """Return what is over the limit, with the numbers, or nothing."""
        if self.fault:
            return f"output {self.output!r} {self.fault}"
        bound = limits.tolerance * max(self.largest, 1e-6)
        if self.max_abs > bound:
            return (
                f"output {self.output!r} differs by up to {self.max_abs:.4g} (mean {self.mean_abs:.4g}, cosine "
                f"{self.cosine:.6f}), the limit is {bound:.4g}: {limits.tolerance:g} of its largest value "
                f"{self.largest:.4g}"
            )
        if self.cosine < limits.cosine:
            return f"output {self.output!r} has cosine {self.cosine:.6f}, the limit is {limits.cosine:g}"
        return ""

    def report(self) -> dict[str, Any]:
        """Return it for report.json: six significant digits, numbers that are none as texts."""
        figures = {"max_abs": self.max_abs, "mean_abs": self.mean_abs, "cosine": self.cosine, "largest": self.largest}
        told = {key: float(f"{value:.6g}") if math.isfinite(value) else str(value) for key, value in figures.items()}
        return {"output": self.output, **told, **({"fault": self.fault} if self.fault else {})}


def compare(wanted: Answers, found: Answers) -> list[Agreement]:
    """Return the agreement of every output that `wanted` has."""
    names = list(dict.fromkeys(name for answer in wanted for name in answer))
    return [_agreement(name, wanted, found) for name in names]


def _agreement(name: str, wanted: Answers, found: Answers) -> Agreement:
    greatest = total = largest = 0.0
    count, cosine = 0, 1.0
    for index, (want, got) in enumerate(zip(wanted, found, strict=True)):
        if name not in got:
            return _fault(name, f"is missing (there are {', '.join(got)})")
        a, b = np.asarray(want[name]), np.asarray(got[name])
        if a.shape != b.shape:
            return _fault(name, f"has shape {list(b.shape)} instead of {list(a.shape)} (request {index})")
        if a.dtype.kind in "OUS":
            if not np.array_equal(a, b):
                return _fault(name, f"is another text (request {index})")
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        for who, array in (("the source model itself", a), ("the new graph", b)):
            if np.isnan(array).any():
                return _fault(name, f"is NaN in {who} (request {index})")
        same = a == b  # infinities too
        if not a.size:
            continue
        with np.errstate(invalid="ignore"):  # infinity less infinity, which is not looked at
            apart = np.abs(np.where(same, 0.0, a - b))
        greatest, total, count = max(greatest, float(apart.max())), total + float(apart.sum()), count + a.size
        finite = a[np.isfinite(a)]
        largest = max(largest, float(np.abs(finite).max()) if finite.size else 0.0)
        cosine = min(cosine, _cosine(a, b))
    if not math.isfinite(greatest):
        return _fault(name, "is infinite on one side only")
    return Agreement(name, greatest, total / max(count, 1), cosine, largest)


def _fault(name: str, text: str) -> Agreement:
    return Agreement(name, math.inf, math.inf, 0.0, 0.0, text)


def _cosine(a: Array, b: Array) -> float:
    mask = np.isfinite(a) & np.isfinite(b)
    a, b = a[mask], b[mask]
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    if lengths == 0:
        return 1.0 if float(np.abs(a - b).max(initial=0)) < 1e-6 else 0.0
    return min(float(a @ b) / lengths, 1.0)


def problems(agreements: Sequence[Agreement], limits: Validation) -> list[str]:
    """Return everything that is over the limits."""
    return [text for item in agreements if (text := item.problem(limits))]
