"""Run requests in this machine's own worker processes: the local `Executor`.

Owns nothing but the way from a request to a worker and back. Which models are resident is `model_cache`'s.
"""

from __future__ import annotations

import asyncio

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.execution.executor import Estimate
from edgeinfer.execution.model_cache import ModelCache
from edgeinfer.execution.resident import ResidentModel
from edgeinfer.request import Expired, Failure, InferRequest, Placement, Reason, Refusal, Result, Timeline
from edgeinfer.worker.messages import Marks
from edgeinfer.worker.worker import WORKER_LOST, RunEnding, RunResult, Worker

_LATE_PATIENCE_NS = 10 * NS_PER_S
"""How long after its deadline a result is waited for when the caller takes late ones."""


class LocalExecutor:
    """An `Executor` over the model cache. Loop thread only."""

    def __init__(self, cache: ModelCache, *, where: str, clock: Clock) -> None:
        self._cache = cache
        self._where = where
        self._clock = clock

    @property
    def placement(self) -> Placement:
        """Always local."""
        return Placement.LOCAL

    def estimate(self, request: InferRequest) -> Estimate | Refusal:
        """Return what the newest runs of the model took, plus what its workers still have to do."""
        found = self._cache.find(request.model, request.version)
        match found:
            case Refusal():
                return found
            case int():
                section = self._cache.section(request.model)
                return Estimate(found, found, cores=section.threads if section else 1)
        p50_ns = found.latency.percentile_ns(50)
        worker = found.pick(request.stream)
        if worker is None:
            return Refusal(Reason.MODEL_UNAVAILABLE, f"{request.model}: its worker is being restarted")
        return Estimate(
            p50_ns=p50_ns,
            p99_ns=found.latency.percentile_ns(99),
            wait_ns=worker.in_flight * p50_ns,
            cores=found.section.threads,
        )

    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        """Run the request on the model's least busy worker. See `Executor.execute`."""
        request.timeline.dispatched_ns = self._clock.now_ns()
        deadline_ns = request.deadlines.total_ns
        try:
            async with asyncio.timeout_at(deadline_ns / NS_PER_S):
                found = await self._cache.find_or_load(request.model, request.version)
        except TimeoutError:
            return Expired(f"{request.model} was not loaded in time")
        if isinstance(found, Refusal):
            return found
        if request.accept_late:
            deadline_ns += _LATE_PATIENCE_NS
        with found.lease():
            return await self._run(found, request, deadline_ns)

    async def _run(
        self, model: ResidentModel, request: InferRequest, deadline_ns: int
    ) -> Result | Refusal | Failure | Expired:
        ending: RunEnding = Failure(WORKER_LOST, f"{request.model} has no worker just now")
        for _ in range(2):  # a run that had not begun when its worker died may go to another, once
            worker = model.pick(request.stream)
            if worker is None:
                return ending if isinstance(ending, Failure) else Failure(WORKER_LOST)
            ending = await self._run_on(worker, model, request, deadline_ns)
            if model.manifest.stateful or not (isinstance(ending, Failure) and ending.reason == WORKER_LOST):
                break
        if not isinstance(ending, RunResult):
            return ending
        if ending.state_reset:
            model.state_resets += 1
        return Result(
            payload=ending.payload,
            placement=Placement.LOCAL,
            where=self._where,
            version=model.manifest.version,
            variant=model.variant.name,
            digest=model.installed.digest,
            lease=ending.lease,
        )

    async def _run_on(
        self, worker: Worker, model: ResidentModel, request: InferRequest, deadline_ns: int
    ) -> RunEnding:
        begun_ns = self._clock.now_ns()
        queued = worker.in_flight
        ending = await worker.run(
            request.payload,
            deadline_ns=deadline_ns,
            stream=request.stream,
            sequence_start=request.sequence_start,
        )
        if isinstance(ending, RunResult):
            _mark(request.timeline, ending.marks)
            now_ns = self._clock.now_ns()
            model.latency.add(now_ns - (max(begun_ns, ending.marks.received_ns) if queued else begun_ns))
        return ending


def _mark(timeline: Timeline, marks: Marks) -> None:
    """Copy the worker's times; its clock is ours."""
    timeline.decoded_ns = marks.decoded_ns or None
    timeline.started_ns = marks.started_ns or None
    timeline.first_result_ns = timeline.finished_ns = marks.finished_ns or None
    timeline.postprocessed_ns = marks.postprocessed_ns or None
