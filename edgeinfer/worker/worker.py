"""One worker process, as the daemon sees it: started, asked to run, stopped, or found dead.

Daemon's side. Owns the process, its channel and its slots. Every run is answered by its deadline, whatever the process
is doing: with its result, a typed failure, or `Expired`; what does not stop when told to is killed after a grace.
A late result is dropped here. Whether to start another worker, and when, is `edgeinfer.execution`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from edgeinfer import oip
from edgeinfer.clock import NS_PER_MS, NS_PER_S, LoopClock
from edgeinfer.errors import BudgetExceeded, ProtocolError, SessionError
from edgeinfer.request import Expired, Failure, Payload, Reason, Refusal
from edgeinfer.worker import fault
from edgeinfer.worker.channel import DaemonEnd, close_all
from edgeinfer.worker.lineage import ExitStatus
from edgeinfer.worker.memory import read_memory
from edgeinfer.worker.messages import (
    PROTOCOL,
    Attach,
    Cancel,
    Comparison,
    Detach,
    Done,
    Failed,
    ForgetStream,
    FromWorker,
    Grant,
    Hello,
    Load,
    Loaded,
    LoadFailed,
    LoadSpec,
    Log,
    Marks,
    Memory,
    Oversize,
    Run,
    Stop,
    ToWorker,
)
from edgeinfer.worker.nursery import Newborn, Nursery
from edgeinfer.worker.slot import Slot, SlotLease, SlotPool, SlotState, body_bytes, read_body, write_body
from edgeinfer.worker.spec import WorkerLimits

_log = logging.getLogger(__name__)

CRASHED: Final = "crashed"
"""`Failure.reason` of the run that was under way when the process died."""
WORKER_LOST: Final = "worker_lost"
"""`Failure.reason` of a run that had not begun when the process died: it may be tried again elsewhere."""


class EndCause(StrEnum):
    """Why a worker's process is no more."""

    STOPPED = "stopped"
    """We asked it to."""
    OVERDUE = "overdue"
    """We killed it: a run did not stop within its grace."""
    CRASHED = "crashed"
    """It ended by itself: a signal, or an exit that nobody asked for."""
    LOAD_FAILED = "load_failed"
    """It could not load its model, or not in time."""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker's process ended."""

    cause: EndCause
    status: ExitStatus
    detail: str


@dataclass(slots=True)
class RunResult:
    """The answer of a run. Its payload's buffers are valid until `release`."""

    payload: Payload
    lease: SlotLease
    marks: Marks
    state_reset: bool
    comparison: Comparison | None

    def release(self) -> None:
        """Give the slot back; the payload must not be read afterwards. Idempotent."""
        self.lease.release()


RunEnding = RunResult | Failure | Refusal | Expired


