"""Keep track of what is with an executor: the cores and core-time it takes, its deadline, and how long it really took.

Owns running requests from dispatch until their executor has let go of them, the pace, and the estimator that learns
from them. What a request's ending means to its caller is the scheduler's: `ended` is called once for each run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from edgeinfer.clock import NS_PER_S, Alarm, Clock
from edgeinfer.errors import InternalError
from edgeinfer.execution.executor import Estimate, Executor
from edgeinfer.limits import Limits
from edgeinfer.request import Ending, Expired, Failure, InferRequest, Placement, Result
from edgeinfer.scheduling.estimator import FULL, STALE_NS, Conditions, Estimator, RunTimes, conditions
from edgeinfer.scheduling.forecast import Machine, ModelKey, Occupied, occupied
from edgeinfer.scheduling.pacing import UNPACED
from edgeinfer.scheduling.ticket import PendingTicket, Stage

STOP_GRACE_NS = 2 * NS_PER_S
"""From the end of a request to cancelling an executor that still works on it, and again to giving its cores up."""
INTERNAL = "internal"
"""`Failure.reason` of a run whose executor raised: a bug of ours, of which the log has the traceback."""
LATE_ALLOWANCES = 4
"""Who accepts late results waits at most so many times the time it had given itself, and at least a second."""

_LOOK_AGAIN_NS = 2_000_000

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Run:
    """One request with an executor."""

    ticket: PendingTicket
    placement: Placement
    key: ModelKey
    estimate: Estimate
    """What was expected at dispatch."""
    cores: int
    """Cores of this machine that it takes; 0 next door."""
    conditions: Conditions
    express: bool
    """Whether its core-time is also taken from what small runs may use before their turn."""
    started_ns: int
    look_ns: int = 0
    """When something has to be done about it, if it still runs."""
    is_in_grace: bool = False
    """Its caller has been told: its executor must let go of it by then."""
    is_stopped: bool = False
    is_released: bool = False
    is_begun: bool = False
    """It has no task: its executor calls back, and lets go at once when it is stopped."""
    behind: Run | None = None
    """It is in the worker already, but takes cores only once this one has ended."""
    follower: Run | None = None
    """Which one is behind it, if any."""
    stop: Callable[[], object] = field(init=False)

    @property
    def name(self) -> str:
        """For the log."""
        return f"{self.placement}[{self.ticket.request.id}]"

    def used_ns(self, now_ns: int) -> int:
        """Return for how long it has kept its cores busy, now that it has ended.

        Waiting for a core that another process has makes no heat. So whose worker tells how long it worked is not
        charged more than that, or than usual: the usual includes decoding, which the worker doesn't tell.
        """
        elapsed_ns, timeline = now_ns - self.started_ns, self.ticket.request.timeline
        begun_ns, done_ns = timeline.started_ns, timeline.postprocessed_ns or timeline.finished_ns
        if begun_ns is None or done_ns is None or not self.started_ns <= begun_ns <= done_ns:
            return elapsed_ns
        return min(elapsed_ns, max(self.estimate.p50_ns, done_ns - begun_ns))

    def occupied(self, now_ns: int) -> Occupied:
        """Return what a forecast needs to know: of a run and the one behind it, together."""
        alone = self._alone(now_ns)
        if self.follower is None:
            return alone
        follows = self.follower.estimate
        spread_ns = round(math.hypot(alone.spread_ns, follows.p99_ns - follows.p50_ns))
        return Occupied(self.key, self.cores, alone.end_ns + follows.p50_ns, spread_ns)

    def look_again_ns(self, now_ns: int) -> int:
        """Return when it will have changed the forecast if it isn't done by then."""
        return self._alone(now_ns).end_ns + _LOOK_AGAIN_NS

    def _alone(self, now_ns: int) -> Occupied:
        return occupied(
            self.key,
            cores=self.cores,
            started_ns=self.started_ns,
            p50_ns=self.estimate.wait_ns + self.estimate.p50_ns,
            p99_ns=self.estimate.finish_p99_ns,
            due_ns=last_moment_ns(self.ticket.request),
            now_ns=now_ns,
        )


