"""The offload executor keeps the executor contract over a real broker, and its own promises about peers and scope."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from edgeinfer.config import OffloadSection
from edgeinfer.execution.executor import Estimate
from edgeinfer.execution.offload import KnownModel
from edgeinfer.mqtt.exchange import Answer, encode_answer
from edgeinfer.mqtt.link import Keep, Message
from edgeinfer.mqtt.topics import Topics
from edgeinfer.oip import encode_response, response_header
from edgeinfer.quantity import Bytes
from edgeinfer.request import (
    DataScope,
    Deadlines,
    Expired,
    Failure,
    InferRequest,
    OutcomeKind,
    Reason,
    Refusal,
    Result,
)
from tests.execution.executor_contract import MS, Case, ExecutorContract, Rig, Timing
from tests.execution.fake import Script
from tests.nearby.rig import Site, digest_of, manifest_of, open_site, until
from tests.system.broker import Broker
from tests.system.proxy import proxy_to

pytestmark = pytest.mark.system

_PROMISES = Estimate(1 * MS, 1 * MS)
"""So that the peer takes on what it can't finish; else it would refuse, which is not what is tested."""
_SCRIPTS = {
    "quick": Script(1 * MS),
    "slow": Script(300 * MS, estimate=_PROMISES),
    "stuck": Script(hangs=True, estimate=_PROMISES),
    "broken": Script(1 * MS, ending=Failure("crashed", "SIGSEGV")),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Broker]:
    """One broker for the module: every test has a site of its own on it."""
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder)) as running:
        yield running


@pytest.fixture
async def site(shared: Broker) -> AsyncIterator[Site]:
    async with open_site(shared.section()) as opened:
        await opened.device()
        yield opened


@pytest.mark.slow
class TestOffloadKeepsTheContract(ExecutorContract):
    timing = Timing(slow_ns=300 * MS, short_ns=50 * MS, tolerance_ns=150 * MS)
    broker: ClassVar[Broker]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _broker(cls, shared: Broker) -> None:
        cls.broker = shared

    @asynccontextmanager
    async def open_rig(self) -> AsyncIterator[Rig]:
        async with open_site(self.broker.section()) as site:
            await site.device()
            peer = await site.peer(script=lambda request: _SCRIPTS[request.model], models=tuple(_SCRIPTS))

            def request(case: Case, deadlines: Deadlines, accept_late: bool) -> InferRequest:
                made = site.request(case.name.lower(), accept_late=accept_late)
                return replace(made, deadlines=deadlines)

            async def quiet() -> None:
                async with asyncio.timeout(3):
                    while peer.executor.active.total() or peer.executor.leased or peer.server.snapshot().unanswered:
                        await asyncio.sleep(0.005)

            yield Rig(site.executor, site.clock, request, site.answers, lambda: 0, quiet)


# Who may be asked


async def test_data_of_scope_device_never_leaves(site: Site) -> None:
    peer = await site.peer()
    for ending in (
        site.executor.estimate(site.request(scope=DataScope.DEVICE)),
        await site.executor.execute(site.request(scope=DataScope.DEVICE)),
    ):
        assert isinstance(ending, Refusal)
        assert ending.reason is Reason.DATA_SCOPE
    assert "asked" not in peer.server.snapshot().counters


async def test_scope_is_only_blamed_for_a_peer_that_could_serve_else(site: Site) -> None:
    nobody = site.executor.estimate(site.request(scope=DataScope.DEVICE))
    assert isinstance(nobody, Refusal)
    assert nobody.reason is Reason.MODEL_UNAVAILABLE


async def test_data_of_scope_site_stays_on_the_site(site: Site) -> None:
    cloud = await site.peer("cloud", location="any")
    ending = await site.executor.execute(site.request(scope=DataScope.SITE))
    assert isinstance(ending, Refusal)
    assert ending.reason is Reason.DATA_SCOPE
    assert "cloud" in ending.detail
    assert "asked" not in cloud.server.snapshot().counters
    ending = await site.executor.execute(site.request(scope=DataScope.ANY))
    assert isinstance(ending, Result)


async def test_a_peer_with_another_bundle_is_not_asked(site: Site) -> None:
    peer = await site.peer(version="1.0.1")
    site.known["echo"] = KnownModel(digest_of("echo", "1.0.0"), manifest_of("echo"))
    ending = await site.executor.execute(site.request())
    assert isinstance(ending, Refusal)
    assert ending.reason is Reason.MODEL_UNAVAILABLE
    assert "another bundle" in ending.detail
    assert "asked" not in peer.server.snapshot().counters


