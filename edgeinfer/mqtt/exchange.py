"""The offload conversation as MQTT messages: a device's ask, a nearby service's answer.

The payload of both is an Open Inference Protocol body (`edgeinfer.oip`); everything else stands in MQTT 5 properties,
so that a refusal needs no tensor to be touched. Between machines only remaining budgets travel, never timestamps.
docs/mqtt.md describes each property; a test holds it against this. Sending and matching is `execution.offload`;
answering is `nearby`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from edgeinfer.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from edgeinfer.errors import ProtocolError
from edgeinfer.mqtt.envelope import OIP_CONTENT_TYPE
from edgeinfer.mqtt.message import Message
from edgeinfer.oip import HEADER_LENGTH
from edgeinfer.request import DataScope, OutcomeKind, Payload

MODEL = "model"
DIGEST = "digest"
SCOPE = "scope"
BUDGET_MS = "budget-ms"
TRIP_MS = "trip-ms"
PRIORITY = "priority"
ACCEPT_LATE = "accept-late"
CANCEL = "cancel"
ASK_PROPERTIES = (MODEL, DIGEST, SCOPE, BUDGET_MS, TRIP_MS, PRIORITY, ACCEPT_LATE, HEADER_LENGTH, CANCEL)

OUTCOME = "outcome"
REASON = "reason"
DETAIL = "detail"
VERSION = "version"
VARIANT = "variant"
QUEUE_US = "queue-us"
RUN_US = "run-us"
ANSWER_PROPERTIES = (OUTCOME, REASON, DETAIL, VERSION, VARIANT, DIGEST, QUEUE_US, RUN_US, HEADER_LENGTH)

MAX_CORRELATION_BYTES = 64
MAX_BUDGET_NS = 3600 * NS_PER_S
_DECIMAL = re.compile(r"[0-9]{1,10}(\.[0-9]{1,9})?")
_MAX_TEXT = 512
"""Characters of a detail that travel."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that a device sends next door, as it stands on the wire."""

    model: str
    digest: str
    """Bundle digest: the peer answers with exactly this model or not at all."""
    scope: DataScope
    budget_ns: int
    """Time that was left when it was sent."""
    correlation: bytes
    header: bytes = b""
    """JSON header of the OIP body, once received."""
    tensors: bytes | memoryview = b""
    """The body after the header, once received."""
    trip_ns: int | None = None
    """Time on the wire, both ways together, that the device has measured with this peer."""
    priority: int = 0
    accept_late: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a nearby service says about an ask."""

    outcome: OutcomeKind
    correlation: bytes
    reason: str = ""
    detail: str = ""
    version: str = ""
    variant: str = ""
    digest: str = ""
    queue_ns: int = 0
    """How long it waited at the peer."""
    run_ns: int = 0
    """How long the peer needed after that."""
    header: bytes = b""
    tensors: bytes | memoryview = b""


def encode_ask(ask: Ask, payload: Payload, *, topic: str, response_topic: str) -> Message:
    """Return the message that carries `ask`; the body is `payload`'s, `ask.header` and `ask.tensors` are not read.

    Message expiry knows whole seconds only: it clears away what nobody fetched, the peer enforces the budget.
    """
    user = [
        (MODEL, ask.model),
        (DIGEST, ask.digest),
        (SCOPE, ask.scope.name.lower()),
        (BUDGET_MS, f"{ask.budget_ns / NS_PER_MS:.3f}"),
        (HEADER_LENGTH, str(len(payload.header))),
    ]
    if ask.trip_ns is not None:
        user.append((TRIP_MS, f"{ask.trip_ns / NS_PER_MS:.3f}"))
    if ask.priority:
        user.append((PRIORITY, str(ask.priority)))
    if ask.accept_late:
        user.append((ACCEPT_LATE, "1"))
    return Message(
        topic=topic,
        payload=b"".join((payload.header, *payload.tensors)),
        qos=1,
        response_topic=response_topic,
        correlation=ask.correlation,
        content_type=OIP_CONTENT_TYPE,
        expiry_s=max(1, math.ceil(ask.budget_ns / NS_PER_S)),
        user=tuple(user),
    )


def encode_cancel(correlation: bytes, *, topic: str) -> Message:
    """Return the message that takes back the ask of that correlation: nobody waits for its answer any more."""
    return Message(topic=topic, payload=b"", qos=1, correlation=correlation, expiry_s=1, user=((CANCEL, "1"),))


def cancelled(message: Message) -> bytes | None:
    """Return the correlation of the ask that `message` takes back, None when it is no such message."""
    return message.correlation if message.user_value(CANCEL) == "1" else None


def decode_ask(message: Message) -> Ask:
    """Read an ask's properties and cut its body; the body itself is not read yet.

    Raises:
        ProtocolError: a property is missing or absurd; the text says which.
    """
    header, tensors = _body(message)
    scope = _required(message, SCOPE)
    if scope.upper() not in DataScope.__members__:
        raise ProtocolError(f"{SCOPE} is {scope[:40]!r}, not device, site or any")
    budget_ns = _milliseconds(BUDGET_MS, _required(message, BUDGET_MS))
    trip = message.user_value(TRIP_MS)
    return Ask(
        model=_required(message, MODEL),
        digest=_required(message, DIGEST),
        scope=DataScope[scope.upper()],
        budget_ns=budget_ns,
        correlation=_correlation(message),
        header=header,
        tensors=tensors,
        trip_ns=None if trip is None else _milliseconds(TRIP_MS, trip),
        priority=_integer(PRIORITY, message.user_value(PRIORITY) or "0"),
        accept_late=message.user_value(ACCEPT_LATE) == "1",
    )


def encode_answer(answer: Answer, payload: Payload | None, *, topic: str, expiry_s: int) -> Message:
    """Return the message that carries `answer`, with `payload` as its body when the outcome has one."""
    user = [
        (OUTCOME, answer.outcome.value),
        (QUEUE_US, str(answer.queue_ns // NS_PER_US)),
        (RUN_US, str(answer.run_ns // NS_PER_US)),
    ]
    for name, value in ((REASON, answer.reason), (DETAIL, _printable(answer.detail)), (VERSION, answer.version),
                        (VARIANT, answer.variant), (DIGEST, answer.digest)):  # fmt: skip
        if value:
            user.append((name, value))
    body = b""
    if payload is not None:
        user.append((HEADER_LENGTH, str(len(payload.header))))
        body = b"".join((payload.header, *payload.tensors))
    return Message(
        topic=topic,
        payload=body,
        qos=1,
        correlation=answer.correlation,
        content_type=OIP_CONTENT_TYPE if payload is not None else None,
        expiry_s=expiry_s,
        user=tuple(user),
    )


def decode_answer(message: Message) -> Answer:
    """Read an answer's properties and cut its body; the body itself is not read yet.

    Raises:
        ProtocolError: a property is missing or absurd; the text says which.
    """
    outcome = _required(message, OUTCOME)
    if outcome not in set(OutcomeKind):
        raise ProtocolError(f"{OUTCOME} is {outcome[:40]!r}")
    kind = OutcomeKind(outcome)
    answered = kind in {OutcomeKind.OK, OutcomeKind.LATE}
    header, tensors = _body(message) if answered else (b"", b"")
    return Answer(
        outcome=kind,
        correlation=_correlation(message),
        reason=(message.user_value(REASON) or "")[:64],
        detail=(message.user_value(DETAIL) or "")[:_MAX_TEXT],
        version=_required(message, VERSION) if answered else "",
        variant=_required(message, VARIANT) if answered else "",
        digest=_required(message, DIGEST) if answered else "",
        queue_ns=max(0, _integer(QUEUE_US, message.user_value(QUEUE_US) or "0")) * NS_PER_US,
        run_ns=max(0, _integer(RUN_US, message.user_value(RUN_US) or "0")) * NS_PER_US,
        header=header,
        tensors=tensors,
    )


def _printable(text: str) -> str:
    """Return what MQTT can carry of a text that may quote a peer: a NUL in it would cost the connection."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text[:_MAX_TEXT]
    )