@dataclass(slots=True)
class _Flight:
    """A run that the worker has and has not acknowledged yet."""

    run: int
    slot: Slot
    answer: asyncio.Future[RunEnding]
    deadline: asyncio.TimerHandle | None = None
    kill: asyncio.TimerHandle | None = None
    larger_slot: Slot | None = None
    """Granted for an answer that did not fit."""
    is_abandoned: bool = False
    """Nobody waits for it any more: it was told to stop."""

    def disarm(self) -> None:
        """Stop its timers."""
        for timer in (self.deadline, self.kill):
            if timer is not None:
                timer.cancel()


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
    ) -> None:
        self.spec = spec
        self.limits = limits
        self._loop = asyncio.get_running_loop()
        self._clock = LoopClock(self._loop)
        self.died: asyncio.Future[WorkerEnd] = self._loop.create_future()
        self.late_results = 0
        """Results that came after their run had expired or was cancelled, and were dropped."""
        self._child = newborn.child
        self._pool = SlotPool(
            max_slots=limits.max_slots,
            max_bytes=limits.max_slot_bytes,
            on_change=on_slots_change,
            on_free=self._wake,
        )
        self._loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self._flights: OrderedDict[int, _Flight] = OrderedDict()
        self._next_run = 1
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._waiting = 0
        self._end_cause: EndCause | None = None
        self._end_detail = ""
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
        newborn = await nursery.fork(deadline_ns=deadline_ns)
        worker = cls(newborn, spec, limits or WorkerLimits(), on_slots_change)
        try:
            await worker._load(deadline_ns)
        except BaseException:
            worker._kill(EndCause.LOAD_FAILED, f"{spec.title} was not loaded")
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(worker.died)
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
        """Whether the process runs and nobody has told it to end."""
        return self._child.is_running and self._end_cause is None

    @property
    def can_accept(self) -> bool:
        """Whether a run would be sent to the process at once, without waiting for a place."""
        return self.is_alive and not self._waiting and len(self._flights) <= self.limits.run_ahead

    @property
    def in_flight(self) -> int:
        """Runs that the process has not acknowledged, abandoned ones included."""
        return len(self._flights)

    @property
    def slot_bytes(self) -> int:
        """Shared memory of all its slots."""
        return self._pool.size_bytes

    @property
    def slot_states(self) -> dict[int, SlotState]:
        """Who holds each slot, for reports."""
        return self._pool.states

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

        The payload's buffers are copied before the first wait ends. Cancelling the caller cancels the run. At most
        `limits.run_ahead` runs wait inside the process; further callers wait here, in order, `limits.max_waiting`
        of them, the next is refused. Failures: `crashed` and `worker_lost` (see there), `run_failed`,
        `out_of_memory`, `non_finite_output`, `output_too_large`, `output_unsupported`, `contract_mismatch`;
        refusals: `input_invalid`, `memory`, `queue_full`.
        """
        order = _Order(payload, deadline_ns, stream, sequence_start, expected, tolerance)
        try:
            at_once = self._dispatch(order) if self.can_accept else None
            flight = at_once or await self._dispatch_in_turn(order)
        except BudgetExceeded as error:
            return Refusal(Reason.MEMORY, str(error))
        except ProtocolError as error:
            return Failure(WORKER_LOST, f"{self.spec.title}: {error}")
        if not isinstance(flight, _Flight):
            return flight
        try:
            return await flight.answer
        except asyncio.CancelledError:
            self._give_up(flight)
            raise

    def forget_stream(self, stream: str) -> None:
        """Drop the state of a stream that ended."""
        if self.is_alive:
            with contextlib.suppress(ProtocolError):
                self._channel.send(ForgetStream(stream))

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
        """Let the runs that it has finish within the grace, end the process, and wait until it is reaped."""
        if self.is_alive:
            self._end_cause, self._end_detail = EndCause.STOPPED, "asked to stop"
            with contextlib.suppress(ProtocolError):
                self._channel.send(Stop())
            await asyncio.wait([self.died], timeout=grace_ns / NS_PER_S)
        self._child.kill()
        return await asyncio.shield(self.died)

    def kill(self, detail: str) -> None:
        """End the process now; `died` resolves once it is gone."""
        self._kill(EndCause.STOPPED, detail)

    async def _load(self, deadline_ns: int) -> None:
        raw = msgspec.msgpack.encode(self.spec)
        fd = os.memfd_create("edgeinfer-spec", os.MFD_CLOEXEC)
        try:
            os.write(fd, raw)
            self._channel.send(Load(len(raw)), [fd])
        finally:
            os.close(fd)
        left_ns = deadline_ns - self._clock.now_ns()
        await asyncio.wait([self._loaded], timeout=max(0.0, left_ns / NS_PER_S))
        if not self._loaded.done():
            raise SessionError("load_timeout", f"{self.spec.title} was not loaded in time; its worker is killed")
        self._loaded.result()

    async def _dispatch_in_turn(self, order: _Order) -> _Flight | Refusal | Failure | Expired:
        """Wait for a place in the process and for a slot, in order of arrival, until the deadline."""
        if self._waiting >= self.limits.max_waiting:
            return Refusal(Reason.QUEUE_FULL, f"{self._waiting} runs wait for {self.spec.title}")
        self._waiting += 1
        try:
            async with asyncio.timeout_at(order.deadline_ns / NS_PER_S), self._turn:
                while self.is_alive:
                    self._freed.clear()
                    if len(self._flights) <= self.limits.run_ahead and (flight := self._dispatch(order)) is not None:
                        return flight
                    await self._freed.wait()
        except TimeoutError:
            return Expired(f"no place in the worker of {self.spec.title} before the deadline")
        finally:
            self._waiting -= 1
        return Failure(WORKER_LOST, f"{self.spec.title}: {self._end_detail or 'its worker has ended'}")

    def _dispatch(self, order: _Order) -> _Flight | None:
        """Put a request into a slot and send it; None when no slot is free."""
        request_bytes = body_bytes(order.payload)
        expected_bytes = 0 if order.expected is None else body_bytes(order.expected)
        slot, retired = self._pool.acquire(request_bytes + expected_bytes, self.limits.response_bytes)
        for old in retired:
            self._channel.send(Detach(old.id))
        if slot is None:
            return None
        try:
            self._attach(slot)
            request = write_body(slot.view, slot.id, 0, order.payload)
            expected = None
            if order.expected is not None:
                expected = write_body(slot.view, slot.id, request_bytes, order.expected)
            number = self._next_run
            self._channel.send(
                Run(
                    number,
                    request,
                    slot.response_room,
                    order.stream,
                    order.sequence_start,
                    expected,
                    order.tolerance,
                )
            )
        except BaseException:
            self._pool.free(slot)
            raise
        slot.move(SlotState.IN_WORKER)
        self._next_run += 1
        flight = self._flights[number] = _Flight(number, slot, self._loop.create_future())
        flight.deadline = self._loop.call_at(order.deadline_ns / NS_PER_S, self._expire, flight)
        return flight

    def _attach(self, slot: Slot) -> None:
        if not slot.attached:
            self._channel.send(Attach(slot.id, slot.size_bytes), [slot.fd])
            slot.attached = True

    def _expire(self, flight: _Flight) -> None:
        if not flight.answer.done():
            flight.answer.set_result(Expired(f"{self.spec.title} had not answered at the deadline"))
        self._abandon(flight)

    def _give_up(self, flight: _Flight) -> None:
        """Nobody waits for it: stop the run, or release the answer that was just made."""
        if flight.answer.done() and not flight.answer.cancelled():
            ending = flight.answer.result()
            if isinstance(ending, RunResult):
                ending.release()
        self._abandon(flight)

    def _abandon(self, flight: _Flight) -> None:
        """Tell the process to stop a run; once that is the one under way, it has a grace to obey."""
        if flight.run not in self._flights or flight.is_abandoned:
            return
        flight.is_abandoned = True
        try:
            self._channel.send(Cancel(flight.run))
        except ProtocolError as error:
            self._kill(EndCause.OVERDUE, str(error))
        self._arm_kill()

    def _arm_kill(self) -> None:
        """Give the run under way its grace, when it was abandoned; one that still waits has time until its turn."""
        first = next(iter(self._flights.values()), None)
        if first is not None and first.is_abandoned and first.kill is None:
            first.kill = self._loop.call_later(self.limits.cancel_grace_ns / NS_PER_S, self._kill_overdue, first)

    def _kill_overdue(self, flight: _Flight) -> None:
        grace_ms = self.limits.cancel_grace_ns / NS_PER_MS
        detail = f"run {flight.run} did not stop within {grace_ms:.0f} ms"
        _log.warning("worker overdue model=%r pid=%d detail=%r", self.spec.title, self.pid, detail)
        self._kill(EndCause.OVERDUE, detail)

    def _kill(self, cause: EndCause, detail: str) -> None:
        if self._end_cause is None:
            self._end_cause, self._end_detail = cause, detail
        self._child.kill()
        self._wake()

    def _wake(self) -> None:
        """Let the next waiting caller look again."""
        self._freed.set()

    def _on_message(self, message: FromWorker, fds: list[int]) -> None:
        close_all(fds)
        match message:
            case Done():
                self._on_done(message)
            case Failed():
                self._on_failed(message)
            case Oversize(run, needed_bytes):
                self._on_oversize(run, needed_bytes)
            case Log(level, text):
                _log.log(level, "model=%r pid=%d %s", self.spec.title, self.pid, text)
            case Hello(protocol, _):
                if protocol != PROTOCOL:
                    self._kill(EndCause.LOAD_FAILED, f"worker speaks protocol {protocol}, this daemon {PROTOCOL}")
            case Loaded():
                if not self._loaded.done():
                    self._loaded.set_result(message)
            case LoadFailed(reason, detail):
                self._fail_load(reason, detail)

    def _on_done(self, done: Done) -> None:
        if (flight := self._take(done.run)) is None:
            return
        used, other = flight.slot, flight.larger_slot
        if other is not None and done.response.slot == other.id:
            used, other = other, used
        if other is not None:
            self._pool.free(other)
        if flight.is_abandoned or flight.answer.done():
            self.late_results += 1
            self._pool.free(used)
            return
        used.move(SlotState.RESULT)
        try:
            header, body = read_body(used.view, done.response)
            _, payload = oip.decode_response(bytes(header), body)
        except ProtocolError as error:  # it scribbled over its answer: whatever it holds cannot be trusted
            self._pool.free(used)
            flight.answer.set_result(Failure(CRASHED, f"{self.spec.title} wrote an unreadable answer: {error}"))
            self._kill(EndCause.CRASHED, f"unreadable answer: {error}")
            return
        views = tuple(tensor for tensor in payload.tensors if isinstance(tensor, memoryview))
        lease = SlotLease(self._pool, used, views)
        flight.answer.set_result(RunResult(payload, lease, done.marks, done.state_reset, done.comparison))

    def _on_failed(self, failed: Failed) -> None:
        if (flight := self._take(failed.run)) is None:
            return
        for slot in (flight.slot, flight.larger_slot):
            if slot is not None:
                self._pool.free(slot)
        if flight.answer.done():
            return
        if failed.reason == fault.INPUT_INVALID:
            flight.answer.set_result(Refusal(Reason.INPUT_INVALID, failed.detail))
        else:
            flight.answer.set_result(Failure(failed.reason, failed.detail))

    def _take(self, run: int) -> _Flight | None:
        flight = self._flights.pop(run, None)
        if flight is None:
            self._kill(EndCause.CRASHED, f"it acknowledged run {run}, which it does not have")
            return None
        flight.disarm()
        self._arm_kill()
        self._wake()
        return flight

    def _on_oversize(self, run: int, needed_bytes: int) -> None:
        flight = self._flights.get(run)
        slot = None
        if flight is not None and not flight.is_abandoned:
            with contextlib.suppress(BudgetExceeded):
                slot, retired = self._pool.acquire(0, needed_bytes)
                for old in retired:
                    self._channel.send(Detach(old.id))
        if flight is not None and slot is not None:
            self._attach(slot)
            slot.move(SlotState.IN_WORKER)
            flight.larger_slot = slot
        self._channel.send(Grant(run, None if slot is None else slot.response_room))

    def _on_closed(self, reason: str) -> None:
        if reason:
            self._kill(EndCause.CRASHED, reason)
        else:
            self._child.kill()  # it closed its end because it is ending

    def _fail_load(self, reason: str, detail: str) -> None:
        if not self._loaded.done():
            self._end_cause, self._end_detail = EndCause.LOAD_FAILED, detail
            self._loaded.set_exception(SessionError(reason, detail))

    def _on_ended(self, status: ExitStatus) -> None:
        self._channel.drain()
        self._channel.close()
        cause = self._end_cause or EndCause.CRASHED
        detail = self._end_detail or f"worker {self.pid} {status}"
        self._fail_load("load_crashed", f"{self.spec.title}: its worker was {status} while loading")
        self._loaded.exception()  # seen: the loader may have gone
        for position, flight in enumerate(self._flights.values()):
            flight.disarm()
            if not flight.answer.done():
                began = position == 0
                what = f"{self.spec.title}: {detail}" if began else f"{self.spec.title}: not begun, {detail}"
                flight.answer.set_result(Failure(CRASHED if began else WORKER_LOST, what))
        self._flights.clear()
        self._pool.close()
        self._end_cause, self._end_detail = cause, detail
        self._wake()
        self.died.set_result(WorkerEnd(cause, status, detail))

    def _tasks(self) -> list[str]:
        try:
            return os.listdir(f"/proc/{self.pid}/task")  # noqa: PTH208
        except OSError:
            return []


@dataclass(frozen=True, slots=True)
class _Order:
    """What a caller of `run` asks for."""

    payload: Payload
    deadline_ns: int
    stream: str | None
    sequence_start: bool
    expected: Payload | None
    tolerance: float
