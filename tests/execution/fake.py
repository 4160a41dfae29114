"""A scripted `Executor`: every request does what its script says, on virtual or real time.

Verified: `test_fake.py` holds it to the same contract as the real executors. Scripts can also *break* the contract
(`heeds_deadline`, `ignores_cancels`), to prove that a scheduler answers in time whatever an executor does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from edgeinfer.clock import NS_PER_S, Clock, sleep_until
from edgeinfer.execution.executor import Estimate, Stop
from edgeinfer.request import Ending, Expired, Failure, InferRequest, Payload, Placement, Reason, Refusal, Result

MS = 1_000_000
LATE_PATIENCE_NS = 1_000 * MS


@dataclass(frozen=True)
class Script:
    """What becomes of one request."""

    duration_ns: int = 10 * MS
    delay_ns: int = 0
    """Before that: the worker waits for a core that another process has."""
    hangs: bool = False
    ending: Refusal | Failure | None = None
    """None: a result."""
    estimate: Estimate | Refusal | None = None
    """None: the truth."""
    cores: int = 1
    lanes: int = 1
    heeds_deadline: bool = True
    ignores_cancels: int = 0
    """How many cancellations are swallowed before one is heeded."""


@dataclass
class FakeLease:
    owner: FakeExecutor
    held: bool = True

    def release(self) -> None:
        if self.held:
            self.held = False
            self.owner.leased -= 1


@dataclass(frozen=True)
class FakeRun:
    """One thing that the executor did."""

    request: InferRequest
    started_ns: int
    ended_ns: int
    cores: int


@dataclass(eq=False)
class _Begun:
    """A run without a task."""

    owner: FakeExecutor
    request: InferRequest
    script: Script
    ended: Callable[[Ending], None]
    started_ns: int | None = None
    is_over: bool = False
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self.script.heeds_deadline:
            patience_ns = LATE_PATIENCE_NS if self.request.accept_late else 0
            self._at(self.request.deadlines.total_ns + patience_ns, lambda: Expired("the script takes longer"))

    def start(self) -> None:
        self.started_ns = self.request.timeline.started_ns = self.owner.clock.now_ns()
        self.request.timeline.started_ns += self.script.delay_ns
        self.owner.active[self.request.model] += 1
        self.owner.started.append(self.request.id)
        lasts_ns = 1 << 60 if self.script.hangs else self.script.delay_ns + self.script.duration_ns
        self._at(self.started_ns + lasts_ns, lambda: self.owner.ending(self.request, self.script))

    def stop(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        for timer in self.timers:
            timer.cancel()
        model, owner = self.request.model, self.owner
        if self.started_ns is None:
            del owner.behind[model]
            return
        owner.active[model] -= 1
        owner.runs.append(FakeRun(self.request, self.started_ns, owner.clock.now_ns(), self.script.cores))
        if (follower := owner.behind.pop(model, None)) is not None:
            follower.start()

    def _at(self, at_ns: int, ending: Callable[[], Ending]) -> None:
        def end() -> None:
            self.stop()
            self.ended(ending())

        self.timers.append(self._loop.call_at(at_ns / NS_PER_S, end))


@dataclass
class FakeExecutor:
    clock: Clock
    script: Callable[[InferRequest], Script] = lambda _: Script()
    placement: Placement = Placement.LOCAL
    unavailable: Refusal | None = None
    """Set: nothing can run here at the moment (a link that is down)."""
    slots: int = 1 << 30
    """Requests at once; beyond that the estimate is a refusal, as for a peer with a bound on what is in flight."""
    begins: bool = False
    """Whether it takes requests without a task where it can."""
    behind: dict[str, _Begun] = field(default_factory=dict)
    """Who begins when the run of its model that is under way has ended."""
    leased: int = 0
    active: Counter[str] = field(default_factory=Counter)
    runs: list[FakeRun] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    waited_inside: int = 0
    """Requests that were sent while all lanes of their model were busy."""

    def estimate(self, request: InferRequest) -> Estimate | Refusal:
        script = self.script(request)
        if self.unavailable is not None:
            return self.unavailable
        if self.active.total() >= self.slots:
            return Refusal(Reason.QUEUE_FULL, f"{self.slots} requests are in flight")
        if script.estimate is not None:
            return script.estimate
        busy = self.active[request.model] >= script.lanes
        cores = script.cores if self.placement is Placement.LOCAL else 0
        wait_ns = script.duration_ns if busy and cores else 0
        return Estimate(script.duration_ns, script.duration_ns, wait_ns, cores, script.lanes)

    def begin(self, request: InferRequest, ended: Callable[[Ending], None], *, behind: bool = False) -> Stop | None:
        script, now_ns = self.script(request), self.clock.now_ns()
        refused = self.unavailable is not None or isinstance(script.estimate, Refusal)
        if not self.begins or refused or script.ignores_cancels or now_ns >= request.deadlines.total_ns:
            return None
        if self.active.total() >= self.slots or (behind and self.active[request.model] != 1):
            return None
        request.timeline.dispatched_ns = now_ns
        self.waited_inside += self.active[request.model] >= script.lanes and not behind
        begun = _Begun(self, request, script, ended)
        if behind:
            self.behind[request.model] = begun
        else:
            begun.start()
        return begun.stop

    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        script, now_ns = self.script(request), self.clock.now_ns()
        request.timeline.dispatched_ns, request.timeline.started_ns = now_ns, now_ns + script.delay_ns
        if self.unavailable is not None:
            return self.unavailable
        if isinstance(script.estimate, Refusal):
            return script.estimate
        if self.active.total() >= self.slots:
            return Refusal(Reason.QUEUE_FULL, f"{self.slots} requests are in flight")
        self.waited_inside += self.active[request.model] >= script.lanes
        self.active[request.model] += 1
        self.started.append(request.id)
        try:
            return await self._do(request, script, now_ns)
        finally:
            self.active[request.model] -= 1
            self.runs.append(FakeRun(request, now_ns, self.clock.now_ns(), script.cores))

    async def _do(self, request: InferRequest, script: Script, now_ns: int) -> Result | Refusal | Failure | Expired:
        end_ns = now_ns + (1 << 60 if script.hangs else script.delay_ns + script.duration_ns)
        stop_ns = request.deadlines.total_ns + (LATE_PATIENCE_NS if request.accept_late else 0)
        if script.heeds_deadline and end_ns > stop_ns:
            await sleep_until(stop_ns, self.clock)
            return Expired("the script takes longer")
        for ignored in range(script.ignores_cancels + 1):
            try:
                await sleep_until(end_ns, self.clock)
                break
            except asyncio.CancelledError:
                if ignored == script.ignores_cancels:
                    raise
        return self.ending(request, script)

    def ending(self, request: InferRequest, script: Script) -> Result | Refusal | Failure:
        request.timeline.finished_ns = self.clock.now_ns()
        if script.ending is not None:
            return script.ending
        self.leased += 1
        return Result(
            payload=request.payload if request.payload.header else Payload(b"{}"),
            placement=self.placement,
            where=f"fake-{self.placement}",
            version="1.0.0",
            variant="fake",
            lease=FakeLease(self),
        )
