"""Foresee when each waiting request would start and finish on this machine.

Pure: the answer depends only on the arguments. The same forecast serves admission (may this be promised?), the
scheduler (what starts now?) and shedding (what can't be kept any more?), so that they can't disagree.

The rule it foretells is the scheduler's: earliest deadline first, nothing that started is interrupted, cores are the
resource. A request whose model has all its lanes busy lets others pass, and then takes the core that its lane frees;
a request that needs more cores than are free lets nobody pass. Under pacing starts keep the order of the queue.
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
    free = _free_cores(machine, now_ns)
    lanes: dict[ModelKey, list[tuple[int, float]]] = {}
    for run in machine.running:
        insort(lanes.setdefault(run.key, []), (max(now_ns, run.end_ns), (MARGIN * run.spread_ns) ** 2))
    loading: set[ModelKey] = set()
    pace = machine.pace
    expected = []
    for job in jobs:
        cores = max(1, min(job.cores, machine.cores))
        start_ns, variance = free[cores - 1]
        lane = lanes.setdefault(job.key, [])
        if len(lane) >= job.lanes and lane[-job.lanes][0] > start_ns:
            start_ns, variance = lane[-job.lanes]
        if pace.limited:
            ready_ns = pace.ready_ns(job.p50_ns * cores, max(start_ns, pace.at_ns))
            start_ns = _NEVER_NS if ready_ns is None else ready_ns
            pace = pace.spent(job.p50_ns * cores, start_ns)
        run_ns = job.p50_ns
        if job.wait_ns and job.key not in loading:
            loading.add(job.key)
            run_ns += job.wait_ns
        finish_ns = start_ns + run_ns
        spread_ns = job.p99_ns - job.p50_ns
        expected.append(Expectation(start_ns, finish_ns, finish_ns + round((variance + spread_ns**2) ** 0.5)))
        variance += (MARGIN * spread_ns) ** 2
        # The cores that came free last are taken, so that the others stay open to whoever may pass.
        last = bisect_right(free, (start_ns, math.inf))
        del free[last - cores : last]
        for _ in range(cores):
            insort(free, (finish_ns, variance))
        insort(lane, (finish_ns, variance))
    return expected


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
