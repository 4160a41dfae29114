"""The fake executor keeps the contract that its users rely on, on virtual and on real time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from edgeinfer.clock import LoopClock
from edgeinfer.execution.executor import Estimate
from edgeinfer.request import (
    Deadlines,
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
from tests.execution.executor_contract import MS, Case, ExecutorContract, Rig, Timing
from tests.execution.fake import FakeExecutor, Script
from tests.virtual_time import run_virtual

_SLOW_NS = 100 * MS
_SCRIPTS = {
    "quick": Script(1 * MS),
    "slow": Script(_SLOW_NS),
    "stuck": Script(hangs=True),
    "broken": Script(1 * MS, ending=Failure("crashed", "SIGSEGV")),
    "unknown": Script(estimate=Refusal(Reason.MODEL_UNAVAILABLE, "there is no model 'unknown'")),
}


class FakeContract(ExecutorContract):
    placement: ClassVar[Placement] = Placement.LOCAL
    kind: ClassVar[type[FakeExecutor]] = FakeExecutor
    scripts: ClassVar[dict[str, Script]] = _SCRIPTS

    @asynccontextmanager
    async def open_rig(self) -> AsyncIterator[Rig]:
        clock = LoopClock(asyncio.get_running_loop())
        executor = self.kind(clock, lambda request: self.scripts[request.model], placement=self.placement)
        executor.begins = self.begins
        made = 0

        def request(case: Case, deadlines: Deadlines, accept_late: bool) -> InferRequest:
            nonlocal made
            made += 1
            payload = Payload(f'{{"id": "{made}"}}'.encode())
            timeline = Timeline(clock.now_ns())
            return InferRequest(case.name.lower(), payload, deadlines, timeline, accept_late=accept_late)

        def answers(request: InferRequest, result: Result) -> bool:
            return result.payload.header == request.payload.header

        async def quiet() -> None:
            async with asyncio.timeout(1):
                while executor.active.total():
                    await asyncio.sleep(0.001)

        yield Rig(executor, clock, request, answers, lambda: executor.leased, quiet)


class TestOnVirtualTime(FakeContract):
    timing = Timing(slow_ns=_SLOW_NS, tolerance_ns=0)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        run_virtual(main)


class TestBegunOnVirtualTime(TestOnVirtualTime):
    begins = True


class TestNearbyOnVirtualTime(TestOnVirtualTime):
    placement = Placement.NEARBY


class TestOnRealTime(FakeContract):
    timing = Timing(slow_ns=_SLOW_NS)


# The suite must be able to fail: each of these breaks one promise, and the test of that promise finds it.


class Raises(FakeExecutor):
    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        ending = await super().execute(request)
        if isinstance(ending, Failure):
            raise OSError(ending.detail)
        return ending


class GivesOthersAnswers(FakeExecutor):
    last: Result | None = None

    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        ending = await super().execute(request)
        before, self.last = self.last, ending if isinstance(ending, Result) else None
        return before or ending


class EstimatesLoudly(FakeExecutor):
    def estimate(self, request: InferRequest) -> Estimate | Refusal:
        request.timeline.dispatched_ns = self.clock.now_ns()
        return super().estimate(request)


class LeasesForGood(FakeExecutor):
    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        ending = await super().execute(request)
        if isinstance(ending, Result):
            ending.lease = None
        return ending


class AnswersAnything(FakeExecutor):
    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        if request.model == "unknown":
            return Failure("unknown", "what is that?")
        return await super().execute(request)


class BlocksTheLoop(FakeExecutor):
    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        time.sleep(0.05)
        return await super().execute(request)


class ForgetsMarks(FakeExecutor):
    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        ending = await super().execute(request)
        request.timeline.dispatched_ns = None
        return ending


_DEAF = {**_SCRIPTS, "slow": Script(_SLOW_NS, heeds_deadline=False), "stuck": Script(9_000 * MS, heeds_deadline=False)}
_STUBBORN = {**_SCRIPTS, "stuck": Script(hangs=True, heeds_deadline=False, ignores_cancels=1)}


@pytest.mark.parametrize(
    ("promise", "kind", "scripts"),
    [
        ("test_expires_at_the_deadline_when_slow", FakeExecutor, _DEAF),
        ("test_expires_at_the_deadline_when_stuck_and_serves_the_next", FakeExecutor, _DEAF),
        ("test_a_deadline_that_has_passed_expires_at_once", FakeExecutor, {**_SCRIPTS, "quick": _DEAF["slow"]}),
        ("test_waits_for_a_late_result_where_that_is_accepted", FakeExecutor, {**_SCRIPTS, "slow": _SCRIPTS["stuck"]}),
        ("test_cancelling_stops_the_work", FakeExecutor, _STUBBORN),
        ("test_a_failure_is_a_value_and_the_next_request_succeeds", Raises, _SCRIPTS),
        ("test_requests_at_once_get_their_own_answers", GivesOthersAnswers, _SCRIPTS),
        ("test_late_results_are_never_delivered_as_anothers_answer", GivesOthersAnswers, _SCRIPTS),
        ("test_estimating_has_no_side_effects", EstimatesLoudly, _SCRIPTS),
        ("test_results_are_leased_until_released", LeasesForGood, _SCRIPTS),
        ("test_what_cannot_run_here_is_refused_with_a_reason", AnswersAnything, _SCRIPTS),
        ("test_marks_the_timeline_in_order", ForgetsMarks, _SCRIPTS),
    ],
)
def test_the_suite_finds_an_executor_that_breaks_this_promise(
    promise: str, kind: type[FakeExecutor], scripts: dict[str, Script]
) -> None:
    suite = type("Sabotaged", (TestOnVirtualTime,), {"kind": kind, "scripts": scripts})()
    with pytest.raises((AssertionError, OSError)):
        getattr(suite, promise)()


def test_the_suite_finds_an_executor_that_blocks_the_loop() -> None:
    suite = type("Sabotaged", (TestOnRealTime,), {"kind": BlocksTheLoop})()
    with pytest.raises(AssertionError):
        suite.test_a_stuck_request_does_not_stop_the_loop()
