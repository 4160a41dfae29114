"""Telemetry and commands over a real broker: what somebody who joins later sees, and what a command really costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.clock import NS_PER_S, MonotonicClock
from edgeinfer.control.journal import Journal
from edgeinfer.control.plane import CommandPlane
from edgeinfer.mqtt.link import Keep, Message, MqttLink
from edgeinfer.mqtt.stamp import Stamper
from edgeinfer.mqtt.topics import Topics
from edgeinfer.telemetry.publisher import Publisher, make_will
from edgeinfer.telemetry.report import Identity
from tests.control.plane_fixture import FakeDaemon
from tests.system.broker import Broker, broker
from tests.telemetry.world import World

__all__ = ["broker"]
pytestmark = [pytest.mark.system, pytest.mark.slow]

TOPICS = Topics("edgeinfer", "lab", "cam1")
REPLY_TO = "edgeinfer/v1/lab/operator/reply"
CLOCK = MonotonicClock()
ROOT = Path(__file__).parents[2]


class Ear:
    """Somebody else on the broker, who hears all that the device says."""

    def __init__(self, broker: Broker, name: str = "ear") -> None:
        self.link = MqttLink(broker.section(), name=name, client_id=name, clock=CLOCK)
        self.heard: list[Message] = []
        self.link.subscribe("edgeinfer/v1/lab/#", self.heard.append)

    def contents(self, topic: str) -> list[dict[str, Any]]:
        return [json.loads(message.payload) for message in self.heard if message.topic == topic]

    def tell(self, verb: str, command: dict[str, Any], *, retain: bool = False) -> None:
        message = Message(
            TOPICS.command(verb), json.dumps(command).encode(), qos=1, retain=retain,
            response_topic=REPLY_TO, correlation=b"c",
        )  # fmt: skip
        self.link.send(message, Keep.FIFO)


class Device:
    """Link, publisher and command plane as the daemon has them, over a made-up device."""

    def __init__(self, broker: Broker, folder: Path, storage: ThreadPoolExecutor) -> None:
        stamper = Stamper(CLOCK, boot="boot-1", synced=lambda: True)
        self.daemon, self.world = FakeDaemon(), World()
        self.link = MqttLink(
            broker.section(), name="fleet", client_id="cam1", clock=CLOCK, will=make_will(TOPICS, stamper, "0.1.0")
        )
        self.publisher = Publisher(
            self.link, TOPICS, snapshot=self.world.snapshot, stamper=stamper, clock=CLOCK,
            identity=Identity("generic-x86", "0.1.0", CLOCK.now_ns()), period_ns=NS_PER_S // 5,
        )  # fmt: skip
        self.plane = CommandPlane(
            self.link,
            TOPICS,
            self.daemon,
            journal=Journal(folder / "commands.json", storage),
            stamper=stamper,
            clock=CLOCK,
        )


@contextlib.asynccontextmanager
async def running(*works: Any) -> AsyncIterator[None]:
    """Run tasks while the body runs; cancelled one after the other, in order."""
    tasks = [asyncio.create_task(work.run()) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            await asyncio.wait([task])


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def device(broker: Broker, tmp_path: Path) -> Any:
    with ThreadPoolExecutor(1, thread_name_prefix="storage") as storage:
        yield Device(broker, tmp_path, storage)


async def test_who_joins_later_sees_online_state_and_then_a_clean_goodbye(broker: Broker, device: Device) -> None:
    async with running(device.publisher, device.link):
        await until(lambda: device.link.connected)
        late = Ear(broker)
        async with running(late.link):
            await until(lambda: late.contents(TOPICS.state) and late.contents(TOPICS.report))
            assert late.contents(TOPICS.status)[0]["online"] is True
            assert late.contents(TOPICS.state)[0]["board"] == "generic-x86"
            device.publisher.farewell()
            await until(lambda: not late.contents(TOPICS.status)[-1]["online"])
    later = Ear(broker, "later")
    async with running(later.link):
        await until(lambda: later.contents(TOPICS.status))
        await asyncio.sleep(0.2)  # a will would come now
        assert [(status["online"], status["reason"]) for status in later.contents(TOPICS.status)] == [
            (False, "stopping")
        ]


async def test_a_device_that_is_killed_is_offline_for_all_who_come(broker: Broker) -> None:
    script = f"""
