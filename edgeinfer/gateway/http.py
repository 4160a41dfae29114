"""Hold one HTTP/1.1 connection: bounded heads and bodies, a timeout on every wait, and knowing when the caller is gone.

h11 does the protocol, this the reading and writing. What a request means is `gateway`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import h11

from edgeinfer.errors import EdgeInferError, mib
from edgeinfer.gateway.reply import Reply, error_reply

READER_BYTES = 64 << 10
"""Limit of the stream reader of a connection, which holds twice that and one read of the loop beyond it."""
_READ_BYTES = 64 << 10
_PIECE_BYTES = 128 << 10
"""Replies are handed to the kernel in pieces of this size."""
_LOOP_READ_BYTES = 256 << 10
_DECODING_BYTES = 32 << 20
"""What one JSON header of the largest size becomes while it is decoded; one at a time is."""
_EVENTS_AT_A_TIME = 32
"""Chunks that are taken before others have their turn."""
_PROGRESS_BYTES = 16 << 10
"""A body that has not grown by so much has not come on."""
_LOOK_S = 0.05
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
    chunks: int = 8192
    """Most chunks of one chunked body."""
    grace_s: float = 0.25
    """An answer that is not read by then is copied, and what it borrowed is given back."""
    copied_bytes: int = 8 << 20
    """Such copies together; a caller beyond it is cut off."""
    spare_s: float = 0.25
    """At the limit of connections, one that has been without a request for longer is closed for a new one, …"""
    stall_s: float = 2.0
    """… and one whose body has not come on for longer."""
    linger_s: float = 2.0
    """How long what a refused caller still sends is read away, so that it comes to read why."""

    @property
    def buffer_bytes(self) -> int:
        """Most bytes that all buffers of a gateway with these bounds have at once: what to reserve for it."""
        read = 2 * READER_BYTES + _LOOP_READ_BYTES
        served = self.connections * (read + 2 * _READ_BYTES + self.head_bytes + _PIECE_BYTES)
        leaving = self.connections * read
        bodies = self.body_bytes_in_flight + self.body_bytes_in_flight // 8  # bytearrays grow by an eighth
        return served + leaving + bodies + self.copied_bytes + _DECODING_BYTES


class BadRequest(EdgeInferError):
    """What came is no request that can be answered properly; the connection ends after the reply."""

    def __init__(self, status: int, error: str) -> None:
        self.status = status
        super().__init__(error)


class Room:
    """Counts bytes in use by all connections against one limit. Loop thread only."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Count bytes in, unless they would exceed the limit; return whether they were counted."""
        if self.used_bytes + size_bytes > self.limit_bytes:
            return False
        self.used_bytes += size_bytes
        return True

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
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bounds: Bounds, bodies: Room, copies: Room
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._bounds = bounds
        self._bodies = bodies
        self._copies = copies
        self._held_bytes = 0
        self._method = ""
        self._answered = False
        self._broken = False
        self.spare_from_s: float | None = None
        """From when on it may be closed for another, on the loop's clock; None while its caller waits for us."""
        self._spare_in(bounds.spare_s)
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=bounds.head_bytes)
        writer.transport.set_write_buffer_limits(high=0)  # drain() then means: handed to the kernel, all of it

    async def next_head(self) -> Head | None:
        """Return the next request's head, None when the caller has hung up or stayed silent.

        Raises:
            BadRequest: not HTTP, or a head that is too large or too slow.
        """
        self._spare_in(self._bounds.spare_s)
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
        self.spare_from_s = None
        self._method = event.method.decode("latin-1")
        self._answered = False
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        # h11 bounds only what is incomplete; a head that came in one read is judged here
        if sum(len(name) + len(value) for name, value in headers.items()) + len(event.target) > self._bounds.head_bytes:
            raise BadRequest(431, f"the request's head has more than {self._bounds.head_bytes} bytes")
        return Head(self._method, event.target.decode("latin-1"), headers)

    async def read_body(self, limit_bytes: int) -> bytearray:
        """Return the whole body of the current request; its bytes count as in flight until `finish`.

        Raises:
            BadRequest: larger than `limit_bytes`, too much in flight, in too many pieces, or too slow.
        """
        body = bytearray()
        chunks = events = noticed = 0
        self._spare_in(self._bounds.stall_s)
        try:
            async with asyncio.timeout(self._bounds.body_s):
                while isinstance(event := await self._event(), h11.Data):
                    events += 1
                    chunks += event.chunk_start
                    if events % _EVENTS_AT_A_TIME == 0:
                        await asyncio.sleep(0)
                    if chunks > self._bounds.chunks:
                        raise BadRequest(413, f"the body has more than {self._bounds.chunks} chunks; send larger ones")
                    self._take(len(event.data), limit_bytes)
                    body += event.data
                    if len(body) >= noticed + _PROGRESS_BYTES:
                        noticed = len(body)
                        self._spare_in(self._bounds.stall_s)
        except TimeoutError:
            raise BadRequest(408, f"the body did not come within {self._bounds.body_s:g} s") from None
        if not isinstance(event, h11.EndOfMessage):
            raise BadRequest(400, "the connection ended inside the body")
        self.spare_from_s = None
        return body

    def _spare_in(self, seconds: float) -> None:
        self.spare_from_s = asyncio.get_running_loop().time() + seconds

    def _take(self, size_bytes: int, limit_bytes: int) -> None:
        if self._held_bytes + size_bytes > limit_bytes:
            raise BadRequest(413, f"the body has more than {limit_bytes} bytes, which no valid request has")
        if not self._bodies.take(size_bytes):
            used, most = self._bodies.used_bytes, self._bodies.limit_bytes
            raise BadRequest(429, f"{mib(used)} of request bodies are in flight, at most {mib(most)}; retry")
        self._held_bytes += size_bytes

    async def gone(self) -> None:
        """Return when the caller hangs up. One that only says that it sends no more (`shutdown`) still waits.

        Of a next request sent meanwhile one read is kept, not more.
        """
        await self._receive()
        while not self._broken and not _hung_up(self._writer):
            await asyncio.sleep(_LOOK_S)

    async def respond(self, reply: Reply) -> None:
        """Send a reply whole; to a HEAD its head only. Releases the reply, however this ends.

        Raises:
            ConnectionError: the caller is gone, or does not read.
        """
        borrowed = contextlib.ExitStack()
        borrowed.callback(reply.release)
        with borrowed:
            if self._http.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                await self._send(self._parts(reply), borrowed)

    def _parts(self, reply: Reply) -> list[memoryview]:
        headers = [
            ("content-type", reply.content_type),
            ("content-length", str(reply.size_bytes)),
            *reply.headers,
        ]
        if self._http.their_state is h11.SEND_BODY:  # refused before its body was read
            headers.append(("connection", "close"))
        head = h11.Response(status_code=reply.status, headers=headers, reason=_REASONS.get(reply.status, b""))
        parts = [memoryview(self._http.send(head) or b"")]
        for chunk in () if self._method == "HEAD" else reply.chunks:
            data = h11.Data(data=memoryview(chunk).cast("B"))  # type: ignore[arg-type]
            parts += map(memoryview, self._http.send_with_data_passthrough(data) or ())
        parts.append(memoryview(self._http.send(h11.EndOfMessage()) or b""))
        self._answered = True
        return parts

    async def _send(self, parts: list[memoryview], borrowed: contextlib.ExitStack) -> None:
        """Send them piece by piece; a caller that is slow to read gets copies, and `borrowed` is closed."""
        now_s = asyncio.get_running_loop().time()
        end_s = now_s + self._bounds.write_s
        patience_s = min(now_s + self._bounds.grace_s, end_s)
        pieces = _pieces(parts)
        copied_bytes = 0
        try:
            while pieces:
                self._writer.write(bytes(pieces.popleft()))
                if await self._drained(patience_s):
                    continue
                rest_bytes = sum(map(len, pieces))
                if patience_s == end_s or not self._copies.take(rest_bytes):
                    self._writer.transport.abort()
                    raise ConnectionAbortedError("the caller did not read its answer")
                copied_bytes, patience_s = rest_bytes, end_s
                pieces = deque(memoryview(bytes(piece)) for piece in pieces)
                parts.clear()
                borrowed.close()
                await self._drain()
        finally:
            self._copies.give_back(copied_bytes)

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
        self._give_back()
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self._method = ""
            self._answered = False
            return True
        return False

    def dismiss(self) -> None:
        """Close a spare connection; its task sees the end as if the caller had closed it."""
        if self._http.their_state is h11.SEND_BODY and not self._answered:
            self._answered = True
            reply = error_reply(408, "the body did not come on, and others need the connection; send it at once")
            self._writer.write(_last_reply(b"408 Request Timeout", reply))
        self._writer.close()

    @property
    def interrupted(self) -> bool:
        """Whether it was answered while the caller was still sending."""
        return self._answered and self._http.their_state in {h11.SEND_BODY, h11.ERROR}

    async def read_away(self) -> None:
        """Let an interrupted caller finish sending, so that it reads its answer instead of a broken pipe."""
        await read_away(self._reader, self._writer, self._bounds.linger_s)

    def close(self) -> None:
        """End the connection, whatever its state."""
        self._give_back()
        self._writer.close()

    def _give_back(self) -> None:
        self._bodies.give_back(self._held_bytes)
        self._held_bytes = 0

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
            self._broken = True
            data = b""
        try:
            self._http.receive_data(data)
        except RuntimeError:  # data after its end of file: h11 has nothing to add to that
            return

    async def _drain(self) -> None:
        if not await self._drained(asyncio.get_running_loop().time() + self._bounds.write_s):
            self._writer.transport.abort()
            raise ConnectionAbortedError(f"the caller did not read its answer in {self._bounds.write_s:g} s")

    async def _drained(self, until_s: float) -> bool:
        try:
            async with asyncio.timeout_at(until_s):
                await self._writer.drain()
        except TimeoutError:
            return False
        return True


