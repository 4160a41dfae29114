"""An `Executor` whose workers are nearby services, reached over MQTT.

Chooses a peer that serves *the same bundle digest* and stands where the request's data scope allows, sends the request
to that peer's own topic and waits for its answer, at most until the deadline. Estimates come from observed round
trips. Peers are `peers`, answers are matched by `conversation`, what travels is `mqtt.exchange`; whether a request
should go at all is the scheduler's decision.

Stateful models are never offloaded: their state lives in a worker here. A request is sent again only while nobody can
have received it (the broker says that nobody listens), to another peer.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from edgeinfer.artifact.manifest import Manifest
from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.config import OffloadSection
from edgeinfer.errors import LinkError
from edgeinfer.execution.conversation import Asked, Conversations, UnderWay
from edgeinfer.execution.executor import Estimate, Stop
from edgeinfer.execution.peer import Peer, PeerSnapshot
from edgeinfer.execution.peer_answer import NO_ANSWERS, read_answer
from edgeinfer.execution.peers import PeerBook
from edgeinfer.mqtt.backoff import LinkState
from edgeinfer.mqtt.envelope import AdvertModel
from edgeinfer.mqtt.exchange import Answer, Ask, encode_ask, encode_cancel
from edgeinfer.mqtt.message import Keep, Message, unsendable
from edgeinfer.mqtt.topics import Topics
from edgeinfer.request import (
    DataScope,
    Expired,
    Failure,
    InferRequest,
    OutcomeKind,
    Placement,
    Reason,
    Refusal,
    Result,
)

_NO_MATCHING_SUBSCRIBERS = 0x10
_MAX_PEERS_ASKED = 2
"""Peers that are tried for one request while the broker says that nobody listens."""
_LATE_PATIENCE_NS = 10 * NS_PER_S
"""How long after its deadline an answer is still waited for when the caller accepts late ones."""

Ending = Result | Refusal | Failure | Expired


class RequestLink(Protocol):
    """What offloading needs of a link; see `MqttLink`, which is one."""

    @property
    def connected(self) -> bool:
        """Whether messages go out and come in."""
        ...

    @property
    def max_packet_bytes(self) -> int | None:
        """Largest packet that the broker takes."""
        ...

    def subscribe(self, topic_filter: str, handler: Callable[[Message], None], *, qos: int = 1) -> None:
        """Have `handler` called with every message that matches."""
        ...

    def on_state(self, callback: Callable[[LinkState], None]) -> None:
        """Have `callback` called with each new state."""
        ...

    def send(self, message: Message, keep: Keep) -> None:
        """Publish, or do as `keep` says."""
        ...

    async def publish(self, message: Message, *, timeout_s: float) -> int:
        """Publish at QoS 1 and return the broker's code, or raise LinkError."""
        ...


@dataclass(frozen=True, slots=True)
class KnownModel:
    """What this device knows of a model that it has itself: only that may be asked for elsewhere."""

    digest: str
    """Of the installed bundle: a peer must serve the same."""
    manifest: Manifest
    """What a peer's answers are checked against: a digest can be repeated by anybody."""

    @property
    def stateful(self) -> bool:
        """Whether its requests stay where its state is."""
        return self.manifest.stateful


@dataclass(frozen=True, slots=True)
class OffloadSnapshot:
    """How offloading stands, and what it has done since the service started."""

    in_flight: int
    usable_peers: tuple[str, ...]
    unusable_peers: dict[str, str]
    """Peers that can't be asked right now, and why; none while the link is down, which says it all."""
    peers: tuple[PeerSnapshot, ...]
    counters: dict[str, int]
    """`sent`, `bytes_sent`; endings `ok`, `rejected`, `expired`, `failed`, `cancelled`; `nobody_listens`; answers that
    were ignored: `answer_late`, `answer_repeated`, `answer_foreign`, `answer_malformed`; `advert_malformed`."""


