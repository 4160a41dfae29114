"""Run requests in this machine's own worker processes: the local `Executor`.

Owns nothing but the way from a request to a worker and back. Which models are resident is `model_cache`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from edgeinfer import oip
from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.errors import BudgetExceeded, ProtocolError
from edgeinfer.execution.executor import Estimate, Stop
from edgeinfer.execution.model_cache import ModelCache
from edgeinfer.execution.resident import ResidentModel
from edgeinfer.execution.seed import UNKNOWN, seed_before_loading
from edgeinfer.request import (
    Ending,
    Expired,
    Failure,
    InferRequest,
    Payload,
    Placement,
    Reason,
    Refusal,
    Result,
    Timeline,
)
from edgeinfer.worker.messages import Marks
from edgeinfer.worker.worker import CRASHED, WORKER_LOST, RunEnding, RunOrder, RunResult

_LATE_PATIENCE_NS = 10 * NS_PER_S
"""How long after its deadline a result is waited for when the caller takes late ones."""
_LOSS_PATIENCE_NS = NS_PER_S
"""How long a worker that no run can be sent to is given until its process is gone."""


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
        """Return what the toolchain measured, plus what the worker still has to do; the scheduler learns the rest."""
        found = self._cache.find(request.model, request.version)
        if isinstance(found, ResidentModel):
            seed, section, worker = found.seed, found.section, found.pick(request.stream)
            if worker is not None:
                wait_ns = worker.in_flight * seed.p99_ns
            elif found.is_replacing:
                wait_ns = found.seats_wait_ns
            else:
                return _without_worker(found)
            lanes = 1 if found.manifest.stateful else max(1, found.alive)
            return Estimate(seed.p50_ns, seed.p99_ns, wait_ns, section.threads, lanes, is_guess=seed is UNKNOWN)
        return found if isinstance(found, Refusal) else self._before_loading(request.model, found)

    def _before_loading(self, name: str, load_ns: int) -> Estimate:
        """Return what running a model takes that is loaded for the request first."""
        section, installed = self._cache.section(name), self._cache.installed(name)
        if section is None or installed is None:
            return Estimate(UNKNOWN.p50_ns, UNKNOWN.p99_ns, wait_ns=load_ns, is_guess=True)
        manifest = installed.manifest
        seed = seed_before_loading(manifest, section.variant, section.threads)
        lanes = 1 if manifest.stateful else section.workers
        is_guess = seed is UNKNOWN or self._cache.is_load_guessed(name)
        return Estimate(seed.p50_ns, seed.p99_ns, load_ns, section.threads, lanes, is_guess)

    def begin(self, request: InferRequest, ended: Callable[[Ending], None], *, behind: bool = False) -> Stop | None:
        """Send the request at once to a worker that has nothing else to do, or one run. See `Executor.begin`."""
        now_ns, deadline_ns = self._clock.now_ns(), _deadline_ns(request)
        model = self._cache.find(request.model, request.version)
        if not isinstance(model, ResidentModel) or now_ns >= deadline_ns:
            return None
        worker = model.pick(request.stream)
        if worker is None or worker.in_flight != behind or (behind and model.manifest.stateful):
            return None

        def tell(ending: RunEnding) -> None:
            model.let_go()
            if model.manifest.stateful and isinstance(ending, Failure) and ending.reason == WORKER_LOST:
                ending = Failure(CRASHED, ending.detail)  # its place in the stream is gone: it isn't run again
            ended(self._ending(model, request, ending))

        def stop() -> None:
            if stop_run():
                model.let_go()

        order = RunOrder(request.payload, deadline_ns, request.stream, request.sequence_start)
        try:
            found = worker.begin(order, tell)
        except (BudgetExceeded, ProtocolError, OSError):
            return None  # `execute` meets it again, and says what it means
        if found is None:
            return None
        stop_run = found
        request.timeline.dispatched_ns = now_ns
        model.hold()
        return stop

    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        """Run the request on the model's least busy worker. See `Executor.execute`."""
        request.timeline.dispatched_ns = self._clock.now_ns()
        deadline_ns = _deadline_ns(request)
        if request.timeline.dispatched_ns >= deadline_ns:
            return Expired("its deadline had passed when it was to start")
        try:
            async with asyncio.timeout_at(deadline_ns / NS_PER_S):
                found = await self._cache.find_or_load(request.model, request.version)
        except TimeoutError:
            return Expired(f"{request.model} was not loaded in time")
        if isinstance(found, Refusal):
            return found
        with found.lease():
            return await self._run(found, request, deadline_ns)

    async def _run(
        self, model: ResidentModel, request: InferRequest, deadline_ns: int
    ) -> Result | Refusal | Failure | Expired:
        ending: RunEnding = _without_worker(model)
        for _ in range(2):  # a run that had not begun when its worker died may go to another, once
            worker = model.pick(request.stream) or await model.pick_soon(request.stream, deadline_ns=deadline_ns)
            if worker is None and model.is_replacing:
                return Expired(f"the worker of {request.model} was not replaced in time")
            if worker is None:
                why = self._cache.find(request.model, request.version)
                ending = why if isinstance(why, Refusal) else ending
                break
            ending = await worker.run(
                request.payload,
                deadline_ns=deadline_ns,
                stream=request.stream,
                sequence_start=request.sequence_start,
            )
            if model.manifest.stateful or not (isinstance(ending, Failure) and ending.reason == WORKER_LOST):
                break
            if model.pick(request.stream) is worker:  # its process is gone, and nobody has noted that yet
                left_ns = min(_LOSS_PATIENCE_NS, deadline_ns - self._clock.now_ns())
                await asyncio.wait([worker.died], timeout=max(0, left_ns) / NS_PER_S)
        return self._ending(model, request, ending)

    def _ending(
        self, model: ResidentModel, request: InferRequest, ending: RunEnding
    ) -> Result | Refusal | Failure | Expired:
        """Return what a worker's word means to the caller, and mark the request's timeline."""
        if not isinstance(ending, RunResult):
            return ending
        _mark(request.timeline, ending.marks)
        payload = ending.payload
        if ending.state_reset:
            model.state_resets += 1
            payload = _tell_reset(payload)
        return Result(
            payload=payload,
            placement=Placement.LOCAL,
            where=self._where,
            version=model.manifest.version,
            variant=model.variant.name,
            digest=model.installed.digest,
            lease=ending.lease,
        )


def _without_worker(model: ResidentModel) -> Refusal:
    """Return why a model without a worker, and without one that is expected, serves nobody."""
    detail = model.detail or f"it is {model.phase}, and no successor of its worker is expected"
    return Refusal(Reason.MODEL_UNAVAILABLE, f"{model.section.name} has no worker: {detail}")


def _deadline_ns(request: InferRequest) -> int:
    """Return until when a result is waited for."""
    total_ns = request.deadlines.total_ns
    return total_ns + _LATE_PATIENCE_NS if request.accept_late else total_ns


def _tell_reset(payload: Payload) -> Payload:
    """Return the answer with the parameter `state_reset`: the stream's earlier state was lost, this run began anew."""
    header = oip.response_header(payload)
    header.parameters["state_reset"] = True
    return Payload(msgspec.json.encode(header), payload.tensors)


def _mark(timeline: Timeline, marks: Marks) -> None:
    """Copy the worker's times; its clock is ours."""
    timeline.decoded_ns = marks.decoded_ns or None
    timeline.started_ns = marks.started_ns or None
    timeline.first_result_ns = timeline.finished_ns = marks.finished_ns or None
    timeline.postprocessed_ns = marks.postprocessed_ns or None
    timeline.cpu_ns = marks.cpu_ns or None
