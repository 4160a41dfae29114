"""Find out what can be done with a request right now: gather what the pure decisions need, and ask them.

Asks executors, queue and runs, and changes none of them: what was found is done by `scheduler`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgeinfer.execution.executor import Estimate, Executor
from edgeinfer.limits import Limits
from edgeinfer.request import Failure, InferRequest, Placement, Reason, Refusal
from edgeinfer.scheduling.admission import Admission, Load, admit, local_stop
from edgeinfer.scheduling.deadline_queue import DeadlineQueue
from edgeinfer.scheduling.estimator import RunTimes
from edgeinfer.scheduling.forecast import Job
from edgeinfer.scheduling.placement import place, settled
from edgeinfer.scheduling.runs import Runs, last_moment_ns, model_key
from edgeinfer.scheduling.ticket import PendingTicket

TRY_AGAIN_NS = 1_000_000_000
"""A model that next door takes all frames of is tried here this often."""


@dataclass(frozen=True, slots=True)
class Here:
    """Let it wait for this machine."""

    job: Job
    admission: Admission | None = None
    """Who has to go for it; None when nobody is asked (it only takes spare time, and there is room)."""


@dataclass(frozen=True, slots=True)
class NextDoor:
    """Send it to the nearby service."""


Choice = Here | NextDoor | Refusal


class Options:
    """What can be done with requests under the newest limits. Loop thread only."""

    def __init__(
        self, *, local: Executor, nearby: Executor | None, queue: DeadlineQueue[PendingTicket], runs: Runs
    ) -> None:
        self._local = local
        self._nearby = nearby
        self._queue = queue
        self._runs = runs

    def choose(self, ticket: PendingTicket, limits: Limits, now_ns: int) -> Choice:
        """Return the best place for a request that waits nowhere yet."""
        request = ticket.request
        replaces: tuple[int, ...] = ()
        local: Admission | Refusal
        job: Job | None = None
        estimate: RunTimes | Refusal | None = None
        if (before := ticket.tried.get(Placement.LOCAL)) is not None:
            local = _said(before)
        elif isinstance(estimate := self.local(request, now_ns), Refusal):
            local = estimate
        if isinstance(estimate, RunTimes):
            job = self._job(request, estimate)
            replaces = tuple(entry.job.id for entry in self._queue.superseded_by(request))
            local = admit(job, self.load(limits, now_ns), replaces=replaces, now_ns=now_ns)
        placed = place(request, local, None if settled(local) else self.nearby(ticket), now_ns=now_ns)
        if not isinstance(placed, Refusal) and placed.placement is Placement.LOCAL:
            assert job is not None, "what runs here was admitted"
            assert isinstance(local, Admission), "what runs here was admitted"
            return Here(job, local)
        if isinstance(estimate, RunTimes) and isinstance(local, Refusal):
            if isinstance(placed, Refusal):
                spare_ns = self._spare_time(request, estimate, placed, now_ns)
            else:
                spare_ns = 0 if self._worth_a_try(request, local, now_ns) else None
            if spare_ns is not None:
                job = self._job(request, estimate, spare=True)
                spare = admit(job, self.load(limits, now_ns), replaces=replaces, now_ns=now_ns)
                if isinstance(spare, Admission) and (
                    not spare_ns or spare.expectation.start_ns + spare_ns <= job.due_ns
                ):
                    return Here(job, spare)
        return placed if isinstance(placed, Refusal) else NextDoor()

    def instead(self, ticket: PendingTicket, refusal: Refusal, limits: Limits, now_ns: int) -> Choice:
        """Return what else can be done with an admitted request that can't be kept as it was, for `refusal`.

        Next door, or, where late results are accepted, in spare time here.
        """
        request = ticket.request
        placed = place(request, refusal, self.nearby(ticket), now_ns=now_ns)
        if not isinstance(placed, Refusal):
            return NextDoor()
        if request.accept_late and local_stop(limits) is None and not self._queue.full:
            estimate = self.local(request, now_ns)
            if isinstance(estimate, RunTimes):
                return Here(self._job(request, estimate, spare=True))
        return placed

    def local(self, request: InferRequest, now_ns: int) -> RunTimes | Refusal:
        """Return what running it here would take, from what was seen here."""
        estimate = self._local.estimate(request)
        return estimate if isinstance(estimate, Refusal) else self._runs.refine(estimate, request, now_ns)

    def nearby(self, ticket: PendingTicket) -> Estimate | Refusal | None:
        """Return what running it next door would take; None when there is no nearby service."""
        if self._nearby is None:
            return None
        if (before := ticket.tried.get(Placement.NEARBY)) is not None:
            return _said(before)
        return self._nearby.estimate(ticket.request)

    def load(self, limits: Limits, now_ns: int) -> Load:
        """Return what this machine has to do already."""
        return Load(self._queue.jobs(), self._runs.machine(now_ns), limits, self._queue.limit)

    def rate_again(self, now_ns: int) -> None:
        """Work out anew what all that waits will take: there are fewer or more cores, or another clock."""
        for entry in self._queue:
            estimate = self.local(entry.item.request, now_ns)
            if isinstance(estimate, RunTimes):
                new = self._job(entry.item.request, estimate, spare=entry.job.spare)
                self._queue.rate(replace(new, rank=entry.job.rank))

    def _job(self, request: InferRequest, estimate: RunTimes, *, spare: bool = False) -> Job:
        deadlines = request.deadlines
        start_by_ns = deadlines.start_by_ns
        if request.accept_late and deadlines.queue_ns is None:
            start_by_ns = last_moment_ns(request)
        return Job(
            id=request.id,
            key=model_key(request),
            rank=self._queue.rank(request, spare=spare),
            due_ns=deadlines.total_ns,
            start_by_ns=start_by_ns,
            firm=request.firm,
            priority=request.priority,
            p50_ns=estimate.p50_ns,
            p99_ns=estimate.p99_ns,
            cores=max(1, min(estimate.cores, self._runs.cores)),
            lanes=max(1, estimate.lanes),
            wait_ns=estimate.wait_ns,
            mean_ns=estimate.mean_ns,
            deviation_ns=estimate.deviation_ns,
        )

    def _worth_a_try(self, request: InferRequest, refusal: Refusal, now_ns: int) -> bool:
        """Return whether a frame that could go next door is tried on the idle machine once more.

        When some slow runs have made the estimate too pessimistic, and next door takes all, nothing would ever be
        learned here again. A frame a second may be lost for that.
        """
        if request.firm or refusal.reason is not Reason.DEADLINE_UNREACHABLE or len(self._queue):
            return False
        return not self._runs.cores_busy and self._runs.hearsay(request, now_ns, after_ns=TRY_AGAIN_NS)

    def _spare_time(self, request: InferRequest, estimate: RunTimes, refusal: Refusal, now_ns: int) -> int | None:
        """Return how much spare time a request needs that is refused otherwise; None when it gets none, 0 when any.

        It gets some because its caller takes late results; or because it is likely in time all the same, and the only
        way to learn. A tail that a few hiccups made would else refuse a model for as long as it is remembered, and
        what is refused teaches nothing. Nothing is promised, and whoever is promised something goes first.

        On an idle machine what is believed of the model decides; and where nothing was seen of it lately, a frame that
        may be dropped anyway is tried whatever the estimate: an idle core loses nothing. On a busy one the median
        decides, if the tail is doubtful; or, if the model alone would be late by it, and nobody tries it just now,
        what is believed. What nobody has ever measured (the load of a model that never was in memory, say) refuses
        nobody, while nobody else tries it.
        """
        if request.accept_late:
            return 0 if refusal.reason in {Reason.DEADLINE_UNREACHABLE, Reason.THERMAL} else None
        if refusal.reason is not Reason.DEADLINE_UNREACHABLE:
            return None
        left_ns = request.deadlines.total_ns - now_ns - estimate.wait_ns
        if not len(self._queue) and not self._runs.cores_busy:
            if self._runs.believed_ns(request, estimate, left_ns=left_ns, now_ns=now_ns) is not None:
                return 0
            if estimate.is_guess and self._runs.may_explore(request, now_ns):
                return 0
            return 0 if not request.firm and self._runs.hearsay(request, now_ns) else None
        if estimate.p50_ns <= left_ns:
            if not self._runs.doubts_tail(request):
                return None
        elif self._runs.lanes_busy(key := model_key(request)) or any(job.key == key for job in self._queue.jobs()):
            return None
        elif estimate.is_guess and self._runs.may_explore(request, now_ns):
            return 0
        believed_ns = self._runs.believed_ns(request, estimate, left_ns=left_ns, now_ns=now_ns)
        return None if believed_ns is None else estimate.wait_ns + believed_ns


def _said(ending: Refusal | Failure) -> Refusal:
    """Return what a place said when the request was there, as the reason why it doesn't go there again."""
    if isinstance(ending, Refusal):
        return ending
    return Refusal(Reason.MODEL_UNAVAILABLE, f"{ending.reason}: {ending.detail}")
