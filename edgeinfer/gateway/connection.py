"""Hold one HTTP/1.1 connection: bounded heads and bodies, a timeout on every wait, answers that give back their loans.

`head` reads what a request says, `stream` the socket. What a request means is `gateway`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from edgeinfer.errors import mib
from edgeinfer.gateway.bounds import READ_BYTES, Bounds, Room
from edgeinfer.gateway.head import END, BadRequest, Head, check_trailer, parse_chunk, parse_head
from edgeinfer.gateway.regions import Regions
from edgeinfer.gateway.reply import Reply, error_reply
from edgeinfer.gateway.stream import Stream

_EVENTS_AT_A_TIME: Final = 32
"""Chunks, or reads, that are taken before others have their turn."""
_PROGRESS_BYTES: Final = 16 << 10
"""A body that has not grown by so much has not come on."""
_CHUNK_LINE_BYTES: Final = 256
_EMPTY_LINE: Final = b"\r\n"
_SAME_HEAD_BYTES: Final = 1 << 10
_REASONS: Final = {
    200: b"OK", 400: b"Bad Request", 404: b"Not Found", 408: b"Request Timeout", 413: b"Content Too Large",
    429: b"Too Many Requests", 500: b"Internal Server Error", 503: b"Service Unavailable", 504: b"Gateway Timeout",
}  # fmt: skip


class Connection:
    """One caller's connection. One task reads and writes it."""

    def __init__(self, stream: Stream, bounds: Bounds, bodies: Room, copies: Room) -> None:
        self.stream = stream
        self.regions = Regions(bounds.regions)
        self._bounds = bounds
        self._bodies = bodies
        self._copies = copies
        self._loop = asyncio.get_running_loop()
        self._held_bytes = 0
        self._head: Head | None = None
        self._same = (b"", Head("", "", {}, 0, keeps=False, waits=False))
        self._unread: int | None = 0
        """Bytes of the body that were not read yet; None when only its chunks will tell."""
        self._chunks_left = False
        self._body_due_s = 0.0
        self._grown_bytes = 0
        """Of a body, since it was last seen to have come on."""
        self._ends = False
        self._answered = False
        self.spare_from_s: float | None = None
        """From when on it may be closed for another, on the loop's clock; None while its caller waits for us."""
        self._spare_in(bounds.spare_s)

    async def next_head(self) -> Head | None:
        """Return the next request's head, None when the caller has hung up or stayed silent.

        Raises:
            BadRequest: not HTTP, or a head that is too large or too slow.
        """
        pending, bounds = self.stream.pending, self._bounds
        now_s = self._loop.time()
        self.spare_from_s = now_s + bounds.spare_s
        due_s = now_s + (bounds.head_s if pending else bounds.idle_s)
        looked, may_skip = 0, True
        while True:
            if may_skip and pending.startswith(_EMPTY_LINE):  # one before a request is no harm (RFC 9112, 2.2)
                del pending[: len(_EMPTY_LINE)]
                looked, may_skip = 0, False
            if (end := pending.find(END, looked)) >= 0:
                break
            if len(pending) > bounds.head_bytes:
                raise BadRequest(431, f"the request's head has more than {bounds.head_bytes} bytes")
            if b"\n\n" in pending:
                raise BadRequest(400, "not a proper HTTP request: its lines do not end in CR LF")
            looked, began = max(0, len(pending) - len(END)), bool(pending)
            try:
                got = await self.stream.receive(due_s)
            except TimeoutError:
                return None
            if not got:
                if began:
                    raise BadRequest(400, "not a proper HTTP request: it ends inside its head")
                return None
            if not began:
                due_s = self._loop.time() + bounds.head_s
        raw = bytes(pending[: end + len(END)])
        if len(raw) > bounds.head_bytes:
            raise BadRequest(431, f"the request's head has more than {bounds.head_bytes} bytes")
        del pending[: len(raw)]
        self.spare_from_s = None
        self._answered = self._ends = False
        if raw == self._same[0]:  # most callers say always the same
            head = self._same[1]
        else:
            head = parse_head(raw)
            if len(raw) <= _SAME_HEAD_BYTES:
                self._same = (raw, head)
        self._head, self._unread = head, head.body_bytes
        self._body_due_s = 0.0
        return head

    # Bodies

    def check_length(self, limit_bytes: int) -> None:
        """Refuse a body that is too long or finds no room, before any of it is read.

        Raises:
            BadRequest: it is.
        """
        size_bytes = self._unread or 0
        if size_bytes > limit_bytes:
            raise BadRequest(413, f"the body has more than {limit_bytes} bytes, which no valid request has")
        self._check_most(size_bytes)
        if not self._bodies.has(size_bytes):
            raise self._no_room()

    @property
    def held_bytes(self) -> int:
        """Bytes in flight of its request."""
        return self._held_bytes

    @property
    def unsent_bytes(self) -> int:
        """How much of the body has not arrived here; what waits in the kernel counts as not arrived."""
        return 0 if self._unread is None else max(0, self._unread - len(self.stream.pending))

    @property
    def holds_back(self) -> bool:
        """Whether the caller waits for our word before it sends the body."""
        return self._head is not None and self._head.waits and not self._body_due_s and self.unsent_bytes > 0

    async def read(self, size_bytes: int, due_s: float | None = None) -> bytearray:
        """Return the next bytes of a body of known length; they count as in flight until `finish`.

        Raises:
            BadRequest: too much in flight, or too slow.
            TimeoutError: it did not come by `due_s`, on the loop's clock, which was before it was too slow.
        """
        self._hold(size_bytes)  # before it is there: who may have it allocated has it
        body = bytearray(size_bytes)
        pending = self.stream.pending
        at = min(len(pending), size_bytes)
        body[:at] = pending[:at]
        del pending[:at]
        if self._unread is None:
            self._come_on(at)
        else:
            self._unread -= at
        if at < size_bytes:
            with memoryview(body) as view:
                await self._read_on(view, at, due_s)
        return body

    async def _read_on(self, view: memoryview, at: int, due_s: float | None) -> None:
        reads = 0
        self._go_on()
        until_s = self._body_due_s if due_s is None else min(due_s, self._body_due_s)
        while at < len(view):
            try:
                got = await self.stream.receive_into(view[at:], until_s)
            except TimeoutError:
                if until_s < self._body_due_s:
                    raise
                raise self._too_slow() from None
            if not got:
                raise BadRequest(400, "the connection ended inside the body")
            at += got
            if self._unread is not None:
                self._unread -= got
            self._come_on(got)
            reads += 1
            if reads % _EVENTS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        if self._unread is not None:
            self.spare_from_s = None

    def _come_on(self, got_bytes: int) -> None:
        """A body has grown; how its bytes are wrapped up does not count."""
        self._grown_bytes += got_bytes
        if self._grown_bytes >= _PROGRESS_BYTES:
            self._grown_bytes = 0
            self._spare_in(self._bounds.stall_s)

    async def read_body(self, limit_bytes: int) -> bytearray:
        """Return the whole body of the current request, of whatever form; its bytes count until `finish`.

        Raises:
            BadRequest: larger than `limit_bytes`, too much in flight, in too many pieces, or too slow.
        """
        if self._unread is not None:
            self.check_length(limit_bytes)
            return await self.read(self._unread)
        self._go_on()
        body = bytearray()
        for chunks in range(1, 1 << 62):
            size_bytes = parse_chunk(await self._line(_CHUNK_LINE_BYTES))
            if not size_bytes:
                break
            if chunks > self._bounds.chunks:
                raise BadRequest(413, f"the body has more than {self._bounds.chunks} chunks; send larger ones")
            if len(body) + size_bytes > limit_bytes:
                raise BadRequest(413, f"the body has more than {limit_bytes} bytes, which no valid request has")
            for left in range(size_bytes, 0, -READ_BYTES):
                body += await self.read(min(left, READ_BYTES))
            if await self._line(_CHUNK_LINE_BYTES) != b"\r\n":
                raise BadRequest(400, "not a proper HTTP request: a chunk is longer than it says")
            if chunks % _EVENTS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        trailer_bytes = 0
        while (line := await self._line(self._bounds.head_bytes)) != b"\r\n":
            check_trailer(line)
            trailer_bytes += len(line)
            if trailer_bytes > self._bounds.head_bytes:
                raise BadRequest(431, f"the trailers have more than {self._bounds.head_bytes} bytes")
        self._unread = 0
        self.spare_from_s = None
        return body

    async def _line(self, most_bytes: int) -> bytes:
        """Return the next line of a chunked body, its end included."""
        pending, looked = self.stream.pending, 0
        while (end := pending.find(b"\n", looked, most_bytes)) < 0:
            if len(pending) >= most_bytes:
                raise BadRequest(400, f"not a proper HTTP request: a line of the body has more than {most_bytes} bytes")
            looked = len(pending)
            try:
                got = await self.stream.receive(self._body_due_s)
            except TimeoutError:
                raise self._too_slow() from None
            if not got:
                raise BadRequest(400, "the connection ended inside the body")
        line = bytes(pending[: end + 1])
        del pending[: end + 1]
        return line

    def _too_slow(self) -> BadRequest:
        return BadRequest(408, f"the body did not come within {self._bounds.body_s:g} s")

    def _no_room(self) -> BadRequest:
        used, most = self._bodies.used_bytes, self._bodies.limit_bytes
        return BadRequest(429, f"{mib(used)} of request bodies are in flight, at most {mib(most)}; retry")

    def _go_on(self) -> None:
        """The body is wanted: its time runs from now, and a caller that waits for our word gets it."""
        if self.spare_from_s is None:
            self._grown_bytes = 0
            self._spare_in(self._bounds.stall_s)
        if self._body_due_s:
            return
        self._body_due_s = self._loop.time() + self._bounds.body_s
        if self._head is not None and self._head.waits and (self._unread is None or self.unsent_bytes > 0):
            self.stream.send_now([b"HTTP/1.1 100 Continue\r\n\r\n"])

    def _spare_in(self, seconds: float) -> None:
        self.spare_from_s = self._loop.time() + seconds

    def _hold(self, size_bytes: int) -> None:
        if not self._bodies.take(size_bytes):
            raise self._no_room()
        self._held_bytes += size_bytes

    def hold(self, size_bytes: int) -> None:
        """Count bytes that are held for this request until `finish`.

        Raises:
            BadRequest: too much in flight, or more than there may ever be.
        """
        self._check_most(size_bytes)
        self._hold(size_bytes)

    def _check_most(self, size_bytes: int) -> None:
        if size_bytes > (most := self._bodies.limit_bytes):
            text = f"the inputs have {mib(size_bytes)}, together they may have {mib(most)} here; raise memory.ceiling"
            raise BadRequest(413, text)

    # Answers

    async def respond(self, reply: Reply) -> None:
        """Send a reply whole; to a HEAD its head only. Releases the reply, however this ends.

        Raises:
            ConnectionError: the caller is gone, or does not read.
        """
        borrowed = contextlib.ExitStack()
        borrowed.callback(reply.release)
        with borrowed:
            head = self._head
            self._answered = True
            rest = self._unread
            if head is None or not head.keeps or rest is None or rest > self._bounds.unread_bytes or self.holds_back:
                self._ends = True
            parts: list[bytes | memoryview] = [_head_of(reply, ends=self._ends)]
            if head is None or head.method != "HEAD":
                parts += [memoryview(chunk).cast("B") for chunk in reply.chunks if len(chunk)]
            if parts := self.stream.send_now(parts):
                await self._send_on(parts, borrowed)

    async def refuse(self, reply: Reply) -> None:
        """As `respond`, to what was no request: the connection ends."""
        self._ends = True
        await self.respond(reply)

    async def _send_on(self, parts: list[bytes | memoryview], borrowed: contextlib.ExitStack) -> None:
        """Send what the kernel did not take at once; a caller that is slow to read gets copies."""
        now_s = self._loop.time()
        end_s = now_s + self._bounds.write_s
        patience_s = min(now_s + self._bounds.grace_s, end_s)
        copied_bytes = 0
        try:
            while parts:
                if await self.stream.writable(patience_s):
                    parts = self.stream.send_now(parts)
                    continue
                rest_bytes = sum(map(len, parts))
                if patience_s == end_s or not self._copies.take(rest_bytes):
                    self.stream.close()
                    raise ConnectionAbortedError("the caller did not read its answer")
                copied_bytes, patience_s = rest_bytes, end_s
                parts = [bytes(part) for part in parts]
                borrowed.close()
        finally:
            self._copies.give_back(copied_bytes)

    def apologize(self, error: str) -> None:
        """Answer 500, whatever state the exchange is in, unless an answer was begun. The connection must end then."""
        self._ends = True
        if not self._answered:
            self._answered = True
            with contextlib.suppress(ConnectionError):
                self.stream.send_now(last_reply(error_reply(500, error)))

    async def finish(self) -> bool:
        """Forget the body, read away what of it nobody took; return whether another request may come."""
        self._give_back()
        pending = self.stream.pending
        if self._ends:
            return False
        if self._unread:
            have = min(self._unread, len(pending))
            del pending[:have]
            left = self._unread - have
            if left and not await self.stream.read_away(left, self._loop.time() + self._bounds.linger_s):
                return False
        self._head, self._unread = None, 0
        if pending:  # and one read may have brought the next request's descriptors
            await asyncio.sleep(0)  # requests that were sent ahead take turns with everything else
        else:
            self.stream.drop_descriptors()
        return True

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` when the caller hangs up, until `unwatch`."""
        self.stream.watch(gone)

    def unwatch(self) -> None:
        """Watch no more."""
        self.stream.unwatch()

    def dismiss(self) -> None:
        """Close a spare connection; its task sees the end as if the caller had closed it."""
        self._give_back()
        if self._head is not None and self._unread != 0 and not self._answered:
            self._answered = True
            reply = error_reply(408, "the body did not come on, and others need the connection; send it at once")
            with contextlib.suppress(ConnectionError):
                self.stream.send_now(last_reply(reply))
        self.stream.close()

    @property
    def interrupted(self) -> bool:
        """Whether it was answered while the caller was still sending."""
        return self._answered and (self._head is None or self._unread != 0) and not self.stream.closed

    async def read_away(self) -> None:
        """Let an interrupted caller finish sending, so that it reads its answer instead of a broken pipe."""
        self.stream.say_no_more()
        await self.stream.read_away(None, self._loop.time() + self._bounds.linger_s)

    def close(self) -> None:
        """End the connection, whatever its state."""
        self._give_back()
        self.regions.close()
        self.stream.close()

    def _give_back(self) -> None:
        self._bodies.give_back(self._held_bytes)
        self._held_bytes = 0


def _head_of(reply: Reply, *, ends: bool) -> bytes:
    lines = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n" % (
        reply.status, _REASONS.get(reply.status, b""), reply.content_type.encode(), reply.size_bytes,
    )  # fmt: skip
    for name, value in reply.headers:
        lines += f"{name}: {value}\r\n".encode()
    return lines + (b"connection: close\r\n\r\n" if ends else b"\r\n")


def last_reply(reply: Reply) -> list[bytes | memoryview]:
    """Return a reply's bytes for a connection that ends with it."""
    return [b"".join((_head_of(reply, ends=True), *map(bytes, reply.chunks)))]
