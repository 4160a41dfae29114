"""The runs that a worker process has: put into slots, answered by their deadlines, acknowledged at the end.

Daemon's side. Owns the slots and the timers of one worker. A run's caller gets its ending at the deadline at the
latest; the run itself stays in flight until the process acknowledges it or dies, and only then is its slot free. A run
that was abandoned is told to stop, and has a grace to obey once it is the one under way. Killing the process, and what
became of it, is `worker`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from edgeinfer.clock import NS_PER_MS, NS_PER_S, Alarm, LoopClock
from edgeinfer.errors import BudgetExceeded, ProtocolError
from edgeinfer.request import Expired, Failure, Payload, Reason, Refusal
from edgeinfer.worker import fault
from edgeinfer.worker.answers import Answers
from edgeinfer.worker.messages import (
    Attach,
    Comparison,
    Detach,
    Done,
    Failed,
    Grant,
    Marks,
    Oversize,
    Run,
    ToWorker,
)
from edgeinfer.worker.slot import Slot, SlotLease, SlotPool, SlotState, body_bytes, read_body, write_body
from edgeinfer.worker.spec import WorkerLimits

CRASHED: Final = "crashed"
"""`Failure.reason` of the run that was under way when the process died."""
WORKER_LOST: Final = "worker_lost"
"""`Failure.reason` of a run that had not begun when the process died: it may be tried again elsewhere."""


@dataclass(slots=True)
class RunResult:
    """The answer of a run. Its payload's buffers are valid until `release`."""

    payload: Payload
    lease: SlotLease
    marks: Marks
    state_reset: bool
    """The model began from zeros although the sequence had begun: its state was lost."""
    comparison: Comparison | None
    """With the expected response, when one was given."""

    def release(self) -> None:
        """Give the slot back; the payload must not be read afterwards. Idempotent."""
        self.lease.release()


RunEnding = RunResult | Failure | Refusal | Expired


class RunOrder(NamedTuple):
    """What a caller wants run."""

    payload: Payload
    deadline_ns: int
    stream: str | None = None
    sequence_start: bool = False
    expected: Payload | None = None
    """A golden response to compare with, and how far from it is still right."""
    tolerance: float = 0.0


class Process(Protocol):
    """The worker process, as the runs in it need it."""

    def send(self, message: ToWorker, fds: Sequence[int] = ()) -> None:
        """Send it a message; raises `ProtocolError` when it is gone or stuck."""
        ...

    def cancel(self, run: int) -> None:
        """Have it stop a run, under way or not yet begun; raises `ProtocolError` when it is gone or stuck."""
        ...

    def listen(self) -> None:
        """Take in what it has said already and nobody has read yet."""
        ...

    def kill_overdue(self, detail: str) -> None:
        """End it: a run does not stop."""
        ...

    def kill_broken(self, detail: str) -> None:
        """End it: it breaks the protocol."""
        ...


Tell = Callable[[RunEnding], None]
"""Is told how a run ended, once."""


@dataclass(slots=True, eq=False)
class Flight:
    """A run that the process has and has not acknowledged yet. Its caller may `Flights.abandon` it, no more."""

    run: int
    slot: Slot
    deadline_ns: int
    _tell: Tell
    has_grace: bool = False
    """It was told to stop, and it is its turn."""
    kill_ns: int | None = None
    """When the process is killed for it; None before its grace has begun, and once that was done."""
    larger_slot: Slot | None = None
    """Granted for an answer that did not fit."""
    is_abandoned: bool = False
    """Nobody waits for it any more: it was told to stop."""
    is_told: bool = False
    """Its caller has its ending, or has gone."""

    def end(self, ending: RunEnding) -> None:
        """Tell the caller, who has not been told yet."""
        self.is_told = True
        self._tell(ending)


