"""Remember the newest durations of something and tell their percentiles.

Owned by an executor, one per (model, variant, place). Seeded with an estimate until it has seen enough itself.
"""

from __future__ import annotations

import math
from collections import deque

SEED_WEIGHT = 8
"""So many own samples and the seed is forgotten."""


class LatencyWindow:
    """A sliding window over durations in nanoseconds. The seed counts as the p99; half of it as the p50."""

    __slots__ = ("_samples", "_seed_p99_ns", "_sorted")

    def __init__(self, *, seed_p99_ns: int, size: int = 128) -> None:
        self._seed_p99_ns = seed_p99_ns
        self._samples: deque[int] = deque(maxlen=size)
        self._sorted: list[int] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, duration_ns: int) -> None:
        """Take in one observation; the oldest beyond the window's size is forgotten."""
        self._samples.append(duration_ns)
        self._sorted = None

    def percentile_ns(self, percent: float) -> int:
        """Return the percentile by nearest rank; while there are few samples, never below what the seed says."""
        if self._sorted is None:
            self._sorted = sorted(self._samples)
        ordered = self._sorted
        seed_ns = self._seed_p99_ns if percent > 90 else self._seed_p99_ns // 2
        if not ordered:
            return seed_ns
        observed_ns = ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
        if len(ordered) < SEED_WEIGHT and percent > 90:
            return max(observed_ns, seed_ns)
        return observed_ns
