"""Decide, on arrival, whether this machine can promise a request, and what would have to go for it.

Owns nothing and waits for nothing: the answer depends only on the arguments. Whether the request runs here or next
door is `placement`; when it runs is `scheduler`.

The promise: a firm request is admitted only if its p99 with the work ahead ends before its deadline, and no admitted
firm request becomes late because of it. Displaceable requests are admitted on their median, and may be dropped until
they start: the least important first, among those the longest (dropping the longest until the rest is in time keeps
the largest number, as Moore and Hodgson showed).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from edgeinfer.limits import Limits, ThermalLevel
from edgeinfer.request import Reason, Refusal
from edgeinfer.scheduling.forecast import Expectation, Job, Machine, certain, forecast, meets
from edgeinfer.scheduling.pacing import UNPACED

MAX_VICTIMS = 16
"""Bounds the time of one decision; whoever would have to push out more than this is refused."""

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
    plan = [waiting for waiting in load.waiting if waiting.id not in replaces]
    insort(plan, job, key=_rank)
    victims: list[Job] = []
    late_before: frozenset[int] | None = None
    expected: list[Expectation] = []
    while len(victims) <= MAX_VICTIMS:
        if len(plan) > load.queue_limit:
            late, within = None, plan
        else:
            expected = forecast(plan, load.machine, now_ns)
            late = _first_late(plan, expected, late_before or ())
            if late is not None and late_before is None:
                late_before = _late(load, now_ns)
                late = _first_late(plan, expected, late_before)
            if late is None:
                place = plan.index(job)
                promised = not job.spare and certain(job, expected[place])
                return Admission(expected[place], promised, tuple(victim.id for victim in victims), tuple(replaces))
            within = plan[: late + 1]
        victim = _victim(within, job)
        if victim is None:
            return _refuse(job, plan, late, expected=expected, load=load, now_ns=now_ns)
        plan.remove(victim)
        victims.append(victim)
    return Refusal(Reason.DEADLINE_UNREACHABLE, f"more than {MAX_VICTIMS} waiting requests would have to go for it")


def shed(load: Load, now_ns: int) -> Shed:
    """Return which of the waiting requests can't be kept: to be asked when runs overran or limits changed."""
    plan = list(load.waiting)
    hopeless: list[int] = []
    displaced: list[int] = []
    endangered: list[int] = []
    while (late := _first_late(plan, forecast(plan, load.machine, now_ns), endangered)) is not None:
        droppable = [job for job in plan[: late + 1] if not job.firm and not job.spare]
        if droppable:
            victim = min(droppable, key=_expendability)
            (hopeless if victim.id == plan[late].id else displaced).append(victim.id)
            plan.remove(victim)
        else:
            endangered.append(plan[late].id)
    return Shed(tuple(hopeless), tuple(displaced), tuple(endangered))


def _late(load: Load, now_ns: int) -> frozenset[int]:
    """Return who is late already: that can't be held against the candidate."""
    expected = forecast(load.waiting, load.machine, now_ns)
    return frozenset(
        job.id for job, expectation in zip(load.waiting, expected, strict=True) if not meets(job, expectation)
    )


def _first_late(plan: Sequence[Job], expected: Sequence[Expectation], known: Collection[int]) -> int | None:
    for index, (job, expectation) in enumerate(zip(plan, expected, strict=True)):
        if job.id not in known and not meets(job, expectation):
            return index
    return None


def _expendability(job: Job) -> tuple[bool, int, int, int]:
    """Order jobs by who goes first: without promise, least important, longest, newest."""
    return (not job.spare, job.priority, -job.p50_ns * job.cores, -job.id)


def _victim(within: Sequence[Job], candidate: Job) -> Job | None:
    """Return who goes so that the rest of `within` can be in time; None when that would be the candidate itself."""
    droppable = [job for job in within if not job.firm]
    if not droppable:
        return None
    victim = min(droppable, key=_expendability)
    return None if victim.id == candidate.id else victim


def _refuse(
    job: Job, plan: Sequence[Job], late: int | None, *, expected: Sequence[Expectation], load: Load, now_ns: int
) -> Refusal:
    if late is None:
        return Refusal(Reason.QUEUE_FULL, f"{load.queue_limit} requests wait already and none of them may go for it")
    place = plan.index(job)
    finish_ns = expected[place].finish_p99_ns if job.firm else expected[place].finish_ns
    if load.machine.pace.limited:
        unpaced = forecast(plan, replace(load.machine, pace=UNPACED), now_ns)
        if meets(plan[late], unpaced[late]):
            why = load.limits.reason or f"thermal level {load.limits.level.name.lower()}"
            return Refusal(
                Reason.THERMAL,
                f"local work is held to {load.limits.duty_cycle:.0%} of the time ({why}): it would end "
                f"{_ms(finish_ns - now_ns)} from now, {_ms(job.due_ns - now_ns)} are left",
            )
    if plan[late].id != job.id:
        return Refusal(
            Reason.DEADLINE_UNREACHABLE,
            f"request {plan[late].id}, which was admitted before, would be late because of it",
        )
    return Refusal(
        Reason.DEADLINE_UNREACHABLE,
        f"it would take until {_ms(finish_ns - now_ns)} from now ({_ms(expected[place].start_ns - now_ns)} behind "
        f"other work, {_ms(job.p99_ns if job.firm else job.p50_ns)} to run), {_ms(job.due_ns - now_ns)} are left",
    )


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.1f} ms"