class OffloadExecutor:
    """Runs requests next door. Loop thread only.

    `lookup(model, version)` tells which bundle this device has of a model, None when it has none.
    """

    def __init__(
        self,
        link: RequestLink,
        topics: Topics,
        section: OffloadSection,
        *,
        lookup: Callable[[str, str | None], KnownModel | None],
        clock: Clock,
        dice: random.Random | None = None,
    ) -> None:
        self._link = link
        self._topics = topics
        self._section = section
        self._lookup = lookup
        self._clock = clock
        self._dice = dice or random.Random()  # noqa: S311  # spreads load, guards nothing
        self._peers = PeerBook(topics, digest_of=self._digest_of, clock=clock, dice=self._dice)
        self._conversations = Conversations(late=self._came_late)
        self._in_flight = 0
        self._counters: Counter[str] = Counter()
        link.subscribe(topics.adverts_filter, self._peers.advertised)
        link.subscribe(topics.offload_reply, self._conversations.answered)
        link.on_state(self._on_link)

    @property
    def placement(self) -> Placement:
        """Nearby."""
        return Placement.NEARBY

    def snapshot(self) -> OffloadSnapshot:
        """Return how offloading stands."""
        peers = self._peers.snapshot()
        return OffloadSnapshot(
            in_flight=self._in_flight,
            usable_peers=tuple(peer.name for peer in peers if peer.usable) if self._link.connected else (),
            unusable_peers={peer.name: peer.why_not for peer in peers if peer.why_not and self._link.connected},
            peers=peers,
            counters=dict(self._counters + self._conversations.counters + self._peers.counters),
        )

    def _digest_of(self, model: str) -> str | None:
        known = self._lookup(model, None)
        return None if known is None else known.digest

    def estimate(self, request: InferRequest) -> Estimate | Refusal:
        """Return what the best peer would take, or why none can be asked now."""
        able = self._able(request)
        if isinstance(able, Refusal):
            return able
        return min((peer.estimate(offer) for peer, offer in able), key=lambda estimate: estimate.finish_p99_ns)

    def begin(
        self,
        request: InferRequest,  # noqa: ARG002
        ended: Callable[[Ending], None],  # noqa: ARG002
        *,
        behind: bool = False,  # noqa: ARG002
    ) -> Stop | None:
        """Next door is never so near that it is worth it. See `Executor.begin`."""
        return None

    async def execute(self, request: InferRequest) -> Ending:
        """Have a peer run `request`. See `Executor.execute`."""
        request.timeline.dispatched_ns = self._clock.now_ns()
        tried: frozenset[str] = frozenset()
        refusal: Refusal | None = None
        while len(tried) < _MAX_PEERS_ASKED:
            able = self._able(request, tried)
            if isinstance(able, Refusal):
                refusal = refusal or able
                break
            peer, offer = self._choose(able)
            ending = await self._ask(request, peer, offer)
            if ending is not None:
                return ending
            tried |= {peer.name}
            refusal = Refusal(Reason.MODEL_UNAVAILABLE, f"nobody listens at {peer.name}")
        self._counters["rejected"] += 1
        assert refusal is not None, "every way out of the loop sets it"
        return refusal

    def _able(
        self, request: InferRequest, tried: frozenset[str] = frozenset()
    ) -> list[tuple[Peer, AdvertModel]] | Refusal:
        """Return the peers that may and can be asked, at least one. Nothing is ever sent to any other.

        `data_scope` only when a peer could serve the request, were its data allowed there.
        """
        known = self._lookup(request.model, request.version)
        if known is None:
            return Refusal(Reason.MODEL_UNAVAILABLE, f"{request.model} is not installed here, so no peer can be judged")
        if known.stateful:
            return Refusal(Reason.MODEL_UNAVAILABLE, f"{request.model} is stateful and is never offloaded")
        if not self._link.connected:
            return Refusal(Reason.MODEL_UNAVAILABLE, "the site link is down")
        if self._in_flight >= self._section.max_in_flight:
            return Refusal(Reason.QUEUE_FULL, f"{self._in_flight} offloaded requests are in flight")
        size = request.payload.size_bytes
        if size > self._section.max_request:
            return Refusal(Reason.COST, f"{size} bytes; offload.max_request is {self._section.max_request}")
        if (limit := self._link.max_packet_bytes) is not None and size >= limit:
            return Refusal(Reason.COST, f"{size} bytes; the broker takes packets of {limit}")
        able = self._peers.able(request, known.digest, excluded=tried)
        if request.scope is DataScope.DEVICE and (not isinstance(able, Refusal) or able.reason is Reason.DATA_SCOPE):
            return Refusal(Reason.DATA_SCOPE, "its data may not leave the device")
        return able

    def _choose(self, able: list[tuple[Peer, AdvertModel]]) -> tuple[Peer, AdvertModel]:
        """Return the better of two peers drawn at random: the best of all would be every device's choice at once."""
        drawn = self._dice.sample(able, min(2, len(able)))
        return min(drawn, key=lambda pair: (pair[0].estimate(pair[1]).finish_p99_ns, pair[0].in_flight))

    async def _ask(self, request: InferRequest, peer: Peer, offer: AdvertModel) -> Ending | None:
        """Send the request to one peer and wait; None when nobody can have received it."""
        budget_ns = request.deadlines.total_ns - self._clock.now_ns()
        if budget_ns <= 0:
            return Expired("no time was left to send it")
        self._in_flight += 1
        peer.in_flight += 1
        under_way = self._conversations.begin(peer, offer, self._clock.now_ns())
        word = "cancelled"
        try:
            ending = await self._converse(request, under_way, budget_ns)
            word = "nobody_listens" if ending is None else _WORD[type(ending)]
            return ending
        finally:
            self._conversations.end(under_way)
            self._in_flight -= 1
            peer.in_flight -= 1
            self._counters[word] += 1
            peer.outcomes[word] += 1
            if word == "cancelled":
                peer.breaker.abandoned()
                take_back = encode_cancel(under_way.correlation, topic=self._topics.infer(peer.name))
                self._link.send(take_back, Keep.NEVER)

    async def _converse(self, request: InferRequest, under_way: UnderWay, budget_ns: int) -> Ending | None:
        peer = under_way.asked.peer
        ask = Ask(
            model=request.model,
            digest=under_way.asked.offer.digest,
            scope=request.scope,
            budget_ns=budget_ns,
            correlation=under_way.correlation,
            trip_ns=peer.trip_ns,
            priority=request.priority,
            accept_late=request.accept_late,
        )
        message = encode_ask(
            ask, request.payload, topic=self._topics.infer(peer.name), response_topic=self._topics.offload_reply
        )
        if (why := unsendable(message, max_packet_bytes=self._link.max_packet_bytes)) is not None:
            return Refusal(Reason.COST, why)
        peer.breaker.asked(under_way.asked.sent_ns)
        self._counters["sent"] += 1
        self._counters["bytes_sent"] += len(message.payload)
        until_ns = under_way.asked.sent_ns + budget_ns + (_LATE_PATIENCE_NS if request.accept_late else 0)
        # Bounded by `until_ns` below; its own limit only keeps it from outliving us.
        publish = self._link.publish(message, timeout_s=(until_ns - under_way.asked.sent_ns) / NS_PER_S + 1)
        publishing = asyncio.create_task(publish, name=f"offload[{request.id}].publish")
        try:
            return await self._await_answer(request, under_way, publishing, until_ns)
        finally:
            publishing.cancel()
            await asyncio.wait({publishing})
            if not publishing.cancelled():
                publishing.exception()  # taken note of: the answer, or the deadline, was first

    async def _await_answer(
        self, request: InferRequest, under_way: UnderWay, publishing: asyncio.Task[int], until_ns: int
    ) -> Ending | None:
        peer, answer = under_way.asked.peer, under_way.answer
        await self._wait({publishing, answer}, until_ns)  # the answer may overtake the acknowledgement
        if not answer.done() and publishing.done():
            if (error := publishing.exception()) is not None:
                if not isinstance(error, LinkError):
                    raise error
                return self._lost(under_way, str(error))
            if publishing.result() == _NO_MATCHING_SUBSCRIBERS:
                peer.breaker.absent(self._clock.now_ns())
                return None
            await self._wait({answer}, until_ns)
        now_ns = self._clock.now_ns()
        if not answer.done():
            peer.breaker.silent(now_ns)
            return Expired(f"{peer.name} did not answer within {(now_ns - under_way.asked.sent_ns) / 1e6:.1f} ms")
        said = answer.result()
        if isinstance(said, Failure) and not self._link.connected:
            peer.breaker.abandoned()
            return said
        ending = said if isinstance(said, Failure) else self._read(request, under_way, said)
        if isinstance(ending, Failure) and ending.reason in NO_ANSWERS:
            peer.breaker.silent(now_ns)  # it lives, but is of as little use as if it didn't
        else:
            peer.breaker.answered()
        return ending

    async def _wait(self, futures: set[asyncio.Future[Any]], until_ns: int) -> None:
        remaining_s = max(0, until_ns - self._clock.now_ns()) / NS_PER_S
        await asyncio.wait(futures, timeout=remaining_s, return_when="FIRST_COMPLETED")

    def _lost(self, under_way: UnderWay, why: str) -> Failure:
        """End a request that the broker refused or the link lost; only the first counts against the peer."""
        if self._link.connected:
            under_way.asked.peer.breaker.silent(self._clock.now_ns())
        else:
            under_way.asked.peer.breaker.abandoned()
        return Failure("link", why)

    def _read(self, request: InferRequest, under_way: UnderWay, answer: Answer) -> Ending:
        """Turn a peer's answer into an ending, and its times into the request's."""
        asked, now_ns = under_way.asked, self._clock.now_ns()
        network_ns, queue_ns = self._learn(asked, answer)
        timeline = request.timeline
        timeline.network_ns = network_ns
        timeline.started_ns = min(now_ns, asked.sent_ns + network_ns // 2 + queue_ns)
        timeline.finished_ns = max(timeline.started_ns, now_ns - network_ns // 2)
        known = self._lookup(request.model, request.version)
        if known is None or known.digest != asked.offer.digest:
            return Failure("wrong_digest", f"{request.model} was replaced here while {asked.peer.name} answered")
        return read_answer(request, known.manifest, known.digest, asked.peer.name, answer)

    def _learn(self, asked: Asked, answer: Answer) -> tuple[int, int]:
        """Take note of an answer's times, in time or late; return how long it was on the wire and in the peer's queue.

        Neither can have been longer than the round trip, whatever the peer says.
        """
        round_trip_ns = self._clock.now_ns() - asked.sent_ns
        queue_ns = min(answer.queue_ns, round_trip_ns)
        run_ns = min(answer.run_ns, round_trip_ns - queue_ns)
        if answer.outcome not in {OutcomeKind.OK, OutcomeKind.LATE}:
            return round_trip_ns - queue_ns - run_ns, queue_ns
        network_ns = asked.peer.observed(asked.offer, round_trip_ns=round_trip_ns, queue_ns=queue_ns, run_ns=run_ns)
        return network_ns, queue_ns

    def _came_late(self, asked: Asked, answer: Answer) -> None:
        """An answer that nobody waits for any more still tells that its peer lives, and how long it takes."""
        asked.peer.breaker.answered()
        self._learn(asked, answer)

    def _on_link(self, state: LinkState) -> None:
        """Without the link no answer will come: say so now."""
        if state is not LinkState.CONNECTED:
            self._conversations.fail_all(Failure("link", f"the site link is {state.value}"))
            self._peers.forget_adverts()


_WORD: dict[type[Any], str] = {Result: "ok", Refusal: "rejected", Failure: "failed", Expired: "expired"}
