"""What goes out, and when: births, changes, periods, outages and last words. A link that keeps what it is given."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from edgeinfer.clock import NS_PER_S, LoopClock
from edgeinfer.limits import ThermalLevel
from edgeinfer.mqtt.backoff import LinkState
from edgeinfer.mqtt.message import Keep, Message
from edgeinfer.mqtt.stamp import Stamper
from edgeinfer.mqtt.topics import Topics
from edgeinfer.request import Placement
from edgeinfer.telemetry.publisher import Publisher, make_will
from edgeinfer.telemetry.report import Identity
from edgeinfer.telemetry.snapshot import Snapshot
from tests.telemetry.world import World
from tests.virtual_time import run_virtual

T = TypeVar("T")
TOPICS = Topics("edgeinfer", "lab", "cam1")
BRANCH = "edgeinfer/v1/lab/cam1/"


class FakeLink:
    """An outlet whose connection a test switches."""

    def __init__(self) -> None:
        self.connected = False
        self.births: list[Callable[[], None]] = []
        self.sent: list[tuple[Message, Keep]] = []

    def send(self, message: Message, keep: Keep) -> None:
        self.sent.append((message, keep))

    def on_connected(self, callback: Callable[[], None]) -> None:
        self.births.append(callback)

    def connect(self) -> None:
        self.connected = True
        for birth in self.births:
            birth()

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """Return topic (below the device's branch) and content of what was sent since the last call."""
        taken = [(message.topic.removeprefix(BRANCH), json.loads(message.payload)) for message, _ in self.sent]
        self.sent.clear()
        return taken

    def topics(self) -> list[str]:
        return [topic for topic, _ in self.take()]


class Bench:
    """A publisher on a fake link, with a world behind it."""

    def __init__(self, *, period_s: float = 10, synced: bool = True, linked: bool = True) -> None:
        self.world, self.link = World(), FakeLink()
        self.clock = LoopClock(asyncio.get_running_loop())
        self.stamper = Stamper(self.clock, boot="boot-1", wall_s=lambda: 0.0, synced=lambda: synced)
        self.publisher = Publisher(
            self.link if linked else None, TOPICS, snapshot=self.snapshot, stamper=self.stamper, clock=self.clock,
            identity=Identity("generic-x86", "0.1.0", self.clock.now_ns()), period_ns=round(period_s * NS_PER_S),
        )  # fmt: skip
        self.task = asyncio.create_task(self.publisher.run())

    def snapshot(self) -> Snapshot:
        self.world.now_ns = self.clock.now_ns()
        return self.world.snapshot()

    def answer(self, placement: Placement = Placement.LOCAL, after_ms: int = 20) -> None:
        self.world.now_ns = self.clock.now_ns()
        self.publisher.observe(self.world.answer(placement, after_ms=after_ms))


def run(test: Callable[[Bench], Awaitable[T]], **how: Any) -> T:
    async def main() -> T:
        bench = Bench(**how)
        try:
            return await test(bench)
        finally:
            bench.task.cancel()

    return run_virtual(main())


def test_the_birth_is_retained_and_followed_by_the_state() -> None:
    async def test(bench: Bench) -> None:
        await asyncio.sleep(5)
        assert bench.link.sent == []
        bench.link.connect()
        [(status, _), (state, _)] = bench.link.sent
        assert (status.topic, status.retain, status.qos) == (TOPICS.status, True, 1)
        assert json.loads(status.payload)["online"] is True
        assert (state.topic, state.retain) == (TOPICS.state, True)

    run(test)


def test_will_and_birth_are_retained_on_one_topic() -> None:
    async def test(bench: Bench) -> None:
        will = make_will(TOPICS, bench.stamper, "0.1.0")
        assert (will.topic, will.retain, will.qos) == (TOPICS.status, True, 1)
        content = json.loads(will.payload)
        assert (content["online"], content["reason"]) == (False, "connection_lost")

    run(test)


def test_every_record_is_stamped_and_says_that_its_clock_is_not_to_be_trusted() -> None:
    async def test(bench: Bench) -> None:
        bench.link.connect()
        bench.world.level = ThermalLevel.HOT
        await asyncio.sleep(11)
        bench.publisher.farewell()
        sent = bench.link.take()
        assert {topic for topic, _ in sent} == {"status", "state", "report", "event/throttle-start"}
        for _, content in sent:
            stamp = content["stamp"]
            assert stamp["clock_synced"] is False
            assert stamp["boot"] == "boot-1"
            assert stamp["at"].startswith("1970-01-01")
            assert stamp["mono_ns"] >= 1000 * NS_PER_S

    run(test, synced=False)


def test_reports_come_once_a_period() -> None:
    async def test(bench: Bench) -> None:
        bench.link.connect()
        await asyncio.sleep(60.5)
        assert bench.link.topics().count("report") == 6

    run(test, period_s=10)


def test_a_report_tells_the_recent_past_apart_from_all_time() -> None:
    async def test(bench: Bench) -> None:
        bench.link.connect()
        for _ in range(10):
            bench.answer(after_ms=10)
        await asyncio.sleep(10.5)
        for _ in range(10):
            bench.answer(after_ms=1000)
        await asyncio.sleep(10)
        reports = [content for topic, content in bench.link.take() if topic == "report"]
        first, second = reports
        assert first["recent"][0]["p99_ms"]["local"] == pytest.approx(10, rel=0.05)
        assert second["recent"][0]["p50_ms"]["local"] == pytest.approx(1000, rel=0.05)
        assert second["recent"][0]["by_placement"] == {"local": {"ok": 10}}
        assert second["recent_s"] == pytest.approx(10, abs=1)
        assert second["total"]["ok"] == 20

    run(test, period_s=10)


@pytest.mark.slow
def test_after_an_outage_of_two_hours_there_is_one_birth_and_one_report_that_covers_it() -> None:
    async def test(bench: Bench) -> None:
        bench.link.connect()
        await asyncio.sleep(15)
        bench.link.take()
        bench.link.connected = False
        for _ in range(7200):
            bench.answer()
            await asyncio.sleep(1)
        assert bench.link.take() == []
        bench.link.connect()
        await asyncio.sleep(9)
        sent = bench.link.take()
        assert [topic for topic, _ in sent] == ["status", "state", "report"]
        report = sent[-1][1]
        assert report["recent"][0]["by_placement"]["local"]["ok"] >= 7200
        assert report["recent_s"] >= 7200
        await asyncio.sleep(100)
        assert 9 <= bench.link.topics().count("report") <= 11

    run(test, period_s=10)


def test_a_flapping_link_gets_a_birth_per_connect_and_no_flood_of_reports() -> None:
    async def test(bench: Bench) -> None:
        for _ in range(60):
            bench.link.connect()
            await asyncio.sleep(0.5)
            bench.link.connected = False
            await asyncio.sleep(0.5)
        topics = bench.link.topics()
        assert topics.count("status") == 60
        assert topics.count("report") <= 7

    run(test, period_s=10)


def test_the_state_goes_out_when_it_changes_and_not_because_the_temperature_moves() -> None:
    async def test(bench: Bench) -> None:
        bench.link.connect()
        bench.link.take()
        for step in range(50):
            bench.world.temp_mc = 50_000 + 100 * step
            bench.world.duty_cycle = 1.0 if step % 2 else 0.99
            await asyncio.sleep(1)
        assert "state" not in [topic for topic in bench.link.topics() if not topic.startswith("event")]
        bench.world.phase = "draining"
        await asyncio.sleep(1.5)
        [state] = [content for topic, content in bench.link.take() if topic == "state"]
        assert state["phase"] == "draining"

    run(test, period_s=3600)


def test_the_state_is_at_most_a_minute_old() -> None:
    async def test(bench: Bench) -> None:
        bench.link.connect()
        await asyncio.sleep(600)
        assert 9 <= bench.link.topics().count("state") <= 12

    run(test, period_s=3600)


def test_a_state_that_changes_all_the_time_goes_out_once_a_second() -> None:
    async def test(bench: Bench) -> None:
        bench.link.connect()
        for step in range(600):
            bench.world.peers = (f"peer-{step}",)
            bench.publisher.wake()
            await asyncio.sleep(0.1)
        assert 50 <= bench.link.topics().count("state") <= 62

    run(test)


def test_events_are_kept_while_offline_and_are_seen_at_once_when_asked_for() -> None:
    async def test(bench: Bench) -> None:
        await asyncio.sleep(5.05)
        bench.world.level = ThermalLevel.HOT
        bench.publisher.wake()
        await asyncio.sleep(0.25)
        [(message, keep)] = bench.link.sent
        assert (message.topic, keep, message.qos, message.retain) == (
            TOPICS.event("throttle-start"), Keep.FIFO, 1, False,
        )  # fmt: skip

    run(test)


def test_an_event_that_is_told_late_has_the_wall_time_of_what_it_tells() -> None:
    async def test(bench: Bench) -> None:
        bench.link.connect()
        bench.world.link_states["fleet"] = LinkState.UNREACHABLE
        await asyncio.sleep(5)
        bench.world.link_states["fleet"] = LinkState.CONNECTED
        await asyncio.sleep(40)
        [down, up] = [content for topic, content in bench.link.take() if topic.startswith("event/link")]
        assert down["fields"]["since"] == down["stamp"]["at"]
        late = dt.datetime.fromisoformat(up["stamp"]["at"]) - dt.datetime.fromisoformat(up["fields"]["since"])
        assert 20 < late.total_seconds() == pytest.approx(up["fields"]["held_s"], abs=0.002)

    run(test)


def test_last_words_are_the_final_report_the_state_and_offline() -> None:
    async def test(bench: Bench) -> None:
        bench.link.connect()
        await asyncio.sleep(1.5)
        bench.link.take()
        bench.world.phase = "stopping"
        bench.answer()
        bench.publisher.farewell()
        assert all(message.qos == 1 and keep is Keep.LATEST for message, keep in bench.link.sent)
        (report_topic, report), (_, state), (status_topic, status) = bench.link.take()
        assert (report_topic, status_topic) == ("report", "status")
        assert report["total"]["ok"] == 1
        assert state["phase"] == "stopping"
        assert (status["online"], status["reason"]) == (False, "stopping")
        bench.link.connect()  # once more, while the service ends
        (_, status), _ = bench.link.take()
        assert status["online"] is False

    run(test)


def test_a_device_without_a_broker_tells_its_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        bench.world.level = ThermalLevel.HOT
        await asyncio.sleep(2)
        bench.publisher.farewell()
        assert bench.publisher.status()["state"]["thermal"]["level"] == "hot"

    with caplog.at_level(logging.INFO):
        run(test, linked=False)
    assert "event=throttle-start" in caplog.text


@pytest.mark.slow
def test_an_hour_of_trouble_is_less_than_two_hundred_lines_of_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        bench.world.link_states["fleet"] = LinkState.UNREACHABLE
        for second in range(3600):
            bench.world.sensor = bench.world.sensor.MISSING if second % 3 else bench.world.sensor.OK
            await asyncio.sleep(1)

    with caplog.at_level(logging.INFO):
        run(test)
    assert 10 < len(caplog.records) < 200


def test_the_status_does_not_use_up_the_window_of_the_next_report() -> None:
    async def test(bench: Bench) -> None:
        bench.link.connect()
        bench.answer()
        assert bench.publisher.status()["report"]["recent"][0]["by_placement"] == {"local": {"ok": 1}}
        await asyncio.sleep(10.5)
        [report] = [content for topic, content in bench.link.take() if topic == "report"]
        assert report["recent"][0]["by_placement"] == {"local": {"ok": 1}}

    run(test)
