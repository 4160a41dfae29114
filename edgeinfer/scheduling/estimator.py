"""Know how long a model really takes here, from its latest runs.

Owns a window of durations per model and version, of the variant that runs at present. The executor gives the seed:
what a profile or a manifest says. What was seen from the dispatcher's side replaces it after a few runs. Requests that
run next door aren't its business: there are several peers, and only `execution.offload` can tell them apart.

A run on fewer cores than its threads is proportionally slower, and one at a lower clock by what `clock_slope` has seen
of the model: both (`Conditions`) are taken out of what is stored and put back into what is returned, so a CPU mask or
a clock that shrinks is foreseen and not learnt the hard way. A clock that rises is only counted on once its effect was
seen.
What a window says decides who is admitted, and who isn't admitted teaches nothing. So promises go by the p99, but
whether a request is *tried*, without a promise, goes by what is believed of its model (`Estimator.believed_ns`): its
median, its newest run, or now and then its fastest one.

The duty cycle stretches the time *between* runs, never a run: it is accounted for in `forecast`, by `pacing`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from edgeinfer.execution.executor import Estimate
from edgeinfer.execution.window import robust_p99
from edgeinfer.scheduling.clock_slope import UNKNOWN_SLOPE, ClockSlope
from edgeinfer.scheduling.forecast import ModelKey

WINDOW_RUNS = 128
"""Enough for a p99 that one outlier doesn't make, and short enough to follow a change within seconds."""
MOST_RUNS = 512
"""Of frequent runs more are remembered, as many as `RECENT_NS` brings: of 128 the p99 is a guess."""
RECENT_NS = 2_000_000_000
WINDOW_NS = 60_000_000_000
MIN_RUNS = 8
"""Fewer than this, and the seed still has a say."""
STALE_NS = 10_000_000_000
"""Older knowledge than this may be wrong by now: then trying is worth more than refusing."""
FEW_SIGMAS = 2.33
"""Between mean and p99 of a normal distribution: what is taken of a seed that only says p99."""
_OUTLIER = 4
"""A run that had to be stopped counts as at most so many times the p99: one hang must not close the door."""
HICCUP = 20
"""A run of more than so many times the median was held up by the machine, as far as one can say. A few of them count
in what is promised, but are no reason not to try."""
MOST_HICCUPS = 0.05
"""At a larger share of the runs it is how the model behaves here. Three are few in any window."""
_FEW_HICCUPS = 3
FAILED_TRIES = 3
"""So many runs in a row that were stopped at their deadlines say more than the median of what was before: it takes
a quarter longer than the last of them had, as far as one can say."""
FIRST_PAUSE_NS = 10_000_000
"""Between two tries of a model then; doubles with each that fails."""
LONGEST_PAUSE_NS = 1_000_000_000
MOST_PAUSE_NS = 10_000_000_000
"""Of tries that take so long that one a second would cost more than `TRY_SHARE` of the time."""
TRY_SHARE = 20


class Conditions(NamedTuple):
    """What a run has to compute with, compared with all that it could use."""

    slowdown: float = 1.0
    """By what fewer cores make it slower."""
    clock_share: float = 1.0
    """Of the full clock."""


FULL = Conditions()


@dataclass(frozen=True, slots=True)
class RunTimes(Estimate):
    """An estimate with what it takes to add runs up: medians and p99s don't, means and variances do."""

    mean_ns: int = 0
    deviation_ns: int = 0
    """Standard deviation."""
    seed_ns: int = 0
    """The executor's own median, before anything was seen; 0 when that is not known."""


