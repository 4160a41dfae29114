"""Run every accepted request by its deadline, and tell every caller how its request ended, exactly once.

Owns the deadline queue and the tickets; what is with an executor is `runs`. All decisions are pure functions of other
modules (`admission`, `placement`, `forecast`, `pacing`), which `options` asks: this one does what they say, and goes
round. It sees executors only through their protocol, so here and next door are the same to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.execution.executor import NOT_BEGUN, Estimate, Executor
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
)  # fmt: skip
from edgeinfer.scheduling.admission import Admission, local_stop, shed
from edgeinfer.scheduling.deadline_queue import DeadlineQueue, Entry
from edgeinfer.scheduling.forecast import ROUNDING_NS, Job, Plan
from edgeinfer.scheduling.options import Choice, Here, NextDoor, Options
from edgeinfer.scheduling.runs import Run, Runs, model_key
from edgeinfer.scheduling.snapshot import SchedulerSnapshot
from edgeinfer.scheduling.ticket import PendingTicket, Stage

ROUND_NS = 1_000_000_000
"""The dispatcher goes round at least this often, so that a watchdog can tell idle from dead."""
AHEAD_NS = 3_000_000
"""The longest run (median) that is sent to its worker while the one before it is still under way. Between two runs a
worker is idle for some 0.3 ms, a quarter of a run of 1 ms and little of a long one; and so much later may a more urgent
request start that comes just then."""
OFFLOAD_HOLD_NS = 5_000_000_000
"""Offloading counts as open until nothing went next door for this long."""


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
        self._observe = observe
        self._queue: DeadlineQueue[PendingTicket] = DeadlineQueue(queue_limit)
        self._outbound: list[PendingTicket] = []
        self._wake = asyncio.Event()
        self._runs = Runs(clock, cores=cores, ended=self._returned, changed=self._came_free, broke=self._break)
        self._options = Options(local=local, nearby=nearby, queue=self._queue, runs=self._runs)
        self._review = False
        self._open: dict[int, PendingTicket] = {}
        self._limits = Limits(ThermalLevel.NOMINAL, frozenset(range(cores)), 1.0, 0)
        self._empty = asyncio.Event()
        self._empty.set()
        self._draining = False
        self._progress = 0
        self._last_offload_ns: int | None = None
        self._bug: BaseException | None = None

    # What callers use

    def submit(self, request: InferRequest) -> Ticket:
        """Take a request in; whatever becomes of it, refusals too, is its ticket's outcome."""
        now_ns = self._clock.now_ns()
        self._accounting.received(request)
        ticket = PendingTicket(request, self._cancel)
        self._open[request.id] = ticket
        self._empty.clear()
        if (closed := self._closed_to(request, now_ns)) is not None:
            self._end(ticket, closed)
        elif self._start_at_once(ticket, now_ns):
            request.timeline.admitted_ns = now_ns
        elif (refusal := self._settle(ticket, now_ns)) is not None:
            self._end(ticket, refusal)
        else:
            request.timeline.admitted_ns = now_ns
        return ticket

    def decline(self, request: InferRequest) -> Ticket | None:
        """Refuse a request whose data has not come yet, if it would be refused now; None when its data may come.

        One that is declined was received and has ended like any other; its payload may be empty. One that is not has
        left no trace: submit it, with its data, later.
        """
        now_ns = self._clock.now_ns()
        ending: Refusal | Expired | Choice | None = self._closed_to(request, now_ns)
        if ending is None and self._unhindered(request, now_ns) is not None:
            return None
        ticket = PendingTicket(request, self._cancel)
        if ending is None:
            ending = self._options.choose(ticket, self._limits, now_ns)
        if not isinstance(ending, (Refusal, Expired)):
            return None
        self._accounting.received(request)
        self._open[request.id] = ticket
        self._empty.clear()
        self._end(ticket, ending)
        return ticket

    def _closed_to(self, request: InferRequest, now_ns: int) -> Refusal | Expired | None:
        """Return why the request is out of the question whatever there is to do."""
        if self._draining:
            return Refusal(Reason.DRAINING, "the service is draining: no new requests")
        if request.deadlines.start_by_ns <= now_ns and not request.accept_late:
            late_ms = (now_ns - request.deadlines.start_by_ns) / 1e6
            return Expired(f"it came {late_ms:.1f} ms after its deadline")
        return None

    def set_limits(self, limits: Limits) -> None:
        """Obey `limits` from now on; what runs already goes on, what can't be kept is told at once."""
        was, self._limits = self._limits, limits
        self._runs.set_limits(limits)
        if (was.cpus, was.clock_share) != (limits.cpus, limits.clock_share):
            self._options.rate_again(self._clock.now_ns())
        self._look_back()

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
        nearby = sum(run.placement is Placement.NEARBY for run in self._runs)
        last_ns = self._last_offload_ns
        lately = last_ns is not None and self._clock.now_ns() - last_ns < OFFLOAD_HOLD_NS
        return SchedulerSnapshot(
            queue_length=len(self._queue),
            queue_limit=self._queue.limit,
            work_ahead_ns=self._queue.work_ahead_ns(1 << 62),
            running_local=sum(run.placement is Placement.LOCAL for run in self._runs),
            running_nearby=nearby,
            cores=self._runs.cores,
            cores_busy=self._runs.cores_busy,
            paced=self._runs.paced,
            stopped=local_stop(self._limits) is not None,
            offload_open=bool(nearby) or lately,
            draining=self._draining,
            in_flight=len(self._open),
            abandoned_runs=self._runs.abandoned,
            raised_runs=self._runs.raised,
            progress=self._progress,
        )

    async def run(self) -> None:
        """Dispatch, for ever. When it is cancelled all work stops and every open ticket ends `failed(stopped)`."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._wake.clear()
                    wait_ns = self._round(group)
                    if self._wake.is_set():
                        await asyncio.sleep(0)  # what was started starts, also when the next round is due already
                        continue
                    alarm = asyncio.get_running_loop().call_later(wait_ns / NS_PER_S, self._look_back)
                    try:
                        await self._wake.wait()
                    finally:
                        alarm.cancel()
        finally:
            self._runs.stop_begun()
            for ticket in list(self._open.values()):
                self._end(ticket, Failure("stopped", "the scheduler stopped"))

    # Moving requests

    def _start_at_once(self, ticket: PendingTicket, now_ns: int) -> bool:
        """Start a request that nobody is in front of and that is in time for certain; return whether it was.

        The same as would come of admission, the queue and the next round, without their turns of the loop.
        """
        estimate = self._unhindered(ticket.request, now_ns)
        return estimate is not None and self._runs.begin(self._local, ticket, estimate, now_ns)

    def _unhindered(self, request: InferRequest, now_ns: int) -> Estimate | None:
        """Return what a request would take that could start at once and be in time for certain; None for others."""
        runs = self._runs
        if len(self._queue) or runs.paced or runs.cores_busy >= runs.cores or local_stop(self._limits) is not None:
            return None
        estimate = self._options.local(request, now_ns)
        if not isinstance(estimate, Estimate) or estimate.wait_ns or not runs.has_room(model_key(request), estimate):
            return None
        if now_ns + estimate.p99_ns + ROUNDING_NS > request.deadlines.total_ns:
            return None
        return estimate

    def _settle(self, ticket: PendingTicket, now_ns: int) -> Refusal | None:
        """Let the request go where it is best off, or return why there is no such place."""
        return self._carry_out(ticket, self._options.choose(ticket, self._limits, now_ns), now_ns)

    def _elsewhere(self, ticket: PendingTicket, refusal: Refusal, now_ns: int) -> None:
        """Do something else with a request that can't be kept as it was, or tell its caller why not."""
        ticket.stage = Stage.DECIDING
        choice = self._options.instead(ticket, refusal, self._limits, now_ns)
        if (final := self._carry_out(ticket, choice, now_ns)) is not None:
            self._end(ticket, final)

    def _carry_out(self, ticket: PendingTicket, choice: Choice, now_ns: int) -> Refusal | None:
        match choice:
            case Here(job, admission):
                self._take_in(ticket, job, admission, now_ns)
            case NextDoor() if len(self._outbound) >= self._queue.limit:
                return Refusal(Reason.QUEUE_FULL, f"{self._queue.limit} requests are about to go next door already")
            case NextDoor():
                ticket.stage = Stage.OUTBOUND
                self._outbound.append(ticket)
            case Refusal():
                return choice
        self._wake.set()
        return None

    def _take_in(self, ticket: PendingTicket, job: Job, admission: Admission | None, now_ns: int) -> None:
        """Let a request wait here, and find another way for those who had to go for it."""
        superseded = [self._queue.remove(old) for old in admission.replaces] if admission else []
        displaced = [self._queue.remove(old) for old in admission.victims] if admission else []
        ticket.stage = Stage.WAITING
        self._queue.push(job, ticket, stream=ticket.request.stream)
        for entry in filter(None, superseded):
            refusal = Refusal(Reason.SUPERSEDED, f"request {job.id} is a newer frame")
            self._elsewhere(entry.item, refusal, now_ns)
        for entry in filter(None, displaced):
            refusal = Refusal(Reason.DISPLACED, f"request {job.id} needs the time and is more important")
            self._elsewhere(entry.item, refusal, now_ns)

    # Dispatching

    def _round(self, group: asyncio.TaskGroup) -> int:
        """Do everything that is due, and return in how many nanoseconds the next round is."""
        if self._bug is not None:
            raise self._bug
        now_ns = self._clock.now_ns()
        self._progress += 1
        for entry in self._queue.pop_expired(now_ns):
            self._end(entry.item, Expired("it still waited when its latest start had come"))
        if self._review and len(self._queue):
            if local_stop(self._limits) is None:
                self._start_local(group, now_ns, promised=True)  # a free core shouldn't wait for the review
            self._drop_what_cannot_be_kept(now_ns)
        self._review = False
        self._start_outbound(group, now_ns)
        if len(self._queue):
            return self._start_local(group, now_ns)
        return ROUND_NS

    def _came_free(self, late: bool) -> None:
        """Cores or a lane came free: somebody who waits may have them. Not before it was foreseen: a look back too."""
        if len(self._queue):
            self._review = self._review or late
            self._wake.set()

    def _break(self, bug: BaseException) -> None:
        """End the dispatcher, and the service with it: an invariant is broken."""
        self._bug = bug
        self._wake.set()

    def _look_back(self) -> None:
        """Go round soon, and look after what was admitted: something is not as it was foreseen, or time has passed.

        After an arrival that isn't needed: admission has just looked at everybody.
        """
        self._review = True
        self._wake.set()

    def _drop_what_cannot_be_kept(self, now_ns: int) -> None:
        """Look after what was admitted before limits changed or a run overran."""
        entries = {entry.job.id: entry for entry in self._queue}
        if (stop := local_stop(self._limits)) is not None:
            for entry in entries.values():
                self._withdraw(entry, stop, now_ns)
            return
        verdict = shed(self._options.load(self._limits, now_ns), now_ns)
        for job_id in verdict.displaced:
            self._withdraw(entries[job_id], self._blame(Reason.DISPLACED), now_ns)
        for job_id in verdict.hopeless:
            self._withdraw(entries[job_id], self._blame(Reason.DEADLINE_UNREACHABLE), now_ns)
        for job_id in verdict.endangered:
            entry = entries[job_id]
            nearby = self._options.nearby(entry.item)
            safe = isinstance(nearby, Estimate) and now_ns + nearby.finish_p99_ns <= entry.job.due_ns
            if safe or now_ns + entry.job.p50_ns > entry.job.due_ns:
                self._withdraw(entry, self._blame(Reason.DEADLINE_UNREACHABLE), now_ns)

    def _withdraw(self, entry: Entry[PendingTicket], refusal: Refusal, now_ns: int) -> None:
        self._queue.remove(entry.job.id)
        self._elsewhere(entry.item, refusal, now_ns)

    def _blame(self, reason: Reason) -> Refusal:
        """Return why something that was admitted can't be kept."""
        if self._runs.paced:
            why = self._limits.reason or f"thermal level {self._limits.level.name.lower()}"
            return Refusal(Reason.THERMAL, f"local work is held to {self._limits.duty_cycle:.0%} of the time ({why})")
        return Refusal(reason, "the work ahead took longer than expected, and not all of it can be done in time")

    def _start_outbound(self, group: asyncio.TaskGroup, now_ns: int) -> None:
        outbound, self._outbound = self._outbound, []
        for ticket in outbound:
            if ticket.stage is not Stage.OUTBOUND:
                continue
            estimate = self._options.nearby(ticket)
            if self._nearby is not None and isinstance(estimate, Estimate):
                self._last_offload_ns = now_ns
                self._runs.start(group, self._nearby, ticket, estimate, now_ns)
                continue
            # The others of the same burst have taken what was free.
            ticket.stage = Stage.DECIDING
            if isinstance(estimate, Refusal):
                ticket.tried[Placement.NEARBY] = estimate
            if (refusal := self._settle(ticket, now_ns)) is not None:
                self._end(ticket, refusal)

    def _start_local(self, group: asyncio.TaskGroup, now_ns: int, *, promised: bool = False) -> int:
        """Start what the forecast starts now, and return when to look again.

        With `promised` only what is firm and has nothing else in front of it, so that no review would drop it.
        """
        wait_ns = ROUND_NS
        plan = Plan(self._runs.machine(now_ns), now_ns)
        paced = self._runs.paced and self._runs.cores_busy < self._runs.cores
        for entry in self._queue:
            if (promised and not entry.job.firm) or (not paced and self._runs.cores_busy >= self._runs.cores):
                break
            expected = plan.place(entry.job)
            if expected.start_ns <= now_ns:
                self._start_entry(group, entry, now_ns)
            elif paced:
                wait_ns = min(wait_ns, expected.start_ns - now_ns)
        if not promised:
            self._send_ahead(now_ns)
        for at_ns in (self._queue.next_expiry_ns(), self._runs.next_look_ns(now_ns)):
            if at_ns is not None:
                wait_ns = min(wait_ns, at_ns - now_ns)
        return max(0, wait_ns)

    def _send_ahead(self, now_ns: int) -> None:
        """Send the next request behind the run it waits for, so that its worker isn't idle between the two.

        Only the first in the queue, which nobody who waits can pass, and only a short one: somebody more urgent may
        still come, and then waits for it. From here on it counts as started: it isn't displaced any more.
        """
        entry = next(iter(self._queue), None)
        if entry is None or self._runs.paced or entry.job.p50_ns > AHEAD_NS or entry.job.lanes != 1 or entry.job.spare:
            return
        job, leader = entry.job, self._runs.leader(entry.job.key, entry.job.cores)
        if leader is None:
            return
        estimate = self._options.local(entry.item.request, now_ns)
        if not isinstance(estimate, Estimate) or leader.occupied(now_ns).end_ns + estimate.p50_ns > job.due_ns:
            return
        if self._runs.begin(self._local, entry.item, estimate, now_ns, behind=leader):
            self._queue.remove(job.id)

    def _start_entry(self, group: asyncio.TaskGroup, entry: Entry[PendingTicket], now_ns: int) -> None:
        ticket, job = entry.item, entry.job
        if self._runs.cores_busy + job.cores > self._runs.cores or self._runs.lanes_busy(job.key) >= job.lanes:
            return
        estimate = self._options.local(ticket.request, now_ns)
        refusal = estimate
        if isinstance(estimate, Estimate):
            if job.spare or now_ns + estimate.wait_ns + estimate.p50_ns <= job.due_ns:
                self._queue.remove(job.id)
                self._runs.start(group, self._local, ticket, estimate, now_ns)
                return
            refusal = self._blame(Reason.DEADLINE_UNREACHABLE)
        assert isinstance(refusal, Refusal)
        self._withdraw(entry, refusal, now_ns)
        self._wake.set()  # somebody else may have the place

    # Ending

    def _returned(self, run: Run, ending: Ending) -> None:
        """Take how a run ended: with its executor's word, at its deadline, or stopped."""
        if isinstance(ending, Result):
            self._end(run.ticket, ending, run.placement)
            return
        lost = run.is_begun and isinstance(ending, Failure) and ending.reason == NOT_BEGUN
        if lost and self._take_back(run.ticket):
            return
        if not self._try_again(run, ending):
            self._end(run.ticket, ending, run.placement)

    def _take_back(self, ticket: PendingTicket) -> bool:
        """Return whether a request whose worker died before it began found another place, here or next door."""
        now_ns = self._clock.now_ns()
        if now_ns >= ticket.request.deadlines.start_by_ns:
            return False
        ticket.stage = Stage.DECIDING
        return self._settle(ticket, now_ns) is None

    def _try_again(self, run: Run, ending: Ending) -> bool:
        """Return whether the request went to the other place, after this one refused it or lost it on the way."""
        lost = run.placement is Placement.NEARBY and isinstance(ending, Failure)
        refused = isinstance(ending, Refusal) and ending.reason is not Reason.INPUT_INVALID
        ticket, now_ns = run.ticket, self._clock.now_ns()
        if not isinstance(ending, (Refusal, Failure)) or not (lost or refused):
            return False
        ticket.tried[run.placement] = ending
        in_time = now_ns < ticket.request.deadlines.total_ns or ticket.request.accept_late
        if not in_time or len(ticket.tried) > 1 or self._queue.has_newer(ticket.request):
            return False
        ticket.stage = Stage.DECIDING
        return self._settle(ticket, now_ns) is None

    def _cancel(self, ticket: PendingTicket) -> None:
        """Serve `Ticket.cancel`."""
        self._queue.remove(ticket.request.id)
        self._end(ticket, None, self._runs.cancel(ticket.request.id))
        self._wake.set()

    def _end(self, ticket: PendingTicket, ending: Ending, placement: Placement = Placement.NONE) -> None:
        """End a request: the only place where that happens."""
        outcome = conclude(ticket.request, ending, now_ns=self._clock.now_ns(), placement=placement)
        self._accounting.ended(outcome)
        del self._open[ticket.request.id]
        ticket.end(outcome)
        if not self._open:
            self._empty.set()
        self._observe(outcome)
