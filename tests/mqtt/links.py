"""Run links in tests, connected or not, and collect what they receive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from edgeinfer.clock import MonotonicClock
from edgeinfer.config import BrokerSection
from edgeinfer.mqtt.link import Message, MqttLink
from tests.nearby.rig import until


@contextlib.asynccontextmanager
async def running(section: BrokerSection, *, client_id: str = "one", **options: Any) -> AsyncIterator[MqttLink]:
    """Run a link, whether or not it can connect."""
    link = MqttLink(section, name=client_id, client_id=client_id, clock=MonotonicClock(), **options)
    task = asyncio.create_task(link.run(), name="link")
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled(), task.exception()


@contextlib.asynccontextmanager
async def connected(section: BrokerSection, **options: Any) -> AsyncIterator[MqttLink]:
    async with running(section, **options) as link:
        await until(lambda: link.connected)
        yield link


class Inbox(list[Message]):
    """Messages that a link received on a filter."""

    def __init__(self, link: MqttLink, topic_filter: str) -> None:
        super().__init__()
        link.subscribe(topic_filter, self.append)

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self]
