"""Decide whether a message is a command to obey, from nothing but the message and the clocks.

Pure. Answers with the command, checked completely, or with a refusal that says what to change. Whether the command is
a repetition is the journal's to know; whether there is room to carry it out, the plane's.

When a command is void (docs/mqtt.md tells it to operators):

- `issued_at` + `ttl_s` count while the device's wall clock is synchronized. A sender whose clock is ahead of ours by
  more than five minutes is refused: its `ttl_s` would mean nothing.
- While it is not, wall time decides nothing: a command with `ttl_s` is obeyed only if it also has an MQTT message
  expiry, which the broker enforces on a clock of its own; else it is refused and may be sent again with one.
- A command without either never expires.
- The time that it waits in the device counts, on the monotonic clock.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from edgeinfer.clock import NS_PER_S
from edgeinfer.control.commands import VERBS, Arguments, Verb, parse_arguments
from edgeinfer.errors import ProtocolError
from edgeinfer.mqtt.envelope import Command, decode
from edgeinfer.mqtt.message import Message
from edgeinfer.mqtt.topics import Topics, can_publish

MAX_COMMAND_BYTES = 64 << 10
"""No command needs more; what is longer is refused unread."""
MAX_ID_BYTES = 128
MAX_CORRELATION_BYTES = 256
CLOCK_SKEW_S = 300
_RESERVED = frozenset(
    {"command", "infer", "advert", "status", "state", "report", "event", "result", "offload"}
)  # fmt: skip
"""Branches whose topics mean something: a reply there would be taken for an order, an advert or a birth."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The clocks when a message came."""

    now_ns: int
    wall_s: float
    clock_synced: bool


@dataclass(frozen=True, slots=True)
class Address:
    """Where a reply goes."""

    topic: str
    correlation: bytes | None
    asked: bool
    """The sender gave it; False: the default topic, which may have no reader."""


@dataclass(frozen=True, slots=True)
class Order:
    """A command that may be carried out."""

    id: str
    name: str
    """The verb."""
    verb: Verb
    arguments: Arguments
    address: Address
    void_ns: int | None
    """Monotonic time after which it must not be carried out any more."""


@dataclass(frozen=True, slots=True)
class Nack:
    """A command that is refused, and why. `id` is empty where none could be read."""

    id: str
    name: str
    reason: str
    detail: str
    address: Address


def judge(message: Message, topics: Topics, moment: Moment) -> Order | Nack | None:
    """Return what to do about a message of the command filter; None when its topic is no command of ours."""
    name = topics.parse_command(message.topic)
    if name is None:
        return None
    address, bad_address = _address(message, topics)

    def nack(reason: str, detail: str, command_id: str = "") -> Nack:
        return Nack(command_id, name, reason, detail, address)

    command = _read(message.payload)
    if message.retain:
        detail = "commands must not be retained: they would come again at every connect"
        return nack("retained", detail, "" if isinstance(command, str) else command.id)
    if isinstance(command, str):
        return nack("invalid", command)
    if bad_address:
        return nack("reply_address", bad_address, command.id)
    if name not in VERBS:
        return nack("unknown_verb", f"{name!r} is not one of {', '.join(VERBS)}", command.id)
    arguments = parse_arguments(name, command.args)
    if isinstance(arguments, str):
        return nack("invalid", arguments, command.id)
    expiry = _void_ns(command, message, moment)
    if isinstance(expiry, tuple):
        return nack(*expiry, command.id)
    return Order(command.id, name, VERBS[name], arguments, address, expiry)


def _read(payload: bytes) -> Command | str:
    """Return the command, or what is wrong with it."""
    if len(payload) > MAX_COMMAND_BYTES:
        return f"{len(payload)} bytes; a command has at most {MAX_COMMAND_BYTES}"
    try:
        command = decode(payload, Command)
    except ProtocolError as error:
        return str(error)
    if not 1 <= len(command.id.encode()) <= MAX_ID_BYTES or not command.id.isprintable():
        return f"id: needs 1 to {MAX_ID_BYTES} printable characters"
    return command


def _address(message: Message, topics: Topics) -> tuple[Address, str]:
    """Return where to reply, and what is wrong with where the sender wants it, if anything."""
    correlation = message.correlation
    if correlation is not None and len(correlation) > MAX_CORRELATION_BYTES:
        fault = f"correlation data of {len(correlation)} bytes; at most {MAX_CORRELATION_BYTES}"
        return Address(topics.reply, None, asked=False), fault
    wanted = message.response_topic
    if wanted is None:
        return Address(topics.reply, correlation, asked=False), ""
    branch = f"{topics.prefix}/v1/"
    levels = wanted.removeprefix(branch).split("/")
    if not wanted.startswith(branch) or not can_publish(wanted) or len(levels) < 3 or levels[2] in _RESERVED:
        fault = f"response topic {wanted[:200]!r} is not {branch}SITE/NAME/…, or lies where messages have a meaning"
        return Address(topics.reply, correlation, asked=False), fault
    return Address(wanted, correlation, asked=True), ""


def _void_ns(command: Command, message: Message, moment: Moment) -> int | tuple[str, str] | None:
    """Return when the command is void, None for never, or the reason and detail of a refusal."""
    limits_ns = []
    if message.expiry_s is not None:
        limits_ns.append(moment.now_ns + message.expiry_s * NS_PER_S)
    if command.ttl_s is None:
        return min(limits_ns, default=None)
    if not command.ttl_s > 0:
        return "invalid", f"ttl_s: {command.ttl_s} is not above 0"
    issued_s = _epoch_s(command.issued_at)
    if issued_s is None:
        return "invalid", f"issued_at: {command.issued_at[:64]!r} is not an ISO 8601 time with a zone; ttl_s needs it"
    if not moment.clock_synced:
        if message.expiry_s is None:
            return "clock_unsynced", "ttl_s can't be judged without a synchronized clock; give a message expiry as well"
        return min(limits_ns)
    age_s = moment.wall_s - issued_s
    if age_s < -CLOCK_SKEW_S:
        return "clock_skew", f"issued_at is {-age_s:.0f} s ahead of this device's clock; set the sender's clock"
    left_s = command.ttl_s - max(age_s, 0.0)
    if left_s <= 0:
        return "expired", f"{age_s:.0f} s old, valid for {command.ttl_s:g} s"
    return min([*limits_ns, moment.now_ns + round(min(left_s, 1e9) * NS_PER_S)])


def _epoch_s(text: str) -> float | None:
    try:
        issued = dt.datetime.fromisoformat(text)
        return None if issued.tzinfo is None else issued.timestamp()
    except (ValueError, OverflowError):
        return None
