"""One worker process, as the daemon sees it: started with one model, asked to run, stopped, or found dead.

Daemon's side. Owns the process and its channel; the runs in it are `flight`'s. Every run is answered by its deadline,
whatever the process is doing; one that does not stop when told to costs the process its life. Whether to start
another worker, and when, is `edgeinfer.execution`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import msgspec

from edgeinfer.clock import NS_PER_S, LoopClock
from edgeinfer.errors import ProtocolError, SessionError
from edgeinfer.request import Payload
from edgeinfer.worker.cancels import CancelPipe
from edgeinfer.worker.channel import DaemonEnd, post
from edgeinfer.worker.flight import CRASHED, WORKER_LOST, Flights, RunEnding, RunOrder, RunResult
from edgeinfer.worker.lineage import KILL_PATIENCE_S, ExitStatus
from edgeinfer.worker.memory import read_memory
from edgeinfer.worker.messages import (
    PROTOCOL,
    Done,
    Failed,
    ForgetStream,
    FromWorker,
    Hello,
    Load,
    Loaded,
    LoadFailed,
    LoadSpec,
    Log,
    Memory,
    Oversize,
    Shrink,
    Shrunk,
    Stop,
    ToWorker,
)
from edgeinfer.worker.nursery import Newborn, Nursery
from edgeinfer.worker.slot import SlotState
from edgeinfer.worker.spec import WorkerLimits

__all__ = ["CRASHED", "WORKER_LOST", "EndCause", "RunEnding", "RunOrder", "RunResult", "Worker", "WorkerEnd"]

_log = logging.getLogger(__name__)


class EndCause(StrEnum):
    """Why a worker's process is no more."""

    STOPPED = "stopped"
    """We asked it to."""
    OVERDUE = "overdue"
    """We killed it: a run did not stop within its grace."""
    CRASHED = "crashed"
    """It ended by itself: a signal, or an exit that nobody asked for."""
    BROKEN = "broken"
    """We killed it: it broke the protocol."""
    LOAD_FAILED = "load_failed"
    """It could not load its model, or not in time."""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker's process ended."""

    cause: EndCause
    status: ExitStatus
    detail: str


