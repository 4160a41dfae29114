"""One connection to a broker, from CONNECT to its end: one paho client that lives as long and no longer.

A new client per connection means that nothing of an old connection (packet ids, in-flight counts, half a packet,
queued publishes) can leak into the next. paho runs in its external event-loop mode: asyncio tells it when the socket
is readable or writable, and nothing here has a thread. Reconnecting, buffering and subscriptions are `link`'s.

Everything runs on the loop. paho holds a plain lock while it calls us back, so nothing that is called from a
callback may close the socket; `_end` therefore only records, and `abort` is for timers and tasks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgeinfer.clock import NS_PER_S, Clock
from edgeinfer.mqtt.backoff import LinkState
from edgeinfer.mqtt.broker import BrokerLimits, Ended
from edgeinfer.mqtt.message import Message, publish_properties, received, will_properties

_log = logging.getLogger(__name__)

_TAKEN_OVER = 0x8E
_AUTH_FAILED = {0x84, 0x85, 0x86, 0x87, 0x8A, 0x8C}
"""CONNACK codes that waiting does not mend: wrong protocol or client id, bad credentials, not authorized, banned."""
_SILENCE_LIMIT = 1.75
"""Keep-alives without a byte after which a connection counts as dead: paho pings after one, the broker had 0.75 more
to answer, and the caller's promise is two."""
_DEFAULT_RECEIVE_MAXIMUM = 65_535


class _WithoutTls:
    """What paho needs of `ssl` where OpenSSL is kept out: its `except` clauses around plain sockets name these."""

    class SSLWantReadError(OSError):
        """Never raised."""

    class SSLWantWriteError(OSError):
        """Never raised."""


if vars(paho)["ssl"] is None:
    vars(paho)["ssl"] = _WithoutTls


class _Client(paho.Client):
    """A paho client that is given its socket, already connected."""

    def __init__(self, client_id: str, ready: socket.socket) -> None:
        super().__init__(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv5)
        self._ready = ready

    def _create_socket(self) -> socket.socket:
        return self._ready

    def close_socket(self) -> None:
        self._sock_close()


