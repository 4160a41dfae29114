"""Remember how inputs and outputs are distributed on the evaluation data, so that a device can notice drift.

A reservoir of bounded size per tensor, thinned evenly and deterministically: the same data give the same file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgeinfer_tools.samples import Array

SCHEMA = 1
VALUES_PER_TENSOR = 4096
"""More values of one tensor are thinned by an even stride."""
BINS = 20
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(slots=True)
class Distribution:
    """Values of one tensor over all requests."""

    tensors: int = 0
    parts: list[Array] = field(default_factory=list)

    def add(self, array: Array) -> None:
        """Count one request's tensor; of texts, the number of elements."""
        self.tensors += 1
        flat = np.array([array.size], np.float64) if array.dtype == np.object_ else array.reshape(-1).astype(np.float64)
        stride = max(1, -(-flat.size // VALUES_PER_TENSOR))
        self.parts.append(flat[::stride].astype(np.float32))

    @property
    def extent(self) -> tuple[float, float]:
        """The smallest and the largest value; zeros when there is none."""
        ends = [(float(part.min()), float(part.max())) for part in self.parts if part.size]
        return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (0.0, 0.0)

    def summary(self) -> dict[str, Any]:
        """Return the figures of reference.json for this tensor."""
        values = np.concatenate(self.parts).astype(np.float64) if self.parts else np.zeros(0)
        if values.size == 0:
            return {"requests": self.tensors, "values": 0}
        counts, edges = np.histogram(values, bins=BINS)
        return {
            "requests": self.tensors,
            "values": int(values.size),
            "mean": _round(values.mean()),
            "std": _round(values.std()),
            "min": _round(values.min()),
            "max": _round(values.max()),
            "quantiles": {f"{q:g}": _round(np.quantile(values, q)) for q in QUANTILES},
            "histogram": {"edges": [_round(edge) for edge in edges], "counts": [int(count) for count in counts]},
        }


def reference(distributions: dict[str, Distribution], *, variant: str) -> dict[str, Any]:
    """Return the whole of reference.json."""
    found: dict[str, Any] = {"schema": SCHEMA, "variant": variant, "inputs": {}, "outputs": {}}
    for key in sorted(distributions):
        role, _, name = key.partition(".")
        found[role][name] = distributions[key].summary()
    return found


def _round(value: Any) -> float:
    """Six significant digits: enough for drift, and equal on machines that differ in the last bit."""
    return float(f"{float(value):.6g}")
