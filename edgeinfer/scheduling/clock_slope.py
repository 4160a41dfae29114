"""Learn by how much a model's runs take longer when the clock falls.

    run time ~ clock ** -slope

The slope is 1 for a model that only computes, 0 for one that only waits for memory, whose speed stays. Fitted on
log run time against log clock, robustly: a median for each clock that was seen, then the weighted median of the slopes
between them (Theil and Sen). Owns those samples. Which clock counts is the governor's to say (`Limits`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import combinations

UNKNOWN_SLOPE = 1.0
"""Of a model that was never seen at another clock: as if it only computed. That is careful when the clock falls, and
`Estimator` doesn't count on it when the clock rises."""
MIN_RUNS = 5
"""Fewer at one clock say nothing."""
MIN_STEP = math.log(1.1)
"""Clocks that are closer together than a tenth don't count as two: noise would be taken for slope."""
MAX_AGE_NS = 600_000_000_000
"""How a model depends on the clock doesn't change, but what else runs on the board does."""
_SAMPLES = 15
_MAX_CLOCKS = 20


@dataclass(slots=True)
class ClockSlope:
    """The slope of one model. Loop thread only; bounded by `_MAX_CLOCKS` times `_SAMPLES`."""

    value: float | None = None
    """Between 0 and 1; None as long as the clock hasn't really varied."""
    _logs: dict[float, deque[float]] = field(default_factory=dict)
    """Log run times of each share of the full clock, the newest clock last."""
    _seen_ns: dict[float, int] = field(default_factory=dict)

    def observe(self, duration: float, clock_share: float, now_ns: int) -> bool:
        """Count a run; return whether the slope is another one now."""
        logs = self._logs.pop(clock_share, None) or deque(maxlen=_SAMPLES)
        self._logs[clock_share] = logs
        self._seen_ns[clock_share] = now_ns
        logs.append(math.log(max(1.0, duration)))
        if len(self._logs) < 2 or len(logs) < MIN_RUNS:
            return False
        oldest = next(iter(self._logs))
        if len(self._logs) > _MAX_CLOCKS or now_ns - self._seen_ns[oldest] > MAX_AGE_NS:
            del self._logs[oldest], self._seen_ns[oldest]
        was, found = self.value, self._fit()
        if found is None or (was is not None and abs(found - was) < 0.02):
            return False
        self.value = found
        return True

    def _fit(self) -> float | None:
        """Return the slope of what is there, None when the clocks are too close together; what was known stands."""
        points = [(math.log(share), _median(logs)) for share, logs in self._logs.items() if len(logs) >= MIN_RUNS]
        slopes = sorted(
            ((log - other_log) / (other_clock - clock), abs(other_clock - clock))
            for (clock, log), (other_clock, other_log) in combinations(points, 2)
            if abs(other_clock - clock) >= MIN_STEP
        )
        half = sum(weight for _, weight in slopes) / 2
        for slope, weight in slopes:
            half -= weight
            if half <= 0:
                return min(1.0, max(0.0, slope))
        return None


def _median(values: deque[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
