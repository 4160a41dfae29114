"""One MQTT message as the rest of edgeinfer sees it, and its form on the wire.

Nothing outside this package meets paho's types.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from edgeinfer.mqtt.topics import can_publish

if TYPE_CHECKING:
    from paho.mqtt.client import MQTTMessage
    from paho.mqtt.properties import Properties


@dataclass(frozen=True, slots=True)
class Message:
    """What is published or was received; the MQTT 5 properties that we use are plain fields."""

    topic: str
    payload: bytes
    qos: int = 0
    """0 (may be lost) or 1 (acknowledged, may come twice). Quality 2 isn't used: requests carry ids."""
    retain: bool = False
    """Sent: keep as the topic's last value. Received: it is such a last value, not news."""
    response_topic: str | None = None
    correlation: bytes | None = None
    content_type: str | None = None
    expiry_s: int | None = None
    """Whole seconds after which the broker drops it undelivered; received: what is left of them."""
    user: tuple[tuple[str, str], ...] = ()
    """User properties, in order; a name may come twice."""

    def user_value(self, name: str) -> str | None:
        """Return the first user property of that name."""
        return next((value for key, value in self.user if key == name), None)


class Keep(Enum):
    """What becomes of a message that can't go out right now."""

    LATEST = "latest"
    """Held; a newer message on the same topic takes its place (telemetry)."""
    FIFO = "fifo"
    """Held in order, the oldest dropped first (events, replies)."""
    NEVER = "never"
    """Dropped."""


def unsendable(message: Message, *, max_packet_bytes: int | None) -> str | None:
    """Return why `message` can't be published on any connection like this one, or None when it can."""
    if not can_publish(message.topic):
        return f"topic {message.topic[:80]!r} cannot be published to"
    if max_packet_bytes is not None and (size := packet_bytes(message)) > max_packet_bytes:
        return f"{size} bytes to {message.topic} are more than the broker's maximum packet of {max_packet_bytes}"
    return None


def packet_bytes(message: Message) -> int:
    """Return the size of the PUBLISH packet that carries `message`."""
    rest = 2 + len(message.topic.encode()) + (2 if message.qos else 0) + len(message.payload)
    rest += len(publish_properties(message).pack())  # type: ignore[no-untyped-call]
    length_bytes = 1 + sum(rest >= 1 << 7 * place for place in (1, 2, 3))
    return 1 + length_bytes + rest


def publish_properties(message: Message) -> Properties:
    """Return the MQTT 5 properties of a PUBLISH or of a will."""
    from paho.mqtt.packettypes import PacketTypes  # noqa: PLC0415 - records are made without a link, too
    from paho.mqtt.properties import Properties  # noqa: PLC0415

    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    _fill(properties, message)
    return properties


def will_properties(message: Message) -> Properties:
    """Return the MQTT 5 properties of a will."""
    from paho.mqtt.packettypes import PacketTypes  # noqa: PLC0415
    from paho.mqtt.properties import Properties  # noqa: PLC0415

    properties = Properties(PacketTypes.WILLMESSAGE)  # type: ignore[no-untyped-call]
    _fill(properties, message)
    return properties


def received(message: MQTTMessage) -> Message:
    """Return a message as it came in.

    Raises:
        UnicodeDecodeError: the topic isn't UTF-8.
    """
    properties = message.properties
    return Message(
        topic=message.topic,
        payload=bytes(message.payload),
        qos=message.qos,
        retain=bool(message.retain),
        response_topic=getattr(properties, "ResponseTopic", None),
        correlation=getattr(properties, "CorrelationData", None),
        content_type=getattr(properties, "ContentType", None),
        expiry_s=getattr(properties, "MessageExpiryInterval", None),
        user=tuple((str(name), str(value)) for name, value in getattr(properties, "UserProperty", ())),
    )


def _fill(properties: Properties, message: Message) -> None:
    if message.response_topic is not None:
        properties.ResponseTopic = message.response_topic
    if message.correlation is not None:
        properties.CorrelationData = message.correlation
    if message.content_type is not None:
        properties.ContentType = message.content_type
    if message.expiry_s is not None:
        properties.MessageExpiryInterval = message.expiry_s
    if message.user:
        properties.UserProperty = list(message.user)
