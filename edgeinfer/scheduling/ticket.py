"""What a caller holds of its request, and what the scheduler remembers about it until it has ended.

Owns the one-time hand-over of the outcome. Which outcome it is, the scheduler says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from edgeinfer.errors import InternalError
from edgeinfer.request import Failure, InferRequest, Outcome, Placement, Refusal


class Stage(Enum):
    """Where a request is in the scheduler."""

    DECIDING = auto()
    """Being placed; never left so at the end of a loop step."""
    WAITING = auto()
    """In the deadline queue, for this machine."""
    OUTBOUND = auto()
    """Going next door with the dispatcher's next round."""
    RUNNING = auto()
    """With an executor."""
    ENDED = auto()
    """Its outcome is out."""


class PendingTicket:
    """A submitted request. Loop thread only."""

    __slots__ = ("_cancel", "_is_claimed", "_outcome", "_waiters", "request", "stage", "tried")

    def __init__(self, request: InferRequest, cancel: Callable[[PendingTicket], None]) -> None:
        self.request = request
        self.stage = Stage.DECIDING
        self.tried: dict[Placement, Refusal | Failure] = {}
        """Where it has been already, and what was said there."""
        self._outcome: Outcome | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._cancel = cancel
        self._is_claimed = False

    async def outcome(self) -> Outcome:
        """Return the outcome, at the total deadline at the latest (later only for requests that accept that).

        May be awaited by several, and again. Whoever stops awaiting should `cancel`.
        """
        if self._outcome is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
            assert self._outcome is not None, "whoever waits is woken with the outcome"
        else:
            await asyncio.sleep(0)  # a caller that goes on and on with what is refused at once must not stop the loop
        self._is_claimed = True
        return self._outcome

    def cancel(self) -> None:
        """Say that nobody waits any more: queued and running work stops, a result that nobody took is released."""
        if self._outcome is None:
            self._cancel(self)
        elif not self._is_claimed and self._outcome.result is not None:
            self._outcome.result.release()

    def end(self, outcome: Outcome) -> None:
        """Hand the outcome over.

        Raises:
            InternalError: it has ended before, which is a bug.
        """
        if self.stage is Stage.ENDED:
            raise InternalError(f"request {self.request.id} ended twice, the second time as {outcome.kind}")
        self.stage = Stage.ENDED
        self._outcome = outcome
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
