"""Foresee when each waiting request would start and finish on this machine.

Pure: the answer depends only on the arguments. The same forecast serves admission (may this be promised?), the
scheduler (what starts now?) and shedding (what can't be kept any more?), so that they can't disagree.

The rule it foretells is the scheduler's: earliest deadline first, nothing that started is interrupted, cores are the
resource. A request whose model has all its lanes busy lets others pass, and then takes the core that its lane frees;
a request that needs more cores than are free lets nobody pass. Under pacing starts keep the order of the queue, but for
small runs: they may go first on the express lane, and on a core that whoever is in front of them leaves idle meanwhile,
if they are done by then.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edgeinfer.scheduling.pacing import UNPACED, Pace

ModelKey = tuple[str, str]
"""Model name and pinned version (empty for the active one)."""


class Rank(NamedTuple):
    """Where a request stands in the queue; the least starts first."""

    spare: bool
    """Requests to which nothing was promised come after all the others."""
    due_ns: int
    behind: int
    """The negative of its priority."""
    arrival: int


@dataclass(frozen=True, slots=True)
class Job:
    """What deciding needs to know about one request that would run here."""

    id: int
    key: ModelKey
    rank: Rank
    due_ns: int
    """When its result is due."""
    start_by_ns: int
    """When it has expired if it still waits."""
    firm: bool
    priority: int
    p50_ns: int
    p99_ns: int
    cores: int
    lanes: int = 1
    """How many of the same model can run at once."""
    wait_ns: int = 0
    """What its model needs before it can run at all (loading); charged to the first job of the model."""

    @property
    def spare(self) -> bool:
        """Whether it only runs when nothing else wants the cores, without a promise."""
        return self.rank.spare


@dataclass(frozen=True, slots=True)
class Occupied:
    """A request that runs here now."""

    key: ModelKey
    cores: int
    end_ns: int
    """When it is expected to be done."""
    spread_ns: int
    """How much later than that it may be, at p99."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """When a job would start and finish."""

    start_ns: int
    finish_ns: int
    """The likely end: with medians all the way."""
    finish_p99_ns: int
    """The end that can be promised: its own p99 behind the work ahead. Medians add up; what lies between median and
    p99 adds up as independent errors do, in squares: the sum of many p99s would refuse half of the work for nothing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs here, and what may."""

    cores: int
    running: tuple[Occupied, ...] = ()
    pace: Pace = field(default=UNPACED)


MARGIN = 1.5
"""How much of the work ahead's distance between median and p99 is kept free. Run times have tails like an exponential,
whose p99.9 is 1.5 times as far out as its p99 (ln 1000 / ln 100), and one long run ahead can break many promises at
once. Over random histories at three times the capacity this breaks half as many promises as 1.0 would, and costs
less than a hundredth of the throughput."""

ROUNDING_NS = 10_000
"""Clocks and timers round: a promise to the nanosecond is none."""

_NEVER_NS = 1 << 62


def forecast(jobs: Sequence[Job], machine: Machine, now_ns: int) -> list[Expectation]:
    """Return when each of `jobs`, which must be in the order of their ranks, would start and finish.

    Where pacing forbids all local work, every start is beyond any deadline.
    """
    plan = _Plan(machine, now_ns)
    return [plan.place(job) for job in jobs]


@dataclass(slots=True)
class _Gap:
    """Time in which a core is idle although somebody waits for it, whom pacing holds back."""

    begin_ns: int
    end_ns: int
    variance: float


class _Plan:
    """What is taken by the jobs that were placed so far."""

    def __init__(self, machine: Machine, now_ns: int) -> None:
        self._cores = machine.cores
        self._now_ns = now_ns
        self._free = _free_cores(machine, now_ns)
        self._gaps: list[_Gap] = []
        self._lanes: dict[ModelKey, list[tuple[int, float]]] = {}
        for run in machine.running:
            insort(self._lanes.setdefault(run.key, []), (max(now_ns, run.end_ns), (MARGIN * run.spread_ns) ** 2))
        self._loading: set[ModelKey] = set()
        self._pace = machine.pace
        self._worst = machine.pace.worst()

    def place(self, job: Job) -> Expectation:
        """Take what `job` needs, as early as it may."""
        cores = max(1, min(job.cores, self._cores))
        cost = job.p50_ns * cores
        run_ns = job.p50_ns
        if job.wait_ns and job.key not in self._loading:
            self._loading.add(job.key)
            run_ns += job.wait_ns
        lane = self._lanes.setdefault(job.key, [])
        lane_free = lane[-job.lanes] if len(lane) >= job.lanes else (self._now_ns, 0.0)
        ready_ns, variance = max(self._free[cores - 1], lane_free)
        start_ns, gap = ready_ns, None
        if self._pace.limited:
            may_ns = self._pace.ready_ns(cost, ready_ns)
            start_ns = _NEVER_NS if may_ns is None else may_ns
            if self._gaps and cores == 1 and self._pace.is_small(cost):
                first_ns = self._pace.express.ready_ns(cost, lane_free[0])
                gap = self._gap(first_ns, run_ns, start_ns)
                if gap is not None:
                    start_ns, variance = max(gap.begin_ns, first_ns), max(gap.variance, lane_free[1])
        finish_ns = start_ns + run_ns
        spread_ns = job.p99_ns - job.p50_ns
        finish_p99_ns = finish_ns + self._charge(cost, start_ns) + round((variance + spread_ns**2) ** 0.5)
        taken = finish_ns, variance + (MARGIN * spread_ns) ** 2
        insort(lane, taken)
        if gap is not None:
            gap.begin_ns, gap.variance = taken
        else:
            self._take_cores(cores, ready_ns, start_ns, taken)
        return Expectation(start_ns, finish_ns, finish_p99_ns)

    def _gap(self, first_ns: int, run_ns: int, before_ns: int) -> _Gap | None:
        """Return idle time for a run that may start at `first_ns`; None when it could not begin before `before_ns`."""
        for gap in self._gaps:
            start_ns = max(gap.begin_ns, first_ns)
            if start_ns < before_ns and start_ns + run_ns <= gap.end_ns:
                return gap
        return None

    def _charge(self, cost: float, start_ns: int) -> int:
        """Take the cost of a run, and return by how much small runs to come may still delay it."""
        if not self._pace.limited or self._pace.stopped:
            return 0
        express = self._pace.by_express(cost, start_ns)
        self._pace = self._pace.spent(cost, start_ns, express=express)
        if express:
            return 0
        worst_ns = self._worst.ready_ns(cost, start_ns)
        self._worst = self._worst.spent(cost, worst_ns)
        return worst_ns - start_ns

    def _take_cores(self, cores: int, ready_ns: int, start_ns: int, taken: tuple[int, float]) -> None:
        """Take those that come free last, so that the others stay open to whoever may pass."""
        last = bisect_right(self._free, (start_ns, math.inf))
        if start_ns > ready_ns:
            self._gaps += [_Gap(ready_ns, start_ns, variance) for _, variance in self._free[last - cores : last]]
        del self._free[last - cores : last]
        for _ in range(cores):
            insort(self._free, taken)


def _free_cores(machine: Machine, now_ns: int) -> list[tuple[int, float]]:
    """Return when each core comes free, and the variance of that; more may run than there are cores left."""
    ends: list[tuple[int, float]] = [(now_ns, 0.0)] * machine.cores
    for run in machine.running:
        ends += [(max(now_ns, run.end_ns), (MARGIN * run.spread_ns) ** 2)] * run.cores
    return sorted(ends)[len(ends) - machine.cores :]


def meets(job: Job, expectation: Expectation) -> bool:
    """Return whether the job would be in time: at p99 if it is firm, at p50 if not; always if nothing is promised."""
    if job.spare:
        return True
    if expectation.start_ns >= job.start_by_ns:
        return False
    return certain(job, expectation) if job.firm else expectation.finish_ns <= job.due_ns


def certain(job: Job, expectation: Expectation) -> bool:
    """Return whether it can be promised that the job is in time."""
    return expectation.finish_p99_ns + ROUNDING_NS <= job.due_ns


def occupied(
    key: ModelKey, *, cores: int, started_ns: int, p50_ns: int, p99_ns: int, due_ns: int, now_ns: int
) -> Occupied:
    """Return what is to be expected of a run that started at `started_ns`.

    It ends at its median; once that has passed, at its p99; once that has passed too, each look finds it a quarter
    longer, but not beyond its deadline (when it is stopped) as long as that lies ahead.
    """
    slack_ns = max(1_000_000, p99_ns // 50)
    if now_ns < started_ns + p50_ns:
        return Occupied(key, cores, started_ns + p50_ns, p99_ns - p50_ns)
    if now_ns <= started_ns + p99_ns + slack_ns:
        return Occupied(key, cores, max(now_ns, started_ns + p99_ns), (p99_ns - p50_ns) // 2)
    end_ns = now_ns + (now_ns - started_ns) // 4
    return Occupied(key, cores, min(end_ns, due_ns) if due_ns > now_ns else end_ns, 0)
