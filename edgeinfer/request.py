"""The vocabulary of a request's life: what is asked, what becomes of it, and when each step happened.

Owns the closed sets of outcomes and refusals, and `conclude`, the one function that makes an `Outcome`.
Who decides is elsewhere (`scheduling`); how tensors look on a wire is `oip`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

from edgeinfer.errors import InternalError


class DataScope(IntEnum):
    """How far a request's data may travel. Ordered: a wider scope includes the narrower."""

    DEVICE = 0
    SITE = 1
    ANY = 2


class Reason(StrEnum):
    """Why a request was refused. A closed set: each has a counter."""

    DEADLINE_UNREACHABLE = "deadline_unreachable"
    QUEUE_FULL = "queue_full"
    DISPLACED = "displaced"
    SUPERSEDED = "superseded"
    MEMORY = "memory"
    THERMAL = "thermal"
    MODEL_UNAVAILABLE = "model_unavailable"
    QUARANTINED = "quarantined"
    RUNTIME_UNUSABLE = "runtime_unusable"
    INPUT_INVALID = "input_invalid"
    DATA_SCOPE = "data_scope"
    COST = "cost"
    DRAINING = "draining"


class OutcomeKind(StrEnum):
    """How a request ended. Every request ends in exactly one."""

    OK = "ok"
    LATE = "late"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


