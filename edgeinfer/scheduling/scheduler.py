"""Run every accepted request by its deadline, and tell every caller how its request ended, exactly once.

Owns the deadline queue, what runs and the tickets. All decisions are pure functions of other modules (`admission`,
`placement`, `pacing`, `forecast`): this one gathers what they need, does what they say, and keeps time. It sees
executors only through their protocol, so here and next door are the same to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.execution.executor import Estimate, Executor
from edgeinfer.limits import Limits, ThermalLevel
from edgeinfer.metrics import Accounting
from edgeinfer.request import (
    Ending,
    Expired,
    Failure,
    InferRequest,
    Outcome,
    Placement,
    Reason,
    Refusal,
    Result,
    Ticket,
    conclude,
)
from edgeinfer.scheduling.admission import Admission, Load, admit, local_stop, shed
from edgeinfer.scheduling.deadline_queue import DeadlineQueue, Entry
from edgeinfer.scheduling.estimator import Estimator, slowdown
from edgeinfer.scheduling.forecast import Job, Machine, ModelKey, Occupied, forecast, occupied
from edgeinfer.scheduling.pacing import UNPACED
from edgeinfer.scheduling.placement import Placed, place, settled
from edgeinfer.scheduling.ticket import PendingTicket, Stage

ROUND_NS = 1_000_000_000
"""The dispatcher goes round at least this often, so that a watchdog can tell idle from dead."""
STOP_GRACE_S = 2.0
"""From the end of a request to cancelling an executor that still works on it, and again to giving its cores up."""
OFFLOAD_HOLD_NS = 5_000_000_000
"""Offloading counts as open until nothing went next door for this long."""
LATE_ALLOWANCES = 4
"""Who accepts late results waits at most so many times the time it had given itself, and at least a second."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """The scheduler at one moment."""

    queue_length: int
    queue_limit: int
    work_ahead_ns: int
    """Core-nanoseconds (medians) that wait for this machine."""
    running_local: int
    running_nearby: int
    cores: int
    """Cores that may be used now."""
    cores_busy: int
    paced: bool
    """Whether local work is held to a duty cycle."""
    stopped: bool
    """Whether heat forbids all local work."""
    offload_open: bool
    """Whether requests went next door lately."""
    draining: bool
    in_flight: int
    abandoned_runs: int
    """Runs whose executor neither ended nor could be cancelled; their cores were given up."""
    progress: int


@dataclass(slots=True, eq=False)
class _Run:
    """One request with an executor, from dispatch until the executor has let go of it."""

    ticket: PendingTicket
    placement: Placement
    key: ModelKey
    estimate: Estimate
    cores: int
    slowdown: float
    started_ns: int
    task: asyncio.Task[None]
    alarm: asyncio.TimerHandle
    released: bool = False

    def occupied(self, now_ns: int) -> Occupied:
        """Return what the forecast needs to know."""
        request, estimate = self.ticket.request, self.estimate
        due_ns = _give_up_ns(request) if request.accept_late else request.deadlines.total_ns
        return occupied(
            self.key,
            cores=self.cores,
            started_ns=self.started_ns,
            p50_ns=estimate.wait_ns + estimate.p50_ns,
            p99_ns=estimate.finish_p99_ns,
            due_ns=due_ns,
            now_ns=now_ns,
        )


class Scheduler:
    """Admits, queues, places and runs requests. Loop thread only.

    The queue holds at most `queue_limit` requests that wait for this machine, and as many that are about to go next
    door (they leave with the next round); beyond that requests are refused. Each outcome is counted in `accounting`,
    handed to the ticket, then shown to `observe`, which must not raise.
    """

    def __init__(
        self,
        *,
        local: Executor,
        nearby: Executor | None,
        clock: Clock,
        accounting: Accounting,
        queue_limit: int,
        cores: int,
        observe: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._local = local
        self._nearby = nearby
        self._clock = clock
        self._accounting = accounting
        self._all_cores = cores
        self._observe = observe
        self._queue: DeadlineQueue[PendingTicket] = DeadlineQueue(queue_limit)
        self._outbound: list[PendingTicket] = []
        self._runs: dict[int, _Run] = {}
        self._open: dict[int, PendingTicket] = {}
        self._estimator = Estimator()
        self._limits = Limits(ThermalLevel.NOMINAL, frozenset(range(cores)), 1.0, 0)
        self._pace = UNPACED
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._draining = False
        self._progress = 0
        self._abandoned = 0
        self._last_offload_ns: int | None = None

    # What callers use

    def submit(self, request: InferRequest) -> Ticket:
        """Take a request in; whatever becomes of it, refusals too, is its ticket's outcome."""
        now_ns = self._clock.now_ns()
        self._accounting.received(request)
        ticket = PendingTicket(request, asyncio.get_running_loop().create_future(), self._cancel)
        self._open[request.id] = ticket
        self._empty.clear()
        if self._draining:
            self._end(ticket, Refusal(Reason.DRAINING, "the service is draining: no new requests"))
        elif request.deadlines.start_by_ns <= now_ns and not request.accept_late:
            late_ms = (now_ns - request.deadlines.start_by_ns) / 1e6
            self._end(ticket, Expired(f"it came {late_ms:.1f} ms after its deadline"))
        elif (refusal := self._settle(ticket, now_ns)) is not None:
            self._end(ticket, refusal)
        else:
            request.timeline.admitted_ns = now_ns
        return ticket

    def set_limits(self, limits: Limits) -> None:
        """Obey `limits` from now on; what runs already goes on, what can't be kept is told at once."""
        now_ns = self._clock.now_ns()
        self._limits = limits
        self._pace = self._pace.under(duty_cycle=limits.duty_cycle, cores=self._cores, now_ns=now_ns)
        self._wake.set()

    def start_draining(self) -> None:
        """Refuse new requests; those admitted are finished."""
        self._draining = True

    async def drained(self) -> None:
        """Wait until every request has ended; bounded by their deadlines."""
        await self._empty.wait()

    @property
    def progress(self) -> int:
        """Rounds of the dispatcher; stands still only when it is stuck."""
        return self._progress

    def snapshot(self) -> SchedulerSnapshot:
        """Return the scheduler as it is now."""
        now_ns = self._clock.now_ns()
        nearby = sum(run.placement is Placement.NEARBY for run in self._runs.values())
        lately = self._last_offload_ns is not None and now_ns - self._last_offload_ns < OFFLOAD_HOLD_NS
        return SchedulerSnapshot(
            queue_length=len(self._queue),
            queue_limit=self._queue.limit,
            work_ahead_ns=self._queue.work_ahead_ns(1 << 62),
            running_local=len(self._runs) - nearby,
            running_nearby=nearby,
            cores=self._cores,
            cores_busy=self._cores_busy(),
            paced=self._pace.limited,
            stopped=local_stop(self._limits) is not None,
            offload_open=bool(nearby) or lately,
            draining=self._draining,
            in_flight=len(self._open),
            abandoned_runs=self._abandoned,
            progress=self._progress,
        )

    async def run(self) -> None:
        """Dispatch, for ever. When it is cancelled all work stops and every open ticket ends `failed(stopped)`."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._wake.clear()
                    wait_ns = self._round(group)
                    await asyncio.sleep(0)  # what was started starts, even when the next round is due already
                    try:
                        async with asyncio.timeout(wait_ns / NS_PER_S):
                            await self._wake.wait()
                    except TimeoutError:
                        pass
        finally:
            for ticket in list(self._open.values()):
                self._end(ticket, Failure("stopped", "the scheduler stopped"))

    # Deciding

    @property
    def _cores(self) -> int:
        return max(1, min(self._all_cores, len(self._limits.cpus)))

    def _settle(self, ticket: PendingTicket, now_ns: int) -> Refusal | None:
        """Let the request wait for the place that suits it, or return why there is none."""
        request = ticket.request
        local: Admission | Refusal
        job: Job | None = None
        estimate = self._ask_local(request, now_ns) if Placement.LOCAL not in ticket.tried else None
        if isinstance(estimate, Estimate):
            job = self._job(request, estimate)
            replaces = tuple(entry.job.id for entry in self._queue.superseded_by(request))
            local = admit(job, self._load(now_ns), replaces=replaces, now_ns=now_ns)
        else:
            local = estimate or _said(ticket.tried[Placement.LOCAL])
        nearby = None if settled(local) else self._ask_nearby(ticket, now_ns)
        placed = place(request, local, nearby, now_ns=now_ns)
        if isinstance(placed, Refusal):
            if isinstance(estimate, Estimate) and self._may_use_spare_time(request, placed, now_ns):
                job = self._job(request, estimate, spare=True)
                local = admit(job, self._load(now_ns), now_ns=now_ns)
            if isinstance(local, Refusal) or job is None:
                return placed
        elif placed.placement is Placement.NEARBY:
            return self._send_out(ticket)
        if isinstance(local, Admission) and job is not None:
            self._make_room(local, request, now_ns)
            self._enqueue(ticket, job)
        return None

    def _may_use_spare_time(self, request: InferRequest, refusal: Refusal, now_ns: int) -> bool:
        """Return whether a request that can't be in time may run all the same when nothing else wants the cores.

        Either because its caller takes late results; or because it is the only way to learn: nothing was seen of
        the model lately, so the estimate that refuses it may be wrong, and an idle core loses nothing by trying.
        """
        if refusal.reason not in {Reason.DEADLINE_UNREACHABLE, Reason.THERMAL}:
            return False
        if request.accept_late:
            return True
        hearsay = self._estimator.stale(_key(request), Placement.LOCAL, now_ns)
        return not request.firm and hearsay and not len(self._queue) and not self._cores_busy()

    def _ask_local(self, request: InferRequest, now_ns: int) -> Estimate | Refusal:
        estimate = self._local.estimate(request)
        if isinstance(estimate, Refusal):
            return estimate
        key = _key(request)
        estimate = self._estimator.refine(
            estimate, key, Placement.LOCAL, now_ns=now_ns, slowdown=slowdown(estimate.cores, self._cores)
        )
        if self._lanes_busy(key) >= estimate.lanes:
            # What it would wait for inside the executor is our own run, which the forecast counts already.
            return Estimate(estimate.p50_ns, estimate.p99_ns, 0, estimate.cores, estimate.lanes)
        return estimate

    def _ask_nearby(self, ticket: PendingTicket, now_ns: int) -> Estimate | Refusal | None:
        if self._nearby is None:
            return None
        if (before := ticket.tried.get(Placement.NEARBY)) is not None:
            return _said(before)
        estimate = self._nearby.estimate(ticket.request)
        if isinstance(estimate, Refusal):
            return estimate
        return self._estimator.refine(estimate, _key(ticket.request), Placement.NEARBY, now_ns=now_ns)

    def _job(self, request: InferRequest, estimate: Estimate, *, spare: bool = False) -> Job:
        deadlines = request.deadlines
        start_by_ns = deadlines.start_by_ns
        if request.accept_late:
            start_by_ns = _give_up_ns(request) if deadlines.queue_ns is None else deadlines.queue_ns
        return Job(
            id=request.id,
            key=_key(request),
            rank=self._queue.rank(request, spare=spare),
            due_ns=deadlines.total_ns,
            start_by_ns=start_by_ns,
            firm=request.firm,
            priority=request.priority,
            p50_ns=estimate.p50_ns,
            p99_ns=estimate.p99_ns,
            cores=max(1, min(estimate.cores, self._cores)),
            lanes=max(1, estimate.lanes),
            wait_ns=estimate.wait_ns,
        )

    def _load(self, now_ns: int) -> Load:
        return Load(self._queue.jobs(), self._machine(now_ns), self._limits, self._queue.limit)

    def _machine(self, now_ns: int) -> Machine:
        return Machine(self._cores, tuple(run.occupied(now_ns) for run in self._local_runs()), self._pace)

    # Moving requests

    def _enqueue(self, ticket: PendingTicket, job: Job) -> None:
        ticket.stage = Stage.WAITING
        self._queue.push(job, ticket, stream=ticket.request.stream)
        self._wake.set()

    def _send_out(self, ticket: PendingTicket) -> Refusal | None:
        if len(self._outbound) >= self._queue.limit:
            return Refusal(Reason.QUEUE_FULL, f"{self._queue.limit} requests are about to go next door already")
        ticket.stage = Stage.OUTBOUND
        self._outbound.append(ticket)
        self._wake.set()
        return None

    def _make_room(self, admission: Admission, request: InferRequest, now_ns: int) -> None:
        for old in admission.replaces:
            if (entry := self._queue.remove(old)) is not None:
                self._end(entry.item, Refusal(Reason.SUPERSEDED, f"request {request.id} is a newer frame"))
        for old in admission.victims:
            if (entry := self._queue.remove(old)) is not None:
                refusal = Refusal(Reason.DISPLACED, f"request {request.id} needs the time and is more important")
                self._elsewhere(entry.item, refusal, now_ns)

    def _elsewhere(self, ticket: PendingTicket, refusal: Refusal, now_ns: int) -> None:
        """Send a request next door that can't stay here, or tell its caller why it can't."""
        ticket.stage = Stage.DECIDING
        placed = place(ticket.request, refusal, self._ask_nearby(ticket, now_ns), now_ns=now_ns)
        if isinstance(placed, Placed):
            placed = self._send_out(ticket) or placed
        if isinstance(placed, Refusal):
            self._end(ticket, placed)

    def _leave_or_wait(self, entry: Entry[PendingTicket], refusal: Refusal, now_ns: int) -> None:
        """Do `_elsewhere` with a waiting request, or let it wait for spare time if it accepts being late."""
        self._queue.remove(entry.job.id)
        request = entry.item.request
        if not request.accept_late or isinstance(local_stop(self._limits), Refusal):
            return self._elsewhere(entry.item, refusal, now_ns)
        estimate = self._ask_local(request, now_ns)
        if isinstance(estimate, Refusal):
            return self._elsewhere(entry.item, estimate, now_ns)
        return self._enqueue(entry.item, self._job(request, estimate, spare=True))

    # Dispatching

    def _round(self, group: asyncio.TaskGroup) -> int:
        """Do everything that is due, and return in how many nanoseconds the next round is."""
        now_ns = self._clock.now_ns()
        self._progress += 1
        for entry in self._queue.pop_expired(now_ns):
            self._end(entry.item, Expired(f"it waited behind {len(self._queue)} others until its deadline"))
        if len(self._queue):
            self._drop_what_cannot_be_kept(now_ns)
        self._start_outbound(group, now_ns)
        if len(self._queue):
            return self._start_local(group, now_ns)
        return ROUND_NS

    def _drop_what_cannot_be_kept(self, now_ns: int) -> None:
        entries = {entry.job.id: entry for entry in self._queue}
        if (stop := local_stop(self._limits)) is not None:
            for entry in entries.values():
                self._leave_or_wait(entry, stop, now_ns)
            return
        verdict = shed(self._load(now_ns), now_ns)
        for job_id in verdict.hopeless:
            self._leave_or_wait(entries[job_id], self._why_shed(entries[job_id].job), now_ns)
        for job_id in verdict.endangered:
            entry = entries[job_id]
            nearby = self._ask_nearby(entry.item, now_ns)
            safe = isinstance(nearby, Estimate) and now_ns + nearby.finish_p99_ns <= entry.job.due_ns
            if safe or now_ns + entry.job.p50_ns > entry.job.due_ns:
                self._leave_or_wait(entry, self._why_shed(entry.job), now_ns)

    def _why_shed(self, job: Job) -> Refusal:
        if self._pace.limited:
            why = self._limits.reason or f"thermal level {self._limits.level.name.lower()}"
            return Refusal(Reason.THERMAL, f"local work is held to {self._limits.duty_cycle:.0%} of the time ({why})")
        return Refusal(
            Reason.DISPLACED if not job.firm else Reason.DEADLINE_UNREACHABLE,
            "the work ahead took longer than expected, and it can't be done by its deadline any more",
        )

    def _start_outbound(self, group: asyncio.TaskGroup, now_ns: int) -> None:
        outbound, self._outbound = self._outbound, []
        for ticket in outbound:
            if ticket.stage is not Stage.OUTBOUND:
                continue
            estimate = self._ask_nearby(ticket, now_ns)
            if self._nearby is not None and isinstance(estimate, Estimate):
                self._last_offload_ns = now_ns
                self._start(group, self._nearby, ticket, estimate, now_ns)
                continue
            # The others of the same burst have taken what was free.
            ticket.stage = Stage.DECIDING
            if isinstance(estimate, Refusal):
                ticket.tried[Placement.NEARBY] = estimate
            if (refusal := self._settle(ticket, now_ns)) is not None:
                self._end(ticket, refusal)

    def _start_local(self, group: asyncio.TaskGroup, now_ns: int) -> int:
        """Start what the forecast starts now, and return when to look again."""
        entries = list(self._queue)
        wait_ns = ROUND_NS
        if self._cores_busy() < self._cores:
            for entry, expected in zip(
                entries, forecast([entry.job for entry in entries], self._machine(now_ns), now_ns), strict=True
            ):
                if expected.start_ns <= now_ns:
                    self._start_entry(group, entry, now_ns)
                elif self._pace.limited:
                    wait_ns = min(wait_ns, expected.start_ns - now_ns)
        looks = [run.occupied(now_ns).end_ns + 2_000_000 - now_ns for run in self._local_runs()]
        if (expiry_ns := self._queue.next_expiry_ns()) is not None:
            looks.append(expiry_ns - now_ns)
        return max(0, min(wait_ns, *looks)) if looks else wait_ns

    def _start_entry(self, group: asyncio.TaskGroup, entry: Entry[PendingTicket], now_ns: int) -> None:
        ticket, job = entry.item, entry.job
        if self._cores_busy() + job.cores > self._cores or self._lanes_busy(job.key) >= job.lanes:
            return
        estimate = self._ask_local(ticket.request, now_ns)
        if isinstance(estimate, Estimate) and (
            job.spare or now_ns + estimate.wait_ns + estimate.p50_ns <= job.due_ns
        ):  # fmt: skip
            self._queue.remove(job.id)
            self._start(group, self._local, ticket, estimate, now_ns)
            return
        self._wake.set()  # somebody else may have the place
        if isinstance(estimate, Estimate):
            estimate = Refusal(Reason.DEADLINE_UNREACHABLE, "its turn comes too late for it to be done in time")
        self._leave_or_wait(entry, estimate, now_ns)

    def _start(
        self, group: asyncio.TaskGroup, executor: Executor, ticket: PendingTicket, estimate: Estimate, now_ns: int
    ) -> None:
        request, placement = ticket.request, executor.placement
        cores = max(1, min(estimate.cores, self._cores)) if placement is Placement.LOCAL else 0
        self._pace = self._pace.spent(estimate.p50_ns * cores, now_ns)
        ticket.stage = Stage.RUNNING
        task = group.create_task(self._execute(executor, ticket), name=f"{placement}[{request.id}]")
        run = self._runs[request.id] = _Run(
            ticket=ticket,
            placement=placement,
            key=_key(request),
            estimate=estimate,
            cores=cores,
            slowdown=slowdown(estimate.cores, self._cores) if cores else 1.0,
            started_ns=now_ns,
            task=task,
            alarm=asyncio.get_running_loop().call_later(0, lambda: None),
        )
        self._set_alarm(run)
        task.add_done_callback(partial(self._let_go, run))

    async def _execute(self, executor: Executor, ticket: PendingTicket) -> None:
        run = self._runs[ticket.request.id]
        ending = await executor.execute(ticket.request)
        self._returned(run, ending)

    # Ending

    def _returned(self, run: _Run, ending: Result | Refusal | Failure | Expired) -> None:
        """Take what the executor said; its ticket may have ended before."""
        now_ns = self._clock.now_ns()
        self._learn(run, ending, now_ns)
        self._release(run, now_ns)
        if run.ticket.stage is not Stage.RUNNING:
            if isinstance(ending, Result):
                ending.release()
        elif not self._try_again(run, ending, now_ns):
            self._end(run.ticket, ending, run.placement)

    def _try_again(self, run: _Run, ending: Ending, now_ns: int) -> bool:
        """Return whether the request went to the other place, after this one refused it or lost it on the way."""
        lost = run.placement is Placement.NEARBY and isinstance(ending, Failure)
        refused = isinstance(ending, Refusal) and ending.reason is not Reason.INPUT_INVALID
        ticket = run.ticket
        if not isinstance(ending, (Refusal, Failure)) or not (lost or refused):
            return False
        ticket.tried[run.placement] = ending
        in_time = now_ns < ticket.request.deadlines.total_ns or ticket.request.accept_late
        if not in_time or len(ticket.tried) > 1:
            return False
        ticket.stage = Stage.DECIDING
        return self._settle(ticket, now_ns) is None

    def _learn(self, run: _Run, ending: Ending, now_ns: int) -> None:
        elapsed_ns = now_ns - run.started_ns
        if isinstance(ending, Result):
            timeline = run.ticket.request.timeline
            duration_ns = elapsed_ns - run.estimate.wait_ns
            if run.estimate.wait_ns and timeline.started_ns is not None and timeline.finished_ns is not None:
                duration_ns = timeline.finished_ns - timeline.started_ns
            self._estimator.observe(
                run.key,
                run.placement,
                max(1, duration_ns),
                now_ns=now_ns,
                slowdown=run.slowdown,
                origin=f"{ending.digest} {ending.variant}",
            )
        elif isinstance(ending, Expired):
            self._estimator.observe_stopped(
                run.key,
                run.placement,
                elapsed_ns - run.estimate.wait_ns,
                run.estimate,
                now_ns=now_ns,
                slowdown=run.slowdown,
            )

    def _release(self, run: _Run, now_ns: int) -> None:
        """Give back what a run occupied. Calling it again does nothing."""
        if run.released:
            return
        run.released = True
        run.alarm.cancel()
        if self._runs.get(run.ticket.request.id) is run:
            del self._runs[run.ticket.request.id]
        used = (now_ns - run.started_ns - run.estimate.p50_ns) * run.cores
        self._pace = self._pace.spent(used, now_ns)
        self._wake.set()

    def _let_go(self, run: _Run, task: asyncio.Task[None]) -> None:
        """Clean up after a run that did not return: it was cancelled, or it raised, which ends `run` as well."""
        if run.released:
            return
        self._release(run, self._clock.now_ns())
        if run.ticket.stage is Stage.RUNNING:
            why = "the run was cancelled" if task.cancelled() else f"the executor raised {task.exception()!r}"
            self._end(run.ticket, Failure("stopped", why), run.placement)

    def _cancel(self, ticket: PendingTicket) -> None:
        """Serve `Ticket.cancel`."""
        self._queue.remove(ticket.request.id)
        run = self._runs.get(ticket.request.id)
        placement = run.placement if run is not None else Placement.NONE
        self._end(ticket, None, placement)
        if run is not None:
            run.task.cancel()
            self._set_alarm(run)
        self._wake.set()

    def _set_alarm(self, run: _Run) -> None:
        """Wake for the next moment at which a running request must be looked after."""
        run.alarm.cancel()
        loop = asyncio.get_running_loop()
        if run.ticket.stage is not Stage.RUNNING:
            run.alarm = loop.call_later(STOP_GRACE_S, self._stop, run)
            return
        request = run.ticket.request
        at_ns = _give_up_ns(request) if request.accept_late else request.deadlines.total_ns
        first_ns = request.deadlines.first_result_ns
        if first_ns is not None and not request.accept_late and request.timeline.first_result_ns is None:
            at_ns = min(at_ns, first_ns)
        run.alarm = loop.call_later(max(0, at_ns - self._clock.now_ns()) / NS_PER_S, self._due, run, at_ns)

    def _due(self, run: _Run, at_ns: int) -> None:
        """End a running request whose deadline has come, whatever its executor is doing."""
        deadlines, timeline = run.ticket.request.deadlines, run.ticket.request.timeline
        now_ns = self._clock.now_ns()
        total = at_ns >= deadlines.total_ns
        if now_ns >= at_ns and (total or timeline.first_result_ns is None):
            what = "no result" if total else "no first result"
            self._end(run.ticket, Expired(f"{what} by the deadline"), run.placement)
            if not total:
                run.task.cancel()
        self._set_alarm(run)

    def _stop(self, run: _Run) -> None:
        """Cancel a run that its executor should have stopped by itself; give its cores up when that didn't help."""
        if not run.task.cancelling():
            _log.warning("%s did not stop at its deadline: cancelling it", run.task.get_name())
            run.task.cancel()
            run.alarm = asyncio.get_running_loop().call_later(STOP_GRACE_S, self._stop, run)
            return
        self._abandoned += 1
        _log.error("%s can't be stopped: its cores are given up", run.task.get_name())
        self._release(run, self._clock.now_ns())

    def _end(self, ticket: PendingTicket, ending: Ending, placement: Placement = Placement.NONE) -> None:
        """End a request: the only place where that happens."""
        outcome = conclude(ticket.request, ending, now_ns=self._clock.now_ns(), placement=placement)
        self._accounting.ended(outcome)
        del self._open[ticket.request.id]
        ticket.end(outcome)
        if not self._open:
            self._empty.set()
        self._observe(outcome)

    # Counting

    def _local_runs(self) -> Iterable[_Run]:
        return (run for run in self._runs.values() if run.placement is Placement.LOCAL)

    def _cores_busy(self) -> int:
        return sum(run.cores for run in self._runs.values())

    def _lanes_busy(self, key: ModelKey) -> int:
        return sum(run.key == key for run in self._local_runs())


def _key(request: InferRequest) -> ModelKey:
    return request.model, request.version or ""


def _give_up_ns(request: InferRequest) -> int:
    """Return when even a late result isn't waited for any more."""
    allowance_ns = request.deadlines.total_ns - request.timeline.received_ns
    return request.deadlines.total_ns + max(NS_PER_S, LATE_ALLOWANCES * allowance_ns)


def _said(ending: Refusal | Failure) -> Refusal:
    """Return what a place said when the request was there, as the reason why it doesn't go there again."""
    if isinstance(ending, Refusal):
        return ending
    return Refusal(Reason.MODEL_UNAVAILABLE, f"{ending.reason}: {ending.detail}")
