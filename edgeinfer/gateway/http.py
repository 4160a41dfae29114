"""Hold one HTTP/1.1 connection: bounded heads and bodies, a timeout on every wait, and knowing when the caller is gone.

h11 does the protocol, this the reading and writing. What a request means is `gateway`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import h11

from edgeinfer.errors import EdgeInferError, mib
from edgeinfer.gateway.reply import Reply, error_reply

_READ_BYTES = 1 << 18
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 429: b"Too Many Requests", 503: b"Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one gateway takes at most."""

    connections: int = 32
    """One more is answered 503 and closed."""
    head_bytes: int = 32 << 10
    body_bytes_in_flight: int = 64 << 20
    """Bodies of all connections together; beyond it requests are answered 429."""
    idle_s: float = 60.0
    """A connection without a request is closed."""
    head_s: float = 10.0
    body_s: float = 30.0
    write_s: float = 30.0
    """A caller that does not read its answer is cut off."""


class BadRequest(EdgeInferError):
    """What came is no request that can be answered properly; the connection ends after the reply."""

    def __init__(self, status: int, error: str) -> None:
        self.status = status
        super().__init__(error)


class BodyBytes:
    """Counts the bytes of all bodies in flight against one limit. Loop thread only."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Count bytes in.

        Raises:
            BadRequest: 429, they would exceed the limit. Nothing was counted.
        """
        if self.used_bytes + size_bytes > self.limit_bytes:
            raise BadRequest(
                429, f"{mib(self.used_bytes)} of request bodies are in flight, at most {mib(self.limit_bytes)}; retry"
            )
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count bytes out again."""
        self.used_bytes -= size_bytes


@dataclass(frozen=True, slots=True)
class Head:
    """Method, target and headers (lower-case names) of a request."""

    method: str
    target: str
    headers: Mapping[str, str]


class Connection:
    """One caller's connection. One task reads and writes it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bounds: Bounds, bodies: BodyBytes
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._bounds = bounds
        self._bodies = bodies
        self._held_bytes = 0
        self._method = ""
        self._answered = False
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=bounds.head_bytes)
        writer.transport.set_write_buffer_limits(high=0)  # drain() then means: handed to the kernel, all of it

    async def next_head(self) -> Head | None:
        """Return the next request's head, None when the caller has hung up or stayed silent.

        Raises:
            BadRequest: not HTTP, or a head that is too large or too slow.
        """
        try:
            if not self._http.trailing_data[0]:
                async with asyncio.timeout(self._bounds.idle_s):
                    await self._receive()
            async with asyncio.timeout(self._bounds.head_s):
                event = await self._event()
        except TimeoutError:
            return None
        if not isinstance(event, h11.Request):
            return None
        self._method = event.method.decode("latin-1")
        self._answered = False
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        # h11 bounds only what is incomplete; a head that came in one read is judged here
        if sum(len(name) + len(value) for name, value in headers.items()) + len(event.target) > self._bounds.head_bytes:
            raise BadRequest(431, f"the request's head has more than {self._bounds.head_bytes} bytes")
        return Head(self._method, event.target.decode("latin-1"), headers)

    async def read_body(self, limit_bytes: int) -> bytes:
        """Return the whole body of the current request; its bytes count as in flight until `finish`.

        Raises:
            BadRequest: larger than `limit_bytes`, too much in flight, or too slow.
        """
        chunks = []
        try:
            async with asyncio.timeout(self._bounds.body_s):
                while isinstance(event := await self._event(), h11.Data):
                    if self._held_bytes + len(event.data) > limit_bytes:
                        raise BadRequest(413, f"the body has more than {limit_bytes} bytes, which no valid request has")
                    self._bodies.take(len(event.data))
                    self._held_bytes += len(event.data)
                    chunks.append(bytes(event.data))
        except TimeoutError:
            raise BadRequest(408, f"the body did not come within {self._bounds.body_s:g} s") from None
        if not isinstance(event, h11.EndOfMessage):
            raise BadRequest(400, "the connection ended inside the body")
        return b"".join(chunks)

    async def gone(self) -> None:
        """Return when the caller hangs up. Of a next request sent meanwhile one read is kept, not more."""
        await self._receive()
        if not self._http.trailing_data[1]:
            await asyncio.get_running_loop().create_future()

    async def respond(self, reply: Reply) -> None:
        """Send a reply whole; to a HEAD its head only.

        Raises:
            ConnectionError: the caller is gone, or does not read.
        """
        headers = [
            ("content-type", reply.content_type),
            ("content-length", str(reply.size_bytes)),
            *reply.headers,
        ]
        if self._http.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return
        if self._http.their_state is h11.SEND_BODY:  # refused before its body was read
            headers.append(("connection", "close"))
        head = h11.Response(status_code=reply.status, headers=headers, reason=_REASONS.get(reply.status, b""))
        encoded = self._http.send(head) or b""
        self._answered = True
        self._writer.write(encoded)
        for chunk in () if self._method == "HEAD" else reply.chunks:
            for piece in self._http.send_with_data_passthrough(h11.Data(data=memoryview(chunk).cast("B"))) or ():  # type: ignore[arg-type]
                self._writer.write(piece)
        self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
        await self._drain()

    async def apologize(self, error: str) -> None:
        """Answer 500, whatever state the exchange is in, unless an answer was begun. The connection must end then.

        Raises:
            ConnectionError: the caller is gone, or does not read.
        """
        if not self._answered:
            self._answered = True
            self._writer.write(_last_reply(b"500 Internal Server Error", error_reply(500, error)))
            await self._drain()

    def finish(self) -> bool:
        """Forget the body that was read; return whether the connection can take another request."""
        self._bodies.give_back(self._held_bytes)
        self._held_bytes = 0
        self._method = ""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False

    async def close(self) -> None:
        """End the connection, whatever its state."""
        self._bodies.give_back(self._held_bytes)
        self._held_bytes = 0
        self._writer.close()

    async def _event(self) -> object:
        while True:
            try:
                event = self._http.next_event()
                if event is not h11.NEED_DATA:
                    return event
                if self._http.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                    self._writer.write(self._http.send(go_on) or b"")
                await self._receive()
            except h11.RemoteProtocolError as error:
                raise BadRequest(error.error_status_hint, f"not a proper HTTP request: {error}") from error

    async def _receive(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
        except ConnectionError:
            data = b""
        try:
            self._http.receive_data(data)
        except RuntimeError:  # data after its end of file: h11 has nothing to add to that
            return

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._bounds.write_s):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise ConnectionAbortedError(f"the caller did not read its answer in {self._bounds.write_s:g} s") from None


def refuse_connection(writer: asyncio.StreamWriter, limit: int) -> None:
    """Answer 503 to a caller beyond the connection limit, and close."""
    reply = error_reply(503, f"{limit} connections are open, no more are taken; close one or retry")
    writer.write(_last_reply(b"503 Service Unavailable", reply))
    writer.close()


def _last_reply(status: bytes, reply: Reply) -> bytes:
    """Return a reply's bytes for a connection that ends with it."""
    body = b"".join(bytes(chunk) for chunk in reply.chunks)
    return b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )
