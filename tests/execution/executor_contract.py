"""What every `Executor` promises, as one suite that runs unchanged on all of them.

Subclass `ExecutorContract`, give it a rig and, where virtual time works, its loop:

    class TestLocalExecutor(ExecutorContract):
        timing = Timing(slow_ns=150 * MS, tolerance_ns=60 * MS)

        @asynccontextmanager
        async def open_rig(self) -> AsyncIterator[Rig]:
            async with ...:
                yield Rig(executor, clock, request=..., answers=..., leased=..., quiet=...)

Every test opens its own rig on its own loop (`run`: `asyncio.run` or `run_virtual`), so an executor that bound itself to
a loop is fine. Nothing here sleeps for a fixed time but the waits that `Timing` names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.execution.executor import Estimate, Executor
from edgeinfer.request import Deadlines, Ending, Expired, Failure, InferRequest, Placement, Refusal, Result

MS = 1_000_000


class Case(Enum):
    """What a request meets."""

    QUICK = auto()
    """A result well within `Timing.quick_ns`."""
    SLOW = auto()
    """A result after about `Timing.slow_ns`."""
    STUCK = auto()
    """Nothing, ever: a hung operator, a peer that is silent."""
    BROKEN = auto()
    """A failure: a crashed worker, a garbled reply."""
    UNKNOWN = auto()
    """A model that isn't there."""


@dataclass(frozen=True)
class Timing:
    """How long things take on the executor at hand."""

    quick_ns: int = 5_000 * MS
    """Deadline for what must succeed: generous, it is not waited for."""
    slow_ns: int = 100 * MS
    short_ns: int = 30 * MS
    """Deadline for what must not: well below `slow_ns`."""
    tolerance_ns: int = 20 * MS
    """How much after its deadline an executor may answer on a loaded machine; 0 on virtual time."""
    early_ns: int = 1 * MS
    """How much before it may call something expired (rounding of timers)."""


@dataclass(frozen=True)
class Rig:
    """An executor, and what a test must be able to do around it."""

    executor: Executor
    clock: Clock
    request: Callable[[Case, Deadlines, bool], InferRequest]
    """Make a request: (case, deadlines, accept_late). Two requests of a case have different inputs if possible."""
    answers: Callable[[InferRequest, Result], bool]
    """Whether the result is this request's own."""
    leased: Callable[[], int]
    """Results (or slots) that are out; 0 for executors whose results own their memory."""
    quiet: Callable[[], Awaitable[None]]
    """Return once nothing runs any more; raise TimeoutError when that takes too long."""
    cases: frozenset[Case] = frozenset(Case)
    """What this rig can stage."""

    def make(self, case: Case, within_ns: int, *, accept_late: bool = False) -> InferRequest:
        """Make a request that is due `within_ns` from now."""
        return self.request(case, Deadlines(self.clock.now_ns() + within_ns), accept_late)


Scenario = Callable[[Any, Rig], Coroutine[Any, Any, None]]


def on_a_rig(scenario: Scenario) -> Callable[[Any], None]:
    """Make a test method of a scenario."""

    def test(self: ExecutorContract) -> None:
        async def main() -> None:
            async with self.open_rig() as rig:
                await scenario(self, rig)

        self.run(main())

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


async def _begin(executor: Executor, request: InferRequest) -> Ending:
    """Begin a request, and wait for what is said about it; as `execute` where it is not taken so."""
    answer: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
    told: list[Ending] = []

    def ended(ending: Ending) -> None:
        assert not told, "it is told twice"
        told.append(ending)
        if not answer.cancelled():
            answer.set_result(ending)
        elif isinstance(ending, Result):
            ending.release()

    stop = executor.begin(request, ended)
    assert not told, "it is told before it was begun"
    if stop is None:
        return await executor.execute(request)
    try:
        return await answer
    except asyncio.CancelledError:
        stop()
        stop()
        raise


class ExecutorContract:
    """The suite. Test classes derive from it."""

    timing: ClassVar[Timing] = Timing()

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a test to its end: on a real loop, or override with `run_virtual`."""
        asyncio.run(main)

    def open_rig(self) -> AbstractAsyncContextManager[Rig]:
        """Make a fresh executor that can serve all cases, and clean up behind it."""
        raise NotImplementedError

    begins: ClassVar[bool] = False
    """Whether requests are begun without a task, where the executor takes them so."""

    async def execute(self, rig: Rig, request: InferRequest) -> Ending:
        """Have the executor run a request."""
        return await (_begin(rig.executor, request) if self.begins else rig.executor.execute(request))

    async def answered(self, rig: Rig, within_ns: int = 0) -> Result:
        """Run a quick request and return its result."""
        request = rig.make(Case.QUICK, within_ns or self.timing.quick_ns)
        ending = await self.execute(rig, request)
        assert isinstance(ending, Result), ending
        assert rig.answers(request, ending), "the result is somebody else's"
        return ending

    async def expires(self, rig: Rig, case: Case) -> None:
        """Run a request that can't be in time, and check that it is answered at its deadline."""
        request = rig.make(case, self.timing.short_ns)
        ending = await self.execute(rig, request)
        late_ns = rig.clock.now_ns() - request.deadlines.total_ns
        assert isinstance(ending, Expired), ending
        assert -self.timing.early_ns <= late_ns <= self.timing.tolerance_ns, f"answered {late_ns / MS:.3f} ms late"

    @on_a_rig
    async def test_answers_by_the_deadline(self, rig: Rig) -> None:
        result = await self.answered(rig)
        assert result.placement is rig.executor.placement
        assert result.where
        assert result.version
        assert result.variant
        result.release()

    @on_a_rig
    async def test_marks_the_timeline_in_order(self, rig: Rig) -> None:
        before_ns = rig.clock.now_ns()
        request = rig.make(Case.QUICK, self.timing.quick_ns)
        ending = await self.execute(rig, request)
        assert isinstance(ending, Result), ending
        ending.release()
        timeline = request.timeline
        assert timeline.dispatched_ns is not None, "dispatched_ns is not marked"
        marks = [timeline.dispatched_ns, timeline.decoded_ns, timeline.started_ns, timeline.finished_ns]
        seen = [before_ns, *[mark for mark in marks if mark is not None], rig.clock.now_ns()]
        assert seen == sorted(seen), f"marks are out of order: {seen}"

    @on_a_rig
    async def test_expires_at_the_deadline_when_slow(self, rig: Rig) -> None:
        await self.expires(rig, Case.SLOW)

    @on_a_rig
    async def test_expires_at_the_deadline_when_stuck_and_serves_the_next(self, rig: Rig) -> None:
        if Case.STUCK in rig.cases:
            await self.expires(rig, Case.STUCK)
            (await self.answered(rig)).release()

    @on_a_rig
    async def test_a_deadline_that_has_passed_expires_at_once(self, rig: Rig) -> None:
        request = rig.make(Case.QUICK, -self.timing.short_ns)
        started_ns = rig.clock.now_ns()
        ending = await self.execute(rig, request)
        if isinstance(ending, Result):
            ending.release()
        assert isinstance(ending, (Expired, Refusal)), ending
        assert rig.clock.now_ns() - started_ns <= self.timing.tolerance_ns

    @on_a_rig
    async def test_late_results_are_never_delivered_as_anothers_answer(self, rig: Rig) -> None:
        for _ in range(3):
            await self.expires(rig, Case.SLOW)
            (await self.answered(rig)).release()
        await rig.quiet()
        assert rig.leased() == 0, "the result that came too late is still leased"

    @on_a_rig
    async def test_waits_for_a_late_result_where_that_is_accepted(self, rig: Rig) -> None:
        request = rig.make(Case.SLOW, self.timing.short_ns, accept_late=True)
        ending = await self.execute(rig, request)
        assert isinstance(ending, Result), ending
        assert rig.clock.now_ns() > request.deadlines.total_ns
        assert rig.answers(request, ending)
        ending.release()

    @on_a_rig
    async def test_cancelling_stops_the_work(self, rig: Rig) -> None:
        case = Case.STUCK if Case.STUCK in rig.cases else Case.SLOW
        task = asyncio.create_task(self.execute(rig, rig.make(case, self.timing.quick_ns)), name="cancelled")
        await asyncio.sleep(self.timing.short_ns / NS_PER_S)
        assert not task.done(), task.result()
        task.cancel()
        ended, _ = await asyncio.wait({task}, timeout=self.timing.quick_ns / NS_PER_S)
        assert ended, "it goes on although it was cancelled"
        assert task.cancelled(), "the cancellation was swallowed"
        await rig.quiet()
        assert rig.leased() == 0
        (await self.answered(rig)).release()

    @on_a_rig
    async def test_cancelling_before_it_starts_is_fine(self, rig: Rig) -> None:
        task = asyncio.create_task(self.execute(rig, rig.make(Case.QUICK, self.timing.quick_ns)), name="cancelled")
        task.cancel()
        await asyncio.wait({task}, timeout=self.timing.quick_ns / NS_PER_S)
        assert task.cancelled()
        await rig.quiet()
        assert rig.leased() == 0

    @on_a_rig
    async def test_a_failure_is_a_value_and_the_next_request_succeeds(self, rig: Rig) -> None:
        if Case.BROKEN in rig.cases:
            ending = await self.execute(rig, rig.make(Case.BROKEN, self.timing.quick_ns))
            assert isinstance(ending, Failure), ending
            assert ending.reason
            assert " " not in ending.reason, f"a reason is one stable word, not {ending.reason!r}"
            (await self.answered(rig)).release()

    @on_a_rig
    async def test_what_cannot_run_here_is_refused_with_a_reason(self, rig: Rig) -> None:
        if Case.UNKNOWN in rig.cases:
            request = rig.make(Case.UNKNOWN, self.timing.quick_ns)
            estimate = rig.executor.estimate(request)
            assert isinstance(estimate, Refusal), estimate
            assert estimate.detail, "a refusal says why, for people"
            ending = await self.execute(rig, request)
            assert isinstance(ending, Refusal), ending
            assert ending.reason is estimate.reason

    @on_a_rig
    async def test_estimating_has_no_side_effects(self, rig: Rig) -> None:
        request = rig.make(Case.QUICK, self.timing.quick_ns)
        estimates = [rig.executor.estimate(request) for _ in range(50)]
        timeline = request.timeline
        assert timeline.dispatched_ns is timeline.started_ns is timeline.finished_ns is None
        assert rig.leased() == 0
        for estimate in estimates:
            assert isinstance(estimate, Estimate), estimate
            assert 0 < estimate.p50_ns <= estimate.p99_ns
            assert estimate.wait_ns >= 0
            if rig.executor.placement is Placement.LOCAL:
                assert estimate.cores >= 1
                assert estimate.lanes >= 1
            else:
                assert estimate.cores == 0, "remote work takes none of this machine's cores"
        (await self.answered(rig)).release()

    @on_a_rig
    async def test_results_are_leased_until_released(self, rig: Rig) -> None:
        first = await self.answered(rig)
        held = rig.leased()
        assert held in {0, 1}
        second = await self.answered(rig)
        assert rig.leased() == 2 * held, "a result gave up its memory before it was released"
        first.release()
        first.release()
        assert rig.leased() == held, "releasing twice must give back once"
        second.release()
        assert rig.leased() == 0

    @on_a_rig
    async def test_requests_at_once_get_their_own_answers(self, rig: Rig) -> None:
        requests = [rig.make(Case.QUICK, self.timing.quick_ns) for _ in range(4)]
        endings = await asyncio.gather(*(self.execute(rig, request) for request in requests))
        for request, ending in zip(requests, endings, strict=True):
            if isinstance(ending, Result):
                assert rig.answers(request, ending), "a result went to the wrong request"
                ending.release()
            else:
                assert isinstance(ending, Refusal), ending
        assert any(isinstance(ending, Result) for ending in endings), endings
        await rig.quiet()
        assert rig.leased() == 0

    @on_a_rig
    async def test_a_stuck_request_does_not_stop_the_loop(self, rig: Rig) -> None:
        case = Case.STUCK if Case.STUCK in rig.cases else Case.SLOW
        task = asyncio.create_task(self.execute(rig, rig.make(case, self.timing.short_ns)), name="stuck")
        for _ in range(5):
            asked_ns = rig.clock.now_ns()
            await asyncio.sleep(self.timing.short_ns / 10 / NS_PER_S)
            late_ns = rig.clock.now_ns() - asked_ns - self.timing.short_ns // 10
            assert late_ns <= self.timing.tolerance_ns, "the executor blocked the event loop"
        assert isinstance(await task, Expired)
