"""Run one inference loop: take the newest frame once per period, ask for its inference, hand the outcome to the sinks.

Frames are taken on a grid of periods. A loop that overran goes on with the next point of the grid: points that passed
are counted as missed, never made up for. A frame's deadline counts from its capture; one that is already too old is
dropped and counted before it costs anything. How many requests may be under way at once is bounded, of a stateful model
one, so that its frames stay in order; meanwhile the newest frame waits in the source.

What is decided about a request after `submit` is the scheduler's. The loop never ends because of a frame, a source
or a sink that fails: it counts, reports and goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from edgeinfer import oip
from edgeinfer.artifact.contract import check_inputs
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.clock import NS_PER_S, Clock, sleep_until
from edgeinfer.config import LoopSection
from edgeinfer.pipeline.frame import Frame, Source, SourceError, SourceSnapshot
from edgeinfer.pipeline.record import Delivery
from edgeinfer.pipeline.sink import Sink, SinkSnapshot
from edgeinfer.request import Deadlines, InferRequest, Outcome, OutcomeKind, Submit, Ticket, Timeline, conclude

log = logging.getLogger(__name__)

_RETRY_NS = NS_PER_S
_LONGEST_RETRY_NS = 30 * NS_PER_S
_MOST_OUTSTANDING = 16
"""However long the deadline: each holds a frame's memory."""
_MOST_FIRM = 2
"""One that runs and one that is next: frames that are promises don't supersede each other, so more would queue."""
_WENT_WELL = frozenset({OutcomeKind.OK, OutcomeKind.LATE})
"""After any other ending a stateful model lacks the state that the next frame would need."""


@dataclass(frozen=True, slots=True)
class LoopSnapshot:
    """How a loop stands. What became of its requests is in the accounting, under the loop's name."""

    name: str
    model: str
    enabled: bool
    period_ns: int
    deadline_ns: int
    outstanding: int
    submitted: int
    missed: int
    """Points of the grid that passed while the loop could not take a frame."""
    stale: int
    """Frames that were past their deadline before they were asked about."""
    invalid: int
    """Frames that do not fit the model's input."""
    sequences_lost: int
    """Times that a stateful model had to start again because a request did not end well."""
    finished: bool
    """Whether the source has no more frames."""
    source: SourceSnapshot
    sinks: tuple[SinkSnapshot, ...]


