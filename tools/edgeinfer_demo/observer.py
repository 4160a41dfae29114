"""Watch the device from outside, as a fleet operator would: over MQTT, and over its socket while the broker is down."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Any

import msgspec

from edgeinfer.client import Client
from edgeinfer.clock import NS_PER_S, MonotonicClock
from edgeinfer.config import BrokerSection
from edgeinfer.errors import EdgeInferError, LinkError, ProtocolError
from edgeinfer.mqtt import envelope
from edgeinfer.mqtt.link import Message, MqttLink
from edgeinfer.mqtt.topics import Topics
from edgeinfer_demo.verdict import Happening
from edgeinfer_demo.world import DEVICE, SITE, World

OBSERVER = "demo-operator"


class Observer:
    """Keeps what the device said. Loop thread only."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._topics = Topics("edgeinfer", SITE, DEVICE)
        self._reply_topic = f"edgeinfer/v1/{SITE}/{OBSERVER}/reply"
        self._ids = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[envelope.Reply]] = {}
        self.link = MqttLink(
            BrokerSection(host="127.0.0.1", port=world.port, keepalive_s=3),
            name="demo",
            client_id=OBSERVER,
            clock=MonotonicClock(),
        )
        self._clock = MonotonicClock()
        self._began_ns = self._clock.now_ns()
        self.events: list[Happening] = []
        self.recent: deque[str] = deque(maxlen=8)
        self.report: dict[str, Any] | None = None
        """The newest report that came over MQTT: at the end, the one that the device left with."""
        self.online = False
        self.link.subscribe(self._topics.status, self._on_status)
        self.link.subscribe(self._topics.report, self._on_report)
        self.link.subscribe(self._topics.event("x").removesuffix("x") + "+", self._on_event)
        self.link.subscribe(self._reply_topic, self._on_reply)

    async def command(self, verb: str, args: dict[str, Any], *, timeout_s: float = 5.0) -> envelope.Reply:
        """Give the device an order and return its reply.

        Raises:
            LinkError: no reply in time.
        """
        command_id = f"demo-{next(self._ids)}"
        reply: asyncio.Future[envelope.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[command_id] = reply
        order = Message(
            topic=self._topics.command(verb),
            payload=envelope.encode(envelope.Command(id=command_id, args=args)),
            qos=1,
            response_topic=self._reply_topic,
            correlation=command_id.encode(),
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self.link.publish(order, timeout_s=timeout_s)
                return await reply
        except TimeoutError:
            raise LinkError(f"no reply to {verb} within {timeout_s:g} s") from None
        finally:
            del self._waiting[command_id]

    async def status(self) -> dict[str, Any] | None:
        """Return what the daemon says over its socket, None while it doesn't answer."""
        return await asyncio.to_thread(self._read_status)

    def _read_status(self) -> dict[str, Any] | None:
        try:
            with Client(self._world.socket) as client:
                return client.status()
        except (EdgeInferError, OSError):
            return None

    def _on_status(self, message: Message) -> None:
        self.online = envelope.decode(message.payload, envelope.Status).online

    def _on_report(self, message: Message) -> None:
        self.report = msgspec.to_builtins(envelope.decode(message.payload, envelope.Report))

    def _on_event(self, message: Message) -> None:
        event = envelope.decode(message.payload, envelope.Event)
        at_s = (event.stamp.mono_ns - self._began_ns) / NS_PER_S  # one machine, one boot: one monotonic clock
        self.events.append(Happening(round(at_s, 1), event.kind, event.detail))
        self.recent.append(f"{event.kind}: {event.detail}")

    def _on_reply(self, message: Message) -> None:
        reply = envelope.decode(message.payload, envelope.Reply)
        waiting = self._waiting.get(reply.id)
        if waiting is None:
            raise ProtocolError(f"a reply to {reply.id!r}, which nobody waits for")
        if not waiting.done():
            waiting.set_result(reply)
