"""Turn outcomes and documents into HTTP replies: one literal table says which status each ending has.

A refusal's body is JSON: `error` for people, `outcome` and `reason` as `edgeinfer.request` names them, for programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from edgeinfer import oip
from edgeinfer.gateway.intake import Form, too_large_for_json
from edgeinfer.gateway.turns import LEAST_ELEMENT_BYTES
from edgeinfer.request import Outcome, OutcomeKind, Payload, Reason, Refusal, Result

REFUSAL_STATUS: dict[Reason, int] = {
    Reason.DEADLINE_UNREACHABLE: 504,  # it would have been late, and is told before the deadline
    Reason.QUEUE_FULL: 429,
    Reason.DISPLACED: 503,
    Reason.SUPERSEDED: 409,  # the same caller sent a newer one
    Reason.MEMORY: 503,
    Reason.THERMAL: 503,
    Reason.MODEL_UNAVAILABLE: 404,
    Reason.QUARANTINED: 503,
    Reason.RUNTIME_UNUSABLE: 503,
    Reason.INPUT_INVALID: 400,
    Reason.DATA_SCOPE: 403,
    Reason.COST: 429,
    Reason.DRAINING: 503,
}
"""HTTP status of each refusal."""

ENDING_STATUS: dict[OutcomeKind, int] = {
    OutcomeKind.OK: 200,
    OutcomeKind.LATE: 200,
    OutcomeKind.CANCELLED: 499,  # nobody reads it: the caller went away
    OutcomeKind.EXPIRED: 504,
    OutcomeKind.FAILED: 500,
}
"""HTTP status of every other ending."""

_TEMPORARY = frozenset({429, 503})
_LATER = (("retry-after", "1"),)

_encoder = msgspec.json.Encoder(enc_hook=str)


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP reply. `release` gives back what its chunks borrow, once they are sent."""

    status: int
    chunks: tuple[bytes | bytearray | memoryview, ...] = ()
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    release: Callable[[], None] = lambda: None

    @property
    def size_bytes(self) -> int:
        """Bytes of the body."""
        return sum(memoryview(chunk).nbytes for chunk in self.chunks)


def json_reply(document: Any, status: int = 200) -> Reply:
    """Return a JSON document. NaN and infinity become null; what JSON does not know becomes its text."""
    return Reply(status, (_encoder.encode(document),))


def error_reply(status: int, error: str) -> Reply:
    """Return an error that is no inference's outcome: an unknown path, a bad method."""
    return json_reply({"error": error}, status)


def refusal_reply(refusal: Refusal) -> Reply:
    """Return a refusal that was decided before the request was submitted."""
    return _ending(REFUSAL_STATUS[refusal.reason], refusal.detail, "rejected", refusal.reason.value)


def outcome_reply(outcome: Outcome, form: Form) -> Reply:
    """Return the reply to an inference, in the form that its caller wants.

    With a result, the reply borrows the result's memory until its `release`.
    """
    if outcome.result is None:
        if outcome.kind is OutcomeKind.REJECTED:
            status = REFUSAL_STATUS[Reason(outcome.reason)]
        else:
            status = ENDING_STATUS[outcome.kind]
        return _ending(status, outcome.detail, outcome.kind.value, outcome.reason)
    result = outcome.result
    header = oip.response_header(result.payload)
    if refusal := too_large_for_json(_json_sizes(header, result, form)):
        result.release()
        return refusal_reply(refusal)
    raws: list[bytes | bytearray | memoryview] = []
    described = []
    for tensor, raw in zip(header.outputs, result.payload.tensors, strict=True):
        if not form.takes(tensor.name):
            continue
        if form.in_json(tensor.name):
            oip.put_data(tensor, raw)
        else:
            raws.append(raw)
        described.append(tensor)
    header.outputs = described
    header.id = form.id
    header.model_name = header.model_name or outcome.request.model
    header.model_version = header.model_version or result.version
    header.parameters |= _facts(outcome, result)
    encoded = _encoder.encode(header)
    if not raws:
        return Reply(200, (encoded,), release=result.release)
    length = ((oip.HEADER_LENGTH, str(len(encoded))),)
    return Reply(200, (encoded, *raws), "application/octet-stream", length, result.release)


def json_bytes(outcome: Outcome, form: Form) -> int:
    """Return how many bytes of outputs `outcome_reply` would write as JSON; 0 for more than it writes."""
    result = outcome.result
    if result is None or form.binary is True:
        return 0
    sizes = _json_sizes(oip.response_header(result.payload), result, form)
    return 0 if too_large_for_json(sizes) else sum(sizes.values())


def detach(result: Result, form: Form) -> None:
    """Give a result's memory back before its reply is made, and keep copies of the outputs that are wanted."""
    header = oip.response_header(result.payload)
    copies = (
        bytes(raw) if form.takes(tensor.name) else b""
        for tensor, raw in zip(header.outputs, result.payload.tensors, strict=True)
    )
    result.payload = Payload(result.payload.header, tuple(copies))
    result.release()
    result.lease = None


def _json_sizes(header: oip.ResponseHeader, result: Result, form: Form) -> dict[str, int]:
    return {
        tensor.name: max(memoryview(raw).nbytes, LEAST_ELEMENT_BYTES * math.prod(tensor.shape))
        for tensor, raw in zip(header.outputs, result.payload.tensors, strict=True)
        if form.in_json(tensor.name)
    }


def _facts(outcome: Outcome, result: Result) -> dict[str, Any]:
    return {
        "outcome": outcome.kind.value,
        "placement": result.placement.value,
        "where": result.where,
        "variant": result.variant,
        "digest": result.digest,
        "latency_ms": round(outcome.latency_ns / 1e6, 3),
        **{f"{phase}_ms": round(span_ns / 1e6, 3) for phase, span_ns in outcome.phases_ns.items()},
    }


def too_large_reply(detail: str) -> Reply:
    """Return the reply to a request that is larger than any for its model, or than there is memory for."""
    return _ending(413, detail, OutcomeKind.REJECTED.value, Reason.INPUT_INVALID.value)


def busy_reply(detail: str, status: int = 503) -> Reply:
    """Return the reply to a caller for whom there is no room now, whatever it wanted."""
    return _ending(status, detail, OutcomeKind.REJECTED.value, Reason.QUEUE_FULL.value)


def _ending(status: int, detail: str, kind: str, reason: str) -> Reply:
    error = f"{kind} ({reason}): {detail}" if detail else f"{kind} ({reason})"
    document = {"error": error, "outcome": kind, "reason": reason, "detail": detail}
    return Reply(status, (_encoder.encode(document),), headers=_LATER if status in _TEMPORARY else ())
