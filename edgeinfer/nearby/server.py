"""Answer the requests that devices offload over MQTT.

Owns the conversation: what came in, what is being answered, how much each device has under way. Whether a request is
acceptable is `judge`; running it is the scheduler's, the same class as on a device; what travels is `mqtt.exchange`.
Every request that can be answered at all is answered exactly once, a refusal too, so that the device need not wait
for its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.errors import LinkError, ProtocolError
from edgeinfer.execution.window import LatencyWindow
from edgeinfer.mqtt.exchange import MAX_CORRELATION_BYTES, Answer, cancelled, decode_ask, encode_answer
from edgeinfer.mqtt.message import Keep, Message, unsendable
from edgeinfer.mqtt.stamp import Stamper
from edgeinfer.mqtt.topics import Topics
from edgeinfer.nearby.advert import Load, advert_message, build_advert, offline_message
from edgeinfer.nearby.judge import ServedModel, judge
from edgeinfer.request import Outcome, OutcomeKind, Payload, Reason, Refusal, Submit, Ticket

_log = logging.getLogger(__name__)

_REMEMBERED = 4096
"""Requests whose repetition (QoS 1 may deliver twice) is recognised."""
_MAX_UNANSWERED = 1024
"""Requests of all devices together that are being run or answered; more are refused."""
_MAX_TOLD = 4096
"""The same with the refusals that are on their way; more asks than this get no answer at all, which is told."""
_MAX_HELD_BYTES = 32 << 20
"""Answers that wait for the broker; while they are more than this, nothing new is taken in."""
_ANSWER_TIMEOUT_S = 1.0
"""Least time for an answer to reach the broker: a refusal is worth sending after the deadline, too."""
_RETRY_S = 0.1
"""Between two looks at whether the link is back while an answer waits for it."""
_WARN_EVERY_NS = 60 * NS_PER_S


class ServerLink(Protocol):
    """What serving needs of a link; see `MqttLink`, which is one."""

    @property
    def connected(self) -> bool:
        """Whether messages go out and come in."""
        ...

    @property
    def max_packet_bytes(self) -> int | None:
        """Largest packet that the broker takes."""
        ...

    @property
    def max_incoming_bytes(self) -> int:
        """Largest packet that reaches us."""
        ...

    def subscribe(self, topic_filter: str, handler: Callable[[Message], None], *, qos: int = 1) -> None:
        """Have `handler` called with every message that matches."""
        ...

    def on_connected(self, callback: Callable[[], None]) -> None:
        """Have `callback` called at each connection."""
        ...

    def send(self, message: Message, keep: Keep) -> None:
        """Publish, or do as `keep` says."""
        ...

    async def publish(self, message: Message, *, timeout_s: float) -> int:
        """Publish at QoS 1 and return the broker's code, or raise LinkError."""
        ...


@dataclass(frozen=True, slots=True)
class NearbySnapshot:
    """What the service has done since it started."""

    unanswered: int
    by_device: Mapping[str, int]
    """Requests under way, of devices that have any."""
    counters: Mapping[str, int]
    """`asked`; `answered.OUTCOME`; `malformed` (refused); asks that could not be answered: `bad_reply_topic`,
    `no_correlation`, `retained`, `repeated`, `overflow`; `taken_back` by the device; `answers_lost` on the way.
    What devices wait for in vain, `overflow` and `answers_lost`, is also in the advert."""


@dataclass(frozen=True, slots=True)
class _Work:
    """An answer to be given: to a submitted request, or a refusal at the door."""

    device: str
    correlation: bytes
    received_ns: int
    budget_ns: int
    served: ServedModel | None = None
    ticket: Ticket | None = None
    refusal: Refusal | None = None


