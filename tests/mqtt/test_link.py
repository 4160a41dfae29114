"""A link lives through what brokers, networks, other clients and our own handlers do to it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from edgeinfer.config import BrokerSection
from edgeinfer.errors import LinkError
from edgeinfer.mqtt.backoff import WAITS, Waits
from edgeinfer.mqtt.connect import Address, Resolver
from edgeinfer.mqtt.link import Keep, LinkState, Message
from edgeinfer.mqtt.outbox import Outbox
from tests.mqtt.links import Inbox, connected, running
from tests.nearby.rig import until
from tests.system.broker import Broker, free_port
from tests.system.proxy import proxy_to

pytestmark = pytest.mark.system

NOBODY = 0x10


async def test_a_message_arrives_with_all_its_properties(broker: Broker) -> None:
    async with connected(broker.section()) as link:
        inbox = Inbox(link, "a/+")
        message = Message(
            "a/b", b"\x00payload", qos=1, response_topic="r/t", correlation=b"\x00\xff", content_type="text/plain",
            expiry_s=100, user=(("name", "value"), ("name", "again"), ("ü", "€")),
        )  # fmt: skip
        assert await link.publish(message, timeout_s=2) == 0
        await until(lambda: len(inbox) == 1)
        assert inbox[0] == message
        assert inbox[0].user_value("name") == "value"


async def test_publishing_tells_when_nobody_listens(broker: Broker) -> None:
    async with connected(broker.section()) as link:
        assert await link.publish(Message("nobody/here", b"x"), timeout_s=2) == NOBODY


async def test_nagle_is_off(broker: Broker) -> None:
    """A QoS 1 round trip takes well under a millisecond; with Nagle and delayed acknowledgements it took 42."""
    async with connected(broker.section()) as link:
        loop = asyncio.get_running_loop()
        trips = []
        for _ in range(20):
            started = loop.time()
            await link.publish(Message("t", b"x" * 1000), timeout_s=2)
            trips.append(loop.time() - started)
        assert sorted(trips)[10] < 0.02


async def test_subscriptions_are_restored_after_a_restart_of_the_broker(broker: Broker) -> None:
    async with connected(broker.section()) as link, connected(broker.section(), client_id="two") as other:
        inbox = Inbox(link, "command/#")
        births: list[str] = []
        link.on_connected(lambda: births.append("birth"))
        broker.restart()
        await until(lambda: link.snapshot().connects == 2 and other.snapshot().connects == 2)
        assert await other.publish(Message("command/go", b"now"), timeout_s=2) == 0
        await until(lambda: inbox.payloads == [b"now"])
        assert births == ["birth", "birth"]


async def test_births_come_when_subscriptions_stand(broker: Broker) -> None:
    """Who reacts to a birth at once must reach us: it is published after SUBACK."""
    async with connected(broker.section(), client_id="two") as other, running(broker.section()) as link:
        inbox = Inbox(link, "to/one")
        other.subscribe("from/one", lambda _: other.send(Message("to/one", b"hello", qos=1), Keep.FIFO))
        link.on_connected(lambda: link.send(Message("from/one", b"birth", qos=1), Keep.FIFO))
        await until(lambda: inbox.payloads == [b"hello"])


async def test_connects_by_itself_when_the_broker_comes_later(tmp_path: Path) -> None:
    section = BrokerSection("127.0.0.1", free_port())
    async with running(section) as link:
        await until(lambda: link.state is LinkState.UNREACHABLE)
        assert str(section.port) in link.snapshot().reason
        with pytest.raises(LinkError, match="not connected"):
            await link.publish(Message("t", b""), timeout_s=1)
        with Broker(tmp_path, port=section.port):
            await until(lambda: link.connected)


async def test_a_name_that_hangs_or_fails_blocks_nothing(broker: Broker) -> None:
    """The resolver hangs (on its thread), then fails, then answers; the loop and the exit never wait for it."""
    answers: list[list[Address] | OSError] = [OSError("no such name"), [(2, ("127.0.0.1", broker.port))]]
    asked: list[str] = []
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def resolve(host: str, _: int) -> list[Address]:
        asked.append(host)
        if len(asked) == 1:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    section = BrokerSection("broker.invalid", broker.port)
    states: list[str] = []
    async with running(section, resolver=Resolver(resolve)) as link:
        link.on_state(lambda _: states.append(link.snapshot().reason))
        await until(lambda: bool(asked))
        for _ in range(10):
            started = loop.time()
            await asyncio.sleep(0.01)
            assert loop.time() - started < 0.5
        assert asked == ["broker.invalid"], "while a question hangs no other is asked"
        release.set()
        await until(lambda: link.connected)
        assert "broker.invalid cannot be resolved" in states[0]


async def test_rejected_credentials_have_a_state_and_heal_when_the_file_is_mended(tmp_path: Path) -> None:
    passwords, mine = tmp_path / "passwords", tmp_path / "mine"
    subprocess.run(["mosquitto_passwd", "-c", "-b", str(passwords), "dev", "right"], check=True, capture_output=True)
    passwords.chmod(0o600)
    mine.write_text("wrong\n")
    with Broker(tmp_path, [f"password_file {passwords}"], anonymous=False) as broker:
        section = broker.section(username="dev", password_file=mine)
        async with running(section, dice=random.Random(1)) as link:
            await until(lambda: link.state is LinkState.AUTH_FAILED)
            await asyncio.sleep(1)
            assert broker.log().count("New client connected") + broker.log().count("not authorised") <= 2
        mine.write_text("right\n")
        async with connected(section):
            pass
        async with running(broker.section(username="dev", password_file=tmp_path / "absent")) as link:
            await until(lambda: "absent cannot be read" in link.snapshot().reason)


async def test_two_clients_with_one_id_do_not_throw_each_other_out_for_ever(broker: Broker) -> None:
    """Left alone, a pair of naive clients connects eleven times in ten seconds, for ever."""
    async with connected(broker.section()) as first, running(broker.section()) as second:
        await until(lambda: LinkState.TAKEN_OVER in {first.state, second.state}, within_s=10)
        victim = first if first.state is LinkState.TAKEN_OVER else second
        assert "client id 'one'" in victim.snapshot().reason
        before = first.snapshot().connects + second.snapshot().connects
        assert before <= 8
        await asyncio.sleep(2)
        assert first.snapshot().connects + second.snapshot().connects <= before + 1


async def test_too_large_for_the_broker_never_reaches_it(tmp_path: Path) -> None:
    with Broker(tmp_path, ["max_packet_size 2000"]) as broker:
        async with connected(broker.section()) as link:
            inbox = Inbox(link, "t")
            assert link.max_packet_bytes == 2000
            with pytest.raises(LinkError, match="maximum packet of 2000"):
                await link.publish(Message("t", b"x" * 2000), timeout_s=2)
            for keep in Keep:
                link.send(Message("t", b"x" * 2000, qos=1), keep)
            overhead = 2 + 1 + 2 + 2 + 1 + 2  # topic, packet id, empty properties, header with length
            link.send(Message("t", b"x" * (2000 - overhead), qos=1), Keep.FIFO)
            await until(lambda: [len(payload) for payload in inbox.payloads] == [2000 - overhead])
            snapshot = link.snapshot()
            assert snapshot.counters["dropped.unsendable"] == 4
            assert snapshot.connects == 1


async def test_a_message_held_for_a_broker_with_a_smaller_limit_does_not_cost_the_link(tmp_path: Path) -> None:
    section = BrokerSection("127.0.0.1", free_port())
    async with running(section) as link:
        link.send(Message("t", b"x" * 3000, qos=1), Keep.FIFO)
        link.send(Message("t", b"small", qos=1), Keep.FIFO)
        inbox = Inbox(link, "t")
        with Broker(tmp_path, ["max_packet_size 2000"], port=section.port):
            await until(lambda: inbox.payloads == [b"small"])
            assert link.snapshot().counters["dropped.unsendable"] == 1
            assert link.snapshot().connects == 1


@pytest.mark.slow
async def test_half_open_is_noticed_within_two_keepalives(broker: Broker) -> None:
    async with proxy_to(broker.port) as proxy, connected(broker.section(port=proxy.port, keepalive_s=2)) as link:
        loop = asyncio.get_running_loop()
        await link.publish(Message("t", b"x"), timeout_s=2)
        proxy.swallow = True
        began = loop.time()
        await until(lambda: not link.connected, within_s=10)
        assert loop.time() - began <= 4.0
        assert "nothing heard" in link.snapshot().reason
        proxy.swallow = False
        await until(lambda: link.connected, within_s=10)


@pytest.mark.slow
async def test_a_quiet_connection_is_kept(broker: Broker) -> None:
    async with connected(broker.section(keepalive_s=1)) as link:
        await asyncio.sleep(4)
        assert link.connected
        assert link.snapshot().connects == 1


async def test_a_frozen_broker_fails_a_publish_in_its_time(broker: Broker) -> None:
    async with connected(broker.section()) as link:
        broker.freeze()
        try:
            with pytest.raises(LinkError, match="not acknowledged within"):
                await link.publish(Message("t", b"x"), timeout_s=0.2)
        finally:
            broker.thaw()
        assert await link.publish(Message("t", b"x"), timeout_s=5) == NOBODY


async def test_a_handler_that_raises_is_counted_and_the_next_message_is_handled(broker: Broker) -> None:
    async with connected(broker.section()) as link:
        good = Inbox(link, "good")

        def bad(_: Message) -> None:
            raise ValueError("a bug in a handler")

        link.subscribe("bad", bad)
        for payload in (b"\xff\xfe{", b"", b"[]", b"[" * 100_000):
            link.send(Message("bad", payload, qos=1), Keep.FIFO)
        link.send(Message("good", b"good", qos=1), Keep.FIFO)
        await until(lambda: good.payloads == [b"good"])
        assert link.snapshot().counters["handler_errors"] == 4
        assert link.snapshot().connects == 1


async def test_a_handler_may_publish_and_subscribe(broker: Broker) -> None:
    async with connected(broker.section()) as link:
        inbox: list[bytes] = []

        def first(_: Message) -> None:
            link.subscribe("second", lambda message: inbox.append(message.payload))
            link.send(Message("second", b"from a handler", qos=1), Keep.FIFO)

        link.subscribe("first", first)
        link.send(Message("first", b"", qos=1), Keep.FIFO)
        await until(lambda: inbox == [b"from a handler"])


async def test_impossible_topics_are_counted_not_sent(broker: Broker) -> None:
    async with connected(broker.section()) as link:
        for topic in ("", "a+b", "LightSensor#1", "x\0y", "$SYS/x", "t" * 70_000, "\ud800"):
            link.send(Message(topic, b"x"), Keep.FIFO)
            with pytest.raises(LinkError, match="cannot be published"):
                await link.publish(Message(topic, b"x"), timeout_s=1)
        assert await link.publish(Message("fine", b"x"), timeout_s=2) == NOBODY
        assert link.snapshot().connects == 1


async def test_offline_messages_are_held_in_bounds_and_delivered(broker: Broker) -> None:
    """Hours offline: the newest telemetry, the last events, nothing else, and flat memory."""
    async with connected(broker.section(), client_id="two") as other:
        inbox = Inbox(other, "#")
        async with running(broker.section(), outbox=Outbox(max_messages=10, max_bytes=1 << 20)) as link:
            before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for number in range(20_000):
                payload = b"%d" % number + b" " * 1000
                link.send(Message("report", payload), Keep.LATEST)
                link.send(Message("event", payload, qos=1), Keep.FIFO)
                link.send(Message("result", payload), Keep.NEVER)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 10_000
            await until(lambda: len(inbox) == 11)
            numbers = [(message.topic, int(message.payload)) for message in inbox]
            assert numbers == [*(("event", number) for number in range(19_990, 20_000)), ("report", 19_999)]
            counters = link.snapshot().counters
            assert counters["dropped.offline"] == 20_000
            assert counters["dropped.replaced"] == 19_999
            assert counters["dropped.overflow"] == 19_990


async def test_unacknowledged_events_are_sent_again_after_an_outage(broker: Broker) -> None:
    """At least once, in order, over a connection that dies with them in flight."""
    async with proxy_to(broker.port) as proxy, connected(broker.section(), client_id="two") as other:
        inbox = Inbox(other, "event")
        async with connected(broker.section(port=proxy.port)) as link:
            proxy.swallow = True
            for number in range(30):
                link.send(Message("event", b"%d" % number, qos=1), Keep.FIFO)
            await asyncio.sleep(0.1)
            assert link.snapshot().unfinished == 30
            proxy.swallow = False
            proxy.cut()
            await until(lambda: link.snapshot().unfinished == 0 and link.connected)
            await until(lambda: [int(payload) for payload in inbox.payloads] == list(range(30)))


async def test_the_window_is_what_the_broker_allows(tmp_path: Path) -> None:
    with Broker(tmp_path, ["max_inflight_messages 2"]) as broker:
        async with connected(broker.section()) as link:
            codes = await asyncio.gather(*(link.publish(Message("t", b"x"), timeout_s=5) for _ in range(50)))
            assert codes == [NOBODY] * 50
            assert link.snapshot().connects == 1


async def test_commands_during_an_outage_are_not_kept_for_us(broker: Broker) -> None:
    """Documented: the session is not kept, so nothing stale arrives, and the sender sees that nobody was there."""
    async with contextlib.AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxy_to(broker.port))
        other = await stack.enter_async_context(connected(broker.section(), client_id="two"))
        async with connected(broker.section(port=proxy.port)) as link:
            inbox = Inbox(link, "command/+")
            await link.publish(Message("command/before", b""), timeout_s=5)
            await until(lambda: bool(inbox))
            proxy.upstream = free_port()  # nobody is there
            proxy.cut()
            await until(lambda: not link.connected)
            async with asyncio.timeout(5):
                while await other.publish(Message("command/stale", b""), timeout_s=2) != NOBODY:
                    inbox.clear()  # the broker had not noticed yet: it gave us this one, or tried to
            proxy.upstream = broker.port
            await until(lambda: link.connected)
            await other.publish(Message("command/new", b""), timeout_s=2)
            await until(lambda: [message.topic for message in inbox][-1:] == ["command/new"])
            assert "command/stale" not in {message.topic for message in inbox}


async def test_the_last_message_arrives_and_no_will_follows(broker: Broker) -> None:
    will = Message("status", b"lost", qos=1, retain=True)
    async with connected(broker.section(), client_id="two") as other:
        inbox = Inbox(other, "#")
        async with connected(broker.section(), will=will) as link:
            link.send(Message("big", b"x" * 3_000_000, qos=1), Keep.FIFO)
            link.send(Message("status", b"stopping", qos=1, retain=True), Keep.LATEST)
        await until(lambda: len(inbox) == 2)
        assert {message.topic: len(message.payload) for message in inbox} == {"big": 3_000_000, "status": 8}
        await asyncio.sleep(0.2)
        assert len(inbox) == 2, "the will came although we said goodbye"
        assert link.state is LinkState.CLOSED


async def test_leaving_takes_bounded_time_when_the_broker_is_frozen(broker: Broker) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with connected(broker.section()) as link:
            broker.freeze()
            link.send(Message("t", b"x", qos=1), Keep.FIFO)
            began = loop.time()
        assert loop.time() - began < 4
    finally:
        broker.thaw()


async def test_the_will_is_published_when_the_process_is_killed(broker: Broker) -> None:
    """And who subscribes later sees it: birth and will are both retained."""
    script = textwrap.dedent(
        f"""
        import asyncio
        from edgeinfer.clock import MonotonicClock
        from edgeinfer.config import BrokerSection
        from edgeinfer.mqtt.link import Keep, Message, MqttLink

        will = Message("status", b"offline", qos=1, retain=True)
        link = MqttLink(
            BrokerSection("127.0.0.1", {broker.port}), name="x", client_id="x", clock=MonotonicClock(), will=will
        )
        link.on_connected(lambda: link.send(Message("status", b"online", qos=1, retain=True), Keep.LATEST))
        asyncio.run(link.run())
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        async with connected(broker.section()) as link:
            inbox = Inbox(link, "status")
            await until(lambda: inbox.payloads == [b"online"], within_s=15)
            process.send_signal(signal.SIGKILL)
            await until(lambda: inbox.payloads == [b"online", b"offline"], within_s=15)
        async with connected(broker.section(), client_id="later") as link:
            late = Inbox(link, "status")
            await until(lambda: len(late) == 1)
            assert (late[0].payload, late[0].retain) == (b"offline", True)
    finally:
        process.kill()
        process.wait()