async def test_stateful_models_are_never_offloaded(site: Site) -> None:
    peer = await site.peer(stateful=True)
    ending = await site.executor.execute(site.request())
    assert isinstance(ending, Refusal)
    assert "stateful" in ending.detail
    assert "asked" not in peer.server.snapshot().counters


async def test_too_large_for_the_config_is_refused_with_the_numbers(shared: Broker) -> None:
    async with open_site(shared.section()) as site:
        await site.device(OffloadSection(max_request=Bytes(1000)))
        await site.peer()
        assert isinstance(await site.executor.execute(site.request(elements=100)), Result)
        ending = await site.executor.execute(site.request(elements=1000))
        assert isinstance(ending, Refusal)
        assert ending.reason is Reason.COST
        assert "offload.max_request is 1000" in ending.detail


async def test_too_large_for_the_broker_is_refused_and_the_link_lives(tmp_path: Path) -> None:
    with Broker(tmp_path, ["max_packet_size 4000"]) as broker:
        async with open_site(broker.section()) as site:
            await site.device()
            await site.peer()
            for elements in (1000, 950):  # 950: the payload fits, the packet around it doesn't
                ending = await site.executor.execute(site.request(elements=elements))
                assert isinstance(ending, Refusal)
                assert ending.reason is Reason.COST
                assert "4000" in ending.detail
            assert isinstance(await site.executor.execute(site.request()), Result)
            assert site.link.snapshot().connects == 1


async def test_no_more_than_max_in_flight(shared: Broker) -> None:
    async with open_site(shared.section()) as site:
        await site.device(OffloadSection(max_in_flight=3))
        await site.peer(script=lambda _: Script(100 * MS))
        endings = await asyncio.gather(*(site.executor.execute(site.request()) for _ in range(5)))
        assert sum(isinstance(ending, Result) for ending in endings) == 3
        refused = [ending for ending in endings if isinstance(ending, Refusal)]
        assert [ending.reason for ending in refused] == [Reason.QUEUE_FULL] * 2
        assert site.executor.snapshot().in_flight == 0


# What can go wrong


async def test_nobody_listening_is_an_immediate_no(site: Site) -> None:
    """The peer is gone, its retained advert is not: the broker's acknowledgement says so at once."""
    peer = await site.peer()
    peer.tasks[1].cancel()  # the link: its goodbye takes the subscription away
    await asyncio.wait({peer.tasks[1]})
    await until(lambda: not site.executor.snapshot().usable_peers)
    stale = await _stale_advert(site)
    request = site.request(within_ms=5000)
    started_ns = site.clock.now_ns()
    ending = await site.executor.execute(request)
    assert isinstance(ending, Refusal)
    assert ending.reason is Reason.MODEL_UNAVAILABLE
    assert f"nobody listens at {stale}" in ending.detail
    assert site.clock.now_ns() - started_ns < 500 * MS
    assert isinstance(site.executor.estimate(site.request()), Refusal), "its circuit is open now"


async def test_when_nobody_listens_another_peer_is_asked(site: Site) -> None:
    await _stale_advert(site)
    await site.peer("attic")
    for _ in range(8):  # the draw may pick the living one first
        assert isinstance(await site.executor.execute(site.request()), Result)
    assert site.executor.snapshot().counters["nobody_listens"] <= 1


async def test_a_frozen_peer_costs_three_requests_and_comes_back(shared: Broker) -> None:
    async with open_site(shared.section()) as site, proxy_to(shared.port) as proxy:
        await site.device()
        await site.peer(section=shared.section(port=proxy.port))
        assert isinstance(await site.executor.execute(site.request()), Result)
        proxy.swallow = True
        endings = [await site.executor.execute(site.request(within_ms=60)) for _ in range(5)]
        assert [type(ending) for ending in endings[:3]] == [Expired] * 3
        refusal = site.executor.estimate(site.request())
        assert isinstance(refusal, Refusal)
        assert "hall" in refusal.detail
        assert site.executor.snapshot().counters["sent"] == 4
        proxy.swallow = False
        proxy.cut()  # what was swallowed is lost for good: the peer's link notices and reconnects
        await until(lambda: isinstance(site.executor.estimate(site.request()), Estimate), within_s=10)
        assert isinstance(await site.executor.execute(site.request()), Result)


