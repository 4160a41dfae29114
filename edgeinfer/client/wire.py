"""Write the one kind of HTTP request that the clients send, and read the one kind of reply that the daemon gives.

Bytes in, bytes out: sending and receiving is the clients'. The library's own HTTP client does ten times the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edgeinfer import oip
from edgeinfer.errors import ProtocolError
from edgeinfer.request import Payload

BUFFER_BYTES: Final = 64 << 10
MAX_PARTS: Final = 64
"""Most buffers that are handed to the kernel at once."""
HTTP_OK: Final = 200
HEADER_LENGTH: Final = oip.HEADER_LENGTH.lower()
_MAX_BODY_BYTES: Final = 1 << 32
_FIRST: Final = b"HTTP/1.1 "
_END: Final = b"\r\n\r\n"

Buffer = bytes | bytearray | memoryview


def request_head(method: str, path: str, payload: Payload | None = None) -> bytes:
    """Return the head of a request with this body."""
    if payload is None:
        return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        f"{oip.HEADER_LENGTH}: {len(payload.header)}\r\nContent-Length: {payload.size_bytes}\r\n\r\n"
    ).encode()


def request_parts(method: str, path: str, payload: Payload | None) -> list[Buffer]:
    """Return a whole request, in parts that are not copied."""
    parts: list[Buffer] = [request_head(method, path, payload)]
    if payload is not None:
        parts.append(payload.header)
        parts += [memoryview(tensor).cast("B") for tensor in payload.tensors if len(tensor)]
    return parts


def rest_of(parts: list[Buffer], sent_bytes: int) -> list[Buffer]:
    """Return what is left to send of the parts after so many bytes."""
    for number, part in enumerate(parts):
        if sent_bytes < len(part):
            return [memoryview(part)[sent_bytes:], *parts[number + 1 :]]
        sent_bytes -= len(part)
    return []


class Reply:
    """One reply, as it comes in. `buffer` says where the next bytes go, `take` that they are there."""

    def __init__(self, scratch: bytearray) -> None:
        """Read into `scratch`, of `BUFFER_BYTES`, which nobody else uses until the reply is whole."""
        self.status = 0
        self.headers: Mapping[str, str] = {}
        """By lower-case name."""
        self.body: Buffer = b""
        self._scratch = scratch
        self._view = memoryview(scratch)
        self._have = 0
        self._in_body = False

    @property
    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty before the reply is whole."""
        return self._view[self._have :]

    def take(self, got_bytes: int) -> bool:
        """Look at so many bytes that came into `buffer` (0: the other side has closed); return whether it is whole.

        Raises:
            ConnectionResetError: there is no reply.
            ProtocolError: this is no reply of edgeinfer's.
        """
        if not got_bytes:
            if not self._have and not self._in_body:
                raise ConnectionResetError("it sent no reply")
            raise ProtocolError("the reply ends in its middle")
        self._have += got_bytes
        return self._have == len(self.body) if self._in_body else self._take_head()

    @property
    def ends(self) -> bool:
        """Whether the connection ends with it."""
        return self.headers.get("connection", "").lower() == "close"

    def _take_head(self) -> bool:
        if not self._scratch.startswith(_FIRST[: self._have]):
            raise ProtocolError(f"the reply begins with {bytes(self._view[: min(self._have, 40)])!r}")
        end = self._scratch.find(_END, 0, self._have)
        if end < 0:
            if self._have == len(self._scratch):
                raise ProtocolError(f"the reply's head has more than {len(self._scratch)} bytes")
            return False
        first, *lines = self._scratch[:end].decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        length = headers.get("content-length", "")
        status = first[len(_FIRST) : len(_FIRST) + 3]
        if not (length.isdecimal() and status.isdecimal() and int(length) <= _MAX_BODY_BYTES):
            raise ProtocolError(f"the reply begins with {first[:40]!r} and has no length")
        self.status, self.headers = int(status), headers
        return self._begin_body(end + len(_END), int(length))

    def _begin_body(self, begins: int, length: int) -> bool:
        have = self._have - begins
        if have > length:
            raise ProtocolError("more came than the reply")
        if have == length:
            self.body = bytes(self._view[begins : self._have])
            return True
        body = bytearray(length)
        body[:have] = self._view[begins : self._have]
        self.body, self._view, self._have, self._in_body = body, memoryview(body), have, True
        return False
