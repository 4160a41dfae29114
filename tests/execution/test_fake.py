"""The fake executor keeps the contract that its users rely on, on virtual and on real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from edgeinfer.clock import LoopClock
from edgeinfer.request import Deadlines, Failure, InferRequest, Payload, Placement, Reason, Refusal, Result, Timeline
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

    @asynccontextmanager
    async def open_rig(self) -> AsyncIterator[Rig]:
        clock = LoopClock(asyncio.get_running_loop())
        executor = FakeExecutor(clock, lambda request: _SCRIPTS[request.model], placement=self.placement)
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


class TestNearbyOnVirtualTime(TestOnVirtualTime):
    placement = Placement.NEARBY


class TestOnRealTime(FakeContract):
    timing = Timing(slow_ns=_SLOW_NS)
