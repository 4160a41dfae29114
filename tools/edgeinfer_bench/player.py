"""Play the jobs of a trace, against the runtime's scheduler or against a server that knows no deadlines, and count.

Owns what happens in one window. Which traces are played how densely, and what it means, is `overload`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from edgeinfer import oip
from edgeinfer.clock import NS_PER_S
from edgeinfer.request import Deadlines, InferRequest, Outcome, OutcomeKind, Payload, Result, Timeline
from edgeinfer_bench.bound import Job, most_on_time
from edgeinfer_bench.models import LONG, SHORT, Chain
from edgeinfer_bench.rig import Rig
from edgeinfer_bench.trace import LONG_US, SHORT_US

CHAINS: dict[int, Chain] = {SHORT_US: SHORT, LONG_US: LONG}
"""The model of each nominal size."""
SETTLE_S = 0.3
"""After a window: the last deadlines pass, and what still runs ends."""
_WARM_UP = 12
_FIFO_AHEAD = 2
"""Requests that the server without admission gives a worker at once, so that it is never idle between two."""
_FAR_NS = 60 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Sent:
    """One job as it is played: times relative to the window's begin."""

    at_ns: int
    due_ns: int
    service_ns: int
    size_us: int
    firm: bool


@dataclass(slots=True)
class Tally:
    """What became of the jobs of some windows, in nanoseconds of service time."""

    offered_ns: int = 0
    bound_ns: int = 0
    ours_ns: int = 0
    fifo_ns: int = 0
    inside_ns: int = 0
    """Time that the worker's core was inside `session.run` of runs that ended well, as the worker marks it."""
    ran_ns: int = 0
    """Core time that our runs took, from dispatch to their end."""
    wasted_ns: int = 0
    """Of that, what runs took whose answer was not in time."""
    promised: int = 0
    broken: int = 0
    """Firm requests that were admitted, and of them those not answered in time."""
    loop_cpu_ns: int = 0
    """CPU time of this process, which holds the runtime's loop and the sender, while ours played."""
    wall_ns: int = 0
    """From the first arrival to the last outcome of ours."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Of what was not in time."""
    broken_as: Counter[str] = field(default_factory=Counter)
    """What the broken promises ended as."""
    offered_by_class: Counter[bool] = field(default_factory=Counter)
    on_time_by_class: Counter[bool] = field(default_factory=Counter)
    """Service time of firm (True) and displaceable jobs, in nanoseconds."""

    def add(self, other: Tally) -> None:
        """Count another window in."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class Player:
    """Plays jobs. Loop thread only."""

    def __init__(self) -> None:
        self._payloads = {size: _payload(chain) for size, chain in CHAINS.items()}
        self._ended: list[Outcome] = []

    def observe(self, outcome: Outcome) -> None:
        """Take an outcome from the scheduler, and give its memory back."""
        self._ended.append(outcome)
        if outcome.result is not None:
            outcome.result.release()

    async def warm_up(self, rig: Rig) -> None:
        """Let the estimator see some runs."""
        for size, chain in CHAINS.items():
            for _ in range(_WARM_UP):
                ticket = rig.scheduler.submit(self._request(size, chain, rig.clock.now_ns(), rig.deadline_in(5000)))
                await ticket.outcome()

    async def play(self, rig: Rig, jobs: Sequence[Sent], *, fifo_first: bool) -> Tally:
        """Play the jobs against both, one after the other."""
        tally = Tally(
            offered_ns=sum(job.service_ns for job in jobs),
            bound_ns=most_on_time(Job(job.at_ns, job.due_ns, job.service_ns) for job in jobs),
        )
        if fifo_first:
            tally.fifo_ns = await self._fifo(rig, jobs)
        await self._ours(rig, jobs, tally)
        if not fifo_first:
            tally.fifo_ns = await self._fifo(rig, jobs)
        return tally

    async def _ours(self, rig: Rig, jobs: Sequence[Sent], tally: Tally) -> None:
        self._ended.clear()
        sent: dict[int, Sent] = {}
        cpu_ns, begun_ns = time.process_time_ns(), rig.clock.now_ns()
        for job in jobs:
            await _until(begun_ns + job.at_ns)
            chain = CHAINS[job.size_us]
            request = self._request(job.size_us, chain, rig.clock.now_ns(), begun_ns + job.due_ns, firm=job.firm)
            sent[request.id] = job
            rig.scheduler.submit(request)
        await _until(begun_ns + max(job.due_ns for job in jobs))
        tally.loop_cpu_ns += time.process_time_ns() - cpu_ns
        await asyncio.sleep(SETTLE_S)
        tally.wall_ns += max(outcome.ended_ns for outcome in self._ended) - begun_ns
        count_all(self._ended, sent, tally)
        if len(self._ended) != len(jobs):
            raise RuntimeError(f"{len(self._ended)} of {len(jobs)} requests have an outcome")

    async def _fifo(self, rig: Rig, jobs: Sequence[Sent]) -> int:
        """Return the service time that a server delivers in time which runs everything in the order of arrival."""
        waiting: asyncio.Queue[Sent] = asyncio.Queue()
        on_time_ns = 0
        begun_ns = rig.clock.now_ns()

        async def serve() -> None:
            nonlocal on_time_ns
            while True:
                job = await waiting.get()
                now_ns = rig.clock.now_ns()
                request = self._request(job.size_us, CHAINS[job.size_us], now_ns, now_ns + _FAR_NS)
                ending = await rig.local.execute(request)
                if isinstance(ending, Result):
                    ending.release()
                    if rig.clock.now_ns() <= begun_ns + job.due_ns:
                        on_time_ns += job.service_ns

        servers = [asyncio.create_task(serve(), name=f"fifo[{index}]") for index in range(_FIFO_AHEAD)]
        for job in jobs:
            await _until(begun_ns + job.at_ns)
            waiting.put_nowait(job)
        await _until(begun_ns + max(job.due_ns for job in jobs))  # what comes later is late
        for server in servers:
            server.cancel()
        await asyncio.wait(servers)
        await asyncio.sleep(SETTLE_S)
        return on_time_ns

    def _request(self, size_us: int, chain: Chain, now_ns: int, deadline_ns: int, *, firm: bool = True) -> InferRequest:
        payload = self._payloads[size_us]
        return InferRequest(chain.name, payload, Deadlines(deadline_ns), Timeline(now_ns), firm=firm)


def count_all(ended: Sequence[Outcome], sent: Mapping[int, Sent], tally: Tally) -> None:
    """Count what became of all jobs, in the order of their ends.

    Of a run that was sent behind another one, only what it took beyond that one's end.
    """
    core_free_ns = 0
    for outcome in ended:
        count(outcome, sent[outcome.request.id], tally, core_free_ns=core_free_ns)
        if outcome.request.timeline.dispatched_ns is not None:
            core_free_ns = outcome.ended_ns


def count(outcome: Outcome, job: Sent, tally: Tally, *, core_free_ns: int = 0) -> None:
    """Count what became of one job; pure but for the tally."""
    timeline = outcome.request.timeline
    in_time = outcome.kind is OutcomeKind.OK
    how = f"{outcome.kind} {outcome.reason}"
    tally.offered_by_class[job.firm] += job.service_ns
    tally.on_time_by_class[job.firm] += job.service_ns if in_time else 0
    if in_time:
        tally.ours_ns += job.service_ns
    else:
        tally.reasons[how] += 1
    if timeline.dispatched_ns is not None:
        ran_ns = outcome.ended_ns - max(timeline.dispatched_ns, core_free_ns)
        tally.ran_ns += ran_ns
        tally.wasted_ns += 0 if in_time else ran_ns
    if timeline.started_ns is not None and timeline.finished_ns is not None:
        tally.inside_ns += timeline.finished_ns - timeline.started_ns
    if job.firm and timeline.admitted_ns is not None:
        tally.promised += 1
        tally.broken += not in_time
        tally.broken_as[how] += not in_time


async def _until(at_ns: int) -> None:
    """Sleep until then; when it has passed, let the others have their turn all the same."""
    await asyncio.sleep(max(0, at_ns - time.monotonic_ns()) / NS_PER_S)


def _payload(chain: Chain) -> Payload:
    return oip.encode_request([("x", "FP32", [chain.rows, chain.width], bytes(chain.input_bytes))])
