"""Read the head of an HTTP/1.1 request: its line, its headers, and where its body ends.

Pure, and strict: one way to write a head is taken, everything else is refused with 400, so that nobody else on the way
(a proxy before a TCP door) can take the same bytes for another request. A whole HTTP library does ten times the work
for each request; tests hold this one against h11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from edgeinfer.errors import EdgeInferError

END: Final = b"\r\n\r\n"
"""Where a head ends."""
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_HEAD: Final = re.compile(
    rb"%b [\x21-\x7e]++ HTTP/1\.[01]\r\n(?:%b:[\t\x20-\x7e\x80-\xff]*+\r\n)*+\r\n" % (_TOKEN, _TOKEN)
)
_LENGTH: Final = re.compile(r"[0-9]{1,15}")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,8})(?:[\t ]*+;[\t\x20-\x7e\x80-\xff]*+)?\r\n")
_TRAILER: Final = re.compile(rb"%b:[\t\x20-\x7e\x80-\xff]*+\r\n" % _TOKEN)
_ONCE: Final = frozenset({"content-length", "transfer-encoding", "host", "expect"})
"""Headers that mean something else when they are said twice."""


class BadRequest(EdgeInferError):
    """What came is no request that can be answered properly; the connection ends after the reply."""

    def __init__(self, status: int, error: str) -> None:
        self.status = status
        super().__init__(error)


@dataclass(frozen=True, slots=True)
class Head:
    """What the head of a request says."""

    method: str
    target: str
    headers: Mapping[str, str]
    """By lower-case name."""
    body_bytes: int | None
    """Length of the body; None when it comes in chunks."""
    keeps: bool
    """The caller may send another request afterwards."""
    waits: bool
    """The caller sends its body only once it is told to go on."""


def parse_head(raw: bytes) -> Head:
    """Return what a whole head, its last empty line included, says.

    Raises:
        BadRequest: it is no proper head.
    """
    if _HEAD.fullmatch(raw) is None:
        raise BadRequest(400, "not a proper HTTP request: its head is not written as HTTP/1.1 has it")
    first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
    method, target, version = first.split(" ")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if name in headers:
            if name in _ONCE:
                raise BadRequest(400, f"not a proper HTTP request: {name} is given twice")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    if version == "HTTP/1.0":
        if "transfer-encoding" in headers:
            raise BadRequest(400, "not a proper HTTP request: HTTP/1.0 has no transfer-encoding")
    elif "host" not in headers:
        raise BadRequest(400, "not a proper HTTP request: the host header is missing")
    said = headers.get("connection", "").lower()
    keeps = version == "HTTP/1.1" and "close" not in map(str.strip, said.split(","))
    return Head(method, target, headers, _body_bytes(headers), keeps, _waits(headers, version))


def _body_bytes(headers: Mapping[str, str]) -> int | None:
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if coding is not None:
        if length is not None:
            raise BadRequest(400, "not a proper HTTP request: content-length and transfer-encoding exclude each other")
        if coding.lower() != "chunked":
            raise BadRequest(
                501, f"transfer-encoding {coding[:40]!r} is not known; send the body chunked or with a length"
            )
        return None
    if length is None:
        return 0
    if _LENGTH.fullmatch(length) is None:
        raise BadRequest(400, f"not a proper HTTP request: content-length {length[:40]!r} is not a length")
    return int(length)


def _waits(headers: Mapping[str, str], version: str) -> bool:
    expected = headers.get("expect")
    if expected is None or version == "HTTP/1.0":
        return False
    if expected.lower() != "100-continue":
        raise BadRequest(417, f"cannot do what is expected: {expected[:40]!r}")
    return True


def parse_chunk(line: bytes | bytearray) -> int:
    """Return the size that the first line of a chunk says; extensions are ignored.

    Raises:
        BadRequest: it is no such line.
    """
    found = _CHUNK.fullmatch(line)
    if found is None:
        raise BadRequest(400, "not a proper HTTP request: a chunk does not begin with its size")
    return int(found[1], 16)


def check_trailer(line: bytes | bytearray) -> None:
    """Check a line behind the last chunk: it is written as a header's, and nobody reads it.

    Raises:
        BadRequest: it is not.
    """
    if _TRAILER.fullmatch(line) is None:
        raise BadRequest(400, "not a proper HTTP request: a trailer is not written as HTTP/1.1 has it")