class Placement(StrEnum):
    """Where a request ran, or would have run."""

    LOCAL = "local"
    NEARBY = "nearby"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not, or will not be, run: the reason is counted, the detail is for people."""

    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong while a request ran: `reason` is a short stable word, `detail` is for people."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline passed before an executor could finish; whatever it was doing is being stopped."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Payload:
    """An Open Inference Protocol body: a JSON header, then the binary tensors it describes.

    The same bytes travel over the UNIX socket, MQTT and the worker channel; `oip` reads and writes them.
    `tensors` are the raw buffers in the header's order, not copied: they may be slots of shared memory,
    so they are only valid as long as whoever made the payload says.
    """

    header: bytes
    tensors: tuple[bytes | bytearray | memoryview, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of header and tensors together."""
        return len(self.header) + sum(memoryview(tensor).nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Absolute monotonic deadlines in nanoseconds; `total_ns` always holds, the others when set."""

    total_ns: int
    queue_ns: int | None = None
    """Latest start: still waiting then means expired."""
    first_result_ns: int | None = None
    """Latest first result (first token, for a language model)."""

    @property
    def start_by_ns(self) -> int:
        """The moment after which a request that still waits has expired."""
        return self.total_ns if self.queue_ns is None else min(self.queue_ns, self.total_ns)


@dataclass(slots=True)
class Timeline:
    """Monotonic nanoseconds of each step of one request; None where it has not happened.

    Owned by whoever holds the request at the time: it is handed on, never shared.
    """

    received_ns: int
    captured_ns: int | None = None
    """When the frame was taken, for requests that come from a source."""
    admitted_ns: int | None = None
    dispatched_ns: int | None = None
    decoded_ns: int | None = None
    started_ns: int | None = None
    first_result_ns: int | None = None
    finished_ns: int | None = None
    postprocessed_ns: int | None = None
    delivered_ns: int | None = None
    cpu_ns: int | None = None
    """CPU time that the run took, over all threads, decoding included (a duration); known of local runs only."""
    network_ns: int | None = None
    """Time on the wire, both ways together, when the request ran next door (a duration)."""


_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One inference that somebody wants, by a deadline.

    The request is immutable; only its `timeline` is written to as it travels.
    """

    model: str
    payload: Payload
    deadlines: Deadlines
    timeline: Timeline
    version: str | None = None
    """Pinned model version, or None for the active one."""
    priority: int = 0
    """Higher runs first among equal deadlines, and is evicted and displaced last."""
    scope: DataScope = DataScope.DEVICE
    firm: bool = True
    """Firm: admission is a promise. Not firm (displaceable): may be dropped until it starts."""
    accept_late: bool = False
    """Deliver the result even after the deadline, as `late`."""
    stream: str | None = None
    """Who this belongs to (a loop, a client's sequence): newer requests supersede waiting older ones
    of the same stream when not firm, and a stateful model keeps its state by it."""
    sequence_start: bool = False
    """First of a sequence: a stateful model starts from zeros."""
    id: int = field(default_factory=_ids.__next__)

    @property
    def origin(self) -> str:
        """What reports group this request by: its loop, or its model.

        Streams that callers name (they hold a colon, loops never do) are as many as callers like, so they don't count.
        """
        return self.model if self.stream is None or ":" in self.stream else self.stream


class Lease(Protocol):
    """Holds a result's memory until its reader is done."""

    def release(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        ...


@dataclass(slots=True)
class Result:
    """A model's answer. The payload's buffers are valid until `release`."""

    payload: Payload
    placement: Placement
    where: str
    """The device or peer that computed it."""
    version: str
    variant: str
    digest: str = ""
    """Bundle digest of the model that computed it."""
    lease: Lease | None = None

    def release(self) -> None:
        """Give the result's memory back; the payload must not be read afterwards."""
        if self.lease is not None:
            self.lease.release()


Ending = Result | Refusal | Failure | Expired | None
"""What an executor or a decision can say about a request; None means that its caller went away."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The one way in which a request ended. Only `conclude` makes these."""

    request: InferRequest
    kind: OutcomeKind
    reason: str
    """Empty for `ok`; a `Reason` for `rejected`; a short word for `failed`; else where it was caught."""
    detail: str
    placement: Placement
    result: Result | None
    ended_ns: int

    @property
    def latency_ns(self) -> int:
        """From reception (capture, for frames) to the end."""
        timeline = self.request.timeline
        return self.ended_ns - (timeline.received_ns if timeline.captured_ns is None else timeline.captured_ns)

    @property
    def phases_ns(self) -> dict[str, int]:
        """How long each phase took: `wait` (until it was given to an executor), `decode`, `run`, `post`, `network`.

        Phases that didn't happen, or that nobody told us about, are missing.
        """
        timeline = self.request.timeline
        began_ns = timeline.received_ns if timeline.captured_ns is None else timeline.captured_ns
        spans = {
            "wait": (began_ns, timeline.dispatched_ns),
            "decode": (timeline.dispatched_ns, timeline.decoded_ns),
            "run": (timeline.started_ns, timeline.finished_ns),
            "post": (timeline.finished_ns, timeline.postprocessed_ns),
            "network": (0, timeline.network_ns),
        }
        return {
            phase: end_ns - start_ns
            for phase, (start_ns, end_ns) in spans.items()
            if start_ns is not None and end_ns is not None
        }

    @property
    def in_time(self) -> bool:
        """Whether the answer came by its deadline."""
        return self.kind is OutcomeKind.OK


def conclude(request: InferRequest, ending: Ending, *, now_ns: int, placement: Placement = Placement.NONE) -> Outcome:
    """Make the outcome of `request`: the only place where one is made.

    A result after the total deadline is `late` when the caller accepts that, else `expired`, and then its
    memory is given back here. `placement` says where it was running when there is no result to tell it.
    """
    match ending:
        case Result():
            at = ending.placement
            if now_ns <= request.deadlines.total_ns:
                return Outcome(request, OutcomeKind.OK, "", "", at, ending, now_ns)
            if request.accept_late:
                return Outcome(request, OutcomeKind.LATE, "finished", "", at, ending, now_ns)
            ending.release()
            late_ms = (now_ns - request.deadlines.total_ns) / 1e6
            kind, reason, detail = (
                OutcomeKind.EXPIRED,
                "finished",
                f"the result came {late_ms:.1f} ms after the deadline",
            )
        case Refusal(why, detail):
            kind, reason = OutcomeKind.REJECTED, why.value
        case Failure(reason, detail):
            kind = OutcomeKind.FAILED
        case Expired(detail):
            kind = OutcomeKind.EXPIRED
            reason = "queued" if request.timeline.dispatched_ns is None else "running"
        case None:
            kind, reason, detail = OutcomeKind.CANCELLED, "caller_gone", ""
        case _:
            raise InternalError(f"request {request.id} ended in an unknown way: {ending!r}")
    return Outcome(request, kind, reason, detail, placement, None, now_ns)


Submit = Callable[[InferRequest], "Ticket"]


class Ticket(Protocol):
    """A submitted request: await its outcome, or cancel it."""

    async def outcome(self) -> Outcome:
        """Return the outcome, at the total deadline at the latest."""
        ...

    def cancel(self) -> None:
        """Say that nobody waits any more; queued and running work stops."""
        ...