class Flights:
    """The runs of one worker process. Loop thread only.

    `limits.run_ahead` runs wait inside the process beyond the one under way; further callers wait here, in order,
    until their deadlines; beyond `limits.max_waiting` they are refused.
    """

    def __init__(
        self, title: str, limits: WorkerLimits, process: Process, on_slots_change: Callable[[int], None] | None
    ) -> None:
        self.late_results = 0
        """Results that came after their run had expired or was cancelled, and were dropped."""
        self._title = title
        self._limits = limits
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._clock = LoopClock(self._loop)
        self._alarm = Alarm(self._ring)
        self.pool = SlotPool(
            max_slots=limits.max_slots,
            max_bytes=limits.max_slot_bytes,
            on_change=on_slots_change,
            on_free=self._wake,
        )
        self._answers = Answers()
        self._flights: OrderedDict[int, Flight] = OrderedDict()
        self._next_run = 1
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._waiting = 0
        self._closed_because = ""

    def __len__(self) -> int:
        """Return how many runs the process has not acknowledged, abandoned ones included."""
        return len(self._flights)

    @property
    def has_place(self) -> bool:
        """Whether a run would be sent at once."""
        return not self._closed_because and not self._waiting and len(self._flights) <= self._limits.run_ahead

    def begin(self, order: RunOrder, tell: Tell) -> Flight | None:
        """Send a request at once, and have `tell` called with its ending, by its deadline; None without a place.

        Raises:
            BudgetExceeded: it can never fit.
            OSError: the system has no memory or no file descriptor for it now.
            ProtocolError: the process is gone.
        """
        return self._dispatch(order, tell) if self.has_place else None

    async def run(self, order: RunOrder) -> RunEnding:
        """Send a request and return its ending, by its deadline. Cancelling the caller cancels the run."""
        answer: asyncio.Future[RunEnding] = self._loop.create_future()

        def tell(ending: RunEnding) -> None:
            if not answer.done():
                answer.set_result(ending)
            elif isinstance(ending, RunResult):
                ending.release()  # its caller left in this very moment

        try:
            flight = self.begin(order, tell) or await self._dispatch_in_turn(order, tell)
        except BudgetExceeded as error:
            return Refusal(Reason.MEMORY, str(error))
        except OSError as error:
            return Refusal(Reason.MEMORY, f"{self._title}: no shared memory for the request: {error.strerror}")
        except ProtocolError as error:
            return Failure(WORKER_LOST, f"{self._title}: {error}")
        if not isinstance(flight, Flight):
            return flight
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and isinstance(ending := answer.result(), RunResult):
                ending.release()  # it was answered in the very moment in which its caller left
            self.abandon(flight)
            raise

    def abandon(self, flight: Flight) -> bool:
        """Tell the process to stop a run, if it still has it, and its caller nothing any more.

        Return whether the caller had not been told yet.
        """
        was_told, flight.is_told = flight.is_told, True
        if flight.run not in self._flights or flight.is_abandoned:
            return not was_told
        flight.is_abandoned = True
        try:
            self._process.cancel(flight.run)
        except ProtocolError as error:
            self._process.kill_overdue(str(error))
        self._arm_kill()
        return not was_told

    def close(self, why: str) -> None:
        """Send no more runs; those in flight go on."""
        self._closed_because = self._closed_because or why
        self._wake()

    def end(self, why: str) -> None:
        """The process is gone: answer every run that it had, and give its slots back."""
        self.close(why)
        self._alarm.stop()
        lost = Failure(WORKER_LOST, f"{self._title}: not begun, {why}")
        flights = list(self._flights.values())
        self._flights.clear()
        self.pool.close()
        for position, flight in enumerate(flights):
            if not flight.is_told:
                flight.end(lost if position else Failure(CRASHED, f"{self._title}: {why}"))

    def on_done(self, done: Done) -> None:
        """Deliver an answer, or drop it when its run was abandoned."""
        if (flight := self._take(done.run)) is None:
            return
        used, other = flight.slot, flight.larger_slot
        if other is not None and done.response.slot == other.id:
            used, other = other, used
        if other is not None:
            self.pool.free(other)
        if flight.is_told:
            self.late_results += 1
            self.pool.free(used)
            return
        used.move(SlotState.RESULT)
        try:
            header, body = read_body(used.view, done.response)
            payload = self._answers.read(bytes(header), body)
        except ProtocolError as error:  # it scribbled over its answer: whatever it holds cannot be trusted
            self.pool.free(used)
            self._process.kill_broken(f"unreadable answer: {error}")
            flight.end(Failure(CRASHED, f"{self._title} wrote an unreadable answer: {error}"))
            return
        views = [tensor for tensor in payload.tensors if isinstance(tensor, memoryview)]
        lease = SlotLease(self.pool, used, views)
        flight.end(RunResult(payload, lease, done.marks, done.state_reset, done.comparison))

    def on_failed(self, failed: Failed) -> None:
        """Deliver why a run has no answer."""
        if (flight := self._take(failed.run)) is None:
            return
        for slot in (flight.slot, flight.larger_slot):
            if slot is not None:
                self.pool.free(slot)
        if flight.is_told:
            return
        if failed.reason == fault.INPUT_INVALID:
            flight.end(Refusal(Reason.INPUT_INVALID, failed.detail))
        else:
            flight.end(Failure(failed.reason, failed.detail))

    def on_oversize(self, oversize: Oversize) -> None:
        """Grant a run whose answer does not fit a larger slot, or nothing when there is none now."""
        flight = self._flights.get(oversize.run)
        room = None
        if flight is not None and not flight.is_abandoned and flight.larger_slot is None:
            with contextlib.suppress(BudgetExceeded, OSError):
                slot = self._acquire(0, oversize.needed_bytes)
                if slot is not None:
                    slot.move(SlotState.IN_WORKER)
                    flight.larger_slot, room = slot, slot.response_room
        self._process.send(Grant(oversize.run, room))

    async def _dispatch_in_turn(self, order: RunOrder, tell: Tell) -> Flight | Refusal | Failure | Expired:
        """Wait for a place in the process and for a slot, in order of arrival, until the deadline."""
        if self._waiting >= self._limits.max_waiting:
            return Refusal(Reason.QUEUE_FULL, f"{self._waiting} runs wait for {self._title}")
        self._waiting += 1
        try:
            async with asyncio.timeout_at(order.deadline_ns / NS_PER_S), self._turn:
                while not self._closed_because:
                    self._freed.clear()
                    if len(self._flights) <= self._limits.run_ahead and (flight := self._dispatch(order, tell)):
                        return flight
                    await self._freed.wait()
        except TimeoutError:
            return Expired(f"no place in the worker of {self._title} before the deadline")
        finally:
            self._waiting -= 1
        return Failure(WORKER_LOST, f"{self._title}: not begun, {self._closed_because}")

    def _dispatch(self, order: RunOrder, tell: Tell) -> Flight | None:
        """Put a request into a slot and send it; None when no slot is free."""
        request_bytes = body_bytes(order.payload)
        expected_bytes = 0 if order.expected is None else body_bytes(order.expected)
        slot = self._acquire(request_bytes + expected_bytes, self._limits.response_bytes)
        if slot is None:
            return None
        try:
            request = write_body(slot.view, slot.id, 0, order.payload)
            expected = None
            if order.expected is not None:
                expected = write_body(slot.view, slot.id, request_bytes, order.expected)
            number, room = self._next_run, slot.response_room
            self._process.send(
                Run(number, request, room, order.stream, order.sequence_start, expected, order.tolerance)
            )
        except BaseException:
            self.pool.free(slot)
            raise
        slot.move(SlotState.IN_WORKER)
        self._next_run += 1
        flight = self._flights[number] = Flight(number, slot, order.deadline_ns, tell)
        self._alarm.set(order.deadline_ns)
        return flight

    def _acquire(self, request_bytes: int, response_bytes: int) -> Slot | None:
        """Lease a slot that the process has mapped; None when all are in use.

        Raises:
            BudgetExceeded: it can never fit.
            OSError: the system has no memory or no file descriptor for it now.
            ProtocolError: the process is gone.
        """
        slot, retired = self.pool.acquire(request_bytes, response_bytes)
        try:
            for old in retired:
                self._process.send(Detach(old.id))
            if slot is not None and not slot.attached:
                self._process.send(Attach(slot.id, slot.size_bytes), [slot.fd])
                slot.attached = True
        except BaseException:
            if slot is not None:
                self.pool.free(slot)
            raise
        return slot

    def _ring(self) -> None:
        """Do what is due: answer runs whose deadline has come, kill the process for one that does not stop."""
        now_ns = self._clock.now_ns()
        for flight in list(self._flights.values()):
            if not flight.is_abandoned and flight.deadline_ns <= now_ns:
                self._expire(flight)
            if flight.kill_ns is not None and flight.kill_ns <= now_ns:
                self._process.listen()  # on a busy machine it may have obeyed, and we not have heard of it
                if flight.run not in self._flights:
                    continue
                grace_ms = self._limits.cancel_grace_ns / NS_PER_MS
                flight.kill_ns = None
                self._process.kill_overdue(f"run {flight.run} did not stop within {grace_ms:.0f} ms")
        for flight in self._flights.values():
            if not flight.is_abandoned:
                self._alarm.set(flight.deadline_ns)
            elif flight.kill_ns is not None:
                self._alarm.set(flight.kill_ns)

    def _expire(self, flight: Flight) -> None:
        if self.abandon(flight):
            flight.end(Expired(f"{self._title} had not answered at the deadline"))

    def _arm_kill(self) -> None:
        """Give the run under way its grace, when it was abandoned; one that still waits has time until its turn."""
        first = next(iter(self._flights.values()), None)
        if first is not None and first.is_abandoned and not first.has_grace:
            first.has_grace = True
            first.kill_ns = self._clock.now_ns() + self._limits.cancel_grace_ns
            self._alarm.set(first.kill_ns)

    def _take(self, run: int) -> Flight | None:
        flight = self._flights.pop(run, None)
        if flight is None:
            self._process.kill_broken(f"it acknowledged run {run}, which it does not have")
            return None
        if self._flights:
            self._arm_kill()
        self._wake()
        return flight

    def _wake(self) -> None:
        """Let the caller whose turn it is look again."""
        if self._waiting:
            self._freed.set()