def max_outstanding(period_ns: int, deadline_ns: int) -> int:
    """Return how many displaceable frames may be under way: as many as begin before the first one's deadline.

    Here at most one of them waits: a newer frame supersedes it, and then it goes next door or is refused.
    """
    return max(2, min(_MOST_OUTSTANDING, -(-deadline_ns // period_ns)))


class InferenceLoop:
    """One loop of the service. Loop thread only; `run` owns its tasks."""

    def __init__(
        self,
        section: LoopSection,
        *,
        source: Source,
        sinks: Sequence[Sink],
        submit: Submit,
        manifest: Callable[[], Manifest | None],
        clock: Clock,
        stamp: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Make a loop.

        `manifest` returns the model's manifest as it is now, None while it is not installed. `stamp` says when a
        record was made, by which clocks.
        """
        self._section = section
        self._source = source
        self._sinks = tuple(sinks)
        self._submit = submit
        self._manifest = manifest
        self._clock = clock
        self._stamp = stamp
        self._enabled = section.enabled
        self._period_ns: int = section.period
        self._deadline_ns: int = section.deadline
        self._grid_ns = clock.now_ns() - section.period
        """The grid's last point that was used; the next is a period later."""
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._outstanding: dict[int, InferRequest] = {}
        self._some_ended = asyncio.Event()
        self._sequence_broken = True
        self._submitted = self._missed = self._stale = self._invalid = self._sequences_lost = 0
        self._finished = False

    @property
    def name(self) -> str:
        """The loop's name in the config."""
        return self._section.name

    def configure(
        self, *, enabled: bool | None = None, period_ns: int | None = None, deadline_ns: int | None = None
    ) -> None:
        """Change the loop while it runs, from its next frame on; None leaves a setting as it is.

        Raises:
            ValueError: a period or deadline below 1 ms. Nothing was changed.
        """
        for what, value_ns in (("period", period_ns), ("deadline", deadline_ns)):
            if value_ns is not None and value_ns < 1_000_000:
                raise ValueError(f"loop {self.name}: a {what} of {value_ns / 1e6:g} ms is below 1 ms")
        self._enabled = self._enabled if enabled is None else enabled
        self._period_ns = self._period_ns if period_ns is None else period_ns
        self._deadline_ns = self._deadline_ns if deadline_ns is None else deadline_ns
        self._changed.set()

    def stop(self) -> None:
        """Take no more frames; `run` returns once what is outstanding has ended and was delivered."""
        self._stopping.set()

    def snapshot(self) -> LoopSnapshot:
        """Return how it stands."""
        return LoopSnapshot(
            name=self.name,
            model=self._section.model,
            enabled=self._enabled,
            period_ns=self._period_ns,
            deadline_ns=self._deadline_ns,
            outstanding=len(self._outstanding),
            submitted=self._submitted,
            missed=self._missed,
            stale=self._stale,
            invalid=self._invalid,
            sequences_lost=self._sequences_lost,
            finished=self._finished,
            source=self._source.snapshot(),
            sinks=tuple(sink.snapshot() for sink in self._sinks),
        )

    async def run(self) -> None:
        """Run until the source is over or `stop`; cancelling cancels what is outstanding."""
        name = self.name
        async with asyncio.TaskGroup() as places:
            writers = [places.create_task(sink.run(), name=f"sink[{name}]") for sink in self._sinks]
            async with asyncio.TaskGroup() as following:
                feeding = following.create_task(self._source.run(), name=f"source[{name}]")
                pumping = following.create_task(self._pump(following), name=f"pump[{name}]")
                stopping = following.create_task(self._stopping.wait(), name=f"stop[{name}]")
                await asyncio.wait({pumping, stopping}, return_when=asyncio.FIRST_COMPLETED)
                for task in (pumping, stopping, feeding):
                    task.cancel()
            for task in writers:
                task.cancel()  # they pass on what waits before they end

    async def _pump(self, following: asyncio.TaskGroup) -> None:
        """Take a frame per period and ask for its inference, until there are no more."""
        while True:
            await self._next_point()
            due_ns = self._grid_ns + self._period_ns
            await self._room()
            self._missed += max(0, (self._clock.now_ns() - due_ns) // self._period_ns)
            frame = await self._take()
            if frame is None:
                self._finished = True
                log.info("loop finished loop=%s submitted=%d", self.name, self._submitted)
                return
            now_ns = self._clock.now_ns()
            self._grid_ns = due_ns + max(0, (now_ns - due_ns) // self._period_ns) * self._period_ns
            if self._enabled:
                self._ask(frame, now_ns, following)

    async def _next_point(self) -> None:
        """Wait for the next point of the grid, for as long as the loop is disabled too."""
        while True:
            self._changed.clear()
            left_ns = self._grid_ns + self._period_ns - self._clock.now_ns()
            if self._enabled and left_ns <= 0:
                return
            enabled = self._enabled
            with suppress(TimeoutError):
                async with asyncio.timeout(left_ns / NS_PER_S if enabled else None):
                    await self._changed.wait()
            if not enabled:
                self._grid_ns = self._clock.now_ns() - self._period_ns  # due at once when it is enabled again

    async def _room(self) -> None:
        """Wait until another request may be outstanding."""
        while not self._has_room():
            self._some_ended.clear()
            await self._some_ended.wait()

    def _has_room(self) -> bool:
        manifest = self._manifest()
        if manifest is not None and manifest.stateful:
            return not self._outstanding
        if self._section.firm:
            return len(self._outstanding) < _MOST_FIRM
        return len(self._outstanding) < max_outstanding(self._period_ns, self._deadline_ns)

    async def _take(self) -> Frame | None:
        """Return the newest frame; ask a source that fails again, less and less often."""
        retry_ns, said = _RETRY_NS, ""
        while True:
            try:
                return await self._source.next_frame()
            except SourceError as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("source failed loop=%s problem=%r", self.name, said)
            await sleep_until(self._clock.now_ns() + retry_ns, self._clock)
            retry_ns = min(2 * retry_ns, _LONGEST_RETRY_NS)

    def _ask(self, frame: Frame, now_ns: int, following: asyncio.TaskGroup) -> None:
        """Submit a frame that is still worth it."""
        deadline_ns = frame.captured_ns + self._deadline_ns
        if now_ns >= deadline_ns:
            self._stale += 1
            self._sequence_broken = True
            return
        manifest = self._manifest()
        request = self._request(frame, manifest, now_ns, deadline_ns)
        header = oip.request_header(request.payload)
        refusal = None if manifest is None else check_inputs(manifest, header, request.payload)
        if refusal is not None:
            self._invalid += 1
            self._deliver(frame, conclude(request, refusal, now_ns=now_ns))
            return
        self._submitted += 1
        self._sequence_broken = False
        self._outstanding[request.id] = request
        ticket = self._submit(request)
        following.create_task(self._follow(ticket, request, frame), name=f"loop[{self.name}]-{request.id}")

    def _request(self, frame: Frame, manifest: Manifest | None, now_ns: int, deadline_ns: int) -> InferRequest:
        section = self._section
        input_name = section.input or (manifest.inputs[0].name if manifest else "input")
        return InferRequest(
            model=section.model,
            payload=frame.payload(input_name),
            deadlines=Deadlines(deadline_ns),
            timeline=Timeline(received_ns=now_ns, captured_ns=frame.captured_ns),
            priority=section.priority,
            scope=section.data_scope,
            firm=section.firm,
            stream=section.name,
            sequence_start=frame.sequence_start or self._sequence_broken,
        )

    async def _follow(self, ticket: Ticket, request: InferRequest, frame: Frame) -> None:
        """Wait for one outcome and deliver it; a loop that is cancelled cancels its requests."""
        try:
            outcome = await ticket.outcome()
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        finally:
            del self._outstanding[request.id]
            self._some_ended.set()
        manifest = self._manifest()
        if outcome.kind not in _WENT_WELL and manifest is not None and manifest.stateful:
            self._sequences_lost += 1
            self._sequence_broken = True
        self._deliver(frame, outcome)

    def _deliver(self, frame: Frame, outcome: Outcome) -> None:
        """Hand an outcome to every sink and give its memory back."""
        outcome.request.timeline.delivered_ns = self._clock.now_ns()
        delivery = Delivery(self.name, frame.name, outcome, self._stamp)
        try:
            for sink in self._sinks:
                sink.deliver(delivery)
        finally:
            if outcome.result is not None:
                outcome.result.release()
