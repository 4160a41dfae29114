"""The local executor keeps the executor contract over real workers, and tells what it knows of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from edgeinfer import oip
from edgeinfer.clock import MonotonicClock
from edgeinfer.execution.executor import NOT_BEGUN, Estimate, Stop
from edgeinfer.request import Deadlines, Ending, Expired, Failure, InferRequest, Reason, Refusal, Result, Timeline
from edgeinfer.worker.slot import SlotState
from tests.execution.executor_contract import MS, Case, ExecutorContract, Rig, Timing
from tests.execution.local_rig import FILLED, LOOP, SUM, SUM_STATE, open_place, request_of, variant, y_of
from tests.worker import graphs

pytestmark = [pytest.mark.system, pytest.mark.slow]

_NUMBERS = itertools.count(1)
ONE = request_of(x=np.array([1], np.float32))


class TestLocalKeepsTheContract(ExecutorContract):
    """Quick, slow and stuck are the same model: the worker that hangs has to serve the next request too."""

    timing = Timing(slow_ns=200 * MS, short_ns=60 * MS, tolerance_ns=60 * MS)
    rounds: ClassVar[int] = 0

    @asynccontextmanager
    async def open_rig(self) -> AsyncIterator[Rig]:
        with tempfile.TemporaryDirectory() as folder:
            async with open_place(Path(folder)) as place:
                place.install("loop", graphs.slow_loop(), LOOP)
                place.install("broken", graphs.filled(), FILLED)
                loop, broken = await place.load("loop"), await place.load("broken")
                workers = loop.workers + broken.workers
                clock = MonotonicClock()

                def request(case: Case, deadlines: Deadlines, accept_late: bool) -> InferRequest:
                    number = float(next(_NUMBERS))
                    rounds = {Case.SLOW: self.rounds, Case.STUCK: 1 << 40}.get(case, 1)
                    payload = request_of(n=np.array([rounds]), x=np.array([number], np.float32))
                    if case is Case.BROKEN:
                        payload = request_of(shape=np.array([1 << 40]))
                    name = {Case.BROKEN: "broken", Case.UNKNOWN: "nobody"}.get(case, "loop")
                    made = InferRequest(name, payload, deadlines, Timeline(clock.now_ns()), accept_late=accept_late)
                    expected[made.id] = number + rounds
                    return made

                def answers(request: InferRequest, result: Result) -> bool:
                    return float(np.frombuffer(bytes(result.payload.tensors[0]), np.float32)[0]) == expected[request.id]

                def leased() -> int:
                    return sum(list(worker.slot_states.values()).count(SlotState.RESULT) for worker in workers)

                async def quiet() -> None:
                    await place.until(lambda: not any(worker.in_flight for worker in workers))

                expected: dict[int, float] = {}
                rig = Rig(place.executor, clock, request, answers, leased, quiet)
                if not self.rounds:
                    type(self).rounds = await self._calibrate(rig)
                yield rig

    async def _calibrate(self, rig: Rig) -> int:
        """Return how many rounds of the loop take `slow_ns`, on this machine."""
        tried = type(self).rounds = 1 << 14
        made = rig.make(Case.SLOW, 5000 * MS)
        ending = await rig.executor.execute(made)
        assert isinstance(ending, Result), ending
        ending.release()
        assert made.timeline.finished_ns
        assert made.timeline.started_ns
        return min(round(tried * self.timing.slow_ns / (made.timeline.finished_ns - made.timeline.started_ns)), 1 << 23)


class TestLocalBegunKeepsTheContract(TestLocalKeepsTheContract):
    """The same, without a task for each request."""

    begins = True


async def test_a_crash_is_a_failure_and_what_had_not_begun_goes_to_another_worker(tmp_path: Path) -> None:
    async with open_place(tmp_path) as place:
        place.install("loop", graphs.slow_loop(), LOOP)
        model = await place.load("loop", workers=2)
        stuck = np.array([1 << 40])
        running = [asyncio.create_task(place.ask("loop", inputs={"n": stuck}, within_ms=1500)) for _ in range(2)]
        await place.until(lambda: all(worker.in_flight == 1 for worker in model.workers))
        waiting = asyncio.create_task(place.ask("loop", 41.0, inputs={"n": np.array([1])}))
        await place.until(lambda: any(worker.in_flight == 2 for worker in model.workers))
        victim = next(worker for worker in model.workers if worker.in_flight == 2)
        running[1].cancel()  # its worker is free again
        os.kill(victim.pid, signal.SIGSEGV)
        crashed = await running[0]
        assert isinstance(crashed, Failure)
        assert crashed.reason == "crashed"
        assert "SIGSEGV" in crashed.detail
        assert await waiting == 42.0, "it had not begun, so it may go elsewhere"
        await place.until(lambda: len(model.workers) == 2)
        assert [note.quarantined for note in place.crashes] == [False]


async def test_a_stateful_run_that_was_lost_is_not_tried_again(tmp_path: Path) -> None:
    async with open_place(tmp_path) as place:
        place.install("sum", graphs.accumulator(), SUM, state=SUM_STATE)
        model = await place.load("sum", workers=3)
        one = request_of(x=np.array([1], np.float32))
        for stream in ("a", "b", "c", "d"):
            for expected in (1.0, 2.0, 3.0):
                ending = await place.executor.execute(place.request("sum", one, stream=stream))
                assert isinstance(ending, Result)
                assert "state_reset" not in oip.response_header(ending.payload).parameters or expected == 1.0
                assert y_of(ending) == expected, "a stream stays on the worker that has its state"
        estimate = place.executor.estimate(place.request("sum", one, stream="a"))
        assert isinstance(estimate, Estimate)
        assert estimate.lanes == 1
        pinned = model.pick("a")
        assert pinned is not None
        os.kill(pinned.pid, signal.SIGKILL)
        await place.until(lambda: not pinned.is_alive)
        successor = place.executor.estimate(place.request("sum", one, stream="a"))
        assert isinstance(successor, Estimate)
        assert successor.wait_ns > 0, "no other worker may take it"
        await place.until(lambda: model.pick("a") is not None)
        resets = model.state_resets
        ending = await place.executor.execute(place.request("sum", one, stream="a"))
        assert isinstance(ending, Result)
        assert oip.response_header(ending.payload).parameters["state_reset"] is True, "its caller has to know"
        assert y_of(ending) == 1.0
        assert model.state_resets == resets + 1
        assert place.status("sum").state_resets == model.state_resets


async def test_estimates_are_the_toolchains_figures_and_grow_with_what_waits(tmp_path: Path) -> None:
    async with open_place(tmp_path) as place:
        told = variant("fp32", latency_us={"1": 3000, "4": 1000})
        place.install("loop", graphs.slow_loop(), LOOP, variants=[told])
        await place.load("loop")
        payload = request_of(n=np.array([1 << 40]), x=np.array([1], np.float32))
        idle = place.executor.estimate(place.request("loop", payload))
        assert isinstance(idle, Estimate)
        assert (idle.p99_ns, idle.wait_ns, idle.cores, idle.lanes) == (3 * MS, 0, 1, 1)
        task = asyncio.create_task(place.executor.execute(place.request("loop", payload, within_ms=200)))
        await asyncio.sleep(0.05)
        busy = place.executor.estimate(place.request("loop", payload))
        assert isinstance(busy, Estimate)
        assert busy.wait_ns == 3 * MS
        assert isinstance(await task, Expired)


async def test_a_run_behind_another_is_stopped_exactly_and_told_when_its_worker_dies_before_it_began(
    tmp_path: Path,
) -> None:
    async with open_place(tmp_path) as place:
        place.install("loop", graphs.slow_loop(), LOOP)
        model = await place.load("loop")
        (worker,) = model.workers
        told: dict[str, Ending] = {}

        def begin(name: str, rounds: int, within_ms: float = 5000, *, behind: bool = False) -> Stop:
            payload = request_of(n=np.array([rounds]), x=np.array([1], np.float32))
            request = place.request("loop", payload, within_ms=within_ms)
            stop = place.executor.begin(request, lambda ending: told.update({name: ending}), behind=behind)
            assert stop is not None
            return stop

        stop_first = begin("first", 1 << 40)
        stop_second = begin("second", 1, behind=True)
        stop_second()
        assert model.leases == 1
        stop_first()
        await place.until(lambda: not worker.in_flight)
        assert (told, model.leases) == ({}, 0), "who was stopped is told nothing"

        begin("slow", 1 << 40, within_ms=60)
        begin("next", 1, behind=True)
        await place.until(lambda: len(told) == 2)
        assert isinstance(told["slow"], Expired)
        assert isinstance(told["next"], Result), "it begins when the one before it was stopped at its deadline"
        told["next"].release()

        begin("crashed", 1 << 40)
        begin("lost", 1, behind=True)
        os.kill(worker.pid, signal.SIGSEGV)
        await place.until(lambda: len(told) == 4)
        assert isinstance(told["crashed"], Failure)
        assert told["crashed"].reason == "crashed"
        assert isinstance(told["lost"], Failure)
        assert told["lost"].reason == NOT_BEGUN
        assert model.leases == 0


async def test_a_request_waits_for_the_successor_of_a_worker_that_crashed(tmp_path: Path) -> None:
    async with open_place(tmp_path) as place:
        place.install("echo")
        model = await place.load("echo")
        os.kill(model.workers[0].pid, signal.SIGSEGV)
        while model.workers:  # in the very turn: a look every few milliseconds may come when the next one is there
            await asyncio.sleep(0)
        estimate = place.executor.estimate(place.request("echo", ONE))
        assert isinstance(estimate, Estimate)
        assert 0 < estimate.wait_ns < 1000 * MS, "the pause before the restart, and the load"
        assert place.executor.begin(place.request("echo", ONE), lambda _: None) is None
        assert await place.ask("echo", 5.0) == 5.0
        assert isinstance(await place.ask("echo"), float), "it serves again"


async def test_no_moment_of_a_crash_refuses_a_request_that_has_time(tmp_path: Path) -> None:
    async with open_place(tmp_path) as place:
        place.install("echo")
        model = await place.load("echo")
        (worker,) = model.workers
        told: list[Estimate | Refusal] = []
        endings: asyncio.Queue[Ending] = asyncio.Queue()

        os.kill(worker.pid, signal.SIGKILL)
        lost = place.executor.begin(place.request("echo", ONE), endings.put_nowait)
        while model.pick(None) in {worker, None}:
            told.append(place.executor.estimate(place.request("echo", ONE)))
            await asyncio.sleep(0)
        assert all(isinstance(each, Estimate) for each in told), told
        if lost is not None:
            assert isinstance(await endings.get(), Failure), "it may have begun"
        (worker,) = model.workers
        os.kill(worker.pid, signal.SIGKILL)
        answer = await place.ask("echo", 5.0)
        assert answer == 5.0 or isinstance(answer, Failure), answer
        assert await place.ask("echo", 5.0) == 5.0


async def test_whoever_waits_for_a_worker_is_told_when_none_comes(tmp_path: Path) -> None:
    async with open_place(tmp_path) as place:
        place.install("echo")
        model = await place.load("echo")
        os.kill(model.workers[0].pid, signal.SIGSEGV)
        await place.until(lambda: not model.workers)
        expired = await place.executor.execute(place.request("echo", ONE, within_ms=20))
        assert isinstance(expired, Expired)
        waiting = asyncio.create_task(place.executor.execute(place.request("echo", ONE)))
        await asyncio.sleep(0)
        await place.cache.unload("echo")
        refusal = await waiting
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.MODEL_UNAVAILABLE


async def test_what_is_known_of_a_model_counts_before_it_is_loaded(tmp_path: Path) -> None:
    async with open_place(tmp_path) as place:
        place.install("echo", variants=[variant("fp32", latency_us={"1": 7000, "2": 4000})])
        place.want("echo", preload=False, threads=2, workers=3)
        estimate = place.executor.estimate(place.request("echo", ONE))
        assert isinstance(estimate, Estimate)
        assert (estimate.p99_ns, estimate.cores, estimate.lanes) == (4 * MS, 2, 3)
        assert 0 < estimate.wait_ns < 200 * MS, "a small bundle"
        assert estimate.is_guess
        assert await place.ask("echo", 5.0) == 5.0
        await place.cache.unload("echo")
        wanted = place.cache._wanted["echo"]
        assert (wanted.is_load_guessed, 0 < wanted.load_guess_ns < 5000 * MS) == (False, True)
        running = place.executor.estimate(place.request("echo", ONE))
        assert isinstance(running, Refusal)


async def test_late_results_are_waited_for_while_the_model_still_loads(tmp_path: Path) -> None:
    async with open_place(tmp_path) as place:
        place.install("echo")
        place.want("echo", preload=False)
        assert isinstance(await place.ask("echo", within_ms=1), Expired)
        await place.until(place.loaded)
        await place.cache.unload("echo")
        refused = await place.ask("echo")
        assert isinstance(refused, Refusal)
        assert refused.reason is Reason.MODEL_UNAVAILABLE
        await place.cache.load(place.want("echo", preload=False))
        assert await place.ask("echo", 5.0) == 5.0
    async with open_place(tmp_path) as place:
        place.want("echo", preload=False)
        assert await place.ask("echo", 7.0, within_ms=1, accept_late=True) == 7.0