class NearbyServer:
    """A nearby service on one link. Loop thread only; `run` is its one task."""

    def __init__(
        self,
        link: ServerLink,
        topics: Topics,
        *,
        submit: Submit,
        models: Callable[[], Sequence[ServedModel]],
        load: Callable[[], Load],
        stamper: Stamper,
        clock: Clock,
        location: str = "site",
        max_per_device: int = 16,
        advert_period_ns: int = 2 * NS_PER_S,
    ) -> None:
        self._link = link
        self._topics = topics
        self._submit = submit
        self._models = models
        self._load = load
        self._stamper = stamper
        self._clock = clock
        self._location = location
        self._max_per_device = max_per_device
        self._period_ns = advert_period_ns
        self._queue: asyncio.Queue[_Work] = asyncio.Queue(_MAX_TOLD)
        self._unanswered = 0
        self._idle = asyncio.Event()
        self._by_device: Counter[str] = Counter()
        self._tickets: dict[tuple[str, bytes], Ticket] = {}
        self._seen: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._run_times: dict[str, LatencyWindow] = {}
        self._counters: Counter[str] = Counter()
        self._held_bytes = 0
        self._warned_ns: int | None = None
        link.subscribe(topics.infer_filter, self._on_ask)
        link.on_connected(self.advertise)

    def snapshot(self) -> NearbySnapshot:
        """Return what it has done."""
        return NearbySnapshot(self._unanswered, dict(+self._by_device), dict(self._counters))

    def advertise(self) -> None:
        """Publish the advert of this moment; also call it when something changed that devices should know."""
        advert = build_advert(
            name=self._topics.device,
            location=self._location,
            period_ns=self._period_ns,
            models=self._models(),
            run_times=self._run_times,
            load=self._load(),
            max_incoming_bytes=self._link.max_incoming_bytes,
            answers_lost=self._counters["answers_lost"] + self._counters["overflow"],
            stamp=self._stamper.now(),
        )
        self._link.send(advert_message(self._topics, advert), Keep.LATEST)

    async def drained(self) -> None:
        """Return once every request that was taken in has been answered; the caller bounds the time.

        For a clean stop, after the scheduler was told to drain: an outcome is no answer until it is on its way.
        """
        while self._unanswered:
            self._idle.clear()
            await self._idle.wait()

    async def run(self) -> None:
        """Answer, for ever. When cancelled, what is under way is cancelled and the advert says that we are gone."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._refresh(), name="nearby.adverts")
                while True:
                    work = await self._queue.get()
                    group.create_task(self._answer(work), name=f"nearby.answer[{work.device}]")
        finally:
            self._link.send(offline_message(self._topics, self._stamper.now(), reason="stopping"), Keep.LATEST)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._period_ns / NS_PER_S)
            self.advertise()

    # Taking requests in

    def _on_ask(self, message: Message) -> None:
        received_ns = self._clock.now_ns()
        self._counters["asked"] += 1
        device = self._topics.parse_infer(message.topic)
        if device is not None and (taken_back := cancelled(message)) is not None:
            self._counters["taken_back"] += 1
            if (ticket := self._tickets.get((device, taken_back))) is not None:
                ticket.cancel()
            return
        if device is None or message.response_topic != self._topics.reply_of(device):
            self._counters["bad_reply_topic"] += 1  # answering elsewhere would make us write where we are told to
            return
        if message.retain:  # somebody's old request, played back by the broker
            self._counters["retained"] += 1
            return
        correlation = message.correlation
        if not correlation or len(correlation) > MAX_CORRELATION_BYTES:
            self._counters["no_correlation"] += 1
            return
        if self._is_repetition(device, correlation):
            self._counters["repeated"] += 1
            return
        if self._unanswered >= _MAX_TOLD:
            self._lose("overflow", device, f"{self._unanswered} requests are unanswered")
            return
        self._unanswered += 1
        self._by_device[device] += 1
        self._queue.put_nowait(self._take(device, correlation, message, received_ns))

    def _take(self, device: str, correlation: bytes, message: Message, received_ns: int) -> _Work:
        """Submit an acceptable request at once: it queues in the scheduler, nowhere else."""
        refused = partial(_Work, device, correlation, received_ns)
        try:
            ask = decode_ask(message)
        except ProtocolError as error:
            self._counters["malformed"] += 1
            return refused(0, refusal=Refusal(Reason.INPUT_INVALID, str(error)))
        if self._unanswered > _MAX_UNANSWERED or self._held_bytes > _MAX_HELD_BYTES:
            why = f"{self._unanswered} requests are unanswered, {self._held_bytes} bytes of answers wait for the broker"
            return refused(ask.budget_ns, refusal=Refusal(Reason.QUEUE_FULL, why))
        if self._by_device[device] > self._max_per_device:
            why = f"{self._max_per_device} requests of {device} are under way"
            return refused(ask.budget_ns, refusal=Refusal(Reason.QUEUE_FULL, why))
        judged = judge(ask, self._models(), location=self._location, received_ns=received_ns)
        if isinstance(judged, Refusal):
            return refused(ask.budget_ns, refusal=judged)
        request, served = judged
        ticket = self._tickets[device, correlation] = self._submit(request)
        return _Work(device, correlation, received_ns, ask.budget_ns, served, ticket)

    def _is_repetition(self, device: str, correlation: bytes) -> bool:
        key = device, correlation
        if key in self._seen:
            return True
        self._seen[key] = None
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return False

    # Answering

    async def _answer(self, work: _Work) -> None:
        try:
            message = await self._compose(work)
            if message is None:
                return
            self._held_bytes += len(message.payload)
            try:
                await self._deliver(work, message)
            finally:
                self._held_bytes -= len(message.payload)
        finally:
            self._tickets.pop((work.device, work.correlation), None)
            self._unanswered -= 1
            if not self._unanswered:
                self._idle.set()
            self._by_device[work.device] -= 1
            if not self._by_device[work.device]:
                del self._by_device[work.device]

    async def _deliver(self, work: _Work, message: Message) -> None:
        """Have the broker take an answer while it is worth anything; over a lost connection, too."""
        until_ns = self._clock.now_ns() + round(max(self._left_s(work), _ANSWER_TIMEOUT_S) * NS_PER_S)
        while True:
            left_s = (until_ns - self._clock.now_ns()) / NS_PER_S
            try:
                await self._link.publish(message, timeout_s=max(0.0, left_s))
            except LinkError as error:
                if self._link.connected or left_s <= _RETRY_S:  # refused, too large, or too late
                    self._lose("answers_lost", work.device, str(error))
                    return
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def _lose(self, cause: str, device: str, why: str) -> None:
        """Take note that a device waits in vain, and say so: once a minute, others are only counted."""
        self._counters[cause] += 1
        now_ns = self._clock.now_ns()
        if self._warned_ns is None or now_ns - self._warned_ns >= _WARN_EVERY_NS:
            self._warned_ns = now_ns
            _log.warning(
                "device=%s answer=lost why=%r answers_lost=%d overflow=%d: more is asked than the broker takes of us",
                device, why, self._counters["answers_lost"], self._counters["overflow"],
            )  # fmt: skip

    async def _compose(self, work: _Work) -> Message | None:
        """Wait for the end of the request and return what to tell the device; None when it no longer wants to know."""
        if work.refusal is not None:
            reason, detail = work.refusal.reason.value, work.refusal.detail
            return self._encode(work, Answer(OutcomeKind.REJECTED, work.correlation, reason, detail), None)
        assert work.ticket is not None, "what isn't refused was submitted"
        try:
            outcome = await work.ticket.outcome()
        except asyncio.CancelledError:
            work.ticket.cancel()
            raise
        if outcome.kind is OutcomeKind.CANCELLED:
            return None
        payload = None if outcome.result is None else outcome.result.payload
        try:
            return self._encode(work, self._say(work, outcome), payload)
        finally:
            if outcome.result is not None:  # its bytes are in the message now
                outcome.result.release()

    def _say(self, work: _Work, outcome: Outcome) -> Answer:
        timeline, result = outcome.request.timeline, outcome.result
        begun_ns = outcome.ended_ns if timeline.dispatched_ns is None else timeline.dispatched_ns
        if result is not None and work.served is not None:
            window = self._run_times.get(work.served.digest)
            if window is None:
                window = self._run_times[work.served.digest] = LatencyWindow(self._clock, seed_p99_ns=0)
            window.add(outcome.ended_ns - begun_ns)
        return Answer(
            outcome=outcome.kind,
            correlation=work.correlation,
            reason=outcome.reason,
            detail=outcome.detail,
            version="" if result is None else result.version,
            variant="" if result is None else result.variant,
            digest="" if result is None else result.digest,
            queue_ns=max(0, begun_ns - work.received_ns),
            # Until now, not until the outcome: what passed since then is ours, and not time on the wire.
            run_ns=max(0, self._clock.now_ns() - begun_ns),
        )

    def _encode(self, work: _Work, answer: Answer, payload: Payload | None) -> Message:
        topic = self._topics.reply_of(work.device)
        expiry_s = math.ceil(max(self._left_s(work), _ANSWER_TIMEOUT_S))
        message = encode_answer(answer, payload, topic=topic, expiry_s=expiry_s)
        if (why := unsendable(message, max_packet_bytes=self._link.max_packet_bytes)) is not None:
            answer = Answer(OutcomeKind.FAILED, work.correlation, "answer_too_large", why)
            message = encode_answer(answer, None, topic=topic, expiry_s=expiry_s)
        self._counters[f"answered.{answer.outcome.value}"] += 1
        return message

    def _left_s(self, work: _Work) -> float:
        return (work.received_ns + work.budget_ns - self._clock.now_ns()) / NS_PER_S