def _pieces(parts: list[memoryview]) -> deque[memoryview]:
    if sum(map(len, parts)) <= _PIECE_BYTES:
        return deque([memoryview(b"".join(parts))])
    return deque(part[at : at + _PIECE_BYTES] for part in parts for at in range(0, len(part), _PIECE_BYTES))


def _hung_up(writer: asyncio.StreamWriter) -> bool:
    """Return whether the other side has closed both ways, which reading alone cannot tell from one way."""
    descriptor = writer.get_extra_info("socket").fileno()
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, 0)  # POLLHUP and POLLERR are always told
    return bool(poll.poll(0))


async def read_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, at_most_s: float) -> None:
    """Let a caller finish sending what nobody will take, so that it reads its answer instead of a broken pipe."""
    with contextlib.suppress(OSError):  # TimeoutError among them
        async with asyncio.timeout(at_most_s):
            writer.write_eof()
            while await reader.read(_READ_BYTES):
                pass


def refuse_connection(writer: asyncio.StreamWriter, limit: int) -> None:
    """Answer 503 to a caller beyond the connection limit. Closing is left to whoever asked for it."""
    reply = error_reply(503, f"{limit} connections are open, no more are taken; close one or retry")
    writer.write(_last_reply(b"503 Service Unavailable", reply))


def _last_reply(status: bytes, reply: Reply) -> bytes:
    """Return a reply's bytes for a connection that ends with it."""
    body = b"".join(bytes(chunk) for chunk in reply.chunks)
    return b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )
