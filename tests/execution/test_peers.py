"""Whatever peers advertise and callers ask: data goes only where its scope allows, to exactly its own bundle."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.clock import LoopClock
from edgeinfer.config import OffloadSection
from edgeinfer.execution.executor import Estimate
from edgeinfer.execution.offload import KnownModel, OffloadExecutor
from edgeinfer.execution.peer import Peer, may_travel
from edgeinfer.mqtt.backoff import LinkState
from edgeinfer.mqtt.envelope import Advert, AdvertModel, encode
from edgeinfer.mqtt.exchange import Answer, cancelled, encode_answer
from edgeinfer.mqtt.message import Keep, Message
from edgeinfer.mqtt.stamp import Stamp
from edgeinfer.mqtt.topics import Topics
from edgeinfer.oip import encode_response
from edgeinfer.request import (
    DataScope,
    Deadlines,
    Failure,
    InferRequest,
    OutcomeKind,
    Payload,
    Reason,
    Refusal,
    Result,
    Timeline,
)
from tests.nearby.rig import manifest_of
from tests.virtual_time import run_virtual

MS = 1_000_000
STAMP = Stamp("", clock_synced=True, boot="", mono_ns=0)
TOPICS = Topics("p", "s", "d")
DIGESTS = {"m": "digest-m", "n": "digest-n"}


class RecordingLink:
    """A link in memory: records what is published, and answers as `behave` says."""

    def __init__(self, behave: Callable[[Message], Answer | int | None] = lambda _: None) -> None:
        self.connected = True
        self.max_packet_bytes: int | None = None
        self.published: list[Message] = []
        self.sent: list[Message] = []
        self._behave = behave
        self._handlers: dict[str, Callable[[Message], None]] = {}
        self._watchers: list[Callable[[LinkState], None]] = []

    def subscribe(self, topic_filter: str, handler: Callable[[Message], None], *, qos: int = 1) -> None:
        self._handlers[topic_filter] = handler

    def on_state(self, callback: Callable[[LinkState], None]) -> None:
        self._watchers.append(callback)

    def send(self, message: Message, keep: Keep) -> None:
        self.sent.append(message)

    async def publish(self, message: Message, *, timeout_s: float) -> int:
        self.published.append(message)
        reaction = self._behave(message)
        if isinstance(reaction, Answer):
            assert message.correlation is not None
            body = encode_response([("y", "FP32", [1], b"\0\0\0\0")])
            answer = replace(reaction, correlation=message.correlation)
            self.deliver(encode_answer(answer, body, topic=TOPICS.offload_reply, expiry_s=1))
            return 0
        return reaction or 0

    def deliver(self, message: Message) -> None:
        """Hand a message to whoever subscribed, as if the broker had sent it."""
        key = TOPICS.offload_reply if message.topic == TOPICS.offload_reply else TOPICS.adverts_filter
        self._handlers[key](message)

    def become(self, state: LinkState) -> None:
        self.connected = state is LinkState.CONNECTED
        for watcher in self._watchers:
            watcher(state)


def advert(name: str, advert: Advert) -> Message:
    return Message(TOPICS.advert(name), encode(advert), retain=True)


def offering(*models: str, location: str = "site", **changes: object) -> Advert:
    offers = [AdvertModel(model, "1.0.0", DIGESTS[model]) for model in models]
    base = Advert(online=True, stamp=STAMP, location=location, models=offers, period_ms=1000)
    return Advert(**{field: getattr(base, field) for field in Advert.__struct_fields__} | changes)


def executor_on(link: RecordingLink, *, seed: int = 1) -> OffloadExecutor:
    return OffloadExecutor(
        link,
        TOPICS,
        OffloadSection(),
        lookup=lambda model, _: KnownModel(DIGESTS[model], manifest_of(model)) if model in DIGESTS else None,
        clock=LoopClock(asyncio.get_running_loop()),
        dice=random.Random(seed),
    )


def ask_for(model: str = "m", scope: DataScope = DataScope.SITE, within_ms: float = 100) -> InferRequest:
    now_ns = round(asyncio.get_running_loop().time() * 1e9)
    return InferRequest(
        model, Payload(b'{"inputs": []}'), Deadlines(now_ns + round(within_ms * MS)), Timeline(now_ns), scope=scope
    )


def ok(message: Message) -> Answer:
    digest = message.user_value("digest") or ""
    return Answer(OutcomeKind.OK, b"", version="1.0.0", variant="fp32", digest=digest)


adverts = st.builds(
    lambda location, online, models, digest, draining, limit: Advert(
        online=online, stamp=STAMP, location=location, draining=draining, max_request_bytes=limit, period_ms=1000,
        models=[AdvertModel(model, "1.0.0", digest or DIGESTS[model]) for model in models],
    ),
    st.sampled_from(["site", "any", "", "SITE", "device", "moon"]), st.booleans(), st.lists(st.sampled_from("mn")),
    st.sampled_from(["", "", "other"]), st.booleans(), st.sampled_from([0, 1, 1 << 20]),
)  # fmt: skip
requests = st.tuples(st.sampled_from("mnx"), st.sampled_from(DataScope))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), adverts), st.lists(requests, max_size=8), st.integers())
def test_data_goes_only_where_it_may(told: dict[str, Advert], asked: list[tuple[str, DataScope]], seed: int) -> None:
    async def main() -> None:
        link = RecordingLink(ok)
        executor = executor_on(link, seed=seed)
        for name, each in told.items():
            link.deliver(advert(name, each))
        for model, scope in asked:
            before = len(link.published)
            request = ask_for(model, scope)
            estimate = executor.estimate(request)
            ending = await executor.execute(request)
            assert isinstance(estimate, Refusal) == isinstance(ending, Refusal)
            assert isinstance(ending, Refusal) or len(link.published) > before
            for message in link.published[before:]:
                peer = told[message.topic.split("/")[3]]
                assert scope is not DataScope.DEVICE
                assert scope is DataScope.ANY or peer.location == "site"
                assert peer.online
                assert message.user_value("digest") == DIGESTS[model]
                assert any(offer.digest == DIGESTS[model] and offer.name == model for offer in peer.models)
        assert not link.sent

    run_virtual(main())


@pytest.mark.parametrize("location", ["site", "any", "", "elsewhere"])
def test_device_scope_travels_nowhere_and_any_everywhere(location: str) -> None:
    assert not may_travel(DataScope.DEVICE, location)
    assert may_travel(DataScope.SITE, location) == (location == "site")
    assert may_travel(DataScope.ANY, location)


def test_a_peer_whose_adverts_stop_is_stale_after_three_periods_and_returns_with_the_next() -> None:
    async def main() -> None:
        link = RecordingLink(ok)
        executor = executor_on(link)
        link.deliver(advert("a", offering("m")))
        await asyncio.sleep(2.9)
        assert not isinstance(executor.estimate(ask_for()), Refusal)
        await asyncio.sleep(0.2)
        assert isinstance(executor.estimate(ask_for()), Refusal)
        link.deliver(advert("a", offering("m")))
        assert not isinstance(executor.estimate(ask_for()), Refusal)

    run_virtual(main())


def test_a_lost_link_forgets_what_peers_offered() -> None:
    """At the next connection retained adverts tell anew; old ones must not be believed meanwhile."""

    async def main() -> None:
        link = RecordingLink(ok)
        executor = executor_on(link)
        link.deliver(advert("a", offering("m")))
        link.become(LinkState.UNREACHABLE)
        assert executor.snapshot().usable_peers == ()
        link.become(LinkState.CONNECTED)
        refusal = executor.estimate(ask_for())
        assert isinstance(refusal, Refusal)
        assert "no advert" in refusal.detail

    run_virtual(main())


def test_a_draining_peer_and_one_for_small_requests_are_passed_over() -> None:
    async def main() -> None:
        link = RecordingLink(ok)
        executor = executor_on(link)
        link.deliver(advert("drains", offering("m", draining=True)))
        link.deliver(advert("small", offering("m", max_request_bytes=1)))
        refusal = await executor.execute(ask_for())
        assert isinstance(refusal, Refusal)
        assert refusal.reason is Reason.MODEL_UNAVAILABLE
        assert "drains: draining" in refusal.detail
        assert "small: takes 1 bytes, not 14" in refusal.detail

    run_virtual(main())


def test_load_is_spread_over_equal_peers_and_leans_to_the_faster() -> None:
    async def main() -> None:
        link = RecordingLink(ok)
        executor = executor_on(link)
        for name in ("a", "b", "c", "busy"):
            link.deliver(advert(name, offering("m", wait_us=500_000 if name == "busy" else 0)))
        for _ in range(200):
            assert isinstance(await executor.execute(ask_for()), Result)
        shares = {name: sum(f"/{name}/" in message.topic for message in link.published) for name in "abc"}
        assert min(shares.values()) > 20, shares
        assert sum(shares.values()) > 190, "the busy one is nobody's better choice"

    run_virtual(main())


def test_no_more_than_two_peers_are_tried_when_nobody_listens() -> None:
    async def main() -> None:
        link = RecordingLink(lambda _: 0x10)
        executor = executor_on(link)
        for name in ("a", "b", "c", "d"):
            link.deliver(advert(name, offering("m")))
        ending = await executor.execute(ask_for())
        assert isinstance(ending, Refusal)
        assert len(link.published) == 2
        assert len({message.topic for message in link.published}) == 2

    run_virtual(main())


def test_a_cancelled_request_is_taken_back() -> None:
    async def main() -> None:
        link = RecordingLink()
        executor = executor_on(link)
        link.deliver(advert("a", offering("m")))
        asking = asyncio.create_task(executor.execute(ask_for()), name="asking")
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        assert [cancelled(message) for message in link.sent] == [link.published[0].correlation]
        assert executor.snapshot().in_flight == 0

    run_virtual(main())


def test_at_most_sixty_four_peers_are_believed() -> None:
    async def main() -> None:
        link = RecordingLink()
        executor = executor_on(link)
        for number in range(70):
            link.deliver(advert(f"peer{number}", offering("m")))
        snapshot = executor.snapshot()
        assert len(snapshot.peers) == 64
        assert snapshot.counters["advert_malformed"] == 6

    run_virtual(main())


def test_bad_answers_keep_firm_requests_away_only_if_they_are_several_and_only_for_a_while() -> None:
    async def main() -> None:
        clock = LoopClock(asyncio.get_running_loop())
        peer = Peer("box", clock=clock, dice=random.Random(1))
        offer = AdvertModel("m", "1.0.0", DIGESTS["m"])
        for _ in range(10):
            peer.observed(offer, round_trip_ns=25 * MS, queue_ns=0, run_ns=20 * MS)
        peer.observed(offer, round_trip_ns=4_000 * MS, queue_ns=0, run_ns=20 * MS)
        assert peer.estimate(offer).finish_p99_ns <= 50 * MS
        peer.observed(offer, round_trip_ns=4_000 * MS, queue_ns=0, run_ns=20 * MS)
        assert peer.estimate(offer).finish_p99_ns == 4_000 * MS
        await asyncio.sleep(61)
        assert peer.estimate(offer).finish_p99_ns <= 50 * MS

    run_virtual(main())


def test_a_peer_that_tells_absurd_times_stays_usable() -> None:
    absurd_ns = 999_999_999_999_999_000

    async def main() -> None:
        link = RecordingLink(lambda message: replace(ok(message), queue_ns=absurd_ns, run_ns=absurd_ns))
        executor = executor_on(link)
        link.deliver(advert("box", offering("m", wait_us=-(10**15), period_ms=10**15)))
        request = ask_for()
        assert isinstance(await executor.execute(request), Result)
        assert request.timeline.network_ns == 0
        estimate = executor.estimate(ask_for())
        assert isinstance(estimate, Estimate)
        assert 0 <= estimate.wait_ns <= estimate.finish_p99_ns < 1_000 * MS
        link.deliver(advert("box", offering("m", wait_us=-(10**15), period_ms=10**15)))
        estimate = executor.estimate(ask_for())
        assert isinstance(estimate, Estimate)
        assert estimate.wait_ns == 0
        await asyncio.sleep(4 * 3600)
        assert isinstance(executor.estimate(ask_for()), Refusal), "an advert is not believed for ever"

    run_virtual(main())


@pytest.mark.parametrize("lie", [{"digest": "other"}, {"variant": "none"}, {"version": ""}], ids=str)
def test_three_answers_that_are_none_open_the_circuit_and_a_good_probe_closes_it(lie: dict[str, str]) -> None:
    lies = True

    async def main() -> None:
        nonlocal lies
        link = RecordingLink(lambda message: replace(ok(message), **(lie if lies else {})))  # type: ignore[arg-type]
        executor = executor_on(link)

        async def ask_after(seconds: float) -> object:
            await asyncio.sleep(seconds)
            link.deliver(advert("box", offering("m")))
            return await executor.execute(ask_for())

        endings = [await ask_after(0) for _ in range(4)]
        assert [type(ending) for ending in endings] == [Failure, Failure, Failure, Refusal]
        assert isinstance(await ask_after(2), Failure), "a probe"
        lies = False
        assert isinstance(await ask_after(0), Refusal)
        assert isinstance(await ask_after(10), Result), "the next probe"
        assert isinstance(await ask_after(0), Result)

    run_virtual(main())


def test_the_words_of_a_peer_are_those_of_a_closed_set() -> None:
    words = itertools.count()

    async def main() -> None:
        link = RecordingLink(lambda _: Answer(OutcomeKind.FAILED, b"", reason=f"word-{next(words)}", detail="x" * 600))
        executor = executor_on(link)
        link.deliver(advert("box", offering("m")))
        endings = [await executor.execute(ask_for()) for _ in range(20)]
        assert {ending.reason for ending in endings if isinstance(ending, Failure)} == {"peer_failed"}
        last = endings[-1]
        assert isinstance(last, Failure)
        assert "word-19" in last.detail
        assert len(last.detail) < 700

    run_virtual(main())


def test_a_peer_without_a_bundle_in_common_is_told_with_both_digests() -> None:
    """Two builds of one recipe differ: without this, such a peer is idle and nobody knows why."""

    async def main() -> None:
        link = RecordingLink()
        executor = executor_on(link)
        foreign = Advert(
            online=True, stamp=STAMP, location="site", models=[AdvertModel("m", "1.0.0", "6ac26d77")], period_ms=1000
        )
        link.deliver(advert("attic", foreign))
        link.deliver(advert("cellar", offering()))
        link.deliver(advert("hall", offering("m")))
        snapshot = executor.snapshot()
        assert snapshot.usable_peers == ("hall",)
        assert snapshot.unusable_peers == {
            "attic": "no bundle in common: m 6ac26d there, digest here",
            "cellar": "no bundle in common: it serves nothing",
        }
        link.become(LinkState.UNREACHABLE)
        assert executor.snapshot().unusable_peers == {}, "the link says it all"

    run_virtual(main())


def test_a_stateful_model_in_common_makes_no_peer_useful() -> None:
    async def main() -> None:
        link = RecordingLink()
        executor = executor_on(link)
        models = [AdvertModel("m", "1.0.0", DIGESTS["m"], stateful=True)]
        link.deliver(advert("a", Advert(online=True, stamp=STAMP, models=models, period_ms=1000)))
        assert executor.snapshot().unusable_peers == {"a": "no bundle in common: it serves m"}

    run_virtual(main())


def test_each_change_of_an_advert_is_one_line_and_a_warning_while_bundles_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        link = RecordingLink()
        executor_on(link)
        other = [AdvertModel("m", "1.0.0", "6ac26d77"), AdvertModel("n", "1.0.0", DIGESTS["n"])]
        for _ in range(30):
            link.deliver(advert("a", offering("m", "n")))
            await asyncio.sleep(1)
        for wait_us in range(30):  # load is no change of what is offered
            link.deliver(advert("a", offering("m", "n", models=other, wait_us=wait_us)))
            await asyncio.sleep(1)
        for _ in range(30):
            link.deliver(advert("a", offering("m", online=False, reason="stopping")))
            await asyncio.sleep(1)

    with caplog.at_level(logging.INFO, logger="edgeinfer.execution.peers"):
        run_virtual(main())
    first, second, third = caplog.records
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING, logging.INFO]
    assert "m digest; n digest at location site" in first.getMessage()
    assert "m 6ac26d there, digest here" in second.getMessage()
    assert "offline (stopping)" in third.getMessage()


def test_a_peer_that_changes_all_the_time_is_no_flood_and_its_last_word_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        link = RecordingLink()
        executor_on(link)
        for second in range(600):
            link.deliver(advert("a", offering("m" if second % 2 else "n")))
            await asyncio.sleep(1)
        for _ in range(12):
            link.deliver(advert("a", offering("m", "n")))
            await asyncio.sleep(1)

    with caplog.at_level(logging.INFO, logger="edgeinfer.execution.peers"):
        run_virtual(main())
    assert 30 <= len(caplog.records) <= 63
    assert "m digest; n digest" in caplog.messages[-1]