class Worker:
    """One worker process with one loaded model. Loop thread only; made by `start`.

    `died` resolves once, with a `WorkerEnd`, when the process is gone and reaped; every run has been answered by then.
    """

    def __init__(
        self,
        newborn: Newborn,
        spec: LoadSpec,
        limits: WorkerLimits,
        on_slots_change: Callable[[int], None] | None,
        cancels: CancelPipe,
    ) -> None:
        self.spec = spec
        self.limits = limits
        self._loop = asyncio.get_running_loop()
        self._clock = LoopClock(self._loop)
        self.died: asyncio.Future[WorkerEnd] = self._loop.create_future()
        self.shrinks = 0
        """How often it has given back what it did not need, because it was asked to."""
        self.shrunk_bytes = 0
        """Anonymous memory that it had for itself afterwards."""
        self._child = newborn.child
        self._flights = Flights(spec.title, limits, self, on_slots_change)
        self._loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self._end_cause: EndCause | None = None
        self._end_detail = ""
        self._cancels = cancels
        self._channel: DaemonEnd[FromWorker, ToWorker] = DaemonEnd(
            newborn.sock, self._loop, FromWorker, on_message=self._on_message, on_closed=self._on_closed
        )
        self._child.ended.add_done_callback(lambda ended: self._on_ended(ended.result()))

    @classmethod
    async def start(
        cls,
        nursery: Nursery,
        spec: LoadSpec,
        *,
        deadline_ns: int,
        limits: WorkerLimits | None = None,
        on_slots_change: Callable[[int], None] | None = None,
    ) -> Worker:
        """Fork a worker and have it load `spec` until `deadline_ns`.

        `on_slots_change` is called with the bytes of all its slots whenever they change, to be charged. The caller
        has reserved the model's memory before, and stops the worker after.

        Raises:
            RuntimeUnusable: ONNX Runtime cannot be imported here.
            SessionError: no process, or the model was refused, crashed, or took too long. The process is gone then.
        """
        cancels = CancelPipe()
        try:
            newborn = await nursery.fork(deadline_ns=deadline_ns, write=partial(_order, spec, cancels))
        except BaseException:
            cancels.close()
            raise
        worker = cls(newborn, spec, limits or WorkerLimits(), on_slots_change, cancels)
        try:
            await worker._until_loaded(deadline_ns)
        except BaseException:
            worker._kill(EndCause.LOAD_FAILED, f"{spec.title} was not loaded")
            await worker._child.killed()
            raise
        return worker

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def loaded(self) -> Loaded:
        """What loading cost, and the graph's own inputs and outputs."""
        return self._loaded.result()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, can be talked to, and nobody has told it to end."""
        return self._end_cause is None and self._child.is_running and self._channel.is_open

    @property
    def can_accept(self) -> bool:
        """Whether a run would be sent to the process at once, without waiting for a place."""
        return self.is_alive and self._flights.has_place

    @property
    def in_flight(self) -> int:
        """Runs that the process has not acknowledged, abandoned ones included."""
        return len(self._flights)

    @property
    def late_results(self) -> int:
        """Results that came after their run had expired or was cancelled, and were dropped."""
        return self._flights.late_results

    @property
    def slot_bytes(self) -> int:
        """Shared memory of all its slots."""
        return self._flights.pool.size_bytes

    @property
    def slot_states(self) -> dict[int, SlotState]:
        """Who holds each slot, for reports."""
        return self._flights.pool.states

    def memory(self) -> Memory | None:
        """Return the process's memory now, None when it is gone."""
        return read_memory(self.pid) if self._child.is_running else None

    async def run(
        self,
        payload: Payload,
        *,
        deadline_ns: int,
        stream: str | None = None,
        sequence_start: bool = False,
        expected: Payload | None = None,
        tolerance: float = 0.0,
    ) -> RunEnding:
        """Run a request; return its ending at `deadline_ns` at the latest.

        The payload's buffers are copied into a slot when the run is sent: at once while `can_accept`, else when its
        turn comes. Cancelling the caller cancels the run. Failures: `CRASHED` and `WORKER_LOST`, `run_failed`,
        `out_of_memory`, `non_finite_output`, `output_too_large`, `output_unsupported`, `contract_mismatch`;
        refusals: `input_invalid`, `memory`, `queue_full`.
        """
        order = RunOrder(payload, deadline_ns, stream, sequence_start, expected, tolerance)
        return await self._flights.run(order)

    def begin(self, order: RunOrder, tell: Callable[[RunEnding], None]) -> Callable[[], bool] | None:
        """Run a request without a task: `tell` is called once, by the deadline, with what `run` would return.

        Return what stops the run, so that `tell` isn't called any more, and says whether it had not been called; None
        when the run can't be sent at once.

        Raises:
            BudgetExceeded, OSError, ProtocolError: it can't be sent; `run` says what that means.
        """
        flight = self._flights.begin(order, tell) if self.is_alive else None
        return None if flight is None else partial(self._flights.abandon, flight)

    def forget_stream(self, stream: str) -> None:
        """Drop the state of a stream that ended."""
        if self.is_alive:
            with contextlib.suppress(ProtocolError):
                self.send(ForgetStream(stream))

    def shrink(self) -> None:
        """Have the process give back what no run needs, after the runs that it has; `shrinks` counts the answers."""
        if self.is_alive:
            with contextlib.suppress(ProtocolError):
                self.send(Shrink())

    def set_affinity(self, cpus: Iterable[int]) -> None:
        """Put every thread of the process on these CPUs; threads that it makes later inherit them.

        Raises:
            SessionError: `affinity`: none of them may be used.
        """
        mask, seen = sorted(cpus), set[str]()
        while fresh := set(self._tasks()) - seen:  # a thread may have made another meanwhile
            seen |= fresh
            for task in fresh:
                try:
                    os.sched_setaffinity(int(task), mask)
                except ProcessLookupError:
                    continue
                except OSError as error:
                    raise SessionError("affinity", f"{self.spec.title} on CPUs {mask}: {error.strerror}") from error

    async def stop(self, *, grace_ns: int = 2 * NS_PER_S) -> WorkerEnd:
        """Let the runs that it has finish within the grace, end the process, and wait until it is reaped.

        A process that is stuck in the kernel is not waited for beyond `KILL_PATIENCE_S`; its memory comes back when
        `died` says so.
        """
        if self.is_alive:
            self._end_cause, self._end_detail = EndCause.STOPPED, "asked to stop"
            self._flights.close("its worker is stopping")
            with contextlib.suppress(ProtocolError):
                self.send(Stop())
            await asyncio.wait([self.died], timeout=grace_ns / NS_PER_S)
        if not await self._child.killed():
            stuck = f"worker {self.pid} is stuck in the kernel: not gone {KILL_PATIENCE_S:g} s after SIGKILL"
            _log.error("worker stuck model=%r pid=%d", self.spec.title, self.pid)
            return WorkerEnd(self._end_cause or EndCause.STOPPED, ExitStatus(), stuck)
        return await asyncio.shield(self.died)

    def kill(self, detail: str) -> None:
        """End the process now, because we want to; `died` resolves once it is gone."""
        self._kill(EndCause.STOPPED, detail)

    def kill_overdue(self, detail: str) -> None:
        """End the process now: a run in it does not stop."""
        _log.warning("worker overdue model=%r pid=%d detail=%r", self.spec.title, self.pid, detail)
        self._kill(EndCause.OVERDUE, detail)

    def kill_broken(self, detail: str) -> None:
        """End the process now: it broke the protocol."""
        _log.error("worker broken model=%r pid=%d detail=%r", self.spec.title, self.pid, detail)
        self._kill(EndCause.BROKEN, detail)

    def send(self, message: ToWorker, fds: Sequence[int] = ()) -> None:
        """Send the process a message.

        Raises:
            ProtocolError: it is gone, or has not read for too long.
        """
        self._channel.send(message, fds)

    def listen(self) -> None:
        """Take in what the process has said already and nobody has read yet."""
        self._channel.drain()

    def cancel(self, run: int) -> None:
        """Have the process stop a run.

        Raises:
            ProtocolError: it is gone, or has not read for too long.
        """
        self._cancels.send(run)

    async def _until_loaded(self, deadline_ns: int) -> None:
        left_ns = deadline_ns - self._clock.now_ns()
        await asyncio.wait([self._loaded], timeout=max(0.0, left_ns / NS_PER_S))
        if not self._loaded.done():
            raise SessionError("load_timeout", f"{self.spec.title} was not loaded in time; its worker is killed")
        self._loaded.result()

    def _kill(self, cause: EndCause, detail: str) -> None:
        if self._end_cause is None:
            self._end_cause, self._end_detail = cause, detail
        self._flights.close(detail)
        self._child.kill()

    def _on_message(self, message: FromWorker) -> None:
        match message:
            case Done():
                self._flights.on_done(message)
            case Failed():
                self._flights.on_failed(message)
            case Oversize():
                self._flights.on_oversize(message)
            case Shrunk(own_bytes):
                self.shrinks += 1
                self.shrunk_bytes = own_bytes
            case Log(level, text):
                _log.log(level, "model=%r pid=%d %s", self.spec.title, self.pid, text)
            case Hello(protocol, _):
                if protocol != PROTOCOL:
                    self._kill(EndCause.BROKEN, f"it speaks protocol {protocol}, this daemon {PROTOCOL}: restart it")
            case Loaded():
                if not self._loaded.done():
                    self._loaded.set_result(message)
            case LoadFailed(reason, detail):
                self._end_cause, self._end_detail = EndCause.LOAD_FAILED, detail
                self._fail_load(reason, detail)

    def _fail_load(self, reason: str, detail: str) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(SessionError(reason, detail))
            self._loaded.exception()  # seen: whoever started it may have gone

    def _on_closed(self, reason: str) -> None:
        if reason:
            self.kill_broken(reason)
        else:
            self._child.kill()  # it closed its end because it is ending

    def _on_ended(self, status: ExitStatus) -> None:
        self._channel.drain()
        self._channel.close()
        self._cancels.close()
        if self._end_cause is None:
            self._end_cause, self._end_detail = EndCause.CRASHED, f"worker {self.pid} {status}"
            _log.error("worker ended model=%r pid=%d status=%r", self.spec.title, self.pid, str(status))
        self._fail_load("load_crashed", f"{self.spec.title}: {self._end_detail} while loading")
        self._flights.end(self._end_detail)
        self.died.set_result(WorkerEnd(self._end_cause, status, self._end_detail))

    def _tasks(self) -> list[str]:
        try:
            return os.listdir(f"/proc/{self.pid}/task")  # noqa: PTH208
        except OSError:
            return []


def _order(spec: LoadSpec, cancels: CancelPipe, sock: socket.socket) -> None:
    """Tell whoever will be at the other end of a channel its model, and open its cancel pipe.

    A pipe that was opened for an earlier one is closed, which ends a worker that got it after all.

    Raises:
        SessionError: `fork_failed`: there are no descriptors or no memory for it.
    """
    cancels.close()
    raw = msgspec.msgpack.encode(spec)
    with contextlib.ExitStack() as passed:
        try:
            fd = os.memfd_create("edgeinfer-spec", os.MFD_CLOEXEC)
            file = passed.enter_context(os.fdopen(fd, "wb", buffering=0))
            file.write(raw)
            worker_end = cancels.open()
            passed.callback(os.close, worker_end)
            post(sock, Load(len(raw)), [fd, worker_end])
        except OSError as error:
            detail = f"{spec.title} cannot be told its model: {error.strerror}"
            raise SessionError("fork_failed", detail) from error
