"""A scheduler with scripted executors on virtual time: what every test of the scheduler starts from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.clock import NS_PER_S, Clock, LoopClock
from edgeinfer.limits import Limits, ThermalLevel
from edgeinfer.metrics import Accounting
from edgeinfer.request import (
    DataScope,
    Deadlines,
    InferRequest,
    Outcome,
    OutcomeKind,
    Payload,
    Placement,
    Reason,
    Refusal,
    Ticket,
    Timeline,
)  # fmt: skip
from edgeinfer.scheduling.scheduler import Scheduler
from tests.execution.fake import FakeExecutor, Script
from tests.virtual_time import run_virtual

MS = 1_000_000
ROUNDING_NS = 2_000
"""The virtual clock is a float of seconds."""


def limits(
    duty_cycle: float = 1.0,
    *,
    cpus: int = 64,
    level: ThermalLevel | None = None,
    reason: str = "zone cpu 81.2 C",
    clock_share: float = 1.0,
) -> Limits:
    """Limits as a governor would publish them."""
    level = level if level is not None else ThermalLevel.NOMINAL if duty_cycle >= 1.0 else ThermalLevel.WARM
    return Limits(level, frozenset(range(cpus)), duty_cycle, 1 << 30, clock_share=clock_share, reason=reason)


@dataclass
class World:
    """A running scheduler, and what it did."""

    scheduler: Scheduler
    local: FakeExecutor
    nearby: FakeExecutor | None
    clock: Clock
    accounting: Accounting
    scripts: dict[str, Script] = field(default_factory=dict)
    """By model; a model `12ms` needs no script."""
    outcomes: list[Outcome] = field(default_factory=list)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    keeps_results: bool = False
    """False: results are released as soon as they are seen."""

    def request(self, model: str, within_ms: float, *, queue_ms: float | None = None, **more: Any) -> InferRequest:
        """Make a request that is due `within_ms` from now."""
        now_ns = self.clock.now_ns()
        queue_ns = None if queue_ms is None else now_ns + round(queue_ms * MS)
        first_ms = more.pop("first_ms", None)
        first_ns = None if first_ms is None else now_ns + round(first_ms * MS)
        deadlines = Deadlines(now_ns + round(within_ms * MS), queue_ns, first_ns)
        more.setdefault("scope", DataScope.SITE)
        return InferRequest(model, Payload(b"{}"), deadlines, Timeline(now_ns), **more)

    def submit(self, model: str, within_ms: float, **more: Any) -> Ticket:
        """Submit a request that is due `within_ms` from now."""
        request = self.request(model, within_ms, **more)
        ticket = self.tickets[request.id] = self.scheduler.submit(request)
        return ticket

    async def sleep(self, ms: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(ms / 1000)

    def observe(self, outcome: Outcome) -> None:
        """Take an outcome, and prove the identity at this very moment."""
        self.outcomes.append(outcome)
        self.accounting.check()
        if outcome.result is not None and not self.keeps_results:
            outcome.result.release()

    def script(self, request: InferRequest) -> Script:
        """Return what becomes of a request; the model's name is its duration unless a script says otherwise."""
        return self.scripts.get(request.model) or Script(int(request.model.removesuffix("ms")) * MS)

    def kinds(self) -> list[tuple[str, str]]:
        """Return the outcomes so far, as (kind, reason)."""
        return [(outcome.kind.value, outcome.reason) for outcome in self.outcomes]


@asynccontextmanager
async def world(
    *,
    cores: int = 1,
    queue_limit: int = 64,
    nearby_ms: int | None = None,
    nearby_slots: int = 1 << 30,
    begins: bool = False,
) -> AsyncIterator[World]:
    """Run a scheduler; `nearby_ms` is how long everything takes next door, None for no nearby service.

    `begins`: the local executor takes requests without a task.
    """
    clock = LoopClock(asyncio.get_running_loop())
    made: World

    def local_script(request: InferRequest) -> Script:
        return made.script(request)

    def nearby_script(request: InferRequest) -> Script:
        if request.scope is DataScope.DEVICE:
            return Script(estimate=Refusal(Reason.DATA_SCOPE, "the data may not leave the device"))
        script = made.scripts.get(f"nearby {request.model}")
        return script or Script((nearby_ms or 0) * MS, lanes=1 << 30)

    def observe(outcome: Outcome) -> None:
        made.observe(outcome)

    local = FakeExecutor(clock, local_script, begins=begins)
    nearby = FakeExecutor(clock, nearby_script, Placement.NEARBY, slots=nearby_slots) if nearby_ms is not None else None
    accounting = Accounting()
    scheduler = Scheduler(
        local=local,
        nearby=nearby,
        clock=clock,
        accounting=accounting,
        queue_limit=queue_limit,
        cores=cores,
        observe=observe,
    )
    made = World(scheduler, local, nearby, clock, accounting)
    task = asyncio.create_task(scheduler.run(), name="scheduler")
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        accounting.check()
        assert accounting.total.in_flight == 0
        assert len(made.outcomes) == accounting.total.received


def on_virtual_time(
    **arguments: Any,
) -> Callable[[Callable[[World], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """Make a test of a scenario in a world: with a local executor that needs tasks, and with one that needs none."""

    def decorate(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def test() -> None:
            async def main(*, begins: bool) -> None:
                async with world(**arguments, begins=begins) as w:
                    await scenario(w)

            run_virtual(main(begins=False))
            run_virtual(main(begins=True))

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return test

    return decorate


def check_punctual(outcome: Outcome) -> None:
    """Prove that an outcome came by its deadline."""
    if outcome.request.accept_late:
        return
    late_ns = outcome.ended_ns - max(outcome.request.deadlines.total_ns, outcome.request.timeline.received_ns)
    assert late_ns <= ROUNDING_NS, f"{outcome.kind} came {late_ns} ns after the deadline"


def busy_ns(executor: FakeExecutor, start_ns: int, end_ns: int) -> int:
    """Return the core-time that was used between two moments."""
    return sum(
        max(0, min(run.ended_ns, end_ns) - max(run.started_ns, start_ns)) * run.cores for run in executor.runs
    )  # fmt: skip


__all__ = [
    "MS", "NS_PER_S", "ROUNDING_NS", "DataScope", "OutcomeKind", "Reason", "Script", "World", "busy_ns",
    "check_punctual", "limits", "on_virtual_time", "world",
]  # fmt: skip