async def test_adverts_that_stop_make_a_peer_stale(shared: Broker) -> None:
    async with open_site(shared.section()) as site, proxy_to(shared.port) as proxy:
        await site.device()
        await site.peer(section=shared.section(port=proxy.port))
        proxy.swallow = True
        await until(lambda: isinstance(site.executor.estimate(site.request()), Refusal), within_s=5)
        refusal = site.executor.estimate(site.request())
        assert isinstance(refusal, Refusal)
        assert "no advert for" in refusal.detail


async def test_a_broker_outage_fails_at_once_and_heals(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        async with open_site(broker.section()) as site:
            await site.device()
            await site.peer(script=lambda _: Script(400 * MS))
            started_ns = site.clock.now_ns()
            asking = asyncio.create_task(site.executor.execute(site.request(within_ms=10_000)), name="asking")
            await asyncio.sleep(0.1)
            broker.stop()
            ending = await asking
            assert isinstance(ending, Failure)
            assert ending.reason == "link"
            assert site.clock.now_ns() - started_ns < 2_000 * MS, "nobody waits for the deadline when the link is gone"
            refusal = site.executor.estimate(site.request())
            assert isinstance(refusal, Refusal)
            assert "link" in refusal.detail
            await asyncio.sleep(0.5)
            broker.start()
            await until(lambda: isinstance(site.executor.estimate(site.request()), Estimate), within_s=10)
            assert isinstance(await site.executor.execute(site.request()), Result)


async def test_a_late_answer_is_counted_and_never_anyones(site: Site) -> None:
    hold = Script(200 * MS, estimate=_PROMISES, heeds_deadline=False)
    peer = await site.peer(script=lambda _: hold)
    first = site.request(within_ms=50)
    ending = await site.executor.execute(first)
    assert isinstance(ending, Expired)
    peer.executor.script = lambda _: Script(1 * MS)
    second = site.request()
    ending = await site.executor.execute(second)
    assert isinstance(ending, Result)
    assert site.answers(second, ending)
    await until(lambda: site.executor.snapshot().counters.get("answer_late", 0) == 1)


async def test_repeated_and_foreign_answers_are_counted_and_ignored(site: Site) -> None:
    peer = await site.peer()
    request = site.request()
    assert isinstance(await site.executor.execute(request), Result)
    await until(lambda: len(site.replies) == 1)
    genuine = site.replies[0]
    for payload in (genuine, replace(genuine, correlation=b"guess"), replace(genuine, correlation=None)):
        peer.link.send(replace(payload, expiry_s=None), Keep.FIFO)
    await until(lambda: len(site.replies) == 4)
    counters = site.executor.snapshot().counters
    assert counters["answer_repeated"] == 1
    assert counters["answer_foreign"] == 2
    assert counters["ok"] == 1


async def test_a_hostile_peers_answers_are_failures(site: Site) -> None:
    """A peer that advertises what it should and answers with anything at all."""
    peer = await site.peer(start=False)
    hostile = _Hostile(site)
    await hostile.start()
    try:
        good = encode_response([("y", "FP32", [1], b"\0\0\0\0")])
        right = Answer(OutcomeKind.OK, b"", version="1.0.0", variant="fp32", digest=digest_of("echo"))
        for answer, body, reason in (
            (replace(right, digest="0" * 64), good, "wrong_digest"),
            (right, replace(good, header=b"{"), "bad_answer"),
            (right, replace(good, tensors=(b"\0" * 40,)), "bad_answer"),
            (right, encode_response([]), "bad_answer"),
            (right, encode_response([("z", "FP32", [1], b"\0\0\0\0")]), "bad_answer"),
            (right, encode_response([("y", "INT64", [1], bytes(8))]), "bad_answer"),
            (right, encode_response([("y", "FP32", [1], b"\0\0\xc0\x7f")]), "bad_answer"),
            (right, encode_response([("y", "FP32", [(1 << 20) + 1], bytes((4 << 20) + 4))]), "bad_answer"),
            (replace(right, variant="huge"), good, "bad_answer"),
            (replace(right, digest=""), good, "bad_answer"),
            (Answer(OutcomeKind.REJECTED, b"", reason="because"), None, "peer_failed"),
            (Answer(OutcomeKind.FAILED, b"", reason="0123456789abcdef" * 4), None, "peer_failed"),
            (Answer(OutcomeKind.FAILED, b"", reason="crashed"), None, "crashed"),
        ):
            hostile.answer, hostile.payload = answer, body
            ending = await site.executor.execute(site.request())
            assert isinstance(ending, Failure), ending
            assert ending.reason == reason
            site.executor._peers._peers["hall"].breaker.answered()  # else it would not be asked again so soon
        lies = encode_response(
            [("y", "FP32", [1], b"\0\0\0\0")],
            model="other",
            version="9.9.9",
            parameters={"label": "safe", "x": "y" * 9000},
        )
        hostile.answer, hostile.payload = replace(right, version="9.9.9"), lies
        ending = await site.executor.execute(site.request())
        assert isinstance(ending, Result)
        header = response_header(ending.payload)
        assert (ending.version, header.model_name, header.model_version) == ("1.0.0", "echo", "1.0.0")
        assert header.parameters == {}, "a model without classes has no label, whatever a peer says"
    finally:
        await hostile.stop()
        assert peer.server.snapshot().unanswered == 0


async def test_garbage_adverts_are_counted_and_harm_nobody(site: Site) -> None:
    peer = await site.peer()
    for payload in (b"\xff\xfe{", b"[]", b'{"online": 1}', b"[" * 100_000):
        peer.link.send(Message(site.topics.advert("liar"), payload, qos=1), Keep.FIFO)
    await until(lambda: site.executor.snapshot().counters.get("advert_malformed") == 4)
    assert isinstance(await site.executor.execute(site.request()), Result)


async def test_an_offline_advert_closes_the_peer(site: Site) -> None:
    peer = await site.peer()
    await peer.stop()
    await until(lambda: not site.executor.snapshot().usable_peers)
    refusal = site.executor.estimate(site.request())
    assert isinstance(refusal, Refusal)
    assert "offline" in refusal.detail


async def test_estimates_follow_what_was_observed(site: Site) -> None:
    await site.peer(script=lambda _: Script(30 * MS))
    seeded = site.executor.estimate(site.request())
    assert isinstance(seeded, Estimate)
    for _ in range(10):
        assert isinstance(await site.executor.execute(site.request()), Result)
    observed = site.executor.estimate(site.request())
    assert isinstance(observed, Estimate)
    assert seeded.p99_ns == 27 * MS, "7 ms from the advert, 20 ms for a network that nobody has measured"
    assert 30 * MS <= observed.p50_ns < 300 * MS


async def test_a_result_says_where_and_how_long_on_the_wire(site: Site) -> None:
    await site.peer(script=lambda _: Script(50 * MS))
    request = site.request()
    ending = await site.executor.execute(request)
    took_ns = site.clock.now_ns() - request.timeline.received_ns
    assert isinstance(ending, Result)
    assert (ending.where, ending.version, ending.variant, ending.digest) == ("hall", "1.0.0", "fp32", digest_of("echo"))
    timeline = request.timeline
    assert timeline.network_ns is not None
    assert timeline.started_ns is not None
    assert timeline.finished_ns is not None
    assert 0 < timeline.network_ns <= took_ns - 50 * MS
    assert timeline.finished_ns - timeline.started_ns >= 50 * MS


async def _stale_advert(site: Site) -> str:
    """Have a peer's advert, retained and alive, without the peer."""
    ghost = await site.peer("ghost", start=False)
    donor = Topics("edgeinfer", site.name, "ghost")
    ghost.server.advertise()  # held in the outbox of a link that never connects
    held = ghost.link._outgoing._outbox.take()
    assert held is not None
    site.link.send(held.message, Keep.FIFO)
    assert held.message.topic == donor.advert("ghost")
    await until(lambda: "ghost" in {peer.name for peer in site.executor.snapshot().peers})
    return "ghost"


class _Hostile:
    """Advertises what `hall` would, and answers every ask with `answer` and `payload`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._peer = site.peers[0]
        self.answer = Answer(OutcomeKind.OK, b"")
        self.payload: object = None
        self._topics = Topics("edgeinfer", site.name, "hall")

    async def start(self) -> None:
        link = self._peer.link
        link._subscriptions.clear()
        link.subscribe(self._topics.infer_filter, self._on_ask)
        self._peer.tasks.append(asyncio.create_task(link.run(), name="hostile.link"))
        await until(lambda: "hall" in self._site.executor.snapshot().usable_peers)

    def _on_ask(self, message: Message) -> None:
        assert message.correlation is not None
        answer = replace(self.answer, correlation=message.correlation)
        reply = encode_answer(answer, self.payload, topic=self._site.topics.offload_reply, expiry_s=5)  # type: ignore[arg-type]
        self._peer.link.send(reply, Keep.FIFO)

    async def stop(self) -> None:
        await self._peer.stop()
