"""One resident model's rules about its workers, with workers that are told when to die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgeinfer.clock import NS_PER_S, MonotonicClock
from edgeinfer.config import ModelSection
from edgeinfer.errors import EdgeInferError, SessionError
from edgeinfer.execution.crashes import CrashPolicy
from edgeinfer.execution.ledger import MemoryLedger
from edgeinfer.execution.resident import CrashNote, Phase, ResidentModel
from edgeinfer.store.store import Installed
from edgeinfer.worker.lineage import ExitStatus
from edgeinfer.worker.worker import EndCause, WorkerEnd
from tests.artifact.making import make_bundle

SIZE = 1000


class FakeWorker:
    pid = 1

    def __init__(self) -> None:
        self.died: asyncio.Future[WorkerEnd] = asyncio.get_running_loop().create_future()
        self.in_flight = 0
        self.loaded = SimpleNamespace(load_ns=7)
        self.cpus: frozenset[int] | None = None
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    @property
    def is_alive(self) -> bool:
        return not self.died.done()

    def end(self, cause: EndCause = EndCause.CRASHED) -> None:
        if self.is_alive:
            self.died.set_result(WorkerEnd(cause, ExitStatus(), f"it {cause}"))

    async def stop(self) -> None:
        await self.may_stop.wait()
        self.end(EndCause.STOPPED)

    def kill(self, _: str) -> None:
        self.end(EndCause.STOPPED)

    def set_affinity(self, cpus: frozenset[int]) -> None:
        if not cpus:
            raise SessionError("affinity", "no CPU")
        self.cpus = cpus


@dataclass
class Clock:
    at_ns: int = 0

    def now_ns(self) -> int:
        return self.at_ns


@dataclass
class Stage:
    """A resident model whose starts succeed, fail or hang as the test says."""

    folder: Path
    workers: int = 1
    stateful: bool = False
    ledger: MemoryLedger = field(default_factory=lambda: MemoryLedger(SIZE))
    clock: Clock = field(default_factory=Clock)
    started: list[FakeWorker] = field(default_factory=list)
    crashes: list[CrashNote] = field(default_factory=list)
    jobs: list[tuple[int, Callable[[], Awaitable[None]]]] = field(default_factory=list)
    fault: EdgeInferError | None = None
    hangs: bool = False

    def __post_init__(self) -> None:
        manifest = make_bundle(self.folder)
        if self.stateful:
            manifest = cast("Any", SimpleNamespace(stateful=True))
        self.model: Any = ResidentModel(
            section=ModelSection("tiny", workers=self.workers),
            installed=Installed(self.folder, manifest, "d" * 64, active=True),
            variant=cast("Any", SimpleNamespace(name="fp32")),
            reservation=self.ledger.reserve("tiny", SIZE),
            start_worker=cast("Any", self._start),
            later=lambda delay_ns, act, _: self.jobs.append((delay_ns, act)),
            on_crash=self.crashes.append,
            clock=self.clock,
            policy=CrashPolicy(max_crashes=3, first_pause_ns=10, longest_pause_ns=1000),
        )

    async def _start(self) -> FakeWorker:
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        self.started.append(FakeWorker())
        return self.started[-1]

    def phase(self) -> Phase:
        return cast("Phase", self.model.phase)

    async def do_jobs(self) -> list[int]:
        """Do what was put off, and return for how long each was to wait."""
        await asyncio.sleep(0)
        jobs, self.jobs = self.jobs, []
        for _, act in jobs:
            await act()
        await asyncio.sleep(0)
        return [delay_ns for delay_ns, _ in jobs]

    async def crash(self, index: int = -1) -> None:
        self.started[index].end()
        await asyncio.sleep(0)


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Stage]:
    return lambda **options: Stage(tmp_path, **options)


async def test_a_crash_is_noted_and_the_worker_replaced_after_a_growing_pause(stage: Callable[..., Stage]) -> None:
    made = stage()
    await made.model.open()
    assert (made.phase(), made.model.load_ns) == (Phase.READY, 7)
    await made.crash()
    assert made.phase() is Phase.RECOVERING
    assert made.model.pick(None) is None
    assert await made.do_jobs() == [10]
    assert made.phase() is Phase.READY
    assert made.model.detail == ""
    await made.crash()
    assert await made.do_jobs() == [20]
    await made.crash()
    assert made.phase() is Phase.QUARANTINED
    assert [note.quarantined for note in made.crashes] == [False, False, True]
    assert await made.do_jobs() == []
    assert made.ledger.free_bytes == 0, "until its processes are known to be gone"
    await made.model.close()
    assert made.ledger.free_bytes == SIZE


async def test_a_successor_is_expected_from_the_moment_in_which_a_worker_is_lost(stage: Callable[..., Stage]) -> None:
    """Its end is noted a turn of the loop later, or more: nobody may be told meanwhile that none will come."""
    made = stage()
    await made.model.open()
    made.model.load_ns = 7
    made.started[0].end()
    assert made.model.pick(None) is None
    assert (made.model.is_replacing, made.model.seats_wait_ns) == (True, 17)
    waiting = asyncio.create_task(made.model.pick_soon(None, deadline_ns=MonotonicClock().now_ns() + 10 * NS_PER_S))
    await asyncio.sleep(0)
    assert (made.model.is_replacing, made.model.seats_wait_ns) == (True, 17), "as it is once that was noted"
    await made.do_jobs()
    assert await waiting is made.started[1]
    assert not made.model.is_replacing
    made.model._quarantine("enough")
    assert not made.model.is_replacing


async def test_crashes_that_are_far_apart_are_forgiven(stage: Callable[..., Stage]) -> None:
    made = stage()
    await made.model.open()
    for _ in range(10):
        made.clock.at_ns += 61_000_000_000
        await made.crash()
        assert await made.do_jobs() == [10]
    assert made.phase() is Phase.READY


async def test_a_replacement_that_fails_is_tried_again_and_not_for_ever(stage: Callable[..., Stage]) -> None:
    made = stage()
    await made.model.open()
    await made.crash()
    made.fault = SessionError("load_failed", "x")
    assert await made.do_jobs() == [10]
    assert made.phase() is Phase.RECOVERING
    assert await made.do_jobs() == [20]
    assert made.phase() is Phase.QUARANTINED


async def test_no_process_for_a_replacement_is_nothing_that_the_model_has_done(stage: Callable[..., Stage]) -> None:
    made = stage()
    await made.model.open()
    await made.crash()
    made.fault = SessionError("fork_failed", "no zygote in time")
    assert await made.do_jobs() == [10]
    for _ in range(20):
        assert made.phase() is Phase.RECOVERING
        assert await made.do_jobs() == [2_000_000_000]
    made.fault = None
    assert await made.do_jobs() == [2_000_000_000]
    assert made.phase() is Phase.READY
    assert len(made.crashes) == 1


async def test_one_that_was_killed_for_being_overdue_is_no_crash(stage: Callable[..., Stage]) -> None:
    made = stage()
    await made.model.open()
    for _ in range(5):
        made.started[-1].end(EndCause.OVERDUE)
        assert await made.do_jobs() == [0]
    assert made.crashes == []
    assert made.phase() is Phase.READY


async def test_the_others_go_on_while_one_is_replaced(stage: Callable[..., Stage]) -> None:
    made = stage(workers=3)
    await made.model.open()
    busy, idle, gone = made.started
    busy.in_flight = 2
    idle.in_flight = 1
    await made.crash(2)
    assert made.phase() is Phase.READY
    assert made.model.pick("a") is idle
    await made.do_jobs()
    assert made.model.pick("a") is made.started[3]
    assert gone not in made.model.workers


async def test_a_stream_with_state_stays_where_it_is(stage: Callable[..., Stage]) -> None:
    made = stage(workers=4, stateful=True)
    await made.model.open()
    streams = [f"camera-{number}" for number in range(40)]
    first = {stream: made.model.pick(stream) for stream in streams}
    assert len(set(first.values())) == 4, "they are spread"
    for worker in made.started:
        worker.in_flight = 9
        assert {stream: made.model.pick(stream) for stream in streams} == first
    await made.crash(1)
    for stream, worker in first.items():
        assert made.model.pick(stream) is (None if worker is made.started[1] else worker)


async def test_a_worker_that_dies_while_others_still_start(stage: Callable[..., Stage]) -> None:
    made = stage(workers=2)
    opening = asyncio.create_task(made.model.open())
    while not made.started:
        await asyncio.sleep(0)
    made.started[0].end()
    await opening
    assert made.phase() is Phase.READY, "one of two is there"
    await made.do_jobs()
    assert len(made.model.workers) == 2


async def test_nothing_is_left_when_opening_fails(stage: Callable[..., Stage]) -> None:
    made = stage(workers=2)
    made.model._start_worker = _second_fails(made)
    with pytest.raises(SessionError, match="load_failed"):
        await made.model.open()
    assert [worker.is_alive for worker in made.started] == [False]
    assert made.ledger.free_bytes == SIZE


def _second_fails(made: Stage) -> Callable[[], Awaitable[FakeWorker]]:
    async def start() -> FakeWorker:
        if made.started:
            made.fault = SessionError("load_failed", "x")
        return await made._start()

    return start


async def test_closing_stops_a_start_that_is_under_way(stage: Callable[..., Stage]) -> None:
    made = stage()
    await made.model.open()
    await made.crash()
    made.hangs = True
    restarting = asyncio.create_task(made.do_jobs())
    await asyncio.sleep(0.01)
    async with asyncio.timeout(1):
        await made.model.close()
        await asyncio.wait([restarting])
    assert made.phase() is Phase.CLOSED
    assert len(made.started) == 1
    assert made.ledger.free_bytes == SIZE


async def test_memory_is_given_back_when_the_last_process_is_gone(stage: Callable[..., Stage]) -> None:
    made = stage(workers=2)
    await made.model.open()
    slow = made.started[1]
    slow.may_stop.clear()
    closing = asyncio.create_task(made.model.close())
    await asyncio.sleep(0.01)
    assert made.model.workers == []
    assert made.ledger.free_bytes == 0
    slow.may_stop.set()
    await closing
    assert made.ledger.free_bytes == SIZE


async def test_leases_and_last_use(stage: Callable[..., Stage]) -> None:
    made = stage()
    await made.model.open()
    made.clock.at_ns = 5
    with made.model.lease():
        assert (made.model.leases, made.model.last_used_ns) == (1, 5)
        made.clock.at_ns = 9
        with pytest.raises(KeyError), made.model.lease():
            raise KeyError
        assert made.model.leases == 1
        made.clock.at_ns = 12
    assert (made.model.leases, made.model.last_used_ns) == (0, 12)


async def test_cpus_reach_every_worker_and_a_refusal_harms_nobody(stage: Callable[..., Stage]) -> None:
    made = stage(workers=2)
    await made.model.open()
    made.model.set_cpus(frozenset({1}))
    assert {worker.cpus for worker in made.started} == {frozenset({1})}
    made.model.set_cpus(frozenset())
    assert made.phase() is Phase.READY
