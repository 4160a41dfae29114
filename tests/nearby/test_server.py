"""The nearby service answers what it should, refuses the rest with a reason, and is never told where to write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer import oip
from edgeinfer.clock import MonotonicClock
from edgeinfer.errors import ProtocolError
from edgeinfer.execution.executor import Estimate
from edgeinfer.mqtt.envelope import Advert, decode
from edgeinfer.mqtt.exchange import Answer, Ask, decode_answer, encode_ask
from edgeinfer.mqtt.link import Keep, Message, MqttLink
from edgeinfer.mqtt.topics import Topics
from edgeinfer.nearby import server
from edgeinfer.request import DataScope, OutcomeKind, Payload, Placement, Result
from tests.execution.fake import Script
from tests.nearby.rig import MS, Peer, Site, digest_of, open_site, until
from tests.system.broker import Broker
from tests.system.proxy import proxy_to

pytestmark = pytest.mark.system


class Device:
    """Speaks to a nearby service by hand."""

    def __init__(self, site: Site, link: MqttLink, name: str) -> None:
        self.topics = Topics("edgeinfer", site.name, name)
        self.link = link
        self.replies: list[Message] = []
        link.subscribe(self.topics.offload_reply, self.replies.append)
        self.made = 0

    def ask(self, **changes: object) -> Message:
        """An ask that the peer `hall` would answer with `ok`, but for `changes` of the Ask or the Message."""
        self.made += 1
        of_ask = {key: changes.pop(key) for key in list(changes) if key in Ask.__dataclass_fields__}
        ask = Ask(
            model="echo", digest=digest_of("echo"), scope=DataScope.SITE, budget_ns=2000 * MS,
            correlation=f"{self.topics.device}-{self.made}".encode(),
        )  # fmt: skip
        payload = oip.encode_request([("x", "FP32", [1], b"\0\0\x80\x3f")])
        message = encode_ask(
            replace(ask, **of_ask),  # type: ignore[arg-type]
            payload,
            topic=self.topics.infer("hall"),
            response_topic=self.topics.offload_reply,
        )
        return replace(message, **changes)  # type: ignore[arg-type]

    async def answer(self, message: Message) -> Answer:
        """Send an ask and return its answer."""
        before = len(self.replies)
        await self.link.publish(message, timeout_s=2)
        await until(lambda: len(self.replies) > before)
        return decode_answer(self.replies[-1])


@pytest.fixture
async def site(broker: Broker) -> AsyncIterator[Site]:
    async with open_site(broker.section()) as opened:
        await opened.device()
        yield opened


@pytest.fixture
async def device(site: Site) -> Device:
    device = Device(site, site.link, "device-2")
    await site.link.publish(Message("flush", b""), timeout_s=2)  # its subscription stands
    return device


async def settle(peer: Peer, word: str, count: int) -> None:
    """Wait until the service has counted something."""
    await until(lambda: peer.server.snapshot().counters.get(word, 0) == count)


async def test_an_offloaded_request_is_answered_next_door(site: Site) -> None:
    await site.peer()
    request = site.request()
    ending = await site.executor.execute(request)
    assert isinstance(ending, Result), ending
    assert ending.placement is Placement.NEARBY
    assert ending.where == "hall"
    assert site.answers(request, ending)


async def test_an_answer_says_what_it_needed(site: Site, device: Device) -> None:
    await site.peer(script=lambda _: Script(30 * MS))
    answer = await device.answer(device.ask())
    assert answer.outcome is OutcomeKind.OK
    assert (answer.version, answer.variant, answer.digest) == ("1.0.0", "fp32", digest_of("echo"))
    assert 30 * MS <= answer.run_ns < 200 * MS
    _, payload = oip.decode_response(answer.header, answer.tensors)
    assert bytes(payload.tensors[0]) == b"\0\0\x80\x3f"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scope": DataScope.DEVICE}, "data_scope"),
        ({"digest": "0" * 64}, "model_unavailable"),
        ({"model": "other"}, "model_unavailable"),
        ({"budget_ns": 5 * MS}, "deadline_unreachable"),
        ({"payload": b"{" * 30}, "input_invalid"),
    ],
    ids=["scope", "digest", "model", "budget", "header"],
)
async def test_what_it_cannot_do_is_refused_at_once(
    site: Site, device: Device, changes: dict[str, object], reason: str
) -> None:
    peer = await site.peer(script=lambda _: Script(20 * MS))
    answer = await device.answer(device.ask(**changes))
    assert (answer.outcome, answer.reason) == (OutcomeKind.REJECTED, reason)
    assert answer.detail
    assert not peer.executor.started, "no worker was touched"


async def test_inputs_are_checked_against_the_manifest(site: Site, device: Device) -> None:
    peer = await site.peer()
    for inputs in (
        [("z", "FP32", [1], b"\0\0\0\0")],
        [("x", "INT32", [1], b"\0\0\0\0")],
        [("x", "FP32", [1, 1], b"\0\0\0\0")],
    ):
        payload = oip.encode_request(inputs)
        message = device.ask()
        user = [pair for pair in message.user if pair[0] != oip.HEADER_LENGTH]
        message = replace(
            message, payload=oip.join(payload), user=(*user, (oip.HEADER_LENGTH, str(len(payload.header))))
        )
        answer = await device.answer(message)
        assert (answer.outcome, answer.reason) == (OutcomeKind.REJECTED, "input_invalid")
    assert not peer.executor.started


async def test_data_that_may_not_be_here_is_refused_by_the_peer_too(site: Site, device: Device) -> None:
    """The device never sends it; a device with a bug gets told."""
    await site.peer(location="any")
    answer = await device.answer(device.ask())
    assert (answer.outcome, answer.reason) == (OutcomeKind.REJECTED, "data_scope")


@pytest.mark.parametrize(
    "response_topic",
    [None, "", "edgeinfer/v1/elsewhere/device-2/offload/reply", "{own}/x", "victim", "{site}/device-1/offload/reply"],
)
async def test_it_writes_only_to_the_senders_own_reply_topic(
    site: Site, device: Device, response_topic: str | None
) -> None:
    peer = await site.peer()
    if response_topic:
        own, branch = device.topics.offload_reply, f"edgeinfer/v1/{site.name}"
        response_topic = response_topic.format(own=own, site=branch)
    await device.link.publish(device.ask(response_topic=response_topic), timeout_s=2)
    await settle(peer, "bad_reply_topic", 1)
    assert not peer.executor.started
    assert not device.replies
    assert not site.replies


async def test_a_thousand_requests_without_reply_topic_leave_nothing_behind(site: Site, device: Device) -> None:
    peer = await site.peer()
    for _ in range(1000):
        device.link.send(device.ask(response_topic=None), Keep.FIFO)
    await settle(peer, "bad_reply_topic", 1000)
    await until(lambda: peer.link.snapshot().unfinished == 0)  # an advert may be on its way
    assert peer.server.snapshot().unanswered == 0
    assert (await device.answer(device.ask())).outcome is OutcomeKind.OK


async def test_malformed_asks_are_refused_and_the_next_is_answered(site: Site, device: Device) -> None:
    peer = await site.peer()
    user, bad = device.ask().user, []
    for name in ("model", "digest", "scope", "budget-ms", oip.HEADER_LENGTH):
        without = tuple(pair for pair in user if pair[0] != name)
        bad.append(device.ask(user=without))
        if name not in {"model", "digest"}:
            bad += [
                device.ask(user=((name, value), *without)) for value in ("", "nan", "-1", "1e999", "x" * 1000, "\u0662")
            ]
    bad.append(device.ask(payload=b""))
    for message in bad:
        answer = await device.answer(message)
        assert (answer.outcome, answer.reason) == (OutcomeKind.REJECTED, "input_invalid"), message.user
    assert peer.server.snapshot().counters["malformed"] == len(bad)
    for correlation in (None, b"", b"x" * 65):
        device.link.send(device.ask(correlation=correlation), Keep.FIFO)
    await settle(peer, "no_correlation", 3)
    assert (await device.answer(device.ask())).outcome is OutcomeKind.OK


async def test_a_repetition_is_answered_once(site: Site, device: Device) -> None:
    peer = await site.peer()
    ask = device.ask()
    await device.answer(ask)
    await device.link.publish(ask, timeout_s=2)
    await settle(peer, "repeated", 1)
    assert len(peer.executor.started) == 1
    assert len(device.replies) == 1


async def test_a_retained_request_is_not_run(site: Site, device: Device) -> None:
    await device.link.publish(device.ask(retain=True), timeout_s=2)
    peer = await site.peer()
    await settle(peer, "retained", 1)
    assert not peer.executor.started


async def test_one_device_cannot_starve_another(site: Site, device: Device) -> None:
    """Two of its hundred requests get in; the other device's only one does, too."""
    peer = await site.peer(script=lambda _: Script(100 * MS), max_per_device=2)
    greedy = Device(site, site.link, "greedy")
    for _ in range(100):
        site.link.send(greedy.ask(), Keep.FIFO)
    answer = await device.answer(device.ask())
    assert answer.outcome is OutcomeKind.OK
    await until(lambda: len(greedy.replies) == 100)
    kinds = [decode_answer(reply) for reply in greedy.replies]
    assert sum(answer.outcome is OutcomeKind.OK for answer in kinds) == 2
    assert {answer.reason for answer in kinds if answer.outcome is OutcomeKind.REJECTED} == {"queue_full"}
    assert peer.server.snapshot().by_device == {}


