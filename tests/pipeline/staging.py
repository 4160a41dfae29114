"""What the pipeline's tests share: inline storage, scripted sources and sinks, a submit in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from edgeinfer import oip
from edgeinfer.clock import NS_PER_S, LoopClock
from edgeinfer.pipeline.frame import Frame, NewestFrame, SourceError, SourceSnapshot
from edgeinfer.pipeline.record import Delivery
from edgeinfer.pipeline.sink import SinkSnapshot
from edgeinfer.request import Ending, InferRequest, Outcome, Placement, Result, conclude

MS = 1_000_000


class Inline(Executor):
    """A storage thread that does its work at once, in the caller."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments, **keywords))
        except BaseException as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


def loop_clock() -> LoopClock:
    return LoopClock(asyncio.get_running_loop())


class Camera:
    """A source that makes a frame every `period_s` (its own, not the loop's), as JPEG."""

    def __init__(self, period_s: float, *, content_type: str = "image/jpeg", stop_after: int | None = None) -> None:
        self.newest = NewestFrame()
        self.period_s = period_s
        self.content_type = content_type
        self.stop_after = stop_after
        self.made = 0

    async def run(self) -> None:
        clock = loop_clock()
        while self.stop_after is None or self.made < self.stop_after:
            self.newest.put(Frame(b"x", self.content_type, clock.now_ns(), f"#{self.made}"))
            self.made += 1
            await asyncio.sleep(self.period_s)

    async def next_frame(self) -> Frame | None:
        return await self.newest.take()

    def snapshot(self) -> SourceSnapshot:
        return SourceSnapshot(self.newest.taken, self.newest.replaced)


class OnDemand:
    """A source that has a fresh frame whenever it is asked, `count` of them; may fail first."""

    def __init__(self, count: int | None = None, *, failures: list[str] | None = None, age_ns: int = 0) -> None:
        self.count = count
        self.failures = failures or []
        self.age_ns = age_ns
        self.asked_ns: list[int] = []

    async def run(self) -> None:
        return

    async def next_frame(self) -> Frame | None:
        now_ns = loop_clock().now_ns()
        self.asked_ns.append(now_ns)
        if self.failures:
            raise SourceError(self.failures.pop(0))
        if self.count is not None and len(self.asked_ns) > self.count:
            return None
        return Frame(b"x", "image/jpeg", now_ns - self.age_ns, f"#{len(self.asked_ns)}")

    def snapshot(self) -> SourceSnapshot:
        return SourceSnapshot(len(self.asked_ns), 0)


@dataclass
class Lease:
    released: int = 0

    def release(self) -> None:
        self.released += 1


def answer(lease: Lease | None = None, outputs: dict[str, int] | None = None) -> Result:
    """Return a result with zero tensors of these sizes in bytes."""
    tensors = [(name, "UINT8", [size], bytes(size)) for name, size in (outputs or {"boxes": 4}).items()]
    payload = oip.encode_response(tensors, parameters={"label": "cat", "score": 0.9})
    return Result(payload, Placement.LOCAL, "dev-1", "1.0.0", "fp32", "d" * 64, lease)


@dataclass
class Run:
    request: InferRequest
    ends: asyncio.Future[Outcome]
    cancelled: bool = False

    async def outcome(self) -> Outcome:
        return await asyncio.shield(self.ends)

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Machine:
    """A `Submit` that runs each request for `run_s`, up to `slots` at once; older waiting ones are superseded."""

    run_s: float
    slots: int = 1
    script: Callable[[InferRequest], Ending] = lambda _: answer()
    runs: list[Run] = field(default_factory=list)
    busy: int = 0

    def __call__(self, request: InferRequest) -> Run:
        from edgeinfer.request import Reason, Refusal

        run = Run(request, asyncio.get_running_loop().create_future())
        if not request.firm:
            for other in self.runs[-10:]:
                if other.request.timeline.dispatched_ns is None and not other.ends.done():
                    self._end(other, Refusal(Reason.SUPERSEDED))
        self.runs.append(run)
        self._start()
        return run

    @property
    def started_ns(self) -> list[int]:
        return [
            run.request.timeline.dispatched_ns for run in self.runs if run.request.timeline.dispatched_ns is not None
        ]

    def _start(self) -> None:
        for run in self.runs[-10:]:
            if self.busy < self.slots and run.request.timeline.dispatched_ns is None and not run.ends.done():
                self.busy += 1
                run.request.timeline.dispatched_ns = loop_clock().now_ns()
                asyncio.get_running_loop().call_later(self.run_s, self._finish, run)

    def _finish(self, run: Run) -> None:
        self.busy -= 1
        self._end(run, self.script(run.request))
        self._start()

    def _end(self, run: Run, ending: Ending) -> None:
        run.ends.set_result(conclude(run.request, ending, now_ns=loop_clock().now_ns()))


class Notebook:
    """A sink that remembers what it was given, and what it was given it with."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.frames: list[str] = []
        self.ages_ns: list[int] = []
        self.at_ns: list[int] = []

    def deliver(self, delivery: Delivery) -> None:
        self.outcomes.append(delivery.outcome)
        self.frames.append(delivery.frame)
        captured_ns = delivery.outcome.request.timeline.captured_ns
        assert captured_ns is not None
        self.ages_ns.append(loop_clock().now_ns() - captured_ns)
        self.at_ns.append(loop_clock().now_ns())

    async def run(self) -> None:
        return

    def snapshot(self) -> SinkSnapshot:
        return SinkSnapshot("notebook", len(self.outcomes), 0)


__all__ = ["MS", "NS_PER_S", "Camera", "Inline", "Lease", "Machine", "Notebook", "OnDemand", "answer", "loop_clock"]