@dataclass(slots=True)
class _Window:
    origin: str
    """Variant and digest that the runs belong to; another one starts afresh."""
    runs: deque[tuple[int, float, float, float]] = field(default_factory=deque)
    """(when, duration in ns without slowdown, the same at full clock, share of the clock)."""
    ordered: list[float] = field(default_factory=list)
    """The durations at full clock, sorted."""
    total: float = 0.0
    """Their sum."""
    squares: float = 0.0
    """The sum of their squares."""
    slope: ClockSlope = field(default_factory=ClockSlope)
    stopped_ns: int | None = None
    """When a run was last stopped at its deadline."""
    stopped_after_ns: int = 0
    """How long that one had been running."""
    failures: int = 0
    """Runs that were stopped at their deadlines since the newest result."""
    newest: float | None = None
    """How long the newest run with a result took, at full clock."""
    told: tuple[Estimate, Conditions, RunTimes] | None = None
    """What was last answered, to what, while it is still so."""

    def add(self, now_ns: int, duration: float, clock_share: float) -> None:
        """Count a run, and forget the oldest. What was told is to be worked out anew."""
        while self.runs and (
            now_ns - self.runs[0][0] > (RECENT_NS if len(self.runs) >= WINDOW_RUNS else WINDOW_NS)
            or len(self.runs) >= MOST_RUNS
        ):
            full = self.runs.popleft()[2]
            del self.ordered[bisect_left(self.ordered, full)]
            self.total -= full
            self.squares -= full * full
        if self.slope.observe(duration, clock_share, now_ns):
            self._rate_again()
        full = duration / self._stretch(clock_share)
        self.runs.append((now_ns, duration, full, clock_share))
        insort(self.ordered, full)
        self.total += full
        self.squares += full * full

    def stretch(self, clock_share: float) -> float:
        """Return by what runs at that clock take longer than at the full one."""
        if self.slope.value is None and self.runs:
            clock_share = min(clock_share, self.runs[-1][3])
        return self._stretch(clock_share)

    def _stretch(self, clock_share: float) -> float:
        if clock_share == 1.0:
            return 1.0
        slope = UNKNOWN_SLOPE if self.slope.value is None else self.slope.value
        return float(clock_share**-slope)

    def _rate_again(self) -> None:
        """Work out what all runs would have taken at full clock, by a new slope."""
        self.runs = deque(
            (when, duration, duration / self._stretch(share), share) for when, duration, _, share in self.runs
        )
        self.ordered = sorted(full for _, _, full, _ in self.runs)
        self.total = math.fsum(self.ordered)
        self.squares = math.fsum(full * full for full in self.ordered)

    def hiccups(self) -> int:
        """Return how many runs were far longer than usual."""
        ordered = self.ordered
        return len(ordered) - bisect_right(ordered, HICCUP * ordered[(len(ordered) - 1) // 2]) if ordered else 0

    def may_explore(self, now_ns: int) -> bool:
        """Return whether the last try that failed was so long ago that another one can be afforded."""
        if self.stopped_ns is None or not self.failures:
            return True
        pause_ns = FIRST_PAUSE_NS << min(16, max(0, self.failures - FAILED_TRIES))
        return now_ns - self.stopped_ns >= min(
            pause_ns, max(LONGEST_PAUSE_NS, TRY_SHARE * self.stopped_after_ns), MOST_PAUSE_NS
        )

    def figures(self) -> tuple[float, float, float, float]:
        """Return median, p99, mean and standard deviation of the durations; there must be one."""
        ordered = self.ordered
        count = len(ordered)
        mean = self.total / count
        variance = self.squares / count - mean * mean
        deviation = math.sqrt(variance * count / (count - 1)) if count > 1 and variance > 0.0 else 0.0
        return ordered[(count - 1) // 2], robust_p99(ordered), mean, deviation


class Estimator:
    """Windowed percentiles of run times. Loop thread only; memory is bounded per model."""

    def __init__(self) -> None:
        self._windows: dict[ModelKey, _Window] = {}

    def refine(self, seed: Estimate, key: ModelKey, *, now_ns: int, conditions: Conditions = FULL) -> RunTimes:
        """Return the executor's estimate with the percentiles that were seen here; its wait and cores stand.

        The seed is taken for one at full clock. With few runs the pessimistic one of seed and window is taken; with
        stale ones the optimistic one, so that one bad minute is not held against a model for ever.
        """
        window = self._windows.get(key)
        fresh = window is not None and bool(window.runs) and now_ns - window.runs[-1][0] <= STALE_NS
        if fresh and window is not None and window.told is not None and window.told[:2] == (seed, conditions):
            return window.told[2]
        times = self._work_out(seed, window, conditions, fresh=fresh)
        if fresh and window is not None:
            window.told = seed, conditions, times
        return times

    @staticmethod
    def _work_out(seed: Estimate, window: _Window | None, conditions: Conditions, *, fresh: bool) -> RunTimes:
        p50, p99 = float(seed.p50_ns), float(seed.p99_ns)
        mean, deviation = p50, (p99 - p50) / FEW_SIGMAS
        factor = conditions.slowdown
        if window is None:
            factor /= conditions.clock_share**UNKNOWN_SLOPE
        else:
            factor *= window.stretch(conditions.clock_share)
            if window.runs:
                seen = window.figures()
                if not fresh:
                    p50, p99, mean, deviation = map(min, seen, (p50, p99, mean, deviation))
                elif len(window.runs) < MIN_RUNS:
                    p50, p99, mean, deviation = map(max, seen, (p50, p99, mean, deviation))
                else:
                    p50, p99, mean, deviation = seen
        p50_ns = round(p50 * factor)
        if window is not None and window.failures >= FAILED_TRIES:
            p50_ns = max(p50_ns, window.stopped_after_ns * 5 // 4)
        return RunTimes(
            p50_ns,
            max(p50_ns, round(p99 * factor)),
            seed.wait_ns,
            seed.cores,
            seed.lanes,
            seed.is_guess and (window is None or not window.runs),
            max(1, round(mean * factor)),
            round(deviation * factor),
            round(seed.p50_ns * conditions.slowdown),
        )

    def observe(
        self,
        key: ModelKey,
        duration_ns: int,
        *,
        now_ns: int,
        conditions: Conditions = FULL,
        origin: str = "",
    ) -> None:
        """Learn that a run took `duration_ns` from dispatch to result, without what it waited in the executor."""
        window = self._windows.get(key)
        if window is None or window.origin != origin:
            window = self._windows[key] = _Window(origin)
        self._add(window, duration_ns, now_ns, conditions)
        window.newest, window.failures = window.runs[-1][2], 0

    def _add(self, window: _Window, duration_ns: int, now_ns: int, conditions: Conditions) -> None:
        window.add(now_ns, duration_ns / conditions.slowdown, conditions.clock_share)
        if window.told is not None:  # now rather than when the next request waits for it
            seed, told_under, _ = window.told
            window.told = seed, told_under, self._work_out(seed, window, told_under, fresh=True)

    def observe_stopped(
        self, key: ModelKey, elapsed_ns: int, estimate: Estimate, *, now_ns: int, conditions: Conditions = FULL
    ) -> None:
        """Learn that a run was stopped after `elapsed_ns` without a result: it would have taken longer.

        When that was sooner than its p99 the deadline was just short: that says nothing about its run times. It is
        a try that failed all the same, unless the model has never been as quick.
        """
        window = self._windows.setdefault(key, _Window(""))
        window.stopped_ns, window.stopped_after_ns = now_ns, elapsed_ns
        if not window.ordered or elapsed_ns >= window.ordered[0]:
            window.failures += 1
            window.told = None
        if elapsed_ns >= estimate.p99_ns:
            duration_ns = min(elapsed_ns, _OUTLIER * max(1, estimate.p99_ns))
            self._add(window, duration_ns, now_ns, conditions)

    def believed_ns(
        self, key: ModelKey, times: RunTimes, *, left_ns: int, now_ns: int, conditions: Conditions = FULL
    ) -> int | None:
        """Return what a run can be believed to take, so that trying it within `left_ns` makes sense; else None.

        The median, unless the latest runs were stopped at their deadlines one after the other; what the newest took;
        or, once in a while, what the fastest took: what is never tried can't turn out to be better again. A model
        that never was so fast isn't tried.
        """
        window = self._windows.get(key)
        failures = window.failures if window is not None else 0
        if times.p50_ns <= left_ns and failures < FAILED_TRIES:
            return times.p50_ns
        if window is None or not window.ordered:
            return None
        factor = conditions.slowdown * window.stretch(conditions.clock_share)
        if not failures and window.newest is not None and (newest_ns := round(window.newest * factor)) <= left_ns:
            return newest_ns
        fastest_ns = round(window.ordered[0] * factor)
        if len(window.runs) < MIN_RUNS and times.seed_ns:
            fastest_ns = min(fastest_ns, times.seed_ns)
        return fastest_ns if fastest_ns <= left_ns and window.may_explore(now_ns) else None

    def may_explore(self, key: ModelKey, now_ns: int) -> bool:
        """Return whether a model of which nothing is known can be tried: the last one that failed was long ago."""
        window = self._windows.get(key)
        return window is None or window.may_explore(now_ns)

    def doubts_tail(self, key: ModelKey) -> bool:
        """Return whether the p99 may be made by a few hiccups of the machine."""
        window = self._windows.get(key)
        if window is None:
            return False
        return 0 < window.hiccups() <= max(_FEW_HICCUPS, MOST_HICCUPS * len(window.ordered))

    def stale(self, key: ModelKey, now_ns: int, *, after_ns: int = STALE_NS) -> bool:
        """Return whether the model wasn't tried here for so long that its estimate is hearsay."""
        window = self._windows.get(key)
        if window is None:
            return True
        tries = [when for when in (window.stopped_ns, window.runs[-1][0] if window.runs else None) if when is not None]
        return not tries or now_ns - max(tries) > after_ns


def conditions(wanted_cores: int, cores: int, clock_share: float) -> Conditions:
    """Return those of a run with `wanted_cores` threads when only `cores` may be used, at that share of the clock."""
    if wanted_cores <= cores and clock_share == 1.0:
        return FULL
    return Conditions(max(1.0, wanted_cores / max(1, cores)), clock_share)