async def test_what_is_taken_back_stops(site: Site, device: Device) -> None:
    peer = await site.peer(script=lambda _: Script(5000 * MS))
    asking = asyncio.create_task(site.executor.execute(site.request(within_ms=10_000)), name="asking")
    await until(lambda: bool(peer.executor.active.total()))
    asking.cancel()
    await until(lambda: not peer.executor.active.total() and not peer.server.snapshot().unanswered)
    stranger = device.ask(correlation=b"x", user=(("cancel", "1"),))
    await device.link.publish(stranger, timeout_s=2)
    await settle(peer, "taken_back", 2)


async def test_a_clean_stop_answers_what_it_has_and_refuses_the_rest(site: Site, device: Device) -> None:
    peer = await site.peer(script=lambda _: Script(150 * MS))
    device.link.send(device.ask(), Keep.FIFO)
    await until(lambda: bool(peer.executor.active.total()))
    peer.scheduler.start_draining()
    peer.server.advertise()
    answer = await device.answer(device.ask())
    assert (answer.outcome, answer.reason) == (OutcomeKind.REJECTED, "draining")
    await until(lambda: not site.executor.snapshot().usable_peers)
    async with asyncio.timeout(2):
        await peer.server.drained()
    await peer.stop()
    await until(lambda: len(device.replies) == 2)
    assert decode_answer(device.replies[-1]).outcome is OutcomeKind.OK


