"""The one seam between deciding and running: local, remote and fake executors are the same behind it.

`tests/execution/executor_contract.py` holds every implementation to this page. A scheduler needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from edgeinfer.request import Ending, Expired, Failure, InferRequest, Placement, Refusal, Result
from edgeinfer.worker.flight import WORKER_LOST

NOT_BEGUN: Final = WORKER_LOST
"""`Failure.reason` of a run whose worker died before it began."""

Stop = Callable[[], None]
"""Stops a run that was begun. Afterwards, and when it has ended, calling it does nothing."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a request would take on an executor from dispatch to result, from what was observed there."""

    p50_ns: int
    p99_ns: int
    wait_ns: int = 0
    """Work ahead of it inside the executor (a busy worker, a peer's queue), on top of the percentiles."""
    cores: int = 1
    """CPU cores of this machine that it keeps busy; 0 for remote work."""
    lanes: int = 1
    """Requests of the same model that can run here at once (workers): the scheduler holds back what would only wait
    for a busy one, so that other models can use the cores meanwhile. Of no meaning for remote work."""
    is_guess: bool = False
    """Whether nobody has ever measured what it says: who would be late by a guess may still be tried."""

    @property
    def finish_p99_ns(self) -> int:
        """Wait and run together, pessimistically: what promises are made with."""
        return self.wait_ns + self.p99_ns


class Executor(Protocol):
    """Runs requests somewhere. Loop thread only."""

    @property
    def placement(self) -> Placement:
        """Local or nearby."""
        ...

    def estimate(self, request: InferRequest) -> Estimate | Refusal:
        """Return what running `request` now would take, or why it can't run here now.

        Cheap, without side effects, and never waits. A refusal here is final for this placement at this moment
        (model missing, quarantined, link down, circuit open, data scope), never a guess about the deadline.
        """
        ...

    def begin(self, request: InferRequest, ended: Callable[[Ending], None], *, behind: bool = False) -> Stop | None:
        """Run `request` as `execute` does, without a task, where nothing has to be waited for before it starts.

        Return what stops it, or None, with nothing done, when that takes `execute`. `ended` is called once, with what
        `execute` would return: never before this returns, nor after a stop. It may begin the next run, and it must not
        raise. This is for runs so short that the turns of a task cost more than they do.

        With `behind` it is sent to a worker that has one run of the same model under way, and begins when that has
        ended. A run whose worker dies before it began ends `Failure(NOT_BEGUN)`, and may be run again.
        """
        ...

    async def execute(self, request: InferRequest) -> Result | Refusal | Failure | Expired:
        """Run `request` and return how it ended; never raise for anything that can happen to a request.

        Returns `Expired` at `request.deadlines.total_ns` (not later than the loop can wake up), whatever the worker
        or peer is doing; what still runs is stopped behind the caller's back and its result is never delivered as
        anyone's answer. Exception: with `request.accept_late` it keeps waiting, for as long as it pays.
        When the awaiting task is cancelled the work stops too. Marks `request.timeline` from `dispatched_ns` on.
        A `Result` is leased: its receiver must `release` it.
        """
        ...
