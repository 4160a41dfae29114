"""Deadlines, graces and turns of the runs in a worker, on virtual time, with a worker that does as the test says."""

from __future__ import annotations

import asyncio
import errno
import functools
import mmap
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer import oip
from edgeinfer.clock import NS_PER_MS, NS_PER_S
from edgeinfer.request import Expired, Failure, Reason, Refusal
from edgeinfer.worker.channel import ChannelClosed
from edgeinfer.worker.flight import CRASHED, WORKER_LOST, Flights, RunEnding, RunOrder, RunResult
from edgeinfer.worker.messages import Attach, Done, Failed, Marks, Run, ToWorker
from edgeinfer.worker.slot import SlotState, body_bytes, write_body
from edgeinfer.worker.spec import WorkerLimits
from tests.virtual_time import run_virtual

ASK = oip.encode_request([("x", "UINT8", [1], b"\x01")])
ANSWER = oip.encode_response([("y", "UINT8", [1], b"\x02")])
LIMITS = WorkerLimits(cancel_grace_ns=100 * NS_PER_MS, max_waiting=8)


class ScriptedProcess:
    """A worker process whose runs end when the test says so. Maps the slots as the real one does."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.killed: list[str] = []
        self.stopped: list[int] = []
        self.is_gone = False
        self.unread: Callable[[], None] = lambda: None
        self.areas: dict[int, memoryview] = {}

    def send(self, message: ToWorker, fds: Sequence[int] = ()) -> None:
        if self.is_gone:
            raise ChannelClosed("gone")
        self.sent.append(message)
        if isinstance(message, Attach):
            self.areas[message.slot] = memoryview(mmap.mmap(os.dup(fds[0]), message.size_bytes))

    def cancel(self, run: int) -> None:
        if self.is_gone:
            raise ChannelClosed("gone")
        self.stopped.append(run)

    def listen(self) -> None:
        self.unread()

    def kill_overdue(self, detail: str) -> None:
        self.killed.append(detail)

    def kill_broken(self, detail: str) -> None:
        self.killed.append(detail)

    @property
    def runs(self) -> list[Run]:
        return [message for message in self.sent if isinstance(message, Run)]

    def done(self, run: Run) -> Done:
        room = run.response
        return Done(run.run, write_body(self.areas[room.slot], room.slot, room.offset, ANSWER), Marks())


def scene(limits: WorkerLimits = LIMITS) -> tuple[ScriptedProcess, Flights]:
    process = ScriptedProcess()
    return process, Flights("model", limits, process, None)


def now_ns() -> int:
    return round(asyncio.get_running_loop().time() * NS_PER_S)


def ask(flights: Flights, in_ms: float) -> asyncio.Task[RunEnding]:
    return asyncio.create_task(flights.run(RunOrder(ASK, now_ns() + round(in_ms * NS_PER_MS))))


def virtually(test: Coroutine[Any, Any, None]) -> None:
    run_virtual(test)


def test_run_under_way_is_cancelled_at_its_deadline_and_killed_after_the_grace() -> None:
    async def play() -> None:
        process, flights = scene()
        began = now_ns()
        assert isinstance(await ask(flights, 30), Expired)
        assert now_ns() - began == pytest.approx(30 * NS_PER_MS, abs=NS_PER_MS)
        assert process.stopped == [1]
        await asyncio.sleep(0.099)
        assert process.killed == []
        await asyncio.sleep(0.002)
        assert process.killed == ["run 1 did not stop within 100 ms"]

    virtually(play())


def test_acknowledgement_in_the_grace_spares_the_process() -> None:
    async def play() -> None:
        process, flights = scene()
        await ask(flights, 30)
        flights.on_failed(Failed(1, "cancelled", "", Marks()))
        await asyncio.sleep(10)
        assert process.killed == []
        assert flights.has_place

    virtually(play())


def test_acknowledgement_that_lies_unread_when_the_grace_ends_spares_the_process() -> None:
    async def play() -> None:
        process, flights = scene()
        process.unread = lambda: flights.on_failed(Failed(1, "cancelled", "", Marks()))
        await ask(flights, 30)
        await asyncio.sleep(10)
        assert process.killed == []
        assert flights.has_place

    virtually(play())


def test_grace_of_a_waiting_run_begins_with_its_turn() -> None:
    async def play() -> None:
        process, flights = scene()
        first, second = ask(flights, 10_000), ask(flights, 30)
        assert isinstance(await second, Expired)
        await asyncio.sleep(5)
        assert process.killed == []  # the first is still in its right
        flights.on_done(process.done(process.runs[0]))
        assert isinstance(await first, RunResult)
        await asyncio.sleep(0.15)
        assert process.killed == ["run 2 did not stop within 100 ms"]

    virtually(play())


def test_result_after_the_deadline_is_dropped_and_counted_and_frees_the_slot() -> None:
    async def play() -> None:
        process, flights = scene()
        assert isinstance(await ask(flights, 30), Expired)
        assert list(flights.pool.states.values()) == [SlotState.IN_WORKER]
        flights.on_done(process.done(process.runs[0]))
        assert flights.late_results == 1
        assert list(flights.pool.states.values()) == [SlotState.FREE]

    virtually(play())


def test_slow_reader_of_answers_holds_the_next_run_back_until_it_releases_one() -> None:
    async def play() -> None:
        process, flights = scene(WorkerLimits(max_slots=2))
        results = []
        for number in range(2):
            task = ask(flights, 1000)
            await asyncio.sleep(0)
            flights.on_done(process.done(process.runs[number]))
            results.append(await task)
        third, fourth = ask(flights, 1000), ask(flights, 50)
        assert isinstance(await fourth, Expired)
        assert len(process.runs) == 2
        assert isinstance(results[0], RunResult)
        results[0].release()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(process.runs) == 3
        flights.on_done(process.done(process.runs[2]))
        assert isinstance(await third, RunResult)

    virtually(play())


def test_caller_that_leaves_in_the_moment_of_the_answer_gives_its_slot_back() -> None:
    async def play() -> None:
        process, flights = scene()
        task = ask(flights, 100)
        await asyncio.sleep(0)
        flights.on_done(process.done(process.runs[0]))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(flights.pool.states.values()) == [SlotState.FREE]

    virtually(play())


def test_process_that_acknowledges_what_it_does_not_have_is_ended() -> None:
    async def play() -> None:
        process, flights = scene()
        flights.on_failed(Failed(9, "run_failed", "", Marks()))
        assert process.killed == ["it acknowledged run 9, which it does not have"]

    virtually(play())


def test_process_that_is_already_gone_is_a_failure_and_leaks_no_slot() -> None:
    async def play() -> None:
        process, flights = scene()
        process.is_gone = True
        ending = await ask(flights, 100)
        assert isinstance(ending, Failure)
        assert ending.reason == WORKER_LOST
        assert SlotState.LEASED not in flights.pool.states.values()

    virtually(play())


def test_unreadable_answer_is_a_failure_and_ends_the_process() -> None:
    async def play() -> None:
        process, flights = scene()
        task = ask(flights, 100)
        await asyncio.sleep(0)
        done = process.done(process.runs[0])
        process.areas[1][done.response.offset] = 0
        flights.on_done(done)
        ending = await task
        assert isinstance(ending, Failure)
        assert ending.reason == CRASHED
        assert "unreadable answer" in process.killed[0]

    virtually(play())


Step = st.tuples(
    st.sampled_from(["ask", "ask", "answer", "answer", "fail", "leave", "release", "wait", "die"]),
    st.integers(1, 200),
)


@given(steps=st.lists(Step, max_size=40))
@settings(max_examples=150, deadline=None)
def test_every_run_ends_once_by_its_deadline_and_no_slot_is_shared_or_lost(steps: list[tuple[str, int]]) -> None:
    async def play() -> None:
        process, flights = scene(WorkerLimits(max_slots=3, max_waiting=2))
        tasks: list[tuple[asyncio.Task[RunEnding], int]] = []
        results: list[RunResult] = []
        acknowledged = 0
        is_dead = False
        ended_ns: dict[int, int] = {}

        def note_end(at: int, _: object) -> None:
            ended_ns[at] = now_ns()

        for verb, number in steps:
            pending = process.runs[acknowledged:]
            slots = [run.request.slot for run in pending]
            assert len(set(slots)) == len(slots)  # no two unacknowledged runs share a slot
            match verb:
                case "ask":
                    task = ask(flights, number)
                    task.add_done_callback(functools.partial(note_end, len(tasks)))
                    tasks.append((task, now_ns() + number * NS_PER_MS))
                case "answer" if pending and not is_dead:
                    flights.on_done(process.done(pending[0]))
                    acknowledged += 1
                case "fail" if pending and not is_dead:
                    flights.on_failed(Failed(pending[0].run, "run_failed", "", Marks()))
                    acknowledged += 1
                case "leave" if tasks:
                    tasks[number % len(tasks)][0].cancel()
                case "release":
                    for task, _ in tasks:
                        if task.done() and not task.cancelled() and isinstance(ending := task.result(), RunResult):
                            ending.release()
                case "wait":
                    await asyncio.sleep(number / 1000)
                case "die" if not is_dead and number > 150:
                    is_dead = process.is_gone = True
                    flights.end("it died")
                    acknowledged = len(process.runs)
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        for at, (task, deadline_ns) in enumerate(tasks):
            assert task.done()
            assert ended_ns[at] <= deadline_ns + NS_PER_MS
            if not task.cancelled():
                ending = task.result()
                assert isinstance(ending, RunResult | Failure | Refusal | Expired)
                if isinstance(ending, RunResult):
                    results.append(ending)
        for run in process.runs[acknowledged:]:
            flights.on_failed(Failed(run.run, "cancelled", "", Marks()))
        for result in results:
            result.release()
        states = set(flights.pool.states.values())
        assert states <= {SlotState.FREE}
        assert len(flights) == 0
        flights.end("the test is over")
        assert flights.pool.size_bytes == 0

    virtually(play())


def test_room_of_a_body_covers_what_is_written() -> None:
    assert body_bytes(ANSWER) >= len(ANSWER.header) + 1


def test_no_file_descriptors_refuse_one_request_and_the_next_finds_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def test() -> None:
        process, flights = scene()
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", exhausted)
            ending = await ask(flights, 100)
        assert isinstance(ending, Refusal)
        assert ending.reason is Reason.MEMORY
        assert "Too many open files" in ending.detail
        answer = ask(flights, 100)
        await asyncio.sleep(0.001)
        flights.on_done(process.done(process.runs[0]))
        result = await answer
        assert isinstance(result, RunResult)
        result.release()

    virtually(test())