class Session:
    """One MQTT 5 connection over a socket that is already open; owns the socket.

    `accepted` is set when the broker says yes. `ended` is set exactly once, also when it says no. `on_message` and
    `on_sent` must not raise. `on_sent(id, code)`: a publish was written out (QoS 0) or acknowledged (QoS 1).
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        clock: Clock,
        client_id: str,
        on_message: Callable[[Message], None],
        on_sent: Callable[[int, int], None],
    ) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[BrokerLimits] = self._loop.create_future()
        self.ended: asyncio.Future[Ended] = self._loop.create_future()
        self._on_message_in = on_message
        self._on_sent = on_sent
        self._subacks: dict[int, asyncio.Future[list[int]]] = {}
        self._heard_ns = clock.now_ns()
        self._keepalive_s = 0
        self.malformed = 0
        """Messages that were dropped because they can't be read."""
        client = self._client = _Client(client_id, sock)
        client.max_inflight_messages_set(0)  # the link bounds what is in flight; paho shall not queue behind its back
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        client.on_socket_open = self._on_socket_open
        client.on_socket_close = self._on_socket_close
        client.on_socket_register_write = self._on_register_write
        client.on_socket_unregister_write = self._on_unregister_write

    def start(
        self,
        *,
        host: str,
        keepalive_s: int,
        credentials: tuple[str, str | None] | None,
        will: Message | None,
        max_incoming_bytes: int,
    ) -> None:
        """Send CONNECT. Clean start, no session kept by the broker: what is sent while we're away is lost."""
        self._keepalive_s = keepalive_s
        if credentials is not None:
            self._client.username_pw_set(*credentials)
        if will is not None:
            self._client.will_set(will.topic, will.payload, will.qos, will.retain, will_properties(will))
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.MaximumPacketSize = max_incoming_bytes
        self._client.connect_async(host, 1, keepalive_s, clean_start=True, properties=properties)
        self._guarded(self._client.reconnect)

    def publish(self, message: Message) -> int:
        """Queue a message that is known to be sendable, and return the id that `on_sent` will name."""
        info = self._client.publish(
            message.topic, message.payload, message.qos, message.retain, publish_properties(message)
        )
        return info.mid

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> asyncio.Future[list[int]]:
        """Subscribe to (filter, QoS) pairs; the future holds the broker's code for each, 0x80 and up are refusals."""
        answer: asyncio.Future[list[int]] = self._loop.create_future()
        code, mid = self._client.subscribe(list(filters))
        if mid is None:
            answer.cancel()
            _log.debug("subscribe failed code=%s", code)
        else:
            self._subacks[mid] = answer
        return answer

    def tick(self) -> None:
        """Ping when it is time, and give up a connection that is silent. Call several times per keep-alive."""
        if self.ended.done():
            return
        self._guarded(self._client.loop_misc)
        silent_s = (self._clock.now_ns() - self._heard_ns) / NS_PER_S
        if self._keepalive_s and silent_s >= _SILENCE_LIMIT * self._keepalive_s:
            self.abort(Ended(LinkState.UNREACHABLE, f"nothing heard for {silent_s:.1f} s"))

    async def close(self, timeout_s: float) -> None:
        """Send DISCONNECT, so that the broker drops the will, and close; the socket is gone in any case."""
        if not self.ended.done():
            self._guarded(self._client.disconnect)
            await asyncio.wait({self.ended}, timeout=timeout_s)
        self.abort(Ended(LinkState.CLOSED, "closed"))

    def abort(self, end: Ended) -> None:
        """Close the socket at once. Not from within a callback of paho. Does nothing to an ended session."""
        self._end(end)
        self._client.close_socket()
        for answer in self._subacks.values():
            answer.cancel()
        self._subacks.clear()

    def _end(self, end: Ended) -> None:
        if not self.ended.done():
            self.ended.set_result(end)

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """Run a step of paho. Its parser raises whatever a hostile broker makes it raise: that ends the session."""
        try:
            return step()
        except Exception as error:  # noqa: BLE001  # paho's errors share no base: struct.error, IndexError, ...
            self.abort(Ended(LinkState.UNREACHABLE, f"the broker sent what paho cannot read: {error!r}"))
            return MQTTErrorCode.MQTT_ERR_PROTOCOL

    # Callbacks of asyncio

    def _readable(self) -> None:
        self._heard_ns = self._clock.now_ns()
        self._guarded(self._client.loop_read)
        # TLS may hold bytes that the kernel no longer shows as readable.
        while (pending := getattr(self._client.socket(), "pending", None)) is not None and pending():
            if self._guarded(self._client.loop_read):
                break

    def _writable(self) -> None:
        self._guarded(self._client.loop_write)

    # Callbacks of paho, which holds a lock meanwhile

    def _on_socket_open(self, _client: paho.Client, _data: Any, sock: Any) -> None:
        self._loop.add_reader(sock.fileno(), self._readable)

    def _on_socket_close(self, _client: paho.Client, _data: Any, sock: Any) -> None:
        self._loop.remove_reader(sock.fileno())
        self._loop.remove_writer(sock.fileno())

    def _on_register_write(self, _client: paho.Client, _data: Any, sock: Any) -> None:
        self._loop.add_writer(sock.fileno(), self._writable)

    def _on_unregister_write(self, _client: paho.Client, _data: Any, sock: Any) -> None:
        self._loop.remove_writer(sock.fileno())

    def _on_connect(
        self, _client: paho.Client, _data: Any, _flags: Any, code: ReasonCode, properties: Properties | None
    ) -> None:
        if code.is_failure:
            refused = LinkState.AUTH_FAILED if code.value in _AUTH_FAILED else LinkState.UNREACHABLE
            self._end(Ended(refused, f"the broker refuses us: {code} (0x{code.value:02X})"))
            return
        self._keepalive_s = getattr(properties, "ServerKeepAlive", self._keepalive_s)
        if not self.accepted.done():
            self.accepted.set_result(
                BrokerLimits(
                    max_packet_bytes=getattr(properties, "MaximumPacketSize", None),
                    receive_maximum=getattr(properties, "ReceiveMaximum", _DEFAULT_RECEIVE_MAXIMUM),
                    keepalive_s=self._keepalive_s,
                )
            )

    def _on_disconnect(
        self,
        _client: paho.Client,
        _data: Any,
        flags: paho.DisconnectFlags,
        code: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if not flags.is_disconnect_packet_from_server:
            self._end(Ended(LinkState.UNREACHABLE, "the connection was lost"))
        elif code.value == _TAKEN_OVER:
            self._end(Ended(LinkState.TAKEN_OVER, "another client with our client id has connected"))
        else:
            self._end(Ended(LinkState.UNREACHABLE, f"the broker sent us away: {code} (0x{code.value:02X})"))

    def _on_message(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        try:
            readable = received(message)
        except UnicodeDecodeError:
            self.malformed += 1
            return
        self._on_message_in(readable)

    def _on_publish(
        self, _client: paho.Client, _data: Any, mid: int, code: ReasonCode, _properties: Properties | None
    ) -> None:
        self._on_sent(mid, code.value)

    def _on_subscribe(
        self,
        _client: paho.Client,
        _data: Any,
        mid: int,
        codes: list[ReasonCode],
        _properties: Properties | None,
    ) -> None:
        answer = self._subacks.pop(mid, None)
        if answer is not None and not answer.done():
            answer.set_result([code.value for code in codes])
