"""Remember the newest durations of something and tell their percentiles.

Seeded with an estimate, which counts until enough was seen. For what the scheduler can't see from its side: round
trips to one of several peers, and a nearby service's own times, which it advertises.
"""

from __future__ import annotations

import math
from collections import deque

SEED_SAMPLES = 8
"""After so many own samples the seed is forgotten."""


class LatencyWindow:
    """The newest `size` durations in nanoseconds. Loop thread only.

    The seed stands for the p99, half of it for the median.
    """

    __slots__ = ("_ordered", "_samples", "_seed_p99_ns")

    def __init__(self, *, seed_p99_ns: int, size: int = 128) -> None:
        self._seed_p99_ns = seed_p99_ns
        self._samples: deque[int] = deque(maxlen=size)
        self._ordered: list[int] = []

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, duration_ns: int) -> None:
        """Take in an observation; the oldest beyond the window's size is forgotten."""
        self._samples.append(duration_ns)
        self._ordered = []

    @property
    def p50_ns(self) -> int:
        """The median, at least 1; the seed's before the first observation."""
        return max(1, self._percentile(50) if self._samples else self._seed_p99_ns // 2)

    @property
    def p99_ns(self) -> int:
        """The 99th percentile, not below the median; while little was seen, not below the seed either."""
        least_ns = self._seed_p99_ns if len(self._samples) < SEED_SAMPLES else 0
        return max(self.p50_ns, least_ns, self._percentile(99) if self._samples else 0)

    def _percentile(self, percent: int) -> int:
        if not self._ordered:
            self._ordered = sorted(self._samples)
        return self._ordered[math.ceil(len(self._ordered) * percent / 100) - 1]