async def test_an_answer_too_large_for_the_broker_is_a_failure(tmp_path: Path) -> None:
    with Broker(tmp_path, ["max_packet_size 1200"]) as broker:
        async with open_site(broker.section()) as site:
            await site.device()
            peer = await site.peer()
            device = Device(site, site.link, "device-2")
            await until(lambda: peer.link.max_packet_bytes == 1200)
            peer.link._outgoing.limits = replace(peer.link._outgoing.limits, max_packet_bytes=300)
            payload = oip.encode_request([("x", "FP32", [100], b"\0" * 400)])
            message = device.ask()
            user = [pair for pair in message.user if pair[0] != oip.HEADER_LENGTH]
            large = replace(
                message, payload=oip.join(payload), user=(*user, (oip.HEADER_LENGTH, str(len(payload.header))))
            )
            answer = await device.answer(large)
            assert (answer.outcome, answer.reason) == (OutcomeKind.FAILED, "answer_too_large")


async def test_the_advert_says_what_is_served_and_how_fast(site: Site) -> None:
    await site.peer(script=lambda _: Script(20 * MS), models=("echo", "other"))
    adverts: list[Message] = []
    site.link.subscribe("edgeinfer/v1/+/hall/advert", adverts.append)
    for _ in range(3):
        assert isinstance(await site.executor.execute(site.request()), Result)
    await until(lambda: any(b'"p50_us"' in message.payload for message in adverts))
    advert = decode(adverts[-1].payload, Advert)
    assert (advert.online, advert.name, advert.location, advert.period_ms) == (True, "hall", "site", 200)
    offers = {offer.name: offer for offer in advert.models}
    assert offers["echo"].digest == digest_of("echo")
    assert offers["echo"].p50_us is not None
    assert 20_000 <= offers["echo"].p50_us < 100_000
    assert (offers["other"].p50_us, offers["other"].p99_us) == (None, 7000), "the toolchain's, until it has run"
    assert advert.max_request_bytes > 1 << 22


