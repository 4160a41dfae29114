"""Keep one link to an MQTT 5 broker for the life of the process, and tell everyone how it stands.

Owns the connection and the subscriptions, which are made again at each connection. A single connection is `session`;
the waits between them are `backoff`; what goes out is `outgoing`; names and records are `topics` and `envelope`.
Handlers run on the loop: they must be short, and one that raises is logged and counted, nothing more.

Sessions are not kept by the broker (clean start): messages to us while we are away are lost, and their senders can
see it (PUBACK reason 0x10). Nothing stale arrives after an outage but retained messages, which say so.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.config import BrokerSection
from edgeinfer.errors import LinkError
from edgeinfer.mqtt.backoff import Backoff, LinkState
from edgeinfer.mqtt.broker import Ended
from edgeinfer.mqtt.connect import Resolver, open_socket
from edgeinfer.mqtt.credentials import CredentialFiles
from edgeinfer.mqtt.message import Keep, Message
from edgeinfer.mqtt.outbox import Outbox
from edgeinfer.mqtt.outgoing import REFUSED, Outgoing

if TYPE_CHECKING:
    from edgeinfer.mqtt.session import Session

__all__ = ["Keep", "LinkSnapshot", "LinkState", "Message", "MqttLink"]

_log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 3.0
"""For reading credentials, for resolving, for TCP and TLS, and for each answer of the broker."""
_FLUSH_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 0.5

Handler = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """How a link stands, and what it has done since the process started."""

    name: str
    state: LinkState
    reason: str
    """Why it isn't connected."""
    connects: int
    unfinished: int
    """Messages that wait to be sent or to be acknowledged."""
    counters: Mapping[str, int]
    """`sent`, `received`, `refused`, `handler_errors`, `malformed`, `subscriptions_refused`, and `dropped.CAUSE`."""