class Runs:
    """The running requests of one scheduler. Loop thread only.

    Bounded by the cores here and by what the nearby executor takes at once. `ended(run, ending)` is called at the
    deadline at the latest, also when the executor is stuck; `changed(late)` whenever cores came free, late if that was
    after the likely end.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        cores: int,
        ended: Callable[[Run, Ending], None],
        changed: Callable[[bool], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._clock = clock
        self._all_cores = cores
        self.cores = cores
        """Cores that may be used now."""
        self._ended = ended
        self._changed = changed
        self._broke = broke
        self._runs: dict[int, Run] = {}
        self._here: dict[int, Run] = {}
        """Those of them that take cores of this machine."""
        self._alarm = Alarm(self._look_after)
        self._estimator = Estimator()
        self._pace = UNPACED
        self._clock_share = 1.0
        self.abandoned = 0
        """Runs whose executor neither ended nor could be cancelled: their cores were given up."""
        self.raised = 0
        """Runs whose executor raised instead of answering: bugs, each logged with its traceback."""

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    @property
    def paced(self) -> bool:
        """Whether local work is held to a duty cycle."""
        return self._pace.limited

    @property
    def cores_busy(self) -> int:
        """Cores that are taken."""
        if not self._here:
            return 0
        return sum(run.cores for run in self._here.values() if run.behind is None)

    def lanes_busy(self, key: ModelKey) -> int:
        """Return how many requests of the model run here."""
        if not self._here:
            return 0
        return sum(run.key == key and run.behind is None for run in self._here.values())

    def machine(self, now_ns: int) -> Machine:
        """Return what a forecast starts from."""
        return Machine(
            self.cores, tuple(run.occupied(now_ns) for run in self._here.values() if run.behind is None), self._pace
        )

    def set_limits(self, limits: Limits) -> None:
        """Obey `limits` with the next start; what runs goes on."""
        self.cores = max(1, min(self._all_cores, len(limits.cpus)))
        self._clock_share = limits.clock_share
        now_ns = self._clock.now_ns()
        self._pace = self._pace.under(duty_cycle=limits.duty_cycle, cores=self.cores, now_ns=now_ns)

    def refine(self, seed: Estimate, request: InferRequest, now_ns: int) -> RunTimes:
        """Return the local executor's estimate with what was seen here."""
        key = model_key(request)
        now = conditions(seed.cores, self.cores, self._clock_share)
        times = self._estimator.refine(seed, key, now_ns=now_ns, conditions=now)
        if times.wait_ns and self.lanes_busy(key) >= times.lanes:
            # What it would wait for inside the executor is a run of ours, which every forecast counts already.
            return replace(times, wait_ns=0)
        return times

    def hearsay(self, request: InferRequest, now_ns: int, *, after_ns: int = STALE_NS) -> bool:
        """Return whether nothing was seen of the model here for so long that its estimate may be wrong."""
        return self._estimator.stale(model_key(request), now_ns, after_ns=after_ns)

    def believed_ns(self, request: InferRequest, times: RunTimes, *, left_ns: int, now_ns: int) -> int | None:
        """Return what a run can be believed to take if trying it makes sense. See `Estimator.believed_ns`."""
        now = conditions(times.cores, self.cores, self._clock_share)
        return self._estimator.believed_ns(model_key(request), times, left_ns=left_ns, now_ns=now_ns, conditions=now)

    def may_explore(self, request: InferRequest, now_ns: int) -> bool:
        """Return whether a model of which nothing is known can be tried."""
        return self._estimator.may_explore(model_key(request), now_ns)

    def doubts_tail(self, request: InferRequest) -> bool:
        """Return whether a few hiccups of the machine may be what makes the model's p99."""
        return self._estimator.doubts_tail(model_key(request))

    def next_look_ns(self, now_ns: int) -> int | None:
        """Return when a run that isn't done by then will have changed the forecast; None when none runs here."""
        return min((run.look_again_ns(now_ns) for run in self._here.values() if run.behind is None), default=None)

    def has_room(self, key: ModelKey, estimate: Estimate) -> bool:
        """Return whether a run of the model can start now: cores are free, and a lane."""
        cores = max(1, min(estimate.cores, self.cores))
        return self.cores_busy + cores <= self.cores and self.lanes_busy(key) < estimate.lanes

    def start(
        self, group: asyncio.TaskGroup, executor: Executor, ticket: PendingTicket, estimate: Estimate, now_ns: int
    ) -> None:
        """Hand a request to an executor."""
        if self.begin(executor, ticket, estimate, now_ns):
            return
        run = self._new(executor, ticket, estimate, now_ns)
        task = group.create_task(self._execute(executor, run), name=run.name)
        run.stop = task.cancel
        self._add(run, now_ns)
        task.add_done_callback(partial(self._let_go, run))

    def leader(self, key: ModelKey, cores: int) -> Run | None:
        """Return the one run of a model behind which another one could be sent, None when there isn't just one."""
        found = [run for run in self._here.values() if run.key == key]
        if len(found) != 1 or not found[0].is_begun or found[0].is_in_grace or found[0].cores != cores:
            return None
        return found[0]

    def begin(
        self,
        executor: Executor,
        ticket: PendingTicket,
        estimate: Estimate,
        now_ns: int,
        *,
        behind: Run | None = None,
    ) -> bool:
        """Hand a request to an executor if that takes it without a task, and return whether it did.

        One that is sent `behind` another run takes over that one's cores and lane when it ends.
        """
        run = self._new(executor, ticket, estimate, now_ns)
        try:
            stop = executor.begin(ticket.request, partial(self._called_back, run), behind=behind is not None)
        except InternalError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug in one request must not end the others
            self._ended(run, self._raised(run, error))
            return True
        if stop is None:
            return False
        run.stop, run.is_begun = stop, True
        if behind is not None:
            run.behind, behind.follower = behind, run
        self._add(run, now_ns)
        return True

    def cancel(self, request_id: int) -> Placement:
        """Stop a request whose ticket has just ended, if it runs; return where it did."""
        run = self._runs.get(request_id)
        if run is None:
            return Placement.NONE
        self._stop(run)
        return run.placement

    def stop_begun(self) -> None:
        """Stop what has no task that would be cancelled with its group."""
        for run in list(self):
            if run.is_begun:
                self._stop(run)

    def _new(self, executor: Executor, ticket: PendingTicket, estimate: Estimate, now_ns: int) -> Run:
        placement = executor.placement
        local = placement is Placement.LOCAL
        cores = max(1, min(estimate.cores, self.cores)) if local else 0
        return Run(
            ticket=ticket,
            placement=placement,
            key=model_key(ticket.request),
            estimate=estimate,
            cores=cores,
            conditions=conditions(estimate.cores, self.cores, self._clock_share) if local else FULL,
            express=local and self._pace.limited and self._pace.by_express(estimate.p50_ns * cores, now_ns),
            started_ns=now_ns,
        )

    def _add(self, run: Run, now_ns: int) -> None:
        """Count a run in that has just been handed over."""
        if self._pace.limited:
            self._pace = self._pace.spent(run.estimate.p50_ns * run.cores, now_ns, express=run.express)
        run.ticket.stage = Stage.RUNNING
        self._runs[run.ticket.request.id] = run
        if run.cores:
            self._here[run.ticket.request.id] = run
        self._watch_deadline(run)

    def _called_back(self, run: Run, ending: Ending) -> None:
        """Take the ending of a run without a task: what would end the task's group must end it all the same."""
        try:
            self._finish(run, ending)
        except BaseException as error:
            self._broke(error)
            raise

    async def _execute(self, executor: Executor, run: Run) -> None:
        self._finish(run, await self._answer(executor, run))

    def _finish(self, run: Run, ending: Ending) -> None:
        now_ns = self._clock.now_ns()
        # Once the caller has its answer: it may have sent its next request by then, and nothing waits for this.
        asyncio.get_running_loop().call_soon(self._learn, run, ending, now_ns)
        self._release(run, now_ns)
        if run.ticket.stage is Stage.RUNNING:
            self._ended(run, ending)
        elif isinstance(ending, Result):
            ending.release()

    async def _answer(self, executor: Executor, run: Run) -> Ending:
        """Return how the executor answers; a bug in it costs the request that met it and nobody else's.

        Raises:
            InternalError: an invariant is broken, so that nobody can be promised anything.
        """
        try:
            return await executor.execute(run.ticket.request)
        except InternalError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug in one request must not end the others
            return self._raised(run, error)

    def _raised(self, run: Run, error: Exception) -> Failure:
        self.raised += 1
        _log.exception("%s raised: its request has failed", run.name)
        return Failure(INTERNAL, f"the executor raised {error!r}")

    def _learn(self, run: Run, ending: Ending, now_ns: int) -> None:
        if run.placement is not Placement.LOCAL:
            return
        waited_ns, timeline = run.estimate.wait_ns, run.ticket.request.timeline
        duration_ns = now_ns - run.started_ns - waited_ns
        if isinstance(ending, Result):
            if waited_ns and timeline.started_ns is not None and timeline.finished_ns is not None:
                duration_ns = timeline.finished_ns - timeline.started_ns
            self._estimator.observe(
                run.key,
                max(1, duration_ns),
                now_ns=now_ns,
                conditions=run.conditions,
                origin=f"{ending.digest} {ending.variant}",
            )
        elif isinstance(ending, Expired):
            self._estimator.observe_stopped(
                run.key, duration_ns, run.estimate, now_ns=now_ns, conditions=run.conditions
            )

    def _release(self, run: Run, now_ns: int) -> None:
        """Give back what a run took. Calling it again does nothing."""
        if run.is_released:
            return
        run.is_released = True
        del self._runs[run.ticket.request.id]
        self._here.pop(run.ticket.request.id, None)
        if run.behind is not None:
            run.behind.follower = None
        if run.follower is not None:
            run.follower.behind, run.follower.started_ns = None, now_ns
        if self._pace.limited:
            beyond_ns = run.used_ns(now_ns) - run.estimate.p50_ns
            self._pace = self._pace.spent(beyond_ns * run.cores, now_ns, express=run.express)
        self._changed(now_ns > run.started_ns + run.estimate.wait_ns + run.estimate.p50_ns)

    def _let_go(self, run: Run, task: asyncio.Task[None]) -> None:
        """Clean up after a run that did not return: it was cancelled, or its executor raised, which ends us all."""
        if run.is_released:
            return
        self._release(run, self._clock.now_ns())
        if run.ticket.stage is Stage.RUNNING:
            why = "it was cancelled" if task.cancelled() else f"the executor raised {task.exception()!r}"
            self._ended(run, Failure("stopped", why))

    def _watch_deadline(self, run: Run) -> None:
        """Look at a running request at its next deadline."""
        request = run.ticket.request
        at_ns, first_ns = last_moment_ns(request), request.deadlines.first_result_ns
        if first_ns is not None and request.timeline.first_result_ns is None and not request.accept_late:
            at_ns = min(at_ns, max(first_ns, self._clock.now_ns()))
        run.look_ns = at_ns
        self._alarm.set(at_ns)

    def _look_after(self) -> None:
        """Do what is due about running requests."""
        now_ns = self._clock.now_ns()
        for run in list(self):
            if run.look_ns <= now_ns and not run.is_released:
                if run.is_in_grace:
                    self._force(run)
                else:
                    self._due(run)
        for run in self:
            self._alarm.set(run.look_ns)

    def _due(self, run: Run) -> None:
        """End a running request whose deadline has come, whatever its executor is doing."""
        request = run.ticket.request
        if run.look_ns >= last_moment_ns(request):
            # The executor ends at the same moment by itself, or must be made to.
            self._give_grace(run)
            self._ended(run, Expired(f"no result by the deadline, {run.placement}"))
        elif request.timeline.first_result_ns is None:
            self._ended(run, Expired(f"no first result by its deadline, {run.placement}"))
            self._stop(run)
        else:
            self._watch_deadline(run)

    def _stop(self, run: Run) -> None:
        """Have the executor stop a run; one without a task has let go then, others get a grace."""
        run.is_stopped = True
        run.stop()
        if run.is_begun:
            self._release(run, self._clock.now_ns())
        else:
            self._give_grace(run)

    def _give_grace(self, run: Run) -> None:
        run.is_in_grace = True
        run.look_ns = self._clock.now_ns() + STOP_GRACE_NS
        self._alarm.set(run.look_ns)

    def _force(self, run: Run) -> None:
        """Stop a run that its executor should have stopped by itself; give its cores up when that doesn't help."""
        if run.is_stopped:
            self.abandoned += 1
            _log.error("%s can't be stopped: its cores are given up", run.name)
            self._release(run, self._clock.now_ns())
        else:
            _log.warning("%s did not stop at its deadline: stopping it", run.name)
            self._stop(run)


def model_key(request: InferRequest) -> ModelKey:
    """Return what runs of a request are compared by."""
    return request.model, request.version or ""


def last_moment_ns(request: InferRequest) -> int:
    """Return when a request ends at the latest: its total deadline, or what patience allows when late is accepted."""
    total_ns = request.deadlines.total_ns
    if not request.accept_late:
        return total_ns
    return total_ns + max(NS_PER_S, LATE_ALLOWANCES * (total_ns - request.timeline.received_ns))
