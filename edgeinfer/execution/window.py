"""Remember the newest durations of something and tell their percentiles.

Seeded with an estimate, which counts until enough was seen. For what the scheduler can't see from its side: round
trips to one of several peers, and a nearby service's own times, which it advertises.

What a window says decides whether a peer is asked at all, and a peer that isn't asked gives no newer samples: one bad
answer must not close the door for ever. So samples are forgotten when they are old, also when no others come; and
among few samples, of which the p99 is the largest, one that stands alone counts as twice the second largest. (Of 100
times with a tail like an exponential the largest is more than that in one case out of 50, of 20 in one out of 10.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from edgeinfer.clock import NS_PER_S, Clock

SEED_SAMPLES = 8
"""After so many own samples the seed is forgotten."""
MAX_AGE_NS = 60 * NS_PER_S
"""As long as the scheduler remembers local runs."""
_LONER = 2
"""At most so many times the second largest is what one large sample alone can make of the p99."""


class LatencyWindow:
    """The newest `size` durations in nanoseconds, of the last minute. Loop thread only.

    The seed stands for the p99, half of it for the median. What is forgotten leaves its trace in it: from then on it
    isn't more than twice the median there was, because what was seen once is a better guess than what never was.
    """

    __slots__ = ("_clock", "_ordered", "_samples", "_seed_p99_ns")

    def __init__(self, clock: Clock, *, seed_p99_ns: int, size: int = 128) -> None:
        self._clock = clock
        self._seed_p99_ns = seed_p99_ns
        self._samples: deque[tuple[int, int]] = deque(maxlen=size)
        """(when, duration)"""
        self._ordered: list[int] = []

    def __len__(self) -> int:
        return len(self._fresh())

    def add(self, duration_ns: int) -> None:
        """Take in an observation; the oldest beyond the window's size is forgotten."""
        self._fresh()
        self._samples.append((self._clock.now_ns(), duration_ns))
        self._ordered = []

    @property
    def p50_ns(self) -> int:
        """The median, at least 1; the seed's before the first observation."""
        fresh = self._fresh()
        return max(1, _percentile(fresh, 50) if fresh else self._seed_p99_ns // 2)

    @property
    def p99_ns(self) -> int:
        """The 99th percentile, not below the median; while little was seen, not below the seed either."""
        fresh = self._fresh()
        least_ns = self._seed_p99_ns if len(fresh) < SEED_SAMPLES else 0
        if not fresh:
            return max(self.p50_ns, least_ns)
        return max(self.p50_ns, least_ns, round(robust_p99(fresh)))

    def _fresh(self) -> list[int]:
        """Forget what is old; return the rest in ascending order."""
        horizon_ns = self._clock.now_ns() - MAX_AGE_NS
        if self._samples and self._samples[0][0] < horizon_ns:
            self._seed_p99_ns = min(self._seed_p99_ns, 2 * _percentile(self._sorted(), 50))
        while self._samples and self._samples[0][0] < horizon_ns:
            self._samples.popleft()
            self._ordered = []
        return self._sorted()

    def _sorted(self) -> list[int]:
        if not self._ordered:
            self._ordered = sorted(duration_ns for _, duration_ns in self._samples)
        return self._ordered


def robust_p99(ordered: Sequence[float]) -> float:
    """Return the 99th percentile of ascending samples; of fewer than 100, one alone can't make it what it is."""
    p99 = ordered[math.ceil(len(ordered) * 99 / 100) - 1]
    return min(p99, _LONER * ordered[-2]) if 1 < len(ordered) < 100 else p99


def _percentile(ordered: list[int], percent: int) -> int:
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]