class MqttLink:
    """A link to one broker. Loop thread only; `run` is its one task."""

    def __init__(
        self,
        broker: BrokerSection,
        *,
        name: str,
        client_id: str,
        clock: Clock,
        will: Message | None = None,
        max_incoming_bytes: int = 16 << 20,
        outbox: Outbox | None = None,
        resolver: Resolver | None = None,
        dice: random.Random | None = None,
    ) -> None:
        self._broker = broker
        self._name = name
        self._client_id = client_id
        self._clock = clock
        self._will = will
        self._max_incoming_bytes = max_incoming_bytes
        self._outgoing = Outgoing(name, Outbox() if outbox is None else outbox)
        self._resolver = Resolver() if resolver is None else resolver
        self._files = CredentialFiles(broker)
        self._backoff = Backoff(dice or random.Random())  # noqa: S311  # jitter, not a secret
        self._state = LinkState.CONNECTING
        self._reason = "no attempt has ended yet"
        self._connects = 0
        self._counters: Counter[str] = Counter()
        self._session: Session | None = None  # None while there is no connection
        self._subscriptions: list[tuple[str, int, Handler]] = []
        self._births: list[Callable[[], None]] = []
        self._watchers: list[Callable[[LinkState], None]] = []

    @property
    def name(self) -> str:
        """The name it has in logs and reports."""
        return self._name

    @property
    def state(self) -> LinkState:
        """How it stands."""
        return self._state

    @property
    def connected(self) -> bool:
        """Whether messages go out and come in right now, as far as anyone can know."""
        return self._state is LinkState.CONNECTED

    @property
    def max_packet_bytes(self) -> int | None:
        """Largest packet that the broker takes; None when it has no limit, or was never reached."""
        return self._outgoing.limits.max_packet_bytes

    @property
    def max_incoming_bytes(self) -> int:
        """Largest packet that we take; the broker silently drops larger ones on their way to us."""
        return self._max_incoming_bytes

    def snapshot(self) -> LinkSnapshot:
        """Return how it stands and what it has done."""
        counters = self._counters + self._outgoing.counters
        if self._session is not None and self._session.malformed:
            counters["malformed"] += self._session.malformed
        return LinkSnapshot(
            name=self._name,
            state=self._state,
            reason=self._reason,
            connects=self._connects,
            unfinished=self._outgoing.unfinished,
            counters=dict(counters),
        )

    def subscribe(self, topic_filter: str, handler: Handler, *, qos: int = 1) -> None:
        """Have `handler` called with every message that matches; kept over reconnections.

        Filters of one link should not overlap: the broker may deliver a message once for each that matches, and
        every handler whose filter matches is called each time.
        """
        self._subscriptions.append((topic_filter, qos, handler))
        if self._session is not None and self.connected:
            answer = self._session.subscribe([(topic_filter, qos)])
            answer.add_done_callback(lambda done: self._check_granted([topic_filter], done))

    def on_connected(self, callback: Callable[[], None]) -> None:
        """Have `callback` called at each connection, once the subscriptions stand; at once when they do now."""
        self._births.append(callback)
        if self.connected:
            self._call("on_connected", callback)

    def on_state(self, callback: Callable[[LinkState], None]) -> None:
        """Have `callback` called with each new state."""
        self._watchers.append(callback)

    def send(self, message: Message, keep: Keep) -> None:
        """Publish now if the connection and its window allow it, else do as `keep` says. Never blocks, never raises.

        What can't be sent at all (an impossible topic, more than the broker's maximum packet) is dropped and counted.
        """
        self._outgoing.send(message, keep)

    async def publish(self, message: Message, *, timeout_s: float) -> int:
        """Publish at QoS 1 and return the broker's code: 0 accepted, 0x10 accepted but nobody has subscribed to it.

        Waits for a place in the window first. Is never held or sent again: what becomes of it is known, or an error.

        Raises:
            LinkError: not connected, lost before the acknowledgement, refused, too large for the broker, or no
                acknowledgement within `timeout_s`.
        """
        if not self.connected:
            raise LinkError(f"{self._name} is not connected ({self._state.value}: {self._reason})")
        return await self._outgoing.publish(message, timeout_s=timeout_s)

    async def run(self) -> None:
        """Stay connected, for ever. When cancelled: send what waits (bounded in time), then disconnect cleanly."""
        try:
            while True:
                began_ns = self._clock.now_ns()
                end, lived_ns = await self._connect_once()
                state, wait_ns = self._backoff.next(end.state, lived_ns=lived_ns)
                suspect = (
                    "" if state is end.state else f"; another client seems to use our client id {self._client_id!r}"
                )
                self._become(state, end.reason + suspect)
                if lived_ns is None:  # attempts are that far apart, however long each takes to fail
                    wait_ns -= self._clock.now_ns() - began_ns
                await asyncio.sleep(max(0, wait_ns) / NS_PER_S)
        finally:
            await self._leave()

    async def _connect_once(self) -> tuple[Ended, int | None]:
        """Make one connection and stay until it ends; return why, and how long it lived (None: it never did)."""
        from edgeinfer.mqtt.session import Session  # noqa: PLC0415 - paho: 3 MB that a device without a link spares

        try:
            credentials = await self._files.read(timeout_s=_CONNECT_TIMEOUT_S)
            sock = await open_socket(self._broker, self._resolver, credentials.tls, timeout_s=_CONNECT_TIMEOUT_S)
        except LinkError as error:
            return Ended(LinkState.UNREACHABLE, str(error)), None
        session = self._session = Session(
            sock,
            clock=self._clock,
            client_id=self._client_id,
            on_message=self._dispatch,
            on_sent=self._outgoing.settle,
        )
        try:
            session.start(
                host=self._broker.host,
                keepalive_s=self._broker.keepalive_s,
                credentials=credentials.user,
                will=self._will,
                max_incoming_bytes=self._max_incoming_bytes,
            )
            if (refusal := await self._open(session)) is not None:
                return refusal, None
            connected_ns = self._clock.now_ns()
            self._begin(session)
            keepalive_s = session.accepted.result().keepalive_s
            while not session.ended.done():
                await asyncio.wait({session.ended}, timeout=min(1.0, keepalive_s / 8 or 1.0))
                session.tick()
            return session.ended.result(), self._clock.now_ns() - connected_ns
        finally:
            if not self.connected or session.ended.done():  # else we are being cancelled, and `_leave` says goodbye
                self._forget(session)

    async def _open(self, session: Session) -> Ended | None:
        """Wait until the broker has accepted us and answered our subscriptions; return why it didn't."""
        if not await _settled(session.accepted, session.ended):
            return Ended(LinkState.UNREACHABLE, f"the broker did not answer CONNECT within {_CONNECT_TIMEOUT_S} s")
        if session.ended.done():
            return session.ended.result()
        filters = list(dict.fromkeys((topic_filter, qos) for topic_filter, qos, _ in self._subscriptions))
        if filters:
            answer = session.subscribe(filters)
            if not await _settled(answer, session.ended):
                return Ended(LinkState.UNREACHABLE, f"the broker did not answer SUBSCRIBE in {_CONNECT_TIMEOUT_S} s")
            if session.ended.done():
                return session.ended.result()
            self._check_granted([topic_filter for topic_filter, _ in filters], answer)
        return None

    def _begin(self, session: Session) -> None:
        self._connects += 1
        self._outgoing.attach(session, session.accepted.result())
        self._become(LinkState.CONNECTED, "")
        for birth in self._births:
            self._call("on_connected", birth)
        self._outgoing.drain()

    def _forget(self, session: Session) -> None:
        session.abort(Ended(LinkState.UNREACHABLE, "given up"))
        end = session.ended.result()
        self._session = None
        self._counters["malformed"] += session.malformed
        if self.connected:
            self._become(end.state, end.reason)
        self._outgoing.detach(end.reason)

    async def _leave(self) -> None:
        """Send what waits and say goodbye, in bounded time."""
        session = self._session
        if session is None:
            self._become(LinkState.CLOSED, "closed")
            return
        flushed = asyncio.create_task(self._outgoing.flushed(), name=f"link[{self._name}].flush")
        waited_for: set[asyncio.Future[Any]] = {flushed, session.ended}
        try:
            await asyncio.wait(waited_for, timeout=_FLUSH_TIMEOUT_S, return_when="FIRST_COMPLETED")
            if self._outgoing.unfinished:
                _log.warning("link=%s flush=incomplete unsent=%d", self._name, self._outgoing.unfinished)
            await session.close(_CLOSE_TIMEOUT_S)
        finally:
            flushed.cancel()
            self._become(LinkState.CLOSED, "closed")
            self._forget(session)

    def _dispatch(self, message: Message) -> None:
        from paho.mqtt.client import topic_matches_sub  # noqa: PLC0415 - see `_connect_once`

        self._counters["received"] += 1
        for topic_filter, _, handler in self._subscriptions:
            if topic_matches_sub(topic_filter, message.topic):
                self._call(message.topic, handler, message)

    def _call(self, what: str, callback: Callable[..., None], *arguments: object) -> None:
        """Call somebody else's code. Whatever it raises is its bug and must not cost the link."""
        try:
            callback(*arguments)
        except Exception:  # noqa: BLE001  # the one place: a handler that raises is logged and counted
            self._counters["handler_errors"] += 1
            _log.exception("link=%s handler=%s failed", self._name, what)

    def _check_granted(self, filters: list[str], answer: asyncio.Future[list[int]]) -> None:
        codes = [] if answer.cancelled() else answer.result()
        for topic_filter, code in zip(filters, codes, strict=False):
            if code >= REFUSED:
                self._counters["subscriptions_refused"] += 1
                _log.error("link=%s subscription=%s refused=0x%02X", self._name, topic_filter, code)

    def _become(self, state: LinkState, reason: str) -> None:
        changed, old = state is not self._state, self._state
        self._state, self._reason = state, reason
        if changed:  # not every attempt: an outage of hours is one line
            _log.info("link=%s state=%s was=%s reason=%r", self._name, state.value, old.value, reason)
            for watcher in self._watchers:
                self._call("on_state", watcher, state)


async def _settled(*futures: asyncio.Future[Any]) -> bool:
    """Wait for the first of `futures`, and return whether it came in time."""
    done, _ = await asyncio.wait(futures, timeout=_CONNECT_TIMEOUT_S, return_when="FIRST_COMPLETED")
    return bool(done)