async def test_an_advert_outlives_nobody(site: Site, broker: Broker) -> None:
    """Online while it runs, offline after it stops and after its connection dies; retained each time."""
    peer = await site.peer()
    late: list[Advert] = []

    async def newest() -> Advert:
        late.clear()
        link = MqttLink(broker.section(), name="late", client_id="late", clock=MonotonicClock())
        link.subscribe("edgeinfer/v1/+/+/advert", lambda message: late.append(decode(message.payload, Advert)))
        task = asyncio.create_task(link.run(), name="late")
        await until(lambda: bool(late))
        task.cancel()
        await asyncio.wait({task})
        return late[0]

    assert (await newest()).online
    await peer.stop()
    advert = await newest()
    assert (advert.online, advert.reason) == (False, "stopping")
    second = await site.peer("attic")
    assert second.link._session is not None
    second.tasks[0].cancel()
    second.link._session._client.close_socket()  # as a crash would: no goodbye
    await until(lambda: "attic" not in site.executor.snapshot().usable_peers)


async def test_the_executor_survives_an_ask_for_nothing(site: Site) -> None:
    """A payload that isn't OIP at all is the peer's to refuse."""
    await site.peer()
    request = replace(site.request(), payload=Payload(b"{}"))
    ending = await site.executor.execute(request)
    assert not isinstance(ending, Result)
    with pytest.raises(ProtocolError):
        oip.decode_request(b"{}")


async def test_a_burst_of_four_hundred_is_answered_to_the_last(site: Site, device: Device) -> None:
    peer = await site.peer(script=lambda _: Script(20 * MS))
    for _ in range(400):
        device.link.send(device.ask(), Keep.FIFO)
    await until(lambda: len(device.replies) >= 400, within_s=10)
    answers = [decode_answer(reply) for reply in device.replies]
    assert len({answer.correlation for answer in answers}) == len(answers) == 400
    assert {answer.outcome for answer in answers} == {OutcomeKind.OK, OutcomeKind.REJECTED}
    assert {answer.reason for answer in answers} <= {"", "queue_full", "deadline_unreachable"}
    counters = peer.server.snapshot().counters
    assert "answers_lost" not in counters
    assert "overflow" not in counters


async def test_an_answer_is_held_until_the_broker_is_back(site: Site, device: Device, broker: Broker) -> None:
    async with proxy_to(broker.port) as proxy:
        peer = await site.peer(script=lambda _: Script(300 * MS), section=broker.section(port=proxy.port))
        await device.link.publish(device.ask(budget_ns=8000 * MS), timeout_s=2)
        await until(lambda: peer.executor.active.total() == 1)
        proxy.cut()
        await until(lambda: not peer.link.connected)
        await until(lambda: len(device.replies) == 1, within_s=8)
    assert decode_answer(device.replies[0]).outcome is OutcomeKind.OK
    assert "answers_lost" not in peer.server.snapshot().counters


async def test_asks_beyond_all_bounds_are_a_warning_and_stand_in_the_advert(
    site: Site, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_MAX_UNANSWERED", 2)
    monkeypatch.setattr(server, "_MAX_TOLD", 4)
    peer = await site.peer(script=lambda _: Script(hangs=True, estimate=Estimate(1 * MS, 1 * MS)))
    adverts: list[Advert] = []
    device.link.subscribe(device.topics.adverts_filter, lambda message: adverts.append(decode(message.payload, Advert)))
    asks = [device.ask(budget_ns=4000 * MS) for _ in range(10)]
    for message in asks[:2]:
        await device.link.publish(message, timeout_s=2)
    await until(lambda: peer.server.snapshot().unanswered == 2)
    monkeypatch.setattr(peer.server, "_deliver", _never)  # so that refusals pile up, too
    for message in asks[2:]:
        await device.link.publish(message, timeout_s=2)
    await settle(peer, "overflow", 6)
    await until(lambda: adverts[-1:] != [] and adverts[-1].answers_lost == 6)
    warnings = [record.getMessage() for record in caplog.records if record.name == server.__name__]
    assert len(warnings) == 1, "one a minute"
    assert "overflow=1" in warnings[0]


async def _never(*_: object) -> None:
    await asyncio.Event().wait()
