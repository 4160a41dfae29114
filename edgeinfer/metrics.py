"""Count every outcome exactly once, and keep latencies in constant memory.

`Accounting` is owned by the scheduler: it says when a request was received and what became of it. Everyone else reads
snapshots. The identity `received = in_flight + ok + late + rejected + cancelled + expired + failed` holds at every
instant, by construction, per origin and in total, and `Accounting.check` proves it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from edgeinfer.errors import InternalError
from edgeinfer.request import InferRequest, Outcome, OutcomeKind, Placement

_GROWTH = 1.04
"""Ratio of neighbouring histogram bounds: a percentile is at most 4 % off."""
_LOG_GROWTH = math.log(_GROWTH)
_FLOOR_NS = 1_000


class LatencyHistogram:
    """Durations in geometric buckets from 1 microsecond; memory grows only with the spread of the values."""

    __slots__ = ("_buckets", "count", "max_ns", "total_ns")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total_ns = 0
        self.max_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count one duration; below a microsecond (or negative) counts as one microsecond."""
        value = max(duration_ns, _FLOOR_NS)
        index = math.ceil(math.log(value / _FLOOR_NS) / _LOG_GROWTH)
        self._buckets[index] = self._buckets.get(index, 0) + 1
        self.count += 1
        self.total_ns += value
        self.max_ns = max(self.max_ns, value)

    def include(self, other: LatencyHistogram) -> None:
        """Count what another one has counted, too."""
        for index, count in other._buckets.items():
            self._buckets[index] = self._buckets.get(index, 0) + count
        self.count += other.count
        self.total_ns += other.total_ns
        self.max_ns = max(self.max_ns, other.max_ns)

    def percentile_ns(self, percent: float) -> int | None:
        """Return the upper bound of the bucket that holds the percentile, None when nothing was counted."""
        if not self.count:
            return None
        rank, seen = max(1, math.ceil(self.count * percent / 100)), 0
        for index in sorted(self._buckets):
            seen += self._buckets[index]
            if seen >= rank:
                return min(round(_FLOOR_NS * _GROWTH**index), self.max_ns)
        raise InternalError("the histogram's buckets do not add up to its count")


@dataclass(slots=True)
class OriginCounts:
    """What became of the requests of one loop or model."""

    received: int = 0
    in_flight: int = 0
    ended: Counter[OutcomeKind] = field(default_factory=Counter)
    reasons: Counter[tuple[OutcomeKind, str]] = field(default_factory=Counter)
    placed: Counter[tuple[Placement, OutcomeKind]] = field(default_factory=Counter)
    latency: dict[Placement, LatencyHistogram] = field(default_factory=dict)
    """Of `ok` and `late` requests, from capture or reception to the end."""

    def include(self, other: OriginCounts) -> None:
        """Count what another one has counted, too."""
        self.received += other.received
        self.in_flight += other.in_flight
        self.ended.update(other.ended)
        self.reasons.update(other.reasons)
        self.placed.update(other.placed)
        for placement, histogram in other.latency.items():
            self.latency.setdefault(placement, LatencyHistogram()).include(histogram)

    @property
    def balanced(self) -> bool:
        """Whether the accounting identity holds."""
        return self.received == self.in_flight + sum(self.ended.values()) and self.in_flight >= 0

    @property
    def deadline_hit_rate(self) -> float | None:
        """Share of the ended requests that were answered in time; None before the first ended.

        Cancelled requests don't count: nobody waited for them any more.
        """
        judged = sum(self.ended.values()) - self.ended[OutcomeKind.CANCELLED]
        return self.ended[OutcomeKind.OK] / judged if judged else None


class Accounting:
    """Counters of all requests, by origin. Loop thread only."""

    def __init__(self) -> None:
        self.origins: dict[str, OriginCounts] = {}

    def received(self, request: InferRequest) -> None:
        """Count a request in. Call once, before anything is decided about it."""
        counts = self._of(request)
        counts.received += 1
        counts.in_flight += 1

    def ended(self, outcome: Outcome) -> None:
        """Count a request out. Call once."""
        counts = self._of(outcome.request)
        counts.in_flight -= 1
        counts.ended[outcome.kind] += 1
        counts.placed[outcome.placement, outcome.kind] += 1
        if outcome.reason:
            counts.reasons[outcome.kind, outcome.reason] += 1
        if outcome.result is not None:
            histogram = counts.latency.get(outcome.placement)
            if histogram is None:
                histogram = counts.latency[outcome.placement] = LatencyHistogram()
            histogram.add(outcome.latency_ns)

    @property
    def total(self) -> OriginCounts:
        """All origins together, added up when asked: a fresh copy."""
        total = OriginCounts()
        for counts in self.origins.values():
            total.include(counts)
        return total

    def check(self) -> None:
        """Prove the identity.

        Raises:
            InternalError: it is broken, which is a bug.
        """
        for name, counts in (("total", self.total), *self.origins.items()):
            if not counts.balanced:
                raise InternalError(
                    f"accounting of {name}: received {counts.received} != in flight {counts.in_flight} "
                    f"+ ended {dict(counts.ended)}"
                )

    def _of(self, request: InferRequest) -> OriginCounts:
        counts = self.origins.get(request.origin)
        if counts is None:
            counts = self.origins[request.origin] = OriginCounts()
        return counts
