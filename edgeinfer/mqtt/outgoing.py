"""Send what goes out over one link: a bounded window on the connection, the outbox behind it.

Owns everything between a caller's `send` or `publish` and the broker's acknowledgement. Which connection there is,
if any, the link tells it with `attach` and `detach`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgeinfer.errors import LinkError
from edgeinfer.mqtt.broker import BrokerLimits
from edgeinfer.mqtt.message import Keep, Message, unsendable
from edgeinfer.mqtt.outbox import Outbox, Waiting

if TYPE_CHECKING:
    from edgeinfer.mqtt.session import Session

_log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 20
"""Unacknowledged QoS 1 publishes, at most; fewer when the broker says so (mosquitto's own default is 20)."""
_MAX_UNSENT_BYTES = 8 << 20
"""Payload handed to paho and not yet written (QoS 0) or acknowledged (QoS 1), at most, but for a single message."""
_MAX_PUBLISH_WAITERS = 4096
"""Publishes that wait for a place in the window; what they hold of memory is their callers' to bound."""
_TELL_EVERY_S = 60.0
_MAX_TOLD = 64
REFUSED = 0x80
"""PUBACK and SUBACK codes from here on are refusals."""


@dataclass(slots=True)
class _Sent:
    """A publish that was handed to paho: who waits for it, or how to hold it again when the connection is lost."""

    message: Message
    keep: Keep = Keep.NEVER
    answer: asyncio.Future[int] | None = None


class Outgoing:
    """The outgoing half of a link. Loop thread only.

    Every message that is lost is counted in `counters` as `dropped.CAUSE`: `offline` and `congested` (Keep.NEVER),
    `unsendable` (the topic or the broker's maximum packet doesn't allow it), and the outbox's causes.
    """

    def __init__(self, name: str, outbox: Outbox) -> None:
        self._name = name
        self._outbox = outbox
        self._counters: Counter[str] = Counter()
        self._session: Session | None = None  # None while there is no connection
        self.limits = BrokerLimits(None, _MAX_IN_FLIGHT, 0)
        """Of the connection, or of the last one."""
        self._sent: dict[int, _Sent] = {}
        self._sent_bytes = 0
        self._unacknowledged = 0
        self._turns: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._told_s: dict[str, float] = {}
        """When a refusal was last logged, by topic; the oldest gives way."""

    @property
    def counters(self) -> Counter[str]:
        """`sent`, `refused` (by the broker), and `dropped.CAUSE`."""
        counters = self._counters.copy()
        for cause, count in self._outbox.dropped.items():
            counters[f"dropped.{cause}"] += count
        return counters

    @property
    def unfinished(self) -> int:
        """Messages that wait in the outbox or for the broker."""
        return len(self._outbox) + len(self._sent)

    def attach(self, session: Session, limits: BrokerLimits) -> None:
        """Send over this connection from now on. Nothing leaves before `drain`, so that births can be first."""
        self._session, self.limits = session, limits

    def detach(self, reason: str) -> None:
        """Forget the connection: waiting publishes fail, held messages go back in front of the outbox, in order."""
        self._session = None
        unsettled, self._sent, self._sent_bytes, self._unacknowledged = list(self._sent.values()), {}, 0, 0
        lost = LinkError(f"{self._name}: the connection was lost ({reason})")
        for sent in reversed(unsettled):
            if sent.answer is not None:
                if not sent.answer.done():
                    sent.answer.set_exception(lost)
            elif sent.keep is Keep.NEVER:
                self._counters["dropped.offline"] += 1
            else:
                self._outbox.put_back(Waiting(sent.message, sent.keep))
        while self._turns:
            if not (turn := self._turns.popleft()).done():
                turn.set_exception(lost)

    def send(self, message: Message, keep: Keep) -> None:
        """Hand over now if connection and window allow it, else do as `keep` says. Never blocks, never raises."""
        limit = None if self._session is None else self.limits.max_packet_bytes
        if (why := unsendable(message, max_packet_bytes=limit)) is not None:
            self._drop("unsendable", why)
        elif self._session is not None and self._has_room(message) and self._outbox.lets_pass(message, keep):
            self._hand_over(self._session, _Sent(message, keep))
        elif keep is Keep.NEVER:
            self._drop("offline" if self._session is None else "congested", "")
        else:
            self._outbox.put(message, keep)

    async def publish(self, message: Message, *, timeout_s: float) -> int:
        """Publish at QoS 1 and return the broker's code. See `MqttLink.publish`.

        Raises:
            LinkError: see there.
        """
        message = dataclasses.replace(message, qos=1)
        try:
            async with asyncio.timeout(timeout_s):
                session = await self._turn(message)
                if (why := unsendable(message, max_packet_bytes=self.limits.max_packet_bytes)) is not None:
                    self._drop("unsendable", why)
                    raise LinkError(f"{self._name}: {why}")
                answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
                self._hand_over(session, _Sent(message, answer=answer))
                code = await answer
        except TimeoutError as error:
            raise LinkError(f"{self._name}: {message.topic} was not acknowledged within {timeout_s:.3f} s") from error
        if code >= REFUSED:
            raise LinkError(f"{self._name}: the broker refused {message.topic} with reason 0x{code:02X}")
        return code

    def settle(self, mid: int, code: int) -> None:
        """Take note that a publish was written (QoS 0) or acknowledged (QoS 1); make use of the room."""
        sent = self._sent.pop(mid, None)
        if sent is None:
            return
        self._sent_bytes -= len(sent.message.payload)
        self._unacknowledged -= sent.message.qos > 0
        if code >= REFUSED:  # sending it again would not help
            self._counters["refused"] += 1
            self._tell_refusal(sent, code)
        if sent.answer is not None and not sent.answer.done():
            sent.answer.set_result(code)
        self._wake_one()
        self.drain()
        if not self.unfinished:
            self._idle.set()

    def drain(self) -> None:
        """Hand over as much of the outbox as the window takes."""
        while self._session is not None and (message := self._outbox.peek()) is not None and self._has_room(message):
            waiting = self._outbox.take()
            assert waiting is not None, "it was there a moment ago"
            if (why := unsendable(message, max_packet_bytes=self.limits.max_packet_bytes)) is not None:
                self._drop("unsendable", why)
            else:
                self._hand_over(self._session, _Sent(message, waiting.keep))

    async def flushed(self) -> None:
        """Return when nothing is unfinished any more; the caller bounds the time."""
        while self.unfinished:
            self._idle.clear()
            await self._idle.wait()

    def _has_room(self, message: Message) -> bool:
        """Whether the window takes one more from `send`: half of it, so that `publish` never waits for telemetry."""
        half = max(1, self._window // 2)
        return self._fits(message) and (message.qos == 0 or self._unacknowledged < half)

    def _fits(self, message: Message) -> bool:
        return not self._sent or self._sent_bytes + len(message.payload) <= _MAX_UNSENT_BYTES

    @property
    def _window(self) -> int:
        return min(_MAX_IN_FLIGHT, self.limits.receive_maximum)

    async def _turn(self, message: Message) -> Session:
        """Return the connection once its window has a place for a `publish`."""
        while True:
            if self._session is None:
                raise LinkError(f"{self._name} is not connected")
            if self._unacknowledged < self._window and self._fits(message):
                return self._session
            if len(self._turns) >= _MAX_PUBLISH_WAITERS:
                raise LinkError(f"{self._name}: {len(self._turns)} publishes wait for acknowledgements already")
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._turns.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it was our turn just now: pass it on
                    self._wake_one()
                else:  # else those that gave up would be counted as waiting until the broker answers again
                    self._turns.remove(turn)
                raise

    def _wake_one(self) -> None:
        while self._turns:
            if not (turn := self._turns.popleft()).done():
                turn.set_result(None)
                return

    def _hand_over(self, session: Session, sent: _Sent) -> None:
        self._sent[session.publish(sent.message)] = sent
        self._sent_bytes += len(sent.message.payload)
        self._unacknowledged += sent.message.qos > 0
        self._counters["sent"] += 1

    def _tell_refusal(self, sent: _Sent, code: int) -> None:
        """Log what the broker refused and nobody waits for: the access list is wrong, and nobody else would say so."""
        topic, now_s = sent.message.topic, asyncio.get_running_loop().time()
        if sent.answer is not None or now_s - self._told_s.get(topic, -math.inf) < _TELL_EVERY_S:
            return
        self._told_s.pop(topic, None)
        if len(self._told_s) >= _MAX_TOLD:
            self._told_s.pop(next(iter(self._told_s)))
        self._told_s[topic] = now_s
        _log.warning(
            "link=%s refused=%s reason=0x%02X: the broker's access list does not let us publish there",
            self._name, topic, code,
        )  # fmt: skip

    def _drop(self, cause: str, why: str) -> None:
        self._counters[f"dropped.{cause}"] += 1
        if why and self._counters[f"dropped.{cause}"] == 1:
            _log.warning("link=%s dropped=%s why=%r (further ones are only counted)", self._name, cause, why)
