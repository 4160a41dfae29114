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
    mean_ns: int = 0
    """What it takes of others' time in the mean; 0 when only the median is known."""
    deviation_ns: int = 0
    """Standard deviation of that; 0 when only median and p99 are known."""

    @property
    def spare(self) -> bool:
        """Whether it only runs when nothing else wants the cores, without a promise."""
        return self.rank.spare


class Occupied(NamedTuple):
    """A request that runs here now."""

    key: ModelKey
    cores: int
    end_ns: int
    """When it is expected to be done."""
    spread_ns: int
    """How much later than that it may be, at p99."""


class Expectation(NamedTuple):
    """When a job would start and finish."""

    start_ns: int
    finish_ns: int
    """The likely end: the mean of the work ahead, and its own median."""
    finish_p99_ns: int
    """The end that can be promised: its own p99 behind the work ahead."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs here, and what may."""

    cores: int
    running: tuple[Occupied, ...] = ()
    pace: Pace = field(default=UNPACED)


MARGIN = 1.2
"""How far one long run ahead is expected to reach, in distances between median and p99. Run times have tails like an
exponential, whose p99.9 is 1.5 times as far out as its p99 (ln 1000 / ln 100), and one long run ahead can break many
promises at once; between 1.2 and 1.5 lies no difference in broken promises, but in what is admitted."""
SIGMAS = 3.1
"""How many standard deviations of the sum of all runs ahead are kept free: 99.9 % of a normal distribution, towards
which such sums go."""
_P99_SIGMAS = 2.33
MARGIN_SQUARED = MARGIN * MARGIN

ROUNDING_NS = 10_000
"""Clocks and timers round: a promise to the nanosecond is none."""

_NEVER_NS = 1 << 62


_Free = tuple[int, float, float]
"""When something comes free in the mean; in squares, how far the sum of runs until then may be off, and how far the
longest one of them may. What goes wrong together is a long run or many a bit long: sums of p99s would refuse half of
the work for nothing, and so would p99s added in squares, where only few runs are long but those very much so."""


def forecast(jobs: Sequence[Job], machine: Machine, now_ns: int) -> list[Expectation]:
    """Return when each of `jobs`, which must be in the order of their ranks, would start and finish.

    Where pacing forbids all local work, every start is beyond any deadline.
    """
    return list(map(Plan(machine, now_ns).place, jobs))


@dataclass(slots=True)
class _Gap:
    """Time in which a core is idle although somebody waits for it, whom pacing holds back."""

    begin_ns: int
    end_ns: int
    variance: float
    reach: float