def _required(message: Message, name: str) -> str:
    value = message.user_value(name)
    if not value:
        raise ProtocolError(f"user property {name} is missing")
    return value


def _correlation(message: Message) -> bytes:
    correlation = message.correlation
    if not correlation or len(correlation) > MAX_CORRELATION_BYTES:
        raise ProtocolError(f"correlation data of 1 to {MAX_CORRELATION_BYTES} bytes is needed")
    return bytes(correlation)


def _body(message: Message) -> tuple[bytes, memoryview]:
    length = _integer(HEADER_LENGTH, _required(message, HEADER_LENGTH))
    view = memoryview(message.payload)
    if not 0 < length <= len(view):
        raise ProtocolError(f"{HEADER_LENGTH} is {length}, the body has {len(view)} bytes")
    return bytes(view[:length]), view[length:]


def _integer(name: str, value: str) -> int:
    if not (value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 15):
        raise ProtocolError(f"{name} is {value[:40]!r}, not a whole number")
    return int(value)


def _milliseconds(name: str, value: str) -> int:
    if not _DECIMAL.fullmatch(value) or (nanoseconds := round(float(value) * NS_PER_MS)) > MAX_BUDGET_NS:
        raise ProtocolError(f"{name} is {value[:40]!r}, not milliseconds between 0 and {MAX_BUDGET_NS // NS_PER_MS}")
    return nanoseconds
