"""Decide, on arrival, whether this machine can promise a request, and what would have to go for it.

Owns nothing and waits for nothing: the answer depends only on the arguments. Whether the request runs here or next
door is `placement`; when it runs is `scheduler`.

The promise: a firm request is admitted only if its p99 with the work ahead ends before its deadline, and no admitted
firm request is put in danger by it. Displaceable requests are admitted on their median, and may be dropped until they
start: the least important first, among those the least work that is enough. What counts is the work that is answered
in time, so a frame displaces others of its importance only for more work than is lost with them.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from edgeinfer.limits import Limits, ThermalLevel
from edgeinfer.request import Reason, Refusal
from edgeinfer.scheduling.forecast import ROUNDING_NS, Expectation, Job, Machine, Plan, certain, forecast, meets
from edgeinfer.scheduling.pacing import UNPACED

MAX_VICTIMS = 16
"""Bounds the time of one decision; whoever would have to push out more than this is refused."""
GUARD = 1.5
"""A promise is made with p99; whoever comes later must leave it so many times that distance from its median. Each
newcomer takes what slack is left, and a promise that was tight a hundred times is broken once."""
GAIN = 1.1
"""How much more work a frame must bring than those of its own importance that would go for it: estimates tremble."""

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Load:
    """What the machine has to do already, and what it may: all that admission looks at."""

    waiting: Sequence[Job]
    """In the order of their ranks."""
    machine: Machine
    limits: Limits
    queue_limit: int


@dataclass(frozen=True, slots=True)
class Admission:
    """The machine can take the request."""

    expectation: Expectation
    certain: bool
    """In time at p99; False: only at the median."""
    victims: tuple[int, ...] = ()
    """Ids of the waiting requests that are displaced for it."""
    replaces: tuple[int, ...] = ()
    """Ids of the older frames that it supersedes."""

    @property
    def costs(self) -> bool:
        """Whether somebody else has to go for it."""
        return bool(self.victims or self.replaces)


@dataclass(frozen=True, slots=True)
class Shed:
    """What can't be kept of what was admitted, since the world has changed."""

    hopeless: tuple[int, ...] = ()
    """Displaceable requests that will be late."""
    displaced: tuple[int, ...] = ()
    """Displaceable requests that must go so that others won't be late."""
    endangered: tuple[int, ...] = ()
    """Firm requests that may be late: no longer in time at p99, and nothing is left to drop for them."""


def local_stop(limits: Limits) -> Refusal | None:
    """Return why no local work may start at all under `limits`, None when it may."""
    if limits.level >= ThermalLevel.CRITICAL or limits.duty_cycle <= 0.0:
        return Refusal(Reason.THERMAL, limits.reason or f"no local work at thermal level {limits.level.name.lower()}")
    return None


def admit(job: Job, load: Load, *, replaces: Collection[int] = (), now_ns: int) -> Admission | Refusal:
    """Return how `job` fits among the waiting ones, or why it doesn't.

    Args:
        job: the candidate, with its rank.
        load: what waits and runs; nothing of it is changed.
        replaces: ids of waiting frames that go when it is admitted, and stay when it is not.
        now_ns: the present.

    A refusal drops nobody.
    """
    if (stop := local_stop(load.limits)) is not None:
        return stop
    waiting = [other for other in load.waiting if other.id not in replaces] if replaces else list(load.waiting)
    victims: list[Job] = []
    while True:
        place = bisect(waiting, job.rank, key=_rank)
        conflict: _Conflict | None = None
        if len(waiting) < load.queue_limit:
            found = _fit(job, waiting, place, load.machine, now_ns)
            if isinstance(found, Expectation):
                promised = not job.spare and certain(job, found)
                return Admission(found, promised, tuple(victim.id for victim in victims), tuple(replaces))
            conflict = found
        within = waiting if conflict is None else waiting[: conflict.ahead]
        need_ns = 0 if conflict is None else conflict.late_ns * load.machine.cores
        victim = None
        if len(victims) < MAX_VICTIMS:
            victim = _victim(_droppable_for(job, within), need_ns, None if conflict is None else conflict.late)
        if victim is None or not _pays(job, [*victims, victim]):
            return _refuse(job, waiting, conflict, load=load, now_ns=now_ns)
        del waiting[bisect_left(waiting, victim.rank, key=_rank)]
        victims.append(victim)


def shed(load: Load, now_ns: int) -> Shed:
    """Return which of the waiting requests can't be kept: to be asked when runs overran or limits changed."""
    plan = list(load.waiting)
    hopeless: list[int] = []
    displaced: list[int] = []
    endangered: list[int] = []
    while (conflict := _first_late(plan, load.machine, now_ns, endangered)) is not None:
        late = conflict.late
        droppable = [job for job in plan[: conflict.ahead] if not job.firm and not job.spare]
        victim = _victim(droppable, conflict.late_ns * load.machine.cores, late)
        if victim is None:
            endangered.append(late.id)
            continue
        (hopeless if victim is late else displaced).append(victim.id)
        del plan[bisect_left(plan, victim.rank, key=_rank)]
    return Shed(tuple(hopeless), tuple(displaced), tuple(endangered))


@dataclass(frozen=True, slots=True)
class _Conflict:
    """Somebody would be late."""

    late: Job
    expectation: Expectation
    late_ns: int
    """By how much it would have to be earlier."""
    ahead: int
    """How many of the waiting could be in its way, itself among them if it waits."""