async def test_a_broker_that_talks_nonsense_is_left_and_tried_again() -> None:
    answers = iter([
        b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x20\x00", b"\x20\xff\xff\xff\xff\x01",
        b"\x20\x06\x00\x00\x03\x21\x00", b"\x20\x03\x00\x00\x05\xff\xff\xff",
        # an accepted connection, then a PUBLISH whose topic length overruns it, bad topic bytes, bad properties
        b"\x20\x03\x00\x00\x00\x30\x04\x00\xff\x61\x61", b"\x20\x03\x00\x00\x00\x30\x06\x00\x02\xff\xfe\x00\x00",
        b"\x20\x03\x00\x00\x00\x30\x06\x00\x01a\x02\xfe\xfe",
    ])  # fmt: skip
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(OSError):
            await reader.read(1000)
            writer.write(next(answers, b""))
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        async with running(BrokerSection("127.0.0.1", server.sockets[0].getsockname()[1])):
            await until(lambda: connections >= 9, within_s=20)
    finally:
        server.close()


async def test_a_port_that_never_answers_is_unreachable_in_time() -> None:
    """It accepts the connection and says nothing."""
    server = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
    try:
        async with running(BrokerSection("127.0.0.1", server.sockets[0].getsockname()[1])) as link:
            await until(lambda: link.state is LinkState.UNREACHABLE, within_s=6)
            assert "did not answer CONNECT" in link.snapshot().reason
    finally:
        server.close()


async def test_an_outage_of_hours_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hundreds of attempts, as in hours at the real pace."""
    monkeypatch.setitem(WAITS, LinkState.UNREACHABLE, Waits(1_000_000, 1.0, 1_000_000))
    asked: list[str] = []

    def resolve(host: str, _: int) -> list[Address]:
        asked.append(host)
        raise OSError("no such name")

    with caplog.at_level("INFO", "edgeinfer"):
        async with running(BrokerSection("broker.invalid"), resolver=Resolver(resolve)) as link:
            for number in range(500):
                link.send(Message("event", b"%d" % number, qos=1), Keep.FIFO)
            await until(lambda: len(asked) > 300, within_s=10)
        assert len(caplog.records) <= 3, caplog.text
    assert sum(thread.name == "edgeinfer-resolve" for thread in threading.enumerate()) <= 1