class Plan:
    """What is taken by the jobs that were placed so far, in the order of their ranks."""

    __slots__ = (
        "_cores", "_free", "_gaps", "_lanes", "_loading", "_now_ns", "_overbooked", "_pace", "_single", "_worst",
    )  # fmt: skip

    def __init__(self, machine: Machine, now_ns: int) -> None:
        self._cores = machine.cores
        self._now_ns = now_ns
        self._free = _free_cores(machine, now_ns)
        self._gaps: list[_Gap] = []
        self._lanes: dict[ModelKey, list[_Free]] = {}
        self._overbooked = len(machine.running) > machine.cores
        """Else as many of a model as there are cores need no lanes to come one after the other."""
        if self._overbooked or machine.cores > 1:
            for run in machine.running:
                insort(self._lanes.setdefault(run.key, []), _running(run, now_ns))
        self._loading: set[ModelKey] = set()
        self._pace = machine.pace
        self._worst = machine.pace.worst() if machine.pace.limited else None
        self._single = machine.cores == 1 and self._worst is None

    def pass_over(self, jobs: Sequence[Job]) -> None:
        """Take what `jobs` need, of which nobody wants to know when."""
        if not self._single:
            for job in jobs:
                self.place(job)
            return
        ((at_ns, variance, longest),) = self._free
        for job in jobs:
            p50_ns = job.p50_ns
            spread_ns = job.p99_ns - p50_ns
            sigma_ns = SIGMAS * (job.deviation_ns or spread_ns / _P99_SIGMAS)
            at_ns += job.mean_ns or p50_ns
            variance += sigma_ns * sigma_ns
            reach = MARGIN_SQUARED * (spread_ns * spread_ns)
            if reach > longest:  # noqa: PLR1730 - the hottest line there is
                longest = reach
            if job.wait_ns:
                at_ns += self._loads(job)
        self._free[0] = at_ns, variance, longest

    def place(self, job: Job) -> Expectation:
        """Take what `job` needs, as early as it may."""
        return self._next(job) if self._single else self._find(job)

    def _next(self, job: Job) -> Expectation:
        """Take the only core, where one comes after the other: all that `_find` would do then."""
        free = self._free
        start_ns, variance, reach = free[0]
        p50_ns = job.p50_ns
        wait_ns = self._loads(job) if job.wait_ns else 0
        finish_ns = start_ns + wait_ns + p50_ns
        spread_ns = job.p99_ns - p50_ns
        own = spread_ns * spread_ns
        sigma_ns = SIGMAS * (job.deviation_ns or spread_ns / _P99_SIGMAS)
        longest = MARGIN_SQUARED * own
        free[0] = (
            start_ns + wait_ns + (job.mean_ns or p50_ns),
            variance + sigma_ns * sigma_ns,
            longest if longest > reach else reach,  # noqa: FURB136 - as above
        )
        return Expectation(start_ns, finish_ns, finish_ns + int((variance + reach + own) ** 0.5))

    def _loads(self, job: Job) -> int:
        """Return what the first one of a model that isn't loaded has to wait for."""
        if job.key in self._loading:
            return 0
        self._loading.add(job.key)
        return job.wait_ns

    def _find(self, job: Job) -> Expectation:
        free, all_cores = self._free, self._cores
        cores = min(job.cores, all_cores)
        p50_ns = job.p50_ns
        mean_ns = job.mean_ns or p50_ns
        wait_ns = self._loads(job) if job.wait_ns else 0
        begin = free[cores - 1]
        lane: list[_Free] | None = None
        if job.lanes < all_cores or self._overbooked:
            lane = self._lanes.setdefault(job.key, [])
            if len(lane) >= job.lanes and lane[-job.lanes] > begin:
                begin = lane[-job.lanes]
        start_ns, variance, reach = begin
        gap = None
        if self._worst is not None:
            cost = p50_ns * cores
            lane_free = lane[-job.lanes] if lane is not None and len(lane) >= job.lanes else (self._now_ns, 0.0, 0.0)
            may_ns = self._pace.ready_ns(cost, start_ns)
            start_ns = _NEVER_NS if may_ns is None else may_ns
            if self._gaps and cores == 1 and self._pace.is_small(cost):
                first_ns = self._pace.express.ready_ns(cost, lane_free[0])
                gap = self._gap(first_ns, wait_ns + mean_ns, start_ns)
                if gap is not None:
                    start_ns = max(gap.begin_ns, first_ns)
                    variance, reach = max(gap.variance, lane_free[1]), max(gap.reach, lane_free[2])
        finish_ns = start_ns + wait_ns + p50_ns
        spread_ns = job.p99_ns - p50_ns
        own = spread_ns * spread_ns
        finish_p99_ns = finish_ns + int((variance + reach + own) ** 0.5)
        if self._worst is not None:
            finish_p99_ns += self._charge(cost, start_ns)
        sigma_ns = SIGMAS * (job.deviation_ns or spread_ns / _P99_SIGMAS)
        longest = MARGIN_SQUARED * own
        taken = (
            start_ns + wait_ns + mean_ns,
            variance + sigma_ns * sigma_ns,
            max(reach, longest),
        )
        if lane is not None:
            insort(lane, taken)
        if gap is not None:
            gap.begin_ns, gap.variance, gap.reach = taken
        else:
            self._take_cores(cores, begin[0], start_ns, taken)
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
        if self._worst is None or self._pace.stopped:
            return 0
        express = self._pace.by_express(cost, start_ns)
        self._pace = self._pace.spent(cost, start_ns, express=express)
        if express:
            return 0
        worst_ns = self._worst.ready_ns(cost, start_ns)
        self._worst = self._worst.spent(cost, worst_ns)
        return worst_ns - start_ns

    def _take_cores(self, cores: int, ready_ns: int, start_ns: int, taken: _Free) -> None:
        """Take those that come free last, so that the others stay open to whoever may pass."""
        free = self._free
        last = bisect_right(free, (start_ns, math.inf, math.inf))
        if start_ns > ready_ns:
            self._gaps += [_Gap(ready_ns, start_ns, core[1], core[2]) for core in free[last - cores : last]]
        del free[last - cores : last]
        for _ in range(cores):
            insort(free, taken)


def _running(run: Occupied, now_ns: int) -> _Free:
    """Return when a run is done, which is under way already: it is likelier than others to be a long one."""
    return max(now_ns, run.end_ns), MARGIN_SQUARED * run.spread_ns * run.spread_ns, 0.0


def _free_cores(machine: Machine, now_ns: int) -> list[_Free]:
    """Return when each core comes free; more may run than there are cores left."""
    ends: list[_Free] = [(now_ns, 0.0, 0.0)] * machine.cores
    for run in machine.running:
        ends += [_running(run, now_ns)] * run.cores
    ends.sort()
    return ends[len(ends) - machine.cores :]


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