def _fit(job: Job, waiting: Sequence[Job], place: int, machine: Machine, now_ns: int) -> Expectation | _Conflict:
    """Return what is to be expected of `job` at its place among the waiting, or who would be late then.

    Who is in front of it isn't touched by it, and who is lost already can't be held against it. If several would be
    late, the first one who was promised something: what goes for him may be enough for the others.
    """
    plan = Plan(machine, now_ns)
    plan.pass_over(waiting[:place])
    without: Plan | None = None
    own = plan.place(job)
    if not meets(job, own):
        return _Conflict(job, own, _late_ns(job, own, 1.0), place)
    checked = 0
    first: _Conflict | None = None
    for index in range(place, len(waiting)):
        other = waiting[index]
        then = plan.place(other)
        if other.spare:
            break
        if (first is None or other.firm) and not _guarded(other, then):
            without = without or Plan(machine, now_ns)
            without.pass_over(waiting[checked:index])
            before = without.place(other)
            checked = index + 1
            if before.start_ns < other.start_by_ns and before.finish_ns <= other.due_ns and then != before:
                conflict = _Conflict(other, then, _late_ns(other, then, GUARD), index + 1)
                if other.firm:
                    return conflict
                first = conflict
    return own if first is None else first


def _guarded(job: Job, then: Expectation) -> bool:
    """Return whether a job that was admitted stays safe: a frame at its median, a promise with a margin."""
    if then.start_ns >= job.start_by_ns:
        return False
    if not job.firm:
        return then.finish_ns <= job.due_ns
    return then.finish_ns + GUARD * (then.finish_p99_ns - then.finish_ns) + ROUNDING_NS <= job.due_ns


def _late_ns(job: Job, then: Expectation, guard: float) -> int:
    """Return by how much a job would have to be earlier."""
    end_ns = then.finish_ns
    if job.firm:
        end_ns += round(guard * (then.finish_p99_ns - then.finish_ns)) + ROUNDING_NS
    return max(1, end_ns - job.due_ns, then.start_ns + 1 - job.start_by_ns)


def _first_late(plan: Sequence[Job], machine: Machine, now_ns: int, known: Collection[int]) -> _Conflict | None:
    """Return the first late one who was promised something, or else the first late one, but for those `known`."""
    placing = Plan(machine, now_ns)
    first: _Conflict | None = None
    for index, job in enumerate(plan):
        then = placing.place(job)
        if (first is None or job.firm) and not meets(job, then) and job.id not in known:
            conflict = _Conflict(job, then, _late_ns(job, then, 1.0), index + 1)
            if job.firm:
                return conflict
            first = conflict
    return first


def _work_ns(job: Job) -> int:
    return (job.mean_ns or job.p50_ns) * job.cores


def _droppable_for(candidate: Job, within: Iterable[Job]) -> list[Job]:
    """Return who may go for a newcomer: nobody who was promised something, nor for a less important one."""
    if candidate.spare:
        return [job for job in within if job.spare and not job.firm and job.priority < candidate.priority]
    if candidate.firm:
        return [job for job in within if not job.firm]
    return [job for job in within if not job.firm and (job.spare or job.priority <= candidate.priority)]


def _victim(droppable: Sequence[Job], need_ns: int, late: Job | None) -> Job | None:
    """Return who goes first so that `late` can be in time, which takes `need_ns` of the cores; None if nobody can.

    Of the least important (who only takes spare time first of all) the least work that is enough, or else the most
    there is. If `late` itself goes, that is enough.
    """
    if not droppable:
        return None
    if late is not None and late not in droppable and sum(map(_work_ns, droppable)) < need_ns:
        return None
    lowest = min((not job.spare, job.priority) for job in droppable)
    lowest_jobs = [job for job in droppable if (not job.spare, job.priority) == lowest]
    enough = [job for job in lowest_jobs if job is late or _work_ns(job) >= need_ns]
    if enough:
        return min(enough, key=lambda job: (_work_ns(job), -job.id))
    return max(lowest_jobs, key=lambda job: (_work_ns(job), job.id))


def _pays(candidate: Job, victims: Sequence[Job]) -> bool:
    """Return whether a newcomer is worth more than those who would go for it."""
    if candidate.firm:
        return True
    lost_ns = sum(_work_ns(job) for job in victims if not job.spare and job.priority == candidate.priority)
    return GAIN * lost_ns < _work_ns(candidate)


def _refuse(job: Job, waiting: Sequence[Job], conflict: _Conflict | None, *, load: Load, now_ns: int) -> Refusal:
    if conflict is None:
        return Refusal(Reason.QUEUE_FULL, f"{load.queue_limit} requests wait already and none of them may go for it")
    late, then = conflict.late, conflict.expectation
    end_ns = then.finish_p99_ns if late.firm else then.finish_ns
    if load.machine.pace.limited:
        place = bisect(waiting, job.rank, key=_rank)
        plan = [*waiting[:place], job, *waiting[place:]]
        unpaced = forecast(plan, replace(load.machine, pace=UNPACED), now_ns)
        if meets(late, unpaced[plan.index(late)]):
            why = load.limits.reason or f"thermal level {load.limits.level.name.lower()}"
            return Refusal(
                Reason.THERMAL,
                f"local work is held to {load.limits.duty_cycle:.0%} of the time ({why}): "
                f"{'it' if late is job else f'request {late.id}'} would end {_ms(end_ns - now_ns)} from now, "
                f"{_ms(late.due_ns - now_ns)} are left",
            )
    if late is not job:
        return Refusal(
            Reason.DEADLINE_UNREACHABLE,
            f"request {late.id}, which was admitted before, could be late because of it",
        )
    return Refusal(
        Reason.DEADLINE_UNREACHABLE,
        f"it would take until {_ms(end_ns - now_ns)} from now ({_ms(then.start_ns - now_ns)} behind "
        f"other work, {_ms(job.p99_ns if job.firm else job.p50_ns)} to run), {_ms(job.due_ns - now_ns)} are left",
    )


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.1f} ms"
