"""Commands, reports and links of a whole device over real brokers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.clock import MonotonicClock
from edgeinfer.mqtt.link import Keep, Message, MqttLink
from edgeinfer.mqtt.topics import Topics
from tests.system.broker import Broker
from tests.system.programs import SENTENCE, Program, edgeinfer, give_bundles, running_pids

pytestmark = [pytest.mark.system, pytest.mark.slow]

TOPICS = Topics("edgeinfer", "lab", "cam1")
REPLY_TO = "edgeinfer/v1/lab/operator/reply"


class Operator:
    """Somebody on the broker who gives commands and hears everything."""

    def __init__(self, broker: Broker, name: str = "operator") -> None:
        self.link = MqttLink(broker.section(), name=name, client_id=name, clock=MonotonicClock())
        self.heard: list[Message] = []
        self.link.subscribe("edgeinfer/v1/lab/#", self.heard.append)
        self._ids = iter(range(1, 1000))

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Operator]:
        task = asyncio.create_task(self.link.run())
        try:
            await until(lambda: self.link.connected)
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    def contents(self, topic: str) -> list[dict[str, Any]]:
        return [json.loads(message.payload) for message in self.heard if message.topic == topic]

    def topics(self) -> set[str]:
        return {message.topic for message in self.heard}

    async def command(self, verb: str, **arguments: object) -> dict[str, Any]:
        """Give a command and return its reply."""
        command_id = f"c{next(self._ids)}"
        body = json.dumps({"id": command_id, "args": arguments}).encode()
        message = Message(TOPICS.command(verb), body, qos=1, response_topic=REPLY_TO, correlation=command_id.encode())
        self.link.send(message, Keep.FIFO)

        def replies() -> list[dict[str, Any]]:
            return [reply for reply in self.contents(REPLY_TO) if reply["id"] == command_id]

        await until(replies)
        [reply] = replies()
        return reply


async def until(happened: Callable[[], object], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not happened():
            await asyncio.sleep(0.02)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(SENTENCE)
    return folder


def configured(broker: Broker, texts: Path, link: str = "site") -> str:
    return f"""
[mqtt.{link}]
host = "127.0.0.1"
port = {broker.port}
[[model]]
name = "support-intent"
[[loop]]
name = "texts"
model = "support-intent"
source = {{ kind = "directory", path = "{texts}" }}
period = "50 ms"
deadline = "2 s"
sinks = [{{ kind = "mqtt" }}]
"""


async def test_everything_an_operator_can_command(tmp_path: Path, store: Path, texts: Path, broker: Broker) -> None:
    with Program(tmp_path / "cam1", configured(broker, texts)) as daemon:
        give_bundles(daemon, store)
        await asyncio.to_thread(daemon.ready)
        async with Operator(broker).listening() as operator:
            await until(lambda: operator.contents(TOPICS.status) and operator.contents(TOPICS.result("texts")))
            assert operator.contents(TOPICS.status)[-1]["online"] is True
            assert operator.contents(TOPICS.result("texts"))[-1]["label"] == "support_request"

            state = await operator.command("get-state")
            assert state["outcome"] == "ok"
            [model] = state["result"]["state"]["models"]
            assert (model["name"], model["state"]) == ("support-intent", "loaded")

            changed = await operator.command("set-loop", loop="texts", period_ms=500, enabled=False)
            assert changed["result"] == {"loop": "texts", "enabled": False, "period_ms": 500.0, "deadline_ms": 2000.0}
            await asyncio.sleep(0.2)
            count = len(operator.contents(TOPICS.result("texts")))
            await asyncio.sleep(0.7)
            assert len(operator.contents(TOPICS.result("texts"))) == count, "the loop stands still"
            await operator.command("set-loop", loop="texts", enabled=True)
            await until(lambda: len(operator.contents(TOPICS.result("texts"))) > count)

            [worker] = set(daemon.children()) - {daemon.zygote()}
            assert (await operator.command("unload", model="support-intent"))["outcome"] == "ok"
            assert running_pids([worker]) == [], "the reply says that the memory is free"
            told = await asyncio.to_thread(edgeinfer, "infer", "support-intent", SENTENCE, "--socket", daemon.socket)
            assert told.returncode == 75
            assert "load it with the load command" in told.stderr
            loaded = await operator.command("load", model="support-intent")
            assert loaded["outcome"] == "ok"
            assert loaded["result"]["version"]
            assert (await asyncio.to_thread(daemon.ask)).label == "support_request"

            for verb, arguments, reason, said in (
                ("load", {"model": "ghost"}, "unknown_model", "ghost"),
                ("load", {"model": "support-intent", "version": "9.9.9"}, "artifact", "installed: "),
                ("set-loop", {"loop": "ghost", "enabled": True}, "unknown_loop", "texts"),
                ("set-loop", {"loop": "texts", "period_ms": -1}, "invalid", "period_ms"),
                ("unload", {}, "invalid", "model"),
            ):
                refused = await operator.command(verb, **arguments)
                assert refused["outcome"] in {"refused", "failed"}, refused
                assert refused["reason"] == reason
                assert said in refused["detail"]
            assert (await asyncio.to_thread(daemon.ask)).label == "support_request", "nothing of that did harm"
            status, _ = await asyncio.to_thread(daemon.stop)
            assert status == 0
            await until(lambda: operator.contents(TOPICS.status)[-1]["online"] is False)
            assert operator.contents(TOPICS.status)[-1]["reason"] == "stopping"


async def test_two_brokers_site_for_results_fleet_for_reports_and_commands(
    tmp_path: Path, store: Path, texts: Path
) -> None:
    (tmp_path / "b1").mkdir()
    (tmp_path / "b2").mkdir()
    with Broker(tmp_path / "b1") as site, Broker(tmp_path / "b2") as fleet:
        fleet_link = f'[mqtt.fleet]\nhost = "127.0.0.1"\nport = {fleet.port}\n'
        with Program(tmp_path / "cam1", configured(site, texts) + fleet_link) as daemon:
            give_bundles(daemon, store)
            await asyncio.to_thread(daemon.ready)
            async with Operator(site, "near").listening() as near, Operator(fleet, "far").listening() as far:
                await until(lambda: near.contents(TOPICS.result("texts")) and far.contents(TOPICS.report))
                assert (await far.command("get-state"))["outcome"] == "ok"
                reported = {topic.rsplit("/", 1)[-1] for topic in far.topics()}
                assert {"status", "state", "report", "reply"} <= reported
                assert not far.contents(TOPICS.result("texts")), "frames never block commands"
                assert near.topics() == {TOPICS.result("texts")}

                site.stop()  # one link down: the other goes on
                await until(lambda: far.contents(TOPICS.report)[-1]["links"][0]["state"] != "connected")
                assert (await far.command("set-loop", loop="texts", period_ms=100))["outcome"] == "ok"
                assert (await asyncio.to_thread(daemon.ask)).label == "support_request"
                site.start()
                before = len(near.contents(TOPICS.result("texts")))
                await until(lambda: len(near.contents(TOPICS.result("texts"))) > before)
            assert (await asyncio.to_thread(daemon.stop))[0] == 0
            assert "Traceback" not in daemon.log()