import asyncio, pathlib, tempfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from edgeinfer.config import BrokerSection
from tests.system.test_telemetry_and_control import Device
async def main():
    broker = SimpleNamespace(section=lambda: BrokerSection(host="127.0.0.1", port={broker.port}))
    device = Device(broker, pathlib.Path(tempfile.gettempdir()), ThreadPoolExecutor(1))
    await asyncio.gather(device.link.run(), device.publisher.run())
asyncio.run(main())
"""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environ, cwd=ROOT)
    ear = Ear(broker)
    try:
        async with running(ear.link):
            await until(lambda: ear.contents(TOPICS.status), 15)
            assert ear.contents(TOPICS.status)[-1]["online"] is True
            process.send_signal(signal.SIGKILL)
            await until(lambda: not ear.contents(TOPICS.status)[-1]["online"])
        later = Ear(broker, "later")
        async with running(later.link):
            await until(lambda: later.contents(TOPICS.status))
            [status] = later.contents(TOPICS.status)
            assert (status["online"], status["reason"]) == (False, "connection_lost")
    finally:
        process.kill()
        process.wait()


async def test_a_command_is_answered_where_it_was_asked(broker: Broker, device: Device) -> None:
    ear = Ear(broker)
    async with running(device.plane, device.link), running(ear.link):
        await until(lambda: device.link.connected and ear.link.connected)
        ear.tell("set-loop", {"id": "a", "args": {"loop": "camera", "enabled": False}})
        await until(lambda: ear.contents(REPLY_TO))
        ear.tell("set-loop", {"id": "a", "args": {"loop": "camera", "enabled": False}})
        ear.tell("load", {"id": "b", "args": {"model": 7}})
        await until(lambda: len(ear.contents(REPLY_TO)) == 3)
        replies = ear.contents(REPLY_TO)
        assert [(reply["id"], reply["outcome"]) for reply in replies if reply["id"] == "a"] == [("a", "ok")] * 2
        assert [reply["reason"] for reply in replies if reply["id"] == "b"] == ["invalid"]
        assert {message.correlation for message in ear.heard if message.topic == REPLY_TO} == {b"c"}
        assert device.daemon.done == [("set-loop", "camera", False, None, None)]


async def test_a_retained_command_is_refused_once_over_three_connects(broker: Broker, device: Device) -> None:
    ear = Ear(broker)
    async with running(ear.link):
        await until(lambda: ear.link.connected)
        ear.tell("unload", {"id": "r", "args": {"model": "det"}}, retain=True)
        await until(lambda: ear.contents(TOPICS.command("unload")))
        async with running(device.plane):
            for _ in range(3):
                async with running(device.link):
                    await until(lambda: device.link.connected)
                    await asyncio.sleep(0.2)
        assert device.plane.counters["received"] == 3
        assert [reply["reason"] for reply in ear.contents(REPLY_TO)] == ["retained"]
        assert device.daemon.done == []


async def test_a_slow_command_costs_neither_the_connection_nor_the_answer_to_a_question(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, ThreadPoolExecutor(1) as storage:
        device = Device(broker, tmp_path, storage)
        device.link = MqttLink(broker.section(keepalive_s=1), name="fleet", client_id="cam1", clock=CLOCK)
        device.plane = CommandPlane(
            device.link, TOPICS, device.daemon, journal=Journal(None, storage), clock=CLOCK,
            stamper=Stamper(CLOCK, boot="b", synced=lambda: True),
        )  # fmt: skip
        ear = Ear(broker)
        async with running(device.plane, device.link), running(ear.link):
            await until(lambda: device.link.connected and ear.link.connected)
            ear.tell("load", {"id": "l", "args": {"model": "slow"}})
            await asyncio.sleep(3)  # three keep-alives
            ear.tell("get-state", {"id": "q"})
            await until(lambda: ear.contents(REPLY_TO))
            assert [reply["id"] for reply in ear.contents(REPLY_TO)] == ["q"]
            assert device.link.snapshot().connects == 1
